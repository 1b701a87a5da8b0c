"""``fedlit serve``, ``join`` and ``flare``: a federation across organisations, from each one's command line.

``fedlit flare`` writes the job by which NVIDIA FLARE trains an experiment's run across its sites. ``fedlit flare site``
is the process of a site in that job, which FLARE's starts: apart from it, so that one that dies of its data or of its
memory is started again, and takes part again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fedlit.cli.arguments import find_config, normalise, options, refuse_linked, refuse_nameless, trees
from fedlit.cli.command import is_question
from fedlit.cli.experiment import Experiment, all_clients
from fedlit.cli.folders import STARTS
from fedlit.cli.known import load
from fedlit.cli.logs import end_log
from fedlit.cli.mistakes import check
from fedlit.cli.page import PORT, open_page
from fedlit.cli.plan import print_table
from fedlit.cli.policy import asked
from fedlit.federation import FederationError
from fedlit.federation.names import alike, check_list, difference, shown
from fedlit.remote import (
    AheadOfServerError,
    DismissedError,
    LostClientsError,
    Policy,
    PolicyError,
    Seat,
    Server,
    ServerLostError,
    Site,
)
from fedlit.remote.message_carrier import MessageCaller
from fedlit.remote.policy import REFUSED
from fedlit.remote.relay import KIT, OWN, POLICY, TIMES, RelayedSender
from fedlit.remote.seats import KIT_FILES, STEP_TIMEOUT, CarriedSite

_SEATS: dict[str, type[Server] | type[Site]] = {"serve": Server, "join": Site}
_FILES = ("certificate", "key", "ca", "policy")
_OWN = ("peers", "allow_rejoin")
"""What a site in FLARE says of itself; all else is in its startup kit."""
_ROUND = "FEDLIT_SERVER_ROUND"
"""Set in the environment of a site that starts itself again: the round that it may resume from at the latest."""
_MOST_STARTS, _WITHIN = 5, 120.0  # seconds

AGAIN = (DismissedError, ServerLostError, AheadOfServerError, LostClientsError)
"""Errors after which a site starts again; the server does so after the last of them."""

COMPONENTS = "fedlit.flare"
"""Where the classes are that a job names, as it stands in ``class_allow_list`` of a party's resources."""

JOB = "a job of FLARE"
"""In words, for errors."""

_DESCRIPTION = (
    "Write a job folder for NVIDIA FLARE, which its own tools submit: nvflare job submit -j JOB. All other options are "
    "those of fedlit fit. See docs/flare.md."
)


def serve(args: list[str]) -> None:
    """Take the server's seat; starts again where a round needs sites that have dropped out, and waits for them."""
    print_seat_log()
    page = next((word for word in args if word == "--page" or word.startswith("--page=")), None)
    where = None if page is None else page.partition("=")[2] or PORT
    try:
        _take("serve", [word for word in args if word != page], where)
    except LostClientsError as error:
        start_again(error, "The server")


def join(args: list[str]) -> None:
    """Take a site's seat; starts again where the run goes on without this process, or its round has to be repeated."""
    print_seat_log()
    try:
        _take("join", args)
    except AGAIN as error:
        start_again(error)


def print_seat_log() -> None:
    """Print what the seats log: who joins and leaves, who is waited for, and why somebody is refused."""
    log = logging.getLogger("fedlit.remote")
    if not log.handlers and not logging.getLogger("fedlit").handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fedlit %(asctime)s: %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def _take(word: str, args: list[str], page: str | None = None) -> None:
    args = normalise(["fit", *args])
    experiment = read_run(args, word)
    if is_question(args):
        return
    seat = make_seat(word, experiment.parsed.arguments.get("seat"), args)
    if page is not None:
        assert isinstance(seat, Server)
        runs = load("fedlit.callbacks.report:LiveRuns")([experiment.root])
        open_page(lambda: runs.page(*seat.presence()), page, "--page").start()
    take_seat(experiment, seat)


def read_run(args: list[str], word: str) -> Experiment:
    """The experiment of normalised arguments of ``fedlit fit``; ends the command if it stands for several runs."""
    refuse_linked(args)
    check(args)
    experiment = Experiment(args, one_target=True)
    if not is_question(args) and len(experiment.runs) > 1:
        sys.exit(
            f"fedlit: {word} is for one run, but this is {len(experiment.runs)} (seeds, targets, compare): give "
            "--seeds=null --targets=null --compare=null, and a seed_everything and data.target that all have alike"
        )
    return experiment


