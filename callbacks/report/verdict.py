"""Results of a federation: the method to take by trust, differences to SourceOnly, and predictions of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedlit.callbacks.report.charts import confusion, dots, points, reliability, shares
from fedlit.callbacks.report.pages import Block, Bullets, Picture, Pictures, Text
from fedlit.callbacks.report.run import ORACLE
from fedlit.callbacks.report.run_folder import RunFolder
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
from fedlit.callbacks.selection import TRUST, Selection, select
from fedlit.callbacks.shared import grouped
from fedlit.callbacks.summary import marks, named_seeds
from fedlit.tables import COLLAPSED, Figure, Table, mean_and_deviation

_HOW = (
    "fedlit fit --compare ... --select best logs it and selects; for single runs add "
    "--trainer.callbacks+=fedlit.callbacks.Validators"
)

_SURE = 2.0
"""Standard deviations over seeds that a difference must have to count."""

SPREAD = "mean, and one standard deviation over seeds to either side"
"""Below a picture of methods by targets."""

_MEASURES = {
    "balanced accuracy": "oracle_balanced_accuracy",
    "F1": "oracle_f1",
    "AUC": "oracle_auc",
    "calibration error": "oracle_ece",
    "Brier score": "oracle_brier",
    "temperature": "temperature",
}
"""Columns, and the fields of `RunSummary` in them."""

_MEANING = (
    f"Of test samples, counted over all seeds. True classes are those of the target's hidden labels ({ORACLE}). Rows "
    "and columns of a confusion matrix are in the order of the classes, from above and from the left; its diagonal is "
    "right. Features are those of one seed, of at most 150 samples of each client that the target's process hosts, "
    "along their first two principal components: large dots are the target's, coloured by the class predicted, small "
    "ones the sources', coloured by their label."
)


def ranking(runs: Sequence[RunFolder]) -> list[Block]:
    """Sentences on the method to take, and a table of all selections, for finished runs of one federation.

    Methods are compared by ``validator/trust`` alone, see docs/labels.md, within each target and seed. Nothing is
    reported on a single method.
    """
    combined, runs = [run for run in runs if run.members], [run for run in runs if not run.members]
    if len({run.title for run in runs}) < 2:
        return []
    selections = select({run.name: run for run in runs})
    if not selections:
        if any(run.is_regression for run in runs):
            return [Text("Methods are not ranked: no score compares them in regression without labels of the target.")]
        return [
            Text(
                f"Methods are not ranked: only {TRUST} compares methods without labels of the target, and no run has "
                f"logged it. {_HOW}."
            )
        ]
    targets = dict.fromkeys(each.target for each in selections)
    lines = [_line(target, [each for each in selections if each.target == target]) for target in targets]
    compared = {each.run for selection in selections for each in selection.candidates}
    lacking = dict.fromkeys(run.title for run in runs if run.name not in compared)
    if lacking:
        lines.append(f"Not compared, as runs of them have not logged {TRUST}: {', '.join(lacking)}.")
    unranked = dict.fromkeys(
        each.method for selection in selections for each in selection.candidates if not each.ranked
    )
    if unranked:
        lines.append(
            "Trust takes certain predictions for a good sign, so that methods which train for them come after all "
            f"others: {', '.join(unranked)}."
        )
    lines += [
        f"{run.title} on {run.target} (seed {run.seed}) is a network of what {len(run.members)} "
        "models predict together, and not ranked."
        for run in combined
    ]
    header = ["target", "seed", "taken", "after round", "trust", "next", "its trust"]
    return [Bullets(lines), Table.of(header, map(_row, selections), words=3)]


def _line(target: str, selections: Sequence[Selection]) -> str:
    """The method to take on a target, by seed."""
    seeds = grouped(selections, lambda each: None if each.chosen is None else each.chosen.method)
    if [*seeds] == [None]:
        highest = max(selections, key=lambda each: each.candidates[0].trust)
        return f"No model can be trusted on {target}, and none is named: {highest.refusal}"
    taken = [method or "no model" for method in seeds]
    if len(selections) > 1:
        of_seeds = [named_seeds([each.seed for each in some]) for some in seeds.values()]
        taken = [f"{name} with {which}" for name, which in zip(taken, of_seeds, strict=True)]
    text = f"By {TRUST}, without labels of the target: on {target} take {'; '.join(taken)}."
    if any(each.in_doubt for each in selections):
        of_two = any(each.two_classes for each in selections)
        why = "as trust says little of two classes" if of_two else "where no other is trusted by 5% more"
        text += f" SourceOnly is taken {why}."
    return text if len(seeds) == 1 else f"{text} Seeds do not agree."


def _row(selection: Selection) -> list[str]:
    chosen = selection.chosen
    if chosen is None and not any(each.ranked for each in selection.candidates):
        return [selection.target, selection.seed, "none: none is ranked", *["-"] * 4]
    if chosen is None:
        highest = f"at most {selection.candidates[0].trust:.4f}"
        return [selection.target, selection.seed, "none: too little trust", "-", highest, "-", "-"]
    row = [selection.target, selection.seed, chosen.method, str(chosen.round_idx), f"{chosen.trust:.3f}"]
    others = [each for each in selection.candidates if each is not chosen]
    return [*row, *([others[0].method, f"{others[0].trust:.3f}"] if others else ["-", "-"])]


def verdict(runs: Sequence[RunSummary], trust: Picture | None = None, prefix: str = "") -> list[Block]:
    """Sentences, and pictures of methods by targets, on finished runs of one federation.

    Methods are compared with the floor on targets and seeds that both have, and are not ranked: hidden labels may not
    choose among them. A difference counts where its mean over seeds is more than two standard deviations of it: a rule
    of thumb, no test, and with few seeds a weak one. ``trust`` pictures the score that may rank methods.
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
            lines.append(
                f"{ORACLE}: {method} and {FLOOR} have no target, seed and samples in common, and are not compared."
            )
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


