"""``--log json``: every line that a command writes is a JSON object, for the programs that collect operators' logs."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

_VARIABLE = "FEDLIT_LOG"
"""By it, processes that a command starts write as it does."""

_FORMS = ("text", "json")


def take_log(args: Sequence[str]) -> list[str]:
    """Return the arguments without ``--log``, and write JSON from now on if it, or the environment, asks for that."""
    left: list[str] = []
    words = iter(args)
    for word in words:
        if word != "--log" and not word.startswith("--log="):
            left.append(word)
            continue
        form = word.partition("=")[2] or next(words, "")
        if form not in _FORMS:
            sys.exit(f"fedlit: --log must be {' or '.join(_FORMS)}, got {form!r}")
        os.environ[_VARIABLE] = form
    if os.environ.get(_VARIABLE) == "json":
        _write_json()
    return left


class _Stream:
    """A text stream whose lines become JSON objects; all else is as the stream has it."""

    def __init__(self, stream: TextIO, level: str) -> None:
        self.stream, self._level, self._line = stream, level, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                self.stream.write(_object(self._level, "output", line.rstrip()))
        return len(text)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _object(record.levelname.lower(), record.name, record.getMessage(), **fields).rstrip("\n")


def _object(level: str, logger: str, message: str, **fields: object) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    every = {"time": now, "level": level, "logger": logger, "message": message, **fields}
    return json.dumps(every, ensure_ascii=False, default=str) + "\n"


def _write_json() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    for name in ("fedlit", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.stdout, sys.stderr = _Stream(sys.stdout, "info"), _Stream(sys.stderr, "warning")
    sys.excepthook = _log_exception


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("fedlit").error("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def print_error(text: object) -> None:
    """Print why a command ends, in the form that was asked for."""
    if os.environ.get(_VARIABLE) == "json":
        logging.getLogger("fedlit").error(str(text))
    else:
        print(text, file=sys.stderr)
