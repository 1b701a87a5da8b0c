"""Losses, of adversaries too: by hand, against torch, numpy and scipy, and at their limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from scipy.stats import entropy
from torch import Tensor, nn

from fedlit import functional as fn


def test_the_alignment_loss_by_hand() -> None:
    aligned = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]])
    other = torch.tensor([0.0, 1.0])
    # mean (1, 1), distance^2 1; squared deviations 1+1, 1+1, 0+4: 8, over 2 is S = 4; Q = (0 + 4 + 10) / 3 + 1
    scale = 4 + 0.01 * (14 / 3 + 1)
    assert fn.alignment_loss(aligned, other).item() == pytest.approx(1.0)
    assert fn.alignment_loss(aligned, other, unbiased=True).item() == pytest.approx(1 - 4 / 3)
    assert fn.alignment_loss(aligned, other, relative=True).item() == pytest.approx(1 / scale)
    assert fn.alignment_loss(aligned, other, relative=True, unbiased=True).item() == pytest.approx((1 - 4 / 3) / scale)


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_single_sample_has_no_spread_and_is_taken_by_its_length(unbiased: bool) -> None:
    """Distance (1 - 3)^2 + 2^2 = 8; lengths 5 and 9."""
    aligned, other = torch.tensor([[1.0, 2.0]]), torch.tensor([3.0, 0.0])
    assert float(fn.alignment_loss(aligned, other, unbiased=unbiased)) == 8.0
    assert float(fn.alignment_loss(aligned, other, unbiased=unbiased, relative=True)) == pytest.approx(8 / 14)
    opposite = fn.alignment_loss(aligned, -aligned[0], unbiased=unbiased, relative=True)
    assert float(opposite) == pytest.approx(2.0)  # |2 f|^2 / 2 |f|^2, the largest there is


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("unbiased", [False, True])
def test_the_relative_loss_is_bounded_and_no_scaling_of_w_changes_it(
    unbiased: bool, size: int, generator: torch.Generator
) -> None:
    """|mean - other|^2 <= 2 (|mean|^2 + |other|^2) <= 2 Q over at least 0.01 Q; less at most S / b over S."""
    point, noise = torch.randn(1, 3, generator=generator), torch.randn(size, 3, generator=generator)
    alike, skewed = point.expand(size, 3).clone(), torch.cat([1e3 * noise[:1], 1e-3 * noise[1:]])
    lower = -1 / size if unbiased and size > 1 else 0.0
    for aligned in (noise, alike, point + 1e-4 * noise, torch.zeros(size, 3), skewed):
        mean, zero = aligned.mean(dim=0), torch.zeros(3)
        for received in (torch.randn(3, generator=generator), torch.full((3,), 1e4), -mean, mean, zero):
            losses = []
            for scale in (1.0, 1e-4, 1e4):
                batch = (scale * aligned).requires_grad_(True)
                loss = fn.alignment_loss(batch, scale * received, unbiased=unbiased, relative=True)
                assert torch.autograd.grad(loss, batch)[0].isfinite().all()
                losses.append(float(loss.detach()))
            assert lower - 1e-5 <= losses[0] <= 200 * (1 + 1e-5)
            assert losses == pytest.approx([losses[0]] * 3, rel=1e-3, abs=1e-5)


def test_it_is_the_cross_entropy_to_uniform_targets_and_its_gradient_p_less_one_over_c(
    generator: torch.Generator,
) -> None:
    logits = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = fn.uniform_cross_entropy(logits)
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.full_like(logits, 1 / 3)))
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, (logits.softmax(dim=1) - 1 / 3) / 5)


def test_the_bound_is_a_mean_less_the_logarithm_of_a_mean() -> None:
    joint, independent = torch.tensor([math.log(2), math.log(4)]), torch.tensor([0.0, math.log(3), math.log(2)])
    assert float(fn.mutual_information_bound(joint, independent)) == pytest.approx(1.5 * math.log(2) - math.log(2))
    assert float(fn.mutual_information_bound(joint + 5, independent + 5)) == pytest.approx(0.5 * math.log(2), abs=1e-6)
    assert float(fn.mutual_information_bound(torch.ones(3), torch.ones(2))) == pytest.approx(0, abs=1e-6)


def test_it_is_the_mean_entropy_less_that_of_the_mean() -> None:
    logits = 3 * torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = scipy.special.softmax(logits.numpy(), axis=1)
    expected = scipy.stats.entropy(p, axis=1).mean() - scipy.stats.entropy(p.mean(axis=0))
    found = fn.information_maximisation_loss(logits)
    assert float(found) == pytest.approx(expected, abs=1e-12)
    score = fn.information_score(torch.from_numpy(p.mean(axis=0)), float(scipy.stats.entropy(p, axis=1).mean()))
    assert float(found) == pytest.approx(-math.log(5) * float(score), abs=1e-12)


def test_it_is_the_negative_mean_entropy(generator: torch.Generator) -> None:
    logits = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    expected = -entropy(logits.softmax(dim=1).numpy(), axis=1).mean()
    assert float(fn.minimax_entropy_loss(logits)) == pytest.approx(expected, abs=4e-5)


@pytest.mark.parametrize(
    ("loss", "logits", "expected"),
    [
        (fn.uniform_cross_entropy, torch.full((2, 4), 7.0), math.log(4)),
        (fn.uniform_cross_entropy, torch.tensor([[200.0, 0.0]]), 100.0),
        (fn.information_maximisation_loss, torch.zeros(4, 3), 0.0),  # no information
        (fn.information_maximisation_loss, 100 * torch.eye(3), -math.log(3)),  # all is
        (fn.information_maximisation_loss, 100 * torch.eye(3)[[0, 0]], 0.0),  # sure, and of one class
        (fn.information_maximisation_loss, torch.tensor([[1e4, -1e4], [-1e4, 1e4]]), -math.log(2)),
        (fn.minimax_entropy_loss, torch.zeros(3, 5), math.log(0.2 + 1e-5)),  # sum_c p log(p + 1e-5)
        (fn.minimax_entropy_loss, 1e4 * torch.eye(5), 0.0),
        (lambda far: fn.mutual_information_bound(far, far), torch.tensor([1e4, -1e4]), math.log(2) - 1e4),
    ],
)
def test_losses_and_gradients_are_finite_at_their_ends(loss: Any, logits: Tensor, expected: float) -> None:
    value = loss(logits.requires_grad_())
    value.backward()
    assert float(value.detach()) == pytest.approx(expected, rel=1e-6, abs=2e-5)
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_the_discrepancy_of_groups_is_that_of_their_means() -> None:
    """Of three predictors by hand: a mean of (.9, .1) and (.5, .5) next to (.2, .8), and one of equal ones."""
    p = torch.tensor([[[0.9, 0.1], [1, 0]], [[0.5, 0.5], [1, 0]], [[0.2, 0.8], [1, 0]]])
    found = fn.group_discrepancy(p, torch.tensor([True, True, False]))
    assert float(found) == pytest.approx((2 * 0.5 + 0) / 2, abs=1e-6)
    assert float(fn.group_discrepancy(p, torch.tensor([False, False, True]))) == pytest.approx(float(found))
    opposed = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert float(fn.group_discrepancy(opposed, torch.tensor([True, False]))) == 2.0


def test_weights_of_centroids_are_the_same_in_any_unit() -> None:
    distances = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.tensor([-0.5, -1.0, -1.5], dtype=torch.float64).div(0.3).softmax(dim=0)
    for unit in (1e-30, 1.0, 1e30):
        torch.testing.assert_close(fn.centroid_weights(unit * distances, 0.3), expected, atol=1e-6, rtol=0)
    assert fn.centroid_weights(torch.zeros(4), 0.3).tolist() == [0.25] * 4
    assert fn.centroid_weights(distances, 1e-45).tolist() == [1.0, 0.0, 0.0]


def test_uniform_predictions_have_minus_log_c_and_certain_ones_0() -> None:
    uniform = float(fn.minimax_entropy_loss(torch.zeros(3, 5, dtype=torch.float64)))
    assert uniform == pytest.approx(math.log(0.2 + 1e-5), abs=1e-12)  # sum_c p log(p + 1e-5)
    assert uniform == pytest.approx(-math.log(5), abs=5e-5)
    certain = 1e4 * torch.eye(5, dtype=torch.float64)
    certain.requires_grad_()
    loss = fn.minimax_entropy_loss(certain)
    assert float(loss.detach()) == pytest.approx(0.0, abs=2e-5)
    loss.backward()
    assert certain.grad is not None
    assert bool(certain.grad.isfinite().all())  # log of a probability of 0 is not


def test_a_received_gradient_is_that_of_the_loss_and_its_value_the_senders() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    loss = fn.loss_from_gradient(x, torch.full((2, 3), 0.5), 4.0)
    loss.backward()
    assert float(loss.detach()) == 4
    assert torch.equal(x.grad, torch.full((2, 3), 0.5))  # type: ignore[arg-type]


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
