"""Temperatures against scipy's minimiser, scores against scikit-learn, decisions by hand and by every alternative."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.metrics import brier_score_loss
from torch import Tensor

from fedlit import functional as fn


def drawn(factor: float, n: int = 400, num_classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from the softmax of these divided by a factor: the right temperature is about that."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(n, num_classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial((logits / factor).softmax(dim=1), 1, generator=generator).squeeze(1)


def by_scipy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    z, y = logits.double().numpy(), labels.numpy()
    w = np.ones(len(y)) if weights is None else weights.numpy()

    def loss(log_temperature: float) -> float:
        return float(-(w * log_softmax(z / math.exp(log_temperature), axis=1)[np.arange(len(y)), y]).mean())

    found = minimize_scalar(loss, bounds=(math.log(0.1), math.log(10)), method="bounded", options={"xatol": 1e-10})
    return float(np.exp(found.x))


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_fitted_temperature_is_scipys(factor: float) -> None:
    logits, labels = drawn(factor)
    found = fn.fit_temperature(logits, labels)
    assert found == pytest.approx(by_scipy(logits, labels), rel=1e-5)
    assert found == pytest.approx(factor, rel=0.2)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_temperature_of_summed_curves_is_that_of_all_samples_in_one_place(factor: float) -> None:
    grid = fn.temperature_grid()
    parts = [drawn(factor, n=200, seed=seed) for seed in range(3)]
    curve = torch.stack([fn.losses_at(*part, grid).mean(dim=0) for part in parts]).mean(dim=0)
    pooled = [torch.cat(some) for some in zip(*parts, strict=True)]
    assert fn.best_temperature(grid, curve) == pytest.approx(by_scipy(*pooled), rel=5e-3)


def test_losses_are_cross_entropies_within_their_bound() -> None:
    logits, labels = drawn(1.0, n=20)
    grid = torch.tensor([0.5, 2.0])
    expected = [torch.nn.functional.cross_entropy(logits / each, labels, reduction="none") for each in (0.5, 2.0)]
    torch.testing.assert_close(fn.losses_at(logits, labels, grid), torch.stack(expected, dim=1))
    wrong = fn.losses_at(torch.tensor([[1e4, 0.0]]), torch.tensor([1]), fn.temperature_grid())
    assert float(wrong.min()) == float(wrong.max()) == 30.0


def test_temperatures_stay_within_their_bounds() -> None:
    logits, right = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    assert fn.fit_temperature(logits, right) == 0.05
    assert fn.fit_temperature(logits, 1 - right) == 20.0
    grid = fn.temperature_grid()
    assert fn.best_temperature(grid, grid) == float(grid[0])
    assert fn.best_temperature(grid, -grid) == float(grid[-1])
    assert fn.best_temperature(grid, torch.ones(53)) == 1.0
    with pytest.raises(ValueError, match="losses must be finite"):
        fn.best_temperature(grid, torch.full((53,), math.nan))


@pytest.mark.parametrize("confidence", [0.4, 0.7, 0.99])
def test_a_temperature_gives_the_mean_confidence_that_is_asked_for(confidence: float) -> None:
    logits, _ = drawn(1.0)
    found = fn.temperature_at(logits, confidence)
    assert float((logits / found).softmax(dim=1).amax(dim=1).mean()) == pytest.approx(confidence, abs=1e-9)
    assert fn.temperature_at(logits, 0.1) == pytest.approx(20)
    assert fn.temperature_at(torch.zeros(3, 2), 0.9) == pytest.approx(0.05)


def test_the_brier_score_is_scikit_learns() -> None:
    logits, labels = drawn(2.0)
    p = logits.softmax(dim=1)
    expected = sum(brier_score_loss(labels == label, p[:, label]) for label in range(3))
    assert float(fn.brier_score(p, labels)) == pytest.approx(expected)
    two = torch.tensor([[0.7, 0.3]])
    assert float(fn.brier_score(two, torch.tensor([0]))) == pytest.approx(2 * 0.3**2)


def test_decisions_cost_least_of_all() -> None:
    p = drawn(1.0, n=50)[0].softmax(dim=1)
    costs = torch.tensor([[0.0, 2.0, 5.0], [1.0, 0.0, 1.0], [9.0, 3.0, -1.0]])
    for row, decided in zip(p.tolist(), fn.decide(p, costs).tolist(), strict=True):
        expected = [sum(row[true] * float(costs[true, each]) for true in range(3)) for each in range(3)]
        assert expected[decided] == min(expected)
    assert torch.equal(fn.decide(p, 1 - torch.eye(3)), p.argmax(dim=1))
