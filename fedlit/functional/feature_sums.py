"""Sums over random Fourier features, from which RF-TCA follows: clients can add theirs up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlit.checks import refuse
from fedlit.functional.checks import check_finite, check_same_shape, check_samples
from fedlit.functional.random_features import random_fourier_features

CHUNK = 4096
"""Rows whose features are in memory at once: 32 MB at N = 500, and matrix products are at full speed."""


@dataclass(frozen=True)
class RandomFeatureSums:
    r"""Sums over the random Fourier features of one domain (or client), all that RF-TCA needs of it.

    Sums of clients' sums are those of the pooled samples: ``first + second``. The size does not depend on the number of
    samples. They are not private: one sample's sums are its features.

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
    before they are summed: the same samples in the same order give the same bits in whatever batches they come.

    Args:
        batches: Samples in batches of shape (b, p), such as a list, a generator or ``x.split(1000)``. Batches may
            differ in size.
        frequencies: Matrix Omega, shape (N, p), from `sample_frequencies`.

    References:
        The scatter of Feng et al. (FedRF-TCA, 2023), Algorithm 1, as a sum over samples, which the paper does not use.
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
