"""Cells of tables: numbers by the signs for decimals and thousands that the user names, and texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlit.checks import check
from fedlit.data.samples import check_data
from fedlit.federation.names import check_list, not_text

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 5
"""Cells, lines or names that a message has of many."""

_SAME_SIGNS = {" ": " \u00a0\u2009\u202f", "'": "'\u2019"}
"""Signs that count as one: blanks of several widths, and apostrophes."""

_NAMES = {".": "points", ",": "commas", " ": "blanks", "'": "apostrophes"}
_FORMATS = tuple((decimal, thousands) for decimal in ".," for thousands in ("", *" .,'") if thousands != decimal)
"""In which numbers are usually written; those without a sign for thousands come first."""

_MEASURE = re.compile(r"([$€£]?)\s*([-+\u2212]?[\d.,'\u2019\s]*\d)(\s*)(\D{0,12})")
_MAX_CATEGORIES, _MAX_CATEGORIES_ATTACHED = 2, 10
"""Different numbers up to which cells with a unit may be categories: after a blank, and right behind the number."""


@dataclass(frozen=True)
class NumberFormat:
    """How numbers are written in the tables of a federation.

    Exponents (``1.5e-3``) and a sign in front are read whatever the format, the minus of typesetting included.

    Args:
        decimal: Sign before the decimals.
        thousands: Sign between groups of three digits; empty for none. ``None`` takes the point where ``decimal`` is a
            comma, and otherwise none. A blank stands for blanks of any width.

    Raises:
        ValueError: If one of the signs cannot be one, or both are the same.
    """

    decimal: str = "."
    thousands: str | None = None

    def __post_init__(self) -> None:
        for name, sign, may_lack in (("decimal", self.decimal, False), ("thousands", self.thousands or "", True)):
            is_sign = len(sign) == 1 and not re.fullmatch(r"[\w+\-\u2212\"]", sign)
            check(is_sign or (may_lack and not sign), name, "one sign, such as '.' or ',', no letter or digit", sign)
        if self.thousands is None:
            object.__setattr__(self, "thousands", "." if self.decimal == "," else "")
        way_out = "give the other one, or thousands='' where numbers have no groups"
        check(self.thousands != self.decimal, "thousands", "another sign than decimal", self.thousands, way_out)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        signs = _SAME_SIGNS.get(self.thousands or "", self.thousands)
        # no zero in front: 0.123 beside a decimal comma is of another format, and not 123
        groups = rf"|[1-9]\d{{0,2}}(?P<by>[{re.escape(signs)}])\d{{3}}(?:(?P=by)\d{{3}})*" if signs else ""
        return re.compile(
            rf"(?P<sign>[-+\u2212]?)(?P<whole>\d*{groups})(?:{re.escape(self.decimal)}(?P<decimals>\d*))?"
            r"(?P<exponent>[eE][-+]?\d+)?"
        )

    def number(self, text: str) -> float | None:
        """Return the number that a text is; ``None`` if it is none in this format."""
        match = self._pattern.fullmatch(text.strip())
        if match is None:
            return float(text) if re.fullmatch(r"[-+]?inf(inity)?", text.strip(), re.IGNORECASE) else None
        whole, decimals = re.sub(r"\D", "", match["whole"]), match["decimals"] or ""
        if not whole + decimals:
            return None
        sign = "-" if match["sign"] in ("-", "\u2212") else ""
        return float(f"{sign}{whole or 0}.{decimals or 0}{match['exponent'] or ''}")

    def have_groups(self, texts: pd.Series[Any]) -> bool:
        """Return whether one of some numbers is written with a sign for thousands."""
        signs = re.escape(_SAME_SIGNS.get(self.thousands or "", self.thousands or ""))
        if not signs:
            return False
        matches = map(self._pattern.fullmatch, texts[texts.str.contains(f"[{signs}]")].str.strip())
        return any(match and match["whole"] and not match["whole"].isdigit() for match in matches)

    def numbers(self, values: pd.Series[Any]) -> pd.Series[Any]:
        """Return the number of each value, float64; NaN where it is missing, or none in this format."""
        import pandas as pd

        if holds_numbers(values):
            return pd.Series(values.to_numpy(dtype=np.float64, na_value=np.nan), index=values.index)
        entries = values.to_numpy(dtype=object)
        read = {text: self.number(text) for text in {each for each in entries if isinstance(each, str)}}

        def number(value: Any) -> float | None:
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            return read[value] if isinstance(value, str) else float(value) if is_number else None

        return pd.Series([number(value) for value in entries], index=values.index, dtype=np.float64)

    def all_numbers(self, values: pd.Series[Any]) -> pd.Series[Any] | None:
        """Return the number of each value, NaN where it is missing; ``None`` if one is none in this format."""
        import pandas as pd

        if holds_texts(values):
            with suppress(ValueError):  # whole numbers keep all of their digits
                other = self.decimal != "."  # 1.5 is no number beside a decimal comma
                return pd.to_numeric(values.str.translate(str.maketrans(f".{self.decimal}", ";.")) if other else values)
        numbers = self.numbers(values)
        return numbers if numbers[values.notna()].notna().all() else None

    def text(self, number: float) -> str:
        """Return a number as a table has it, a whole one without decimals."""
        return str(int(number)) if float(number).is_integer() else str(number).replace(".", self.decimal)

    def without_decimals(self, text: str) -> str:
        """Remove decimals that are zeros: a table with missing values may have 1.0 for another's 1."""
        return re.sub(rf"^(-?\d+){re.escape(self.decimal)}0+$", r"\1", text)

    # ---------------------------------------------------------------- texts that are no numbers in this format

    def way_out(self, texts: Collection[str]) -> str:
        """Return what to give so that texts are numbers; empty if no format does it."""
        formats: dict[tuple[float | None, ...], NumberFormat] = {}  # one for each way to understand the texts
        for decimal, thousands in _FORMATS:
            other = NumberFormat(decimal, thousands)
            numbers = tuple(map(other.number, texts))
            if None not in numbers:
                formats.setdefault(numbers, other)
        ways = [
            (f"the {_NAMES[each.thousands or '']} separate thousands", f"thousands={each.thousands!r}")
            if each.decimal == self.decimal
            else (f"the {_NAMES[each.decimal]} stand before decimals", each._arguments())
            for each in formats.values()
        ]
        if len(ways) == 1:
            return f"give {ways[0][1]} if all tables are written so, or write this one as the others"
        return "; ".join(f"if {what}, give {arguments}" for what, arguments in ways)

    def _arguments(self) -> str:
        usual = self.thousands == NumberFormat(self.decimal).thousands or not self.thousands
        return f"decimal={self.decimal!r}" + ("" if usual else f" and thousands={self.thousands!r}")

    def unit(self, texts: Collection[str]) -> str | None:
        """Return what stands beside the number in each text, if that is the same in all and they are no categories."""
        matches = [_MEASURE.fullmatch(text.strip()) for text in texts]
        parts = [match.groups() for match in matches if match]
        units = {(before, unit.strip()) for before, _, _, unit in parts}
        if len(parts) < len(texts) or len(units) != 1:
            return None
        before, unit = next(iter(units))
        is_apart = bool(before) or not unit[:1].isalpha() or all(blank for _, _, blank, _ in parts)
        many = len({number for _, number, _, _ in parts}) > (_MAX_CATEGORIES if is_apart else _MAX_CATEGORIES_ATTACHED)
        return (before or unit or None) if many else None


