"""Maximum mean discrepancy against its double sum, and with several kernels by scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import euclidean_distances, rbf_kernel
from torch import Tensor

from fedlit import functional as fn


def by_hand(x: Tensor, y: Tensor, bandwidth: float, unbiased: bool) -> float:
    def k(a: Tensor, b: Tensor) -> float:
        return math.exp(-sum((u - v) ** 2 for u, v in zip(a.tolist(), b.tolist(), strict=True)) / (2 * bandwidth**2))

    def within(z: Tensor) -> float:
        pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j or not unbiased]
        return sum(k(z[i], z[j]) for i, j in pairs) / len(pairs)

    return within(x) + within(y) - 2 * sum(k(a, b) for a in x for b in y) / (len(x) * len(y))


@pytest.fixture
def domains(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(9, 3, generator=generator, dtype=torch.float64) + 0.5


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("bandwidth", [0.5, 3.0])
def test_is_the_double_sum_of_its_definition(unbiased: bool, bandwidth: float, domains: tuple[Tensor, Tensor]) -> None:
    assert fn.mmd_squared(*domains, bandwidth, unbiased).item() == pytest.approx(
        by_hand(*domains, bandwidth, unbiased), rel=1e-12
    )


def test_float32_keeps_the_digits_of_a_small_discrepancy(generator: torch.Generator) -> None:
    """Means of 1e6 kernel values near 1 cancel to 1e-5; sums in float32 would be off by a part in a hundred."""
    x, y = (torch.randn(1000, 2, generator=generator) for _ in range(2))
    exact = fn.mmd_squared(x.double(), y.double() + 0.1, 20.0).item()
    got = fn.mmd_squared(x.double().float(), (y.double() + 0.1).float(), 20.0)
    assert got.dtype == torch.float32
    assert 0 < exact < 1e-4
    assert got.item() == pytest.approx(exact, rel=1e-4)


def samples(n: int = 13, k: int = 9, p: int = 3, shift: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    return x, shift + 1.5 * torch.randn(k, p, generator=generator, dtype=torch.float64)


def test_the_middle_bandwidth_is_the_mean_over_all_pairs_of_both_domains() -> None:
    x, y = samples()
    distances = euclidean_distances(np.concatenate([x, y]), squared=True)
    n = len(distances)
    b = distances.sum() / (n * n - n)
    torch.testing.assert_close(fn.kernel_ladder(x, y), b * torch.tensor([0.25, 0.5, 1, 2, 4], dtype=torch.float64))
    expected = b * torch.tensor([1 / 3, 1.0], dtype=torch.float64)
    torch.testing.assert_close(fn.kernel_ladder(x, y, num_kernels=2, factor=3.0), expected)
    torch.testing.assert_close(fn.kernel_ladder(x + 1e6, y + 1e6), fn.kernel_ladder(x, y), rtol=1e-8, atol=0)


def test_the_middle_bandwidth_follows_from_two_means_of_each_client() -> None:
    """2n/(n-1) (mean |z|^2 - |mean z|^2): weighted by samples, means of single clients' means are all that it takes."""
    x, y = samples()
    n = len(x) + len(y)
    mean = (len(x) * x.mean(0) + len(y) * y.mean(0)) / n
    square = (len(x) * x.square().mean() + len(y) * y.square().mean()) / n
    b = fn.kernel_ladder(x, y, num_kernels=1)
    assert fn.mean_pair_distance(mean, square, n) == pytest.approx(float(b), rel=1e-12)
    assert fn.mean_pair_distance(x[0], x[0].square().mean(), 1) == 0


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_discrepancy_is_the_mean_over_kernels_by_scikit_learn(unbiased: bool) -> None:
    x, y = samples()
    bandwidths = [0.5, 2.0, 7.0]
    expected = 0.0
    for b in bandwidths:
        within = 0.0
        for z in (x, y):
            k = rbf_kernel(z, gamma=1 / b)
            n = len(z)
            within += (k.sum() - np.trace(k)) / (n * n - n) if unbiased else k.mean()
        expected += (within - 2 * rbf_kernel(x, y, gamma=1 / b).mean()) / len(bandwidths)
    got = fn.multi_kernel_mmd(x, y, torch.tensor(bandwidths), unbiased=unbiased)
    assert float(got) == pytest.approx(expected, rel=1e-12)


def test_rows_of_a_mixture_have_the_spread_of_their_kernel() -> None:
    unit = fn.sample_frequencies(6, 4, 1.0)
    got = fn.mixture_frequencies(unit, [0.5, 2.0, 8.0])
    factors = torch.tensor([2.0, 2.0, 1.0, 1.0, 0.5, 0.5])
    torch.testing.assert_close(got, unit * factors[:, None])
    torch.testing.assert_close(fn.mixture_frequencies(unit, [2 * 0.7**2]), fn.sample_frequencies(6, 4, 0.7))
