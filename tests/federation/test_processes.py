"""A federation over several processes: the same results as in one, and clear errors instead of hangs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import peers
import processes
from fedlit.federation import Ledger
from fedlit.federation.documents import fingerprint
from fedlit.federation.transport import OneProcess
from loopback import around_a_star
from refused import slow
from thread_transport import on_ranks

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module", params=[(2, True), slow((3, False))], ids=["2 processes", "3 threads"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    world_size, real = request.param
    if not real:
        return on_ranks(peers.everything, world_size)
    folder = tmp_path_factory.mktemp("peers")
    return processes.results(peers.over_processes, folder, world_size, ranks=world_size)


@pytest.fixture(scope="module")
def bereft(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("peers")
    ended = processes.run(peers.with_the_last_one_lost, folder, 3, ranks=3)
    assert [one.exit_code for one in ended] == [0, 0, 9], "\n".join(one.output + one.error for one in ended)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(3)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return peers.script(OneProcess())


@cache
def affine_in_one_process(run: str) -> dict[str, Any]:
    protocol = peers.paillier() if run == "paillier" else peers.PlainAffine(peers.GRID)
    return peers.affine_script(OneProcess(), protocol)


def same_bits(one: Any, other: Any) -> bool:
    """Equal tensors of equal type, in dictionaries of equal order."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_bits(one[key], other[key]) for key in one)
    return type(one) is type(other) and fingerprint(one) == fingerprint(other)


def joined(ranks: list[dict[str, Any]], run: str, step: int) -> dict[str, Any]:
    return {name: value for rank in ranks for name, value in rank[run]["got"][step].items()}


def ledger(result: dict[str, Any]) -> Ledger:
    made = Ledger()
    made.load_state_dict(result["ledger"])
    return made


def assert_got_the_bits_of_one_process(ranks: list[dict[str, Any]], run: str, alone: dict[str, Any]) -> None:
    assert len(alone["got"]) == 4 * 8
    for step, expected in enumerate(alone["got"]):
        if step % 8 == 7:  # a report: all of it, on every process
            assert all(same_bits(rank[run]["got"][step], expected) for rank in ranks)
        else:
            received = joined(ranks, run, step)
            assert received.keys() == expected.keys()
            assert same_bits({name: received[name] for name in expected}, expected)
    for rank in ranks:
        assert ledger(rank[run]) == ledger(alone)
        assert (rank[run]["weights"], rank[run]["calls"]) == (alone["weights"], alone["calls"])


