"""Random Fourier features, whose inner products estimate a kernel, and sums over them, which clients can add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from fedlit.checks import check_at_least, check_one_of, refuse
from fedlit.functional.checks import check_bandwidth, check_finite, check_same_shape, check_samples, check_shape
from fedlit.functional.kernels import Kernel


def sample_frequencies(num: int, dim: int, bandwidth: float, kernel: Kernel = "gaussian", seed: int = 0) -> Tensor:
    r"""Random frequencies of a kernel, shape (N, p), float32, the same numbers for everyone who knows the seed.

    Entries are independent: normal with standard deviation 1/sigma for the Gaussian kernel, Cauchy with scale 1/sigma
    for the Laplace kernel, Laplace with scale 1/sigma for the Cauchy kernel. See Feng et al. (FedRF-TCA, 2023),
    Algorithm 1, line 2; Rahimi and Recht, NeurIPS 2007, figure 1.

    Args:
        num: Number of frequencies N, at least 1; there will be 2N features.
        dim: Number of input features p, at least 1.
        bandwidth: Kernel width sigma, a positive length in the units of the samples.
        kernel: Which kernel the features estimate.
        seed: Seed that all clients share.
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
    deviation below :math:`1/\sqrt{2N}`. See Feng et al. (FedRF-TCA, 2023), equation 5, transposed: a row is a sample
    here.

    Args:
        x: Samples, shape (n, p).
        frequencies: Matrix Omega, shape (N, p), from `sample_frequencies`.
    """
    check_samples("x", x)
    way_out = "draw them with sample_frequencies, whose dim is that of the samples"
    check_shape("frequencies (Omega)", frequencies, "N > 0", x.shape[1], way_out=way_out)
    phase = x @ frequencies.to(x).T
    return torch.cat([phase.cos(), phase.sin()], dim=1).div_(math.sqrt(len(frequencies)))


CHUNK = 4096
"""Rows whose features are in memory at once: 32 MB at N = 500, and matrix products are at full speed."""


@dataclass(frozen=True)
class RandomFeatureSums:
    r"""Sums over the random Fourier features of one domain (or client), all that RF-TCA needs of it.

    Sums of clients' sums are those of the pooled samples: ``first + second``. They are not private: one sample's sums
    are its features.

    Attributes:
        second_moment: Sum of :math:`\phi \phi^\top` over samples, shape (2N, 2N), float64.
        total: Sum of :math:`\phi` over samples, shape (2N,), float64.
        count: Number of samples.
    """

    second_moment: Tensor
    total: Tensor
    count: int

    @classmethod
    def of(cls, features: Tensor) -> RandomFeatureSums:
        """Sum over the rows of a matrix of random Fourier features, shape (n, 2N), in float64 on the same device."""
        check_samples("features", features)
        check_finite("features", features)
        rows = features.double()
        return cls(second_moment=rows.T @ rows, total=rows.sum(dim=0), count=len(rows))

    def __add__(self, other: RandomFeatureSums) -> RandomFeatureSums:
        if not isinstance(other, RandomFeatureSums):
            return NotImplemented
        check_same_shape("total", other.total, "the first total", self.total, "use the same frequencies at all clients")
        return RandomFeatureSums(
            second_moment=self.second_moment + other.second_moment,
            total=self.total + other.total,
            count=self.count + other.count,
        )


def double_features(chunk: Tensor, frequencies: Tensor) -> Tensor:
    """Random Fourier features in float64."""
    return random_fourier_features(chunk.double(), frequencies)


@torch.no_grad()
def random_feature_sums(batches: Iterable[Tensor], frequencies: Tensor) -> RandomFeatureSums:
    """Sums over the random Fourier features of one domain's samples, in one pass, on their device.

    Memory is for 4096 rows of features and one matrix of 2N x 2N. Features and sums are float64, and rows are regrouped
    first: the same samples in the same order give the same bits in whatever batches they come.

    Args:
        batches: Samples in batches of shape (b, p), such as a list, a generator or ``x.split(1000)``.
        frequencies: Matrix Omega, shape (N, p), from `sample_frequencies`.
    """
    return summed(double_features(chunk, frequencies) for chunk in _chunks(batches, CHUNK))


def summed(chunks: Iterable[Tensor]) -> RandomFeatureSums:
    """Sums over chunks of random Fourier features in float64."""
    second: Tensor | None = None
    total: Tensor | None = None
    count = 0
    for features in chunks:
        width = features.shape[1]
        if second is None or total is None:
            second, total = features.new_zeros(width, width), features.new_zeros(width)
        # of a symmetric matrix, three quarters are enough
        half = width // 2
        cosines, sines = features[:, :half], features[:, half:]
        second[:half, :half].addmm_(cosines.T, cosines)
        second[half:, half:].addmm_(sines.T, sines)
        second[:half, half:].addmm_(cosines.T, sines)
        total += features.sum(dim=0)
        count += len(features)
    if second is None or total is None:
        refuse("batches", "of at least 1 sample", 0)
    half = len(total) // 2
    second[half:, :half] = second[:half, half:].T
    return RandomFeatureSums(second_moment=second, total=total, count=count)


def _chunks(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Cut and join batches to ``size`` rows each, so that sums do not depend on how samples came in batches."""
    held: list[Tensor] = []
    rows = 0
    for batch in batches:
        check_samples("batches", batch)
        check_finite("batches", batch)
        for piece in torch.split(batch, size):
            while len(piece):
                head, piece = piece[: size - rows], piece[size - rows :]
                held.append(head)
                rows += len(head)
                if rows == size:
                    yield torch.cat(held)
                    held, rows = [], 0
    if held:
        yield torch.cat(held)
