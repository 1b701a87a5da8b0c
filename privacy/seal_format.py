"""Bytes of SEAL's objects, read before SEAL reads them: some that it is given end the process, which nothing can catch.

Every object begins with a header that states how the rest is compressed and how long it is, and contains objects with
headers of their own, which SEAL believes: one that announces 2^38 bytes, or another compression than was used, makes it
abort. So whatever comes from others is decompressed here, up to the length that it may have, and each header in it has
to be the one that this version of SEAL writes for an object of its type and size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_HEADER: Final = struct.Struct("<HBBBBHQ")  # magic, bytes of the header, version, compression, reserved, bytes in all
_MAGIC: Final = 0xA15E
_VERSION: Final = 4
_PLAIN, _ZSTANDARD = 0, 2
_WORD: Final = struct.Struct("<Q")
_CIPHERTEXT: Final = struct.Struct(
    "<32sBQQQdQ"
)  # parameters' hash, form, polynomials, degree, primes, scale, correction
_PLAINTEXT: Final = struct.Struct("<32sQd")  # parameters' hash, coefficients, scale
_KEYS: Final = struct.Struct("<32sQ")  # parameters' hash, rotations


@dataclass
class _Reader:
    """Goes through decompressed bytes, and raises a `ValueError` where they are not what they should be."""

    data: bytes
    at: int = 0

    def take(self, layout: struct.Struct) -> tuple[object, ...]:
        if self.at + layout.size > len(self.data):
            raise ValueError(f"{len(self.data)} bytes end within an object")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def header(self, size: int) -> None:
        """Check the header of an object within another, which is not compressed by itself."""
        _check_header(self.take(_HEADER), _PLAIN, size)

    def words(self, count: int) -> None:
        """A row of 64-bit numbers behind its length."""
        self.header(_row_bytes(count))
        if self.take(_WORD) != (count,):
            raise ValueError(f"a row that is not of {count} numbers")
        self.at += 8 * count
        if self.at > len(self.data):
            raise ValueError(f"{len(self.data)} bytes end within a row of {count} numbers")

    def ciphertext(self, degree: int, primes: int) -> None:
        """Two polynomials."""
        _, _, *form, _, _ = self.take(_CIPHERTEXT)
        if form != [2, degree, primes]:
            raise ValueError(f"{form[0]} polynomials of degree {form[1]} with {form[2]} primes")
        self.words(2 * degree * primes)

    def end(self) -> None:
        if self.at != len(self.data):
            raise ValueError(f"{len(self.data) - self.at} bytes too many")


def check_ciphertext(blob: bytes, degree: int, primes: int) -> None:
    """Raise a `ValueError` unless SEAL can load a ciphertext, or public key, of two polynomials from ``blob``."""
    reader = _Reader(_decompress(blob, _ciphertext_bytes(degree, primes)))
    reader.ciphertext(degree, primes)
    reader.end()


def check_secret_key(blob: bytes, degree: int, primes: int) -> None:
    """Raise a `ValueError` unless SEAL can load a secret key of one polynomial from ``blob``."""
    reader = _Reader(_decompress(blob, _PLAINTEXT.size + _row_bytes(degree * primes)))
    _, count, _ = reader.take(_PLAINTEXT)
    if count != degree * primes:
        raise ValueError(f"a secret key of {count} coefficients")
    reader.words(degree * primes)
    reader.end()


def check_rotation_keys(blob: bytes, degree: int, primes: int, max_keys: int) -> None:
    """Raise a `ValueError` unless SEAL can load keys to rotate slots, at most ``max_keys`` of them, from ``blob``."""
    size = _HEADER.size + _ciphertext_bytes(degree, primes)
    bound = _KEYS.size + degree * _WORD.size + max_keys * (primes - 1) * size
    reader = _Reader(_decompress(blob, bound))
    _, slots = reader.take(_KEYS)
    if not isinstance(slots, int) or slots > degree:
        raise ValueError(f"keys for {slots} rotations")
    for _ in range(slots):
        (parts,) = reader.take(_WORD)
        if parts not in (0, primes - 1):
            raise ValueError(f"a key of {parts} parts")
        for _ in range(primes - 1 if parts else 0):
            reader.header(size)
            reader.ciphertext(degree, primes)
    reader.end()


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Numbers and contents of the fields of a message of protocol buffers, in which TenSEAL wraps SEAL's objects."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire_type = divmod(tag, 8)
        if wire_type == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire_type)
        if wire_type == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError(f"field {number} of type {wire_type} does not fit {len(message)} bytes")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        if at + index >= len(message):
            break
        value |= (message[at + index] & 127) << 7 * index
        if message[at + index] < 128:
            return value, at + index + 1
    raise ValueError("a number that does not end")


def _row_bytes(count: int) -> int:
    return _HEADER.size + _WORD.size + 8 * count


def _ciphertext_bytes(degree: int, primes: int) -> int:
    return _CIPHERTEXT.size + _row_bytes(2 * degree * primes)


def _check_header(header: tuple[object, ...], compression: int, size: int) -> None:
    minor = header[3]  # which changes no layout
    if header != (_MAGIC, _HEADER.size, _VERSION, minor, compression, 0, size):
        raise ValueError(f"a header of SEAL that is not that of an object of {size} bytes: {header}")


def _decompress(blob: bytes, max_bytes: int) -> bytes:
    """Content of an object, at most ``max_bytes``."""
    if len(blob) < _HEADER.size:
        raise ValueError(f"{len(blob)} bytes are no object of SEAL")
    _check_header(_HEADER.unpack_from(blob), _ZSTANDARD, len(blob))
    import zstandard  # of the extra "he"

    try:
        with zstandard.ZstdDecompressor().stream_reader(blob[_HEADER.size :]) as stream:
            content = stream.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise ValueError(f"not compressed as SEAL does it: {error}") from error
    if len(content) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes, once decompressed")
    return bytes(content)