def test_every_client_gets_the_bits_that_it_would_get_in_one_process(
    ranks: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for run in ("script", "placed") if "placed" in ranks[0] else ("script",):
        assert_got_the_bits_of_one_process(ranks, run, alone)


def test_three_processes_give_the_bits_and_the_ledger_of_one(
    bereft: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert_got_the_bits_of_one_process(bereft, "script", alone)


def test_a_server_with_sites_around_it_gives_the_bits_and_the_ledger_of_one(alone: dict[str, Any]) -> None:
    sites = {"one": ["a", "d"], "two": ["b", "t"], "three": ["c"]}
    placement = [[], *sites.values()]
    ranks: Any = around_a_star(sites, lambda star, _: {"script": peers.script(star, placement=placement)})
    assert_got_the_bits_of_one_process(ranks, "script", alone)


def test_another_backend_works_over_processes_and_only_the_server_aggregates(
    ranks: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for step in range(4, 7):
        received, expected = joined(ranks, "pads", step), alone["got"][step]
        for name in expected:
            torch.testing.assert_close(received[name]["w"], expected[name]["w"], rtol=0, atol=1e-5)
            assert torch.equal(received[name]["n"], expected[name]["n"])
    assert ["aggregate" in rank["log"] for rank in ranks] == [True] + [False] * (len(ranks) - 1)
    assert all({"open_round", "protect", "reveal"} <= set(rank["log"]) for rank in ranks)


@pytest.mark.parametrize("run", ["affine", "paillier"])
def test_affine_maps_between_clients_of_two_processes_are_those_of_one(ranks: list[dict[str, Any]], run: str) -> None:
    expected, clear = affine_in_one_process(run), affine_in_one_process("affine")
    seen: set[str] = set()
    for step, learned in enumerate(expected["got"]):
        assert same_bits(learned, clear["got"][step]), "under Paillier too: both compute exactly on one grid"
        received = joined(ranks, run, step)
        assert received.keys() == learned.keys()
        assert same_bits({name: received[name] for name in learned}, learned)
        seen |= set(learned)
    assert len(seen) >= 3  # t and two others, as half of the four sources are present at a time
    for rank in ranks:
        if run == "affine":  # sizes under Paillier depend on the keys, by a byte
            assert ledger(rank[run]) == ledger(expected)
        else:
            ours, theirs = ({(e.round_idx, e.sender, e.receiver, e.messages) for e in ledger(result)}
                            for result in (rank[run], expected))  # fmt: skip
            assert ours == theirs
        assert ledger(rank[run]) == ledger(ranks[0][run])
        assert rank[run]["calls"] == expected["calls"]


FAILURES = [
    *((case + when, error, words) for when in ("", " before keys") for case, error, words in [
        ("far", "RangeError", ["bound"]),
        ("nan", "DivergedError", ["client 't'", "channel 'dot'"]),
        ("wide", "RangeError", ["bound"]),
        ("blank", "InputError", ["matrix"]),
        ("ragged", "InputError", ["matrix must be of shape"]),
        ("greedy", "DecodeError", ["numbers of the reply", "got 3"]),
    ]),
    ("nan under noise", "DivergedError", []),
    ("affine out of step", "OutOfStepError", []),
    ("afterwards", "", []),
    ("out_of_step", "OutOfStepError", ["rank 0 is in mean of channel 'one'", "rank 1 in mean of channel 'other'"]),
    ("other_verb", "OutOfStepError", ["in mean of channel 'same'", "rank 1 in exchange of channel 'same'"]),
    ("other_report", "OutOfStepError", ["in report of channel 'metrics'"]),
    ("other_round", "OutOfStepError", ["round 0", "rank 1", "round 1"]),
    ("diverged", "DivergedError", ["client 't'", "channel 'w' in round 0"]),
    ("mismatched", "PayloadError", ["client 't' differs from", "(5,)"]),
    ("weightless", "PayloadError", ["{'t': 0.0}"]),
    ("kept", "DivergedError", ["kept by one"]),
    ("shapes", "RosterError", ["client 't'", "(3,)"]),
    ("disagree", "OutOfStepError", ["rank 0 has 1, rank 1 2"]),
    ("not_mine", "RosterError", ["is hosted by rank"]),
    ("too_few", "FederationError", ["over ['a'] alone"]),
]  # fmt: skip


@pytest.mark.parametrize(("case", "error", "words"), FAILURES)
def test_a_failure_of_one_process_is_an_error_on_all(
    ranks: list[dict[str, Any]], case: str, error: str, words: list[str]
) -> None:
    for rank in ranks:
        raised, text, seconds = rank["failures"][case]
        assert raised == error, text
        # numbers of a client are read in the output of its process alone
        quoted = error not in ("RangeError", "InputError") or "raised by rank" not in text
        assert all(word in text for word in words) if quoted else "in the output of its process alone" in text, text
        assert seconds < 10
    if case.removesuffix(" before keys") in peers.SPOILED:  # all but the process of that party name it
        assert ["raised by rank" in rank["failures"][case][1] for rank in ranks].count(False) == 1


def test_a_process_that_stalls_is_given_up_after_the_timeout(bereft: list[dict[str, Any]]) -> None:
    for rank in bereft[:-1]:
        kind, text, seconds = rank["stalled"]
        assert kind == "FederationTimeoutError", text
        assert "lost the other processes during exchange 'w' of round 0" in text
        assert "was silent for 1 s (timeout)" in text
        assert seconds < 15


def test_a_process_that_dies_is_an_error_and_no_hang(bereft: list[dict[str, Any]]) -> None:
    for rank in bereft[:-1]:
        kind, text, seconds = rank["died"]
        assert kind == "FederationTimeoutError", text
        assert seconds < 20
