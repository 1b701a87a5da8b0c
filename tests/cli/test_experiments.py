"""Experiments of several runs: folders, what methods are compared with, going on, side by side, and tables."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import yaml

import processes
from fedlit.callbacks import RunSummary
from fedlit.callbacks.tables import write_tables
from fedlit.cli import main
from fedlit.cli.arguments import normalise
from fedlit.cli.experiment import Experiment
from fedlit.cli.folders import ExperimentFolder, claim
from fedlit.cli.plugins import load_plugins

TINY = [
    *("--config", "data/heart_disease", "--config", "methods/fedavg", "--trainer.max_epochs=1"),
    *("--trainer.strategy.init_args.num_threads=1", "--trainer.enable_checkpointing=false"),
]
SEVERAL = [*TINY, "--seeds=[0,1]", "--compare=[fedlit.methods.SourceOnly]"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_plugins()


def found() -> dict[tuple[str, int], dict[str, Any]]:
    """Summaries of all runs, without what a clock said."""
    runs = [json.loads(path.read_text()) for path in Path("runs").rglob("summary.json")]
    assert len({(run["method"], run["seed"]) for run in runs}) == len(runs)
    return {
        (run["method"], run["seed"]): {key: value for key, value in run.items() if not key.startswith("seconds")}
        for run in runs
    }


def claim_some(folder: Path) -> list[str]:
    """In one of several processes at the same time."""
    return [str(claim(folder)) for _ in range(50)]


def test_a_folder_is_claimed_by_one_process_alone(tmp_path: Path) -> None:
    claimed = [place for some in processes.results(claim_some, tmp_path / "here", ranks=4) for place in some]
    assert sorted(claimed) == sorted(str(tmp_path / "here" / f"version_{number}") for number in range(200))
    (tmp_path / "here" / "version_217").mkdir()
    assert claim(tmp_path / "here").name == "version_218"
    assert [claim(tmp_path / "here", "trial").name for _ in range(3)] == ["trial", "trial-1", "trial-2"]


def test_an_experiment_goes_on_and_takes_finished_runs_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *SEVERAL])
    first, folders = found(), sorted(map(str, Path("runs").rglob("version_*")))
    assert len(first) == 4
    assert "run 4 of 4" in capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("summary.json")}
    gone = Path("runs/SourceOnly/version_0")
    (gone / "summary.json").unlink()  # as of a run that was killed
    (gone / "half.txt").write_text("of what was written")
    main(["fit", *SEVERAL])
    printed = capsys.readouterr().out
    assert "3 of 4 runs are finished already, in 'runs': --fresh true trains them again" in printed
    assert printed.count("run 3 of 4") == 1
    assert "run 2 of 4" not in printed
    assert found() == first
    assert sorted(map(str, Path("runs").rglob("version_*"))) == folders
    assert not (gone / "half.txt").exists()
    assert sum(path.stat().st_mtime_ns != times[path] for path in Path("runs").rglob("summary.json")) == 1
    main(["fit", *SEVERAL])
    assert "4 of 4 runs are finished already" in capsys.readouterr().out
    main(["fit", *SEVERAL, "--fresh=true"])
    assert len([*Path("runs").rglob("version_*")]) == 8
    main(["fit", *SEVERAL, "--trainer.max_epochs=2"])
    assert len([*Path("runs").rglob("version_*")]) == 12


@pytest.mark.slow
def test_runs_side_by_side_equal_those_one_after_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    main(["fit", *SEVERAL])
    serial = found()
    Path("runs").rename("serial")
    main(["fit", *SEVERAL, "--jobs=2"])
    assert found() == serial
    (logs,) = Path("runs").glob("experiment_*")
    assert len([*logs.glob("*.txt")]) == 4
    assert {path.name for path in logs.glob("table.*")} == {"table.csv", "table.md", "table.tex"}
    with pytest.raises(
        SystemExit, match=r"run 1 of 4 \(--seed_everything=0\) failed; 'runs/experiment_\w+/001.txt' ends with"
    ):
        main(["fit", *SEVERAL, "--jobs=2", "--data.batch_size=100000", "--data.drop_last=true"])
    with pytest.raises(SystemExit, match="jobs must be at least 1, got 0"):
        main(["fit", *SEVERAL, "--jobs=0"])


@pytest.mark.slow
def test_an_experiment_that_was_killed_comes_to_the_same() -> None:
    main(["fit", *SEVERAL, "--trainer.max_epochs=3"])
    whole = found()
    Path("runs").rename("whole")
    command = [sys.executable, "-m", "fedlit.cli", "fit", *SEVERAL, "--trainer.max_epochs=3", "--jobs=2"]
    process = subprocess.Popen(command, start_new_session=True)
    while len(found()) < 2 and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(found()) < 4
    subprocess.run(command, check=True)
    assert found() == whole


def methods(*words: str) -> dict[str, Any]:
    """What each method of an experiment is trained with."""
    experiment = Experiment.parse(normalise(["fit", *words]))
    parsed = {method.name or "": each for method, each in experiment.by_method.items()}
    return {name: yaml.safe_load(each.text)["model"]["init_args"] for name, each in parsed.items()}


def test_a_class_is_compared_with_its_shipped_arguments_where_nothing_else_is_said() -> None:
    shipped = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.002}}
    for name in ("FedMMD", "fedlit.methods.FedMMD"):
        arguments = methods(*TINY, f"--compare=[{name}]")[""]
        assert arguments["warmup_rounds"] == 5
    found = Experiment.parse(normalise(["fit", *TINY, "--compare=[fedlit.methods.FedRFTCA]"]))
    (_, other) = found.by_method.values()
    model = yaml.safe_load(other.text)["model"]["init_args"]
    assert model["classifier_period"] == 10
    assert {key: model["optimizer"][key] for key in shipped} | {"init_args": {"lr": 0.002}} == shipped
    words = ["fit", *TINY, "--model.init_args.optimizer=SGD", "--compare=[fedlit.methods.FedRFTCA]"]
    found = Experiment.parse(normalise(words))
    (_, other) = found.by_method.values()
    assert yaml.safe_load(other.text)["model"]["init_args"]["optimizer"]["class_path"] == "torch.optim.SGD"


def test_methods_are_compared_by_their_configurations(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {class_path: fedlit.methods.FedProx, init_args: {mu: 3.0}}")
    compare = "--compare=[methods/fedgp_auto, mine.yaml]"
    found = Experiment.parse(normalise(["fit", *TINY, compare]))
    texts = {method.name: yaml.safe_load(each.text) for method, each in found.by_method.items()}
    assert [*texts] == [None, "fedgp_auto", "mine"]
    assert texts["fedgp_auto"]["model"]["init_args"]["beta"] == "auto"
    assert texts["fedgp_auto"]["data"]["init_args"]["target_labels"] == 100
    assert texts["mine"]["model"]["init_args"]["mu"] == 3.0
    assert texts["mine"]["model"]["init_args"]["extractor"] == texts[None]["model"]["init_args"]["extractor"]


def summary(method: str, target: str, seed: int, accuracy: float) -> RunSummary:
    return RunSummary(
        method=method, target=target, seed=seed, oracle_accuracy=accuracy, target_score=0.5, rounds=3,
        bytes_by_channel={"weights": 10}, seconds={}, seconds_total=1.0, processes=1, target_sha256="", backends={},
    )  # fmt: skip


def test_tables_have_means_deviations_and_the_best_in_bold(tmp_path: Path) -> None:
    accuracies = {("Fed_A", "north"): (0.5, 0.7), ("Fed_A", "south"): (0.9, 0.8), ("B", "north"): (0.8, 0.9)}
    runs = [summary(*key, seed, each) for key, both in accuracies.items() for seed, each in enumerate(both)]
    paths = write_tables(runs, tmp_path / "tables")
    assert [path.name for path in paths] == ["table.csv", "table.md", "table.tex"]
    first, second = csv.DictReader(paths[0].open())
    assert first["method"] == "Fed_A"
    assert float(first["oracle accuracy in %: north"]) == pytest.approx(100 * fmean((0.5, 0.7)))
    assert float(first["standard deviation: average"]) == pytest.approx(100 * stdev((0.7, 0.75)))
    assert [second[f"{name}: south"] for name in ("oracle accuracy in %", "seeds")] == ["", "0"]
    text = paths[1].read_text()
    assert "hidden labels (oracle), mean ± sample standard deviation over seeds" in text
    assert f"**{100 * fmean((0.8, 0.9)):.1f} ± {100 * stdev((0.8, 0.9)):.1f}**" in text
    assert r"| Fed\_A | 60.0 ± 14.1 | **85.0 ± 7.1** | **72.5 ± 3.5** |" in text
    assert "| B | **85.0 ± 7.1** | - | - |" in text  # no average over targets that the others have more of
    latex = paths[2].read_text()
    assert r"Fed\_A & 60.0 $\pm$ 14.1 & \textbf{85.0 $\pm$ 7.1} & \textbf{72.5 $\pm$ 3.5} \\" in latex
    alone = write_tables([summary("A", "north", 0, 0.5)], tmp_path)
    assert "| A | 50.0 |" in alone[1].read_text()


def test_an_experiment_is_known_by_its_configurations(tmp_path: Path) -> None:
    first = ExperimentFolder(tmp_path, ["a", "b"])
    assert first.path != ExperimentFolder(tmp_path, ["a", "c"]).path
    with first.held(0):
        folder = first.place(0, tmp_path / "FedAvg")
    (folder / "rest").write_text("of an interrupted run")
    again = ExperimentFolder(tmp_path, ["a", "b"])
    assert again.folder_of(0) == folder
    assert again.finished(0) is None
    assert again.place(0, tmp_path / "FedAvg") == folder
    assert not [*folder.iterdir()]
    again.forget()
    assert again.folder_of(0) is None
    assert folder.is_dir()
