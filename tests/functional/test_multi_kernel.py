"""Several kernels at once: bandwidths over all pairs, the discrepancy by scikit-learn, and random features of both."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import euclidean_distances, rbf_kernel
from torch import Tensor

from fedlit.functional import (
    kernel_ladder,
    mean_pair_distance,
    mixture_frequencies,
    multi_kernel_mmd,
    random_fourier_features,
    rff_mmd_squared,
    sample_frequencies,
)


def samples(n: int = 13, k: int = 9, p: int = 3, shift: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    return x, shift + 1.5 * torch.randn(k, p, generator=generator, dtype=torch.float64)


def test_the_middle_bandwidth_is_the_mean_over_all_pairs_of_both_domains() -> None:
    x, y = samples()
    distances = euclidean_distances(np.concatenate([x, y]), squared=True)
    n = len(distances)
    b = distances.sum() / (n * n - n)
    torch.testing.assert_close(kernel_ladder(x, y), b * torch.tensor([0.25, 0.5, 1, 2, 4], dtype=torch.float64))
    expected = b * torch.tensor([1 / 3, 1.0], dtype=torch.float64)
    torch.testing.assert_close(kernel_ladder(x, y, num_kernels=2, factor=3.0), expected)
    torch.testing.assert_close(kernel_ladder(x + 1e6, y + 1e6), kernel_ladder(x, y), rtol=1e-8, atol=0)


def test_the_middle_bandwidth_follows_from_two_means_of_each_client() -> None:
    """2n/(n-1) (mean |z|^2 - |mean z|^2): weighted by samples, means of single clients' means are all that it takes."""
    x, y = samples()
    n = len(x) + len(y)
    mean = (len(x) * x.mean(0) + len(y) * y.mean(0)) / n
    square = (len(x) * x.square().mean() + len(y) * y.square().mean()) / n
    b = kernel_ladder(x, y, num_kernels=1)
    assert mean_pair_distance(mean, square, n) == pytest.approx(float(b), rel=1e-12)
    assert mean_pair_distance(x[0], x[0].square().mean(), 1) == 0


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
    got = multi_kernel_mmd(x, y, torch.tensor(bandwidths), unbiased=unbiased)
    assert float(got) == pytest.approx(expected, rel=1e-12)


def test_equal_batches_give_zero_and_neither_order_nor_place_matters() -> None:
    x, y = samples()
    b = kernel_ladder(x, y)
    assert float(multi_kernel_mmd(x, x.flip(0), b)) == pytest.approx(0, abs=1e-14)
    value = float(multi_kernel_mmd(x, y, b))
    assert value > 0.01
    assert float(multi_kernel_mmd(x.flip(0), y.roll(4, 0), b)) == pytest.approx(value, rel=1e-12)
    assert float(multi_kernel_mmd(x + 5, y + 5, b)) == pytest.approx(value, rel=1e-10)
    assert float(multi_kernel_mmd(3 * x, 3 * y, kernel_ladder(3 * x, 3 * y))) == pytest.approx(value, rel=1e-12)


def test_the_discrepancy_has_the_right_gradient() -> None:
    x, y = samples(5, 4, 2)
    assert torch.autograd.gradcheck(lambda a: multi_kernel_mmd(a, y, [1.0, 3.0]), x.requires_grad_())


def test_rows_of_a_mixture_have_the_spread_of_their_kernel() -> None:
    unit = sample_frequencies(6, 4, 1.0)
    got = mixture_frequencies(unit, [0.5, 2.0, 8.0])
    factors = torch.tensor([2.0, 2.0, 1.0, 1.0, 0.5, 0.5])
    torch.testing.assert_close(got, unit * factors[:, None])
    torch.testing.assert_close(mixture_frequencies(unit, [2 * 0.7**2]), sample_frequencies(6, 4, 0.7))


def test_random_features_of_the_mixture_estimate_the_discrepancy_ever_better() -> None:
    """The root mean square of relative errors over seeds falls as one over the root of N."""
    x, y = samples(40, 40, 5)
    b = kernel_ladder(x, y)
    exact = float(multi_kernel_mmd(x, y, b))
    errors = []
    for num in (50, 800, 12800):
        squares = []
        for seed in range(10):
            frequencies = mixture_frequencies(sample_frequencies(num, 5, 1.0, seed=seed), b)
            means = [random_fourier_features(z, frequencies).mean(0) for z in (x, y)]
            squares.append((float(rff_mmd_squared(*means)) / exact - 1) ** 2)
        errors.append(math.sqrt(sum(squares) / len(squares)))
    assert 0.05 < errors[0] < 0.3
    for few, many in pairwise(errors):
        assert 2 < few / many < 8  # 16 times the features
    assert errors[-1] < 0.02
