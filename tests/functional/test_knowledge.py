"""Votes by hand and against torch.mode, Shapley values over all orders, and variances."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlit import functional as fn
from fedlit.functional.knowledge import agreement, standing_votes

BY_HAND = torch.tensor(
    [
        [[0.95, 0.03, 0.02], [0.50, 0.30, 0.20], [0.92, 0.05, 0.03]],
        [[0.91, 0.05, 0.04], [0.40, 0.45, 0.15], [0.02, 0.97, 0.01]],
        [[0.30, 0.40, 0.30], [0.20, 0.60, 0.20], [0.05, 0.93, 0.02]],
    ]
)
"""Three sources' probabilities of three samples: two agree, none is sure, and one against two."""


def random_probabilities(generator: torch.Generator, sources: int = 4, samples: int = 40, classes: int = 3) -> Tensor:
    return (4 * torch.randn(sources, samples, classes, generator=generator)).softmax(dim=2)


def test_hard_votes_by_hand() -> None:
    vote = fn.knowledge_vote(BY_HAND, 0.9)
    assert vote.kept.tolist() == [True, False, True]
    # where nobody is sure, all vote: .50 against .45 + .60
    assert vote.classes.tolist() == [0, 1, 1]
    assert vote.confidence.tolist() == pytest.approx([0.95 + 0.91, 0.45 + 0.60, 0.97 + 0.93])
    assert vote.targets.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert vote.weights.tolist() == [1, 0, 1]


def test_soft_votes_by_hand() -> None:
    vote = fn.knowledge_vote(BY_HAND, 0.9, soft=True)
    assert vote.kept.tolist() == [True, False, True]
    assert vote.classes.tolist() == [0, 1, 1]
    torch.testing.assert_close(vote.targets[0], (BY_HAND[0, 0] + BY_HAND[1, 0]) / 2)
    torch.testing.assert_close(vote.targets[1], BY_HAND[:, 1].mean(dim=0))
    torch.testing.assert_close(vote.targets[2], (BY_HAND[1, 2] + BY_HAND[2, 2]) / 2)
    assert vote.weights.tolist() == pytest.approx([2, 0.001, 2])
    # n max p, which is the sum of the confidences of those who agree
    assert vote.confidence.tolist() == pytest.approx([1.86, 0.001 * 1.35 / 3, 1.90])


def test_what_sources_agree_on_comes_from_two_sums() -> None:
    votes = torch.tensor([[1.86, 0.0, 0.0], [0.0, 0.0, 0.0], [0.51, 0.0, 0.51]])
    probabilities = torch.tensor([[1.86, 0.08, 0.06], [0.0, 0.0, 0.0], [0.51, 0.98, 0.51]])
    classes, kept = agreement(votes, probabilities)
    assert classes.tolist() == [0, 0, 1]
    assert kept.tolist() == [True, False, False]  # nobody is confident; nobody's own class


@pytest.mark.parametrize(("gate", "least"), [(0.9, 0.45), (0.1, 1 / 6)])
def test_what_is_less_than_half_of_any_vote_is_none(gate: float, least: float) -> None:
    """A vote is above the gate, and of three classes the largest probability is 1/3 at least."""
    noise = torch.tensor([[0.99 * least, -0.01, 1.01 * least]])
    assert standing_votes(noise, gate).tolist() == [[0, 0, pytest.approx(1.01 * least)]]


def test_a_soft_class_that_no_confident_source_has_is_nobodys() -> None:
    """Sums .51, .98, .51: class 1, which neither source names; the mean of all is learnt with next to no weight."""
    probabilities = torch.tensor([[[0.51, 0.49, 0.0]], [[0.0, 0.49, 0.51]]])
    vote = fn.knowledge_vote(probabilities, 0.5, soft=True)
    assert vote.classes.tolist() == [1]
    assert not vote.kept.any()
    assert vote.weights.tolist() == pytest.approx([0.001])
    torch.testing.assert_close(vote.targets, probabilities.mean(dim=0))


def test_a_gate_is_not_passed_by_what_equals_it_and_at_zero_all_pass(generator: torch.Generator) -> None:
    exact = torch.tensor([[[0.75, 0.25]]])
    assert not fn.knowledge_vote(exact, 0.75).kept
    assert fn.knowledge_vote(exact, 0.7499).kept
    assert fn.knowledge_vote(random_probabilities(generator), 0.0).kept.all()


def test_equal_votes_go_to_the_smaller_class() -> None:
    tie = torch.tensor([[[0.05, 0.95]], [[0.95, 0.05]]])
    assert fn.knowledge_vote(tie, 0.9).classes.tolist() == [0]
    assert fn.confident_votes(torch.tensor([[0.5, 0.5]]), 0.3).tolist() == [[0.5, 0.0]]


def quality(probabilities: Tensor, gate: float, members: list[int]) -> float:
    """Q of a coalition, as `knowledge_vote` tells it: the confidence of what is kept."""
    if not members:
        return 0.0
    vote = fn.knowledge_vote(probabilities[members], gate)
    return float((vote.confidence.double() * vote.kept).sum())


