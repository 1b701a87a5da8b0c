"""Columns of a table: which are numbers or categories, their labels, and refusal of those that are neither."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedlit.data.samples import check_data, refuse_data
from fedlit.data.tables.values import SHOWN, NumberFormat, cells, lines, some, texts_of
from fedlit.federation.labels import UNLABELLED

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

_MAX_CLASSES = 50
"""Different labels that may be classes without being named."""

_DAY = (
    r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2(?:\d{4}|\d{2})|"
    r"\d{1,2}[-/. ]+[^\W\d]{3,9}\.?[-/. ]+(?:\d{4}|\d{2})"
)
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm])?"
_MOMENT = re.compile(rf"(?:{_DAY})(?:[T ]+{_TIME}(?:Z|\s?[-+]\d{{2}}:?\d{{2}})?)?|{_TIME}")
"""Dates and times, as programs export them."""

_ODD_NUMBER = re.compile(r"^[-+]?\d[\d.,]*\s?[%€$£]?$")


def column(table: pd.DataFrame, name: str, argument: str, where: str) -> pd.Series[Any]:
    """Return a column that an argument, or the training data, name; refuse a table without it."""
    if name not in table:
        close = get_close_matches(name, map(str, table.columns), 1)
        way_out = f"did you mean {close[0]!r}?" if close else "add the column, with empty cells if it is not known"
        refuse_data(argument, f"a column of {where}, which has {[*table.columns]}", repr(name), way_out)
    return table[name]


def type_of(name: str, values: pd.Series[Any], where: str, is_named: bool, numbers: NumberFormat) -> ColumnType:
    """Return the type of a column as `TableReader.read` returns it; ``is_named`` if the user calls it a category.

    Raises:
        DatasetLayoutError: If it has none.
    """
    import pandas as pd

    known, what = values.dropna(), f"{name} (column of {where})"
    if not len(known):
        return "empty"
    if is_named or pd.api.types.is_bool_dtype(known) or {*map(type, known)} == {bool}:
        return "category"
    if pd.api.types.is_numeric_dtype(known):
        large = known[known.abs() > MAX_NUMBER]
        way_out = (
            "name them in missing_values if they stand for missing ones, mend them, or name the column in leave_out"
        )
        check_data(not len(large), what, f"of numbers up to {MAX_NUMBER:g} in absolute value", cells(large), way_out)
        return "number"
    is_category = isinstance(known.dtype, pd.CategoricalDtype)
    other = next((each for each in map(type, known) if not issubclass(each, str | int | float)), None)
    if pd.api.types.is_datetime64_any_dtype(known) or isinstance(known.iloc[0], date | time | timedelta):
        refuse_data(
            what, "of numbers or texts", "times", "turn them into numbers, such as years, or leave it out (leave_out)"
        )
    if other is not None and not is_category:
        way_out = "turn them into columns of numbers or texts, or leave it out (leave_out)"
        refuse_data(what, "of numbers or texts", f"values of type {other.__name__}", way_out)
    texts = texts_of(known).dropna()
    if not is_category:
        _check_no_numbers(what, texts, numbers)
    different = texts.nunique()
    if different > MAX_LEVELS or (different > 20 and 2 * different > len(texts)):
        way_out = "name it in leave_out if it is free text, a date or a name, or in categories if it is one"
        refuse_data(what, "of a few different texts", f"{different}, such as {some(texts)}", way_out)
    return "category"


def _check_no_numbers(what: str, texts: pd.Series[Any], numbers: NumberFormat) -> None:
    """Refuse texts of which some or all are dates, or numbers that are not in the format of the federation."""
    others = texts[numbers.numbers(texts).isna()]
    way_out = _way_out(texts, others, numbers) if len(others) else ""
    if way_out:
        groups = f" and thousands={numbers.thousands!r}" if numbers.thousands else ""
        rule = f"of numbers with decimal={numbers.decimal!r}{groups}"
        refuse_data(what, rule, cells(others), f"{way_out}; if all are categories, name the column in categories")


def _way_out(texts: pd.Series[Any], others: pd.Series[Any], numbers: NumberFormat) -> str:
    """What makes numbers of ``texts``, of which ``others`` are none; empty if they may be levels."""
    different, rest = [*dict.fromkeys(texts)], [*dict.fromkeys(others)]
    if all(map(_MOMENT.fullmatch, different)):
        return "turn dates and times into numbers, such as years or hours, or name the column in leave_out"
    if way_out := numbers.way_out(different):
        return way_out
    if all(map(_ODD_NUMBER.match, different)):
        return "take all signs but that before decimals out, and name that in decimal if it is no point"
    if unit := numbers.unit(rest):
        return f"write numbers without the unit {unit!r}"
    # mostly numbers, or many different ones beside few texts: the texts are no levels
    mostly = 2 * len(others) <= len(texts) and len(different) > 2 + len(rest)
    if mostly or (len(rest) <= SHOWN and len(different) > 10 + len(rest)):
        return "mend these texts, name those for missing values in missing_values, or the column in leave_out"
    return ""


def check_levels(name: str, levels: list[str], named: Collection[str] | None, may_agree: bool, where: str) -> None:
    """Refuse levels of a category that other clients could not know: not ``named`` by the user, nor agreed on."""
    what = f"{name} (column of {where})"
    way_out = "it is what missing values are called: name it in missing_values, or rename it"
    check_data(MISSING not in levels, what, f"without the level {MISSING!r}", some(levels), way_out)
    if named is not None:
        unknown = [level for level in levels if level not in named]
        way_out = "add them at each client, or give null there to agree on the levels"
        check_data(not unknown, what, f"of levels that categories[{name!r}] has", some(unknown), way_out)
        return
    way_out = "give its levels in categories, or null there to agree on them, or name it in leave_out"
    check_data(may_agree, what, "of numbers, or named in categories", f"texts such as {some(levels)}", way_out)
    long = [level for level in levels if len(level.encode()) > MAX_LEVEL_BYTES]
    way_out = "shorten it, give its levels in categories, or leave it out"
    shown = f"one that begins with {long[0][:20]!r}" if long else ""
    check_data(not long, what, f"of levels up to {MAX_LEVEL_BYTES} bytes to be agreed on", shown, way_out)


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


@dataclass(frozen=True)
class LabelReader:
    """Reads labels of the tables of a federation; ``classes`` if the user named them. The target may lack labels."""

    label: str
    numbers: NumberFormat
    classes: Sequence[str] | None
    target: str

    def _values(self, table: pd.DataFrame, client: str, where: str) -> pd.Series[Any]:
        if self.label not in table and client == self.target:
            return table.iloc[:, 0].map(lambda value: None)
        return column(table, self.label, "label", where)

    def texts(self, table: pd.DataFrame, client: str, where: str) -> pd.Series[Any]:
        """Return classes as texts, missing where unknown; refuse what does not look like classes and is not named."""
        texts = texts_of(self._values(table, client, where))
        known = texts.dropna()
        numbers = self.numbers.numbers(known)
        others, fractions = known[numbers.isna()], known[numbers % 1 != 0]
        if self.classes is None:
            way_out = self.numbers.way_out({*known}) if len(others) else ""
            if not way_out and ((len(fractions) and not len(others)) or known.nunique() > _MAX_CLASSES):
                way_out = "give task: regression, or choose another column"
            if way_out:
                shown = f"{known.nunique()} different values, such as {cells(fractions if len(fractions) else known)}"
                way_out += "; if they are names, name the classes in classes"
                refuse_data(self._what(where), "of a few classes", shown, way_out)
        if str(UNLABELLED) in (self.classes or ()):
            return texts
        return texts.where(self.numbers.numbers(texts) != UNLABELLED, None)

    def class_numbers(self, table: pd.DataFrame, classes: Sequence[str], client: str, where: str) -> Tensor:
        """Return the number of each row's class, int64, shape (n,), -1 where it is not known."""
        texts = self.texts(table, client, where)
        unknown = texts[texts.notna() & ~texts.isin([*classes])]
        rule, way_out = f"of the classes {[*classes]}", "name all in classes, or mend the labels"
        check_data(not len(unknown), self._what(where), rule, cells(unknown), way_out)
        self._check_known(texts, client, where)
        number_of = {name: number for number, name in enumerate(classes)}
        return torch.tensor([number_of.get(text, UNLABELLED) for text in texts], dtype=torch.int64)

    def numbers_to_predict(self, table: pd.DataFrame, client: str, where: str) -> Tensor:
        """Return the number of each row, float64, shape (n,), NaN where it is not known."""
        values = self._values(table, client, where)
        numbers = self.numbers.numbers(values)
        wrong = values[(numbers.isna() & values.notna()) | (numbers.abs() == float("inf"))]
        if len(wrong):
            rule = f"of finite numbers with decimal={self.numbers.decimal!r}"
            way_out = self.numbers.way_out({*texts_of(wrong)}) if numbers.isna().any() else ""
            way_out = way_out or "mend them, name them in missing_values, or give task: classification"
            refuse_data(self._what(where), rule, cells(wrong), way_out)
        self._check_known(numbers, client, where)
        return torch.tensor([*numbers.astype(float)], dtype=torch.float64)

    def _check_known(self, values: pd.Series[Any], client: str, where: str) -> None:
        """Refuse missing labels of a source."""
        missing = values.index[values.isna()]
        shown = (
            f"none (empty, -1, or a text for missing values) in {len(missing)} of {len(values)} rows, {lines(missing)}"
        )
        way_out = f"leave these rows out, make {client!r} the target, or name all in classes if one of these is a class"
        holds = client == self.target or not len(missing)
        check_data(holds, self._what(where), f"in each row but of the target ({self.target!r})", shown, way_out)

    def _what(self, where: str) -> str:
        return f"label ({self.label!r} of {where})"
