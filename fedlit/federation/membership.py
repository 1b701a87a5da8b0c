"""Membership: which processes take part in a run that others may leave and come back to.

The set of lost processes changes at meetings only, where all processes receive the same one; processes come back with
a roll call. Between two meetings a process that is disconnected for too long is dropped: nobody waits for it any more,
and the next meeting announces it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Verdict(NamedTuple):
    """Result of a meeting."""

    lost: frozenset[int]
    """All ranks that are not there."""
    joined: frozenset[int]
    """Those that come back with it."""


class Membership:
    """Connected and waiting processes, as the server knows them.

    Attributes:
        here: Ranks that take part, and are waited for.
        waiting: Those that come back, and wait for the next roll call.
        patience: Seconds without a connection after which a process is dropped.
    """

    def __init__(self, ranks: Iterable[int], patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.here: set[int] = set()
        self._ranks = frozenset(ranks)
        self.patience = patience
        self._clock = clock
        self._disconnected: dict[int, float] = {}
        self.waiting: set[int] = set()

    def come(self, rank: int) -> None:
        """A process comes, before the first round, or later to wait for the next roll call: see `wait`."""
        self.here.add(rank)
        self._disconnected.pop(rank, None)

    def wait(self, rank: int) -> None:
        """A process that is not here waits for the next roll call."""
        self.waiting.add(rank)
        self._disconnected.pop(rank, None)

    def connected(self, rank: int) -> None:
        """Something connects a process."""
        self._disconnected.pop(rank, None)

    def disconnected(self, rank: int) -> None:
        """Nothing connects a process any more."""
        self._disconnected.setdefault(rank, self._clock())

    def drop(self, rank: int) -> None:
        """Wait for a process no more: it has left, sends nonsense, or was disconnected for too long."""
        self.here.discard(rank)
        self.waiting.discard(rank)

    def overdue(self) -> set[int]:
        """Those here and waiting that have been disconnected for longer than the patience; they are dropped."""
        late = {rank for rank, since in self._disconnected.items() if self._clock() - since >= self.patience}
        late &= self.here | self.waiting
        for rank in late:
            self.drop(rank)
        return late

    def time_left(self) -> float | None:
        """Seconds until a process is overdue; ``None`` if all are connected."""
        since = [self._disconnected[rank] for rank in self.here | self.waiting if rank in self._disconnected]
        return max(0.0, min(since) + self.patience - self._clock()) if since else None

    def meeting(self, roll_call: bool = False) -> Verdict:
        """Return who is lost from now on; with a ``roll_call``, waiting processes join."""
        joined = frozenset(self.waiting) if roll_call else frozenset()
        self.here |= joined
        self.waiting -= joined
        return Verdict(self._ranks - self.here, joined)
