"""What the site needs beside MkDocs: files outside of docs/ that pages link to, and roles and formulas of docstrings.

Formulas become MathML, which browsers draw by themselves, so that a page needs no script from elsewhere.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
ELSEWHERE = {".github/CONTRIBUTING.md": "CONTRIBUTING.md"}
ENTRIES = ("benchmarks/RESULTS.md", "CHANGELOG.md", ".github/CONTRIBUTING.md")
"""Pages from outside of docs/ that are in the site's navigation."""


def place(path: Path) -> str:
    """Where a file of the repository is in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return ELSEWHERE.get(name, name)


def linked(page: Path, link: str) -> Path:
    """The file of the repository that a page links to; of a folder its README, and the README's part is the start's."""
    path = Path(os.path.normpath(page.parent / link))
    path = path / "README.md" if path.is_dir() else path
    return DOCS / "index.md" if path == ROOT / "README.md" else path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of docs/, and what that links to."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    waiting += [ROOT / name for name in ENTRIES]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        if not page.is_relative_to(DOCS):
            files.append(File.generated(config, place(page), abs_src_path=str(page)))
        if page.suffix != ".md":
            continue
        found = {linked(page, match["path"]) for match in LINK.finditer(page.read_text(encoding="utf-8"))}
        fresh = {path for path in found - seen if path.is_file() and not path.is_relative_to(DOCS)}
        waiting += sorted(fresh)
        seen |= fresh
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are in the repository, to where their files are in the site."""
    own = Path(page.file.abs_src_path or "")
    start = PurePosixPath(page.file.src_uri).parent

    def put(match: re.Match[str]) -> str:
        path = linked(own, match["path"])
        if not path.is_file():
            return match[0]  # MkDocs says so
        return os.path.relpath(place(path), start).replace(os.sep, "/") + (match["anchor"] or "")

    return LINK.sub(put, markdown)


class Blocks(Preprocessor):
    """``.. math::`` with the indented lines below it."""

    def run(self, lines: list[str]) -> list[str]:
        """Each formula as one line of HTML."""
        made: list[str] = []
        rest = list(lines)
        while rest:
            line = rest.pop(0)
            if not line.lstrip().startswith(".. math::"):
                made.append(line)
                continue
            indent = len(line) - len(line.lstrip())
            formula = [line.split("::", 1)[1]]
            while rest and (not rest[0].strip() or len(rest[0]) - len(rest[0].lstrip()) > indent):
                formula.append(rest.pop(0))
            html = convert(" ".join(map(str.strip, formula)), display="block")
            made += ["", " " * indent + self.md.htmlStash.store(html), ""]
        return made


class Inline(InlineProcessor):
    """``:math:`x``` as a formula, and ``:class:`X``` as code."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[ElementTree.Element | str, int, int]:  # type: ignore[override]
        """The element in place of the role."""
        if m["role"] == "math":
            return self.md.htmlStash.store(convert(m["text"])), m.start(0), m.end(0)
        code = ElementTree.Element("code")
        code.text = m["text"].lstrip("~")
        return code, m.start(0), m.end(0)


class Docstrings(Extension):
    """What docstrings have beside Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Before code in backticks is taken for code."""
        md.preprocessors.register(Blocks(md), "math_blocks", 26)
        role = r":(?P<role>math|class|func|meth|mod):`(?P<text>[^`]+)`"
        md.inlinePatterns.register(Inline(role, md), "roles", 200)


def tree() -> str:
    """A folder with the package as it is installed: here `fedlit.callbacks` and `fedlit.privacy` lie beside it.

    An editable installation has them at those names for Python alone, and the API is read without importing it.
    """
    package = Path(_trees.name, "fedlit")
    package.mkdir(exist_ok=True)
    for part in (*(ROOT / "fedlit").iterdir(), ROOT / "callbacks", ROOT / "privacy"):
        if part.name != "__pycache__" and not (package / part.name).exists():
            (package / part.name).symlink_to(part)
    return _trees.name


_trees = tempfile.TemporaryDirectory(prefix="fedlit-api-")


@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Before mkdocstrings: where it finds the package, and with which extensions pages and docstrings are read."""
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [tree()]
    config["markdown_extensions"].append(Docstrings())
    return config
