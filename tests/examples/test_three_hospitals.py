"""The example of three hospitals around a server, for a few rounds: as its README says, each with its own table."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "three_hospitals"
SITES = ["cleveland", "hungary", "long_beach"]


def copied(folder: Path) -> dict[str, Any]:
    """The example in a folder, and what a process there is started with."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("sites", "certificates", "server", "__pycache__"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": place, "PORT": str(port), "MINUTES": "3", "OMP_NUM_THREADS": "1"}
    return {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 400, "check": False}


@pytest.mark.packaging
def test_a_server_and_three_hospitals_train_predict_and_export(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    folder = tmp_path / "hospitals"
    how = copied(folder)
    rounds = ["--trainer.max_epochs=3", "--model.init_args.warmup_rounds=1"]
    done = subprocess.run(["./run.sh", *rounds], **how)
    logs = [path.read_text() for path in folder.glob("*/**/*.log")]
    assert done.returncode == 0, done.stdout + done.stderr + "\n".join(logs)
    site = folder / "sites" / "long_beach"
    table = pd.read_csv(site / "patients.csv")
    for name in ("experiment", "dadil"):
        patients = pd.read_csv(site / f"{name}.csv")
        assert patients["id"].tolist() == table["patient"].tolist()
        assert [*patients.columns] == ["id", "predicted", "no", "yes"]
        assert (site / f"{name}.pt2").is_file()
    for place in [folder / "server", *(folder / "sites" / name for name in SITES)]:
        trained = {path.parents[2].name for path in place.glob("runs/*/version_*/checkpoints/*.ckpt*")}
        assert trained == {"FedGP", "FedDaDiL"}, place
    assert table["disease"].notna().sum() == 20


@pytest.mark.packaging
def test_all_end_when_one_hospital_cannot_start(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    folder = tmp_path / "hospitals"
    how = copied(folder)
    subprocess.run([sys.executable, "make_sites.py"], **how)
    (folder / "sites" / "hungary" / "patients.csv").unlink()
    done = subprocess.run(["./run.sh", "--trainer.max_epochs=3"], **how)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "none of files={'hungary': 'patients.csv'} is there" in done.stderr


@pytest.mark.slow
def test_each_folder_has_one_table(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLE / "make_sites.py", tmp_path], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == SITES
    assert all([each.name for each in (tmp_path / name).iterdir()] == ["patients.csv"] for name in SITES)


def test_containers_have_their_own_folder_and_certificate_alone() -> None:
    services = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]
    assert [*services] == ["server", *SITES]
    for name, service in services.items():
        sources = [volume.split(":")[0] for volume in service["volumes"]]
        own = "./server" if name == "server" else f"./sites/{name}"
        files = ("experiment.yaml", f"{name}.yaml", *(f"certificates/{file}" for file in ("ca.crt", f"{name}.crt")))
        assert sources == [own, *(f"./{file}" for file in files), f"./certificates/{name}.key"]
        assert all((EXAMPLE / source).is_file() for source in sources if source.endswith(".yaml"))
