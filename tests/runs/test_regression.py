"""Regression: losses by hand, R2 against scikit-learn, hidden numbers of the target, and all methods that can do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from fedlit import FederatedModule
from fedlit.callbacks import OracleAccuracy, closing_table, summarise
from fedlit.data import HeartDisease
from fedlit.methods import (
    APFL,
    FADE,
    KD3A,
    AdaBN,
    CoMDA,
    Ditto,
    FedAvg,
    FedCORAL,
    FedDA,
    FedDAN,
    FedDANN,
    FedGP,
    FedJDA,
    FedMMD,
    FedProx,
    FedRep,
    FedRFTCA,
    FedRFTCAClosedForm,
    FedWDGRL,
    FinetuneOffline,
    KNNPer,
    Oracle,
    SourceOnly,
    TargetOnly,
)
from fedlit.models import MLP, Committee
from helpers import build, loader, normalised_head, same, trainer, weights

REGRESSING: dict[str, tuple[type[FederatedModule], dict[str, Any]]] = {
    "APFL": (APFL, {}),
    "AdaBN": (AdaBN, {"classifier": normalised_head(8, 1)}),
    "Ditto": (Ditto, {}),
    "FADE": (FADE, {}),
    "FedAvg": (FedAvg, {}),
    "FedCORAL": (FedCORAL, {}),
    "FedDA": (FedDA, {"beta": "auto"}),
    "FedDAN": (FedDAN, {"num_frequencies": 20}),
    "FedDANN": (FedDANN, {}),
    "FedGP": (FedGP, {"beta": "auto"}),
    "FedMMD": (FedMMD, {"warmup_rounds": 1}),
    "FedMMD pairwise": (FedMMD, {"warmup_rounds": 1, "exchange": "pairwise"}),
    "FedProx": (FedProx, {}),
    "FedRep": (FedRep, {}),
    "FedWDGRL": (FedWDGRL, {}),
    "FinetuneOffline": (FinetuneOffline, {"federated_rounds": 2}),
    "Oracle": (Oracle, {}),
    "SourceOnly": (SourceOnly, {}),
    "TargetOnly": (TargetOnly, {}),
}


def hearts(**kwargs: Any) -> HeartDisease:
    return HeartDisease(**({"predict": "heart_rate", "seed": 0} | kwargs))


def linear(method: type[FederatedModule], data: Any, **kwargs: Any) -> FederatedModule:
    """Linear regression: features are the inputs."""
    extractor = nn.Identity()
    extractor.out_features = data.in_features  # type: ignore[assignment]
    torch.manual_seed(0)
    return method(data.clients, data.target, data.num_classes, extractor, task="regression", **kwargs)


@pytest.mark.parametrize("name", REGRESSING)
def test_methods_regress(name: str) -> None:
    method, arguments = REGRESSING[name]
    labels = 1.0 if method is Oracle else 30
    data = hearts(target_labels=labels, target_batch_size=10)
    module = build(
        method,
        data,  # type: ignore[arg-type]
        extractor=MLP(data.in_features, [8]),
        task=data.task,
        optimizer=lambda params: Adam(params, lr=0.01),
        **arguments,
    )
    run = trainer(4, [OracleAccuracy()])
    run.fit(module, data)
    metrics = run.callback_metrics
    assert metrics["source/r2"] < 1
    assert metrics["oracle/target/loss"] > 0
    assert "target/score" not in metrics
    assert "source/acc" not in metrics
    assert module(torch.zeros(3, data.in_features)).shape == (3, 1)


@pytest.mark.parametrize("method", [CoMDA, FedJDA, FedRFTCA, FedRFTCAClosedForm, KD3A, KNNPer])
def test_methods_of_classes_refuse_numbers(method: type[FederatedModule]) -> None:
    with pytest.raises(ValueError, match=f"{method.__name__} is about classes: task must be 'classification'"):
        method(["a", "b", "c"], "c", 1, MLP(5, [4]), task="regression")


def test_tasks_are_checked() -> None:
    with pytest.raises(ValueError, match="num_classes must be at least 1 with task='regression'"):
        FedAvg(["a", "b"], "b", 0, MLP(5, [4]), task="regression")
    with pytest.raises(ValueError, match="task must be 'classification' or 'regression', got 'ranking'"):
        FedAvg(["a", "b"], "b", 2, MLP(5, [4]), task="ranking")  # type: ignore[arg-type]
    data = hearts()
    with pytest.raises(ValueError, match="vectorize=True has the loss of a classification"):
        trainer(1).fit(linear(FedAvg, data, vectorize=True), data)


def test_one_step_of_each_source_is_one_of_its_mean_squared_error() -> None:
    """Of labels less the mean of all sources' training labels, over their deviation."""
    data = hearts(batch_size=1000)
    module = linear(SourceOnly, data, optimizer=lambda params: SGD(params, lr=0.01), weighting="uniform")
    trainer(1).fit(module, data)
    first = linear(SourceOnly, data)
    first.configure_model()
    sources = ("cleveland", "hungary", "switzerland")
    everything = torch.cat([data._domain(client).y[data.split(client).train] for client in sources])
    steps = []
    for client in sources:
        replica = first.replicas[client]
        split = data.split(client).train
        x, y = data._domain(client).x[split], data._domain(client).y[split]
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
    known = torch.cat([data._domain(c.name).y[data.split(c.name).train] for c in data.clients if not c.is_target])

    def told(client: str) -> tuple[Tensor, Tensor]:
        test = data.split(client).test
        x, y = data._domain(client).x[test], data._domain(client).y[test]
        outputs = module.replicas[client](x).detach()[:, 0]
        return y, outputs * known.std(correction=0) + known.mean()

    y, predicted = told("va_long_beach")
    assert float(run.callback_metrics["oracle/target/r2"]) == pytest.approx(
        r2_score(y.numpy(), predicted.numpy()), abs=1e-5
    )
    assert float(run.callback_metrics["oracle/target/loss"]) == pytest.approx(float(((y - predicted) ** 2).mean()))
    sources = [r2_score(*(each.numpy() for each in told(client))) for client in ("cleveland", "hungary", "switzerland")]
    assert float(run.callback_metrics["source/r2"]) == pytest.approx(sum(sources) / 3, abs=1e-5)


