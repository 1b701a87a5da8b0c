"""What several callbacks need: the module they watch, and numbers and tables in words."""

from __future__ import annotations

import types
from dataclasses import is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fedlit.federation import KEYS
from fedlit.federation.nested import Inputs
from fedlit.functional import random_fourier_features, sample_frequencies
from fedlit.module import FederatedModule

LOGGING_CHANNELS = ("metrics", "oracle")
"""Channels of numbers that are watched, which are reported in the clear."""

SOURCE_MOMENTS = "source_moments"
"""Channel of what `Validators` average over the sources, through its privacy backend."""

CLASS_MEANS = "class_means"
"""Channel of the means of inputs by class that `Validators` average over the sources, through its privacy backend."""

CALIBRATION = "calibration"
"""Channel of what `Calibration` averages over the sources, through its privacy backend."""


_T = TypeVar("_T")


def check_fields(record: _T) -> _T:
    """A dataclass that was read from a file; raises a `TypeError` if a field has another type than is declared."""
    for name, kind in get_type_hints(type(record)).items():
        if not _fits(getattr(record, name), kind):
            raise TypeError(f"{name} cannot be {str(getattr(record, name))[:100]!r}")
    return record


def _fits(value: object, kind: Any) -> bool:
    of, parts = get_origin(kind), get_args(kind)
    if of in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if of is dict:
        return isinstance(value, dict) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if of in (list, tuple):
        return isinstance(value, of) and all(_fits(each, parts[0]) for each in value)
    if isinstance(value, bool):  # which is no number
        return kind is bool
    if isinstance(value, int):  # bounded, as larger ones are no floats
        return kind in (int, float) and abs(value) < 2**63
    if is_dataclass(value):
        check_fields(value)
    return isinstance(value, kind)


def watched(channel: str) -> bool:
    """Whether a channel carries what is watched alone: the method would train the same without it."""
    return channel in LOGGING_CHANNELS or channel.removesuffix(KEYS) in (SOURCE_MOMENTS, CLASS_MEANS, CALIBRATION)


def federated(module: LightningModule, callback: object) -> FederatedModule:
    """``module``, which must be a `FederatedModule` for ``callback`` to watch it; raises a `TypeError` otherwise."""
    if not isinstance(module, FederatedModule):
        raise TypeError(
            f"{type(callback).__name__} watches a FederatedModule, got {type(module).__name__}: train a method of "
            "fedlit.methods, or remove the callback"
        )
    return module


def class_names(trainer: Trainer, module: FederatedModule) -> list[str]:
    """Names of classes, or of numbers to predict: those of the data module's ``classes``, or else they count from 0."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    names = getattr(data, "classes", None)
    if names is None:
        return [str(index) for index in range(module.num_classes)]
    if len(names) != module.num_classes:
        raise ValueError(
            f"classes of {type(data).__name__} must name the {module.num_classes} outputs of {type(module).__name__} "
            f"(num_classes), got {len(names)} names: give the module num_classes=data.num_classes"
        )
    return [str(name) for name in names]


class RandomBasis:
    """Random features of what a client's network extracts, scaled to length 1; the same for everyone.

    Args:
        num_frequencies: N, at least 1; there are 2 N features.
        bandwidth: Of their Gaussian kernel, positive, in units of features scaled to length 1.

    Attributes:
        size: 2 N.
    """

    def __init__(self, num_frequencies: int = 32, bandwidth: float = 0.5) -> None:
        self.num_frequencies, self.bandwidth = num_frequencies, bandwidth
        self.size = 2 * num_frequencies
        self.forget_()

    def forget_(self) -> None:
        """Let the next module draw frequencies of its own, for its width and seed."""
        self._frequencies: Tensor | None = None

    def of(self, module: FederatedModule, name: str, inputs: Inputs) -> Tensor:
        """Of a batch of a local client's inputs, shape (n, 2 N), float64."""
        extracted: Tensor = module.replicas[name].get_submodule("extractor")(inputs)
        unit = F.normalize(extracted.detach().flatten(1).double(), dim=1)
        if self._frequencies is None:
            drawn = (self.num_frequencies, unit.shape[1], self.bandwidth)
            self._frequencies = sample_frequencies(*drawn, seed=module.federation.seed)
        return random_fourier_features(unit, self._frequencies)


def triangle(size: int) -> tuple[Tensor, ...]:
    """Where the upper triangle of a matrix of so many rows and columns is."""
    return tuple(torch.triu_indices(size, size))


def unfold(numbers: Tensor, size: int) -> Tensor:
    """The symmetric matrix, float64, of which these numbers are the upper triangle."""
    full = torch.zeros(size, size, dtype=torch.float64)
    full[triangle(size)] = numbers.double()
    return full + full.T - full.diagonal().diag()


def megabytes(num_bytes: float) -> str:
    """Bytes in MB (10^6), to three digits, or to the byte where that would be nothing: ``"3.21"``, ``"0.000042"``."""
    amount = num_bytes / 1e6
    if amount >= 100:
        return f"{amount:,.0f}"
    if amount >= 0.001:
        return f"{amount:#.3g}"
    return f"{amount:.6f}" if num_bytes else "0"
