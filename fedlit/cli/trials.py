"""Trials of a sweep: trained as runs of an experiment are, and ranked by a metric that needs no label of the target."""

from __future__ import annotations

import csv
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedlit.callbacks import RunSummary
from fedlit.callbacks.run_record import METRICS
from fedlit.callbacks.selection import TRUST
from fedlit.callbacks.summary import write_tables
from fedlit.cli.arguments import find_config, normalise, refuse_linked, refuse_nameless, type_true
from fedlit.cli.experiment import Experiment, Method
from fedlit.cli.folders import ExperimentFolder, fingerprint, first_process
from fedlit.cli.lightning_cli import FedlitCLI, Parsed, WarnOfRepeats
from fedlit.cli.ranking import Ranking, method_of, not_ranked, plain
from fedlit.cli.schedule import is_dry, print_table, say, still_to_train, train_all, trains_one
from fedlit.cli.sweep_file import SweepFile
from fedlit.remote import Seat
from fedlit.tables import show

_LOGGER = "WandbLogger"

_AXES = {"seed_everything": "seed", "data.target": "target"}
"""Parameters whose values are no settings to choose among, but what settings are tried on."""


@dataclass(frozen=True)
class Trial:
    """One of a sweep.

    Args:
        number: From 0.
        values: Of the swept parameters, by their names on the command line.
        settings: Those to choose among, by short names.
        label: The settings in a text, which is what the run is called in tables; ``None`` if nothing but seeds and
            targets is swept.
    """

    number: int
    values: Mapping[str, Any]
    settings: Mapping[str, str]
    label: str | None

    def __str__(self) -> str:
        axes = (f"{_AXES[short]}={value}" for name, value in self.values.items() if (short := plain(name)) in _AXES)
        return ", ".join([*([] if self.label is None else [self.label]), *axes]) or "as configured"


class SweepFolder(ExperimentFolder):
    """Where a sweep keeps what it has done: ``ROOT/sweep_NAME``.

    A trial is known there by what it is trained with, whatever its number, so that a sweep over more values takes those
    that it has tried.

    Args:
        root: Of the folders of its runs.
        name: Of the sweep.
        total: Number of trials.
        configuration: What a trial is trained with, by its number.
    """

    def __init__(self, root: Path, name: str, total: int, configuration: Callable[[int], Parsed]) -> None:
        super().__init__(root, [])
        self.path = root / f"sweep_{name}"
        self._total, self._configuration = total, configuration
        self._known: dict[int, str] = {}

    def fingerprint(self, number: int) -> str:
        """Of what a trial is trained with."""
        if number not in self._known:
            self._known[number] = fingerprint(self._configuration(number).text)
        return self._known[number]

    def forget(self) -> None:
        """Start these trials afresh; folders of runs stay."""
        for number in range(self._total):
            self._file(number).unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self.path / f"trial_{self.fingerprint(number)[:12]}.json"


