"""Model updates as vectors: inner products, projections, and weighted combinations over clients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedlit.checks import check, check_one_of, refuse
from fedlit.functional.checks import check_entries, check_same_shape

Granularity = Literal["layer", "model"]

# numbers taken to float64 at once: long enough that calls cost little, short enough (0.5 MB) that two stay in a core's
# own cache
CHUNK = 2**16
# numbers below which a layer is no work to speak of next to the call that starts it
SMALL = 2**12


def check_alike(updates: Sequence[dict[str, Tensor]], callers: Sequence[str] | None = None) -> None:
    """Refuse updates that differ in names, shapes or number type; ``callers`` is what errors call them."""
    who = callers or [f"update {idx}" for idx in range(len(updates))]
    first = updates[0]
    for idx, update in enumerate(updates):
        missing, extra = sorted(first.keys() - update.keys()), sorted(update.keys() - first.keys())
        if missing or extra:
            refuse(
                "updates",
                f"of the keys of {who[0]}",
                sorted(update),
                f"{who[idx]} lacks {missing} and adds {extra}; average only what all clients hold",
            )
        for name, tensor in first.items():
            if number_type(update[name]) != number_type(tensor) or update[name].shape != tensor.shape:
                refuse(
                    "updates",
                    f"alike: {name!r} of {who[0]} has shape {tuple(tensor.shape)} and {tensor.dtype}",
                    update[name],
                    "build all clients from the same network",
                    shown=f"{tuple(update[name].shape)} and {update[name].dtype} in {who[idx]}",
                )


def number_type(tensor: Tensor) -> str:
    """Complex, real or integer: half precision goes with double, but not with integers."""
    return "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "integer"


def check_granularity(granularity: str) -> None:
    """Refuse what is neither ``"layer"`` nor ``"model"``."""
    check_one_of("granularity", granularity, get_args(Granularity))


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def layer_names(update: dict[str, Tensor]) -> list[str]:
    """Names of what inner products run over: entries that are neither integers nor BatchNorm's statistics."""
    return [name for name, t in update.items() if (t.is_floating_point() or t.is_complex()) and not _is_statistic(name)]


