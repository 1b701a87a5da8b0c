"""Runs a function on several processes joined by torch.distributed, each a fork of one that has imported everything.

A fresh interpreter takes seconds to import torch and Lightning; a fork of a process that has takes milliseconds.
`start` forks the first from the pytest process after its tests are collected, before any of them has started a thread
that a fork would lose, and `stop` ends it. All forks share the seed of Python's string hashes, so whatever depends on
the order of a set looks the same on all of them: `test_cli.py` has a run on fresh interpreters too.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")
LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK")


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        result: What the function returned.
        error: Traceback of what it raised; empty if it returned or the process died.
        exit_code: Of the process; negative is a signal.
        output: What it printed.
    """

    result: Any
    error: str
    exit_code: int
    output: str


def results(function: Callable[..., Any], *arguments: Any, ranks: int = 1, timeout: float = 90) -> list[Any]:
    """What ``function(*arguments)`` returns on each rank; a rank that fails fails the test with its traceback."""
    ended = run(function, *arguments, ranks=ranks, timeout=timeout)
    for rank, one in enumerate(ended):
        if one.error or one.exit_code:
            raise AssertionError(f"rank {rank} of {ranks} ended with {one.exit_code}:\n{one.output}\n{one.error}")
    return [one.result for one in ended]


def run(function: Callable[..., Any], *arguments: Any, ranks: int = 1, timeout: float = 90) -> list[Ended]:
    """Call ``function(*arguments)`` on each rank, as a launcher would, and say how each ended.

    Args:
        function: Of a module that can be imported, as those in tests/support can.
        *arguments: What it is called with; pickled, as is what it returns.
        ranks: Number of processes.
        timeout: Seconds after which all are killed and the test fails.
    """
    _, pipe = _server[0]
    pipe.send_bytes(pickle.dumps((pickle.dumps((function, arguments)), ranks, timeout)))
    answer = pickle.loads(pipe.recv_bytes())
    if isinstance(answer, AssertionError):
        raise answer
    return answer


_server: list[tuple[Any, Any]] = []
"""The process that others are forked from, and the pipe to it, once there is one."""


def start() -> None:
    """Fork the process that others are forked from."""
    import helpers

    data = helpers.digits()
    for name in data.domain_names():
        data.load(name)  # drawn once for all
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_serve, args=(ours, theirs))
    process.start()
    theirs.close()
    _server.append((process, ours))


def stop() -> None:
    """End the process that others are forked from, if there is one, and wait for it."""
    while _server:
        process, pipe = _server.pop()
        process.terminate()
        process.join()
        pipe.close()


def _serve(other_end: Any, pipe: Any) -> None:
    import torch

    other_end.close()  # or its end would not show
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.zeros(1),))  # compiles its rules once, for all forks
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    _train_once()
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            call, ranks, timeout = pickle.loads(pipe.recv_bytes())
            answer: list[Ended] | AssertionError
            try:
                answer = _fork(call, ranks, timeout)
            except AssertionError as error:
                answer = error
            pipe.send_bytes(pickle.dumps(answer))


def _train_once() -> None:
    """Import and look up what a run does at its first round, for all forks."""
    from lightning.fabric.utilities import registry

    import helpers
    from fedlit.methods import FedAvg

    registry.entry_points = cache(registry.entry_points)  # which every Trainer would read from all installed packages
    data = helpers.digits()
    helpers.trainer(1, strategy={"local_steps": 1}).fit(helpers.build(FedAvg, data), data)


def _fork(call: bytes, ranks: int, timeout: float) -> list[Ended]:
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        pipes, processes = [], []
        try:
            for rank in range(ranks):
                receive, send = FORK.Pipe(duplex=False)
                target = (send, str(Path(folder, str(rank))), _environment(rank, ranks, port), call)
                process = FORK.Process(target=_child, args=target)
                process.start()
                send.close()
                pipes.append(receive)
                processes.append(process)
            return _collect(pipes, processes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Any], processes: list[Any], folder: Path, timeout: float) -> list[Ended]:
    """Results as they come; a process whose pipe closes has ended, with or without one."""
    sent: dict[int, tuple[Any, str]] = {}
    deadline = time.monotonic() + timeout
    pending = {pipe: rank for rank, pipe in enumerate(pipes)}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            output = "\n".join(_read(folder / str(rank)) for rank in range(len(pipes)))
            raise AssertionError(f"ranks {sorted(pending.values())} did not end within {timeout:g} s:\n{output}")
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                sent[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                sent[rank] = (None, "")
    ended = []
    for rank, process in enumerate(processes):
        process.join(max(1.0, deadline - time.monotonic()))
        if process.exitcode is None:
            raise AssertionError(f"rank {rank} returned, but did not end within {timeout:g} s")
        ended.append(Ended(*sent[rank], process.exitcode, _read(folder / str(rank))))
    return ended


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment that Lightning's launcher sets."""
    launched = dict(zip(LAUNCHED, ("127.0.0.1", str(port), "0", str(rank)), strict=True)) if ranks > 1 else {}
    return {"GLOO_SOCKET_IFNAME": "lo", "PL_GLOBAL_SEED": "0", **launched}


def _child(pipe: Any, output: str, environment: dict[str, str], call: bytes) -> None:
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # pytest has put others in their places
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(environment)
    result, error = None, ""
    try:
        function, arguments = pickle.loads(call)
        result = function(*arguments)
    except BaseException:
        error = traceback.format_exc()
    pipe.send_bytes(pickle.dumps((result, error)))
    pipe.close()
    import torch.distributed as dist

    if dist.is_initialized():  # exit handlers do not run in a fork
        dist.destroy_process_group()


def free_port() -> int:
    """A port of the loopback that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
