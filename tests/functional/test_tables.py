"""The union of sets from summed tables, and moments of columns from sums of small numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlit.functional.set_union import read_union, union_cells, union_table
from fedlit.functional.table_moments import (
    known_moments,
    largest_scale,
    mean_and_deviation,
    needed_exponents,
    spread_about,
)


@settings(max_examples=12)
@given(st.lists(st.sets(st.binary(max_size=62), max_size=12), min_size=1, max_size=5))
def test_the_union_of_sets_is_read_from_the_sum_of_their_tables(sets):
    cells = union_cells(sum(map(len, sets)))
    total = sum(union_table(each, cells) for each in sets)
    expected = {element: sum(element in each for each in sets) for element in set().union(*sets)}
    assert read_union(total, cells) == expected
    assert [*read_union(total, cells)] == sorted(expected)


def test_a_large_union_is_read_in_spite_of_noise_below_half_a_unit():
    sets = [{f"level {number}".encode() for number in range(start, start + 120)} for start in (0, 30, 90)]
    cells = union_cells(360)
    noise = 0.007 * (2 * torch.rand(5 * cells, 143, dtype=torch.float64) - 1)
    assert len(read_union(sum(union_table(each, cells) for each in sets) + noise, cells)) == 210
    most = max(float(union_table(each, cells).max()) for each in sets)
    assert most < 4  # within the range of fixed-point numbers


def agreed(parts: list[torch.Tensor], digits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What clients come to whose messages are rounded to so many binary places."""
    shares = [len(x) / sum(map(len, parts)) for x in parts]

    def total(messages: list[torch.Tensor]) -> torch.Tensor:
        assert all(float(each.abs().max()) <= 1 for each in messages)
        return sum((each * 2**digits).round() / 2**digits for each in messages)

    mean = deviation = torch.zeros(parts[0].shape[1], dtype=torch.float64)
    for _ in range(3):
        scale = largest_scale(total([needed_exponents(spread_about(x, mean)) for x in parts]))
        known = [w * known_moments(x, mean, scale) for w, x in zip(shares, parts, strict=True)]
        mean, deviation = mean_and_deviation(total(known), mean, scale)
    return mean, deviation


@pytest.mark.parametrize("digits", [20, 50])
def test_moments_are_those_of_all_values_together_whatever_their_magnitude(digits):
    generator = np.random.default_rng(0)
    columns = [(0, 1), (2020, 0.5), (1e6, 1e-1), (-3e-7, 1e-8), (5e11, 4e12), (7, 0), (0, 0)]
    parts = []
    for n, shift in ((40, 0.0), (300, 0.5), (7, 3.0)):
        x = np.stack([mean + std * (shift + generator.standard_normal(n)) for mean, std in columns], axis=1)
        x[generator.random(x.shape) < 0.2] = np.nan
        parts.append(torch.from_numpy(x))
    mean, deviation = agreed(parts, digits)
    together = np.concatenate([x.numpy() for x in parts])
    expected = np.nanstd(together, axis=0)
    np.testing.assert_allclose(deviation.numpy()[:5], expected[:5], rtol=5e-3 if digits == 20 else 1e-6)
    assert deviation[5:].tolist() == [0, 0]
    error = np.abs(mean.numpy() - np.nanmean(together, axis=0))
    assert (error[:5] <= (1e-3 if digits == 20 else 1e-6) * expected[:5]).all()
    np.testing.assert_allclose(mean.numpy()[5:], [7, 0], rtol=1e-5)


def test_a_column_that_nobody_has_is_of_zeros():
    x = torch.full((4, 1), torch.nan, dtype=torch.float64)
    assert needed_exponents(spread_about(x, torch.zeros(1))).sum() == 0
    mean, deviation = mean_and_deviation(known_moments(x, torch.zeros(1), torch.ones(1)), torch.zeros(1), torch.ones(1))
    assert (mean.tolist(), deviation.tolist()) == ([0], [0])
    assert largest_scale(torch.zeros(2, 128)).tolist() == [1, 1]
