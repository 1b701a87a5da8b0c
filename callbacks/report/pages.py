"""A page of headings, tables and pictures, written once and rendered as HTML and as Markdown."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

from fedlit.callbacks.report.svg import standalone

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1f24; --paper: #ffffff; --faint: #5c6670; --line: #d5dae0; --band: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #16181c; --faint: #9aa4af; --line: #3a4048; --band: #1f2329; }
}
body { margin: 0 auto; max-width: 1160px; padding: 1rem 1rem 4rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { font-size: 1.3rem; margin-top: 2.5rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin-top: 1.8rem; }
a { color: inherit; }
p, li { max-width: 80ch; }
.table { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; vertical-align: top; border-bottom: 1px solid var(--line);
  min-width: 2.5rem; max-width: 34rem; }
th { background: var(--band); font-weight: 600; vertical-align: bottom; }
th, td { text-align: right; white-space: nowrap; }
.w { text-align: left; white-space: normal; }
tr.sum td { font-weight: 600; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
.pictures.wide { grid-template-columns: 1fr; }
figure { margin: 0; min-width: 0; }
figcaption { color: var(--faint); font-size: .85rem; }
img, svg { max-width: 100%; height: auto; }
svg text { fill: currentColor; stroke: none; }
.wide img { background: #ffffff; }
details { margin: .6rem 0; }
details details { margin-left: .8rem; }
summary { cursor: pointer; color: var(--faint); }
""".strip()


@dataclass(frozen=True)
class Heading:
    """A title of the page (level 1), of a part (2), or of a section (3)."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """Sentences below one another."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of cells; a line break in a cell is kept.

    The first ``words`` columns hold words, the others numbers; ``sums`` are places of rows that sum up others.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    sums: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A picture; its name beside a Markdown page shows the type: ``.svg``, which is text, or ``.png``."""

    file: str
    caption: str
    content: bytes | str

    def on_disk(self) -> bytes:
        """As a file of its own."""
        return self.content if isinstance(self.content, bytes) else standalone(self.content).encode()


@dataclass(frozen=True)
class Pictures:
    """Pictures beside one another where there is room; wide ones one below the other, on white, captions in sight."""

    pictures: Sequence[Picture]
    wide: bool = False


@dataclass(frozen=True)
class Folded:
    """What is shown on demand."""

    title: str
    blocks: Sequence[Block]


Block = Heading | Text | Bullets | Table | Pictures | Folded


def pictures_in(blocks: Iterable[Block]) -> Iterator[Picture]:
    """All pictures, those behind folds as well."""
    for block in blocks:
        if isinstance(block, Pictures):
            yield from block.pictures
        elif isinstance(block, Folded):
            yield from pictures_in(block.blocks)


def to_html(title: str, blocks: Iterable[Block]) -> str:
    """A page that needs no other file and loads nothing: style and pictures are inside, and there are no scripts."""
    # the policy keeps a browser from loading anything, whatever the texts say
    head = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        "</head>",
        "<body>",
    ]
    return "\n".join([*head, *(_html(block) for block in blocks), "</body>", "</html>", ""])


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(lines):
            return "\n".join(["<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"])
        case Table():
            return _html_table(block)
        case Pictures(pictures, wide):
            kind = "pictures wide" if wide else "pictures"
            return "\n".join([f'<div class="{kind}">', *(_html_picture(each, wide) for each in pictures), "</div>"])
        case Folded(title, blocks):
            inside = "\n".join(map(_html, blocks))
            return f"<details><summary>{escape(title)}</summary>\n{inside}\n</details>"


def _html_table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        texts = [escape(cell).replace("\n", "<br>") for cell in cells]
        # of a table of numbers alone no cell has to say what it is
        kinds = [" class=w" if place < table.words and table.words else "" for place in range(len(cells))]
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    lines = ['<div class="table"><table>', f"<thead><tr>{row(table.header, 'th')}</tr></thead>", "<tbody>"]
    for place, cells in enumerate(table.rows):
        kind = ' class="sum"' if place in table.sums else ""
        lines.append(f"<tr{kind}>{row(cells, 'td')}</tr>")
    return "\n".join([*lines, "</tbody>", "</table></div>"])


def _html_picture(picture: Picture, captioned: bool) -> str:
    caption = escape(picture.caption)
    if isinstance(picture.content, str):
        return f"<figure>{picture.content}</figure>"
    data = b64encode(picture.content).decode()
    below = f"\n<figcaption>{caption}</figcaption>" if captioned else ""
    return f'<figure><img src="data:image/png;base64,{data}" alt="{caption}">{below}</figure>'


def to_markdown(blocks: Iterable[Block], folder: str) -> str:
    """The same page for a code host or an editor: tables as text, pictures as files in a folder beside it."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: str) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Text(text):
            return _plain(text)
        case Bullets(lines):
            return "\n".join(f"- {_plain(line)}" for line in lines)
        case Table():
            return _markdown_table(block)
        case Pictures(pictures):
            return "\n\n".join(
                f"![{_plain(picture.caption)}]({quote(f'{folder}/{picture.file}')})" for picture in pictures
            )
        case Folded(title, blocks):
            return f"<details><summary>{escape(title)}</summary>\n\n{to_markdown(blocks, folder)}\n</details>"


def _markdown_table(table: Table) -> str:
    rule = ["---" if place < table.words else "---:" for place in range(len(table.header))]
    rows = [[_plain(cell) for cell in cells] for cells in table.rows]
    for place in table.sums:
        rows[place] = [f"**{cell}**" if cell else "" for cell in rows[place]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [[_plain(cell) for cell in table.header], rule, *rows])


def _plain(text: str) -> str:
    """Words that mean nothing but themselves in Markdown or in the HTML within it; line breaks are kept as ``<br>``."""
    # at the edge of a word an underscore would begin or end emphasis; within a name such as va_long_beach it does not
    text = re.sub(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", escape(text, quote=False))
    return "<br>".join(text.split("\n"))
