"""Parties of masked rounds that a test moves step by step, and servers and clients among them that do not follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from fedlit.privacy import PrivacyError, QuorumError, RoundId
from fedlit.privacy.links import KEY_BYTES, TAG_BYTES, pack_fields, unpack_fields
from fedlit.privacy.masking import MaskingClient, MaskingServer, PairwiseMasking
from fedlit.privacy.masking.round import MaskedRound, authenticate, binding, party

STAGES = ["keys", "shares", "vector", "confirm", "unmask"]
"""At which a client may vanish."""

Wire = Callable[[str, str, bytes], bytes]
"""Step, client and message, and what arrives of it."""


class Recorder:
    """A wire that keeps what it carries."""

    def __init__(self) -> None:
        self.carried: list[tuple[str, str, bytes]] = []

    def __call__(self, what: str, client: str, message: bytes) -> bytes:
        self.carried.append((what, client, message))
        return message


@dataclass
class Parties:
    """All parties of a backend, and the wire between them, which may change what it carries."""

    backend: PairwiseMasking
    names: Sequence[str]
    wire: Wire = lambda what, client, message: message
    rounds: int = 0
    clients: dict[str, MaskingClient] = field(init=False)
    server: MaskingServer = field(init=False)
    attested: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Tags in each client's last vector, by whom they are for."""

    def __post_init__(self) -> None:
        self.clients = {name: self.backend.client(name) for name in self.names}
        self.server = self.backend.server()
        self.enrol()

    @property
    def opening_steps(self) -> tuple[str, ...]:
        return self.backend.steps(len(self.names))[0]

    def enrol(self) -> None:
        for each in (*self.clients.values(), self.server):
            each.enrol(list(self.names))
        self.step("identities")

    def step(self, step: str, gone: Sequence[str] = ()) -> None:
        there = {name: client for name, client in self.clients.items() if name not in gone}
        sent = {name: self.wire(f"send {step}", name, client.send(step)) for name, client in there.items()}
        relayed = self.server.relay(step, sent)
        for name, client in there.items():
            client.receive(step, self.wire(f"receive {step}", name, relayed.get(name, b"")))

    def open(self) -> None:
        for each in (*self.clients.values(), self.server):
            each.open_round(RoundId(self.rounds, "update", self.rounds), list(self.names))
        self.rounds += 1

    def sum(self, vectors: Mapping[str, Tensor], vanish: Mapping[str, str] | None = None) -> list[int]:
        """Integers of the sum over a whole round; ``vanish`` names the stage before which clients do."""
        vanish = vanish or {}

        def gone(stage: str) -> list[str]:
            return [name for name, last in vanish.items() if STAGES.index(last) <= STAGES.index(stage)]

        self.open()
        for step in self.opening_steps:
            self.step(step, gone(step))
        there = [name for name in self.names if name not in gone("vector")]
        messages = {name: self.carry(name, self.clients[name].protect(vectors[name])) for name in there}
        self.server.aggregate(messages)
        total: list[int] = self.server.conclude(self.close(gone)).tolist()
        return total

    def protect(self, vectors: Mapping[str, Tensor] | None = None, length: int = 2) -> dict[str, Tensor]:
        """Masked vectors; of zeros, from all clients, by default."""
        vectors = dict.fromkeys(self.names, torch.zeros(length)) if vectors is None else vectors
        return {name: self.mask(name, vector) for name, vector in vectors.items()}

    def mask(self, name: str, vector: Tensor) -> Tensor:
        """Masked vector of one client, the tags in which are noted."""
        witnesses = agreed_by(self.clients[name]).witnesses(name, shared_by(self.clients[name]))
        message = self.clients[name].protect(vector)
        tags = message[len(message) - TAG_BYTES * len(witnesses) :].numpy().tobytes()
        starts = range(0, len(tags), TAG_BYTES)
        self.attested[name] = dict(zip(witnesses, (tags[at : at + TAG_BYTES] for at in starts), strict=True))
        return message

    def confirmations(self) -> dict[str, bytes]:
        """Answers to an honest server's question who survived."""
        asked = self.server.ask("confirm", {})
        return {name: self.clients[name].answer("confirm", text) for name, text in asked.items()}

    def close(self, gone: Callable[[str], Sequence[str]] = lambda step: ()) -> dict[str, bytes]:
        """Answers to the last step of closing."""
        answers: dict[str, bytes] = {}
        for step in self.backend.steps(len(self.names))[1]:
            asked = self.server.ask(step, answers)
            received = {name: self.wire(f"ask {step}", name, text) for name, text in asked.items()}
            answers = {
                name: self.wire(f"answer {step}", name, self.clients[name].answer(step, text))
                for name, text in received.items()
                if name not in gone(step)
            }
        return answers

    def carry(self, name: str, message: Tensor) -> Tensor:
        carried = self.wire("vector", name, message.numpy().tobytes())
        return torch.frombuffer(bytearray(carried), dtype=torch.uint8) if carried else torch.zeros(0, dtype=torch.uint8)

    def agree(self) -> MaskedRound:
        """Open a round and run its steps."""
        self.open()
        for step in self.opening_steps:
            self.step(step)
        assert self.server._round is not None
        return self.server._round.agreed

    def round_keys(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Open a round; what its clients send in the step ``keys``, and the keys in it."""
        self.open()
        sent = {name: client.send("keys") for name, client in self.clients.items()}
        return sent, {name: message[TAG_BYTES:][:KEY_BYTES] for name, message in sent.items()}

    def opening(self) -> bytes:
        """Digest to which messages of the open round are bound before its keys are known."""
        assert self.server._round is not None
        return self.server._round.opening

    def directory(self) -> dict[str, bytes]:
        """Identity key of each party."""
        keys = {party(name): client.send("identities") for name, client in self.clients.items()}
        return {"server": self.server._identity.public, **keys}

    def forge(self, what: str, name: str, bound_to: bytes, body: bytes) -> bytes:
        """A message of a dishonest client, properly tagged."""
        return authenticate(self.clients[name]._identity.link("server"), binding(what, party(name), bound_to), body)

    def tell_keys(self, name: str, keys: Mapping[str, bytes]) -> None:
        """Send a client these round keys."""
        self.clients[name].receive("keys", self.tell("keys", name, self.opening(), pack_fields(keys)))

    def tell(self, what: str, name: str, bound_to: bytes, body: bytes) -> bytes:
        """A message of a dishonest server, properly tagged."""
        return authenticate(self.server._identity.link(party(name)), binding(what, "server", bound_to), body)

    def confirm(self, name: str, fates: Mapping[str, str]) -> dict[str, bytes]:
        """Tags that a client makes for its peers when a dishonest server reports these fates."""
        client = self.clients[name]
        stated = {owner: fate.encode() for owner, fate in fates.items()}
        for owner, fate in fates.items():
            if fate == "survived":
                stated[owner] += self.attested.get(owner, {}).get(name, b"")
        answer = client.answer("confirm", self.tell("survivors", name, agreed_by(client).digest, pack_fields(stated)))
        return unpack_fields(answer[28:])

    def unmask(self, name: str, tags: Mapping[str, bytes]) -> dict[str, bytes]:
        """Shares that a client releases when a dishonest server relays these tags, by sender."""
        client = self.clients[name]
        bound_to = agreed_by(client).digest
        answer = client.answer("unmask", self.tell("tags", name, bound_to, pack_fields(tags)))
        return unpack_fields(
            self.server._identity.link(party(name)).open(answer, binding("unmask", party(name), bound_to))
        )


def names_of(number: int) -> list[str]:
    return [f"c{index}" for index in range(number)]


def vectors_of(names: Sequence[str], length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(length, generator=generator) for name in names}


def integer_sum(
    vectors: Mapping[str, Tensor], names: Sequence[str] | None = None, fraction_bits: int = 20
) -> list[int]:
    """The oracle: exact rational arithmetic on Python's integers."""
    rows = [
        [round(Fraction(number) * 2**fraction_bits) for number in vectors[name].tolist()]
        for name in (vectors if names is None else names)
    ]
    return [sum(column) for column in zip(*rows, strict=True)]


def agreed_by(client: MaskingClient) -> MaskedRound:
    assert client._round is not None
    return client._round.agreed


def shared_by(client: MaskingClient) -> tuple[str, ...]:
    assert client._round is not None
    return client._round.shared


def question(fates: Mapping[str, str]) -> bytes:
    return pack_fields({name: fate.encode() for name, fate in fates.items()})


def fates_of(names: Sequence[str], dropped: Sequence[str] = ()) -> dict[str, str]:
    return {name: "dropped" if name in dropped else "survived" for name in names}


def addressed_to(name: str, tags: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """What a server relays, given the tags that each sender made."""
    return {sender: given[name] for sender, given in tags.items() if name in given}


@dataclass
class Lies:
    """A round in which a dishonest server reports something else to each client.

    Args:
        parties: With an open round and its keys.
        shared: Who shared secrets, as reported to each client.
    """

    parties: Parties
    shared: Mapping[str, Sequence[str]]
    seeds: dict[str, set[str]] = field(default_factory=dict)
    """Who gave a share of each seed; likewise of each round key."""
    keys: dict[str, set[str]] = field(default_factory=dict)
    masked_with: dict[str, set[str]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        clients = self.parties.clients
        deals = {name: unpack_fields(client.send("shares")[28:]) for name, client in clients.items()}
        for name, client in clients.items():
            sealed = {owner: deals[owner].get(party(name), b"") for owner in self.shared[name]}
            client.receive("shares", self.parties.tell("shares", name, agreed_by(client).digest, pack_fields(sealed)))
            assert client._round is not None
            self.masked_with[name] = set(client._round.mask_keys)
            self.parties.mask(name, torch.arange(3.0))

    def ask(self, dropped: Mapping[str, Sequence[str]]) -> None:
        """Collect the answers of clients to which these are reported as dropped."""
        tags: dict[str, dict[str, bytes]] = {}
        for name, gone in dropped.items():
            with suppress(PrivacyError):
                tags[name] = self.parties.confirm(name, fates_of(self.shared[name], gone))
        for name in tags:
            self.collect(name, tags, dropped[name])

    def collect(self, name: str, tags: Mapping[str, Mapping[str, bytes]], gone: Sequence[str]) -> None:
        """Ask a client to which these are reported as gone for its shares, with the tags of all."""
        with suppress(QuorumError):
            owners = self.parties.unmask(name, addressed_to(name, tags))
            self.released.append(name)
            for owner in owners:
                (self.keys if owner in gone else self.seeds).setdefault(owner, set()).add(name)

    def readable(self, threshold: int) -> list[set[str]]:
        """Smallest groups of clients whose sum can be read: no mask of theirs is left that does not cancel."""
        seeds, keys = ({name for name, of in by.items() if len(of) >= threshold} for by in (self.seeds, self.keys))
        unknown = {
            name: set() if name in keys else {peer for peer in peers if peer not in keys}
            for name, peers in self.masked_with.items()
        }
        groups: list[set[str]] = []
        for name in unknown:
            group, frontier = {name}, [name]
            while frontier:  # an unknown mask goes away only if the one with which it is shared is added
                new = unknown[frontier.pop()] - group
                group |= new
                frontier += new
            cancels = all(one in unknown[peer] for one in group for peer in unknown[one])
            if group <= seeds and cancels and group not in groups:
                groups.append(group)
        return groups


@dataclass
class Colluding(Lies):
    """Lies in which some clients help the server: they send it all they hold, and confirm whatever it reports.

    Args:
        colluding: Their names.
    """

    colluding: Sequence[str] = ()

    def ask(self, dropped: Mapping[str, Sequence[str]]) -> None:
        """Collect the answers of honest clients to which these are reported as dropped; colluders confirm it."""
        for name in self.colluding:
            opened = self.parties.clients[name]._round
            assert opened is not None
            for owner in opened.shares:
                self.seeds.setdefault(owner, set()).add(name)
                self.keys.setdefault(owner, set()).add(name)
        # the server takes off what colluders share with others, who are left with their other masks
        self.masked_with = {
            name: peers - {*self.colluding} for name, peers in self.masked_with.items() if name not in self.colluding
        }
        views: dict[tuple[str, ...], list[str]] = {}
        for name, gone in dropped.items():
            views.setdefault(tuple(gone), []).append(name)
        for gone, misled in views.items():
            tags = {}
            for name in misled:
                with suppress(QuorumError):  # too few survivors are reported to it
                    tags[name] = self.parties.confirm(name, fates_of(self.shared[name], gone))
            misled = list(tags)
            survivors = tuple(name for name in self.parties.names if name not in gone)
            agreed = agreed_by(next(iter(self.parties.clients.values())))
            view = agreed.view(self.parties.names, survivors)
            for helper in self.colluding:
                identity = self.parties.clients[helper]._identity
                tags[helper] = {
                    name: identity.link(party(name)).tag(view, agreed.confirmation(helper, name)) for name in misled
                }
            for name in misled:
                self.collect(name, tags, gone)


def collude(backend: PairwiseMasking, names: Sequence[str], number: int) -> Colluding:
    """A round in which a server reports to two halves of the honest clients that the other half dropped out."""
    parties = Parties(backend, names)
    parties.open()
    parties.step("keys")
    colluding, honest = names[:number], names[number:]
    lying = Colluding(parties, dict.fromkeys(names, names), colluding=colluding)
    halves = honest[: len(honest) // 2], honest[len(honest) // 2 :]
    misled = {name: other for half, other in (halves, halves[::-1]) for name in half}
    lying.ask(misled)
    return lying
