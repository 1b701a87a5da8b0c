"""How far methods are above what adapts nothing, measured with the target's hidden labels; and collapsed models."""

from __future__ import annotations

from collections.abc import Sequence

from fedlit.callbacks.report.charts import Dots, mean_and_spread
from fedlit.callbacks.report.pages import Block, Bullets, Picture, Pictures, Text
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
from fedlit.callbacks.summary import COLLAPSED, marks

_SURE = 2.0
"""Standard deviations over seeds that a difference must have to count."""

_IN_PERCENT = {"accuracy": "accuracy in %", "R2": "R2 in %"}


def verdict(runs: Sequence[RunSummary], trust: Picture | None = None, prefix: str = "") -> list[Block]:
    """Sentences, and pictures of methods by targets, on finished runs of at least one method.

    Methods are compared with the floor on targets and seeds that both have, and are not ranked: hidden labels may not
    choose among them. A difference counts where its mean over seeds is more than two standard deviations of it. That is
    a rule of thumb, no test, and of few seeds a weak one; the page states so.

    Args:
        runs: Of one federation.
        trust: A picture of what may rank methods, which comes first.
        prefix: Of the pictures' file names.
    """
    by_task = {task: part for task, part in split_by_task(runs).items() if accuracies(part)}
    lines = [line for part in by_task.values() for line in _against_floor([run for run in part if accuracies([run])])]
    lines += [f"{line.removeprefix(COLLAPSED).strip()}." for line in marks(runs)]
    blocks: list[Block] = [Bullets(lines)] if lines else []
    pictures = [] if trust is None else [trust]
    for task, part in by_task.items():
        values = {
            method: [
                [100 * each for each in accuracies(run for run in part if (run.method, run.target) == (method, target))]
                for target in targets_of(part)
            ]
            for method in methods_of(part)
        }
        title = f"{_IN_PERCENT[task]} of the target ({ORACLE})"
        chart = Dots(title, targets_of(part), values, SPREAD)
        pictures.append(Picture(f"{prefix}methods_{len(pictures) + 1}.svg", title, chart.draw()))
    return [*blocks, Pictures(pictures)] if pictures else blocks


SPREAD = "mean, and one standard deviation over seeds to either side"
"""What a picture of methods by targets shows."""


def _over(targets: Sequence[str], of: Sequence[str]) -> str:
    """On which targets, named where these are not all."""
    if len(targets) == 1:
        return f"on {targets[0]}" + (" alone" if len(of) > 1 else "")
    return f"on average over {len(targets)} targets" + (f" ({_and(targets)})" if len(targets) < len(of) else "")


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _against_floor(runs: Sequence[RunSummary]) -> list[str]:
    """How far each method is above what adapts nothing, in runs that are measured alike."""
    if FLOOR not in methods_of(runs):
        return []
    lines, harmed = [], []
    for method in methods_of(runs):
        if method == FLOOR:
            continue
        by_target = gains(runs, method)
        if not by_target:
            lines.append(f"{ORACLE}: {method} and {FLOOR} have no target and seed in common, and are not compared.")
            continue
        means = mean_gains(by_target)
        where = _over([*by_target], targets_of(runs))
        if means:
            lines.append(f"{ORACLE}: {method} - {FLOOR} is {_signed(means, where)}.")
        for target, by_seed in by_target.items():
            mean, spread = mean_and_spread([*by_seed.values()])
            if mean < 0 and spread is not None and -mean > _SURE * spread:
                harmed.append(f"{method} on {target} ({_points([*by_seed.values()])})")
    if harmed:
        lines.append(f"{ORACLE}: worse than {FLOOR}, which adapts nothing: {', '.join(harmed)}.")
    return lines


def _points(values: Sequence[float]) -> str:
    mean, spread = mean_and_spread(values)
    return f"{mean:+.1f}" + ("" if spread is None else f" ± {spread:.1f}")


def _signed(values: Sequence[float], where: str) -> str:
    mean, spread = mean_and_spread(values)
    text = f"{_points(values)} points {where}"
    if spread is None:
        return f"{text}, of one seed, which shows nothing about chance"
    if abs(mean) > _SURE * spread and mean:
        return f"{text}, over {len(values)} seeds: more than two standard deviations"
    return f"{text}, over {len(values)} seeds: not more than two standard deviations, chance may have made it"


def how_to_read(runs: Sequence[RunSummary]) -> list[Block]:
    """What one may conclude of it."""
    if len({run.seed for run in runs}) > 1:
        return [Text("Differences are taken within each seed. Two standard deviations are a rule of thumb, no test.")]
    return []
