"""Random Fourier features: maps whose inner products estimate a kernel."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from fedlit.checks import check_at_least, check_one_of
from fedlit.functional.checks import check_bandwidth, check_samples, check_shape
from fedlit.functional.kernels import Kernel


def sample_frequencies(num: int, dim: int, bandwidth: float, kernel: Kernel = "gaussian", seed: int = 0) -> Tensor:
    r"""Random frequencies of a kernel, shape (N, p), float32, the same numbers for everyone who knows the seed.

    Entries are independent: normal with standard deviation 1/sigma for the Gaussian kernel, Cauchy with scale 1/sigma
    for the Laplace kernel, Laplace with scale 1/sigma for the Cauchy kernel.

    Args:
        num: Number of frequencies N, at least 1. There will be 2N features.
        dim: Number of input features p, at least 1.
        bandwidth: Kernel width sigma, a positive length in the units of the samples.
        kernel: Which kernel the features estimate.
        seed: Seed that all clients share.

    References:
        Feng et al. (FedRF-TCA, 2023), Algorithm 1, line 2; Rahimi and Recht, NeurIPS 2007, figure 1. The published
        code draws from numpy's global generator.
    """
    check_at_least("num (N)", num, 1)
    check_at_least("dim (p)", dim, 1)
    check_bandwidth(bandwidth)
    check_one_of("kernel", kernel, get_args(Kernel))
    # on the CPU in float64 from a separate generator, so that no global seed, default dtype or device matters
    generator = torch.Generator(device="cpu").manual_seed(seed)
    if kernel == "gaussian":
        draws = torch.randn(num, dim, generator=generator, dtype=torch.float64, device="cpu")
    else:
        # the quantile of a uniform number; in-place samplers depend on the maths library torch was built with
        uniform = torch.rand(num, dim, generator=generator, dtype=torch.float64, device="cpu") - 0.5
        if kernel == "laplace":
            draws = torch.tan(math.pi * uniform)
        else:
            # 1 - 2|u| is 0 for one number of 2^53
            draws = -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_max(0.5 - 2.0**-54))
    return (draws / bandwidth).to(torch.float32)


def random_fourier_features(x: Tensor, frequencies: Tensor) -> Tensor:
    r"""Random Fourier features of samples, each of length 1, shape (n, 2N), all cosines before all sines.

    .. math:: \phi(x) = \frac{1}{\sqrt N} \left[\cos(\Omega x), \sin(\Omega x)\right]

    Inner products :math:`\phi(x)^\top \phi(y)` estimate the kernel of the frequencies without bias, with a standard
    deviation below :math:`1/\sqrt{2N}`, and depend on the difference of the samples alone.

    Args:
        x: Samples, shape (n, p).
        frequencies: Matrix Omega, shape (N, p), from `sample_frequencies`.

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
    way_out = "draw them with sample_frequencies, whose dim is that of the samples"
    check_shape("frequencies (Omega)", frequencies, "N > 0", x.shape[1], way_out=way_out)
    phase = x @ frequencies.to(x).T
    return torch.cat([phase.cos(), phase.sin()], dim=1).div_(math.sqrt(len(frequencies)))
