"""The README: its tables are those of the benchmarks' results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import tables

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", [f"{name}/{table}" for name, found in tables.TABLES.items() for table in found])
def test_every_table_is_in_the_readme_as_the_results_have_it(name: str) -> None:
    benchmark, table = name.split("/")
    made = tables.TABLES[benchmark][table](tables.results_of(benchmark))
    assert README.count(f"<!-- table: {name} -->\n{made}\n") == 1


def test_the_readme_marks_no_other_table() -> None:
    marked = set(re.findall(r"<!-- table: (\S+) -->", README))
    assert marked == {f"{name}/{table}" for name, found in tables.TABLES.items() for table in found}
    assert tables.in_readme(README) == README


def test_newer_figures_take_the_place_of_the_repositorys() -> None:
    kept = {"a": {"x": {"mean": 1.0, "std": 0.1, "by_seed": {"0": 1.0}}, "y": {"mean": 2.0, "std": 0.2}}}
    newer = {"a": {"x": {"mean": 3.0, "std": 0.3}}, "b": 4}
    assert tables.merged(kept, newer) == {"a": {"x": {"mean": 3.0, "std": 0.3}, "y": kept["a"]["y"]}, "b": 4}
