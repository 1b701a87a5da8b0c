"""Trials of a sweep: trained as runs of an experiment are, and ranked by a metric that needs no label of the target."""

from __future__ import annotations

import csv
import math
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
from fedlit.cli.arguments import normalise, refuse_linked, refuse_nameless, type_true
from fedlit.cli.compare import name_of
from fedlit.cli.experiment import Experiment
from fedlit.cli.folders import ExperimentFolder, fingerprint, first_process
from fedlit.cli.parsed import Parsed
from fedlit.cli.plan import Plan, print_table, say
from fedlit.cli.ranking import Ranking, method_of, not_ranked, plain
from fedlit.cli.sweep_file import SweepFile
from fedlit.remote import Seat
from fedlit.tables import show

_LOGGER = "WandbLogger"

_AXES = {"seed_everything": "seed", "data.target": "target"}
"""Parameters whose values are no settings to choose among, but what settings are tried on."""


@dataclass(frozen=True)
class Trial:
    """One of a sweep."""

    number: int
    values: Mapping[str, Any]  # of the swept parameters, by their names on the command line
    settings: Mapping[str, str]  # those to choose among, by short names
    label: str | None  # of the run in tables: the settings, if more than seeds and targets are swept

    def __str__(self) -> str:
        axes = (f"{_AXES[short]}={value}" for name, value in self.values.items() if (short := plain(name)) in _AXES)
        return ", ".join([*([] if self.label is None else [self.label]), *axes]) or "as configured"


