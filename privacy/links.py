"""Links between two parties: identities, X25519 key agreement, HKDF, AES-GCM over what crosses, and small messages.

Every key is bound to who talks to whom and to what about, so that a message made for one use opens in no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedlit.checks import check
from fedlit.privacy.errors import AuthenticationError, DecodeError, KeyCheckError, PrivacyError, RangeError

if TYPE_CHECKING:
    from fedlit.privacy.base import RoundId

KEY_BYTES = 32
_NONCE_BYTES = 12
_MAC_BYTES = 16
TAG_BYTES = _NONCE_BYTES + _MAC_BYTES
"""Bytes of `Link.tag`, and by how much `Link.seal` makes a message longer."""

_COUNT = struct.Struct("<I")
_FIELD = struct.Struct("<HI")  # length of the name, length of the value

_PIECE_BYTES = 1 << 30
"""Of a message at a time: OpenSSL counts bytes with 31 bits, and at more `cryptography` ends the program."""

Buffer: TypeAlias = bytes | bytearray | memoryview


def digest(*parts: object) -> bytes:
    """SHA-256 over strings, numbers, bytes and lists of them, such that different parts never give equal input."""
    return hashlib.sha256(json.dumps(parts, default=_plain, separators=(",", ":")).encode()).digest()


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    raise TypeError(f"cannot hash a {type(value).__name__}")


def round_digest(round_id: RoundId, clients: Sequence[str], *more: object) -> bytes:
    """Binding of everything made in one round: the round, its roster, and ``more`` (the keys announced)."""
    return digest("fedlit round", round_id.round_idx, round_id.channel, round_id.call, list(clients), [list(more)])


def derive(secret: bytes, *about: object, length: int = KEY_BYTES) -> bytes:
    """Key of ``length`` bytes from a shared secret (HKDF-SHA256, RFC 5869), for one use named by ``about``."""
    return HKDF(SHA256(), length, salt=None, info=digest("fedlit key", *about)).derive(secret)


def check_members(
    names: Iterable[str], clients: Collection[str], what: str, error: type[PrivacyError] = AuthenticationError
) -> None:
    """Raise ``error`` if one of ``names``, which are about to do ``what``, is not one of ``clients``."""
    strangers = [name for name in names if name not in clients]
    if strangers:
        raise error(f"clients {strangers} cannot {what}: they are not in {list(clients)}")


def check_stated(keys: Mapping[str, bytes], stated: Mapping[str, bytes] | None) -> None:
    """Raise a `KeyCheckError` if clients have stated other identity keys; ``None`` states none."""
    for client, key in () if stated is None else keys.items():
        if stated is not None and stated.get(client) != key:
            raise KeyCheckError(f"the identity key of client {client!r} is not the one that it has stated: refuse it")


@final
class KeyPair:
    """An X25519 key pair of one party, fresh from the operating system; its private half never leaves the object."""

    def __init__(self, private: bytes | None = None) -> None:
        self._private = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        self.public = self._private.public_key().public_bytes_raw()

    def private_bytes(self) -> bytes:
        """The private half, to be cut into shares; whoever has it can act as its owner."""
        return self._private.private_bytes_raw()

    def agree(self, public: bytes, owner: str) -> bytes:
        """Secret of 32 bytes shared with the ``owner`` of a public key.

        Raises a `KeyCheckError` if the key is none, or one of low order, with which anybody could guess the secret.
        """
        valid = len(public) == KEY_BYTES
        check(valid, f"public key of {owner!r}", f"of {KEY_BYTES} bytes", len(public), error=KeyCheckError)
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise KeyCheckError(f"public key of {owner!r} is of low order: refuse this client") from error

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.hex()[:16]}...)"


@final
class Link:
    """Encrypts or authenticates messages under one 32-byte key that both ends know; errors name the other, ``peer``."""

    def __init__(self, key: bytes, peer: str) -> None:
        self._cipher = AESGCM(key)
        self._block = algorithms.AES256(key)
        self.peer = peer

    def seal(self, message: Buffer, about: bytes) -> bytes:
        """Encrypt ``message``, bound to ``about``; 28 bytes longer."""
        nonce = os.urandom(_NONCE_BYTES)
        if len(message) <= _PIECE_BYTES:
            return nonce + self._cipher.encrypt(nonce, message, about)
        cipher = Cipher(self._block, modes.GCM(nonce)).encryptor()
        cipher.authenticate_additional_data(about)
        pieces = [cipher.update(piece) for piece in _pieces(message)]
        return b"".join([nonce, *pieces, cipher.finalize(), cipher.tag])

    def open(self, sealed: Buffer, about: bytes) -> bytes:
        """Inverse of `seal`; raises an `AuthenticationError` at another key, another ``about``, or a change."""
        try:
            nonce = bytes(sealed[:_NONCE_BYTES])
            if len(sealed) <= _PIECE_BYTES:
                return self._cipher.decrypt(nonce, sealed[_NONCE_BYTES:], about)
            cipher = Cipher(self._block, modes.GCM(nonce, bytes(sealed[-_MAC_BYTES:]))).decryptor()
            cipher.authenticate_additional_data(about)
            pieces = [cipher.update(piece) for piece in _pieces(memoryview(sealed)[_NONCE_BYTES:-_MAC_BYTES])]
            return b"".join([*pieces, cipher.finalize()])
        except (InvalidTag, ValueError) as error:
            raise AuthenticationError(
                f"a message encrypted for {self.peer!r} does not open: it was changed, made for another round or "
                "roster, or its sender holds another key"
            ) from error

    def tag(self, message: Buffer, about: bytes) -> bytes:
        """Authenticate ``message`` without hiding it: 28 bytes (nonce and AES-GMAC tag) to send along."""
        nonce = os.urandom(_NONCE_BYTES)
        mac = Cipher(self._block, modes.GCM(nonce)).encryptor()
        mac.authenticate_additional_data(hashlib.sha256(about).digest())
        for piece in _pieces(message):  # in place: joined, a long vector would be copied
            mac.authenticate_additional_data(piece)
        mac.finalize()
        return nonce + mac.tag

    def verify(self, message: Buffer, about: bytes, tag: bytes) -> None:
        """Raise an `AuthenticationError` unless ``tag`` was made by `tag` for this message."""
        try:
            nonce, mac_tag = tag[:_NONCE_BYTES], tag[_NONCE_BYTES:]
            mac = Cipher(self._block, modes.GCM(nonce, mac_tag, min_tag_length=_MAC_BYTES)).decryptor()
            mac.authenticate_additional_data(hashlib.sha256(about).digest())
            for piece in _pieces(message):
                mac.authenticate_additional_data(piece)
            mac.finalize()
        except (InvalidTag, ValueError) as error:
            raise AuthenticationError(
                f"a message of {self.peer!r} fails its check: it was changed, made for another round, or made by "
                "somebody else"
            ) from error


def _pieces(message: Buffer) -> Iterator[memoryview]:
    """Parts of a message, in its memory."""
    view = memoryview(message)
    return (view[first : first + _PIECE_BYTES] for first in range(0, len(view), _PIECE_BYTES))


@final
class Identity:
    """One party's long-term key, fresh unless given, and those of the others, which are pinned when first seen."""

    def __init__(self, owner: str, keys: KeyPair | None = None) -> None:
        self.owner = owner
        self._keys = KeyPair() if keys is None else keys
        self._publics: dict[str, bytes] = {owner: self.public}
        # two encodings of one key agree on the same secret, so secrets show what bytes would not
        self._owners: dict[bytes, str] = {self._keys.agree(self.public, owner): owner}
        self._links: dict[str, Link] = {}

    @property
    def public(self) -> bytes:
        """Public half of the owner's key."""
        return self._keys.public

    def pin(self, publics: Mapping[str, bytes]) -> None:
        """Take in the directory ``{party: public key}``.

        Raises a `KeyCheckError` if a key is weak, another one than its owner had before, or the key of two parties.
        """
        owners = dict(self._owners)
        links: dict[str, Link] = {}
        for peer, public in publics.items():
            if self._publics.get(peer, public) != public:
                raise KeyCheckError(f"the identity key of {peer!r} is not the one that {self.owner!r} knows")
            if peer == self.owner:
                continue
            secret = self._keys.agree(public, peer)
            if owners.setdefault(secret, peer) != peer:
                raise KeyCheckError(f"{owners[secret]!r} and {peer!r} have the same identity key: refuse them")
            links[peer] = Link(derive(secret, "identities", *sorted((self.owner, peer))), peer)
        self._publics.update(publics)
        self._owners = owners
        self._links.update(links)

    def public_of(self, peer: str) -> bytes:
        """Pinned key of a party."""
        if peer not in self._publics:
            raise KeyCheckError(f"{self.owner!r} knows no identity key of {peer!r}: run the enrolment steps first")
        return self._publics[peer]

    def link(self, peer: str) -> Link:
        """Authentic, private link to a party."""
        self.public_of(peer)
        return self._links[peer]

    def check_strong(self, public: bytes, owner: str) -> None:
        """Raise a `KeyCheckError` if a public key is malformed or of low order."""
        self._keys.agree(public, owner)

    def __repr__(self) -> str:
        return f"Identity(owner={self.owner!r})"


