"""Plain data on the wire, without pickle.

A document is a message of `wire`: its structure as JSON, then the tensors in it. Lists begin with their type,
``["tuple", 1, 2]``; so do bytes, infinities and mappings with keys that are no texts, which JSON has not.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlit.federation.errors import PayloadError
from fedlit.federation.wire import decode, encode
from fedlit.privacy import DecodeError

_STRUCTURE = "structure"
_DEPTH = 100
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set}
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict, "OrderedDict": OrderedDict, "Counter": lambda pairs: Counter(dict(pairs)),
}  # fmt: skip


def document(value: Any, what: str) -> Tensor:
    """A value as a message, shape (bytes,), uint8; ``what`` names it in errors.

    It may be ``None``, a bool, number, text or bytes, a tensor or numeric array, or a list, tuple, set or mapping of
    such, nested up to 100 deep; a `PayloadError` of anything else.
    """
    tensors: list[Tensor] = []
    structure = json.dumps(_structure(value, what, tensors, 0), separators=(",", ":"), allow_nan=False).encode()
    text = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
    return encode({_STRUCTURE: text} | {str(index): tensor for index, tensor in enumerate(tensors)})


def read_document(message: Tensor) -> Any:
    """Inverse of `document`, with tensors on the CPU; a `DecodeError` of any other message."""
    tensors = decode(message)
    try:
        structure = json.loads(tensors.pop(_STRUCTURE).numpy().tobytes(), parse_constant=_refuse)
        return _value(structure, tensors, 0)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise DecodeError(f"message of {len(message)} bytes is no document: {error}") from error


def _structure(value: Any, where: str, tensors: list[Tensor], depth: int) -> Any:
    if depth > _DEPTH:
        raise PayloadError(f"{where} is nested more than {_DEPTH} deep, which no message can be")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["float", repr(float(value))]
    if isinstance(value, Tensor | np.ndarray | bytes):
        tensors.append(_tensor(value, where))
        return [_kind(value), len(tensors) - 1]
    for names, kind in ((_SEQUENCES, list | tuple | set), (_MAPPINGS, Mapping)):
        if isinstance(value, kind):
            name = type(value).__name__ if type(value).__name__ in names else next(iter(names))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            inner = [(key, _structure(item, f"{where}[{key!r}]", tensors, depth + 1)) for key, item in items]
            if not isinstance(value, Mapping):
                return [name, *(item for _, item in inner)]
            return [name, *([_structure(key, where, tensors, depth + 1), item] for key, item in inner)]
    raise PayloadError(
        f"{where} is of type {type(value).__name__}, which no message can hold: processes send each other numbers, "
        "text, tensors, and lists, tuples, sets and mappings of them"
    )


def _kind(value: Any) -> str:
    return "bytes" if isinstance(value, bytes) else "array" if isinstance(value, np.ndarray) else "tensor"


def _tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
    try:
        return torch.from_numpy(np.array(value))
    except TypeError as error:
        raise PayloadError(f"{where} is an array of {value.dtype}, which no message can hold") from error


def _value(structure: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > _DEPTH:
        raise ValueError(f"nested more than {_DEPTH} deep")
    if not isinstance(structure, list):
        if isinstance(structure, dict):
            raise ValueError("a mapping without its type")
        return structure
    name, *items = structure
    if name in _MAPPINGS:
        pairs = [(_value(key, tensors, depth + 1), _value(item, tensors, depth + 1)) for key, item in items]
        return _MAPPINGS[name](pairs)
    if name in _SEQUENCES:
        return _SEQUENCES[name]([_value(item, tensors, depth + 1) for item in items])
    (item,) = items
    if name == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[item]
    tensor = tensors[str(item)]
    kinds: dict[str, Callable[[], Any]] = {
        "tensor": lambda: tensor,
        "array": tensor.numpy,
        "bytes": lambda: tensor.numpy().tobytes(),
    }
    return kinds[name]()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def fingerprint(value: Any) -> str:
    """SHA-256 of a value, equal for equal ones on all machines; of other objects than data, of their type alone.

    Mappings and sets may be in any order; 1, 1.0 and True are different, a NaN is equal to itself.
    """
    return _digest(value).hex()


def _digest(value: Any) -> bytes:
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value).__name__
    if isinstance(value, Mapping):
        kind, parts = "mapping", sorted(_digest(key) + _digest(item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        kind, parts = "sequence", [_digest(item) for item in value]
    elif isinstance(value, set | frozenset):
        parts = sorted(map(_digest, value))
    elif isinstance(value, np.ndarray) and value.dtype == object:  # whose bytes are addresses
        parts = [repr(value.shape).encode(), _digest(value.tolist())]
    elif isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts = [repr((value.dtype, tuple(value.shape))).encode(), flat.numpy().tobytes()]
    elif isinstance(value, np.ndarray):
        parts = [repr((value.dtype.str, value.shape)).encode(), value.tobytes()]
    else:
        plain = isinstance(value, str | bytes | int | float | complex | None)
        parts = [repr(value).encode()] if plain else []
    sha = hashlib.sha256()
    for part in (kind.encode(), *parts):  # lengths keep parts apart
        sha.update(struct.pack("<Q", len(part)) + part)
    return sha.digest()
