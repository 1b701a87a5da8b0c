"""The site: ``sphinx-build -c docs . site`` in the root of the repository, whose pages link to each other there too.

It needs nothing from elsewhere: formulas become MathML, which browsers draw by themselves.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "scripts"))

import method_pages  # noqa: E402 (beside this file)

NAVIGATION = {
    "Start": ["concepts", "choose", "starts/analyst", "starts/lightning", "starts/researcher", "starts/operator"],
    "Tutorials": ["tutorials/hospitals", "tutorials/images", "tutorials/lightning"],
    "How to": ["data", "command", "sweeps", "export", "machines", "across", "flare", "trouble"],
    "Explanations": ["recommended", "labels", "refinement", "privacy", "cost", "glossary"],
    "Methods": ["methods", *(f"methods/{name}" for name in method_pages.methods())],
    "Results": ["results", "papers", "/benchmarks/RESULTS"],
    "API": [f"api/{name}" for name in (
        "fedlit", "methods", "data", "models", "callbacks", "privacy", "federation", "functional", "shallow", "export"
    )],
    "Development": ["extending", "/.github/CONTRIBUTING", "releases", "/CHANGELOG"],
    "Examples": [f"/examples/{path.parent.name}/README" for path in sorted(ROOT.glob("examples/*/README.md"))],
}  # fmt: skip
"""Pages of the sidebar, below docs/ or, with a stroke, below the root."""

project = "fedlit"
author = "the developers of fedlit"
root_doc = "docs/index"
include_patterns = [
    *("docs/*.md", "docs/**/*.md", "examples/**/*.md"),
    *("CHANGELOG.md", "benchmarks/RESULTS.md", ".github/CONTRIBUTING.md"),
]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
default_role = "any"
suppress_warnings = ["ref.any", "misc.highlighting_failure"]  # code in backticks need not be ours; shortened JSON

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "alphabetical"
autodoc_typehints_format = "short"
napoleon_use_ivar = True

html_theme = "furo"
html_title = "fedlit"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_math_renderer = "mathml"
html_static_path: list[str] = []

LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)(?P<path>[^)\s#]+)(?=[)#])")


def read_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the sidebar to the start, and let links to folders and to the README go to pages."""
    if name == root_doc:
        entries = (
            f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```"
            for caption, pages in NAVIGATION.items()
        )
        source[0] += "\n" + "\n\n".join(entries) + "\n"
    page = ROOT / f"{name}.md"

    def put(match: re.Match[str]) -> str:
        path = (page.parent / match["path"]).resolve()
        path = path / "README.md" if path.is_dir() else path
        start = ROOT / "docs" / "index.md"  # in place of the README, which has the same
        return os.path.relpath(start if path == ROOT / "README.md" else path, page.parent)

    source[0] = LINK.sub(put, source[0])


def read_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Let bars and stars of docstrings stand for themselves."""
    lines[:] = method_pages.escaped(lines)


def skip(app: Sphinx, what: str, name: str, thing: Any, is_skipped: bool, options: object) -> bool | None:
    """Leave out what other libraries put into our classes."""
    module = getattr(thing, "__module__", None) or getattr(getattr(thing, "fget", None), "__module__", None)
    return True if module is not None and not module.startswith("fedlit") else None


def draw_inline(self: Any, node: nodes.math) -> None:
    """Write a formula in a line."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def draw_block(self: Any, node: nodes.math_block) -> None:
    """Write a formula by itself."""
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Write the methods' pages, and connect the above."""
    method_pages.write(ROOT / "docs" / "methods")
    app.add_html_math_renderer("mathml", (draw_inline, None), (draw_block, None))
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-skip-member", skip)
