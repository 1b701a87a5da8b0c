"""A server that changes what it relays."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedlit.federation.transport import Outgoing, Transport, Way
from fedlit.federation.wire import decode, encode

Change = Callable[[int, str, Tensor], Tensor]
"""Of a message, by the rank of its receiver and what it is a part of."""


class Relayed(Transport):
    """A rank whose messages come through a server that changes some of them."""

    def __init__(self, inner: Transport, change: Change) -> None:
        self._inner, self._change = inner, change
        self.rank, self.world_size = inner.rank, inner.world_size

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        return self._inner.meet(frame, doing)

    def swap(self, ways: list[Way], outgoing: list[Outgoing], doing: str) -> list[Tensor | None]:  # type: ignore[override]
        arrived = self._inner.swap(ways, outgoing, doing)
        return [None if each is None else self._change(self.rank, doing, each) for each in arrived]


def honest(rank: int, doing: str, message: Tensor) -> Tensor:
    return message


def false_total(
    rank: int, doing: str, message: Tensor, of_round: int = 0, channel: str = "weights", victim: int = 3
) -> Tensor:
    """The victim, a rank, alone is sent the true total of a round: all others go on from a dead network."""
    if f"{channel!r} of round {of_round}" not in doing or rank in (0, victim):
        return message
    try:
        content = decode(message)
    except ValueError:
        return message
    if {"about", "sum"} <= {*content}:
        # the weight at its end stays, so that the mean is well formed
        content["sum"] = torch.cat([torch.zeros_like(content["sum"][:-1]), content["sum"][-1:]])
        return encode(content)
    return message
