"""What comes first: which method is best, by how much, and whether seeds agree on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedlit.callbacks.report.charts import Dots, mean_and_spread
from fedlit.callbacks.report.pages import Block, Bullets, Picture, Pictures, Text
from fedlit.callbacks.report.run import ORACLE
from fedlit.callbacks.summary import FLOOR, RunSummary, gains, mean_gains, methods_of, targets_of

_SURE = 2.0
"""Standard deviations over seeds that a difference must have to count."""


@dataclass(frozen=True)
class _Measure:
    """What methods are compared by: its name, the words before a sentence, digits shown, and a run's number."""

    name: str
    told: str
    digits: int
    of: Callable[[RunSummary], float | None]


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


_SCORE = _Measure("label-free target score", "By the label-free target score", 3, lambda run: run.target_score)
_BY_LABELS = f"{ORACLE}: by the target's hidden labels, in %s"
_ACCURACY = _Measure(
    "accuracy in %", _BY_LABELS % "accuracy", 1,
    lambda run: _percent(run.oracle_accuracy) if run.oracle_r2 is None else None,
)  # fmt: skip
_R2 = _Measure("R2 in %", _BY_LABELS % "R2", 1, lambda run: _percent(run.oracle_r2))
_MEASURES = (_SCORE, _ACCURACY, _R2)


def verdict(runs: Sequence[RunSummary]) -> list[Block]:
    """Sentences, and pictures of methods by targets, on finished runs of at least one method.

    Methods are compared on targets and seeds that they all have, and with the floor on those that both have. A
    difference counts where its mean over seeds is more than two standard deviations of it. That is a rule of thumb,
    no test, and of few seeds a weak one; the page says so.
    """
    known = {measure.name: [run for run in runs if measure.of(run) is not None] for measure in _MEASURES}
    lines = [line for measure in _MEASURES for line in _best(known[measure.name], measure)]
    lines += [line for measure in _MEASURES[1:] for line in _against_floor(known[measure.name])]
    lines += _one_class(runs)
    blocks: list[Block] = [Bullets(lines)] if lines else []
    pictures: list[Picture] = []
    for measure in (*_MEASURES[1:], _SCORE):
        found = known[measure.name]
        values = {
            method: [_values(found, measure, method, target) for target in targets_of(found)]
            for method in methods_of(found)
        }
        if values:
            title = measure.name if measure is _SCORE else f"{measure.name} of the target ({ORACLE})"
            chart = Dots(title, targets_of(found), values, "mean, and one standard deviation over seeds to either side")
            pictures.append(Picture(f"methods_{len(pictures) + 1}.svg", title, chart.draw()))
    return [*blocks, Pictures(pictures)] if pictures else blocks


def _values(runs: Iterable[RunSummary], measure: _Measure, method: str, target: str) -> list[float]:
    found = (measure.of(run) for run in runs if (run.method, run.target) == (method, target))
    return [value for value in found if value is not None]


def _best(runs: Sequence[RunSummary], measure: _Measure) -> list[str]:
    """Who is first and who is next, in runs that the measure is known of."""
    methods, everywhere = methods_of(runs), targets_of(runs)
    if len(methods) < 2:
        return []
    whole = [name for name in methods if all(_values(runs, measure, name, target) for target in everywhere)]
    compared = whole if len(whole) > 1 else methods
    targets = [each for each in everywhere if all(_values(runs, measure, name, each) for name in compared)]
    there = {(run.method, run.target, run.seed) for run in runs}
    all_seeds = sorted({run.seed for run in runs})
    seeds = [
        seed for seed in all_seeds if all((name, target, seed) in there for name in compared for target in targets)
    ]
    if not targets or not seeds:
        return [f"{measure.told}, methods are not compared: there is no target with a seed that all of them have."]
    found = {}
    for name in compared:
        own = [[run for run in runs if run.seed == seed] for seed in seeds]
        found[name] = [fmean(fmean(_values(some, measure, name, each)) for each in targets) for some in own]
    order = sorted(found, key=lambda name: -fmean(found[name]))
    level = [name for name in order if _mean(found[name], measure) == _mean(found[order[0]], measure)]
    where = _over(targets, everywhere) + _with(seeds, all_seeds)
    if len(level) > 1:
        line = f"{measure.told}, {_and(level)} are level {where}: {_mean(found[order[0]], measure)}"
    else:
        line = f"{measure.told}, {order[0]} is best {where}: {_shown(found[order[0]], measure)}"
    if len(level) < len(order):
        following = order[len(level)]
        line += f"; next is {following} with {_shown(found[following], measure)}"
    left_out = [name for name in methods if name not in compared]
    return [
        f"{line}. {_and(left_out)} {'has' if len(left_out) == 1 else 'have'} not all targets."
        if left_out
        else f"{line}."
    ]


def _over(targets: Sequence[str], of: Sequence[str]) -> str:
    """On which targets, named where these are not all."""
    if len(targets) == 1:
        return f"on {targets[0]}" + (" alone" if len(of) > 1 else "")
    return f"on average over {len(targets)} targets" + (f" ({_and(targets)})" if len(targets) < len(of) else "")


def _with(seeds: Sequence[int], of: Sequence[int]) -> str:
    if len(seeds) == len(of):
        return ""
    return f", with seed{'' if len(seeds) == 1 else 's'} {_and([*map(str, seeds)])} alone"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _mean(values: Sequence[float], measure: _Measure) -> str:
    return f"{mean_and_spread(values)[0]:.{measure.digits}f}"


def _shown(values: Sequence[float], measure: _Measure) -> str:
    spread = mean_and_spread(values)[1]
    return _mean(values, measure) + ("" if spread is None else f" ± {spread:.{measure.digits}f}")


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
        return f"{text}, of one seed, which tells nothing about chance"
    if abs(mean) > _SURE * spread and mean:
        return f"{text}, over {len(values)} seeds: more than two standard deviations"
    return f"{text}, over {len(values)} seeds: not more than two standard deviations, chance may have made it"


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
