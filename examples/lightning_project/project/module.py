"""A small convolutional network over the series, summed up over the part that is not padding."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Encoder(nn.Module):
    """Mean and deviation of each channel over a series."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 9, padding=4), nn.ReLU(), nn.Conv1d(width, width, 9, padding=4), nn.ReLU()
        )

    def forward(self, series: Tensor, length: Tensor) -> Tensor:
        """Features, shape (batch, 2 width)."""
        there = torch.arange(series.shape[1], device=series.device) < length[:, None]
        hidden = self.layers(series[:, None]) * there[:, None]
        mean = hidden.sum(dim=2) / length[:, None]
        spread = (hidden.square().sum(dim=2) / length[:, None] - mean.square()).clamp(min=1e-6).sqrt()
        return torch.cat([mean, spread], dim=1)


class BreathClassifier(L.LightningModule):
    """Classifies kinds of breathing."""

    def __init__(self, kinds: int = 3, width: int = 24, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder, self.head = Encoder(width), nn.Linear(2 * width, kinds)

    def forward(self, batch: dict) -> Tensor:
        """Logits, shape (batch, kinds)."""
        return self.head(self.encoder(batch["series"], batch["length"]))

    def training_step(self, batch: dict, batch_idx: int) -> Tensor:
        """Cross-entropy."""
        loss = F.cross_entropy(self(batch), batch["label"])
        self.log("train_loss", loss, batch_size=len(batch["label"]))
        return loss

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        """Accuracy."""
        self.log("val_acc", self.accuracy(batch), batch_size=len(batch["label"]))

    def test_step(self, batch: dict, batch_idx: int) -> None:
        """Accuracy."""
        self.log("test_acc", self.accuracy(batch), batch_size=len(batch["label"]))

    def accuracy(self, batch: dict) -> Tensor:
        """Accuracy on a batch."""
        return (self(batch).argmax(dim=1) == batch["label"]).float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
