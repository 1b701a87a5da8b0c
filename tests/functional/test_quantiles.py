"""Quantiles from sums of counts against numpy on all values in one place, and the coverage that is promised of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from fedlit.functional.quantiles import CELLS, agree_on_quantiles, conformal_rank, fewest_residuals
from fedlit.privacy import FixedPoint


def summed(clients: dict[str, Tensor], grid: FixedPoint | None = None) -> Callable[[Callable[[str], Tensor]], Tensor]:
    """Sums over clients, of numbers that are on a grid if one is given."""

    def total(message: Callable[[str], Tensor]) -> Tensor:
        sent = [message(name) for name in clients]
        return sum(sent) if grid is None else grid.decode(sum(map(grid.encode, sent)))  # type: ignore[return-value, arg-type]

    return total


def quantile(clients: dict[str, Tensor], rank: Any, grid: FixedPoint | None = None) -> Any:
    columns = next(iter(clients.values())).shape[1]
    found = agree_on_quantiles(columns, clients.__getitem__, lambda n, k: rank(n, k), summed(clients, grid))
    assert found is not None
    return found.numpy()


def parts(values: Any, seed: int = 0) -> dict[str, Tensor]:
    """Values of shape (n, d), which three clients have of unequal parts."""
    cuts = np.sort(np.random.default_rng(seed).integers(1, len(values), 2))
    return {str(number): torch.from_numpy(part) for number, part in enumerate(np.split(values, cuts))}


@pytest.mark.parametrize("grid", [None, FixedPoint(), FixedPoint(16)], ids=str)
def test_a_quantile_is_that_of_all_values_rounded_up_by_less_than_a_step(grid: FixedPoint | None) -> None:
    """Of any size and sign, with ties; a step is a 256th of the power of two below, in absolute value."""
    random = np.random.default_rng(0)
    columns = [
        random.standard_normal(400), 1e-12 * random.exponential(size=400), 1e9 + random.standard_normal(400),
        -np.exp(10 * random.standard_normal(400)), random.integers(0, 4, 400).astype(float), np.zeros(400),
        np.where(random.random(400) < 0.5, 1e6, -1e-6), random.standard_cauchy(400) * 1e15,
    ]  # fmt: skip
    values = np.stack(columns, axis=1)
    ordered = np.sort(values, axis=0)
    for rank in (1, 3, 200, 361, 400):
        found = quantile(parts(values, rank), lambda n, _, rank=rank: torch.full_like(n, rank), grid)
        exact = ordered[rank - 1]
        steps = 2.0 ** np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-64))) / CELLS
        assert (found >= exact).all()
        assert (found - exact <= steps).all()


def test_missing_values_do_not_count_and_infinite_ones_are_the_largest() -> None:
    values = np.array([[1.0, np.nan, np.inf], [np.nan, np.nan, np.inf], [2.0, np.nan, 3.0], [4.0, np.nan, np.inf]])
    numbers, clients = [], []

    def median(n: Tensor, k: Tensor) -> Tensor:
        numbers.append(n.tolist())
        clients.append(k.tolist())
        return ((n + 1) / 2).ceil()

    found = quantile({"a": torch.from_numpy(values[:2]), "b": torch.from_numpy(values[2:])}, median)
    assert (numbers, clients) == ([[3.0, 0.0, 4.0]], [[2.0, 0.0, 2.0]])
    assert found[0] == 2
    assert math.isnan(found[1])
    assert found[2] == math.inf


def test_a_process_without_clients_takes_part_in_both_sums() -> None:
    asked: list[object] = []
    assert agree_on_quantiles(1, lambda name: torch.zeros(0, 1), lambda n, k: n, asked.append) is None
    assert len(asked) == 2


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.3, 0.37])
def test_the_rank_is_the_one_of_split_conformal_prediction(alpha: float) -> None:
    """Of one client ceil((n + 1) (1 - alpha)), in exact arithmetic."""
    share = Fraction(round(100 * alpha), 100)
    for number in range(1, 400):
        assert conformal_rank(number, 1, alpha) == math.ceil((number + 1) * (1 - share))
    for several in (1, 2, 5):
        fewest = fewest_residuals(several, alpha)
        assert conformal_rank(fewest, several, alpha) <= fewest
        assert conformal_rank(fewest - 1, several, alpha) > fewest - 1


@pytest.mark.parametrize("sizes", [(19,), (40, 9, 30)])
def test_intervals_hold_as_many_new_samples_as_promised(sizes: tuple[int, ...]) -> None:
    """New samples come from one of clients that differ, in proportion to n_k + 1; a false alarm is rarer than 1e-9."""
    random, runs, alpha = np.random.default_rng(0), 20_000, 0.1
    scales = np.array([1.0, 30.0, 0.1])[: len(sizes)]
    scores = [scale * random.exponential(size=(runs, size)) for scale, size in zip(scales, sizes, strict=True)]
    pooled = np.concatenate(scores, axis=1)
    rank = conformal_rank(pooled.shape[1], len(sizes), alpha)
    radius = np.partition(pooled, rank - 1, axis=1)[:, rank - 1]
    odds = np.array(sizes) + 1
    origin = random.choice(len(sizes), runs, p=odds / odds.sum())
    held = int((scales[origin] * random.exponential(size=runs) <= radius).sum())
    most = 1 - alpha + len(sizes) / odds.sum()
    assert binom.cdf(held, runs, 1 - alpha) > 1e-9
    assert binom.sf(held - 1, runs, most) > 1e-9
    # of another distribution they hold as many as it happens to be
    assert binom.cdf(int((100 * random.exponential(size=runs) <= radius).sum()), runs, 1 - alpha) < 1e-9
