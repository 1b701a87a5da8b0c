"""Random Fourier features against the kernels they estimate and against scipy's distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy.stats
import torch
from torch import Tensor

from fedlit.functional import (
    Kernel,
    cauchy_kernel,
    gaussian_kernel,
    laplace_kernel,
    random_fourier_features,
    sample_frequencies,
)

EXACT: dict[Kernel, Callable[..., Tensor]] = {
    "gaussian": gaussian_kernel,
    "laplace": laplace_kernel,
    "cauchy": cauchy_kernel,
}


@pytest.mark.parametrize("kernel", list(EXACT))
def test_inner_products_estimate_the_kernel(kernel: Kernel, generator: torch.Generator) -> None:
    """Each is a mean of N cosines of variance (1 + k(2d))/2 - k(d)^2 <= 1/2: 5 standard errors over 45 pairs."""
    x = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    number = 200_000
    features = random_fourier_features(x, sample_frequencies(number, 3, 1.7, kernel, seed=3))
    error = (features @ features.T - EXACT[kernel](x, x, 1.7)).abs()
    assert error.max() < 5 / math.sqrt(2 * number)
    # a wrong distribution, such as that of another kernel, is much further away
    others = [EXACT[other](x, x, 1.7) for other in EXACT if other != kernel]
    assert min((features @ features.T - other).abs().max() for other in others) > 20 / math.sqrt(2 * number)


def test_error_of_the_estimate_falls_as_one_over_the_root_of_their_number(generator: torch.Generator) -> None:
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    exact = gaussian_kernel(x, x, 2.0)

    def error(number: int) -> float:
        frequencies = [sample_frequencies(number, 3, 2.0, seed=seed) for seed in range(20)]
        features = [random_fourier_features(x, omega) for omega in frequencies]
        return sum(torch.linalg.norm(phi @ phi.T - exact).item() ** 2 for phi in features) ** 0.5

    assert error(100) / error(1600) == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize(
    ("kernel", "distribution"),
    [("gaussian", scipy.stats.norm), ("laplace", scipy.stats.cauchy), ("cauchy", scipy.stats.laplace)],
)
def test_frequencies_have_the_kernels_spectral_distribution(kernel: Kernel, distribution: object) -> None:
    draws = sample_frequencies(5000, 4, 2.5, kernel).flatten().numpy()
    assert scipy.stats.kstest(draws, distribution(scale=1 / 2.5).cdf).pvalue > 0.01
    assert scipy.stats.kstest(draws, distribution(scale=1 / 2.0).cdf).pvalue < 1e-6
    assert abs(scipy.stats.spearmanr(draws[:-1], draws[1:]).statistic) < 4 / math.sqrt(len(draws))


@pytest.mark.parametrize("kernel", list(EXACT))
def test_frequencies_depend_on_their_seed_alone(kernel: Kernel) -> None:
    first = sample_frequencies(50, 3, 1.0, kernel, seed=7)
    assert (first.dtype, first.device.type, first.shape) == (torch.float32, "cpu", (50, 3))
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # where nothing can be drawn
            second = sample_frequencies(50, 3, 1.0, kernel, seed=7)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(first, second)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(first, sample_frequencies(50, 3, 1.0, kernel, seed=8))


def test_the_numbers_of_a_seed_stay_the_same() -> None:
    """Clients with different versions would not understand each other's messages otherwise."""
    golden = {
        "gaussian": [-2.310411692, -0.373250872],
        "laplace": [10.597729683, 0.764767289],
        "cauchy": [2.81517911, 0.537237585],
    }
    for kernel, numbers in golden.items():
        assert sample_frequencies(8, 2, 1.0, kernel)[0].tolist() == pytest.approx(numbers, rel=1e-6)


def test_features_by_hand() -> None:
    # phases: 2 * pi/4 = pi/2 and 2 * pi/2 = pi; cosines 0, -1 and sines 1, 0, over sqrt(2)
    features = random_fourier_features(
        torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([[math.pi / 4], [math.pi / 2]], dtype=torch.float64)
    )
    half = math.sqrt(0.5)
    assert features[0].tolist() == pytest.approx([0, -half, half, 0], abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_sample_has_length_one(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = 10 * torch.randn(20, 5, generator=generator, dtype=torch.float64).to(dtype)
    features = random_fourier_features(x, sample_frequencies(33, 5, 1.0))
    assert (features.dtype, features.shape) == (dtype, (20, 66))
    torch.testing.assert_close(features.norm(dim=1), torch.ones(20, dtype=dtype))


def test_gradients_agree_with_finite_differences(generator: torch.Generator) -> None:
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    frequencies = sample_frequencies(5, 3, 1.0)
    assert torch.autograd.gradcheck(lambda a: random_fourier_features(a, frequencies), (x,))