class Sweep:
    """Trials of a sweep file on this machine, in the form in which runs of an experiment are trained.

    Args:
        file: That they are of.
        values: Of each trial, by parameter.
        more: Words that are added to each.
        jobs: Trials trained side by side.
        fresh: Whether to train trials again that are finished.
        wandb: Whether to keep W&B's logger.
    """

    def __init__(
        self,
        file: SweepFile,
        values: Sequence[Mapping[str, Any]],
        more: Sequence[str],
        jobs: int,
        fresh: bool,
        wandb: bool,
    ) -> None:
        self.file = file
        self.more = [*more]
        self.wandb = wandb
        self.runs = _trials(values)
        self._parsed: dict[int, Parsed] = {}
        with self._named(0):
            self._first = Experiment.parse(["fit", *self._words(0)]).parsed
        self._first.arguments.jobs, self._first.arguments.fresh = jobs, fresh

    @property
    def parsed(self) -> Parsed:
        """The first trial's, with what the command was given."""
        return self._first

    def _words(self, number: int) -> list[str]:
        words = normalise([*self.file.words(self.runs[number].values), *self.more])
        refuse_linked(words)
        refuse_nameless(words)
        return words

    @contextmanager
    def _named(self, number: int) -> Iterator[None]:
        """Print which trial it is whose configuration is refused."""
        try:
            yield
        except SystemExit:
            print(f"fedlit: trial {number + 1} ({self.runs[number]}) of {self.file.path}:", file=sys.stderr, flush=True)
            raise

    def configuration(self, number: int) -> Parsed:
        """What a trial is trained with."""
        if number not in self._parsed:
            with self._named(number):
                parsed = self._first.instead(self._words(number))
            found = [key for key in ("seeds", "targets", "compare", "ckpt_path") if parsed.arguments.get(key)]
            if found:
                sys.exit(
                    f"fedlit: a trial is one run from its start, but {self.file.path} has {' and '.join(found)}: sweep "
                    "over data.target, seed_everything and config, and take these out by words after a lone --, "
                    f"{' '.join(f'--{key}=null' for key in found)}"
                )
            if not self.wandb:
                parsed.arguments.trainer.logger = _without_wandb(parsed.arguments.trainer.logger)
            self._parsed[number] = parsed
        return self._parsed[number]

    @cached_property
    def folder(self) -> SweepFolder:
        """Where it is kept what is finished."""
        root = Path(self._first.arguments.trainer.default_root_dir or "runs")
        return SweepFolder(root, Path(self.file.path).stem, len(self.runs), self.configuration)

    @cached_property
    def _repeats(self) -> WarnOfRepeats | None:
        targets = [
            str(trial.values[name]) for trial in self.runs for name in trial.values if plain(name) == "data.target"
        ]
        return WarnOfRepeats([*dict.fromkeys(targets)], {}) if len(self.runs) > 1 else None

    def start(
        self,
        run: Trial,
        place: Callable[[Path], Path] | None = None,
        checkpoint: Path | None = None,
        seat: Seat | None = None,
    ) -> RunSummary:
        """Train and evaluate a trial; ends with it if it has not logged what trials are ranked by.

        Args:
            run: Which.
            place: Makes its folder in the one that is given.
            checkpoint: Of this trial, in that folder: where it was interrupted and goes on.
            seat: ``None``: a sweep is of one organisation.
        """
        try:
            cli = FedlitCLI(
                self.configuration(run.number),
                one_of_many=True,
                name=run.label,
                repeats=self._repeats,
                place=place,
                checkpoint=checkpoint,
                seat=seat,
            )
        except BaseException:
            wandb = sys.modules.get("wandb")
            if self.wandb and wandb is not None and wandb.run is not None:
                wandb.finish(exit_code=1)  # or W&B would take the next trial for this one
            raise
        assert cli.summary is not None
        has = self._logged(run.number) if first_process() else {}
        if has and self.file.metric is not None and self.file.metric not in has:
            sys.exit(
                f"it has not logged {self.file.metric!r}, the metric of {self.file.path}: rank by one of "
                f"{', '.join(self._label_free(has))}"
            )
        return cli.summary

    def metric(self, number: int) -> float | None:
        """What a finished trial has logged last of the metric; ``None`` if that is nothing, or no number."""
        logged = self._logged(number).get(self.file.metric or "")
        return logged if logged is not None and math.isfinite(logged) else None

    @staticmethod
    def _label_free(logged: Mapping[str, float]) -> list[str]:
        """Names of what trials could be ranked by."""
        return sorted(name for name in logged if "/" in name and not name.startswith("oracle/"))

    def _logged(self, number: int) -> dict[str, float]:
        folder = self.folder.folder_of(number)
        if folder is None or not (folder / METRICS).is_file():
            return {}
        with (folder / METRICS).open(newline="", encoding="utf-8") as file:
            return {name: float(value) for row in csv.DictReader(file) for name, value in row.items() if name and value}


