"""Tables that are read: of each client, from a folder or one file of all, and of the rows to predict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedlit.checks import refuse
from fedlit.data.samples import DatasetLayoutError, DatasetNotFoundError
from fedlit.data.tables.columns import type_of
from fedlit.data.tables.features import TableFeatures
from fedlit.data.tables.messages import SHOWN, cells, check_once, column, lines, some
from fedlit.data.tables.numbers import texts_of
from fedlit.data.tables.reader import SUFFIXES, TableReader
from fedlit.federation.names import alike, difference, shown

if TYPE_CHECKING:
    import pandas as pd

_UNREAD = (".xlsx", ".xls", ".ods", ".gz", ".zip", ".bz2", ".xz", ".zst", ".json", ".feather", ".orc", ".pq", ".dat")
"""Suffixes of files in a folder that may be a client's table, and are not read."""


def find_tables(files: str | Mapping[str, str]) -> dict[str, Path]:
    """Return the path of each client's table, in a folder or as named."""
    if not isinstance(files, str):
        paths = {name: Path(path) for name, path in files.items()}
        for texts in ([str(path) for path in paths.values()], [str(path.resolve()) for path in paths.values()]):
            check_once(texts, "files of clients are", "give each client its own")
        return paths
    folder = Path(files)
    if not folder.is_dir():
        rule = "a folder of tables, {client: file}, or one file with site, the column that names each row's client"
        refuse("files", rule, files, f"looked for {str(folder.absolute())!r}", DatasetNotFoundError)
    tables = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != ".")
    check_once([file.stem for file in tables], f"tables in {files!r} are called", "keep one for each client")
    others = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in _UNREAD)
    if others:
        warnings.warn(
            f"left out {some(others)} of files={files!r}, as tables are {', '.join(SUFFIXES)}: export them as CSV if "
            "they are clients' tables",
            stacklevel=2,
        )
    if not tables:
        raise DatasetLayoutError(f"folder files={files!r} must hold tables ({', '.join(SUFFIXES)}), got none")
    return {file.stem: file for file in tables}


def split_by_site(path: Path, site: str, reader: TableReader, key: Callable[[str], object]) -> dict[str, pd.DataFrame]:
    """Return each client's rows of one file, by the column ``site``; clients of one ``key`` are refused."""
    table = reader.read(path)
    names = texts_of(column(table, site, "site", repr(str(path))))
    nameless = table.index[names.isna()]
    if len(nameless):
        raise DatasetLayoutError(
            f"{len(nameless)} rows of {str(path)!r} have no {site!r} ({lines(nameless)}): name their client, or leave "
            "them out"
        )
    for group in alike(dict.fromkeys(names), key):
        rows = " and ".join(str(int((names == name).sum())) for name in group)
        raise DatasetLayoutError(
            f"site={site!r} of {str(path)!r} has {shown(group)}, with {rows} rows, which differ in "
            f"{difference(group)}: write them alike, or rename one if they are different clients"
        )
    return {name: reader.numbers_in(table[names == name].copy()) for name in dict.fromkeys(names)}


def check_ids(table: pd.DataFrame, name: str | None, where: str) -> None:
    """Refuse rows without an id in the column ``name``, or with that of another."""
    if name is None:
        return
    ids = texts_of(column(table, name, "id", where))
    nameless = table.index[ids.isna()]
    if len(nameless):
        raise DatasetLayoutError(f"{len(nameless)} rows of {where} have no {name!r} ({lines(nameless)}): name all rows")
    twice = ids[ids.duplicated(keep=False)]
    if len(twice):
        raise DatasetLayoutError(
            f"rows of {where} have the {name!r} {some(twice)} more than once: keep one of each ({lines(twice.index)})"
        )


def read_new_rows(
    path: Path, reader: TableReader, features: TableFeatures, id_column: str | None, site: str | None, target: str
) -> pd.DataFrame:
    """Return the target's rows to predict, of a table with the columns of the training data."""
    table = reader.read(path, [*features.categories])
    where = f"predict_file={str(path)!r}"
    if not len(table):
        raise DatasetLayoutError(f"{where} has no rows: give it those that are to be predicted")
    check_ids(table, id_column, where)
    if site is not None and site in table:
        names = texts_of(table[site])
        others = names[names.notna() & (names != target)]
        if len(others):
            raise DatasetLayoutError(
                f"{where} has rows of {cells(others)}, and those of the target ({target!r}) are predicted: leave the "
                "others out"
            )
    for name in features.numbers:
        values, what = column(table, name, None, where), f"column {name!r} of {where}"
        if type_of(values, what, False, reader.numbers) == "category":
            raise DatasetLayoutError(
                f"{what} must be numbers, as in training, got {cells(values.dropna())}: mend them, or name those that "
                "stand for missing values in missing_values"
            )
    for name, levels in features.categories.items():
        new = [text for text in texts_of(column(table, name, None, where)).dropna().unique() if text not in levels]
        if new:
            warnings.warn(
                f"column {name!r} of {where} has {new[:SHOWN]}, which no client had in training: they count as none of "
                "its levels",
                stacklevel=2,
            )
    return table
