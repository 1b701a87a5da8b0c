"""The project's own networks and module; nothing here imports fedlit."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from plant_monitor.signals import CONDITIONS, LENGTH

BANDS = 32


class Spectrum(nn.Module):
    """Features of a record, from the power in bands of frequencies.

    Args:
        width: Number of features.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.out_features = width  # methods of fedlit that add a layer of their own ask for it
        self.layers = nn.Sequential(nn.Linear(BANDS, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, signals: Tensor) -> Tensor:
        """Features (batch, width) of records (batch, LENGTH)."""
        power = torch.fft.rfft(signals).abs().square()[:, 1:]
        features: Tensor = self.layers(torch.log1p(power.reshape(-1, BANDS, LENGTH // 2 // BANDS).mean(dim=2)))
        return features


class FaultDetector(L.LightningModule):
    """Learns the conditions of inspected machines.

    Args:
        lr: Learning rate.
    """

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.spectrum = Spectrum()
        self.classifier = nn.Linear(16, len(CONDITIONS))
        self.accuracy = MulticlassAccuracy(len(CONDITIONS), average="micro")

    def forward(self, signals: Tensor) -> Tensor:
        """Logits of the conditions."""
        logits: Tensor = self.classifier(self.spectrum(signals))
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch of inspected machines."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Accuracy on the tested plant."""
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), self.lr)
