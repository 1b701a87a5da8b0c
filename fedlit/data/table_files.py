"""One table from a file that somebody has, CSV or Parquet: read, or refused with the file, the column and a way out."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlit.data.base import DatasetLayoutError, DatasetNotFoundError

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
MOST_LEVELS = 100
"""Different texts that a column may have without being called a category."""

_SHOWN = 5
_ODD_NUMBER = re.compile(r"^[-+]?\d[\d.,]*\s?[%€$£]?$")
_DECIMAL_COMMA = re.compile(r"^[-+]?\d+(,\d+)?$")
_THOUSANDS = re.compile(r"^[-+]?\d{1,3}(,\d{3})+$")
_WHOLE = re.compile(r"^(-?\d+)\.0+$")
_USUAL = [
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"),
    *("NULL", "NaN", "None", "n/a", "nan", "null"),
]
"""What pandas takes for missing values, unless it is told otherwise."""
_SEPARATORS = {";": "';'", "\t": "'\\t'", "|": "'|'"}


class TableReader:
    """How the tables of a federation are written.

    Args:
        separator: Between the columns of CSV files.
        decimal: Sign before the decimals of their numbers.
        encoding: Of their text.
        missing_values: Texts that stand for missing values, besides the usual ones (empty, ``NA``, ``NaN``, ``null``).
        texts: Columns that are read as texts, whatever is in them.
        known: Of some columns, texts that are no missing values there, whatever they are elsewhere.

    Raises:
        ImportError: If pandas is not installed.
    """

    def __init__(
        self,
        separator: str = ",",
        decimal: str = ".",
        encoding: str = "utf-8",
        missing_values: Sequence[str] = (),
        texts: Collection[str] = (),
        known: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        try:
            import pandas  # noqa: F401
        except ImportError as error:
            raise ImportError("reading tables needs: pip install 'fedlit[tables]'") from error
        self.separator = separator
        self.decimal = decimal
        self.encoding = encoding
        self.missing_values = list(missing_values)
        self.texts = tuple(texts)
        missing = {*_USUAL, *missing_values}
        self.known = {name: {*some} & missing for name, some in (known or {}).items() if {*some} & missing}

    def read(self, path: Path) -> pd.DataFrame:
        """The table of a file, with columns named by its first line.

        Raises:
            DatasetNotFoundError: If there is no such file.
            DatasetLayoutError: If it cannot be read as a table.
        """
        import pandas as pd

        if not path.is_file():
            raise DatasetNotFoundError(
                f"no table {str(path)!r} (looked for {str(path.absolute())!r}): give a file of {', '.join(SUFFIXES)}"
            )
        try:
            if path.suffix.lower() == ".parquet":
                return _without_decimals(pd.read_parquet(path))
            self._check_rows(path)
            table = self._csv(path, self.texts)
            # pandas turns TRUE into True, but not beside other texts, and not at another client
            truths = [str(name) for name in table if {*map(type, table[name].dropna().head(1))} & {bool, np.bool_}]
            return self._csv(path, (*self.texts, *truths)) if truths else table
        except (DatasetLayoutError, ImportError):
            raise
        except UnicodeError as error:
            raise DatasetLayoutError(
                f"{str(path)!r} is not written in encoding={self.encoding!r} ({error}): give its encoding, such as "
                "'latin-1' or 'utf-16'"
            ) from error
        except Exception as error:  # at bytes of another format, libraries raise errors of any kind
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DatasetLayoutError(
                f"{str(path)!r} cannot be read as a table ({said}): mend or export it again"
            ) from (error)

    def _csv(self, path: Path, texts: Collection[str]) -> pd.DataFrame:
        import pandas as pd

        names = pd.read_csv(path, sep=self.separator, encoding=self._encoding, nrows=0).columns
        options = self.options([name.strip() for name in names])
        table: pd.DataFrame = pd.read_csv(path, dtype=dict.fromkeys(texts, str), low_memory=False, **options)
        return table

    def options(self, names: Sequence[str]) -> dict[str, Any]:
        """Arguments by which pandas reads these columns of such a file."""
        written = {"sep": (self.separator, ","), "decimal": (self.decimal, "."), "encoding": (self._encoding, "utf-8")}
        options: dict[str, Any] = {name: own for name, (own, usual) in written.items() if own != usual}
        missing = [*dict.fromkeys([*_USUAL, *self.missing_values])]
        if self.known.keys() & {*names}:
            options["na_values"] = {
                name: [text for text in missing if text not in self.known.get(name, ())] for name in names
            }
            options["keep_default_na"] = False
        elif self.missing_values:
            options["na_values"] = self.missing_values
        return options | {"skipinitialspace": True}

    def numbers_in(self, table: pd.DataFrame) -> pd.DataFrame:
        """Part of a table, with columns that hold numbers alone in it as numbers: as in a file of its own."""
        import pandas as pd

        for name in [name for name in table.columns if name not in self.texts]:
            known = table[name].notna()
            numbers = pd.to_numeric(table[name], errors="coerce")
            if known.any() and not pd.api.types.is_numeric_dtype(table[name]) and numbers[known].notna().all():
                table[name] = numbers
        return table

    @property
    def _encoding(self) -> str:
        # a table that Excel has saved begins with a mark, which would be part of the first column's name
        return "utf-8-sig" if self.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else self.encoding

    def _check_rows(self, path: Path) -> None:
        """Refuse what pandas would read otherwise than it is meant: rows that are too short, too long, or cut."""
        with path.open(encoding=self._encoding, newline="") as file:
            lines = csv.reader(file, delimiter=self.separator, skipinitialspace=True)
            names = [name.strip() for name in next(lines, [])]
            if len(names) < 2:
                found = next((sign for sign in _SEPARATORS if names and sign in names[0]), None)
                raise DatasetLayoutError(
                    f"{str(path)!r} has {len(names)} column with separator={self.separator!r}"
                    + (f", and its first line is {names[0][:80]!r}" if names else "")
                    + (f": give separator={_SEPARATORS[found]}" if found else ": give a table with a header line")
                )
            check_once(names, f"columns of {str(path)!r} are called", "rename them")
            if "" in names:
                raise DatasetLayoutError(
                    f"column {names.index('') + 1} of {str(path)!r} has no name: name it in the first line, or write "
                    "the table without it (in pandas, to_csv(index=False))"
                )
            for row in lines:
                if row and len(row) != len(names):
                    raise DatasetLayoutError(
                        f"line {lines.line_num} of {str(path)!r} has {len(row)} fields, and its first line names "
                        f"{len(names)} columns: mend it, put quotes around texts with {self.separator!r}, or give "
                        "another separator"
                    )
                if any("\0" in field for field in row):
                    raise DatasetLayoutError(
                        f"line {lines.line_num} of {str(path)!r} has a NUL byte, as in a file that was not written to "
                        "its end: export it again"
                    )


def _without_decimals(table: pd.DataFrame) -> pd.DataFrame:
    """Exact decimals, which databases write, as numbers."""
    for name in table.columns:
        known = table[name].dropna()
        if {*map(type, known)} == {Decimal}:
            table[name] = table[name].astype(float)
    return table


def check_once(values: Sequence[Any], what: str, way_out: str) -> None:
    """Raise a `DatasetLayoutError` if a value occurs more than once."""
    twice = [value for value, times in Counter(values).items() if times > 1]
    if twice:
        more = " and more" if len(twice) > _SHOWN else ""
        raise DatasetLayoutError(f"{what} {twice[:_SHOWN]}{more} more than once: {way_out}")


def column(table: pd.DataFrame, name: str, argument: str, where: str) -> pd.Series[Any]:
    """A column that an argument names; a `DatasetLayoutError` if there is none."""
    if name not in table:
        close = get_close_matches(name, map(str, table.columns), 1)
        raise DatasetLayoutError(
            f"{argument}={name!r} is no column of {where}, which has {[*table.columns]}: "
            + (f"did you mean {close[0]!r}?" if close else f"name one of them in {argument}")
        )
    return table[name]


def texts_of(values: pd.Series[Any]) -> pd.Series[Any]:
    """Values as texts without blanks around them; missing ones, and empty, as None.

    Whole numbers have no decimals: a table with a missing value may have 1.0 where another has 1.
    """

    def text(value: Any) -> str | None:
        return _WHOLE.sub(r"\1", str(value).strip()) or None

    return values.astype(object).map(text, na_action="ignore").where(values.notna(), None)


def kind_of(values: pd.Series[Any], where: str, named: bool) -> str:
    """What a column holds: ``"number"``, ``"category"``, or ``"empty"`` if all are missing.

    Args:
        values: The column.
        where: File and name of it, for errors.
        named: Whether the user calls it a category.

    Raises:
        DatasetLayoutError: If it is neither.
    """
    import pandas as pd

    known = values.dropna()
    if not len(known):
        return "empty"
    if named or pd.api.types.is_bool_dtype(known) or {*map(type, known)} == {bool}:
        return "category"
    if pd.api.types.is_numeric_dtype(known):
        if bool((known.abs() == float("inf")).any()):
            raise DatasetLayoutError(f"{where} has infinite numbers: mend them, or leave the column out (leave_out)")
        return "number"
    if pd.api.types.is_datetime64_any_dtype(known) or isinstance(known.iloc[0], date | time | timedelta):
        raise DatasetLayoutError(
            f"{where} has times: turn them into numbers, such as years, or leave the column out (leave_out)"
        )
    other = next((kind for kind in map(type, known) if not issubclass(kind, str | int | float)), None)
    if other is not None:
        raise DatasetLayoutError(
            f"{where} has values of type {other.__name__}, which are neither numbers nor texts: turn them into "
            "columns of numbers or texts, or leave the column out (leave_out)"
        )
    texts = texts_of(known).dropna()
    different = [*dict.fromkeys(texts)]
    numbers = pd.to_numeric(texts, errors="coerce").notna()
    others = [*dict.fromkeys(texts[~numbers])]
    odd = [text for text in different if _ODD_NUMBER.match(text)]
    if others and len(odd) == len(different):
        raise DatasetLayoutError(
            f"{where} has numbers that are written as {others[:_SHOWN]}: {_mended(others)}; if all are categories, "
            "name the column in categories"
        )
    mostly = 2 * int(numbers.sum()) >= len(texts) and len(different) > 2 + len(others)
    if others and (mostly or (len(others) <= _SHOWN and len(different) > 10 + len(others))):
        raise DatasetLayoutError(
            f"{where} has numbers and texts such as {others[:_SHOWN]}: if these stand for missing values, name them in "
            "missing_values; if all are categories, name the column in categories; or leave it out (leave_out)"
        )
    if len(different) > MOST_LEVELS or (len(different) > 20 and 2 * len(different) > len(texts)):
        raise DatasetLayoutError(
            f"{where} has {len(different)} different texts, such as {different[:3]}: "
            "leave it out if it is free text, a date or a name (leave_out), or name it in categories if it is one"
        )
    return "category"


def _mended(odd: Sequence[str]) -> str:
    """The way out for numbers that are not written as such."""
    if all(map(_THOUSANDS.match, odd)):
        return "if the commas separate thousands, take them out; if they stand before decimals, give decimal=','"
    if all(map(_DECIMAL_COMMA.match, odd)):
        return "give decimal=','"
    return "take all signs but that before decimals out, and name that in decimal if it is no point"
