"""One table from a file that somebody has, CSV or Parquet: read, or refused with the file, the column and a way out."""

from __future__ import annotations

import csv
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlit.data.base import DatasetLayoutError, DatasetNotFoundError
from fedlit.data.table_numbers import SHOWN, NumberFormat, cells, lines

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
MOST_LEVELS = 100
"""Different texts that a column may have without being called a category."""

LARGEST = 1e150
"""Of numbers in absolute value: squares of larger ones are infinite."""
_DAY = "|".join(
    (
        r"\d{4}([-/.])\d{1,2}\1\d{1,2}",
        r"\d{1,2}([-/.])\d{1,2}\2(?:\d{4}|\d{2})",
        r"\d{1,2}[-/. ]+[^\W\d]{3,9}\.?[-/. ]+(?:\d{4}|\d{2})",
    )
)
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm])?"
_MOMENT = re.compile(rf"(?:{_DAY})(?:[T ]+{_TIME}(?:Z|\s?[-+]\d{{2}}:?\d{{2}})?)?|{_TIME}")
"""Dates and times, as programs export them."""
_PADDED = re.compile(r"0\d+")
_NAMELESS = re.compile(r"Unnamed: \d+|__index_level_\d+__")
"""What pandas and pyarrow call a table's index that was saved without a name."""
_ODD_NUMBER = re.compile(r"^[-+]?\d[\d.,]*\s?[%€$£]?$")
NO_TABLES = (".xlsx", ".xls", ".ods", ".gz", ".zip", ".bz2", ".xz", ".zst", ".json", ".feather", ".orc", ".pq", ".dat")
"""Suffixes of files in a folder that may be somebody's table, and are not read."""
_USUAL = [
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"),
    *("NULL", "NaN", "None", "n/a", "nan", "null"),
]
"""What pandas takes for missing values by default."""
_SEPARATORS = {";": "';'", "\t": "'\\t'", "|": "'|'"}


