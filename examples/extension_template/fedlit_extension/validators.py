"""Confidence: a label-free score of the target, logged after each validation and fit for ``monitor``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedlit import FederatedModule


class Confidence(Callback):
    """Log ``validator/confidence``: how likely the predicted class is, on average over the target's samples.

    Sends: one number of the target, over "metrics".
    """

    def __init__(self) -> None:
        self._likely: list[Tensor] = []

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting afresh."""
        self._likely.clear()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note the target's predictions, where it is hosted; its labels are not read."""
        assert isinstance(pl_module, FederatedModule)
        if pl_module.target.name in outputs:  # a method may have nothing to predict with yet
            probabilities = outputs[pl_module.target.name].detach().softmax(dim=1)
            self._likely.append(probabilities.amax(dim=1))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell all processes, which log the same number: else EarlyStopping would stop some of them only."""
        if trainer.sanity_checking:
            return
        assert isinstance(pl_module, FederatedModule)
        target = pl_module.target.name
        known = {target: {"confidence": float(torch.cat(self._likely).mean())}} if self._likely else {}
        reported = pl_module.federation.report(known, ["confidence"])
        pl_module.run.log({f"validator/{name}": value for name, value in reported.get(target, {}).items()})
