"""One loss of fedlit inside the project's own module: records of the tested plant are drawn to those of the others.

All records are in one place here; `plant_monitor.federated` is for when they are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.functional import mmd_squared
from plant_monitor.detector import FaultDetector


class AdaptedFaultDetector(FaultDetector):
    """Learns conditions from features that are distributed alike in the inspected plants and in another one.

    Args:
        uninspected: Records of the other plant, without labels, shape (n, LENGTH).
        weight: Of the distance between the two distributions in the loss.
        lr: Learning rate.
    """

    def __init__(self, uninspected: Tensor, weight: float = 1.0, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.register_buffer("uninspected", uninspected, persistent=False)
        self.weight = weight

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy, and the maximum mean discrepancy to as many records of the other plant."""
        features = self.spectrum(batch[0])
        others = self.spectrum(self.uninspected[torch.randperm(len(self.uninspected))[: len(features)]])
        bandwidth = torch.cdist(features.detach(), features.detach()).median().clamp(min=1e-3)
        distance = mmd_squared(features, others, float(bandwidth))
        loss = F.cross_entropy(self.classifier(features), batch[1]) + self.weight * distance
        self.log_dict({"loss": loss, "mmd_squared": distance}, on_step=False, on_epoch=True)
        return loss
