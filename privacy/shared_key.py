"""Sums under additively homomorphic encryption, with one key that the clients share and the server never has.

The first client of the roster makes the key pair and deals it: the public key goes to everybody, the private key to
each other client, encrypted for it alone, through the server. A second key, known to the server too, authenticates what
crosses, so that no byte is loaded that a stranger made or a wire has changed. Each scheme only defines how it makes
keys, encrypts, adds and decrypts.

The server is assumed to follow the protocol. One that deviates chooses what clients decrypt: they refuse what is no
total, with one error whatever its numbers are. Terms of a sum are not bound to its ciphertexts.

Whoever reads a total need not have opened its round, so totals name the round they were made for, and a client that
has read one, or has opened its round, refuses older ones of the same channel.
"""

from __future__ import annotations

import hashlib
import os
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from fedlit.checks import check, check_at_least, check_one_of
from fedlit.privacy.base import AggregationClient, AggregationServer, Party, RoundId, SecureAggregation
from fedlit.privacy.errors import (
    AuthenticationError,
    DecodeError,
    KeyCheckError,
    PrivacyError,
    QuorumError,
    RangeError,
    ReplayError,
)
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import (
    KEY_BYTES,
    TAG_BYTES,
    Buffer,
    KeyPair,
    Link,
    check_members,
    check_stated,
    derive,
    digest,
    field_of,
    pack_fields,
    round_digest,
    unpack_fields,
)
from fedlit.privacy.packing import check_equally_long, check_row

_HEAD = struct.Struct("<QQqqI32s")
"""Numbers in the vector, vectors in the sum; the round, the call, bytes of the channel's name; the digest."""

_NO_ROUND = -1
"""In place of a round, in totals that were encrypted anew after a resume."""


@dataclass(frozen=True)
class _Binding:
    """The round of a message."""

    round_id: RoundId
    """In plaintext, for clients that read a total and have not opened its round."""
    digest: bytes
    """Of the round and its clients, or `_about_sealed`."""


class HomomorphicKey(ABC):
    """A key of one scheme: both halves at a client, and at the server the public one, which is enough to `add`.

    The ciphertexts of a long vector fill memory, so that they are made and taken apart piece by piece.
    """

    @abstractmethod
    def encrypt(self, vector: Tensor) -> Iterator[bytes]:
        """Ciphertexts of a floating-point vector, shape (n,), n > 0, in pieces.

        Raises as `FixedPoint.check`, when the first piece is asked for.
        """

    @abstractmethod
    def decrypt(self, body: Buffer, length: int, num_clients: int) -> Tensor:
        """Sum of ``num_clients`` vectors, shape (``length``,), float64; raises a `DecodeError` on nonsense."""

    @abstractmethod
    def add(self, total: deque[Any], body: Buffer, length: int) -> None:
        """Add the ciphertexts of a vector of ``length`` numbers to those of a total, which begins empty.

        Raises a `DecodeError` if they do not have the size and form of such ciphertexts, before they are loaded; what
        the total is then, is not defined.
        """

    @abstractmethod
    def write(self, total: deque[Any]) -> Iterator[bytes]:
        """Ciphertexts of a total, in pieces; it is used up by it."""


