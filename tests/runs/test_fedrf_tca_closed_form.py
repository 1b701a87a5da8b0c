"""RF-TCA of a federation in closed form, against RF-TCA and linear discriminant analysis of the pooled data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from helpers import digits, loader, same, shards, trainer, weights

from fedlit.callbacks import OracleAccuracy
from fedlit.federation import RosterError, Schedule, UniformSubset
from fedlit.functional import linear_discriminant, random_fourier_features, rf_tca, sample_frequencies
from fedlit.methods import FedRFTCAClosedForm
from fedlit.models import MLP, Features
from fedlit.privacy import CKKS, FixedPoint, PairwiseMasking, Plain

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


def test_it_is_the_same_to_float64_before_it_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {name: TensorDataset(d.tensors[0].double(), d.tensors[1]) for name, d in domains().items()}
    module = build(list(data))
    seen: list[Tensor] = []

    def spy(second: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        seen.append(second)
        return linear_discriminant(second, *rest)

    monkeypatch.setattr("fedlit.methods.fedrf_tca_closed_form.linear_discriminant", spy)
    trainer(1, precision="64-true").fit(module, loader(data))
    xs, _, xt = pooled(data)
    omega = sample_frequencies(N, 5, 2.0, seed=0)
    result = rf_tca(xs, xt, M, 0.1, omega.double())
    torch.testing.assert_close(seen[0].abs(), (result.source.T @ result.source / len(xs)).abs(), atol=1e-9, rtol=1e-7)


def test_the_classifier_is_linear_discriminant_analysis_of_the_pooled_aligned_sources() -> None:
    """scikit-learn pools its classes' shrunk covariances by their shares, which is the shrunk pooled covariance."""
    data = domains()
    module = fit(data, shrinkage=0.2)
    xs, ys, xt = pooled(data)
    replica = module.replicas["c2"]
    with torch.no_grad():
        fs, ft = (replica.aligner(replica.random_features(x)).double().numpy() for x in (xs, xt))
        logits = module(xt).double().numpy()
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.2).fit(fs, ys.numpy())
    expected = oracle.decision_function(ft)  # of two classes: the difference of their logits
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], expected, rtol=1e-3, atol=1e-3)


def test_neither_batch_size_nor_cut_nor_order_of_clients_matters() -> None:
    data = domains()
    reference = projector(weights(fit(data), "c2")["aligner.weight"].T)
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
        xt = data["c2"].tensors[0]
        torch.testing.assert_close(module(xt), fit(data)(xt), rtol=1e-3, atol=1e-3)


def test_everyone_ends_with_the_same_model_after_one_round() -> None:
    data = domains()
    module = fit(data)  # of up to 20 epochs
    assert module.federation.round_idx == 1
    assert module.trainer.current_epoch == 1
    assert same(weights(module, "c0"), weights(module, "c2"))
    assert same(weights(module, "c1"), weights(module, "c2"))


def test_a_run_of_several_rounds_per_epoch_stops_too() -> None:
    data = domains()
    ours = fit(data, strategy={"rounds_per_epoch": 3})
    assert same(weights(ours, "c0"), weights(fit(data), "c0"))
    assert len([e for e in ours.federation.ledger if e.channel == "moments"]) == 3


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
    [(Plain(FixedPoint()), 1e-3), (PairwiseMasking(), 1e-3), (CKKS, 1e-2)],
    ids=["grid", "masking", "ckks"],
)
def test_private_sums_give_the_same_model_within_the_error_of_their_numbers(backend: Any, tolerance: float) -> None:
    if backend is CKKS:
        pytest.importorskip("tenseal")
        backend = backend()
    data = domains()
    module, plain = fit(data, strategy={"privacy": backend}), fit(data)
    assert module.federation.summed_channels == {"moments"}
    x = data["c2"].tensors[0]
    with torch.no_grad():
        expected, got = plain(x), module(x)
    assert float((got - expected).norm() / expected.norm()) < tolerance


