"""Three clients with shifted data in float64, on which adversarial methods are compared with training by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import helpers

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
    return helpers.unequal(*sizes, dtype=torch.float64)


def fit(module: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Train; returns the replicas at the start. By default a batch has all samples of a client."""
    return helpers.fit(module, *args, **kwargs).start