def test_leave_one_out_is_the_difference_of_two_votes(generator: torch.Generator) -> None:
    probabilities = random_probabilities(generator)
    everyone = list(range(4))
    expected = [
        quality(probabilities, 0.7, everyone) - quality(probabilities, 0.7, [other for other in everyone if other != k])
        for k in everyone
    ]
    assert fn.consensus_focus(probabilities, 0.7).tolist() == pytest.approx(expected, abs=1e-5)


def test_shapley_values_are_means_over_all_orders(generator: torch.Generator) -> None:
    probabilities = random_probabilities(generator)
    added = np.zeros((24, 4))
    for row, order in enumerate(permutations(range(4))):
        for place, k in enumerate(order):
            before = quality(probabilities, 0.6, list(order[:place]))
            added[row, k] = quality(probabilities, 0.6, list(order[: place + 1])) - before
    focus = fn.consensus_focus(probabilities, 0.6, "shapley")
    assert focus.tolist() == pytest.approx(added.mean(axis=0).tolist(), abs=1e-5)
    assert float(focus.sum()) == pytest.approx(quality(probabilities, 0.6, [0, 1, 2, 3]), abs=1e-5)
    assert (focus >= 0).all()
    left_out = fn.consensus_focus(probabilities, 0.6)
    assert (left_out >= 0).all()
    assert float((focus - left_out).abs().max()) > 0.1  # sources disagree here


def test_between_class_variance_by_hand_and_at_its_ends() -> None:
    # class 0: 3 of 4 samples with .8, one with .3: .75 * .25 * .5^2; class 1 the same, class 2 is never predicted
    rows = torch.tensor([[0.8, 0.2, 0.0], [0.8, 0.2, 0.0], [0.8, 0.2, 0.0], [0.3, 0.7, 0.0]])
    assert float(fn.between_class_variance(rows)) == pytest.approx(2 * 0.75 * 0.25 * 0.25)
    assert float(fn.between_class_variance(rows[:1].expand(6, 3))) == 0
    # one-hot and balanced: sum of r (1 - r), at most 1 - 1/C
    assert float(fn.between_class_variance(torch.eye(4).repeat(3, 1))) == pytest.approx(1 - 1 / 4)


def test_mixup_mixes_inputs_and_labels_alike(generator: torch.Generator) -> None:
    inputs = torch.randn(50, 2, 3, generator=generator)
    labels = torch.eye(50)  # which tell the shares of the samples
    torch.manual_seed(0)
    mixed, shares = fn.mixup(inputs, labels, 2.0)
    torch.testing.assert_close(mixed, torch.einsum("ij,jkl->ikl", shares, inputs))
    torch.testing.assert_close(shares.sum(dim=0), torch.ones(50))
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(50))
    own = {round(float(shares[i, i]), 5) for i in range(50) if shares[i].count_nonzero() > 1}
    assert len(own) == 1
    drawn = [float(fn.mixup(inputs[:2], labels[:2, :2], 0.3, at_least_half=True)[1].max()) for _ in range(40)]
    assert min(drawn) >= 0.5
    same = fn.mixup(inputs, labels, 0.0)
    assert same[0] is inputs
    assert same[1] is labels


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().unsqueeze(1)


def test_three_voters_by_hand() -> None:
    # votes 2 : 1 : 0 for classes 1, 0, 2, although class 0 has the larger mean probability
    vote = fn.hard_vote(logits_of([0.98, 0.01, 0.01], [0.45, 0.5, 0.05], [0.45, 0.5, 0.05]))
    assert vote.shape == (1, 3)
    assert vote.argmax().item() == 1
    total = 3 + 1e-3 + 3e-6
    expected = [math.log(v / total) for v in (1 + 1e-6, 2 + 1e-3 + 1e-6, 1e-6)]
    assert vote[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_equal_votes_go_to_the_larger_mean_probability_then_to_the_smaller_class() -> None:
    # one vote each; means 0.35, 0.55, 0.1
    assert fn.hard_vote(logits_of([0.5, 0.3, 0.2], [0.2, 0.8, 0.0])).argmax().item() == 1
    # one vote each and equal means
    assert fn.hard_vote(logits_of([0.1, 0.6, 0.3], [0.1, 0.3, 0.6])).argmax().item() == 1
    # class 2 has the largest mean probability (0.41), but no vote
    assert fn.hard_vote(logits_of([0.55, 0.05, 0.4], [0.03, 0.55, 0.42])).argmax().item() == 1


def test_agrees_with_the_mode_where_votes_are_not_tied(generator: torch.Generator) -> None:
    logits = torch.randn(7, 300, 4, generator=generator)
    cast = logits.argmax(dim=2)
    counts = torch.stack([(cast == c).sum(dim=0) for c in range(4)], dim=1)
    best = counts.amax(dim=1)
    clear = (counts == best[:, None]).sum(dim=1) == 1
    vote = fn.hard_vote(logits)
    assert clear.sum() > 100
    assert (~clear).sum() > 20
    assert torch.equal(vote.argmax(dim=1)[clear], cast.mode(dim=0).values[clear])
    # tied or not, the winner has most votes
    assert torch.equal(counts.gather(1, vote.argmax(dim=1, keepdim=True)).squeeze(1), best)


def test_a_class_ruled_out_by_a_voter_is_no_error() -> None:
    vote = fn.hard_vote(torch.tensor([[[0.0, -math.inf]]]))
    assert vote.isfinite().all()
    assert vote.argmax().item() == 0
