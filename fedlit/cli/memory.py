"""Answers to ``--help`` and ``--print_config``, kept in the user's cache: making one imports torch, for seconds.

An answer is kept with all that it depends on: the command line, configurations, and every module that was imported, by
its size and time of change. Where any of them differs, the answer is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fedlit.cli.arguments import find_config, normalise, options

_COMMANDS = ("fit", "validate", "test", "predict", "serve", "join")
_QUESTIONS = ("-h", "--help", "--print_config")
_VARIABLES = ("COLUMNS", "CUDA", "FEDLIT", "HOME", "JSONARGPARSE", "LANG", "LC_", "LINES", "PL_", "PYTHON", "TORCH")
"""Beginnings of environment variables on which libraries let their answers depend."""
_KEPT = 20
"""Answers in the folder; each has a list of some thousand modules."""


def is_question(args: Sequence[str]) -> bool:
    """Whether a command only asks what there is, and runs nothing."""
    words = {arg.split("=")[0] for arg in args}
    return any(word in _QUESTIONS or (word.startswith("--") and word.endswith(".help")) for word in words)


class Answer:
    """The answer to a question, which may have been given before.

    Args:
        args: Of the command line.

    Attributes:
        file: In which the answer is kept; ``None`` if the command is no question.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.file: Path | None = None
        asked = args[:1] and args[0] in _COMMANDS and is_question(args) and "LOCAL_RANK" not in os.environ
        with suppress(OSError, ValueError, RuntimeError, yaml.YAMLError):  # an error of the command, which says more
            if asked:
                cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fedlit")
                self.file = cache / f"answer_{_fingerprint(args)}.json"

    def recall(self) -> list[str] | None:
        """Return what was printed, and what as an error, unless something that it depends on has changed."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            if self.file is not None:
                kept: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
                if all(_stamp(path) == stamp for path, stamp in kept["made_of"].items()):
                    printed: list[str] = kept["printed"]
                    return printed
        return None

    def keep(self, printed: list[str]) -> None:
        """Keep what `recall` returns; without a folder that can be written to, nothing is kept."""
        assert self.file is not None
        files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
        # a folder changes with the packages in it: one that is installed later may be a plug-in, or hide another
        paths = {*files, *(path or os.getcwd() for path in sys.path)}
        made_of = {path: _stamp(path) for path in paths if isinstance(path, str)}
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            writing = self.file.with_suffix(f".{os.getpid()}")
            writing.write_text(json.dumps({"printed": printed, "made_of": made_of}), encoding="utf-8")
            os.replace(writing, self.file)
            answers = sorted(self.file.parent.glob("answer_*.json"), key=lambda file: file.stat().st_mtime_ns)
            for file in answers[:-_KEPT]:
                file.unlink(missing_ok=True)


def _stamp(path: str) -> list[int] | None:
    """Size and time of change; ``None`` if there is no such file."""
    with suppress(OSError):
        status = os.stat(path)
        return [status.st_size, status.st_mtime_ns]
    return None


def _fingerprint(args: Sequence[str]) -> str:
    variables = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    screen = [shutil.get_terminal_size().columns, sys.stdout.isatty()]
    parts = [sys.executable, sys.version, os.getcwd(), *sys.path, *screen, *variables, *args, *_contents(args)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _contents(args: Sequence[str]) -> Iterator[object]:
    """Configurations, and stamps of files that they or options name."""
    for key, value in options(normalise([*args])):
        text = value or ""
        if key in ("config", "c") and os.path.isfile(text):
            text = Path(text).read_text(encoding="utf-8")
            yield text
        yield [_stamp(find_config(each)) for each in _texts(yaml.safe_load(text))]


def _texts(tree: object) -> Iterator[str]:
    if isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(each)
    elif isinstance(tree, str):
        yield tree
