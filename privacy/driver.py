"""The steps of a secure sum in their order, written once for whatever moves messages between its parties.

`Parties` runs the steps; a `Carrier` moves their messages. Where all parties share a process, as in
`SecureAggregation.sum`, nothing has to be moved; a federation moves them over its transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fedlit.privacy.packing import Payload, check_equal, pack, relative_weights, schema_of, unpack

if TYPE_CHECKING:
    from fedlit.privacy.base import AggregationClient, Party, RoundId, SecureAggregation

Phase = Literal["keys", "unmasking"]


class Carrier:
    """Moves messages, by client, between clients and the server; this one has them all in one process.

    Empty messages may be left out. On processes without the server, `gather` returns nothing.
    """

    def working(self) -> AbstractContextManager[None]:
        """Return the context in which parties of this process work; it may keep their errors for later."""
        return nullcontext()

    def gather(self, messages: Mapping[str, bytes], phase: Phase) -> Mapping[str, bytes]:
        """Carry messages of local clients to the server and return those that arrived."""
        return messages

    def scatter(self, messages: Mapping[str, bytes], phase: Phase) -> Mapping[str, bytes]:
        """Carry the server's messages to clients and return those to local ones."""
        return messages

    def confirming(self, client: str, survivors: Sequence[str]) -> None:
        """Take note that a client is about to confirm who survived; an error keeps it from that."""


_IN_PROCESS = Carrier()


class Parties:
    """The parties of a backend that live in this process; where the server lives elsewhere, ``server`` has no work."""

    def __init__(self, backend: SecureAggregation, clients: Iterable[str], with_server: bool = True) -> None:
        self._backend = backend
        self.clients: dict[str, AggregationClient] = {name: backend.client(name) for name in clients}
        self.server = backend.server()
        self.enrolled = False  # set by the caller, once enrolment has succeeded everywhere
        self.closing: tuple[str, ...] = ()  # steps of the open round in which survivors are asked something
        self._with_server = with_server

    def enrol(self, roster: Sequence[str], carrier: Carrier = _IN_PROCESS) -> None:
        """Exchange the keys that last, between everybody who may ever take part."""
        with carrier.working():
            for party in self._working(self.clients):
                party.enrol(roster)
        for step in self._backend.enrolment:
            self.run_step(step, roster, carrier)

    def open_round(self, round_id: RoundId, senders: Sequence[str], carrier: Carrier = _IN_PROCESS) -> None:
        """Exchange the keys of one round between those who are to send a vector."""
        with carrier.working():
            for party in self._working(senders):
                party.open_round(round_id, senders)
        opening, self.closing = self._backend.steps(len(senders))
        for step in opening:
            self.run_step(step, senders, carrier)

    def run_step(self, step: str, names: Sequence[str], carrier: Carrier = _IN_PROCESS) -> None:
        """In a step of enrolment or opening each client sends a message, the server relays, each receives one."""
        local = {name: self.clients[name] for name in names if name in self.clients}
        sent: Mapping[str, bytes] = {}
        relayed: Mapping[str, bytes] = {}
        with carrier.working():
            sent = {name: client.send(step) for name, client in local.items()}
        arrived = carrier.gather(sent, "keys")
        if self._with_server:
            with carrier.working():
                relayed = self.server.relay(step, {name: arrived.get(name, b"") for name in names})
        received = carrier.scatter(relayed, "keys")
        with carrier.working():
            for name, client in local.items():
                client.receive(step, received.get(name, b""))

    def ask_survivors(
        self, senders: Sequence[str], carrier: Carrier = _IN_PROCESS, has_total: bool = True
    ) -> Mapping[str, bytes]:
        """Return what those who sent a vector answer in the last step of closing; the server asks if it has a total."""
        answers: Mapping[str, bytes] = {}
        for step in self.closing:
            questions: Mapping[str, bytes] = {}
            replies: Mapping[str, bytes] = {}
            if has_total:
                with carrier.working():
                    questions = self.server.ask(step, answers)
            asked = carrier.scatter(questions, "unmasking")
            with carrier.working():
                answered = {name: self.clients[name].answer(step, asked[name]) for name in senders if name in asked}
                for name in answered:
                    if self.clients[name].survivors:
                        carrier.confirming(name, self.clients[name].survivors)
                replies = answered
            answers = carrier.gather(replies, "unmasking")
        return answers

    def total(self, senders: Sequence[str]) -> Tensor:
        """Return the total of the vectors that the server has added, where all parties are in this process."""
        total = self.server.total()
        return self.server.conclude(self.ask_survivors(senders)) if self._backend.closing else total

    def _working(self, names: Iterable[str]) -> list[Party]:
        """Local clients of these, and the server if it lives here."""
        return [self.clients[name] for name in names if name in self.clients] + [self.server] * self._with_server


def sum_in_process(
    backend: SecureAggregation,
    round_id: RoundId,
    payloads: Mapping[str, Payload],
    weights: Mapping[str, float] | None,
) -> dict[str, Tensor]:
    """Sum of payloads, or with ``weights`` their mean, with every party in this process."""
    names = list(payloads)
    backend.check_clients(len(names))
    schema = check_equal({name: schema_of(payload) for name, payload in payloads.items()})
    shares = None if weights is None else relative_weights(weights, names, backend.codec)
    parties = Parties(backend, names)
    server = parties.server
    parties.enrol(names)
    parties.open_round(round_id, names)
    for name, payload in payloads.items():
        vector = pack(payload, backend.codec, None if shares is None else shares[name])
        server.add(name, parties.clients[name].protect(vector))
    total = parties.total(names)
    holder = server if backend.key_holder == "server" else parties.clients[names[0]]
    return unpack(holder.reveal(total, len(names)), schema, backend.codec, weighted=weights is not None)
