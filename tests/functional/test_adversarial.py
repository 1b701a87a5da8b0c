"""Adversarial losses: against torch's cross-entropy, slopes by finite differences and by hand, and identities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import entropy
from torch import Tensor, nn

from fedlit import functional as fn


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_domain_loss_is_cross_entropy_in_which_both_sides_and_all_sources_weigh_the_same() -> None:
    sources, target = [numbers(5), numbers(2, seed=1)], numbers(7, seed=2)
    labels = torch.cat([torch.ones(7), torch.zeros(7)]).double()
    weights = torch.cat([torch.full((5,), 1 / 20), torch.full((2,), 1 / 8), torch.full((7,), 1 / 14)]).double()
    logits = torch.cat([*sources, target])
    expected = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    torch.testing.assert_close(fn.domain_adversarial_loss(sources, target), expected, atol=1e-7, rtol=0)
    assert fn.domain_adversarial_loss(sources[::-1], target) == fn.domain_adversarial_loss(sources, target)


@pytest.mark.parametrize("progress", [0.0, 0.05, 1.0])
def test_the_schedule_is_the_papers(progress: float) -> None:
    assert fn.reversal_weight(progress) == pytest.approx(2 / (1 + math.exp(-10 * progress)) - 1, abs=1e-15)


@pytest.mark.parametrize("keepdim", [False, True], ids=["(n,)", "(n, 1)"])
def test_the_penalty_of_a_linear_critic_is_that_of_its_weights_length_wherever_it_is_looked_at(keepdim: bool) -> None:
    weight = torch.tensor([[3.0], [4.0]], requires_grad=True)
    penalty = fn.gradient_penalty(lambda x: x @ weight if keepdim else (x @ weight)[:, 0], torch.randn(7, 2))
    assert float(penalty) == pytest.approx((5 - 1) ** 2)
    penalty.backward()
    torch.testing.assert_close(weight.grad, 2 * (5 - 1) * weight.detach() / 5)


def test_a_critic_without_a_slope_is_penalised_by_one_and_has_a_gradient() -> None:
    weight = torch.zeros(2, 1, requires_grad=True)
    penalty = fn.gradient_penalty(lambda x: x @ weight, torch.ones(3, 2))
    penalty.backward()
    assert float(penalty.detach()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(weight.grad, torch.zeros(2, 1))  # type: ignore[arg-type]


def test_points_get_no_gradient_and_it_works_where_none_are_taken() -> None:
    points, critic = torch.randn(4, 2, requires_grad=True), nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    penalty = fn.gradient_penalty(critic, points * 2)
    penalty.backward()
    assert points.grad is None
    with torch.no_grad():
        assert float(fn.gradient_penalty(critic, points * 2)) == float(penalty.detach())


def test_the_multilinear_map_is_the_kronecker_product_of_each_sample() -> None:
    features, probabilities = numbers(4, 3), numbers(4, 2, seed=1).softmax(dim=1)
    expected = np.stack([np.kron(p, f) for p, f in zip(probabilities.numpy(), features.numpy(), strict=True)])
    assert np.array_equal(fn.multilinear_map(features, probabilities).numpy(), expected)


def test_certain_predictions_weigh_more_and_the_mean_is_one() -> None:
    probabilities = numbers(5, 3).softmax(dim=1)
    raw = 1 + np.exp(-entropy(probabilities.numpy(), axis=1))
    np.testing.assert_allclose(fn.entropy_weights(probabilities), raw / raw.mean(), rtol=1e-12)
    certain, unsure = fn.entropy_weights(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist()
    assert certain / unsure == pytest.approx(2 / 1.5)
