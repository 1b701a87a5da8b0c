"""The client of threshold sums: encrypts, confirms whose vectors are in the sum, and decrypts it in part."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.privacy.base import RoundId
from fedlit.privacy.errors import AuthenticationError, DecodeError, KeyCheckError, ReplayError
from fedlit.privacy.links import (
    TAG_BYTES,
    check_members,
    digest,
    field_of,
    pack_fields,
    unpack_fields,
)
from fedlit.privacy.masking.parties import IdentifiedClient, step_due
from fedlit.privacy.masking.round import SERVER, authenticate, binding, party, read, write
from fedlit.privacy.packing import check_row
from fedlit.privacy.paillier_arithmetic import generate
from fedlit.privacy.terms import Terms
from fedlit.privacy.threshold.arithmetic import ThresholdModulus, deal

if TYPE_CHECKING:
    from fedlit.privacy.threshold.backend import ThresholdPaillier

STEPS = ("terms", "vector", "confirm", "decrypt")
"""Of a client in a round."""

HASH_BYTES = 32


@dataclass(repr=False)
class _ClientRound:
    """State of the open round; forgotten with this client's last answer."""

    digest: bytes
    terms: Terms
    clients: tuple[str, ...]
    due: str = STEPS[0]
    """The step that comes next: each is taken once."""
    agreeing: tuple[str, ...] = ()
    """Clients that have shown this one that they received the same terms, itself included."""
    body: bytes = b""
    """Of this client's vector, as others get it."""
    listed: dict[str, bytes] = field(default_factory=dict)
    """Hashes of the vectors in the sum, by client, once this client has confirmed them."""

    def view(self) -> bytes:
        """What clients confirm to each other."""
        return digest("vectors of a threshold sum", self.digest, sorted([*self.listed.items()]))


