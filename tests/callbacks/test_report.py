"""What a report reads from a folder, and what it makes of names that mean something to HTML, Markdown or matplotlib."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fedlit.callbacks import RunSummary
from fedlit.callbacks.report import report_on, write_report
from fedlit.callbacks.report.charts import Line, Panel
from fedlit.callbacks.report.pages import Heading, Pictures, Text, to_html, to_markdown
from fedlit.callbacks.report.run_folder import as_yaml, differences, read_runs, rounds_of
from fedlit.configs import flat
from fedlit.privacy import Plain
from fedlit.tables import Table
from read_page import Page, markdown_tables
from summaries import summary, write_run

HOSTILE = "<script>alert('1')</script>|*b* _c_ `d` [e](http://f) $g$ &amp;"


def write(folder: Path, metrics: str = "", target: str = "webcam", finished: RunSummary | None = None) -> Path:
    """A run's folder; without a summary the run was interrupted."""
    config = {"seed_everything": 3, "model": {"class_path": "fedlit.methods.FedAvg"}}
    config |= {"data": {"init_args": {"target": target}}}
    return write_run(folder, config, metrics or "round,step\n0.0,1\n", finished)


def write_finished(folder: Path, accuracy: float, target: str = "webcam", **fields: Any) -> Path:
    fields = {"target_score": None, "bytes_by_channel": {"weights": 10}} | fields
    return write(folder, target=target, finished=summary("FedAvg", target, accuracy, **({"seed": 3} | fields)))


def corrupt(folder: Path, **fields: object) -> None:
    path = write_finished(folder, 0.5) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def page_of(folder: Path) -> Page:
    return Page(to_html(*report_on(read_runs([folder]))))


def test_what_is_logged_belongs_to_its_round():
    """Rounds of two steps: FedDA logs beta before the round's row, Lightning logs evaluations with an epoch."""
    rows = [
        {"target/score": 0.1, "epoch": 0, "step": 0},  # before any round has ended
        {"beta": 0.5, "step": 2},
        {"round": 0.0, "train/loss": 1.5, "step": 2},
        {"comm/MB": 3.0, "step": 2},
        {"target/score": 0.2, "epoch": 0, "step": 1},
        {"target/score": 0.9, "epoch": 1, "step": 2},  # in the midst of the next round
        {"beta": 0.25, "step": 4},
        {"round": 1.0, "train/loss": math.nan, "step": 4},
        {"target/score": 0.3, "epoch": 1, "step": 3},
        {"beta": 0.125, "step": 6},  # its round has not ended
    ]
    curves = rounds_of(rows)
    assert math.isnan(curves["train/loss"].pop(1))
    assert curves == {
        "beta": {0: 0.5, 1: 0.25},
        "comm/MB": {0: 3.0},
        "round": {0: 0.0, 1: 1.0},
        "target/score": {0: 0.2, 1: 0.3},
        "train/loss": {0: 1.5},
    }


def test_rounds_of_one_step_are_told_apart():
    """An evaluation after round r has the same step as what was logged at the end of round r - 1."""
    rows = [
        {"round": 0.0, "step": 1},
        {"target/score": 0.2, "epoch": 0, "step": 0},
        {"round": 1.0, "step": 2},
        {"comm/MB": 3.0, "step": 2},
        {"target/score": 0.3, "epoch": 1, "step": 1},
    ]
    curves = rounds_of(rows)
    assert (curves["target/score"], curves["comm/MB"]) == ({0: 0.2, 1: 0.3}, {1: 3.0})


def test_sparse_cells_words_and_half_a_line_are_left_out(tmp_path):
    text = "a,b,epoch,round,step\n,nan,,0.0,1\n0.5,yes,0,,0\n,,,1.0,2\n0.75,,1,,1\n0.1"
    (run,) = read_runs([write(tmp_path / "x" / "y", text)])
    assert run.curves["a"] == {0: 0.5, 1: 0.75}
    assert math.isnan(run.curves["b"][0])
    assert list(run.curves["b"]) == [0]
    assert (run.name, run.method, run.target, run.seed, run.num_rounds) == ("x/y", "FedAvg", "webcam", "3", 2)


