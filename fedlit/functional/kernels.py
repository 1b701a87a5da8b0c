"""Kernels that are functions of the difference of two samples (Rahimi and Recht, NeurIPS 2007, figure 1)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedlit.functional.checks import check_bandwidth, check_pair

Kernel = Literal["gaussian", "laplace", "cauchy"]


def _common_dtype(x: Tensor, y: Tensor, bandwidth: float) -> torch.dtype:
    """Check the arguments of a kernel, and return the type of its values."""
    check_pair(x, y)
    check_bandwidth(bandwidth)
    return torch.promote_types(x.dtype, y.dtype)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Squared Euclidean distances between all pairs of rows of (n, p) and (k, p), shape (n, k), float64.

    Gradients pass through, and are zero between coincident samples.
    """
    # inner products are fast; centred and in float64, they keep the distance of near samples far from the origin
    a, b = x.double(), y.double()
    if len(b):
        centre = b.detach().mean(dim=0)
        a, b = a - centre, b - centre
    squared = torch.addmm((a * a).sum(dim=1, keepdim=True) + (b * b).sum(dim=1), a, b.T, alpha=-2)
    return squared.clamp_min(0)


def gaussian_kernel(x: Tensor, y: Tensor, bandwidth: float) -> Tensor:
    r"""Gaussian kernel between all pairs of rows, shape (n, k), in [0, 1], in the dtype of the samples.

    .. math:: k(x, y) = \exp\left(-\frac{\|x - y\|_2^2}{2 \sigma^2}\right)

    Args:
        x: Samples, shape (n, p).
        y: Samples, shape (k, p).
        bandwidth: Width sigma, a positive length in the units of ``x``; gamma = 1/(2 sigma^2) in scikit-learn.
    """
    dtype = _common_dtype(x, y, bandwidth)
    return torch.exp(squared_distances(x, y) / (-2 * bandwidth**2)).to(dtype)


def laplace_kernel(x: Tensor, y: Tensor, bandwidth: float) -> Tensor:
    r"""Laplace kernel between all pairs of rows, shape (n, k), in [0, 1].

    .. math:: k(x, y) = \exp\left(-\frac{\|x - y\|_1}{\sigma}\right)

    Args:
        x: Samples, shape (n, p).
        y: Samples, shape (k, p).
        bandwidth: Width sigma, a positive length in the units of ``x``; gamma = 1/sigma in scikit-learn.
    """
    dtype = _common_dtype(x, y, bandwidth)
    return torch.exp(torch.cdist(x.to(dtype), y.to(dtype), p=1.0) / -bandwidth)


def cauchy_kernel(x: Tensor, y: Tensor, bandwidth: float) -> Tensor:
    r"""Cauchy kernel between all pairs of rows, shape (n, k), in [0, 1].

    .. math:: k(x, y) = \prod_{j=1}^{p} \frac{1}{1 + (x_j - y_j)^2 / \sigma^2}

    Args:
        x: Samples, shape (n, p).
        y: Samples, shape (k, p).
        bandwidth: Width sigma, a positive length in the units of ``x``.
    """
    dtype = _common_dtype(x, y, bandwidth)
    logarithm = torch.zeros(len(x), len(y), dtype=dtype, device=x.device)
    # one feature at a time, because (n, k, p) differences would not fit in memory
    for a, b in zip(x.to(dtype).T / bandwidth, y.to(dtype).T / bandwidth, strict=True):
        logarithm = logarithm + torch.log1p((a[:, None] - b) ** 2)
    return torch.exp(-logarithm)
