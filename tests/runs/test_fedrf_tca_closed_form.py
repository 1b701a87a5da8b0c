"""RF-TCA of a federation in closed form, against RF-TCA and linear discriminant analysis of the pooled data."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedlit.federation import SERVER, DivergedError, RosterError, Schedule
from fedlit.functional import random_fourier_features, rf_tca, sample_frequencies
from fedlit.methods import FedRFTCAClosedForm
from fedlit.models import MLP
from fedlit.privacy import CKKS, FixedPoint, PairwiseMasking, Plain
from helpers import loader, same, shards, trainer, weights

N, M = 6, 4


class Raw(nn.Identity):
    """Features computed beforehand."""

    out_features = 5


def build(names: list[str], **kwargs: Any) -> FedRFTCAClosedForm:
    torch.manual_seed(0)
    given = {"num_frequencies": N, "num_components": M, "unit_norm": False, "bandwidth": 2.0, "gamma": 0.1}
    return FedRFTCAClosedForm(names, names[-1], 2, kwargs.pop("extractor", None) or Raw(), **(given | kwargs))


def fit(
    data: dict[str, TensorDataset], batch_size: int = 8, strategy: dict[str, Any] | None = None, **kwargs: Any
) -> FedRFTCAClosedForm:
    module = build(list(data), **kwargs)
    trainer(20, strategy=strategy or {}).fit(module, loader(data, batch_size))
    return module


def domains(num_clients: int = 3) -> dict[str, TensorDataset]:
    """Clients of 40, 33, 26, ... samples; the last is the target."""
    data = shards(num_clients, 40)
    return {
        name: TensorDataset(shard.tensors[0][: 40 - 7 * i] + 0.3 * i, shard.tensors[1][: 40 - 7 * i])
        for i, (name, shard) in enumerate(data.items())
    }


def pooled(data: dict[str, TensorDataset]) -> tuple[Tensor, Tensor, Tensor]:
    """All sources' samples and labels, and the target's samples."""
    shards = list(data.values())
    return (
        torch.cat([shard.tensors[0] for shard in shards[:-1]]),
        torch.cat([shard.tensors[1] for shard in shards[:-1]]),
        shards[-1].tensors[0],
    )


def projector(aligner: Tensor) -> Tensor:
    """W W^T, which no sign of an eigenvector changes."""
    return aligner.double() @ aligner.double().T


@pytest.mark.parametrize("gamma", [0.1, None])
def test_the_aligner_is_rf_tca_of_the_pooled_data(gamma: float | None) -> None:
    data = domains()
    module = fit(data, gamma=gamma)
    xs, _, xt = pooled(data)
    omega = sample_frequencies(N, 5, 2.0, seed=0)
    if gamma is None:
        gap = random_fourier_features(xs, omega).mean(dim=0) - random_fourier_features(xt, omega).mean(dim=0)
        gamma = float(gap.square().sum())
    expected = rf_tca(xs.double(), xt.double(), M, gamma, omega.double()).aligner
    for name in data:
        got = weights(module, name)["aligner.weight"].T
        # weights are float32, and so are random features of float32 samples
        torch.testing.assert_close(projector(got), projector(expected), atol=1e-4 * float(expected.norm()) ** 2, rtol=0)


def test_neither_batch_size_nor_cut_nor_order_of_clients_matters() -> None:
    data = domains()
    module, xt = fit(data), data["c2"].tensors[0]
    reference, predictions = projector(weights(module, "c2")["aligner.weight"].T), module(xt)
    x, y = data["c0"].tensors
    cut = {
        "c0": TensorDataset(x[:13], y[:13]),
        "c1": data["c1"],
        "c3": TensorDataset(x[13:], y[13:]),
        "c2": data["c2"],
    }
    swapped = {"c1": data["c1"], "c0": data["c0"], "c2": data["c2"]}
    for given, batch_size in ((data, 1), (data, 64), (cut, 8), (swapped, 8)):
        module = fit(given, batch_size)
        got = weights(module, "c2")
        torch.testing.assert_close(projector(got["aligner.weight"].T), reference, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(module(xt), predictions, rtol=1e-3, atol=1e-3)


def test_bytes_are_booked_once_and_do_not_depend_on_the_data() -> None:
    def used(data: dict[str, TensorDataset]) -> dict[str, int]:
        bytes_by_channel = fit(data).federation.ledger.bytes_by_channel()
        return {channel: bytes_by_channel[channel] for channel in ("moments", "model")}

    data = domains()
    doubled = {name: TensorDataset(*(torch.cat([t, t]) for t in d.tensors)) for name, d in data.items()}
    assert used(data) == used(doubled)
    numbers = N * (2 * N + 1) + 2 * N * 3 + 2
    assert 3 * 8 * numbers < used(data)["moments"] < 3 * (8 * numbers + 300)  # two up, one down
    assert 2 * 4 * (2 * N * M + (M + 1) * 2) < used(data)["model"] < 2 * (4 * (2 * N * M + (M + 1) * 2) + 200)


@pytest.mark.parametrize(
    ("backend", "tolerance"),
    [(Plain(FixedPoint()), 1e-3), (PairwiseMasking(colluders=0), 1e-3), (CKKS, 1e-2)],
    ids=["grid", "masking", "ckks"],
)
def test_private_sums_give_the_same_model_within_the_error_of_their_numbers(backend: Any, tolerance: float) -> None:
    if backend is CKKS:
        pytest.importorskip("tenseal")
        backend = backend()
    data = domains()
    module, plain = fit(data, strategy={"privacy": backend}), fit(data)
    assert {e.channel.split("/")[0] for e in module.federation.ledger if e.receiver == SERVER} == {"moments"}
    x = data["c2"].tensors[0]
    with torch.no_grad():
        expected, got = plain(x), module(x)
    assert float((got - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("trouble", ["local_steps", "drop_last", "limit"])
def test_a_pass_that_is_not_complete_is_refused_with_advice(trouble: str) -> None:
    data = domains()
    module = build(list(data))
    strategy = {"local_steps": 1} if trouble == "local_steps" else {}
    limit = {"limit_train_batches": 2} if trouble == "limit" else {}
    given = loader(data, 8, drop_last=trouble == "drop_last")
    with pytest.raises(RosterError, match=r"cover \d+ of \d+"):
        trainer(1, strategy=strategy, **limit).fit(module, given)


@pytest.mark.parametrize("there", [["c2"], ["c0", "c1"]])
def test_without_a_source_or_the_target_there_is_an_error_and_no_empty_model(there: list[str]) -> None:
    with pytest.raises(RosterError, match="moments"):
        fit(domains(), strategy={"participation": Schedule([there])})


def test_absent_sources_are_left_out() -> None:
    data = domains()
    module = fit(data, strategy={"participation": Schedule([["c0", "c2"]])})
    alone = fit({"c0": data["c0"], "c2": data["c2"]})
    assert same(weights(module, "c2"), weights(alone, "c2"))
    assert same(weights(module, "c0"), weights(alone, "c2"))
    assert not same(weights(module, "c1"), weights(alone, "c2"))


def test_after_a_warm_up_the_trained_extractor_is_used() -> None:
    data = domains()
    module = fit(data, extractor=nn.Linear(5, 5), warmup_rounds=2, bandwidth=1.0)
    assert module.federation.round_idx == 3
    torch.manual_seed(0)
    start = nn.Linear(5, 5)
    state = {name: weights(module, name) for name in data}
    assert same(state["c0"], state["c2"])
    assert not torch.equal(state["c0"]["extractor.weight"], start.weight)
    xs, _, xt = pooled(data)
    zs, zt = (x @ state["c0"]["extractor.weight"].T + state["c0"]["extractor.bias"] for x in (xs, xt))
    expected = rf_tca(zs.double(), zt.double(), M, 0.1, sample_frequencies(N, 5, 1.0, seed=0).double()).aligner
    torch.testing.assert_close(
        projector(state["c2"]["aligner.weight"].T), projector(expected), atol=1e-4 * float(expected.norm()) ** 2, rtol=0
    )


def test_an_extractor_that_nobody_trains_is_warned_of_at_the_start() -> None:
    data = domains(3)
    with pytest.warns(UserWarning, match="warmup_rounds=19"):
        fit(data, extractor=MLP(5, [4]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stays at its first weights")
        fit(data)
        fit(data, extractor=MLP(5, [4]).requires_grad_(False))


def test_more_components_than_the_data_have_rank_is_an_error() -> None:
    data = {
        name: TensorDataset(shard.tensors[0][:2].repeat(10, 1), shard.tensors[1][:2].repeat(10))
        for name, shard in shards(2, 20).items()
    }
    module = build(list(data), num_components=12)
    with pytest.raises(RosterError, match="cannot be solved"):
        trainer(1).fit(module, loader(data))


def test_features_that_are_not_finite_are_an_error() -> None:
    class Root(Raw):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sqrt())

    data = domains()
    for name, shard in data.items():
        shard.tensors[0].abs_().mul_(-1.0 if name == "c1" else 1.0)
    module = build(list(data), extractor=Root())
    with pytest.raises(DivergedError, match="features of client 'c1'"):
        trainer(1).fit(module, loader(data))
    assert not {"moments", "model"} & set(module.federation.ledger.bytes_by_channel())


def test_a_class_that_no_source_has_is_never_predicted() -> None:
    data = domains()
    torch.manual_seed(0)
    module = FedRFTCAClosedForm(
        list(data), "c2", 3, Raw(), num_frequencies=N, num_components=M, unit_norm=False, bandwidth=2.0, gamma=0.1
    )
    trainer(1).fit(module, loader(data))
    replica = module.replicas["c2"]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for scale in (1.0, 10.0, 1e3):
            logits = module(scale * torch.randn(200, 5, generator=generator))
            assert logits.isfinite().all()
            assert not (logits.argmax(dim=1) == 2).any()
        # aligned features of other places than random features have: a small prior would not do
        far = replica.classifier(1e4 * torch.randn(200, M, generator=generator))
    assert float(far[:, :2].max(dim=1).values.min()) < -100
    assert not (far.argmax(dim=1) == 2).any()
    two = fit(data)
    with torch.no_grad():
        x = data["c2"].tensors[0]
        torch.testing.assert_close(module(x)[:, :2], two(x))
