"""What the columns of a table hold, and refusal of those that are neither numbers nor categories."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from datetime import date, time, timedelta
from typing import TYPE_CHECKING, Any, Literal

from fedlit.data.samples import DatasetLayoutError
from fedlit.data.tables.messages import SHOWN, cells, lines
from fedlit.data.tables.numbers import NumberFormat, texts_of

if TYPE_CHECKING:
    import pandas as pd

ColumnType = Literal["number", "category", "empty"]

Columns = dict[str, tuple[ColumnType, bool]]
"""Type of each column that is a feature, and whether any of it is missing."""

MISSING = "(missing)"
"""Level of a category that is not known, where that occurs at some client."""

MAX_LEVELS = 100
"""Different texts that a column may have without being called a category."""

MAX_LEVEL_BYTES = 60
"""Of a level that clients agree on."""

MAX_NUMBER = 1e150
"""Of numbers in absolute value: squares of larger ones are infinite."""

_DAY = (
    r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2(?:\d{4}|\d{2})|"
    r"\d{1,2}[-/. ]+[^\W\d]{3,9}\.?[-/. ]+(?:\d{4}|\d{2})"
)
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm])?"
_MOMENT = re.compile(rf"(?:{_DAY})(?:[T ]+{_TIME}(?:Z|\s?[-+]\d{{2}}:?\d{{2}})?)?|{_TIME}")
"""Dates and times, as programs export them."""

_ODD_NUMBER = re.compile(r"^[-+]?\d[\d.,]*\s?[%€$£]?$")


def type_of(values: pd.Series[Any], where: str, is_named: bool, numbers: NumberFormat) -> ColumnType:
    """Return the type of a column as `TableReader.read` returns it; ``is_named`` if the user calls it a category.

    Raises:
        DatasetLayoutError: If it has none.
    """
    import pandas as pd

    known = values.dropna()
    if not len(known):
        return "empty"
    if is_named or pd.api.types.is_bool_dtype(known) or {*map(type, known)} == {bool}:
        return "category"
    if pd.api.types.is_numeric_dtype(known):
        _check_finite(known, where)
        return "number"
    if pd.api.types.is_datetime64_any_dtype(known) or isinstance(known.iloc[0], date | time | timedelta):
        raise DatasetLayoutError(
            f"{where} has times: turn them into numbers, such as years, or leave the column out (leave_out)"
        )
    is_category = isinstance(known.dtype, pd.CategoricalDtype)
    other = next((each for each in map(type, known) if not issubclass(each, str | int | float)), None)
    if other is not None and not is_category:
        raise DatasetLayoutError(
            f"{where} has values of type {other.__name__}, which are neither numbers nor texts: turn them into "
            "columns of numbers or texts, or leave the column out (leave_out)"
        )
    texts = texts_of(known).dropna()
    if not is_category:
        if len(texts) and all(map(_MOMENT.fullmatch, texts)):
            raise DatasetLayoutError(
                f"{where} has dates or times, such as {cells(texts)}: turn them into numbers, such as years or hours, "
                "leave the column out (leave_out), or name it in categories if it is one"
            )
        _check_no_numbers(texts, where, numbers)
    different = [*dict.fromkeys(texts)]
    if len(different) > MAX_LEVELS or (len(different) > 20 and 2 * len(different) > len(texts)):
        raise DatasetLayoutError(
            f"{where} has {len(different)} different texts, such as {different[:3]}: "
            "leave it out if it is free text, a date or a name (leave_out), or name it in categories if it is one"
        )
    return "category"


def _check_finite(known: pd.Series[Any], where: str) -> None:
    infinite = known[known.abs() == float("inf")]
    if len(infinite):
        raise DatasetLayoutError(
            f"{where} has infinite numbers ({lines(infinite.index)}): mend them, or leave the column out (leave_out)"
        )
    large = known[known.abs() > MAX_NUMBER]
    if len(large):
        raise DatasetLayoutError(
            f"{where} has numbers above {MAX_NUMBER:g} in absolute value, of which there is no deviation: "
            f"{cells(large)}; name them in missing_values if they stand for missing ones, mend them, or leave the "
            "column out (leave_out)"
        )


def _check_no_numbers(texts: pd.Series[Any], where: str, numbers: NumberFormat) -> None:
    """Refuse texts of which some or all are numbers, but not in the format of the federation."""
    is_none = numbers.numbers(texts).isna()
    others = texts[is_none]
    if not len(others):
        return
    different, rest = [*dict.fromkeys(texts)], [*dict.fromkeys(others)]
    way_out, unit = numbers.way_out(different), numbers.unit(rest)
    last = "if all are categories, name the column in categories"
    if way_out or all(map(_ODD_NUMBER.match, different)):
        way_out = way_out or "take all signs but that before decimals out, and name that in decimal if it is no point"
        raise DatasetLayoutError(
            f"{where} has numbers that are written as {cells(others)}, with decimal={numbers.decimal!r}"
            + (f" and thousands={numbers.thousands!r}" if numbers.thousands else "")
            + f": {way_out}; {last}"
        )
    if unit is not None:
        raise DatasetLayoutError(
            f"{where} has numbers with the unit {unit!r}, such as {cells(others)}: write numbers alone; {last}"
        )
    # mostly numbers, or many different ones beside few texts: the texts are no levels
    mostly = 2 * int((~is_none).sum()) >= len(texts) and len(different) > 2 + len(rest)
    if mostly or (len(rest) <= SHOWN and len(different) > 10 + len(rest)):
        raise DatasetLayoutError(
            f"{where} has numbers and texts such as {cells(others)}: if these stand for missing values, name them in "
            f"missing_values; if they are numbers, write them with decimal={numbers.decimal!r}; {last}; or leave it "
            "out (leave_out)"
        )


def check_levels(name: str, levels: list[str], named: Collection[str] | None, may_agree: bool, where: str) -> None:
    """Refuse levels of a category that other clients could not know: not ``named`` by the user, nor agreed on."""
    whose = f"column {name!r} of {where}"
    if MISSING in levels:
        raise DatasetLayoutError(
            f"{whose} has {MISSING!r}, which is what missing values are called: name it in missing_values, or rename it"
        )
    if named is not None:
        unknown = [level for level in levels if level not in named]
        if unknown:
            raise DatasetLayoutError(
                f"{whose} has {unknown[:SHOWN]}, which categories[{name!r}] lack: add them at each client, or give "
                "null there to agree on the levels"
            )
        return
    if not may_agree:
        raise DatasetLayoutError(
            f"{whose} has texts such as {levels[:SHOWN]}, and categories do not name it: give its levels there, or "
            "null to agree on them, or leave it out (leave_out)"
        )
    long = next((level for level in levels if len(level.encode()) > MAX_LEVEL_BYTES), None)
    if long is not None:
        raise DatasetLayoutError(
            f"{whose} has a level of {len(long.encode())} bytes, {long[:20]!r}..., and {MAX_LEVEL_BYTES} can be agreed "
            "on: shorten it, give its levels in categories, or leave it out"
        )


def warn_of_constants(rows: pd.DataFrame, columns: Columns, numbers: NumberFormat, where: str) -> None:
    """Warn of columns from which nothing can be learnt in a client's training samples."""
    constant, unknown = [], []
    for name, (type_, _) in columns.items():
        known = rows[name].dropna()
        values = (numbers.numbers(known) if type_ == "number" else known).unique()[:2]
        if len(values) == 1:
            constant.append(f"{name!r} (always {numbers.text(values[0]) if type_ == 'number' else values[0]})")
        elif not len(values):
            unknown.append(repr(name))
    for names, what in ((constant, "holds one value in"), (unknown, "is missing in all of")):
        if names:
            each = f"column {names[0]}" if len(names) == 1 else f"each of the columns {', '.join(names)}"
            warnings.warn(
                f"{each} {what} the {len(rows)} training samples of {where}, and shows nothing there: see whether it "
                "was exported rightly, or leave it out at all clients (leave_out)",
                stacklevel=2,
            )
