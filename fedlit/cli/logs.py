"""``--log json``: every line that a command writes is a JSON object, for the programs that collect operators' logs."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from types import TracebackType

_VARIABLE = "FEDLIT_LOG"
"""By it, processes that a command starts write as it does."""

_FORMS = ("text", "json")

_BEGINNING = '{"time": "'
"""Of each object."""


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


class _Output:
    """A file descriptor of this process, whose lines become JSON objects, whoever writes them: Python, C or a child.

    Lines that are objects of a child's own log stay as they are.
    """

    def __init__(self, number: int, level: str) -> None:
        self._number, self._level = number, level
        self.file = os.fdopen(os.dup(number), "w", encoding="utf-8")
        reading, writing = os.pipe()
        os.dup2(writing, number)
        os.close(writing)
        self._thread = threading.Thread(target=self._copy, args=(reading,), daemon=True)
        self._thread.start()

    def _copy(self, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace", newline="\n") as lines, suppress(OSError):
            for line in lines:
                text = line.rstrip()
                if text.startswith(_BEGINNING):
                    self.file.write(f"{text}\n")
                elif text:
                    self.file.write(_object(self._level, "output", text))
                self.file.flush()

    def end(self) -> None:
        """Write what has come, and let the descriptor be as before."""
        os.dup2(self.file.fileno(), self._number)
        self._thread.join(5)  # a child that outlives this process may hold it open


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


_outputs: list[_Output] = []


def _write_json() -> None:
    if _outputs:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    _outputs.extend((_Output(1, "info"), _Output(2, "warning")))
    handler = logging.StreamHandler(_outputs[1].file)
    handler.setFormatter(_Formatter())
    for name in ("fedlit", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _log_exception
    atexit.register(end_log)


def end_log() -> None:
    """Write what has come until now, and write text from now on: before the process ends, or becomes another."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    while _outputs:
        _outputs.pop().end()


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("fedlit").error("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def print_error(text: object) -> None:
    """Print why a command ends, in the form that was asked for."""
    if os.environ.get(_VARIABLE) == "json":
        logging.getLogger("fedlit").error(str(text))
    else:
        print(text, file=sys.stderr)
