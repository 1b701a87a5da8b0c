"""What the base of homomorphic backends promises whatever the scheme: enrolment, rounds, which totals are read."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from torch import Tensor

from fedlit.privacy import (
    AuthenticationError,
    DecodeError,
    FixedPoint,
    InputError,
    KeyCheckError,
    QuorumError,
    RangeError,
    ReplayError,
    RoundId,
    driver,
    links,
    shared_key,
)
from fedlit.privacy.base import Description
from fedlit.privacy.links import Buffer
from fedlit.privacy.shared_key import HomomorphicKey, SharedKeyAggregation, SharedKeyClient, SharedKeyServer
from refused import refused

NAMES = ["a", "b", "c"]


class Clear(HomomorphicKey):
    """Hides nothing."""

    def encrypt(self, vector: Tensor) -> Iterator[bytes]:
        yield vector.double().numpy().tobytes()

    def decrypt(self, body: Buffer, length: int, num_clients: int) -> Tensor:
        return torch.frombuffer(bytearray(body), dtype=torch.float64)

    def add(self, total: deque[Tensor], body: Buffer, length: int) -> None:
        total.append(self.decrypt(body, length, 1) + (total.popleft() if total else 0))

    def write(self, total: deque[Tensor]) -> Iterator[bytes]:
        yield total.popleft().numpy().tobytes()


class Summing(SharedKeyAggregation):
    def __init__(self, max_clients: int = 8) -> None:
        self.codec = FixedPoint()
        self.max_clients = max_clients

    def generate_keys(self) -> tuple[bytes, bytes]:
        return b"private", b"public"

    def load_key(self, public: bytes, private: bytes | None = None) -> HomomorphicKey:
        return Clear()

    def describe(self) -> Description:
        raise NotImplementedError


class Parties(driver.Parties):
    """A federation with a key."""

    clients: dict[str, Any]
    server: Any

    def __init__(self, backend: SharedKeyAggregation | None = None) -> None:
        super().__init__(backend or Summing(), NAMES)
        self.enrol(NAMES)

    def open(self, call: int, channel: str = "w", names: Sequence[str] = NAMES) -> None:
        self.open_round(RoundId(call // 10, channel, call), names)

    def total_of(self, call: int, channel: str = "w", names: Sequence[str] = NAMES, length: int = 4) -> Tensor:
        self.open(call, channel, names)
        value = torch.full((length,), call / 64)
        total: Tensor = self.server.aggregate({name: self.clients[name].protect(value) for name in names})
        return total


@pytest.fixture
def parties() -> Parties:
    return Parties()


def test_a_total_older_than_one_that_was_read_is_refused(parties: Parties) -> None:
    old, new = parties.total_of(4), parties.total_of(7)
    client = parties.clients["a"]
    assert client.reveal(new, 3).tolist() == [3 * 7 / 64] * 4
    with pytest.raises(ReplayError, match=r"call 4 on channel 'w' is older than the one of call 7"):
        client.reveal(old, 3)
    assert client.reveal(new, 3).tolist() == [3 * 7 / 64] * 4  # several receivers may share a client


def test_a_client_that_was_away_reads_a_total_that_others_have_read(parties: Parties) -> None:
    """It has opened no round, and knows the channel and the call from the total alone."""
    old, new = parties.total_of(4, names=["a", "b"]), parties.total_of(7, names=["a", "b"])
    parties.clients["a"].reveal(new, 2)
    late = parties.clients["c"]
    assert late.reveal(old, 2).tolist() == [2 * 4 / 64] * 4
    assert late.reveal(new, 2).tolist() == [2 * 7 / 64] * 4
    with pytest.raises(ReplayError):
        late.reveal(old, 2)


def test_the_last_total_is_not_that_of_the_round_that_is_open(parties: Parties) -> None:
    last = parties.total_of(4)
    assert parties.clients["a"].reveal(last, 3).tolist() == [3 * 4 / 64] * 4
    parties.open(7)
    for name in NAMES:  # whether they have read it before or not
        with pytest.raises(ReplayError, match=r"call 4 on channel 'w' is older than the one of call 7"):
            parties.clients[name].reveal(last, 3)


def test_each_channel_has_totals_of_its_own_age(parties: Parties) -> None:
    weights, steps = parties.total_of(4, "weights"), parties.total_of(7, "steps")
    client = parties.clients["b"]
    client.reveal(steps, 3)
    assert client.reveal(weights, 3).tolist() == [3 * 4 / 64] * 4


def test_a_refused_total_makes_no_other_one_old(parties: Parties) -> None:
    old, new = parties.total_of(4, names=["a", "b"]), parties.total_of(7, names=["a", "b"])
    client = parties.clients["c"]  # in neither round
    with pytest.raises(AuthenticationError):
        client.reveal(new, 3)
    changed = new.clone()
    changed[-1] ^= 1
    with pytest.raises(AuthenticationError):
        client.reveal(changed, 2)
    client.reveal(old, 2)


@pytest.mark.parametrize("position", [28, 36, 44, 52, 60, 64, 95, 96])  # a byte of each field
def test_no_field_of_the_head_of_a_total_can_be_changed(parties: Parties, position: int) -> None:
    total = parties.total_of(4)
    total[position] ^= 1
    with pytest.raises(AuthenticationError):
        parties.clients["a"].reveal(total, 3)


def test_a_new_enrolment_forgets_the_age_of_totals(parties: Parties) -> None:
    parties.clients["a"].reveal(parties.total_of(7), 3)
    parties.enrol(NAMES)
    parties.clients["a"].reveal(parties.total_of(4), 3)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_total_sealed_anew_is_read_as_it_was(parties: Parties, length: int) -> None:
    total = torch.linspace(-1, 1, length, dtype=torch.float64)
    sealed = parties.clients["a"].reissue(total, 2)
    assert torch.equal(parties.clients["b"].reveal(sealed, 2), total)
    with pytest.raises(AuthenticationError, match="must be 3, as announced, got 2"):
        parties.clients["b"].reveal(sealed, 3)


def test_a_total_sealed_anew_is_as_old_as_the_one_that_it_repeats(parties: Parties) -> None:
    author, reader = parties.clients["a"], parties.clients["b"]
    first = author.reveal(parties.total_of(4, "w"), 3)
    author.reveal(parties.total_of(5, "other"), 3)
    sealed = author.reissue(first, 3)
    reader.reveal(parties.total_of(9, "other"), 3)
    assert torch.equal(reader.reveal(sealed, 3), first)
    reader.reveal(parties.total_of(10, "w"), 3)
    with pytest.raises(ReplayError, match="call 4 on channel 'w'"):
        reader.reveal(sealed, 3)


def test_a_total_from_before_a_resume_is_read_until_something_newer_was(parties: Parties) -> None:
    author, reader = parties.clients["a"], parties.clients["b"]
    restored = torch.ones(3, dtype=torch.float64)
    sealed = author.reissue(restored, 3)
    for _ in range(2):
        assert torch.equal(reader.reveal(sealed, 3), restored)
    total = parties.total_of(0)
    reader.reveal(total, 3)
    with pytest.raises(ReplayError):
        reader.reveal(sealed, 3)
    author.reveal(total, 3)  # whoever is as far as the reader can seal what is from before the resume
    assert torch.equal(reader.reveal(author.reissue(restored, 3), 3), restored)


def test_a_server_cannot_give_a_sealed_total_another_round(parties: Parties) -> None:
    author, reader = parties.clients["a"], parties.clients["b"]
    sealed = author.reissue(author.reveal(parties.total_of(4), 3), 3)
    link = parties.server._keys[1]
    bound_to, length, added, body = shared_key._unframe(link, "total", sealed)
    newer = RoundId(bound_to.round_id.round_idx, "w", 9)
    digest = shared_key._about_sealed(newer, length, added)
    with pytest.raises(AuthenticationError):
        reader.reveal(shared_key._frame(link, "total", shared_key._Binding(newer, digest), length, added, [body]), 3)


@pytest.mark.parametrize("step", ["", "shares"])
def test_unknown_steps_are_refused(parties: Parties, step: str) -> None:
    client, server = parties.clients["a"], parties.server
    for call in (lambda: client.send(step), lambda: client.receive(step, b""), lambda: server.relay(step, {})):
        with refused("step"):
            call()


def test_parties_enrol_in_order_and_open_no_round_before() -> None:
    client, server = SharedKeyClient("a", Summing()), SharedKeyServer(Summing())
    sent, round_id = dict.fromkeys(NAMES, bytes(32)), RoundId(0, "w", 0)
    for step in ("identities", "keys"):
        for call in (lambda step=step: client.receive(step, b"x"), lambda step=step: server.relay(step, sent)):
            with pytest.raises(KeyCheckError, match="call enrol first"):
                call()
    server.enrol(NAMES)
    for call in (
        lambda: server.relay("keys", {"a": b"deal"}),
        lambda: client.enrol(["b", "c"]),
        lambda: client.open_round(round_id, NAMES),
        lambda: SharedKeyServer(Summing()).open_round(round_id, NAMES),
    ):
        with pytest.raises(KeyCheckError):
            call()


@pytest.mark.parametrize(("names", "error"), [(["a", "x"], KeyCheckError), (["a"], QuorumError), (NAMES, RangeError)])
def test_rounds_of_strangers_too_few_or_too_many_are_refused_by_both(names: list[str], error: type[Exception]) -> None:
    parties = Parties(Summing(max_clients=2))
    for party in (parties.clients["a"], parties.server):
        with pytest.raises(error):
            party.open_round(RoundId(0, "w", 0), names)
    with pytest.raises(KeyCheckError, match="not in"):
        parties.clients["a"].open_round(RoundId(0, "w", 0), ["b", "c"])


def test_a_refused_round_leaves_no_earlier_one_open(parties: Parties) -> None:
    parties.open(0)
    messages = {name: parties.clients[name].protect(torch.ones(2)) for name in "ab"}
    for party in (parties.clients["c"], parties.server):
        with pytest.raises(QuorumError):
            party.open_round(RoundId(0, "w", 1), ["c"])
    with pytest.raises(ReplayError):
        parties.clients["c"].protect(torch.ones(2))
    with pytest.raises(ReplayError):
        parties.server.aggregate(messages)


def test_vectors_of_a_round_that_failed_are_in_no_later_one(parties: Parties) -> None:
    parties.open(0)
    parties.server.add("a", parties.clients["a"].protect(torch.ones(2)))
    parties.open(1, names=["b", "c"])
    for name in ("b", "c"):
        parties.server.add(name, parties.clients[name].protect(torch.ones(2)))
    assert parties.clients["b"].reveal(parties.server.total(), 2).tolist() == [2.0, 2.0]


def test_a_vector_is_added_when_it_comes_once_and_its_message_is_not_kept(parties: Parties) -> None:
    parties.open(0)
    for number, name in enumerate(NAMES):
        message = parties.clients[name].protect(torch.full((2,), float(number)))
        parties.server.add(name, message)
        with pytest.raises(ReplayError, match="has sent its vector of this round already"):
            parties.server.add(name, message)
        memory = weakref.ref(message)
        del message
        assert memory() is None
    assert parties.clients["a"].reveal(parties.server.total(), 3).tolist() == [3.0, 3.0]


def test_a_vector_that_fails_in_the_middle_ends_the_round(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of it is in the total by then."""
    parties.open(0)
    first, second = (parties.clients[name].protect(torch.ones(2)) for name in "ab")
    parties.server.add("a", first)

    def fail(*_: Any) -> None:
        raise DecodeError("ciphertexts cannot be added")

    with monkeypatch.context() as patch:
        patch.setattr(Clear, "add", fail)
        with pytest.raises(DecodeError, match="cannot be added"):
            parties.server.add("b", second)
    with pytest.raises(ReplayError, match="no open round"):
        parties.server.add("b", second)
    with pytest.raises(ReplayError, match="no open round"):
        parties.server.total()


