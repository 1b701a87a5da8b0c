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
    from fedlit.privacy.base import AggregationClient, AggregationServer, RoundId, SecureAggregation

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


_IN_PROCESS = Carrier()


class Parties:
    """The parties of a backend that live in this process; where the server lives elsewhere, ``server`` has no work."""

    def __init__(self, backend: SecureAggregation, clients: Iterable[str], with_server: bool = True) -> None:
        self._backend = backend
        self.clients: dict[str, AggregationClient] = {name: backend.client(name) for name in clients}
        self.server = backend.server()
        self.enrolled = False  # set by the caller, once enrolment has succeeded everywhere
        self._working_server = self.server if with_server else None

    def enrol(self, roster: Sequence[str], carrier: Carrier = _IN_PROCESS) -> None:
        """Exchange the keys that last, between everybody who may ever take part."""
        with carrier.working():
            for party in (self._working_server, *self.clients.values()):
                if party is not None:
                    party.enrol(roster)
        run_steps(self._backend.enrolment, self.clients, self._working_server, roster, carrier)

    def open_round(self, round_id: RoundId, senders: Sequence[str], carrier: Carrier = _IN_PROCESS) -> None:
        """Exchange the keys of one round between those who are to send a vector."""
        with carrier.working():
            for party in (*(self.clients.get(name) for name in senders), self._working_server):
                if party is not None:
                    party.open_round(round_id, senders)
        run_steps(self._backend.opening, self.clients, self._working_server, senders, carrier)


def run_steps(
    steps: Iterable[str],
    clients: Mapping[str, AggregationClient],
    server: AggregationServer | None,
    names: Sequence[str] | None = None,
    carrier: Carrier = _IN_PROCESS,
) -> None:
    """Run steps of enrolment or opening between the clients ``names``; ``None`` is all ``clients``, the local ones."""
    for step in steps:
        run_step(step, clients, server, [*clients] if names is None else names, carrier)


def run_step(
    step: str,
    clients: Mapping[str, AggregationClient],
    server: AggregationServer | None,
    names: Sequence[str],
    carrier: Carrier,
) -> None:
    """Every client sends a message, the server relays, every client receives one."""
    local = {name: clients[name] for name in names if name in clients}
    sent: Mapping[str, bytes] = {}
    relayed: Mapping[str, bytes] = {}
    with carrier.working():
        sent = {name: client.send(step) for name, client in local.items()}
    arrived = carrier.gather(sent, "keys")
    if server is not None:
        with carrier.working():
            relayed = server.relay(step, {name: arrived.get(name, b"") for name in names})
    received = carrier.scatter(relayed, "keys")
    with carrier.working():
        for name, client in local.items():
            client.receive(step, received.get(name, b""))


def close_round(steps: Iterable[str], clients: Mapping[str, AggregationClient], server: AggregationServer) -> Tensor:
    """Return the total without masks, where all parties are in this process."""
    return server.conclude(ask_survivors(steps, clients, server, [*clients], _IN_PROCESS))


def ask_survivors(
    steps: Iterable[str],
    clients: Mapping[str, AggregationClient],
    server: AggregationServer | None,
    senders: Sequence[str],
    carrier: Carrier,
) -> Mapping[str, bytes]:
    """Return what those who sent a vector answer in the last step of closing; ``server`` if it has a total here."""
    answers: Mapping[str, bytes] = {}
    for step in steps:
        questions: Mapping[str, bytes] = {}
        replies: Mapping[str, bytes] = {}
        if server is not None:
            with carrier.working():
                questions = server.ask(step, answers)
        asked = carrier.scatter(questions, "unmasking")
        with carrier.working():
            replies = {name: clients[name].answer(step, asked[name]) for name in senders if name in asked}
        answers = carrier.gather(replies, "unmasking")
    return answers


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
    total = server.total()
    if backend.closing:
        total = close_round(backend.closing, parties.clients, server)
    holder = server if backend.key_holder == "server" else parties.clients[names[0]]
    return unpack(holder.reveal(total, len(names)), schema, backend.codec, weighted=weights is not None)
