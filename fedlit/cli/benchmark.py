"""``fedlit benchmark``: a benchmark, or a table or figure of a paper, run again and next to what was found before."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from fedlit.checks import ArgumentError
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
    """Run a benchmark or a table of a paper, and compare; without a name, list what there is."""
    parser = argparse.ArgumentParser(
        prog="fedlit benchmark",
        usage="fedlit benchmark [-h] [--list] [NAME ... | PAPER TABLE ... | --page FILE]",
        description="Run a table or figure of a paper (fedlit benchmark fedgp table-12) and print it next to the "
        "paper's, or a benchmark (fedlit benchmark fedgp --parts heart) and report for each figure with a spread "
        "whether it lies within the shipped one's. Arguments after the names are the benchmark's own "
        "(fedlit benchmark NAME --help, fedlit benchmark PAPER TABLE --help).",
    )
    parser.add_argument("--list", action="store_true", help="List benchmarks, and the papers' tables and figures.")
    parser.add_argument(
        "--page", metavar="FILE", type=Path, help="Write the page of the papers, such as docs/papers.md."
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="A benchmark, such as fedgp; or a paper.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="TABLE of the paper; arguments of the benchmark.")
    options = parser.parse_args(args)
    table = next(iter(options.arguments), "")
    if options.page:
        from fedlit.papers.page import page

        with _shipped() as results:
            text = page(results, _folder())
        try:
            options.page.write_text(text, encoding="utf-8")
        except OSError as error:
            sys.exit(f"fedlit: the page cannot be written: {error}")
    elif options.list or options.name is None:
        _list()
    elif table.startswith(("table", "figure")):
        _paper(options.name, table, options.arguments[1:])
    else:
        _script(options.name, options.arguments)


def _list() -> None:
    from fedlit.papers.entries import names, read
    from fedlit.papers.page import state
    from fedlit.papers.running import STAND_IN, ours, read_results

    for name, path in _scripts().items():
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        print(f"{name:22s} {about.partition(chr(10))[0]}")
    with _shipped() as results:
        small = read_results(results / f"{STAND_IN}.json")
        for paper in names():
            print(f"\n{read(paper).paper}")
            for table, asked in read(paper).tables.items():
                how = state(asked, ours(paper, table, results, _folder()), small.get(paper, {}).get(table))
                print(f"{paper + ' ' + table:26s} {asked.title} [{how}]")


def _papers(tables: Sequence[tuple[str, str]], args: list[str]) -> None:
    """Run tables one after the other, whatever becomes of those before."""
    failed = []
    for table in tables:
        print(f"fedlit benchmark {' '.join((*table, *args))}", flush=True)
        try:
            _paper(*table, args)
        except SystemExit as end:
            if end.code:
                print(end.code, file=sys.stderr, flush=True)
                failed.append(" ".join(table))
    if failed:
        sys.exit(f"fedlit: not run, or not whole: {', '.join(failed)}")


def _paper(name: str, table: str, args: list[str]) -> None:
    from fedlit.papers.entries import entry, same_as
    from fedlit.papers.running import compared, ours, read_results, run, run_stand_in

    parser = argparse.ArgumentParser(prog=f"fedlit benchmark {name} {table}")
    parser.add_argument("--seeds", nargs="+", type=int, default=(), help="In place of those of the configurations.")
    parser.add_argument("--columns", nargs="+", default=(), help="Only these columns of the table.")
    parser.add_argument("--jobs", type=int, default=1, help="Trainings side by side.")
    parser.add_argument("--folder", type=Path, help="Keep the runs there; what is finished is not trained again.")
    parser.add_argument("--out", type=Path, default=Path("papers"), help="Folder of the JSON files; default: papers.")
    parser.add_argument("--stand-in", action="store_true", help="On small made data of the same layout: that it runs.")
    parser.add_argument("--fit", nargs="+", default=(), metavar="KEY=VALUE", help="Arguments of each fedlit fit, "
                        "such as data.init_args.root=FOLDER.")  # fmt: skip
    try:
        asked = entry(name, table)
    except ValueError as error:
        sys.exit(f"fedlit: {error}")
    options = parser.parse_args(args)
    if asked.shows and not asked.script:
        sys.exit(f"fedlit: {name} {table} has nothing to run: {asked.shows}")
    if asked.same:
        return _papers(same_as(asked), args)
    if asked.script:
        given = [word for each in args if (word := each.partition("=")[0]).startswith("-") and word != "--out"]
        if given:
            way_out = f"run fedlit benchmark {asked.script}, which has arguments of its own (--help)"
            sys.exit(f"fedlit: {name} {table} is a benchmark's, to which {', '.join(given)} says nothing: {way_out}")
        print(f"fedlit benchmark {asked.script}")
        folder = options.out / "benchmarks"  # a paper's file may have a benchmark's name
        _script(asked.script.split()[0], asked.script.split()[1:], folder.resolve())
        found = ours(name, table, options.out, folder)
        return show(compared(asked, found)) if found else None
    unknown = set(options.columns) - {each.column for each in asked.runs}
    if unknown:
        known = ", ".join(each.column for each in asked.runs if each.column)
        sys.exit(f"fedlit: columns must be of {known or 'no run, which have a column for each target'}, got {unknown}")
    more = [name for name in ("seeds", "folder", "fit") if getattr(options, name)]
    if options.stand_in and more:
        sys.exit(
            f"fedlit: --stand-in runs one seed on made data and keeps no runs, so leave --{' and --'.join(more)} out"
        )
    problem = None
    try:
        if options.stand_in:
            run_stand_in(name, table, options.out, options.columns)
        else:
            arguments = [f"--{each}" for each in options.fit]
            run(name, table, options.out, seeds=options.seeds, columns=options.columns, jobs=options.jobs,
                arguments=arguments, kept=options.folder)  # fmt: skip
        found = ours(name, table, options.out, _folder())
    except RuntimeError as error:  # the other experiments' figures are shown
        problem, found = f"fedlit: {error}", ours(name, table, options.out, _folder())
    except (OSError, ArgumentError) as error:
        sys.exit(f"fedlit: {error}")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        sys.exit(f"fedlit: the figures in --out={options.out} cannot be read ({error}): remove the file, or mend it")
    if options.stand_in and problem is None:
        where = "" if options.columns else f"; see {options.out / 'stand_ins.json'}"
        print(f"{name} {table} ran on made data of the same layout{where}")
        return None
    if found:
        show(compared(asked, found))
    with _shipped() as results:
        kept = read_results(results / f"{name}.json").get(table, {})
    if kept:
        show(comparison(list(figures(kept)), list(figures(read_results(options.out / f"{name}.json").get(table, {})))))
    if problem is not None:
        sys.exit(problem)
    return None


def _script(name: str, arguments: list[str], folder: Path | None = None) -> None:
    there = _scripts()
    if name not in there:
        sys.exit(f"fedlit: name must be one of {', '.join(there)}, or a paper with one of its tables, got {name!r}")
    script = there[name]
    command = [sys.executable, str(script), *arguments]
    if {"-h", "--help"} & set(arguments):
        sys.exit(subprocess.run(command, check=False).returncode)
    if any(each.split("=")[0] == "--out" for each in arguments):
        sys.exit(
            "fedlit: --out is not for fedlit benchmark, which keeps the repository's figures to compare with: run "
            f"python benchmarks/{script.name} to replace them"
        )
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder)) as place:
        try:
            Path(place).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"fedlit: the figures cannot be kept in --out: {error}")
        out = Path(place, script.with_suffix(".json").name)
        done = subprocess.run([*command, f"--out={out}"], cwd=_clone(), check=False)
        if done.returncode:
            sys.exit(done.returncode)
        now = list(figures(json.loads(out.read_text()).get("results", {})))
        tables = [sys.executable, str(script.with_name("tables.py")), name, f"--results={out}"]
        made = subprocess.run(tables, capture_output=True, text=True, check=False)
        if made.returncode == 0:  # the tables of this benchmark on the repository's pages, with this run's figures
            print(f"\n{made.stdout}", end="")
        else:
            print(f"no table for the pages: {(made.stderr.strip().splitlines() or ['?'])[-1]}", flush=True)
    kept = list(figures(json.loads(script.with_suffix(".json").read_text()).get("results", {})))
    show(comparison(kept, now))


def _scripts() -> dict[str, Path]:
    """Benchmarks with figures, by name; outside a clone, those that need nothing of its tests."""
    folder, in_clone = _folder(), _clone() is not None
    there = {path.stem: path for path in sorted(folder.glob("*.py")) if path.with_suffix(".json").is_file()}
    return {name: path for name, path in there.items() if in_clone or '"tests"' not in path.read_text(encoding="utf-8")}


def _folder() -> Path:
    """Of the benchmarks: the clone's that the command is run in, or the one that is installed."""
    clone = _clone()
    return Path(str(files("fedlit.benchmarks"))) if clone is None else clone / "benchmarks"


def _clone() -> Path | None:
    here = Path.cwd()
    for root in (here, *here.parents):
        if (root / "benchmarks" / "tables.py").is_file() and (root / "fedlit").is_dir():
            return root
    return None


def _shipped() -> AbstractContextManager[Path]:
    """The folder of figures of the papers' tables."""
    return as_file(files("fedlit.papers").joinpath("results"))


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
