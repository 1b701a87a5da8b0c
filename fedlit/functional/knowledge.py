"""Votes of several sources on one batch: confident and hard ones, what each source adds, how it separates classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Beta
from torch.nn.functional import one_hot

from fedlit.checks import check, check_at_least, check_one_of, refuse
from fedlit.functional.checks import check_finite, check_shape

FocusRule = Literal["leave_one_out", "shapley"]

UNSURE = 1e-3
"""Weight of a soft vote that no source is confident of, in units of one confident source."""

_MAX_SOURCES = 16
"""Shapley values take the votes of all subsets of sources."""


@dataclass(frozen=True)
class Knowledge:
    """Agreement of sources on each of B samples; a student learns ``targets`` with ``weights``.

    Args:
        classes: The class that they agree on, int64, shape (B,).
        confidence: Sum of the confidences behind it, at most the number of sources, shape (B,).
        kept: Whether a source is confident of it, bool, shape (B,).
        targets: Shape (B, C): the class as one-hot, or in a soft vote the mean probabilities of those who agree.
        weights: Shape (B,): 1 where kept and else 0; in a soft vote the number of those who agree, and 0.001 where
            nobody is confident.
    """

    classes: Tensor
    confidence: Tensor
    kept: Tensor
    targets: Tensor
    weights: Tensor


def confident_votes(probabilities: Tensor, gate: float) -> Tensor:
    r"""Each source's vote: its largest probability, in the column of its class, if that is above a gate; else 0.

    Args:
        probabilities: Of classes, shape (..., B, C), which is that of the votes; of equal ones the smallest class has
            it.
        gate: In [0, 1); a source at the gate is not above it.
    """
    check_gate(gate)
    shape = probabilities.shape
    check(len(shape) >= 2 and shape[-1] > 0, "probabilities", "of shape (..., B, C) with a class", tuple(shape))
    best, classes = probabilities.amax(dim=-1, keepdim=True), probabilities.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, classes, torch.where(best > gate, best, 0.0))


def agreeing(probabilities: Tensor, votes: Tensor, classes: Tensor, kept: Tensor) -> Tensor:
    """Mark the sources that a soft vote averages, bool, shape (..., B); where nobody is confident, all.

    ``probabilities`` and `confident_votes` of one source or several have shape (..., B, C); ``classes`` on which they
    agree, and whether they are ``kept``, (B,).
    """
    confident = votes.amax(dim=-1) > 0
    return torch.where(kept, confident & (probabilities.argmax(dim=-1) == classes), torch.ones_like(confident))


def knowledge_vote(probabilities: Tensor, gate: float, soft: bool = False) -> Knowledge:
    r"""Agreement of the sources that are confident of a sample.

    With probabilities :math:`q_k` of source k, and those confident whose largest is above the gate g,

    .. math:: c^* = \arg\max_c \sum_{k: \max q_k > g} \max(q_k) \, [\arg\max q_k = c]

    and the confidence is that largest sum. Where nobody is confident all vote, and the weight is 0. The soft vote
    (KD3A, Feng et al., ICML 2021, section 3.2; the hard one is its code's) takes the class of
    :math:`\sum_{k: \max q_k > g} q_k`, and the mean p of the probabilities of those n confident sources whose own class
    it is; n is its weight, and n max p its confidence. Where there are none, p is the mean of all, with a weight of
    0.001. Of equals the smallest class is taken.

    Args:
        probabilities: Of K sources, shape (K, B, C).
        gate: g, in [0, 1).
        soft: Whether a student learns probabilities in place of classes.
    """
    check_shape("probabilities", probabilities, "K > 0", "B", "C > 0")
    votes = confident_votes(probabilities, gate)
    total = _summed(votes)
    if not soft:
        kept = total.amax(dim=1) > 0
        all_votes = torch.where(kept[:, None], total, _summed(confident_votes(probabilities, 0.0)))
        confidence, classes = all_votes.max(dim=1).values, all_votes.argmax(dim=1)
        targets = F.one_hot(classes, probabilities.shape[2]).to(probabilities)
        return Knowledge(classes, confidence.to(probabilities), kept, targets, kept.to(probabilities))
    confident = votes.amax(dim=2, keepdim=True) > 0
    classes, kept = agreement(total, _summed(torch.where(confident, probabilities, 0.0)))
    members = agreeing(probabilities, votes, classes, kept)
    sums = _summed(torch.where(members[..., None], probabilities, 0.0))
    return soft_knowledge(classes, kept, sums, members.sum(dim=0), probabilities)


def standing_votes(votes: Tensor, gate: float) -> Tensor:
    """Drop from a sum of votes, shape (B, C), what is too little for a single one: CKKS returns nearly 0 for no vote.

    The error must be below half of any vote, which is above the gate, and 1/C at least.
    """
    return torch.where(votes > max(gate, 1 / votes.shape[1]) / 2, votes, 0.0)


def agreement(votes: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Class of each sample that confident sources agree on in a soft vote, and whether it is that of one of them.

    From the sums over confident sources of their `confident_votes` and of their probabilities, each of shape (B, C).
    """
    classes = probabilities.argmax(dim=1)
    return classes, votes.gather(1, classes[:, None]).squeeze(1) > 0


def soft_knowledge(classes: Tensor, kept: Tensor, sums: Tensor, numbers: Tensor, like: Tensor) -> Knowledge:
    """Knowledge by a soft vote, in the type of ``like``, from `agreement` and sums over the sources that agree.

    ``sums`` of their probabilities have shape (B, C); their ``numbers``, at least 1, (B,). Where no source is
    confident, the class is that of the mean.
    """
    targets = sums.double() / numbers.double()[:, None]
    weights = torch.where(kept, numbers.double(), UNSURE)
    classes = torch.where(kept, classes, targets.argmax(dim=1))
    confidence = weights * targets.amax(dim=1)
    return Knowledge(classes, confidence.to(like), kept, targets.to(like), weights.to(like))


def consensus_focus(probabilities: Tensor, gate: float, rule: FocusRule = "leave_one_out") -> Tensor:
    r"""Contribution of each source, (K,), to the quality :math:`Q(S) = \sum_x \max_c \sum_{k \in S} a_k` of votes.

    Votes :math:`a_k` are those of `confident_votes`. Leave-one-out is :math:`Q(\text{all}) - Q(\text{all but } k)`; the
    Shapley value is the mean of what k adds over all orders in which sources could join, of sum Q(all). The two are
    equal where no sample's confident sources disagree. See KD3A, definition 2, for leave-one-out, and its code for
    Shapley values.

    Args:
        probabilities: Of K sources, shape (K, B, C).
        gate: In [0, 1).
        rule: ``"leave_one_out"``, or ``"shapley"``, which takes 2^K votes of at most 16 sources.
    """
    check_shape("probabilities", probabilities, "K > 0", "B", "C > 0")
    check_one_of("rule", rule, get_args(FocusRule))
    votes = confident_votes(probabilities, gate).double()
    if rule == "leave_one_out":
        total = _summed(votes)
        return torch.stack([left_out_focus(total, own) for own in votes])
    return _shapley([*votes], lambda total: total.amax(dim=1).sum())


def left_out_focus(total: Tensor, own: Tensor) -> Tensor:
    """Leave-one-out contribution of one source, from the total alone: a scalar, float64.

    Args:
        total: Sum of all sources' `confident_votes`, shape (B, C).
        own: Those of the source, of the same shape.
    """
    total, own = total.double(), own.double()
    return (total.amax(dim=1) - (total - own).amax(dim=1)).sum()


def between_class_variance(probabilities: Tensor) -> Tensor:
    r"""Variance of class probabilities between a predicted class and the rest, float64, from 0 to 1 - 1/C.

    .. math:: \sum_c r_c (m_c^+ - m_c)^2 + (1 - r_c) (m_c^- - m_c)^2 = \sum_c r_c (1 - r_c) (m_c^+ - m_c^-)^2

    where :math:`r_c` is the share of samples that are predicted to be of class c, :math:`m_c` the mean of column c, and
    :math:`m_c^\pm` its means over those samples and over the others. See the code of Liu et al. (Co-MDA), IEEE TCSVT
    2023.

    Args:
        probabilities: Of N samples, shape (N, C).
    """
    check_shape("probabilities", probabilities, "N > 0", "C > 0")
    columns = probabilities.double()
    predicted = F.one_hot(probabilities.argmax(dim=1), columns.shape[1]).double()
    share = predicted.mean(dim=0)
    mean = columns.mean(dim=0)
    inside, outside = (
        (columns * chosen).sum(dim=0) / chosen.sum(dim=0).clamp(min=1) for chosen in (predicted, 1 - predicted)
    )
    return (share * (inside - mean).square() + (1 - share) * (outside - mean).square()).sum()


def mixup(inputs: Tensor, labels: Tensor, concentration: float, at_least_half: bool = False) -> tuple[Tensor, Tensor]:
    r"""Convex combinations of a batch with itself in another order, by one drawn lambda (Zhang et al., ICLR 2018).

    .. math:: \lambda x_i + (1 - \lambda) x_{\pi(i)}, \qquad \lambda \sim \text{Beta}(\beta, \beta)

    Args:
        inputs: Shape (B, ...), floating.
        labels: As probabilities, shape (B, C), times the samples' weights if they have any.
        concentration: beta, at least 0; 0 mixes nothing and draws nothing.
        at_least_half: Whether lambda is at least 1/2: a sample stays the larger part of its mixture.
    """
    mix = draw_mixup(len(labels), concentration, at_least_half)
    return mix(inputs), mix(labels)


def draw_mixup(number: int, concentration: float, at_least_half: bool = False) -> Callable[[Tensor], Tensor]:
    """Draw a `mixup` of a batch of ``number`` samples once, to apply to each of its tensors, of shape (number, ...)."""
    check_at_least("mixup (beta)", concentration, 0)
    if concentration == 0:
        return lambda tensor: tensor
    share = float(Beta(concentration, concentration).sample())
    share = max(share, 1 - share) if at_least_half else share
    order = torch.randperm(number)

    def mix(tensor: Tensor) -> Tensor:
        return share * tensor + (1 - share) * tensor[order.to(tensor.device)]

    return mix


def first_and_last_gate(gate: float | tuple[float, float]) -> tuple[float, float]:
    """Gates of a run's first and last round, from two or from one for both; a ValueError if they are out of range."""
    gates = tuple(gate) if isinstance(gate, tuple | list) else (gate, gate)
    if len(gates) != 2:
        refuse("gate", "a number, or the first and the last of a run", gate)
    for each in gates:
        check_gate(each)
    return gates


def check_gate(gate: float) -> None:
    """Refuse a gate that no confidence can be above."""
    check(0 <= gate < 1, "gate", "in [0, 1)", gate, "votes of a source with more confidence count")


def _summed(votes: Tensor) -> Tensor:
    """Sum over sources in float64, where sums of float32 numbers are exact: equal votes stay equal in any order."""
    return votes.double().sum(dim=0)


def _shapley(votes: list[Tensor], quality: Callable[[Tensor], Tensor]) -> Tensor:
    """Shapley values of votes, whose sets are worth the ``quality`` of their sum; shape (number of votes,)."""
    number = len(votes)
    way_out = f"take rule='leave_one_out', since Shapley values of {number} sources take 2^{number} votes"
    check(number <= _MAX_SOURCES, "probabilities", f"of at most {_MAX_SOURCES} sources", number, way_out)
    worth = votes[0].new_zeros(1 << number)
    for members in range(1, 1 << number):
        worth[members] = quality(torch.stack([votes[k] for k in range(number) if members >> k & 1]).sum(dim=0))
    values = votes[0].new_zeros(number)
    for members in range(1 << number):
        size = members.bit_count()
        for k in range(number):
            if not members >> k & 1:
                share = math.factorial(size) * math.factorial(number - size - 1) / math.factorial(number)
                values[k] += share * (worth[members | 1 << k] - worth[members])
    return values


# in votes: below half a vote, so that it never outvotes anybody, and well above the rounding of float32 logarithms
_WINNER_BONUS = 1e-3
_FLOOR = 1e-6


def hard_vote(logits: Tensor) -> Tensor:
    r"""Majority vote of several classifiers, as log-probabilities of shape (batch, classes), float32 at least.

    Each voter votes for its largest logit. With :math:`v_c` votes for class c of V voters and winner c*,

    .. math:: \log \frac{v_c + 10^{-3} [c = c^*] + 10^{-6}}{V + 10^{-3} + 10^{-6} C}

    The winner has most votes; of equals, the largest mean softmax probability (differences below 1e-12 are a tie);
    of those, the smallest class index. The order of the voters does not matter. No gradient passes. See Feng et al.
    (FedRF-TCA, 2023), appendix, one-shot hard voting. The published code breaks ties by the smallest class alone.

    Args:
        logits: Outputs of the voters before or after log-softmax, shape (voters, batch, classes).
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
