"""Images in a federation: each process with its own and nothing else, and a server without any."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from PIL import Image

import processes
from fedlit import FederatedStrategy
from fedlit.data import ImageDomains
from fedlit.methods import FedAvg
from fedlit.models import SmallCNN
from helpers import QUIET, fingerprint, weights

CLIENTS = ("north", "south", "west")


def run(folder: str, ranks: int) -> tuple[dict[str, str], list[str], Any]:
    """On one of the processes: fingerprints of its clients, what it warned of, and the shape of samples."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    here = Path(folder, "together" if ranks == 1 else f"site{rank}")
    L.seed_everything(0)
    root = None if ranks > 1 and rank == 0 else str(here)
    given: dict[str, Any] = {"clients": [*CLIENTS], "classes": ["ill", "well"], "window": (1000.0, 800.0)}
    data = ImageDomains(root, **given, image_size=16, resized_side=16, seed=0)
    module = FedAvg(data.clients, data.target, data.num_classes, SmallCNN(in_channels=3, width=4))
    placement = [[], ["north", "south"], ["west"]] if ranks > 1 else None
    strategy = FederatedStrategy(num_threads=1, placement=placement)
    trainer = L.Trainer(**QUIET, max_epochs=2, devices=ranks, strategy=strategy)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
    shas = {name: fingerprint(weights(module, name)) for name, _ in module.replicas.named_children()}
    return shas, [str(each.message) for each in caught if "bit depths" in str(each.message)], data.input_shape


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for client in CLIENTS:
        for name in ("ill", "well"):
            place = tmp_path / "together" / client / name
            place.mkdir(parents=True)
            for number in range(8):
                values = (900 + 200 * (name == "ill") + 100 * rng.normal(size=(16, 16))).clip(0, 4095)
                values = (values / 16).astype(np.uint8) if client == "west" else values.astype(np.uint16)
                Image.fromarray(values).save(place / f"{number}.png")
        shutil.copytree(tmp_path / "together" / client, tmp_path / f"site{1 + (client == 'west')}" / client)
    return tmp_path


def test_a_server_without_images_changes_nothing_and_other_bit_depths_are_told_everywhere(folder: Path) -> None:
    together = run(str(folder), 1)
    server, *sites = processes.results(run, str(folder), 3, ranks=3)
    assert {name: sha for each in sites for name, sha in each[0].items()} == together[0]
    assert server[0] == {}
    assert all(each[2] == (3, 16, 16) for each in (server, *sites))
    for told in (server[1], *(each[1] for each in sites)):
        assert "16 bits at ['north', 'south']; 8 bits at ['west']" in told[0]
    # each names its own files alone
    assert [".png" in each[1][0] for each in (server, *sites)] == [False, True, True]
    assert "west/ill" in sites[1][1][0]
    assert "west/ill" not in sites[0][1][0]
