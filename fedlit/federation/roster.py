"""Roster: the clients, the processes that host them, and participation in a round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from fedlit.checks import check, check_one_of, refuse
from fedlit.federation.client import Client, Facts, make_roster, names_of, place
from fedlit.federation.errors import RosterError, about
from fedlit.federation.nested import alike, in_words
from fedlit.federation.participation import Everyone, Participation
from fedlit.federation.transport import Transport

_T = TypeVar("_T")

_ROUNDS_COMPARED = 10
"""After a checkpoint, to see whether participation has changed."""


class Roster:
    """The clients of a federation; arguments as of `Federation`, whose ``heard`` is ``participating`` here.

    Attributes:
        rank_of: Process that hosts each client, in roster order.
        away: Clients that are absent as their process was disconnected when the round began.
        returned: Clients that have come back after the last round, and fetch what they have missed; before, none.

    Raises:
        RosterError: If roster, target, placement or participation do not fit together.
    """

    def __init__(
        self,
        clients: Iterable[Client | str],
        target: str,
        transport: Transport,
        placement: Sequence[Sequence[str]] | None,
        participation: Participation | None,
        participating: Mapping[str, Participation] | None,
        nested: bool,
        seed: int,
    ) -> None:
        self.clients = make_roster(clients, target)
        self.participation = Everyone() if participation is None else participation
        self.participating = dict(participating or {})
        self.nested = nested
        self.seed = seed
        for rule in (self.participation, *self.participating.values()):
            rule.check(self.clients)
        ranks = place(self.clients, transport.world_size, placement)
        self.rank_of = {client.name: rank for client, rank in zip(self.clients, ranks, strict=True)}
        self._rank = transport.rank
        self._present: dict[tuple[int, str | None], tuple[Client, ...]] = {}
        self._weights: dict[str, int] = {}
        self.away: frozenset[str] = frozenset()
        self.returned: frozenset[str] = frozenset()

    def is_local(self, client: Client | str) -> bool:
        """Return whether this process hosts ``client``."""
        return self.rank_of[client.name if isinstance(client, Client) else client] == self._rank

    def names(self, argument: str, clients: Iterable[Client | str]) -> set[str]:
        """Names of ``clients``, which must be of the roster; ``argument`` is for the error message."""
        names = {clients} if isinstance(clients, str) else set(names_of(clients))
        unknown = sorted(names - self.rank_of.keys())
        if unknown or isinstance(clients, str):
            refuse(argument, f"a list of clients of {list(self.rank_of)}", unknown or clients, error=RosterError)
        return names

    def by_sender(
        self, argument: str, clients: Iterable[Client | str] | Mapping[str, Iterable[Client | str]] | None
    ) -> dict[str, set[str]]:
        """Names of receivers by sender; ``None`` is everybody."""
        if isinstance(clients, Mapping):
            self.names(argument, clients)
            return {name: self.names(argument, some) for name, some in clients.items()}
        everyone = self.names(argument, self.rank_of if clients is None else clients)
        return {name: everyone for name in self.rank_of}

    def local(self, payloads: Mapping[str, _T]) -> dict[str, _T]:
        """Entries of local clients, in roster order; a `RosterError` of others."""
        for name in payloads:
            check_one_of("sender", name, self.rank_of, "they are the clients", RosterError)
            if not self.is_local(name):
                text = f"sender {name!r} is hosted by rank {self.rank_of[name]}: give payloads of local clients only"
                raise about("sender", name, RosterError(text))
        return {name: payloads[name] for name in self.rank_of if name in payloads}

    @property
    def weights(self) -> dict[str, int]:
        """See `Federation.weights`."""
        if not self._weights:
            unknown = [client.name for client in self.clients if client.num_samples is None]
            way_out = "train with a FederatedLoader, give Client(num_samples=...), or weight clients uniformly"
            check(
                not unknown, "num_samples", "known for all clients", None, way_out, RosterError, f"none for {unknown}"
            )
            self._weights = {client.name: client.num_samples or 0 for client in self.clients}
        return dict(self._weights)

    def send_away(self, clients: Collection[str]) -> None:
        """Set which clients are ``away`` from now on."""
        if self.away != {*clients}:
            self.away = frozenset(clients)
            self._present.clear()

    def call_back(self, clients: Collection[str]) -> None:
        """Set which clients have ``returned`` after the last round; none before another."""
        if self.returned != {*clients}:
            self.returned = frozenset(clients)
            self._present.clear()

    def present(self, round_idx: int, channel: str | None = None) -> tuple[Client, ...]:
        """Clients present in a round; with ``channel``, those who participate on it.

        After the last round, those are who were there in it, and who have ``returned``.
        """
        if self.returned:
            there = self._drawn(round_idx - 1, channel if channel in self.participating else None, self.away)
            return tuple(client for client in self.clients if client in there or client.name in self.returned)
        key = (round_idx, channel if channel in self.participating else None)
        if key not in self._present:
            # draws of earlier rounds are not asked for again
            self._present = {past: clients for past, clients in self._present.items() if past[0] == round_idx}
            self._present[key] = self._drawn(round_idx, key[1], self.away)
        return self._present[key]

    def _drawn(self, round_idx: int, channel: str | None, away: Collection[str]) -> tuple[Client, ...]:
        drawn = self.participation.present(self.clients, round_idx, self.seed)
        drawn = tuple(client for client in drawn if client.name not in away)
        for name, rule in self.participating.items() if channel is not None else ():
            if self.nested or name == channel:
                drawn = rule.present(drawn, round_idx, self.seed, stream=name)
            if name == channel:
                break
        return drawn

    def introduce(self, facts: Mapping[str, Facts]) -> None:
        """Take in sizes and shapes of all clients' data; see `Federation.introduce`."""
        missing = [client.name for client in self.clients if client.name not in facts]
        if missing:
            text = f"clients {missing} have no training data: give each client a data set, or leave it out"
            raise about("clients", missing, RosterError(text))
        first = self.clients[0].name
        for name, fact in facts.items():
            if not alike(fact.input_shape, facts[first].input_shape):
                wanted, way_out = facts[first].input_shape, "bring them to one shape"
                if any(isinstance(part, tuple) for part in (*fact.input_shape, *wanted)):
                    way_out += ", or name the entries that all have (inputs of FederatedLoader.from_loaders)"
                text = (
                    f"samples of client {name!r} have shape {in_words(fact.input_shape)}, those of {first!r} have "
                    f"{in_words(wanted)}: all clients feed the same network, {way_out}"
                )
                raise about("samples", fact.input_shape, RosterError(text))
        self.clients = tuple(replace(client, num_samples=facts[client.name].num_samples) for client in self.clients)
        self._present.clear()
        self._weights.clear()

    def hosted_by(self, rank: int) -> list[str]:
        """Names of the clients of this process."""
        return [name for name, host in self.rank_of.items() if host == rank]

    def draws(self, round_idx: int) -> list[list[str]]:
        """Return who is present, and who participates on each channel with a rule, in a round and those after it."""
        return [
            names_of(self._drawn(each, channel, ()))
            for each in range(round_idx, round_idx + _ROUNDS_COMPARED)
            for channel in (None, *self.participating)
        ]

    def state(self) -> list[list[str]]:
        """Names and roles, for checkpoints."""
        return [[client.name, client.role] for client in self.clients]

    def go_on(self, roster: Iterable[Sequence[str]], seed: int) -> None:
        """Draw as a federation of the same clients did; see `Federation.load_state_dict`."""
        self.check(roster)
        self.seed = seed
        self._present.clear()

    def check(self, roster: Iterable[Sequence[str]]) -> None:
        """Raise a `RosterError` unless what `state` gave is of the same clients."""
        theirs = [list(item) for item in roster]
        if theirs != self.state():
            text = (
                f"the checkpoint belongs to another federation: it has {_in_words(theirs)}, this run has "
                f"{_in_words(self.state())}. Give the same clients, in the same order, and the same target"
            )
            raise about("clients", theirs, RosterError(text))


def _in_words(roster: Iterable[Sequence[str]]) -> str:
    return ", ".join(f"{name} ({role})" for name, role in roster)
