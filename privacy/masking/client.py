"""The client of masked sums: masks its vector, holds shares of its neighbours' secrets, confirms who survived."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.privacy import shamir
from fedlit.privacy.base import RoundId
from fedlit.privacy.errors import AuthenticationError, DecodeError, KeyCheckError
from fedlit.privacy.links import (
    KEY_BYTES,
    KeyPair,
    check_members,
    derive,
    digest,
    pack_fields,
    round_digest,
    unpack_fields,
)
from fedlit.privacy.masking.graph import draw
from fedlit.privacy.masking.parties import IdentifiedClient, step_due
from fedlit.privacy.masking.round import (
    DROPPED,
    HEADER_BYTES,
    SERVER,
    SURVIVED,
    MaskedRound,
    Masks,
    binding,
    party,
    read,
    write,
    write_header,
)
from fedlit.privacy.packing import check_row
from fedlit.privacy.tags import Tags
from fedlit.privacy.terms import Terms

if TYPE_CHECKING:
    from fedlit.privacy.masking.backend import PairwiseMasking


STEPS = ("keys", "shares", "vector", "confirm", "unmask")
"""Of a client in a round."""


@dataclass(repr=False)
class _ClientRound:
    """State of the open round; forgotten with this client's last answer, or without one with its vector."""

    opening: bytes
    """Digest of the round and its clients: binds messages before round keys are known."""
    terms: Terms
    roster: tuple[str, ...]
    keys: KeyPair
    drawn: bytes
    """Neighbours of this client, as it announces them."""
    seed: bytes
    recovers: bool
    """Whether the total can do without some clients, so that secrets are shared."""
    due: str = STEPS[0]
    """The step that comes next: each is taken once."""
    agreed: MaskedRound = field(init=False)
    """From the step ``keys`` on."""
    mask_keys: dict[str, bytes] = field(default_factory=dict)
    shares: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    """Of the seed and of the round key of each client that has drawn this one, and of this client's."""
    shared: tuple[str, ...] = ()
    """Clients whose shares were relayed."""
    survivors: tuple[str, ...] = ()
    """As the server reported, once this client has confirmed it."""
    unlike: frozenset[str] = frozenset()
    """Survivors that have not shown this client that they masked with those who shared secrets as it knows them."""


