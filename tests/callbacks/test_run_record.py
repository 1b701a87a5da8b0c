"""What a script's run leaves, next to what the module, scikit-learn and the command say of the same."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.calibration import calibration_curve
from sklearn.decomposition import PCA

import processes
from fedlit.callbacks import OracleAccuracy, RunRecord
from fedlit.cli import main
from fedlit.methods import FedAvg
from read_page import Page
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, build, trainer


def train(folder: Path, record: RunRecord, rounds: int = 2, **kwargs: Any) -> tuple[pl.Trainer, Any, Blobs]:
    data, module = Blobs(), build(weighting="uniform")
    run = trainer(rounds, [record], folder, **kwargs)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    return run, module, data


def test_a_script_leaves_what_the_command_leaves_and_the_report_shows_it(tmp_path, monkeypatch):
    record = RunRecord(tmp_path / "mine")
    run, module, _ = train(tmp_path, record)
    assert record.path == tmp_path / "mine" / "version_0"
    assert record.summary is not None
    assert record.summary.oracle_accuracy == pytest.approx(float(run.callback_metrics["oracle/target/acc"]))
    assert {path.name for path in record.path.iterdir()} == {
        *("metrics.csv", "summary.json", "ledger.csv", "embeddings.csv", "settings.yaml")
    }
    sent = csv.DictReader((record.path / "ledger.csv").open(newline=""))
    assert (
        sum(int(row["bytes"]) for row in sent if row["channel"] == "weights")
        == record.summary.bytes_by_channel["weights"]
    )
    monkeypatch.chdir(tmp_path)
    main(["report", "mine"])
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert "How the target's samples are predicted" in page.texts["h2"]
    assert {"Accuracy", "Losses", "Communication", "Privacy"} <= set(page.texts["h3"])
    assert page.table("folder")[0][3:] == ["0", "finished", "2"]
    assert module.federation.round_idx == 2


def test_each_fit_has_a_folder_of_its_own(tmp_path):
    first, second = RunRecord(tmp_path / "mine"), RunRecord(tmp_path / "mine")
    train(tmp_path, first, 1)
    train(tmp_path, second, 1)
    run, module, data = train(tmp_path, first, 1)
    run.fit(module, data)
    assert [each.name for each in sorted((tmp_path / "mine").iterdir())] == [f"version_{n}" for n in range(4)]
    assert (second.path, first.path) == (tmp_path / "mine" / "version_1", tmp_path / "mine" / "version_3")


def test_the_folder_is_that_of_a_logger_or_none(tmp_path):
    record = RunRecord()
    train(tmp_path, record, 1, logger=CSVLogger(str(tmp_path), "logged", "here"))
    assert record.path == tmp_path / "logged" / "here"
    assert (record.path / "summary.json").is_file()
    with pytest.raises(ValueError, match="CSVLogger"):
        train(tmp_path, RunRecord(tmp_path / "mine"), 1, logger=CSVLogger(str(tmp_path), "logged", "here"))
    before = sorted(tmp_path.rglob("*"))
    record = RunRecord()
    train(tmp_path, record, 1)
    assert record.path is None
    assert record.summary is not None
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_test_the_summary_is_of_the_last_validation_or_waits(tmp_path):
    for awaits, there in ((False, True), (True, False)):
        record = RunRecord(tmp_path / str(awaits), awaits_test=awaits)
        run = trainer(1, [record], tmp_path)
        run.fit(build(weighting="uniform"), Blobs())
        assert record.path is not None
        assert (record.path / "summary.json").is_file() is there
        if record.summary is not None:
            assert record.summary.oracle_accuracy == pytest.approx(float(run.callback_metrics["oracle/target/acc"]))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Any, Blobs]:
    folder = tmp_path_factory.mktemp("recorded")
    _, module, data = train(folder, record := RunRecord(folder / "mine"), 1)
    return record, module, data


@pytest.mark.slow
def test_the_exported_file_gives_what_the_targets_network_gives(tmp_path):
    record = RunRecord(tmp_path / "mine", method="Mine", export="target.pt2")
    _, module, data = train(tmp_path, record, 1)
    x, _ = data.parts["test"][TARGET].tensors
    expected = module.replicas[TARGET].eval()(x).softmax(dim=1)
    torch.testing.assert_close(torch.export.load(record.path / "target.pt2").module()(x), expected)
    assert json.loads((record.path / "summary.json").read_text())["method"] == "Mine"


def test_embeddings_are_principal_components_of_test_features(recorded):
    record, module, data = recorded
    header, *rows = csv.reader((record.path / "embeddings.csv").open(newline=""))
    assert header == ["client", "x", "y", "predicted", "label"]
    assert [row[0] for row in rows] == [name for name in CLIENTS for _ in range(30)]
    with torch.no_grad():
        x = {name: data.parts["test"][name].tensors[0] for name in CLIENTS}
        features = torch.cat([module.replicas[name].eval().extractor(x[name]) for name in CLIENTS]).double()
        predicted = torch.cat([module.replicas[name](x[name]).argmax(dim=1) for name in CLIENTS])
    expected = PCA(2).fit_transform(features.numpy())
    found = np.array([[float(cell) for cell in row[1:3]] for row in rows])
    for axis in (0, 1):  # the sign of a component is free
        way = np.sign(found[:, axis] @ expected[:, axis])
        np.testing.assert_allclose(way * found[:, axis], expected[:, axis], atol=2e-3)
    assert [int(row[3]) for row in rows] == predicted.tolist()
    assert [int(row[4]) for row in rows] == torch.cat([data.parts["test"][n].tensors[1] for n in CLIENTS]).tolist()


def test_reliability_is_scikit_learns_calibration_curve(recorded):
    record, module, data = recorded
    x, y = data.parts["test"][TARGET].tensors
    with torch.no_grad():
        sure, predicted = module.replicas[TARGET].eval()(x).double().softmax(dim=1).max(dim=1)
    right, means = calibration_curve((predicted == y).int(), sure, n_bins=10)
    rows = [row for row in record.summary.oracle_reliability if row[0]]
    np.testing.assert_allclose([row[1] for row in rows], means, atol=1e-5)
    np.testing.assert_allclose([row[2] for row in rows], right)
    assert sum(row[0] for row in rows) == 30


def apart(folder: str) -> str:
    record = RunRecord(folder)
    train(Path(folder), record, 1, devices=2)
    return str(record.path)


def test_on_several_processes_one_folder_has_features_of_the_targets_process_alone(tmp_path):
    first, second = processes.results(apart, str(tmp_path), ranks=2)
    assert first == second
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == [Path(first).name]
    _, *rows = csv.reader(Path(first, "embeddings.csv").read_text(encoding="utf-8").splitlines())
    clients = {row[0] for row in rows}
    assert TARGET in clients
    assert len(clients) < len(CLIENTS)


def test_what_cannot_be_exported_is_told_before_training(tmp_path):
    for record, problem in (
        (RunRecord(tmp_path / "mine", export="target.h5"), r"\.pt2 or \.onnx"),
        (RunRecord(export="target.pt2"), "needs a folder"),
    ):
        module = build(weighting="uniform")
        with pytest.raises(ValueError, match=problem):
            trainer(1, [record], tmp_path).fit(module, Blobs())
        assert module.federation.round_idx == 0


@pytest.mark.parametrize("seed", [None, "7"])
def test_a_run_without_a_seed_warns(tmp_path, monkeypatch, seed):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(tmp_path, RunRecord(tmp_path / "mine"), 1)
    recorded = yaml.safe_load((tmp_path / "mine" / "version_0" / "settings.yaml").read_text())["seed_everything"]
    assert recorded == (None if seed is None else 7)
    assert any("no seed was given" in str(each.message) for each in caught) == (seed is None)


def test_a_trial_run_leaves_nothing(tmp_path):
    record = RunRecord(tmp_path / "mine", export="target.pt2")
    train(tmp_path, record, 1, fast_dev_run=True)
    assert record.summary is not None
    assert [*tmp_path.iterdir()] == []


def test_callbacks_of_the_user_are_not_added_again(tmp_path):
    watcher = OracleAccuracy(per_class=True)
    data, module = Blobs(), build(weighting="uniform")
    run = trainer(1, [watcher, RunRecord()], tmp_path)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    assert [each for each in run.callbacks if isinstance(each, OracleAccuracy)] == [watcher]
    assert sum(f"oracle/target/acc/{index}" in run.callback_metrics for index in range(NUM_CLASSES)) > 1
    assert isinstance(module, FedAvg)


class Killed(pl.Callback):
    """Looks, at the start of every local step, at what a run that is killed there has left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left: list[tuple[int, list[int]]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        saved = [torch.load(path, weights_only=True)["federation"] for path in (self.folder / "c").glob("*.ckpt")]
        path = self.folder / "mine" / "version_0" / "metrics.csv"
        if saved and not path.is_file():
            self.left.append((max(int(each["round_idx"]) for each in saved), []))
        elif saved:
            with path.open(newline="") as file:
                rounds = [int(float(row["round"])) for row in csv.DictReader(file) if row.get("round")]
            self.left.append((max(int(each["round_idx"]) for each in saved), rounds))


@pytest.mark.parametrize("kwargs", [{"limit_val_batches": 0}, {"strategy": {"rounds_per_epoch": 4, "local_steps": 2}}])
def test_what_was_logged_before_a_checkpoint_is_in_the_file_when_it_is_written(tmp_path, kwargs):
    killed, saving = Killed(tmp_path), ModelCheckpoint(tmp_path / "c", every_n_train_steps=2, save_top_k=-1)
    run = trainer(2, [RunRecord(tmp_path / "mine"), saving, killed], tmp_path, enable_checkpointing=True, **kwargs)
    run.fit(build(), Blobs())
    assert len(killed.left) > 5
    for round_idx, rounds in killed.left:
        assert rounds[:round_idx] == [*range(round_idx)]
