"""Participation in a round: seeded rules, with equal draws on every process."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, final

from fedlit.checks import check, check_at_least, check_one_of
from fedlit.federation.client import Client
from fedlit.federation.errors import RosterError
from fedlit.federation.streams import stable_seed


class Participation(ABC):
    """A rule that picks, in each round, a subset of clients.

    The rule picks among the sources; the target is always present unless a `Schedule` omits it. A draw is a pure
    function of (seed, round), so it needs no state, survives a resume and agrees between processes.
    """

    @abstractmethod
    def draw(self, clients: Sequence[Client], round_idx: int, rng: random.Random) -> Sequence[Client]:
        """Clients present in round ``round_idx``, picked from ``clients`` with ``rng``."""

    def present(self, clients: Sequence[Client], round_idx: int, seed: int, stream: str = "") -> tuple[Client, ...]:
        """Clients of ``clients`` present in round ``round_idx``, in roster order.

        Args:
            clients: Those to pick from.
            round_idx: Communication round, from 0.
            seed: Of the federation.
            stream: Distinguishes rules that draw in the same round, such as those of two channels.
        """
        rng = random.Random(stable_seed(seed, "participation", stream, round_idx))
        drawn = {client.name for client in self.draw(clients, round_idx, rng)}
        return tuple(client for client in clients if client.name in drawn)

    def check(self, clients: Sequence[Client]) -> None:
        """Raise a `RosterError` if the rule does not fit the roster; called before the first round."""
        del clients


def _split(clients: Sequence[Client]) -> tuple[list[Client], list[Client]]:
    return [c for c in clients if not c.is_target], [c for c in clients if c.is_target]


@final
class Everyone(Participation):
    """All clients, in every round."""

    def draw(self, clients: Sequence[Client], round_idx: int, rng: random.Random) -> Sequence[Client]:
        """All of ``clients``."""
        return clients


@final
class Fraction(Participation):
    """A fixed share of the sources, drawn without replacement.

    Args:
        p: Share in (0, 1]; the number of sources is rounded to the nearest integer and is at least 1.

    Raises:
        ValueError: If ``p`` is outside (0, 1].
    """

    def __init__(self, p: float) -> None:
        check(0 < p <= 1, "p", "in (0, 1]", p, "it is the share of sources present in a round")
        self.p = p

    def draw(self, clients: Sequence[Client], round_idx: int, rng: random.Random) -> Sequence[Client]:
        """The target and ``round(p * K)`` of the K sources."""
        sources, target = _split(clients)
        number = min(len(sources), max(1, round(self.p * len(sources))))
        return [*rng.sample(sources, number), *target]


@final
class UniformSubset(Participation):
    """A subset of the sources whose size is uniform on {at_least, ..., K}: FedRF-TCA, Algorithm 5, line 5.

    Args:
        at_least: Fewest sources, at least 0 (the paper's); where there are fewer, all of them. With a privacy backend
            take 2: a mean over a single source hides nothing of it.

    Raises:
        ValueError: If ``at_least`` is negative.
    """

    def __init__(self, at_least: int = 0) -> None:
        check_at_least("at_least", at_least, 0, "sources")
        self.at_least = at_least

    def draw(self, clients: Sequence[Client], round_idx: int, rng: random.Random) -> Sequence[Client]:
        """The target and between ``at_least`` and all of the sources."""
        sources, target = _split(clients)
        return [*rng.sample(sources, rng.randint(min(self.at_least, len(sources)), len(sources))), *target]


@final
class OneByOne(Participation):
    """One source in each round.

    Args:
        order: ``"ordered"`` goes through the sources in roster order, ``"random"`` draws one each time.

    Raises:
        ValueError: If ``order`` is neither.
    """

    def __init__(self, order: Literal["ordered", "random"] = "ordered") -> None:
        check_one_of("order", order, ("ordered", "random"))
        self.order = order

    def draw(self, clients: Sequence[Client], round_idx: int, rng: random.Random) -> Sequence[Client]:
        """The target and a single source."""
        sources, target = _split(clients)
        if not sources:
            return target
        one = rng.choice(sources) if self.order == "random" else sources[round_idx % len(sources)]
        return [one, *target]


@final
class Schedule(Participation):
    """Exactly the clients listed for each round, the target included or not.

    Args:
        rounds: One list of client names per round; after the last one the schedule starts again.

    Raises:
        ValueError: If ``rounds`` is empty.
        RosterError: At the start of a run, if a name is not in the roster.
    """

    def __init__(self, rounds: list[list[str]]) -> None:
        check(bool(rounds), "rounds", "a list of clients for at least one round", rounds)
        self.rounds = rounds

    def draw(self, clients: Sequence[Client], round_idx: int, rng: random.Random) -> Sequence[Client]:
        """The clients named for this round."""
        names = set(self.rounds[round_idx % len(self.rounds)])
        return [client for client in clients if client.name in names]

    def check(self, clients: Sequence[Client]) -> None:
        """Refuse names that are not in the roster."""
        roster = sorted(client.name for client in clients)
        for round_idx, names in enumerate(self.rounds):
            unknown = sorted(set(names).difference(roster))
            check(not unknown, f"rounds[{round_idx}]", f"names of clients {roster}", unknown, "", RosterError)