def take_seat(experiment: Experiment, seat: Seat) -> None:
    """Train in a seat, from this seat's own checkpoint if there is one, and print what came of it."""
    if seat.policy is not None:  # before anything is built that may read data
        seat.policy.check(asked(experiment.configuration(0).arguments))
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
    except PolicyError:
        raise
    except (ValueError, TypeError) as error:
        sys.exit(f"fedlit: seat: {error}")


def _folders(args: Sequence[str]) -> dict[str, Path]:
    """The folder of the configuration that names each file of the seat."""
    configs = ((Path(where).parent, tree) for where, tree in trees(args) if os.path.isfile(where))
    return {name: folder for folder, tree in configs if isinstance(tree, dict) for name in tree.get("seat") or ()}


def _beside(file: str, folder: Path | None) -> str:
    """A relative file from the folder of its configuration, if it is there, and else as it is."""
    if folder is not None and not os.path.isabs(os.path.expanduser(file)) and (folder / file).is_file():
        return str(folder / file)
    return file


def start_again(error: FederationError, who: str = "This site") -> None:
    """Replace this process by a new one of the same command."""
    now = time.time()
    starts = [float(each) for each in os.environ.get(STARTS, "").split()]
    starts = [each for each in starts if now - each < _WITHIN]
    if len(starts) >= _MOST_STARTS:
        sys.exit(f"fedlit: {type(error).__name__}: {error}. Started again {len(starts)} times within {_WITHIN:g} s")
    print(f"fedlit: {type(error).__name__}: {error}. {who} starts again", file=sys.stderr, flush=True)
    os.environ[STARTS] = " ".join(map(str, [*starts, now]))
    if isinstance(error, AheadOfServerError):
        os.environ[_ROUND] = str(error.server_round)
    time.sleep(1)
    end_log()  # execv drops what is buffered
    # -P: no file of the folder takes the place of a library's
    os.execv(sys.executable, [sys.executable, "-P", "-m", "fedlit.cli", *sys.argv[1:]])


