"""Replicas of FedRF-TCA."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from fedlit.functional import hard_vote, random_fourier_features, sample_frequencies
from fedlit.models import AlignedReplica, VotingReplica


def build(unit_norm: bool = True, seed: int = 0) -> AlignedReplica:
    torch.manual_seed(0)
    sample = partial(sample_frequencies, 6, 3, 1.0)
    return AlignedReplica(nn.Linear(5, 3), sample, seed, nn.Linear(12, 4, bias=False), nn.Linear(4, 2), unit_norm)


@pytest.mark.parametrize("unit_norm", [True, False])
def test_it_is_extractor_random_features_aligner_and_classifier(unit_norm: bool, generator: torch.Generator) -> None:
    x, replica = torch.randn(7, 5, generator=generator), build(unit_norm)
    z = replica.extractor(x)
    s = random_fourier_features(z / z.norm(dim=1, keepdim=True) if unit_norm else z, replica.frequencies)
    torch.testing.assert_close(replica.random_features(x), s)
    torch.testing.assert_close(replica(x), replica.classifier(s @ replica.aligner.weight.T))
    before = replica(x)
    with torch.no_grad():
        for parameter in replica.extractor.parameters():
            parameter.mul_(3)
    assert torch.allclose(replica(x), before, atol=1e-5) == unit_norm, "the scale of features matters"


def test_a_feature_of_zero_does_not_divide_by_zero() -> None:
    replica = build()
    with torch.no_grad():
        for parameter in replica.extractor.parameters():
            parameter.zero_()
    logits = replica(torch.zeros(2, 5))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in replica.extractor.parameters())


def test_frequencies_follow_the_seed_that_is_loaded(generator: torch.Generator) -> None:
    """Alone, as a part of another module, in a copy, and in another precision."""
    theirs, x = build(seed=2**40 + 1), torch.randn(7, 5, generator=generator)
    assert {name for name in theirs.state_dict() if "." not in name} == {"seed", "received", "heard", "informed"}
    alone, within, copied = build(seed=3), build(seed=4), copy.deepcopy(build(seed=6))
    assert not torch.equal(theirs.frequencies, alone.frequencies)
    alone.load_state_dict(theirs.state_dict())
    nn.ModuleDict({"a": within}).load_state_dict({f"a.{key}": value for key, value in theirs.state_dict().items()})
    copied.load_state_dict(theirs.state_dict())
    assert torch.equal(alone.frequencies, sample_frequencies(6, 3, 1.0, seed=2**40 + 1))
    assert all(torch.equal(each(x), theirs(x)) for each in (alone, within, copied))
    double = build(seed=5).double()
    double.load_state_dict(theirs.state_dict())
    assert double.frequencies.dtype == torch.float64
    assert torch.equal(double.frequencies.float(), theirs.frequencies)


def test_voters_are_copies_that_do_not_train_and_decide_together(generator: torch.Generator) -> None:
    replica = build()
    voting = VotingReplica(replica, ["a", "b", "c"])
    assert not voting.informed
    assert {name for name, p in voting.named_parameters() if not p.requires_grad} == {
        f"ballot.{i}.{key}" for i in range(3) for key in ("weight", "bias")
    }
    assert voting.ballot[0].weight.data_ptr() != replica.classifier.weight.data_ptr()
    x = torch.randn(9, 5, generator=generator)
    classifiers = {name: nn.Linear(4, 2) for name in "abc"}
    voting.count_({name: classifier.state_dict() for name, classifier in classifiers.items()})
    assert voting.informed
    aligned = replica.aligner(replica.random_features(x))
    expected = hard_vote(torch.stack([classifier(aligned) for classifier in classifiers.values()]))
    torch.testing.assert_close(voting(x), expected)


def test_a_voting_replica_takes_over_the_parts_and_its_state_loads_elsewhere() -> None:
    replica = build()
    voting = VotingReplica(replica, ["a", "b"])
    assert voting.extractor is replica.extractor
    assert voting.aligner is replica.aligner
    assert torch.equal(voting.frequencies, replica.frequencies)
    other = VotingReplica(copy.deepcopy(build(False, seed=9)), ["a", "b"])
    voting.informed.fill_(True)
    other.load_state_dict(voting.state_dict())
    assert other.informed
    assert torch.equal(other.frequencies, voting.frequencies)
