"""Whole conversations for `fuzz.py`: all parties of a backend, and one message that is spoilt on its way.

What a backend promises (``describe()``) decides what is spoilt, and what a wrong sum is:

- `PairwiseMasking` bears a server that lies and a wire that anybody changes: every message of enrolment, opening,
  protection and closing is spoilt, before its tag is made too, as a party that has its keys could. A client's own
  vector before it is tagged is the client's to choose, and is left alone. A sum that a client's bad shares or a
  server's lie let through must be that of the vectors that arrived.
- `Paillier`, `BFV` and `CKKS` bear a server that follows the protocol, and a wire that anybody changes: every message
  is spoilt as it crosses. What whoever has the clients' key could forge is no matter of theirs: `fuzz_formats.py` feeds
  such ciphertexts to their readers, for errors alone.
- The two-party protocols tell damage, mix-ups and replays by a hash without a key, so a spoilt message must not give
  another y; with the hash made anew, as who forges would, nothing is promised but errors of the package.
- `Plain` and exchanges between clients promise nothing. They are part of the conversations between processes, of which
  one has a message of its own spoilt: an announcement, its size, a document, tensors.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fedlit.federation import Facts, Federation, FederationTimeoutError
from fedlit.federation.transport import Outgoing, Transport, Way, whole
from fedlit.privacy import (
    BFV,
    CKKS,
    AffineGrid,
    CKKSAffine,
    FixedPoint,
    Paillier,
    PaillierAffine,
    PairwiseMasking,
    Plain,
    PlainAffine,
    RoundId,
    SecureAggregation,
    TwoPartyAffine,
    affine,
    links,
)
from fedlit.privacy.links import pack_fields, unpack_fields
from fedlit.privacy.masking import round as masking_round
from fuzz_formats import REFUSED, Format, Make, WrongSumError, bytes_of, tensor_of
from mutations import spoil

NAMES = ["a", "b", "c", "d"]
PLACES = 60
"""More than there are messages in a conversation; places beyond the last one are taken from the first on."""

CHANGES = ("bytes", "bytes", "bytes", "fields", "fields", "replay", "swap", "other", "twice", "lost")


class Wire:
    """Carries the messages of a conversation and spoils one of them; keeps those of earlier ones to replay.

    Args:
        plan: Which one, how, and the seed of the details; ``None`` leaves all as they are.
        past: Messages of earlier conversations, by kind.
    """

    def __init__(self, plan: Mapping[str, Any] | None, past: dict[str, list[bytes]], inside: bool = False) -> None:
        self.plan, self.past, self.inside = plan, past, inside
        self.rng = Random(plan["seed"] if plan else 0)
        self.count = 0
        self.seen: list[bytes] = []

    def carry(self, kind: str, message: bytes, inside: bool = False) -> bytes:
        """The message that arrives; only those before their tags are counted where the plan says so."""
        if self.plan is None:
            self.past.setdefault(kind, []).append(message)
        if inside != self.inside:
            return message
        self.count += 1
        self.seen.append(message)
        if self.plan is None or self.count - 1 != self.plan["at"]:
            return message
        return self._spoil(kind, message)

    def _spoil(self, kind: str, message: bytes) -> bytes:
        assert self.plan is not None
        change, rng, pool = self.plan["change"], self.rng, [*self.past.get(kind, []), *self.seen]
        if change == "fields":
            return _in_fields(rng, message, pool)
        if change == "replay":
            return rng.choice(self.past.get(kind, pool))
        if change == "swap":
            return rng.choice(self.seen)
        if change == "other":
            return rng.choice([text for texts in self.past.values() for text in texts])
        if change == "twice":
            return message + message
        return b"" if change == "lost" else spoil(rng, message, pool)


def _in_fields(rng: Random, message: bytes, pool: Sequence[bytes]) -> bytes:
    """One named value of a message spoilt, left out, renamed or given to another, where it has such."""
    for tag in (0, links.TAG_BYTES):
        try:
            fields = unpack_fields(message[tag:])
            name = rng.choice(list(fields))
        except (*REFUSED, IndexError):
            continue
        change = rng.randrange(4)
        if change == 0:
            fields.pop(name)
        elif change == 1:
            fields[rng.choice(["", "client a", "server", *fields])] = fields.pop(name)
        else:
            fields[name] = spoil(rng, fields[name], list(fields.values()))
        return message[:tag] + pack_fields(fields)
    return spoil(rng, message, pool)


class Conversation:
    """All parties of a backend; `play` runs one round, from enrolment on if the plan says so."""

    def __init__(self, backend: SecureAggregation) -> None:
        self.backend, self.call = backend, 0
        self.past: dict[str, list[bytes]] = {}
        self.enrol(Wire(None, self.past))
        for _ in range(3):  # what a later round could replay, and how many messages there are
            wire, inner = Wire(None, self.past), Wire(None, self.past, inside=True)
            self.play(wire)
            with spoiling_inside(inner):
                self.play(inner)
        self.messages, self.messages_inside = wire.count, inner.count

    def enrol(self, wire: Wire) -> None:
        """Make all parties, and their keys, anew."""
        self.clients, self.server = {name: self.backend.client(name) for name in NAMES}, self.backend.server()
        for party in (*self.clients.values(), self.server):
            party.enrol(NAMES)
        self._steps(self.backend.enrolment, wire)

    def _steps(self, steps: Sequence[str], wire: Wire) -> None:
        for step in steps:
            sent = {name: wire.carry(f"{step} up", client.send(step)) for name, client in self.clients.items()}
            relayed = self.server.relay(step, sent)
            for name, client in self.clients.items():
                client.receive(step, wire.carry(f"{step} down", relayed.get(name, b"")))

    def play(self, wire: Wire) -> None:
        """One round; raises a `WrongSumError` if somebody reads another sum than that of the vectors that arrived."""
        self.call += 1
        round_id = RoundId(self.call, "w", self.call)
        # in each round others: a sum that was right in an earlier one is wrong now
        vectors = {name: torch.linspace(-3, 2, 5) * (place + 1) + self.call % 16 for place, name in enumerate(NAMES)}

        def check(total: Tensor, names: Sequence[str]) -> None:
            true, most = sum(vectors[name].double() for name in names), self.backend.error_bound(len(names))
            if total.shape != (5,) or not bool(((total - true).abs() <= most).all()):
                raise WrongSumError(f"{total.tolist()} in place of {true}")

        for party in (*self.clients.values(), self.server):
            party.open_round(round_id, NAMES)
        opening, closing = self.backend.steps(len(NAMES))
        self._steps(opening, wire)
        sent = {name: bytes_of(client.protect(vectors[name])) for name, client in self.clients.items()}
        arrived = {name: wire.carry("vector", message) for name, message in sent.items()}
        messages = {
            name: tensor_of(message) for name, message in arrived.items() if message
        }  # who is lost has vanished
        total = self.server.aggregate(messages)
        answers: dict[str, bytes] = {}
        for step in closing:
            asked = self.server.ask(step, answers)
            questions = {name: wire.carry(f"{step} down", text) for name, text in asked.items()}
            answers = {name: self.clients[name].answer(step, text) for name, text in questions.items() if text}
            answers = {name: wire.carry(f"{step} up", text) for name, text in answers.items()}
        if self.backend.closing:
            total = self.server.conclude(answers)
        if self.backend.key_holder == "server":
            check(self.server.reveal(total, len(messages)), list(messages))
            return
        for client in self.clients.values():
            received = tensor_of(wire.carry("total", bytes_of(total)))
            check(client.reveal(received, len(messages)), list(messages))
        again = self.clients["a"].reissue(client.reveal(total, len(messages)), len(messages))
        received = tensor_of(wire.carry("sealed total", bytes_of(again)))
        check(self.clients["c"].reveal(received, len(messages)), list(messages))


@contextmanager
def spoiling_inside(wire: Wire) -> Iterator[None]:
    """Lets a wire spoil what parties of masked rounds say before they tag or seal it."""
    tagged, seal = masking_round.authenticate, links.Link.seal

    def authenticate(link: links.Link, about: bytes, body: bytes) -> bytes:
        return tagged(link, about, wire.carry("tagged", body, inside=True))

    def sealed(link: links.Link, message: bytes, about: bytes) -> bytes:
        return seal(link, wire.carry("sealed", bytes(message), inside=True), about)

    with mock.patch.object(masking_round, "authenticate", authenticate), mock.patch.object(links.Link, "seal", sealed):
        yield


def aggregation(share: int, backend: Callable[[], SecureAggregation], enrolments: float, inside: float = 0.0) -> Make:
    """Rounds of a backend; of so large a share of them parties enrol anew, or messages are spoilt before their tags."""

    def make(folder: Path) -> Format:
        talk = Conversation(backend())

        def draw(rng: Random) -> bytes:
            plan = {"enrol": rng.random() < enrolments, "inside": rng.random() < inside}
            plan |= {"at": rng.randrange(PLACES), "change": rng.choice(CHANGES), "seed": rng.randrange(2**32)}
            return json.dumps(plan).encode()

        def read(case: bytes) -> None:
            plan = json.loads(case)
            plan["at"] %= 16 if plan["enrol"] else talk.messages_inside if plan["inside"] else talk.messages
            past = talk.past
            if plan["change"] == "replay" and plan["seed"] % 2:  # of the round before, else of one long ago
                talk.play(Wire(None, past := {}))
            wire = Wire(plan, past, plan["inside"])
            with spoiling_inside(wire):
                if not plan["enrol"]:
                    talk.play(wire)
                    return
                enrolled = talk.clients, talk.server
                try:
                    talk.enrol(wire)
                    talk.play(wire)
                finally:
                    talk.clients, talk.server = enrolled

        return Format(share, draw, read, REFUSED)

    return make


# ---------------------------------------------------------------- two parties


def two_parties(share: int, protocol: Callable[[], TwoPartyAffine]) -> Make:
    """Exchanges of A m + b; half of the spoilt messages get a new hash, as who forges would give them."""

    def make(folder: Path) -> Format:
        backend, calls = protocol(), iter(range(1, 2**62))
        moments, matrix, offset = (
            torch.tensor([0.5, -1.0, 0.25]).double(),
            torch.eye(2, 3).double(),
            torch.ones(2).double(),
        )
        source, target, past = backend.source(), backend.target(), {}
        true, key = matrix @ moments + offset, source.public_key()
        target.receive_key(key)

        def play(wire: Wire, forged: bool) -> None:
            round_id = RoundId(call := next(calls), "w", call)
            source.open_round(round_id)
            target.open_round(round_id)

            def carry(step: str, message: bytes) -> bytes:
                if not forged:
                    return wire.carry(step, message)
                bound = unpack_fields(message)["bound"]
                length, body = affine._unframe(step, bound, message)
                spoilt = wire.carry(step, body)
                return affine._frame(step, bound, length + (wire.rng.randrange(-1, 2) if spoilt != body else 0), spoilt)

            asked = carry("protect", source.protect(moments, 3))
            reply = carry("evaluate", target.evaluate(asked, matrix, offset))
            y = target.reveal(carry("unlock", source.unlock(reply)))
            if not forged and not bool(((y - true).abs() <= backend.error_bound(3)).all()):
                raise WrongSumError(f"{y.tolist()} in place of {true.tolist()}")

        for forged in (False, False, True):
            play(Wire(None, past), forged)

        def draw(rng: Random) -> bytes:
            plan = {"forged": rng.random() < 0.5, "at": rng.randrange(3)}
            return json.dumps({**plan, "change": rng.choice(CHANGES), "seed": rng.randrange(2**32)}).encode()

        return Format(share, draw, lambda case: play(Wire(plan := json.loads(case), past), plan["forged"]), REFUSED)

    return make


# ---------------------------------------------------------------- processes


class Spoiling(Transport):
    """Two processes that are threads; what the hostile one sends is counted, and one of its frames or messages spoilt.

    Messages arrive in as many bytes as were announced, as over torch.distributed. A side that fails stays silent.
    """

    world_size = 2

    def __init__(self, rank: int, boxes: Sequence[Queue[Any]], plan: Mapping[str, Any]) -> None:
        self.rank, self.boxes, self.plan = rank, boxes, plan
        self.rng, self.count, self.seen = Random(plan["seed"]), 0, [b""]

    def _send(self, message: Tensor) -> None:
        if self.rank == self.plan["rank"] and message.numel():
            data = message.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if self.count == self.plan["at"]:
                data = (spoil(self.rng, data, self.seen) + bytes(len(data)))[: len(data)] if message.dim() else data
            self.seen.append(data)
            self.count += 1
            message = tensor_of(data).view(message.dtype).reshape(message.shape)
        self.boxes[1 - self.rank].put(message.clone())

    def _receive(self, doing: str) -> Tensor:
        try:
            message = self.boxes[self.rank].get(timeout=1)
        except Empty:
            message = None
        if message is None:
            raise FederationTimeoutError(f"the other process was silent in {doing}")
        return message

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        """Both frames."""
        self._send(frame)
        other = self._receive(doing)
        if (other.shape, other.dtype) != (frame.shape, frame.dtype):
            raise FederationTimeoutError(f"frames of two lengths in {doing}")
        return [frame, other] if self.rank == 0 else [other, frame]

    def swap(self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str) -> list[Tensor | None]:
        """Bytes to and from the other process."""
        for message in outgoing:
            self._send(whole(message))
        arrived: list[Tensor | None] = []
        for size in [size for _, there, size in ways if there == self.rank]:
            message = self._receive(doing).reshape(-1).view(torch.uint8)  # a frame, if one is out of step
            if size > 1 << 24:
                raise FederationTimeoutError(f"{size} bytes do not come in {doing}")
            arrived.append(torch.cat([message, torch.zeros(size, dtype=torch.uint8)])[:size])
        return arrived


def federation_run(transport: Transport, honest: bool) -> None:
    """Everything that processes tell each other; an honest server checks sums whose backend promises them."""
    names = ["a", "b", "t"]
    hidden = {
        "masked": PairwiseMasking(threshold=0.6, colluders=0),
        "in pairs": PairwiseMasking(colluders=0),  # of three clients, none of whom may vanish
        "shared": Paillier(key_bits=512, insecure_test_keys=True, workers=1),
    }
    fed = Federation(
        names, "t", transport=transport, placement=[["a"], ["b", "t"]], privacy=hidden | {"plain": Plain()},
        two_party=PlainAffine(GRID),
    )  # fmt: skip
    sent = {name: {"w": torch.arange(3.0) + names.index(name), "n": torch.tensor(2)} for name in names}
    mine = {client.name: sent[client.name] for client in fed.local_clients}
    fed.agree("a word", "good")
    fed.introduce({name: Facts(3, (2,)) for name in mine})
    fed.exchange("talk", mine)
    fed.exchange("told", mine, to={"t": ["a"], "a": ["t"]})
    fed.mean("plain", mine)
    for channel in hidden:
        got = fed.sum(channel, mine, to=["a", "t"])
        true = torch.arange(3.0) * 3 + 3
        if honest and not torch.allclose(got["a"]["w"], true, atol=1e-5):
            raise WrongSumError(f"{got['a']['w'].tolist()} in place of {true.tolist()} over {channel}")
    pairs = [(client, other) for client in fed.clients[:1] for other in fed.clients[2:]] + [
        (fed.clients[2], fed.clients[0])
    ]
    moments = {name: torch.ones(3) for name in mine}
    maps = {name: {"t" if name == "a" else "a": (torch.ones(2, 3), torch.zeros(2))} for name in mine if name != "b"}
    fed.affine("dot", moments, maps, pairs, 2)
    fed.report({name: {"loss": 1.0} for name in mine}, ["loss"])
    fed.check("anything", None)


GRID = AffineGrid(*[FixedPoint(16, 8.0)] * 3)


def processes(folder: Path) -> Format:
    """Two processes, of which one is hostile: that of the server, or another."""

    def draw(rng: Random) -> bytes:
        return json.dumps({"at": rng.randrange(64), "rank": rng.randrange(2), "seed": rng.randrange(2**32)}).encode()

    def read(case: bytes) -> int:
        plan = json.loads(case)
        boxes: list[Queue[Any]] = [Queue(), Queue()]
        ends: list[Spoiling] = [Spoiling(rank, boxes, plan) for rank in range(2)]
        found: list[BaseException | None] = [None, None]

        def work(rank: int) -> None:
            try:
                federation_run(ends[rank], honest=rank == 0 != plan["rank"])
            except BaseException as error:
                found[rank] = error
            boxes[1 - rank].put(None)

        other = threading.Thread(target=work, args=(1,), daemon=True)
        other.start()
        work(0)
        other.join()
        for error in found:
            if error is not None:
                raise error
        return ends[plan["rank"]].count

    return Format(6, draw, read, REFUSED)


FORMATS: dict[str, Make] = {
    "masked rounds": aggregation(50, lambda: PairwiseMasking(colluders=0), enrolments=0.3, inside=0.5),
    "masked rounds that nobody may leave": aggregation(
        20, lambda: PairwiseMasking(threshold=1.0, colluders=0), enrolments=0.3, inside=0.5
    ),
    "Paillier rounds": aggregation(
        20, lambda: Paillier(key_bits=512, insecure_test_keys=True, workers=1), enrolments=0.1
    ),
    "BFV rounds": aggregation(10, BFV, enrolments=0.1),
    "CKKS rounds": aggregation(10, CKKS, enrolments=0.1),
    "Paillier for two": two_parties(20, lambda: PaillierAffine(GRID, 512, True, workers=1, reveal_moments=True)),
    "CKKS for two": two_parties(2, lambda: CKKSAffine(reveal_moments=True)),
    "processes": processes,
}
