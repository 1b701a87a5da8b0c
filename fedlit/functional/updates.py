"""Model updates as vectors: inner products and projections, layer by layer or as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
        lengths = torch.tensor([sizes[layer] for layer in pack], device=device)
        t, *packed = (_packed(update, [names[layer] for layer in pack]) for update in (target, *sources))
        terms = itertools.chain([t * t], *((t * s, s * s) for s in packed))
        for row, term in zip(total, terms, strict=True):
            row[pack] = torch.segment_reduce(term, "sum", lengths=lengths, initial=0)
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
    check_granularity(granularity)
    first, second = ({name: update[name] for name in layer_names(update)} for update in (a, b))
    check_alike([first, second], ["a", "b"])
    return products_of_layers(first, [second], granularity).inner[0]


def projection_coefficients(inner: Tensor, norms_squared: Tensor) -> Tensor:
    r"""Factors of directions s, float64, that make them the projections of vectors t that are not opposed to them.

    .. math:: \max(\langle t, s \rangle, 0) / \lVert s \rVert^2, \quad 0 \text{ where } s = 0

    Args:
        inner: Inner products of the projected vectors with the directions, any shape.
        norms_squared: Squared norms of the directions, same shape.
    """
    check_entries(not bool((norms_squared < 0).any()), "norms_squared", "not negative", norms_squared)
    check_same_shape("inner", inner, "norms_squared", norms_squared, "use the same granularity for both")
    norms = norms_squared.double()
    quotients = inner.double().clamp(min=0) / torch.where(norms == 0, 1.0, norms)
    # float32 has no larger number; only a direction of subnormal numbers asks for one
    return torch.where(norms == 0, 0.0, quotients.clamp(max=torch.finfo(torch.float32).max))


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
