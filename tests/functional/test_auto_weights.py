"""The three estimators of auto-weighting: against their definitions, by Monte-Carlo, and at their edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlit.functional import (
    BatchStatistics,
    auto_beta,
    auto_weights,
    fedda,
    fedda_delta_squared,
    fedgp,
    fedgp_delta_squared,
)
from refused import refused

GRANULARITIES = pytest.mark.parametrize("granularity", ["layer", "model"])
SIZES = {"a": 4, "b": 2}
LAYERS = [slice(0, 4), slice(4, 6)]


def update(vector: np.ndarray) -> dict[str, Tensor]:
    """A vector of six numbers as an update of two layers."""
    return {name: torch.as_tensor(vector[part]) for name, part in zip(SIZES, LAYERS, strict=True)}


def vector(of: dict[str, Tensor]) -> np.ndarray:
    return np.concatenate([tensor.double().numpy().ravel() for tensor in of.values()])


def projected(g: np.ndarray, on: np.ndarray, granularity: str) -> np.ndarray:
    """Projection of rows on the span of a vector, or of each of its layers."""
    result = np.empty_like(g)
    for part in LAYERS if granularity == "layer" else [slice(None)]:
        u = on[part] / np.linalg.norm(on[part])
        result[..., part] = (g[..., part] @ u)[..., None] * u
    return result


def estimates_by_definition(g: np.ndarray, source: np.ndarray, granularity: str) -> tuple[float, float, float]:
    """The paper's estimators, with all batches in memory: rows of ``g``."""

    def spread(x: np.ndarray) -> float:
        return float(((x - x.mean(0)) ** 2).sum() / (len(x) - 1))

    r = g - projected(g, source, granularity)
    distance = ((source - g) ** 2).sum(1).mean() - spread(g)
    return spread(g) / len(g), float(distance), float((r**2).sum(1).mean() - spread(r))


@GRANULARITIES
@pytest.mark.parametrize("rule", ["fedda", "fedgp"])
def test_streamed_estimates_are_those_of_the_definitions(rule: Any, granularity: Any) -> None:
    rng = np.random.default_rng(0)
    batches, sources = rng.normal(1, 1, (5, 6)), rng.normal(1, 1, (3, 6))
    found = auto_beta((update(g) for g in batches), [update(s) for s in sources], rule, granularity)
    expected = np.array([estimates_by_definition(batches, source, granularity) for source in sources])
    np.testing.assert_allclose(found.target_variance.expand(3), expected[:, 0], rtol=1e-12)
    np.testing.assert_allclose(found.distance, expected[:, 1], rtol=1e-12)
    np.testing.assert_allclose(found.residual, expected[:, 2], rtol=1e-12)
    used = np.maximum(expected[:, 1 if rule == "fedda" else 2], 0)
    np.testing.assert_allclose(found.beta, expected[:, 0] / (expected[:, 0] + used), rtol=1e-12)
    assert {t.dtype for t in (found.beta, found.target_variance, found.distance, found.residual)} == {torch.float64}
    assert found.target_variance.dim() == 0


def test_the_three_estimators_are_unbiased() -> None:
    r"""Means over 200 repetitions are within 4.5 of their standard errors of s2 = tr(C)/B, |gS - g|^2, |g - Pg|^2.

    C is the covariance of a batch gradient, neither isotropic nor within one layer. Without their corrections the last
    two would be too large by s2 and by (tr C - tr PC)/B, which is more than 5 standard errors.
    """
    rng = np.random.default_rng(1)
    mean, source, mixing = rng.normal(0, 1, 6), rng.normal(0, 1, 6), rng.normal(0, 1, (6, 6))
    batches, repetitions = 3, 200
    draws = mean + rng.normal(0, 1, (repetitions, batches, 6)) @ mixing.T
    found = [auto_beta(map(update, draw), [update(source)], "fedgp", "layer") for draw in draws]
    variance = np.trace(mixing @ mixing.T) / batches
    truth = [
        variance,
        ((source - mean) ** 2).sum(),
        ((mean - projected(mean, source, "layer")) ** 2).sum(),
    ]
    residual_noise = mixing.T - projected(mixing.T, source, "layer")  # rows: images of the unit noises
    uncorrected = [0.0, variance, (residual_noise**2).sum() / batches]
    for name, value, bias in zip(("target_variance", "distance", "residual"), truth, uncorrected, strict=True):
        values = np.array([float(getattr(one, name)) for one in found])
        error = values.std(ddof=1) / np.sqrt(repetitions)
        assert abs(values.mean() - value) < 4.5 * error, name
        assert bias == 0 or bias > 5 * error, name