def test_runs_are_found_at_any_depth_in_natural_order_and_once(tmp_path):
    for name in ("b/version_10", "b/version_2", "a/deep/er/version_0", "a2/version_0", "a10/version_0"):
        write(tmp_path / name)
    runs = read_runs([tmp_path / "b", tmp_path, tmp_path / "b" / "version_2"])
    assert [run.name for run in runs] == [
        "b/version_2", "b/version_10", "er/version_0", "a2/version_0", "a10/version_0"
    ]  # fmt: skip
    write(tmp_path / "c" / "b" / "version_2")
    names = [run.name for run in read_runs([tmp_path / "b" / "version_2", tmp_path / "c"])]
    assert names == [f"{tmp_path.name}/b/version_2", "c/b/version_2"]


def test_configurations_differ_in_leaves():
    first = {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": "x"}, {"e": True}], "f": None, "g": {}, "h": 0.1}
    second = {"a": {"b": 1, "c": [1]}, "d": [{"e": "x"}, {"e": 1}, {"e": 2}], "g": {"i": "1"}, "h": 0.1}
    assert flat(first)["d.1.e"] is True
    assert differences([flat(first), flat(second)]) == {
        "a.c": ["[1, 2]", "[1]"],
        "d.1.e": ["true", "1"],
        "d.2.e": ["-", "2"],
        "f": ["null", "-"],
        "g": ["{}", "-"],
        "g.i": ["-", "'1'"],
    }
    assert as_yaml("x " * 100).count("\n") == 0


def test_words_from_files_stay_words(tmp_path):
    metrics = "epoch,oracle/target/acc,round,source/x<i>_/acc,step\n,,0,,1\n0,0.5,,0.25,0\n"
    write(tmp_path / "<b>&" / "v<img src=x onerror=y>", metrics, HOSTILE)
    write(tmp_path / "other" / "version_0", metrics, "../../x/y")
    runs = read_runs([tmp_path])
    paths = write_report(runs, tmp_path / "out" / "page.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["<b>&", "other", "out"]  # no name leads elsewhere
    page = Page(paths[0].read_text(encoding="utf-8"))
    assert {tag for tag, _ in page.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li", "div", "table"),
        *("thead", "tbody", "tr", "th", "td", "details", "summary", "figure", "svg", "path", "rect", "text"),
    }
    assert HOSTILE in page.texts["title"][0]
    assert f"FedAvg on {HOSTILE}, seed 3 (<b>&/v<img src=x onerror=y>)" in page.texts["summary"]
    assert page.table("folder")[0][:3] == ["<b>&/v<img src=x onerror=y>", "FedAvg", HOSTILE]
    assert page.table("client")[-1][0] == HOSTILE
    text = paths[1].read_text(encoding="utf-8")
    assert markdown_tables(text) == page.tables
    assert not re.search(r"<(script|img|i|b)\b", text)


def test_markdown_has_no_marks_but_its_own():
    blocks = [Heading(2, HOSTILE), Text(HOSTILE), Table.of(["x"], [[HOSTILE]]), Text("va_long_beach #1")]
    escaped = r"&lt;script&gt;alert('1')&lt;/script&gt;\|\*b\* \_c\_ \`d\` \[e\](http://f) \$g\$ &amp;amp;"
    assert to_markdown(blocks, "files") == (
        f"## {escaped}\n\n{escaped}\n\n| x |\n|---|\n| {escaped} |\n\nva_long_beach \\#1\n"
    )
    assert Page(to_html("t", blocks)).texts["td"] == [HOSTILE]


def test_pictures_show_names_as_they_are_and_are_drawn_alike_each_time():
    labels = ["_hidden", HOSTILE, "mean"]
    lines = [
        Line(labels[0], {0: 1.0, 3: 2.0}, 0),
        Line(labels[1], {0: math.nan, 2: 3.0}, 1),
        Line(labels[2], {1: 1.5}, None, True),
    ]
    picture = Panel(HOSTILE, lines).draw()
    assert Panel(HOSTILE, lines).draw() == picture
    root = ElementTree.fromstring(picture)
    texts = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count(HOSTILE) == 2
    assert {"_hidden", "mean", "communication round, the first is 0"} <= set(texts)
    assert "currentColor" in picture
    assert "script>" not in picture.replace("&lt;script&gt;", "").replace("&lt;/script&gt;", "")


def test_many_runs_are_not_drawn_on_top_of_each_other(tmp_path):
    for number in range(17):
        write(tmp_path / f"version_{number}")
    runs = read_runs([tmp_path])
    _, blocks = report_on(runs[:1] + runs)
    assert Text("17 settings on webcam are too many to be distinguished in one picture.") in blocks
    assert blocks[0] == Heading(1, "FedAvg on webcam")


def test_every_validator_is_a_curve_beside_the_score(tmp_path):
    write(
        tmp_path / "version_0",
        "epoch,round,step,target/score,validator/density,validator/iwv\n"
        ",0.0,1,,,\n0,,0,0.25,0.5,-0.125\n,1.0,2,,,\n1,,1,0.375,0.75,1.25\n",
    )
    assert page_of(tmp_path).numbers("label-free scores of the target, the higher the better") == {
        "target/score": {0: "0.2500", 1: "0.3750"},
        "validator/density": {0: "0.5000", 1: "0.7500"},
        "validator/iwv": {0: "-0.1250", 1: "1.250"},
    }


def test_other_predictions_of_the_target_have_their_names(tmp_path):
    write(
        tmp_path / "version_0",
        "epoch,oracle/target/acc,oracle/target/ensemble/acc,oracle/target/reconstruction/acc,round,source/dslr/acc,"
        "step\n,,,,0.0,,1\n0,0.125,0.25,0.375,,0.5,0\n",
    )
    assert page_of(tmp_path).numbers("accuracy on validation samples, in %") == {
        "dslr": {0: "50"},
        "webcam (target, ORACLE)": {0: "12.50"},
        "webcam by ensemble (ORACLE)": {0: "25"},
        "webcam by reconstruction (ORACLE)": {0: "37.50"},
    }


def test_coordinates_have_a_picture_for_each_client_under_its_name(tmp_path):
    folder = write(tmp_path / "version_0")
    header = "round,coordinate_1,coordinate_2,transport_cost\n"
    (folder / "dictionary_dslr.csv").write_text(f"{header}0,0.25,0.75,1.5\n1,0.125,0.875,2.5\n")
    (folder / "dictionary_webcam.csv").write_text(f"{header}1,0.375,0.625,nan\n")
    page = page_of(tmp_path)
    dslr, webcam = "barycentric coordinates of dslr", "barycentric coordinates of webcam (target)"
    cost = "cost of transport to the client's barycenter"
    assert page.numbers(dslr) == {"atom 1": {0: "0.2500", 1: "0.1250"}, "atom 2": {0: "0.7500", 1: "0.8750"}}
    assert page.numbers(webcam) == {"atom 1": {1: "0.3750"}, "atom 2": {1: "0.6250"}}
    assert page.numbers(cost) == {"dslr": {0: "1.500", 1: "2.500"}, "webcam (target)": {1: "nan"}}
    titles = re.findall("<svg.*?<title>(.*?)</title>", page.source)
    assert [html.unescape(title) for title in titles] == [dslr, webcam, cost]


def test_a_run_done_twice_is_two_rows_and_no_repetition(tmp_path):
    for number, accuracy in enumerate((0.5, 0.75)):
        write_finished(tmp_path / "a" / f"version_{number}", accuracy)
    assert [row[:3] for row in page_of(tmp_path).table("method")] == [
        ["FedAvg (a/version_0)", "webcam", "50.0"],
        ["FedAvg (a/version_1)", "webcam", "75.0"],
    ]
    other = write_finished(tmp_path / "b" / "version_0", 0.25)  # beside a run of another setting they still are
    with (other / "config.yaml").open("a") as file:
        file.write("trainer: {max_epochs: 9}\n")
    assert [row[0] for row in page_of(tmp_path).table("method")] == [
        "FedAvg (max_epochs=-, a/version_0)",
        "FedAvg (max_epochs=-, a/version_1)",
        "FedAvg (max_epochs=9)",
    ]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("target", ["webcam"], "TypeError"),
        ("rounds", 10**400, "TypeError"),
        ("bytes_by_channel", {"weights": "10"}, "TypeError"),
        ("oracle_confusion", [["1"]], "TypeError"),
        ("backends", {"weights": {**asdict(Plain().describe()), "error": 1}}, "TypeError"),
        ("oracle_confusion", [[1, 2], [3]], "ArgumentError: oracle_confusion"),
        ("oracle_reliability", [[1, 0.5, 2]], "ArgumentError: oracle_reliability"),
        ("oracle_accuracy", math.nan, "ValueError: it has NaN"),
        ("oracle_accuracy", 7.0, "ArgumentError: oracle_accuracy must be from 0 to 1, got 7.0"),
        ("oracle_rmse", -1.0, "ArgumentError: oracle_rmse must be from 0 to inf"),
        ("oracle_outputs", {"a": {"r2": 1.5}}, "ArgumentError: oracle_r2 of 'a' must be from -inf to 1"),
        ("oracle_r2", 1.5, "ArgumentError: oracle_r2 must be from -inf to 1"),
        ("seconds", {"local": -1.0}, "ArgumentError: seconds['local'] must be from 0 to inf"),
    ],
)
def test_a_summary_that_no_run_writes_is_refused(tmp_path, name, value, error):
    corrupt(tmp_path / "run", **{"classes": ["no", "yes"], name: value})
    with pytest.raises(ValueError, match=rf"summary.json', which cannot be read \({re.escape(error)}"):
        read_runs([tmp_path])


