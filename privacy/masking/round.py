"""The agreed round of masked sums: its messages, keys, neighbours, keys of masks, and the masks."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedlit.checks import check_at_least
from fedlit.privacy.errors import DecodeError, KeyCheckError, QuorumError
from fedlit.privacy.links import KEY_BYTES, TAG_BYTES, Identity, KeyPair, Link, check_members, derive, digest
from fedlit.privacy.masking.graph import drawn_in

SERVER = "server"

_HEADER = struct.Struct("<32sIQ")  # digest of the round, bits of the ring, numbers in the vector
HEADER_BYTES = TAG_BYTES + _HEADER.size
"""Before the numbers of a masked vector; a multiple of 8, so that they are aligned."""

SURVIVED, DROPPED = b"survived", b"dropped"
"""Fates of clients, as the server reports them."""

_CHUNK_BYTES = 2**17
_ZEROS = bytes(_CHUNK_BYTES)


@final
class MaskedRound:
    """The terms that all parties of one round share, once round keys are announced; holds no secret.

    Everything made in the round is bound to its `digest`, which covers the round, the clients, all their keys and draws
    of neighbours (`fedlit.privacy.masking.graph`), the settings of the backend and the terms of the sum. So parties
    that received different ones cannot open each other's messages, and their masks do not cancel. Shares are bound to
    the digest without the terms (`agreement`) and contain these, so that an error can name what differs.

    Raises a `QuorumError` if too few clients announced a key, an `AuthenticationError` if one is not in the roster, a
    `KeyCheckError` if two announced the same one, or a key is malformed, a `DecodeError` if a draw is.
    """

    def __init__(
        self,
        opening: bytes,  # digest of the round that was opened, and its clients
        roster: Sequence[str],
        identities: Mapping[str, bytes],  # of every party
        announced: Mapping[str, bytes],  # round key and draw of neighbours
        threshold: int,  # shares that restore a secret
        quorum: int,  # clients that must confirm who survived, more than half
        degree: int,  # neighbours that each client draws
        ring: int,  # bits of a masked number
        settings: Sequence[object],  # of the backend, that parties must share
        terms: bytes,  # digest of the terms of the sum
    ) -> None:
        check_members(announced, roster, "announce keys")
        self.clients = tuple(name for name in roster if name in announced)
        self.keys = {name: announced[name][:KEY_BYTES] for name in self.clients}
        if len(set(self.keys.values())) < len(self.keys) or any(len(key) != KEY_BYTES for key in self.keys.values()):
            raise KeyCheckError(f"round keys must differ and have {KEY_BYTES} bytes: a client copied another's")
        self.threshold = threshold
        self.quorum = quorum
        self.dtype = np.dtype(f"<u{ring // 8}")
        self.signed_dtype = np.dtype(f"<i{ring // 8}")  # the ring read as from -2^(bits-1) to 2^(bits-1)
        known = [[name, identities[party(name)], announced[name]] for name in self.clients]
        self.agreement = digest(
            "masked round", opening, identities[SERVER], known, threshold, quorum, degree, [ring, *settings]
        )
        self.digest = digest("terms of a masked round", self.agreement, terms)
        self._points = {name: position for position, name in enumerate(self.clients, 1)}
        self.complete = degree >= len(roster) - 1
        drawn = {name: drawn_in(announced[name][KEY_BYTES:], roster, name, degree) for name in self.clients}
        self._drawn = {name: tuple(peer for peer in peers if peer in self.keys) for name, peers in drawn.items()}
        self._drawing: dict[str, list[str]] = {name: [] for name in self.clients}
        for name, peers in self._drawn.items():
            for peer in peers:
                self._drawing[peer].append(name)
        self._neighbours: dict[str, tuple[str, ...]] = {}  # as far as they were asked for
        self.check_left(self.clients, "announced a round key")

    def point(self, client: str) -> int:
        """Argument of the polynomials of secrets at which a client's share is their value."""
        return self._points[client]

    def neighbours(self, client: str) -> tuple[str, ...]:
        """Clients with which one shares masks, as one of the two has drawn the other, in roster order."""
        if client not in self._neighbours:
            both = {*self._drawn[client], *self._drawing[client]}
            self._neighbours[client] = tuple(sorted(both, key=self._points.__getitem__))
        return self._neighbours[client]

    def holders(self, client: str) -> tuple[str, ...]:
        """Clients that get a share of one's secrets: those that it has drawn, and itself."""
        return (*self._drawn[client], client)

    def owners(self, holder: str) -> tuple[str, ...]:
        """Clients of whose secrets one gets a share: those that have drawn it, and itself."""
        return (*self._drawing[holder], holder)

    def witnesses(self, client: str, shared: Collection[str]) -> tuple[str, ...]:
        """Holders of one's shares that release that of its seed only if it has masked with those whom they know."""
        # in a complete graph, the confirmations of the holders themselves suffice
        return () if self.complete else tuple(peer for peer in self._drawn[client] if peer in shared)

    def adds(self, client: str, neighbour: str) -> bool:
        """Whether ``client`` adds the mask that it shares with a neighbour; the other one subtracts it."""
        return self._points[client] < self._points[neighbour]

    def mask_key(self, keys: KeyPair, client: str, neighbour: str) -> bytes:
        """Key of the mask that ``client``, whose round key is ``keys``, shares with a neighbour."""
        return derive(
            keys.agree(self.keys[neighbour], neighbour), "pairwise mask", self.digest, *sorted((client, neighbour))
        )

    def self_mask_key(self, seed: bytes) -> bytes:
        """Key of a client's own mask."""
        return derive(seed, "self mask", self.digest)

    def commitment(self, client: str, seed: bytes) -> bytes:
        """Published with the shares of a client's seed, to check what they restore."""
        return digest("seed of a self mask", self.digest, client, seed)

    def view(self, shared: Sequence[str], survivors: Sequence[str]) -> bytes:
        """Digest of a client's view of the round: who shared secrets, and who of them survived."""
        return digest("view of a round", self.digest, list(shared), list(survivors))

    def masked_with(self, client: str, witness: str) -> bytes:
        """Binding of a tag on a view of who shared secrets, made by a client that has masked with these."""
        return binding("masked", party(client), self.digest, party(witness))

    def confirmation(self, sender: str, recipient: str) -> bytes:
        """Binding of a tag on the `view` of ``sender``, made for ``recipient``."""
        return binding("confirm", party(sender), self.digest, party(recipient))

    def check_left(self, left: Collection[str], what: str) -> None:
        """Raise a `QuorumError` unless the clients ``left`` are enough for a sum, and to restore every secret."""
        if len(left) < self.quorum:
            raise QuorumError(f"only {len(left)} clients {what}, {sorted(left)}, but at least {self.quorum} must")
        left = set(left)
        for client in self.clients:
            holders = len(left.intersection(self.holders(client)))
            if holders < self.threshold:
                raise QuorumError(
                    f"only {holders} of the clients that hold shares of {client!r} {what}, {self.threshold} must"
                )


