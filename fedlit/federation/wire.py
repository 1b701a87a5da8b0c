"""Messages on the wire: a header that describes named tensors, then their bytes.

The header is JSON (``[[name, dtype, shape], ...]``), preceded by its length in 4 bytes. The payload is the tensors'
raw little-endian bytes in the order of the header. Nothing is pickled, so a message cannot run code.
"""

from __future__ import annotations

import json
import math
import struct
from functools import lru_cache

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.federation.errors import PayloadError
from fedlit.privacy import DecodeError
from fedlit.privacy.packing import Payload, Schema, schema_of

_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 22
_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 1 << 48  # of one dimension: more than any memory has, and products of them stay short
_PINNED = 1 << 20
"""Bytes from which on a copy from a GPU goes to pinned memory, which the GPU writes to itself."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
)}  # fmt: skip


@lru_cache(maxsize=64)
def schema_text(schema: Schema) -> bytes:
    """A schema as JSON; a `PayloadError` if an entry has a type that no message can hold."""
    for name, dtype, _ in schema:
        if dtype not in _DTYPES.values():
            raise PayloadError(f"entry {name!r} has type {dtype}, a message can hold {list(_DTYPES)}: convert it first")
    fields = [[name, str(dtype).removeprefix("torch."), shape] for name, dtype, shape in schema]
    return json.dumps(fields, separators=(",", ":")).encode()


@lru_cache(maxsize=64)
def schema_from(text: bytes) -> Schema:
    """Inverse of `schema_text`; raises a `DecodeError` on anything else."""
    try:
        return _checked(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DecodeError(f"{len(text)} bytes do not describe a payload: {error}") from error


def _checked(fields: list[tuple[str, str, list[int]]]) -> Schema:
    schema = tuple((name, _DTYPES[dtype], tuple(shape)) for name, dtype, shape in fields)
    if not all(isinstance(name, str) for name, _, _ in schema) or len({name for name, _, _ in schema}) < len(schema):
        raise ValueError("names are not different strings")
    # type() and not isinstance(): True is no size, and 1.0 would meet the cache entry of 1
    if not all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for _, _, shape in schema for size in shape):
        raise ValueError("a shape is not a list of sizes")
    if any(len(shape) > _MAX_DIMENSIONS for _, _, shape in schema):
        raise ValueError(f"a shape has more than {_MAX_DIMENSIONS} dimensions")
    return schema


@lru_cache(maxsize=64)
def _header(schema: Schema) -> tuple[bytes, int]:
    text = schema_text(schema)
    if len(text) > _MAX_HEADER_BYTES:
        raise PayloadError(f"{len(schema)} entries need a header of {len(text)} bytes, more than {_MAX_HEADER_BYTES}")
    body = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in schema)
    return _LENGTH.pack(len(text)) + text, body


def wire_size(payload: Payload) -> int:
    """Bytes of ``payload`` on the wire, without making them."""
    header, body = _header(schema_of(payload))
    return len(header) + body


def part(message: Payload, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """One entry of a received message; a `DecodeError` if it is missing, or not a row of ``dtype``."""
    check(name in message, f"part {name!r}", "in the message", [*message], error=DecodeError)
    entry = message[name]
    form = f"{entry.dtype} of shape {tuple(entry.shape)}"
    valid = dtype is None or (entry.dtype == dtype and entry.dim() == 1)
    check(valid, f"part {name!r}", f"a row of {dtype}", form, error=DecodeError, shown=form)
    return entry


def to_host(tensor: Tensor) -> Tensor:
    """A tensor in the CPU's memory, itself if it is there."""
    if tensor.device.type != "cuda" or tensor.nbytes < _PINNED:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def encode(payload: Payload) -> Tensor:
    """Bytes of ``payload``, as a uint8 tensor of shape (`wire_size`,)."""
    return torch.cat(encode_in_place(payload))


def encode_in_place(payload: Payload) -> list[Tensor]:
    """The same in parts, in the memory of the tensors where they are on the CPU: of long ones there is no copy."""
    header, _ = _header(schema_of(payload))
    parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
    parts += [to_host(t.detach()).contiguous().reshape(-1).view(torch.uint8) for t in payload.values() if t.numel()]
    return parts


def decode(message: Tensor) -> dict[str, Tensor]:
    """Inverse of `encode`; a `DecodeError` if bytes are no such message, or not as many as its header announces."""
    if len(message) < _LENGTH.size:
        raise DecodeError(f"message of {len(message)} bytes is shorter than its length field")
    (length,) = _LENGTH.unpack(message[: _LENGTH.size].numpy().tobytes())
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES:
        raise DecodeError(f"message has a header of {length} bytes, more than {_MAX_HEADER_BYTES}")
    try:
        schema = schema_from(message[_LENGTH.size : start].numpy().tobytes())
    except DecodeError as error:
        raise DecodeError(f"message of {len(message)} bytes has no readable header: {error}") from error
    expected = start + _header(schema)[1]
    if len(message) != expected:
        raise DecodeError(f"message has {len(message)} bytes, its header announces {expected}")
    payload: dict[str, Tensor] = {}
    for name, dtype, shape in schema:
        stop = start + dtype.itemsize * math.prod(shape)
        # clone(): the slice may start at an address that the dtype does not allow; bytes may start anywhere
        part = message[start:stop] if dtype == torch.uint8 else message[start:stop].clone()
        try:
            payload[name] = (part != 0 if dtype == torch.bool else part.view(dtype)).reshape(shape)
        except (RuntimeError, TypeError, OverflowError) as error:  # no elements, and sizes past any tensor's
            raise DecodeError(f"message has an entry {name!r} of impossible shape {shape}") from error
        start = stop
    return payload
