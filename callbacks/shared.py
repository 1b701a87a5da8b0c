"""What several callbacks need: the module they watch, and numbers and tables in words."""

from __future__ import annotations

import sys
import types
from dataclasses import is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning.pytorch import LightningModule
from rich.console import Console, RenderableType

from fedlit.federation import KEYS
from fedlit.module import FederatedModule

LOGGING_CHANNELS = ("metrics", "oracle")
"""Channels of numbers that are watched, which are reported in the clear."""

SOURCE_MOMENTS = "source_moments"
"""Channel of what `Validators` average over the sources, through its privacy backend."""


_T = TypeVar("_T")


def check_fields(record: _T) -> _T:
    """A dataclass that was read from a file; raises a `TypeError` if a field has another type than is declared."""
    for name, kind in get_type_hints(type(record)).items():
        if not _fits(getattr(record, name), kind):
            raise TypeError(f"{name} cannot be {str(getattr(record, name))[:100]!r}")
    return record


def _fits(value: object, kind: Any) -> bool:
    of, parts = get_origin(kind), get_args(kind)
    if of in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if of is dict:
        return isinstance(value, dict) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if of in (list, tuple):
        return isinstance(value, of) and all(_fits(each, parts[0]) for each in value)
    if isinstance(value, int):  # bounded, as larger ones are no floats; a bool is no number
        return kind in (int, float) and not isinstance(value, bool) and abs(value) < 2**63
    if is_dataclass(value):
        check_fields(value)
    return isinstance(value, kind)


def watched(channel: str) -> bool:
    """Whether a channel carries what is watched alone: the method would train the same without it."""
    return channel in LOGGING_CHANNELS or channel.removesuffix(KEYS) == SOURCE_MOMENTS


def federated(module: LightningModule, callback: object) -> FederatedModule:
    """``module``, which must be a `FederatedModule` for ``callback`` to watch it; raises a `TypeError` otherwise."""
    if not isinstance(module, FederatedModule):
        raise TypeError(
            f"{type(callback).__name__} watches a FederatedModule, got {type(module).__name__}: train a method of "
            "fedlit.methods, or remove the callback"
        )
    return module


def megabytes(num_bytes: float) -> str:
    """Bytes in MB (10^6), to three digits, or to the byte where that would be nothing: ``"3.21"``, ``"0.000042"``."""
    amount = num_bytes / 1e6
    if amount >= 100:
        return f"{amount:,.0f}"
    if amount >= 0.001:
        return f"{amount:#.3g}"
    return f"{amount:.6f}" if num_bytes else "0"


def show(what: RenderableType) -> None:
    """Print a table; in a file or a pipe as wide as it needs, as there is no screen to fit it to."""
    console = Console()
    if not sys.stdout.isatty():
        wide = Console(width=10_000)
        console = Console(width=max(80, wide.measure(what).maximum))
    console.print(what)
