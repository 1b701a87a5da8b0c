"""Encrypted messages from client to client: a relay reads and changes nothing, and all else stays."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlit.federation import Federation
from fedlit.federation.sealing import MAC_BYTES, WRAP_BYTES, Seals
from fedlit.federation.transport import OneProcess, Transport
from fedlit.privacy import AuthenticationError, DecodeError, KeyCheckError, PairwiseMasking, Plain, PlainAffine
from thread_transport import Threads, on_ranks

NAMES = ["a", "b", "c", "t"]
PLACEMENT = [[], ["a", "b"], ["c"], ["t"]]
SECRET = torch.tensor([0.1234567, -2.7182818, 3.1415926, 1.4142135])


def talk(transport: Transport, placement: Any = None, **choices: Any) -> dict[str, Any]:
    """The target sends its sources a message, each source the target, and one source two others."""
    federation = Federation(NAMES, "t", transport=transport, placement=placement, seed=0, **choices)
    got: list[Any] = []
    for federation.round_idx in range(2):
        own = {name: {"w": SECRET + place} for place, name in enumerate(NAMES) if federation.is_local(name)}
        got.append(federation.exchange("model", {"t": own["t"]} if "t" in own else {}, to=["a", "b", "c"]))
        got.append(federation.exchange("update", {name: own[name] for name in own if name != "t"}, to=["t"]))
        each = {"a": {"b": {"w": SECRET}, "c": {"w": 2 * SECRET}}} if "a" in own else {}
        got.append(federation.exchange("routed", each, to=["b", "c"]))
    return {"got": got, "ledger": list(federation.ledger)}


def record(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], None] | None = None) -> list[bytes]:
    """All messages as a relay between the ranks sees them, and may change them."""
    seen: list[bytes] = []
    send = Threads._send

    def relay(self: Threads, rank: int, value: Any) -> None:
        if isinstance(value, Tensor) and value.dtype == torch.uint8:
            value = value.clone()
            seen.append(value.numpy().tobytes())
            if spoil is not None:
                spoil(value)
        send(self, rank, value)

    monkeypatch.setattr(Threads, "_send", relay)
    return seen


def in_traffic(seen: list[bytes]) -> bool:
    pairs = itertools.pairwise(SECRET.tolist())  # 8 bytes each, which random bytes are not by chance
    return any(struct.pack("<2f", *pair) in message for pair in pairs for message in seen)


@pytest.mark.parametrize("choices", [{"privacy": PairwiseMasking()}, {"encrypted": True}])
def test_a_relay_reads_no_message_between_clients(monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]) -> None:
    seen = record(monkeypatch)
    results = on_ranks(lambda transport: talk(transport, PLACEMENT, **choices), 4)
    assert not in_traffic(seen)
    received = [by_receiver for result in results for by_receiver in result["got"]]
    assert any("t" in each and torch.equal(each["t"]["c"]["w"], SECRET + 2) for each in received)


@pytest.mark.parametrize(
    "choices", [{"privacy": Plain()}, {"two_party": PlainAffine()}, {"encrypted": False, "privacy": PairwiseMasking()}]
)
def test_without_encryption_it_does(monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]) -> None:
    seen = record(monkeypatch)
    on_ranks(lambda transport: talk(transport, PLACEMENT, **choices), 4)
    assert in_traffic(seen)


@pytest.mark.parametrize("choices", [{"privacy": PairwiseMasking()}, {}], ids=["encrypted", "in the clear"])
@pytest.mark.parametrize("placement", [None, PLACEMENT, [["a", "t"], ["b", "c"]], [["a"], ["b"], ["c"], ["t"]]])
def test_messages_and_ledger_do_not_depend_on_where_clients_are(placement: Any, choices: dict[str, Any]) -> None:
    alone = talk(OneProcess(), **choices)
    results = on_ranks(lambda transport: talk(transport, placement, **choices), len(placement or PLACEMENT))
    clear = talk(OneProcess())
    for step, received in enumerate(alone["got"]):
        together: dict[str, Any] = {}
        for result in results:
            together |= result["got"][step]
        assert list(sorted(together)) == list(sorted(received)) == list(sorted(clear["got"][step]))
        for name in received:
            for sender, message in received[name].items():
                assert torch.equal(together[name][sender]["w"], message["w"])
                assert torch.equal(clear["got"][step][name][sender]["w"], message["w"])
    for result in results:
        assert sorted(result["ledger"]) == sorted(alone["ledger"])


def test_a_message_is_longer_by_a_tag_and_by_its_sealed_key() -> None:
    def sizes(**choices: Any) -> dict[tuple[str, str, str], int]:
        ledger = talk(OneProcess(), **choices)["ledger"]
        return {(e.channel, e.sender, e.receiver): e.num_bytes for e in ledger if not e.channel.endswith("/keys")}

    clear, sealed = sizes(), sizes(encrypted=True)
    assert clear.keys() == sealed.keys()
    assert {sealed[way] - clear[way] for way in clear} == {MAC_BYTES + WRAP_BYTES} == {76}


@pytest.mark.parametrize("place", [0, WRAP_BYTES, -1])
def test_a_changed_message_opens_for_nobody(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    def spoil(message: Tensor) -> None:
        if len(message) > 130:  # a sealed payload, and no key
            message[place] ^= 1

    record(monkeypatch, spoil)
    with pytest.raises(AuthenticationError, match="does not open"):
        on_ranks(lambda transport: talk(transport, PLACEMENT, encrypted=True), 4, timeout=0.5)


@pytest.fixture
def met() -> tuple[Seals, Seals]:
    """Those of a and b, and of c and d, who know each other."""
    first, second = Seals(["a", "b"]), Seals(["c", "d"])
    keys = {**first.public_keys(), **second.public_keys()}
    for seals, names in ((first, ["a", "b"]), (second, ["c", "d"])):
        seals.introduce({name: {other: keys[other] for other in keys if other != name} for name in names})
    return first, second


MESSAGE = torch.arange(200, dtype=torch.uint8)


@pytest.mark.parametrize("length", [0, 1, 200])
def test_what_is_closed_opens_for_its_readers(met: tuple[Seals, Seals], length: int) -> None:
    first, second = met
    (sealed,) = first.close(MESSAGE[:length], "a", [["c", "d"]], b"this")
    assert sealed.shape == (2 * WRAP_BYTES + length + MAC_BYTES,)
    assert torch.equal(second.open(sealed, "a", ["c", "d"], b"this"), MESSAGE[:length])
    assert not torch.equal(sealed, first.close(MESSAGE[:length], "a", [["c", "d"]], b"this")[0])


@pytest.mark.parametrize(
    ("sender", "readers", "about"),
    [("b", ["c", "d"], b"this"), ("a", ["d", "c"], b"this"), ("a", ["c", "d"], b"that"), ("a", ["c"], b"this")],
)
def test_it_opens_for_no_other_sender_reader_or_use(
    met: tuple[Seals, Seals], sender: str, readers: list[str], about: bytes
) -> None:
    first, second = met
    (sealed,) = first.close(MESSAGE, "a", [["c", "d"]], b"this")
    with pytest.raises(AuthenticationError, match="does not open"):
        second.open(sealed, sender, readers, about)


def test_messages_cut_off_or_spliced_do_not_open(met: tuple[Seals, Seals]) -> None:
    first, second = met
    (one,), (other,) = (first.close(message, "a", [["c", "d"]], b"this") for message in (MESSAGE, MESSAGE + 1))
    cut_off = [one[:length] for length in (0, 1, 15, 59, 60, 75, 119, 120, 135, 335)]
    spliced = [torch.cat([one[:cut], other[cut:]]) for cut in (WRAP_BYTES, 2 * WRAP_BYTES)]
    for bad in (*cut_off, *spliced):
        with pytest.raises(AuthenticationError, match="does not open"):
            second.open(bad, "a", ["c", "d"], b"this")


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ({"b": {"key": torch.zeros(32, dtype=torch.uint8)}}, KeyCheckError),  # of low order
        ({"b": {"key": torch.zeros(3, dtype=torch.uint8)}}, KeyCheckError),
        ({"b": {"w": torch.zeros(32)}}, DecodeError),
        (dict.fromkeys("bc", Seals(["b"]).public_keys()["b"]), KeyCheckError),  # one key of two clients
    ],
)
def test_keys_are_checked(messages: dict[str, dict[str, Tensor]], error: type[Exception]) -> None:
    with pytest.raises(error, match="'b'"):
        Seals(["a"]).introduce({"a": messages})
