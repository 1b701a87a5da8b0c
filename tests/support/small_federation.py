"""A federation of four clients that trains in a blink, for the tests of callbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import TensorDataset

import helpers
from fedlit import FederatedModule
from fedlit.callbacks import (
    Calibration,
    CommunicationLedger,
    OracleAccuracy,
    RoundTimer,
    TargetPredictions,
    Validators,
    summarise,
)
from fedlit.data import FederatedLoader
from fedlit.methods import FedAvg
from fedlit.models import MLP

CLIENTS = ["amazon", "dslr", "caltech", "webcam"]
TARGET = "webcam"
NUM_CLASSES = 4


class Blobs(pl.LightningDataModule):
    """Shifted blobs of 4 classes; 30 samples per client, and others to evaluate on.

    Args:
        unknown: Evaluation samples of the target without a label.
    """

    def __init__(self, unknown: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        centres = 2 * torch.randn(NUM_CLASSES, 5, generator=generator)
        self.parts: dict[str, dict[str, TensorDataset]] = {}
        for part in ("train", "val", "test"):
            self.parts[part] = {}
            for shift, name in enumerate(CLIENTS):
                y = torch.randint(NUM_CLASSES, (30,), generator=generator)
                x = centres[y] + 0.3 * shift + torch.randn(30, 5, generator=generator)
                self.parts[part][name] = TensorDataset(x, y)
            self.parts[part][TARGET].tensors[1][:unknown] = -1

    def loader(self, part: str) -> FederatedLoader:
        """Of the clients hosted by this process."""
        assert self.trainer is not None
        module = self.trainer.lightning_module
        assert isinstance(module, FederatedModule)
        mine = {client.name: self.parts[part][client.name] for client in module.federation.local_clients}
        return FederatedLoader(mine, batch_size=8, training=part == "train", guarded=TARGET, seed=0)

    def train_dataloader(self) -> FederatedLoader:
        return self.loader("train")

    def val_dataloader(self) -> FederatedLoader:
        return self.loader("val")

    def test_dataloader(self) -> FederatedLoader:
        return self.loader("test")

    def predict_dataloader(self) -> FederatedLoader:
        """Of the target alone; a process without it goes through one empty batch."""
        mine = {TARGET: self.parts["test"][TARGET]}
        return FederatedLoader(mine, batch_size=8, training=False, guarded=TARGET, least_batches=1)


def build(method: type[FederatedModule] = FedAvg, **kwargs: Any) -> FederatedModule:
    """A method on a tiny network, always from the same weights."""
    torch.manual_seed(0)
    return method(CLIENTS, TARGET, NUM_CLASSES, MLP(5, [8]), **kwargs)


def trainer(
    rounds: int, callbacks: list[pl.Callback], folder: Path, federated: bool = True, **kwargs: Any
) -> pl.Trainer:
    """A Trainer with nothing but the given callbacks; the strategy's arguments are given as ``strategy={...}``."""
    return helpers.trainer(rounds, callbacks, federated, **({"default_root_dir": str(folder)} | kwargs))


class EveryMetric(pl.Callback):
    """Remembers the metrics as they were after each epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def watched(folder: Path, processes: int) -> dict[str, Any]:
    """What this process sees of a run over so many processes, whose callbacks write into ``folder``."""
    seen = EveryMetric()
    watching: list[pl.Callback] = [
        Calibration(),
        OracleAccuracy(per_class=True),
        Validators(),
        CommunicationLedger(),
        RoundTimer(),
        TargetPredictions(),
        seen,
    ]
    run, method = trainer(3, watching, folder, devices=processes), build()
    run.fit(method, Blobs())
    run.test(method, Blobs(), verbose=False)
    seen.rows.append({name: float(value) for name, value in run.callback_metrics.items()})
    summary = json.loads(summarise(run, method, 1.0).to_json())
    run.predict(method, Blobs())
    return {"rows": seen.rows, "summary": summary}
