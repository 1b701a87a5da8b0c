"""What a client of FedRF-TCA holds."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from fedlit.functional import hard_vote, random_fourier_features, sample_frequencies
from fedlit.models import AlignedReplica, VotingReplica


def build(unit_norm: bool = True, seed: int = 0) -> AlignedReplica:
    torch.manual_seed(0)
    sample = partial(sample_frequencies, 6, 3, 1.0)
    return AlignedReplica(nn.Linear(5, 3), sample, seed, nn.Linear(12, 4, bias=False), nn.Linear(4, 2), unit_norm)


def test_it_is_extractor_random_features_aligner_and_classifier(generator: torch.Generator) -> None:
    x = torch.randn(7, 5, generator=generator)
    for unit_norm in (True, False):
        replica = build(unit_norm)
        z = replica.extractor(x)
        s = random_fourier_features(z / z.norm(dim=1, keepdim=True) if unit_norm else z, replica.frequencies)
        torch.testing.assert_close(replica.random_features(x), s)
        torch.testing.assert_close(replica(x), replica.classifier(s @ replica.aligner.weight.T))
        torch.testing.assert_close(s.norm(dim=1), torch.ones(7))  # as cos^2 + sin^2 of each frequency


def test_with_unit_norm_the_scale_of_the_features_does_not_matter(generator: torch.Generator) -> None:
    x = torch.randn(7, 5, generator=generator)
    for unit_norm in (True, False):
        replica = build(unit_norm)
        before = replica(x)
        with torch.no_grad():
            for parameter in replica.extractor.parameters():
                parameter.mul_(3)
        assert torch.allclose(replica(x), before, atol=1e-5) == unit_norm


def test_a_feature_of_zero_does_not_divide_by_zero() -> None:
    replica = build()
    with torch.no_grad():
        for parameter in replica.extractor.parameters():
            parameter.zero_()
    logits = replica(torch.zeros(2, 5))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in replica.extractor.parameters())


def test_the_state_has_what_was_received_and_not_the_frequencies() -> None:
    state = build().state_dict()
    assert {name for name in state if "." not in name} == {"seed", "received", "heard", "informed"}
    assert state["received"].shape == (12,)
    assert not state["heard"]
    assert not state["informed"]
    assert state["seed"].dtype == torch.int64


def test_frequencies_follow_the_seed_that_is_loaded(generator: torch.Generator) -> None:
    """Everywhere: alone, as a part of something, in another precision, and where the state has no seed, not at all."""
    theirs, ours = build(seed=2**40 + 1), build(seed=3)
    x = torch.randn(7, 5, generator=generator)
    assert not torch.equal(theirs.frequencies, ours.frequencies)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.frequencies, sample_frequencies(6, 3, 1.0, seed=2**40 + 1))
    assert torch.equal(ours(x), theirs(x))
    within = nn.ModuleDict({"a": build(seed=4)})
    within.load_state_dict({f"a.{name}": tensor for name, tensor in theirs.state_dict().items()})
    assert torch.equal(within["a"](x), theirs(x))
    double = build(seed=5).double()
    double.load_state_dict(theirs.state_dict())
    assert double.frequencies.dtype == torch.float64
    assert torch.equal(double.frequencies.float(), theirs.frequencies)
    copied = copy.deepcopy(build(seed=6))
    copied.load_state_dict(theirs.state_dict())
    assert torch.equal(copied(x), theirs(x))


def test_gradients_reach_all_parameters_of_the_network(generator: torch.Generator) -> None:
    replica = build()
    F.cross_entropy(replica(torch.randn(7, 5, generator=generator)), torch.arange(7) % 2).backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in replica.parameters())


def test_voters_are_copies_that_do_not_train_and_decide_together(generator: torch.Generator) -> None:
    replica = build()
    voting = VotingReplica(replica, ["a", "b", "c"])
    assert voting.voters == ["a", "b", "c"]
    assert not voting.informed
    assert {name for name, p in voting.named_parameters() if not p.requires_grad} == {
        f"ballot.{i}.{key}" for i in range(3) for key in ("weight", "bias")
    }
    assert voting.ballot[0].weight.data_ptr() != replica.classifier.weight.data_ptr()
    x = torch.randn(9, 5, generator=generator)
    classifiers = [nn.Linear(4, 2) for _ in range(3)]
    for mine, theirs in zip(voting.ballot, classifiers, strict=True):
        mine.load_state_dict(theirs.state_dict())
    aligned = replica.aligner(replica.random_features(x))
    torch.testing.assert_close(voting(x), hard_vote(torch.stack([classifier(aligned) for classifier in classifiers])))


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
