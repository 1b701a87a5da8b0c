"""Averages of model updates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _normalise(weights: Sequence[float] | Tensor | None, number: int) -> list[float]:
    if weights is None:
        return [1.0 / number] * number
    if isinstance(weights, Tensor) and weights.dim() != 1:
        raise ValueError(f"weights must have one dimension, got shape {tuple(weights.shape)}: give one per update")
    values = [float(weight) for weight in weights]
    if len(values) != number:
        raise ValueError(f"weights must hold one number per update, got {len(values)} for {number} updates")
    for idx, value in enumerate(values):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"weights must be finite and not negative, got {value} for update {idx} of {number}")
    total = math.fsum(values)
    if total == 0:
        raise ValueError(f"weights must have a positive sum, got {values}: give at least one update a weight")
    return [value / total for value in values]


def _check_alike(updates: Sequence[dict[str, Tensor]]) -> None:
    first = updates[0]
    for idx, update in enumerate(updates):
        missing, extra = sorted(first.keys() - update.keys()), sorted(update.keys() - first.keys())
        if missing or extra:
            raise ValueError(
                f"updates must have the same keys: update {idx} lacks {missing} and adds {extra} "
                "compared with update 0; average only what all clients hold"
            )
        for name, tensor in first.items():
            if update[name].shape != tensor.shape:
                raise ValueError(
                    f"updates must have the same shapes: {name!r} is {tuple(tensor.shape)} in update 0 "
                    f"and {tuple(update[name].shape)} in update {idx}; build all clients from the same network"
                )


def fedavg(updates: Sequence[dict[str, Tensor]], weights: Sequence[float] | Tensor | None = None) -> dict[str, Tensor]:
    r"""Weighted mean of model updates, name by name.

    .. math:: \bar{u} = \sum_i \frac{w_i}{\sum_j w_j} u_i

    Updates are added one after the other in the order given, so that the same updates in the same order give the same
    bits. Integer tensors (such as BatchNorm's ``num_batches_tracked``) are averaged in float64 and rounded half to
    even.

    Args:
        updates: One dictionary per client, with the same names and shapes. At least one.
        weights: One finite number per update, none negative, in any unit (such as numbers of samples): they are
            divided by their sum. ``None`` weighs all updates alike.

    Returns:
        A dictionary of new tensors, with the names, shapes, dtypes and devices of the first update.

    Raises:
        ValueError: If there are no updates, their names or shapes differ, or the weights are not one per update,
            finite, not negative and of positive sum.

    References:
        McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017,
        Algorithm 1.
    """
    if not updates:
        raise ValueError("updates must hold at least 1 update, got none: skip the average when no client is present")
    shares = _normalise(weights, len(updates))
    _check_alike(updates)
    mean: dict[str, Tensor] = {}
    for name, first in updates[0].items():
        exact = first.is_floating_point() or first.is_complex()
        # half precision would lose a small client's share in the running sum
        dtype = torch.promote_types(first.dtype, torch.float32) if exact else torch.float64
        total = shares[0] * first.to(dtype)
        for share, update in zip(shares[1:], updates[1:], strict=True):
            total = total + share * update[name].to(device=first.device, dtype=dtype)
        mean[name] = (total if exact else total.round()).to(first.dtype)
    return mean