def holds_numbers(values: pd.Series[Any]) -> bool:
    """Return whether a column has a type of numbers."""
    import pandas as pd

    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def holds_texts(values: pd.Series[Any]) -> bool:
    """Return whether all available values of a column are texts."""
    import pandas as pd

    return isinstance(values.dtype, pd.StringDtype) or all(isinstance(value, str) for value in values.dropna())


def texts_of(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return values as texts without outer blanks; missing and empty ones as None; whole numbers without decimals."""

    def text(value: Any) -> str | None:
        is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
        return (str(int(value)) if is_whole else str(value).strip()) or None

    return values.astype(object).map(text, na_action="ignore").where(values.notna(), None)


def as_texts(argument: str, values: Sequence[object], numbers: NumberFormat) -> list[str]:
    """Return values as texts; numbers are the texts that tables of this format have.

    Raises:
        TypeError: If one is neither, such as a truth value of YAML.
    """
    check_list(argument, values if isinstance(values, str) else None)
    texts = []
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool):
            texts.append(numbers.text(value))
        elif (problem := not_text(value)) is not None:
            raise TypeError(f"{argument} must have texts, {problem}")
        else:
            texts.append(str(value).strip())
    return texts


def named_levels(argument: str, levels: Sequence[object], numbers: NumberFormat) -> list[str]:
    """Return names of classes or levels, each once, as `as_texts` does, whole numbers without decimals."""
    names = [numbers.without_decimals(name) for name in as_texts(argument, levels, numbers)]
    check_once(names, f"{argument} has", "name each once")
    return names


# ---------------------------------------------------------------- for errors


def some(values: Iterable[object]) -> str:
    """Return different ones of some values."""
    different = [*dict.fromkeys(values)]
    return f"{different[:SHOWN]}{_more(different)}"


def lines(index: pd.Index[Any]) -> str:
    """Return where rows are in their file."""
    name = f"{index.name or 'row'}{'s' if len(index) > 1 else ''}"
    return f"{name} {', '.join(map(str, index[:SHOWN]))}{_more(index)}"


def _more(values: Sequence[object] | pd.Index[Any]) -> str:
    return f" and {len(values) - SHOWN} more" if len(values) > SHOWN else ""


def cells(values: pd.Series[Any]) -> str:
    """Return different values of some cells, and where they are: the index has the line or row of each."""
    return f"{some(values)} ({lines(values.index)})"


def check_once(values: Sequence[Any], what: str, way_out: str) -> None:
    """Raise a `DatasetLayoutError` if a value occurs more than once."""
    twice = [value for value, times in Counter(values).items() if times > 1]
    check_data(not twice, what, "different", f"{some(twice)} more than once", way_out)
