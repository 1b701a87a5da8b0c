"""The project's own data module: labelled records of some plants to train on, records of one to test on."""

from __future__ import annotations

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from plant_monitor.signals import record

Batches = DataLoader[tuple[torch.Tensor, ...]]


class PlantData(L.LightningDataModule):
    """Records of the plants that have inspected their machines, and of the one that wants to know.

    Args:
        labelled: Plants to train on.
        tested: Plant to test on; its training records carry no labels.
        machines: Records of each plant, for training and for testing.
        batch_size: Records in a batch.
        seed: Of the records.
    """

    def __init__(
        self,
        labelled: tuple[str, ...] = ("gdansk", "oslo", "lyon"),
        tested: str = "turin",
        machines: int = 200,
        batch_size: int = 40,
        seed: int = 0,
    ) -> None:
        super().__init__()
        records = [record(plant, machines, 10 * seed + place) for place, plant in enumerate(labelled)]
        self.inspected = TensorDataset(*(torch.cat(parts) for parts in zip(*records, strict=True)))
        self.uninspected = record(tested, machines, 10 * seed + 8)[0]
        self.test = TensorDataset(*record(tested, machines, 10 * seed + 9))
        self.batch_size = batch_size

    def train_dataloader(self) -> Batches:
        """Inspected machines."""
        return DataLoader(self.inspected, self.batch_size, shuffle=True)

    def test_dataloader(self) -> Batches:
        """Machines of the tested plant."""
        return DataLoader(self.test, self.batch_size)
