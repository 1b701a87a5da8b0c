"""Messenger: carries messages between the processes of a federation, and keeps them in step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fedlit.federation import errors
from fedlit.federation.channel import NAME_BYTES
from fedlit.federation.errors import DivergedError, FederationError, OutOfStepError, PeerFailedError, RosterError
from fedlit.federation.ledger import SERVER, Ledger
from fedlit.federation.transport import Transport
from fedlit.federation.wire import decode, encode
from fedlit.privacy import DecodeError, PrivacyError
from fedlit.privacy import errors as privacy_errors

KINDS = ("exchange", "sum", "mean", "download", "keys", "unmasking", "affine", "check", "report")
"""What processes can be in together; the last one also tells how many numbers it reports."""

_HEAD_WORDS = 5  # kind, call, round, failed, weights
_FRAME_WORDS = _HEAD_WORDS + NAME_BYTES // 8  # then the channel's name

Message = dict[str, Tensor]
Pair = tuple[str, str]
"""Sender and receiver."""

Party = str | Pair
"""Whose message it is: of one who tells all receivers the same, or of a pair."""


class Messenger:
    """Announces each exchange to all processes, and carries its messages.

    Args:
        transport: Joins the processes.
        rank_of: Process that hosts each client, in roster order. The server lives on rank 0.

    Attributes:
        round_idx: Communication round under way.
        call: Counts announcements, from 0; never repeats.
        device: Where received tensors are put; ``None`` leaves them where they arrive.
        ledger: What crossed so far.
    """

    def __init__(self, transport: Transport, rank_of: Mapping[str, int]) -> None:
        self.transport = transport
        self.rank_of = dict(rank_of)
        self.round_idx = 0
        self.call = 0
        self.device: torch.device | None = None
        self.ledger = Ledger()
        self._failure: FederationError | RosterError | PrivacyError | None = None

    @property
    def hosts_server(self) -> bool:
        """Whether the server lives in this process."""
        return self.transport.rank == 0

    @property
    def failed(self) -> bool:
        """Whether a local failure waits for the next announcement."""
        return self._failure is not None

    def is_local(self, name: str) -> bool:
        """Whether this process hosts the client."""
        return self.rank_of[name] == self.transport.rank

    # ---------------------------------------------------------------- failures

    def fail(self, error: FederationError | RosterError | PrivacyError) -> None:
        """Keep a local failure until the next announcement, which then raises it on every process."""
        self._failure = self._failure or error

    def check_finite(self, channel: str, client: str, tensor: Tensor) -> None:
        """Fail if something that a local client would send is not finite."""
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            self.fail(
                DivergedError(
                    f"client {client!r} would send NaN or infinity over channel {channel!r} in round "
                    f"{self.round_idx}: its training has diverged, lower the learning rate or clip gradients"
                )
            )

    def _raise_everywhere(self, failure: FederationError | RosterError | PrivacyError | None) -> None:
        told = self.transport.all_gather_object(None if failure is None else (type(failure).__name__, str(failure)))
        if failure is not None:
            raise failure
        rank, (kind, text) = next((rank, item) for rank, item in enumerate(told) if item is not None)
        known: type[Exception] = getattr(errors, kind, getattr(privacy_errors, kind, PeerFailedError))
        raise known(f"{text} [raised by rank {rank}]")

    # ---------------------------------------------------------------- announcements

    def announce(
        self, channel: str, sizes: Mapping[Any, int], kind: int, weights: Mapping[str, float] | None = None
    ) -> dict[Any, int]:
        """Tell all processes which exchange this is and how long each message will be; returns the sizes of all.

        Also the place where a failure of one process becomes an error on all of them. Sizes are those of this process,
        by `Party`: `SERVER` for one message to several receivers, or the receiving client where the server tells each
        something else. Weights, of a mean, are the same on every process; ``kind`` is an index in `KINDS`.
        """
        name = channel.encode()
        if not 0 < len(name) <= NAME_BYTES:
            raise ValueError(f"channel must have 1 to {NAME_BYTES} bytes of UTF-8, got {channel!r}")
        failure, self._failure = self._failure, None
        call, self.call = self.call, self.call + 1  # a call that fails is never repeated: see `RoundId`
        routed = any(isinstance(party, tuple) for party in sizes)
        if self.transport.world_size == 1:
            if failure is not None:
                raise failure
            own = self._by_pair(sizes) if routed else sizes
            return {party: size for party, size in own.items() if size}
        parties: list[Party] = [*self.rank_of, SERVER]
        head = [kind, call, self.round_idx, failure is not None, _fingerprint(weights)]
        words = torch.frombuffer(bytearray(name.ljust(NAME_BYTES)), dtype=torch.int64)
        body = torch.tensor([routed, *(sizes.get(party, 0) for party in parties)], dtype=torch.int64)
        frame = torch.cat([torch.tensor(head, dtype=torch.int64), words, body])
        frames = self.transport.all_gather(frame, self._doing(channel))
        if any(bool(other[3]) for other in frames):
            self._raise_everywhere(failure)
        for rank, other in enumerate(frames):
            if not torch.equal(other[:_FRAME_WORDS], frames[0][:_FRAME_WORDS]):
                raise OutOfStepError(
                    f"processes are out of step: rank 0 is in {_describe(frames[0])}, rank {rank} in "
                    f"{_describe(other)}. Every process must call the same exchanges in the same order"
                )
        bodies = [other[_FRAME_WORDS:] for other in frames]
        if any(bool(other[0]) for other in bodies):  # a second frame, as there are as many sizes as pairs
            pairs = self._by_pair(sizes)
            parties = list(pairs)
            second = torch.tensor([0, *pairs.values()], dtype=torch.int64)
            bodies = self.transport.all_gather(second, self._doing(channel))
        # One rank knows each size: the server's and its receivers' are rank 0's word, a client's its own rank's.
        largest = torch.stack(bodies).max(dim=0).values.tolist()[1:]
        return {party: size for party, size in zip(parties, largest, strict=True) if size}

    def _by_pair(self, sizes: Mapping[Any, int]) -> dict[Pair, int]:
        """Sizes by sender and receiver; one who tells all the same thing may tell it to any of them."""
        return {pair: sizes.get(pair, sizes.get(pair[0], 0)) for pair in product(self.rank_of, self.rank_of)}

    def book(self, channel: str, sender: str, receiver: str, num_bytes: int) -> None:
        """Enter a message of this round in the ledger."""
        self.ledger.record(self.round_idx, channel, sender, receiver, num_bytes)

    # ---------------------------------------------------------------- carrying

    def gather(self, table: Tensor, channel: str) -> list[Tensor]:
        """``table`` of every process, after an announcement."""
        return self.transport.all_gather(table, self._doing(channel))

    def deliver(
        self, channel: str, outgoing: Mapping[Party, Message], sizes: Mapping[Any, int], ways: Mapping[Pair, Party]
    ) -> dict[str, dict[str, Message]]:
        """Carry messages of local clients the ``ways`` they go, by sender and receiver; what local receivers get."""
        rank = self.transport.rank
        # One copy per receiving process, however many clients it hosts: (message, from rank, to rank), in order.
        crossings = dict.fromkeys((party, self.rank_of[way[0]], self.rank_of[way[1]]) for way, party in ways.items())
        messages = {party: _of(outgoing, party) for party, here, _ in crossings if here == rank}
        leaving = [(party, there) for party, here, there in crossings if here == rank != there]
        encoded = {party: encode(messages[party]) for party in dict(leaving)}
        due = [(party, here) for party, here, there in crossings if there == rank != here]
        arrived = self.transport.swap(
            [(there, encoded[party]) for party, there in leaving],
            [(here, sizes[party]) for party, here in due],
            self._doing(channel),
        )
        for (party, _), message in zip(due, arrived, strict=True):
            messages[party] = {name: tensor.to(self.device) for name, tensor in decode(message).items()}
        received: dict[str, dict[str, Message]] = {}
        for (sender, receiver), party in ways.items():
            if self.is_local(receiver):
                received.setdefault(receiver, {})[sender] = messages[party]
        return received

    def to_server(self, channel: str, messages: Mapping[str, Message], sizes: Mapping[str, int]) -> dict[str, Message]:
        """Carry clients' messages to the server: all of them there, none elsewhere."""
        if self.transport.world_size == 1:
            return {name: messages[name] for name in sizes}
        if not self.hosts_server:
            self.transport.swap(
                [(0, encode(messages[name])) for name in sizes if name in messages], [], self._doing(channel)
            )
            return {}
        senders = [name for name in sizes if name not in messages]
        inbox = [(self.rank_of[name], sizes[name]) for name in senders]
        arrived = self.transport.swap([], inbox, self._doing(channel))
        try:
            decoded = {name: decode(message) for name, message in zip(senders, arrived, strict=True)}
        except ValueError as error:
            self.fail(DecodeError(f"channel {channel!r}: {error}"))
            return {}
        return {name: messages[name] if name in messages else decoded[name] for name in sizes}

    def broadcast(self, channel: str, message: Message, size: int, receivers: Sequence[str]) -> Message:
        """Carry one message of the server to the processes of ``receivers``; empty elsewhere."""
        ranks = sorted({self.rank_of[name] for name in receivers} - {0})
        if self.hosts_server:
            if ranks:
                encoded = encode(message)
                self.transport.swap([(rank, encoded) for rank in ranks], [], self._doing(channel))
            return message
        if self.transport.rank in ranks:
            return decode(self.transport.swap([], [(0, size)], self._doing(channel))[0])
        return {}

    def from_server(
        self, channel: str, messages: Mapping[str, Message], sizes: Mapping[str, int]
    ) -> dict[str, Message]:
        """Carry the server's messages, a different one for each client; those of local clients."""
        if self.transport.world_size == 1:
            return {name: messages[name] for name in sizes}
        if self.hosts_server:
            outbox = [(self.rank_of[name], encode(messages[name])) for name in sizes if not self.is_local(name)]
            self.transport.swap(outbox, [], self._doing(channel))
            return {name: messages[name] for name in sizes if self.is_local(name)}
        here = [name for name in sizes if self.is_local(name)]
        arrived = self.transport.swap([], [(0, sizes[name]) for name in here], self._doing(channel))
        return {name: decode(message) for name, message in zip(here, arrived, strict=True)}

    def _doing(self, channel: str) -> str:
        return f"exchange {channel!r} of round {self.round_idx}"


def _of(outgoing: Mapping[Party, Message], party: Party) -> Message:
    """A local message; one for all receivers is announced by pairs where another's messages are."""
    return outgoing[party] if party in outgoing else outgoing[party[0]]


def _fingerprint(weights: Mapping[str, float] | None) -> int:
    """63 bits that tell unequal weights apart."""
    if weights is None:
        return 0
    text = repr(sorted((name, float(weight)) for name, weight in weights.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _describe(frame: Tensor) -> str:
    name = frame[_HEAD_WORDS:_FRAME_WORDS].numpy().tobytes().decode(errors="replace").rstrip()
    kind = KINDS[min(int(frame[0]), len(KINDS) - 1)]
    weights = f", weights {int(frame[4]):x}" if int(frame[4]) else ""
    return f"{kind} of channel {name!r} (call {int(frame[1])}, round {int(frame[2])}{weights})"
