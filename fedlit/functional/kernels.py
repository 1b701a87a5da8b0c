"""Kernels that are functions of the difference of two samples."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["gaussian", "laplace", "cauchy"]


def check_bandwidth(bandwidth: float) -> None:
    """Refuse a kernel width that is not a positive, finite length."""
    if not (math.isfinite(bandwidth) and bandwidth > 0):
        raise ValueError(
            f"bandwidth (sigma) must be positive and finite, got {bandwidth}: "
            "give a length in the units of x, such as the median distance between samples"
        )


def check_samples(name: str, x: Tensor) -> None:
    """Refuse what is not a matrix of real numbers, shape (n, p), with samples as rows."""
    if x.dim() != 2:
        raise ValueError(f"{name} must have shape (n, p), samples as rows, got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be of a floating type, got {x.dtype}: convert it with {name}.float()")


def check_pair(x: Tensor, y: Tensor, names: tuple[str, str] = ("x", "y"), symbol: str = "p") -> None:
    """Refuse samples that are no matrices, or differ in the number of features, which is called ``symbol``."""
    for name, samples in zip(names, (x, y), strict=True):
        check_samples(name, samples)
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"{names[0]} and {names[1]} must have equally many features ({symbol}), got shapes {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )


def _common_dtype(x: Tensor, y: Tensor, bandwidth: float) -> torch.dtype:
    """Of a kernel of these samples, which are checked."""
    check_pair(x, y)
    check_bandwidth(bandwidth)
    return torch.promote_types(x.dtype, y.dtype)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Squared Euclidean distances between all pairs of rows of (n, p) and (k, p), shape (n, k), float64.

    They come from inner products of float64 samples centred on their mean, which is fast and keeps the distance of near
    samples far from the origin. Gradients pass through, and are zero between coincident samples.
    """
    a, b = x.double(), y.double()
    if len(b):
        centre = b.detach().mean(dim=0)
        a, b = a - centre, b - centre
    squared = torch.addmm((a * a).sum(dim=1, keepdim=True) + (b * b).sum(dim=1), a, b.T, alpha=-2)
    return squared.clamp_min(0)


def gaussian_kernel(x: Tensor, y: Tensor, bandwidth: float) -> Tensor:
    r"""Gaussian kernel between all pairs of rows.

    .. math:: k(x, y) = \exp\left(-\frac{\|x - y\|_2^2}{2 \sigma^2}\right)

    Distances are those of `squared_distances`.

    Args:
        x: Samples, shape (n, p).
        y: Samples, shape (k, p).
        bandwidth: Width sigma, a positive length in the units of ``x``. It is gamma = 1/(2 sigma^2) in scikit-learn.

    Returns:
        Matrix of shape (n, k) with entries in [0, 1], in the dtype of ``x``.

    Raises:
        ValueError: If the shapes do not fit or the bandwidth is not positive.
        TypeError: If the samples are not of a floating type.

    Example:
        >>> gaussian_kernel(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [3.0, 4.0]]), bandwidth=5.0)
        tensor([[1.0000, 0.6065]])

    References:
        Pan et al., Domain adaptation via transfer component analysis, IEEE TNN 2011, where the width is stated
        otherwise; this is the convention of Feng et al. (FedRF-TCA, 2023), appendix D.
    """
    dtype = _common_dtype(x, y, bandwidth)
    return torch.exp(squared_distances(x, y) / (-2 * bandwidth**2)).to(dtype)


def laplace_kernel(x: Tensor, y: Tensor, bandwidth: float) -> Tensor:
    r"""Laplace kernel between all pairs of rows.

    .. math:: k(x, y) = \exp\left(-\frac{\|x - y\|_1}{\sigma}\right)

    Args:
        x: Samples, shape (n, p).
        y: Samples, shape (k, p).
        bandwidth: Width sigma, a positive length in the units of ``x``. It is gamma = 1/sigma in scikit-learn.

    Returns:
        Matrix of shape (n, k) with entries in [0, 1], in the dtype of ``x``.

    Raises:
        ValueError: If the shapes do not fit or the bandwidth is not positive.
        TypeError: If the samples are not of a floating type.

    References:
        Rahimi and Recht, Random features for large-scale kernel machines, NeurIPS 2007, figure 1.
    """
    dtype = _common_dtype(x, y, bandwidth)
    return torch.exp(torch.cdist(x.to(dtype), y.to(dtype), p=1.0) / -bandwidth)


def cauchy_kernel(x: Tensor, y: Tensor, bandwidth: float) -> Tensor:
    r"""Cauchy kernel, a product over features, between all pairs of rows.

    .. math:: k(x, y) = \prod_{j=1}^{p} \frac{1}{1 + (x_j - y_j)^2 / \sigma^2}

    Args:
        x: Samples, shape (n, p).
        y: Samples, shape (k, p).
        bandwidth: Width sigma, a positive length in the units of ``x``.

    Returns:
        Matrix of shape (n, k) with entries in [0, 1], in the dtype of ``x``.

    Raises:
        ValueError: If the shapes do not fit or the bandwidth is not positive.
        TypeError: If the samples are not of a floating type.

    References:
        Rahimi and Recht, Random features for large-scale kernel machines, NeurIPS 2007, figure 1, where sigma is 1.
    """
    dtype = _common_dtype(x, y, bandwidth)
    logarithm = torch.zeros(len(x), len(y), dtype=dtype, device=x.device)
    # one feature at a time, because (n, k, p) differences would not fit in memory
    for a, b in zip(x.to(dtype).T / bandwidth, y.to(dtype).T / bandwidth, strict=True):
        logarithm = logarithm + torch.log1p((a[:, None] - b) ** 2)
    return torch.exp(-logarithm)
