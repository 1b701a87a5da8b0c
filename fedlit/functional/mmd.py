"""Maximum mean discrepancy between two samples, with one Gaussian kernel or with several that follow the data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedlit.checks import check, check_at_least, check_positive
from fedlit.functional.checks import check_pair, check_same_shape, check_shape
from fedlit.functional.kernels import gaussian_kernel


def mmd_squared(x: Tensor, y: Tensor, bandwidth: float, unbiased: bool = True) -> Tensor:
    r"""Squared maximum mean discrepancy with a Gaussian kernel, a scalar that gradients pass through.

    .. math:: \frac{1}{n(n-1)}\sum_{i\ne j}k(x_i,x_j) + \frac{1}{k(k-1)}\sum_{i\ne j}k(y_i,y_j)
              - \frac{2}{nk}\sum_{i,j}k(x_i,y_j)

    The biased estimate has :math:`1/n^2 \sum_{i,j}` and :math:`1/k^2 \sum_{i,j}` in the first two terms. The unbiased
    one can be slightly negative. See Gretton et al., A kernel two-sample test, JMLR 2012, equations 3 (unbiased) and 5
    (biased).

    Args:
        x: Samples of the first domain, shape (n, p).
        y: Samples of the second domain, shape (k, p).
        bandwidth: Kernel width sigma, a positive length in the units of ``x``.
        unbiased: Leave out each sample's kernel with itself, so that the mean is zero between equal distributions.
    """
    check_pair(x, y)
    for name, samples in (("x", x), ("y", y)):
        check_at_least(name, len(samples), 2 if unbiased else 1, "samples", "for one, take unbiased=False")
    # the difference of sums of n^2 terms near 1 loses digits that float32 does not have
    a, b = x.double(), y.double()
    within = [gaussian_kernel(samples, samples, bandwidth) for samples in (a, b)]
    if unbiased:
        means = [(k.sum() - k.diagonal().sum()) / (len(k) * (len(k) - 1)) for k in within]
    else:
        means = [k.mean() for k in within]
    return (means[0] + means[1] - 2 * gaussian_kernel(a, b, bandwidth).mean()).to(x.dtype)


def rff_mmd_squared(mean_source: Tensor, mean_target: Tensor, aligner: Tensor | None = None) -> Tensor:
    r"""Squared distance between the domains' mean random Fourier features after alignment, a scalar.

    .. math:: \left\|W^\top (\mu_S - \mu_T)\right\|^2

    Without an aligner, or with :math:`W W^\top = I`, it is the biased squared maximum mean discrepancy of the kernel
    that the features have as inner product. See Feng et al. (FedRF-TCA, 2023), equation 11. The published code adds
    several sources' messages without dividing by their number.

    Args:
        mean_source: Mean feature of the source, or mean over several sources, shape (2N,).
        mean_target: Mean feature of the target, shape (2N,).
        aligner: Matrix W, shape (2N, m), or ``None`` for the identity.
    """
    check_shape("mean_source", mean_source, "2N")
    check_same_shape("mean_target", mean_target, "mean_source", mean_source)
    gap = mean_source - mean_target
    if aligner is not None:
        check_shape("aligner (W)", aligner, len(gap), "m")
        gap = gap @ aligner
    return (gap * gap).sum()


def kernel_ladder(x: Tensor, y: Tensor, num_kernels: int = 5, factor: float = 2.0) -> Tensor:
    r"""Bandwidths of several Gaussian kernels around the mean squared distance of all samples of both domains.

    .. math:: b_u = b \, r^{u - \lfloor U/2 \rfloor}, \quad u = 0, \dots, U - 1, \qquad
              b = \frac{1}{n(n-1)} \sum_{i \ne j} \|z_i - z_j\|^2

    They are squared lengths, rising, of shape (U,), float64, without a graph. See Long et al., Learning transferable
    features with deep adaptation networks, ICML 2015, in the form of DeepDA.

    Args:
        x: Samples of the first domain, shape (n, p).
        y: Samples of the second domain, shape (k, p); not all samples may be alike.
        num_kernels: Number U of kernels, at least 1.
        factor: Ratio r of one bandwidth to the one before, above 1.
    """
    check_pair(x, y)
    z = torch.cat([x.detach().double(), y.detach().double()])
    z = z - z[:1]  # distances stay, and far from the origin their digits would not
    middle = mean_pair_distance(z.mean(dim=0), z.square().mean(), len(z))
    return bandwidth_ladder(middle, num_kernels, factor).to(x.device)


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
    r"""Squared maximum mean discrepancy with the mean of several Gaussian kernels, a scalar with gradients.

    .. math:: k(x, y) = \frac{1}{U} \sum_{u=1}^{U} \exp\left(-\frac{\|x - y\|^2}{b_u}\right)

    See Long et al., ICML 2015, where kernels have weights that a quadratic programme finds; all published codes weigh
    them alike, and add them (U times this).

    Args:
        x: Samples of the first domain, shape (n, p).
        y: Samples of the second domain, shape (k, p).
        bandwidths: The b_u, positive squared lengths: twice the square of the width sigma of `gaussian_kernel`.
        unbiased: See `mmd_squared`; biased, it is not negative.
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
