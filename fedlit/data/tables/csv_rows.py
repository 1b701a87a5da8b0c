"""Rows of a CSV file before pandas reads them: what it would read otherwise than it is meant is refused."""

from __future__ import annotations

import csv
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from fedlit.data.samples import DatasetLayoutError
from fedlit.data.tables.messages import check_once

_PADDED = re.compile(r"0\d+")
_SEPARATORS = {";": "';'", "\t": "'\\t'", "|": "'|'"}


@dataclass
class CsvRows:
    """Names of the columns, the line of each row, and of each column the cells that are digits behind a zero."""

    names: list[str]
    lines: list[int] = field(default_factory=list)
    padded: dict[str, dict[int, str]] = field(default_factory=dict)


def is_padded(value: object) -> bool:
    """Return whether a cell is digits behind a zero, which a number loses."""
    return isinstance(value, str) and _PADDED.fullmatch(value.strip()) is not None


def check_rows(path: Path, separator: str, encoding: str) -> CsvRows:
    """Look through a file, whose ``encoding`` is the one that tolerates a mark of Unicode.

    Raises:
        DatasetLayoutError: If its first line does not name columns, or rows are too short, too long, or cut.
    """
    with path.open(encoding=encoding, newline="") as file:
        rows = csv.reader(file, delimiter=separator, skipinitialspace=True)
        found = CsvRows([name.strip() for name in next(rows, [])])
        _check_header(path, found.names, separator, encoding)
        last = rows.line_num
        for row in rows:
            _check_row(path, row, found.names, separator, last + 1, rows.line_num)
            if row:
                found.lines.append(last + 1)
                for name, cell in zip(found.names, row, strict=True):
                    if cell[:1] == "0" and is_padded(cell):
                        found.padded.setdefault(name, {})[last + 1] = cell.strip()
            last = rows.line_num
    return found


def _check_header(path: Path, names: list[str], separator: str, encoding: str) -> None:
    if names and names[0].startswith(("\ufeff", "\u00ef\u00bb\u00bf")):
        raise DatasetLayoutError(
            f"{str(path)!r} begins with the mark of Unicode, which encoding={encoding!r} takes for a part of a name: "
            "give encoding='utf-8', or 'utf-16'"
        )
    _check_encoding(path, encoding)
    if len(names) < 2:
        other = next((sign for sign in _SEPARATORS if names and sign in names[0]), None)
        raise DatasetLayoutError(
            f"{str(path)!r} has {len(names)} column with separator={separator!r}"
            + (f", and its first line is {names[0][:80]!r}" if names else "")
            + (f": give separator={_SEPARATORS[other]}" if other else ": give a table with a header line")
        )
    if re.fullmatch(r"sep=.?", names[0], re.IGNORECASE):
        raise DatasetLayoutError(
            f"the first line of {str(path)!r} is a note for Excel ({separator.join(names)!r}), and not the names of "
            "the columns: take that line out"
        )
    check_once(names, f"columns of {str(path)!r} are called", "rename them")
    if "" in names:
        raise DatasetLayoutError(
            f"column {names.index('') + 1} of {str(path)!r} has no name: name it in the first line, or write the table "
            "without it (in pandas, to_csv(index=False))"
        )


def _check_encoding(path: Path, encoding: str) -> None:
    """Refuse UTF-8 that is read as one byte for each letter, which no decoder refuses."""
    if len("é".encode(encoding, "ignore")) != 1:
        return
    content = path.read_bytes()
    try:
        text = "" if content.isascii() else content.decode("utf-8")
    except UnicodeDecodeError:
        return
    line = next((line for line in text.splitlines() if not line.isascii()), "")[:40]
    if line:
        raise DatasetLayoutError(
            f"{str(path)!r} is written in UTF-8, and encoding={encoding!r} would read {line!r} as "
            f"{line.encode().decode(encoding, 'replace')!r}: give encoding='utf-8' if all tables are, or write this "
            "one as the others"
        )


def _check_row(path: Path, row: list[str], names: list[str], separator: str, first: int, last: int) -> None:
    if row and len(row) != len(names):
        raise DatasetLayoutError(
            f"line {last} of {str(path)!r} has {len(row)} fields, and its first line names {len(names)} columns: mend "
            f"it, put quotes around texts with {separator!r}, or give another separator"
        )
    if any("\0" in cell for cell in row):
        raise DatasetLayoutError(
            f"line {last} of {str(path)!r} has a NUL byte, as in a file that was not written to its end: export it "
            "again"
        )
    inside = [line for cell in row if "\n" in cell for line in cell.splitlines()[1:]]
    if any(line.count(separator) == len(names) - 1 for line in inside):
        warnings.warn(
            f"lines {first} to {last} of {str(path)!r} are one row, as there are quotes around what looks like other "
            "rows: see whether there is a quote too many",
            stacklevel=2,
        )
