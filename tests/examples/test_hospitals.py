"""The example of four hospitals, for a few rounds: as its README says, each process in a folder with its own table."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals"

pytestmark = pytest.mark.packaging


def test_four_hospitals_train_predict_and_export_with_a_table_each(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    folder = tmp_path / "hospitals"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("sites", "__pycache__"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": place, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}

    def call(*words: str) -> str:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        logs = [path.read_text() for path in folder.glob("sites/*/fit.log")]
        assert done.returncode == 0, done.stdout + done.stderr + "\n".join(logs)
        return done.stdout

    call(sys.executable, "make_tables.py")
    sites = [path for path in (folder / "sites").iterdir() if path.is_dir()]
    assert all([each.name for each in site.iterdir()] == [f"{site.name}.csv"] for site in sites)
    call("./federation.sh", "--trainer.max_epochs=3", "--model.init_args.warmup_rounds=1")
    printed = call(sys.executable, "compare.py")
    assert "federation, before calibration" in printed
    difference = float(printed.split("differs by at most ")[1])
    assert difference < 1e-5
    table = pd.read_csv(folder / "sites" / "long_beach" / "long_beach.csv")
    patients = pd.read_csv(folder / "sites" / "long_beach" / "patients.csv")
    assert patients["id"].tolist() == table["patient"].tolist()
    assert [*patients.columns] == ["id", "predicted", "no", "yes"]
    parts = sorted(path.name.rpartition(".ckpt")[2] for path in folder.glob("sites/*/runs/*/*/checkpoints/*"))
    assert parts == ["", ".part1", ".part2", ".part3"]
