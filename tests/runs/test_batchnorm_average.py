"""Means of BatchNorm statistics: of variances, or of second moments, which are those of all clients' data."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from fedlit import Client, FederatedModule
from fedlit.functional import mixture_variance
from fedlit.methods import FedAvg, FedDA, FedGP
from fedlit.privacy import CKKS, FixedPoint, GaussianMechanism, PairwiseMasking, Plain, PrivacyError
from helpers import loader, same, shards, trainer, weights

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
    ("strategy", "tolerance", "weighting"),
    [
        ({}, 1e-5, "samples"),
        ({}, 1e-5, "sqrt"),
        ({}, 1e-5, "uniform"),
        ({"privacy": PairwiseMasking(FixedPoint(20, 256.0))}, 2e-5, "sqrt"),
        ({"differential_privacy": GaussianMechanism(clip_norm=1e4, noise_multiplier=1e-12)}, 1e-4, "samples"),
    ],
)
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
    masked: dict[str, Any] = {"strategy": {"privacy": PairwiseMasking()}, "weighting": "uniform"}
    fit(batchnorm_average="variances", **masked)
    with pytest.raises(PrivacyError, match=r"largest number is [4-9]\d"):
        fit(**masked)


@pytest.mark.parametrize("privacy", [None, PairwiseMasking(FixedPoint(20, 256.0), colluders=0)], ids=["open", "hidden"])
@pytest.mark.parametrize("method", [FedDA, FedGP])
def test_combined_updates_mix_statistics_too(method: type[FederatedModule], privacy: Any) -> None:
    module = fit(method, strategy={"privacy": privacy}, beta=0.75, weighting="uniform")
    mean, variance = mixture({"c0": 0.375, "c1": 0.375, "c2": 0.25})
    for client in SIZES:
        state = weights(module, client)
        torch.testing.assert_close(state[MEAN], mean, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state[VARIANCE], variance, atol=1e-3, rtol=1e-4)


def test_noise_makes_no_variance_negative_and_its_effect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: b"\1" * size)
    noise = {"differential_privacy": GaussianMechanism(clip_norm=1.0, noise_multiplier=5.0)}
    with pytest.warns(UserWarning, match=f"running variances.*{VARIANCE}"):
        module = fit(rounds=2, strategy=noise, batchnorm_average="variances")
    state = weights(module, "c0")
    assert (state[VARIANCE] >= 0).all()
    assert (state[VARIANCE] == 0).any()
    x = shifted()["c0"].tensors[0]
    assert module.replicas["c0"].eval()(x).isfinite().all()
