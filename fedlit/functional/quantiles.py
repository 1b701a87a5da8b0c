"""Quantiles over all clients from counts, which a secure sum adds; and what they are taken for."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

_POWERS = 2.0 ** torch.arange(-64, 64, dtype=torch.float64)
_EDGES = torch.cat([-_POWERS.flip(0), torch.zeros(1, dtype=torch.float64), _POWERS])
"""Edges of the first pass, ascending."""

CELLS = 256
"""Equal cells between two edges, which the second pass distinguishes."""

COUNT_BITS = 16
"""A count of 1 is sent as 2^-16: exact on grids of 16 fraction bits or more, and two million are still below 32."""


def agree_on_quantiles(
    columns: int,
    values_of: Callable[[str], Tensor],
    rank: Callable[[Tensor, Tensor], Tensor],
    total: Callable[[Callable[[str], Tensor]], Tensor | None],
) -> Tensor | None:
    """Find in each of d ``columns`` an r-th smallest value over all clients, rounded up on a grid.

    Two sums are taken: of the counts of values up to each power of two, and of those up to each of 256 steps between
    the two around the quantile. So the result is never below the r-th smallest value, and above it by at most one step,
    which is a 256th of the power of two below.

    Args:
        columns: d.
        values_of: Values of a client, shape (n, d); NaN where a sample has none. Infinity counts as the largest.
        rank: r of each column, shape (d,), from the number of values and of clients with one, two of shape (d,).
        total: Sum over clients of what each sends; ``None`` in a process without clients, which takes part in lockstep.

    Returns:
        Float64, shape (d,): infinity where r is above the number of finite values, NaN where there are no values;
        ``None`` in a process without clients.
    """

    def counts(client: str, edges: Tensor) -> Tensor:
        """Values up to each edge, shape (d, G); edges have the shape (d, G)."""
        rows = []
        for values, bounds in zip(values_of(client).double().cpu().T, edges, strict=True):
            there = values[~values.isnan()].sort().values
            rows.append(torch.searchsorted(there, bounds, right=True))
        return torch.stack(rows).double()

    def coarse(client: str) -> Tensor:
        number = (~values_of(client).cpu().isnan()).sum(dim=0).double()
        return torch.cat([(number > 0).double()[:, None], number[:, None], counts(client, first)], dim=1)

    def summed(message: Callable[[str], Tensor]) -> Tensor | None:
        received = total(lambda client: message(client) * 2.0**-COUNT_BITS)
        return None if received is None else (received.double().cpu() * 2.0**COUNT_BITS).round()

    first = _EDGES.expand(columns, -1).contiguous()
    received = summed(coarse)
    if received is None:
        summed(lambda client: torch.zeros(0))  # no client is here
        return None
    clients, number, up_to = received[:, 0], received[:, 1], received[:, 2:]
    ranks = rank(number, clients)
    reached = up_to >= ranks[:, None]
    # where no edge is reached, the cells are of no use, but all processes send them
    place = torch.where(reached.any(dim=1), reached.double().argmax(dim=1), 1).clamp(min=1)
    lower, upper = _EDGES[place - 1], _EDGES[place]
    steps = torch.arange(1, CELLS, dtype=torch.float64) / CELLS
    edges = lower[:, None] + (upper - lower)[:, None] * steps
    # without the upper edge, at which both sums would differ by the count of a client that has dropped out since
    received = summed(lambda client: counts(client, edges))
    assert received is not None
    edges = torch.cat([edges, upper[:, None]], dim=1)
    reached_again = torch.cat([received >= ranks[:, None], torch.ones(columns, 1, dtype=torch.bool)], dim=1)
    found = edges.gather(1, reached_again.double().argmax(dim=1, keepdim=True)).squeeze(1)
    found = torch.where(reached.any(dim=1), found, torch.inf)
    found = torch.where(reached[:, 0], _EDGES[0], found)
    return torch.where(number > 0, found, torch.nan)


def conformal_rank(number: int, clients: int, alpha: float) -> int:
    r"""Rank of the residual that is the radius of intervals with coverage 1 - alpha.

    .. math:: r = \lceil (1 - \alpha)(n + K) \rceil

    Args:
        number: n, residuals of all clients.
        clients: K, that have residuals; of one it is the rank of split conformal prediction.
        alpha: Share of new samples that may lie outside, in (0, 1).

    Returns:
        At least 1; above n if there are too few residuals.

    References:
        Papadopoulos et al., Inductive confidence machines for regression, ECML 2002; Lei et al., Distribution-free
        predictive inference for regression, JASA 2018; of several clients Lu et al., Federated conformal predictors for
        distributed uncertainty quantification, ICML 2023.
    """
    return math.ceil((number + clients) * (1 - Fraction(str(alpha))))


def fewest_residuals(clients: int, alpha: float) -> int:
    """Smallest n for which `conformal_rank` is at most n."""
    share = Fraction(str(alpha))
    return math.ceil(clients * (1 - share) / share)
