"""The README, the pages of docs/ and RESULTS.md: their tables are those of the benchmarks' results."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tables
from fedlit import methods

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


@pytest.mark.parametrize(
    ("figure", "shares", "mark"),
    [
        ({"mean": 10.0, "std": 0.0, "by_seed": {"0": 10.0, "1": 10.0, "2": 10.0}}, (10.0,), " † 3/3"),
        ({"mean": 18.3, "std": 14.3, "by_seed": {"0": 10.0, "1": 34.78, "2": 10.0}}, (10.0,), " † 2/3"),
        ({"mean": 25.7, "std": 2.5, "by_seed": {"0": 24.56, "1": 28.67, "2": 24.0}}, (10.0,), ""),
        # of a class with most of the samples one seed may be as accurate by coincidence, and all of them not
        ({"mean": 93.3, "std": 0.7, "by_seed": {"0": 92.86, "1": 93.0}}, (92.86, 7.14), ""),
        ({"mean": 92.9, "std": 0.0, "by_seed": {"0": 92.86, "1": 92.86}}, (92.86, 7.14), " † 2/2"),
        ({"mean": 10.0, "std": 0.0}, (10.0,), " †"),
        ({"mean": 99.4, "std": 0.0}, (10.0,), ""),
        ({"mean": 10.0, "std": 0.4}, (10.0,), ""),
    ],
)
def test_a_figure_of_models_that_name_one_class_is_marked(
    figure: dict[str, Any], shares: tuple[float, ...], mark: str
) -> None:
    assert tables.cell(figure, shares) == f"{figure['mean']:.1f} ± {figure['std']:.1f}{mark}"


def test_a_table_with_a_mark_says_what_it_means() -> None:
    marked = tables.grid("x", ["a", "b"], [("m", ["10.0 ± 0.0 † 3/3", "1"])])
    assert marked.splitlines()[-1] == "| † as accurate as naming one class, in so many seeds | | |"
    assert "†" not in tables.grid("x", ["a", "b"], [("m", ["10.0 ± 0.4", "1"])])


def test_each_method_has_a_figure_and_says_whose_it_is_compared_with() -> None:
    shown = {name.split(",")[0].split("(")[0] for name, *_ in tables.HEADLINES}
    assert shown == set(methods.__all__)
    assert all(bool(where) == (printed is not None) for *_, printed, where in tables.HEADLINES)


def test_the_papers_figures_are_theirs() -> None:
    """Montesuma et al. 2024, Table 2a; Feng et al. 2023 (v1), Table IV."""
    papers = tables.BASELINES_PAPERS
    assert (papers["FedAvg"], papers["FedProx"], papers["KD3A"]) == ("92.8*", "96.6*", "97.9*")
    assert (papers["FedDAN"], papers["FedDANN"], papers["AdaBN"]) == ("85.9", "86.3", "85.7")
