"""Names of fedlit's classes and arguments without importing them, the nearest to a misspelt one, and late imports."""

from __future__ import annotations

import atexit
import gc
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

KINDS = ("methods", "data", "privacy", "models", "validators")
"""What a configuration can name, by the last parts of the entry-point groups of plug-ins."""

FILE = files("fedlit.cli").joinpath("known.json")
"""Made by `fedlit.cli.catalogue`; a test compares it with the classes."""


@dataclass(frozen=True)
class Row:
    """One thing that can be named."""

    name: str  # by which it is named, or logged
    what: str  # summary, in a line
    origin: str  # paper, or distribution of a plug-in; of a score, what logs it
    extra: str  # lines of configurations that have it; of a score, whether it needs statistics of the sources
    sends: str = ""  # of a method, its channels by how messages go; see `fedlit.cli.catalogue.sends`


@dataclass(frozen=True)
class Known:
    """The file's content."""

    listed: Mapping[str, Sequence[Row]]  # by kind
    arguments: Mapping[str, Sequence[str]]  # of each class that a configuration may name, by its public path


@cache
def known() -> Known:
    """Read the file."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    listed = {kind: [Row(**row) for row in content["listed"][kind]] for kind in KINDS}
    return Known(listed, content["arguments"])


@cache
def offered(kind: str) -> tuple[str, ...]:
    """Short names of what other packages offer of a kind."""
    return tuple(entry.name for entry in entry_points(group=f"fedlit.{kind}"))


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice nearest to a misspelt name, whatever its capitals; ``None`` if none is near."""
    by_lower = {each.lower(): each for each in choices}
    near = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[near[0]] if near else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A question to go between an error and the rest of its message, or nothing but a colon."""
    guess = nearest(name, choices)
    return ":" if guess is None else f": did you mean {guess!r}?"


def load(path: str) -> Any:
    """Import ``module:name`` now: torch, Lightning and what is built on them take seconds."""
    module, _, name = path.partition(":")
    enabled = gc.isenabled()
    # What libraries make when they are imported stays: looking through it for garbage again and again takes seconds.
    gc.disable()
    try:
        thing = getattr(import_module(module), name)
    finally:
        if enabled:
            gc.enable()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # or extensions would report leaks when the process ends
    return thing
