"""Number of CPU threads: as few as are nearly as fast as any, tried on a copy of a client's network before training."""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedlit.federation import FederatedLoader
from fedlit.federation.streams import torch_streams
from fedlit.models import Replica
from fedlit.run.run import Run

_log = logging.getLogger("lightning.pytorch.fedlit.run")

_LONG = 2.0
"""Seconds of a step with all threads from which on nothing else is tried."""
_NEARLY = 1.2
"""Times the fastest, within which fewer threads are taken: others can use the cores, and runs repeat more often."""
_TRIES = 5
_ENOUGH = 0.2
"""Seconds of a step from which on one is enough."""

_found: dict[tuple[int, object], dict[int, float]] = {}
"""Seconds of a step by number of threads, of networks that were tried in this process, by their form."""

_set: tuple[int, int] | None = None
"""In this process the number that was chosen last, and of how many: the next run has all of these again."""


def choose_threads(run: Run, loader: object) -> int:
    """Return the number of threads for a run's local steps, of at most those that torch has now.

    These are taken where there is nothing to try: on a GPU, with other loaders than a `FederatedLoader`, and for
    networks that take no samples by themselves.
    """
    most = available()
    step, form = (None, ()) if most == 1 else _step_of(run, loader)
    if step is None:
        return most
    try:
        if (most, form) not in _found:  # the runs of an experiment take the same
            with torch_streams():  # a network may draw random numbers
                _found[most, form] = try_threads(step, most)
        seconds = _found[most, form]
    except (RuntimeError, ValueError, TypeError) as error:  # of a network that the method calls in another way
        _log.info("num_threads: %d, as a client's network could not be tried by itself (%s)", most, error)
        return most
    chosen = fewest(seconds)
    tried = ", ".join(f"{number}: {1000 * each:.3g} ms" for number, each in sorted(seconds.items()))
    _log.info("num_threads: %d, as a local step of one client takes with %s", chosen, tried)
    return chosen


def available() -> int:
    """Return the threads that torch has, or had before a number was chosen in this process."""
    now = torch.get_num_threads()
    return _set[1] if _set is not None and _set[0] == now else now


def set_threads(number: int) -> None:
    """Let torch have so many threads, of those that are available."""
    global _set
    most = available()
    number = max(1, min(number, most))
    _set = (number, most)
    torch.set_num_threads(number)


def fewest(seconds: dict[int, float]) -> int:
    """Return the smallest number of threads whose step takes nearly as little as the fastest."""
    return min(number for number, each in seconds.items() if each <= _NEARLY * min(seconds.values()))


def try_threads(step: Callable[[], object], most: int) -> dict[int, float]:
    """Return the seconds of a step with all threads, half of them and one, by number; with all alone if it is long."""
    seconds: dict[int, float] = {}
    try:
        for number in dict.fromkeys((most, max(1, most // 2), 1)):
            torch.set_num_threads(number)
            seconds[number] = _timed(step)  # threads start in it
            if seconds[number] < _ENOUGH:
                seconds[number] = statistics.median(_timed(step) for _ in range(_TRIES))
            elif number == most:
                seconds[number] = min(seconds[number], _timed(step))
                if seconds[number] >= _LONG:
                    break
    finally:
        torch.set_num_threads(most)
    return seconds


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _step_of(run: Run, loader: object) -> tuple[Callable[[], object] | None, object]:
    """Return a forward and backward pass of a copy of a local client's network on samples of it, and their form.

    Of the client with the most samples in a batch, as its steps take the most time.
    """
    local = [client.name for client in run.learners() if run.federation.is_local(client)]
    if not isinstance(loader, FederatedLoader) or run.trainer.strategy.root_device.type != "cpu" or not local:
        return None, ()
    sizes = loader.sizes()
    rows, name = max((min(loader.batch_size_of(each), sizes[each]), each) for each in local)
    network: Any = copy.deepcopy(run.replicas[name])
    if not isinstance(network, Replica) or not any(each.requires_grad for each in network.parameters()):
        return None, ()
    precision = run.trainer.precision_plugin
    inputs = precision.convert_input(loader.samples(name, torch.arange(rows))[0])

    def step() -> None:
        with precision.forward_context():
            outputs = network(inputs)
        outputs.float().square().mean().backward()

    shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else rows
    return step, (repr(network), type(precision).__name__, shape)
