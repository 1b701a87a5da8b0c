"""Messages of masked rounds: whom they are from, what their tags cover, and the bytes of a masked vector."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlit.privacy.errors import DecodeError
from fedlit.privacy.links import TAG_BYTES, Identity, Link, digest

SERVER = "server"

_HEADER = struct.Struct("<32sIQ")  # digest of the round, bits of the ring, numbers in the vector
HEADER_BYTES = TAG_BYTES + _HEADER.size
"""Before the numbers of a masked vector; a multiple of 8, so that they are aligned."""


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


def write_header(message: NDArray[np.uint8], link: Link, about: bytes, bound_to: bytes, dtype: np.dtype[Any]) -> None:
    """Fill in what stands before the numbers of a masked vector: its tag, and what it is."""
    length = (len(message) - HEADER_BYTES) // dtype.itemsize
    _HEADER.pack_into(message.data, TAG_BYTES, bound_to, 8 * dtype.itemsize, length)
    message[:TAG_BYTES] = np.frombuffer(link.tag(message.data[TAG_BYTES:], about), np.uint8)


def read_header(message: NDArray[np.uint8], dtype: np.dtype[Any]) -> tuple[bytes, NDArray[Any]]:
    """Digest of the round and numbers of a masked vector, not copied; its tag is checked by `check_tag`.

    Raises a `DecodeError` if it is no such message.
    """
    if len(message) < HEADER_BYTES:
        raise DecodeError(f"a masked vector has at least {HEADER_BYTES} bytes, got {len(message)}")
    bound_to, bits, length = _HEADER.unpack_from(message.data, TAG_BYTES)
    if bits != 8 * dtype.itemsize or len(message) != HEADER_BYTES + length * dtype.itemsize:
        raise DecodeError(
            f"a masked vector announces {length} numbers of {bits} bits, but has {len(message)} bytes and the ring "
            f"{8 * dtype.itemsize} bits"
        )
    return bound_to, message[HEADER_BYTES:].view(dtype)


def check_tag(message: NDArray[np.uint8], link: Link, about: bytes) -> None:
    """Raise an `AuthenticationError` unless a masked vector was made by the other end of ``link``."""
    link.verify(message.data[TAG_BYTES:], about, bytes(message.data[:TAG_BYTES]))
