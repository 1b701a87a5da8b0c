"""What files and loggers of a process have of the clients of others, where a backend hides."""

from __future__ import annotations

import csv
import glob
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

import one_site
import processes
from fedlit import FederatedStrategy
from fedlit.callbacks import AggregationCurves, RunRecord, Validators
from fedlit.cli import lightning_cli
from fedlit.federation import Federation, Summed
from fedlit.federation.transport import OneProcess
from fedlit.methods import FedGP
from fedlit.privacy import PairwiseMasking
from helpers import build, digits, trainer
from stars import certificates

PRIVATE = ("oracle/", "validator/", "beta", "distance", "tau", "target_variance")
"""Beginnings of the names of numbers of the target, beside those that name a client."""


def of_whom(folder: Path) -> set[str]:
    """Whose numbers metrics.csv has."""
    with next(folder.rglob("metrics.csv")).open(newline="") as file:
        names = next(csv.reader(file))
    found = {name.split("/")[1] for name in names if name.startswith("source/") and name.count("/") == 2}
    return found | {"fonts" for name in names if name.startswith(("target/", *PRIVATE))}


def numbers_of_target(folder: Path) -> set[str]:
    """Names of what summary.json has of the target."""
    summary = json.loads(next(folder.rglob("summary.json")).read_text())
    return {key for key, value in summary.items() if key.startswith(("oracle_", "target_score", "selected")) and value}


def recorded(folder: Path, strategy: dict[str, Any]) -> pl.Trainer:
    """A run with every file that callbacks write."""
    saver = ModelCheckpoint(folder, "last")
    record = RunRecord(folder, awaits_test=True)
    callbacks = [record, Validators(["trust"]), AggregationCurves(), saver]
    fitted = trainer(2, callbacks, strategy={"local_steps": 4, **strategy}, enable_checkpointing=True)
    pl.seed_everything(0, verbose=False)
    module = build(FedGP, digits(target_labels=30, target_batch_size=8), beta="auto", warmup_rounds=0)
    data = one_site.OwnDataOnly(8) if "seat" in strategy else digits(target_labels=30, target_batch_size=8)
    data.test_dataloader = data.val_dataloader
    fitted.strategy.stays_joined = True
    fitted.fit(module, data)
    fitted.test(module, data, verbose=False)
    fitted.strategy.leave()
    return fitted


def test_files_have_the_numbers_of_clients_that_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "simulation", {})
    assert of_whom(tmp_path / "simulation") == {"clean", "blended", "fonts"}
    assert {"oracle_accuracy", "oracle_confusion", "target_score"} <= numbers_of_target(tmp_path / "simulation")
    assert list((tmp_path / "simulation").rglob("aggregation_curves.csv"))
    monkeypatch.setattr(Federation, "shows", lambda self, client: getattr(client, "name", client) == "clean")
    fitted = recorded(tmp_path / "site", {})
    assert of_whom(tmp_path / "site") == {"clean"}
    assert not numbers_of_target(tmp_path / "site")
    assert not list((tmp_path / "site").rglob("aggregation_curves.*"))
    assert {"target/score", "source/blended/acc", "oracle/target/acc"} <= fitted.callback_metrics.keys()  # to monitor
    state = torch.load(next((tmp_path / "site").glob("*.ckpt")), weights_only=True)["callbacks"]
    assert state["OracleAccuracy"]["history"] == []
    assert state["AggregationCurves"]["rounds"] == {}


@pytest.mark.parametrize("losable", [False, True])
@pytest.mark.parametrize("privacy", [None, PairwiseMasking(colluders=0)])
def test_numbers_of_others_are_left_out_where_a_backend_hides_across_organisations(losable: bool, privacy: Any) -> None:
    transport = OneProcess()
    transport.losable, transport.world_size = losable, 2
    federation = Federation(["a", "b"], "b", transport=transport, placement=[["a"], ["b"]], privacy=privacy, seed=0)
    federation.channels.over("weights", Summed)
    assert federation.shows("a")
    assert federation.shows("b") == (not losable or privacy is None)


