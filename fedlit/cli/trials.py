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
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedlit.callbacks import RunSummary
from fedlit.callbacks.run_record import METRICS
from fedlit.callbacks.run_summary import accuracies
from fedlit.callbacks.tables import write_tables
from fedlit.cli.arguments import find_config, normalise, refuse_linked, refuse_nameless
from fedlit.cli.experiment import Experiment, Method
from fedlit.cli.folders import ExperimentFolder, fingerprint, first_process
from fedlit.cli.lightning_cli import FedlitCLI, Parsed, WarnOfRepeats
from fedlit.cli.schedule import print_table, say, still_to_train, train_all, trains_one
from fedlit.cli.sweep_file import SweepFile
from fedlit.console import show
from fedlit.remote import Seat

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
        axes = (f"{_AXES[short]}={value}" for name, value in self.values.items() if (short := _plain(name)) in _AXES)
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
        """Say which trial it is whose configuration is refused."""
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
            str(trial.values[name]) for trial in self.runs for name in trial.values if _plain(name) == "data.target"
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
    names = [
        name
        for name in values[0]
        if _plain(name) not in _AXES and any(each[name] != values[0][name] for each in values)
    ]
    short = {name: _short(name, names) for name in names}
    called = {value: _called(value) for value in {str(each["config"]) for each in values if "config" in each}}
    same = len({*called.values()}) < len(called)
    trials = []
    for number, each in enumerate(values):
        settings = {
            short[name]: (called[str(each[name])] if name == "config" and not same else str(each[name]))
            for name in names
        }
        parts = [value if name == "config" else f"{name}={value}" for name, value in settings.items()]
        trials.append(Trial(number, each, settings, ", ".join(parts) or None))
    return trials


def _plain(name: str) -> str:
    return name.replace(".init_args", "")


def _short(name: str, names: Sequence[str]) -> str:
    """The last words of a name that no other has."""
    words = _plain(name).split(".")
    for count in range(1, len(words)):
        end = ".".join(words[-count:])
        if not any(other != name and f".{_plain(other)}".endswith(f".{end}") for other in names):
            return end
    return _plain(name)


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
    print_table(named)
    ranks = Ranking(sweep, dict(zip(done, named, strict=True)))
    if not first_process():
        return
    show(ranks.table())
    paths = [*write_tables(named, sweep.folder.path), _write_trials(sweep, done, failed)]
    say(f"tables: {', '.join(map(str, paths))}")
    for line in ranks.best():
        say(line)
    if len(done) < len(sweep.runs):
        say(f"{len(done)} of {len(sweep.runs)} trials are finished: the same command goes on")


@dataclass(frozen=True)
class Group:
    """Trials of the same settings on the same target, one for each seed.

    Args:
        label: The settings.
        target: Client name.
        numbers: Of its trials that are finished.
        whole: Whether all of its trials are finished and have logged the metric.
        score: Mean of the metric over its trials; ``None`` if none has it.
        spread: Their sample standard deviation; ``None`` of a single one.
    """

    label: str
    target: str
    numbers: tuple[int, ...]
    whole: bool
    score: float | None
    spread: float | None


