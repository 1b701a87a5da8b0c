"""Maximum mean discrepancy with several Gaussian kernels at once, whose widths follow the data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedlit.checks import check, check_at_least, check_positive
from fedlit.functional.checks import check_pair, check_shape
from fedlit.functional.mmd import mmd_squared


def kernel_ladder(x: Tensor, y: Tensor, num_kernels: int = 5, factor: float = 2.0) -> Tensor:
    r"""Bandwidths of several Gaussian kernels around the mean squared distance of all samples of both domains.

    .. math:: b_u = b \, r^{u - \lfloor U/2 \rfloor}, \quad u = 0, \dots, U - 1, \qquad
              b = \frac{1}{n(n-1)} \sum_{i \ne j} \|z_i - z_j\|^2

    Args:
        x: Samples of the first domain, shape (n, p).
        y: Samples of the second domain, shape (k, p).
        num_kernels: Number U of kernels, at least 1.
        factor: Ratio r of one bandwidth to the one before, above 1.

    Returns:
        The b_u, rising, shape (U,), float64, without a graph: squared lengths.

    Raises:
        ValueError: If the shapes do not fit, there is one sample or all are alike, or a number is out of range.
        TypeError: If the samples are not of a floating type.

    Example:
        >>> kernel_ladder(torch.zeros(1, 1), torch.ones(1, 1), num_kernels=3)
        tensor([0.5000, 1.0000, 2.0000], dtype=torch.float64)

    References:
        Long et al., Learning transferable features with deep adaptation networks, ICML 2015, in the form of DeepDA.
    """
    check_pair(x, y)
    z = torch.cat([x.detach().double(), y.detach().double()])
    z = z - z[:1]  # distances stay, and far from the origin their digits would not
    return bandwidth_ladder(mean_pair_distance(z.mean(dim=0), z.square().mean(), len(z)), num_kernels, factor)


def mean_pair_distance(mean: Tensor, mean_square: Tensor, count: int) -> float:
    r"""Mean squared distance between different samples, from two means alone.

    .. math:: \frac{1}{n(n-1)} \sum_{i \ne j} \|z_i - z_j\|^2
              = \frac{2n}{n-1} \left(p \, \overline{z^2} - \|\bar z\|^2\right)

    Args:
        mean: Of the samples, shape (p,).
        mean_square: Mean of all their squared entries, a scalar.
        count: Number n of samples; of fewer than 2 the distance is 0.
    """
    spread = float(len(mean) * mean_square.double() - mean.double().square().sum())
    return 2 * count / (count - 1) * max(spread, 0.0) if count > 1 else 0.0


def bandwidth_ladder(middle: float, num_kernels: int, factor: float) -> Tensor:
    """Bandwidths b_u around a middle one b, shape (U,), float64: see `kernel_ladder`.

    Args:
        middle: b, a positive squared length.
        num_kernels: Number U of kernels, at least 1.
        factor: Ratio r of one to the one before, above 1.
    """
    check_at_least("num_kernels (U)", num_kernels, 1)
    check(1 < factor < math.inf, "factor", "above 1 and finite", factor)
    check_positive("middle (b)", middle, "a mean squared distance is 0 where all samples are alike, or there is one")
    steps = torch.arange(num_kernels, dtype=torch.float64) - num_kernels // 2
    return middle * torch.tensor(factor, dtype=torch.float64) ** steps


def multi_kernel_mmd(x: Tensor, y: Tensor, bandwidths: Tensor | Sequence[float], unbiased: bool = False) -> Tensor:
    r"""Squared maximum mean discrepancy with the mean of several Gaussian kernels.

    .. math:: k(x, y) = \frac{1}{U} \sum_{u=1}^{U} \exp\left(-\frac{\|x - y\|^2}{b_u}\right)

    It is 1/U of the form of published codes, in which kernels are added.

    Args:
        x: Samples of the first domain, shape (n, p).
        y: Samples of the second domain, shape (k, p).
        bandwidths: The b_u, positive squared lengths: twice the square of the width sigma of `gaussian_kernel`.
        unbiased: See `mmd_squared`.

    Returns:
        A scalar that gradients pass through; biased, it is not negative.

    Example:
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> multi_kernel_mmd(x, x + 3, kernel_ladder(x, x + 3)) > multi_kernel_mmd(x, x, [1.0, 2.0])
        tensor(True)

    References:
        Long et al., ICML 2015, where kernels have weights that a quadratic programme finds; all published codes weigh
        them alike.
    """
    check_pair(x, y)
    widths = [math.sqrt(b / 2) for b in _checked(bandwidths)]
    a, c = x.double(), y.double()
    return torch.stack([mmd_squared(a, c, width, unbiased) for width in widths]).mean().to(x.dtype)


def mixture_frequencies(frequencies: Tensor, bandwidths: Tensor | Sequence[float]) -> Tensor:
    r"""Frequencies of the mean of several Gaussian kernels, from those of one whose width is 1; shape (N, p).

    In U blocks of equal size, rows of block u are multiplied by :math:`\sqrt{2 / b_u}`. Inner products of
    `random_fourier_features` then estimate the kernel of `multi_kernel_mmd`.

    Args:
        frequencies: From `sample_frequencies` with ``bandwidth=1``, shape (N, p).
        bandwidths: The b_u, U positive squared lengths.
    """
    scales = torch.tensor([math.sqrt(2 / b) for b in _checked(bandwidths)], dtype=torch.float64)
    check_shape("frequencies", frequencies, "N", "p")
    fits = len(frequencies) % len(scales) == 0
    check(fits, "frequencies", f"a multiple of the {len(scales)} bandwidths in number", len(frequencies))
    rows = scales.repeat_interleave(len(frequencies) // len(scales)).to(frequencies.device)
    return (frequencies.double() * rows[:, None]).to(frequencies.dtype)


def _checked(bandwidths: Tensor | Sequence[float]) -> list[float]:
    values = [float(b) for b in bandwidths]
    fits = len(values) > 0 and all(0 < b < math.inf for b in values)
    check(fits, "bandwidths (b_u)", "positive and finite squared lengths, at least one", values, "see kernel_ladder")
    return values
