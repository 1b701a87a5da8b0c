"""The matrices and cards of docs/privacy.md: short cells, each with its tests, and figures that are the code's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fedlit import privacy
from pages import ROOT
from read_page import Cells, markdown_tables

TEXT = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
TABLES = markdown_tables(TEXT)
LONGEST, WIDEST = 7, 135
"""Words of a cell, and characters of a row: 132 are 1035 pixels in the 16 pixels of a browser."""


def table(first: str) -> list[Cells]:
    return [each for each in TABLES if each[0][0] == first]


def shown(cell: str) -> str:
    """A cell without its address and marks."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "")


def section(heading: str) -> str:
    """The text below a heading of the third rank."""
    return re.split(r"^##+ ", TEXT.split(f"\n### {heading}\n")[1], flags=re.MULTILINE)[0]


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-")


HEADINGS = {anchor(heading): heading for heading in re.findall(r"^### (.*)$", TEXT, re.MULTILINE)}


def test_no_cell_has_a_paragraph_and_no_table_is_wide() -> None:
    assert len(TABLES) == 6
    for cells in TABLES:
        widths = [max(len(shown(row[column])) for row in cells) for column in range(len(cells[0]))]
        assert sum(widths) <= WIDEST, (cells[0], widths)
        for cell in [shown(cell) for row in cells for cell in row]:
            assert len(cell.split()) <= LONGEST, cell


@pytest.mark.parametrize(("place", "rows"), [(0, 9), (1, 6)])
def test_the_tests_of_each_cell_of_a_matrix_are_named(place: int, rows: int) -> None:
    """In the list to which its row leads, by the name of its column, or under all (that hide)."""
    header, *lines = table("adversary")[place]
    assert len(lines) == rows
    for line in lines:
        (target,) = re.findall(r"\(#([\w-]+)\)", line[0])
        items = re.split(r"^- ", section(HEADINGS[target]), flags=re.MULTILINE)[1:]
        assert items
        assert [item for item in items if "`tests/" not in item] == []
        backed = " ".join(re.findall(r"\*\*(.*?):\*\*", " ".join(items)))
        for column in header[1:]:
            hides = column != "`Plain`" and column != "noise"
            assert column in backed or re.search(r"\ball\b(?! that)", backed) or (hides and "all that" in backed), (
                f"{line[0]}: no test of {column}"
            )


def test_each_backend_has_a_card_and_its_figures_are_its_own() -> None:
    for library in ("phe", "tenseal"):
        pytest.importorskip(library)
    made: list[Any] = [privacy.Plain(), privacy.RobustPlain(), privacy.PairwiseMasking(), privacy.ThresholdPaillier()]
    made += [privacy.Paillier(), privacy.BFV(), privacy.CKKS()]
    two: list[Any] = [privacy.PlainAffine(), privacy.PaillierAffine(), privacy.CKKSAffine()]
    rows = {row[0]: row for first in ("backend", "exchange") for row in table(first)[0][1:]}
    assert len(rows) == len(made + two)
    for backend in made + two:
        about = backend.describe()
        assert f"{about.bytes_per_number:.4g}" in rows[f"`{about.backend}`"]
        card = " ".join(section(about.backend).split())
        assert f"**Error:** {about.error}" in card, f"{about.backend}: {about.error}"
        assert backend in two or f"**Dropouts:** {about.dropouts}." in card, f"{about.backend}: {about.dropouts}"
        assert "**Assumes:**" in card or "**Keys and assumptions:**" in card
        assert backend in two or "**Does not protect from:**" in card
