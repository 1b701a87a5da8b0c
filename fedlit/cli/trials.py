"""Trials of a sweep: trained as runs of an experiment are, and ranked by a metric that needs no label of the target."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedlit.callbacks import RunSummary
from fedlit.callbacks.report.federations import facts_of
from fedlit.callbacks.report.run_folder import differences
from fedlit.callbacks.run_record import METRICS
from fedlit.callbacks.run_summary import FLOOR, accuracies
from fedlit.callbacks.selection import NO_TRUST, SAFE, TRUST, choose, trains_on_information
from fedlit.callbacks.shared import grouped
from fedlit.cli.arguments import normalise, refuse_linked, refuse_nameless, type_true
from fedlit.cli.experiment import Experiment, name_of
from fedlit.cli.folders import ExperimentFolder, fingerprint, first_process
from fedlit.cli.parsed import Parsed
from fedlit.cli.plan import Plan, print_table, say
from fedlit.cli.sweep import SweepFile
from fedlit.tables import Column, Figure, Row, Table, show


class Method(NamedTuple):
    """What makes a method of its own of settings."""

    class_path: str
    refine: Any
    labels: bool  # whether the target has any
    certain: str | None  # see `trains_on_information`

    def __str__(self) -> str:
        """Its class."""
        return self.class_path.rpartition(".")[2]

    def is_plain(self, name: str) -> bool:
        """Whether it is a class of this name that is not refined, which would adapt to the target."""
        return str(self) == name and not self.refine


_AXES = {"seed_everything": "seed", "data.target": "target"}
"""Parameters whose values are no settings to choose among, but what settings are tried on."""


@dataclass(frozen=True)
class Group:
    """Trials of the same settings on the same target, one for each seed."""

    label: str  # the settings
    target: str  # client name, and, where trials have other data of the same name, which data
    method: Method  # see `method_of`
    numbers: Sequence[int]  # of its finished trials
    complete: bool  # all of its trials are finished and have logged the metric
    scores: Sequence[float]  # the metric of each trial that has logged it

    @property
    def score(self) -> float:
        """Mean over its trials; of no trial, NaN."""
        return fmean(self.scores) if self.scores else math.nan


_OF_INFORMATION = (
    "target/score",
    *(f"validator/{name}" for name in ("information", "certainty", "diversity", "calibrated")),
)
"""Metrics that are high where predictions are certain, or of all classes."""


def method_of(parsed: Parsed) -> Method:
    """Settings with the same value are of one method, which scores of a single method may compare."""
    model, own = parsed.arguments.model, parsed.arguments.model.get("init_args") or {}
    labels = bool((parsed.arguments.data.get("init_args") or {}).get("target_labels"))
    return Method(model.class_path, own.get("refine"), labels, trains_on_information(model.class_path, own))


def not_ranked(metric: str | None) -> str:
    """Why methods of a sweep are not ranked, and how they would be."""
    return (
        f"methods are not ranked: {metric} compares settings of one method. {TRUST} compares methods: write metric: "
        f"{{name: {TRUST}, goal: maximize}}, and --trainer.callbacks+=fedlit.callbacks.Validators in command"
    )


class Ranking:
    """Settings by the metric of the sweep file, on each target; ``done`` has summaries of finished trials by number.

    Methods are compared by ``validator/trust`` alone, with `choose`, see docs/labels.md. Other metrics rank
    settings of one method, and where there are several methods those within each.
    """

    def __init__(self, sweep: Sweep, done: Mapping[int, RunSummary]) -> None:
        self.sweep, self.done, self.metric = sweep, done, sweep.file.metric
        methods = {number: method_of(sweep.configuration(number)) for number in done}
        self.methods = [*dict.fromkeys(methods.values())]
        self.by_trust = self.metric == TRUST
        self.between = self.by_trust or len(self.methods) < 2
        """Whether all settings may be compared, and not those of each method alone."""
        self.goal = "the highest" if sweep.file.maximises else "the lowest"
        self.two_classes = len(self.methods) > 1 and any(len(run.classes) == 2 for run in done.values())
        labels = _target_labels({number: (run.target, sweep.configuration(number)) for number, run in done.items()})
        self.targets = [*dict.fromkeys(labels.values())]
        settings = grouped(done, lambda number: (labels[number], done[number].method))
        groups = []
        for (target, label), numbers in settings.items():
            scores = [score for number in numbers if (score := sweep.metric(number)) is not None]
            complete = len(scores) == self._planned(numbers[0])
            groups.append(Group(label, target, methods[numbers[0]], numbers, complete, scores))
        self.groups = sorted(groups, key=self._position)

    def _planned(self, number: int) -> int:
        """Trials of the sweep with the same settings on the same target."""

        def key(trial: Any) -> tuple[Any, ...]:
            return trial.label, *(str(value) for name, value in trial.values.items() if plain(name) == "data.target")

        return sum(key(trial) == key(self.sweep.runs[number]) for trial in self.sweep.runs)

    def _position(self, group: Group) -> tuple[Any, ...]:
        """By target and comparable settings, the best first; settings of which a trial is missing come last."""
        score = -group.score if self.sweep.file.maximises else group.score
        return (
            *(self.targets.index(group.target), None if self.between else self.methods.index(group.method)),
            *(not group.complete, score if group.scores else math.inf),
        )

    def _comparable(self, groups: Iterable[Group]) -> list[list[Group]]:
        """Complete groups with a score, by which of them may be compared."""
        scored = (group for group in groups if group.complete and group.scores and not self._certain(group))
        return [*grouped(scored, lambda group: None if self.between else group.method).values()]

    def _certain(self, group: Group) -> bool:
        """Whether trust does not rank a group, which trains its predictions to be certain."""
        return self.by_trust and len(self.methods) > 1 and group.method.certain is not None

    def best(self) -> list[str]:
        """A sentence for each target, and one on their average where all settings were tried on all of them."""
        if self.metric is None:
            return ["nothing is ranked: the file has no metric, such as {name: target/score, goal: maximize}"]
        if not any(group.scores for group in self.groups):
            return [f"nothing is ranked: no trial has logged a number as {self.metric!r}, the metric of the file"]
        if len({trial.label for trial in self.sweep.runs}) < 2:
            return ["nothing is ranked: all trials have the same settings"]
        lines = []
        for target in self.targets:
            for part in self._comparable(group for group in self.groups if group.target == target):
                if self.between or len(part) > 1:
                    lines.append(self._on(target, part))
        for part in self._comparable(self.groups):
            lines += self._on_average(part)
        certain = dict.fromkeys(group.label for group in self.groups if self._certain(group))
        if certain:
            lines.append(f"not ranked, as they train predictions to be certain: {', '.join(certain)}")
        return lines if self.between else [*lines, not_ranked(self.metric)]

    def _on(self, target: str, groups: Sequence[Group]) -> str:
        """The best on a target."""
        taken = self._taken([group.score for group in groups], groups)
        if taken is None:
            return f"no settings are named on {target}: {self._distrust(groups)}"
        group = groups[taken]
        why = f", of which no other has 5% more {self.metric}" if taken else ""
        why = ", as trust says little of two classes" if taken and self.two_classes else why
        return (
            f"best{self._of(group)} on {target} by {self.metric} ({self.goal}, no label of the target needed): "
            f"{group.label}{why}, {group.score:.4g}; its first run is '{self.sweep.folder.folder_of(group.numbers[0])}'"
        )

    def _on_average(self, groups: Sequence[Group]) -> list[str]:
        """The best on average, of settings tried on all targets; nothing of one target, or one such setting."""
        by_label = grouped(groups, lambda group: group.label).values()
        everywhere = [each for each in by_label if len(each) == len(self.targets)]
        if len(self.targets) < 2 or len(everywhere) < 2:
            return []
        means = [fmean(group.score for group in each) for each in everywhere]
        firsts = [each[0] for each in everywhere]
        taken = self._taken(means, firsts)
        where = f"on average of {len(self.targets)} targets"
        if taken is None:
            return [f"no settings are named {where}: {self._distrust(groups)}"]
        return [f"best{self._of(firsts[taken])} {where}: {firsts[taken].label}, {means[taken]:.4g}"]

    def _of(self, group: Group) -> str:
        return "" if self.between else f" of {group.method}"

    def _taken(self, scores: Sequence[float], groups: Sequence[Group]) -> int | None:
        """Position of the best; in trust the one that adapts nothing has a margin, and what is near 0 is none."""
        if self.by_trust:
            return choose(scores, [group.method.is_plain(FLOOR) for group in groups], self.two_classes)
        best = max if self.sweep.file.maximises else min
        return best(range(len(scores)), key=scores.__getitem__)

    def _distrust(self, groups: Sequence[Group]) -> str:
        highest = max(0.0, *(group.score for group in groups))
        text = f"the highest {TRUST} is {highest:.2g}, and models that have learnt nothing reach {NO_TRUST:g} by chance"
        safe = [group.label for name in SAFE for group in groups if group.method.is_plain(name)]
        return f"{text}. Until then {safe[0]} is the safe one" if safe else text

    def table(self) -> Table:
        """Groups, the best of each target first, as far as they may be compared."""
        settings, metric = [*self.sweep.runs[0].settings], self.metric
        targets, metrics = ["target"] if len(self.targets) > 1 else [], [] if metric is None else [metric]
        title = "trials, in their order" if metric is None else f"settings by {metric}, {self.goal} first"
        title += "" if self.between or metric is None else " within each method"
        explained = any(run.oracle_r2 is not None for run in self.done.values())
        columns = [Column(name, folds=True) for name in ("trial", *targets, *settings)]
        columns += [Column(name, numeric=True) for name in metrics]
        columns.append(Column(f"target {'R2 in %' if explained else 'accuracy'}\n(oracle)", numeric=True))
        rows = []
        for place, group in enumerate(self.groups, 1):
            first = self.sweep.runs[group.numbers[0]]
            cells: list[object] = [", ".join(str(number + 1) for number in group.numbers)]
            cells += [group.target for _ in targets]
            cells += [first.settings[name] for name in settings]
            cells += [Figure(group.scores, form="{:.4g}") for _ in metrics]
            cells.append(Figure(accuracies(self.done[number] for number in group.numbers), 100))
            rows.append(
                Row(cells, last=self.groups[place : place + 1] == [] or self.groups[place].target != group.target)
            )
        return Table(columns, rows, title)


def _target_labels(trained: Mapping[int, tuple[str, Parsed]]) -> dict[int, str]:
    """By trial, its target; where trials have other data under the same name, with what differs."""
    labels = {}
    for target in dict.fromkeys(target for target, _ in trained.values()):
        same = {number: parsed for number, (name, parsed) in trained.items() if name == target}
        facts = [
            facts_of({f"data.{key}": value for key, value in vars(parsed.arguments.data.as_flat()).items()})
            for parsed in same.values()
        ]
        differing = differences([{key: str(value) for key, value in each.items()} for each in facts])
        for place, number in enumerate(same):
            shown = ", ".join(f"{key.rpartition('.')[2]}={values[place]}" for key, values in differing.items())
            labels[number] = f"{target} ({shown})" if shown else target
    return labels


def plain(name: str) -> str:
    """A parameter as options may have it."""
    return name.replace(".init_args", "")


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
    """Trials of a sweep file on this machine, with ``more`` arguments; W&B's logger is left out unless ``wandb``."""

    runs: list[Trial]
    hopeless = 3
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
        self.runs = name_trials(values)
        pairs = (pair for trial in self.runs for pair in trial.values.items())
        self.targets_tried = [*dict.fromkeys(str(value) for name, value in pairs if plain(name) == "data.target")]
        self._configurations: dict[int, Parsed] = {}
        with self._named(0):
            self.parsed = Experiment(["fit", *self._words(0)]).parsed
        self.parsed.arguments.jobs, self.parsed.arguments.fresh = jobs, fresh

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
        """The arguments that a trial is trained with."""
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
        """The trial's name in tables: its settings."""
        return self.runs[number].label

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
        metric = self.file.metric
        if metric not in (None, TRUST):
            methods = dict.fromkeys(method_of(self.configuration(number)) for number in range(len(self.runs)))
            self._refuse_what_is_trained_on(methods)
            if len(methods) > 1:
                say(not_ranked(metric))
        return waiting

    def _refuse_what_is_trained_on(self, methods: Iterable[Method]) -> None:
        """End, if trials are ranked by what their loss maximises."""
        for method in methods:
            if self.file.metric in _OF_INFORMATION and method.certain is not None:
                name = " with ".join(filter(None, (str(method), method.certain)))
                sys.exit(
                    f"fedlit: {name} trains its predictions to be certain, so that {self.file.metric} does not rank "
                    f"it: write metric: {{name: {TRUST}, goal: maximize}}, and "
                    "--trainer.callbacks+=fedlit.callbacks.Validators in command"
                )

    def start(self, number: int, *args: Any, **kwargs: Any) -> RunSummary:
        """Train and evaluate a trial; ends with it if it has not logged what trials are ranked by."""
        try:
            summary = super().start(number, *args, **kwargs)
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

    def close(self, done: Mapping[int, RunSummary], failed: Collection[int]) -> None:
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

    def _write_trials(self, done: Mapping[int, RunSummary], failed: Collection[int]) -> Path:
        """Write ``trials.csv``: of each trial its settings and results."""
        path = self.folder.path / "trials.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        metrics = [] if self.file.metric is None else [self.file.metric]
        fields = ("oracle_accuracy", "oracle_r2", "oracle_rmse", "oracle_mae", "rounds", "seconds_total")
        titles = ["trial", "state", *self.runs[0].values, *metrics, "target", *fields, "bytes", "folder"]
        rows: list[list[Any]] = []
        for number, trial in enumerate(self.runs):
            run = done.get(number)
            state = "finished" if run is not None else "failed" if number in failed else "waiting"
            row = [number + 1, state, *trial.values.values()]
            if run is None:
                row += [None] * (len(titles) - len(row))
            else:
                row += [*(self.metric(number) for _ in metrics), run.target, *(getattr(run, name) for name in fields)]
                row += [sum(run.bytes_by_channel.values()), self.folder.folder_of(number)]
            rows.append(row)
        path.write_text(Table.of(titles, rows).csv(), encoding="utf-8", newline="")
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
    loggers = logger if isinstance(logger, list) else [logger]
    kept = [each for each in loggers if not str(getattr(each, "class_path", "")).endswith("WandbLogger")]
    return logger if len(kept) == len(loggers) else kept or None
