"""Moves bytes between the processes of a federation; one process needs none of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from fedlit.federation.errors import FederationTimeoutError


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
    def all_gather_object(self, value: Any) -> list[Any]:
        """A picklable value of every rank, in rank order."""

    @abstractmethod
    def gather_object(self, value: Any) -> list[Any] | None:
        """A picklable value of every rank, in rank order, on rank 0; ``None`` on the others."""

    @abstractmethod
    def swap(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, int]], doing: str
    ) -> list[Tensor]:
        """Send uint8 messages (rank, message), and receive messages (rank, number of bytes) in their order.

        Sender and receiver share the order; ``doing`` is for error messages.
        """


@final
class OneProcess(Transport):
    """All clients in this process: nothing to send."""

    rank = 0
    world_size = 1

    def all_gather(self, frame: Tensor, doing: str) -> list[Tensor]:
        """Own frame alone."""
        return [frame]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Own value alone."""
        return [value]

    def gather_object(self, value: Any) -> list[Any] | None:
        """Own value alone."""
        return [value]

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

    def all_gather_object(self, value: Any) -> list[Any]:
        """A value of every rank."""
        values: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._lost("introductions", error) from error
        return values

    def gather_object(self, value: Any) -> list[Any] | None:
        """A value of every rank, on rank 0."""
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        try:
            dist.gather_object(value, values, dst=0, group=self._group)
        except RuntimeError as error:
            raise self._lost("a checkpoint", error) from error
        return values

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
