"""Files of a checkpoint where each process writes its clients: ``NAME.ckpt``, ``NAME.ckpt.part1`` and so on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlit.federation import RosterError

SET = "set"
"""Key of a value that is equal in all files of one checkpoint, and differs between checkpoints."""

PROCESS = "process"
"""Key of the process that wrote a file."""

_PART = re.compile(r"\.part[1-9]\d*$")


def part_of(path: str | Path, rank: int) -> str:
    """Return the file of a process for the checkpoint that process 0 writes to ``path``."""
    return f"{path}.part{rank}" if rank else str(path)


def files_of(path: str | Path) -> list[Path]:
    """Return the existing files of a checkpoint, in the order of processes; ``path`` may be any of them."""
    first = Path(_PART.sub("", str(path)))
    first = first.resolve() if first.is_symlink() else first  # such as last.ckpt
    parts = [file for file in first.parent.glob(f"{_escaped(first.name)}.part*") if _PART.search(file.name)]
    parts.sort(key=lambda file: int(file.name.rpartition(".part")[2]))
    return [file for file in (first, *parts) if file.is_file()]


def stale(path: str | Path, processes: int) -> list[Path]:
    """Return files of ranks beyond this number of processes, left by an earlier checkpoint."""
    return [file for file in files_of(path) if (found := _PART.search(file.name)) and int(found[0][5:]) >= processes]


def read(path: str | Path, load: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the first file of a checkpoint, with the clients of all its files.

    Raises:
        RosterError: If they are of different checkpoints.
        FileNotFoundError: If there is none.
    """
    files = files_of(path)
    if not files:
        raise FileNotFoundError(f"{path} is not a file, and no .part of it is here")
    checkpoint = load(files[0])
    if SET not in checkpoint:
        return checkpoint
    for file in files[1:]:
        other = load(file)
        if other.get(SET) != checkpoint[SET]:
            raise RosterError(
                f"{file} is of another checkpoint than {files[0]}: keep the files of one checkpoint together, and take "
                "others away"
            )
        checkpoint["clients"] |= other["clients"]
    return checkpoint


def _escaped(name: str) -> str:
    return re.sub(r"([\[\]*?])", r"[\1]", name)
