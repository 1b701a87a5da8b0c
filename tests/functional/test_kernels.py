"""Kernels against scikit-learn and numpy; random features against the kernels and scipy's distributions."""

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
