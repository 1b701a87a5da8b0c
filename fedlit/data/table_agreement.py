"""What clients with tables agree on by sums alone: levels of categories, and mean and deviation of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedlit.data.base import DatasetLayoutError
from fedlit.functional.set_union import read_union, union_cells, union_table
from fedlit.functional.table_moments import (
    known_moments,
    largest_scale,
    mean_and_deviation,
    needed_exponents,
    spread_about,
)

Total = Callable[[str, Callable[[str], Tensor]], "Tensor | None"]
"""Sum over all domains of what each sends over a channel; ``None`` in a process that hosts no client."""

_PASSES = 3
"""Over the numbers, each about the mean that the one before has found."""

_COUNTED = 1024
"""Levels that are counted as one, so that the number of levels is one of the small range of fixed-point numbers."""


def agree_on_levels(
    names: Sequence[str], levels_of: Callable[[str], Mapping[str, Sequence[str]]], total: Total
) -> dict[str, list[str]]:
    """Levels of categories at any client, sorted, from two sums over the channel ``"levels"``.

    Args:
        names: Of the categories, the same in every process.
        levels_of: What a domain has, by category; each of at most 60 bytes.
        total: Of all domains.

    Raises:
        DatasetLayoutError: If what was summed cannot be read.
    """

    def own(domain: str) -> list[bytes]:
        return [
            names.index(name).to_bytes(2, "big") + level.encode()
            for name, levels in levels_of(domain).items()
            for level in levels
        ]

    found: dict[str, list[str]] = {name: [] for name in names}
    count = total("levels", lambda domain: torch.tensor([len(own(domain)) / _COUNTED], dtype=torch.float64))
    cells = 0 if count is None else union_cells(round(float(count) * _COUNTED))
    table = total("levels", lambda domain: union_table(own(domain), cells))
    if table is None:
        return found
    try:
        union = read_union(table, cells)
    except ValueError as error:
        raise DatasetLayoutError(
            f"the levels of {[*names]} could not be read from the sum over all clients ({error}): give them in "
            "categories"
        ) from error
    for element in union:
        found[names[int.from_bytes(element[:2], "big")]].append(element[2:].decode())
    return found


def agree_on_moments(
    columns: int, numbers_of: Callable[[str], Tensor], samples: Mapping[str, int], total: Total
) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each number over all samples, from sums over ``"magnitudes"`` and ``"statistics"``.

    Args:
        columns: How many numbers d.
        numbers_of: Those of a domain's training samples, shape (n, d), NaN where one is missing.
        samples: The n of each domain.
        total: Of all domains.

    Returns:
        Two of shape (d,), float64; the deviation is 0 where a column is constant.
    """
    everyone = sum(samples.values())
    mean = deviation = torch.zeros(columns, dtype=torch.float64)
    for _ in range(_PASSES):

        def magnitudes(domain: str, mean: Tensor = mean) -> Tensor:
            return needed_exponents(spread_about(numbers_of(domain), mean))

        needed = total("magnitudes", magnitudes)
        scale = torch.ones_like(mean) if needed is None else largest_scale(needed)

        def share(domain: str, mean: Tensor = mean, scale: Tensor = scale) -> Tensor:
            return samples[domain] / everyone * known_moments(numbers_of(domain), mean, scale)

        moments = total("statistics", share)
        if moments is not None:
            mean, deviation = mean_and_deviation(moments, mean, scale)
    return mean, deviation


def own_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column of known values, shape (n, d), NaN where one is missing."""
    zero = torch.zeros(x.shape[1], dtype=torch.float64)
    mean, _ = mean_and_deviation(known_moments(x, zero, zero + 1), zero, zero + 1)
    spread = spread_about(x, mean).nan_to_num(0.0)
    scale = torch.where(spread > 0, spread, 1.0)
    return mean_and_deviation(known_moments(x, mean, scale), mean, scale)
