"""One table from a CSV or Parquet file: read, or refused with the file, the line or column, and a way out."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlit.checks import check
from fedlit.data.samples import DatasetLayoutError, DatasetNotFoundError, check_data, refuse_data
from fedlit.data.tables.values import NumberFormat, cells, check_once, holds_numbers, holds_texts, lines

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
_NAMELESS = r"Unnamed: \d+|__index_level_\d+__"
"""What pandas and pyarrow call a table's index that was saved without a name."""

_PADDED = re.compile(r"0\d+")
_SEPARATORS = (";", "\t", "|")
_USUAL = [
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"),
    *("NULL", "NaN", "None", "n/a", "nan", "null"),
]
"""What pandas takes for missing values by default."""


class TableReader:
    """Reads the tables of a federation, which are written alike; other arguments as of `CSVDomains`.

    Args:
        texts: Columns that are read as texts, whatever is in them.
        names: Column of names, which keep all of their signs.
        columns: Others that are columns if a Parquet file has them as its index.
        known: Of some columns, texts that are no missing values there, whatever they are elsewhere.

    Attributes:
        has_groups: Whether a number that was read has a sign for thousands.
    """

    def __init__(
        self,
        separator: str,
        numbers: NumberFormat,
        encoding: str,
        missing_values: Sequence[str],
        texts: Collection[str],
        names: str | None,
        columns: Collection[str],
        known: Mapping[str, Collection[str]],
    ) -> None:
        try:
            import pandas  # noqa: F401
        except ImportError as error:
            raise ImportError("reading tables needs: pip install 'fedlit[tables]'") from error
        check(len(separator) == 1, "separator", "one sign, such as ',', ';' or '\\t'", separator)
        self.separator = separator
        self.numbers = numbers
        self.missing_values = list(missing_values)
        self.texts = tuple(texts)
        self.names = names
        self.columns = {*texts, *columns}
        self.has_groups = False
        self.known = known
        # a table that Excel has saved begins with a mark, which would be part of the first column's name
        self.encoding = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding

    def read(self, path: Path, texts: Collection[str] = ()) -> pd.DataFrame:
        """Return the table of a file, with columns named by its first line, and rows by their lines in the file.

        Columns of texts that are all numbers, in the format of the federation, are numbers, but those in ``texts``.
        """
        if not path.is_file():
            raise DatasetNotFoundError(
                f"no table {str(path)!r} (looked for {str(path.absolute())!r}): give a file of {', '.join(SUFFIXES)}"
            )
        try:
            table = self._parquet(path) if path.suffix.lower() == ".parquet" else self._csv(path)
            table = self._without_missing(table)
            padded = {name: column[_are_padded(column)] for name, column in table.items()}
            table = self.numbers_in(table, (*self.texts, *texts))
        except (DatasetLayoutError, ImportError):
            raise
        except UnicodeError as error:
            rule = f"written in encoding={self.encoding.removesuffix('-sig')!r}"
            refuse_data(str(path), rule, error, "give its encoding, such as 'latin-1' or 'utf-16'")
        except Exception as error:  # at bytes of another format, libraries raise errors of any kind
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            refuse_data(str(path), "a table", reason, "mend or export it again")
        empty = table.index[table.isna().all(axis=1)]
        check_data(not len(empty), str(path), "of rows with values", f"empty ones ({lines(empty)})", "take them out")
        nameless = [*table.columns[table.columns.str.fullmatch(_NAMELESS) & ~table.columns.isin([*self.columns])]]
        way_out = "name it in leave_out, or write the table without it (in pandas, to_csv(index=False))"
        check_data(not nameless, str(path), "without numbers of rows, which are no feature", nameless, way_out)
        for name, digits in padded.items():
            if len(digits) and name not in self.columns and holds_numbers(table[name]):
                warnings.warn(
                    f"column {name!r} of {str(path)!r} has {cells(digits)}, which are read as numbers, without the "
                    "zeros in front: name the column in categories if they are codes",
                    stacklevel=2,
                )
        return table

    def _csv(self, path: Path) -> pd.DataFrame:
        """Return the cells of a file, all of them texts."""
        import pandas as pd

        rows: dict[int, list[str]] = {}
        with path.open(encoding=self.encoding, newline="") as file:
            reader = csv.reader(file, delimiter=self.separator, skipinitialspace=True)
            names = [name.strip() for name in next(reader, [])]
            _check_header(path, names, self.separator, self.encoding)
            first = reader.line_num + 1
            for row in reader:
                _check_row(path, row, names, self.separator, first, reader.line_num)
                if row:
                    rows[first] = row
                first = reader.line_num + 1
        return pd.DataFrame([*rows.values()], pd.Index([*rows], name="line"), names, dtype=object)

    def _parquet(self, path: Path) -> pd.DataFrame:
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
        check_once([*table.columns], f"{path} (names of columns)", "rename them")
        for name in table.columns:
            if {*map(type, table[name].dropna())} == {Decimal}:  # exact decimals, which databases write
                table[name] = table[name].astype(float)
        table.index = pd.RangeIndex(1, len(table) + 1, name="row")
        return table

    def _missing(self, name: str) -> list[str]:
        """Return texts that stand for missing values in a column."""
        return [text for text in dict.fromkeys([*_USUAL, *self.missing_values]) if text not in self.known.get(name, ())]

    def _without_missing(self, table: pd.DataFrame) -> pd.DataFrame:
        """Strip texts, and replace those that stand for missing values."""
        import pandas as pd

        for name, values in table.items():
            if values.dtype == object or isinstance(values.dtype, pd.StringDtype):
                entries = values.to_numpy(dtype=object)
                stripped = [value.strip() if isinstance(value, str) else value for value in entries]
                texts = pd.Series(stripped, index=values.index)
                table[name] = texts.mask(texts.isin(self._missing(str(name))))
        return table

    def numbers_in(self, table: pd.DataFrame, texts: Collection[str] | None = None) -> pd.DataFrame:
        """Convert columns of numbers alone, but ``texts``, to numbers, and whole numbers among texts to one form."""
        import pandas as pd

        for name in map(str, table.columns):
            values, stays = table[name], name in (self.texts if texts is None else texts)
            if holds_numbers(values):
                values = self._known_numbers(name, values)
                if stays and name != self.names:
                    values = values.astype(object).map(self.numbers.text, na_action="ignore")
            elif name != self.names and not isinstance(values.dtype, pd.CategoricalDtype):
                known = values.dropna()
                are_texts = len(known) > 0 and holds_texts(known)
                numbers = None if stays or not len(known) else self.numbers.all_numbers(values)
                if numbers is not None:
                    self.has_groups |= are_texts and self.numbers.have_groups(known)
                    values = self._known_numbers(name, numbers)
                elif are_texts:
                    values = values.map(self.numbers.without_decimals, na_action="ignore")
            table[name] = values
        return table

    def _known_numbers(self, name: str, values: pd.Series[Any]) -> pd.Series[Any]:
        """Replace numbers that stand for missing values."""
        missing = [number for number in map(self.numbers.number, self._missing(name)) if number is not None]
        return values.mask(values.isin(missing)) if missing else values

    def reading(self, names: Sequence[str]) -> dict[str, Any]:
        """Return arguments by which pandas reads these columns of such a file, for a program that has pandas alone."""
        written = {"sep": self.separator, "decimal": self.numbers.decimal, "encoding": self.encoding}
        usual = {"sep": ",", "decimal": ".", "encoding": "utf-8"}
        options: dict[str, Any] = {name: value for name, value in written.items() if value != usual[name]}
        if any(set(self.known.get(name, ())) & {*_USUAL, *self.missing_values} for name in names):
            options |= {"na_values": {name: self._missing(name) for name in names}, "keep_default_na": False}
        elif self.missing_values:
            options["na_values"] = self.missing_values
        options["skipinitialspace"] = True
        return options | ({"thousands": self.numbers.thousands} if self.has_groups else {})


