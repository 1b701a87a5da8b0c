"""The facts of a user's data that a configuration and its README state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Writers = list[Callable[[], None]]
"""What writes the files of an example, once nothing is left to refuse."""


@dataclass(frozen=True)
class Study:
    """The facts of some data."""

    files: object  # where they are, as the configuration has it
    target: str  # the client that is adapted to
    labelled: int  # samples of the target whose label is known
    about: str  # the data, in a sentence
    place: str  # where to put one's own data, in sentences
    listing: str = ""  # entries of the README's list, for what is written besides
    regression: bool = False
    more: dict[str, object] = field(default_factory=dict)  # placeholders of this kind of data


def seen_from(folder: Path, path: Path) -> str:
    """A path as it is written in a configuration in a folder: relative to it, if it lies in it."""
    path, folder = path.resolve(), folder.resolve()
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def check_target(target: str | None, names: Sequence[str]) -> None:
    """End the command unless there are sources and the target is a client."""
    if len(names) < 2:
        sys.exit(f"fedlit: --data must have at least 2 clients, a source and the target, and has {[*names]}")
    if target not in names:
        got = "" if target is None else f", got {target!r}"
        sys.exit(f"fedlit: --target must name the client that is adapted to, one of {[*names]}{got}")
