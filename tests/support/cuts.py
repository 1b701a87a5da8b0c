"""A server that knows a masked round's graph looks for clients to report as dropped that leave sums of few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedlit.privacy.masking.graph import draw, drawn_in
from fedlit.privacy.masking.round import MaskedRound


@dataclass
class Graph:
    """Of a round, as the server knows it: clients are positions.

    Args:
        masks: Whether two clients share masks, shape (n, n).
        holders: Whether the second holds a share of the first's secrets, shape (n, n); each holds one of its own.
        colluding: Whether a client tells the server all it knows, shape (n,).
        threshold: Shares that restore a secret.
        quorum: Clients that must survive.
    """

    masks: NDArray[np.bool_]
    holders: NDArray[np.bool_]
    colluding: NDArray[np.bool_]
    threshold: int
    quorum: int

    def __post_init__(self) -> None:
        self.spare = self.holders.sum(axis=1) - self.threshold
        self._holders = self.holders.astype(np.float32)

    def excess(self, parts: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Of parts, shape (m, n): by how much clients would refuse that all honest neighbours outside had dropped.

        The server may report so if it is 0, and then learns the sum of the honest clients of the part alone.
        """
        dropped = self.dropped(parts)
        too_many = np.maximum(0, dropped.sum(axis=1) - (len(self.masks) - self.quorum))
        held = dropped.astype(np.float32) @ self._holders.T
        rest = ~(parts | dropped | self.colluding)
        return too_many + np.maximum(0, held - self.spare).sum(axis=1) + np.where(rest.any(axis=1), 0, np.inf)

    def dropped(self, parts: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Honest neighbours outside of parts, shape (m, n)."""
        reached = parts.astype(np.float32) @ self.masks.astype(np.float32) > 0
        return reached & ~parts & ~self.colluding

    def grown(self, start: int, largest: int) -> NDArray[np.bool_] | None:
        """Add to an honest client the neighbour that makes least excess, until there is none; ``None`` if never."""
        part = np.zeros(len(self.masks), np.bool_)
        part[start] = True
        while part.sum() <= largest:
            if self.excess(part[None])[0] == 0:
                return part
            candidates = np.flatnonzero(self.dropped(part[None])[0])
            if not len(candidates):
                return None
            parts = np.repeat(part[None], len(candidates), axis=0)
            parts[np.arange(len(candidates)), candidates] = True
            part = parts[self.excess(parts).argmin()]
        return None

    def smallest(self, starts: Iterable[int] | None = None) -> NDArray[np.bool_] | None:
        """The smallest part that is grown from any of these honest clients, all by default."""
        honest = np.flatnonzero(~self.colluding)
        largest, best = len(honest) // 2, None
        for start in honest if starts is None else starts:
            part = self.grown(int(start), largest)
            if part is not None:
                best, largest = part, int(part.sum()) - 1
        return best


def graph_of(agreed: MaskedRound, colluding: Sequence[str] = ()) -> Graph:
    """The graph of a round among those who announced a key."""
    names = agreed.clients
    masks = np.array([[peer in agreed.neighbours(name) for peer in names] for name in names])
    holders = np.array([[peer in agreed.holders(name) for peer in names] for name in names])
    return Graph(masks, holders, np.isin(names, list(colluding)), agreed.threshold, agreed.quorum)


def drawn(generator: np.random.Generator, number: int, degree: int, threshold: int, quorum: int, few: int) -> Graph:
    """A graph as clients draw it, the first ``few`` of which collude."""
    roster = [f"c{index}" for index in range(number)]
    holders = np.eye(number, dtype=np.bool_)
    for client, name in enumerate(roster):
        announced = draw(generator.bytes(32), b"round", roster, name, degree)
        holders[client, [roster.index(peer) for peer in drawn_in(announced, roster, name, degree)]] = True
    masks = (holders | holders.T) & ~np.eye(number, dtype=np.bool_)
    return Graph(masks, holders, np.arange(number) < few, threshold, quorum)
