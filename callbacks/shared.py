"""What several callbacks need: the module they watch, and numbers and tables in words."""

from __future__ import annotations

import sys

from lightning.pytorch import LightningModule
from rich.console import Console, RenderableType

from fedlit.federation import KEYS
from fedlit.module import FederatedModule

LOGGING_CHANNELS = ("metrics", "oracle")
"""Channels of numbers that are watched, which are reported in the clear."""

SOURCE_MOMENTS = "source_moments"
"""Channel of what `Validators` average over the sources, through its privacy backend."""


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
