"""The graph of a sparse masked round: each client draws its neighbours; the probability that a server can cut it.

A client draws k of the n - 1 others by itself, from a secret of its own and the digest of the opened round. It shares
masks with these and with the clients that drew it, and only those that it drew hold shares of its secrets. (Bell et
al., 2020, let clients draw neighbours as well, where the server deviates; their circle, in an order drawn for all, is
for servers that do not.)
The draw is announced together with the round key, and the digest of the round covers all of them. So nobody can redraw
the graph between honest clients: a colluder that announces last chooses its own neighbours only, one that announces
nothing takes itself away, and a round that is opened again has the same draws. New ones take another round, roster or
enrolment, and each can be cut with the probability below.

Bell et al. assume that clients drop out at random. Here the server chooses them once it knows the graph: up to n - q in
all, as every client wants q survivors, and of the k + 1 holders of each client's shares (itself is one) k + 1 - t, as
every client wants t of them among the survivors. Colluders are c clients that were chosen before the graph is drawn.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedlit.privacy.errors import DecodeError

LARGEST_COMPLETE_GRAPH = 20
"""Rounds of up to so many clients mask every pair."""

FAILURE = -40.0
"""Logarithm to base 2 of the probability with which a sparse graph may fail."""

_STRANDED = -20.0
"""The same of the loss of an honest round in which a tenth of the clients drops out."""

_WEIGHT_BYTES = 16


def draw(secret: bytes, opening: bytes, roster: Sequence[str], client: str, degree: int) -> bytes:
    """Neighbours that a client draws: a bit for each client of the roster; nothing if the graph is complete."""
    size = draw_bytes(len(roster), degree)
    if not size:
        return b""
    stream = hashlib.shake_256(b"fedlit neighbours" + secret + opening).digest(_WEIGHT_BYTES * len(roster))
    weights = [stream[start : start + _WEIGHT_BYTES] for start in range(0, len(stream), _WEIGHT_BYTES)]
    others = [position for position, name in enumerate(roster) if name != client]
    drawn = sorted(others, key=weights.__getitem__)[:degree]
    return sum(1 << position for position in drawn).to_bytes(size, "little")


def draw_bytes(num_clients: int, degree: int) -> int:
    """Bytes of a `draw`."""
    return -(-num_clients // 8) if degree < num_clients - 1 else 0


def drawn_in(announced: bytes, roster: Sequence[str], client: str, degree: int) -> tuple[str, ...]:
    """Neighbours in a `draw`, in roster order; raises a `DecodeError` unless it is one."""
    if len(announced) != draw_bytes(len(roster), degree):
        raise DecodeError(f"client {client!r} announces its neighbours in {len(announced)} bytes")
    if not announced:
        return tuple(name for name in roster if name != client)
    positions = np.flatnonzero(np.unpackbits(np.frombuffer(announced, np.uint8), bitorder="little")).tolist()
    drawn = tuple(roster[position] for position in positions if position < len(roster))
    if len(drawn) < len(positions) or client in drawn or len(drawn) != degree:
        raise DecodeError(f"client {client!r} must draw {degree} other clients of the round, got {list(drawn)}")
    return drawn


def fraction_of(threshold: int | float | None, number: int) -> int:
    """A backend's threshold as a fraction of shares, or of clients; more than half, if it is a number."""
    if isinstance(threshold, float):
        return max(number // 2 + 1, math.ceil(threshold * number))
    return number // 2 + 1 if threshold is not None else 2 * number // 3 + 1


@functools.cache
def default_degree(num_clients: int, threshold: int | float | None = None, colluders: int = 0) -> int:
    """Number of clients that each one draws: all up to 20 clients, and beyond, as few as suffice.

    The fewest for which the probability of `log2_failure` is at most 2^-40 against ``colluders``, or a fifth of them
    if that is more, though no more than the quorum bears; and that a round in which a tenth of the clients drops out
    at random loses too many holders of somebody's shares once in 2^20 rounds. All others, if no smaller one suffices.
    """
    others, dropping = num_clients - 1, math.ceil(num_clients / 10)
    if num_clients <= LARGEST_COMPLETE_GRAPH:
        return others
    for degree in range(2, others):
        shares = threshold if isinstance(threshold, int) else fraction_of(threshold, degree + 1)
        if not degree + 1 < 2 * shares <= 2 * (degree + 1):
            continue
        logs = _log_factorials(num_clients)
        lost = _tail(logs, others, np.array([dropping]), degree, degree - shares + 1)
        if math.log2(num_clients) + float(lost[0]) / math.log(2) > _STRANDED:
            continue
        quorum = max(fraction_of(threshold, num_clients), shares)
        against = max(0, min(max(colluders, math.ceil(num_clients / 5)), 2 * quorum - num_clients - 1))
        if log2_failure(num_clients, degree, shares, quorum, against) <= FAILURE:
            return degree
    return others


@functools.cache
def log2_failure(num_clients: int, degree: int, threshold: int, quorum: int, colluders: int) -> float:
    r"""Logarithm to base 2 of a bound on the probability that a sparse graph hides less than a complete one.

    That is, over the draws of the h = n - c honest clients: c colluders hold t of the k shares that somebody has dealt,
    or some choice of at most n - q clients to drop, D, parts the honest ones that stay into S and a larger R without a
    mask between them. For one S of s clients, each has at least t - 1 of its k draws among the c + s - 1 that are
    colluders or in S; and for one S and D besides, nobody in S has drawn one of R, or in R one of S, and none has drawn
    more than k + 1 - t of D. Draws are independent, so with H(u, w) = P[at least w of k draws without replacement from
    n - 1 are among u], and with P_S and P_R the probabilities of a client's draw in the second case,

    .. math:: h H(c, t) + \sum_{s \le h/2} \min\Bigl\{\binom{h}{s} H(c + s - 1, t - 1)^s,
              \sum_{d \le n - q} \binom{h}{s} \binom{h - s}{d} P_S^s P_R^{h - s - d}\Bigr\}

    with the minimum taken over those d together for which the second term is larger, and that term alone for others.
    """
    honest, others = num_clients - colluders, num_clients - 1
    logs = _log_factorials(num_clients)
    shares = math.log(honest) + float(_tail(logs, others, np.array([colluders]), degree, threshold)[0])
    part = np.arange(1, honest // 2 + 1)[:, None]
    dropped = np.arange(num_clients - quorum + 1)[None, :]
    rest = honest - part - dropped
    possible = rest >= part
    within = _tail(logs, others, colluders + part[:, 0] - 1, degree, threshold - 1)
    by_part = _log_choose(logs, np.array([honest]), part[:, 0]) + part[:, 0] * within
    by_both = (
        _log_choose(logs, np.array([[honest]]), part)
        + _log_choose(logs, honest - part, dropped)
        + part * _draws(logs, colluders + part - 1, dropped, degree, threshold)
        + np.maximum(rest, 0) * _draws(logs, colluders + rest - 1, dropped, degree, threshold)
    )
    better = by_both < by_part[:, None]
    apart = np.where(possible & better, by_both, -np.inf)
    together = np.where((possible & ~better).any(axis=1), by_part, -np.inf)
    bound = np.logaddexp.reduce([shares, *apart.ravel(), *together])
    return min(0.0, float(bound) / math.log(2))


def _draws(
    logs: NDArray[np.float64], free: NDArray[np.int64], dropped: NDArray[np.int64], degree: int, threshold: int
) -> NDArray[np.float64]:
    """Log-probability that all draws of a client are among ``free`` and ``dropped`` others, with few of the latter."""
    ways = np.full(np.broadcast_shapes(free.shape, dropped.shape), -np.inf)
    for number in range(degree + 2 - threshold):
        both = _log_choose(logs, dropped, number) + _log_choose(logs, free, degree - number)
        ways = np.logaddexp(ways, both)
    return np.minimum(0.0, ways - _log_choose(logs, np.array([len(logs) - 2]), degree))


def _tail(
    logs: NDArray[np.float64], population: int, marked: NDArray[np.int64], drawn: int, minimum: int
) -> NDArray[np.float64]:
    """Log-probability of at least ``minimum`` marked ones in ``drawn``, without replacement."""
    ways = np.full(marked.shape, -np.inf)
    for hit in range(minimum, drawn + 1):
        both = _log_choose(logs, marked, hit) + _log_choose(logs, population - marked, drawn - hit)
        ways = np.logaddexp(ways, both)
    return np.minimum(0.0, ways - _log_choose(logs, np.array([population]), drawn))


def _log_choose(
    logs: NDArray[np.float64], total: NDArray[np.int64], chosen: NDArray[np.int64] | int
) -> NDArray[np.float64]:
    """Logarithm of binomial coefficients, -inf where there is no way."""
    total, chosen = np.broadcast_arrays(total, chosen)
    valid = (chosen >= 0) & (chosen <= total)
    of, some = np.where(valid, total, 0), np.where(valid, chosen, 0)
    return np.where(valid, logs[of] - logs[some] - logs[of - some], -np.inf)


@functools.cache
def _log_factorials(largest: int) -> NDArray[np.float64]:
    """Of 0 to ``largest``."""
    return np.array([math.lgamma(number + 1) for number in range(largest + 1)])
