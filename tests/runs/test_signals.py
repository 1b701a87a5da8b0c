"""Signals in a federation: each process with its own recordings and nothing else, as in one process with all."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest

import processes
from fedlit import FederatedStrategy
from fedlit.data import SignalDomains
from fedlit.methods import FedAvg
from fedlit.models import SmallCNN1D
from fedlit.privacy import PairwiseMasking
from helpers import QUIET, fingerprint, weights

CLIENTS = ("ann", "ben", "carl", "eva")


def write(folder: Path, *names: str, unit: float = 1.0) -> None:
    for name in names:
        rng = np.random.default_rng(ord(name[0]))
        label = np.arange(600) // 60 % 2
        table = pd.DataFrame({"x": rng.normal(size=600) * (1 + label), "y": rng.normal(size=600)})
        (folder / name).mkdir(parents=True)
        (table * unit).assign(label=np.array(["still", "walk"])[label]).to_csv(folder / name / "r.csv", index=False)


def run(folder: str, masked: bool, ranks: int, server: bool = False) -> tuple[dict[str, str], list[str], Any]:
    """On one of the processes: fingerprints of its clients, what it warned of, and the shape of samples."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    here = Path(folder) / ("together" if ranks == 1 else f"site{rank}")
    L.seed_everything(0)
    data = SignalDomains(
        None if server and rank == 0 else str(here), clients=[*CLIENTS], classes=["still", "walk"], recorded_rate=20.0,
        window=1.0, stride=0.5, seed=0,
    )  # fmt: skip
    module = FedAvg(data.clients, data.target, data.num_classes, SmallCNN1D(width=4))
    placement = [[], ["ann", "ben", "carl"], ["eva"]] if server else None
    more = {"privacy": PairwiseMasking() if masked else None, "placement": placement}
    trainer = L.Trainer(**QUIET, max_epochs=2, devices=ranks, strategy=FederatedStrategy(num_threads=1, **more))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
    shas = {name: fingerprint(weights(module, name)) for name, _ in module.replicas.named_children()}
    told = [str(each.message) for each in caught if "tenfold" in str(each.message)]
    return shas, told, data.input_shape


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in CLIENTS:
        for place in ("together", f"site{CLIENTS.index(name)}"):
            write(tmp_path / place, name, unit=1000.0 if name == "eva" else 1.0)
    return tmp_path


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_four_processes_with_recordings_each_equal_one_with_all(folder: Path, masked: bool) -> None:
    together = run(str(folder), masked, 1)
    apart = processes.results(run, str(folder), masked, 4, ranks=4)
    assert {name: sha for each in apart for name, sha in each[0].items()} == together[0]
    assert [message for each in apart for message in each[1]] == together[1]
    assert [len(each[1]) for each in apart] == [0, 0, 0, 2]  # both channels of eva, whom the others do not see
    assert all(each[2] == (2, 20) for each in apart)


@pytest.mark.slow
def test_a_server_without_recordings_changes_nothing(folder: Path) -> None:
    together = run(str(folder), False, 1)
    write(folder / "site1", "ann", "carl")
    write(folder / "site2", "eva", unit=1000.0)
    server, *sites = processes.results(run, str(folder), False, 3, True, ranks=3)
    assert {name: sha for each in sites for name, sha in each[0].items()} == together[0]
    assert server[0] == {}
    assert server[2] == (2, 20)


@pytest.mark.slow
def test_masked_sums_learn_the_same(folder: Path) -> None:
    plain, masked = (run(str(folder), choice, 1) for choice in (False, True))
    assert plain[1:] == masked[1:]