def test_uniform_weights_count_every_source_alike() -> None:
    """As if the smaller source were copied until it is as large; only ratios of sizes matter to the logits."""
    base = shards(3, 20)

    def repeated(name: str, size: int, times: int) -> TensorDataset:
        return TensorDataset(*(torch.cat([tensor[:size]] * times) for tensor in base[name].tensors))

    small = {"c0": repeated("c0", 20, 1), "c1": repeated("c1", 10, 1), "c2": repeated("c2", 10, 3)}
    equal = {"c0": repeated("c0", 20, 1), "c1": repeated("c1", 10, 2), "c2": repeated("c2", 10, 4)}
    x = base["c2"].tensors[0]
    with torch.no_grad():
        uniform, by_samples = fit(small, weighting="uniform")(x), fit(small, weighting="samples")(x)
        expected = fit(equal, weighting="samples")(x)
    torch.testing.assert_close(uniform, expected, rtol=1e-3, atol=1e-3)
    assert float((by_samples - expected).detach().abs().max()) > 1e-2


@pytest.mark.parametrize("trouble", ["local_steps", "drop_last", "limit"])
def test_a_pass_that_is_not_complete_is_refused_with_advice(trouble: str) -> None:
    data = domains()
    module = build(list(data))
    strategy = {"local_steps": 1} if trouble == "local_steps" else {}
    limit = {"limit_train_batches": 2} if trouble == "limit" else {}
    given = loader(data, 8, drop_last=trouble == "drop_last")
    with pytest.raises(RosterError, match=r"cover \d+ of \d+ training samples: give drop_last=False"):
        trainer(1, strategy=strategy, **limit).fit(module, given)


@pytest.mark.parametrize("there", [["c2"], ["c0", "c1"]])
def test_without_a_source_or_the_target_there_is_an_error_and_no_empty_model(there: list[str]) -> None:
    with pytest.raises(RosterError, match="moments of the target and at least one source"):
        fit(domains(), strategy={"participation": Schedule([there])})


def test_absent_sources_are_left_out() -> None:
    data = domains()
    module = fit(data, strategy={"participation": Schedule([["c0", "c2"]])})
    alone = fit({"c0": data["c0"], "c2": data["c2"]})
    assert same(weights(module, "c2"), weights(alone, "c2"))
    assert same(weights(module, "c0"), weights(alone, "c2"))
    assert not same(weights(module, "c1"), weights(alone, "c2"))


def test_a_subset_with_masking_needs_two_sources() -> None:
    module = fit(domains(4), strategy={"participation": UniformSubset(at_least=2), "privacy": PairwiseMasking()})
    assert module.federation.round_idx == 1


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


def test_in_a_plain_trainer_it_solves_the_same() -> None:
    data = domains()
    module = build(list(data))
    trainer(3, federated=False).fit(module, loader(data))
    assert same(weights(module, "c0"), weights(fit(data), "c0"))


def test_nothing_is_trained_and_dropout_is_off() -> None:
    data = domains()
    torch.manual_seed(0)
    module = fit(data, extractor=MLP(5, [5], dropout=0.5))
    torch.manual_seed(0)
    network = MLP(5, [5])
    start = network.state_dict()
    ours = weights(module, "c1")
    assert all(torch.equal(ours[f"extractor.{name}"], tensor) for name, tensor in start.items())
    without = fit(data, extractor=network)
    assert same(ours, weights(without, "c1"))


def test_embedded_digits_are_told_apart_far_better_than_by_chance() -> None:
    data = digits()
    torch.manual_seed(0)
    module = FedRFTCAClosedForm(
        data.clients, data.target, data.num_classes, Features(64), num_frequencies=200, num_components=50
    )
    run = trainer(20, [OracleAccuracy()])
    run.fit(module, data)
    accuracy = run.test(module, data, verbose=False)[0]["oracle/target/acc"]
    print(f"target accuracy on digits: {accuracy:.3f}")
    assert accuracy > 0.4  # of ten classes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_components": 13},
            r"num_components \(m\) must be between 1 and .* \(2N = 12\), got 13",
        ),
        ({"num_components": 0}, r"num_components \(m\) must be between 1"),
        ({"shrinkage": 0.0}, r"shrinkage must be in \(0, 1\], got 0.0"),
        ({"shrinkage": 1.5}, r"shrinkage must be in \(0, 1\], got 1.5"),
        ({"gamma": 0.0}, "gamma must be positive, or null .*, got 0.0"),
        ({"bandwidth": -1.0}, "bandwidth"),
        ({"kernel": "rbf"}, "kernel"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(["c0", "c1"], **arguments)