class Sweep(Plan):
    """Trials of a sweep file on this machine.

    Args:
        file: That they are of.
        values: Of each trial, by parameter.
        more: Words that are added to each.
        jobs: Trials trained side by side.
        fresh: Whether to train trials again that are finished.
        wandb: Whether to keep W&B's logger.
    """

    goes_on = True
    is_many = True  # a trial may be one of many later

    def __init__(
        self,
        file: SweepFile,
        values: Sequence[Mapping[str, Any]],
        more: Sequence[str],
        jobs: int,
        fresh: bool,
        wandb: bool,
    ) -> None:
        self.file, self.more, self.wandb = file, [*more], wandb
        self._trials = name_trials(values)
        self._configurations: dict[int, Parsed] = {}
        with self._named(0):
            self.parsed = Experiment(["fit", *self._words(0)]).parsed
        self.parsed.arguments.jobs, self.parsed.arguments.fresh = jobs, fresh

    @property
    def runs(self) -> list[Trial]:
        """The trials."""
        return self._trials

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
        if number not in self._configurations:
            with self._named(number):
                parsed = self.parsed.instead(self._words(number))
            several = [key for key in ("seeds", "targets", "compare", "ckpt_path") if parsed.arguments.get(key)]
            if several:
                sys.exit(
                    f"fedlit: a trial is one run from its start, but {self.file.path} has {' and '.join(several)}: "
                    "sweep over data.target, seed_everything and config, and take these out by words after a lone --, "
                    f"{' '.join(f'--{key}=null' for key in several)}"
                )
            if not self.wandb:
                parsed.arguments.trainer.logger = _without_wandb(parsed.arguments.trainer.logger)
            self._configurations[number] = parsed
        return self._configurations[number]

    def name(self, number: int) -> str | None:
        """What tables call a trial: its settings."""
        return self.runs[number].label

    @property
    def targets_tried(self) -> list[str]:
        """Targets that are swept over."""
        trials = (trial.values.items() for trial in self.runs)
        return [*{str(value): None for each in trials for name, value in each if plain(name) == "data.target"}]

    @cached_property
    def folder(self) -> ExperimentFolder:
        """Where finished trials are noted by what they are trained with: a sweep over more values takes them."""
        total, name = len(self.runs), f"sweep_{Path(self.file.path).stem}"
        return ExperimentFolder(
            self.root, name, total, lambda number: fingerprint(self.configuration(number).text), by_content=True
        )

    def waiting(self) -> list[int]:
        """Numbers of the trials that are not finished; prints, too, if methods will not be ranked."""
        waiting = super().waiting()
        metric, trials = self.file.metric, range(len(self.runs))
        if metric not in (None, TRUST) and len({method_of(self.configuration(number)) for number in trials}) > 1:
            say(not_ranked(metric))
        return waiting

    def start(
        self,
        number: int,
        place: Callable[[Path], Path] | None = None,
        checkpoint: Path | None = None,
        seat: Seat | None = None,
    ) -> RunSummary:
        """Train and evaluate a trial; ends with it if it has not logged what trials are ranked by."""
        try:
            summary = super().start(number, place, checkpoint, seat)
        except BaseException:
            wandb = sys.modules.get("wandb")
            if self.wandb and wandb is not None and wandb.run is not None:
                wandb.finish(exit_code=1)  # or W&B would take the next trial for this one
            raise
        logged = self._logged(number) if first_process() else {}
        if logged and self.file.metric is not None and self.file.metric not in logged:
            label_free = sorted(name for name in logged if "/" in name and not name.startswith("oracle/"))
            sys.exit(
                f"it has not logged {self.file.metric!r}, the metric of {self.file.path}: rank by one of "
                f"{', '.join(label_free)}"
            )
        return summary

    def metric(self, number: int) -> float | None:
        """What a finished trial has logged last of the metric; ``None`` if that is nothing, or no number."""
        logged = self._logged(number).get(self.file.metric or "")
        return logged if logged is not None and math.isfinite(logged) else None

    def _logged(self, number: int) -> dict[str, float]:
        folder = self.folder.folder_of(number)
        if folder is None or not (folder / METRICS).is_file():
            return {}
        with (folder / METRICS).open(newline="", encoding="utf-8") as file:
            return {name: float(value) for row in csv.DictReader(file) for name, value in row.items() if name and value}

    def close(self, done: Mapping[int, RunSummary], failed: Mapping[int, str]) -> None:
        """Print and write tables of the trials that are finished."""
        named = {number: replace(run, method=self.name(number) or run.method) for number, run in done.items()}
        ranks = Ranking(self, named)
        print_table([*named.values()], one_method=len(ranks.methods) < 2)
        if not first_process() or self.is_dry:
            return
        show(ranks.table())
        self.write_tables([*named.values()], self._write_trials(done, failed))
        for line in ranks.best():
            say(line)
        if len(done) < len(self.runs):
            say(f"{len(done)} of {len(self.runs)} trials are finished: the same command goes on")

    def _write_trials(self, done: Mapping[int, RunSummary], failed: Mapping[int, str]) -> Path:
        """Write ``trials.csv``: of each trial its settings, and what it came to."""
        path = self.folder.path / "trials.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        metric, came_to = self.file.metric, ("oracle_accuracy", "oracle_r2", "rounds", "seconds_total")
        measured = [*([] if metric is None else [metric]), "target", *came_to, "bytes", "folder"]
        rows = []
        for number, trial in enumerate(self.runs):
            run = done.get(number)
            state = "finished" if run is not None else "failed" if number in failed else "waiting"
            row = {"trial": number + 1, "state": state, **trial.values}
            if run is not None:
                row |= {} if metric is None else {metric: self.metric(number)}
                row |= {"target": run.target, **{name: getattr(run, name) for name in came_to}}
                row |= {"bytes": sum(run.bytes_by_channel.values()), "folder": self.folder.folder_of(number)}
            rows.append(row)
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, ["trial", "state", *self.runs[0].values, *measured])
            table.writeheader()
            table.writerows(rows)
        return path


def name_trials(values: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """Trials with short names of their settings, as short as they are different."""
    different = {name: {type_true(each[name]): each[name] for each in values} for name in values[0]}
    names = [name for name in values[0] if plain(name) not in _AXES and len(different[name]) > 1]
    short = {name: _short(name, names) for name in names}
    called = {value: name_of(value) or value for value in {str(each["config"]) for each in values if "config" in each}}
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


def _without_wandb(logger: Any) -> Any:
    """Loggers of a configuration, without those of W&B."""
    if isinstance(logger, list):
        kept = [each for each in logger if not _is_wandb(each)]
        return kept or None
    return None if _is_wandb(logger) else logger


def _is_wandb(logger: Any) -> bool:
    return str(getattr(logger, "class_path", "")).split(".")[-1] == _LOGGER
