"""Imports that take seconds, where they are needed and not before: torch, Lightning, what is built on them."""

from __future__ import annotations

import atexit
import gc
from importlib import import_module
from typing import Any


def load(place: str) -> Any:
    """What ``module:name`` names, imported now."""
    module, _, name = place.partition(":")
    enabled = gc.isenabled()
    # What libraries make when they are imported stays: looking through it for garbage again and again takes seconds.
    gc.disable()
    try:
        found = getattr(import_module(module), name)
    finally:
        if enabled:
            gc.enable()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # or extensions would report leaks when the process ends
    return found
