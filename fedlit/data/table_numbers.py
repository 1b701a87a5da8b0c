"""Numbers in texts: read by the signs that were given for decimals and thousands, and by no others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 5
"""Cells, lines or names that a message has of many."""

_LIKE = {" ": " \u00a0\u2009\u202f", "'": "'\u2019"}
"""Signs that are one: blanks of several widths, and apostrophes."""

_SIGNS = " .,'"
_FORMATS = tuple((decimal, thousands) for decimal in ".," for thousands in ("", *_SIGNS) if thousands != decimal)
"""In which numbers are usually written; those without a sign for thousands come first."""

_MEASURE = re.compile(r"([$€£]?)\s*([-+\u2212]?[\d.,'\u2019\s]*\d)(\s*)(\D{0,12})")
_FEW, _MANY = 2, 10
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
        for name, sign, least in (("decimal", self.decimal, 1), ("thousands", self.thousands or "", 0)):
            if not least <= len(sign) <= 1 or re.fullmatch(r"[\w+\-\u2212\"]", sign):
                raise ValueError(f"{name} must be one sign, such as '.' or ',', and no letter or digit, got {sign!r}")
        if self.thousands is None:
            object.__setattr__(self, "thousands", "." if self.decimal == "," else "")
        if self.thousands == self.decimal:
            raise ValueError(
                f"thousands and decimal must be different signs, got {self.decimal!r} for both: give the other one, or "
                "thousands='' where numbers have no groups"
            )

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        signs = _LIKE.get(self.thousands or "", self.thousands)
        # no zero in front: 0.123 beside a decimal comma is of another format, and not 123
        groups = rf"|[1-9]\d{{0,2}}(?P<by>[{re.escape(signs)}])\d{{3}}(?:(?P=by)\d{{3}})*" if signs else ""
        return re.compile(
            rf"(?P<sign>[-+\u2212]?)(?P<whole>\d*{groups})(?:{re.escape(self.decimal)}(?P<decimals>\d*))?"
            r"(?P<exponent>[eE][-+]?\d+)?"
        )

    def number(self, text: str) -> float | None:
        """The number that a text is; ``None`` if it is none in this format."""
        found = self._pattern.fullmatch(text.strip())
        if found is None:
            return float(text) if re.fullmatch(r"[-+]?inf(inity)?", text.strip(), re.IGNORECASE) else None
        whole, decimals = re.sub(r"\D", "", found["whole"]), found["decimals"] or ""
        if not whole + decimals:
            return None
        sign = "-" if found["sign"] in ("-", "\u2212") else ""
        return float(f"{sign}{whole or 0}.{decimals or 0}{found['exponent'] or ''}")

    def has_groups(self, text: str) -> bool:
        """Whether a number is written with a sign for thousands."""
        found = self._pattern.fullmatch(text.strip())
        return found is not None and not found["whole"].isdigit() and found["whole"] != ""

    def numbers(self, values: pd.Series[Any]) -> pd.Series[Any]:
        """The number of each value, float64; NaN where it is missing, or none in this format."""
        import pandas as pd

        if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
            return pd.Series(values.to_numpy(dtype=np.float64, na_value=np.nan), index=values.index)
        read = {text: self.number(text) for text in {value for value in values if isinstance(value, str)}}

        def number(value: Any) -> float:
            if isinstance(value, str):
                found = read[value]
                return np.nan if found is None else found
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            return float(value) if is_number else np.nan

        return pd.Series([number(value) for value in values], index=values.index, dtype=np.float64)

    def text(self, number: float) -> str:
        """A number as a table has it, a whole one without decimals."""
        return str(int(number)) if float(number).is_integer() else str(number).replace(".", self.decimal)

    def without_decimals(self, text: str) -> str:
        """A whole number without decimals that are zeros: a table with missing values may have 1.0 for another's 1."""
        return re.sub(rf"^(-?\d+){re.escape(self.decimal)}0+$", r"\1", text)

    # ---------------------------------------------------------------- texts that are no numbers in this format

    def others(self, texts: Collection[str]) -> list[NumberFormat]:
        """Formats in which all texts are numbers, one for each way to understand them; the plainest first."""
        ways: dict[tuple[float | None, ...], NumberFormat] = {}
        for decimal, thousands in _FORMATS:
            each = NumberFormat(decimal, thousands)
            found = tuple(map(each.number, texts))
            if None not in found:
                ways.setdefault(found, each)
        return [*ways.values()]

    def way_out(self, texts: Collection[str]) -> str:
        """What to give so that texts are numbers; empty if no format does it."""
        ways = [
            (f"the {_NAMES[each.thousands or '']} separate thousands", f"thousands={each.thousands!r}")
            if each.decimal == self.decimal
            else (f"the {_NAMES[each.decimal]} stand before decimals", each._arguments())
            for each in self.others(texts)
        ]
        if len(ways) == 1:
            return f"give {ways[0][1]} if all tables are written so, or write this one as the others"
        return "; ".join(f"if {what}, give {arguments}" for what, arguments in ways)

    def _arguments(self) -> str:
        usual = self.thousands == NumberFormat(self.decimal).thousands or not self.thousands
        return f"decimal={self.decimal!r}" + ("" if usual else f" and thousands={self.thousands!r}")

    def unit(self, texts: Collection[str]) -> str | None:
        """What stands beside the number in each text, if that is the same in all; ``None`` if they are no measures."""
        found = [_MEASURE.fullmatch(text.strip()) for text in texts]
        parts = [match.groups() for match in found if match is not None]
        units = {(before, unit.strip()) for before, _, _, unit in parts}
        if len(parts) < len(texts) or len(units) != 1:
            return None
        before, unit = next(iter(units))
        is_apart = bool(before) or not unit[:1].isalpha() or all(blank for _, _, blank, _ in parts)
        different = len({number for _, number, _, _ in parts})
        return (before or unit or None) if different > (_FEW if is_apart else _MANY) else None


_NAMES = {".": "points", ",": "commas", " ": "blanks", "'": "apostrophes"}


def cells(values: pd.Series[Any]) -> str:
    """Different values of some cells, and where they are, for messages: the index has the line or row of each."""
    return f"{some(values)} ({lines(values.index)})"


def some(values: Iterable[object]) -> str:
    """Different ones of some values, for messages."""
    different = [*dict.fromkeys(values)]
    return f"{different[:SHOWN]}" + ("" if len(different) <= SHOWN else f" and {len(different) - SHOWN} more")


def lines(index: pd.Index[Any]) -> str:
    """Where rows are in their file, for messages."""
    places, name = [*index], str(index.name or "row")
    more = "" if len(places) <= SHOWN else f" and {len(places) - SHOWN} more"
    return f"{name}{'s' if len(places) > 1 else ''} {', '.join(map(str, places[:SHOWN]))}{more}"
