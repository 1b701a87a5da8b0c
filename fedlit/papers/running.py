"""Runs a table or figure of a paper: its experiments as subprocesses, and the cells that their runs come to."""

from __future__ import annotations

import csv
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from zlib import crc32

import yaml

from fedlit.checks import check
from fedlit.configs import flow
from fedlit.papers.entries import Cells, Entry, Fit, entry, read
from fedlit.papers.experiments import Results, by_target, fit, spread
from fedlit.tables import Table

STAND_IN = "stand_ins"
"""File of what ran on stand-ins: that it did, and no figure."""

_UNITS = {"megabytes": 1.0, "seconds": 1.0, "seconds_per_round": 1.0, "oracle_r2": 1.0}
"""Factors of measures that are no shares; shares are shown in per cent."""


def run(
    paper: str,
    table: str,
    folder: Path,
    *,
    seeds: Sequence[int] = (),
    columns: Sequence[str] = (),
    arguments: Sequence[str] = (),
    jobs: int = 1,
    kept: Path | None = None,
) -> None:
    """Run all experiments of a table, and keep each column's figures in ``folder/PAPER.json`` as they come.

    Args:
        paper: Its name.
        table: Name of its table or figure.
        folder: Of the files of results.
        seeds: In place of the configurations'.
        columns: Only runs of these; all by default.
        arguments: Of each ``fedlit fit``, such as where the data are.
        jobs: Trainings side by side.
        kept: Folder in which they stay, and go on where they were ended; by default they are not kept.

    Raises:
        RuntimeError: If an experiment fails, once all others have run; with what it printed.
    """
    asked = entry(paper, table)
    results = _results(folder, paper)
    fits = _chosen(asked, columns)
    side_by_side = max(1, min(jobs, len(fits)))
    more = [*arguments, *([f"--seeds={list(seeds)}"] if seeds else []), f"--jobs={max(1, jobs // side_by_side)}"]

    def one(each: Fit) -> str:
        given = _given(each)
        settings = crc32(
            " ".join([*given, *arguments, *map(str, seeds)]).encode()
        )  # others' runs are none of this cell
        place = kept and kept / f"{paper}_{table}_{asked.runs.index(each)}_{settings:08x}"
        try:
            with _folder(place) as there:
                runs = fit(there, *given, *more)
                runs = {folder: one for folder, one in runs.items() if not seeds or one["seed"] in seeds}
                columns = (
                    _curves(runs, each, asked) if asked.curve else _columns([*runs.values()], each, asked.measures)
                )
        except RuntimeError as error:
            return f"{each.column or each.row or ', '.join(each.configs)}: {error}"
        with results.lock:  # other experiments fill other rows of a column
            for column, cells in columns.items():
                known = results.found.get(table, {}).get(column, {})
                results.keep({**known, **cells, "run": {**known.get("run", {}), **cells["run"]}}, table, column)
        return ""

    with ThreadPoolExecutor(side_by_side) as pool:
        failed = [problem for problem in pool.map(one, fits) if problem]
    if failed:
        needs = f"; this table needs {', '.join(asked.data)}, see configs/data" if asked.data else ""
        raise RuntimeError(f"{len(failed)} of {len(fits)} experiments failed{needs}:\n" + "\n".join(failed))


