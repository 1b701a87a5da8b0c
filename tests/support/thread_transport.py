"""Ranks that are threads of this process, where torch.distributed is not what a test is about."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import Any, TypeVar

from torch import Tensor

from fedlit.federation.errors import FederationTimeoutError
from fedlit.federation.transport import Outgoing, Transport, Way, whole
from fedlit.privacy import DecodeError

_T = TypeVar("_T")


class Threads(Transport):
    """One rank of those that share ``mailboxes``; what is received is a copy, as over a wire.

    Args:
        rank: Of this thread.
        mailboxes: By sender and receiver.
        timeout: Seconds that a rank waits for another.
        over: Set when a rank has failed, whereupon none waits for another any more.
    """

    def __init__(
        self, rank: int, mailboxes: list[list[Queue[Any]]], timeout: float, over: threading.Event | None = None
    ) -> None:
        self.rank = rank
        self.world_size = len(mailboxes)
        self.timeout = timeout
        self._mailboxes = mailboxes
        self._over = over

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        for rank in range(self.world_size):
            self._send(rank, frame)
        frames = [self._receive(rank, doing) for rank in range(self.world_size)]
        assert len({(tuple(other.shape), other.dtype) for other in frames}) == 1, f"shapes differ in {doing}"
        return frames

    def swap(self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str) -> list[Tensor | None]:
        leaving = [there for here, there, _ in ways if here == self.rank]
        due = [(here, size) for here, there, size in ways if there == self.rank]
        for rank, message in zip(leaving, outgoing, strict=True):
            assert rank != self.rank, "nothing is sent to oneself"
            self._send(rank, whole(message))
        arrived = [self._receive(rank, doing) for rank, _ in due]
        if [message.numel() for message in arrived] != [size for _, size in due]:
            raise DecodeError(f"sizes differ in {doing}")
        return arrived

    def _send(self, rank: int, value: Any) -> None:
        self._mailboxes[self.rank][rank].put(copy.deepcopy(value))

    def _receive(self, rank: int, doing: str) -> Any:
        waited = 0.0
        while waited < self.timeout and not (self._over is not None and self._over.is_set()):
            wait = self.timeout if self._over is None else 0.02
            try:
                return self._mailboxes[rank][self.rank].get(timeout=wait)
            except Empty:
                waited += wait
        if self._mailboxes[rank][self.rank].empty():
            raise FederationTimeoutError(
                f"rank {self.rank} lost the other processes during {doing}: rank {rank} was silent for "
                f"{self.timeout:g} s (timeout)"
            )
        return self._mailboxes[rank][self.rank].get_nowait()


def on_ranks(action: Callable[[Transport], _T], ranks: int, timeout: float = 20.0) -> list[_T]:
    """Results of ``action`` on each of so many ranks; raises an error of one.

    A rank that waits in vain for one that has failed gives up soon.
    """
    over = threading.Event()
    mailboxes: list[list[Queue[Any]]] = [[Queue() for _ in range(ranks)] for _ in range(ranks)]
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = action(Threads(rank, mailboxes, timeout, over))
        except BaseException as error:
            errors.append(error)
            threading.Timer(0.2, over.set).start()  # the others first meet the error by themselves

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # a rank that waits in vain for one that has failed says less than that one
        raise min(errors, key=lambda error: isinstance(error, FederationTimeoutError))
    return [results[rank] for rank in range(ranks)]
