"""Two numbers of unlike units to predict at three plants."""

from __future__ import annotations

import torch

from fedlit.data import Domain, DomainDataModule

NAMES = ["wear", "heat"]
PLANTS = ["essen", "lyon", "turin"]


class Measured(DomainDataModule):
    """Somebody's data in Python, with labels of shape (n, 2) and names for them."""

    task = "regression"

    def domain_names(self) -> list[str]:
        return [*PLANTS]

    def class_names(self) -> list[str]:
        return [*NAMES]

    def load(self, domain: str) -> Domain:
        generator = torch.Generator().manual_seed(PLANTS.index(domain))
        x = torch.randn(60, 3, generator=generator)
        y = x[:, :2].double() * torch.tensor([1e3, 0.01]) + torch.tensor([1e6, 0.0])
        return Domain(x, y)
