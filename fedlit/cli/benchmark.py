"""``fedlit benchmark``: run again what the tables were made from, and compare the figures."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from fedlit.tables import Table, show


@dataclass(frozen=True)
class Figure:
    """One figure that has a spread over seeds."""

    path: tuple[str, ...]  # keys that lead to it in the JSON
    mean: float
    std: float  # sample standard deviation

    @property
    def places(self) -> int:
        """Behind the point, as the file has them."""
        exponents = (Decimal(repr(each)).as_tuple().exponent for each in (self.mean, self.std))
        return max((-exponent for exponent in exponents if isinstance(exponent, int)), default=1)

    def __str__(self) -> str:
        return f"{self.mean:.{self.places}f} ± {self.std:.{self.places}f}"


def benchmark(args: list[str]) -> None:
    """Run a benchmark and compare it with the figures that the repository has; without a name, list what there is."""
    parser = argparse.ArgumentParser(
        prog="fedlit benchmark",
        description="Run a benchmark of the repository again, and report for each figure with a spread whether it "
        "lies within theirs. Without a name: list them. Arguments after the name are the benchmark's own "
        "(fedlit benchmark NAME --help).",
    )
    parser.add_argument("name", nargs="?", help="Of a file in benchmarks/, such as fedgp.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Of the benchmark.")
    options = parser.parse_args(args)
    folder = _folder()
    there = {path.stem: path for path in sorted(folder.glob("*.py")) if path.with_suffix(".json").is_file()}
    if options.name is None:
        for name, path in there.items():
            about = ast.get_docstring(ast.parse(path.read_text())) or ""
            print(f"{name:22s} {about.partition(chr(10))[0]}")
        return
    if options.name not in there:
        sys.exit(f"fedlit: name must be one of {', '.join(there)}, got {options.name!r}")
    script = there[options.name]
    command = [sys.executable, str(script), *options.arguments]
    if {"-h", "--help"} & set(options.arguments):
        sys.exit(subprocess.run(command, check=False).returncode)
    if any(each.split("=")[0] == "--out" for each in options.arguments):
        sys.exit(
            "fedlit: --out is not for fedlit benchmark, which keeps the repository's figures to compare with: run "
            f"python benchmarks/{script.name} to replace them"
        )
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, script.with_suffix(".json").name)
        done = subprocess.run([*command, f"--out={out}"], cwd=folder.parent, check=False)
        if done.returncode:
            sys.exit(done.returncode)
        now = list(figures(json.loads(out.read_text()).get("results", {})))
        tables = [sys.executable, str(folder / "tables.py"), options.name, f"--results={out}"]
        made = subprocess.run(tables, capture_output=True, text=True, check=False)
        if made.returncode == 0:  # the tables of this benchmark on the repository's pages, with this run's figures
            print(f"\n{made.stdout}", end="")
        else:
            print(f"no table for the pages: {(made.stderr.strip().splitlines() or ['?'])[-1]}", flush=True)
    kept = list(figures(json.loads(script.with_suffix(".json").read_text()).get("results", {})))
    show(comparison(kept, now))


def _folder() -> Path:
    here = Path.cwd()
    for root in (here, *here.parents):
        if (root / "benchmarks" / "experiments.py").is_file() and (root / "fedlit").is_dir():
            return root / "benchmarks"
    sys.exit(
        f"fedlit: fedlit benchmark must be run in a clone of fedlit's repository, which {str(here)!r} is not: "
        "benchmarks are not installed with the package"
    )


def figures(results: Any, path: tuple[str, ...] = ()) -> Iterator[Figure]:
    """All figures with a spread in what the JSON has under "results", in its order, with the keys to them."""
    if not isinstance(results, dict):
        return
    if {"mean", "std"} <= results.keys() and isinstance(results["mean"], int | float):
        yield Figure(path, float(results["mean"]), float(results["std"]))
        return
    for key, value in results.items():
        yield from figures(value, (*path, str(key)))


def comparison(kept: list[Figure], now: list[Figure]) -> Table | str:
    """The figures of the repository and of this run, side by side; a sentence if there are none with a spread.

    Two means agree if they are no further apart than both spreads together, or than rounding to the decimals that they
    are reported with explains.
    """
    if not now:
        return "This benchmark has no figures with a spread over seeds: compare its output with benchmarks/RESULTS.md."
    before = {figure.path: figure for figure in kept}
    agree, rows = 0, []
    for figure in now:
        old = before.get(figure.path)
        name = ", ".join(figure.path)
        if old is None:
            rows.append([name, "-", str(figure), "new"])
            continue
        rounding = 10.0 ** -max(figure.places, old.places)
        within = abs(figure.mean - old.mean) <= max(figure.std + old.std, rounding) + 1e-9
        agree += within
        rows.append([name, str(old), str(figure), "yes" if within else "no"])
    note = f"{agree} of {sum(figure.path in before for figure in now)} within the spread"
    titles = ("figure", "repository", "this run", "within the spread")
    return Table.of(titles, rows, caption="this run next to the repository's figures", footnotes=[note])