class Ranking:
    """Settings by the metric of the sweep file, on each target.

    Args:
        sweep: Whose trials.
        done: What those that are finished came to, called by their settings, by number.
    """

    def __init__(self, sweep: Sweep, done: Mapping[int, RunSummary]) -> None:
        self.sweep, self.done = sweep, done
        self.targets = [*dict.fromkeys(run.target for run in done.values())]
        by_name: dict[tuple[str, str], list[int]] = {}
        for number, run in done.items():
            by_name.setdefault((run.target, run.method), []).append(number)
        groups = []
        for (target, label), numbers in by_name.items():
            scores = [score for number in numbers if (score := sweep.metric(number)) is not None]
            whole = len(scores) == self._planned(numbers[0])
            mean = fmean(scores) if scores else None
            groups.append(Group(label, target, (*numbers,), whole, mean, stdev(scores) if len(scores) > 1 else None))
        self.groups = sorted(groups, key=lambda group: (self.targets.index(group.target), *self._rank(group)))

    def _planned(self, number: int) -> int:
        """Trials of the sweep with the same settings on the same target."""

        def key(trial: Trial) -> tuple[Any, ...]:
            return trial.label, *(str(value) for name, value in trial.values.items() if _plain(name) == "data.target")

        return sum(key(trial) == key(self.sweep.runs[number]) for trial in self.sweep.runs)

    def _rank(self, group: Group) -> tuple[bool, float]:
        """The better the lower; settings of which a trial is missing come last."""
        score = math.inf if group.score is None else group.score
        return not group.whole, -score if self.sweep.file.maximises and group.score is not None else score

    def best(self) -> list[str]:
        """A sentence for each target, and one on their average where all settings were tried on all of them."""
        metric = self.sweep.file.metric
        if metric is None:
            return ["nothing is ranked: the file has no metric, such as {name: target/score, goal: maximize}"]
        if all(group.score is None for group in self.groups):
            return [f"nothing is ranked: no trial has logged a number as {metric!r}, the metric of the file"]
        lines = []
        for target in self.targets:
            first = next((group for group in self.groups if group.target == target and group.whole), None)
            if first is not None and first.score is not None:
                where = self.sweep.folder.folder_of(first.numbers[0])
                lines.append(
                    f"best on {target} by {metric} ({self._goal}, no label of the target needed): {first.label}, "
                    f"{first.score:.4g}; its first run is '{where}'"
                )
        average = self._average()
        if average is not None:
            lines.append(f"best on average of {len(self.targets)} targets: {average[0]}, {average[1]:.4g}")
        return lines

    def _average(self) -> tuple[str, float] | None:
        """The settings that are best on average, of those tried on all targets; ``None`` of one target, or one such."""
        scores: dict[str, list[float]] = {}
        for group in self.groups:
            if group.whole and group.score is not None:
                scores.setdefault(group.label, []).append(group.score)
        means = {label: fmean(each) for label, each in scores.items() if len(each) == len(self.targets)}
        if len(self.targets) < 2 or len(means) < 2:
            return None
        label = (max if self.sweep.file.maximises else min)(means, key=lambda each: means[each])
        return label, means[label]

    @property
    def _goal(self) -> str:
        return "the highest" if self.sweep.file.maximises else "the lowest"

    def table(self) -> Table:
        """Groups, the best of each target first."""
        metric, settings = self.sweep.file.metric, [*self.sweep.runs[0].settings]
        explained = any(run.oracle_r2 is not None for run in self.done.values())
        title = "trials, in their order" if metric is None else f"settings by {metric}, {self._goal} first"
        table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for name in ["trial", *(["target"] if len(self.targets) > 1 else []), *settings]:
            table.add_column(Text(name), overflow="fold")
        for name in [
            *([] if metric is None else [metric]),
            f"target {'R2 in %' if explained else 'accuracy'}\n(oracle)",
        ]:
            table.add_column(Text(name), justify="right")
        for group in self.groups:
            first = self.sweep.runs[group.numbers[0]]
            cells = [", ".join(str(number + 1) for number in group.numbers)]
            cells += [group.target] if len(self.targets) > 1 else []
            cells += [first.settings[name] for name in settings]
            cells += [] if metric is None else [_mean(group.score, group.spread, "{:.4g}")]
            found = [100 * each for each in accuracies(self.done[number] for number in group.numbers)]
            spread = stdev(found) if len(found) > 1 else None
            cells.append(_mean(fmean(found) if found else None, spread, "{:.1f}"))
            last = group is self.groups[-1] or self.groups[self.groups.index(group) + 1].target != group.target
            table.add_row(*map(Text, cells), end_section=last)
        return table


def _mean(mean: float | None, spread: float | None, form: str) -> str:
    if mean is None:
        return "-"
    return form.format(mean) + ("" if spread is None else f" ± {form.format(spread)}")


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
