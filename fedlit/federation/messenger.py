"""Messenger: carries messages between the processes of a federation, and keeps them in step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fedlit.federation import errors
from fedlit.federation.channel import NAME_BYTES
from fedlit.federation.errors import (
    DivergedError,
    FederationError,
    OutOfStepError,
    PeerFailedError,
    RosterError,
    printable,
    public_text,
)
from fedlit.federation.journal import Journal
from fedlit.federation.ledger import SERVER, Ledger
from fedlit.federation.sealing import WRAP_BYTES, Seals
from fedlit.federation.transport import Transport, check_sizes
from fedlit.federation.wire import decode, encode, encode_in_place
from fedlit.privacy import DecodeError, PrivacyError
from fedlit.privacy import errors as privacy_errors
from fedlit.privacy.links import digest

KINDS = ("exchange", "sum", "mean", "download", "keys", "unmasking", "affine", "check", "report")
"""Types of exchange, sent as their index; ``"report"`` adds the number of names."""

_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in (vars(privacy_errors) | vars(errors)).items()
    if isinstance(kind, type)
    and issubclass(kind, FederationError | RosterError | PrivacyError)
    and "__init__" not in vars(kind)  # made from a text alone
}
"""Errors that processes raise for each other, by name."""

_ERROR_LENGTH = 10_000  # characters that are sent

_HEAD = 5  # kind, call, round, failed, weights
_FRAME = _HEAD + NAME_BYTES // 8  # then the channel's name

Message = dict[str, Tensor]
Pair = tuple[str, str]
"""Sender and receiver."""

Party = str | Pair
"""Of a message: its sender, who sends all receivers the same, or the pair."""


class Messenger:
    """Announces each exchange to all processes, and carries its messages; the server lives on rank 0.

    Attributes:
        round_idx: Communication round under way.
        call: Counts announcements, from 0; never repeats.
        device: Where received tensors are put; ``None`` leaves them where they arrive.
        ledger: What crossed so far.
        batch_idx: Batch within the round.
        stage: Returns whether the run trains, validates or tests.
        on_read: Called with a local client's name when its long vector has been checked, and when it has been added.
        journal: Of what this process releases, if it keeps one.
        settled: Whether all processes are in the same round; until then, after a resume from different checkpoints,
            announcements count from 0 at each.
        stepping: Whether a local step is under way, in which exchanges follow one another: see `check`.
    """

    def __init__(self, transport: Transport, rank_of: Mapping[str, int]) -> None:
        self.transport = transport
        self.rank_of = dict(rank_of)
        self.round_idx = 0
        self.call = 0
        self.batch_idx = 0
        self.stage: Callable[[], str] = str
        self.on_read: Callable[[str], object] = str
        self.journal: Journal | None = None
        self.device: torch.device | None = None
        self.ledger = Ledger()
        self.settled = True
        self.stepping = False
        self._early = 0
        self._owed = False
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
        """Return whether this process hosts the client."""
        return self.rank_of[name] == self.transport.rank

    def is_lost(self, name: str) -> bool:
        """Return whether the client's process is lost, as all others know."""
        return self.rank_of[name] in self.transport.lost

    @property
    def lost(self) -> list[str]:
        """Clients whose processes are lost, in roster order."""
        return [name for name in self.rank_of if self.is_lost(name)] if self.transport.lost else []

    @property
    def position(self) -> tuple[int, int]:
        """The next announcement, and the round under way: the same on all processes."""
        return (self.call, self.round_idx) if self.settled else (self._early, 0)

    @property
    def step(self) -> tuple[object, ...]:
        """Where this process is in the run, by its own count: the same whenever a part of it is repeated."""
        return (self.stage(), self.round_idx, self.batch_idx) if self.settled else (self.stage(),)

    def skip(self, early: int) -> None:
        """Go on as if so many announcements had been made here since the start."""
        self.call, self._early = self.call + early - self._early, early

    # ---------------------------------------------------------------- failures

    def fail(self, error: FederationError | RosterError | PrivacyError) -> None:
        """Keep a local failure until the next announcement, which then raises it on every process."""
        self._failure = self._failure or error

    def raise_left(self) -> None:
        """Raise a local failure here alone, which no announcement has raised."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def check_finite(self, channel: str, client: str, tensor: Tensor) -> None:
        """Fail if something that a local client would send is not finite."""
        if not tensor.is_floating_point() or not tensor.numel():
            return
        # NaN anywhere makes both ends NaN; isfinite() would make a tensor as long
        if not all(bool(end.isfinite()) for end in torch.aminmax(tensor)):
            self.fail(
                DivergedError(
                    f"client {client!r} would send NaN or infinity over channel {channel!r} in round "
                    f"{self.round_idx}: its training has diverged, lower the learning rate or clip gradients"
                )
            )

    def _raise_everywhere(self, failure: FederationError | RosterError | PrivacyError | None) -> None:
        ours = None if failure is None else [type(failure).__name__, public_text(failure)[:_ERROR_LENGTH]]
        failures = self.transport.all_gather(ours, "failures")
        if failure is not None:
            raise failure
        for rank, item in enumerate(failures):
            if item is not None:
                kind, text = item if isinstance(item, list) and len(item) == 2 else ("", item)
                raise _ERRORS.get(str(kind), PeerFailedError)(
                    f"{printable(str(text)[:_ERROR_LENGTH])} [raised by rank {rank}]"
                )
        raise PeerFailedError("a process announced that it failed, and then sent no error")

    # ---------------------------------------------------------------- announcements

    def announce(
        self, channel: str, sizes: Mapping[Any, int], kind: int, weights: Mapping[str, float] | None = None
    ) -> dict[Any, int]:
        """Announce the exchange and the sizes of local messages by `Party`; return the sizes of all processes.

        A failure of one process is raised on all of them here. The server's messages go under `SERVER`, or under the
        receiving client where they are separate. Weights are those of a mean; ``kind`` is an index in `KINDS`.
        """
        return self.announce_with(channel, sizes, kind, weights=weights)[0]

    def announce_with(
        self,
        channel: str,
        sizes: Mapping[Any, int],
        kind: int,
        enclosed: Mapping[int, Tensor] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> tuple[dict[Any, int], dict[int, Tensor]]:
        """As `announce`, with bytes that travel along, by receiving rank; returns those to this one, by sender."""
        name = channel.encode()
        if not 0 < len(name) <= NAME_BYTES:
            raise ValueError(f"channel must have 1 to {NAME_BYTES} bytes of UTF-8, got {channel!r}")
        failure, self._failure, self._owed = self._failure, None, False
        call, round_idx = self.position
        self.call, self._early = self.call + 1, self._early + 1  # a call that fails is never repeated: see `RoundId`
        routed = any(isinstance(party, tuple) for party in sizes)
        if self.transport.world_size == 1:
            if failure is not None:
                raise failure
            return {party: size for party, size in (self._by_pair(sizes) if routed else sizes).items() if size}, {}
        parties: list[Party] = [*self.rank_of, SERVER]
        head = [kind, call, round_idx, failure is not None, _fingerprint(weights)]
        channel_name = torch.frombuffer(bytearray(name.ljust(NAME_BYTES)), dtype=torch.int64)
        body = torch.tensor([routed, *(sizes.get(party, 0) for party in parties)], dtype=torch.int64)
        # of equal length everywhere, whatever is sent: frames of unequal size cannot meet
        frame = torch.cat([torch.tensor(head, dtype=torch.int64), channel_name, body])
        arrived: dict[int, Tensor] = {}
        if enclosed is not None:
            frames, arrived = self.transport.meet_with(frame, enclosed, self._doing(channel))
        else:
            frames = self.transport.meet(frame, self._doing(channel))
        if any(bool(other[3]) for other in frames):
            self._raise_everywhere(failure)
        for rank, other in enumerate(frames):
            if rank not in self.transport.lost and not torch.equal(other[:_FRAME], frames[0][:_FRAME]):
                raise OutOfStepError(
                    f"processes are out of step: rank 0 is in {_describe(frames[0])}, rank {rank} in "
                    f"{_describe(other)}. Every process must call the same exchanges in the same order"
                )
        bodies = [other[_FRAME:] for other in frames]
        if any(bool(other[0]) for other in bodies):  # a second frame, as there are as many sizes as pairs
            pairs = self._by_pair(sizes)
            parties = list(pairs)
            second = torch.tensor([0, *pairs.values()], dtype=torch.int64)
            bodies = self.transport.meet(second, self._doing(channel))
        # one rank knows each size: rank 0 those of the server, a client's rank the client's
        reported = torch.stack(bodies)[:, 1:]
        self._check_senders(reported, parties, channel)
        largest = reported.max(dim=0).values.tolist()
        announced = {party: size for party, size in zip(parties, largest, strict=True) if size}
        check_sizes(announced, self._doing(channel))
        return announced, arrived

    def check(self, channel: str) -> None:
        """After the last message of an exchange, raise a local failure on every process.

        Within a local step, a process without failure goes on, and raises another's at the next announcement: that
        saves a meeting in each of a step's exchanges.
        """
        if self.failed or not self.stepping:
            self.announce(channel, {}, KINDS.index("check"))
        else:
            self._owed = True

    def settle(self) -> None:
        """Raise failures of the last exchange, before processes meet for something else."""
        if self._owed:
            self.announce("settling", {}, KINDS.index("check"))

    def _check_senders(self, reported: Tensor, parties: Sequence[Party], channel: str) -> None:
        """Raise a `DecodeError` if a process other than rank 0 reports sizes for clients of another."""
        senders = [party if isinstance(party, str) else party[0] for party in parties]
        hosts = torch.tensor([self.rank_of.get(sender, 0) for sender in senders])
        strangers = (reported != 0) & (hosts != torch.arange(len(reported))[:, None])
        strangers[0] &= torch.tensor([not isinstance(party, str) for party in parties])
        for rank, index in strangers.nonzero().tolist()[:1]:
            raise DecodeError(
                f"rank {rank} announces a message of {senders[index]!r}, whom it does not host, in "
                f"{self._doing(channel)}"
            )

    def _by_pair(self, sizes: Mapping[Any, int]) -> dict[Pair, int]:
        """Return sizes by sender and receiver; a message for all receivers may go to any of them."""
        return {pair: sizes.get(pair, sizes.get(pair[0], 0)) for pair in product(self.rank_of, self.rank_of)}

    def book(self, channel: str, sender: str, receiver: str, num_bytes: int) -> None:
        """Enter a message of this round in the ledger."""
        self.ledger.record(self.round_idx, channel, sender, receiver, num_bytes)

    # ---------------------------------------------------------------- carrying

    def all_gather(self, table: Tensor, channel: str) -> list[Tensor]:
        """``table`` of every process, after an announcement; zeros of one that is lost."""
        return self.transport.meet(table, self._doing(channel))

    def deliver(
        self,
        channel: str,
        outgoing: Mapping[Any, Message],
        sizes: Mapping[Any, int],
        ways: Mapping[Pair, Party],
        seals: Seals | None = None,
    ) -> dict[str, dict[str, Message]]:
        """Carry messages of local clients along ``ways``, by (sender, receiver); return those to local receivers.

        With ``seals``, messages to another process are encrypted for their receivers there.
        """
        rank = self.transport.rank
        # One copy per receiving process, however many clients it hosts: (message, from rank, to rank), in order.
        crossings = dict.fromkeys((party, self.rank_of[way[0]], self.rank_of[way[1]]) for way, party in ways.items())
        messages = {party: _local_message(outgoing, party) for party, here, _ in crossings if here == rank}
        readers: dict[tuple[Party, int], list[str]] = {}
        for (_, receiver), party in ways.items():
            readers.setdefault((party, self.rank_of[receiver]), []).append(receiver)
        about = digest(channel, *reversed(self.position))
        copies: dict[tuple[Party, int], Tensor] = {}
        for party in dict.fromkeys(party for party, here, there in crossings if here == rank != there):
            ranks = [there for each, _, there in crossings if each == party and there != rank]
            encoded = [encode(messages[party])] * len(ranks)
            if seals is not None:
                encoded = seals.close(encoded[0], _sender(party), [readers[party, there] for there in ranks], about)
            copies |= {(party, there): copy for there, copy in zip(ranks, encoded, strict=True)}
        extra = 0 if seals is None else WRAP_BYTES
        between = {
            (party, there): (here, there, sizes[party] + extra * len(readers[party, there]))
            for party, here, there in crossings
            if here != there and there not in self.transport.lost
        }
        arrived = self.transport.swap(
            [*between.values()], [copies[way] for way in between if way in copies], self._doing(channel)
        )
        due = [party for (party, _), (_, there, _) in between.items() if there == rank]
        for party, message in zip(due, arrived, strict=True):
            if message is None:
                continue
            if seals is not None:
                message = seals.open(message, _sender(party), readers[party, rank], about)
            messages[party] = {name: tensor.to(self.device) for name, tensor in decode(message).items()}
        received: dict[str, dict[str, Message]] = {}
        for (sender, receiver), party in ways.items():
            if self.is_local(receiver) and party in messages:
                received.setdefault(receiver, {})[sender] = messages[party]
        return received

    def gather(self, channel: str, messages: Mapping[str, Message], sizes: Mapping[str, int]) -> dict[str, Message]:
        """Carry clients' messages to the server; return them there."""
        arrived: dict[str, Message] = {}
        self.gather_each(channel, {**messages}, sizes, arrived.__setitem__)
        return {} if self.failed else arrived

    def gather_each(
        self,
        channel: str,
        messages: dict[str, Message],
        sizes: Mapping[str, int],
        take: Callable[[str, Message], None],
    ) -> None:
        """Carry clients' messages to the server, which takes each as it arrives, in the order of ``sizes``.

        Those of the server's process are taken out of ``messages``, as long ones fill memory.
        """
        if self.transport.world_size == 1:
            for name in sizes:
                take(name, messages.pop(name))
            return
        names = [*sizes]
        far = [index for index, name in enumerate(names) if self.rank_of[name]]
        ways = [(self.rank_of[names[index]], 0, sizes[names[index]]) for index in far]
        outgoing = [encode_in_place(messages[names[index]]) for index in far if self.is_local(names[index])]
        mine = [index for index, name in enumerate(names) if not self.rank_of[name]] if self.hosts_server else []

        def take_local(until: int) -> None:
            while mine and mine[0] < until:
                name = names[mine.pop(0)]
                take(name, _local_message(messages, name))
                messages.pop(name, None)

        def arrived(index: int, message: Tensor) -> None:
            take_local(far[index])
            try:
                decoded = decode(message)
            except ValueError as error:
                self.fail(DecodeError(f"channel {channel!r}: {error}"))
                return
            take(names[far[index]], decoded)

        self.transport.gather_each(ways, outgoing, self._doing(channel), arrived)
        take_local(len(names))

    def broadcast(self, channel: str, message: Message, size: int, receivers: Sequence[str]) -> Message:
        """Carry one message of the server to the processes of ``receivers``; empty elsewhere."""
        ranks = sorted({self.rank_of[name] for name in receivers} - {0} - self.transport.lost)
        encoded = [encode_in_place(message)] * len(ranks) if self.hosts_server and ranks else []
        arrived = self.transport.swap([(0, rank, size) for rank in ranks], encoded, self._doing(channel))
        if self.hosts_server:
            return message
        return {} if not arrived or arrived[0] is None else decode(arrived[0])

    def scatter(self, channel: str, messages: Mapping[str, Message], sizes: Mapping[str, int]) -> dict[str, Message]:
        """Carry the server's messages, one for each client; return those to local clients."""
        if self.transport.world_size == 1:
            return {name: messages[name] for name in sizes}
        far = [name for name in sizes if self.rank_of[name] and not self.is_lost(name)]
        sent = {name: _local_message(messages, name) for name in sizes} if self.hosts_server else {}
        arrived = self.transport.swap(
            [(0, self.rank_of[name], sizes[name]) for name in far],
            [encode(sent[name]) for name in far if name in sent],
            self._doing(channel),
        )
        if self.hosts_server:
            return {name: sent[name] for name in sent if self.is_local(name)}
        here = [name for name in far if self.is_local(name)]
        return {name: decode(each) for name, each in zip(here, arrived, strict=True) if each is not None}

    def _doing(self, channel: str) -> str:
        return f"exchange {channel!r} of round {self.round_idx}"


def _sender(party: Party) -> str:
    return party if isinstance(party, str) else party[0]


def _local_message(outgoing: Mapping[Any, Message], party: Party) -> Message:
    """A local message; a `DecodeError` if there is none, and another process has announced it."""
    key = party if party in outgoing or isinstance(party, str) else party[0]  # one for all is announced by pairs too
    if key not in outgoing:
        raise DecodeError(f"another process announces a message of {party!r}, who sends nothing here")
    return outgoing[key]


def _fingerprint(weights: Mapping[str, float] | None) -> int:
    """Hash weights to 63 bits, to tell unequal ones apart."""
    if weights is None:
        return 0
    text = repr(sorted((name, float(weight)) for name, weight in weights.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _describe(frame: Tensor) -> str:
    name = frame[_HEAD:_FRAME].numpy().tobytes().decode(errors="replace").rstrip()
    kind = KINDS[max(0, min(int(frame[0]), len(KINDS) - 1))]
    weights = f", weights {int(frame[4]):x}" if int(frame[4]) else ""
    return f"{kind} of channel {name!r} (call {int(frame[1])}, round {int(frame[2])}{weights})"
