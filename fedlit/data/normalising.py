"""How feature vectors are normalised by each client."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedlit.data.raw_inputs import RankNetwork, VectorNetwork

Normalise = Literal["none", "unit", "zscore", "zscore_unit", "ranks"]

_STANDARDISES = "standardises them with mean and deviation of the target's training samples"
HOW = {
    "unit": "scales each sample to length 1",
    "zscore": _STANDARDISES,
    "zscore_unit": f"{_STANDARDISES}, then scales each sample to length 1,",
    "ranks": "ranks them among the target's training samples, takes normal scores of the ranks and scales to length 1",
}


def feature_normaliser(normalise: Normalise, train: Tensor) -> nn.Module:
    """Return the network that normalises samples, with statistics of those in training, ``train``, shape (n, d)."""
    if normalise == "none":
        return nn.Identity()
    if normalise == "ranks":
        return RankNetwork(train)
    nothing = (torch.zeros(train.shape[1]), torch.ones(train.shape[1]))
    mean, deviation = nothing if normalise == "unit" else feature_moments(train)
    return VectorNetwork(mean, deviation, unit=normalise != "zscore")


def feature_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature, 1 of a constant one, which has nothing to scale."""
    # the computed deviation of a constant feature may be a rounding error instead of 0
    constant = x.amin(dim=0) == x.amax(dim=0)
    return x.mean(dim=0), x.std(dim=0, correction=0).masked_fill(constant, 1.0)
