"""``fedlit doctor`` and ``fedlit --version``: what is installed, and what would keep a run from working here."""

from __future__ import annotations

import argparse
import datetime as dt
import errno
import os
import platform
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fedlit.cli.arguments import find_config, trees

_FREE = 1 << 30
"""Bytes of disk below which checkpoints of a run may not fit."""
_DAYS = 14
"""From which on before its end a certificate is reported."""
_SECONDS = 5.0
"""For which an answer of the server is waited."""
_PATIENCE = 10.0
"""Seconds for other commands, which hang where a driver is broken."""
_NO_EXTRAS = ("all", "dev", "docs")
"""Sets of extras, and what developers need."""


@dataclass(frozen=True)
class Finding:
    """Something that was looked at; ``mend`` is what to do about it, and empty if nothing is wrong."""

    topic: str
    text: str
    mend: str = ""


def doctor(args: list[str]) -> None:
    """Print what was found; ends with status 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        "fedlit doctor",
        description="Look at versions, extras, threads, GPUs, disk and clock; with --config also at the seat of fedlit "
        "serve or join that it has: certificates, address, and whether the server answers. Ends with status 1 if "
        "something is wrong.",
    )
    config = "configuration with a seat, as given to fedlit serve or join; may be given several times"
    parser.add_argument("--config", "-c", action="append", default=[], help=config)
    configs = [find_config(config) for config in parser.parse_args(args).config]
    for config in configs:
        if not Path(config).is_file():
            parser.error(f"--config: there is no file {config!r}")
    wrong = 0
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        "fedlit": _installation,
        "torchvision": _torchvision,
        "threads": _threads,
        "gpus": _gpus,
        "disk": _disk,
        "clock": _clock,
        "seat": partial(_seat, configs),
    }
    for topic, part in parts.items():
        for finding in _looked_at(topic, part):  # as it is found: a server may take seconds to answer
            print(f"{'!!' if finding.mend else 'ok'}  {finding.topic:<14}{finding.text}", flush=True)
            if finding.mend:
                wrong += 1
                print(f"{'':18}-> {finding.mend}")
    if wrong:
        sys.exit(f"fedlit: {wrong} of these (!!) may keep runs from working")


def _looked_at(topic: str, part: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a part finds; an error of it is a finding, and the other parts go on."""
    try:
        yield from part()
    except Exception as error:  # of any kind: what is broken is what is looked for
        text = f"could not be looked at: {type(error).__name__}: {str(error)[:200]}"
        yield Finding(topic, text, "mend what is above first, and see the error")


# ---------------------------------------------------------------- what is installed


def version_lines() -> list[str]:
    """The answer to ``fedlit --version``."""
    lines = [f"fedlit {metadata.version('fedlit')}", f"Python {platform.python_version()}"]
    lines += [f"{name} {_version(name)}" for name in ("torch", "lightning") if _version(name) is not None]
    return [*lines, *_extras()]


@cache
def _requirements() -> tuple[Requirement, ...]:
    """Those of fedlit, without its references to its own extras."""
    every = map(Requirement, metadata.requires("fedlit") or ())
    return tuple(each for each in every if canonicalize_name(each.name) != "fedlit")


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _needed(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _extras() -> list[str]:
    """Lines on extras that are installed, with versions, and those that are not."""
    there, lacking = [], []
    for extra in metadata.metadata("fedlit").get_all("Provides-Extra") or ():
        own = [each for each in _requirements() if _needed(each, extra) and not _needed(each)]
        if extra not in _NO_EXTRAS and all(_version(each.name) for each in own):
            there.append(f"{extra} ({', '.join(f'{each.name} {_version(each.name)}' for each in own)})")
        elif extra not in _NO_EXTRAS:
            lacking.append(extra)
    lines = [f"extras: {', '.join(there)}"] if there else []
    if lacking:
        lines.append(f"extras that are not installed: {', '.join(lacking)}: pip install 'fedlit[NAME]'")
    return lines


def _installation() -> Iterator[Finding]:
    yield Finding("fedlit", f"{metadata.version('fedlit')}, Python {platform.python_version()} ({sys.executable})")
    wrong = {}
    for each in _requirements():
        found = _version(each.name)
        if found is None and _needed(each):
            wrong[each] = f"{each.name} is missing"
        elif found is not None and not each.specifier.contains(found, prereleases=True):
            wrong[each] = f"{each.name} is {found}, and must be {each.specifier}"
    wanted = " ".join(f"'{each.name}{each.specifier}'" for each in wrong)
    text = "; ".join(wrong.values()) or ", ".join(f"{name} {_version(name)}" for name in ("torch", "lightning"))
    yield Finding("dependencies", text, f"pip install -U {wanted}" if wrong else "")
    for line in _extras():
        yield Finding("extras", line.removeprefix("extras: ").removeprefix("extras that are "))


def _torchvision() -> Iterator[Finding]:
    if _version("torchvision") is None:
        return  # `_installation` reports it
    try:
        import_module("torchvision.ops")
        yield Finding("torchvision", f"{_version('torchvision')}, which goes with torch")
    except Exception as error:  # its operators are compiled for one version of torch
        pair = f"{_version('torchvision')} does not go with torch {_version('torch')}"
        text = f"{pair} ({''.join(str(error).splitlines()[:1])[:100]})"
        yield Finding("torchvision", text, "pip install -U torch torchvision, in one command and of one source")


# ---------------------------------------------------------------- this machine


def _threads() -> Iterator[Finding]:
    torch = import_module("torch")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    mend = f"set OMP_NUM_THREADS={cores}: more threads than cores wait for each other" if threads > cores else ""
    yield Finding("threads", f"{threads} on {cores} cores", mend)


def _disk() -> Iterator[Finding]:
    folder, free = os.getcwd(), shutil.disk_usage(".").free
    mend = "" if free >= _FREE else "make space, or let runs lie elsewhere: --trainer.default_root_dir DIR"
    if not os.access(folder, os.W_OK):
        mend = "go to a folder that can be written to, or let runs lie in one: --trainer.default_root_dir DIR"
    yield Finding("disk", f"{free / 2**30:.1f} GiB free in '{folder}'", mend)


def _clock() -> Iterator[Finding]:
    now, written = dt.datetime.now(dt.UTC), Path(__file__).stat().st_mtime
    mend = "set the clock of this machine" if now.timestamp() < written - 86_400 else ""  # a day for time zones
    yield Finding("clock", f"{now:%Y-%m-%d %H:%M:%S} UTC; a server's and its sites' may differ by 300 s", mend)


def _gpus() -> Iterator[Finding]:
    torch = import_module("torch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("gpus", f"{', '.join(names)}: --trainer.accelerator gpu")
        return
    if shutil.which("nvidia-smi") is None:
        yield Finding("gpus", "none; training is on the CPU")
        return
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=_PATIENCE)
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"no answer (status {done.returncode})"]
    except (OSError, subprocess.TimeoutExpired) as error:
        lines = [f"cannot be run: {error}"]
    if not lines[0].startswith("GPU"):
        mend = "" if "No devices" in lines[0] else "install the driver again, or start this machine again"
        yield Finding("gpus", f"training is on the CPU; nvidia-smi: {lines[0]}", mend)
        return
    why, mend = "is built without CUDA", "pip install -U torch torchvision, of a build for CUDA"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        given = os.environ["CUDA_VISIBLE_DEVICES"]
        why, mend = f"may not use it (CUDA_VISIBLE_DEVICES={given!r})", "unset CUDA_VISIBLE_DEVICES, to train on it"
    elif torch.version.cuda is not None:
        why, mend = f"for CUDA {torch.version.cuda} cannot use it", "update its driver, or install an older torch"
    yield Finding("gpus", f"{lines[0]}, but torch {torch.__version__} {why}", mend)


