"""DataLoaders and data modules as somebody's project has them, and what a `FederatedLoader` makes of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedlit.federation import FederatedLoader, Pace, RoundPlan


class Rows(Dataset[Any]):
    """Samples of any form that know their row."""

    def __init__(self, size: int, form: Callable[[int], Any]) -> None:
        self.size, self.form = size, form

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.form(index)


class Named(NamedTuple):
    x: Tensor
    label: Tensor


@dataclass
class Record:
    x: Tensor
    age: Tensor
    label: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    label: Tensor


def dictionary(index: int) -> dict[str, Any]:
    return {"id": f"row {index}", "x": torch.tensor([float(index)]), "label": index % 3}


def pairs(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size)[:, None].float(), torch.arange(size) % 3)


def gathered(kind: type[Any]) -> Callable[[list[Any]], Any]:
    """A collate_fn of dictionaries that makes a batch of another type."""

    def collate(samples: list[Any]) -> Any:
        x, label = torch.stack([each["x"] for each in samples]), torch.tensor([each["label"] for each in samples])
        return kind(x, x + 30, label) if kind is Record else kind(x, label)

    return collate


def planned(loader: FederatedLoader, position: tuple[int, int] = (0, 0), **pace: Any) -> FederatedLoader:
    names = list(loader.datasets)
    loader.plan(RoundPlan(loader.sizes(), lambda _: names, lambda: position, [Pace(**pace)]))
    return loader


def one(loader: DataLoader[Any], round_idx: int = 0, **given: Any) -> list[Any]:
    """Batches of a client ``a`` in a round."""
    made = FederatedLoader.from_loaders({"a": loader}, **({"seed": 0} | given))
    return [step["a"] for step in planned(made, (round_idx, 0))]


def rows(batches: list[Any]) -> list[list[int]]:
    return [[int(value) for value in batch[0][:, 0]] for batch in batches]


def counted(batches: list[Any]) -> Counter[int]:
    return Counter(row for batch in rows(batches) for row in batch)


class Ward(pl.LightningDataModule):
    """Writes down what it is asked for, and splits its samples at random when it is set up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def prepare_data(self) -> None:
        self.asked.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.asked.append(f"setup {stage}")
        self.train, self.val = torch.utils.data.random_split(pairs(20), [14, 6])

    def train_dataloader(self) -> DataLoader[Any]:
        self.asked.append("train")
        return DataLoader(self.train, 4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        self.asked.append("val")
        return DataLoader(self.val, 4)

    def test_dataloader(self) -> DataLoader[Any]:
        self.asked.append("test")
        return DataLoader(pairs(3), 4)

    def predict_dataloader(self) -> list[Any]:
        return [self.test_dataloader(), self.test_dataloader()]
