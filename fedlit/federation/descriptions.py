"""Texts of arguments, equal on all processes and after a resume.

``repr`` has addresses of functions and objects, sets in the order of their hashes, and large arrays cut short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedlit.federation.documents import fingerprint

_DEPTH = 20


def described(value: Any, depth: int = 0) -> str:
    """Return a text of a value: data by their contents, functions and other objects by where they are defined.

    Lambdas of one scope have the same text. What lies more than 20 deep is left out.
    """
    if depth > _DEPTH:
        return "..."
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        pairs = (f"{described(key, depth + 1)}: {described(item, depth + 1)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        inner = ", ".join(described(item, depth + 1) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(described(item, depth + 1) for item in value))}}}"
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__}({tuple(value.shape)}, {value.dtype}, {fingerprint(value)[:16]})"
    if isinstance(value, partial):
        arguments = [described(each, depth + 1) for each in (value.func, *value.args)]
        arguments += [f"{name}={described(each, depth + 1)}" for name, each in value.keywords.items()]
        return f"partial({', '.join(arguments)})"
    if isinstance(value, Enum):
        return f"{_qualified(type(value))}.{value.name}"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{each.name}={described(getattr(value, each.name, None), depth + 1)}" for each in fields(value))
        return f"{_qualified(type(value))}({', '.join(parts)})"
    if isinstance(value, nn.Module):
        return f"{_qualified(type(value))}({fingerprint({**value.state_dict()})[:16]})"
    if hasattr(value, "__qualname__"):  # a class, function or method
        return _qualified(value)
    text = repr(value)
    return _qualified(type(value)) if " at 0x" in text else text


def _qualified(defined: Any) -> str:
    module = getattr(defined, "__module__", None)
    return f"{module}.{defined.__qualname__}" if module else str(defined.__qualname__)
