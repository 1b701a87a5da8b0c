"""Messages from client to client under a hiding backend: a relay reads and changes nothing; all else stays."""

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
    """The target tells its sources something; each source tells the target, and one source another one."""
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
    """What anybody between the ranks sees of all messages, and may change."""
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


def test_a_relay_reads_no_message_between_clients_under_a_hiding_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record(monkeypatch)
    results = on_ranks(lambda transport: talk(transport, PLACEMENT, privacy=PairwiseMasking()), 4)
    assert not in_traffic(seen)
    received = [by_receiver for result in results for by_receiver in result["got"]]
    assert any("t" in each and torch.equal(each["t"]["c"]["w"], SECRET + 2) for each in received)


@pytest.mark.parametrize("choices", [{}, {"privacy": Plain()}, {"two_party": PlainAffine()}, {"encrypted": False}])
def test_without_one_it_does_and_so_the_test_above_can_fail(
    monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    if "encrypted" in choices:
        choices = {**choices, "privacy": PairwiseMasking()}
    seen = record(monkeypatch)
    on_ranks(lambda transport: talk(transport, PLACEMENT, **choices), 4)
    assert in_traffic(seen)


def test_encryption_is_had_without_a_backend_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record(monkeypatch)
    on_ranks(lambda transport: talk(transport, PLACEMENT, encrypted=True), 4)
    assert not in_traffic(seen)


@pytest.mark.parametrize("placement", [None, PLACEMENT, [["a", "t"], ["b", "c"]], [["a"], ["b"], ["c"], ["t"]]])
def test_messages_and_ledger_do_not_depend_on_where_clients_are(placement: Any) -> None:
    choices = {"privacy": PairwiseMasking()}
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


@pytest.mark.parametrize("place", [0, 12, 40, WRAP_BYTES, 100, -1])
def test_a_changed_message_opens_for_nobody(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    def spoil(message: Tensor) -> None:
        if len(message) > 130:  # a sealed payload, and no key
            message[place] ^= 1

    record(monkeypatch, spoil)
    with pytest.raises(AuthenticationError, match="does not open"):
        on_ranks(lambda transport: talk(transport, PLACEMENT, encrypted=True), 4, timeout=0.3)


# ---------------------------------------------------------------- the seals alone


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


@pytest.mark.parametrize("length", [0, 1, 15, 59, 60, 75, 119, 120, 135, 335])
def test_a_message_cut_off_does_not_open(met: tuple[Seals, Seals], length: int) -> None:
    first, second = met
    (sealed,) = first.close(MESSAGE, "a", [["c", "d"]], b"this")
    with pytest.raises(AuthenticationError, match="does not open"):
        second.open(sealed[:length], "a", ["c", "d"], b"this")


def test_two_messages_spliced_do_not_open(met: tuple[Seals, Seals]) -> None:
    first, second = met
    (one,), (other,) = (first.close(message, "a", [["c", "d"]], b"this") for message in (MESSAGE, MESSAGE + 1))
    for cut in (WRAP_BYTES, 2 * WRAP_BYTES):  # keys of the two messages for the two readers; the other's body
        with pytest.raises(AuthenticationError, match="does not open"):
            second.open(torch.cat([one[:cut], other[cut:]]), "a", ["c", "d"], b"this")


def test_keys_are_checked() -> None:
    seals = Seals(["a"])
    with pytest.raises(KeyCheckError, match="low order"):
        seals.introduce({"a": {"b": {"key": torch.zeros(32, dtype=torch.uint8)}}})
    with pytest.raises(KeyCheckError, match="must have 32 bytes, got 3"):
        seals.introduce({"a": {"b": {"key": torch.zeros(3, dtype=torch.uint8)}}})
    with pytest.raises(DecodeError, match="'b' sends no key"):
        seals.introduce({"a": {"b": {"w": torch.zeros(32)}}})
    key = Seals(["b"]).public_keys()["b"]
    with pytest.raises(KeyCheckError, match="the same identity key"):
        seals.introduce({"a": {"b": key, "c": key}})
