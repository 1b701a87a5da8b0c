"""One table for everything that fedlit prints: for terminals, and as CSV, Markdown, LaTeX and HTML.

It does not import torch, so that commands which need none can print their tables immediately.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

COLLAPSED = "†"
"""After a score of models of which at least one predicts a single class."""


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation of at least one value; a single value has no deviation."""
    return fmean(values), stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Figure:
    """A cell with the values of repetitions, shown as mean ± sample standard deviation."""

    values: Sequence[float]  # one per repetition; without any the cell is a dash
    scale: float = 1  # factor of mean and deviation, 100 for shares that are shown in per cent
    form: str = "{:.1f}"  # format of the mean and of the deviation
    collapsed: int = 0  # number of models behind it that predict a single class; they are marked with a dagger
    bold: bool = False  # whether it stands out

    @property
    def parts(self) -> tuple[float | None, float | None, int, int]:
        """Mean, deviation, number of values and of collapsed models: the columns of a figure in a CSV file."""
        mean, deviation = mean_and_deviation(self.values) if self.values else (None, None)
        mean, deviation = (None if each is None else self.scale * each for each in (mean, deviation))
        return mean, deviation, len(self.values), self.collapsed

    def __str__(self) -> str:
        mean, deviation, *_ = self.parts
        if mean is None:
            return "-"
        text = self.form.format(mean) + ("" if deviation is None else f" ± {self.form.format(deviation)}")
        return f"{text} {COLLAPSED}" if self.collapsed else text


@dataclass(frozen=True)
class Column:
    """A column."""

    title: str  # heading; only terminals keep its line breaks
    numeric: bool = False  # whether it has numbers, which are aligned to the right, or words
    form: Callable[[Any], str] = str  # turns a value into text; texts, figures and ``None``, which is a dash, need none
    folds: bool = False  # whether a narrow terminal may break its cells
    min_width: int = 1  # characters that a narrow terminal leaves it
    parts: tuple[str, ...] = ()  # headings of `Figure.parts` in a CSV file; empty for columns without figures

    def text(self, value: object) -> str:
        """The text of a cell."""
        return "-" if value is None else value if isinstance(value, str) else self.form(value)


