"""Work on several cores: threads where ``gmpy2`` lets go of the interpreter lock, and forked processes."""

from __future__ import annotations

import functools
import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any, BinaryIO, NoReturn


@functools.cache
def gmpy2() -> Any:
    """The ``gmpy2`` module, or ``None``: everything works without it, slower."""
    try:
        return import_module("gmpy2")
    except ImportError:
        return None


def spread(work: Callable[[int], int], numbers: Sequence[int], workers: int | None) -> list[int]:
    """``work`` of each number, in order, on several cores while ``gmpy2`` lets go of the interpreter lock.

    It has to take much longer than passing the lock on. Threads live for one call: nothing to break at a fork.
    """
    workers = _cores() if workers is None else workers
    if workers < 2 or len(numbers) < 2 or gmpy2() is None:
        return [work(number) for number in numbers]

    def work_on(part: Sequence[int]) -> list[int]:
        with gmpy2().context(allow_release_gil=True):
            return [work(number) for number in part]

    parts = _split(numbers, workers)
    with ThreadPoolExecutor(len(parts)) as pool:
        return [result for results in pool.map(work_on, parts) for result in results]


def spread_forked(
    work: Callable[[Sequence[int]], bytes], numbers: Sequence[int], size: int, workers: int | None, smallest: int
) -> bytes:
    """``work`` of ``numbers``, on several cores by forking: children do a part each while this process does the first.

    Children share the memory of this process, such as tables, from before the call. This process does the part of a
    child that fails, so that the result is complete, or the error that of ``work``. That may read the operating
    system's random source, but must take no lock: one that another thread holds at the fork is never released in a
    child. It returns ``size`` bytes for each number; below ``smallest`` numbers to a process, forking does not pay.
    """
    workers = (_cores() if workers is None else workers) if hasattr(os, "fork") else 1
    first, *others = _split(numbers, max(1, min(workers, len(numbers) // smallest)))
    with ExitStack() as children:
        pipes = [children.enter_context(_forked(work, part)) for part in others]
        bodies = [work(first)]
        for part, pipe in zip(others, pipes, strict=True):
            body = pipe.read(len(part) * size)
            bodies.append(body if len(body) == len(part) * size else work(part))
    return b"".join(bodies)


@contextmanager
def _forked(work: Callable[[Sequence[int]], bytes], part: Sequence[int]) -> Iterator[BinaryIO]:
    """A pipe with the child's result of ``part``; it ends early if the child fails, or none can be made."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as pipe:
        child = None
        with suppress(OSError), warnings.catch_warnings():
            # since Python 3.12, of locks that other threads may hold: the child takes none
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _answer_and_exit(work, part, reader, writer)
        os.close(writer)
        try:
            yield pipe
        finally:
            if child is not None:
                with suppress(ProcessLookupError, ChildProcessError):  # where the program reaps its children elsewhere
                    os.kill(child, signal.SIGKILL)  # it has sent all, or an error here has made it useless
                    os.waitpid(child, 0)


def _answer_and_exit(work: Callable[[Sequence[int]], bytes], part: Sequence[int], reader: int, writer: int) -> NoReturn:
    """Run in the child; exit handlers and finalizers are left to the parent."""
    try:
        gc.disable()
        os.close(reader)  # so that it cannot outlive a parent that has died
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(work(part))
    finally:
        os._exit(0)


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _split(numbers: Sequence[int], count: int) -> list[Sequence[int]]:
    """``numbers`` in at most ``count`` parts, as even as possible."""
    share = max(1, -(-len(numbers) // count))
    return [numbers[first : first + share] for first in range(0, len(numbers) or 1, share)]
