"""Kernels and discrepancies against scikit-learn and numpy; random features against kernels and distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import pairwise
from torch import Tensor

from fedlit import functional as fn

KERNELS = [fn.gaussian_kernel, fn.laplace_kernel, fn.cauchy_kernel]


@pytest.fixture
def pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (7, 5))


@pytest.mark.parametrize("bandwidth", [0.3, 1.0, 5.0])
def test_agree_with_scikit_learn_and_numpy(pair: tuple[Tensor, Tensor], bandwidth: float) -> None:
    x, y = pair
    rbf = pairwise.rbf_kernel(x.numpy(), y.numpy(), gamma=1 / (2 * bandwidth**2))
    np.testing.assert_allclose(fn.gaussian_kernel(x, y, bandwidth).numpy(), rbf, rtol=1e-12)
    laplacian = pairwise.laplacian_kernel(x.numpy(), y.numpy(), gamma=1 / bandwidth)
    np.testing.assert_allclose(fn.laplace_kernel(x, y, bandwidth).numpy(), laplacian, rtol=1e-12)
    difference = x.numpy()[:, None] - y.numpy()[None]
    cauchy = (1 / (1 + (difference / bandwidth) ** 2)).prod(axis=2)
    np.testing.assert_allclose(fn.cauchy_kernel(x, y, bandwidth).numpy(), cauchy, rtol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_near_samples_far_from_the_origin_keep_their_distance(kernel: Callable[..., Tensor]) -> None:
    """In float32, |x|^2 + |y|^2 - 2xy of samples at 1000 would have errors of 0.1: here the distances are exact."""
    x = torch.tensor([[1000.0, 1000.0], [1001.0, 1000.0]])
    torch.testing.assert_close(kernel(x, x, 1.0), kernel(x - 1000, x - 1000, 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", [fn.gaussian_kernel, fn.cauchy_kernel])
def test_gradient_between_coincident_samples_is_zero(kernel: Callable[..., Tensor]) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(kernel(x, torch.ones(2, 3), 1.0).sum(), x)
    assert gradient.abs().max() < 1e-6


EXACT: dict[fn.Kernel, Callable[..., Tensor]] = {
    "gaussian": fn.gaussian_kernel,
    "laplace": fn.laplace_kernel,
    "cauchy": fn.cauchy_kernel,
}


@pytest.mark.parametrize("kernel", list(EXACT))
def test_inner_products_estimate_the_kernel(kernel: fn.Kernel, generator: torch.Generator) -> None:
    """Each is a mean of N cosines of variance (1 + k(2d))/2 - k(d)^2 <= 1/2: 5 standard errors over 45 pairs."""
    x = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    number = 200_000
    features = fn.random_fourier_features(x, fn.sample_frequencies(number, 3, 1.7, kernel, seed=3))
    error = (features @ features.T - EXACT[kernel](x, x, 1.7)).abs()
    assert error.max() < 5 / math.sqrt(2 * number)
    # a wrong distribution, such as that of another kernel, is much further away
    others = [EXACT[other](x, x, 1.7) for other in EXACT if other != kernel]
    assert min((features @ features.T - other).abs().max() for other in others) > 20 / math.sqrt(2 * number)


@pytest.mark.parametrize(
    ("kernel", "distribution"),
    [("gaussian", scipy.stats.norm), ("laplace", scipy.stats.cauchy), ("cauchy", scipy.stats.laplace)],
)
def test_frequencies_have_the_kernels_spectral_distribution(kernel: fn.Kernel, distribution: object) -> None:
    draws = fn.sample_frequencies(5000, 4, 2.5, kernel).flatten().numpy()
    assert scipy.stats.kstest(draws, distribution(scale=1 / 2.5).cdf).pvalue > 0.01
    assert scipy.stats.kstest(draws, distribution(scale=1 / 2.0).cdf).pvalue < 1e-6
    assert abs(scipy.stats.spearmanr(draws[:-1], draws[1:]).statistic) < 4 / math.sqrt(len(draws))


@pytest.mark.parametrize("kernel", list(EXACT))
def test_frequencies_depend_on_their_seed_alone(kernel: fn.Kernel) -> None:
    first = fn.sample_frequencies(50, 3, 1.0, kernel, seed=7)
    assert (first.dtype, first.device.type, first.shape) == (torch.float32, "cpu", (50, 3))
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # where nothing can be drawn
            second = fn.sample_frequencies(50, 3, 1.0, kernel, seed=7)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(first, second)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(first, fn.sample_frequencies(50, 3, 1.0, kernel, seed=8))


def test_the_numbers_of_a_seed_stay_the_same() -> None:
    """Clients with different versions would not understand each other's messages otherwise."""
    golden = {
        "gaussian": [-2.310411692, -0.373250872],
        "laplace": [10.597729683, 0.764767289],
        "cauchy": [2.81517911, 0.537237585],
    }
    for kernel, numbers in golden.items():
        assert fn.sample_frequencies(8, 2, 1.0, kernel)[0].tolist() == pytest.approx(numbers, rel=1e-6)


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
def test_the_discrepancy_is_the_double_sum_of_its_definition(
    unbiased: bool, bandwidth: float, domains: tuple[Tensor, Tensor]
) -> None:
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


def test_the_aligned_discrepancy_by_hand() -> None:
    """W = (1, 2)^T and a gap of (3, -1): (3 - 2)^2."""
    means = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])
    assert fn.rff_mmd_squared(*means, torch.tensor([[1.0], [2.0]])).item() == 1


def samples(n: int = 13, k: int = 9, p: int = 3, shift: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    return x, shift + 1.5 * torch.randn(k, p, generator=generator, dtype=torch.float64)


def test_the_middle_bandwidth_is_the_mean_over_all_pairs_of_both_domains() -> None:
    x, y = samples()
    distances = pairwise.euclidean_distances(np.concatenate([x, y]), squared=True)
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
            k = pairwise.rbf_kernel(z, gamma=1 / b)
            n = len(z)
            within += (k.sum() - np.trace(k)) / (n * n - n) if unbiased else k.mean()
        expected += (within - 2 * pairwise.rbf_kernel(x, y, gamma=1 / b).mean()) / len(bandwidths)
    got = fn.multi_kernel_mmd(x, y, torch.tensor(bandwidths), unbiased=unbiased)
    assert float(got) == pytest.approx(expected, rel=1e-12)


def test_rows_of_a_mixture_have_the_spread_of_their_kernel() -> None:
    unit = fn.sample_frequencies(6, 4, 1.0)
    got = fn.mixture_frequencies(unit, [0.5, 2.0, 8.0])
    factors = torch.tensor([2.0, 2.0, 1.0, 1.0, 0.5, 0.5])
    torch.testing.assert_close(got, unit * factors[:, None])
    torch.testing.assert_close(fn.mixture_frequencies(unit, [2 * 0.7**2]), fn.sample_frequencies(6, 4, 0.7))
