"""The one table in all its forms, and tables of results on numbers worked out by hand."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedlit.callbacks import RunSummary, closing_table
from fedlit.callbacks.summary import write_tables
from fedlit.tables import Column, Figure, Row, Table, mean_and_deviation, show
from summaries import COLLAPSED, HEALTHY, summary

NAME = r"<b>&A_ [/b] \x|*$%#{}~^"
TABLE = Table(
    [
        Column("method"),
        Column("MB by\nchannel", folds=True),
        Column("score", numeric=True, parts=("mean", "deviation", "seeds", "collapsed")),
        Column("bytes", numeric=True, form="{:,}".format),
    ],
    [
        Row([NAME, "a 1\nb 2", Figure((0.25, 0.75), 100, collapsed=1, bold=True), 12345]),
        Row(["sum", "", Figure((0.5,), 100), None], total=True, last=True),
    ],
    caption="Scores",
    footnotes=[f"† {NAME}"],
    split=(2, 1),
)


def printed(table: object, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_figures_are_mean_and_sample_deviation():
    """Of 2, 4 and 9: mean 5, deviation sqrt((9 + 1 + 16) / 2)."""
    assert mean_and_deviation([2.0, 4.0, 9.0]) == (5.0, pytest.approx(13**0.5))
    assert str(Figure((2.0, 4.0, 9.0), form="{:.2f}")) == "5.00 ± 3.61"
    assert [str(Figure(values, 100)) for values in ((0.5,), ())] == ["50.0", "-"]


def test_a_terminal_gets_names_as_they_are_and_two_tables_if_it_is_narrow(capsys):
    wide, narrow = printed(TABLE, 100), printed(TABLE, 50)
    assert [text.count(NAME) for text in (wide, narrow)] == [2, 3]
    for text in (wide, narrow):
        assert all(part in text for part in ("Scores", "50.0 ± 35.4 †", "12,345", "a 1", "b 2"))
    assert max(map(len, narrow.splitlines())) <= 50
    show(TABLE)
    assert capsys.readouterr().out.count(NAME) == 2


def test_csv_has_all_digits_and_a_column_for_each_part_of_a_figure():
    header, *rows = csv.reader(io.StringIO(TABLE.csv()))
    assert header == ["method", "MB by\nchannel", "mean", "deviation", "seeds", "collapsed", "bytes"]
    assert rows == [
        [NAME, "a 1\nb 2", "50.0", str(100 * 0.125**0.5), "2", "1", "12345"],
        ["sum", "", "50.0", "", "1", "0", ""],
    ]


def test_markdown_means_nothing_but_its_table():
    name = r"&lt;b&gt;&amp;A\_ \[/b\] \\x\|\*\$%\#{}\~^"
    assert TABLE.markdown().splitlines() == [
        "Scores:",
        "",
        "| method | MB by channel | score | bytes |",
        "|---|---|---:|---:|",
        f"| {name} | a 1<br>b 2 | **50.0 ± 35.4 †** | 12,345 |",
        "| **sum** |  | **50.0** | **-** |",
        "",
        f"† {name}",
    ]
    assert "| **a** | `b` |" in Table.of(["x", "y"], [["**a**", "`b`"]]).markdown(escaped=False)


def test_latex_prints_what_is_there():
    name = r"<b>\&A\_ [/b] \textbackslash{}x|*\$\%\#\{\}\textasciitilde{}\textasciicircum{}"
    assert TABLE.latex().splitlines() == [
        "% Scores; needs the package booktabs",
        r"\begin{tabular}{llrr}",
        r"\toprule",
        r"method & MB by channel & score & bytes \\",
        r"\midrule",
        rf"{name} & a 1 b 2 & \textbf{{50.0 $\pm$ 35.4$^\dagger$}} & 12,345 \\",
        r"\textbf{sum} &  & \textbf{50.0} & \textbf{-} \\",
        r"\bottomrule",
        rf"\multicolumn{{4}}{{l}}{{$^\dagger$ {name}}} \\",
        r"\end{tabular}",
    ]


def test_html_is_escaped():
    page = str(TABLE.html())
    name = NAME.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert f"<td class=w>{name}</td><td class=w>a 1<br>b 2</td><td>50.0 ± 35.4 †</td><td>12,345</td>" in page
    assert '<tr class="sum"><td class=w>sum</td>' in page
    assert f"<p>† {name}</p>" in page


def tables(runs: list[RunSummary], folder: Path) -> tuple[list[dict[str, str]], str, str]:
    csv_file, markdown, latex = write_tables(runs, folder)
    with csv_file.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file)), markdown.read_text("utf-8"), latex.read_text("utf-8")


def seeds(method: str, *values: float) -> list[RunSummary]:
    return [summary(method, "fonts", value, seed) for seed, value in enumerate(values)]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([(0.60, 0.64)], ["A"]),  # 62 ± 2.8 below 70 ± 2.8: 64.8 < 67.2
        ([(0.65, 0.69)], []),  # 67 ± 2.8: they overlap
        ([(0.60,)], []),  # of one seed, whose spread is unknown
        ([(0.67, 0.71), (0.1, 0.12)], []),
    ],
)
def test_bold_is_what_no_other_interval_reaches(tmp_path, others, expected):
    """A has 70 ± 2.8: 68 and 72."""
    runs = [
        *seeds("A", 0.68, 0.72),
        *(run for name, each in zip("BC", others, strict=False) for run in seeds(name, *each)),
    ]
    _, markdown, latex = tables(runs, tmp_path)
    assert [line.split("|")[1].strip() for line in markdown.splitlines() if "**" in line] == expected
    assert latex.count(r"\textbf") == len(expected)
    for text in (markdown, latex):
        assert "bold where no other mean ± deviation of the column reaches it" in text


def test_accuracies_and_r2_are_in_no_column_or_average_together(tmp_path):
    """Accuracy 50 and R2 90 would be 70."""
    runs = [summary("A", "north", 0.5)]
    runs += [summary("A", target, None, oracle_r2=r2) for target, r2 in (("south", 0.9), ("west", 0.7))]
    (row,), markdown, _ = tables(runs, tmp_path)
    assert "| method | north (accuracy) | south (R2) | west (R2) | average (R2) |" in markdown
    assert "| A | 50.0 | 90.0 | 70.0 | 80.0 |" in markdown
    assert row["oracle accuracy or R2 in %: average (R2)"] == "80.0"
    assert [cells[1:3] for cells in closing_table(runs).texts()] == [
        ["north", "50.0"], ["south (R2)", "90.0"], ["west (R2)", "70.0"], ["average (R2)", "80.0"],
    ]  # fmt: skip


def test_errors_have_columns_and_each_number_to_predict_a_note(tmp_path):
    """RMSE 2 and 4 at two targets are 3 on average, in the labels' unit and not in per cent."""
    wear = {"wear": {"r2": 0.5, "rmse": 1500.25, "mae": 1000.0}, "heat": {"rmse": 0.5, "mae": 0.25}}
    runs = [summary("A", "south", None, oracle_r2=0.9, oracle_rmse=2.0, oracle_mae=1.0, oracle_outputs=wear)]
    runs += [summary("A", "west", None, oracle_r2=0.7, oracle_rmse=4.0, oracle_mae=1.5)]
    table = closing_table(runs)
    assert [column.title for column in table.columns[2:5]] == [
        "target R2 in % (oracle)",
        "RMSE\n(oracle)",
        "MAE\n(oracle)",
    ]
    assert [cells[1:5] for cells in table.texts()] == [
        ["south", "90.0", "2", "1"], ["west", "70.0", "4", "1.5"], ["average", "80.0", "3", "1.25"],
    ]  # fmt: skip
    assert "A on south, wear (oracle): R2 50.0%, RMSE 1500, MAE 1000" in table.footnotes
    assert "A on south, heat (oracle): RMSE 0.5, MAE 0.25" in table.footnotes
    (row,), markdown, _ = tables(runs, tmp_path)
    assert "| method | south | west | average | south (RMSE) | west (RMSE) | average (RMSE) | south (MAE) |" in markdown
    assert "| A | 90.0 | 70.0 | 80.0 | 2 | 4 | 3 | 1 |" in markdown
    assert row["oracle error in the labels' unit: average (RMSE)"] == "3.0"
    better = [replace(run, method="B", seed=seed, oracle_rmse=1 + seed / 4) for run in runs for seed in (0, 1)]
    worse = [replace(run, seed=seed, oracle_rmse=3 + seed / 4) for run in runs for seed in (0, 1)]
    _, markdown, _ = tables(better + worse, tmp_path)
    assert markdown.count("**1.125 ± 0.1768**") == 3  # the lowest
    assert "RMSE\n(oracle)" not in [column.title for column in closing_table([summary("A", "north", 0.5)]).columns]


def test_a_model_that_predicts_one_class_is_marked_and_named(tmp_path):
    runs = [summary("A", "fonts", 0.5, 0, **COLLAPSED), summary("A", "fonts", 0.75, 1, **HEALTHY)]
    runs += [summary("B", "fonts", 0.75, seed, **HEALTHY) for seed in (0, 1)]
    rows, markdown, latex = tables(runs, tmp_path)
    assert [row["of one class alone: fonts"] for row in rows] == ["1", "0"]
    assert "| A | 62.5 ± 17.7 † |" in markdown
    assert "† A on fonts, seed 0, predicts nothing but 'yes'" in markdown
    assert r"62.5 $\pm$ 17.7$^\dagger$ \\" in latex
    assert "75.0 ± 0.0 |" in markdown


def test_a_target_that_is_called_average_is_not_the_average(tmp_path):
    (row,), *_ = tables([summary("A", "average", 0.5), summary("A", "south", 0.9)], tmp_path)
    assert row["oracle accuracy in %: average"] == "50.0"
    assert row["oracle accuracy in %: average over targets"] == "70.0"
