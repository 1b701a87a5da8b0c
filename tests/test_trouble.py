"""The page of errors quotes messages as the code has them."""

from __future__ import annotations

import ast
import re

import pytest

from pages import PAGES, ROOT

TEXT = PAGES["docs/trouble.md"].read_text(encoding="utf-8")
MESSAGES = [part for line in re.findall(r"^### (.*)$", TEXT, re.M) for part in re.findall(r"`([^`]+)`", line)]


def template(node: ast.Constant | ast.JoinedStr) -> str:
    """A text of the code, with an ellipsis for each value in it."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


@pytest.fixture(scope="module")
def texts() -> str:
    files = [path for folder in ("fedlit", "callbacks", "privacy") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return "\n".join(template(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr))


def test_there_are_messages() -> None:
    assert len(MESSAGES) >= 40


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_in_the_code(message: str, texts: str) -> None:
    """Each part between its values; names of arguments stand before ``must be`` elsewhere in the code."""
    parts = [part.strip(" :,()'") for part in re.split(r"…|\bmust be\b|, got\b|: ", message)]
    parts = [part for part in parts if len(part) > 2]
    assert parts
    assert [part for part in parts if part not in texts] == []
