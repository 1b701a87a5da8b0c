"""Which method a report names first: by trust alone, and none where nothing tells one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlit.callbacks.report import read_runs, report_on
from fedlit.callbacks.report.federations import labelled
from fedlit.callbacks.report.pages import Bullets, Heading, Pictures, Text
from fedlit.tables import Table
from summaries import summary, write_run


def write(
    folder,
    method,
    accuracy,
    trust,
    seed=0,
    target="fonts",
    data="fedlit.data.Digits",
    data_args=None,
    **of_summary: Any,
):
    config = {
        "seed_everything": seed,
        "model": {"class_path": f"fedlit.methods.{method}"},
        "data": {"class_path": data, "init_args": {"target": target, **(data_args or {})}},
    }
    cells = "" if trust is None else str(trust)
    metrics = f"epoch,round,step,target/score,validator/trust\n,0,1,,\n0,,0,0.5,{cells}\n1,,1,0.5,{cells}\n"
    write_run(folder, config, metrics, summary(method, target, accuracy, seed, **of_summary))


def table(folder: Path) -> list[list[str]]:
    return next(block for block in report_on(read_runs([folder]))[1] if isinstance(block, Table)).texts()


def texts(folder: Path) -> list[str]:
    """Texts of the page outside of folds, in order."""
    _, blocks = report_on(read_runs([folder]))
    found: list[str] = []
    for block in blocks:
        if isinstance(block, Text | Heading):
            found.append(block.text)
        elif isinstance(block, Bullets):
            found += block.lines
    return found


def test_without_trust_the_page_says_first_that_methods_are_not_ranked_and_how_they_would_be(tmp_path):
    write(tmp_path / "a", "SourceOnly", 0.5, None, target_score=0.9)
    write(tmp_path / "b", "FedAvg", 0.9, None, target_score=0.1)
    text = texts(tmp_path)[2]
    assert text.startswith("Methods are not ranked: only validator/trust compares")
    assert "--select best" in text
    assert "--trainer.callbacks+=fedlit.callbacks.Validators" in text


def test_the_most_trusted_is_taken_whatever_target_score_and_hidden_labels_say(tmp_path):
    write(tmp_path / "a", "FedAvg", 0.9, 0.1, target_score=0.9)
    write(tmp_path / "b", "FedMMD", 0.5, 0.3, target_score=0.1)
    write(tmp_path / "c", "SourceOnly", 0.7, 0.2)
    write(tmp_path / "d", "FADA", 0.99, None)
    found = texts(tmp_path)
    assert found[2] == "By validator/trust, without labels of the target: on fonts take FedMMD."
    assert found[3] == "Not compared, as runs of them have not logged validator/trust: FADA."
    assert table(tmp_path) == [["fonts", "0", "FedMMD", "0", "0.300", "SourceOnly", "0.200"]]
    _, blocks = report_on(read_runs([tmp_path]))
    pictures = [picture for block in blocks if isinstance(block, Pictures) for picture in block.pictures]
    assert pictures[0].caption == "validator/trust of the most trusted round"


def test_seeds_that_do_not_agree_are_told_of_and_source_only_has_the_margin(tmp_path):
    for seed, trust in ((0, 0.3), (1, 0.203)):
        write(tmp_path / f"a{seed}", "FedMMD", 0.5, trust, seed)
        write(tmp_path / f"b{seed}", "SourceOnly", 0.5, 0.2, seed)
    (line,) = [each for each in texts(tmp_path) if " take " in each]
    assert line == (
        "By validator/trust, without labels of the target: on fonts take FedMMD with seed 0; SourceOnly with seed 1. "
        "SourceOnly is taken where no other is trusted by 5% more. Seeds do not agree."
    )


def test_where_no_model_is_trusted_none_is_named(tmp_path):
    for place, (method, trust) in enumerate((("SourceOnly", 0.0), ("FedAvg", 0.0011), ("FedMMD", 0.0004))):
        write(tmp_path / str(place), method, 0.5, trust)
    text = texts(tmp_path)[2]
    assert text.startswith("No model can be trusted on fonts, and none is named: the highest trust is 0.0011")
    assert text.endswith("Until then SourceOnly is the safe one.")
    assert not any(name in text for name in ("FedAvg", "FedMMD"))
    assert table(tmp_path) == [["fonts", "0", "none: too little trust", "-", "at most 0.0011", "-", "-"]]


def test_one_method_and_regression_have_no_ranking(tmp_path):
    for seed in (0, 1):
        write(tmp_path / "one" / str(seed), "FedAvg", 0.5, 0.2, seed)
    assert not any(" take " in each or "ranked" in each for each in texts(tmp_path / "one"))
    for method in ("FedAvg", "SourceOnly"):
        write(tmp_path / "numbers" / method, method, None, None, oracle_r2=0.5)
    assert (
        texts(tmp_path / "numbers")[2]
        == "Methods are not ranked: no score compares them in regression without labels of the target."
    )


def closing(folder: Path) -> list[list[list[str]]]:
    _, blocks = report_on(read_runs([folder]))
    tables = [block for block in blocks if isinstance(block, Table)]
    closing = [table for table in tables if [column.title for column in table.columns[:2]] == ["method", "target"]]
    return [[row[:3] for row in table.texts()] for table in closing]


@pytest.mark.parametrize(
    ("other", "title"),
    [
        ({"data": "fedlit.data.HeartDisease"}, "HeartDisease"),
        ({"data_args": {"path": "b.npz"}}, "Digits (path=b.npz)"),
        ({"accuracy": None, "oracle_r2": 0.25}, "Digits (task=regression)"),
    ],
)
def test_runs_of_other_data_clients_or_tasks_are_not_averaged_or_compared(tmp_path, other, title):
    """The same methods, target and names: 50 and 90 would be 70 in one table."""
    for method in ("FedAvg", "SourceOnly"):
        write(tmp_path / "a" / method, method, 0.5, 0.2)
        write(tmp_path / "b" / method, method, **({"accuracy": 0.9, "trust": 0.4, "seed": 1} | other))
    first, second = closing(tmp_path)
    assert first == [["FedAvg", "fonts", "50.0"], ["SourceOnly", "fonts", "50.0"]]
    assert {row[2] for row in second} == {"25.0" if "oracle_r2" in other else "90.0"}
    found = texts(tmp_path)
    assert found[1].startswith("These runs are of 2 federations")
    assert f"What it came to: {title}" in found
    assert len([each for each in found if "on fonts take" in each or "not ranked" in each]) == 2


def test_arguments_of_training_and_null_ones_make_no_other_federation(tmp_path):
    write(tmp_path / "a", "SourceOnly", 0.5, None, data_args={"clients": None})
    of_training = {"target_labels": 50, "batch_size": 8, "normalise": "ranks"}
    write(tmp_path / "b", "FedAvg", 0.7, None, data_args=of_training)
    assert len(closing(tmp_path)) == 1
    assert any("FedAvg - SourceOnly is +20.0 points" in each for each in texts(tmp_path))


def test_runs_of_other_arguments_rounds_and_seeds_have_rows_of_their_own(tmp_path):
    for seed, rounds, accuracy in ((0, 5, 0.5), (1, 5, 0.6), (0, 9, 0.9)):
        write(tmp_path / f"{seed}-{rounds}", "FedAvg", accuracy, None, seed, rounds=rounds)
        (tmp_path / f"{seed}-{rounds}" / "config.yaml").unlink()
    assert closing(tmp_path) == [[["FedAvg (rounds=5)", "fonts", "55.0 ± 7.1"], ["FedAvg (rounds=9)", "fonts", "90.0"]]]


def test_equal_runs_of_settings_that_differ_in_much_have_a_name_each(tmp_path):
    """By its folder once, and not by that of another run beside its own."""
    for name, of_data in (("a", {}), ("b", {}), ("c", {key: 1 for key in ("e", "f", "g", "h")})):
        write(tmp_path / name, "FedAvg", 0.5, 0.2)
        config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        config["model"]["init_args"] = of_data
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    runs = labelled(read_runs([tmp_path]))
    assert [run.label for run in runs] == [f"FedAvg (as {run.name})" for run in runs]
