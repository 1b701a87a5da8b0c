"""Transport of bytes between the processes of a federation.

Other processes are not trusted: sizes are checked before memory is taken, and nothing is unpickled.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from fedlit.federation.documents import document, read_document
from fedlit.federation.errors import FederationTimeoutError
from fedlit.privacy import DecodeError


def _memory() -> int:
    """Bytes that this machine has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on Windows
        return 1 << 40


MOST_BYTES = _memory()
"""Limit of all messages that a process receives at once."""


Outgoing = Tensor | list[Tensor]
"""A uint8 message, or its parts."""

Way = tuple[int, int, int]
"""Sending rank, receiving rank, and number of bytes of a message."""

SHORT = 1 << 20
"""Bytes of all messages of a process up to which they travel with the announcement of their sizes."""

NO_BYTES = torch.empty(0, dtype=torch.uint8)

NOTHING = torch.zeros(1, dtype=torch.uint8)
"""Frame of a meeting that tells who is there, and nothing else."""


class Transport(ABC):
    """Messages between the processes of a federation.

    Attributes:
        rank: Of this process, from 0. The server lives on rank 0.
        world_size: Number of processes.
        losable: Whether the others go on when a process is disconnected.
        encloses: Whether it has a `meet_with` of its own.
        lost: Disconnected ranks, as of the last meeting: the same on all others.
        over: Whether this process has come back after the last round, with the `last_call`.
    """

    rank: int
    world_size: int
    losable: bool = False
    encloses: bool = False
    lost: frozenset[int] = frozenset()
    over: bool = False

    @abstractmethod
    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        """Return ``frame`` of every rank, and zeros for lost ones; all have the same shape. ``doing`` is for errors."""

    def meet_with(
        self, frame: Tensor, enclosed: Mapping[int, Tensor], doing: str
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """As `meet`, and carry short uint8 messages between rank 0 and others with the frames, which saves a `swap`.

        ``enclosed`` are those of this rank by receiver, of `SHORT` bytes together; returns those to it by sender.
        """
        raise NotImplementedError

    @abstractmethod
    def swap(self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str) -> list[Tensor | None]:
        """Carry uint8 messages along ``ways``, the same on all ranks; ``outgoing`` are those of this rank, in order.

        Returns those to this rank, in the order of their ways; ``None`` of a rank that is lost.
        """

    def gather_each(
        self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str, take: Callable[[int, Tensor], None]
    ) -> None:
        """As `swap` to rank 0 alone, which calls ``take(position, message)`` for each way, if it can as they come."""
        for index, message in enumerate(self.swap(ways, outgoing, doing)):
            if message is not None:
                take(index, message)

    @property
    def returning(self) -> bool:
        """Whether this process joins a run that has begun, and takes part from the next roll call."""
        return False

    def roll_call(self, lacks: Callable[[Collection[int]], str] = lambda lost: "") -> frozenset[int]:
        """Meet before a round starts; return ranks that were lost and come back with it.

        ``lacks`` says why a round without some ranks makes no sense; while it is not empty, they are waited for.
        """
        return frozenset()

    def last_call(self) -> frozenset[int]:
        """Meet after the last round, once ranks that are lost are there or their time is over; as `roll_call`."""
        return frozenset()

    def begin(self, back: Collection[int]) -> None:  # noqa: B027 (nothing, where nobody comes back)
        """At the server: the first round comes next; ranks in ``back`` start again and are waited for."""

    def broadcast(self, value: Any, ranks: Collection[int], doing: str) -> Any:
        """Return the ``value`` of rank 0, a `document`, on these ranks; ``None`` elsewhere."""
        message = document(value if self.rank == 0 else None, doing)
        size = self._sizes(message, doing)[0]
        ways = [(0, rank, size) for rank in sorted(ranks)]
        arrived = self.swap(ways, [] if self.rank else [message] * len(ways), doing)
        return read_document(arrived[0]) if arrived and arrived[0] is not None else None

    def note(self, step: int, value: Any) -> None:  # noqa: B027 (nothing, where nobody comes back)
        """At the server: keep a result from before the first round, begun at ``step``, for ranks that come back."""

    def recall(self) -> Any:
        """On a rank that comes back: the result noted for what all others have done at this step; else ``None``."""
        return None

    @property
    def step(self) -> int:
        """Number of meetings and swaps so far."""
        return 0

    def all_gather(self, value: Any, doing: str) -> list[Any]:
        """Return the value of every rank, a `document`; ``None`` of ranks that are lost.

        A `DecodeError` if what a rank sends is none, or announced as larger than this machine's memory.
        """
        if self.world_size == 1:
            return [value]
        message = document(value, doing)
        sizes = self._sizes(message, doing)
        ranks = [rank for rank in range(self.world_size) if rank not in self.lost]
        ways = [(here, there, sizes[here]) for here in ranks for there in ranks if here != there]
        mine = [message for here, _, _ in ways if here == self.rank]
        arrived = iter(self.swap(ways, mine, doing))
        received = {rank: next(arrived) for rank in ranks if rank != self.rank}
        values: list[Any] = [None] * self.world_size
        values[self.rank] = value
        for rank, theirs in received.items():
            values[rank] = None if theirs is None else read_document(theirs)
        return values

    def gather(self, message: Tensor, doing: str) -> list[Tensor]:
        """Return the messages of all ranks, shape (bytes,), on rank 0; none elsewhere."""
        sizes = self._sizes(message, doing)
        ways = [(rank, 0, sizes[rank]) for rank in range(1, self.world_size)]
        arrived = self.swap(ways, [message] if self.rank else [], doing)
        return [] if self.rank else [message, *(each for each in arrived if each is not None)]

    def _sizes(self, message: Tensor, doing: str) -> list[int]:
        sizes = [int(size) for size in self.meet(torch.tensor([len(message)]), doing)]
        check_sizes(dict(enumerate(sizes)), doing)
        return sizes


def whole(message: Outgoing) -> Tensor:
    """A message whose parts follow one another in memory."""
    return torch.cat(message) if isinstance(message, list) else message


def check_sizes(sizes: Mapping[Any, int], doing: str) -> None:
    """Raise a `DecodeError` unless messages of so many bytes each can be received, all at once."""
    if min(sizes.values(), default=0) < 0 or sum(sizes.values()) > MOST_BYTES:
        sender = min(sizes, key=lambda each: (sizes[each] >= 0, -sizes[each]))  # the first below 0, or the largest
        raise DecodeError(
            f"{sizes[sender]} bytes are announced by {sender!r} during {doing}, of {sum(sizes.values())} in all: "
            f"messages have 0 bytes or more, and no more together than this machine's memory, {MOST_BYTES}"
        )


@final
class OneProcess(Transport):
    """All clients in this process: nothing to send."""

    rank = 0
    world_size = 1

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        """Own frame alone."""
        return [frame]

    def swap(self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str) -> list[Tensor | None]:
        """Nothing crosses."""
        assert not ways, "one process has nobody to send to"
        assert not outgoing, "one process has nobody to send to"
        return []


@final
class ProcessGroup(Transport):
    """Processes joined by torch.distributed over CPU tensors, whatever device the clients train on."""

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout = timeout
        # A group of its own: a collective of Lightning's can never be mistaken for one of the federation's.
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "all processes are in the group"
        self._group = group

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        """``frame`` of every rank."""
        frames = [torch.empty_like(frame) for _ in range(self.world_size)]
        try:
            dist.all_gather(frames, frame, group=self._group)
        except RuntimeError as error:
            raise self._ended(doing, error) from error
        return frames

    def swap(self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str) -> list[Tensor | None]:
        """Send to and receive from other ranks, both at once."""
        leaving = [there for here, there, _ in ways if here == self.rank]
        due = [(here, size) for here, there, size in ways if there == self.rank]
        messages = [torch.empty(size, dtype=torch.uint8) for _, size in due]
        try:
            pending = [
                dist.isend(whole(message), rank, group=self._group)
                for rank, message in zip(leaving, outgoing, strict=True)
            ]
            for message, (rank, _) in zip(messages, due, strict=True):
                pending.append(dist.irecv(message, rank, group=self._group))
            for work in pending:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise self._ended(doing, error) from error
        return [*messages]

    def _ended(self, doing: str, error: RuntimeError) -> FederationTimeoutError:
        return FederationTimeoutError(
            f"rank {self.rank} lost the other processes during {doing}: one of them stopped, or was silent for "
            f"{self.timeout.total_seconds():g} s (timeout). Look at its output first. [{str(error).splitlines()[0]}]"
        )
