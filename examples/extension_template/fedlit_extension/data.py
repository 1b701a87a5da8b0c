"""Moons: two interleaved half circles, turned by another angle at each client. A data set is one class."""

from __future__ import annotations

import math
from typing import Any

import torch

from fedlit.data import Domain, DomainDataModule

ANGLES = {"upright": 0.0, "tilted": 20.0, "turned": 40.0}


class Moons(DomainDataModule):
    """Two half circles in the plane, 200 points to a domain, turned by 0, 20 and 40 degrees; generated.

    Args:
        noise: Standard deviation of the points around their circle.
        kwargs: See `DomainDataModule`.
    """

    def __init__(self, *, noise: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if noise < 0:
            raise ValueError(f"noise must be at least 0, got {noise}: it is a standard deviation")
        self.noise = noise
        self.check_roster()

    def domain_names(self) -> list[str]:
        """By how much they are turned."""
        return list(ANGLES)

    def class_names(self) -> list[str]:
        """Of the half circles."""
        return ["outer", "inner"]

    def load(self, domain: str) -> Domain:
        """Always the same points: what a data set is does not depend on the seed, which rules splits and order."""
        generator = torch.Generator().manual_seed(list(ANGLES).index(domain))
        labels = torch.arange(200) % 2
        along = math.pi * torch.rand(200, generator=generator)
        outer = torch.stack([along.cos(), along.sin()], dim=1)
        points = torch.where(labels[:, None] == 0, outer, torch.tensor([1.0, 0.5]) - outer)
        points = points + self.noise * torch.randn(200, 2, generator=generator)
        angle = math.radians(ANGLES[domain])
        turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        return Domain(points @ turn, labels)
