"""Nights of one clinic: series of different lengths, padded to the longest of a batch."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, random_split

KINDS = ("quiet", "fast", "with pauses")
CLINICS = {"oslo": (0, 1.0, 0.3), "lyon": (1, 1.2, 0.4), "turin": (2, 0.8, 0.5)}
"""Seed of a clinic's patients, and gain and noise of its belt."""


class Nights(Dataset):
    """Patients of a clinic: a series of movements of the chest at 4 Hz, of 30 to 60 seconds, and how they breathe."""

    def __init__(self, clinic: str, patients: int) -> None:
        seed, gain, noise = CLINICS[clinic]
        generator = torch.Generator().manual_seed(seed)
        self.names = [f"{clinic}-{number}" for number in range(patients)]
        self.kinds = torch.multinomial(torch.tensor([0.6, 0.25, 0.15]), patients, True, generator=generator)
        self.series = []
        for kind in self.kinds.tolist():
            seconds = torch.arange(int(torch.randint(120, 241, (), generator=generator))) / 4
            speed, phase = torch.rand(2, generator=generator)
            chest = torch.sin(2 * torch.pi * ((0.5 if kind == 1 else 0.2) + 0.1 * speed) * seconds + 6 * phase)
            if kind == 2:
                chest = chest * (torch.sin(0.4 * seconds + 6 * speed) > -0.2)
            self.series.append(gain * chest + noise * torch.randn(len(seconds), generator=generator))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"patient": self.names[index], "series": self.series[index], "label": self.kinds[index]}


def collate(nights: list[dict]) -> dict[str, object]:
    """Pad series with zeros to the longest."""
    return {
        "patient": [night["patient"] for night in nights],
        "series": pad_sequence([night["series"] for night in nights], batch_first=True),
        "length": torch.tensor([len(night["series"]) for night in nights]),
        "label": torch.stack([night["label"] for night in nights]),
    }


class BreathData(L.LightningDataModule):
    """Nights of a clinic; if balanced, rare kinds are drawn as often as frequent ones in training."""

    def __init__(self, clinic: str, balanced: bool = True, patients: int = 300, batch_size: int = 32) -> None:
        super().__init__()
        self.clinic, self.balanced, self.patients, self.batch_size = clinic, balanced, patients, batch_size

    def setup(self, stage: str) -> None:
        """Split into patients for training, validation and test."""
        parts = random_split(Nights(self.clinic, self.patients), [0.7, 0.1, 0.2], torch.Generator().manual_seed(0))
        self.train, self.val, self.test = parts

    def train_dataloader(self) -> DataLoader:
        """In random order."""
        if not self.balanced:
            return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=collate)
        kinds = torch.stack([night["label"] for night in self.train])
        weights: Tensor = 1 / kinds.bincount(minlength=len(KINDS))[kinds]
        sampler = WeightedRandomSampler(weights.tolist(), len(kinds))
        return DataLoader(self.train, self.batch_size, sampler=sampler, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        """In order."""
        return DataLoader(self.val, self.batch_size, collate_fn=collate)

    def test_dataloader(self) -> DataLoader:
        """In order."""
        return DataLoader(self.test, self.batch_size, collate_fn=collate)