def run_stand_in(paper: str, table: str, folder: Path, columns: Sequence[str] = ()) -> None:
    """Run each method of each configuration whose data are to be fetched once, on small data of that layout.

    Runs that differ in numbers or data alone count as one. Of all, it is kept that they ran.

    Args:
        paper: Its name.
        table: Name of its table or figure.
        folder: Of the files of results.
        columns: Only runs of these; all by default.

    Raises:
        ValueError: If all data of these runs come with fedlit.
    """
    from fedlit.papers.stand_ins import STAND_INS  # with Pillow and scipy

    asked = entry(paper, table)
    results = _results(folder, STAND_IN)
    started, methods = time.monotonic(), set[str]()
    different: dict[str, Fit] = {}
    for each in reversed([one for one in _chosen(asked, columns) if one.needs]):
        numbers = [key for key, value in each.set.items() if type(value) in (int, float)]  # of the same method
        of_method = {key: v for key, v in each.set.items() if key not in numbers and not key.startswith("data")}
        different[repr((each.configs, each.needs, of_method))] = each
    check(bool(different), "stand_in", "for a table whose data are to be fetched", table, "run it on its data")
    for each in reversed(different.values()):
        with tempfile.TemporaryDirectory() as place:
            given = STAND_INS[each.needs](Path(place))
            options = [*_given(each, place), *(f"--{key}={text}" for key, text in given.items())]
            with _folder(None) as there:
                methods |= {str(one["method"]) for one in fit(there, *options).values()}
    found = {"fits": len(different), "methods": sorted(methods), "seconds": round(time.monotonic() - started, 1)}
    if not columns:  # of some columns it would take the place of all
        results.keep(found, paper, table)


def ours(paper: str, table: str, folder: Path, benchmarks: Path | None) -> Cells:
    """Figures of a table by row and column, with the rows' names of the paper.

    Args:
        paper: Its name.
        table: Name of its table or figure.
        folder: Of the files of results.
        benchmarks: Folder of the benchmarks' files, from which some entries take theirs.
    """
    asked, kept = entry(paper, table), _kept(paper, table, folder, benchmarks)
    names, seeds = {name: row for row, name in asked.rows.items()}, _numbers_of_seeds(asked, kept)
    by_column = not asked.source or asked.source.get("by") == "column"
    cells: dict[str, dict[str, Any]] = {}
    for outer, inner, figure in _pairs(kept):
        row, column = (inner, outer) if by_column else (outer, inner)
        row = names.get(row, row)
        if isinstance(figure, Mapping) and not figure["std"] and seeds.get(row, 1) == 1:
            figure = {"mean": figure["mean"]}  # of one seed, which has no spread
        cells.setdefault(row, {})[column] = figure
    return cells


def _kept(paper: str, table: str, folder: Path, benchmarks: Path | None) -> Any:
    """What a table's own file, or that of the benchmark which it takes its figures from, has for it."""
    asked = entry(paper, table)
    if not asked.source:
        return read_results(folder / f"{paper}.json").get(table, {})
    if benchmarks is None:
        return {}
    found = read_results(benchmarks / f"{asked.source['file']}.json")
    for key in asked.source["part"].split("/"):
        found = found.get(key, {})
    return found


def compared(asked: Entry, found: Cells) -> Table:
    """A table of our figures, each followed by the paper's in brackets."""
    columns = list(dict.fromkeys(column for cells in (asked.paper, found) for row in cells.values() for column in row))
    rows = list(dict.fromkeys([*asked.paper, *found]))
    return Table.of(
        ["", *columns],
        [[row, *(cell(found.get(row, {}).get(c), asked.paper.get(row, {}).get(c)) for c in columns)] for row in rows],
        caption=f"{asked.title} - ours (the paper's)",
    )


def cell(mine: Any, printed: Any) -> str:
    """One cell: our figure, and in brackets the paper's."""
    text = "-" if mine is None else shown(mine)
    return text if printed is None else f"{text} ({printed})"


def shown(figure: Any) -> str:
    """A figure as text, its spread with it."""
    if isinstance(figure, Mapping):
        return f"{figure['mean']} ± {figure['std']}" if "std" in figure else str(figure["mean"])
    return f"{figure:g}" if isinstance(figure, float) else str(figure)


def label_of(measure: str) -> str:
    """What a column's name ends with, where there are several measures."""
    return f", {measure.removeprefix('oracle_').replace('_', ' ')}"


def seeds_of(paper: str, table: str, folder: Path, benchmarks: Path | None) -> Mapping[str, int]:
    """Number of seeds that the figures of each row are over, at least, with the rows' names of the paper."""
    return _numbers_of_seeds(entry(paper, table), _kept(paper, table, folder, benchmarks))


