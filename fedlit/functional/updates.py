"""Model updates as vectors: inner products and projections, layer by layer or as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Granularity = Literal["layer", "model"]

# numbers taken to float64 at once: long enough that calls cost little, short enough (0.5 MB) that two stay in a core's
# own cache
CHUNK = 2**16
# numbers below which a layer is no work to speak of next to the call that starts it
SMALL = 2**12


def check_alike(updates: Sequence[dict[str, Tensor]], callers: Sequence[str] | None = None) -> None:
    """Refuse updates that differ in names or shapes; ``callers`` is what errors call them."""
    who = callers or [f"update {idx}" for idx in range(len(updates))]
    first = updates[0]
    for idx, update in enumerate(updates):
        missing, extra = sorted(first.keys() - update.keys()), sorted(update.keys() - first.keys())
        if missing or extra:
            raise ValueError(
                f"updates must have the same keys: {who[idx]} lacks {missing} and adds {extra} "
                f"compared with {who[0]}; average only what all clients hold"
            )
        for name, tensor in first.items():
            if kind(update[name]) != kind(tensor):
                raise ValueError(
                    f"updates must hold the same kinds of numbers: {name!r} is {tensor.dtype} in {who[0]} and "
                    f"{update[name].dtype} in {who[idx]}; convert one of them"
                )
            if update[name].shape != tensor.shape:
                raise ValueError(
                    f"updates must have the same shapes: {name!r} is {tuple(tensor.shape)} in {who[0]} "
                    f"and {tuple(update[name].shape)} in {who[idx]}; build all clients from the same network"
                )


def kind(tensor: Tensor) -> str:
    """Whether its numbers are complex, real or integers; half precision goes with double, but not with integers."""
    return "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "integer"


def check_granularity(granularity: str) -> None:
    """Refuse what is neither ``"layer"`` nor ``"model"``."""
    if granularity not in get_args(Granularity):
        raise ValueError(f"granularity must be one of {list(get_args(Granularity))}, got {granularity!r}")


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def layer_names(update: dict[str, Tensor]) -> list[str]:
    """Names of what inner products run over: entries that are neither integers nor BatchNorm's statistics."""
    return [name for name, t in update.items() if (t.is_floating_point() or t.is_complex()) and not _is_statistic(name)]


def flat(tensor: Tensor) -> Tensor:
    """The numbers of an entry as one real vector."""
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
    """Inner products of a target's update with those of sources, and of each with itself, in one reading of all.

    Args:
        target: The target's update (g_T).
        sources: One update per source (g_S), with layers of the same names and shapes.
        granularity: As of `inner_products`.

    Raises:
        ValueError: If names or shapes of the layers differ, or the granularity is unknown.
    """
    check_granularity(granularity)
    layers = [{name: update[name] for name in layer_names(update)} for update in (target, *sources)]
    check_alike(layers, ["the target", *(f"source {idx}" for idx in range(len(sources)))])
    return products_of_layers(target, sources, granularity)


def products_of_layers(
    target: dict[str, Tensor], sources: Sequence[dict[str, Tensor]], granularity: Granularity
) -> UpdateProducts:
    """`products_with_sources` of arguments that have been checked."""
    names = layer_names(target)
    sizes = [flat(target[name]).numel() for name in names]
    device = target[names[0]].device if names else None
    total = torch.zeros(2 * len(sources) + 1, len(names), dtype=torch.float64, device=device)  # two a source, and one
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
    """Small layers, by their places, in groups of at most ``CHUNK`` numbers: a call for each would cost more."""
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
    r"""Inner products of two updates, layer by layer or as one vector.

    Products and sums are in float64, whatever the updates' dtypes: in float32 the sum over a million entries loses
    half the digits, and opposed updates can look aligned. Integer entries and BatchNorm's ``running_mean`` and
    ``running_var`` take no part. Complex entries count as vectors of their real and imaginary parts.

    Args:
        a: An update.
        b: An update with layers of the same names and shapes.
        granularity: ``"layer"`` for one product per entry, ``"model"`` for their sum.

    Returns:
        Float64 on the device of ``a``, shape (L,) in the order of ``a``, or (1,) for the whole model.

    Raises:
        ValueError: If names or shapes of the layers differ, or the granularity is unknown.
    """
    check_granularity(granularity)
    first, second = ({name: update[name] for name in layer_names(update)} for update in (a, b))
    check_alike([first, second], ["a", "b"])
    return products_of_layers(first, [second], granularity).inner[0]


def projection_coefficients(inner: Tensor, norms_squared: Tensor) -> Tensor:
    r"""What to multiply a vector with, so that it becomes the projection of another one that is not opposed to it.

    .. math:: \max(\langle t, s \rangle, 0) / \lVert s \rVert^2, \quad 0 \text{ where } s = 0

    Args:
        inner: Inner products of the projected vectors with the directions, any shape.
        norms_squared: Squared norms of the directions, same shape.

    Returns:
        Coefficients of the directions, not negative and within float32's range, float64, same shape.

    Raises:
        ValueError: If the shapes differ, or a squared norm is negative.
    """
    if bool((norms_squared < 0).any()):
        raise ValueError(f"norms_squared must not be negative, got {norms_squared.min():g}: they are squares")
    if inner.shape != norms_squared.shape:
        raise ValueError(
            f"inner and norms_squared must have one shape, got {tuple(inner.shape)} and {tuple(norms_squared.shape)}: "
            "use the same granularity for both"
        )
    norms = norms_squared.double()
    quotients = inner.double().clamp(min=0) / torch.where(norms == 0, 1.0, norms)
    # float32 has no larger number; only a direction of subnormal numbers asks for one
    return torch.where(norms == 0, 0.0, quotients.clamp(max=torch.finfo(torch.float32).max))


def scale_layers(update: dict[str, Tensor], coefficients: Tensor) -> dict[str, Tensor]:
    """Multiply each layer of an update with a number.

    Integer entries and BatchNorm's ``running_mean`` and ``running_var``, which are not projected, are left out.

    Args:
        update: An update of L layers.
        coefficients: One number per layer in the order of ``update``, shape (L,), or one for all, shape (1,).

    Returns:
        The scaled layers, new tensors in the update's dtypes.

    Raises:
        ValueError: If there are neither L coefficients nor one.
    """
    names = layer_names(update)
    if coefficients.dim() != 1 or len(coefficients) not in (1, len(names)):
        raise ValueError(
            f"coefficients must have shape ({len(names)},), one per layer, or (1,), got {tuple(coefficients.shape)}"
        )
    values = coefficients.expand(len(names)).tolist()
    return {name: update[name] * value for name, value in zip(names, values, strict=True)}
