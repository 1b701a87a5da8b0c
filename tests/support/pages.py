"""What pages are made of: blocks of code, each in its language, with what a comment right before it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_SITE = ROOT / "docs" / "methods"  # made with the site
_FOUND = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent != _SITE)]
PAGES = {str(path.relative_to(ROOT)): path for path in _FOUND}
TUTORIALS = [name for name in PAGES if name.startswith("docs/tutorials/")]
FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$", re.M | re.S
)


class Block(NamedTuple):
    """Code of a page, in which language, and what the comment right before it says."""

    language: str
    code: str
    mark: str

    @property
    def file(self) -> str | None:
        """Where the reader is to save it, if so."""
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else None


def blocks(text: str) -> list[Block]:
    """Of a page's text, in their order; those of a list's entry without its indent."""
    found = FENCE.finditer(text)
    return [Block(m["language"], re.sub(f"^{m['indent']}", "", m["code"], flags=re.M), m["mark"] or "") for m in found]


def steps(text: str) -> list[Block]:
    """What the reader of a tutorial saves and runs, in its order; not how it is installed."""
    return [
        block
        for block in blocks(text)
        if block.file is not None or (block.mark != "not run" and block.language in ("bash", "python"))
    ]
