"""Networks that prepare windows of signals: further channels, features, and normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class WindowScaling(nn.Module):
    """Standardises each channel of each window by itself; one that stands still is centred alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Standardise windows of shape (n, C, L)."""
        centred = x - x.mean(dim=-1, keepdim=True)
        deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
        # of the deviation of a constant, what is not 0 is a rounding error; units may be of any size
        rounding = 1e-6 * x.abs().amax(dim=-1, keepdim=True) + torch.finfo(x.dtype).tiny
        return centred / torch.maximum(deviation, rounding)


class SignalNetwork(nn.Module):
    """From windows as they were recorded to what a model takes.

    Args:
        magnitudes: Indices of the channels of each group whose length is a further channel.
        features: Whether features are computed of windows.
        normalise: Network that follows.
    """

    def __init__(self, magnitudes: Sequence[Sequence[int]], features: bool, normalise: nn.Module) -> None:
        super().__init__()
        self.magnitudes = [[*group] for group in magnitudes]
        self.features = features
        self.normalise = normalise

    def prepare(self, x: Tensor) -> Tensor:
        """Return what is normalised, of windows of shape (n, C, L)."""
        from fedlit.functional.signals import window_features, with_magnitudes  # with libraries of others

        if self.magnitudes:
            x = with_magnitudes(x, self.magnitudes)
        return window_features(x) if self.features else x

    def forward(self, x: Tensor) -> Tensor:
        """Return what a model takes, of windows of shape (n, C, L), float32."""
        prepared: Tensor = self.normalise(self.prepare(x))
        return prepared