def _numbers_of_seeds(asked: Entry, kept: Any) -> Mapping[str, int]:
    names = {name: row for row, name in asked.rows.items()}
    numbers: dict[str, int] = {}
    for method, record in _mappings(kept):
        seeds = record.get("seeds", record.get("by_seed"))
        if isinstance(seeds, list | Mapping):
            row = names.get(method, method)
            numbers[row] = min(len(seeds), numbers.get(row, len(seeds)))
    return numbers


def seconds(paper: str, folder: Path, benchmarks: Path | None) -> float:
    """Seconds that the runs behind a paper's tables took, as far as its files have them; the same runs count once."""
    spent: dict[str, float] = {}
    for table, asked in read(paper).tables.items():
        place = "/".join(asked.source[key] for key in ("file", "part")) if asked.source else table
        records = [record for _, record in _mappings(_kept(paper, table, folder, benchmarks)) if "seeds" in record]
        spent[place] = sum(float(each["seconds"]) for each in records if isinstance(each.get("seconds"), int | float))
    return sum(spent.values())


def _mappings(found: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Mappings in a mapping, at any depth, each with its key."""
    for key, value in found.items() if isinstance(found, Mapping) else ():
        if isinstance(value, Mapping):
            yield key, value
            yield from _mappings(value)


def read_results(path: Path) -> Any:
    """What a file of figures has; nothing, if there is none."""
    if not path.is_file():
        return {}
    whole = json.loads(path.read_text(encoding="utf-8"))
    found = whole.get("results", whole) if isinstance(whole, Mapping) else whole
    check(isinstance(found, Mapping), str(path), "a file of figures by table", found, "remove it, or mend it")
    return found


def read_made(path: Path) -> Any:
    """By which command each piece of a file of figures was made; nothing, if there is none."""
    return json.loads(path.read_text(encoding="utf-8")).get("made", {}) if path.is_file() else {}


def _chosen(asked: Entry, columns: Sequence[str]) -> list[Fit]:
    """The runs of some columns, or all."""
    return [each for each in asked.runs if not columns or each.column in columns]


def _results(folder: Path, name: str) -> Results:
    folder.mkdir(parents=True, exist_ok=True)
    return Results(folder / f"{name}.json", "torch", "lightning", "fedlit")


def _folder(kept: Path | None) -> AbstractContextManager[str]:
    """The folder of a fit's runs: the one in which they stay, or one that goes."""
    return tempfile.TemporaryDirectory() if kept is None else nullcontext(str(kept))


def _given(each: Fit, small: str = "") -> list[str]:
    """Arguments of the fit; with a folder ``small``, of a shrunk one, whose configurations are written there."""
    words = []
    for index, name in enumerate(each.configs):
        if small:
            whole = yaml.safe_load(files("fedlit.configs").joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
            path = Path(small, f"{index}.yaml")
            path.write_text(yaml.safe_dump(shrunk(whole)), encoding="utf-8")
            name = str(path)
        words.append(f"--config={name}")
    words += _options(shrunk(each.set) if small else each.set)
    return [*words, *(["--compare=null"] if each.row else [])]


_SMALL: dict[str, int] = {
    "max_epochs": 2, "rounds_per_epoch": 1, "federated_rounds": 1, "warmup_rounds": 1, "local_steps": 2,
    "check_val_every_n_epoch": 1, "image_size": 32, "max_samples": 200, "batch_size": 8, "target_batch_size": 4,
    "num_iterations": 2, "classifier_period": 1,
}  # fmt: skip
"""Values that an argument of this name is lowered to."""


def shrunk(given: Any) -> Any:
    """A configuration of the same experiment with a few rounds, small images and networks without trained weights."""
    if isinstance(given, list):
        return [shrunk(each) for each in given]
    if not isinstance(given, Mapping):
        return given
    small: dict[str, Any] = {}
    for key, value in given.items():
        name = key.rpartition(".")[2]
        if name in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            small[key] = min(value, _SMALL[name])
        elif name == "seeds":
            small[key] = [0]
        elif name == "target_labels" and value not in (0, 1.0):  # few labels of few samples would be none
            small[key] = 8
        elif name == "strategy" and isinstance(value, Mapping):
            small[key] = {**shrunk(value), "init_args": {**shrunk(value.get("init_args", {})), "local_steps": 2}}
        elif name == "targets":
            small[key] = None
        elif name == "num_workers":
            small[key] = 0
        elif name in ("weights", "resized_side") and "class_path" not in given:
            small[key] = None
        else:
            small[key] = shrunk(value)
    return small


def _options(values: Mapping[str, Any]) -> list[str]:
    return [f"--{key}={flow(value)}" for key, value in values.items()]


def _columns(summaries: Sequence[dict[str, Any]], each: Fit, measures: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Figures by column and method."""
    result: dict[str, dict[str, Any]] = {}
    for measure in measures:
        label = "" if len(measures) == 1 else label_of(measure)
        for method in dict.fromkeys(str(one["method"]) for one in summaries):
            own = [one for one in summaries if one["method"] == method]
            *targets, average = by_target(own, partial(_value, measure=measure), _UNITS.get(measure, 100.0)).items()
            if each.column:
                found = {each.column: (average[1], own)}
            else:
                found = {
                    each.targets.get(target, target): (figure, [one for one in own if one["target"] == target])
                    for target, figure in targets
                }
                if len(targets) > 1:
                    found["average"] = (average[1], [])  # of runs that the others have
            for column, (figure, runs) in found.items():
                cells = result.setdefault(column + label, {})
                cells[each.row or method] = figure
                spent = sum(one["seconds_total"] for one in runs) if measure == measures[0] else 0.0  # each run once
                seeds = sorted({one["seed"] for one in own})
                cells.setdefault("run", {})[each.row or method] = {"seeds": seeds, "seconds": round(spent, 1)}
    return result


def _curves(runs: Mapping[Path, Mapping[str, Any]], each: Fit, asked: Entry) -> dict[str, dict[str, Any]]:
    """By round, a metric of each source at each target, over seeds; from the metrics in the runs' folders."""
    found: dict[str, dict[str, list[float]]] = {}
    for place, summary in runs.items():
        target = each.targets.get(summary["target"], summary["target"])
        try:
            rows = list(csv.DictReader((place / "metrics.csv").read_text(encoding="utf-8").splitlines()))
        except OSError as error:
            raise RuntimeError(f"{asked.curve} is read of metrics.csv, which a run has not written: {error}") from error
        ends = {row["step"]: 1 + int(float(row["round"])) for row in rows if row.get("round")}
        for metric in rows[0] if rows else ():
            source = metric.removeprefix(f"{asked.curve}/")
            if source == metric:
                continue
            name = f"target {target}: {each.targets.get(source, source)}"
            for row in rows:
                number = ends.get(row["step"])
                if row[metric] and number in asked.rounds:  # a warm-up has no such metric
                    found.setdefault(f"round {number}", {}).setdefault(name, []).append(float(row[metric]))
    share = sum(one["seconds_total"] for one in runs.values()) / max(1, sum(map(len, found.values())))
    record = {"seeds": sorted({one["seed"] for one in runs.values()}), "seconds": round(share, 1)}
    return {
        column: {**{row: spread(values, 1.0, 4) for row, values in rows.items()}, "run": dict.fromkeys(rows, record)}
        for column, rows in found.items()
    }


def _value(summary: Mapping[str, Any], measure: str) -> float:
    if measure == "megabytes":
        return float(sum(summary["bytes_by_channel"].values())) / 1e6
    if measure == "seconds":
        return float(summary["seconds_total"])
    if measure == "seconds_per_round":
        return float(summary["seconds_total"] / summary["rounds"])
    return float(summary[measure])


def _pairs(found: Any) -> Iterator[tuple[str, str, Any]]:
    """Outer key, inner key and figure; other things in between are left out."""
    for outer, cells in found.items():
        if not isinstance(cells, Mapping) or "mean" in cells:
            continue
        for inner, figure in cells.items():
            if isinstance(figure, int | float) or (isinstance(figure, Mapping) and {"mean", "std"} <= figure.keys()):
                yield outer, inner, figure
