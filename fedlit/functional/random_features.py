"""Random Fourier features: maps whose inner products estimate a kernel."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from fedlit.functional.kernels import Kernel, check_bandwidth, check_samples


def sample_frequencies(num: int, dim: int, bandwidth: float, kernel: Kernel = "gaussian", seed: int = 0) -> Tensor:
    r"""Random frequencies of a kernel, the same numbers for everyone who knows the seed.

    Entries are independent: normal with standard deviation 1/sigma for the Gaussian kernel, Cauchy with scale 1/sigma
    for the Laplace kernel, Laplace with scale 1/sigma for the Cauchy kernel. They are drawn on the CPU in float64 from
    a generator of their own and then rounded, so that neither a global seed nor a default dtype or device matters.

    Args:
        num: Number of frequencies N, at least 1. There will be 2N features.
        dim: Number of input features p, at least 1.
        bandwidth: Kernel width sigma, a positive length in the units of the samples.
        kernel: Which kernel the features estimate.
        seed: Seed that all clients share.

    Returns:
        Matrix Omega of shape (N, p), float32, on the CPU.

    Raises:
        ValueError: If a number is out of range or the kernel unknown.

    References:
        Feng et al. (FedRF-TCA, 2023), Algorithm 1, line 2; Rahimi and Recht, Random features for large-scale kernel
        machines, NeurIPS 2007, figure 1. The published code draws from numpy's global generator.
    """
    for name, symbol, value in (("num", "N", num), ("dim", "p", dim)):
        if value < 1:
            raise ValueError(f"{name} ({symbol}) must be at least 1, got {value}")
    check_bandwidth(bandwidth)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    if kernel == "gaussian":
        draws = torch.randn(num, dim, generator=generator, dtype=torch.float64, device="cpu")
    elif kernel in get_args(Kernel):
        # the quantile of a uniform number; in-place samplers depend on the maths library torch was built with
        uniform = torch.rand(num, dim, generator=generator, dtype=torch.float64, device="cpu") - 0.5
        if kernel == "laplace":
            draws = torch.tan(math.pi * uniform)
        else:
            # 1 - 2|u| is 0 for one number of 2^53
            draws = -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_max(0.5 - 2.0**-54))
    else:
        raise ValueError(f"kernel must be one of {list(get_args(Kernel))}, got {kernel!r}")
    return (draws / bandwidth).to(torch.float32)


def random_fourier_features(x: Tensor, frequencies: Tensor) -> Tensor:
    r"""Random Fourier features of samples, each of length 1.

    .. math:: \phi(x) = \frac{1}{\sqrt N} \left[\cos(\Omega x), \sin(\Omega x)\right]

    Inner products :math:`\phi(x)^\top \phi(y)` estimate the kernel of the frequencies without bias, with a standard
    deviation below :math:`1/\sqrt{2N}`, and depend on the difference of the samples alone.

    Args:
        x: Samples, shape (n, p).
        frequencies: Matrix Omega, shape (N, p), from :func:`sample_frequencies`. It is moved to the dtype and device
            of ``x``.

    Returns:
        Features of shape (n, 2N), all cosines before all sines, in the dtype of ``x``.

    Raises:
        ValueError: If the shapes do not fit.
        TypeError: If the samples are not of a floating type.

    Example:
        >>> frequencies = sample_frequencies(2000, dim=3, bandwidth=1.0, seed=0)
        >>> x, y = torch.zeros(1, 3), torch.full((1, 3), 0.5)
        >>> phi_x, phi_y = random_fourier_features(x, frequencies), random_fourier_features(y, frequencies)
        >>> kernel = torch.exp(-(x - y).square().sum() / 2)  # of bandwidth 1
        >>> bool(((phi_x * phi_y).sum() - kernel).abs() < 0.03)
        True

    References:
        Feng et al. (FedRF-TCA, 2023), equation 5, transposed: a row is a sample here.
    """
    check_samples("x", x)
    if frequencies.dim() != 2 or frequencies.shape[1] != x.shape[1] or len(frequencies) < 1:
        raise ValueError(
            f"frequencies (Omega) must have shape (N, {x.shape[1]}) for samples of shape {tuple(x.shape)}, "
            f"got {tuple(frequencies.shape)}: draw them with sample_frequencies(num, dim={x.shape[1]}, ...)"
        )
    phase = x @ frequencies.to(x).T
    return torch.cat([phase.cos(), phase.sin()], dim=1).div_(math.sqrt(len(frequencies)))