@final
class ThresholdClient(IdentifiedClient):
    """Encrypts one vector per round, and decrypts one sum in part, with its share of the key."""

    def __init__(self, name: str, backend: ThresholdPaillier) -> None:
        super().__init__(name)
        self._backend = backend
        self._key: tuple[ThresholdModulus, int] | None = None  # with this client's share
        self._round: _ClientRound | None = None
        self._newest = -1  # call of the newest round opened under this key

    @property
    def survivors(self) -> tuple[str, ...]:
        """As the server has listed them in the open round."""
        return () if self._round is None else tuple(name for name in self._round.clients if name in self._round.listed)

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment; an earlier share is forgotten, identity keys stay pinned."""
        check_members([self.name], roster, "enrol", KeyCheckError)
        self._backend.dealer_of(roster)  # raises if it is missing
        self._roster, self._key, self._round, self._newest = tuple(roster), None, None, -1

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``; raises as `ThresholdPaillier.check_round`.

        Raises a `ReplayError` if this or a later round was opened under this key: its vectors could be added once more.
        """
        self._round = None
        modulus, _ = self._enrolled()
        self._backend.check_round(clients, self._roster)
        check_members([self.name], clients, "open a round", KeyCheckError)
        if round_id.call <= self._newest:
            raise ReplayError(
                f"client {self.name!r} is to open the round of call {round_id.call}, but has opened that of "
                f"{self._newest} under the same key: calls are counted upwards"
            )
        self._newest = round_id.call
        bound_to = self._backend.bind(round_id, clients, self._identity, modulus)
        self._round = _ClientRound(bound_to, round_id.terms or Terms(), tuple(clients))

    def send(self, step: str) -> bytes:
        """Identity key; from the dealer, the modulus and everybody's encrypted share; terms of the sum."""
        if step == "identities":
            return self._identity.public
        if step == "terms":
            return self._stated()
        return self._dealt() if self._roster and self.name == self._backend.dealer_of(self._roster) else b""

    def receive(self, step: str, message: bytes) -> None:
        """Directory; this client's encrypted share; others' terms, or nothing if this client is left out."""
        if step == "identities":
            self._receive_identities(message)
        elif step == "terms":
            self._receive_terms(message)
        elif message:
            self._receive_share(message)
        else:
            self._enrolled()

    def protect(self, vector: Tensor) -> Tensor:
        """Ciphertexts, shape (bytes,), uint8, with what shows the other clients who made them, and from what.

        Raises an `InputError` if the vector cannot be encrypted (see `FixedPoint`), a `ReplayError` if no round is
        open, or has this client's vector.
        """
        (modulus, _), opened = self._enrolled(), self._due("vector")
        check_row("vector to protect", vector)
        plaintexts = self._backend.slots.pack(self._backend.codec.encode(vector).tolist())
        about = binding("vector", self._identity.owner, opened.digest)
        ciphertexts, proof = modulus.encrypt(plaintexts, about, self._backend.workers)
        length = len(vector).to_bytes(8, "big")
        opened.body = pack_fields({"length": length, "proof": proof, "vector": ciphertexts})
        opened.due = "confirm"
        tags = {
            peer: self._identity.link(party(peer)).tag(opened.body, self._about("vector", self.name, peer, opened))
            for peer in opened.agreeing
            if peer != self.name
        }
        sent = pack_fields({"tags": pack_fields(tags), "body": opened.body})
        message = authenticate(self._identity.link(SERVER), about, sent)
        return torch.frombuffer(bytearray(message), dtype=torch.uint8)

    def answer(self, step: str, question: bytes) -> bytes:
        """Tags for the other survivors; then this client's part of the sum's decryption, and the round is forgotten."""
        return self._confirm(question) if step == "confirm" else self._decrypt(question)

    def _dealt(self) -> bytes:
        """Make a key, cut it into shares, and forget it; nothing of it stays here but this client's own share."""
        private, public = generate(self._backend.key_bits)
        modulus = self._backend.load_key(public, self._roster)
        shares = dict(zip(self._roster, deal(private, public, modulus.threshold, len(self._roster)), strict=True))
        self._key = modulus, int.from_bytes(shares.pop(self.name), "big")
        about = about_deal(self._roster, public)
        sealed = {party(name): self._identity.link(party(name)).seal(share, about) for name, share in shares.items()}
        return write(self._identity, SERVER, "keys", b"", pack_fields({"public": public, **sealed}))

    def _receive_share(self, message: bytes) -> None:
        dealt = unpack_fields(message)
        public = field_of(dealt, "public")
        link = self._identity.link(party(self._backend.dealer_of(self._roster)))
        share = link.open(field_of(dealt, "share"), about_deal(self._roster, public))
        self._key = self._backend.load_key(public, self._roster), int.from_bytes(share, "big")

    def _stated(self) -> bytes:
        """Terms of the sum, as this client has received them, with a tag for each other client."""
        opened = self._due("terms")
        terms = opened.terms.for_peers()
        tags = {
            party(peer): self._identity.link(party(peer)).tag(terms, self._about("terms", self.name, peer, opened))
            for peer in opened.clients
            if peer != self.name
        }
        return write(self._identity, SERVER, "terms", opened.digest, pack_fields({"terms": terms, **tags}))

    def _receive_terms(self, message: bytes) -> None:
        """Compare those of others; no vector is sent where they differ."""
        if not message:
            return
        (modulus, _), opened = self._enrolled(), self._due("terms")
        stated = unpack_fields(read(self._identity, SERVER, "terms", opened.digest, message))
        check_members(stated, opened.clients, "state the terms of the sum")
        for peer, tagged in stated.items():
            tag, terms = tagged[:TAG_BYTES], tagged[TAG_BYTES:]
            self._identity.link(party(peer)).verify(terms, self._about("terms", peer, self.name, opened), tag)
            opened.terms.check(terms, peer, self.name)
        opened.agreeing = tuple(name for name in opened.clients if name in {*stated, self.name})
        self._backend.check_left(len(opened.agreeing), opened.clients, modulus, "have stated terms of the sum")
        opened.due = "vector"

    def _confirm(self, question: bytes) -> bytes:
        """Commit to one list of vectors, and attest it to every other survivor."""
        (modulus, _), opened = self._enrolled(), self._due("confirm")
        listed = unpack_fields(read(self._identity, SERVER, "survivors", opened.digest, question))
        check_members(listed, opened.agreeing, "be in the sum, whose terms they have not shown to have received")
        if any(len(each) != HASH_BYTES for each in listed.values()):
            raise DecodeError(f"the server must list hashes of vectors, of {HASH_BYTES} bytes each")
        if listed.get(self.name) != hash_of(opened.body):
            raise AuthenticationError(f"client {self.name!r} is asked to confirm a sum without the vector that it sent")
        self._backend.check_left(len(listed), opened.clients, modulus, "have sent a vector")
        opened.listed, opened.due = listed, "decrypt"  # a second list could be another
        view = opened.view()
        tags = {
            peer: self._identity.link(party(peer)).tag(view, self._about("confirm", self.name, peer, opened))
            for peer in listed
            if peer != self.name
        }
        return write(self._identity, SERVER, "tags", opened.digest, pack_fields(tags))

    def _decrypt(self, question: bytes) -> bytes:
        """Part of the decryption of the confirmed sum, which this client adds up itself."""
        (modulus, share), opened = self._enrolled(), self._due("decrypt")
        asked = unpack_fields(read(self._identity, SERVER, "vectors", opened.digest, question))
        tags, vectors = (unpack_fields(field_of(asked, name)) for name in ("tags", "vectors"))
        others, view = [peer for peer in opened.listed if peer != self.name], opened.view()
        confirming = 1 + sum(
            self._verifies(peer, tags.get(peer, b""), view, self._about("confirm", peer, self.name, opened))
            for peer in others
        )
        what = f"confirm the list of vectors that client {self.name!r} received"
        self._backend.check_left(confirming, opened.clients, modulus, what)
        length = unpack_fields(opened.body)["length"]
        summed = [self._ciphertexts(self.name, opened.body, length, opened, modulus)]
        for peer in others:
            vector = field_of(vectors, peer)
            tag, body = vector[:TAG_BYTES], vector[TAG_BYTES:]
            self._identity.link(party(peer)).verify(body, self._about("vector", peer, self.name, opened), tag)
            if hash_of(body) != opened.listed[peer]:
                raise AuthenticationError(f"the vector of client {peer!r} is not the one on the confirmed list")
            summed.append(self._ciphertexts(peer, body, length, opened, modulus))
        self._round = None  # one sum, once
        parts = modulus.decrypt_partly(modulus.multiply(summed), share, self._backend.workers)
        return write(self._identity, SERVER, "partials", opened.digest, modulus.write(parts))

    def _ciphertexts(
        self, sender: str, body: bytes, length: bytes, opened: _ClientRound, modulus: ThresholdModulus
    ) -> list[int]:
        """Ciphertexts of one vector, whose sender must know what they hold."""
        fields = unpack_fields(body)
        same = field_of(fields, "length") == length
        check(same, f"vector of client {sender!r}", "as long as the others", fields["length"].hex(), error=DecodeError)
        count = self._backend.slots.integers(int.from_bytes(length, "big"))
        vector, proof = field_of(fields, "vector"), field_of(fields, "proof")
        if sender == self.name:
            return modulus.read(vector, count)
        about = binding("vector", party(sender), opened.digest)
        try:
            return modulus.check_known(vector, count, proof, about, self._backend.workers)
        except AuthenticationError as error:
            raise AuthenticationError(f"client {sender!r}: {error}") from error

    def _about(self, step: str, sender: str, recipient: str, opened: _ClientRound) -> bytes:
        return binding(step, party(sender), opened.digest, party(recipient))

    def _enrolled(self) -> tuple[ThresholdModulus, int]:
        if self._key is None:
            raise KeyCheckError(f"client {self.name!r} has no share of a key yet: run the enrolment steps first")
        return self._key

    def _due(self, step: str) -> _ClientRound:
        return step_due(self._round, step, self.name, STEPS)


def about_deal(roster: Sequence[str], public: bytes) -> bytes:
    """Binding of encrypted shares: a swapped modulus or roster makes them fail to open."""
    return digest("threshold deal", list(roster), public)


def hash_of(body: bytes) -> bytes:
    """Hash by which a vector is listed."""
    return hashlib.sha256(body).digest()
