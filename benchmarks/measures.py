"""CPU time and memory, for the benchmarks of speed."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path


def seconds(action: Callable[[], object]) -> float:
    """CPU seconds of an action, over all threads of this process."""
    start = time.process_time()
    action()
    return time.process_time() - start


def medians(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each action.

    Actions take turns, so that all meet the same noise of the machine, in an order drawn anew each time: what ran
    before decides whether the memory for a result is at hand or has to be fetched from the system.
    """
    taken: dict[str, list[float]] = {name: [] for name in actions}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(actions), len(actions)):
            taken[name].append(seconds(actions[name]))
    return {name: statistics.median(times) for name, times in taken.items()}


def mebibytes(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process; ru_maxrss would start from the peak of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def peak(action: Callable[[], object]) -> float:
    """Peak memory of an action, its result included, above what this process holds before it, in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory freed but kept would hide what the action takes
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of what came before
    before = mebibytes("VmRSS")
    kept = action()
    found = mebibytes("VmHWM") - before
    del kept
    return found


def environment() -> dict[str, object]:
    """Versions, cores and load, for the files next to tables."""
    libraries = ("torch", "lightning", "grpcio")
    versions = {"python": platform.python_version(), **{name: version(name) for name in libraries}}
    return {"cores": os.cpu_count(), "load_average": os.getloadavg()[0], "versions": versions}
