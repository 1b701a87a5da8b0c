"""The Taylor-expanded discrepancy against double sums over pairs of samples, autograd of these, and closed forms."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor

from fedlit import functional as fn

DEGREES = [1, 2, 3]
pytestmark = pytest.mark.filterwarnings("ignore:.*repels")


def truncated(squared: Tensor, alpha: float, degree: int, center: float) -> Tensor:
    """Sum over q of (-alpha (u - c))^q / q!, times exp(-alpha c): the definition, on distances."""
    z = -alpha * (squared - center)
    return math.exp(-alpha * center) * sum(z**q / math.factorial(q) for q in range(degree + 1))  # type: ignore[return-value]


def distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y[None]).square().sum(dim=2)


def by_pairs(x: Tensor, y: Tensor, alpha: float, degree: int, center: float, within: str = "truncated") -> Tensor:
    """All pairs, one by one."""

    def mean_within(z: Tensor) -> Tensor:
        u = distances(z, z)
        k = truncated(u, alpha, degree, center) if within == "truncated" else torch.exp(-alpha * u)
        keep = ~torch.eye(len(z), dtype=torch.bool)
        return k[keep].mean()

    return mean_within(x) + mean_within(y) - 2 * truncated(distances(x, y), alpha, degree, center).mean()


@pytest.fixture
def domains(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    return x, 1.3 * torch.randn(7, 4, generator=generator, dtype=torch.float64) + 0.5


@pytest.mark.parametrize(
    ("length", "degree", "number"),
    [(4, 1, 6), (4, 2, 21), (128, 2, 8515), (1, 3, 10), (3, 3, 4 + 3 * 3 + 2 * 6 + 10)],
)
def test_number_of_moments(length: int, degree: int, number: int) -> None:
    """L + 2 at degree 1, and 3 + 2L + L(L+1)/2 at degree 2, for L features."""
    assert fn.num_taylor_moments(length, degree) == number
    assert fn.taylor_moments(torch.randn(2, length), degree).shape == (number,)


@pytest.mark.parametrize("center", [0.0, 2.5])
@pytest.mark.parametrize("degree", DEGREES)
def test_the_gradient_is_a_linear_map_of_the_other_domains_moments(
    degree: int, center: float, domains: tuple[Tensor, Tensor]
) -> None:
    """The factorised gradient equals autograd of the truncated kernel to 1e-12."""
    x, y = domains
    x.requires_grad_()
    truncated(distances(x, y), 0.1, degree, center).mean().backward()
    assert x.grad is not None
    found = fn.gradient_map(x, fn.taylor_coefficients(0.1, degree, center)) @ fn.taylor_moments(y, degree)
    torch.testing.assert_close(found.view(9, 4), x.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("within", ["truncated", "exact"])
@pytest.mark.parametrize("center", [0.0, 2.5, None])
@pytest.mark.parametrize("degree", DEGREES)
def test_value_and_gradient_are_those_of_all_pairs(
    degree: int, center: float | None, within: str, domains: tuple[Tensor, Tensor]
) -> None:
    x, y = (each.requires_grad_() for each in domains)
    value = fn.taylor_mmd_squared(x, y, 0.1, degree, center, within)  # type: ignore[arg-type]
    around = float(distances(x, y).detach().mean()) if center is None else center
    expected = by_pairs(x, y, 0.1, degree, around, within)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-13)
    for ours, theirs in zip(torch.autograd.grad(value, [x, y]), torch.autograd.grad(expected, [x, y]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_256_features_at_degree_2_equal_the_pairs(generator: torch.Generator) -> None:
    """There are 33,411 moments; single monomials would be many millions."""
    x, y = torch.randn(2, 64, 256, generator=generator).double().unbind()
    assert fn.taylor_moments(x, 2).shape == (33_411,)
    value = fn.taylor_mmd_squared(x.requires_grad_(), y, 1 / 1024, 2, 512.0)
    expected = by_pairs(x, y, 1 / 1024, 2, 512.0)
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    ours, theirs = (torch.autograd.grad(each, x)[0] for each in (value, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


def test_degree_2_repels_beyond_its_minimum_and_odd_degrees_never() -> None:
    for degree, center in itertools.product(DEGREES, (0.0, 5.0)):
        limit = fn.repelling_distance(0.25, degree, center)
        u = torch.linspace(0, 40, 4001, dtype=torch.float64)
        rising = truncated(u, 0.25, degree, center).diff() > 0
        assert bool(rising[u[1:] <= limit].any()) is False
        assert bool(rising[u[:-1] >= limit].all())
    assert fn.repelling_distance(0.25, 2, 5.0) == 9.0


def test_pairs_that_are_repelled_are_warned_about(domains: tuple[Tensor, Tensor]) -> None:
    with pytest.warns(UserWarning, match=r"\d+% of the pairs .* degree 2 repels: lower alpha \(2;"):
        fn.taylor_mmd_squared(*domains, 2.0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn.taylor_mmd_squared(*domains, 2.0, 3)
        fn.taylor_mmd_squared(*domains, 1 / 50, 2)
