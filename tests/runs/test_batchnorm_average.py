"""Means of BatchNorm statistics: of variances, or of second moments, which are those of all clients' data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from fedlit import Client, FederatedModule
from fedlit.federation import Schedule
from fedlit.functional import mixture_variance
from fedlit.methods import FedAvg, FedDA, FedGP, FedRFTCA, SourceOnly
from fedlit.models import SmallCNN
from fedlit.privacy import CKKS, FixedPoint, GaussianMechanism, PairwiseMasking, Plain, PrivacyError
from fedlit.run.batchnorm import as_second_moments, as_variances, second_moment, variances_of
from fedlit.run.run import Run
from helpers import STATEFUL, build, digits, loader, same, shards, trainer, weights

SIZES = {"c0": 20, "c1": 14, "c2": 9}
MEAN, VARIANCE = "extractor.running_mean", "extractor.running_var"


def shifted() -> dict[str, TensorDataset]:
    """Clients of 20, 14 and 9 samples at different places, each with a scale of its own."""
    given = shards(3, 20)
    return {
        name: TensorDataset((i + 0.5) * x[:size] + 3 * i, y[:size])
        for i, (name, size) in enumerate(SIZES.items())
        for x, y in [given[name].tensors]
    }


def fit(
    method: type[FederatedModule] = FedAvg, rounds: int = 1, strategy: Any = None, lr: float = 0.0, **kwargs: Any
) -> FederatedModule:
    """A run in which statistics alone move, to those of a client's data in its first round."""
    torch.manual_seed(0)
    names: list[Client | str] = ["c0", "c1", Client("c2", role="target", labelled=True)]
    extractor = nn.BatchNorm1d(5, momentum=None)
    extractor.out_features = 5  # type: ignore[assignment]
    kwargs.setdefault("batchnorm_average", "moments")
    module = method(names, "c2", 2, extractor, optimizer=lambda params: SGD(params, lr=lr), **kwargs)
    trainer(rounds, strategy=strategy or {}).fit(module, loader(shifted(), batch_size=64))
    return module


def own(name: str) -> tuple[Tensor, Tensor]:
    """Mean and variance of a client's samples, as BatchNorm takes them."""
    x = shifted()[name].tensors[0]
    return x.mean(dim=0), x.var(dim=0)


