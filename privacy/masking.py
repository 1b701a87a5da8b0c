"""Pairwise masks that cancel in the sum (Bonawitz et al., 2017), along a sparse graph of pairs (Bell et al., 2020).

A client adds to its vector, in the ring of integers modulo 2^32 or 2^64, one mask for each neighbour, which that
neighbour subtracts, and one mask of its own. Both kinds come from short secrets, of which every neighbour holds a
share. Once the server has the vectors, survivors give it shares of the own mask of each survivor and of the round key
of each client that vanished, never both of one client, and it removes what is left in the sum.

    step         client sends                                   server relays
    identities   long-term key                                  everybody's, which clients pin
    keys         round key                                      round keys of those who are there
    shares       for each neighbour, sealed: shares of its      what was sealed for each
                 seed and of its round key
    protect      masked vector

    step         server asks                                    client answers
    confirm      who survived?                                  a tag for each other survivor
    unmask       the tags made for each                         shares, by who survived

Round keys are authentic because the shares are sealed with identity keys and bound to the digest of the round, which
covers all keys: they open only between clients that received the same keys.

A server may lie nevertheless, and report to clients differently who shared secrets or survived. So each client confirms
to all others the one view that it received, and gives shares only once enough confirm the same: q of the n clients of
the round, itself included, where q is more than half and at least the threshold, and a threshold of those who hold
shares of any one client. Two views need 2q clients that confirm, and an honest one confirms one: without 2q - n that
confirm both, clients act on one view at most. By default q is above 2n/3, so that these would be above n/3.
Whoever received another view masked with somebody who gave a share of its seed, as both are more than half of those
who hold such shares. That one survived, so its round key stays secret, and what it masked stays masked: in the
complete graph, but for the sum of all survivors. Of these there are q or more, so with q - 2 that collude it is still
a sum of two others.

One lie that nobody notices here: the server reports to everybody alike that a client vanished whose vector has arrived.
It then learns the sum of the others, who are q or more, in place of the sum of all. In a sparse graph it may so
cut the survivors into groups, of a threshold or more, and learn the sum of each (Bell et al. bound such groups
likewise). In a federation, clients compare the weight in a mean with that of the clients that announced a vector,
and refuse a mean in which it differs: see `Aggregation`.

This is about one sum. A server that deviates between sums is not prevented here from reading single vectors: nothing
binds masks to the sample counts, weights or totals that each client received, or keeps a sum from being repeated over
other clients. Nor does anything vouch for identity keys when they are pinned: a server that swaps them in enrolment is
everybody's peer.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlit.privacy import frames, shamir
from fedlit.privacy.base import AggregationClient, AggregationServer, Description, RoundId, SecureAggregation
from fedlit.privacy.errors import AuthenticationError, DecodeError, KeyCheckError, QuorumError, ReplayError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.frames import pack_fields, unpack_fields
from fedlit.privacy.links import TAG_BYTES, Identity, KeyPair, round_digest
from fedlit.privacy.masking_round import (
    HEADER_BYTES,
    SERVER,
    MaskedRound,
    Masks,
    authenticate,
    authenticated,
    binding,
    check_tag,
    default_degree,
    party,
    read_header,
    write_header,
)
from fedlit.privacy.packing import check_equally_long, check_row

_MOST_TRIED = 200
"""Clients of the largest round that is tried to see whether it bears the colluders asked for."""

_SURVIVED, _DROPPED = b"survived", b"dropped"


@final
class PairwiseMasking(SecureAggregation):
    """Masks that cancel in the sum, and can be removed when clients vanish within a round.

    Args:
        codec: Grid on which numbers travel; ``None`` is `FixedPoint()`.
        modulus_bits: Size of the ring, 32 or 64; a number takes 4 or 8 bytes. 32 bits hold sums of 63 clients on the
            default grid.
        threshold: Shares that restore a client's secrets, out of one for each neighbour and one for itself, more than
            half: a fraction from 0.5 (exclusive) to 1, or a number of shares; ``None`` is the fewest above two thirds.
            So many of a round's clients must also confirm who survived. The higher, the more clients may collude with
            the server (`colluders_borne`), and the fewer may vanish.
        neighbours: Clients with which each one shares masks, even; ``None`` is all of up to 20 clients, and beyond,
            as many as keep the masks safe: see `default_degree`.
        colluders: Clients that may collude with a server that lies, at least: a round that bears fewer is refused. Of
            two clients, one that colludes knows the other's vector from their sum: 0 asks for that by name.

    Raises:
        ValueError: If an argument is out of range.
        RangeError: If the ring is too small for the grid.

    References:
        Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning, CCS 2017, figure 4,
        with tags for each peer in place of signatures in round 3. Bell et al., Secure single-server aggregation with
        (poly)logarithmic overhead, CCS 2020, algorithm 2.
    """

    key_holder: ClassVar[Literal["server", "clients"]] = "server"
    enrolment: ClassVar[tuple[str, ...]] = ("identities",)
    opening: ClassVar[tuple[str, ...]] = ("keys", "shares")
    closing: ClassVar[tuple[str, ...]] = ("confirm", "unmask")
    codec: FixedPoint

    def __init__(
        self,
        codec: FixedPoint | None = None,
        modulus_bits: Literal[32, 64] = 32,
        threshold: int | float | None = None,
        neighbours: int | None = None,
        colluders: int = 1,
    ) -> None:
        self.codec = FixedPoint() if codec is None else codec
        if modulus_bits not in (32, 64):
            raise ValueError(f"modulus_bits must be 32 or 64, got {modulus_bits}")
        if isinstance(threshold, float) and not 0.5 < threshold <= 1:
            raise ValueError(
                f"threshold as a fraction must be above 0.5 and at most 1, got {threshold}: with shares of one half, "
                "the server could restore both secrets of a client"
            )
        if isinstance(threshold, int) and threshold < 2:
            raise ValueError(f"threshold as a number of shares must be at least 2, got {threshold}")
        if neighbours is not None and (neighbours < 2 or neighbours % 2):
            raise ValueError(f"neighbours must be even and at least 2, got {neighbours}")
        self.modulus_bits = modulus_bits
        self.threshold = threshold
        self.neighbours = neighbours
        if colluders < 0:
            raise ValueError(f"colluders must be 0 or more, got {colluders}")
        self.colluders = colluders
        self.min_clients = self._fewest_clients()
        self._check_headroom(self.min_clients)

    def client(self, name: str) -> MaskingClient:
        """Masks, and holds shares of others' secrets."""
        return MaskingClient(name, self)

    def server(self) -> MaskingServer:
        """Adds masked vectors, and removes the masks of their sum."""
        return MaskingServer(self)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of one number in the ring."""
        return np.dtype("<u4" if self.modulus_bits == 32 else "<u8")

    @property
    def signed_dtype(self) -> np.dtype[Any]:
        """Of one number once its place in the ring is read as from -2^(bits-1) to 2^(bits-1)."""
        return np.dtype(f"<i{self.dtype.itemsize}")

    def check_clients(self, num_clients: int) -> None:
        """Raise unless a sum over so many clients hides each of them, from `colluders` of them too.

        Raises:
            QuorumError: If they are too few, or the threshold does not suit them.
        """
        if num_clients < 2:
            super().check_clients(num_clients)
        borne = self.colluders_borne(num_clients)
        if borne < self.colluders:
            raise QuorumError(
                f"a sum over {num_clients} clients was asked for, but of so many {borne} may collude with a server "
                f"that lies, and PairwiseMasking(colluders={self.colluders}) is to hide vectors from more: let more "
                "clients take part, raise threshold, or ask for fewer colluders by name"
            )

    def check_round(self, num_clients: int) -> None:
        """Raise unless so many clients can open a round.

        Raises:
            QuorumError: As `check_clients`.
            RangeError: If their sum may not fit the ring.
        """
        self.check_clients(num_clients)
        self._check_headroom(num_clients)

    def _fewest_clients(self) -> int:
        """Of a round that bears the colluders asked for."""
        suited = False
        for number in range(2, _MOST_TRIED):
            try:
                borne = self.colluders_borne(number)
            except QuorumError:  # the threshold does not suit so many: a round of them raises this
                continue
            suited = True
            if borne >= self.colluders:
                return number
        if not suited:
            return 2
        raise ValueError(
            f"colluders={self.colluders} are borne by no round of less than {_MOST_TRIED} clients with "
            f"threshold={self.threshold} and neighbours={self.neighbours}: ask for fewer, or raise these"
        )

    def _check_headroom(self, num_clients: int) -> None:
        self.codec.check_headroom(num_clients, 2 ** (self.modulus_bits - 1) - 1, f"uint{self.modulus_bits} masks")

    def degree(self, num_clients: int) -> int:
        """Neighbours of each client in a round of so many."""
        degree = default_degree(num_clients) if self.neighbours is None else self.neighbours
        return min(degree, num_clients - 1)

    def shares_needed(self, num_clients: int) -> int:
        """Shares that restore a secret in a round of so many clients.

        Raises:
            QuorumError: If ``threshold`` is a number that is no majority of the shares, or more than there are.
        """
        shares = self.degree(num_clients) + 1
        if not isinstance(self.threshold, int):
            return self._fraction_of(shares)
        if not shares < 2 * self.threshold <= 2 * shares:
            raise QuorumError(
                f"threshold must be more than half of the {shares} shares of a secret and at most all of them in a "
                f"round of {num_clients} clients, got {self.threshold}: give it as a fraction"
            )
        return self.threshold

    def _fraction_of(self, number: int) -> int:
        """The threshold as a fraction of shares, or of clients."""
        if isinstance(self.threshold, float):
            return max(number // 2 + 1, math.ceil(self.threshold * number))
        return number // 2 + 1 if self.threshold is not None else 2 * number // 3 + 1

    def confirmations_needed(self, num_clients: int) -> int:
        """Clients of a round of so many that must confirm the same view of who survived, q.

        Raises:
            QuorumError: As `shares_needed`.
        """
        return max(self._fraction_of(num_clients), self.shares_needed(num_clients))

    def colluders_needed(self, num_clients: int) -> int:
        """As many as hold shares enough of a client's secrets; or all others, who take their own off the sum."""
        return min(num_clients - 1, self.shares_needed(num_clients))

    def colluders_borne(self, num_clients: int) -> int:
        """Clients of a round of so many that may collude with a server that lies, without a vector of others read.

        They confirm two views if they are 2q - n; and they leave out their own vectors of the sum over the fewest
        that may survive, which is then to be one of two others at least.

        Raises:
            QuorumError: As `shares_needed`.
        """
        confirming, shares = self.confirmations_needed(num_clients), self.shares_needed(num_clients)
        complete = self.degree(num_clients) == num_clients - 1
        return max(0, min(2 * confirming - num_clients - 1, (confirming if complete else shares) - 2))

    def agree(
        self, opening: bytes, roster: Sequence[str], identity: Identity, keys: Mapping[str, bytes]
    ) -> MaskedRound:
        """The round among those who announced keys, as every party derives it; raises as `MaskedRound`."""
        return MaskedRound(
            opening,
            roster,
            {peer: identity.public_of(peer) for peer in (SERVER, *map(party, roster))},
            keys,
            threshold=self.shares_needed(len(roster)),
            quorum=self.confirmations_needed(len(roster)),
            degree=self.degree(len(roster)),
            terms=[self.modulus_bits, self.codec.fraction_bits, self.codec.bound],
        )

    def error_bound(self, num_clients: int) -> float:
        """Half a step of the grid per client: the sum itself is exact."""
        return self.codec.error_bound(num_clients)

    def describe(self) -> Description:
        """Who learns what."""
        threshold = "more than two thirds" if self.threshold is None else f"the threshold {self.threshold}"
        refused = f": refused where not even {self.colluders} may collude" if self.colluders else ""
        return Description(
            backend="PairwiseMasking",
            adversary="the server, honest but curious. Not a server that deviates: it reads single vectors if it gives "
            "clients different sample counts or totals, repeats a round, or swaps keys when clients enrol, which are "
            "trusted on first use",
            hidden="every client's vector, and sums of fewer than q of n clients, where q must confirm who survived",
            revealed="to the server: the sum and who is in it; if it reports clients as dropped whose vectors it has, "
            "the sum of the others, at least q; in a sparse graph (beyond 20 clients), then also sums of as few "
            "clients as restore a secret",
            collusion=f"the server with {threshold} of those who hold shares of a client's secrets, or with all others "
            f"in a sum; if it reports false dropouts, with 2q - n of the n clients, or with q - 1{refused}",
            dropouts=f"clients may vanish while {threshold} of those who hold shares of each one's secrets stay",
            bytes_per_number=self.modulus_bits / 8,
            error=self.codec.error_text(),
        )

    def describe_round(self, num_clients: int) -> Description:
        """The same, with the number of clients that may collude in a round of so many."""
        base = self.describe()
        if num_clients < 2:
            return base
        borne = self.colluders_borne(num_clients)
        return replace(base, collusion=f"of {num_clients} clients, {borne} may collude with it. Not: {base.collusion}")

    def __repr__(self) -> str:
        return (
            f"PairwiseMasking(codec={self.codec!r}, modulus_bits={self.modulus_bits}, threshold={self.threshold}, "
            f"neighbours={self.neighbours}, colluders={self.colluders})"
        )


