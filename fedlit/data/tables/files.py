"""Tables that are read: of each client, from a folder or one file of all, and of the rows to predict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedlit.checks import refuse
from fedlit.data.files import check_names
from fedlit.data.samples import DatasetNotFoundError, check_data, refuse_data
from fedlit.data.tables.columns import column, type_of
from fedlit.data.tables.features import TableFeatures
from fedlit.data.tables.reader import SUFFIXES, TableReader
from fedlit.data.tables.values import cells, check_once, lines, some, texts_of
from fedlit.federation.names import alike, difference, shown

if TYPE_CHECKING:
    import pandas as pd

_UNREAD = (".xlsx", ".xls", ".ods", ".gz", ".zip", ".bz2", ".xz", ".zst", ".json", ".feather", ".orc", ".pq", ".dat")
"""Suffixes of files in a folder that may be a client's table, and are not read."""


def find_tables(files: str | Mapping[str, str]) -> dict[str, Path]:
    """Return the path of each client's table, in a folder or as named."""
    if not isinstance(files, str):
        paths = {name: Path(path) for name, path in files.items()}
        for each in (lambda path: str(path), lambda path: str(path.resolve())):
            check_once([*map(each, paths.values())], "files of clients", "give each client a file")
        return paths
    folder = Path(files)
    if not folder.is_dir():
        rule = "a folder of tables, {client: file}, or one file with site, the column that names each row's client"
        refuse("files", rule, files, f"looked for {str(folder.absolute())!r}", DatasetNotFoundError)
    tables = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != ".")
    check_names(tables)
    check_once([file.stem for file in tables], "files (clients in a folder)", "keep one for each client")
    others = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in _UNREAD)
    if others:
        warnings.warn(
            f"left out {some(others)} of files={files!r}, as tables are {', '.join(SUFFIXES)}: export them as CSV if "
            "they are clients' tables",
            stacklevel=2,
        )
    check_data(bool(tables), "files", f"a folder with tables ({', '.join(SUFFIXES)})", f"{files!r} without any")
    return {file.stem: file for file in tables}


def split_by_site(path: Path, site: str, reader: TableReader, key: Callable[[str], object]) -> dict[str, pd.DataFrame]:
    """Return each client's rows of one file, by the column ``site``; clients of one ``key`` are refused."""
    table, what = reader.read(path), f"site ({site!r} of {path})"
    names = texts_of(column(table, site, "site", str(path)))
    _check_named(names, what)
    for group in alike(dict.fromkeys(names), key):
        rows = " and ".join(str(int((names == name).sum())) for name in group)
        way_out = "write them alike, or rename one if they are different clients"
        got = f"{shown(group)} in {rows} rows, which differ in {difference(group)}"
        refuse_data(what, "of different names", got, way_out)
    return {name: reader.numbers_in(table[names == name].copy()) for name in dict.fromkeys(names)}


def check_ids(table: pd.DataFrame, name: str | None, where: str) -> None:
    """Refuse rows without an id in the column ``name``, or with that of another."""
    if name is not None:
        ids, what = texts_of(column(table, name, "id", where)), f"id ({name!r} of {where})"
        _check_named(ids, what)
        twice = ids[ids.duplicated(keep=False)]
        check_data(
            not len(twice), what, "another one in each row", f"{cells(twice)} more than once", "keep one of each"
        )


def _check_named(names: pd.Series[str], what: str) -> None:
    """Refuse rows without a name."""
    nameless = names.index[names.isna()]
    shown = f"none in {len(nameless)} rows, {lines(nameless)}"
    check_data(not len(nameless), what, "in all rows", shown, "fill it in, or leave the rows out")


def read_new_rows(
    path: Path, reader: TableReader, features: TableFeatures, id_column: str | None, site: str | None, target: str
) -> pd.DataFrame:
    """Return the target's rows to predict, of a table with the columns of the training data."""
    table = reader.read(path, [*features.categories])
    where, what = str(path), f"predict_file ({path})"
    check_data(len(table) > 0, what, "of rows to predict", "none")
    check_ids(table, id_column, where)
    if site is not None and site in table:
        names = texts_of(table[site])
        others = names[names.notna() & (names != target)]
        check_data(not len(others), what, f"of rows of the target ({target!r})", cells(others), "leave the others out")
    for name in features.numbers:
        values = column(table, name, "predict_file", where)
        if type_of(name, values, where, False, reader.numbers) == "category":
            way_out = "mend them, or name those that stand for missing values in missing_values"
            rule = f"of numbers in column {name!r}, as in training"
            refuse_data(what, rule, cells(values.dropna()), way_out)
    for name, levels in features.categories.items():
        texts = texts_of(column(table, name, "predict_file", where)).dropna()
        new = texts[~texts.isin(levels)]
        if len(new):
            warnings.warn(
                f"column {name!r} of {where} has {some(new)}, which no client had in training: they count as none of "
                "its levels",
                stacklevel=2,
            )
    return table