def mixture(shares: dict[str, float]) -> tuple[Tensor, Tensor]:
    means, variances = (torch.stack(each) for each in zip(*map(own, shares), strict=True))
    parts = torch.tensor(list(shares.values()))
    return parts / parts.sum() @ means, mixture_variance(means, variances, parts)


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        ({}, 1e-5),
        ({"privacy": Plain(FixedPoint(20, 256.0))}, 2e-5),
        ({"privacy": PairwiseMasking(FixedPoint(20, 256.0))}, 2e-5),
        ({"differential_privacy": GaussianMechanism(clip_norm=1e4, noise_multiplier=1e-12)}, 1e-4),
    ],
    ids=["plain", "grid", "masking", "noise"],
)
@pytest.mark.parametrize("weighting", ["samples", "sqrt", "uniform"])
def test_moments_give_the_variance_of_all_clients_data_together(
    strategy: dict[str, Any], tolerance: float, weighting: Any
) -> None:
    power = {"samples": 1.0, "sqrt": 0.5, "uniform": 0.0}[weighting]
    shares = {name: size**power for name, size in SIZES.items()}
    state = weights(fit(strategy=strategy, weighting=weighting), "c0")
    mean, variance = mixture(shares)
    torch.testing.assert_close(state[MEAN], mean, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(state[VARIANCE], variance, atol=20 * tolerance, rtol=tolerance)


def test_variances_lack_the_spread_of_the_means() -> None:
    state = weights(fit(batchnorm_average="variances", weighting="uniform"), "c0")
    mean, variance = mixture(dict.fromkeys(SIZES, 1.0))
    torch.testing.assert_close(state[MEAN], mean)
    torch.testing.assert_close(state[VARIANCE], torch.stack([own(name)[1] for name in SIZES]).mean(dim=0))
    assert bool((state[VARIANCE] < 0.6 * variance).all())


def test_ckks_and_masking_train_like_the_plain_sum() -> None:
    pytest.importorskip("tenseal")
    plain, masked, grid, approximate = (
        weights(fit(lr=0.1, rounds=3, strategy={"privacy": privacy}), "c2")
        for privacy in (None, PairwiseMasking(FixedPoint(20, 256.0)), Plain(FixedPoint(20, 256.0)), CKKS())
    )
    assert same(masked, grid)
    for name, tensor in plain.items():
        torch.testing.assert_close(masked[name], tensor, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(approximate[name], tensor, atol=1e-3, rtol=1e-3)


def test_second_moments_past_the_bound_stop_training_with_advice() -> None:
    """Means of up to 6 are within a bound of 32, and their squares are not."""
    masked: dict[str, Any] = {"strategy": {"privacy": PairwiseMasking()}, "weighting": "uniform"}
    fit(batchnorm_average="variances", **masked)
    with pytest.raises(PrivacyError, match=r"the largest number is [4-9]\d.*, but the fixed-point bound is 32: raise"):
        fit(**masked)


def test_who_was_away_fetches_the_same_statistics() -> None:
    schedule = Schedule([["c0", "c1", "c2"], ["c0", "c2"], ["c1", "c2"]])
    away = fit(SourceOnly, 2, {"participation": schedule}, batchnorm_average="moments")
    assert not same(statistics(away, "c0"), statistics(away, "c1"))

    class Fetching(SourceOnly):
        def on_round_start(self, run: Run) -> None:
            super().on_round_start(run)
            if run.clock.round_idx == 2:
                self.fetched = statistics(self, "c1")

    back = fit(Fetching, 3, {"participation": schedule})
    assert same(back.fetched, statistics(away, "c0"))


def statistics(module: FederatedModule, client: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights(module, client).items() if name in (MEAN, VARIANCE)}


@pytest.mark.parametrize("privacy", [None, PairwiseMasking(colluders=0)], ids=["plain", "masking"])
def test_a_run_resumes_to_the_last_bit(privacy: Any, tmp_path: Path) -> None:
    def run(rounds: int, checkpoint: str | None = None) -> tuple[FederatedModule, Any]:
        data = digits(flatten=False)
        torch.manual_seed(0)
        network = {"extractor": SmallCNN(1, width=4), **{k: v for k, v in STATEFUL.items() if k != "dropout"}}
        module = build(SourceOnly, data, batchnorm_average="moments", **network)
        schedule = Schedule([["clean", "blended", "fonts"], ["clean", "blended"], ["clean", "blended", "fonts"]])
        started = trainer(rounds, strategy={"participation": schedule, "local_steps": 2, "privacy": privacy})
        started.fit(module, data, ckpt_path=checkpoint)
        return module, started

    _, half = run(2)  # the target has yet to fetch the last total
    half.save_checkpoint(tmp_path / "two.ckpt")
    resumed, straight = run(3, str(tmp_path / "two.ckpt"))[0], run(3)[0]
    for client in ("clean", "blended", "fonts"):
        assert same(weights(resumed, client), weights(straight, client))


@pytest.mark.parametrize("privacy", [None, PairwiseMasking(FixedPoint(20, 256.0), colluders=0)], ids=["open", "hidden"])
@pytest.mark.parametrize("method", [FedDA, FedGP])
def test_combined_updates_mix_statistics_too(method: type[FederatedModule], privacy: Any) -> None:
    """A quarter of the target, the rest the sources alike."""
    module = fit(method, strategy={"privacy": privacy}, beta=0.75, weighting="uniform")
    mean, variance = mixture({"c0": 0.375, "c1": 0.375, "c2": 0.25})
    for client in SIZES:
        state = weights(module, client)
        torch.testing.assert_close(state[MEAN], mean, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state[VARIANCE], variance, atol=1e-3, rtol=1e-4)


def test_every_average_of_a_method_takes_them() -> None:
    """FedRF-TCA averages a classifier by itself, seldom; here one with BatchNorm."""
    data = digits()
    head = nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10))
    sizes = {"num_frequencies": 16, "num_components": 8, "classifier_period": 1, "batchnorm_average": "moments"}
    seen: list[dict[str, Tensor]] = []

    module = build(FedRFTCA, data, classifier=head, **sizes)
    average_ = module.run.weights.average_

    def noted(channel: str, *args: Any, **kwargs: Any) -> None:
        if channel == "classifier":
            seen.extend(weights(module, name) for name in ("clean", "blended"))
        average_(channel, *args, **kwargs)

    module.run.weights.average_ = noted  # type: ignore[method-assign]
    trainer(1, strategy={"local_steps": 2, "participation": Schedule([["clean", "blended", "fonts"]])}).fit(
        module, data
    )
    means, variances = (
        torch.stack([state[f"classifier.1.running_{name}"] for state in seen]) for name in ("mean", "var")
    )
    found = weights(module, "fonts")["classifier.1.running_var"]
    torch.testing.assert_close(found, mixture_variance(means, variances, torch.ones(2)))


