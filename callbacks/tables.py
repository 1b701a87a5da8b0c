"""What runs came to as files for papers and spreadsheets: methods by targets, in CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

from fedlit.callbacks.summary import RunSummary, accuracies, averages, methods_of, targets_of

_AVERAGE = "average"


@dataclass(frozen=True)
class Cell:
    """Repetitions of a method on a target, or its averages over targets, in per cent."""

    values: tuple[float, ...]

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


def write_tables(summaries: Sequence[RunSummary], folder: Path) -> list[Path]:
    """Write ``table.csv``, ``table.md`` and ``table.tex``: a row per method, a column per target, and the average.

    Figures are accuracies (in regression, R2) on the target's hidden labels in per cent, an oracle: mean ± sample
    standard deviation over seeds, which are columns of their own in the CSV. The best mean of each column is bold in
    Markdown and LaTeX.

    Args:
        summaries: Of all runs, at least one.
        folder: Where they go.

    Returns:
        Their paths.
    """
    columns = [*targets_of(summaries), *([_AVERAGE] if len(targets_of(summaries)) > 1 else [])]
    rows = {method: [_cell(summaries, method, column) for column in columns] for method in methods_of(summaries)}
    score = "R2" if any(run.oracle_r2 is not None for run in summaries) else "accuracy"
    repeated = len({run.seed for run in summaries}) > 1
    caption = f"Target {score} in per cent on hidden labels (oracle)" + (
        ", mean ± sample standard deviation over seeds" if repeated else ""
    )
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"table.{suffix}" for suffix in ("csv", "md", "tex")]
    with paths[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        of_each = (f"oracle {score} in %: {{}}", "standard deviation: {}", "seeds: {}")
        writer.writerow(["method", *(name.format(column) for column in columns for name in of_each)])
        for method, cells in rows.items():
            figures = ((cell.mean, cell.deviation, len(cell.values)) for cell in cells)
            writer.writerow([method, *chain.from_iterable(figures)])
    paths[1].write_text(_markdown(columns, rows, caption), encoding="utf-8")
    paths[2].write_text(_latex(columns, rows, caption), encoding="utf-8")
    return paths


def _cell(summaries: Sequence[RunSummary], method: str, column: str) -> Cell:
    runs = [run for run in summaries if run.method == method]
    if column == _AVERAGE and _AVERAGE not in targets_of(runs):
        whole = set(targets_of(runs)) == set(targets_of(summaries))
        return Cell(tuple(averages(runs)) if whole else ())
    return Cell(tuple(accuracies(run for run in runs if run.target == column)))


def _best(rows: dict[str, list[Cell]], place: int) -> float | None:
    """The highest mean of a column as it is shown, if there are several."""
    means = [round(cells[place].mean, 1) for cells in rows.values() if cells[place].mean is not None]  # type: ignore[arg-type]
    return max(means) if len(rows) > 1 and means else None


def _texts(rows: dict[str, list[Cell]], between: str, bold: Callable[[str], str]) -> dict[str, list[str]]:
    return {
        method: [
            bold(cell.text(between))
            if cell.mean is not None and round(cell.mean, 1) == _best(rows, place)
            else cell.text(between)
            for place, cell in enumerate(cells)
        ]
        for method, cells in rows.items()
    }


def _markdown(columns: Sequence[str], rows: dict[str, list[Cell]], caption: str) -> str:
    texts = _texts(rows, " ± ", "**{}**".format)
    lines = [
        f"{caption}:",
        "",
        _row(["method", *map(_markdown_text, columns)]),
        _row(["---", *("---:" for _ in columns)]),
        *(_row([_markdown_text(method), *cells]) for method, cells in texts.items()),
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_text(text: str) -> str:
    return "".join(f"\\{sign}" if sign in "|*_`\\" else sign for sign in text)


def _latex(columns: Sequence[str], rows: dict[str, list[Cell]], caption: str) -> str:
    texts = _texts(rows, r" $\pm$ ", r"\textbf{{{}}}".format)
    lines = [
        f"% {caption}; needs the package booktabs",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["method", *map(_latex_text, columns)]) + r" \\",
        r"\midrule",
        *(" & ".join([_latex_text(method), *cells]) + r" \\" for method, cells in texts.items()),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)