def test_a_total_that_fails_is_no_later_vector_s(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as without memory for it: what is added next would be the total of one client."""
    parties.open(0)
    messages = {name: parties.clients[name].protect(torch.ones(2)) for name in NAMES}
    for name in "ab":
        parties.server.add(name, messages[name])

    def fail(*_: Any) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(links.Link, "tag", fail)
        with pytest.raises(MemoryError):
            parties.server.total()
    for step in (lambda: parties.server.add("c", messages["c"]), parties.server.total):
        with pytest.raises(ReplayError, match="no open round"):
            step()


def test_a_failed_aggregate_keeps_no_vector(parties: Parties) -> None:
    parties.open(0)
    messages = {name: parties.clients[name].protect(torch.ones(2)) for name in NAMES}
    with pytest.raises(AuthenticationError):
        parties.server.aggregate({**messages, "c": messages["b"]})
    with pytest.raises(QuorumError):
        parties.server.total()
    assert parties.clients["a"].reveal(parties.server.aggregate(messages), 3).tolist() == [3.0, 3.0]


def test_what_is_no_vector_of_a_client_of_the_round_is_not_added(parties: Parties) -> None:
    total = parties.total_of(4, names=["a", "b"])
    parties.open(5, names=["a", "b"])
    opened, link = parties.server._opened(), parties.server._keys[1]
    two = shared_key._frame(link, "vector of a", opened, 4, 2, [shared_key._unframe(link, "total", total)[3]])
    with pytest.raises(AuthenticationError, match="client 'a' sent a total of 2 vectors in place of its own"):
        parties.server.add("a", two)
    parties.server.add("b", parties.clients["b"].protect(torch.ones(2)))
    stranger = shared_key._frame(link, "vector of c", opened, 2, 1, [bytes(16)])
    with pytest.raises(AuthenticationError, match="clients \\['c'\\] cannot send vectors"):
        parties.server.add("c", stranger)


class Recording:
    """A cipher that counts the bytes of each call."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, *arguments: Any) -> None:
        self._made: Any = Cipher(*arguments)

    def encryptor(self) -> Recording:
        self._made = self._made.encryptor()
        return self

    def decryptor(self) -> Recording:
        self._made = self._made.decryptor()
        return self

    def authenticate_additional_data(self, data: Any) -> None:
        self.sizes.append(len(data))
        self._made.authenticate_additional_data(data)

    def update(self, data: Any) -> Any:
        self.sizes.append(len(data))
        return self._made.update(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 100])
