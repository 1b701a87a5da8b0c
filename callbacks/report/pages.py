"""A page of headings, tables and pictures, written once and rendered as HTML and as Markdown."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

_MIME = {".png": "image/png", ".svg": "image/svg+xml"}

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
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  min-width: 2.5rem; max-width: 34rem; }
th { background: var(--band); font-weight: 600; vertical-align: bottom; }
.number { text-align: right; }
td.number { white-space: nowrap; }
tr.sum td { font-weight: 600; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
.pictures.wide { grid-template-columns: 1fr; }
figure { margin: 0; min-width: 0; }
figcaption { color: var(--faint); font-size: .85rem; }
img { max-width: 100%; height: auto; }
.wide img { background: #ffffff; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--faint); }
""".strip()


@dataclass(frozen=True)
class Heading:
    """A title of the page (level 1), of a part (2), or of a section (3), which `Links` find by its anchor."""

    level: int
    text: str
    anchor: str | None = None


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """Sentences below one another."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Links:
    """A list of what the page has: words and the anchor of a heading, each."""

    items: Sequence[tuple[str, str]]


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
    """A picture as it is on disk; its name beside a Markdown page tells the kind, ``.svg`` or ``.png``."""

    file: str
    caption: str
    content: bytes


@dataclass(frozen=True)
class Pictures:
    """Pictures beside one another where there is room; wide ones one below the other, on white, captions in sight."""

    pictures: Sequence[Picture]
    wide: bool = False


@dataclass(frozen=True)
class Folded:
    """A table that is shown on demand."""

    title: str
    table: Table


Block = Heading | Text | Bullets | Links | Table | Pictures | Folded


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
        case Heading(level, text, anchor):
            place = "" if anchor is None else f' id="{escape(anchor)}"'
            return f"<h{level}{place}>{escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(lines):
            return _html_list(escape(line) for line in lines)
        case Links(items):
            return _html_list(f'<a href="#{escape(anchor)}">{escape(text)}</a>' for text, anchor in items)
        case Table():
            return _html_table(block)
        case Pictures(pictures, wide):
            kind = "pictures wide" if wide else "pictures"
            return "\n".join([f'<div class="{kind}">', *(_html_picture(each, wide) for each in pictures), "</div>"])
        case Folded(title, table):
            return f"<details><summary>{escape(title)}</summary>\n{_html_table(table)}\n</details>"


def _html_list(items: Iterable[str]) -> str:
    return "\n".join(["<ul>", *(f"<li>{item}</li>" for item in items), "</ul>"])


def _html_table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        kinds = ["" if place < table.words else ' class="number"' for place in range(len(cells))]
        texts = [escape(cell).replace("\n", "<br>") for cell in cells]
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    lines = ['<div class="table"><table>', f"<thead><tr>{row(table.header, 'th')}</tr></thead>", "<tbody>"]
    for place, cells in enumerate(table.rows):
        kind = ' class="sum"' if place in table.sums else ""
        lines.append(f"<tr{kind}>{row(cells, 'td')}</tr>")
    return "\n".join([*lines, "</tbody>", "</table></div>"])


def _html_picture(picture: Picture, captioned: bool) -> str:
    mime = _MIME[picture.file[-4:]]
    data = b64encode(picture.content).decode()
    caption = escape(picture.caption)
    below = f"\n<figcaption>{caption}</figcaption>" if captioned else ""
    return f'<figure><img src="data:{mime};base64,{data}" alt="{caption}">{below}</figure>'


def to_markdown(blocks: Iterable[Block], folder: str) -> str:
    """The same page for a code host or an editor: tables as text, pictures as files in a folder beside it."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: str) -> str:
    match block:
        case Heading(level, text, anchor):
            place = "" if anchor is None else f'<a id="{escape(anchor)}"></a>\n\n'
            return f"{place}{'#' * level} {_plain(text)}"
        case Text(text):
            return _plain(text)
        case Bullets(lines):
            return "\n".join(f"- {_plain(line)}" for line in lines)
        case Links(items):
            return "\n".join(f"- [{_plain(text)}](#{anchor})" for text, anchor in items)
        case Table():
            return _markdown_table(block)
        case Pictures(pictures):
            return "\n\n".join(
                f"![{_plain(picture.caption)}]({quote(f'{folder}/{picture.file}')})" for picture in pictures
            )
        case Folded(title, table):
            return f"<details><summary>{escape(title)}</summary>\n\n{_markdown_table(table)}\n\n</details>"


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
