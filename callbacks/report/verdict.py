"""What comes first: which method is best, by how much, and whether seeds agree on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from fedlit.callbacks.report.charts import Dots, mean_and_spread
from fedlit.callbacks.report.pages import Block, Bullets, Picture, Pictures, Text
from fedlit.callbacks.report.run import ORACLE
from fedlit.callbacks.summary import FLOOR, RunSummary, accuracies, averages, methods_of, targets_of

_SURE = 2.0
"""Standard deviations over seeds that a difference must have to count."""


def verdict(runs: Sequence[RunSummary]) -> list[Block]:
    """Sentences, and pictures of methods by targets, on finished runs of at least one method.

    A difference counts where its mean over seeds is more than two standard deviations of it. That is a rule of thumb,
    no test, and of few seeds a weak one; the page says so.
    """
    lines = [*_by_score(runs), *_by_oracle(runs), *_against_floor(runs), *_one_class(runs)]
    blocks: list[Block] = [Bullets(lines)] if lines else []
    pictures: list[Picture] = []
    targets = targets_of(runs)
    for title, of in ((f"{_measure(runs)} of the target ({ORACLE})", _percent), ("label-free target score", _scores)):
        values = {
            method: [of([run for run in runs if (run.method, run.target) == (method, target)]) for target in targets]
            for method in methods_of(runs)
        }
        if any(each for some in values.values() for each in some):
            unit = "mean, and one standard deviation over seeds to either side"
            chart = Dots(title, targets, values, unit)
            pictures.append(Picture(f"methods_{len(pictures) + 1}.svg", title, chart.draw()))
    return [*blocks, Pictures(pictures)] if pictures else blocks


def _measure(runs: Iterable[RunSummary]) -> str:
    return "R2 in %" if any(run.oracle_r2 is not None for run in runs) else "accuracy in %"


def _percent(runs: Sequence[RunSummary]) -> list[float]:
    return [100 * each for each in accuracies(runs)]


def _scores(runs: Iterable[RunSummary]) -> list[float]:
    return [run.target_score for run in runs if run.target_score is not None]


def _shown(values: Sequence[float], digits: int) -> str:
    mean, spread = mean_and_spread(values)
    return f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _complete(runs: Sequence[RunSummary]) -> list[str]:
    """Methods that have a run on every target: others cannot be compared on average."""
    targets = targets_of(runs)
    return [method for method in methods_of(runs) if targets_of(r for r in runs if r.method == method) == targets]


def _over_targets(runs: Sequence[RunSummary]) -> str:
    number = len(targets_of(runs))
    return f"on {targets_of(runs)[0]}" if number == 1 else f"on average over {number} targets"


def _by_score(runs: Sequence[RunSummary]) -> list[str]:
    found: dict[str, list[float]] = {}
    for method in _complete(runs):
        own = [run for run in runs if run.method == method]
        seeds = dict.fromkeys(run.seed for run in own)
        each = [_scores(run for run in own if run.seed == seed) for seed in seeds]
        if all(len(some) == len(targets_of(runs)) for some in each):
            found[method] = [fmean(some) for some in each]
    if not found:
        return []
    order = sorted(found, key=lambda method: -fmean(found[method]))
    line = f"By the label-free target score, {order[0]} is best {_over_targets(runs)}: {_shown(found[order[0]], 3)}"
    return [line + (f"; next is {order[1]} with {_shown(found[order[1]], 3)}." if len(order) > 1 else ".")]


def _by_oracle(runs: Sequence[RunSummary]) -> list[str]:
    found = {
        method: [100 * each for each in averages([run for run in runs if run.method == method])]
        for method in _complete(runs)
    }
    found = {method: values for method, values in found.items() if values}
    if not found:
        return []
    order = sorted(found, key=lambda method: -fmean(found[method]))
    line = (
        f"{ORACLE}: by the target's hidden labels {order[0]} has the highest {_measure(runs)} {_over_targets(runs)}, "
        f"{_shown(found[order[0]], 1)}"
    )
    return [line + (f"; next is {order[1]} with {_shown(found[order[1]], 1)}." if len(order) > 1 else ".")]


def _against_floor(runs: Sequence[RunSummary]) -> list[str]:
    methods = [method for method in methods_of(runs) if method != FLOOR]
    if len(methods) == len(methods_of(runs)) or not methods:
        return []
    lines, harmed = [], []
    for method in methods:
        gains = {target: _gains(runs, method, target) for target in targets_of(runs)}
        gains = {target: by_seed for target, by_seed in gains.items() if by_seed}
        if not gains:
            continue
        seeds = [seed for seed in next(iter(gains.values())) if all(seed in by_seed for by_seed in gains.values())]
        means = [fmean(by_seed[seed] for by_seed in gains.values()) for seed in seeds]
        if means:
            lines.append(f"{ORACLE}: {method} - {FLOOR} is {_signed(means)}.")
        for target, by_seed in gains.items():
            mean, spread = mean_and_spread([*by_seed.values()])
            if mean < 0 and spread is not None and -mean > _SURE * spread:
                harmed.append(f"{method} on {target} ({_points([*by_seed.values()])})")
    if harmed:
        lines.append(f"{ORACLE}: worse than {FLOOR}, which adapts nothing: {', '.join(harmed)}.")
    return lines


def _gains(runs: Sequence[RunSummary], method: str, target: str) -> dict[int, float]:
    """Points above the floor by seed, of seeds that both have."""

    def by_seed(name: str) -> dict[int, float]:
        found = (run for run in runs if (run.method, run.target) == (name, target))
        return {run.seed: 100 * value for run in found for value in accuracies([run])}

    own, floor = by_seed(method), by_seed(FLOOR)
    return {seed: own[seed] - floor[seed] for seed in own if seed in floor}


def _points(values: Sequence[float]) -> str:
    mean, spread = mean_and_spread(values)
    return f"{mean:+.1f}" + ("" if spread is None else f" ± {spread:.1f}")


def _signed(values: Sequence[float]) -> str:
    mean, spread = mean_and_spread(values)
    text = f"{_points(values)} points"
    if spread is None:
        return f"{text}, of one seed, which tells nothing about chance"
    if abs(mean) > _SURE * spread and mean:
        return f"{text} over {len(values)} seeds, more than two standard deviations"
    return f"{text} over {len(values)} seeds, not more than two standard deviations: chance may have made it"


def _one_class(runs: Sequence[RunSummary]) -> list[str]:
    lines = []
    for run in runs:
        columns = [sum(column) for column in zip(*run.oracle_confusion or [], strict=True)]
        if sum(map(bool, columns)) == 1 and len(columns) > 1:
            name = run.classes[columns.index(max(columns))]
            lines.append(f"{run.method} on {run.target}, seed {run.seed}, predicts nothing but {name!r}.")
    return lines


def how_to_read(runs: Sequence[RunSummary]) -> list[Block]:
    """What one may conclude of it."""
    if len({run.seed for run in runs}) > 1:
        return [Text("Differences are taken within each seed. Two standard deviations are a rule of thumb, no test.")]
    return []
