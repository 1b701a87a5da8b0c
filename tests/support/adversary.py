"""A server, or a client's site, that lies once in a run: at any message, in one of a few ways.

`moments_of` runs a program honestly and lists every message that arrives anywhere; `attack` runs it again with one lie.
Nothing is written for a kind of message: one that the protocol gets later is attacked as well.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedlit.federation.transport import Outgoing, Transport, Way
from thread_transport import on_ranks

_T = TypeVar("_T")

LIES = ("change", "change for one", "drop", "repeat", "delay")
"""A changed byte for all receivers, or for one of them; nothing in its place; an earlier message in its place; and
an earlier one in its place, and it in the place of the next."""


@dataclass(frozen=True)
class Moment:
    """The n-th message of a kind that arrives at a rank from another: in a meeting (``frame``), or by a swap."""

    kind: str
    frame: bool
    sender: int
    receiver: int
    number: int


class Lying(Transport):
    """A rank whose messages come through somebody who lies about one of them.

    Args:
        inner: The honest transport.
        lie: One of `LIES`, or "" for none.
        at: The message.
        seen: Where all that arrive are noted.
    """

    def __init__(self, inner: Transport, lie: str, at: Moment | None, seen: list[tuple[Moment, Tensor]]) -> None:
        self._inner, self._lie, self._at, self._seen = inner, lie, at, seen
        self.rank, self.world_size = inner.rank, inner.world_size
        self._counts: dict[tuple[str, bool, int], int] = {}
        self._before: dict[tuple[object, ...], Tensor] = {}  # the newest message of each kind and size
        self._held: Tensor | None = None
        self.lied = False

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        frames = self._inner.meet(frame, doing)
        changed = [self._arrives(each, doing, True, sender) for sender, each in enumerate(frames)]
        return [theirs if new is None else new for theirs, new in zip(frames, changed, strict=True)]

    def swap(self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str) -> list[Tensor | None]:
        arrived = self._inner.swap(ways, outgoing, doing)
        senders = [here for here, there, _ in ways if there == self.rank]
        return [
            None if each is None else self._arrives(each, doing, False, sender)
            for each, sender in zip(arrived, senders, strict=True)
        ]

    def _arrives(self, message: Tensor, doing: str, frame: bool, sender: int) -> Tensor | None:
        if sender == self.rank:
            return message
        key = (re.sub(r"\d+", "N", doing), frame, sender)
        number = self._counts[key] = self._counts.get(key, -1) + 1
        self._seen.append((Moment(*key, self.rank, number), message))
        sized = (*key, message.shape)
        before, self._before[sized] = self._before.get(sized), message
        at = self._at
        if at is None or (at.kind, at.frame, at.sender) != key:
            return message
        if self._lie != "change" and at.receiver != self.rank:
            return message
        if self._held is not None and number == at.number + 1:
            message, self._held = self._held, None
            return message
        return self._lied_about(message, before) if number == at.number else message

    def _lied_about(self, message: Tensor, before: Tensor | None) -> Tensor | None:
        self.lied = True
        if self._lie == "drop":
            return torch.zeros_like(message)  # what a receiver makes of nothing
        if self._lie in ("repeat", "delay"):
            if before is None or torch.equal(before, message):
                self.lied = False
                return message
            if self._lie == "delay":
                self._held = message
            return before
        changed = message.clone()
        if changed.numel():  # one byte in its last third, which is content and no header
            flat = changed.view(torch.uint8).reshape(-1) if changed.dtype != torch.uint8 else changed
            flat[len(flat) - 1 - len(flat) // 4] ^= 0x41
        return changed


def run(
    program: Callable[[Transport, list[Any]], None], ranks: int, lie: str = "", at: Moment | None = None
) -> tuple[list[list[Any]], BaseException | None, list[tuple[Moment, Tensor]], bool]:
    """Results of each rank up to the end or an error; the error; messages that arrived; whether a lie was there."""
    results: list[list[Any]] = [[] for _ in range(ranks)]
    seen: list[tuple[Moment, Tensor]] = []
    ends: list[Lying] = []
    lock = threading.Lock()

    def on_rank(transport: Transport) -> None:
        lying = Lying(transport, lie, at, seen)
        with lock:
            ends.append(lying)
        program(lying, results[transport.rank])

    error: BaseException | None = None
    try:
        on_ranks(on_rank, ranks, timeout=4.0)
    except BaseException as raised:
        error = raised
    return results, error, seen, any(each.lied for each in ends)


def moments_of(seen: Sequence[tuple[Moment, Tensor]]) -> list[Moment]:
    """Every message from the server to the last rank, from there to the server, and from there to the rank before.

    Of the tables in which all ranks announce what comes next, of each kind the last one: they are alike.
    """
    last = max(moment.receiver for moment, _ in seen)
    ways = ((0, last), (last, 0), (last, last - 1))
    ours = [moment for moment, _ in seen if (moment.sender, moment.receiver) in ways]
    tables = {(moment.kind, moment.sender, moment.receiver): moment for moment in ours if moment.frame}
    return [moment for moment in ours if not moment.frame] + [*tables.values()]
