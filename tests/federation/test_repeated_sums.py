"""The same messages summed over other clients: what sums reveal together, and the warnings of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlit.federation import Everyone, Federation, Fraction, Participation, Schedule, Summed
from fedlit.federation.leaks import hidden_senders, over_other_senders, over_other_targets
from fedlit.privacy import GaussianMechanism, PairwiseMasking, Plain, PrivacyWarning

NAMES = ["a", "b", "c", "d", "e"]
MOMENTS = Summed("moments", "sums of the data", "sources", fixed=True)
WEIGHTS = Summed("weights", "weights of the network", "sources")


def own(name: str) -> Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(NAMES.index(name)), dtype=torch.float64)


def federation(target: str = "e", **choices: Any) -> Federation:
    given = {"channels": [MOMENTS, WEIGHTS], "privacy": PairwiseMasking(colluders=0), "seed": 0}
    return Federation(NAMES, target, **(given | choices))


def total(fed: Federation, channel: str = "moments") -> Tensor:
    payloads = {client.name: {"x": own(client.name)} for client in fed.sources}
    return next(iter(fed.sum(channel, payloads).values()))["x"]


@contextmanager
def warned() -> Iterator[list[str]]:
    words: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield words
    words += [str(item.message) for item in caught if issubclass(item.category, PrivacyWarning)]


def test_sums_over_all_targets_reveal_every_message_and_zeros_in_place_of_absence_help_nobody() -> None:
    totals = {target: total(federation(target)) for target in NAMES}
    everything = sum(totals.values()) / (len(NAMES) - 1)
    for name in NAMES:
        torch.testing.assert_close(everything - totals[name], own(name), atol=1e-5, rtol=0)

    def with_zeros(target: str) -> Tensor:
        fed = Federation(NAMES, target, privacy=PairwiseMasking(), seed=0)
        payloads = {name: {"x": own(name) * (name != target)} for name in NAMES}
        return fed.sum("moments", payloads)["a"]["x"]

    for target in NAMES:  # the totals are the same numbers, so it is no way out
        torch.testing.assert_close(with_zeros(target), totals[target], atol=1e-5, rtol=0)


def test_sums_over_other_targets_are_named() -> None:
    moments, weights = over_other_targets(federation().channels, NAMES, NAMES)
    assert "channel 'moments' is summed for the targets ['a', 'b', 'c', 'd', 'e']" in moments
    assert "in every round" in moments
    assert "channel 'weights'" in weights
    assert "in the first round" in weights


@pytest.mark.parametrize(
    ("choices", "targets"),
    [
        ({}, ["a"]),
        ({"privacy": Plain()}, NAMES),
        ({"channels": [Summed("weights", "weights")]}, NAMES),  # of everyone, whoever is the target
    ],
)
def test_sums_over_other_targets_that_reveal_nothing_are_not_named(choices: dict[str, Any], targets: list[str]) -> None:
    assert over_other_targets(federation(**choices).channels, NAMES, targets) == []


def test_methods_that_sum_over_other_clients_are_named_and_others_are_not() -> None:
    everyone = federation(channels=[Summed("weights", "weights of the network")])
    before = hidden_senders(everyone.channels)
    assert before == {"weights": tuple(NAMES)}
    (sentence,) = over_other_senders(federation().channels, before, "FedAvg")
    assert "summed over ['a', 'b', 'c', 'd'], and was over ['a', 'b', 'c', 'd', 'e'] with FedAvg" in sentence
    assert over_other_senders(everyone.channels, before, "FedAvg") == []
    assert over_other_senders(federation(privacy=Plain()).channels, before, "FedAvg") == []


class AllButOne(Participation):
    """One source is absent in each round, in turn."""

    def draw(self, clients: Any, round_idx: int, rng: Any) -> Any:
        return [client for place, client in enumerate(clients) if place != round_idx % 4]


def test_two_rounds_over_other_clients_reveal_a_difference_and_warn() -> None:
    fed = federation(participation=AllButOne())
    totals = []
    with warned() as words:
        for fed.round_idx in range(2):
            totals.append(total(fed))
    torch.testing.assert_close(totals[1] - totals[0], own("a") - own("b"), atol=1e-5, rtol=0)
    assert len(words) == 1
    assert "channel 'moments' is summed over ['a', 'c', 'd'], and was over ['b', 'c', 'd']" in words[0]
    assert "what ['a', 'b'] sent" in words[0]


@pytest.mark.parametrize(
    "choices",
    [
        {"participation": Everyone()},
        {"participation": AllButOne(), "privacy": Plain()},
        {"participation": AllButOne(), "channels": [Summed("moments", "changes from round to round", "sources")]},
    ],
)
def test_rounds_that_reveal_nothing_more_do_not_warn(choices: dict[str, Any]) -> None:
    fed = federation(**choices)
    with warned() as words:
        for fed.round_idx in range(3):
            total(fed)
    assert words == []


def test_noise_ends_no_warning_but_the_warning_states_what_it_covers() -> None:
    """The difference of two sums has the victims' vectors with their noise, and that of all others, twice."""
    noise = {"differential_privacy": GaussianMechanism(1.0, 0.25)}
    fed = federation(participation=AllButOne(), **noise)
    with warned() as words:
        for fed.round_idx in range(2):
            total(fed)
    words += over_other_targets(federation(**noise).channels, NAMES, NAMES)
    everyone = hidden_senders(federation(channels=[Summed("weights", "weights")], **noise).channels)
    words += over_other_senders(federation(**noise).channels, everyone, "FedAvg")
    before = federation(participation=Schedule([["a", "b", "c"]]), **noise)
    with warned() as more:
        federation(participation=Everyone(), **noise).load_state_dict(before.state_dict())
    assert len(words + more) == 5
    for sentence in words + more:
        assert "noise_multiplier=0.25) covers that only as far as the epsilon" in sentence
        assert "keep an account of all runs" in sentence
        assert "give differential_privacy" not in sentence


def test_a_resume_remembers_over_whom_a_fixed_channel_was_summed() -> None:
    before = federation(participation=Schedule([["a", "b", "c"]]))
    total(before)
    state = before.state_dict()
    after = federation(participation=Schedule([["a", "b", "d"]]))
    with warned() as words:
        after.load_state_dict(state)
        total(after)
    assert "participation or heard is another one than in the checkpoint" in words[0]
    assert "['moments', 'weights']" in words[0]
    assert "was over ['a', 'b', 'c']" in words[1]
    assert len(words) == 2


@pytest.mark.parametrize("rule", [Everyone(), Fraction(0.5), Schedule([["a", "b"], ["c", "d"]])])
def test_a_resume_with_the_same_participation_or_without_a_note_of_it_does_not_warn(rule: Participation) -> None:
    before = federation(participation=rule, heard={"weights": Fraction(0.7)})
    before.round_idx = 3
    state = before.state_dict()
    noteless = {key: value for key, value in state.items() if key not in ("participation", "summed")}
    with warned() as words:
        federation(participation=rule, heard={"weights": Fraction(0.7)}).load_state_dict(state)
        federation(participation=Fraction(0.2)).load_state_dict(noteless)
    assert words == []
