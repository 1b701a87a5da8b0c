"""Messages from client to client: what leaves a sender, which receiver gets it, and what is booked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from fedlit.federation.choices import Resolved
from fedlit.federation.client import names_of
from fedlit.federation.errors import PayloadError
from fedlit.federation.messenger import KINDS, Message, Messenger, Pair, Party
from fedlit.federation.release import Releases
from fedlit.federation.wire import wire_size
from fedlit.privacy.packing import Payload

Payloads = Mapping[str, Payload | Mapping[str, Payload]]
"""``{sender: {name: tensor}}``, or ``{sender: {receiver: {name: tensor}}}`` where each is told something else."""

Received = dict[str, dict[str, dict[str, Tensor]]]
"""``{receiver: {sender: {name: tensor}}}`` of local receivers."""


def by_receiver(sender: str, payload: Mapping[str, Any]) -> bool:
    """Whether each receiver is told something else; a `PayloadError` if only some entries are payloads."""
    kinds = {isinstance(entry, Mapping) for entry in payload.values()}
    if len(kinds) > 1:
        raise PayloadError(
            f"the payload of {sender!r} must have tensors, or a payload for each receiver, got both under "
            f"{[*payload]}: exchange them by two calls"
        )
    return kinds == {True}


class Exchange:
    """Carries messages from client to client."""

    def __init__(self, messenger: Messenger, releases: Releases) -> None:
        self._messenger = messenger
        self._releases = releases

    def run(
        self,
        channel: Resolved,
        payloads: Payloads,
        around: Mapping[str, Payload] | None,
        heard: Sequence[str],
        to: Mapping[str, Collection[str]],
    ) -> Received:
        """Send what local clients say; ``to`` has, by sender, those whom it is for, the same on every process."""
        wanted = {
            sender: [name for name in heard if name in to.get(sender, ()) and name != sender]
            for sender in self._messenger.rank_of
        }
        outgoing: dict[Party, Message] = {}
        for sender in [name for name in payloads if name in heard]:
            payload = payloads[sender]
            messages: dict[Party, Any] = {sender: payload}
            if by_receiver(sender, payload):
                told = dict(zip(names_of(payload), payload.values(), strict=True))
                messages = {(sender, name): told[name] for name in wanted[sender] if name in told}
            for party, message in messages.items():
                outgoing[party] = self._releases.of(channel, sender, message, around)
        return self.carry(channel, outgoing, wanted, "exchange")

    def carry(
        self, channel: Resolved, outgoing: Mapping[Party, Message], wanted: Mapping[str, Sequence[str]], kind: str
    ) -> Received:
        """Carry and book finished messages of local clients, by who says them or by (sender, receiver).

        ``wanted`` has, by sender, those who receive; what goes by an ``"exchange"`` is accounted for.
        """
        messenger = self._messenger
        announced = {party: wire_size(message) for party, message in outgoing.items()}
        sizes = messenger.announce(channel.name, announced, KINDS.index(kind))
        ways: dict[Pair, Party] = {}
        for party in sizes:
            sender = party if isinstance(party, str) else party[0]
            ways |= {(sender, to): party for to in wanted[sender] if party in (sender, (sender, to))}
        for party in dict.fromkeys(ways.values()) if kind == "exchange" else ():
            self._releases.account(channel, {party if isinstance(party, str) else party[0]: 1.0})
        for (sender, receiver), party in ways.items():
            messenger.book(channel.name, sender, receiver, sizes[party])
        return messenger.deliver(channel.name, outgoing, sizes, ways)