def test_weights_by_hand() -> None:
    assert auto_weights(1.0, torch.tensor([0.0, 1.0, 3.0, -5.0])).tolist() == [1.0, 0.5, 0.25, 1.0]
    assert auto_weights(0.0, torch.tensor([0.0, 1.0, -1.0])).tolist() == [0.0, 0.0, 0.0]
    assert auto_weights(torch.tensor([1.0, 0.0]), 1.0).tolist() == [0.5, 0.0]
    assert auto_weights(1e-300, 0.0).item() == 1.0
    assert auto_weights(torch.tensor(1.0), torch.tensor(1.0)).dtype == torch.float64


def test_a_source_that_cannot_be_told_from_the_target_gets_all_the_weight() -> None:
    r"""gS is the batches' mean: |gS - gbar|^2 = 0, so the estimate is -V/B = -(4 * 6)/2 and is clipped to 0.

    g = 0 and 2 in each of six coordinates, mean 1: V = 6 (1 + 1) / 1 = 12, s2 = V/2 = 6.
    """
    found = auto_beta([update(np.zeros(6)), update(np.full(6, 2.0))], [update(np.ones(6))])
    assert found.target_variance.item() == 6.0
    assert found.distance.item() == pytest.approx(-6.0)
    assert found.beta.item() == 1.0


def test_float32_gradients_with_a_large_common_part_keep_their_variance() -> None:
    """g = 1000 +- 1/64 in a million coordinates: V = 2e6 / 64^2; sum g^2 - B gbar^2 in float32 would lose it."""
    batches = [{"a": torch.full((10**6,), 1000 + sign / 64)} for sign in (-1, 1)]
    found = auto_beta(batches, [{"a": torch.full((10**6,), 1000.0)}], "fedgp")
    assert found.target_variance.item() == pytest.approx(10**6 / 64**2, rel=1e-9)
    # the source is the mean: |gS - gbar|^2 = 0 out of 10^12
    assert found.distance.item() == pytest.approx(-(10**6) / 64**2, rel=1e-3)


def test_statistics_and_counters_of_networks_take_no_part() -> None:
    rng = np.random.default_rng(5)
    g, source = rng.normal(0, 1, (3, 6)), rng.normal(0, 1, 6)
    plain = auto_beta(map(update, g), [update(source)], "fedgp", "layer")
    extra = {"bn.running_mean": torch.full((2,), 1e6), "bn.num_batches_tracked": torch.tensor(3)}
    with_extra = auto_beta((update(one) | extra for one in g), [update(source) | extra], "fedgp", "layer")
    bare_sources = auto_beta((update(one) | extra for one in g), [update(source)], "fedgp", "layer")
    for other in (with_extra, bare_sources):
        assert torch.equal(other.beta, plain.beta)
        assert torch.equal(other.distance, plain.distance)


def test_batch_statistics_keep_neither_the_gradient_nor_its_half_precision() -> None:
    gradient = {"a": torch.full((2,), 0.1, dtype=torch.float16), "b": torch.ones(2, requires_grad=True)}
    statistics = BatchStatistics()
    statistics.add(gradient)
    gradient["a"].zero_()
    statistics.add({"a": torch.zeros(2, dtype=torch.float16), "b": torch.zeros(2)})
    assert statistics.mean["a"].dtype == torch.float32
    assert statistics.mean["a"].tolist() == pytest.approx([0.05, 0.05], rel=1e-3)
    assert not statistics.mean["b"].requires_grad


