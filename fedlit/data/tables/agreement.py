"""Agreement of clients with tables on columns, levels of categories, and mean and deviation, by sums alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlit.data.roster import agreed
from fedlit.data.samples import DatasetLayoutError
from fedlit.data.tables.columns import Columns
from fedlit.data.tables.features import Column, TableFeatures, numbers_of
from fedlit.data.tables.numbers import texts_of
from fedlit.federation import Federation, Summed

if TYPE_CHECKING:
    import pandas as pd

    from fedlit.functional.table_moments import Total

_EXACT = (
    "what tables agree on is exact: name the levels of each category in categories, and give statistics='own', or "
    "let a mechanism blur other channels alone"
)
LEVELS, MAGNITUDES, STATISTICS = (
    Summed(name, content, how_often="once", fixed=True, unblurred=_EXACT)
    for name, content in (
        ("levels", "which levels categories have, and how many clients have each"),
        ("magnitudes", "how many clients have numbers of which power of two"),
        ("statistics", "mean and deviation of all numbers, and how many are known"),
    )
)

_COUNTED = 1024
"""Levels that are counted as one, so that the number of levels is one of the small range of fixed-point numbers."""


def common_columns(facts: Mapping[str, Any], where_mixed: Callable[[str, Mapping[str, str]], str]) -> Columns:
    """Return the columns that all clients announced in `CSVDomains.facts`; a `DatasetLayoutError` if they differ.

    ``where_mixed`` takes a column and its type at each client to where texts stand beside numbers, for the error.
    """
    agreed("levels", facts, "name the same levels in categories at each client")
    tables: dict[str, Columns] = {name: table for each in facts.values() for name, table in each["columns"].items()}
    (first, columns), *others = tables.items()
    for name, table in others:
        if table.keys() != columns.keys():
            mine, theirs = ([each for each in a if each not in b] for a, b in ((columns, table), (table, columns)))
            raise DatasetLayoutError(
                f"tables of all clients must have the same columns, but {first!r} alone has {mine} and {name!r} alone "
                f"has {theirs}: rename them, or leave them out (leave_out)"
            )
    common: Columns = {}
    for column in columns:
        types = {name: table[column][0] for name, table in tables.items() if table[column][0] != "empty"}
        if not types:
            raise DatasetLayoutError(f"column {column!r} is empty at every client: leave it out (leave_out)")
        if len(set(types.values())) > 1:
            raise DatasetLayoutError(
                f"column {column!r} must hold the same at each client, but is {types}{where_mixed(column, types)}: "
                "name it in categories if it is one, or mend the texts among the numbers (missing_values has those "
                "for missing ones)"
            )
        common[column] = (next(iter(types.values())), any(table[column][1] for table in tables.values()))
    return common


def agree_on_levels(
    names: Sequence[str], levels_of: Callable[[str], Mapping[str, Sequence[str]]], total: Total
) -> dict[str, list[str]]:
    """Return the levels of categories at any client, sorted, from two sums over the channel ``"levels"``.

    ``names`` are the same in every process; ``levels_of`` a domain have at most 60 bytes each.

    Raises:
        DatasetLayoutError: If what was summed cannot be read.
    """
    from fedlit.functional.set_union import (
        read_union,
        union_cells,
        union_table,
    )  # data without tables need no such libraries

    def elements(domain: str) -> list[bytes]:
        return [
            names.index(name).to_bytes(2, "big") + level.encode()
            for name, levels in levels_of(domain).items()
            for level in levels
        ]

    found: dict[str, list[str]] = {name: [] for name in names}
    count = total("levels", lambda domain: torch.tensor([len(elements(domain)) / _COUNTED], dtype=torch.float64))
    cells = 0 if count is None else union_cells(round(float(count) * _COUNTED))
    table = total("levels", lambda domain: union_table(elements(domain), cells))
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


def total_over(federation: Federation, members: Callable[[str], Sequence[str]]) -> Total:
    """Return secure sums over the domains (``members``) of all clients of a run, also those absent from a round."""

    def total(channel: str, message: Callable[[str], Tensor]) -> Tensor | None:
        payloads = {
            client.name: {"table": torch.stack([message(name) for name in members(client.name)]).sum(dim=0)}
            for client in federation.local_clients
        }
        received = federation.mean(channel, payloads, absent_too=True)
        mean = next(iter(received.values()), None)
        return None if mean is None else len(federation.clients) * mean["table"].double().cpu()

    return total


def agree_on_features(
    columns: Columns,
    categories: Mapping[str, Sequence[str] | None],
    table_of: Callable[[str], pd.DataFrame],
    train_of: Callable[[str], Tensor],
    samples: Mapping[str, int],
    hosted: Sequence[str],
    total: Total,
    federated: bool,
    check_alike: Callable[[str, Sequence[str], str], None],
) -> dict[str, TableFeatures]:
    """Return what makes features of the table of each domain in ``hosted``.

    ``samples`` has the number of training samples of every domain, here or not; ``federated`` states whether mean and
    deviation are those of all clients; ``check_alike`` refuses levels that are written in two ways.
    """
    from fedlit.functional.table_moments import agree_on_moments, own_moments

    numbers = [name for name, (type_, _) in columns.items() if type_ == "number"]
    levels = {name: [*(categories.get(name) or ())] for name in columns if name not in numbers}
    asked = [name for name in levels if categories.get(name) is None]
    if asked:

        def levels_of(domain: str) -> dict[str, list[str]]:
            return {name: [*dict.fromkeys(texts_of(table_of(domain)[name]).dropna())] for name in asked}

        levels |= agree_on_levels(asked, levels_of, total)
        for name in asked:
            way_out = "write them alike in all tables, or name all levels in categories if they are different things"
            check_alike(f"column {name!r} has the levels", levels[name], way_out)
    features = tuple(
        Column(name, missing, None if type_ == "number" else tuple(levels[name]))
        for name, (type_, missing) in columns.items()
    )

    def train_numbers(domain: str) -> Tensor:
        return numbers_of(table_of(domain), numbers)[train_of(domain)]

    common = agree_on_moments(len(numbers), train_numbers, samples, total) if federated and numbers else None
    moments = {name: common or own_moments(train_numbers(name)) for name in hosted}
    return {
        name: TableFeatures(features, tuple(mean.tolist()), tuple(deviation.tolist()))
        for name, (mean, deviation) in moments.items()
    }
