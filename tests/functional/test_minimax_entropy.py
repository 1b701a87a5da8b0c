"""The entropy term of minimax entropy, against scipy and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import entropy

from fedlit.functional import minimax_entropy_loss


def test_it_is_the_negative_mean_entropy(generator: torch.Generator) -> None:
    logits = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    expected = -entropy(logits.softmax(dim=1).numpy(), axis=1).mean()
    assert float(minimax_entropy_loss(logits)) == pytest.approx(expected, abs=4e-5)


def test_uniform_predictions_have_minus_log_c_and_certain_ones_0() -> None:
    uniform = float(minimax_entropy_loss(torch.zeros(3, 5, dtype=torch.float64)))
    assert uniform == pytest.approx(math.log(0.2 + 1e-5), abs=1e-12)  # sum_c p log(p + 1e-5)
    assert uniform == pytest.approx(-math.log(5), abs=5e-5)
    certain = 1e4 * torch.eye(5, dtype=torch.float64)
    certain.requires_grad_()
    loss = minimax_entropy_loss(certain)
    assert float(loss.detach()) == pytest.approx(0.0, abs=2e-5)
    loss.backward()
    assert certain.grad is not None
    assert bool(certain.grad.isfinite().all())  # log of a probability of 0 is not
