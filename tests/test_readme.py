"""The README, the pages of docs/ and RESULTS.md: their tables are those of the benchmarks' results."""

from __future__ import annotations

import re

import pytest

import tables

TEXT = "\n".join(page.read_text() for page in tables.PAGES)


@pytest.mark.parametrize("name", [f"{name}/{table}" for name, found in tables.TABLES.items() for table in found])
def test_every_table_is_there_as_the_results_have_it(name: str) -> None:
    benchmark, table = name.split("/")
    made = tables.TABLES[benchmark][table](tables.results_of(benchmark))
    assert TEXT.count(f"<!-- table: {name} -->\n{made}\n") == 1


def test_the_pages_mark_no_other_table() -> None:
    marked = set(re.findall(r"^<!-- table: (\S+) -->$", TEXT, re.MULTILINE))
    assert marked == {f"{name}/{table}" for name, found in tables.TABLES.items() for table in found}
    assert tables.with_tables(TEXT) == TEXT


def test_newer_figures_take_the_place_of_the_repositorys() -> None:
    kept = {"a": {"x": {"mean": 1.0, "std": 0.1, "by_seed": {"0": 1.0}}, "y": {"mean": 2.0, "std": 0.2}}}
    newer = {"a": {"x": {"mean": 3.0, "std": 0.3}}, "b": 4}
    assert tables.merged(kept, newer) == {"a": {"x": {"mean": 3.0, "std": 0.3}, "y": kept["a"]["y"]}, "b": 4}