def test_confusions_are_summed_by_the_names_of_classes(tmp_path):
    """40 of 'no' are right at seed 0 and 10 at seed 1, whose classes are in another order; seed 2 has other classes."""
    counts = [(["no", "yes"], [[40, 0], [1, 2]]), (["yes", "no"], [[5, 6], [0, 10]])]
    counts.append((["never", "yes"], [[1000, 0], [0, 0]]))
    for seed, (classes, matrix) in enumerate(counts):
        write_finished(tmp_path / str(seed), 0.5, seed=seed, classes=classes, oracle_confusion=matrix)
    _, blocks = report_on(read_runs([tmp_path]))
    pictures = [picture for block in blocks if isinstance(block, Pictures) for picture in block.pictures]
    (confusion,) = [picture for picture in pictures if "true classes" in picture.caption]
    assert re.findall("<text[^>]*>([0-9]+)</text>", str(confusion.content)) == ["50", "7", "7"]
    (note,) = [b.text for b in blocks if isinstance(b, Text) and "other classes" in b.text]
    assert note == "Runs of FedAvg with other classes than ['no', 'yes'] are not counted as classes."


def test_what_a_hand_has_emptied_is_told_by_its_file(tmp_path):
    folder = write_finished(tmp_path / "run", 0.5)
    (folder / "metrics.csv").write_text("round,step,epoch,oracle/target/acc\n0,1,,\n,1,0,0.5\n")
    (folder / "config.yaml").write_text("trainer: {strategy: {init_args: {rounds_per_epoch: null}}}\n")
    (run,) = read_runs([tmp_path])
    assert run.curves["oracle/target/acc"] == {0: 0.5}
    (folder / "embeddings.csv").write_text("")
    with pytest.raises(ValueError, match=r"embeddings.csv', which cannot be read \(ValueError: its columns are \[\]"):
        read_runs([tmp_path])


def test_a_logarithmic_axis_has_plain_numbers_and_only_where_values_allow_it():
    def texts(*values: float, logarithmic: bool = True) -> set[str]:
        root = ElementTree.fromstring(Panel("t", [Line("a", dict(enumerate(values)), 0)], None, logarithmic).draw())
        return {"".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")}

    assert {"10", "100", "1,000"} <= texts(5.0, 5000.0)
    for linear in (texts(0.0, 5000.0), texts(5.0, 5000.0, logarithmic=False)):
        assert {"1,000", "2,000", "3,000"} <= linear
