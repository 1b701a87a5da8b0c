"""Tables: a CSV or Parquet file for each client."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlit.cli.new.studies import Kind, Study, check_target, seen_from
from fedlit.configs import flow

if TYPE_CHECKING:
    from fedlit.data import Domain

_MANY = 20
"""Rows from which on a column with another whole number in each is taken to number them."""

_HOSPITALS = {
    "Cleveland": "cleveland", "Hungary": "hungary", "Switzerland": "switzerland", "VA Long Beach": "long_beach",
}  # fmt: skip

_LEFT_OUT = ("id", "dataset", "num", "chol", "ca")
"""Columns that the example has otherwise, or not, as whole hospitals did not measure them."""


_SQUARED_LENGTH = 11.0
"""Of the example's rows, as `_squared_length` finds it."""


class Tables(Kind):
    """CSV or Parquet files; an example of patients of four hospitals."""

    summary = "tables, a CSV or Parquet file for each client, or one file and --site"
    suffixes = (".csv", ".tsv", ".parquet")

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add what describes tables."""
        tasks, several = ("classification", "regression"), {"nargs": "+"}
        more: dict[str, Any]
        for name, metavar, help_, more in (
            ("label", "COLUMN", "column to predict; with --data", {}),
            ("task", None, "whether it has classes, or numbers", {"choices": tasks}),
            ("id", "COLUMN", "column that names the rows, which is no feature", {}),
            ("site", "COLUMN", "column of the client's name, if all are in one file", {}),
            ("leave_out", "COLUMN", "columns that are no features", several),
            ("categories", "COLUMN", "categories that look like numbers", several),
            ("classes", "CLASS", "their names, in the order of their labels", several),
            ("missing_values", "TEXT", "texts that stand for missing values", several),
            ("separator", None, "between columns, such as ';'", {}),
            ("decimal", None, "sign before decimals, such as ','", {}),
            ("thousands", None, "sign between groups of three digits, such as ' '", {}),
            ("encoding", None, "of the text, such as latin-1", {}),
        ):
            parser.add_argument(f"--{name}", metavar=metavar, help=help_, **more)

    def own(self, given: argparse.Namespace) -> Study:
        """A user's tables, from the options that describe them."""
        from fedlit.data import CSVDomains, DatasetLayoutError

        described_by = (
            *("id", "leave_out", "categories", "classes", "task"),
            *("missing_values", "separator", "decimal", "thousands", "encoding"),
        )
        arguments = {key: getattr(given, key) for key in (*described_by, "site") if getattr(given, key) is not None}
        if given.task == "regression" and given.classes:
            sys.exit("fedlit: --classes names the classes of a label, and --task regression has none: leave one out")
        if given.data.is_file() and given.site is None:
            sys.exit(
                f"fedlit: --data '{given.data}' is one file: give --site COLUMN, the column that names each row's "
                "client, or a folder with a file for each client"
            )
        try:
            probe = CSVDomains(str(given.data), label=given.label or "", **arguments)
            names = probe.domain_names()
            columns = [str(name) for name in probe.table(names[0]).columns]
            if given.label is None:
                sys.exit(f"fedlit: --label must name the column to predict, and the tables have {columns}")
            check_target(given.target, names)
            as_written: dict[str, Any] = {
                "transductive": True,
                "val_fraction": 0.0,
                "test_fraction": 0.0,
            }  # in the template
            data = CSVDomains(str(given.data), label=given.label, target=given.target, **arguments, **as_written)
            facts = {name: data.facts(name) for name in names}
            data.check_facts(facts)
            rows = {name: data.load(name) for name in names}
            y = rows[given.target].y
        except DatasetLayoutError as error:
            sys.exit(f"fedlit: {error}. What it asks for is an option of fedlit new csv, with -- before it: --help")
        features = list(facts[names[0]]["columns"][names[0]])
        for name in features:
            if all(_counts(data.table(client)[name]) for client in names):
                print(
                    f"fedlit: column {name!r} has another whole number in each row: if it names them, give --id {name}"
                )
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
            more=_placeholders(given.label, _squared_length(rows, given.target), written, regression),
        )

    def example(self) -> Study:
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

        def write(folder: Path) -> None:
            (folder / "data").mkdir()
            for name, rows in tables.items():
                with (folder / "data" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                    table = csv.DictWriter(file, list(rows[0]))
                    table.writeheader()
                    table.writerows(rows)

        return Study(
            files={name: f"data/{name}.csv" for name in tables},
            target="long_beach",
            labelled=len(tables["long_beach"]),
            about="tables of four hospitals as an example (920 patients, UCI heart disease data, CC BY 4.0): who is "
            "ill at Long Beach? Its labels score the result and are for comparison.",
            place="The example runs as it is. Then put a CSV or Parquet file for each client into `data/`, in place of "
            "those there.",
            listing="- `data/`: the example, a table for each hospital.\n",
            write=write,
            more=_placeholders("disease", _SQUARED_LENGTH, "    id: patient  # names the rows, in predictions\n"),
        )


def _squared_length(rows: Mapping[str, Domain], target: str) -> float:
    """Mean squared length of a row's features, of the sources' rows or of all, whichever is larger.

    Columns have mean 0 and deviation 1 over all rows, but not over those of the sources, which may spread more.
    """
    import torch

    lengths = {name: domain.x.double().square().sum(dim=1) for name, domain in rows.items()}
    sources = [length for name, length in lengths.items() if name != target]
    return max(float(torch.cat(some).mean()) for some in (sources, [*lengths.values()]))


def _placeholders(label: str, squared_length: float, own: str, regression: bool = False) -> dict[str, object]:
    """Of the configuration of tables whose rows have features of this mean squared length.

    Gradient descent with Nesterov's momentum of 0.9 is stable below 1.35 / L. The curvature L of the mean loss is at
    most 1 + the mean squared length for squared errors twice, and for cross-entropies half.
    """
    rate = (0.5 if regression else 2.0) / (1 + squared_length)
    step = 10.0 ** (math.floor(math.log10(rate)) - 1)
    lower = math.floor(rate / step) * step  # of two digits, and never above
    return {"label": flow(label), "own": own, "lr": f"{lower:.2g}", "length": f"{squared_length:.1f}"}


def _counts(values: Any) -> bool:
    """Whether a column has another whole number in each row, as one that numbers them."""
    known = values.dropna()
    return bool(len(values) > _MANY and len(known) == len(values) == known.nunique() and known.dtype.kind == "i")