@dataclass(repr=False)
class _ClientRound:
    """What a client knows of the round that is open; forgotten with its last answer."""

    opening: bytes
    """Digest of the round and its clients: what messages are bound to before round keys are known."""
    roster: tuple[str, ...]
    keys: KeyPair
    seed: bytes
    agreed: MaskedRound | None = None
    deal: bytes = b""
    mask_keys: dict[str, bytes] = field(default_factory=dict)
    shares: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    """Of the seed and of the round key of each neighbour, and of one's own."""
    shared: tuple[str, ...] = ()
    """Clients whose shares were relayed."""
    protected: bool = False
    survivors: tuple[str, ...] = ()
    """As the server reported; empty until this client has confirmed it."""


@final
class MaskingClient(AggregationClient):
    """Masks one vector per round, and holds shares of its neighbours' secrets.

    Args:
        name: Of the client, as the roster has it.
        backend: What the parties have agreed on beforehand.
    """

    def __init__(self, name: str, backend: PairwiseMasking) -> None:
        super().__init__(name)
        self._backend = backend
        self._identity = Identity(party(name))
        self._roster: tuple[str, ...] = ()
        self._round: _ClientRound | None = None

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment; keys pinned earlier stay pinned."""
        if self.name not in roster:
            raise KeyCheckError(f"client {self.name!r} is not in the roster {list(roster)}")
        self._roster = tuple(roster)
        self._round = None

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``, with fresh secrets.

        Raises:
            QuorumError: If they are too few, or the threshold does not suit them.
            RangeError: If they are too many for the ring.
        """
        self._round = None
        self._backend.check_round(len(clients))
        if self.name not in clients:
            raise KeyCheckError(f"client {self.name!r} is not in the round among {list(clients)}")
        for peer in (SERVER, *map(party, clients)):
            self._identity.public_of(peer)
        self._round = _ClientRound(
            round_digest(round_id, clients), tuple(clients), KeyPair(), secrets.token_bytes(shamir.SECRET_BYTES)
        )

    def send(self, step: str) -> bytes:
        """Identity key; round key; sealed shares, or nothing if the server has left this client out."""
        if step == "identities":
            return self._identity.public
        opened = self._open()
        if step == "keys":
            about = binding("keys", party(self.name), opened.opening)
            return authenticate(self._identity.link(SERVER), about, opened.keys.public)
        deal, opened.deal = opened.deal, b""
        return deal

    def receive(self, step: str, message: bytes) -> None:
        """Directory; round keys; shares of the neighbours' secrets. Empty if this client is left out of the round."""
        if not message:
            return
        if step == "identities":
            self._receive_identities(unpack_fields(message))
        elif step == "keys":
            self._receive_keys(message)
        else:
            self._receive_shares(message)

    def protect(self, vector: Tensor) -> Tensor:
        """Masked vector, shape (bytes,), uint8; once per round.

        Raises:
            InputError: If the vector cannot be encoded.
            ReplayError: If this round's masks are used up, or not agreed on.
        """
        opened, agreed = self._agreed()
        if opened.protected:
            raise ReplayError(
                f"client {self.name!r} has protected a vector in this round: the same masks would show how two differ"
            )
        check_row("vector to protect", vector)
        vector = vector.detach().cpu()
        self._backend.codec.check(vector)
        peers = list(opened.mask_keys)
        masks = Masks(
            [opened.mask_keys[peer] for peer in peers if agreed.adds(self.name, peer)]
            + [agreed.self_mask_key(opened.seed)],
            [opened.mask_keys[peer] for peer in peers if not agreed.adds(self.name, peer)],
            self._backend.dtype,
        )
        opened.protected = True  # before masking: if that fails midway, the masks are used up all the same
        opened.mask_keys.clear()
        dtype = self._backend.dtype
        message = torch.empty(HEADER_BYTES + len(vector) * dtype.itemsize, dtype=torch.uint8)
        data = message.numpy()
        numbers = (vector if vector.dtype == torch.float64 else vector.float()).numpy()
        masked = data[HEADER_BYTES:].view(dtype)
        for start in range(0, len(masked), masks.chunk):
            chunk = masked[start : start + masks.chunk]
            # two's complement: a negative integer is itself modulo the size of the ring
            self._backend.codec.round_into(numbers[start : start + masks.chunk], chunk.view(self._backend.signed_dtype))
            masks.apply(chunk)
        about = binding("vector", party(self.name), agreed.digest)
        write_header(data, self._identity.link(SERVER), about, agreed.digest, dtype)
        return message

    def answer(self, step: str, question: bytes) -> bytes:
        """Tags for the other survivors; shares, whereupon the round is forgotten.

        Raises:
            AuthenticationError: If the question was not asked by the server, in this round.
            ReplayError: If a view was confirmed before, or is not confirmed yet.
            DecodeError: If the clients named are not those who shared secrets.
            QuorumError: If too few survived, or too few confirm what this client received.
        """
        return self._confirm(question) if step == "confirm" else self._unmask(question)

    def _receive_identities(self, directory: Mapping[str, bytes]) -> None:
        if set(directory) != {SERVER, *map(party, self._roster)}:
            raise KeyCheckError(
                f"the server names identity keys of {sorted(directory)}, but the roster is {list(self._roster)}"
            )
        self._identity.pin(directory)

    def _receive_keys(self, message: bytes) -> None:
        opened = self._open()
        if opened.agreed is not None:
            raise ReplayError(f"client {self.name!r} has received the keys of this round before")
        keys = unpack_fields(
            authenticated(self._identity.link(SERVER), binding("keys", SERVER, opened.opening), message)
        )
        if keys.get(self.name) != opened.keys.public:
            raise KeyCheckError(f"the server names another round key of client {self.name!r} than it has")
        agreed = self._backend.agree(opened.opening, opened.roster, self._identity, keys)
        opened.mask_keys = {
            peer: agreed.mask_key(opened.keys, self.name, peer) for peer in agreed.neighbours(self.name)
        }
        opened.deal = self._deal(opened, agreed)
        opened.agreed = agreed

    def _deal(self, opened: _ClientRound, agreed: MaskedRound) -> bytes:
        """Shares of the own secrets, each pair sealed for the one who is to hold it."""
        holders = agreed.holders(self.name)
        points = [agreed.point(holder) for holder in holders]
        of_seed = shamir.split(opened.seed, agreed.threshold, points)
        of_key = shamir.split(opened.keys.private_bytes(), agreed.threshold, points)
        deal = {"commitment": agreed.commitment(self.name, opened.seed)}
        for holder, point in zip(holders, points, strict=True):
            if holder == self.name:
                opened.shares[holder] = of_seed[point], of_key[point]
            else:
                about = binding("shares", party(self.name), agreed.digest, party(holder))
                deal[party(holder)] = self._identity.link(party(holder)).seal(of_seed[point] + of_key[point], about)
        return authenticate(
            self._identity.link(SERVER), binding("shares", party(self.name), agreed.digest), pack_fields(deal)
        )

    def _receive_shares(self, message: bytes) -> None:
        opened = self._open()
        agreed = opened.agreed
        if agreed is None or opened.shared:
            raise ReplayError(f"client {self.name!r} has received shares of this round before, or no keys yet")
        sealed = unpack_fields(
            authenticated(self._identity.link(SERVER), binding("shares", SERVER, agreed.digest), message)
        )
        shared = tuple(name for name in agreed.clients if name in sealed)
        if len(shared) != len(sealed) or self.name not in sealed:
            raise AuthenticationError(
                f"the server relays shares of {list(sealed)}, but keys were announced by {list(agreed.clients)}"
            )
        agreed.check_left(shared, "shared secrets")
        shares: dict[str, tuple[bytes, bytes]] = {}
        for peer in agreed.neighbours(self.name):
            if peer not in sealed:
                continue
            about = binding("shares", party(peer), agreed.digest, party(self.name))
            both = self._identity.link(party(peer)).open(sealed[peer], about)
            if len(both) != 2 * shamir.SHARE_BYTES:
                raise DecodeError(f"client {peer!r} dealt {len(both)} bytes, not two shares")
            shares[peer] = both[: shamir.SHARE_BYTES], both[shamir.SHARE_BYTES :]
        opened.shares |= shares
        # nobody could remove the mask of one who vanished before its shares were dealt
        opened.mask_keys = {peer: opened.mask_keys[peer] for peer in shares}
        opened.shared = shared

    def _confirm(self, question: bytes) -> bytes:
        """Commit to one view of who shared secrets and who survived, and attest it to every other survivor."""
        opened, agreed = self._agreed()
        if not opened.protected:
            raise ReplayError(f"client {self.name!r} is asked about a sum to which it has given no vector")
        if opened.survivors:
            raise ReplayError(
                f"client {self.name!r} has confirmed who survived this round: a second list could be another"
            )
        link = self._identity.link(SERVER)
        fates = unpack_fields(authenticated(link, binding("survivors", SERVER, agreed.digest), question))
        if set(fates) != set(opened.shared) or not set(fates.values()) <= {_SURVIVED, _DROPPED}:
            raise DecodeError(f"the server must state who of {list(opened.shared)} survived, got {list(fates)}")
        if fates[self.name] != _SURVIVED:
            raise AuthenticationError(f"client {self.name!r} is asked to confirm that it vanished")
        survivors = tuple(name for name in opened.shared if fates[name] == _SURVIVED)
        agreed.check_left(survivors, "survived")
        opened.survivors = survivors
        view = agreed.view(opened.shared, survivors)
        tags = {
            peer: self._identity.link(party(peer)).tag(view, agreed.confirmation(self.name, peer))
            for peer in survivors
            if peer != self.name
        }
        return authenticate(link, binding("tags", party(self.name), agreed.digest), pack_fields(tags))

    def _unmask(self, question: bytes) -> bytes:
        """Shares of the survivors' seeds and of the round keys of those who vanished, once enough confirm who did."""
        opened, agreed = self._agreed()
        if not opened.survivors:
            raise ReplayError(f"client {self.name!r} is asked for shares before it has confirmed who survived")
        link = self._identity.link(SERVER)
        tags = unpack_fields(authenticated(link, binding("tags", SERVER, agreed.digest), question))
        view = agreed.view(opened.shared, opened.survivors)
        others = [peer for peer in opened.survivors if peer != self.name]
        confirming = [self.name, *(peer for peer in others if self._confirms(peer, tags.get(peer, b""), view, agreed))]
        agreed.check_left(confirming, f"confirm the list of survivors that client {self.name!r} received")
        shares = {
            owner: of_seed if owner in opened.survivors else of_key
            for owner, (of_seed, of_key) in opened.shares.items()
        }
        self._round = None
        return link.seal(pack_fields(shares), binding("unmask", party(self.name), agreed.digest))

    def _confirms(self, peer: str, tag: bytes, view: bytes, agreed: MaskedRound) -> bool:
        """Whether another survivor has the same view; a wrong tag is none, lest a single client stop the round."""
        try:
            self._identity.link(party(peer)).verify(view, agreed.confirmation(peer, self.name), tag)
        except AuthenticationError:
            return False
        return True

    def _open(self) -> _ClientRound:
        if self._round is None:
            raise ReplayError(f"client {self.name!r} has no open round, or has left it: call open_round first")
        return self._round

    def _agreed(self) -> tuple[_ClientRound, MaskedRound]:
        opened = self._open()
        if opened.agreed is None or not opened.shared:
            raise ReplayError(
                f"client {self.name!r} has not received everything that opens the round: run its steps "
                f"{list(self._backend.opening)} first; a client that the server left out takes no part"
            )
        return opened, opened.agreed


