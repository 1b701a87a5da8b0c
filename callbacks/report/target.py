"""How the target's samples are predicted: scores of probabilities, classes, and features in the plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedlit.callbacks.report.charts import confusion, points, reliability, shares
from fedlit.callbacks.report.pages import Block, Picture, Pictures, Text
from fedlit.callbacks.report.run import ORACLE
from fedlit.callbacks.report.run_folder import RunFolder
from fedlit.callbacks.run_summary import RunSummary
from fedlit.tables import Figure, Table

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
            drawings[title] = _points(title, run, target)
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


def _points(title: str, run: RunFolder, target: str) -> str:
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
