"""A run under differential privacy whose process ends at a chosen point, again and again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedlit.federation import Federation, records
from fedlit.federation.account import Account
from fedlit.federation.journal import Journal
from fedlit.privacy import GaussianMechanism

NAMES = ["a", "b", "t"]
NOISE = GaussianMechanism(clip_norm=1.0, noise_multiplier=2.0)
POINTS = (
    "before it is written",
    "in the middle of a line",
    "written and not sent",
    "after it was sent",
    "after the round",
)
"""Where a process ends, as to the release of a client."""


class Crashing:
    """A process that makes rounds, notes what leaves it in a file of its own, and ends at a point of a round."""

    def __init__(self, folder: Path, point: str, at: int, with_journal: bool) -> None:
        self.folder, self.point, self.at = folder, point, at
        self.fed = Federation(NAMES, "t", differential_privacy=NOISE, account=str(folder / "accounts"), seed=0)
        if with_journal:
            self.fed.journal = Journal(folder / "journal")
        self._carry = self.fed._messenger.gather_each
        self.fed._messenger.gather_each = self._watched  # type: ignore[method-assign]

    def _dies(self, point: str) -> bool:
        return point == self.point and self.fed.round_idx == self.at

    def _watched(self, channel: str, messages: Any, sizes: Any, take: Callable[..., None]) -> None:
        if self._dies("written and not sent"):
            os._exit(0)

        def taken(name: str, message: Any) -> None:
            with (self.folder / "released").open("a") as file:  # by the bytes that leave
                file.write(f"{name} {message['sum'].numpy().tobytes().hex()}\n")
            take(name, message)
            if self._dies("after it was sent"):
                os._exit(0)

        self._carry(channel, messages, sizes, taken)

    def rounds(self, first: int, last: int) -> None:
        """Make rounds, each with one mean."""
        write = os.write

        def cut(file: int, line: bytes) -> int:
            if b'"release"' in line and self._dies("before it is written"):
                os._exit(0)
            if b'"release"' in line and self._dies("in the middle of a line"):
                write(file, line[: len(line) // 2])
                os._exit(0)
            return write(file, line)

        records.os.write = cut  # type: ignore[attr-defined]
        for self.fed.round_idx in range(first, last):
            self.fed.mean("weights", {name: {"w": torch.full((2,), float(self.fed.round_idx))} for name in NAMES})
            if self._dies("after the round"):
                os._exit(0)
        os._exit(0)


def crash(folder: Path, point: str, first: int, at: int, with_journal: bool = False) -> None:
    """Start a process that goes on from round ``first``, as a server makes it, and ends in round ``at``."""
    child = os.fork()
    if not child:
        try:
            Crashing(folder, point, at, with_journal).rounds(first, at + 2)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def booked(folder: Path) -> dict[str, float]:
    """Privacy in the account of each client, 1 / z^2."""
    return {name: Account(folder / "accounts" / f"{name}.account").spent["message"] for name in NAMES}


def released(folder: Path) -> dict[str, float]:
    """Privacy of the messages that have left, of which those that are equal to the last bit count once."""
    path = folder / "released"
    seen = {*path.read_text().splitlines()} if path.exists() else set()
    return {name: len([line for line in seen if line.startswith(f"{name} ")]) / 4 for name in NAMES}
