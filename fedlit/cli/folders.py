"""Folders of runs, each claimed by one process alone, and the folder that notes which runs are finished."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from pickle import UnpicklingError

import torch
from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only

from fedlit.callbacks import RunSummary
from fedlit.callbacks.run_record import SUMMARY, claim
from fedlit.callbacks.shared import write_whole
from fedlit.run.checkpoint_files import SET

_MARK = "experiment.sha256"
"""In a run's folder: the fingerprint of what it is trained with."""

_MISSING = "missing.json"
"""In a run's folder: names of clients that the run has ended without."""

SELECTED = "selected.json"
"""Which method and round were selected."""


STARTS = "FEDLIT_STARTS"
"""In the environment of a seat that has started itself again: the times at which it did."""


def first_process() -> bool:
    """Whether this is the one process of a run that writes."""
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))  # before Lightning knows ranks
    return not getattr(rank_zero_only, "rank", 0) and node in ("", "0")


def first_of_host() -> bool:
    """Whether this is the one process of its host that moves files there."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


class ExperimentFolder:
    """Where a command notes its finished runs, in ``ROOT/NAME``: a file for each run, which names the run's folder.

    It has the tables, too, and the output of runs that are side by side. A run's folder has the `fingerprint` of the
    run's configuration; without it, it is not a run of this command. A run is known by its number, or ``by_content``.
    """

    def __init__(
        self, root: Path, name: str, total: int, fingerprint: Callable[[int], str], by_content: bool = False
    ) -> None:
        self.root, self.path = root, root / name
        self._total, self._fingerprint, self._by_content = total, cache(fingerprint), by_content
        self._unwritten: dict[int, RunSummary] = {}

    def forget(self, only: int | None = None) -> None:
        """Start these runs afresh, or one of them; their folders stay."""
        for number in range(self._total) if only is None else [only]:
            self._file(number).unlink(missing_ok=True)
        (self.path / SELECTED).unlink(missing_ok=True)

    def finished(self, number: int) -> RunSummary | None:
        """What a run came to, if it has ended, and with all clients."""
        if number in self._unwritten:
            return self._unwritten[number]
        folder = self.folder_of(number)
        if folder is None or not (folder / SUMMARY).is_file() or (folder / _MISSING).is_file():
            return None
        try:
            return RunSummary.from_json((folder / SUMMARY).read_text(encoding="utf-8"))
        except (ValueError, TypeError, KeyError) as error:
            sys.exit(
                f"fedlit: '{folder / SUMMARY}' cannot be read, as it is not what a run of this version of fedlit "
                f"writes ({error}): remove the file to train that run again, or --fresh true trains the experiment "
                "again, in new folders"
            )

    def keep(self, number: int, summary: RunSummary, missing: Sequence[str] = ()) -> None:
        """Note clients that a run has ended without, if there are any, so that it is no finished one.

        Remember, in this process alone, what it came to if it has written nothing, as under fast_dev_run.
        """
        folder = self.folder_of(number)
        if folder is not None and missing:
            write_whole(folder / _MISSING, json.dumps([*missing]))
            return
        if folder is not None:
            (folder / _MISSING).unlink(missing_ok=True)
        if self.finished(number) is None:
            self._unwritten[number] = summary

    def folder_of(self, number: int) -> Path | None:
        """A run's folder, if it has started and is still there."""
        file = self._file(number)
        if not file.is_file():
            return None
        folder: Path = self.root / json.loads(file.read_text(encoding="utf-8"))["folder"]
        mark = folder / _MARK
        return folder if mark.is_file() and mark.read_text(encoding="utf-8") == self._fingerprint(number) else None

    def checkpoint(self, number: int, until: int | None = None) -> Path | None:
        """The latest one that an interrupted run has left whole, with the state of all clients, up to a round."""
        folder = self.folder_of(number)
        checkpoints = [] if folder is None else [*folder.glob("checkpoints/*.ckpt")]
        checkpoints.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
        return next((file for file in checkpoints if _has_all(file, until)), None)

    @contextmanager
    def held(self, number: int) -> Iterator[None]:
        """Keep a run to this process; waits while another one trains it."""
        if not first_process():
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with FileLock(self._file(number).with_suffix(".lock")):
            yield

    def busy(self, number: int) -> bool:
        """Whether another process trains a run at this moment."""
        if not first_process():
            return False
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._file(number).with_suffix(".lock"))
        with suppress(Timeout), lock.acquire(timeout=0):
            return False
        return True

    def place(self, number: int, parent: Path) -> Path:
        """The folder for a run: where it was interrupted, emptied if it left no checkpoint, or a new one."""
        folder = self.folder_of(number)
        if folder is None or folder.parent != parent:
            folder = claim(parent)
            write_whole(folder / _MARK, self._fingerprint(number))
            write_whole(self._file(number), json.dumps({"folder": os.path.relpath(folder, self.root)}))
        elif self.checkpoint(number) is None:
            for each in folder.iterdir():
                if each.is_dir():
                    shutil.rmtree(each)
                elif each.name != _MARK:
                    each.unlink()
        return folder

    def journal(self, number: int) -> Path:
        """A site's journal of what it has released in a run."""
        return self._file(number).with_suffix(".releases")

    def journals(self, number: int) -> Path:
        """A folder of the journals of a run's processes, where there are several."""
        return self._file(number).with_suffix(".journals")

    def log(self, number: int) -> Path:
        """Where a run that is side by side with others prints to."""
        return self._file(number).with_suffix(".txt")

    def _file(self, number: int) -> Path:
        name = f"trial_{self._fingerprint(number)[:12]}" if self._by_content else f"{number + 1:03d}"
        return self.path / f"{name}.json"


def set_aside(path: Path) -> None:
    """Rename what is there, if it is, to the first free name of ``NAME-1``, ``NAME-2`` and so on."""
    if path.exists():
        path.rename(next(each for n in count(1) if not (each := path.with_name(f"{path.name}-{n}")).exists()))


def fingerprint(*texts: str) -> str:
    """The same of the same texts in the same order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _has_all(checkpoint: Path, until: int | None) -> bool:
    """Whether a checkpoint can be read, has the state of all clients, and is early enough."""
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        return SET not in content and (until is None or content["federation"]["round_idx"] <= until)
    except (OSError, RuntimeError, EOFError, UnpicklingError):  # of a process that was killed while it wrote
        return False