def flare(args: list[str]) -> None:
    """Write a job, or be a site's process in one."""
    if args[:1] == ["site"]:
        _site(args[1:])
        return
    parser = argparse.ArgumentParser("fedlit flare", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--sites", required=True, help="as FLARE names them: north,south, or north:client+client,south")
    parser.add_argument("--out", required=True, type=Path, help="folder of the job, made if need be")
    parser.add_argument("--wait_for", type=float, default=600.0, help="seconds to wait for sites (default: 600)")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds that one may be silent (default: 20)")
    help_ = "seconds for which a site that is connected may send nothing (default: %(default)g)"
    parser.add_argument("--step_timeout", type=float, default=STEP_TIMEOUT, help=help_)
    help_ = "of the experiment; may be given several times"
    parser.add_argument("--config", "-c", action="append", default=[], help=help_)
    given, others = parser.parse_known_args(args)
    sites = read_sites(given.sites)
    for name in ("wait_for", "patience", "step_timeout"):
        if not 0 < getattr(given, name) < 1e9:
            sys.exit(f"fedlit: --{name} must be positive seconds, got {getattr(given, name)}")
    if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
        sys.exit(f"fedlit: --out '{given.out}' is there already: give a new folder, or remove it")
    files = [Path(find_config(name)) for name in given.config]
    for name, file in zip(given.config, files, strict=True):
        if not file.is_file():
            sys.exit(f"fedlit: --config {name} is no file and no installed configuration: fedlit list")
    for key, value in options(others):
        if value is not None and Path(value).is_file():
            sys.exit(
                f"fedlit: --{key} {value} is a file of this machine, which a job does not have: give it by --config"
            )
    check_sites(files, others, sites)
    texts = {f"{place}-{file.name}": file.read_text() for place, file in enumerate(files)}
    arguments = [f"--config={name}" for name in texts] + normalise(others)
    times = {"wait_for": given.wait_for, "patience": given.patience}
    write_job(given.out, sites, texts, arguments, times, given.step_timeout)
    print(f"fedlit: the job is in '{given.out}'; submit it with: nvflare job submit -j {given.out}")
    print(f"Each party needs fedlit, and {COMPONENTS!r} in class_allow_list of its local/resources.json; a site states")
    print("where its data are in its local/fedlit.yaml. See docs/flare.md.")


def read_sites(text: str) -> dict[str, list[str]]:
    """Clients of each site, from ``north,south`` or ``north:client+client,south``."""
    sites: dict[str, list[str]] = {}
    for part in text.split(","):
        name, _, clients = part.strip().partition(":")
        if not name or name in sites or name == "server":
            what = "a site without a name" if not name else f"{name!r} twice" if name in sites else "'server'"
            sys.exit(f"fedlit: --sites must be names, each once and none 'server', as in north,south, got {what}")
        sites[name] = [client.strip() for client in clients.split("+") if client.strip()] or [name]
    for group in alike(sites):
        sys.exit(f"fedlit: --sites {shown(group)} differ in {difference(group)}: rename one, or name it once")
    all_of_them = [client for of in sites.values() for client in of]
    twice = sorted({client for client in all_of_them if all_of_them.count(client) > 1})
    if twice:
        sys.exit(f"fedlit: --sites has client {twice[0]!r} at two sites, and a client is at one")
    return sites


def check_sites(files: list[Path], others: list[str], sites: dict[str, list[str]]) -> None:
    """End the command if the experiment is none, or has other clients than the sites."""
    args = normalise(["fit", *(f"--config={file}" for file in files), *others])
    refuse_nameless(args)
    experiment = read_run(args, JOB)
    clients, at_sites = all_clients(experiment.parsed), {client for of in sites.values() for client in of}
    if {*clients} != at_sites:
        sys.exit(
            f"fedlit: --sites has the clients {sorted(at_sites)}, but the experiment's are {sorted(clients)}: name the "
            "site of each, as in --sites north:client+client,south:client"
        )


def _site(args: list[str]) -> None:
    print_seat_log()
    experiment = read_run(normalise(["fit", *args]), JOB)
    times = os.environ.get(TIMES)
    if times is None:
        sys.exit("fedlit: flare site is started by NVIDIA FLARE, in a job that fedlit flare has written")
    wait_for, patience = map(float, times.split())
    try:
        policy = os.environ.get(POLICY)
        seat = CarriedSite(MessageCaller(RelayedSender()), None, wait_for, patience)
        certify(seat, args)
        seat.policy = None if policy is None else Policy.read(policy)
        take_seat(experiment, seat)
    except AGAIN as error:
        start_again(error)
    except PolicyError as error:
        print(f"fedlit: PolicyError: {error}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)


def certify(seat: CarriedSite, args: Sequence[str]) -> None:
    """Let a site in FLARE vouch by its startup kit, and know others as its own configuration says, not as the job's."""
    own: Any = next((tree for where, tree in trees(args) if where == os.environ.get(OWN)), {})
    given = own.get("seat") or {}
    unknown = [name for name in given if name not in _OWN]
    if unknown:
        sys.exit(f"fedlit: seat of a site in FLARE takes {', '.join(_OWN)}, got {', '.join(unknown)}")
    seat.allow_rejoin, seat.peers = given.get("allow_rejoin") or [], given.get("peers") or {}
    if kit := os.environ.get(KIT):
        certificate, key, ca = (Path(kit, name) for name in KIT_FILES)
        seat.files = certificate, key, ca
    try:
        check_list("allow_rejoin", seat.allow_rejoin)
        seat.voucher()
    except (ValueError, TypeError) as error:
        sys.exit(f"fedlit: seat: {error}")


def write_job(
    folder: Path,
    sites: dict[str, list[str]],
    texts: dict[str, str],
    arguments: list[str],
    times: dict[str, float],
    step_timeout: float,
) -> None:
    """Write a job's files."""
    configs = folder / "app" / "config"
    configs.mkdir(parents=True)
    for name, text in texts.items():
        (configs / name).write_text(text)
    controller = {"sites": sites, "arguments": arguments, **times, "step_timeout": step_timeout}
    files: dict[Path, dict[str, Any]] = {
        folder / "meta.json": {
            "name": folder.name,
            "resource_spec": {},
            "min_clients": 1,  # else FLARE ends the job when it finds one dead; the run knows itself whom it needs
            "deploy_map": {"app": ["server", *sites]},
        },
        configs / "config_fed_server.json": {
            "format_version": 2,
            "workflows": [{"id": "fedlit", "path": f"{COMPONENTS}.FedlitController", "args": controller}],
            "components": [],
        },
        configs / "config_fed_client.json": {
            "format_version": 2,
            "executors": [
                {
                    "tasks": ["fedlit"],
                    "executor": {"path": f"{COMPONENTS}.FedlitExecutor", "args": {"arguments": arguments, **times}},
                }
            ],
            "components": [],
        },
    }
    for file, content in files.items():
        file.write_text(json.dumps(content, indent=2) + "\n")
