"""Folders of runs, each claimed by one process alone, and the folder of an experiment, which knows what is finished."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError

import torch
from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only

from fedlit.callbacks import RunSummary
from fedlit.callbacks.run_record import SUMMARY, claim, write_whole
from fedlit.run.checkpoint_files import SET

_MARK = "experiment.sha256"
"""In a run's folder: the fingerprint of what it is trained with."""


def first_process() -> bool:
    """Whether this is the one process of a run that writes."""
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))  # before Lightning knows ranks
    return not getattr(rank_zero_only, "rank", 0) and node in ("", "0")


class ExperimentFolder:
    """Where an experiment keeps what it has done: ``ROOT/experiment_…``, named by its configurations.

    It has a file for each run, which names the run's folder, the tables, and the output of runs that are side by side.
    A run's folder has the fingerprint of the run's configuration, and without it is none of this experiment.

    Args:
        root: Of the folders of its runs.
        configurations: Of all its runs, in plain text, in their order.
    """

    def __init__(self, root: Path, configurations: Sequence[str]) -> None:
        self._fingerprints = [fingerprint(each) for each in configurations]
        self.root = root
        self.path = root / f"experiment_{fingerprint(*self._fingerprints)[:12]}"
        self._unwritten: dict[int, RunSummary] = {}

    def fingerprint(self, number: int) -> str:
        """Of what a run is trained with."""
        return self._fingerprints[number]

    def forget(self) -> None:
        """Start afresh; folders of runs stay."""
        for file in self.path.glob("*.json"):
            file.unlink()

    def finished(self, number: int) -> RunSummary | None:
        """What a run came to, if it has ended."""
        if number in self._unwritten:
            return self._unwritten[number]
        folder = self.folder_of(number)
        if folder is None or not (folder / SUMMARY).is_file():
            return None
        try:
            return RunSummary.from_json((folder / SUMMARY).read_text(encoding="utf-8"))
        except (ValueError, TypeError, KeyError) as error:
            sys.exit(
                f"fedlit: '{folder / SUMMARY}' cannot be read, as it is not what a run of this version of fedlit "
                f"writes ({error}): remove the file to train that run again, or --fresh true trains the experiment "
                "again, in new folders"
            )

    def keep(self, number: int, summary: RunSummary) -> None:
        """Remember, in this process alone, what a run came to that has written nothing, as under fast_dev_run."""
        if self.finished(number) is None:
            self._unwritten[number] = summary

    def folder_of(self, number: int) -> Path | None:
        """A run's folder, if it has started and is still there."""
        file = self._file(number)
        if not file.is_file():
            return None
        folder: Path = self.root / json.loads(file.read_text(encoding="utf-8"))["folder"]
        mark = folder / _MARK
        return folder if mark.is_file() and mark.read_text(encoding="utf-8") == self.fingerprint(number) else None

    def checkpoint(self, number: int, until: int | None = None) -> Path | None:
        """The latest one that an interrupted run has left whole, with the state of all clients.

        Args:
            number: Of the run.
            until: Round that is the next one after it at the latest.
        """
        folder = self.folder_of(number)
        found = [] if folder is None else [*folder.glob("checkpoints/*.ckpt")]
        found.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
        return next((file for file in found if _has_all(file, until)), None)

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
            write_whole(folder / _MARK, self.fingerprint(number))
            write_whole(self._file(number), json.dumps({"folder": os.path.relpath(folder, self.root)}))
        elif self.checkpoint(number) is None:
            for each in folder.iterdir():
                if each.is_dir():
                    shutil.rmtree(each)
                elif each.name != _MARK:
                    each.unlink()
        return folder

    def log(self, number: int) -> Path:
        """Where a run that is side by side with others prints to."""
        return self._file(number).with_suffix(".txt")

    def _file(self, number: int) -> Path:
        return self.path / f"{number + 1:03d}.json"


def fingerprint(*texts: str) -> str:
    """The same of the same texts in the same order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _has_all(checkpoint: Path, until: int | None) -> bool:
    """Whether a checkpoint can be read, is not one of several files that each have some clients, and early enough."""
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        return SET not in content and (until is None or content["federation"]["round_idx"] <= until)
    except (OSError, RuntimeError, EOFError, UnpicklingError):  # of a process that was killed while it wrote
        return False
