"""Robust means, where the server sees single vectors: one client's vector moves the result by little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedlit.checks import check, check_one_of, check_positive
from fedlit.privacy.base import AggregationClient, AggregationServer, Description, RoundId, SecureAggregation
from fedlit.privacy.errors import QuorumError
from fedlit.privacy.packing import check_equally_long
from fedlit.privacy.plain import Plain

Rule = Literal["median", "trimmed_mean"]


@final
class RobustPlain(SecureAggregation):
    """Takes the coordinate-wise median or trimmed mean of clients' numbers in place of their weighted mean.

    Clients count alike, whatever their weights, so that no announced number of samples buys influence (Yin et al.,
    Byzantine-robust distributed learning, ICML 2018). The server has to read every vector: under a backend that hides
    them there is no such rule. Sums are refused, as a median says nothing of them.

    Args:
        rule: ``"median"``, with the mean of both in the middle for an even number of clients; or ``"trimmed_mean"``.
        trim: Share of the clients, from 0 to below 0.5, that the trimmed mean leaves out at either end of each number;
            of K clients those are ``floor(trim * K)``.
        norm_bound: Vectors that are longer than so many times the median of all lengths are scaled to that length
            before; positive. ``None`` scales none.

    Raises:
        ValueError: If an argument is out of range.
    """

    key_holder: ClassVar[Literal["server", "clients"]] = "server"
    adds: ClassVar[bool] = False
    min_clients: int = 1
    codec = None

    def __init__(self, rule: Rule = "median", trim: float = 0.2, norm_bound: float | None = None) -> None:
        check_one_of("rule", rule, ("median", "trimmed_mean"))
        check(0 <= trim < 0.5, "trim", "from 0 to below 0.5", trim)
        if norm_bound is not None:
            check_positive("norm_bound", norm_bound)
        self.rule, self.trim, self.norm_bound = rule, float(trim), norm_bound

    def client(self, name: str) -> AggregationClient:
        """Sends its vector as it is."""
        return Plain().client(name)

    def server(self) -> AggregationServer:
        """Keeps the vectors of a round until all are there."""
        return _RobustServer(self)

    def error_bound(self, num_clients: int) -> float:
        """0: nothing is added to the rounding of floats."""
        return 0.0

    def describe(self) -> Description:
        """Everything is revealed."""
        return Description(
            backend="RobustPlain",
            adversary="a minority of clients that send anything; the server is trusted",
            hidden="nothing",
            revealed="every client's vector, to the server",
            collusion="half of the clients, or more than are trimmed at one end, choose the result",
            dropouts="the rule runs over those who sent",
            bytes_per_number=float(torch.float32.itemsize),
            error=f"a {self.rule.replace('_', ' ')} in place of the weighted mean",
        )

    def combine(self, rows: Tensor) -> Tensor:
        """Return the rule of rows, shape (K, n), by column, shape (n,)."""
        if self.norm_bound is not None:
            lengths = rows.double().norm(dim=1)
            limit = self.norm_bound * lengths.median()
            rows = rows * (limit / lengths.clamp(min=float(limit))).nan_to_num(1.0)[:, None].to(rows.dtype)
        ordered, number = rows.sort(dim=0).values, len(rows)
        ends = (number - 1) // 2 if self.rule == "median" else int(self.trim * number)
        return ordered[ends : number - ends].mean(dim=0)


@final
class _RobustServer(AggregationServer):
    def __init__(self, backend: RobustPlain) -> None:
        self._backend = backend
        self._round: RoundId | None = None

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        self._round = round_id

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        """The rule of what each client sent, times the sum of weights, which is the last number."""
        if not messages:
            raise QuorumError("there is no vector to take a robust mean of")
        if self._round is None or not self._round.weighted:
            channel = "" if self._round is None else f" of channel {self._round.channel!r}"
            raise QuorumError(
                f"RobustPlain takes robust means, and a sum{channel} is asked for: give that channel another backend"
            )
        check_equally_long({name: len(vector) for name, vector in messages.items()})
        rows = torch.stack([*messages.values()])
        weights = rows[:, -1:]
        total = weights.sum()
        return torch.cat([self._backend.combine(rows[:, :-1] / weights) * total, total[None]])

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        return total
