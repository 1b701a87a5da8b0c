"""Regression: losses by hand, R2 against scikit-learn, and hidden numbers of the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from torch import Tensor, nn
from torch.optim import SGD, Adam

from fedlit import FederatedModule
from fedlit.callbacks import OracleAccuracy, closing_table, summarise
from fedlit.data import HeartDisease
from fedlit.methods import FedAvg, FedMMD, SourceOnly, TargetOnly
from fedlit.models import MLP, Committee
from helpers import build, samples_of, trainer


def hearts(**kwargs: Any) -> HeartDisease:
    return HeartDisease(**({"predict": "heart_rate", "seed": 0} | kwargs))


def linear(method: type[FederatedModule], data: Any, **kwargs: Any) -> FederatedModule:
    """Linear regression: features are the inputs."""
    extractor = nn.Identity()
    extractor.out_features = data.in_features  # type: ignore[assignment]
    torch.manual_seed(0)
    return method(data.clients, data.target, data.num_classes, extractor, task="regression", **kwargs)


def test_one_step_of_each_source_is_one_of_its_mean_squared_error() -> None:
    """Of labels less the mean of all sources' training labels, over their deviation."""
    data = hearts(batch_size=1000)
    module = linear(SourceOnly, data, optimizer=lambda params: SGD(params, lr=0.01), weighting="uniform")
    trainer(1).fit(module, data)
    first = linear(SourceOnly, data)
    first.configure_model()
    sources = ("cleveland", "hungary", "switzerland")
    everything = torch.cat([samples_of(data, client, "train")[1] for client in sources])
    steps = []
    for client in sources:
        replica = first.replicas[client]
        x, y = samples_of(data, client, "train")
        y = (y - everything.mean()) / everything.std(correction=0)
        loss = ((replica(x)[:, 0] - y) ** 2).mean()
        gradients = torch.autograd.grad(loss, list(replica.parameters()))
        steps.append([p - 0.01 * g for p, g in zip(replica.parameters(), gradients, strict=True)])
    expected = [torch.stack(each).mean(dim=0) for each in zip(*steps, strict=True)]
    for ours, theirs in zip(module.replicas["va_long_beach"].parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_r2_and_loss_are_those_of_scikit_learn() -> None:
    data = hearts(transductive=True)
    module = linear(FedAvg, data)
    run = trainer(2, [OracleAccuracy()])
    run.fit(module, data)
    run.test(module, data, verbose=False)
    known = torch.cat([samples_of(data, c.name, "train")[1] for c in data.clients if not c.is_target])

    def labels_and_outputs(client: str) -> tuple[Tensor, Tensor]:
        x, y = samples_of(data, client, "test")
        outputs = module.replicas[client](x).detach()[:, 0]
        return y, outputs * known.std(correction=0) + known.mean()

    y, predicted = labels_and_outputs("va_long_beach")
    assert float(run.callback_metrics["oracle/target/r2"]) == pytest.approx(
        r2_score(y.numpy(), predicted.numpy()), abs=1e-5
    )
    assert float(run.callback_metrics["oracle/target/loss"]) == pytest.approx(float(((y - predicted) ** 2).mean()))
    sources = [
        r2_score(*(each.numpy() for each in labels_and_outputs(client)))
        for client in ("cleveland", "hungary", "switzerland")
    ]
    assert float(run.callback_metrics["source/r2"]) == pytest.approx(sum(sources) / 3, abs=1e-5)


def test_one_client_with_all_labels_finds_the_least_squares_fit() -> None:
    data = hearts(clients=["cleveland", "hungary"], target="hungary", target_labels=1.0, batch_size=1000)
    module = linear(TargetOnly, data, optimizer=lambda params: SGD(params, lr=0.05, momentum=0.9))
    trainer(600, limit_val_batches=0).fit(module, data)
    x, y = samples_of(data, "hungary", "train")
    fit = LinearRegression().fit(x, y)
    torch.testing.assert_close(module(x).detach()[:, 0], torch.from_numpy(fit.predict(x)).double(), atol=0.05, rtol=0)


def test_the_target_of_fedmmd_predicts_the_mean_of_its_sources_regressors() -> None:
    data = hearts()
    module = build(
        FedMMD,
        data,  # type: ignore[arg-type]
        extractor=MLP(data.in_features, [8]),
        task="regression",
        warmup_rounds=0,
        optimizer=lambda params: Adam(params, lr=0.01),
    )
    trainer(2).fit(module, data)
    committee = module.replicas["va_long_beach"]
    assert isinstance(committee, Committee)
    x = torch.randn(7, data.in_features)
    features = committee.readable(committee.features(x))
    each = [module.replicas[client.name].classifier(features) for client in module.sources]
    torch.testing.assert_close(committee(x), torch.stack(each).mean(dim=0))


def test_the_closing_table_has_r2() -> None:
    module = linear(FedAvg, data := hearts())
    run = trainer(1, [OracleAccuracy()])
    run.fit(module, data)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(closing_table([summarise(run, module, 1.0)]))
    assert "target R2 in % (oracle)" in capture.get()
    assert f"{100 * float(run.callback_metrics['oracle/target/r2']):.1f}" in capture.get()
