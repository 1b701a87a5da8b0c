"""Three clients with shifted data in float64, on which adversarial methods are compared with training by hand."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.utils.data import TensorDataset

from fedlit import FederatedModule
from helpers import loader, shards, trainer

LR = 0.3
NAMES = ["c0", "c1", "c2"]


class Extractor(nn.Sequential):
    """Of 5 numbers to 4 features, in float64."""

    out_features = 4

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.Tanh())
        self.double()


class Untouched(nn.Identity):
    """Features are the samples."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features


def shifted(sizes: tuple[int, ...] = (20, 17, 14)) -> dict[str, TensorDataset]:
    """Clients around different centres, in float64."""
    data = {}
    for index, (name, size) in enumerate(zip(NAMES, sizes, strict=True)):
        x, y = shards(3, size)[name].tensors
        data[name] = TensorDataset(x.double() + 0.5 * index, y)
    return data


class Start(pl.Callback):
    """The replicas at the start."""

    def on_train_start(self, trainer: pl.Trainer, module: FederatedModule) -> None:  # type: ignore[override]
        self.replicas = {name: copy.deepcopy(replica) for name, replica in module.replicas.named_children()}


def fit(
    module: Any, data: dict[str, TensorDataset], batch_size: int = 64, rounds: int = 1, **kwargs: Any
) -> dict[str, Any]:
    """Train; returns the replicas at the start. By default a batch has all samples of a client."""
    start = Start()
    trainer(rounds, [start], **kwargs).fit(module, loader(data, batch_size))
    return start.replicas
