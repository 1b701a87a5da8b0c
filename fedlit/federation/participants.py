"""The clients of a run on their processes: who is there, and what processes agree on beside the exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fedlit.federation.channel import Summed
from fedlit.federation.choices import Channels
from fedlit.federation.client import Client, Facts, introductions, names_of, reports_by_client
from fedlit.federation.errors import FederationError, OutOfStepError, RosterError
from fedlit.federation.journal import Journal
from fedlit.federation.messenger import KINDS, Messenger
from fedlit.federation.roster import Roster
from fedlit.federation.transport import Transport
from fedlit.privacy import PrivacyError


def _of_messenger(name: str, doc: str) -> Any:
    """A property of the messenger that is also one of the federation."""

    def read(participants: Participants) -> Any:
        return getattr(participants._messenger, name)

    def write(participants: Participants, value: Any) -> None:
        setattr(participants._messenger, name, value)

    return property(read, write, doc=doc)


class Participants:
    """Clients, and the processes that host them; the base of `Federation`.

    Attributes:
        seconds: Time spent so far by phase: ``"exchange"`` and ``"protection"``; others may add theirs.
        hosts_server: Whether the server lives in this process.
    """

    def __init__(self, transport: Transport, roster: Roster, channels: Channels) -> None:
        self.transport = transport
        self.roster = roster
        self.channels = channels
        self.seconds: dict[str, float] = {}
        self._messenger = Messenger(transport, roster.rank_of)
        self._messenger.settled = not transport.losable
        self.hosts_server = self._messenger.hosts_server

    round_idx: int = _of_messenger("round_idx", "Communication round under way, from 0; no epoch restarts it.")
    batch_idx: int = _of_messenger("batch_idx", "Batch within the round.")
    stage: Callable[[], str] = _of_messenger("stage", "Whether the run trains, validates or tests; see `Messenger`.")
    on_read: Callable[[str], object] = _of_messenger(
        "on_read", "Called when a long vector has been read; see `Messenger`."
    )
    journal: Journal | None = _of_messenger("journal", "Of what this process releases; ``None`` keeps none.")
    device: torch.device | None = _of_messenger("device", "Where received tensors are put; see `Messenger`.")
    settled: bool = _of_messenger("settled", "Whether all processes have come to the same round; see `Messenger`.")

    @property
    def hides(self) -> bool:
        """Whether any message is hidden from the server."""
        return self.channels.encrypted or any(each.hides for each in self.channels.values())

    def shows(self, client: Client | str) -> bool:
        """Whether files and loggers of this process may have a client's numbers.

        Across organisations, where a backend hides, those of its own clients alone.
        """
        return not (self.transport.losable and self.hides) or self.is_local(client)

    # ---------------------------------------------------------------- roster

    @property
    def clients(self) -> tuple[Client, ...]:
        """Everyone, in roster order."""
        return self.roster.clients

    @property
    def seed(self) -> int:
        """Of participation and random streams."""
        return self.roster.seed

    @property
    def sources(self) -> tuple[Client, ...]:
        """Labelled clients, in roster order."""
        return tuple(client for client in self.clients if not client.is_target)

    @property
    def target(self) -> Client:
        """The client adapted to."""
        return next(client for client in self.clients if client.is_target)

    @property
    def local_clients(self) -> tuple[Client, ...]:
        """Clients hosted by this process, in roster order."""
        return tuple(client for client in self.clients if self.is_local(client))

    def is_local(self, client: Client | str) -> bool:
        """Return whether this process hosts ``client``."""
        return self.roster.is_local(client)

    @property
    def weights(self) -> dict[str, int]:
        """Number of training samples per client; a `RosterError` if one has not reported it, see `introduce`."""
        return self.roster.weights

    def present(self, channel: str | None = None) -> tuple[Client, ...]:
        """Clients present in this round; with ``channel``, those who participate on it."""
        _ = channel is None or self.channels[channel]  # a name that no channel has is an error
        return self.roster.present(self.round_idx, channel)

    def _lacks(self, lost: Collection[int], adapts: bool) -> str:
        """Say why a round without the clients of these ranks makes no sense; empty if it does."""
        here = [name for name, rank in self.roster.rank_of.items() if rank not in lost]
        target = self.target.name
        if adapts and target not in here:
            return f"the model is adapted to the target {target!r}"
        if not any(name != target for name in here):
            return "no source is left"
        for name, channel in self.channels.items():
            if isinstance(channel.declared, Summed) and channel.declared.too_few == "skip":
                left, needed = [each for each in channel.senders if each in here], channel.backend.min_clients
                if len(left) < needed <= len(channel.senders):
                    backend = type(channel.backend).__name__
                    return f"a mean over channel {name!r} needs {needed} clients under {backend}, and {left} are left"
        return ""

    def introduce(self, facts: Mapping[str, Facts]) -> None:
        """Before training, send sizes and shapes of local clients' data to every process.

        A `RosterError` on every process, if a client's samples are shaped unlike the others'.
        """
        shares = self.transport.all_gather({name: tuple(fact) for name, fact in facts.items()}, "introductions")
        self.roster.introduce(introductions(shares, self.roster.rank_of))

    def all_gather(self, label: str, report: Callable[[str], Any]) -> dict[str, Any]:
        """Return the reports of all clients about ``label``, plain data by client, before anything is sent on channels.

        ``report`` takes the name of a local client. An error that it raises here ends the other processes too, by a
        `PeerFailedError` without its message, which may be about data. A `DecodeError` if a process reports for others
        than the clients that it hosts.
        """
        failure: Exception | None = None
        mine: dict[str, Any] | None = None
        try:
            mine = {client.name: report(client.name) for client in self.local_clients}
        except Exception as error:
            failure = error
        self.settle()
        reported = self.transport.all_gather(mine, label)
        if failure is not None:  # raised after the meeting, in which the other processes wait for this one
            raise failure
        return reports_by_client(reported, self.roster.rank_of, label)

    def agree(self, label: str, value: object) -> None:
        """Raise an `OutOfStepError` on every process unless all of them hold an equal ``value``."""
        self.settle()
        values = self.transport.all_gather(value, f"agreement on {label}")
        for rank, other in enumerate(values):
            if other != values[0] and rank not in self.transport.lost:
                difference = f"rank 0 has {str(values[0])[:1000]}, rank {rank} {str(other)[:1000]}"
                raise OutOfStepError(f"{label} differs between processes: {difference}")

    # ---------------------------------------------------------------- in step

    def see_who_is_there(self) -> None:
        """Find out which processes are lost and what has failed since the last exchange."""
        if self.transport.losable:
            self._messenger.announce("presence", {}, KINDS.index("check"))
        self.settle()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A local step: what fails at the end of one of its exchanges may fail elsewhere at the next one."""
        self._messenger.stepping = True
        try:
            yield
        finally:
            self._messenger.stepping = False

    def settle(self) -> None:
        """Raise failures of other processes in the last exchange, before all do together what is no exchange."""
        self._messenger.settle()

    def fail(self, error: FederationError | RosterError | PrivacyError) -> None:
        """Keep a local failure until the next exchange, which then raises it on every process."""
        self._messenger.fail(error)

    @property
    def failed(self) -> bool:
        """Whether a local failure waits for the next exchange."""
        return self._messenger.failed

    def raise_left(self) -> None:
        """Raise a local failure here alone, where no exchange follows that would raise it everywhere."""
        self._messenger.raise_left()

    def check(self, about: str, error: FederationError | RosterError | PrivacyError | None) -> None:
        """Raise a local ``error`` on every process; all call it, and name by ``about`` (32 bytes) what is checked."""
        if error is not None:
            self.fail(error)
        self._messenger.announce(about, {}, KINDS.index("check"))

    def _participants(self, channel: str, absent_too: bool) -> list[str]:
        participants = names_of(self.clients if absent_too else self.present(channel))
        lost = self._messenger.lost
        return [name for name in participants if name not in lost] if lost else participants

    @contextmanager
    def _timed(self, phase: str, less: str = "") -> Iterator[None]:
        """Book the time of a phase, less what another one has booked meanwhile."""
        start, before = time.perf_counter(), self.seconds.get(less, 0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - start - (self.seconds.get(less, 0.0) - before)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