class SharedKeyAggregation(SecureAggregation):
    """Base of backends that encrypt under a key shared by the clients; see the module.

    Attributes:
        max_clients: Maximum number of vectors in one sum that the scheme has headroom for.
    """

    key_holder: ClassVar[Literal["server", "clients"]] = "clients"
    min_clients: int = 2
    enrolment: ClassVar[tuple[str, ...]] = ("identities", "keys")
    codec: FixedPoint
    max_clients: int

    @abstractmethod
    def generate_keys(self) -> tuple[bytes, bytes]:
        """A fresh key pair: private half, public half."""

    @abstractmethod
    def load_key(self, public: bytes, private: bytes | None = None) -> HomomorphicKey:
        """Load a key pair, or its public half alone.

        Raises a `KeyCheckError` if a half is malformed, too short, or of another pair, or the public one contains a
        private key.
        """

    def error_bound(self, num_clients: int) -> float:
        """Half a step of the grid for each client: the sum itself is exact."""
        return self.codec.error_bound(num_clients)

    def colluders_needed(self, num_clients: int) -> int:
        """One, who has the key."""
        return 1

    def check_headroom(self, num_clients: int) -> None:
        """Raise a `RangeError` unless there are at most ``max_clients``."""
        check_at_least("max_clients", self.max_clients, num_clients, "for the clients of this sum", error=RangeError)

    def check_round(self, clients: Sequence[str], roster: Sequence[str]) -> None:
        """Raise a `QuorumError` at too few clients, a `RangeError` at too many, a `KeyCheckError` at strangers."""
        self.check_clients(len(clients))
        self.check_headroom(len(clients))
        check_members(clients, roster, "open a round before they enrol", KeyCheckError)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(codec={self.codec}, max_clients={self.max_clients})"

    @final
    def client(self, name: str) -> AggregationClient:
        """A client; the first of the roster makes the key."""
        return SharedKeyClient(name, self)

    @final
    def server(self) -> AggregationServer:
        """A server that holds the public key only."""
        return SharedKeyServer(self)


class _SharedKeyParty(Party):
    """What clients and the server do alike."""

    _who: str

    def __init__(self, backend: SharedKeyAggregation) -> None:
        self._backend = backend
        self._identity = KeyPair()
        self._roster: tuple[str, ...] = ()
        self._keys: tuple[HomomorphicKey, Link] | None = None
        self._round: _Binding | None = None

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment; an earlier key is forgotten."""
        self._roster = tuple(roster)
        self._keys = self._round = None

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``; raises as `SharedKeyAggregation.check_round`."""
        self._round = None  # a refused round leaves no earlier one open
        self._backend.check_round(clients, self._roster)
        self._round = _Binding(round_id, round_digest(round_id, clients))

    def _check_step(self, step: str, needs_roster: bool = True) -> None:
        check_one_of("step", step, self._backend.enrolment)
        if needs_roster and not self._roster:
            raise KeyCheckError(f"{self._who} has no roster yet: call enrol first")

    def _enrolled(self) -> tuple[HomomorphicKey, Link]:
        if self._keys is None:
            raise KeyCheckError(f"{self._who} has no key yet: run the enrolment steps first")
        return self._keys

    def _opened(self) -> _Binding:
        if self._round is None:
            raise ReplayError(f"{self._who} has no open round: call open_round once for each sum")
        return self._round


