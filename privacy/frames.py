"""Small messages between parties: named byte strings, nothing pickled, nothing trusted."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from fedlit.privacy.errors import DecodeError

_COUNT = struct.Struct("<I")
_FIELD = struct.Struct("<HI")  # length of the name, length of the value


def pack_fields(fields: Mapping[str, bytes]) -> bytes:
    """Named values as one message, in their order."""
    parts = [_COUNT.pack(len(fields))]
    for name, value in fields.items():
        key = name.encode()
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


def field(fields: Mapping[str, bytes], name: str, size: int | None = None) -> bytes:
    """One field of an unpacked message; raises a `DecodeError` if it is missing, or not of ``size`` bytes."""
    if name not in fields:
        raise DecodeError(f"message lacks the field {name!r}, it has {list(fields)}")
    value = fields[name]
    if size is not None and len(value) != size:
        raise DecodeError(f"field {name!r} must have {size} bytes, got {len(value)}")
    return value
