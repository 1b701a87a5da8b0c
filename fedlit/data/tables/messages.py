"""Words for errors about tables: some values, their lines, and columns that are not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from fedlit.data.samples import DatasetLayoutError

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 5
"""Cells, lines or names that a message has of many."""


def some(values: Iterable[object]) -> str:
    """Return different ones of some values."""
    different = [*dict.fromkeys(values)]
    return f"{different[:SHOWN]}" + ("" if len(different) <= SHOWN else f" and {len(different) - SHOWN} more")


def lines(index: pd.Index[Any]) -> str:
    """Return where rows are in their file."""
    numbers, name = [*index], str(index.name or "row")
    more = "" if len(numbers) <= SHOWN else f" and {len(numbers) - SHOWN} more"
    return f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:SHOWN]))}{more}"


def cells(values: pd.Series[Any]) -> str:
    """Return different values of some cells, and where they are: the index has the line or row of each."""
    return f"{some(values)} ({lines(values.index)})"


def check_once(values: Sequence[Any], what: str, way_out: str) -> None:
    """Raise a `DatasetLayoutError` if a value occurs more than once."""
    twice = [value for value, times in Counter(values).items() if times > 1]
    if twice:
        more = " and more" if len(twice) > SHOWN else ""
        raise DatasetLayoutError(f"{what} {twice[:SHOWN]}{more} more than once: {way_out}")


def column(table: pd.DataFrame, name: str, argument: str | None, where: str) -> pd.Series[Any]:
    """Return a column that an argument names, or (``None``) that training had.

    Raises:
        DatasetLayoutError: If there is none.
    """
    if name in table:
        return table[name]
    close = get_close_matches(name, map(str, table.columns), 1)
    if argument is None:
        raise DatasetLayoutError(
            f"{where} has no column {name!r}, which is a feature of the training data, but {[*table.columns]}: "
            + (f"rename {close[0]!r} if it is meant" if close else "add it, with empty cells if it is not known")
        )
    raise DatasetLayoutError(
        f"{argument}={name!r} is no column of {where}, which has {[*table.columns]}: "
        + (f"did you mean {close[0]!r}?" if close else f"name one of them in {argument}")
    )
