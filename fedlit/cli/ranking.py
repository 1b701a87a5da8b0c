"""Trials of a sweep that are finished, ranked by a metric that needs no label of the target, as far as that may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedlit.callbacks import RunSummary
from fedlit.callbacks.report.federations import facts_of
from fedlit.callbacks.report.run_folder import differences
from fedlit.callbacks.run_summary import FLOOR, accuracies
from fedlit.callbacks.selection import NO_TRUST, TRUST, choose
from fedlit.cli.parsed import Parsed
from fedlit.tables import Column, Figure, Row, Table

if TYPE_CHECKING:  # it makes the ranking
    from fedlit.cli.trials import Sweep


@dataclass(frozen=True)
class Group:
    """Trials of the same settings on the same target, one for each seed."""

    label: str  # the settings
    target: str  # client name, and, where trials have other data of the same name, which data
    method: Method  # see `method_of`
    numbers: tuple[int, ...]  # of its trials that are finished
    whole: bool  # all of its trials are finished and have logged the metric
    score: float | None  # mean of the metric over its trials
    spread: float | None  # their sample standard deviation; none of a single one


Method = tuple[str, Any, bool]
"""The class of a method, its ``refine``, and whether the target has labels."""


def method_of(parsed: Parsed) -> Method:
    """What has to be equal for settings to be those of one method, which scores of a single method may compare."""
    arguments = parsed.arguments
    refine = (arguments.model.get("init_args") or {}).get("refine")
    return arguments.model.class_path, refine, bool((arguments.data.get("init_args") or {}).get("target_labels"))


def not_ranked(metric: str | None) -> str:
    """Why methods of a sweep are not ranked, and how they would be."""
    return (
        f"methods are not ranked: {metric} compares settings of one method. {TRUST} compares methods: write metric: "
        f"{{name: {TRUST}, goal: maximize}}, and --trainer.callbacks+=fedlit.callbacks.Validators in command"
    )


class Ranking:
    """Settings by the metric of the sweep file, on each target.

    Methods are compared by ``validator/trust`` alone, with `choose`, see docs/labels.md. Other metrics rank
    settings of one method, and where there are several methods those within each.

    Args:
        sweep: Whose trials.
        done: What those that are finished came to, called by their settings, by number.
    """

    def __init__(self, sweep: Sweep, done: Mapping[int, RunSummary]) -> None:
        self.sweep, self.done = sweep, done
        methods = {number: method_of(sweep.configuration(number)) for number in done}
        self.methods = [*dict.fromkeys(methods.values())]
        self.by_trust = sweep.file.metric == TRUST
        self.between = self.by_trust or len(self.methods) < 2
        """Whether all settings may be compared, and not those of each method alone."""
        labels = _target_labels({number: (run.target, sweep.configuration(number)) for number, run in done.items()})
        self.targets = [*dict.fromkeys(labels.values())]
        by_name: dict[tuple[str, str], list[int]] = {}
        for number, run in done.items():
            by_name.setdefault((labels[number], run.method), []).append(number)
        groups = []
        for (target, label), numbers in by_name.items():
            scores = [score for number in numbers if (score := sweep.metric(number)) is not None]
            whole = len(scores) == self._planned(numbers[0])
            mean, spread = fmean(scores) if scores else None, stdev(scores) if len(scores) > 1 else None
            groups.append(Group(label, target, methods[numbers[0]], (*numbers,), whole, mean, spread))
        self.groups = sorted(
            groups, key=lambda group: (self.targets.index(group.target), self._part(group), *self._rank(group))
        )

    def _planned(self, number: int) -> int:
        """Trials of the sweep with the same settings on the same target."""

        def key(trial: Any) -> tuple[Any, ...]:
            return trial.label, *(str(value) for name, value in trial.values.items() if plain(name) == "data.target")

        return sum(key(trial) == key(self.sweep.runs[number]) for trial in self.sweep.runs)

    def _part(self, group: Group) -> int:
        """Of the groups that may be compared, the position."""
        return 0 if self.between else self.methods.index(group.method)

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
        if len({trial.label for trial in self.sweep.runs}) < 2:
            return ["nothing is ranked: all trials have the same settings"]
        lines = [line for target in self.targets for line in self._on(target)]
        for part in self._parts([group for group in self.groups if group.whole]):
            lines += self._on_average(part)
        if not self.between:
            lines.append(not_ranked(metric))
        return lines

    def _parts(self, groups: Sequence[Group]) -> list[list[Group]]:
        """Groups that have a score, by what may be compared."""
        parts: dict[int, list[Group]] = {}
        for group in groups:
            if group.score is not None:
                parts.setdefault(self._part(group), []).append(group)
        return [*parts.values()]

    def _on(self, target: str) -> list[str]:
        """What is best on a target; of each method, if no more may be compared and it has several settings."""
        metric, lines = self.sweep.file.metric, []
        for part in self._parts([group for group in self.groups if group.target == target and group.whole]):
            if not self.between and len(part) < 2:
                continue
            taken = self._taken([group.score or 0.0 for group in part], part)
            if taken is None:
                lines.append(f"no settings are named on {target}: {self._distrust(part)}")
                continue
            group = part[taken]
            where = self.sweep.folder.folder_of(group.numbers[0])
            of = "" if self.between else f" of {group.method[0].rpartition('.')[2]}"
            why = "" if not taken else f", of which no other has 5% more {metric}"
            lines.append(
                f"best{of} on {target} by {metric} ({self._goal}, no label of the target needed): {group.label}{why}, "
                f"{group.score:.4g}; its first run is '{where}'"
            )
        return lines

    def _taken(self, scores: Sequence[float], groups: Sequence[Group]) -> int | None:
        """Position of the best; in trust the one that adapts nothing has a margin, and what is near 0 is none."""
        if self.by_trust:
            return choose(scores, [group.method[0].rpartition(".")[2] == FLOOR for group in groups])
        best = max if self.sweep.file.maximises else min
        return best(range(len(scores)), key=scores.__getitem__)

    def _distrust(self, groups: Sequence[Group]) -> str:
        highest = max(0.0, *(group.score or 0.0 for group in groups))
        return f"the highest {TRUST} is {highest:.2g}, and models that have learnt nothing reach {NO_TRUST:g} by chance"

    def _on_average(self, groups: Sequence[Group]) -> list[str]:
        """What is best on average, of settings tried on all targets; nothing of one target, or one such setting."""
        scores: dict[str, list[Group]] = {}
        for group in groups:
            scores.setdefault(group.label, []).append(group)
        whole = {label: each for label, each in scores.items() if len(each) == len(self.targets)}
        if len(self.targets) < 2 or len(whole) < 2:
            return []
        means = [fmean(group.score or 0.0 for group in each) for each in whole.values()]
        firsts = [each[0] for each in whole.values()]
        taken = self._taken(means, firsts)
        if taken is None:
            return [f"no settings are named on average of {len(self.targets)} targets: {self._distrust(groups)}"]
        of = "" if self.between else f" of {firsts[taken].method[0].rpartition('.')[2]}"
        return [f"best{of} on average of {len(self.targets)} targets: {firsts[taken].label}, {means[taken]:.4g}"]

    @property
    def _goal(self) -> str:
        return "the highest" if self.sweep.file.maximises else "the lowest"

    def table(self) -> Table:
        """Groups, the best of each target first, as far as they may be compared."""
        metric, settings = self.sweep.file.metric, [*self.sweep.runs[0].settings]
        explained = any(run.oracle_r2 is not None for run in self.done.values())
        title = "trials, in their order" if metric is None else f"settings by {metric}, {self._goal} first"
        title += "" if self.between or metric is None else " within each method"
        compared = [] if metric is None else [metric]
        words = ["trial", *(["target"] if len(self.targets) > 1 else []), *settings]
        score = f"target {'R2 in %' if explained else 'accuracy'}\n(oracle)"
        columns = [Column(name, folds=True) for name in words]
        columns += [Column(name, numeric=True) for name in [*compared, score]]
        rows = []
        for group in self.groups:
            first = self.sweep.runs[group.numbers[0]]
            cells: list[object] = [", ".join(str(number + 1) for number in group.numbers)]
            cells += [group.target] if len(self.targets) > 1 else []
            cells += [first.settings[name] for name in settings]
            cells += [] if metric is None else [_mean(group.score, group.spread, "{:.4g}")]
            cells.append(Figure(accuracies(self.done[number] for number in group.numbers), 100))
            last = group is self.groups[-1] or self.groups[self.groups.index(group) + 1].target != group.target
            rows.append(Row(cells, last=last))
        return Table(columns, rows, title)


def _mean(mean: float | None, spread: float | None, form: str) -> str:
    if mean is None:
        return "-"
    return form.format(mean) + ("" if spread is None else f" ± {form.format(spread)}")


def _target_labels(trained: Mapping[int, tuple[str, Parsed]]) -> dict[int, str]:
    """By trial, its target; where trials have other data under the same name, with what differs."""
    facts = {
        number: facts_of({f"data.{key}": value for key, value in vars(parsed.arguments.data.as_flat()).items()})
        for number, (_, parsed) in trained.items()
    }
    plain_facts = {number: {key: str(value) for key, value in each.items()} for number, each in facts.items()}
    labels = {}
    for target in dict.fromkeys(target for target, _ in trained.values()):
        numbers = [number for number, (name, _) in trained.items() if name == target]
        differing = differences([plain_facts[number] for number in numbers])
        for position, number in enumerate(numbers):
            words = ", ".join(f"{key.rpartition('.')[2]}={values[position]}" for key, values in differing.items())
            labels[number] = f"{target} ({words})" if words else target
    return labels


def plain(name: str) -> str:
    """A parameter as options may have it."""
    return name.replace(".init_args", "")
