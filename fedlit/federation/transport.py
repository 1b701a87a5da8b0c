"""Moves bytes between the processes of a federation; one process needs none of it.

What another process announces or sends is not trusted: sizes are checked before memory is taken, and nothing is
unpickled.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
    except (AttributeError, ValueError, OSError):  # not told on Windows
        return 1 << 40


MOST_BYTES = _memory()
"""Of all messages that a process receives at once: what is announced beyond is refused."""


class Transport(ABC):
    """What a federation needs from the processes it runs on.

    Attributes:
        rank: Of this process, from 0. The server lives on rank 0.
        world_size: Number of processes.
    """

    rank: int
    world_size: int

    @abstractmethod
    def all_gather(self, frame: Tensor, doing: str) -> list[Tensor]:
        """``frame`` of every rank, in rank order; all ranks give the same shape. ``doing`` is for error messages."""

    @abstractmethod
    def swap(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, int]], doing: str
    ) -> list[Tensor]:
        """Send uint8 messages (rank, message), and receive messages (rank, number of bytes) in their order.

        Sender and receiver share the order; ``doing`` is for error messages.
        """

    def tell_all(self, value: Any, doing: str) -> list[Any]:
        """A value of every rank, in rank order; of what `document` can hold.

        Raises:
            DecodeError: If what a rank sends is none, or announced as larger than this machine's memory.
        """
        if self.world_size == 1:
            return [value]
        message = document(value, doing)
        sizes = self._sizes(message, doing)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        arrived = iter(self.swap([(rank, message) for rank in others], [(rank, sizes[rank]) for rank in others], doing))
        return [value if rank == self.rank else read_document(next(arrived)) for rank in range(self.world_size)]

    def bring_first(self, message: Tensor, doing: str) -> list[Tensor]:
        """Messages of every rank, of shape (bytes,), in rank order, on rank 0; none on the others.

        Raises:
            DecodeError: On every rank, if they are announced as larger than this machine's memory.
        """
        sizes = self._sizes(message, doing)
        if self.rank:
            self.swap([(0, message)], [], doing)
            return []
        return [message, *self.swap([], [(rank, sizes[rank]) for rank in range(1, self.world_size)], doing)]

    def _sizes(self, message: Tensor, doing: str) -> list[int]:
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(message)]), doing)]
        check_sizes(dict(enumerate(sizes)), doing)
        return sizes


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

    def all_gather(self, frame: Tensor, doing: str) -> list[Tensor]:
        """Own frame alone."""
        return [frame]

    def swap(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, int]], doing: str
    ) -> list[Tensor]:
        """Nothing crosses."""
        assert not outgoing, "one process has nobody to send to"
        assert not incoming, "one process has nobody to receive from"
        return []


@final
class ProcessGroup(Transport):
    """Processes joined by torch.distributed over CPU tensors, whatever device the clients train on.

    Args:
        timeout: How long a process waits for the others before it gives up.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout = timeout
        # A group of its own: a collective of Lightning's can never be mistaken for one of the federation's.
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "all processes are in the group"
        self._group = group

    def all_gather(self, frame: Tensor, doing: str) -> list[Tensor]:
        """``frame`` of every rank."""
        frames = [torch.empty_like(frame) for _ in range(self.world_size)]
        try:
            dist.all_gather(frames, frame, group=self._group)
        except RuntimeError as error:
            raise self._lost(doing, error) from error
        return frames

    def swap(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, int]], doing: str
    ) -> list[Tensor]:
        """Send to and receive from other ranks, both at once."""
        messages = [torch.empty(size, dtype=torch.uint8) for _, size in incoming]
        try:
            pending = [dist.isend(message, rank, group=self._group) for rank, message in outgoing]
            for message, (rank, _) in zip(messages, incoming, strict=True):
                pending.append(dist.irecv(message, rank, group=self._group))
            for work in pending:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise self._lost(doing, error) from error
        return messages

    def _lost(self, doing: str, error: RuntimeError) -> FederationTimeoutError:
        seconds = self.timeout.total_seconds()
        return FederationTimeoutError(
            f"rank {self.rank} lost the other processes during {doing}: one of them stopped, or was silent for "
            f"{seconds:g} s (timeout). Look at its output first. [{str(error).splitlines()[0]}]"
        )