def target_blocks(target: str, runs: Mapping[str, Sequence[RunFolder]], file: str) -> list[Block]:
    """Tables and pictures of the target's test samples, of runs by their names in tables; nothing if none has any."""
    summaries = {name: [run.summary for run in some if run.summary is not None] for name, some in runs.items()}
    recorded = [run for some in summaries.values() for run in some if run.oracle_confusion]
    classes = recorded[0].classes if recorded else []
    counts = {name: _summed(some, classes) for name, some in summaries.items()}
    counts = {name: matrix for name, matrix in counts.items() if matrix}
    bins = {name: _bins(some) for name, some in summaries.items()}
    bins = {name: rows for name, rows in bins.items() if rows}
    drawings: dict[str, str] = {}
    if bins:
        title = f"{target}: share that is right ({ORACLE}), by probability"
        drawings[title] = reliability(title, bins)
    if counts:
        predicted = {name: [sum(column) for column in zip(*matrix, strict=True)] for name, matrix in counts.items()}
        title = f"{target}: share of each class, in %"
        drawings[title] = shares(title, classes, predicted, [sum(row) for row in next(iter(counts.values()))])
    for name, matrix in counts.items():
        title = f"{name} on {target}: true classes (rows, {ORACLE})"
        drawings[title] = confusion(title, classes, matrix)
    for name, some in runs.items():
        for run in sorted((run for run in some if run.embeddings), key=lambda run: int(run.seed))[:1]:
            title = f"{name} on {target}: features, seed {run.seed}"
            drawings[title] = _plane(title, run, target)
    blocks: list[Block] = []
    values = {
        name: [[v for run in some if (v := getattr(run, field)) is not None] for field in _MEASURES.values()]
        for name, some in summaries.items()
    }
    scores = [[name, *(Figure(each, form="{:.3f}") for each in row)] for name, row in values.items() if any(row)]
    if scores:
        blocks.append(Text(f"{ORACLE}, all but the temperature by which Calibration has divided logits:"))
        blocks.append(Table.of(["method", *_MEASURES], scores))
    if drawings:
        pictures = [Picture(f"{file}_{n}.svg", title, svg) for n, (title, svg) in enumerate(drawings.items(), 1)]
        blocks += [Text(_MEANING), Pictures(pictures)]
    others = sorted({run.method for run in recorded if sorted(run.classes) != sorted(classes)})
    if others:
        blocks.append(
            Text(f"Runs of {', '.join(others)} with other classes than {classes} are not counted as classes.")
        )
    return blocks


def _summed(runs: Sequence[RunSummary], classes: Sequence[str]) -> list[list[int]]:
    """The sum of the runs' confusion matrices in the order of these classes; runs with other classes are left out."""
    matrices = []
    for run in runs:
        if run.oracle_confusion and sorted(run.classes) == sorted(classes):
            order = sorted(range(len(classes)), key=lambda place: classes.index(run.classes[place]))
            matrices.append([[run.oracle_confusion[row][column] for column in order] for row in order])
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]


def _bins(runs: Sequence[RunSummary]) -> list[list[float]]:
    """Reliability over seeds."""
    tables = [run.oracle_reliability for run in runs if run.oracle_reliability]
    if len({len(table) for table in tables}) != 1:
        return []
    rows = []
    for same in zip(*tables, strict=True):
        count = sum(row[0] for row in same)
        rows.append([count, *(sum(row[0] * row[part] for row in same) / max(count, 1) for part in (1, 2))])
    return rows


def _plane(title: str, run: RunFolder, target: str) -> str:
    rows = [(row, row.predicted if row.client == target else row.label) for row in run.embeddings]
    classes = sorted({label for _, label in rows if label})
    samples: dict[str, list[tuple[float, float]]] = {}
    colors: dict[str, list[int]] = {}
    for row, label in rows:
        samples.setdefault(row.client, []).append((row.x, row.y))
        colors.setdefault(row.client, []).append(classes.index(label) if label else 0)
    if not classes:  # in regression, clients have the colours
        colors = {client: [place] * len(some) for place, (client, some) in enumerate(samples.items())}
        classes = [*samples]
    return points(title, samples, colors, classes, target)