def test_loggers_get_the_names_of_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "data": {"init_args": {"files": {"north": "/data/Jane Doe/patients.csv"}, "missing_values": ["n/a"]}},
        "seat": {"key": "/etc/north.key"},
        "config": ["C:\\hospital\\a.yaml", "../b/"],
        "seed_everything": 0,
        "trainer": {"max_epochs": 1, "logger": {"class_path": "Service", "init_args": {"key": "secret"}}},
    }
    logged: list[dict[str, Any]] = []
    logger = SimpleNamespace(log_hyperparams=logged.append)
    parser = SimpleNamespace(dump=lambda config, skip_unset: yaml.safe_dump(config))
    save = lightning_cli.SaveConfig(parser, given)  # type: ignore[arg-type]
    monkeypatch.setattr(lightning_cli, "tags_at_start", lambda *_: {})
    for hides in (False, True):
        federation = SimpleNamespace(hides=hides, transport=SimpleNamespace(world_size=2))
        module = SimpleNamespace(federation=federation)
        monkeypatch.setattr(lightning_cli, "federated", lambda *_, module=module: module)
        save.save_config(SimpleNamespace(loggers=[logger], callbacks=[]), None, "fit")  # type: ignore[arg-type]
    assert logged[0] == {
        "data.files.north": "/data/Jane Doe/patients.csv",
        "data.missing_values": "n/a",
        "seat.key": "/etc/north.key",
        "config": "C:\\hospital\\a.yaml, ../b/",
        "seed_everything": 0,
        "trainer.max_epochs": 1,
    }
    assert logged[1] == {
        "data.files.north": "patients.csv",
        "data.missing_values": "a",
        "config": "a.yaml, b",
        "seed_everything": 0,
        "trainer.max_epochs": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("hides", [False, True])
def test_wandb_gets_neither_output_nor_command_where_a_backend_hides(hides: bool, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (everything,) = processes.results(_log, str(tmp_path), hides)
    assert ("3 cells are missing" in everything) is not hides
    assert ("/patients" in everything) is not hides


def _log(folder: str, hides: bool) -> str:
    """All that W&B keeps to send of a run that prints."""
    from lightning.pytorch.loggers import WandbLogger

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    os.environ["WANDB_MODE"] = "offline"
    sys.argv = ["train.py", "--data=/patients"]
    lightning_cli._keep_console(FederatedStrategy(privacy=PairwiseMasking() if hides else None))
    logger = WandbLogger(save_dir=folder, project="test")
    logger.log_metrics({"loss": 1.0}, 0)
    print("3 cells are missing", flush=True)
    logger.experiment.finish()
    files = [file for file in glob.glob(f"{folder}/wandb/offline*/**", recursive=True) if os.path.isfile(file)]
    sent = [file for file in files if "/logs/" not in file]
    return b"".join(Path(file).read_bytes() for file in sent).decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("privacy", ["None", "PairwiseMasking(colluders=0)"])
def test_a_site_writes_the_numbers_and_samples_of_its_own_clients(privacy: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    folder = certificates(tmp_path / "certificates")
    processes.results(_site, folder, str(tmp_path), privacy, ranks=4, timeout=120)
    everyone = {"clean", "blended", "fonts"}
    for name in ("server", *one_site.SITES):
        assert of_whom(tmp_path / name) == (everyone if privacy == "None" else {name} - {"server"})
        assert bool(numbers_of_target(tmp_path / name)) == (privacy == "None" or name == "fonts")
    (samples,) = tmp_path.rglob("embeddings.csv")
    assert samples.relative_to(tmp_path).parts[0] == "fonts"
    assert {row[0] for row in csv.reader(samples.open())} == {"client", "fonts"}


def _site(folder: str, out: str, privacy: str) -> None:
    import fedlit.privacy

    seat = one_site.seated(folder, 1.0)
    backend = eval(privacy, vars(fedlit.privacy))  # written above, nobody else
    recorded(Path(out, one_site.RANKS_NAMED[seat]), {"seat": seat, "privacy": backend})
