"""What runs came to as files for papers and spreadsheets: methods by targets, in CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

from fedlit.callbacks.run_summary import RunSummary, accuracies, averages, methods_of, split_by_task, targets_of
from fedlit.callbacks.summary import COLLAPSED, marks

_AVERAGE = "average"


@dataclass(frozen=True)
class Cell:
    """Repetitions of a method on a target, or its averages over targets, in per cent.

    Args:
        values: One for each seed.
        collapsed: How many of the models behind it predict one class alone.
    """

    values: tuple[float, ...]
    collapsed: int = 0

    @property
    def mean(self) -> float | None:
        """Over seeds; ``None`` without any."""
        return 100 * fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds; ``None`` of a single one."""
        return 100 * stdev(self.values) if len(self.values) > 1 else None

    def text(self, between: str) -> str:
        """With one place behind the point."""
        if self.mean is None:
            return "-"
        return f"{self.mean:.1f}" + ("" if self.deviation is None else f"{between}{self.deviation:.1f}")


@dataclass(frozen=True)
class _Column:
    """A target, or the average over targets, and the cell of each method.

    Args:
        name: In the header.
        cells: By method; methods without runs have a cell without values.
    """

    name: str
    cells: dict[str, Cell]

    @property
    def distinct(self) -> str | None:
        """The method whose mean less its deviation is above every other mean plus its deviation, if there is one."""
        known = {method: cell for method, cell in self.cells.items() if cell.mean is not None}
        if len(self.cells) < 2 or not known:
            return None
        limits = {m: (cell.mean, cell.deviation) for m, cell in known.items()}
        if any(deviation is None for _, deviation in limits.values()):
            return None  # nothing is known of its spread
        low = {method: mean - deviation for method, (mean, deviation) in limits.items()}  # type: ignore[operator]
        first = max(low, key=lambda method: low[method])
        others = (mean + deviation for method, (mean, deviation) in limits.items() if method != first)  # type: ignore[operator]
        return first if all(low[first] > high for high in others) else None


def write_tables(summaries: Sequence[RunSummary], folder: Path) -> list[Path]:
    """Write ``table.csv``, ``table.md`` and ``table.tex``: a row per method, a column per target, and the average.

    Figures are accuracies (in regression, R2) on the target's hidden labels in per cent, an oracle: mean ± sample
    standard deviation over seeds, which are columns of their own in the CSV. Accuracies and R2 have columns of their
    own. In Markdown and LaTeX a figure is bold if no other interval (mean ± deviation) of its column reaches its own;
    with one seed there are no intervals, and nothing is bold. Models that predict one class alone are marked.

    Args:
        summaries: Of all runs, at least one.
        folder: Where they go.

    Returns:
        Their paths.
    """
    methods, columns = methods_of(summaries), _columns(summaries)
    score = " or ".join(task for task, runs in split_by_task(summaries).items() if runs)
    caption = f"Target {score} in per cent on hidden labels (oracle)"
    if len({run.seed for run in summaries}) > 1:
        caption += ", mean ± sample standard deviation over seeds"
    if len(methods) > 1:
        caption += "; bold where no other mean ± deviation of the column reaches it, and nowhere with one seed"
    footnotes = marks(summaries)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"table.{suffix}" for suffix in ("csv", "md", "tex")]
    with paths[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        of_each = (f"oracle {score} in %: {{}}", "standard deviation: {}", "seeds: {}", "of one class alone: {}")
        writer.writerow(["method", *(name.format(column.name) for column in columns for name in of_each)])
        for method in methods:
            cells = (column.cells[method] for column in columns)
            figures = ((cell.mean, cell.deviation, len(cell.values), cell.collapsed) for cell in cells)
            writer.writerow([method, *chain.from_iterable(figures)])
    paths[1].write_text(_markdown(methods, columns, caption, footnotes), encoding="utf-8")
    paths[2].write_text(_latex(methods, columns, caption, footnotes), encoding="utf-8")
    return paths


def _columns(summaries: Sequence[RunSummary]) -> list[_Column]:
    """Targets and their average; accuracies and R2 apart from each other where there are both."""
    methods = methods_of(summaries)
    by_task = {task: runs for task, runs in split_by_task(summaries).items() if runs}
    columns = []
    for task, part in by_task.items():
        unit = f" ({task})" if len(by_task) > 1 else ""
        targets = targets_of(part)
        for target in targets:
            here = [run for run in part if run.target == target]
            columns.append(_Column(f"{target}{unit}", {method: _cell(_of(here, method)) for method in methods}))
        if len(targets) > 1:
            cells = {method: _average(_of(part, method), targets) for method in methods}
            name = "average over targets" if _AVERAGE in targets else _AVERAGE
            columns.append(_Column(f"{name}{unit}", cells))
    return columns


def _of(runs: Sequence[RunSummary], method: str) -> list[RunSummary]:
    return [run for run in runs if run.method == method]


def _cell(runs: Sequence[RunSummary]) -> Cell:
    return Cell(tuple(accuracies(runs)), sum(run.only_class is not None for run in runs))


def _average(runs: Sequence[RunSummary], targets: Sequence[str]) -> Cell:
    """Of a method that has all targets; of another one, an average would be of other targets than the others'."""
    if set(targets_of(runs)) != set(targets):
        return Cell(())
    return Cell(tuple(averages(runs)), _cell(runs).collapsed)


def _texts(
    methods: Sequence[str], columns: Sequence[_Column], between: str, bold: Callable[[str], str], mark: str
) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {method: [] for method in methods}
    for column in columns:
        distinct = column.distinct
        for method in methods:
            cell = column.cells[method]
            text = bold(cell.text(between)) if method == distinct else cell.text(between)
            rows[method].append(text + (mark if cell.collapsed and cell.values else ""))
    return rows


def _markdown(methods: Sequence[str], columns: Sequence[_Column], caption: str, footnotes: Sequence[str]) -> str:
    texts = _texts(methods, columns, " ± ", "**{}**".format, f" {COLLAPSED}")
    lines = [
        f"{caption}:",
        "",
        _row(["method", *(_markdown_text(column.name) for column in columns)]),
        _row(["---", *("---:" for _ in columns)]),
        *(_row([_markdown_text(method), *cells]) for method, cells in texts.items()),
        *(line for note in footnotes for line in ("", _markdown_text(note))),
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_text(text: str) -> str:
    return "".join(f"\\{sign}" if sign in "|*_`\\" else sign for sign in text)


def _latex(methods: Sequence[str], columns: Sequence[_Column], caption: str, footnotes: Sequence[str]) -> str:
    texts = _texts(methods, columns, r" $\pm$ ", r"\textbf{{{}}}".format, r"$^\dagger$")
    width = len(columns) + 1
    lines = [
        f"% {caption}; needs the package booktabs",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["method", *(_latex_text(column.name) for column in columns)]) + r" \\",
        r"\midrule",
        *(" & ".join([_latex_text(method), *cells]) + r" \\" for method, cells in texts.items()),
        r"\bottomrule",
        *(rf"\multicolumn{{{width}}}{{l}}{{{_latex_text(note)}}} \\" for note in footnotes),
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    COLLAPSED: r"$^\dagger$",
} | {sign: f"\\{sign}" for sign in "&%$#_{}"}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)
