"""DomainBed's protocol for photographs: how they are scaled and augmented, and how a domain is split."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import md5
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlit.data.splits import HoldOut, Parts


def stretched(side: int) -> Callable[[Any], Any]:
    """Return the scaling of a Pillow image to a square of ``side`` pixels, whatever its shape."""
    from torchvision.transforms import Resize

    resize: Callable[[Any], Any] = Resize((side, side))
    return resize


def augmented(side: int) -> Callable[[Any], Any]:
    """Return the augmentation of a Pillow image, which draws from torch's global generator.

    A part of 70 to 100 % of the area is scaled to a square of ``side`` pixels, half of the images are mirrored,
    brightness, contrast, saturation and hue change by up to 0.3, and a tenth of the images become grey.
    """
    from torchvision import transforms

    steps: Callable[[Any], Any] = transforms.Compose([
        transforms.RandomResizedCrop(side, scale=(0.7, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
        transforms.RandomGrayscale(),
    ])  # fmt: skip
    return steps


def domainbed_split(trial: int, environment: int) -> HoldOut:
    """Return DomainBed's split of a domain, which is not stratified.

    Args:
        trial: Its ``trial_seed``.
        environment: Index of the domain among all, sorted by name.
    """

    def hold_out(
        y: Tensor, val_fraction: float, test_fraction: float, generator: torch.Generator, blind: bool
    ) -> Parts:
        seed = int(md5(str((trial, environment)).encode(), usedforsecurity=False).hexdigest(), 16) % 2**31
        keys = np.arange(len(y))
        np.random.RandomState(seed).shuffle(keys)  # the generator that DomainBed draws from
        ends = int(len(y) * test_fraction), int(len(y) * test_fraction) + int(len(y) * val_fraction)
        test, val, train = (torch.from_numpy(np.sort(part)) for part in np.split(keys, ends))
        return train, val, test

    return hold_out
