"""A project without fedlit: cells in made pictures of microscopes, and a LightningModule that finds them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassF1Score, MulticlassJaccardIndex

KINDS = 3  # of pixels: background, round cells, long cells
SIZE = 32  # pixels a side

# gain, offset and noise of each microscope; the last one is dim, in front of a bright background
MICROSCOPES = {"oslo": (1.0, 0.0, 0.1), "lyon": (0.7, 0.3, 0.15), "porto": (1.3, -0.2, 0.1), "turin": (0.4, 0.8, 0.05)}


def pictures(site: str, number: int, seed: int = 0) -> TensorDataset:
    """Pictures of shape (number, 1, SIZE, SIZE), and the kind of each pixel, (number, SIZE, SIZE)."""
    generator = torch.Generator().manual_seed(1000 * [*MICROSCOPES].index(site) + seed)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    kinds = torch.zeros(number, SIZE, SIZE, dtype=torch.int64)
    for picture in kinds:
        for cell in range(4):
            row, column = (float(each) for each in SIZE * torch.rand(2, generator=generator))
            is_long = cell % 2
            height, width = (2, 7) if is_long else (4, 4)
            inside = ((rows - row) / height) ** 2 + ((columns - column) / width) ** 2 < 1
            picture[inside] = 1 + is_long
    gain, offset, noise = MICROSCOPES[site]
    light = 0.2 + 0.5 * (kinds > 0)
    x = gain * light + offset + noise * torch.randn(kinds.shape, generator=generator)
    return TensorDataset(x[:, None], kinds)


class CellFinder(L.LightningModule):
    """A small U-Net, trained by cross-entropy and a soft Dice loss, and validated by IoU and Dice."""

    def __init__(self, width: int = 8, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.down = _block(1, width)
        self.bottleneck = _block(width, 2 * width)
        self.up = _block(3 * width, width)
        self.head = nn.Conv2d(width, KINDS, 1)
        self.iou = MulticlassJaccardIndex(KINDS)
        self.dice = MulticlassF1Score(KINDS)  # which is Dice, over pixels

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each pixel, shape (batch, KINDS, SIZE, SIZE)."""
        fine = self.down(x)
        coarse = F.interpolate(self.bottleneck(F.max_pool2d(fine, 2)), scale_factor=2)
        logits: Tensor = self.head(self.up(torch.cat([fine, coarse], dim=1)))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy and Dice loss."""
        x, kinds = batch
        logits = self(x)
        p, truth = logits.softmax(dim=1), F.one_hot(kinds, KINDS).movedim(-1, 1)
        overlap = (2 * (p * truth).sum(dim=(0, 2, 3)) + 1) / ((p + truth).sum(dim=(0, 2, 3)) + 1)
        dice_loss = 1 - overlap.mean()
        self.log("dice_loss", dice_loss)
        return F.cross_entropy(logits, kinds) + dice_loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count pixels."""
        x, kinds = batch
        found = self(x).argmax(dim=1)
        self.iou(found, kinds)
        self.dice(found, kinds)
        self.log_dict({"iou": self.iou, "dice": self.dice})

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


def _block(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
