"""A report's pages as a reader sees them: headings, texts, tables and pictures."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

Cells = list[list[str]]


@dataclass
class Page(HTMLParser):
    """An HTML page.

    Tables are found by the summary that folds them, or by their first heading cell.
    """

    source: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    tables: list[Cells] = field(default_factory=list)
    folded: dict[str, list[Cells]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._summaries: list[str] = []
        self.feed(self.source)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "br":
            self.handle_data("\n")
        if tag in ("meta", "img", "br"):
            return
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "summary":
            self._summaries.append(self.texts["summary"][-1])
        elif tag == "details":
            summary = self._summaries.pop()
            if summary.startswith("numbers"):
                self.folded.setdefault(summary, []).append(self.tables[-1])

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data
        if set(self._open) & {"td", "th"}:
            self.tables[-1][-1][-1] += data

    def table(self, first: str, place: int = 0) -> Cells:
        """The ``place``-th table that is not folded and whose first heading is ``first``, without its header."""
        folded = [id(table) for tables in self.folded.values() for table in tables]
        found = [table for table in self.tables if table[0][0] == first and id(table) not in folded]
        return found[place][1:]

    def numbers(self, title: str, place: int = 0) -> dict[str, dict[int, str]]:
        """The folded table of the ``place``-th picture of this title: by column, its filled cells by round."""
        header, *rows = self.folded[f"numbers: {title}"][place]
        columns = {name: [row[column] for row in rows] for column, name in enumerate(header)}
        rounds = [int(cell) for cell in columns.pop("round")]
        return {
            name: {at: cell for at, cell in zip(rounds, cells, strict=True) if cell} for name, cells in columns.items()
        }


def markdown_tables(text: str) -> list[Cells]:
    """Tables of a Markdown page, with the words that their cells stand for."""
    tables: list[Cells] = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        rows = [[_word(cell) for cell in re.split(r"(?<!\\) ?\| ?", line)[1:-1]] for line in block.splitlines()]
        assert all(set(cell) <= {"-", ":"} for cell in rows.pop(1))
        tables.append(rows)
    return tables


def _word(cell: str) -> str:
    cell = re.sub(r"^\*\*(.*)\*\*$", r"\1", cell.replace("<br>", "\n"))
    return html.unescape(re.sub(r"\\(.)", r"\1", cell))