@dataclass
class _ServerRound:
    """What the server knows of the round that is open."""

    opening: bytes
    """Digest of the round and its clients: what messages are bound to before round keys are known."""
    roster: tuple[str, ...]
    agreed: MaskedRound | None = None
    commitments: dict[str, bytes] = field(default_factory=dict)
    """Of those who shared secrets, in roster order."""
    survivors: tuple[str, ...] = ()
    added: dict[str, int] = field(default_factory=dict)
    """Lengths of vectors that were added one by one."""
    sum: NDArray[Any] | None = None
    """Of these."""
    total: NDArray[Any] | None = None
    confirming: tuple[str, ...] = ()
    """Survivors who are asked for shares."""


@final
class MaskingServer(AggregationServer):
    """Relays keys and sealed shares, adds masked vectors, and removes the masks of the sum.

    Args:
        backend: What the parties have agreed on beforehand.
    """

    on_grid = True

    def __init__(self, backend: PairwiseMasking) -> None:
        self._backend = backend
        self._identity = Identity(SERVER)
        self._roster: tuple[str, ...] = ()
        self._round: _ServerRound | None = None

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment; keys pinned earlier stay pinned."""
        self._roster = tuple(roster)
        self._round = None

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``; raises as `MaskingClient.open_round`."""
        self._round = None
        self._backend.check_round(len(clients))
        for name in clients:
            self._identity.public_of(party(name))
        self._round = _ServerRound(round_digest(round_id, clients), tuple(clients))

    def relay(self, step: str, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        """Identity keys, round keys, or sealed shares of those who sent something, to each of them.

        Raises:
            QuorumError: If too few sent something; in enrolment, if anybody did not.
        """
        messages = {name: message for name, message in sent.items() if message}
        if step == "identities":
            return self._relay_identities(messages)
        return self._relay_keys(messages) if step == "keys" else self._relay_shares(messages)

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        """Masked total, which `conclude` changes in place; who is not among the messages has vanished.

        Raises:
            QuorumError: If too few survived; nothing is added.
            ReplayError: If a vector was made for another round, or the vectors come a second time.
            AuthenticationError: If a vector was not made by its sender, or was changed.
            DecodeError: If it is none, or longer or shorter than the others.
        """
        opened, agreed = self._agreed()
        self._check_first(opened)
        return self._taken(opened, self._add_vectors(self._check_vectors(messages, opened, agreed)), messages)

    @staticmethod
    def _check_first(opened: _ServerRound) -> None:
        if opened.total is not None:
            raise ReplayError("the vectors of this round have been added: these come too late, or twice")

    def _taken(self, opened: _ServerRound, total: NDArray[Any], survivors: Collection[str]) -> Tensor:
        opened.total, opened.sum = total, None
        opened.survivors = tuple(name for name in opened.commitments if name in survivors)
        return torch.from_numpy(total.view(self._backend.signed_dtype))

    def add(self, name: str, message: Tensor) -> None:
        """Add one vector, of which nothing is kept; raises as `aggregate`."""
        opened, agreed = self._agreed()
        self._check_first(opened)
        if name in opened.added:
            raise ReplayError(f"client {name!r} has sent its vector of this round already")
        self._check_known([name], opened)
        numbers = self._numbers(name, message, agreed)
        check_equally_long({**opened.added, name: len(numbers)})
        opened.added[name] = len(numbers)
        if opened.sum is None:
            opened.sum = numbers.copy()
        else:
            opened.sum += numbers

    def total(self) -> Tensor:
        """Masked total of the vectors that were added; raises as `aggregate`."""
        opened, agreed = self._agreed()
        self._check_first(opened)
        agreed.check_left(opened.added, "survived")
        total = opened.sum
        if total is None:
            raise QuorumError("there is no vector to add")
        return self._taken(opened, total, opened.added)

    def ask(self, step: str, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        """Each survivor, to confirm who survived; each one who did, for shares, with the others' tags for it.

        Raises:
            QuorumError: If too few confirmed.
            AuthenticationError: If an answer was not made by its sender, or who answers was not asked.
            DecodeError: If somebody has not confirmed to all others.
        """
        return self._ask_to_confirm() if step == "confirm" else self._ask_for_shares(answers)

    def conclude(self, answers: Mapping[str, bytes]) -> Tensor:
        """Total without masks, shape (n,), signed integers of the ring's size; then the round is forgotten.

        Raises:
            QuorumError: If a secret lacks shares: too few survivors answered.
            AuthenticationError: If an answer was not made by its sender, or holds a wrong share.
        """
        opened, agreed, total = self._added()
        shares = self._open_answers(answers, opened, agreed)
        dropped = [name for name in opened.commitments if name not in opened.survivors]
        seeds = {name: self._restore_seed(name, shares[name], opened, agreed) for name in opened.survivors}
        round_keys = {name: self._restore_keys(name, shares[name], agreed) for name in dropped}
        added = [agreed.self_mask_key(seed) for seed in seeds.values()]
        subtracted: list[bytes] = []
        for name, keys in round_keys.items():
            for peer in agreed.neighbours(name):
                if peer in seeds:
                    key = agreed.mask_key(keys, name, peer)
                    (added if agreed.adds(peer, name) else subtracted).append(key)
        masks = Masks(subtracted, added, self._backend.dtype)
        self._round = None  # from here on the total changes: a second try would start from half of one
        for start in range(0, len(total), masks.chunk):
            masks.apply(total[start : start + masks.chunk])
        return torch.from_numpy(total.view(self._backend.signed_dtype))

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        """Reals of the total that `conclude` gave."""
        return self._backend.codec.decode(total)

    def _relay_identities(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        missing = [name for name in self._roster if name not in messages]
        strangers = [name for name in messages if name not in self._roster]
        if missing or strangers:
            raise QuorumError(
                f"clients {missing} did not enrol and {strangers} did, but the roster is {list(self._roster)}"
            )
        self._identity.pin({party(name): messages[name] for name in self._roster})
        directory = pack_fields({SERVER: self._identity.public, **{party(n): messages[n] for n in self._roster}})
        return dict.fromkeys(self._roster, directory)

    def _relay_keys(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        opened = self._open()
        if opened.agreed is not None:
            raise ReplayError("the keys of this round have been relayed")
        keys = self._bodies("keys", messages, opened.roster, opened.opening)
        for name, key in keys.items():
            self._identity.check_strong(key, name)
        opened.agreed = self._backend.agree(opened.opening, opened.roster, self._identity, keys)
        about = binding("keys", SERVER, opened.opening)
        return {name: authenticate(self._identity.link(party(name)), about, pack_fields(keys)) for name in keys}

    def _relay_shares(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        opened = self._open()
        agreed = opened.agreed
        if agreed is None or opened.commitments:
            raise ReplayError("the shares of this round have been relayed, or no keys yet")
        deals = {
            name: unpack_fields(body)
            for name, body in self._bodies("shares", messages, agreed.clients, agreed.digest).items()
        }
        agreed.check_left(deals, "shared secrets")
        commitments = {name: frames.field(deal, "commitment", 32) for name, deal in deals.items()}
        relayed: dict[str, bytes] = {}
        about = binding("shares", SERVER, agreed.digest)
        for name in deals:
            neighbours = set(agreed.neighbours(name))
            sealed = {
                owner: frames.field(deal, party(name)) if owner in neighbours else b"" for owner, deal in deals.items()
            }
            relayed[name] = authenticate(self._identity.link(party(name)), about, pack_fields(sealed))
        opened.commitments = commitments
        return relayed

    def _bodies(
        self, step: str, messages: Mapping[str, bytes], clients: Sequence[str], bound_to: bytes
    ) -> dict[str, bytes]:
        """What ``clients`` sent in a step, in their order, once the tags have been checked."""
        strangers = [name for name in messages if name not in clients]
        if strangers:
            raise AuthenticationError(f"{strangers} sent {step}, but the round is among {list(clients)}")
        return {
            name: authenticated(self._identity.link(party(name)), binding(step, party(name), bound_to), messages[name])
            for name in clients
            if name in messages
        }

    def _check_vectors(
        self, messages: Mapping[str, Tensor], opened: _ServerRound, agreed: MaskedRound
    ) -> list[NDArray[Any]]:
        """Masked numbers of each vector, in its message's memory, once tags and lengths have been checked."""
        self._check_known(messages, opened)
        agreed.check_left(messages, "survived")
        vectors = [self._numbers(name, message, agreed) for name, message in messages.items()]
        lengths = {name: len(vector) for name, vector in zip(messages, vectors, strict=True)}
        check_equally_long(lengths)
        return vectors

    @staticmethod
    def _check_known(names: Iterable[str], opened: _ServerRound) -> None:
        strangers = [name for name in names if name not in opened.commitments]
        if strangers:
            raise AuthenticationError(
                f"vectors of {strangers}, who are not among those who shared secrets, {list(opened.commitments)}"
            )

    @staticmethod
    def _add_vectors(vectors: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Their sum in the ring."""
        total = vectors[0].copy()
        for vector in vectors[1:]:
            total += vector
        return total

    def _numbers(self, name: str, message: Tensor, agreed: MaskedRound) -> NDArray[Any]:
        """Masked numbers of one vector, in the message's memory."""
        if message.dtype != torch.uint8 or message.dim() != 1:
            raise DecodeError(f"a masked vector is a row of bytes, got {tuple(message.shape)} of {message.dtype}")
        data = message.cpu().contiguous().numpy()
        bound_to, numbers = read_header(data, self._backend.dtype)
        if bound_to != agreed.digest:
            raise ReplayError(f"the vector of client {name!r} was made for another round, roster or keys")
        check_tag(data, self._identity.link(party(name)), binding("vector", party(name), agreed.digest))
        return numbers

    def _ask_to_confirm(self) -> dict[str, bytes]:
        opened, agreed, _ = self._added()
        fates = pack_fields({name: _SURVIVED if name in opened.survivors else _DROPPED for name in opened.commitments})
        about = binding("survivors", SERVER, agreed.digest)
        return {name: authenticate(self._identity.link(party(name)), about, fates) for name in opened.survivors}

    def _ask_for_shares(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        opened, agreed, _ = self._added()
        messages = {name: answer for name, answer in answers.items() if answer}
        bodies = self._bodies("tags", messages, opened.survivors, agreed.digest)
        agreed.check_left(bodies, "confirmed who survived")
        tags = {name: unpack_fields(body) for name, body in bodies.items()}
        about = binding("tags", SERVER, agreed.digest)
        asked: dict[str, bytes] = {}
        for name in tags:
            to_name = {peer: frames.field(given, name, TAG_BYTES) for peer, given in tags.items() if peer != name}
            asked[name] = authenticate(self._identity.link(party(name)), about, pack_fields(to_name))
        opened.confirming = tuple(asked)
        return asked

    def _open_answers(
        self, answers: Mapping[str, bytes], opened: _ServerRound, agreed: MaskedRound
    ) -> dict[str, dict[int, bytes]]:
        """Shares of each client's secret by the points of their holders."""
        shares: dict[str, dict[int, bytes]] = {name: {} for name in opened.commitments}
        for name, answer in answers.items():
            if name not in opened.confirming:
                raise AuthenticationError(f"client {name!r} answers, but was not asked")
            if not answer:
                continue
            about = binding("unmask", party(name), agreed.digest)
            held = unpack_fields(self._identity.link(party(name)).open(answer, about))
            expected = [owner for owner in agreed.holders(name) if owner in shares]
            if set(held) != set(expected):
                raise DecodeError(f"client {name!r} must answer with shares of {expected}, got {list(held)}")
            for owner, share in held.items():
                shares[owner][agreed.point(name)] = share
        return shares

    def _restore_seed(self, name: str, shares: Mapping[int, bytes], opened: _ServerRound, agreed: MaskedRound) -> bytes:
        seed = shamir.combine(shares, agreed.threshold)
        if agreed.commitment(name, seed) != opened.commitments[name]:
            raise AuthenticationError(
                f"the shares of the seed of client {name!r} do not fit: a client gave a wrong one"
            )
        return seed

    def _restore_keys(self, name: str, shares: Mapping[int, bytes], agreed: MaskedRound) -> KeyPair:
        keys = KeyPair(shamir.combine(shares, agreed.threshold))
        if keys.public != agreed.keys[name]:
            raise AuthenticationError(f"the shares of the key of client {name!r} do not fit: a client gave a wrong one")
        return keys

    def _open(self) -> _ServerRound:
        if self._round is None:
            raise ReplayError("no round is open, or its total has been unmasked: call open_round first")
        return self._round

    def _agreed(self) -> tuple[_ServerRound, MaskedRound]:
        opened = self._open()
        if opened.agreed is None or not opened.commitments:
            raise ReplayError(f"the round is not open yet: relay its steps {list(self._backend.opening)} first")
        return opened, opened.agreed

    def _added(self) -> tuple[_ServerRound, MaskedRound, NDArray[Any]]:
        opened, agreed = self._agreed()
        if opened.total is None:
            raise ReplayError("no vectors of this round have been added yet: call aggregate first")
        return opened, agreed, opened.total