def flat(tensor: Tensor) -> Tensor:
    """All numbers of an entry, as one real vector."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)


class UpdateProducts(NamedTuple):
    """Inner products of a target's update g_T and those of N sources, g_S, in float64; L is 1 for the whole model.

    Args:
        inner: <g_T, g_S>, shape (N, L).
        sources: <g_S, g_S>, shape (N, L).
        target: <g_T, g_T>, shape (L,).
    """

    inner: Tensor
    sources: Tensor
    target: Tensor


def products_with_sources(
    target: dict[str, Tensor], sources: Sequence[dict[str, Tensor]], granularity: Granularity
) -> UpdateProducts:
    """Inner products of a target's update with those of sources, and of each with itself, in one pass over all.

    Args:
        target: The target's update (g_T).
        sources: One update per source (g_S), with layers of the same names and shapes.
        granularity: As of `inner_products`.
    """
    check_granularity(granularity)
    layers = [{name: update[name] for name in layer_names(update)} for update in (target, *sources)]
    check_alike(layers, ["the target", *(f"source {idx}" for idx in range(len(sources)))])
    return products_of_layers(target, sources, granularity)


def products_of_layers(
    target: dict[str, Tensor], sources: Sequence[dict[str, Tensor]], granularity: Granularity
) -> UpdateProducts:
    """Compute `products_with_sources` of arguments that have been checked."""
    names = layer_names(target)
    sizes = [flat(target[name]).numel() for name in names]
    device = target[names[0]].device if names else None
    # rows: the target's square, then two per source: its product with the target, and its square
    total = torch.zeros(2 * len(sources) + 1, len(names), dtype=torch.float64, device=device)
    for pack in _packs(sizes):
        lengths, layers = torch.tensor([[sizes[layer] for layer in pack], [*pack]], device=device)
        t, *packed = (_packed(update, [names[layer] for layer in pack]) for update in (target, *sources))
        terms = itertools.chain([t * t], *((t * s, s * s) for s in packed))
        for row, term in zip(total, terms, strict=True):
            row[layers] = torch.segment_reduce(term, "sum", lengths=lengths, initial=0)
    large = [layer for layer, size in enumerate(sizes) if size > SMALL]
    t, s = torch.empty(2, min(max(sizes, default=0), CHUNK), dtype=torch.float64, device=device)
    dots: list[Tensor] = []
    owners: list[int] = []  # the layer of each chunk
    for layer in large:
        pieces = (torch.split(flat(update[names[layer]]), CHUNK) for update in (target, *sources))
        for chunk, *others in zip(*pieces, strict=True):
            first, second = t[: len(chunk)], s[: len(chunk)]
            first.copy_(chunk)
            dots.append(first.dot(first))
            for other in others:
                second.copy_(other)
                dots += (first.dot(second), second.dot(second))
            owners.append(layer)
    if dots:
        chunks = torch.stack(dots).view(len(owners), len(total))
        total.index_add_(1, torch.tensor(owners, device=device), chunks.T)
    if granularity == "model":
        total = total.sum(dim=1, keepdim=True)
    return UpdateProducts(inner=total[1::2], sources=total[2::2], target=total[0])


def _packs(sizes: Sequence[int]) -> list[list[int]]:
    """Group small layers, by index, into packs of at most ``CHUNK`` numbers: a call for each would cost more."""
    packs: list[list[int]] = []
    room = 0
    for layer, size in enumerate(sizes):
        if size > SMALL:
            continue
        if size > room or not packs:
            packs.append([])
            room = CHUNK
        packs[-1].append(layer)
        room -= size
    return packs


def _packed(update: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """Entries as one float64 vector."""
    return torch.cat([flat(update[name]) for name in names]).double()


def inner_products(a: dict[str, Tensor], b: dict[str, Tensor], granularity: Granularity = "layer") -> Tensor:
    r"""Inner products of two updates, float64, shape (L,) in the order of ``a``, or (1,) for the whole model.

    Integer entries and BatchNorm's ``running_mean`` and ``running_var`` take no part. Complex entries count as vectors
    of their real and imaginary parts.

    Args:
        a: An update.
        b: An update with layers of the same names and shapes.
        granularity: ``"layer"`` for one product per entry, ``"model"`` for their sum.
    """
    # float64 whatever the dtypes: in float32 a sum over a million entries loses half the digits, and opposed updates
    # can look aligned
    return products_with_sources(a, [b], granularity).inner[0]


def projection_coefficients(inner: Tensor, norms_squared: Tensor, filtered: bool = True) -> Tensor:
    r"""Factors, float64, that turn directions s into projections of vectors t, if t is not opposed to s.

    .. math:: \max(\langle t, s \rangle, 0) / \lVert s \rVert^2, \quad 0 \text{ where } s = 0

    Args:
        inner: Inner products of the projected vectors with the directions, any shape.
        norms_squared: Squared norms of the directions, same shape.
        filtered: Take the maximum with 0; without it, opposed directions have negative factors.
    """
    check_entries(not bool((norms_squared < 0).any()), "norms_squared", "not negative", norms_squared)
    check_same_shape("inner", inner, "norms_squared", norms_squared, "use the same granularity for both")
    norms = norms_squared.double()
    # float32 has no larger number; only a direction of subnormal numbers asks for one
    largest = torch.finfo(torch.float32).max
    quotients = inner.double() / torch.where(norms == 0, 1.0, norms)
    return torch.where(norms == 0, 0.0, quotients.clamp(min=0.0 if filtered else -largest, max=largest))


def scale_layers(update: dict[str, Tensor], coefficients: Tensor) -> dict[str, Tensor]:
    """Multiply each layer of an update with a number; integer entries and BatchNorm's statistics are left out.

    Args:
        update: An update of L layers.
        coefficients: One number per layer in the order of ``update``, shape (L,), or one for all, shape (1,).
    """
    names = layer_names(update)
    fits = coefficients.dim() == 1 and len(coefficients) in (1, len(names))
    check(fits, "coefficients", f"of shape ({len(names)},), one per layer, or (1,)", tuple(coefficients.shape))
    values = coefficients.expand(len(names)).tolist()
    return {name: update[name] * value for name, value in zip(names, values, strict=True)}


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
    r"""Weighted mean of model updates, name by name, as new tensors of the first one's dtypes (McMahan et al., 2017).

    .. math:: \bar{u} = \sum_i \frac{w_i}{\sum_j w_j} u_i

    Updates are added one after the other: the same order gives the same bits. Integer tensors (such as BatchNorm's
    ``num_batches_tracked``) are averaged in float64 and rounded half to even.

    Args:
        updates: One dictionary per client, at least one, with the same names and shapes.
        weights: One finite number per update, none negative, in any unit: they are divided by their sum. ``None``
            weighs all updates alike.
    """
    check(len(updates) > 0, "updates", "at least 1 update", updates, "skip the average when no client is present")
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

    Integer entries keep the target's value: they are counters. See Jiang et al., Principled federated domain
    adaptation, ICLR 2024, definition 4.1. There the result is a gradient, which is subtracted from the parameters; an
    update is added.

    Args:
        target: The target's update (g_T).
        sources: One update per source (g_S), at least one, with the target's names and shapes.
        beta: Weight of the source, from 0 (target alone) to 1 (sources alone): one number, or one per source.
        weights: One finite number per source, none negative, in any unit; ``None`` weighs all alike, as in the paper
            (its experiments use numbers of samples).
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
    filtered: bool = True,
) -> dict[str, Tensor]:
    r"""FedGP: as FedDA, with the target's update projected on each source's direction in place of the source's update.

    .. math:: \sum_i w_i \left[ (1 - \beta_i) g_T + \beta_i \frac{\max(\langle g_T, g_{S_i} \rangle, 0)}
              {\lVert g_{S_i} \rVert^2} g_{S_i} \right]

    The result is no longer than the target's update and never points against it. A source whose update is opposed,
    orthogonal or zero adds nothing. BatchNorm's ``running_mean`` and ``running_var`` are averaged as in `fedda`.
    Gradients do not pass through. See Jiang et al., ICLR 2024, definition 4.3. The published code scales with the
    cosine: `fedgp_cosine`.

    Args:
        target: As for `fedda`.
        sources: As for `fedda`.
        beta: Weight of the projection, from 0 (target alone) to 1 (projections alone): one number, or one per source.
        weights: As for `fedda`.
        granularity: ``"layer"`` projects every entry by itself (the paper's experiments), ``"model"`` the update as one
            vector (its definition).
        products: From `products_with_sources` of the same updates and granularity, if available.
        filtered: Leave out opposed sources; ``False`` projects on them too, by a negative factor (figure 4's ablation).

    Example:
        >>> target, source = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([5.0, 0.0])}
        >>> fedgp(target, [source], beta=0.5)  # half of the target, half of its projection on the source, (1, 0)
        {'w': tensor([1.0000, 0.5000])}
    """
    check_granularity(granularity)
    target_share, shares = _shares(target, sources, beta, weights)
    dots = products or products_of_layers(target, sources, granularity)
    coefficients = projection_coefficients(dots.inner, dots.sources, filtered)
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
    filtered: bool = True,
) -> dict[str, Tensor]:
    r"""FedGP with aligned magnitudes: each source's update times a cosine, in place of the projection.

    .. math:: \sum_i w_i \left[ (1 - \beta_i) g_T + \beta_i \, s_i \max(\cos(g_T, g_{S_i}), 0) \, g_{S_i} \right]

    With :math:`s_i = \lVert g_T \rVert / \lVert g_{S_i} \rVert` this is `fedgp`; the paper puts a ratio of learning
    rates and numbers of local steps there, so that the result can be longer than the target's update. BatchNorm
    statistics are averaged as in `fedda`, without ``scales``. See Jiang et al., ICLR 2024, appendix C.9, where (1 -
    beta) stands before the projection; its code and definition 4.3 have beta there. The cosine has no epsilon: it is 0
    where an update is 0.

    Args:
        target: As for `fedda`.
        sources: As for `fedda`.
        beta: As for `fedda`.
        scales: One finite number per source, none negative: what makes its update as long as the target's.
        weights: As for `fedda`.
        granularity: ``"layer"`` takes a cosine per entry (the paper's experiments), ``"model"`` one for all.
        products: As for `fedgp`.
        filtered: As for `fedgp`.
    """
    check_granularity(granularity)
    target_share, shares = _shares(target, sources, beta, weights)
    ratios = _per_source("scales", scales, len(sources), highest=math.inf)
    dots = products or products_of_layers(target, sources, granularity)
    cosines = projection_coefficients(dots.inner, (dots.sources * dots.target).sqrt(), filtered)
    return _combine(target, sources, target_share, shares, cosines * cosines.new_tensor(ratios)[:, None])
