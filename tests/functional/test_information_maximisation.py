"""The loss of sure predictions of all classes, against scipy."""

from __future__ import annotations

import math

import pytest
import scipy.special
import scipy.stats
import torch

from fedlit.functional import information_maximisation_loss, information_score


def test_it_is_the_mean_entropy_less_that_of_the_mean() -> None:
    logits = 3 * torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = scipy.special.softmax(logits.numpy(), axis=1)
    expected = scipy.stats.entropy(p, axis=1).mean() - scipy.stats.entropy(p.mean(axis=0))
    found = information_maximisation_loss(logits)
    assert float(found) == pytest.approx(expected, abs=1e-12)
    score = information_score(torch.from_numpy(p.mean(axis=0)), float(scipy.stats.entropy(p, axis=1).mean()))
    assert float(found) == pytest.approx(-math.log(5) * float(score), abs=1e-12)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (torch.zeros(4, 3), 0.0),  # no information
        (100 * torch.eye(3), -math.log(3)),  # all is
        (100 * torch.eye(3)[[0, 0]], 0.0),  # sure, and of one class
        (torch.tensor([[1e4, -1e4], [-1e4, 1e4]]), -math.log(2)),  # no NaN where a probability is 0
    ],
)
def test_its_ends(logits: torch.Tensor, expected: float) -> None:
    assert float(information_maximisation_loss(logits)) == pytest.approx(expected, abs=1e-6)


def test_its_gradient_is_finite_where_predictions_are_certain() -> None:
    logits = torch.tensor([[1e4, -1e4], [3.0, 1.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(information_maximisation_loss(logits), logits)
    assert bool(gradient.isfinite().all())
    logits = torch.tensor([[200.0, 0.0, 0.0], [200.0, 0.0, 1.0]], requires_grad=True)  # of one class, as float32 has it
    (gradient,) = torch.autograd.grad(information_maximisation_loss(logits), logits)
    assert bool(gradient.isfinite().all())
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(information_maximisation_loss, x)
