"""Experiments of several runs: folders, what methods are compared with, going on, side by side, and tables."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import processes
from commands import parsed, refusal, summaries
from fedlit.callbacks.run_record import claim
from fedlit.cli import main
from fedlit.cli.arguments import normalise, type_true
from fedlit.cli.catalogue import load_plugins
from fedlit.cli.experiment import Experiment
from fedlit.cli.folders import ExperimentFolder
from refused import slow

CONFIGS = Path(__file__).parents[2] / "configs"

TINY = [
    *("--config", "data/heart_disease", "--config", "methods/fedavg", "--trainer.max_epochs=1"),
    *("--trainer.strategy.init_args.num_threads=1", "--trainer.enable_checkpointing=false"),
]
WILD = "{class_path: torch.optim.SGD, init_args: {lr: 3.0e+38}}"
"""An optimiser with which training diverges."""
SEVERAL = [*TINY, "--seeds=[0,1]", "--compare=[fedlit.methods.SourceOnly]"]


@pytest.fixture(autouse=True)
def _plug_ins() -> None:
    load_plugins()


def found() -> dict[tuple[str, int], dict[str, Any]]:
    """Summaries of all runs, without times."""
    runs = summaries()
    assert len({(run["method"], run["seed"]) for run in runs}) == len(runs)
    return {
        (run["method"], run["seed"]): {key: value for key, value in run.items() if not key.startswith("seconds")}
        for run in runs
    }


def claim_some(folder: Path) -> list[str]:
    return [str(claim(folder)) for _ in range(50)]


def test_a_folder_is_claimed_by_one_process_alone(tmp_path):
    claimed = [place for some in processes.results(claim_some, tmp_path / "here", ranks=4) for place in some]
    assert sorted(claimed) == sorted(str(tmp_path / "here" / f"version_{number}") for number in range(200))
    (tmp_path / "here" / "version_217").mkdir()
    assert claim(tmp_path / "here").name == "version_218"
    assert [claim(tmp_path / "here", "trial").name for _ in range(3)] == ["trial", "trial-1", "trial-2"]


EVERY = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"save_top_k": -1}}
SEEDS = ["fit", *TINY[:-1], "--seeds=[0,1]", "--trainer.max_epochs=2", f"--trainer.callbacks={json.dumps([EVERY])}"]


@pytest.fixture
def trained(once: Callable[..., Path]) -> dict[tuple[str, int], dict[str, Any]]:
    """What `found` finds in the folder ``runs``, a copy of what `SEEDS` has written."""
    shutil.copytree(once("experiment", lambda folder: main(SEEDS)) / "runs", "runs")
    return found()


def test_an_experiment_goes_on_and_takes_finished_runs_as_they_are(trained, capsys):
    folders = sorted(map(str, Path("runs").rglob("version_*")))
    assert len(trained) == 2
    assert trained["FedAvg", 0]["target_sha256"] != trained["FedAvg", 1]["target_sha256"]
    times = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("summary.json")}
    gone = Path("runs/FedAvg/version_1")
    (gone / "summary.json").unlink()  # as of a run that was killed
    shutil.rmtree(gone / "checkpoints")
    (gone / "half.txt").write_text("of what was written")
    main(SEEDS)
    printed = capsys.readouterr().out
    assert "1 of 2 runs are finished already, in 'runs': --fresh true trains them again" in printed
    assert printed.count("run 2 of 2") == 1
    assert "run 1 of 2" not in printed
    assert found() == trained
    assert sorted(map(str, Path("runs").rglob("version_*"))) == folders
    assert not (gone / "half.txt").exists()
    assert sum(path.stat().st_mtime_ns != times[path] for path in Path("runs").rglob("summary.json")) == 1


@pytest.mark.slow
def test_finished_runs_are_trained_again_if_that_is_asked_for(trained, capsys):
    main(SEEDS)
    assert "2 of 2 runs are finished already" in capsys.readouterr().out
    main([*SEEDS, "--fresh=true"])
    assert len(trained) == 2
    assert len([*Path("runs").rglob("version_*")]) == 4
    Path("runs/FedAvg/version_2/summary.json").write_text("{}")
    assert re.search(r"version_2/summary.json' cannot be read.* --fresh true trains", refusal(*SEEDS))


def test_a_method_and_its_round_are_selected(capsys):
    words = [*TINY, "--compare=[fedlit.methods.SourceOnly]", "--select=best", "--trainer.enable_checkpointing=true"]
    main(["fit", *words, "--trainer.max_epochs=6", "--data.target=cleveland"])
    printed = " ".join(capsys.readouterr().out.split())
    (file,) = Path("runs").glob("experiment_*/selected.json")
    (row,) = json.loads(file.read_text())
    chosen = row["chosen"]
    assert f"selected for cleveland (seed 0): {chosen['method']} after round {chosen['round_idx']}" in printed
    assert {each["method"] for each in row["candidates"]} == {"FedAvg", "SourceOnly"}
    kept = {path.name for path in Path(chosen["run"]).glob("checkpoints/*.ckpt")}
    assert len(kept) == 2
    assert f"trusted-epoch={chosen['round_idx']}.ckpt" in kept


def test_a_selection_needs_several_methods_and_trust():
    assert "select chooses among methods" in refusal("fit", *TINY, "--select=best")
    density = ["--trainer.callbacks+=Validators", "--trainer.callbacks.init_args.names=[density]"]
    words = ["--select=best", "--compare=[fedlit.methods.SourceOnly]", *density]
    assert "select compares models by 'trust'" in refusal("fit", *TINY, *words)
    words = [*TINY, "--select=best", "--compare=[fedlit.methods.SourceOnly]"]
    said = refusal("fit", *words, "--data.val_fraction=0")
    assert "select compares models on validation samples, and data.val_fraction is 0" in said
    said = refusal("fit", "--config=experiments/heart_rate_fed_mmd", *words[-2:])
    assert "no score compares models of regression without labels" in said


def test_methods_are_combined_into_one_network(capsys):
    words = ["fit", *TINY, "--compare=[SourceOnly, FedJDA]", "--select=combine", "--data.target=cleveland"]
    words += ["--trainer.enable_checkpointing=true", "--trainer.max_epochs=10"]
    main(words)
    printed = " ".join(capsys.readouterr().out.split())
    (folder,) = Path("runs/TargetDistillation").glob("version_*")
    (place,) = Path("runs").glob("experiment_*/combined/cleveland_0")
    members = json.loads((folder / "combination.json").read_text())["members"]
    weights = {each["method"]: each["weight"] for each in members}
    assert weights.keys() == {"FedAvg", "SourceOnly", "FedJDA"}
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["FedAvg"] == weights["SourceOnly"]  # without labels at the target they are the same
    shares = [f"{name} {weight:.0%}" for name, weight in weights.items() if weight >= 0.005]
    assert all(each in printed.partition("combined for cleveland (seed 0): ")[2] for each in shares)
    assert f"network of the combination: '{folder}'" in printed

    rows = [*csv.DictReader((place / "predictions.csv").open())]
    teacher = torch.load(place / "teacher.pt", weights_only=True)
    assert [[float(row[name]) for name in [*rows[0]][2:4]] for row in rows] == [
        pytest.approx(row, abs=1e-6) for row in teacher["probabilities"].tolist()
    ]
    agree = {each["method"]: sum(row["predicted"] == row[f"by {each['method']}"] for row in rows) for each in members}
    assert agree == {each["method"]: round(each["agreement"] * len(rows)) for each in members}

    main(["export", str(folder)])
    main(["report", "runs"])
    page = Path("report.md").read_text()
    assert "Members of the combination" in page
    assert "combined on cleveland (seed 0) is a network of what 3 models predict together, and not ranked" in page
    before = (folder / "summary.json").stat().st_mtime_ns
    capsys.readouterr()
    main(words)
    assert "combined for cleveland (seed 0)" in capsys.readouterr().out
    assert (folder / "summary.json").stat().st_mtime_ns == before  # not trained again


def test_a_method_that_cannot_be_read_or_has_other_samples_is_left_out(capsys):
    other = "{class_path: fedlit.methods.FedJDA, name: other samples, data: {val_fraction: 0.4}}"
    words = ["fit", *TINY, f"--compare=[SourceOnly, FedProx, {other}]", "--select=combine", "--data.target=cleveland"]
    words += ["--trainer.enable_checkpointing=true", "--trainer.max_epochs=10"]
    main(words)
    (place,) = Path("runs").glob("experiment_*/combined/cleveland_0")
    shutil.rmtree(place.parent)
    shutil.rmtree("runs/FedProx/version_0/checkpoints")
    capsys.readouterr()
    main(words)
    printed = " ".join(capsys.readouterr().out.split())
    assert "left out: FedProx: 'runs/FedProx/version_0/checkpoints' has no checkpoint" in printed
    assert "left out: other samples: it has other training samples of the target than" in printed


def test_a_combination_needs_checkpoints_neighbourhoods_and_trust(capsys):
    words = [*TINY, "--compare=[SourceOnly]", "--select=combine"]
    assert "select=combine reads the methods' checkpoints" in refusal("fit", *words)
    few = [*words, "--trainer.enable_checkpointing=true", "--data.target=cleveland"]
    main(["fit", *few, "--trainer.max_epochs=30", "--data.test_fraction=0.75", "--data.val_fraction=0.2"])
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"nothing is combined for cleveland \(seed 0\): .* it has \d\d\b", printed)
    main(["fit", *few])
    assert "nothing is combined for cleveland (seed 0): the highest trust is" in capsys.readouterr().out
    assert not [*Path("runs").glob("**/combination.json")]


@pytest.mark.slow
def test_runs_side_by_side_equal_those_one_after_the_other(capfd):
    main(["fit", *SEVERAL])
    serial = found()
    Path("runs").rename("serial")
    Path("fedlit").mkdir()  # as in a clone, where what is installed is meant
    Path("fedlit/__init__.py").write_text("raise ImportError('not the installed package')\n")
    main(["fit", *SEVERAL, "--jobs=2"])
    assert found() == serial
    (logs,) = Path("runs").glob("experiment_*")
    assert len([*logs.glob("*.txt")]) == 4
    assert {path.name for path in logs.glob("table.*")} == {"table.csv", "table.md", "table.tex"}
    assert re.search(
        r"run ([12]) of 4 \(--seed_everything=[01]\) failed; 'runs/experiment_\w+/00\1.txt' ends with",
        refusal("fit", *SEVERAL, "--jobs=2", "--data.batch_size=100000", "--data.drop_last=true"),
    )
    assert "jobs must be at least 1, got 0" in refusal("fit", *SEVERAL, "--jobs=0")


def test_a_method_that_fails_does_not_end_the_others(capsys):
    fails = f"{{class_path: FedAvg, name: wild, init_args: {{optimizer: {WILD}}}}}"
    words = [*TINY, f"--compare=[{fails},SourceOnly]", "--select=combine", "--trainer.enable_checkpointing=true"]
    for trains in (True, False):
        assert refusal("fit", *words) == "fedlit: 1 of 3 runs failed: the same command tries them again"
        printed = capsys.readouterr().out
        assert {method for method, *_ in found()} == {"FedAvg", "SourceOnly"}
        assert ("run 3 of 3" in printed) == trains
        assert re.search(r"run 2 of 3 \(wild: [^\n]*\) failed: DivergedError: ", printed.replace("\n", " "))
        assert "nothing of the runs that failed is combined: wild: " in printed
    (log,) = Path("runs").glob("experiment_*/002.txt")
    assert "Traceback" in log.read_text()
    # what fails first is most often the configuration, of all of them
    assert "DivergedError" in refusal("fit", *TINY, "--compare=[SourceOnly]", f"--model.optimizer={WILD}")
    assert "run 2 of 2" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_fails_waits_for_those_beside_it(capfd):
    fails = f"{{class_path: FedAvg, name: wild, init_args: {{optimizer: {WILD}}}, trainer: {{max_epochs: 1}}}}"
    words = [*TINY, f"--compare=[{fails},SourceOnly]", "--trainer.max_epochs=150", "--jobs=2"]
    assert refusal("fit", *words) == "fedlit: 1 of 3 runs failed: the same command tries them again"
    assert {method for method, *_ in found()} == {"FedAvg", "SourceOnly"}
    assert "run 2 of 3 (wild: " in capfd.readouterr().out


def test_an_interrupted_run_goes_on_from_its_latest_whole_checkpoint(trained):
    folder = Path("runs/FedAvg/version_1")
    rows = metrics(folder)
    (folder / "summary.json").unlink()  # as of a run that was killed after its first epoch
    first, second = sorted(folder.glob("checkpoints/*.ckpt"))
    second.write_bytes(second.read_bytes()[:5000])
    (folder / "metrics.csv").write_text("".join((folder / "metrics.csv").read_text().splitlines(keepends=True)[:-3]))
    written = first.stat().st_mtime_ns
    main(SEEDS)
    assert found() == trained
    assert metrics(folder) == rows
    assert first.stat().st_mtime_ns == written
    assert len([*Path("runs").rglob("version_*")]) == 2


@pytest.mark.slow
def test_a_folder_that_is_no_run_of_the_experiment_stays_as_it_is(trained):
    folder = Path("runs/FedAvg/version_1")
    for name in ("experiment.sha256", "summary.json"):
        (folder / name).unlink()
    main(SEEDS)
    assert (folder / "metrics.csv").is_file()
    assert not (folder / "summary.json").exists()
    assert found() == trained
    assert Path("runs/FedAvg/version_2/summary.json").is_file()


def metrics(folder: Path) -> list[dict[str, str]]:
    """Rows without what a clock said, and without zeros, which stand for channels that nothing was sent on."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if float(value or 0) and not key.startswith("time/")}
            for row in csv.DictReader(file)
        ]