def _are_padded(values: pd.Series[Any]) -> Any:
    """Return which cells are digits behind a zero, which a number loses, bool, shape (n,)."""
    if holds_numbers(values):
        return [False] * len(values)
    return [isinstance(value, str) and _PADDED.fullmatch(value) is not None for value in values.to_numpy(dtype=object)]


def _check_header(path: Path, names: list[str], separator: str, encoding: str) -> None:
    way_out = "give encoding='utf-8', or 'utf-16'"
    marked = bool(names) and names[0].startswith(("\ufeff", "\u00ef\u00bb\u00bf"))
    check_data(not marked, str(path), "without a mark of Unicode", f"one with encoding={encoding!r}", way_out)
    _check_encoding(path, encoding)
    line = repr(separator.join(names)[:80])
    if len(names) < 2:
        other = next((sign for sign in _SEPARATORS if names and sign in names[0]), None)
        way_out = f"give separator={other!r}" if other else "give a table with a header line"
        refuse_data(str(path), f"of 2 columns or more with separator={separator!r}", f"{len(names)} ({line})", way_out)
    way_out = "take the line out, which is a note for Excel"
    check_data(not re.fullmatch(r"sep=.?", names[0], re.I), str(path), "of names in its first line", line, way_out)
    check_once(names, f"{path} (names of columns)", "rename them")
    way_out = "name it in the first line, or write the table without it (in pandas, to_csv(index=False))"
    check_data("" not in names, str(path), "of columns with a name each", f"none in its first line {line}", way_out)


def _check_encoding(path: Path, encoding: str) -> None:
    """Refuse UTF-8 that is read as one byte for each letter, which no decoder refuses."""
    if len("é".encode(encoding, "ignore")) != 1:
        return
    content = path.read_bytes()
    with suppress(UnicodeDecodeError):
        text = "" if content.isascii() else content.decode("utf-8")
        line = next((line for line in text.splitlines() if not line.isascii()), "")[:40]
        shown = f"UTF-8, whose {line!r} would be read as {line.encode().decode(encoding, 'replace')!r}"
        way_out = "give encoding='utf-8' if all tables are, or write this one as the others"
        check_data(not line, str(path), f"written in encoding={encoding!r}", shown, way_out)


def _check_row(path: Path, row: list[str], names: list[str], separator: str, first: int, last: int) -> None:
    way_out = f"mend it, put quotes around texts with {separator!r}, or give another separator"
    fits = len(row) in (0, len(names))
    check_data(fits, str(path), f"of {len(names)} fields in each line", f"{len(row)} in line {last}", way_out)
    way_out = "it was not written to its end, export it again"
    check_data("\0" not in "".join(row), str(path), "of text", f"a NUL byte in line {last}", way_out)
    inside = [line for cell in row if "\n" in cell for line in cell.splitlines()[1:]]
    if any(line.count(separator) == len(names) - 1 for line in inside):
        warnings.warn(
            f"lines {first} to {last} of {str(path)!r} are one row, as there are quotes around what looks like other "
            "rows: see whether there is a quote too many",
            stacklevel=2,
        )
