"""Messages between the parties of a privacy backend beside vectors and totals: keys, and shares that remove masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fedlit.federation import announced
from fedlit.federation.choices import Resolved
from fedlit.federation.errors import JournalError, PayloadError, with_place
from fedlit.federation.identities import Identities
from fedlit.federation.journal import Sum
from fedlit.federation.ledger import KEYS, SERVER
from fedlit.federation.messenger import KINDS, Messenger
from fedlit.federation.wire import part
from fedlit.privacy import InputError, PrivacyError, RoundId, SecureAggregation, Terms
from fedlit.privacy.driver import Carrier, Parties, Phase


class Conversation(Carrier):
    """Carries the messages of a channel's backend between processes, and books them."""

    def __init__(
        self,
        messenger: Messenger,
        channel: str,
        timed: Callable[[str], Any],
        step: Sum = (),
        check: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self._messenger = messenger
        self._channel = channel
        self._timed = timed
        self._step = step
        self._check = check

    @contextmanager
    def working(self, client: str | None = None) -> Iterator[None]:
        """Time the work of parties; their errors are raised on every process, by the next announcement."""
        with self._timed("protection"):
            try:
                yield
            except InputError as error:
                client_of = "" if client is None else f"client {client!r}, "
                self._messenger.fail(with_place(error, f"{client_of}channel {self._channel!r}"))
            except (PrivacyError, PayloadError, JournalError) as error:
                self._messenger.fail(error)

    def gather(self, messages: Mapping[str, bytes], phase: Phase) -> dict[str, bytes]:
        """Carry messages of clients to the server."""
        return self._carry(messages, phase, up=True)

    def scatter(self, messages: Mapping[str, bytes], phase: Phase) -> dict[str, bytes]:
        """Carry the server's message to each client."""
        return self._carry(messages, phase, up=False)

    def confirming(self, client: str, survivors: Sequence[str]) -> None:
        """Check whose vectors the total of a local client has, and write it to the journal."""
        if self._check is not None:
            self._check(survivors)
        if self._messenger.journal is not None:
            self._messenger.journal.survivors(client, self._step, survivors)

    def _carry(self, texts: Mapping[str, bytes], phase: Phase, up: bool) -> dict[str, bytes]:
        """Announce, book and carry one text from or to each client; empty ones are not sent."""
        messenger, channel = self._messenger, self._channel
        messages = {
            name: {"keys": torch.frombuffer(bytearray(text), dtype=torch.uint8)} for name, text in texts.items() if text
        }
        sizes, arrived = announced.carry(messenger, channel, messages, KINDS.index(phase), up)
        for name, size in sizes.items():
            sender, receiver = (name, SERVER) if up else (SERVER, name)
            messenger.book(channel + KEYS, sender, receiver, size)
        with self.working():
            return {
                name: part(message, "keys", torch.uint8).cpu().numpy().tobytes() for name, message in arrived.items()
            }
        return {}


class Backends:
    """The parties of each backend that live in this process; their keys last as long as they do."""

    def __init__(self, messenger: Messenger, channels: Mapping[str, Resolved], timed: Callable[[str], Any]) -> None:
        self._messenger = messenger
        self._channels = channels
        self._timed = timed
        self.identities: Identities | None = None
        self._parties: dict[int, Parties] = {}  # by identity of the backend: one object may serve several channels

    def conversation(
        self, channel: str, step: Sum = (), check: Callable[[Sequence[str]], None] | None = None
    ) -> Conversation:
        """Return what carries the messages over a channel, of the sum by which the journal knows it.

        ``check`` refuses survivors, before a client confirms them.
        """
        return Conversation(self._messenger, channel, self._timed, step, check)

    def parties(self, backend: SecureAggregation) -> Parties:
        """Return a backend's parties, made at their first use."""
        if id(backend) not in self._parties:
            local = [name for name in self._messenger.rank_of if self._messenger.is_local(name)]
            self._parties[id(backend)] = Parties(backend, local, self._messenger.hosts_server)
        return self._parties[id(backend)]

    def enrolled(self, channel: str) -> Parties:
        """Return the parties of a channel's backend; at their first use all clients that are not lost enrol."""
        backend = self._channels[channel].backend
        parties = self.parties(backend)
        if not parties.enrolled:
            if self.identities is not None:
                for name, party in parties.clients.items():
                    party.introduce(self.identities.keys[name], self.identities.publics)
            roster = [name for name in self._messenger.rank_of if not self._messenger.is_lost(name)]
            parties.enrol(roster, self.conversation(channel))
            if backend.enrolment:  # a client that refused its key fails here, on every process
                self._messenger.announce(channel, {}, KINDS.index("check"))
            parties.enrolled = True
        return parties

    def open_round(self, channel: str, senders: Sequence[str], terms: Terms, weighted: bool) -> None:
        """Open a round between the senders, bound to its terms as this process has received them."""
        call, round_idx = self._messenger.position
        parties = self.parties(self._channels[channel].backend)
        parties.open_round(RoundId(round_idx, channel, call, terms, weighted), senders, self.conversation(channel))

    def forget(self, backend: SecureAggregation | None = None) -> None:
        """Let a backend, or all of them, enrol anew before the next sum."""
        if backend is None:
            self._parties.clear()
        else:
            self._parties.pop(id(backend), None)
