"""What the tests share: Trainers without decoration, and the detector that nothing was adapted for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from plant_monitor.data import PlantData
from plant_monitor.detector import FaultDetector


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    # seed_everything leaves its seed in the environment, from where the next test would read it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_trainer() -> L.Trainer:
    """An ordinary Trainer."""
    return L.Trainer(
        max_epochs=25,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.fixture
def trainer() -> L.Trainer:
    return make_trainer()


@pytest.fixture(scope="session")
def data() -> PlantData:
    return PlantData()


@pytest.fixture(scope="session")
def accuracy(data: PlantData) -> Callable[[nn.Module], float]:
    """Share of Turin's test machines that a network tells right."""

    @torch.no_grad()
    def measure(network: nn.Module) -> float:
        signals, conditions = data.test.tensors
        return float((network.eval()(signals).argmax(dim=1) == conditions).float().mean())

    return measure


@pytest.fixture(scope="session")
def source_only(data: PlantData, accuracy: Callable[[nn.Module], float]) -> dict[str, Any]:
    """The project's own detector, trained on the inspected plants alone."""
    torch.manual_seed(0)
    detector, run = FaultDetector(), make_trainer()
    losses: list[float] = []
    run.callbacks.append(_Losses(losses))
    run.fit(detector, data)
    (tested,) = run.test(detector, data, verbose=False)
    return {"detector": detector, "losses": losses, "accuracy": accuracy(detector), "tested": tested["accuracy"]}


class _Losses(L.Callback):
    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
