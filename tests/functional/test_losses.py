"""Losses of single clients: by hand, against torch and scipy, and at their limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from scipy.stats import entropy
from torch import Tensor

from fedlit import functional as fn


def test_numbers_by_hand() -> None:
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


def test_a_received_gradient_is_that_of_the_loss_and_its_value_the_senders() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    loss = fn.loss_from_gradient(x, torch.full((2, 3), 0.5), 4.0)
    loss.backward()
    assert float(loss.detach()) == 4
    assert torch.equal(x.grad, torch.full((2, 3), 0.5))  # type: ignore[arg-type]
