"""The head of methods that solve for it: linear in features at unit length, in random features, or in squares too."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.functional import random_fourier_features


class ClosedFormHead(nn.Module):
    """A classifier whose layer is solved for: ``linear(features(x))``, or with squares ``linear([features, squares])``.

    Args:
        in_features: Width of the extractor's features; without frequencies, ``None`` takes that of the first ones.
        num_classes: Logits for each input.
        frequencies: Matrix Omega, shape (N, in_features), whose random Fourier features take the place of the
            extractor's; ``None`` takes these themselves. It is in the state.
        squares: Whether squares of the features follow them.
        unit_norm: Scale the extractor's features to length 1 first.
    """

    frequencies: Tensor | None

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        frequencies: Tensor | None = None,
        squares: bool = False,
        unit_norm: bool = True,
    ) -> None:
        super().__init__()
        width = in_features if frequencies is None else 2 * len(frequencies)
        self.squares, self.unit_norm = squares, unit_norm
        self.linear = nn.LazyLinear(num_classes) if width is None else nn.Linear((1 + squares) * width, num_classes)
        self.register_buffer("frequencies", None if frequencies is None else frequencies.to(self.linear.weight))

    def features(self, x: Tensor) -> Tensor:
        """What moments are taken of, shape (batch, width), of the extractor's features (batch, in_features)."""
        z = F.normalize(x, dim=1) if self.unit_norm else x
        return z if self.frequencies is None else random_fourier_features(z, self.frequencies)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, num_classes) of the extractor's features (batch, in_features)."""
        features = self.features(x)
        return cast(Tensor, self.linear(torch.cat([features, features.square()], dim=1) if self.squares else features))
