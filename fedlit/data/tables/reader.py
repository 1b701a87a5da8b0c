"""One table from a CSV or Parquet file: read, or refused with the file, the column and a way out."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlit.checks import check
from fedlit.data.samples import DatasetLayoutError, DatasetNotFoundError
from fedlit.data.tables.csv_rows import check_rows, is_padded
from fedlit.data.tables.messages import cells, check_once, lines
from fedlit.data.tables.numbers import NumberFormat, holds_numbers

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
_NAMELESS = r"Unnamed: \d+|__index_level_\d+__"
"""What pandas and pyarrow call a table's index that was saved without a name."""

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
        self.encoding = encoding
        self.missing_values = list(missing_values)
        self.texts = tuple(texts)
        self.names = names
        self.columns = {*texts, *columns}
        self.has_groups = False
        missing = {*_USUAL, *missing_values}
        self.known = {name: {*some} & missing for name, some in known.items() if {*some} & missing}

    def read(self, path: Path, texts: Collection[str] = ()) -> pd.DataFrame:
        """Return the table of a file, with columns named by its first line, and rows by their lines in the file.

        Columns of texts that are all numbers, in the format of the federation, are numbers, but those in ``texts``.
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
            ) from error
        self._check(table, path)
        for name in [name for name in padded if name not in self.columns and holds_numbers(table[name])]:
            warnings.warn(
                f"column {name!r} of {str(path)!r} has {cells(padded[name])}, which are read as numbers, without the "
                "zeros in front: name the column in categories if they are codes",
                stacklevel=2,
            )
        return table

    def _check(self, table: pd.DataFrame, path: Path) -> None:
        """Refuse empty rows, and a saved index, which would be a feature."""
        empty = table.index[table.isna().all(axis=1)]
        if len(empty):
            raise DatasetLayoutError(
                f"{len(empty)} rows of {str(path)!r} have no value in any column ({lines(empty)}): take them out"
            )
        nameless = [*table.columns[table.columns.str.fullmatch(_NAMELESS) & ~table.columns.isin([*self.columns])]]
        if nameless:
            raise DatasetLayoutError(
                f"column {nameless[0]!r} of {str(path)!r} is the index of a table that was saved without a name, and "
                "numbers of rows are no feature: name it in leave_out, or write the table without it (in pandas, "
                "to_csv(index=False))"
            )

    def _csv(self, path: Path, texts: Collection[str]) -> tuple[pd.DataFrame, dict[str, pd.Series[Any]]]:
        """Return the table of a file, and of each column the cells that are digits behind a zero."""
        import pandas as pd

        rows = check_rows(path, self.separator, self._encoding)

        def read(texts: Collection[str]) -> pd.DataFrame:
            types = dict.fromkeys(texts, str)
            options = self.options(rows.names)
            table: pd.DataFrame = pd.read_csv(
                path, header=0, names=rows.names, dtype=types, low_memory=False, **options
            )
            return table

        table = read(texts)
        # pandas turns TRUE into True, but not beside other texts, and not at another client
        truths = [str(name) for name in table if {*map(type, table[name].dropna().head(1))} & {bool, np.bool_}]
        table = read((*texts, *truths)) if truths else table
        if len(table) != len(rows.lines):
            raise DatasetLayoutError(
                f"{str(path)!r} has {len(rows.lines)} rows, and pandas finds {len(table)}: put quotes around texts "
                "with line breaks or quotes, or export it again"
            )
        table.index = pd.Index(rows.lines, name="line")
        return table, {name: pd.Series(found).rename_axis("line") for name, found in rows.padded.items()}

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
            if {*map(type, table[name].dropna())} == {Decimal}:  # exact decimals, which databases write
                table[name] = table[name].astype(float)
        table.index = pd.RangeIndex(1, len(table) + 1, name="row")
        texts = [str(name) for name in table if not holds_numbers(table[name])]
        padded = {name: table[name][table[name].map(is_padded).astype(bool)] for name in texts}
        return table, {name: found for name, found in padded.items() if len(found)}

    def _without_missing(self, table: pd.DataFrame) -> pd.DataFrame:
        """Strip texts, and replace values that stand for missing ones."""
        import pandas as pd

        for name in table.columns:
            values, known = table[name], self.known.get(name, ())
            named = [text for text in self.missing_values if text not in known]
            if holds_numbers(values):
                numbers = [number for number in map(self.numbers.number, named) if number is not None]
                table[name] = values.mask(values.isin(numbers)) if numbers else values
            elif values.dtype == object or isinstance(values.dtype, pd.StringDtype):
                missing = {text for text in (*_USUAL, *named) if text not in known}
                table[name] = values.map(lambda value, missing=missing: _stripped(value, missing), na_action="ignore")
        return table

    def numbers_in(self, table: pd.DataFrame, texts: Collection[str] | None = None) -> pd.DataFrame:
        """Convert columns of numbers alone, but ``texts``, to numbers, and whole numbers among texts to one form."""
        import pandas as pd

        for name in table.columns:
            values = table[name]
            stays = name in (self.texts if texts is None else texts)
            if holds_numbers(values) and stays and name != self.names:
                table[name] = values.astype(object).map(self.numbers.text, na_action="ignore")
            if holds_numbers(values) or isinstance(values.dtype, pd.CategoricalDtype) or name == self.names:
                continue
            known = values.dropna()
            are_texts = len(known) > 0 and all(isinstance(value, str) for value in known)
            numbers = self.numbers.numbers(values)
            if not stays and len(known) and numbers[values.notna()].notna().all():
                self.has_groups |= are_texts and any(map(self.numbers.has_groups, known))
                table[name] = numbers
            elif are_texts:
                table[name] = values.map(self.numbers.without_decimals, na_action="ignore")
        return table

    def options(self, names: Sequence[str]) -> dict[str, Any]:
        """Return arguments by which pandas reads these columns of such a file."""
        written = {"sep": self.separator, "decimal": self.numbers.decimal, "encoding": self._encoding}
        usual = {"sep": ",", "decimal": ".", "encoding": "utf-8"}
        options: dict[str, Any] = {name: value for name, value in written.items() if value != usual[name]}
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
        """Return the same for a program that has pandas alone, and thus reads numbers once."""
        return self.options(names) | ({"thousands": self.numbers.thousands} if self.has_groups else {})

    @property
    def _encoding(self) -> str:
        # a table that Excel has saved begins with a mark, which would be part of the first column's name
        return "utf-8-sig" if self.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else self.encoding


def _stripped(value: Any, missing: Collection[str]) -> Any:
    """A value, a text without outer blanks; ``None`` if that stands for a missing one."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    return None if text in missing else text