def test_a_message_longer_than_openssl_counts_goes_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, message = links.Link(bytes(32), "a"), links.Link(bytes(32), "b"), bytes(range(size))
    tag, sealed = ours.tag(message, b"about"), ours.seal(message, b"about")
    with monkeypatch.context() as patch:
        patch.setattr(links, "_PIECE_BYTES", 32)  # no shorter than a hash, which is a piece as well
        patch.setattr(links, "Cipher", Recording)
        patch.setattr(Recording, "sizes", [])
        theirs.verify(bytearray(message), b"about", tag)
        assert theirs.open(memoryview(sealed), b"about") == message
        pieces, in_pieces = theirs.tag(memoryview(message), b"about"), theirs.seal(memoryview(message), b"about")
        assert max(Recording.sizes) <= 32
        for changed in (sealed[:-1] + bytes([sealed[-1] ^ 1]), sealed[:12] + b"x" + sealed[13:], sealed[:20]):
            if changed != sealed:
                with pytest.raises(AuthenticationError):
                    theirs.open(changed, b"about")
    ours.verify(message, b"about", pieces)
    assert ours.open(in_pieces, b"about") == message
    with pytest.raises(AuthenticationError):
        ours.verify(message + b"x", b"about", pieces)
    with pytest.raises(AuthenticationError):
        ours.open(in_pieces, b"another")


@pytest.mark.parametrize("shape", [(), (2, 3), (0, 2)])
def test_only_vectors_are_protected_and_sealed(parties: Parties, shape: tuple[int, ...]) -> None:
    parties.open(0)
    client = parties.clients["a"]
    with pytest.raises(InputError, match=r"must be of shape \(n,\)"):
        client.protect(torch.zeros(shape))
    with pytest.raises(InputError, match=r"must be of shape \(n,\)"):
        client.reissue(torch.zeros(shape), 2)
    assert len(client.protect(torch.zeros(6)))


@pytest.mark.parametrize("wrong", [b"xx", None, torch.zeros(200), torch.zeros(2, 100).byte(), torch.zeros(50).byte()])
def test_tensors_that_are_no_message_are_refused_by_both(parties: Parties, wrong: Any) -> None:
    parties.open(0)
    good = parties.clients["b"].protect(torch.ones(2))
    with pytest.raises(DecodeError):
        parties.server.aggregate({"a": wrong, "b": good})
    with pytest.raises(DecodeError):
        parties.clients["a"].reveal(wrong, 2)
