"""What fedlit's classes are called and take, without importing them: out of what `fedlit.cli.catalogue` makes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files

KINDS = ("methods", "data", "privacy", "models", "validators")
"""What a configuration can name, by the last words of the groups in which plug-ins offer theirs."""

FILE = files("fedlit.cli").joinpath("known.json")
"""A test compares it with the classes."""


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
    """Of fedlit's own classes."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    listed = {kind: [Row(**row) for row in content["listed"][kind]] for kind in KINDS}
    return Known(listed, content["arguments"])


@cache
def offered(kind: str) -> tuple[str, ...]:
    """Short names of what other packages offer of a kind."""
    return tuple(entry.name for entry in entry_points(group=f"fedlit.{kind}"))
