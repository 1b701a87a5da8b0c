"""Files that only grow, by which a site remembers after a crash what it was about to send."""

from __future__ import annotations

import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from fedlit.federation.errors import JournalError

_START = b'{"version": '

_open_here: Counter[tuple[int, int]] = Counter()
"""How many records of a file, by device and number, this process has open."""


class Records(ABC):
    """Lines of JSON in a file that only its owner reads: a head, and entries, each synchronised before it counts.

    A line that is cut off at the end of the file was not yet synchronised when its process ended: nothing had left.
    A file that is not shared is locked as long as this process has it open, as another would not know what it adds.

    Args:
        path: Of the file, which is made if it is missing.

    Raises:
        JournalError: If the file cannot be read, written or locked, is open in another process, or holds something
            else.
    """

    _NOUN: ClassVar[str]
    _TITLE: ClassVar[str]
    _WAY_OUT: ClassVar[str]
    _SHARED: ClassVar[bool] = False
    _VERSION = 1

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._end = 0  # of what was read
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            start = os.pread(self._file, len(_START), 0)
            if not _START.startswith(start):  # so that no other file is cut or locked
                os.close(self._file)
                raise self._problem(f"is no {self._NOUN} of fedlit")
            os.fchmod(self._file, 0o600)
            status = os.fstat(self._file)
        except OSError as error:
            raise self._problem(f"cannot be opened ({error.strerror})") from error
        self._place = status.st_dev, status.st_ino
        _open_here[self._place] += 1
        if not self._SHARED:
            self._keep_others_out()
        self._update()

    def __del__(self) -> None:
        place = getattr(self, "_place", None)
        if place is not None:
            _open_here[place] -= 1
            if not _open_here[place]:  # or another one of this process would lose its lock
                os.close(self._file)

    @abstractmethod
    def _head(self) -> dict[str, Any]:
        """Return what the head has beside the version."""

    @abstractmethod
    def _open(self, head: Mapping[str, Any]) -> None:
        """Take in the head; what it raises makes the file another one, as of `_take`."""

    @abstractmethod
    def _take(self, entry: Mapping[str, Any]) -> None:
        """Take in an entry, which was there or is new."""

    def _problem(self, what: str, way_out: str = "") -> JournalError:
        """Return the error that the file ``what``, such as "cannot be read"."""
        error = JournalError(f"the {self._TITLE} '{self.path}' {what}: {way_out or self._WAY_OUT}")
        error.public = f"a site's {self._TITLE} {what}"  # type: ignore[attr-defined]
        return error

    def _keep_others_out(self) -> None:
        """Keep other processes out; not by flock, which forks share, so that it may outlive a process that is killed.

        The lock ends as soon as this process closes the file anywhere: so it is read through the one descriptor.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            way_out = "end that one, or name another file; a journal is of one site in one run"
            raise self._problem("is open in another process", way_out) from error
        except OSError as error:
            way_out = "name a file on a file system with locks, such as a disk of this machine"
            raise self._problem(f"cannot be locked ({error.strerror})", way_out) from error

    def _update(self) -> None:
        """Take in entries that were added to the file since it was last read."""
        try:
            text = os.pread(self._file, max(0, os.fstat(self._file).st_size - self._end), self._end)
            whole = text[: text.rfind(b"\n") + 1]
            if len(whole) < len(text):
                os.ftruncate(self._file, self._end + len(whole))
            entries = [json.loads(line) for line in whole.splitlines()]
            if not self._end:
                head, *entries = entries or [self._begin()]
                if head["version"] != self._VERSION:
                    raise self._problem(f"has version {head['version']}, and this program writes {self._VERSION}")
                self._open(head)
            for entry in entries:
                self._take(entry)
            self._end += len(whole)
        except OSError as error:
            raise self._problem(f"cannot be read or written ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._problem(f"is no {self._NOUN} of fedlit ({type(error).__name__})") from error

    def _begin(self) -> dict[str, Any]:
        head = {"version": self._VERSION, **self._head()}
        self._write(head)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)  # or the file itself could be gone after a crash
        os.close(folder)
        return head

    def _append(self, entry: Mapping[str, Any]) -> None:
        try:
            self._write(entry)
        except OSError as error:
            raise self._problem(f"cannot be written ({error.strerror}), so nothing is sent") from error
        self._take(entry)

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        left = line
        try:
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:  # of a disk that is full: half a line would make the file unreadable
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(line)
