"""Runs a function on several processes joined by torch.distributed, each a fork of one that has imported everything.

A fresh interpreter takes seconds to import torch and Lightning; a fork of a process that has takes milliseconds. The
first run starts that process, one per pytest process, and `stop` ends it. All forks share the seed of Python's string
hashes, so whatever depends on the order of a set looks the same on all of them: `test_cli.py` has a run on fresh
interpreters too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
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
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder, _server_finds_support():
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        pipes, processes = [], []
        try:
            for rank in range(ranks):
                receive, send = context.Pipe(duplex=False)
                environment = _environment(rank, ranks, port)
                target = (send, str(Path(folder, str(rank))), environment, pickle.dumps((function, arguments)))
                process = context.Process(target=_child, args=target)
                process.start()
                send.close()
                pipes.append(receive)
                processes.append(process)
            return _collect(pipes, processes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def stop() -> None:
    """End the process that others are forked from, if there is one, and wait for it."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # the only way: else it lives until this process ends


def _collect(pipes: list[Any], processes: list[Any], folder: Path, timeout: float) -> list[Ended]:
    """Results as they come; a process whose pipe closes has ended, with or without one."""
    told: dict[int, tuple[Any, str]] = {}
    deadline = time.monotonic() + timeout
    pending = {pipe: rank for rank, pipe in enumerate(pipes)}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            said = "\n".join(_read(folder / str(rank)) for rank in range(len(pipes)))
            raise AssertionError(f"ranks {sorted(pending.values())} did not end within {timeout:g} s:\n{said}")
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                told[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                told[rank] = (None, "")
    ended = []
    for rank, process in enumerate(processes):
        process.join(max(1.0, deadline - time.monotonic()))
        if process.exitcode is None:
            raise AssertionError(f"rank {rank} returned, but did not end within {timeout:g} s")
        ended.append(Ended(*told[rank], process.exitcode, _read(folder / str(rank))))
    return ended


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What Lightning's own launcher tells a process."""
    launched = dict(zip(LAUNCHED, ("127.0.0.1", str(port), "0", str(rank)), strict=True)) if ranks > 1 else {}
    return {"GLOO_SOCKET_IFNAME": "lo", "PL_GLOBAL_SEED": "0", **launched}


def _child(pipe: Any, output: str, environment: dict[str, str], call: bytes) -> None:
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for name in (*LAUNCHED, "WORLD_SIZE"):  # of a run that was under way when the first process started
        os.environ.pop(name, None)
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


@contextmanager
def _server_finds_support() -> Iterator[None]:
    """Python 3.11 does not hand ``sys.path`` to the process that forks, but the environment."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *([before] if before else [])])
    multiprocessing.set_forkserver_preload(["preloaded"])
    try:
        forkserver.ensure_running()
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