class TableReader:
    """How the tables of a federation are written.

    Args:
        separator: Between the columns of CSV files.
        numbers: How texts write numbers.
        encoding: Of the text of CSV files.
        missing_values: Texts that stand for missing values, besides the usual ones (empty, ``NA``, ``NaN``, ``null``);
            of numbers, all that are equal to one of them.
        texts: Columns that are read as texts, whatever is in them.
        names: Column of names, which keep all of their signs.
        columns: Others that are columns if a Parquet file has them as its index.
        known: Of some columns, texts that are no missing values there, whatever they are elsewhere.

    Raises:
        ImportError: If pandas is not installed.
        ValueError: If the separator is not one sign.
    """

    def __init__(
        self,
        separator: str = ",",
        numbers: NumberFormat | None = None,
        encoding: str = "utf-8",
        missing_values: Sequence[str] = (),
        texts: Collection[str] = (),
        names: str | None = None,
        columns: Collection[str] = (),
        known: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        try:
            import pandas  # noqa: F401
        except ImportError as error:
            raise ImportError("reading tables needs: pip install 'fedlit[tables]'") from error
        if len(separator) != 1:
            raise ValueError(f"separator must be one sign, such as ',', ';' or '\\t', got {separator!r}")
        self.separator = separator
        self.numbers = NumberFormat() if numbers is None else numbers
        self.encoding = encoding
        self.missing_values = list(missing_values)
        self.texts = tuple(texts)
        self.names = names
        self.columns = {*texts, *columns}
        self.has_groups = False
        """Whether a number that was read has a sign for thousands."""
        missing = {*_USUAL, *missing_values}
        self.known = {name: {*some} & missing for name, some in (known or {}).items() if {*some} & missing}

    def read(self, path: Path, texts: Collection[str] = ()) -> pd.DataFrame:
        """The table of a file, with columns named by its first line, and rows by their lines in the file.

        Columns of texts that are all numbers, in the format of the federation, are numbers.

        Args:
            path: Of the file.
            texts: More columns that are read as texts.

        Raises:
            DatasetNotFoundError: If there is no such file.
            DatasetLayoutError: If it cannot be read as a table.
        """
        if not path.is_file():
            raise DatasetNotFoundError(
                f"no table {str(path)!r} (looked for {str(path.absolute())!r}): give a file of {', '.join(SUFFIXES)}"
            )
        texts = (*self.texts, *texts)
        try:
            table, padded = self._parquet(path) if path.suffix.lower() == ".parquet" else self._csv(path, texts)
            table = self.numbers_in(self._without_missing(table), texts)
        except (DatasetLayoutError, ImportError):
            raise
        except UnicodeError as error:
            raise DatasetLayoutError(
                f"{str(path)!r} is not written in encoding={self.encoding!r} ({error}): give its encoding, such as "
                "'latin-1' or 'utf-16'"
            ) from error
        except Exception as error:  # at bytes of another format, libraries raise errors of any kind
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DatasetLayoutError(
                f"{str(path)!r} cannot be read as a table ({reason}): mend or export it again"
            ) from (error)
        empty = table.index[table.isna().all(axis=1)]
        if len(empty):
            raise DatasetLayoutError(
                f"{len(empty)} rows of {str(path)!r} have no value in any column ({lines(empty)}): take them out"
            )
        self._check_names(table, path)
        for name in [name for name in padded if name not in self.columns and _holds_numbers(table[name])]:
            warnings.warn(
                f"column {name!r} of {str(path)!r} has {cells(padded[name])}, which are read as numbers, without the "
                "zeros in front: name the column in categories if they are codes",
                stacklevel=2,
            )
        return table

    def _check_names(self, table: pd.DataFrame, path: Path) -> None:
        """Refuse a saved index, which would be a feature."""
        nameless = [name for name in table.columns if _NAMELESS.fullmatch(name) and name not in self.columns]
        if nameless:
            raise DatasetLayoutError(
                f"column {nameless[0]!r} of {str(path)!r} is the index of a table that was saved without a name, and "
                "numbers of rows are no feature: name it in leave_out, or write the table without it (in pandas, "
                "to_csv(index=False))"
            )

    def _csv(self, path: Path, texts: Collection[str]) -> tuple[pd.DataFrame, dict[str, pd.Series[Any]]]:
        """The table of a file, and of each column the cells that are digits behind a zero."""
        import pandas as pd

        names, places, padded = self._check_rows(path)

        def read(texts: Collection[str]) -> pd.DataFrame:
            table: pd.DataFrame = pd.read_csv(
                path, header=0, names=names, dtype=dict.fromkeys(texts, str), low_memory=False,
                **self.options(names),
            )  # fmt: skip
            return table

        table = read(texts)
        # pandas turns TRUE into True, but not beside other texts, and not at another client
        truths = [str(name) for name in table if {*map(type, table[name].dropna().head(1))} & {bool, np.bool_}]
        table = read((*texts, *truths)) if truths else table
        if len(table) != len(places):
            raise DatasetLayoutError(
                f"{str(path)!r} has {len(places)} rows, and pandas finds {len(table)}: put quotes around texts with "
                "line breaks or quotes, or export it again"
            )
        table.index = pd.Index(places, name="line")
        return table, {name: pd.Series(found).rename_axis("line") for name, found in padded.items()}

    def _parquet(self, path: Path) -> tuple[pd.DataFrame, dict[str, pd.Series[Any]]]:
        """As `_csv`."""
        import pandas as pd

        table = pd.read_parquet(path)
        index = [name for name in table.index.names if name is not None]
        unused = [name for name in index if str(name).strip() not in self.columns]
        if unused:
            warnings.warn(
                f"{str(path)!r} has {unused} as index, which is no column: name it in id if it names the rows; if it "
                "is to be a feature, write the table after reset_index()",
                stacklevel=2,
            )
        table = table.reset_index(level=[name for name in index if name not in unused])
        table.columns = pd.Index([str(name).strip() for name in table.columns])
        check_once([*table.columns], f"columns of {str(path)!r} are called", "rename them")
        for name in table.columns:
            known = table[name].dropna()
            if {*map(type, known)} == {Decimal}:  # exact decimals, which databases write
                table[name] = table[name].astype(float)
        table.index = pd.RangeIndex(1, len(table) + 1, name="row")
        texts = [str(name) for name in table if not _holds_numbers(table[name])]
        padded = {name: table[name][table[name].map(_is_padded).astype(bool)] for name in texts}
        return table, {name: found for name, found in padded.items() if len(found)}

    def _without_missing(self, table: pd.DataFrame) -> pd.DataFrame:
        """A table whose texts have no outer blanks, and no value that stands for a missing one."""
        import pandas as pd

        for name in table.columns:
            values, known = table[name], self.known.get(name, ())
            given = [text for text in self.missing_values if text not in known]
            if _holds_numbers(values):
                numbers = [number for number in map(self.numbers.number, given) if number is not None]
                table[name] = values.mask(values.isin(numbers)) if numbers else values
            elif values.dtype == object or isinstance(values.dtype, pd.StringDtype):
                missing = {text for text in (*_USUAL, *given) if text not in known}
                table[name] = values.map(lambda value, missing=missing: _stripped(value, missing), na_action="ignore")
        return table

    def numbers_in(self, table: pd.DataFrame, texts: Collection[str] | None = None) -> pd.DataFrame:
        """A table, or a part of one, with columns that hold numbers alone as numbers, and whole ones in texts alike.

        Args:
            table: Its texts are without outer blanks.
            texts: Columns that stay texts.
        """
        import pandas as pd

        for name in table.columns:
            values = table[name]
            stays = name in (self.texts if texts is None else texts)
            if _holds_numbers(values) and stays and name != self.names:
                table[name] = values.astype(object).map(self.numbers.text, na_action="ignore")
            if _holds_numbers(values) or isinstance(values.dtype, pd.CategoricalDtype) or name == self.names:
                continue
            known = values.dropna()
            of_texts = len(known) > 0 and all(isinstance(value, str) for value in known)
            numbers = self.numbers.numbers(values)
            if not stays and len(known) and numbers[values.notna()].notna().all():
                self.has_groups |= of_texts and any(map(self.numbers.has_groups, known))
                table[name] = numbers
            elif of_texts:
                table[name] = values.map(self.numbers.without_decimals, na_action="ignore")
        return table

    def options(self, names: Sequence[str]) -> dict[str, Any]:
        """Arguments by which pandas reads these columns of such a file."""
        written = {
            "sep": (self.separator, ","), "decimal": (self.numbers.decimal, "."), "encoding": (self._encoding, "utf-8"),
        }  # fmt: skip
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

    def options_for_others(self, names: Sequence[str]) -> dict[str, Any]:
        """The same for a program that has pandas alone, and thus reads numbers once."""
        return self.options(names) | ({"thousands": self.numbers.thousands} if self.has_groups else {})

    @property
    def _encoding(self) -> str:
        # a table that Excel has saved begins with a mark, which would be part of the first column's name
        return "utf-8-sig" if self.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else self.encoding

    def _check_rows(self, path: Path) -> tuple[list[str], list[int], dict[str, dict[int, str]]]:
        """Names of the columns, the line of each row, and of each column the cells that are digits behind a zero.

        Refuses what pandas would read otherwise than it is meant: rows that are too short, too long, or cut.
        """
        places: list[int] = []
        padded: dict[str, dict[int, str]] = {}
        with path.open(encoding=self._encoding, newline="") as file:
            rows = csv.reader(file, delimiter=self.separator, skipinitialspace=True)
            names = [name.strip() for name in next(rows, [])]
            if names and names[0].startswith(("\ufeff", "\u00ef\u00bb\u00bf")):
                raise DatasetLayoutError(
                    f"{str(path)!r} begins with the mark of Unicode, which encoding={self.encoding!r} takes for a part "
                    "of a name: give encoding='utf-8', or 'utf-16'"
                )
            self._check_encoding(path)
            if len(names) < 2:
                found = next((sign for sign in _SEPARATORS if names and sign in names[0]), None)
                raise DatasetLayoutError(
                    f"{str(path)!r} has {len(names)} column with separator={self.separator!r}"
                    + (f", and its first line is {names[0][:80]!r}" if names else "")
                    + (f": give separator={_SEPARATORS[found]}" if found else ": give a table with a header line")
                )
            if names[0].lower() == "sep=" or re.fullmatch(r"sep=.", names[0], re.IGNORECASE):
                raise DatasetLayoutError(
                    f"the first line of {str(path)!r} is a note for Excel ({self.separator.join(names)!r}), and not "
                    "the names of the columns: take that line out"
                )
            check_once(names, f"columns of {str(path)!r} are called", "rename them")
            if "" in names:
                raise DatasetLayoutError(
                    f"column {names.index('') + 1} of {str(path)!r} has no name: name it in the first line, or write "
                    "the table without it (in pandas, to_csv(index=False))"
                )
            last = rows.line_num
            for row in rows:
                if row and len(row) != len(names):
                    raise DatasetLayoutError(
                        f"line {rows.line_num} of {str(path)!r} has {len(row)} fields, and its first line names "
                        f"{len(names)} columns: mend it, put quotes around texts with {self.separator!r}, or give "
                        "another separator"
                    )
                if any("\0" in field for field in row):
                    raise DatasetLayoutError(
                        f"line {rows.line_num} of {str(path)!r} has a NUL byte, as in a file that was not written to "
                        "its end: export it again"
                    )
                inside = [line for field in row if "\n" in field for line in field.splitlines()[1:]]
                if any(line.count(self.separator) == len(names) - 1 for line in inside):
                    warnings.warn(
                        f"lines {last + 1} to {rows.line_num} of {str(path)!r} are one row, as there are quotes around "
                        "what looks like other rows: see whether there is a quote too many",
                        stacklevel=2,
                    )
                if row:
                    places.append(last + 1)
                    for name, field in zip(names, row, strict=True):
                        if field[:1] == "0" and _is_padded(field):
                            padded.setdefault(name, {})[last + 1] = field.strip()
                last = rows.line_num
        return names, places, padded

    def _check_encoding(self, path: Path) -> None:
        """Refuse UTF-8 that is read as one byte for each letter, which no decoder refuses."""
        if len("é".encode(self.encoding, "ignore")) != 1:
            return
        content = path.read_bytes()
        try:
            text = "" if content.isascii() else content.decode("utf-8")
        except UnicodeDecodeError:
            return
        found = next((line for line in text.splitlines() if not line.isascii()), "")
        if found:
            raise DatasetLayoutError(
                f"{str(path)!r} is written in UTF-8, and encoding={self.encoding!r} would read {found[:40]!r} as "
                f"{found[:40].encode().decode(self.encoding, 'replace')!r}: give encoding='utf-8' if all tables are, "
                "or write this one as the others"
            )


def _is_padded(value: object) -> bool:
    return isinstance(value, str) and _PADDED.fullmatch(value.strip()) is not None


def _holds_numbers(values: pd.Series[Any]) -> bool:
    import pandas as pd

    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def _stripped(value: Any, missing: Collection[str]) -> Any:
    """A value, a text without outer blanks; ``None`` if that stands for a missing one."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    return None if text in missing else text


def check_once(values: Sequence[Any], what: str, way_out: str) -> None:
    """Raise a `DatasetLayoutError` if a value occurs more than once."""
    twice = [value for value, times in Counter(values).items() if times > 1]
    if twice:
        more = " and more" if len(twice) > SHOWN else ""
        raise DatasetLayoutError(f"{what} {twice[:SHOWN]}{more} more than once: {way_out}")


def column(table: pd.DataFrame, name: str, argument: str | None, where: str) -> pd.Series[Any]:
    """A column that an argument names, or that training had; a `DatasetLayoutError` if there is none."""
    if name not in table:
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
    return table[name]


def texts_of(values: pd.Series[Any]) -> pd.Series[Any]:
    """Values as texts without blanks around them; missing ones, and empty, as None. Whole numbers have no decimals."""

    def text(value: Any) -> str | None:
        is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
        return (str(int(value)) if is_whole else str(value).strip()) or None

    return values.astype(object).map(text, na_action="ignore").where(values.notna(), None)


def kind_of(values: pd.Series[Any], where: str, named: bool, numbers: NumberFormat) -> str:
    """What a column holds: ``"number"``, ``"category"``, or ``"empty"`` if all are missing.

    Args:
        values: The column, as `TableReader.read` gives it.
        where: File and name of it, for errors.
        named: Whether the user calls it a category.
        numbers: How numbers are written.

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
        infinite = known[known.abs() == float("inf")]
        if len(infinite):
            raise DatasetLayoutError(
                f"{where} has infinite numbers ({lines(infinite.index)}): mend them, or leave the column out "
                "(leave_out)"
            )
        large = known[known.abs() > LARGEST]
        if len(large):
            raise DatasetLayoutError(
                f"{where} has numbers above {LARGEST:g} in absolute value, of which there is no deviation: "
                f"{cells(large)}; name them in missing_values if they stand for missing ones, mend them, or leave the "
                "column out (leave_out)"
            )
        return "number"
    if pd.api.types.is_datetime64_any_dtype(known) or isinstance(known.iloc[0], date | time | timedelta):
        raise DatasetLayoutError(
            f"{where} has times: turn them into numbers, such as years, or leave the column out (leave_out)"
        )
    is_category = isinstance(known.dtype, pd.CategoricalDtype)
    other = next((kind for kind in map(type, known) if not issubclass(kind, str | int | float)), None)
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
        _check_numbers(texts, where, numbers)
    different = [*dict.fromkeys(texts)]
    if len(different) > MOST_LEVELS or (len(different) > 20 and 2 * len(different) > len(texts)):
        raise DatasetLayoutError(
            f"{where} has {len(different)} different texts, such as {different[:3]}: "
            "leave it out if it is free text, a date or a name (leave_out), or name it in categories if it is one"
        )
    return "category"


def _check_numbers(texts: pd.Series[Any], where: str, numbers: NumberFormat) -> None:
    """Refuse texts of which some or all are numbers, but not in the format that was given."""
    is_none = numbers.numbers(texts).isna()
    others = texts[is_none]
    if not len(others):
        return
    different = [*dict.fromkeys(texts)]
    way_out, unit = numbers.way_out(different), numbers.unit([*dict.fromkeys(others)])
    last = "if all are categories, name the column in categories"
    if way_out or all(map(_ODD_NUMBER.match, different)):
        if not way_out:
            way_out = "take all signs but that before decimals out, and name that in decimal if it is no point"
        raise DatasetLayoutError(
            f"{where} has numbers that are written as {cells(others)}, with decimal={numbers.decimal!r}"
            + (f" and thousands={numbers.thousands!r}" if numbers.thousands else "")
            + f": {way_out}; {last}"
        )
    if unit is not None:
        raise DatasetLayoutError(
            f"{where} has numbers with the unit {unit!r}, such as {cells(others)}: write numbers alone; {last}"
        )
    rest = [*dict.fromkeys(others)]
    mostly = 2 * int((~is_none).sum()) >= len(texts) and len(different) > 2 + len(rest)
    if mostly or (len(rest) <= SHOWN and len(different) > 10 + len(rest)):
        raise DatasetLayoutError(
            f"{where} has numbers and texts such as {cells(others)}: if these stand for missing values, name them in "
            f"missing_values; if they are numbers, write them with decimal={numbers.decimal!r}; {last}; or leave it "
            "out (leave_out)"
        )