def _trials(values: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """Trials with short names of their settings, as short as they are different."""
    different = {name: {type_true(each[name]): each[name] for each in values} for name in values[0]}
    names = [name for name in values[0] if plain(name) not in _AXES and len(different[name]) > 1]
    short = {name: _short(name, names) for name in names}
    called = {value: _called(value) for value in {str(each["config"]) for each in values if "config" in each}}
    same = len({*called.values()}) < len(called)
    trials = []
    for number, each in enumerate(values):
        shown = {name: _shown(each[name], different[name]) for name in names}
        settings = {
            short[name]: called[str(each[name])] if name == "config" and not same else shown[name] for name in names
        }
        parts = [value if name == "config" else f"{name}={value}" for name, value in settings.items()]
        trials.append(Trial(number, each, settings, ", ".join(parts) or None))
    return trials


def _shown(value: Any, others: Mapping[str, Any]) -> str:
    """A value as text, with quotes where others would have the same: 1.0 and the text "1.0"."""
    texts = {str(each) for each in others.values()}
    return str(value) if len(texts) == len(others) else repr(value)


def _short(name: str, names: Sequence[str]) -> str:
    """The last words of a name that no other has."""
    words = plain(name).split(".")
    for count in range(1, len(words)):
        end = ".".join(words[-count:])
        if not any(other != name and f".{plain(other)}".endswith(f".{end}") for other in names):
            return end
    return plain(name)


def _called(config: str) -> str:
    """What a configuration is called among methods that are compared."""
    return (Method.parse(config).name if os.path.isfile(find_config(config)) else None) or config


def _without_wandb(logger: Any) -> Any:
    """Loggers of a configuration, without those of W&B."""
    if isinstance(logger, list):
        kept = [each for each in logger if not _is_wandb(each)]
        return kept or None
    return None if _is_wandb(logger) else logger


def _is_wandb(logger: Any) -> bool:
    return str(getattr(logger, "class_path", "")).split(".")[-1] == _LOGGER


# ---------------------------------------------------------------- all of them


def run_sweep(sweep: Sweep, args: list[str]) -> None:
    """Train the trials that are not finished yet, and print and write what all came to.

    Args:
        sweep: Of which.
        args: Of the command line, for processes that train single trials.
    """
    if trains_one(sweep):
        return
    failed: dict[int, str] = {}
    waiting = still_to_train(sweep)
    metric, trials = sweep.file.metric, range(len(sweep.runs))
    if metric not in (None, TRUST) and len({method_of(sweep.configuration(number)) for number in trials}) > 1:
        say(not_ranked(metric))
    try:
        train_all(sweep, args, waiting, failed)
    finally:
        _close(sweep, failed)
    if failed:
        sys.exit(f"fedlit: {len(failed)} of {len(sweep.runs)} trials failed: the same command tries them again")


def _close(sweep: Sweep, failed: Mapping[int, str]) -> None:
    """Print and write tables of the trials that are finished."""
    done = {number: found for number in range(len(sweep.runs)) if (found := sweep.folder.finished(number)) is not None}
    if not done:
        return
    named = [replace(run, method=sweep.runs[number].label or run.method) for number, run in done.items()]
    ranks = Ranking(sweep, dict(zip(done, named, strict=True)))
    print_table(named, one_method=len(ranks.methods) < 2)
    if not first_process() or is_dry(sweep):
        return
    show(ranks.table())
    paths = [*write_tables(named, sweep.folder.path), _write_trials(sweep, done, failed)]
    say(f"tables: {', '.join(map(str, paths))}")
    for line in ranks.best():
        say(line)
    if len(done) < len(sweep.runs):
        say(f"{len(done)} of {len(sweep.runs)} trials are finished: the same command goes on")


def _write_trials(sweep: Sweep, done: Mapping[int, RunSummary], failed: Mapping[int, str]) -> Path:
    """Write ``trials.csv``: of each trial its settings, and what it came to."""
    path = sweep.folder.path / "trials.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [*sweep.runs[0].values]
    metric = sweep.file.metric
    came_to = ("oracle_accuracy", "oracle_r2", "rounds", "seconds_total")
    header = ["trial", "state", *names, *([] if metric is None else [metric]), "target", *came_to, "bytes", "folder"]
    rows: list[list[Any]] = [header]
    for trial in sweep.runs:
        run = done.get(trial.number)
        state = "finished" if run is not None else "failed" if trial.number in failed else "waiting"
        row = [trial.number + 1, state, *(trial.values[name] for name in names)]
        if run is not None:
            row += [] if metric is None else [sweep.metric(trial.number)]
            row += [run.target, *(getattr(run, name) for name in came_to), sum(run.bytes_by_channel.values())]
            row.append(sweep.folder.folder_of(trial.number))
        rows.append(row + [None] * (len(header) - len(row)))
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path
