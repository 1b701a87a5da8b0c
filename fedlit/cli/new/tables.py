"""Tables: a CSV or Parquet file for each client."""

from __future__ import annotations

import argparse
import csv
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedlit.cli.arguments import flow
from fedlit.cli.new.study import Study, Writers, check_target, seen_from

SUFFIXES = (".csv", ".tsv", ".parquet")

_MANY = 20
"""Rows from which on a column with another whole number in each is taken to number them."""

_HOSPITALS = {
    "Cleveland": "cleveland", "Hungary": "hungary", "Switzerland": "switzerland", "VA Long Beach": "long_beach",
}  # fmt: skip

_LEFT_OUT = ("id", "dataset", "num", "chol", "ca")
"""Columns that the example has otherwise, or not, as whole hospitals did not measure them."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add what is to be told of tables."""
    parser.add_argument("--label", metavar="COLUMN", help="column to predict; with --data")
    parser.add_argument("--task", choices=["classification", "regression"], help="whether it has classes, or numbers")
    parser.add_argument("--id", metavar="COLUMN", help="column that names the rows, which is no feature")
    parser.add_argument("--site", metavar="COLUMN", help="column of the client's name, if all are in one file")
    parser.add_argument("--leave_out", metavar="COLUMN", nargs="+", help="columns that are no features")
    parser.add_argument("--categories", metavar="COLUMN", nargs="+", help="categories that look like numbers")
    parser.add_argument("--classes", metavar="CLASS", nargs="+", help="their names, in the order of their labels")
    parser.add_argument("--missing_values", metavar="TEXT", nargs="+", help="texts that stand for missing values")
    parser.add_argument("--separator", help="between columns, such as ';'")
    parser.add_argument("--decimal", help="sign before decimals, such as ','")
    parser.add_argument("--encoding", help="of the text, such as latin-1")


def own(given: argparse.Namespace) -> Study:
    """The user's tables, from what the command was told of them."""
    from fedlit.data import CSVDomains, DatasetLayoutError

    told_of = ("id", "leave_out", "categories", "classes", "task", "missing_values", "separator", "decimal", "encoding")
    arguments = {key: getattr(given, key) for key in (*told_of, "site") if getattr(given, key) is not None}
    if given.task == "regression" and given.classes:
        sys.exit("fedlit: --classes names the classes of a label, and --task regression has none: leave one out")
    if given.data.is_file() and given.site is None:
        sys.exit(
            f"fedlit: --data '{given.data}' is one file: give --site COLUMN, the column that says whose a row is, or a "
            "folder with a file for each client"
        )
    try:
        probe = CSVDomains(str(given.data), label=given.label or "", **arguments)
        names = probe.domain_names()
        columns = [str(name) for name in probe.table(names[0]).columns]
        if given.label is None:
            sys.exit(f"fedlit: --label must name the column to predict, and the tables have {columns}")
        check_target(given.target, names)
        data = CSVDomains(str(given.data), label=given.label, target=given.target, **arguments)
        told = {name: data.facts(name) for name in names}
        data.check_facts(told)
        y = data._y(given.target)
    except DatasetLayoutError as error:
        sys.exit(f"fedlit: {error}. What it says to give is an option of fedlit new csv, with -- before it: --help")
    features = list(told[names[0]]["columns"][names[0]])
    for name in features:
        if all(_counts(data.table(client)[name]) for client in names):
            print(f"fedlit: column {name!r} has another whole number in each row: if it names them, give --id {name}")
    regression = data.task == "regression"
    written = "".join(f"    {key}: {flow(value)}\n" for key, value in arguments.items() if key != "task")
    total = sum(len(data.table(name)) for name in names)
    places = {name: seen_from(given.dir, data._paths[name]) for name in names} if given.site is None else {}
    return Study(
        files=places or seen_from(given.dir, given.data),
        target=given.target,
        labelled=int((~y.isnan() if regression else y >= 0).sum()),
        about=f"tables of {len(names)} clients ({', '.join(names)}), {total} rows; {given.target!r} is adapted to.",
        place=f"They are read from `{given.data}`; other files of the same columns may take their places.",
        regression=regression,
        more=_placeholders(given.label, len(features), written, regression),
    )


def _placeholders(label: str, columns: int, own: str, regression: bool = False) -> dict[str, object]:
    """Of the configuration of tables with so many features."""
    rate = 0.5 if regression else 2.0  # squared errors are four and more times as curved as cross-entropies
    return {"label": flow(label), "own": own, "lr": f"{rate / columns:.2g}"}


def _counts(values: Any) -> bool:
    """Whether a column has another whole number in each row, as one that numbers them."""
    known = values.dropna()
    return bool(len(values) > _MANY and len(known) == len(values) == known.nunique() and known.dtype.kind == "i")


def example(folder: Path, writers: Writers) -> Study:
    """The embedded patients of four hospitals, as tables that somebody might have."""
    text = files("fedlit").joinpath("data", "heart_disease_uci.csv").read_text(encoding="utf-8")
    patients = [*csv.DictReader(text.splitlines())]
    tables: dict[str, list[dict[str, str]]] = {name: [] for name in _HOSPITALS.values()}
    for patient in patients:
        name = _HOSPITALS[patient["dataset"]]
        row = {"patient": f"{name}-{len(tables[name]) + 1}"}
        row |= {key: value for key, value in patient.items() if key not in _LEFT_OUT}
        if row["trestbps"] and float(row["trestbps"]) == 0:  # nobody alive has a blood pressure of 0
            row["trestbps"] = ""
        tables[name].append(row | {"disease": "yes" if float(patient["num"]) > 0 else "no"})

    def write() -> None:
        (folder / "data").mkdir()
        for name, rows in tables.items():
            with (folder / "data" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]))
                table.writeheader()
                table.writerows(rows)

    writers.append(write)
    columns = len(tables["cleveland"][0]) - 2
    return Study(
        files={name: f"data/{name}.csv" for name in tables},
        target="long_beach",
        labelled=len(tables["long_beach"]),
        about="tables of four hospitals as an example (920 patients, UCI heart disease data, CC BY 4.0): who is ill at "
        "Long Beach, which tells nobody who is?",
        place="The example runs as it is. Then put a CSV or Parquet file for each client into `data/`, in place of "
        "those there.",
        listing="- `data/`: the example, a table for each hospital.\n",
        more=_placeholders("disease", columns, "    id: patient  # names the rows, in predictions\n"),
    )
