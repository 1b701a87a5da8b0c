"""Aggregation of model updates: means, and a target's update mixed with sources' updates or projected on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from fedlit.checks import check, refuse
from fedlit.functional.updates import (
    Granularity,
    UpdateProducts,
    check_alike,
    check_granularity,
    layer_names,
    products_of_layers,
    projection_coefficients,
)


def _normalise(weights: Sequence[float] | Tensor | None, number: int) -> list[float]:
    """Weights over their sum."""
    if weights is None:
        return [1.0 / number] * number
    values = _per_update("weights", weights, number)
    total = math.fsum(values)
    check(total > 0, "weights", "of a positive sum", values, "give at least one update a weight")
    return [value / total for value in values]


def _per_update(argument: str, values: Iterable[float] | Tensor, number: int, highest: float = math.inf) -> list[float]:
    """One finite number from 0 to ``highest`` per update."""
    if isinstance(values, Tensor):
        check(values.dim() == 1, argument, "of one dimension", tuple(values.shape), "give one number per update")
    listed = [float(value) for value in values]
    check(len(listed) == number, argument, f"one number for each of {number} updates", listed)
    for idx, value in enumerate(listed):
        if not (math.isfinite(value) and 0 <= value <= highest):
            upper = "finite and not negative" if highest == math.inf else f"between 0 and {highest:g}"
            refuse(argument, upper, value, f"it is that of update {idx} of {number}")
    return listed


def _weighted_sum(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Sum from left to right, in float32 at least: half precision would lose a small client's share."""
    first = tensors[0]
    exact = first.is_floating_point() or first.is_complex()
    dtype = torch.promote_types(first.dtype, torch.float32) if exact else torch.float64
    total = first.to(dtype) * shares[0]
    for share, tensor in zip(shares[1:], tensors[1:], strict=True):
        total.add_(tensor.to(device=first.device, dtype=dtype), alpha=share)
    return total


def fedavg(updates: Sequence[dict[str, Tensor]], weights: Sequence[float] | Tensor | None = None) -> dict[str, Tensor]:
    r"""Weighted mean of model updates, name by name, as new tensors with the dtypes and devices of the first update.

    .. math:: \bar{u} = \sum_i \frac{w_i}{\sum_j w_j} u_i

    Updates are added one after the other, so that the same updates in the same order give the same bits. Integer
    tensors (such as BatchNorm's ``num_batches_tracked``) are averaged in float64 and rounded half to even.

    Args:
        updates: One dictionary per client, with the same names and shapes. At least one.
        weights: One finite number per update, none negative, in any unit (such as numbers of samples): they are
            divided by their sum. ``None`` weighs all updates alike.

    Example:
        >>> updates = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([4.0, 3.0])}]
        >>> fedavg(updates, weights=[2, 1])
        {'w': tensor([2., 1.])}

    References:
        McMahan et al., AISTATS 2017, Algorithm 1.
    """
    check(len(updates) > 0, "updates", "at least 1 update", updates, "skip the average when no client is present")
    if not updates:
        raise ValueError("updates must hold at least 1 update, got none: skip the average when no client is present")
    shares = _normalise(weights, len(updates))
    check_alike(updates)
    mean: dict[str, Tensor] = {}
    for name, first in updates[0].items():
        total = _weighted_sum([update[name] for update in updates], shares)
        mean[name] = (total if first.is_floating_point() or first.is_complex() else total.round()).to(first.dtype)
    return mean


def _per_source(argument: str, values: float | Sequence[float] | Tensor, number: int, highest: float) -> list[float]:
    """One number from 0 to ``highest`` per source, where one alone stands for all."""
    if isinstance(values, Tensor) and values.dim() == 0:
        values = float(values)
    return _per_update(argument, values if isinstance(values, Iterable) else [values] * number, number, highest)


def _shares(
    target: dict[str, Tensor],
    sources: Sequence[dict[str, Tensor]],
    beta: float | Sequence[float] | Tensor,
    weights: Sequence[float] | Tensor | None,
) -> tuple[float, list[float]]:
    """Check the arguments; the target's share, sum_i w_i (1 - beta_i), and each source's, w_i beta_i."""
    check(len(sources) > 0, "sources", "at least 1 update", sources, "without a source keep the target's update")
    betas = _per_source("beta", beta, len(sources), highest=1)
    parts = [Fraction(share) for share in _normalise(weights, len(sources))]
    whole = sum(parts)
    check_alike([target, *sources], ["the target", *(f"source {idx}" for idx in range(len(sources)))])
    # rounded once: equal betas leave the target exactly 1 - beta, whatever the weights
    exact = [part * Fraction(value) / whole for part, value in zip(parts, betas, strict=True)]
    return float(1 - sum(exact)), [float(share) for share in exact]


