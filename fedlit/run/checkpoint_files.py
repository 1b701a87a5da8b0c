"""Files of a checkpoint where each process writes its clients: ``NAME.ckpt``, ``NAME.ckpt.part1`` and so on."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import TorchCheckpointIO

from fedlit.federation import RosterError

SET = "set"
"""Key of a value that is equal in all files of one checkpoint, and differs between checkpoints."""

PROCESS = "process"
"""Key of the process that wrote a file."""

_LITTLE = 1 << 20
"""Bytes that a disk with space takes."""

_REASONS = {
    errno.ENOSPC: "no space is left on the disk of",
    errno.EDQUOT: "the disk quota is used up by",
    errno.EFBIG: "the system's limit of file sizes (ulimit -f) is below",
}

_PART = re.compile(r"\.part[1-9]\d*$")


class StreamedCheckpointIO(TorchCheckpointIO):
    """Write files tensor by tensor, where Lightning's holds a file twice in memory before it writes.

    A file is in place once it is complete; an earlier one of its name stays until then.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint to a local path; others, as of cloud storage, as Lightning does."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{hashlib.sha256(file.name.encode()).hexdigest()[:16]}.unfinished")
        try:
            torch.save(checkpoint, unfinished)
            os.replace(unfinished, file)
        except BaseException as error:
            # torch's writer has a RuntimeError of its own where the system takes no more
            why = _refusal(unfinished) if isinstance(error, OSError | RuntimeError) else None
            unfinished.unlink(missing_ok=True)
            if why is not None:
                text = f"{_REASONS[why]} {file}: an earlier file of its name is as it was"
                raise OSError(why, text, str(file)) from error
            raise


def _refusal(unfinished: Path) -> int | None:
    """Return the system's number for the reason that a file cannot grow, if it is one of space."""
    try:
        with unfinished.open("ab") as file:
            file.write(bytes(_LITTLE))
    except OSError as error:
        return error.errno if error.errno in _REASONS else None
    return None


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
