"""Tables for papers, on numbers worked out by hand: what is bold, marked and averaged."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from fedlit.callbacks import RunSummary, closing_table
from fedlit.callbacks.tables import write_tables


def run(method: str, target: str, accuracy: float | None, seed: int = 0, **kwargs: Any) -> RunSummary:
    given = {"target_score": 0.5, "rounds": 1, "bytes_by_channel": {}, "seconds": {}, "seconds_total": 1.0}
    given |= {"processes": 1, "target_sha256": "", "backends": {}}
    return RunSummary(method, target, seed, accuracy, **(given | kwargs))


def tables(runs: list[RunSummary], folder: Path) -> tuple[list[dict[str, str]], str, str]:
    csv_file, markdown, latex = write_tables(runs, folder)
    with csv_file.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file)), markdown.read_text("utf-8"), latex.read_text("utf-8")


def seeds(method: str, *values: float, target: str = "fonts") -> list[RunSummary]:
    return [run(method, target, value, seed) for seed, value in enumerate(values)]


def bold(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if "**" in line]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ((0.60, 0.64), ["A"]),  # 62 ± 2.8 below 70 ± 2.8: 64.8 < 67.2
        ((0.65, 0.69), []),  # 67 ± 2.8: they overlap
        ((0.70, 0.70), []),
        ((0.60,), []),  # of one seed, whose spread is not known
    ],
)
def test_bold_is_what_no_other_interval_reaches(tmp_path: Path, second: tuple[float, ...], expected: list[str]) -> None:
    """A has 70 ± 2.8: 68 and 72."""
    _, markdown, latex = tables([*seeds("A", 0.68, 0.72), *seeds("B", *second)], tmp_path)
    assert bold(markdown) == expected
    assert latex.count(r"\textbf") == len(expected)
    rule = "bold where no other mean ± deviation of the column reaches it, and nowhere with one seed"
    assert rule in markdown
    assert rule in latex


def test_with_one_seed_nothing_is_bold(tmp_path: Path) -> None:
    _, markdown, latex = tables([*seeds("A", 0.9), *seeds("B", 0.1)], tmp_path)
    assert "**" not in markdown
    assert "textbf" not in latex


def test_three_methods_of_which_two_overlap_have_none_bold(tmp_path: Path) -> None:
    _, markdown, _ = tables([*seeds("A", 0.8, 0.82), *seeds("B", 0.79, 0.81), *seeds("C", 0.1, 0.12)], tmp_path)
    assert bold(markdown) == []


def test_accuracies_and_r2_are_in_no_column_or_average_together(tmp_path: Path) -> None:
    """Accuracy 50 and R2 90 would be 70."""
    runs = [run("A", "north", 0.5), run("A", "south", None, oracle_r2=0.9), run("A", "west", None, oracle_r2=0.7)]
    (row,), markdown, _ = tables(runs, tmp_path)
    assert "| method | north (accuracy) | south (R2) | west (R2) | average (R2) |" in markdown
    assert "| A | 50.0 | 90.0 | 70.0 | 80.0 |" in markdown
    assert row["oracle accuracy or R2 in %: average (R2)"] == "80.0"
    closing = closing_table(runs)
    assert [row.cells[1:3] for row in closing.rows] == [
        ["north", "50.0"], ["south (R2)", "90.0"], ["west (R2)", "70.0"], ["average (R2)", "80.0"],
    ]  # fmt: skip


def test_a_model_that_predicts_one_class_is_marked_and_named(tmp_path: Path) -> None:
    collapsed = {"oracle_confusion": [[0, 3, 0], [0, 3, 0], [0, 3, 0]], "classes": ["a", "b_", "c"]}
    healthy = {"oracle_confusion": [[3, 0, 0], [0, 3, 0], [0, 1, 2]], "classes": ["a", "b_", "c"]}
    runs = [
        run("A", "fonts", 1 / 3, 0, **collapsed), run("A", "fonts", 8 / 9, 1, **healthy),
        run("B", "fonts", 8 / 9, 0, **healthy), run("B", "fonts", 8 / 9, 1, **healthy),
    ]  # fmt: skip
    rows, markdown, latex = tables(runs, tmp_path)
    assert [row["of one class alone: fonts"] for row in rows] == ["1", "0"]
    assert "| A | 61.1 ± 39.3 † |" in markdown
    assert r"† A on fonts, seed 0, predicts nothing but 'b\_'" in markdown
    assert r"61.1 $\pm$ 39.3$^\dagger$ \\" in latex
    assert r"\multicolumn{2}{l}{$^\dagger$ A on fonts, seed 0, predicts nothing but 'b\_'} \\" in latex
    assert "88.9 ± 0.0 |" in markdown


def test_a_target_that_is_called_average_is_not_the_average(tmp_path: Path) -> None:
    (row,), *_ = tables([run("A", "average", 0.5), run("A", "south", 0.9)], tmp_path)
    assert row["oracle accuracy in %: average"] == "50.0"
    assert row["oracle accuracy in %: average over targets"] == "70.0"