@final
class MaskingClient(IdentifiedClient):
    """Masks one vector per round, and holds shares of its neighbours' secrets."""

    def __init__(self, name: str, backend: PairwiseMasking) -> None:
        super().__init__(name)
        self._backend = backend
        self._tags: Tags | None = None  # of the vector that is being masked
        self._round: _ClientRound | None = None
        self._deal = b""
        self._draws = secrets.token_bytes(shamir.SECRET_BYTES)  # lasts: a round that is repeated has the same graph

    def introduce(self, keys: KeyPair, publics: Mapping[str, bytes]) -> None:
        """See `AggregationClient`."""
        super().introduce(keys, publics)
        self._draws = derive(keys.private_bytes(), "neighbours")  # as long as the identity lasts

    @property
    def survivors(self) -> tuple[str, ...]:
        """As the server has reported them in the open round."""
        return () if self._round is None else self._round.survivors

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment; keys pinned earlier stay pinned."""
        check_members([self.name], roster, "enrol", KeyCheckError)
        self._roster = tuple(roster)
        self._round = None

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``, with fresh secrets; raises as `PairwiseMasking.check_round`."""
        self._round, self._deal = None, b""
        self._backend.check_round(len(clients))
        check_members([self.name], clients, "open a round", KeyCheckError)
        for peer in (SERVER, *map(party, clients)):
            self._identity.public_of(peer)
        opening = round_digest(round_id, clients)
        self._round = _ClientRound(
            opening,
            round_id.terms or Terms(),
            tuple(clients),
            KeyPair(),
            draw(self._draws, opening, clients, self.name, self._backend.degree(len(clients))),
            secrets.token_bytes(shamir.SECRET_BYTES),
            self._backend.recovers(len(clients)),
        )

    def send(self, step: str) -> bytes:
        """Identity key; round key and neighbours; encrypted shares, or nothing if the server left this client out."""
        if step == "identities":
            return self._identity.public
        if step == "keys":
            opened = self._due("keys")
            terms = opened.terms.to_bytes()
            more = terms if opened.recovers else pack_fields({"terms": terms, **self._terms_for_peers(opened)})
            return write(self._identity, SERVER, "keys", opened.opening, opened.keys.public + opened.drawn + more)
        deal, self._deal = self._deal, b""
        return deal

    def receive(self, step: str, message: bytes) -> None:
        """Directory; round keys; shares of the neighbours' secrets. Empty if this client is left out of the round."""
        if not message:
            return
        if step == "identities":
            self._receive_identities(message)
        elif step == "keys":
            self._receive_keys(message)
        else:
            self._receive_shares(message)

    def protect(self, vector: Tensor) -> Tensor:
        """Masked vector, shape (bytes,), uint8; a `ReplayError` if this round's masks are used up, or not agreed on."""
        opened, tags = self._due("vector"), self._tags
        agreed = opened.agreed
        check_row("vector to protect", vector)
        vector = vector.detach().cpu()
        self._backend.codec.check(vector)
        dtype = agreed.dtype
        added: list[bytes] = []
        subtracted: list[bytes] = []
        for peer, key in opened.mask_keys.items():
            (added if agreed.adds(self.name, peer) else subtracted).append(key)
        if opened.recovers:
            added.append(agreed.self_mask_key(opened.seed))
        masks = Masks(added, subtracted, dtype)
        # before masking: if that fails midway, the masks are used up, as a second vector would show how the two differ
        opened.due = "confirm"
        if not opened.recovers:  # nothing is asked later: the round's key is not kept
            self._round = None
        opened.mask_keys.clear()
        attested = self._attested(opened)
        end = HEADER_BYTES + (len(vector) + (0 if tags is None else tags.count)) * dtype.itemsize
        message = torch.empty(end + len(attested), dtype=torch.uint8)
        data = message.numpy()
        data[end:] = np.frombuffer(attested, np.uint8)
        numbers = (vector if vector.dtype == torch.float64 else vector.float()).numpy()
        masked = data[HEADER_BYTES:end].view(dtype)
        running = None if tags is None else tags.begin(self.name)
        for start in range(0, len(numbers), masks.chunk):
            chunk = masked[: len(numbers)][start : start + masks.chunk]
            # two's complement: a negative integer is itself modulo the size of the ring
            integers = chunk.view(agreed.signed_dtype)
            self._backend.codec.round_into(numbers[start : start + masks.chunk], integers)
            if running is not None:
                running.take(integers)
            masks.apply(chunk)
        if tags is not None and running is not None:
            masked[len(numbers) :].view(agreed.signed_dtype)[:] = tags.numbers(running)
            masks.apply(masked[len(numbers) :])
        about = binding("vector", self._identity.owner, agreed.digest)
        write_header(data, self._identity.link(SERVER), about, agreed.digest, dtype, len(attested))
        return message

    def _attested(self, opened: _ClientRound) -> bytes:
        """Tags that show each witness with whom this client has masked, as it may vanish before it can confirm it."""
        agreed = opened.agreed
        view = agreed.view(opened.shared, opened.shared)
        return b"".join(
            self._identity.link(party(peer)).tag(view, agreed.masked_with(self.name, peer))
            for peer in agreed.witnesses(self.name, opened.shared)
        )

    def protect_tagged(self, vector: Tensor, tags: Tags) -> Tensor:
        """See `AggregationClient`; numbers are rounded once, for masks and tags."""
        self._tags = tags
        try:
            return self.protect(vector)
        finally:
            self._tags = None

    def answer(self, step: str, question: bytes) -> bytes:
        """Tags for the other survivors; then shares, whereupon the round is forgotten."""
        return self._confirm(question) if step == "confirm" else self._unmask(question)

    def _receive_keys(self, message: bytes) -> None:
        opened = self._due("keys")
        announced = unpack_fields(read(self._identity, SERVER, "keys", opened.opening, message))
        theirs: dict[str, bytes] = {}
        if not opened.recovers:
            theirs = {name: text[KEY_BYTES:] for name, text in announced.items() if name != self.name}
            announced |= {name: announced[name][:KEY_BYTES] for name in theirs}
        if announced.get(self.name) != opened.keys.public + opened.drawn:  # or its peers would derive other masks
            raise KeyCheckError(f"the server names another round key or other neighbours of client {self.name!r}")
        agreed = self._backend.agree(opened.opening, opened.roster, self._identity, announced, opened.terms.digest)
        opened.mask_keys = {
            peer: agreed.mask_key(opened.keys, self.name, peer) for peer in agreed.neighbours(self.name)
        }
        opened.agreed = agreed
        if opened.recovers:
            self._deal, opened.due = self._dealt(opened, agreed), "shares"
            return
        for peer, sealed in theirs.items():
            about = self._about_terms(opened, peer, agreed.keys[peer], self.name)
            opened.terms.check(self._identity.link(party(peer)).open(sealed, about), peer, self.name)
        opened.shared, opened.due = agreed.clients, "vector"

    def _terms_for_peers(self, opened: _ClientRound) -> dict[str, bytes]:
        """The terms, encrypted for each other client of the round, where there are no shares to carry them."""
        sealed: dict[str, bytes] = {}
        for peer in opened.roster:
            if peer != self.name:
                about = self._about_terms(opened, self.name, opened.keys.public, peer)
                sealed[party(peer)] = self._identity.link(party(peer)).seal(opened.terms.for_peers(), about)
        return sealed

    def _about_terms(self, opened: _ClientRound, sender: str, key: bytes, receiver: str) -> bytes:
        """Binding of one client's terms: also to its fresh round key, which it so shows to be its own."""
        return binding("terms", party(sender), digest("round key", opened.opening, key), party(receiver))

    def _dealt(self, opened: _ClientRound, agreed: MaskedRound) -> bytes:
        """Shares of this client's secrets, each pair encrypted for its holder; and for all neighbours, the terms."""
        holders = agreed.holders(self.name)
        points = [agreed.point(holder) for holder in holders]
        of_seed = shamir.split(opened.seed, agreed.threshold, points)
        of_key = shamir.split(opened.keys.private_bytes(), agreed.threshold, points)
        deal = {"commitment": agreed.commitment(self.name, opened.seed)}
        dealt = {holder: (of_seed[point], of_key[point]) for holder, point in zip(holders, points, strict=True)}
        opened.shares[self.name] = dealt.pop(self.name)
        # neighbours that hold no share open a message too: it shows them that this key and these neighbours are its own
        for peer in agreed.neighbours(self.name):
            # bound to its receiver, so that the server cannot hand one client the shares of another
            about = binding("shares", self._identity.owner, agreed.agreement, party(peer))
            both = b"".join(dealt.get(peer, ())) + opened.terms.for_peers()
            deal[party(peer)] = self._identity.link(party(peer)).seal(both, about)
        return write(self._identity, SERVER, "shares", agreed.digest, pack_fields(deal))

    def _receive_shares(self, message: bytes) -> None:
        opened = self._due("shares")
        agreed = opened.agreed
        encrypted = unpack_fields(read(self._identity, SERVER, "shares", agreed.digest, message))
        shared = tuple(name for name in agreed.clients if name in encrypted)
        if len(shared) != len(encrypted) or self.name not in encrypted:
            raise AuthenticationError(f"shares are of {list(encrypted)}, but keys of {list(agreed.clients)}")
        agreed.check_left(shared, "shared secrets")
        shares: dict[str, tuple[bytes, bytes]] = {}
        neighbours = [peer for peer in agreed.neighbours(self.name) if peer in encrypted]
        for peer in neighbours:
            about = binding("shares", party(peer), agreed.agreement, self._identity.owner)
            both = self._identity.link(party(peer)).open(encrypted[peer], about)
            size = 2 * shamir.SHARE_BYTES if peer in agreed.owners(self.name) else 0
            check(len(both) >= size, f"shares of {peer!r}", f"{size} bytes", len(both), error=DecodeError)
            opened.terms.check(both[size:], peer, self.name)
            if size:
                shares[peer] = both[: shamir.SHARE_BYTES], both[shamir.SHARE_BYTES : size]
        opened.shares |= shares
        # nobody could remove the mask of a client that dropped out before its shares were dealt
        opened.mask_keys = {peer: opened.mask_keys[peer] for peer in neighbours}
        opened.shared, opened.due = shared, "vector"

    def _confirm(self, question: bytes) -> bytes:
        """Commit to one view of who shared secrets and who survived, and attest it to every other survivor."""
        opened = self._due("confirm")
        agreed = opened.agreed
        stated = unpack_fields(read(self._identity, SERVER, "survivors", agreed.digest, question))
        fates = {name: text[: len(SURVIVED)] for name, text in stated.items()}
        if set(fates) != set(opened.shared) or not set(fates.values()) <= {SURVIVED, DROPPED}:
            raise DecodeError(f"the server must state who of {list(opened.shared)} survived, got {list(fates)}")
        if fates[self.name] != SURVIVED:
            raise AuthenticationError(f"client {self.name!r} is asked to confirm that it dropped out")
        survivors = tuple(name for name in opened.shared if fates[name] == SURVIVED)
        agreed.check_left(survivors, "survived")
        opened.survivors, opened.due = survivors, "unmask"  # a second list could be another
        masked = agreed.view(opened.shared, opened.shared)
        owners = () if agreed.complete else agreed.owners(self.name)
        opened.unlike = frozenset(
            owner
            for owner in owners
            if owner != self.name
            and fates.get(owner) == SURVIVED
            and not self._verifies(owner, stated[owner][len(SURVIVED) :], masked, agreed.masked_with(owner, self.name))
        )
        view = agreed.view(opened.shared, survivors)
        tags = {
            peer: self._identity.link(party(peer)).tag(view, agreed.confirmation(self.name, peer))
            for peer in survivors
            if peer != self.name
        }
        return write(self._identity, SERVER, "tags", agreed.digest, pack_fields(tags))

    def _unmask(self, question: bytes) -> bytes:
        """Shares of the survivors' seeds and of the round keys of the others, once enough confirm who survived."""
        opened = self._due("unmask")
        agreed = opened.agreed
        tags = unpack_fields(read(self._identity, SERVER, "tags", agreed.digest, question))
        view = agreed.view(opened.shared, opened.survivors)
        others = [peer for peer in opened.survivors if peer != self.name]
        confirming = [
            self.name,
            *(
                peer
                for peer in others
                if self._verifies(peer, tags.get(peer, b""), view, agreed.confirmation(peer, self.name))
            ),
        ]
        agreed.check_left(confirming, f"confirm the list of survivors that client {self.name!r} received")
        shares = {
            owner: of_seed if owner in opened.survivors else of_key
            for owner, (of_seed, of_key) in opened.shares.items()
            if owner not in opened.unlike
        }
        self._round = None
        about = binding("unmask", self._identity.owner, agreed.digest)
        return self._identity.link(SERVER).seal(pack_fields(shares), about)

    def _due(self, step: str) -> _ClientRound:
        left_out = ", and a client that the server left out takes no part"
        return step_due(self._round, step, self.name, STEPS, left_out)
