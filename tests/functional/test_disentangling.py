"""Cross-entropy to uniform against torch's, and a bound on mutual information against that of Gaussians."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.functional import mutual_information_bound, uniform_cross_entropy

RHO = 0.8
KNOWN = -0.5 * math.log(1 - RHO**2)
"""Mutual information of two standard normal variables with correlation RHO, 0.511 nats."""


def gaussians(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, noise = torch.randn(2, n, generator=generator, dtype=torch.float64)
    return x, RHO * x + math.sqrt(1 - RHO**2) * noise


def log_ratio(x: Tensor, y: Tensor) -> Tensor:
    """Logarithm of the joint density over the product of both: the best critic."""
    return KNOWN - (RHO**2 * (x.square() + y.square()) - 2 * RHO * x * y) / (2 * (1 - RHO**2))


def test_it_is_the_cross_entropy_to_uniform_targets_and_its_gradient_p_less_one_over_c(
    generator: torch.Generator,
) -> None:
    logits = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = uniform_cross_entropy(logits)
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.full_like(logits, 1 / 3)))
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, (logits.softmax(dim=1) - 1 / 3) / 5)


def test_it_is_least_where_predictions_are_uniform() -> None:
    assert float(uniform_cross_entropy(torch.full((2, 4), 7.0))) == pytest.approx(math.log(4))
    certain = torch.tensor([[200.0, 0.0]], requires_grad=True)
    loss = uniform_cross_entropy(certain)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(100)  # half of 0 and half of 200
    assert certain.grad is not None
    torch.testing.assert_close(certain.grad, torch.tensor([[0.5, -0.5]]))


def test_the_bound_is_a_mean_less_the_logarithm_of_a_mean() -> None:
    joint, independent = torch.tensor([math.log(2), math.log(4)]), torch.tensor([0.0, math.log(3), math.log(2)])
    assert float(mutual_information_bound(joint, independent)) == pytest.approx(1.5 * math.log(2) - math.log(2))
    assert float(mutual_information_bound(joint + 5, independent + 5)) == pytest.approx(0.5 * math.log(2), abs=1e-6)
    assert float(mutual_information_bound(torch.ones(3), torch.ones(2))) == pytest.approx(0, abs=1e-6)


def test_critics_far_out_have_finite_bounds_and_gradients() -> None:
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    bound = mutual_information_bound(far, far)
    bound.backward()
    assert float(bound.detach()) == pytest.approx(math.log(2) - 1e4)
    assert far.grad is not None
    torch.testing.assert_close(far.grad, torch.tensor([-0.5, 0.5]))


def test_the_best_critic_of_gaussians_has_their_mutual_information_and_others_less(generator: torch.Generator) -> None:
    x, y = gaussians(200_000, generator)
    for factor, expected in ((1.0, KNOWN), (0.5, None), (1.5, None), (-1.0, None)):
        own, others = factor * log_ratio(x, y), factor * log_ratio(x, y.roll(1))
        bound = float(mutual_information_bound(own, others))
        assert bound == pytest.approx(KNOWN, abs=0.02) if expected else bound < KNOWN - 0.05


def test_of_few_pairs_it_is_too_high_in_the_mean(generator: torch.Generator) -> None:
    x, y = gaussians(4_000, generator)
    batches = zip(x.split(4), y.split(4), strict=True)
    bounds = [mutual_information_bound(log_ratio(u, v), log_ratio(u, v.roll(1))) for u, v in batches]
    assert float(torch.stack(bounds).mean()) > KNOWN + 0.1