@final
class SharedKeyClient(_SharedKeyParty, AggregationClient):
    """Encrypts, and decrypts totals."""

    _among_clients: Link  # from enrolment on: for totals that one of them encrypts for the others

    def __init__(self, name: str, backend: SharedKeyAggregation) -> None:
        super().__init__(backend)
        self.name, self._who = name, f"client {name!r}"
        self._deal = b""
        self._publics: Mapping[str, bytes] | None = None
        self._newest: dict[str, tuple[RoundId, bytes]] = {}  # by channel: the newest total revealed, its fingerprint
        self._calls: dict[str, int] = {}  # by channel: the call of the newest round opened

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment; an earlier key is forgotten."""
        check_members([self.name], roster, "enrol", KeyCheckError)
        super().enrol(roster)
        self._newest, self._calls = {}, {}

    def introduce(self, keys: KeyPair, publics: Mapping[str, bytes]) -> None:
        """See `AggregationClient`."""
        self._identity, self._publics = keys, publics

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``, this one included; raises as `SharedKeyAggregation.check_round`."""
        self._round = None
        self._enrolled()
        check_members([self.name], clients, "open a round", KeyCheckError)
        super().open_round(round_id, clients)
        self._calls[round_id.channel] = max(round_id.call, self._calls.get(round_id.channel, round_id.call))

    def send(self, step: str) -> bytes:
        """First one's public key; then, from the dealer, everybody's encrypted keys."""
        self._check_step(step, needs_roster=False)
        if step == "identities":
            return self._identity.public
        deal, self._deal = self._deal, b""
        return deal

    def receive(self, step: str, message: bytes) -> None:
        """As the dealer, everybody's public keys; as another client, the encrypted key."""
        self._check_step(step, needs_roster=bool(message))
        if message:
            (self._make_keys if step == "identities" else self._receive_keys)(unpack_fields(message))

    def _make_keys(self, publics: Mapping[str, bytes]) -> None:
        if self.name != self._roster[0] or set(publics) != {"server", *(f"client {n}" for n in self._roster[1:])}:
            raise KeyCheckError(
                f"client {self.name!r} was asked to deal keys to {sorted(publics)}, but the roster is "
                f"{list(self._roster)} and its first client deals"
            )
        private, public = self._backend.generate_keys()
        mac = os.urandom(KEY_BYTES)
        about = _about_deal(self._roster, public)  # a swapped roster or public key makes the deal fail to open
        deal = {"public": public}
        check_stated({name: publics[f"client {name}"] for name in self._roster[1:]}, self._publics)
        for party, key in publics.items():
            link = Link(derive(self._identity.agree(key, party), about, party), party)
            secrets = {"mac": mac} if party == "server" else {"mac": mac, "private": private}
            deal[party] = link.seal(pack_fields(secrets), about)
        self._deal = pack_fields(deal)
        self._install(private, public, mac)

    def _receive_keys(self, deal: Mapping[str, bytes]) -> None:
        public = field_of(deal, "public")
        about = _about_deal(self._roster, public)
        dealer = self._roster[0]
        key = field_of(deal, "dealer", KEY_BYTES)
        check_stated({dealer: key}, self._publics)
        party = f"client {self.name}"
        link = Link(derive(self._identity.agree(key, dealer), about, party), party)
        secrets = unpack_fields(link.open(field_of(deal, "sealed"), about))
        self._install(field_of(secrets, "private"), public, field_of(secrets, "mac", KEY_BYTES))

    def _install(self, private: bytes, public: bytes, mac: bytes) -> None:
        self._keys = self._backend.load_key(public, private), Link(mac, "the federation")
        self._among_clients = Link(derive(private, "sealed totals"), "the clients")

    def protect(self, vector: Tensor) -> Tensor:
        """Encrypt; the round is used up, so that nothing can be sent twice in it.

        Raises an `InputError` if it cannot be encrypted (see `FixedPoint`), a `ReplayError` if no round is open.
        """
        (key, link), opened = self._enrolled(), self._opened()
        check_row("vector to protect", vector)
        pieces = key.encrypt(vector) if len(vector) else ()
        message = _frame(link, f"vector of {self.name}", opened, len(vector), 1, pieces)
        self._round = None
        return message

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        """Decrypt a total; raises a `DecodeError` if it is none.

        Raises an `AuthenticationError` if it was not made by this federation's server, or was changed, a `ReplayError`
        if this client has revealed a newer total of the same channel, or opened a newer round.
        """
        key, link = self._enrolled()
        bound_to, length, added, body = _unframe(link, "total", total)
        rule = f"{num_clients}, as announced"
        check(added == num_clients, "vectors in the total", rule, added, error=AuthenticationError)
        round_id = bound_to.round_id
        self._check_newest(round_id)  # before decryption, which is the slow part
        if bound_to.digest == _about_sealed(round_id, length, added):
            numbers = _numbers(self._among_clients.open(body, bound_to.digest), length)
        else:
            self._backend.check_headroom(added)
            numbers = key.decrypt(body, length, added) if length else torch.zeros(0, dtype=torch.float64)
        self._newest[round_id.channel] = round_id, _fingerprint(numbers)
        return numbers

    def _check_newest(self, round_id: RoundId) -> None:
        """Raise a `ReplayError` if something newer was revealed: of this channel, or of any if it is unknown.

        So too if this client has opened a newer round of the channel, whose total an older one would pass for.
        """
        calls = [
            seen.call
            for channel, (seen, _) in self._newest.items()
            if channel == round_id.channel or round_id.round_idx == _NO_ROUND
        ]
        if round_id.round_idx != _NO_ROUND:
            calls.append(self._calls.get(round_id.channel, round_id.call))
        newest = max(calls, default=round_id.call)
        if round_id.call < newest:
            raise ReplayError(
                f"the total of call {round_id.call} on channel {round_id.channel!r} is older than the one of call "
                f"{newest}, which client {self.name!r} has revealed, or takes part in"
            )

    def reissue(self, total: Tensor, num_clients: int) -> Tensor:
        """Encrypt a total under a key that all clients derive from the private one, and the server cannot.

        It names the round it was made for, if this object has revealed it under its key. One from before a resume is as
        old as the last that this object has revealed: clients that have revealed something newer refuse it.
        """
        _, link = self._enrolled()
        check_row("total to seal", total)
        numbers = total.detach().to("cpu", torch.float64).contiguous()
        fingerprint = _fingerprint(numbers)
        revealed = [round_id for round_id, seen in self._newest.values() if seen == fingerprint]
        last = max((round_id.call for round_id, _ in self._newest.values()), default=-1)
        round_id = revealed[0] if revealed else RoundId(_NO_ROUND, "", last)
        about = _about_sealed(round_id, len(numbers), num_clients)
        sealed = self._among_clients.seal(numbers.view(torch.uint8).numpy().data, about)
        return _frame(link, "total", _Binding(round_id, about), len(numbers), num_clients, [sealed])