@final
class Masks:
    """Keystreams (AES-256 in counter mode) to add to and subtract from a vector, from its front to its back.

    Keys have 32 bytes, and each is used for one vector only, which is why counters start at 0.
    """

    def __init__(self, added: Sequence[bytes], subtracted: Sequence[bytes], dtype: np.dtype[Any]) -> None:
        self.chunk = _CHUNK_BYTES // dtype.itemsize
        self._streams = [
            (Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor(), combine)
            for keys, combine in ((added, np.add), (subtracted, np.subtract))
            for key in keys
        ]
        self._keystream = np.empty(_CHUNK_BYTES, np.uint8)

    def apply(self, numbers: NDArray[Any]) -> None:
        """Mask the next numbers, at most `chunk` of them, in place.

        Chunk by chunk all keystreams go through the same small buffer: one as long as the vector would leave the
        cache, and its fresh pages alone cost more than the encryption.
        """
        keystream = self._keystream[: numbers.nbytes]
        zeros = memoryview(_ZEROS)[: numbers.nbytes]
        for encryptor, combine in self._streams:
            encryptor.update_into(zeros, keystream.data)
            combine(numbers, keystream.view(numbers.dtype), out=numbers)


def party(client: str) -> str:
    """Name of a client among parties, so that a client may be called "server"."""
    return f"client {client}"


def binding(step: str, sender: str, bound_to: bytes, recipient: str = "") -> bytes:
    """Binding of one message; the recipient is named if a client sends to a client."""
    return digest("masking", step, sender, recipient, bound_to)


def authenticate(link: Link, about: bytes, body: bytes) -> bytes:
    """A message with its tag in front."""
    return link.tag(body, about) + body


def authenticated(link: Link, about: bytes, message: bytes) -> bytes:
    """Body of a message, once its tag has been checked; raises an `AuthenticationError` if it fails."""
    body = message[TAG_BYTES:]
    link.verify(body, about, message[:TAG_BYTES])
    return body


def write(identity: Identity, recipient: str, step: str, bound_to: bytes, body: bytes) -> bytes:
    """Tagged message of the owner of ``identity`` in one step."""
    return authenticate(identity.link(recipient), binding(step, identity.owner, bound_to), body)


def read(identity: Identity, sender: str, step: str, bound_to: bytes, message: bytes) -> bytes:
    """Body of what ``sender`` made with `write`, or an `AuthenticationError`."""
    return authenticated(identity.link(sender), binding(step, sender, bound_to), message)


def write_header(
    message: NDArray[np.uint8], link: Link, about: bytes, bound_to: bytes, dtype: np.dtype[Any], after: int = 0
) -> None:
    """Fill in what stands before the numbers of a masked vector, which ``after`` bytes follow: its tag, what it is."""
    length = (len(message) - HEADER_BYTES - after) // dtype.itemsize
    _HEADER.pack_into(message.data, TAG_BYTES, bound_to, 8 * dtype.itemsize, length)
    message[:TAG_BYTES] = np.frombuffer(link.tag(message.data[TAG_BYTES:], about), np.uint8)


def read_header(message: NDArray[np.uint8], dtype: np.dtype[Any], after: int = 0) -> tuple[bytes, NDArray[Any]]:
    """Digest of the round and numbers of a masked vector, not copied, which ``after`` bytes follow.

    Its tag is checked by `check_tag`.

    Raises a `DecodeError` if it is no such message.
    """
    check_at_least("bytes of a masked vector", len(message), HEADER_BYTES, error=DecodeError)
    bound_to, bits, length = _HEADER.unpack_from(message.data, TAG_BYTES)
    if bits != 8 * dtype.itemsize or len(message) != HEADER_BYTES + length * dtype.itemsize + after:
        raise DecodeError(
            f"a masked vector announces {length} numbers of {bits} bits, but has {len(message)} bytes and the ring "
            f"{8 * dtype.itemsize} bits"
        )
    return bound_to, message[HEADER_BYTES : len(message) - after].view(dtype)


def check_tag(message: NDArray[np.uint8], link: Link, about: bytes) -> None:
    """Raise an `AuthenticationError` unless a masked vector was made by the other end of ``link``."""
    link.verify(message.data[TAG_BYTES:], about, bytes(message.data[:TAG_BYTES]))