def _combine(
    target: dict[str, Tensor],
    sources: Sequence[dict[str, Tensor]],
    target_share: float,
    shares: Sequence[float],
    coefficients: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sum of shares, where each source's layers are scaled by its row of ``coefficients``, shape (N, L) or (N, 1)."""
    scaled = torch.tensor(shares, dtype=torch.float64)[:, None]
    if coefficients is not None:
        scaled = scaled * coefficients.cpu()
    layers = layer_names(target)
    factors = dict(zip(layers, scaled.expand(-1, len(layers)).T.tolist(), strict=True))
    result: dict[str, Tensor] = {}
    for name, entry in target.items():
        if entry.is_floating_point() or entry.is_complex():
            own = [target_share, *factors.get(name, shares)]
            result[name] = _weighted_sum([entry, *(source[name] for source in sources)], own).to(entry.dtype)
        else:
            result[name] = entry.clone()
    return result


def fedda(
    target: dict[str, Tensor],
    sources: Sequence[dict[str, Tensor]],
    beta: float | Sequence[float] | Tensor,
    weights: Sequence[float] | Tensor | None = None,
) -> dict[str, Tensor]:
    r"""FedDA: weighted mean of convex combinations of the target's update with each source's, as new tensors.

    .. math:: \sum_i w_i \left[ (1 - \beta_i) g_T + \beta_i g_{S_i} \right]

    Integer entries (such as BatchNorm's ``num_batches_tracked``) keep the target's value: they are counters.

    Args:
        target: The target's update (g_T).
        sources: One update per source (g_S), with the target's names and shapes. At least one.
        beta: Weight of the source, from 0 (target alone) to 1 (sources alone): one number, or one per source.
        weights: One finite number per source, none negative, in any unit; they are divided by their sum. ``None``
            weighs all sources alike, as in the paper; its experiments use numbers of samples.

    Example:
        >>> target, source = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])}
        >>> fedda(target, [source], beta=0.25)
        {'w': tensor([0.7500, 1.0000])}

    References:
        Jiang et al., Principled federated domain adaptation, ICLR 2024, definition 4.1. There the result is a
        gradient, which is subtracted from the parameters; an update is added.
    """
    target_share, shares = _shares(target, sources, beta, weights)
    return _combine(target, sources, target_share, shares)


@torch.no_grad()
def fedgp(
    target: dict[str, Tensor],
    sources: Sequence[dict[str, Tensor]],
    beta: float | Sequence[float] | Tensor,
    weights: Sequence[float] | Tensor | None = None,
    granularity: Granularity = "layer",
    products: UpdateProducts | None = None,
) -> dict[str, Tensor]:
    r"""FedGP: as FedDA, with the target's update projected on each source's direction in place of the source's update.

    .. math:: \sum_i w_i \left[ (1 - \beta_i) g_T + \beta_i \frac{\max(\langle g_T, g_{S_i} \rangle, 0)}
              {\lVert g_{S_i} \rVert^2} g_{S_i} \right]

    The result does not depend on the length of a source's update, is no longer than the target's, and never points
    against it. A source whose update is opposed, orthogonal or zero adds nothing. BatchNorm's ``running_mean`` and
    ``running_var`` are statistics, not directions: they are averaged as in `fedda`. Gradients do not pass through.

    Args:
        target: As for `fedda`.
        sources: As for `fedda`.
        beta: Weight of the projection, from 0 (target alone) to 1 (projections alone): one number, or one per source.
        weights: As for `fedda`.
        granularity: ``"layer"`` projects every entry by itself, as the paper's experiments do; ``"model"`` projects
            the update as one vector, as in the paper's definition.
        products: From `products_with_sources` of the same updates and granularity, if available.

    Example:
        >>> target, source = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([5.0, 0.0])}
        >>> fedgp(target, [source], beta=0.5)  # half of the target, half of its projection on the source, (1, 0)
        {'w': tensor([1.0000, 0.5000])}

    References:
        Jiang et al., ICLR 2024, definition 4.3. The published code scales with the cosine: `fedgp_cosine`.
    """
    check_granularity(granularity)
    target_share, shares = _shares(target, sources, beta, weights)
    dots = products or products_of_layers(target, sources, granularity)
    coefficients = projection_coefficients(dots.inner, dots.sources)
    return _combine(target, sources, target_share, shares, coefficients)


@torch.no_grad()
def fedgp_cosine(
    target: dict[str, Tensor],
    sources: Sequence[dict[str, Tensor]],
    beta: float | Sequence[float] | Tensor,
    scales: Sequence[float] | Tensor,
    weights: Sequence[float] | Tensor | None = None,
    granularity: Granularity = "layer",
    products: UpdateProducts | None = None,
) -> dict[str, Tensor]:
    r"""FedGP with aligned magnitudes: each source's update times a cosine, in place of the projection.

    .. math:: \sum_i w_i \left[ (1 - \beta_i) g_T + \beta_i \, s_i \max(\cos(g_T, g_{S_i}), 0) \, g_{S_i} \right]

    With :math:`s_i = \lVert g_T \rVert / \lVert g_{S_i} \rVert` this is `fedgp`; the paper puts a ratio of learning
    rates and numbers of local steps there. So the result grows with the length of a source's update, and can be longer
    than the target's. BatchNorm statistics are averaged as in `fedda`, without ``scales``.

    Args:
        target: As for `fedda`.
        sources: As for `fedda`.
        beta: As for `fedda`.
        scales: One finite number per source, none negative: what makes its update as long as the target's.
        weights: As for `fedda`.
        granularity: ``"layer"`` takes a cosine per entry, as the paper's experiments do; ``"model"`` one for all.
        products: As for `fedgp`.

    References:
        Jiang et al., ICLR 2024, appendix C.9. There (1 - beta) stands before the projection; its code and definition
        4.3 have beta there, and so have we. The cosine has no epsilon: it is 0 where an update is 0.
    """
    check_granularity(granularity)
    target_share, shares = _shares(target, sources, beta, weights)
    ratios = _per_source("scales", scales, len(sources), highest=math.inf)
    dots = products or products_of_layers(target, sources, granularity)
    cosines = projection_coefficients(dots.inner, (dots.sources * dots.target).sqrt())
    return _combine(target, sources, target_share, shares, cosines * cosines.new_tensor(ratios)[:, None])
