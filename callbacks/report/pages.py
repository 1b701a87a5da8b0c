"""A page of headings, tables and pictures, written once and rendered as HTML and as Markdown."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from fedlit.callbacks.report.charts import standalone
from fedlit.tables import Table, as_markdown


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
    """A list of sentences."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A picture."""

    file: str  # name beside a Markdown page; shows the type, ``.svg`` or ``.png``
    caption: str  # alternative text
    content: bytes | str  # text of an SVG drawing of ours, which has escaped all names in it, or bytes of a PNG file

    @property
    def drawn(self) -> bool:
        """Whether it is an SVG drawing."""
        return isinstance(self.content, str)

    @property
    def base64(self) -> str:
        """The bytes of a PNG file as text."""
        assert isinstance(self.content, bytes)
        return b64encode(self.content).decode()

    def on_disk(self) -> bytes:
        """Content of the file."""
        return self.content if isinstance(self.content, bytes) else standalone(self.content).encode()


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side where there is room; ``wide`` ones one below the other, on white, with captions."""

    pictures: Sequence[Picture]
    wide: bool = False


@dataclass(frozen=True)
class Folded:
    """Blocks that are shown on demand."""

    title: str
    blocks: Sequence[Block]


Block = Heading | Text | Bullets | Table | Pictures | Folded


def pictures_in(blocks: Iterable[Block]) -> Iterator[Picture]:
    """All pictures, also those behind folds."""
    for block in blocks:
        if isinstance(block, Pictures):
            yield from block.pictures
        elif isinstance(block, Folded):
            yield from pictures_in(block.blocks)


def to_html(title: str, blocks: Iterable[Block], seconds: int | None = None) -> str:
    """A page that needs no other file and loads nothing but itself, after so many seconds if they are given."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    pages = Environment(
        autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return pages.get_template("page.html").render(title=title, blocks=list(blocks), seconds=seconds)


def to_markdown(blocks: Iterable[Block], folder: str) -> str:
    """The same page for a code host or an editor: tables as text, pictures as files in a folder beside it."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: str) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {as_markdown(text)}"
        case Text(text):
            return as_markdown(text)
        case Bullets(lines):
            return "\n".join(f"- {as_markdown(line)}" for line in lines)
        case Table():
            return block.markdown()
        case Pictures(pictures):
            return "\n\n".join(f"![{as_markdown(each.caption)}]({quote(f'{folder}/{each.file}')})" for each in pictures)
        case Folded(title, blocks):
            return f"<details><summary>{escape(title)}</summary>\n\n{to_markdown(blocks, folder)}\n</details>"
