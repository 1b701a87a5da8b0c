"""Short messages that travel with their announcement: fewer calls, the same messages and refusals."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlit.federation import Federation
from fedlit.federation import announced as carried
from fedlit.federation.ledger import Ledger
from fedlit.federation.messenger import KINDS, Message, Messenger
from fedlit.federation.transport import SHORT, Transport
from fedlit.federation.wire import wire_size
from fedlit.privacy import DecodeError, PairwiseMasking, Plain, SecureAggregation
from thread_transport import on_ranks

pytest.importorskip("grpc")
from star_threads import on_a_star

SITES = {"north": ["a", "b"], "south": ["c"]}
RANK_OF = {"a": 1, "b": 1, "c": 2}
KEYS, DOWNLOAD = KINDS.index("keys"), KINDS.index("download")


def message(length: int, value: int) -> Message:
    return {"keys": torch.full((length,), value, dtype=torch.uint8)}


def plain(messages: dict[str, Message]) -> dict[str, tuple[int, int]]:
    """By name, how long a message is, and its only value."""
    return {name: (len(each["keys"]), int(each["keys"].unique())) for name, each in messages.items()}


def up_and_down(lengths: dict[str, int]) -> Any:
    """All of these messages up, down, and the first for all; with the steps that this took."""

    def action(transport: Transport) -> Any:
        messenger = Messenger(transport, RANK_OF)
        local = {name: message(length, index) for index, (name, length) in enumerate(lengths.items(), 1)}
        mine = {name: each for name, each in local.items() if messenger.is_local(name)}
        down = local if messenger.hosts_server else {}
        steps = [transport.step]
        sizes, arrived = carried.carry(messenger, "keys", mine, KEYS, up=True)
        steps.append(transport.step)
        _, sent = carried.carry(messenger, "keys", down, KEYS, up=False)
        steps.append(transport.step)
        first = message(lengths["a"], 7) if messenger.hosts_server else {}
        size, to_all = carried.broadcast(messenger, "total", first, DOWNLOAD, ["a", "c"])
        steps.append(transport.step)
        messenger.announce("end", {}, KINDS.index("check"))
        taken = [after - before for before, after in pairwise(steps)]
        return sizes, plain(arrived), plain(sent), size, plain({"total": to_all}), taken

    return action


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ({"a": 10, "b": 1, "c": 1000}, [1, 1, 1]),
        ({"a": 10, "b": SHORT, "c": 1000}, [2, 2, 1]),  # north's are long together, and all of the server's
        ({"a": SHORT + 1, "b": 5, "c": SHORT + 1}, [2, 2, 2]),
        ({"a": SHORT // 2 + 1, "b": 5, "c": 7}, [1, 1, 2]),  # twice the server's is long
    ],
)
def test_messages_arrive_whether_they_travel_with_their_announcement_or_not(
    lengths: dict[str, int], steps: list[int], tmp_path: Path
) -> None:
    results: list[Any] = on_a_star(up_and_down(lengths), SITES, tmp_path)
    values = {name: (length, index) for index, (name, length) in enumerate(lengths.items(), 1)}
    sizes = {name: wire_size(message(length, 0)) for name, length in lengths.items()}
    for rank, (announced, arrived, sent, size, to_all, taken) in enumerate(results):
        assert announced == sizes
        assert arrived == (values if rank == 0 else {})
        assert sent == {name: value for name, value in values.items() if RANK_OF[name] == rank}
        assert (size, to_all) == (sizes["a"], {"total": (lengths["a"], 7)})
        assert taken == steps
    others: list[Any] = on_ranks(up_and_down(lengths), 3)
    assert [each[:5] for each in others] == [each[:5] for each in results]


def mean_over(backend: SecureAggregation) -> Any:
    """A mean of three clients by name of its receivers, the steps that a second one takes, and what crossed."""

    def action(transport: Transport) -> tuple[dict[str, list[float]], int, Ledger]:
        placement = [[], ["a", "b"], ["c"]]
        federation = Federation(["a", "b", "c"], "c", transport=transport, placement=placement, privacy=backend)
        payloads = {each.name: {"w": torch.tensor([ord(each.name) - 96.0, 1.0])} for each in federation.local_clients}
        weights = dict.fromkeys("abc", 1.0)
        federation.mean("weights", payloads, weights=weights)  # with the keys that last
        before = transport.step
        received = federation.mean("weights", payloads, weights=weights)
        return {name: each["w"].tolist() for name, each in received.items()}, transport.step - before, federation.ledger

    return action


@pytest.mark.parametrize(
    ("backend", "calls"),
    [
        # keys, shares, confirmations and unmasking go up and down in a call each, the vector in two: it waits until all
        # are there; then the total, and whether all could read it
        (PairwiseMasking(colluders=0, threshold=2), 4 + 2 + 4 + 1 + 1),
        (Plain(), 2 + 1 + 1),
    ],
)
def test_messages_beside_the_vectors_of_a_mean_take_a_call_each(
    backend: SecureAggregation, calls: int, tmp_path: Path
) -> None:
    results: list[Any] = on_a_star(mean_over(backend), SITES, tmp_path)
    expected: list[Any] = on_ranks(mean_over(backend), 3)
    for (received, taken, ledger), (same, _, books) in zip(results, expected, strict=True):
        assert received == same
        assert taken == calls
        assert ledger == books


def test_bytes_that_are_no_messages_are_an_error_of_all(tmp_path: Path) -> None:
    def action(transport: Transport) -> None:
        messenger = Messenger(transport, RANK_OF)
        if transport.rank == 1:
            messenger.announce_with("keys", {"a": 30}, KEYS, {0: torch.zeros(29, dtype=torch.uint8)})
        else:
            mine = {} if messenger.hosts_server else {"c": message(5, 1)}
            _, arrived = carried.carry(messenger, "keys", mine, KEYS, up=True)
            assert not arrived
        messenger.announce("end", {}, KINDS.index("check"))

    for error in on_a_star(action, SITES, tmp_path):
        assert isinstance(error, DecodeError)
        assert "channel 'keys': 29 bytes came, where 30 are announced" in str(error)


def test_more_than_what_is_short_drops_its_site(tmp_path: Path) -> None:
    def action(transport: Transport) -> Any:
        messenger = Messenger(transport, RANK_OF)
        if transport.rank == 1:
            blob = torch.zeros(SHORT + 1, dtype=torch.uint8)
            transport.meet_with(torch.zeros(4, dtype=torch.int64), {0: blob}, "a lie")
        sizes, arrived = carried.carry(
            messenger, "keys", {} if messenger.hosts_server else {"c": message(5, 1)}, KEYS, up=True
        )
        return transport.lost, {**sizes}, plain(arrived)

    server, liar, other = on_a_star(action, SITES, tmp_path)
    assert server == (frozenset({1}), {"c": wire_size(message(5, 1))}, {"c": (5, 1)})
    assert other == (*server[:2], {})
    assert isinstance(liar, Exception)
