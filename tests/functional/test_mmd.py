"""Maximum mean discrepancy against its double sum and its expectation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedlit.functional import (
    mmd_squared,
    random_fourier_features,
    rff_mmd_squared,
    sample_frequencies,
)


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
    assert mmd_squared(*domains, bandwidth, unbiased).item() == pytest.approx(
        by_hand(*domains, bandwidth, unbiased), rel=1e-12
    )


def test_means_under_equal_distributions_are_zero_unbiased_and_known_biased(generator: torch.Generator) -> None:
    """For x, x' ~ N(0, 1), E k(x, x') = (1 + 2/sigma^2)^(-1/2), and the biased mean is (1/n + 1/k)(1 - E k(x, x'))."""
    draws = 500
    estimates = torch.tensor(
        [
            [mmd_squared(x, y, 1.0, unbiased).item() for unbiased in (True, False)]
            for x, y in (
                (torch.randn(8, 1, generator=generator), torch.randn(12, 1, generator=generator)) for _ in range(draws)
            )
        ]
    )
    mean, error = estimates.mean(dim=0), estimates.std(dim=0) / math.sqrt(draws)
    expected = torch.tensor([0.0, (1 / 8 + 1 / 12) * (1 - 3**-0.5)])
    assert ((mean - expected).abs() < 4 * error).all()
    assert expected[1] > 10 * error[1]


def test_float32_keeps_the_digits_of_a_small_discrepancy(generator: torch.Generator) -> None:
    """Means of 1e6 kernel values near 1 cancel to 1e-5; sums in float32 would be off by a part in a hundred."""
    x, y = (torch.randn(1000, 2, generator=generator) for _ in range(2))
    exact = mmd_squared(x.double(), y.double() + 0.1, 20.0).item()
    got = mmd_squared(x.double().float(), (y.double() + 0.1).float(), 20.0)
    assert got.dtype == torch.float32
    assert 0 < exact < 1e-4
    assert got.item() == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("unbiased", [True, False])
def test_gradients_agree_with_finite_differences(unbiased: bool, domains: tuple[Tensor, Tensor]) -> None:
    x, y = (z.clone().requires_grad_() for z in domains)
    assert torch.autograd.gradcheck(lambda a, b: mmd_squared(a, b, 1.0, unbiased), (x, y))


def test_random_features_give_the_biased_discrepancy_of_their_own_kernel(domains: tuple[Tensor, Tensor]) -> None:
    """|mean_s - mean_t|^2 is l^T S^T S l, the biased estimate with S^T S in place of the kernel matrix."""
    phi, psi = (random_fourier_features(z, sample_frequencies(20, 3, 2.0)) for z in domains)
    own = (phi @ phi.T).mean() + (psi @ psi.T).mean() - 2 * (phi @ psi.T).mean()
    assert rff_mmd_squared(phi.mean(0), psi.mean(0)).item() == pytest.approx(own.item(), rel=1e-10)


def test_an_aligner_with_orthonormal_rows_changes_nothing(generator: torch.Generator) -> None:
    source, target = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    wide = torch.linalg.qr(torch.randn(12, 8, generator=generator, dtype=torch.float64)).Q.T
    torch.testing.assert_close(wide @ wide.T, torch.eye(8, dtype=torch.float64))
    torch.testing.assert_close(rff_mmd_squared(source, target, wide), rff_mmd_squared(source, target))


def test_an_aligner_that_does_not_see_the_gap_gives_zero_and_a_multiple_scales_by_its_square(
    generator: torch.Generator,
) -> None:
    source, target = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1.0, 0.0, 0.5])
    blind = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    assert rff_mmd_squared(source, target, blind).item() == 0
    aligner = torch.randn(3, 2, generator=generator)
    assert rff_mmd_squared(source, target, aligner).item() == pytest.approx(4 * (aligner[1] ** 2).sum().item())
    assert rff_mmd_squared(source, target, 3 * aligner).item() == pytest.approx(
        9 * rff_mmd_squared(source, target, aligner).item()
    )


def test_gradient_of_the_aligned_discrepancy_by_hand() -> None:
    # W = (1, 2)^T, gap g = (3, -1): the loss is (g^T W)^2 = 1, its gradient 2 g (g^T W) in W and 2 W (g^T W) in mu_S
    source = torch.tensor([3.0, 0.0], requires_grad=True)
    target = torch.tensor([0.0, 1.0], requires_grad=True)
    aligner = torch.tensor([[1.0], [2.0]], requires_grad=True)
    loss = rff_mmd_squared(source, target, aligner)
    gradients = torch.autograd.grad(loss, [source, target, aligner])
    assert loss.item() == 1
    assert [g.flatten().tolist() for g in gradients] == [[2, 4], [-2, -4], [6, -2]]
