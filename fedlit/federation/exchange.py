"""Messages from client to client."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from fedlit.federation.choices import Resolved
from fedlit.federation.client import names_of
from fedlit.federation.errors import PayloadError
from fedlit.federation.identities import Identities
from fedlit.federation.ledger import KEYS
from fedlit.federation.messenger import KINDS, Message, Messenger, Pair, Party
from fedlit.federation.release import Releases
from fedlit.federation.sealing import MAC_BYTES, WRAP_BYTES, Seals
from fedlit.federation.wire import wire_size
from fedlit.privacy import DecodeError, KeyCheckError
from fedlit.privacy.packing import Payload

Payloads = Mapping[str, Payload | Mapping[str, Payload]]
"""``{sender: {name: tensor}}``, or ``{sender: {receiver: {name: tensor}}}`` where each is sent a separate message."""

Received = dict[str, dict[str, dict[str, Tensor]]]
"""``{receiver: {sender: {name: tensor}}}`` of local receivers."""


def by_receiver(sender: str, payload: Mapping[str, Any]) -> bool:
    """Return whether each receiver is sent a separate message; a `PayloadError` if only some entries are payloads."""
    kinds = {isinstance(entry, Mapping) for entry in payload.values()}
    if len(kinds) > 1:
        raise PayloadError(
            f"the payload of {sender!r} must have tensors, or a payload for each receiver, got both under "
            f"{[*payload]}: exchange them by two calls"
        )
    return kinds == {True}


class Exchange:
    """Carries messages from client to client, encrypted between them if they are to be."""

    def __init__(self, messenger: Messenger, releases: Releases, encrypted: bool = False) -> None:
        self._messenger = messenger
        self._releases = releases
        local = [name for name in messenger.rank_of if messenger.is_local(name)]
        self._identities: Identities | None = None
        self._seals = Seals(local) if encrypted else None

    def run(
        self,
        channel: Resolved,
        payloads: Payloads,
        around: Mapping[str, Payload] | None,
        participants: Sequence[str],
        to: Mapping[str, Collection[str]],
    ) -> Received:
        """Send messages of local clients; ``to`` has the receivers by sender, the same on every process."""
        participants = [name for name in participants if not self._messenger.is_lost(name)]
        receivers_of = {
            sender: [name for name in participants if name in to.get(sender, ()) and name != sender]
            for sender in self._messenger.rank_of
        }
        outgoing: dict[Party, Message] = {}
        for sender in [name for name in payloads if name in participants]:
            payload = payloads[sender]
            messages: dict[Party, Any] = {sender: payload}
            if by_receiver(sender, payload):
                sent = dict(zip(names_of(payload), payload.values(), strict=True))
                messages = {(sender, name): sent[name] for name in receivers_of[sender] if name in sent}
            for party, message in messages.items():
                outgoing[party] = self._releases.of(channel, party, message, around)
        return self.carry(channel, outgoing, receivers_of, "exchange")

    def carry(
        self, channel: Resolved, outgoing: Mapping[Party, Message], receivers_of: Mapping[str, Sequence[str]], kind: str
    ) -> Received:
        """Carry and book messages of local clients, by sender or (sender, receiver); ``receivers_of`` has receivers."""
        self._meet(channel)
        return self._send(channel, outgoing, receivers_of, kind, self._seals)

    def _send(
        self,
        channel: Resolved,
        outgoing: Mapping[Any, Message],
        receivers_of: Mapping[str, Sequence[str]] | None,  # ``None`` is all others
        kind: str,
        seals: Seals | None,
    ) -> Received:
        messenger, (mac, wrap) = self._messenger, (0, 0) if seals is None else (MAC_BYTES, WRAP_BYTES)
        announced = {party: wire_size(message) + mac for party, message in outgoing.items()}
        sizes = messenger.announce(channel.name, announced, KINDS.index(kind))
        if receivers_of is None:  # after the announcement, which shows who is lost
            here = [name for name in messenger.rank_of if not messenger.is_lost(name)]
            receivers_of = {name: [other for other in here if other != name] for name in messenger.rank_of}
        ways: dict[Pair, Party] = {}
        for party in sizes:
            sender = party if isinstance(party, str) else party[0]
            ways |= {(sender, to): party for to in receivers_of.get(sender, ()) if party in (sender, (sender, to))}
        if kind == "exchange":
            self._releases.account(channel, dict.fromkeys(ways.values(), 1.0))
        booked = channel.name + (KEYS if kind == "keys" else "")
        for (sender, receiver), party in ways.items():
            messenger.book(booked, sender, receiver, sizes[party] + wrap)
        return messenger.deliver(channel.name, outgoing, sizes, ways, seals)

    def identify(self, identities: Identities) -> None:
        """Encrypt under the keys that clients have stated."""
        self._identities = identities
        self.forget()

    def forget(self) -> None:
        """Make new keys before the next encrypted message, as a process without keys has come back."""
        if self._seals is not None:
            local = [name for name in self._messenger.rank_of if self._messenger.is_local(name)]
            stated = () if self._identities is None else (self._identities.keys, self._identities.publics)
            self._seals = Seals(local, *stated)

    def _meet(self, channel: Resolved) -> None:
        """Exchange public keys before the first encrypted message."""
        seals, messenger = self._seals, self._messenger
        if seals is None or seals.introduced:
            return
        received = self._send(channel, seals.public_keys(), None, "keys", None)
        try:
            seals.introduce(received)
        except (KeyCheckError, DecodeError) as error:
            messenger.fail(error)
        messenger.announce(channel.name, {}, KINDS.index("check"))