def test_one_client_with_all_labels_finds_the_least_squares_fit() -> None:
    """Oracle's target against scikit-learn on the same samples; full batches, many steps."""
    data = hearts(clients=["cleveland", "hungary"], target="hungary", target_labels=1.0, batch_size=1000)
    module = linear(TargetOnly, data, optimizer=lambda params: SGD(params, lr=0.05, momentum=0.9))
    trainer(600, limit_val_batches=0).fit(module, data)
    train = data.split("hungary").train
    x, y = data._domain("hungary").x[train], data._domain("hungary").y[train]
    fit = LinearRegression().fit(x, y)
    torch.testing.assert_close(module(x).detach()[:, 0], torch.from_numpy(fit.predict(x)).double(), atol=0.05, rtol=0)


def test_unknown_numbers_of_the_target_move_nothing() -> None:
    """A loss over labelled samples alone; NaN reaches no weight."""
    data = hearts()
    module = linear(FedAvg, data)
    module.configure_model()
    target = module.target
    outputs = torch.randn(6, 1, requires_grad=True)
    labels = torch.tensor([1.0, torch.nan, 3.0, torch.nan, torch.nan, 0.5])
    loss = module.task.loss(target, outputs, labels)
    known = torch.tensor([0, 2, 5])
    torch.testing.assert_close(loss, ((outputs[known, 0] - labels[known]) ** 2).mean())
    loss.backward()
    assert outputs.grad is not None
    assert bool((outputs.grad[torch.tensor([1, 3, 4])] == 0).all())
    assert bool(outputs.grad.isfinite().all())


def test_several_outputs_are_averaged() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    data = {name: TensorDataset(x, torch.stack([x[:, 0], -x[:, 1]], dim=1)) for name in ("c0", "c1", "c2")}
    module = FedAvg(
        ["c0", "c1", "c2"], "c2", 2, MLP(5, [16]), task="regression", optimizer=lambda params: Adam(params, lr=0.02)
    )
    trainer(80).fit(module, loader(data))
    assert float((module(x).detach() - data["c2"].tensors[1]).square().mean()) < 0.02


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


def test_the_closing_table_has_r2_and_a_run_resumes(tmp_path: Path) -> None:
    def run(rounds: int, checkpoint: str | None = None) -> tuple[Any, FederatedModule]:
        data = hearts()
        module = linear(FedAvg, data, optimizer=lambda params: Adam(params, lr=0.01))
        run = trainer(rounds, [OracleAccuracy()])
        run.fit(module, data, ckpt_path=checkpoint)
        return run, module

    first, _ = run(2)
    first.save_checkpoint(tmp_path / "two.ckpt")
    resumed, half = run(4, str(tmp_path / "two.ckpt"))
    straight, whole = run(4)
    assert same(weights(half, "va_long_beach"), weights(whole, "va_long_beach"))
    console = Console(width=160)
    with console.capture() as capture:
        console.print(closing_table([summarise(straight, whole, 1.0)]))
    assert "target R2 in % (oracle)" in capture.get()
    r2 = float(straight.callback_metrics["oracle/target/r2"])
    assert f"{100 * r2:.1f}" in capture.get()
    assert resumed.callback_metrics["oracle/target/r2"] == pytest.approx(r2)