def pack_fields(fields: Mapping[str, bytes]) -> bytes:
    """Named values as one message, in their order; nothing in it is pickled."""
    parts = [_COUNT.pack(len(fields))]
    for name, value in fields.items():
        key = name.encode()
        check(len(value) < 2**32, f"bytes of {name!r}", "below 2^32 in a message", len(value), error=RangeError)
        parts += [_FIELD.pack(len(key), len(value)), key, value]
    return b"".join(parts)


def unpack_fields(message: bytes) -> dict[str, bytes]:
    """Inverse of `pack_fields`; raises a `DecodeError` at anything else: truncated, longer, with a name twice."""
    view = memoryview(message)
    fields: dict[str, bytes] = {}
    try:
        (count,) = _COUNT.unpack_from(view)
        position = _COUNT.size
        for _ in range(count):
            key, value = _FIELD.unpack_from(view, position)
            position += _FIELD.size
            if position + key + value > len(view):
                raise ValueError("a field is longer than the message")
            name = bytes(view[position : position + key]).decode()
            if name in fields:
                raise ValueError(f"field {name!r} comes twice")
            fields[name] = bytes(view[position + key : position + key + value])
            position += key + value
        if position != len(view):
            raise ValueError(f"{len(view) - position} bytes too many")
    except (ValueError, struct.error) as error:
        raise DecodeError(f"message of {len(message)} bytes is not a list of named fields: {error}") from error
    return fields


def field_of(fields: Mapping[str, bytes], name: str, size: int | None = None) -> bytes:
    """One field of an unpacked message; raises a `DecodeError` if it is missing, or not of ``size`` bytes."""
    check(name in fields, f"field {name!r}", "in the message", [*fields], error=DecodeError)
    valid = size is None or len(fields[name]) == size
    check(valid, f"field {name!r}", f"of {size} bytes", len(fields[name]), error=DecodeError)
    return fields[name]
