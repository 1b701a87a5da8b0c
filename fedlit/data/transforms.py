"""Transforms of batches, and whether they draw random numbers: one that may is given a random stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def flatten(x: Tensor) -> Tensor:
    """Flatten each sample of a batch to one vector."""
    return x.flatten(1)


def to_unit(x: Tensor) -> Tensor:
    """Convert bytes to floats in [0, 1]; floats stay as they are."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def may_draw(transform: Callable[[Tensor], Tensor] | None) -> bool:
    """Return whether a transform may draw random numbers: any may, but those named here and with ``draws`` False."""
    return transform not in (None, flatten, to_unit) and getattr(transform, "draws", True)
