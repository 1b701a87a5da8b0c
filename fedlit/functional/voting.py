"""Votes of several classifiers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedlit.checks import refuse
from fedlit.functional.checks import check_finite, check_shape

# in votes: below half a vote, so that it never outvotes anybody, and well above the rounding of float32 logarithms
_WINNER_BONUS = 1e-3
_FLOOR = 1e-6


def hard_vote(logits: Tensor) -> Tensor:
    r"""Majority vote of several classifiers, as log-probabilities.

    Each voter votes for its largest logit. With :math:`v_c` votes for class c of V voters and winner c*,

    .. math:: \log \frac{v_c + 10^{-3} [c = c^*] + 10^{-6}}{V + 10^{-3} + 10^{-6} C}

    The winner has most votes; of equals, the largest mean softmax probability (differences below 1e-12 are a tie);
    of those, the smallest class index. Neither the order of the voters nor their repetition changes the winner. No
    gradient passes.

    Args:
        logits: Outputs of the voters before or after log-softmax, shape (voters, batch, classes).

    Returns:
        Log-probabilities of shape (batch, classes), whose largest entry is the winner; float32, or float64 for
        float64 logits.

    References:
        Feng et al. (FedRF-TCA, 2023), appendix, one-shot hard voting. The published code breaks ties by the smallest
        class alone.
    """
    check_shape("logits", logits, "voters > 0", "batch", "classes > 0")
    if not logits.is_floating_point():
        refuse("logits", "of a floating type", logits.dtype, error=TypeError)
    logits = logits.detach()
    probabilities = logits.double().softmax(dim=2).mean(dim=0)
    # a graph that is traced for export has no way to stop
    if not torch.compiler.is_compiling():
        check_finite("logits", probabilities, "has a voter's model diverged?")
    num_voters, _, num_classes = logits.shape
    votes = one_hot(logits.argmax(dim=2), num_classes).sum(dim=0).double()
    tied = votes == votes.amax(dim=1, keepdim=True)
    support = probabilities.masked_fill(~tied, -1.0)
    # argmax of a mask is its first True; the margin hides that sums in another order round otherwise
    winner = (support >= support.amax(dim=1, keepdim=True) - 1e-12).int().argmax(dim=1)
    shares = votes + _WINNER_BONUS * one_hot(winner, num_classes).double() + _FLOOR
    total = num_voters + _WINNER_BONUS + _FLOOR * num_classes
    return (shares / total).log().to(torch.promote_types(logits.dtype, torch.float32))
