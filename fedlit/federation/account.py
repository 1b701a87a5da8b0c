"""A client's account of what differential privacy has cost it, in all runs on its data set together.

A run's own accountant forgets: it begins anew with each seed, target and method, and goes back to a checkpoint with the
run, though what was released stays released. So each release is written to a file at the site, and synchronised, before
it leaves. A process that ends in between has booked more than it released, never less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from fedlit.federation.errors import BudgetError
from fedlit.federation.records import Records
from fedlit.privacy.differential import epsilon_of

Against = Literal["message", "sum"]
"""Observers: those who see single messages, or those who see sums only, where the backend hides the messages."""


class Account(Records):
    """Releases of one client, a line of JSON for each; processes that run side by side may share the file.

    Args:
        path: Of the file, which is made if it is missing.

    Attributes:
        spent: Privacy spent against each of `Against`, the sum of 1 / z^2 over noise multipliers z.

    Raises:
        JournalError: If the file cannot be read or written, or is no account.
    """

    _NOUN = "account"
    _TITLE = "account of privacy"
    _WAY_OUT = "restore the file. If it is lost, what has been spent is unknown, and a new one starts from nothing"
    _SHARED = True

    def __init__(self, path: str | Path) -> None:
        self.spent: dict[Against, float] = {"message": 0.0, "sum": 0.0}
        self._booked: dict[str, list[float]] = {}  # what each release was booked at
        self._lock = FileLock(f"{path}.lock")
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                super().__init__(path)
        except OSError as error:
            self.path = Path(path)
            raise self._problem(f"cannot be opened ({error.strerror})") from error

    def epsilon(self, delta: float, against: Against = "sum") -> float:
        """Privacy loss of all releases so far together, at failure probability ``delta``."""
        with self._lock:
            self._update()
        return epsilon_of(self.spent[against], delta)

    def book(
        self,
        client: str,
        channel: str,
        message: float,
        summed: float,
        release: str | None = None,
        budget: float = math.inf,
        delta: float = 1e-5,
    ) -> None:
        """Write that a message leaves next.

        Args:
            client: Who sends it.
            channel: Over which it is sent.
            message: Privacy that it spends against those who see it, 1 / z^2.
            summed: The same against those who see a sum with it.
            release: Name of the release; the same means the same message with the same noise, which is booked once.
            budget: Greatest epsilon of all releases together, as of `epsilon`.
            delta: Failure probability of the budget.

        Raises:
            BudgetError: If that would exceed the budget; nothing is written then.
            JournalError: If the file cannot be written.
        """
        with self._lock:
            self._update()
            if release is not None and self._booked.get(release) == [message, summed]:
                return
            check_budget(client, self.spent["sum"], summed, budget, delta, f"in the account '{self.path}'")
            self._append({"release": release, "channel": channel, "message": message, "sum": summed})

    def _head(self) -> dict[str, Any]:
        return {"account": "1 / z^2 of each release, added up"}

    def _open(self, head: Mapping[str, Any]) -> None:
        _ = head["account"]  # which a journal has not

    def _take(self, entry: Mapping[str, Any]) -> None:
        costs = [float(entry["message"]), float(entry["sum"])]
        if not min(costs) >= 0:
            raise ValueError("releases never cost less than nothing")
        self.spent["message"] += costs[0]
        self.spent["sum"] += costs[1]
        if entry["release"] is not None:
            self._booked[str(entry["release"])] = costs


def check_budget(client: str, before: float, cost: float, budget: float, delta: float, where: str) -> None:
    """Raise a `BudgetError` if a release of this cost, after what was spent before, would exceed the budget."""
    if math.isinf(budget) or epsilon_of(before + cost, delta) <= budget:
        return
    error = BudgetError(
        f"client {client!r} has spent epsilon {epsilon_of(before, delta):.4g} {where} (delta {delta:g}), and its next "
        f"release would make it {epsilon_of(before + cost, delta):.4g}, above epsilon_budget ({budget:g}): nothing is "
        "sent. End here, with the last checkpoint; or raise epsilon_budget, or noise_multiplier in a run that begins "
        "within it"
    )
    error.public = f"the privacy budget of client {client!r} is spent"  # type: ignore[attr-defined]
    raise error
