"""How far methods are above SourceOnly, measured with the target's hidden labels; and collapsed models."""

from __future__ import annotations

from collections.abc import Sequence

from fedlit.callbacks.report.charts import dots
from fedlit.callbacks.report.pages import Block, Bullets, Picture, Pictures
from fedlit.callbacks.report.run import ORACLE
from fedlit.callbacks.run_summary import (
    FLOOR,
    RunSummary,
    accuracies,
    gains,
    mean_gains,
    methods_of,
    split_by_task,
    targets_of,
)
from fedlit.callbacks.summary import marks
from fedlit.tables import COLLAPSED, mean_and_deviation

_SURE = 2.0
"""Standard deviations over seeds that a difference must have to count."""

SPREAD = "mean, and one standard deviation over seeds to either side"
"""Below a picture of methods by targets."""


def verdict(runs: Sequence[RunSummary], trust: Picture | None = None, prefix: str = "") -> list[Block]:
    """Sentences, and pictures of methods by targets, on finished runs of at least one method.

    Methods are compared with the floor on targets and seeds that both have, and are not ranked: hidden labels may not
    choose among them. A difference counts where its mean over seeds is more than two standard deviations of it. That is
    a rule of thumb, no test, and with few seeds a weak one; the page states so.

    Args:
        runs: Of one federation.
        trust: A picture of the score that may rank methods, which comes first.
        prefix: Of the pictures' file names.
    """
    by_task = {task: part for task, part in split_by_task(runs).items() if accuracies(part)}
    lines = [line for part in by_task.values() for line in _against_floor([run for run in part if accuracies([run])])]
    lines += [f"{line.removeprefix(COLLAPSED).strip()}." for line in marks(runs)]
    pictures = [] if trust is None else [trust]
    for task, part in by_task.items():
        values = {
            method: [
                [100 * each for each in accuracies(run for run in part if (run.method, run.target) == (method, target))]
                for target in targets_of(part)
            ]
            for method in methods_of(part)
        }
        title = f"{task} in % of the target ({ORACLE})"
        svg = dots(title, targets_of(part), values, SPREAD)
        pictures.append(Picture(f"{prefix}methods_{len(pictures) + 1}.svg", title, svg))
    return [*([Bullets(lines)] if lines else []), *([Pictures(pictures)] if pictures else [])]


def _against_floor(runs: Sequence[RunSummary]) -> list[str]:
    """Difference of each method to the floor, in runs of one task."""
    methods = methods_of(runs)
    lines, harmed = [], []
    for method in methods if FLOOR in methods else ():
        if method == FLOOR:
            continue
        by_target = gains(runs, method)
        if not by_target:
            lines.append(f"{ORACLE}: {method} and {FLOOR} have no target and seed in common, and are not compared.")
            continue
        means = mean_gains(by_target)
        if means:
            where = _over([*by_target], targets_of(runs))
            lines.append(f"{ORACLE}: {method} - {FLOOR} is {_points(means)} points {where}, {_chance(means)}.")
        for target, by_seed in by_target.items():
            mean, deviation = mean_and_deviation([*by_seed.values()])
            if mean < 0 and deviation is not None and -mean > _SURE * deviation:
                harmed.append(f"{method} on {target} ({_points([*by_seed.values()])})")
    if harmed:
        lines.append(f"{ORACLE}: worse than {FLOOR}, which adapts nothing: {', '.join(harmed)}.")
    return lines


def _over(targets: Sequence[str], of: Sequence[str]) -> str:
    """The targets of an average, named where these are not all."""
    if len(targets) == 1:
        return f"on {targets[0]}" + (" alone" if len(of) > 1 else "")
    names = f" ({', '.join(targets[:-1])} and {targets[-1]})" if len(targets) < len(of) else ""
    return f"on average over {len(targets)} targets{names}"


def _points(values: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation(values)
    return f"{mean:+.1f}" + ("" if deviation is None else f" ± {deviation:.1f}")


def _chance(values: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation(values)
    if deviation is None:
        return "of one seed, which shows nothing about chance"
    if abs(mean) > _SURE * deviation and mean:
        return f"over {len(values)} seeds: more than two standard deviations"
    return f"over {len(values)} seeds: not more than two standard deviations, chance may have made it"
