"""Votes counted by hand and against torch.mode."""

from __future__ import annotations

import math

import pytest
import torch

from fedlit.functional import hard_vote


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().unsqueeze(1)


def test_three_voters_by_hand() -> None:
    # votes 2 : 1 : 0 for classes 1, 0, 2, although class 0 has the larger mean probability
    vote = hard_vote(logits_of([0.98, 0.01, 0.01], [0.45, 0.5, 0.05], [0.45, 0.5, 0.05]))
    assert vote.shape == (1, 3)
    assert vote.argmax().item() == 1
    total = 3 + 1e-3 + 3e-6
    expected = [math.log(v / total) for v in (1 + 1e-6, 2 + 1e-3 + 1e-6, 1e-6)]
    assert vote[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_equal_votes_go_to_the_larger_mean_probability_then_to_the_smaller_class() -> None:
    # one vote each; means 0.35, 0.55, 0.1
    assert hard_vote(logits_of([0.5, 0.3, 0.2], [0.2, 0.8, 0.0])).argmax().item() == 1
    # one vote each and equal means
    assert hard_vote(logits_of([0.1, 0.6, 0.3], [0.1, 0.3, 0.6])).argmax().item() == 1
    # class 2 has the largest mean probability (0.41), but no vote
    assert hard_vote(logits_of([0.55, 0.05, 0.4], [0.03, 0.55, 0.42])).argmax().item() == 1


def test_agrees_with_the_mode_where_votes_are_not_tied(generator: torch.Generator) -> None:
    logits = torch.randn(7, 300, 4, generator=generator)
    cast = logits.argmax(dim=2)
    counts = torch.stack([(cast == c).sum(dim=0) for c in range(4)], dim=1)
    best = counts.amax(dim=1)
    clear = (counts == best[:, None]).sum(dim=1) == 1
    vote = hard_vote(logits)
    assert clear.sum() > 100
    assert (~clear).sum() > 20
    assert torch.equal(vote.argmax(dim=1)[clear], cast.mode(dim=0).values[clear])
    # tied or not, the winner has most votes
    assert torch.equal(counts.gather(1, vote.argmax(dim=1, keepdim=True)).squeeze(1), best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_is_a_finite_distribution_in_which_one_class_stands_out(dtype: torch.dtype, generator: torch.Generator) -> None:
    logits = torch.randn(6, 200, 345, generator=generator).to(dtype)
    vote = hard_vote(logits)
    assert vote.dtype == torch.promote_types(dtype, torch.float32)
    assert vote.isfinite().all()
    torch.testing.assert_close(vote.logsumexp(dim=1), torch.zeros(200, dtype=vote.dtype), rtol=0, atol=1e-5)
    first, second = vote.topk(2, dim=1).values.unbind(dim=1)
    assert (first > second).all()


def test_neither_order_nor_repetition_of_voters_matters(generator: torch.Generator) -> None:
    logits = torch.randn(6, 500, 3, generator=generator).round()  # many ties of votes and of probabilities
    vote = hard_vote(logits)
    for _ in range(5):
        shuffled = logits[torch.randperm(6, generator=generator)]
        torch.testing.assert_close(hard_vote(shuffled), vote, rtol=0, atol=1e-12)
    assert torch.equal(hard_vote(torch.cat([logits, logits])).argmax(dim=1), vote.argmax(dim=1))


def test_a_lone_voter_is_followed_and_an_empty_batch_stays_empty(generator: torch.Generator) -> None:
    logits = torch.randn(1, 50, 5, generator=generator)
    assert torch.equal(hard_vote(logits).argmax(dim=1), logits[0].argmax(dim=1))
    assert hard_vote(logits[:, :0]).shape == (0, 5)


def test_a_class_ruled_out_by_a_voter_is_no_error() -> None:
    vote = hard_vote(torch.tensor([[[0.0, -math.inf]]]))
    assert vote.isfinite().all()
    assert vote.argmax().item() == 0