# ---------------------------------------------------------------- the seat


def _seat(configs: Sequence[str]) -> Iterator[Finding]:
    given: dict[str, Any] = {}
    words = [f"--config={config}" for config in configs]
    for _, tree in trees(words):
        seat = tree.get("seat") if isinstance(tree, dict) else None
        if seat is not None and not isinstance(seat, dict):
            yield Finding("seat", f"is {seat!r}", "give a mapping of keys below 'seat:', see docs/across.md")
            return
        given |= seat or {}
    if not configs:
        return
    if not given:
        yield Finding("seat", "none in these configurations, which fedlit fit needs none of")
        return
    word = "serve" if {"address", "sites"} & given.keys() else "join"
    seats = import_module("fedlit.cli.seats")
    try:
        seat = seats.make_seat(word, given, words)
    except (SystemExit, ValueError, TypeError, AttributeError) as error:  # PolicyError is one of them
        text = str(error).removeprefix("fedlit: ")
        yield Finding("seat", f"of fedlit {word}", text)
        return
    certificates = import_module("fedlit.remote.certificates")
    own = certificates.read_certificates("certificate", seat.files[0])[0]
    left = (own.not_valid_after_utc - dt.datetime.now(dt.UTC)).days
    name = certificates.common_name(own)
    text = f"of {name!r}, with its key and signed by the ca, until {own.not_valid_after_utc:%Y-%m-%d} ({left} days)"
    yield Finding("certificate", text, "" if left >= _DAYS else "have it renewed, and start again with the new one")
    yield _listens(seat.address) if word == "serve" else _answers(seat.server, *seat.files)


def _listens(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    if host == "*" or (":" in host and not host.startswith("[")):
        return Finding("address", f"{address} is none", "write 0.0.0.0:PORT for all, and an IPv6 address as [::1]:PORT")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(place)
            trial.listen()
    except OSError as error:
        mend = "give an address of this machine, or 0.0.0.0:PORT for all"
        if error.errno == errno.EADDRINUSE:
            mend = "end what listens there, or give another seat.address"
        elif error.errno == errno.EACCES:
            mend = "give a port above 1023, which needs no rights of an administrator"
        return Finding("address", f"{address} cannot be listened at: {error}", mend)
    return Finding("address", f"{address} is free")


def _answers(address: str, certificate: Path, key: Path, ca: Path) -> Finding:
    """Whether a server answers, has a certificate of this authority for its name, and takes that of this site."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context = ssl.create_default_context(cafile=str(ca))
    context.load_cert_chain(str(certificate), str(key))
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            secured.settimeout(_SECONDS)
            first = secured.recv(1)  # a refusal of this site's certificate comes after the handshake
    except ssl.SSLCertVerificationError as error:
        mend = "call it by a name that its certificate has, and take the ca that has signed it"
        return Finding("server", f"{address} has a certificate that does not hold: {error.verify_message}", mend)
    except ssl.SSLError as error:
        mend = "ask its operator which ca it has, and whether it is fedlit serve"
        return Finding("server", f"{address} takes no certificate of this site: {error.reason}", mend)
    except socket.gaierror as error:
        return Finding(
            "server", f"{address} is unknown: {error}", "see how its name is written, and ask for its address"
        )
    except OSError as error:
        mend = "see that fedlit serve runs there, and that this machine may dial out to that port"
        return Finding("server", f"{address} does not answer: {error}", mend)
    if not first:
        return Finding("server", f"{address} hangs up", "see that it is fedlit serve, and what it prints")
    return Finding("server", f"{address} answers, and takes the certificate of this site")
