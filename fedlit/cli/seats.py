"""``fedlit serve`` and ``join``: a federation across organisations, from each one's command line."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fedlit.cli.arguments import content_of, find_config, normalise, options, refuse_linked
from fedlit.cli.experiment import Experiment
from fedlit.cli.memory import is_question
from fedlit.cli.mistakes import check
from fedlit.cli.plan import print_table
from fedlit.federation import FederationError
from fedlit.remote import AheadOfServerError, DismissedError, Seat, Server, ServerLostError, Site

_SEATS: dict[str, type[Server] | type[Site]] = {"serve": Server, "join": Site}
_FILES = ("certificate", "key", "ca")
_STARTS = "FEDLIT_STARTS"
"""In the environment of a site that has started itself again: the times at which it did."""
_ROUND = "FEDLIT_SERVER_ROUND"
"""Set in the environment of a site that starts itself again: the round that it may resume from at the latest."""
_MOST_STARTS, _WITHIN = 5, 120.0  # seconds

AGAIN = (DismissedError, ServerLostError, AheadOfServerError)
"""Errors after which a site starts again."""


def serve(args: list[str]) -> None:
    """Take the server's seat."""
    print_seat_log()
    _take("serve", args)


def join(args: list[str]) -> None:
    """Take a site's seat; starts again where the run goes on without this process, or the server was lost."""
    print_seat_log()
    try:
        _take("join", args)
    except AGAIN as error:
        start_again(error)


def print_seat_log() -> None:
    """Print what the seats log: who joins and leaves, who is waited for, and why somebody is refused."""
    log = logging.getLogger("fedlit.remote")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fedlit %(asctime)s: %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def _take(word: str, args: list[str]) -> None:
    args = normalise(["fit", *args])
    experiment = read_run(args, word)
    if not is_question(args):
        take_seat(experiment, make_seat(word, experiment.parsed.arguments.get("seat"), args))


def read_run(args: list[str], word: str) -> Experiment:
    """The experiment of normalised arguments of ``fedlit fit``; ends the command if it stands for several runs."""
    refuse_linked(args)
    check(args)
    experiment = Experiment(args)
    if not is_question(args) and len(experiment.runs) > 1:
        sys.exit(
            f"fedlit: {word} is for one run, but this is {len(experiment.runs)} (seeds, targets, compare): give "
            "--seeds=null --targets=null --compare=null, and a seed_everything and data.target that all have alike"
        )
    return experiment


def take_seat(experiment: Experiment, seat: Seat) -> None:
    """Train in a seat, from this seat's own checkpoint if there is one, and print what came of it."""
    folder = experiment.folder
    print(
        f"fedlit: this is the {'server' if seat.is_server else 'site'}; its runs lie in '{experiment.root}'", flush=True
    )
    if folder.busy(0):
        sys.exit(f"fedlit: another command has this seat of this run in '{experiment.root}': end it first")
    until = os.environ.pop(_ROUND, None)
    experiment.train(0, seat, None if until is None else int(until))
    summary = folder.finished(0)
    if summary is not None:
        print_table([summary])


def make_seat(word: str, given: object, args: Sequence[str]) -> Seat:
    """The seat that a configuration describes, with its files beside it."""
    kind, parameters = _SEATS[word], inspect.signature(_SEATS[word]).parameters
    if hasattr(given, "as_dict"):
        given = given.as_dict()
    if not isinstance(given, Mapping) or not given:
        sys.exit(
            f"fedlit: {word} needs a seat, and no configuration has one: give a --config with 'seat:' and below it "
            f"{', '.join([*parameters][:5])}; see docs/across.md"
        )
    unknown = [name for name in given if name not in parameters]
    if unknown:
        other = "join" if word == "serve" else "serve"
        theirs = inspect.signature(_SEATS[other]).parameters
        advice = f" ({unknown[0]} is of fedlit {other})" if unknown[0] in theirs else ""
        sys.exit(f"fedlit: seat of {word} takes {', '.join(parameters)}, got {', '.join(unknown)}{advice}")
    needed = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
    lacking = [name for name in needed if name not in given]
    if lacking:
        sys.exit(f"fedlit: seat of {word} needs {', '.join(lacking)}, which no configuration has: add them below seat")
    folders = _folders(args)
    files = {name: _beside(str(given[name]), folders.get(name)) for name in _FILES if name in given}
    try:
        return kind(**cast(Any, {**given, **files}))
    except (ValueError, TypeError) as error:
        sys.exit(f"fedlit: seat: {error}")


def _folders(args: Sequence[str]) -> dict[str, Path]:
    """The folder of the configuration that names each file of the seat."""
    folders: dict[str, Path] = {}
    for key, value in options(args):
        if key in ("config", "c") and value is not None and os.path.isfile(find_config(value)):
            content = content_of(find_config(value))
            seat = content.get("seat") if isinstance(content, dict) else None
            for name in seat if isinstance(seat, dict) else ():
                folders[name] = Path(find_config(value)).parent
    return folders


def _beside(file: str, folder: Path | None) -> str:
    """A relative file from the folder of its configuration, if it is there, and else as it is."""
    if folder is not None and not os.path.isabs(os.path.expanduser(file)) and (folder / file).is_file():
        return str(folder / file)
    return file


def start_again(error: FederationError) -> None:
    """Replace this process by a new one of the same command."""
    now = time.time()
    starts = [float(each) for each in os.environ.get(_STARTS, "").split()]
    starts = [each for each in starts if now - each < _WITHIN]
    if len(starts) >= _MOST_STARTS:
        sys.exit(f"fedlit: {type(error).__name__}: {error}. Started again {len(starts)} times within {_WITHIN:g} s")
    print(f"fedlit: {type(error).__name__}: {error}. This site starts again", file=sys.stderr, flush=True)
    os.environ[_STARTS] = " ".join(map(str, [*starts, now]))
    if isinstance(error, AheadOfServerError):
        os.environ[_ROUND] = str(error.server_round)
    time.sleep(1)
    sys.stdout.flush()  # execv drops what is buffered
    # -P: no file of the folder takes the place of a library's
    os.execv(sys.executable, [sys.executable, "-P", "-m", "fedlit.cli", *sys.argv[1:]])
