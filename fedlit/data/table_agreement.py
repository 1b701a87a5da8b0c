"""Levels of categories, on which clients with tables agree by sums alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fedlit.data.base import DatasetLayoutError
from fedlit.functional.set_union import read_union, union_cells, union_table
from fedlit.functional.table_moments import Total

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
