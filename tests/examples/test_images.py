"""The example of photographs in folders, small: drawn images, a small backbone, two rounds; killed, and gone on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlit.models import SmallCNN

EXAMPLE = Path(__file__).parents[2] / "examples" / "images"

pytestmark = pytest.mark.packaging

CLIENTS = {"amazon": 0.0, "dslr": 0.2, "webcam": 0.4}
SMALL = [
    *("--model.init_args.extractor.init_args.extractor.init_args.in_features=32", "--trainer.max_epochs=1"),
    *("--data.init_args.val_fraction=0.2", "--seeds=[0]"),
]


def draw(folder: Path) -> None:
    """Discs, bars and rings, on a background that each client has of its own."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[-1:1:32j, -1:1:32j]
    shapes = {"disc": rows**2 + columns**2 < 0.5, "bar": abs(rows) < 0.3, "ring": abs(rows**2 + columns**2 - 0.5) < 0.2}
    for client, background in CLIENTS.items():
        for name, shape in shapes.items():
            (folder / client / name).mkdir(parents=True)
            for number in range(10):
                pixels = np.clip(background + 0.5 * shape + 0.1 * rng.standard_normal((32, 32)), 0, 1)
                image = Image.fromarray((255 * pixels).astype(np.uint8)).convert("RGB")
                image.save(folder / client / name / f"{number}.png")


def figures(folder: Path) -> str:
    """What all runs came to."""
    (table,) = folder.glob("experiment_*/table.csv")
    return table.read_text()


def test_features_are_made_once_and_an_experiment_that_was_killed_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("runs", "photographs", "*.npz*"))
    draw(folder / "photographs")
    torch.manual_seed(0)
    torch.save(SmallCNN(3, 4).state_dict(), folder / "backbone.pt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedlit.cli"]

    def call(*words: str) -> str:
        done = subprocess.run(
            [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    network = [
        "--extractor",
        "SmallCNN",
        "--extractor_args",
        '{"in_channels": 3, "width": 4}',
        "--weights",
        "backbone.pt",
    ]
    call("features", "--config", "photographs.yaml", *network, "--out", "features.npz")
    with np.load(folder / "features.npz") as found:
        assert {name: len(found[f"{name}_x"]) for name in CLIENTS} == dict.fromkeys(CLIENTS, 30)
        assert found["amazon_x"].shape == (30, 32)
    experiment = ["fit", "--config", "experiment.yaml", *SMALL]
    killed = subprocess.Popen(
        [*command, *experiment, "--jobs=2"], cwd=folder, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while len([*folder.glob("runs/*/*/summary.json")]) < 4 and killed.poll() is None:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert 4 <= len([*folder.glob("runs/*/*/summary.json")]) < 12
    assert "runs are finished already" in call(*experiment)
    assert len([*folder.glob("runs/*/*/summary.json")]) == 12
    goes_on = figures(folder / "runs")
    shutil.rmtree(folder / "runs")
    call(*experiment)
    assert figures(folder / "runs") == goes_on
    assert r"\toprule" in next(iter(folder.glob("runs/experiment_*/table.tex"))).read_text()
    call("report", "runs")
    assert (folder / "report.html").is_file()
