"""Files that only grow, by which a site remembers after a crash what it was about to send."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from fedlit.federation.errors import JournalError


class Records(ABC):
    """Lines of JSON in a file that only its owner reads: a head, and entries, each synchronised before it counts.

    A line that is cut off at the end of the file was not yet synchronised when its process ended: nothing had left.

    Args:
        path: Of the file, which is made if it is missing.

    Raises:
        JournalError: If the file cannot be read or written, or holds something else.
    """

    _NOUN: ClassVar[str]
    _VERSION = 1

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._end = 0  # of what was read
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.fchmod(self._file, 0o600)
        except OSError as error:
            raise self._problem(f"cannot be opened ({error.strerror})") from error
        self._update()

    @abstractmethod
    def _head(self) -> dict[str, Any]:
        """Return what the head has beside the version."""

    @abstractmethod
    def _open(self, head: Mapping[str, Any]) -> None:
        """Take in the head; what it raises makes the file another one, as of `_take`."""

    @abstractmethod
    def _take(self, entry: Mapping[str, Any]) -> None:
        """Take in an entry, which was there or is new."""

    @abstractmethod
    def _problem(self, what: str) -> JournalError:
        """Return the error that the file ``what``, such as "cannot be read"."""

    def _update(self) -> None:
        """Take in entries that were added to the file since it was last read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._end)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            if len(whole) < len(text):
                os.truncate(self.path, self._end + len(whole))
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
