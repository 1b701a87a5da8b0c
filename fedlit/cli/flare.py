"""``fedlit flare``: writes the job by which NVIDIA FLARE trains an experiment's run across its sites.

``fedlit flare site`` is the process of a site in that job, which FLARE's starts: apart from it, so that one that dies
of its data or of its memory is started again, and takes part again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from fedlit.cli.arguments import find_config, normalise, options, refuse_nameless
from fedlit.cli.experiment import all_clients
from fedlit.cli.seats import AGAIN, print_seat_log, read_run, start_again, take_seat
from fedlit.federation.names import alike, difference, shown
from fedlit.remote.message_carrier import MessageCaller
from fedlit.remote.relay import TIMES, RelayedSender
from fedlit.remote.seats import CarriedSite

COMPONENTS = "fedlit.flare"
"""Where the classes are that a job names, as it stands in ``class_allow_list`` of a party's resources."""

JOB = "a job of FLARE"
"""In words, for errors."""

_DESCRIPTION = (
    "Write a job folder for NVIDIA FLARE, which its own tools submit: nvflare job submit -j JOB. All other options are "
    "those of fedlit fit. See docs/flare.md."
)


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
    help_ = "of the experiment; may be given several times"
    parser.add_argument("--config", "-c", action="append", default=[], help=help_)
    given, others = parser.parse_known_args(args)
    sites = read_sites(given.sites)
    for name in ("wait_for", "patience"):
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
    check(files, others, sites)
    texts = {f"{place}-{file.name}": file.read_text() for place, file in enumerate(files)}
    arguments = [f"--config={name}" for name in texts] + normalise(others)
    write(given.out, sites, texts, arguments, {"wait_for": given.wait_for, "patience": given.patience})
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


def check(files: list[Path], others: list[str], sites: dict[str, list[str]]) -> None:
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
    seat = CarriedSite(MessageCaller(RelayedSender()), None, wait_for, patience)
    try:
        take_seat(experiment, seat)
    except AGAIN as error:
        start_again(error)


def write(
    folder: Path, sites: dict[str, list[str]], texts: dict[str, str], arguments: list[str], times: dict[str, float]
) -> None:
    """Write a job's files."""
    configs = folder / "app" / "config"
    configs.mkdir(parents=True)
    for name, text in texts.items():
        (configs / name).write_text(text)
    controller = {"sites": sites, "arguments": arguments, **times}
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
