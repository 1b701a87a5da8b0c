"""Checks of tensors, which raise the errors of `fedlit.checks`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedlit.checks import check, check_positive, refuse


def check_shape(argument: str, x: Tensor, *shape: int | str, way_out: str = "") -> None:
    """Refuse another shape: ``("n > 0", "p", 3)`` is any number of rows but 0, any number of columns, and 3."""
    fits = len(x.shape) == len(shape) and all(
        size == wanted if isinstance(wanted, int) else not wanted.endswith("> 0") or size > 0
        for size, wanted in zip(x.shape, shape, strict=True)
    )
    if not fits:
        refuse(argument, f"of shape ({', '.join(map(str, shape))})", tuple(x.shape), way_out)


def check_same_shape(argument: str, x: Tensor, other: str, y: Tensor, way_out: str = "") -> None:
    """Refuse a tensor whose shape is not that of another argument."""
    check(x.shape == y.shape, argument, f"of the shape of {other}, {tuple(y.shape)}", tuple(x.shape), way_out)


def check_finite(
    argument: str, x: Tensor, way_out: str = "look for NaN and infinity in the data, or divergence"
) -> None:
    """Refuse NaN and infinity."""
    # the sum is not finite if an entry is not, unless huge entries overflow it
    if not x.sum(dtype=torch.float64).isfinite() and not x.isfinite().all():
        refuse(argument, "finite", tuple(x.shape), way_out, shown="NaN or infinity")


def check_entries(holds: bool, argument: str, rule: str, x: Tensor, way_out: str = "") -> None:
    """Refuse a tensor whose entries break a rule; the message has their range alone, as they may be private."""
    if not holds:
        smallest, largest = (float(each) for each in x.detach().aminmax()) if x.numel() else (math.nan, math.nan)
        refuse(argument, rule, tuple(x.shape), way_out, shown=f"entries from {smallest:.3g} to {largest:.3g}")


def check_samples(argument: str, x: Tensor) -> None:
    """Refuse what is not a matrix of real numbers, shape (n, p), with samples as rows."""
    check_shape(argument, x, "n", "p", way_out="samples are rows")
    if not x.is_floating_point():
        refuse(argument, "of a floating type", x.dtype, f"convert it with {argument}.float()", TypeError)


def check_pair(x: Tensor, y: Tensor, names: tuple[str, str] = ("x", "y"), symbol: str = "p") -> None:
    """Refuse samples that are no matrices, or differ in the number of features, which is called ``symbol``."""
    for name, samples in zip(names, (x, y), strict=True):
        check_samples(name, samples)
    rule = f"samples of the {x.shape[1]} features ({symbol}) of {names[0]}"
    check(x.shape[1] == y.shape[1], names[1], rule, tuple(y.shape))


def check_bandwidth(bandwidth: float) -> None:
    """Refuse a kernel width that is not a positive, finite length."""
    way_out = "give a length in the units of x, such as the median distance between samples"
    check_positive("bandwidth (sigma)", bandwidth, way_out)