@pytest.mark.slow
def test_one_experiment_that_starts_twice_at_once_trains_each_run_once():
    command = [sys.executable, "-m", "fedlit.cli", "fit", *SEVERAL]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = "".join(process.communicate()[0] for process in started)
    assert "; another command trains it, and this one waits for its end" in said
    assert [process.returncode for process in started] == [0] * 3
    assert len(found()) == len([*Path("runs").rglob("version_*")]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "checkpoints"), [(1, True), (2, False)])
def test_an_experiment_that_was_killed_comes_to_the_same(jobs, checkpoints):
    own = ["--trainer.max_epochs=6", f"--trainer.enable_checkpointing={json.dumps(checkpoints)}"]
    main(["fit", *SEVERAL, *own])
    whole = found()
    Path("runs").rename("whole")
    command = [sys.executable, "-m", "fedlit.cli", "fit", *SEVERAL, *own, f"--jobs={jobs}"]
    process = subprocess.Popen(command, start_new_session=True)
    while len(found()) < 2 and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with suppress(ProcessLookupError):  # runs that it has started end by themselves
        for _ in range(600):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        raise AssertionError("a run goes on without the command that has started it")
    assert len(found()) < 4
    subprocess.run(command, check=True)
    assert found() == whole


@pytest.mark.slow
def test_a_signal_ends_all_runs_that_are_side_by_side():
    command = [sys.executable, "-m", "fedlit.cli", "fit", *SEVERAL, "--trainer.max_epochs=100000", "--jobs=2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len([*Path("runs").rglob("metrics.csv")]) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "fedlit: ended by SIGTERM; the same command goes on with an experiment" in said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not found()


@pytest.mark.slow
def test_a_run_of_two_processes_is_taken_as_it_is():
    command = [sys.executable, "-m", "fedlit.cli", "fit", *SEVERAL, "--trainer.devices=2"]
    subprocess.run(command, check=True, timeout=200)
    whole = found()
    assert len([*Path("runs").rglob("version_*")]) == 4
    (Path("runs/SourceOnly/version_0") / "summary.json").unlink()
    subprocess.run([*command, "--jobs=2"], check=True, timeout=200)
    assert found() == whole
    assert len([*Path("runs").rglob("version_*")]) == 4


def trained_with(*words: str) -> dict[str, Any]:
    _, other = parsed(*words)
    arguments: dict[str, Any] = yaml.safe_load(other.text)["model"]["init_args"]
    return arguments


@pytest.mark.parametrize(
    ("own", "optimizer"),
    [slow([], "Adam"), slow(["--model=FedProx"], "Adam"), (["--model.optimizer.class_path=SGD"], "SGD")],
)
def test_a_class_is_compared_with_its_shipped_arguments_where_nothing_else_is_said(own, optimizer):
    shipped = yaml.safe_load((CONFIGS / "methods" / "fedrf_tca.yaml").read_text())["model"]["init_args"]
    found = trained_with(*TINY, *own, f"--compare=[{'fedlit.methods.' if own else ''}FedRFTCA]")
    assert found["classifier_period"] == shipped["classifier_period"]
    assert found["optimizer"]["class_path"] == f"torch.optim.{optimizer}"
    assert optimizer == "SGD" or found["optimizer"]["init_args"]["lr"] == shipped["optimizer"]["init_args"]["lr"]


@pytest.mark.slow
def test_methods_are_compared_by_their_configurations(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {class_path: fedlit.methods.FedProx, init_args: {mu: 3.0}}")
    compare = "--compare=[methods/fedgp_auto, mine.yaml, methods/fed_mmd]"
    found = Experiment(normalise(["fit", *TINY, compare]))
    texts = {method.name: yaml.safe_load(each.text) for method, each in found.by_method.items()}
    assert [*texts] == [None, "fedgp_auto", "mine", "FedMMD"]
    assert texts["fedgp_auto"]["model"]["init_args"]["beta"] == "auto"
    assert texts["fedgp_auto"]["data"]["init_args"]["target_labels"] == 100
    assert texts["mine"]["model"]["init_args"]["mu"] == 3.0
    assert texts["mine"]["model"]["init_args"]["extractor"] == texts[None]["model"]["init_args"]["extractor"]
    (tmp_path / "few.yaml").write_text("data: {init_args: {target_labels: 20}}")
    texts = [yaml.safe_load(each.text)["data"]["init_args"] for each in parsed(*TINY, "--config=few.yaml", compare)]
    assert [text["target_labels"] for text in texts] == [20] * 4  # all methods on the same data
    assert [text.get("target_batch_size") for text in texts] == [None, 16, None, None]
    own = ["--model.optimizer=SGD", "--model.optimizer.init_args.lr=0.5", "--model.warmup_rounds=0.25"]  # for all
    both = parsed(*TINY, *own, "--compare=[methods/fedrf_tca]")
    given = [yaml.safe_load(each.text)["model"]["init_args"] for each in both]
    assert [each["warmup_rounds"] for each in given] == [0.25] * 2
    assert [each["optimizer"]["init_args"]["lr"] for each in given] == [0.5] * 2
    assert given[1]["optimizer"]["class_path"] == "torch.optim.SGD"
    assert given[1]["trust_region"] == 1.0
    for entry in ("methods/fed_mdm", "other.yaml"):
        assert f"'{entry}' is no file" in refusal("fit", *TINY, f"--compare=[{entry}]")
    (tmp_path / "text.yaml").write_text("nothing")
    assert "text.yaml in compare must be a configuration" in refusal("fit", *TINY, "--compare=[text.yaml]")


def test_an_experiment_is_known_by_its_configurations(tmp_path):
    one, same, other = (
        Experiment(normalise(["fit", *TINY, *more])).folder.path for more in ([], [], ["--data.batch_size=7"])
    )
    assert one == same != other
    first = ExperimentFolder(tmp_path, "experiment", 2, str)
    with first.held(0):
        folder = first.place(0, tmp_path / "FedAvg")
    (folder / "rest").write_text("of an interrupted run")
    again = ExperimentFolder(tmp_path, "experiment", 2, str)
    assert again.folder_of(0) == folder
    assert again.finished(0) is None
    assert again.place(0, tmp_path / "FedAvg") == folder
    assert [path.name for path in folder.iterdir()] == ["experiment.sha256"]
    again.forget()
    assert again.folder_of(0) is None
    assert folder.is_dir()


@pytest.mark.slow
def test_the_readmes_first_experiment_shows_what_adaptation_gains():
    main(["fit", "--config", "experiments/first"])
    accuracies: dict[str, list[float]] = {}
    for path in Path("runs").rglob("summary.json"):
        summary = json.loads(path.read_text())
        accuracies.setdefault(summary["method"], []).append(summary["oracle_accuracy"])
    sources, labelled, refined = (
        sum(accuracies[name]) / 2 for name in ("SourceOnly", "FedAvg, 50 target labels", "FedAvg, refined network")
    )
    assert sources + 0.015 < labelled
    assert labelled + 0.1 < refined
    assert sources + 0.15 < refined


@pytest.mark.slow
def test_an_option_takes_the_place_of_what_a_compared_configuration_sets(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "model: {class_path: FedProx, init_args: {mu: 3.0, optimizer: {class_path: Adam, init_args: {lr: 0.1}}}}\n"
        "data: {init_args: {target_labels: 20}}\n"
    )
    (tmp_path / "text.yaml").write_text("model: fedlit.methods.FedDAN")

    def mine(*words: str, entry: str = "mine.yaml") -> dict[str, Any]:
        return trained_with(*TINY, *words, f"--compare=[{entry}]")

    assert "lr: 0.1" not in yaml.safe_dump(mine("--model.init_args.optimizer=null")["optimizer"])
    given = mine('--model.init_args={"local_norm": true}')
    assert (given["local_norm"], given["mu"]) == (True, 3.0)
    both = parsed(*TINY, '--data.init_args={"batch_size": 7}', "--compare=[mine.yaml]")
    given = [yaml.safe_load(each.text)["data"]["init_args"] for each in both]
    assert [each["batch_size"] for each in given] == [7, 7]
    assert given[1]["target_labels"] == 20
    assert "mmd_weight" in mine(entry="text.yaml")


LISTS = """
model: {class_path: FedProx, init_args: {mu: 3.0, param_groups: [{part: classifier, lr: 0.1}]}}
trainer:
  callbacks:
    - {class_path: fedlit.callbacks.PrivacyReport, init_args: {print_table: false}}
    - fedlit.callbacks.Calibration
  logger: [{class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {save_dir: x}}]
"""
MINE = """
trainer:
  callbacks: [{class_path: fedlit.callbacks.PrivacyReport}]
  logger: {class_path: lightning.pytorch.loggers.WandbLogger, init_args: {offline: true}}
"""
MAPPING = {
    "class_path": "FedProx",
    "init_args": {"param_groups": [{"part": "classifier", "lr": 0.1}]},
    "trainer": {"callbacks": ["fedlit.callbacks.Calibration"]},
}
TRUST = ["--trainer.callbacks+=Validators", "--trainer.callbacks.names=[trust]"]


def lists(*words: str, entry: object) -> tuple[list[str], list[str], list[str], dict[str, Any]]:
    """Callbacks and loggers of a compared method by class, and parts of its groups; arguments of the Validators."""
    Path("lists.yaml").write_text(LISTS)
    Path("mine.yaml").write_text(MINE)
    _, other = parsed("--config=data/digits", "--config=methods/fedavg", *words, f"--compare={json.dumps([entry])}")
    arguments = other.arguments
    loggers = arguments.trainer.logger or []
    loggers = loggers if isinstance(loggers, list) else [loggers]
    classes = [[each.class_path.rpartition(".")[2] for each in some] for some in (arguments.trainer.callbacks, loggers)]
    parts = [group["part"] for group in arguments.model.init_args.param_groups or []]
    ours = [each for each in arguments.trainer.callbacks if each.class_path.endswith("Validators")]
    return *classes, parts, dict(ours[0].init_args.items()) if ours else {}


@pytest.mark.parametrize(
    ("words", "callbacks", "loggers"),
    [
        (
            ["--config=mine.yaml", *TRUST],
            ["PrivacyReport", "Validators", "Calibration"],
            ["WandbLogger", "TensorBoardLogger"],
        ),
        slow(["--trainer.callbacks+=Calibration"], ["Calibration", "PrivacyReport"], ["TensorBoardLogger"]),
        slow(
            ["--trainer.logger+=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=a"],
            ["PrivacyReport", "Calibration"],
            ["CSVLogger", "TensorBoardLogger"],
        ),
    ],
)
def test_lists_of_a_compared_configuration_come_beside_those_of_the_experiment(words, callbacks, loggers):
    found, logged, parts, validators = lists(*words, entry="lists.yaml")
    assert (found, logged, parts) == (callbacks, loggers, ["classifier"])
    assert validators.get("names") == (["trust"] if "Validators" in callbacks else None)


@pytest.mark.parametrize("entry", ["lists.yaml", slow(MAPPING)])
def test_what_is_appended_to_a_list_is_not_lost_to_a_compared_method(entry):
    group = "--model.param_groups+={part: extractor, lr: 0.5}"
    callbacks, _, parts, validators = lists(*TRUST, group, "--config=methods/fedavg", entry=entry)
    assert {"Validators", "Calibration"} <= {*callbacks}
    assert validators["names"] == ["trust"]
    assert parts == ["classifier", "extractor"]


VALUES: dict[str, Any] = {
    "warmup_rounds": 1e-05,
    "local_norm": True,
    "trust_region": None,
    "class_weights": [1.0, 1e-05],
    "param_groups": [{"part": "classifier", "lr": math.inf, "weight_decay": None}],
}


@pytest.mark.parametrize("kind", [slow("mapping"), slow("file"), "trimmed file"])
def test_values_of_compared_methods_keep_their_types(kind):
    entry: Any = {"class_path": "fedlit.methods.FedProx", "init_args": VALUES, "data": {"target_labels": 1.0}}
    words = ["--config", "data/digits", "--config", "methods/fedavg"]
    if kind != "mapping":
        content = {"model": {"class_path": "fedlit.methods.FedProx", "init_args": VALUES}}
        Path("entry.yaml").write_text(yaml.safe_dump(content | {"data": {"init_args": {"target_labels": 1.0}}}))
        entry = "entry.yaml"
        words += ["--trainer.max_epochs=3", "--data.batch_size=7"]
    if kind == "trimmed file":  # it goes through text, without what the command line sets
        words.append("--data.target_labels=1.0")
    compare = yaml.safe_dump([entry], default_flow_style=True, width=math.inf)
    _, other = parsed(*words, f"--compare={compare}")
    for name, value in VALUES.items():
        assert type_true(other.arguments.model.init_args[name]) == type_true(value)
    assert type_true(other.arguments.data.init_args.target_labels) == "1.0"