@final
class SharedKeyServer(_SharedKeyParty, AggregationServer):
    """Adds ciphertexts; holds the public key only."""

    _who = "the server"

    def __init__(self, backend: SharedKeyAggregation) -> None:
        super().__init__(backend)
        self._publics: dict[str, bytes] = {}
        self._clients: tuple[str, ...] = ()
        self._lengths: dict[str, int] = {}  # of the vectors added so far
        self._sum: deque[Any] = deque()  # of these

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment; an earlier key is forgotten."""
        super().enrol(roster)
        self._publics = {}
        self._begin()

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``; raises as `SharedKeyClient.open_round`."""
        self._begin()
        super().open_round(round_id, clients)
        self._clients = tuple(clients)

    def _begin(self, opened: _Binding | None = None) -> None:
        """Have a round in which nothing is added yet, or none."""
        self._round, self._lengths, self._sum = opened, {}, deque()

    def relay(self, step: str, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        """Pass public keys to the dealer, and its encrypted keys to everybody.

        Raises a `QuorumError` if somebody did not enrol, or no keys were dealt, a `KeyCheckError` if this step comes
        before the one it rests on, or a key is malformed.
        """
        self._check_step(step)
        missing = [name for name in self._roster if not sent.get(name)]
        dealer = self._roster[0]
        if step == "identities":
            if missing:
                raise QuorumError(f"clients {missing} did not enrol: the roster is {list(self._roster)}")
            self._publics = dict(sent)
            to_dealer = {f"client {name}": sent[name] for name in self._roster[1:]}
            return {dealer: pack_fields({"server": self._identity.public, **to_dealer})}
        if dealer not in self._publics:
            raise KeyCheckError("the server has no public keys of the clients yet: relay 'identities' first")
        if dealer in missing:
            raise QuorumError(f"client {dealer!r} dealt no keys")
        deal = unpack_fields(sent[dealer])
        public = field_of(deal, "public")
        about = _about_deal(self._roster, public)
        link = Link(derive(self._identity.agree(self._publics[dealer], dealer), about, "server"), "server")
        secrets = unpack_fields(link.open(field_of(deal, "server"), about))
        if set(secrets) != {"mac"}:
            raise KeyCheckError(f"the server was sent {sorted(secrets)}: it must hold no private key")
        self._keys = self._backend.load_key(public), Link(field_of(secrets, "mac", KEY_BYTES), "the federation")
        return {
            name: pack_fields(
                {"public": public, "dealer": self._publics[dealer], "sealed": field_of(deal, f"client {name}")}
            )
            for name in self._roster[1:]
        }

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        """Add ciphertexts; the round is used up."""
        opened = self._opened()
        self._backend.check_clients(len(messages))
        check_members(messages, self._clients, "send vectors")
        self._begin(opened)
        try:
            for name, message in messages.items():
                self.add(name, message)
        except PrivacyError:
            self._begin(opened)
            raise
        return self.total()

    def add(self, name: str, message: Tensor) -> None:
        """Add one vector, of which nothing is kept; raises as `aggregate`.

        Ciphertexts that cannot be added end the round, as some of them are in the total.
        """
        (key, link), opened = self._enrolled(), self._opened()
        if name in self._lengths:
            raise ReplayError(f"client {name!r} has sent its vector of this round already")
        check_members([name], self._clients, "send vectors")
        bound_to, length, added, body = _unframe(link, f"vector of {name}", message)
        if bound_to != opened:
            raise ReplayError(f"the vector of client {name!r} was made for another round or roster")
        if added != 1:
            raise AuthenticationError(f"client {name!r} sent a total of {added} vectors in place of its own")
        lengths, total = {**self._lengths, name: length}, self._sum
        check_equally_long(lengths)
        self._begin()
        if length:
            key.add(total, body, length)
        self._round, self._lengths, self._sum = opened, lengths, total

    def total(self) -> Tensor:
        """Ciphertexts of the total of the vectors that were added; the round is used up. Raises as `aggregate`."""
        (key, link), opened = self._enrolled(), self._opened()
        self._backend.check_clients(len(self._lengths))
        lengths, total = [*self._lengths.values()], self._sum
        self._begin()  # before it is used up: whatever fails, no later vector is taken for the total of all
        return _frame(link, "total", opened, lengths[0], len(lengths), key.write(total))


def _about_deal(roster: Sequence[str], public: bytes) -> bytes:
    """Binding of encrypted keys: a swapped public key or roster makes them fail to open."""
    return digest("fedlit deal", list(roster), public)


def _about_sealed(round_id: RoundId, length: int, added: int) -> bytes:
    """Binding of a total that a client encrypts for the others, in place of the digest of its round."""
    return digest("fedlit sealed total", round_id.round_idx, round_id.channel, round_id.call, length, added)


def _numbers(data: bytes, length: int) -> Tensor:
    """A decrypted total from its bytes."""
    size = length * torch.float64.itemsize
    check(len(data) == size, f"bytes of a total of {length} numbers", str(size), len(data), error=DecodeError)
    return torch.frombuffer(bytearray(data), dtype=torch.float64) if length else torch.zeros(0, dtype=torch.float64)


def _fingerprint(numbers: Tensor) -> bytes:
    """Hash of a decrypted total, to recognise it."""
    return hashlib.sha256(numbers.contiguous().numpy().data).digest()


def _frame(link: Link, what: str, bound_to: _Binding, length: int, added: int, pieces: Iterable[bytes]) -> Tensor:
    """A message: tag, then what it covers: sizes, the round, ciphertexts."""
    round_id = bound_to.round_id
    channel = round_id.channel.encode()
    message = bytearray(TAG_BYTES)
    message += _HEAD.pack(length, added, round_id.round_idx, round_id.call, len(channel), bound_to.digest) + channel
    for piece in pieces:
        message += piece
    covered = memoryview(message)[TAG_BYTES:]
    message[:TAG_BYTES] = link.tag(covered, what.encode())
    return torch.frombuffer(message, dtype=torch.uint8)


def _unframe(link: Link, what: str, message: Tensor) -> tuple[_Binding, int, int, memoryview]:
    """Round, number of entries, number of vectors and ciphertexts of a message, once its tag has been checked."""
    smallest = TAG_BYTES + _HEAD.size
    check(isinstance(message, Tensor), what, "a tensor of bytes", type(message).__name__, error=DecodeError)
    form = f"{message.dtype} of shape {tuple(message.shape)}"
    valid = message.dtype == torch.uint8 and message.dim() == 1 and len(message) >= smallest
    check(valid, what, f"at least {smallest} bytes", form, error=DecodeError, shown=form)
    data = message.cpu().contiguous().numpy().data
    tag, covered = bytes(data[:TAG_BYTES]), data[TAG_BYTES:]
    link.verify(covered, what.encode(), tag)
    length, added, round_idx, call, name_bytes, about = _HEAD.unpack_from(covered)
    body = _HEAD.size + name_bytes
    try:
        channel = bytes(covered[_HEAD.size : body]).decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"a {what} names a channel that is no text") from error
    return _Binding(RoundId(round_idx, channel, call), about), length, added, covered[body:]