# ---------------------------------------------------------------- the delta error


def test_delta_errors_by_hand() -> None:
    """s2 = 4, d2 = 8, t2d2 = 2, b = 1/2: 1/4 4 + 1/4 8 = 3, and (1/4 + 3/4 / 6) 4 + 1/4 2 = 2.

    A source that passes the filter half the time, with |gT|^2 = 10: (1/4 + 1/2 3/4 / 6) 4 + 1/4 (2/2 + 10/2) = 2.75.
    """
    assert fedda_delta_squared(4.0, 8.0, 0.5).item() == 3.0
    assert fedgp_delta_squared(4.0, 2.0, 0.5, num_parameters=6).item() == 2.0
    assert fedgp_delta_squared(4.0, 2.0, 0.5, 6, kept=0.5, target_square=10.0).item() == 2.75
    ends = torch.tensor([0.0, 1.0])
    assert fedda_delta_squared(4.0, 8.0, ends).tolist() == [4.0, 8.0]  # the target alone, the source alone
    assert fedgp_delta_squared(4.0, 2.0, ends).tolist() == [4.0, 2.0]


@pytest.mark.parametrize("rule", ["fedda", "fedgp"])
def test_delta_errors_are_the_mean_squared_errors_of_the_rules(rule: str) -> None:
    """20,000 draws of a target's gradient with isotropic noise, on the two rules; within 6.5 standard errors."""
    rng = np.random.default_rng(2)
    mean, source, beta, sigma = rng.normal(0, 1, 6), rng.normal(0, 1, 6), 0.4, 0.7
    target = mean + sigma * rng.normal(0, 1, (20_000, 6))
    u = source / np.linalg.norm(source)
    other = source if rule == "fedda" else (target @ u)[:, None] * u
    results = (1 - beta) * target + beta * other
    first = (update(target[0]), [update(source)], beta)
    made = fedda(*first) if rule == "fedda" else fedgp(*first, granularity="model", filtered=False)
    np.testing.assert_allclose(vector(made), results[0], atol=1e-12)
    errors = ((results - mean) ** 2).sum(1)
    variance = 6 * sigma**2
    if rule == "fedda":
        expected = fedda_delta_squared(variance, ((source - mean) ** 2).sum(), beta)
    else:
        expected = fedgp_delta_squared(variance, ((mean - (mean @ u) * u) ** 2).sum(), beta, num_parameters=6)
    assert abs(errors.mean() - float(expected)) < 6.5 * errors.std(ddof=1) / np.sqrt(len(errors))


def test_auto_weights_minimise_the_delta_errors() -> None:
    betas = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    for function in (fedda_delta_squared, fedgp_delta_squared):
        best = betas[function(3.0, 5.0, betas).argmin()]
        assert best.item() == pytest.approx(auto_weights(3.0, 5.0).item(), abs=1e-4)


def test_arguments_of_delta_errors() -> None:
    for argument, call in {
        "target_variance": lambda: fedda_delta_squared(-1.0, 1.0, 0.5),
        "beta": lambda: fedda_delta_squared(1.0, 1.0, 1.5),
        "distance": lambda: fedda_delta_squared(1.0, float("nan"), 0.5),
        "residual": lambda: fedgp_delta_squared(1.0, float("nan"), 0.5),
        "target_square": lambda: fedgp_delta_squared(1.0, 1.0, 0.5, target_square=float("inf")),
        "kept": lambda: fedgp_delta_squared(1.0, 1.0, 0.5, kept=-0.1),
        "num_parameters": lambda: fedgp_delta_squared(1.0, 1.0, 0.5, num_parameters=0),
    }.items():
        with refused(argument):
            call()
