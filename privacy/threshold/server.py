"""The server of threshold sums: relays ciphertexts, and puts the clients' partial decryptions of their sum together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.privacy.base import AggregationServer, RoundId
from fedlit.privacy.errors import DecodeError, KeyCheckError, QuorumError, ReplayError
from fedlit.privacy.links import TAG_BYTES, Identity, check_members, field_of, pack_fields, unpack_fields
from fedlit.privacy.masking.parties import part_due, read_bodies, relay_identities
from fedlit.privacy.masking.round import SERVER, authenticated, binding, party, read, write
from fedlit.privacy.packing import check_equally_long
from fedlit.privacy.threshold.arithmetic import ThresholdModulus
from fedlit.privacy.threshold.client import hash_of

if TYPE_CHECKING:
    from fedlit.privacy.threshold.backend import ThresholdPaillier


@dataclass
class _Vector:
    """What one client has sent."""

    body: bytes
    tags: dict[str, bytes]
    """For the other clients."""
    length: int


@dataclass
class _ServerRound:
    """State of the open round."""

    digest: bytes
    clients: tuple[str, ...]
    due: str = "terms"
    """What comes next: ``terms``, ``vectors``, and ``answers`` once their total is taken."""
    stated: tuple[str, ...] = ()
    """Clients that have sent their terms of the sum."""
    vectors: dict[str, _Vector] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    """Survivors who are asked to decrypt."""


@final
class ThresholdServer(AggregationServer):
    """Relays ciphertexts, and opens their sum with the partial decryptions of t clients."""

    on_grid = True

    def __init__(self, backend: ThresholdPaillier) -> None:
        self._backend = backend
        self._identity = Identity(SERVER)
        self._roster: tuple[str, ...] = ()
        self._modulus: ThresholdModulus | None = None
        self._round: _ServerRound | None = None

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment; the modulus is forgotten, identity keys stay pinned."""
        self._roster, self._modulus, self._round = tuple(roster), None, None

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``; raises as `ThresholdClient.open_round`."""
        self._round = None
        modulus = self._enrolled()
        self._backend.check_round(clients, self._roster)
        self._round = _ServerRound(self._backend.bind(round_id, clients, self._identity, modulus), tuple(clients))

    def relay(self, step: str, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        """Identity keys, to everybody; each client's share of the key, encrypted for it; terms of those who sent some.

        Raises a `QuorumError` if somebody did not enrol, no shares were dealt, or too few have sent terms.
        """
        messages = {name: message for name, message in sent.items() if message}
        if step == "terms":
            return self._relay_terms(messages)
        if step == "identities":
            return relay_identities(self._identity, messages, self._roster)
        return self._relay_shares(messages)

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        """Nothing, shape (0,): clients add up the vectors. Those without a message have dropped out.

        Raises a `QuorumError` if too few survived, a `ReplayError` if a vector comes twice, an `AuthenticationError`
        if it was not made by its sender for this round, a `DecodeError` if it is none, or not of equal length.
        """
        self._due("vectors").vectors.clear()
        for name, message in messages.items():
            self.add(name, message)
        return self.total()

    def add(self, name: str, message: Tensor) -> None:
        """Take one vector; raises as `aggregate`."""
        opened = self._due("vectors")
        check_members([name], opened.stated, "send vectors")
        if name in opened.vectors:
            raise ReplayError(f"client {name!r} has sent its vector of this round already")
        form = f"{message.dtype} of shape {tuple(message.shape)}"
        is_row = message.dtype == torch.uint8 and message.dim() == 1
        check(is_row, f"vector of client {name!r}", "a row of bytes", form, error=DecodeError, shown=form)
        about = binding("vector", party(name), opened.digest)
        data = message.cpu().contiguous().numpy().tobytes()
        sent = unpack_fields(authenticated(self._identity.link(party(name)), about, data))
        body, tags = field_of(sent, "body"), unpack_fields(field_of(sent, "tags"))
        vector = _Vector(body, tags, int.from_bytes(field_of(unpack_fields(body), "length", 8), "big"))
        check_equally_long({**{peer: each.length for peer, each in opened.vectors.items()}, name: vector.length})
        opened.vectors[name] = vector

    def total(self) -> Tensor:
        """Nothing, as `aggregate`, once the vectors are complete; raises as `aggregate`."""
        opened = self._due("vectors")
        self._backend.check_left(len(opened.vectors), opened.clients, self._enrolled(), "have sent a vector")
        opened.due = "answers"
        return torch.empty(0, dtype=torch.uint8)

    def ask(self, step: str, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        """Ask each survivor to confirm who sent what; then each one who did to decrypt, with all other vectors."""
        return self._ask_to_confirm() if step == "confirm" else self._ask_to_decrypt(answers)

    def conclude(self, answers: Mapping[str, bytes]) -> Tensor:
        """Total, shape (n,), int64; then the round is forgotten.

        Raises a `QuorumError` if too few survivors answered, an `AuthenticationError` if partial decryptions do not
        fit, a `DecodeError` if what they give is no sum of so many vectors.
        """
        opened, modulus = self._due("answers"), self._enrolled()
        codec, slots = self._backend.codec, self._backend.slots
        length = next(iter(opened.vectors.values())).length
        bodies = read_bodies(self._identity, "partials", answers, opened.asked, opened.digest)
        partials = {
            self._roster.index(name) + 1: modulus.read(body, slots.integers(length)) for name, body in bodies.items()
        }
        self._round = None
        plaintexts = modulus.combine(partials, self._backend.workers)
        numbers = slots.unpack([modulus.centre(plaintext) for plaintext in plaintexts], length)
        total = torch.tensor(numbers, dtype=torch.int64)
        added = len(opened.vectors)
        if length and int(total.abs().max()) > codec.largest_sum(added):
            raise DecodeError(f"a decrypted number exceeds what {added} clients can add up to")
        return total

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        """Reals of the total that `conclude` returned."""
        return self._backend.codec.decode(total)

    def _relay_shares(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        dealer = self._backend.dealer_of(self._roster)
        if dealer not in messages:
            raise QuorumError(f"client {dealer!r} dealt no shares of a key")
        dealt = unpack_fields(read(self._identity, party(dealer), "keys", b"", messages[dealer]))
        public = field_of(dealt, "public")
        self._modulus = self._backend.load_key(public, self._roster)
        return {
            name: pack_fields({"public": public, "share": field_of(dealt, party(name))})
            for name in self._roster
            if name != dealer
        }

    def _relay_terms(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        opened = self._due("terms")
        bodies = read_bodies(self._identity, "terms", messages, opened.clients, opened.digest)
        self._backend.check_left(len(bodies), opened.clients, self._enrolled(), "have stated terms of the sum")
        stated = {name: unpack_fields(body) for name, body in bodies.items()}
        opened.stated, opened.due = tuple(stated), "vectors"
        relayed: dict[str, bytes] = {}
        for name in stated:
            others = {
                peer: field_of(fields, party(name), TAG_BYTES) + field_of(fields, "terms")
                for peer, fields in stated.items()
                if peer != name
            }
            relayed[name] = write(self._identity, party(name), "terms", opened.digest, pack_fields(others))
        return relayed

    def _ask_to_confirm(self) -> dict[str, bytes]:
        opened = self._due("answers")
        listed = pack_fields({name: hash_of(vector.body) for name, vector in opened.vectors.items()})
        return {name: write(self._identity, party(name), "survivors", opened.digest, listed) for name in opened.vectors}

    def _ask_to_decrypt(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        opened = self._due("answers")
        bodies = read_bodies(self._identity, "tags", answers, tuple(opened.vectors), opened.digest)
        self._backend.check_left(len(bodies), opened.clients, self._enrolled(), "confirmed who sent a vector")
        confirmed = {name: unpack_fields(body) for name, body in bodies.items()}
        questions: dict[str, bytes] = {}
        for name in confirmed:
            tags = {peer: field_of(made, name, TAG_BYTES) for peer, made in confirmed.items() if peer != name}
            vectors = {
                peer: field_of(vector.tags, name, TAG_BYTES) + vector.body
                for peer, vector in opened.vectors.items()
                if peer != name
            }
            asked = pack_fields({"tags": pack_fields(tags), "vectors": pack_fields(vectors)})
            questions[name] = write(self._identity, party(name), "vectors", opened.digest, asked)
        opened.asked = tuple(questions)
        return questions

    def _enrolled(self) -> ThresholdModulus:
        if self._modulus is None:
            raise KeyCheckError("the server has no modulus yet: run the enrolment steps first")
        return self._modulus

    def _due(self, what: str) -> _ServerRound:
        return part_due(self._round, what, "terms, vectors and answers")
