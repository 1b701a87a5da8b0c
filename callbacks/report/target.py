"""How the target's samples are predicted: right or wrong, how surely, as which classes, and by which features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedlit.callbacks.report.charts import Confusion, Points, Reliability, Shares, mean_and_spread
from fedlit.callbacks.report.pages import Block, Picture, Pictures, Table, Text
from fedlit.callbacks.report.run import ORACLE
from fedlit.callbacks.report.run_folder import RunFolder
from fedlit.callbacks.run_summary import RunSummary

Runs = Mapping[str, Sequence[RunFolder]]
"""Finished runs on one target, by method."""

_MEASURES: tuple[tuple[str, Callable[[RunSummary], float | None]], ...] = (
    ("balanced accuracy", lambda run: run.oracle_balanced_accuracy),
    ("F1", lambda run: run.oracle_f1),
    ("AUC", lambda run: run.oracle_auc),
    ("calibration error", lambda run: run.oracle_ece),
    ("Brier score", lambda run: run.oracle_brier),
    ("temperature", lambda run: run.temperature),
)


def target_blocks(target: str, runs: Runs, file: str) -> list[Block]:
    """Tables and pictures of the test samples of one target; nothing if no run has recorded them."""
    summaries = [run for own in runs.values() for run in _summaries(own)]
    classes = next((run.classes for run in summaries if run.oracle_confusion), [])
    summed = {method: _summed(own, classes) for method, own in runs.items()}
    summed = {method: counts for method, counts in summed.items() if counts}
    others = sorted(
        {run.method for run in summaries if run.oracle_confusion and sorted(run.classes) != sorted(classes)}
    )
    pictures: list[Picture] = []

    def add(title: str, svg: str) -> None:
        pictures.append(Picture(f"{file}_{len(pictures) + 1}.svg", title, svg))

    bins = {method: _bins(own) for method, own in runs.items()}
    bins = {method: rows for method, rows in bins.items() if rows}
    if bins:
        title = f"{target}: share that is right ({ORACLE}), by probability"
        add(title, Reliability(title, bins).draw())
    if summed:
        title = f"{target}: share of each class, in %"
        shares = {method: [sum(column) for column in zip(*counts, strict=True)] for method, counts in summed.items()}
        add(title, Shares(title, classes, shares, [sum(row) for row in next(iter(summed.values()))]).draw())
    for method, counts in summed.items():
        title = f"{method} on {target}: true classes (rows, {ORACLE})"
        add(title, Confusion(title, classes, counts).draw())
    for method, own in runs.items():
        embedded = [run for run in own if run.embeddings and run.summary]
        if embedded:
            run = min(embedded, key=lambda run: int(run.seed))
            title = f"{method} on {target}: features, seed {run.seed}"
            add(title, _points(title, run, target))
    blocks: list[Block] = [*_table(runs)]
    if pictures:
        blocks += [Text(_MEANING), Pictures(pictures)]
    if others:
        blocks.append(
            Text(f"Runs of {', '.join(others)} with other classes than {classes} are not counted as classes.")
        )
    return blocks


_MEANING = (
    f"Of test samples, counted over all seeds. True classes are those of the target's hidden labels ({ORACLE}). Rows "
    "and columns of a confusion matrix are in the order of the classes, from above and from the left; its diagonal is "
    "right. Features are those of one seed, of at most 150 samples of each client that the target's process hosts, "
    "along their first two principal components: large dots are the target's, coloured by the class predicted, small "
    "ones the sources', coloured by their label."
)


def _summaries(runs: Sequence[RunFolder]) -> list[RunSummary]:
    return [run.summary for run in runs if run.summary is not None]


def _summed(runs: Sequence[RunFolder], classes: Sequence[str]) -> list[list[int]]:
    """Confusion matrices over seeds, in the order of these classes; of runs that have others nothing."""
    found = []
    for run in _summaries(runs):
        if run.oracle_confusion and sorted(run.classes) == sorted(classes):
            places = sorted(range(len(classes)), key=lambda place: classes.index(run.classes[place]))
            found.append([[run.oracle_confusion[row][column] for column in places] for row in places])
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]


def _bins(runs: Sequence[RunFolder]) -> list[list[float]]:
    """Reliability over seeds."""
    found = [run.oracle_reliability for run in _summaries(runs) if run.oracle_reliability]
    if not found or len({len(each) for each in found}) > 1:
        return []
    rows = []
    for same in zip(*found, strict=True):
        count = sum(row[0] for row in same)
        means = [sum(row[0] * row[place] for row in same) / max(count, 1) for place in (1, 2)]
        rows.append([count, *means])
    return rows


def _table(runs: Runs) -> list[Block]:
    rows = []
    for method, own in runs.items():
        each = [[value for run in _summaries(own) if (value := of(run)) is not None] for _, of in _MEASURES]
        if any(each):
            rows.append([method, *(_number(values) if values else "-" for values in each)])
    header = [name for name, _ in _MEASURES]
    caption = Text(f"{ORACLE}, all but the temperature by which Calibration has divided logits:")
    return [caption, Table(["method", *header], rows)] if rows else []


def _number(values: Sequence[float]) -> str:
    mean, spread = mean_and_spread(values)
    return f"{mean:.3f}" + ("" if spread is None else f" ± {spread:.3f}")


def _points(title: str, run: RunFolder, target: str) -> str:
    rows = run.embeddings
    shown = {row.client: row.predicted if row.client == target else row.label for row in rows}
    classes = list(dict.fromkeys(row.predicted if row.client == target else row.label for row in rows))
    classes = sorted(name for name in classes if name)
    points = {client: [(row.x, row.y) for row in rows if row.client == client] for client in shown}
    colors = {
        client: [
            classes.index(name) if (name := row.predicted if client == target else row.label) else 0
            for row in rows
            if row.client == client
        ]
        for client in shown
    }
    if not classes:  # of numbers, clients have the colours
        colors = {client: [place] * len(points[client]) for place, client in enumerate(points)}
        classes = [*points]
    return Points(title, points, colors, classes, target).draw()