@dataclass
class Row:
    """A row; ``total`` sums up other rows and stands out, ``last`` ends a group."""

    cells: list[Any]
    total: bool = False
    last: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows, with a caption above and footnotes below."""

    columns: Sequence[Column]  # at least one
    rows: Sequence[Row]  # with a cell for each column
    caption: str | None = None  # states what the table has, and how to read its numbers
    footnotes: Sequence[str] = ()  # sentences on single cells
    # columns from which a second table is made on a terminal too narrow for all, and columns repeated in it
    split: tuple[int, int] | None = None

    @classmethod
    def of(cls, titles: Iterable[str], rows: Iterable[Sequence[Any]], words: int = 1, **kwargs: Any) -> Table:
        """A table whose first ``words`` columns have words, and the others numbers."""
        columns = [Column(title, numeric=place >= words, folds=place < words) for place, title in enumerate(titles)]
        return cls(columns, [Row(list(cells)) for cells in rows], **kwargs)

    def select(self, places: Sequence[int]) -> Table:
        """Some columns, without caption and footnotes."""
        rows = [replace(row, cells=[row.cells[place] for place in places]) for row in self.rows]
        return Table([self.columns[place] for place in places], rows)

    def texts(self) -> list[list[str]]:
        """The cells as text."""
        return [[c.text(cell) for c, cell in zip(self.columns, row.cells, strict=True)] for row in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._rich()
        if (
            self.split is None
            or console.measure(whole, options=options.update(width=10_000)).maximum <= options.max_width
        ):
            yield whole
        else:
            first, repeated = self.split
            yield replace(self.select(range(first)), caption=self.caption)._rich()
            yield self.select([*range(repeated), *range(first, len(self.columns))])._rich()
        if self.footnotes:
            yield Text("\n".join(self.footnotes))

    def _rich(self) -> RichTable:
        title = None if self.caption is None else Text(self.caption, style="italic")
        table = RichTable(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for column in self.columns:
            look: dict[str, Any] = {"justify": "right" if column.numeric else "left", "no_wrap": not column.folds}
            table.add_column(Text(column.title), overflow="fold", min_width=column.min_width, **look)
        for row, cells in zip(self.rows, self.texts(), strict=True):
            # as `Text`: brackets in names would be styles to rich
            table.add_row(*map(Text, cells), style="bold" if row.total else None, end_section=row.last)
        return table

    def csv(self) -> str:
        """Values with all their digits; a column of figures becomes one column per part."""
        file = io.StringIO(newline="")
        writer = csv.writer(file)
        writer.writerow(_no_formula(title) for c in self.columns for title in c.parts or [c.title])
        for row in self.rows:
            cells = zip(self.columns, row.cells, strict=True)
            parts = (part for column, cell in cells for part in (cell.parts if column.parts else [cell]))
            writer.writerow(map(_no_formula, parts))
        return file.getvalue()

    def markdown(self, escaped: bool = True) -> str:
        """The table; ``escaped`` unless its texts are Markdown already."""
        plain = as_markdown if escaped else str
        header = [plain(column.title.replace("\n", " ")) for column in self.columns]
        lines = [_piped(header), f"|{'|'.join('---:' if column.numeric else '---' for column in self.columns)}|"]
        for row, texts in zip(self.rows, self.texts(), strict=True):
            cells = zip(row.cells, map(plain, texts), strict=True)
            lines.append(_piped(f"**{text}**" if text and _stands_out(row, cell) else text for cell, text in cells))
        above = [] if self.caption is None else [f"{plain(self.caption)}:", ""]
        return "\n".join([*above, *lines, *(line for note in self.footnotes for line in ("", plain(note)))])

    def latex(self) -> str:
        """A tabular of the package booktabs, with the caption as a comment."""
        rows = [
            [
                rf"\textbf{{{as_latex(text)}}}" if text and _stands_out(row, cell) else as_latex(text)
                for cell, text in cells
            ]
            for row, texts in zip(self.rows, self.texts(), strict=True)
            for cells in [zip(row.cells, texts, strict=True)]
        ]
        header = [as_latex(column.title) for column in self.columns]
        width = len(self.columns)
        lines = [
            *([] if self.caption is None else [f"% {self.caption}; needs the package booktabs"]),
            rf"\begin{{tabular}}{{{''.join('r' if column.numeric else 'l' for column in self.columns)}}}",
            r"\toprule",
            " & ".join(header) + r" \\",
            r"\midrule",
            *(" & ".join(cells) + r" \\" for cells in rows),
            r"\bottomrule",
            *(rf"\multicolumn{{{width}}}{{l}}{{{as_latex(note)}}} \\" for note in self.footnotes),
            r"\end{tabular}",
        ]
        return "\n".join(lines)

    def html(self) -> str:
        """An element of a page; all texts are escaped, and line breaks are ``<br>``."""
        titles = [column.title.replace("\n", " ") for column in self.columns]
        rows = []
        for row, texts in zip(self.rows, self.texts(), strict=True):
            kind = ' class="sum"' if row.total else ""
            rows.append(f"<tr{kind}>{self._cells('td', texts)}</tr>")
        lines = [
            '<div class="table"><table>',
            *([] if self.caption is None else [f"<caption>{escape(self.caption)}</caption>"]),
            f"<thead><tr>{self._cells('th', titles)}</tr></thead>",
            *("<tbody>", *rows, "</tbody></table></div>"),
            *(line for note in self.footnotes for line in ("", f"<p>{escape(note)}</p>")),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:  # notebooks show it
        return self.html()

    def _cells(self, tag: str, texts: Iterable[str]) -> str:
        pairs = zip(self.columns, (escape(text).replace("\n", "<br>") for text in texts), strict=True)
        return "".join(f"<{tag}{'' if column.numeric else ' class=w'}>{text}</{tag}>" for column, text in pairs)


def _stands_out(row: Row, cell: object) -> bool:
    return row.total or (isinstance(cell, Figure) and cell.bold)


def _no_formula(cell: object) -> object:
    """A cell of a CSV file; a text that a spreadsheet would compute gets an apostrophe in front (OWASP)."""
    computes = isinstance(cell, str) and len(cell) > 1 and cell.lstrip().startswith(("=", "+", "-", "@"))
    return f"'{cell}" if computes else cell


def _piped(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_markdown(text: str) -> str:
    """Text that means nothing but itself in Markdown and in the HTML within it; line breaks become ``<br>``."""
    # at the edge of a word an underscore would begin or end emphasis; within a name such as va_long_beach it does not
    text = re.sub(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", escape(text, quote=False))
    return "<br>".join(text.split("\n"))


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\n": " "}
_LATEX |= {f" {COLLAPSED}": r"$^\dagger$", COLLAPSED: r"$^\dagger$", "±": r"$\pm$"}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
_LATEX_SIGNS = re.compile("|".join(map(re.escape, _LATEX)))  # the first alternative wins: the dagger with its space


def as_latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return _LATEX_SIGNS.sub(lambda sign: _LATEX[sign[0]], text)


def show(what: RenderableType, width: int | None = None) -> None:
    """Print a table; in a file or a pipe in this width, or as wide as it needs: there is no screen to fit it to."""
    console = Console()
    if not sys.stdout.isatty():
        console = Console(width=width or max(80, Console(width=10_000).measure(what).maximum))
    console.print(what)