def test_bytes_are_those_of_variances_but_for_a_longer_name() -> None:
    sent = [
        fit(batchnorm_average=average).federation.ledger.bytes_by_channel()["weights"]
        for average in ("variances", "moments")
    ]
    longer = len("running_square") - len("running_var")
    assert sent[1] - sent[0] == 6 * longer  # three up, three down


def test_layers_of_batchnorm_alone_are_meant_wherever_they_stand() -> None:
    norm = nn.BatchNorm1d(3)
    network = nn.ModuleDict({"a": norm, "b": norm, "c": nn.InstanceNorm1d(3, track_running_stats=True)})
    network["d"] = nn.BatchNorm2d(2, track_running_stats=False)
    pairs = {f"{name}.running_var": f"{name}.running_mean" for name in "ab"}
    assert variances_of(network) == pairs
    state = {
        "a.running_var": torch.tensor([2.0]),
        "a.running_mean": torch.tensor([3.0]),
        "c.running_var": torch.ones(1),
    }
    sent = as_second_moments(state, pairs)
    assert {name: tensor.tolist() for name, tensor in sent.items()} == {
        "a.running_square": [11.0],
        "a.running_mean": [3.0],
        "c.running_var": [1.0],
    }
    back = as_variances(sent)
    assert {name: tensor.tolist() for name, tensor in back.items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }


def test_a_variance_is_never_below_0_and_half_precision_keeps_its_digits() -> None:
    noisy = {"n.running_mean": torch.tensor([2.0]), "n.running_square": torch.tensor([3.9])}
    assert as_variances(noisy)["n.running_var"].item() == 0.0
    half = second_moment(torch.tensor([30.0], dtype=torch.float16), torch.tensor([0.25], dtype=torch.float16))
    assert half.item() == 900.25
    assert half.dtype == torch.float32


def test_bad_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="batchnorm_average must be 'variances' or 'moments', got 'median'"):
        fit(batchnorm_average="median")
    with pytest.raises(ValueError, match="averages what local_norm=True keeps at its client: leave one of both out"):
        fit(local_norm=True)


def test_noise_makes_no_variance_negative_and_its_effect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of a variance below 0 is NaN, and so were all predictions. The noise is the same in every run."""
    monkeypatch.setattr(os, "urandom", lambda size: b"\1" * size)
    noise = {"differential_privacy": GaussianMechanism(clip_norm=1.0, noise_multiplier=5.0)}
    with pytest.warns(UserWarning, match=f"noise to running variances of BatchNorm .'{VARIANCE}' is the first of 1"):
        module = fit(rounds=2, strategy=noise, batchnorm_average="variances")
    state = weights(module, "c0")
    assert (state[VARIANCE] >= 0).all()
    assert (state[VARIANCE] == 0).any()
    x = shifted()["c0"].tensors[0]
    assert module.replicas["c0"].eval()(x).isfinite().all()
