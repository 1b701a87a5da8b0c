"""Federation: the roster on its processes, and what clients say to each other."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedlit.federation.aggregation import Aggregation, Recipe
from fedlit.federation.client import Client, Facts, make_roster, names_of, place
from fedlit.federation.errors import FederationError, OutOfStepError, RosterError
from fedlit.federation.ledger import SERVER, Ledger
from fedlit.federation.messenger import KINDS, Messenger
from fedlit.federation.participation import Everyone, Participation
from fedlit.federation.streams import global_seed
from fedlit.federation.transport import OneProcess, Transport
from fedlit.federation.two_party import TwoPartyExchange
from fedlit.federation.wire import wire_size
from fedlit.privacy import (
    Accountant,
    Description,
    GaussianMechanism,
    InputError,
    PlainAffine,
    PrivacyError,
    RoundId,
    SecureAggregation,
    TwoPartyAffine,
)
from fedlit.privacy.packing import Payload

_NUMBER = torch.zeros((), dtype=torch.float64)
_T = TypeVar("_T")


class Federation:
    """The clients of a federation, those hosted by this process, and the exchanges between them.

    Every process calls `exchange`, `mean` and `sum` in the same order with the payloads of the clients it hosts;
    world size 1 hosts everybody. What leaves a client is detached and copied here, once, and nowhere else.

    Args:
        clients: The roster, at least two.
        target: Name of the target.
        transport: Joins the processes; default one process.
        placement: Client names per rank; ``None`` deals out contiguous shares.
        participation: Who is present in a round.
        drops: Per channel, who of those present is heard. Subsets are nested in the order of the mapping: the second
            channel's clients are drawn among the first's, and so on (FedRF-TCA, Table II).
        nested_drops: ``False`` draws each channel's subset among all who are present, independently of the other
            channels' (FedRF-TCA, Table XV).
        privacy: Backend for sums, one for all channels or one per channel; ``None`` is `Plain`. If channels are named,
            a sum over another one is refused: it would be sent in the clear.
        two_party: Protocol for what pairs of clients compute together (`affine`), one for all channels or one per
            channel; ``None`` is `PlainAffine`. If channels are named, another one is refused, as for sums.
        differential_privacy: What each client does to what it sends before anything else, one for all channels or one
            per channel. Watched numbers (`report`) are never touched.
        seed: Of participation and random streams; ``None`` takes the one given to ``seed_everything``.

    Attributes:
        batch_idx: Batch within the round.
        accounts: Of differential privacy: what was spent against those who see single messages (``"message"``), and
            against those who see sums only (``"sum"``), where the backend hides the messages.
        seconds: Time spent so far by phase: ``"exchange"`` and ``"protection"``; others may add theirs.

    Raises:
        RosterError: If roster, target, placement or participation do not fit together.
        TypeError: If ``privacy``, ``two_party`` or ``differential_privacy`` hold something else.
    """

    def __init__(
        self,
        clients: Iterable[Client | str],
        target: str,
        *,
        transport: Transport | None = None,
        placement: Sequence[Sequence[str]] | None = None,
        participation: Participation | None = None,
        drops: Mapping[str, Participation] | None = None,
        nested_drops: bool = True,
        privacy: SecureAggregation | Mapping[str, SecureAggregation] | None = None,
        two_party: TwoPartyAffine | Mapping[str, TwoPartyAffine] | None = None,
        differential_privacy: GaussianMechanism | Mapping[str, GaussianMechanism] | None = None,
        seed: int | None = None,
    ) -> None:
        check_kinds("privacy", privacy, SecureAggregation)
        check_kinds("two_party", two_party, TwoPartyAffine)
        check_kinds("differential_privacy", differential_privacy, GaussianMechanism)
        self.clients = make_roster(clients, target)
        self.transport = OneProcess() if transport is None else transport
        self.participation = Everyone() if participation is None else participation
        self.drops = dict(drops or {})
        self.nested_drops = nested_drops
        self.seed = global_seed() if seed is None else seed
        for rule in (self.participation, *self.drops.values()):
            rule.check(self.clients)
        ranks = place(self.clients, self.transport.world_size, placement)
        rank_of = {client.name: rank for client, rank in zip(self.clients, ranks, strict=True)}
        self.batch_idx = 0
        self.seconds: dict[str, float] = {}
        self._messenger = Messenger(self.transport, rank_of)
        self._aggregation = Aggregation(
            self._messenger,
            privacy,
            timed=self._timed,
        )
        self._protocols = two_party
        self._two_party = TwoPartyExchange(self._messenger, partial(self._send, kind="affine"), self._timed)
        self._mechanisms = differential_privacy
        self.accounts = {"message": Accountant(), "sum": Accountant()}
        self._present: dict[tuple[int, str | None], tuple[Client, ...]] = {}
        self._skipped: set[str] = set()  # channels on which a mean was skipped, and a warning given

    @property
    def round_idx(self) -> int:
        """Communication round under way, from 0; no epoch restarts it."""
        return self._messenger.round_idx

    @round_idx.setter
    def round_idx(self, round_idx: int) -> None:
        self._messenger.round_idx = round_idx

    @property
    def device(self) -> torch.device | None:
        """Where received tensors are put; ``None`` leaves them where they arrive. The strategy sets it."""
        return self._messenger.device

    @device.setter
    def device(self, device: torch.device | None) -> None:
        self._messenger.device = device

    @property
    def ledger(self) -> Ledger:
        """What crossed so far."""
        return self._messenger.ledger

    # ---------------------------------------------------------------- roster

    @property
    def sources(self) -> tuple[Client, ...]:
        """Labelled clients, in roster order."""
        return tuple(client for client in self.clients if not client.is_target)

    @property
    def target(self) -> Client:
        """The client adapted to."""
        return next(client for client in self.clients if client.is_target)

    @property
    def local_clients(self) -> tuple[Client, ...]:
        """Clients hosted by this process, in roster order."""
        return tuple(client for client in self.clients if self.is_local(client))

    def is_local(self, client: Client | str) -> bool:
        """Whether this process hosts ``client``."""
        name = client.name if isinstance(client, Client) else client
        return self._messenger.is_local(name)

    @property
    def hosts_server(self) -> bool:
        """Whether the server lives in this process."""
        return self._messenger.hosts_server

    @property
    def weights(self) -> dict[str, int]:
        """Number of training samples per client.

        Raises:
            RosterError: If a client has not told; see `introduce`.
        """
        unknown = [client.name for client in self.clients if client.num_samples is None]
        if unknown:
            raise RosterError(
                f"the number of training samples of {unknown} is not known: train with a FederatedLoader, give "
                "Client(num_samples=...), or weight clients uniformly"
            )
        return {client.name: client.num_samples or 0 for client in self.clients}

    def present(self, channel: str | None = None) -> tuple[Client, ...]:
        """Clients present in this round; with ``channel``, those who are heard on it."""
        key = (self.round_idx, channel)
        if key not in self._present:
            if channel not in self.drops or channel is None:
                drawn = self.participation.present(self.clients, self.round_idx, self.seed)
            else:
                drawn = self.present()
                for name, rule in self.drops.items():
                    if self.nested_drops or name == channel:
                        drawn = rule.present(drawn, self.round_idx, self.seed, stream=name)
                    if name == channel:
                        break
            self._present = {k: v for k, v in self._present.items() if k[0] == self.round_idx}
            self._present[key] = drawn
        return self._present[key]

    def present_in(self, round_idx: int) -> tuple[Client, ...]:
        """Clients present in any round, past or to come."""
        return self.participation.present(self.clients, round_idx, self.seed)

    def introduce(self, facts: Mapping[str, Facts]) -> None:
        """Let every process know the size and shape of all clients' data; called by all of them before training.

        Args:
            facts: Of the local clients.

        Raises:
            RosterError: On every process, if a client's samples are shaped unlike the others'.
        """
        everyone: dict[str, Facts] = {}
        for share in self.transport.all_gather_object({name: tuple(fact) for name, fact in facts.items()}):
            everyone.update({name: Facts(*fact) for name, fact in share.items()})
        missing = [client.name for client in self.clients if client.name not in everyone]
        if missing:
            raise RosterError(f"clients {missing} have no training data: give each client a data set, or leave it out")
        first = self.clients[0].name
        for name, fact in everyone.items():
            if fact.input_shape != everyone[first].input_shape:
                raise RosterError(
                    f"samples of client {name!r} have shape {fact.input_shape}, those of {first!r} have "
                    f"{everyone[first].input_shape}: all clients feed the same network, bring them to one shape"
                )
        self.clients = tuple(replace(client, num_samples=everyone[client.name].num_samples) for client in self.clients)
        self._present.clear()

    def agree(self, label: str, value: object) -> None:
        """Raise an `OutOfStepError` on every process unless all of them hold an equal ``value``."""
        values = self.transport.all_gather_object(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise OutOfStepError(f"{label} differs between processes: rank 0 has {values[0]}, rank {rank} {other}")

    # ---------------------------------------------------------------- messages

    def exchange(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        to: Iterable[Client | str] | Mapping[str, Iterable[Client | str]] | None = None,
        around: Mapping[str, Payload] | None = None,
        absent_too: bool = False,
    ) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Send messages from client to client.

        Args:
            channel: Kind of message, at most 32 bytes of UTF-8.
            payloads: ``{sender: {name: tensor}}`` of local clients; shapes may differ between clients. Senders that
                are not present on the channel are left out.
            to: Receivers of every message, or receivers by sender; ``None`` is everyone. A client does not send to
                itself; receivers that are not present are left out.
            around: See `mean`.
            absent_too: Whether clients that are not present send and receive all the same, as at the end of a run.

        Returns:
            ``{receiver: {sender: {name: tensor}}}`` for local receivers. Receivers of one process share the tensors:
            copy before writing.

        Raises:
            OutOfStepError: On every process, if another one is in a different exchange.
            DivergedError: On every process, if a payload has NaN or infinite entries.
            RosterError: If a sender is unknown or not hosted here, or a receiver is unknown.
            PayloadError: If an entry has a type that cannot be sent.
        """
        with self._timed("exchange"):
            heard = self._heard(channel, absent_too)
            routing = {name: self._names("to", some) for name, some in to.items()} if isinstance(to, Mapping) else None
            everyone = self._names("to", None if isinstance(to, Mapping) else to)
            self._names("to", routing)
            mine = {name: payload for name, payload in self._mine(payloads).items() if name in heard}
            outgoing = self._released(channel, mine, around)
            for name, payload in outgoing.items():
                for tensor in payload.values():
                    self._messenger.check_finite(channel, name, tensor)

            def routes(sender: str) -> list[tuple[str, str]]:
                wanted = everyone if routing is None else routing.get(sender, set())
                return [(sender, name) for name in heard if name in wanted and name != sender]

            return self._send(channel, outgoing, routes, lambda sent: self._account(channel, sent, hidden=False))

    def affine(
        self,
        channel: str,
        moments: Mapping[str, Tensor],
        maps: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]],
        pairs: Sequence[tuple[Client, Client]],
        num_outputs: int,
    ) -> dict[str, dict[str, Tensor]]:
        """For pairs of clients: the second learns y = A m + b of the first's moments m and its own A and b.

        Neither learns what the other put in, as far as the channel's protocol (``two_party``) hides it. Keys are
        exchanged the first time that a pair meets on the channel. A mechanism of differential privacy on it noises the
        moments.

        Args:
            channel: Kind of message.
            moments: ``{client: m}`` of local clients that are first in a pair, each of shape (M,).
            maps: ``{client: {first: (A, b)}}`` of local clients that are second in a pair, of shapes (k, M) and (k,).
            pairs: Of (who holds m, who learns y), the same on every process. Pairs with somebody who is not present
                on the channel are left out.
            num_outputs: Most numbers k of a y that holders of moments let the others learn.

        Returns:
            ``{second: {first: y}}`` for local clients that are second in a pair, each y of shape (k,), float64.

        Raises:
            OutOfStepError: On every process, if another one is in a different exchange.
            DivergedError: On every process, if moments have NaN or infinite entries.
            RosterError: If a client is unknown or not hosted here, or ``two_party`` names channels but not this one.
            PrivacyError: On every process, if one party cannot encode its numbers or refuses what it was sent.
        """
        protocol = self.protocol(channel)
        if protocol is None and self._protocols is not None:
            raise RosterError(
                f"two_party names channels, but not {channel!r}, whose moments would be sent in the clear: add it, if "
                "only with fedlit.privacy.PlainAffine()"
            )
        heard = self._heard(channel, False)
        self._names("pairs", [client for pair in pairs for client in pair])
        active = [(first.name, second.name) for first, second in pairs if {first.name, second.name} <= {*heard}]
        holders = list(dict.fromkeys(first for first, _ in active))
        own = {name: {"moments": m} for name, m in self._mine(moments).items() if name in holders}
        released = self._released(channel, own, None)
        for name, payload in released.items():
            self._messenger.check_finite(channel, name, payload["moments"])
        self._account(channel, dict.fromkeys(holders, 1.0), hidden=False)
        return self._two_party.run(
            RoundId(self.round_idx, channel, self._messenger.call),
            PlainAffine() if protocol is None else protocol,
            {name: payload["moments"] for name, payload in released.items()},
            maps,
            active,
            num_outputs,
        )

    def mean(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        among: Iterable[Client | str] | None = None,
        to: Iterable[Client | str] | None = None,
        weights: Mapping[str, float] | None = None,
        around: Mapping[str, Payload] | None = None,
        too_few: Literal["raise", "skip"] = "raise",
        absent_too: bool = False,
    ) -> dict[str, dict[str, Tensor]]:
        """Weighted mean of payloads, through the channel's privacy backend: only the mean arrives.

        Args:
            channel: Kind of message.
            payloads: ``{client: {name: tensor}}`` of local clients, equal names and shapes for all. Integer entries
                are averaged and rounded.
            among: Whose payloads count, if they are present; ``None`` is everyone who gave one.
            to: Who receives the mean, if present; ``None`` is everyone.
            weights: By client, positive; ``None`` is uniform. They travel inside the sum.
            around: ``{client: {name: tensor}}`` of local clients: public values that payloads are close to. A
                mechanism of differential privacy clips the difference to them; otherwise of no effect.
            too_few: What to do if fewer of ``among`` are present than the backend needs to hide them: raise an error,
                or send nothing, with a warning the first time.
            absent_too: Whether clients that are not present send and receive all the same, as at the end of a run.

        Returns:
            ``{receiver: {name: tensor}}`` for local receivers; empty if nobody was present to send. Receivers of one
            process share the tensors: copy before writing.

        Raises:
            OutOfStepError: On every process, if another one is in a different exchange.
            DivergedError: On every process, if a payload has NaN or infinite entries.
            PayloadError: On every process, if payloads differ in names, types or shapes, or the weight of a sender is
                missing or not positive.
            RosterError: If a sender, or a name in ``among`` or ``to``, is unknown.
            FederationError: On every process, if fewer clients send than the backend needs to hide them.
        """
        shares = dict.fromkeys(self._names("among", None), 1.0) if weights is None else dict(weights)
        return self._aggregate(channel, payloads, among, to, shares, around, too_few, absent_too)

    def sum(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        among: Iterable[Client | str] | None = None,
        to: Iterable[Client | str] | None = None,
    ) -> dict[str, dict[str, Tensor]]:
        """Sum of payloads, through the channel's privacy backend; otherwise as `mean`."""
        return self._aggregate(channel, payloads, among, to, None, None)

    def catch_up(self, channel: str, absent_too: bool = False) -> dict[str, dict[str, Tensor]]:
        """Send the last mean or sum of ``channel`` to present clients that were away when it was sent to them.

        Args:
            channel: Of the mean or sum.
            absent_too: Whether clients that are not present receive it all the same.

        Returns:
            ``{receiver: {name: tensor}}`` for local receivers that were behind.
        """
        with self._timed("exchange"):
            return self._aggregation.catch_up(channel, self._heard(channel, absent_too))

    def report(
        self, values: Mapping[str, Mapping[str, float]], names: Sequence[str], channel: str = "metrics"
    ) -> dict[str, dict[str, float]]:
        """Let every process know a few numbers of each client, for logging and model selection.

        Each client sends its numbers to the server, which sends the table of all of them to everyone.

        Args:
            values: ``{client: {name: number}}`` of local clients; clients and names may be left out.
            names: The names there may be, the same on every process.
            channel: Under which the messages are booked.

        Returns:
            ``{client: {name: number}}`` of all clients that reported, in roster order.

        Raises:
            OutOfStepError: On every process, if another one is in a different exchange.
            RosterError: If a client is unknown or not hosted here.
        """
        with self._timed("exchange"):
            clients = list(self._messenger.rank_of)
            values = self._mine(values)
            # Flags say which numbers are given: NaN is a number that a metric may have.
            table = torch.zeros(2, len(clients), len(names), dtype=torch.float64)
            for row, client in enumerate(clients):
                for column, name in enumerate(names):
                    if name in values.get(client, {}):
                        table[0, row, column], table[1, row, column] = values[client][name], 1.0
            given = table[1].any(dim=1).tolist()
            # The kind tells the number of names too: tables of unequal size cannot be gathered.
            kind = KINDS.index("report") + len(names)
            self._messenger.announce(
                channel, {name: 8 for name, some in zip(clients, given, strict=True) if some}, kind
            )
            tables = self.transport.all_gather(table, f"exchange {channel!r} of round {self.round_idx}")
            table = torch.stack(tables).sum(dim=0)
            numbers, flags = table[0].tolist(), table[1].tolist()
            told = {
                client: {name: numbers[row][column] for column, name in enumerate(names) if flags[row][column]}
                for row, client in enumerate(clients)
                if any(flags[row])
            }
            sizes = {client: wire_size(dict.fromkeys(mine, _NUMBER)) for client, mine in told.items()}
            # Between two rounds, as in validation, a report is about the round that has ended.
            about = self.round_idx if self.batch_idx else max(0, self.round_idx - 1)
            for client, size in sizes.items():
                self.ledger.record(about, channel, client, SERVER, size)
            for client in clients if told else ():
                self.ledger.record(about, channel, SERVER, client, sum(sizes.values()))
            return told

    def backend(self, channel: str) -> SecureAggregation:
        """Privacy backend of ``channel``."""
        return self._aggregation.backend(channel)

    def least_clients(self, channel: str) -> int:
        """Fewest clients that a mean or sum over ``channel`` can run over: its backend hides nothing of fewer."""
        return self.backend(channel).min_clients

    def protocol(self, channel: str) -> TwoPartyAffine | None:
        """Protocol that was given for what pairs of clients compute over ``channel``."""
        if isinstance(self._protocols, Mapping):
            return self._protocols.get(channel)
        return self._protocols

    def mechanism(self, channel: str) -> GaussianMechanism | None:
        """What clients do to what they send over ``channel`` for differential privacy."""
        if isinstance(self._mechanisms, Mapping):
            return self._mechanisms.get(channel)
        return self._mechanisms

    @property
    def has_mechanism(self) -> bool:
        """Whether differential privacy is on for any channel."""
        return bool(self._mechanisms)

    def epsilon(self, against: Literal["message", "sum"] = "message") -> dict[str, float]:
        """Privacy loss so far of each client that has released anything, at the largest ``delta`` of the mechanisms.

        Args:
            against: Those who see single messages, or those who see sums only: see `accounts`.

        Raises:
            ImportError: If the accountant's library is not installed.
        """
        mechanisms = self._mechanisms
        rules = mechanisms.values() if isinstance(mechanisms, Mapping) else [mechanisms]
        delta = max((rule.delta for rule in rules if rule is not None), default=1e-5)
        account = self.accounts[against]
        return {name: account.epsilon(name, delta) for name in account.clients}

    @property
    def summed_channels(self) -> set[str]:
        """Channels over which means or sums were taken so far, each through its backend."""
        return self._aggregation.channels

    def description(self, channel: str) -> Description | None:
        """What protects a channel that was used, or ``None`` where clients tell each other things in the clear."""
        if channel in self._two_party.protocols:
            return self._two_party.protocols[channel].describe()
        return self.backend(channel).describe() if channel in self.summed_channels else None

    @property
    def named_channels(self) -> set[str]:
        """Channels that ``drops``, ``privacy``, ``two_party`` or ``differential_privacy`` name."""
        mechanisms = self._mechanisms if isinstance(self._mechanisms, Mapping) else {}
        protocols = self._protocols if isinstance(self._protocols, Mapping) else {}
        return {*self.drops, *self._aggregation.backends, *protocols, *mechanisms}

    def fail(self, error: FederationError | RosterError | PrivacyError) -> None:
        """Keep a local failure until the next exchange, which then raises it on every process."""
        self._messenger.fail(error)

    def check(self, about: str, error: FederationError | RosterError | None) -> None:
        """Raise a local ``error`` on every process; all of them call it, those without an error give ``None``.

        Args:
            about: What is checked, at most 32 bytes of UTF-8.
            error: What this process has found.
        """
        if error is not None:
            self.fail(error)
        self._messenger.announce(about, {}, KINDS.index("check"))

    # ---------------------------------------------------------------- small things

    def _aggregate(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        among: Iterable[Client | str] | None,
        to: Iterable[Client | str] | None,
        weights: Mapping[str, float] | None,
        around: Mapping[str, Payload] | None,
        too_few: Literal["raise", "skip"] = "raise",
        absent_too: bool = False,
    ) -> dict[str, dict[str, Tensor]]:
        start = time.perf_counter()
        protecting = self.seconds.get("protection", 0.0)
        heard = self._heard(channel, absent_too)
        counted, addressed = self._names("among", among), self._names("to", to)
        recipe = Recipe(
            channel,
            senders=[name for name in heard if name in counted],
            receivers=[name for name in heard if name in addressed],
            away=frozenset(addressed.difference(heard)),
            weights=weights,
        )
        needed = self.least_clients(channel)
        if too_few == "skip" and 0 < len(recipe.senders) < needed:  # as all processes find
            if channel not in self._skipped:
                self._skipped.add(channel)
                if self.hosts_server:
                    warnings.warn(
                        f"round {self.round_idx} sends no mean over channel {channel!r}: {recipe.senders} alone would "
                        f"be heard, and {type(self.backend(channel)).__name__} hides nothing of fewer than {needed} "
                        "clients. Rounds like this pass without it; a participation such as "
                        f"UniformSubset(at_least={needed}) has none of them",
                        stacklevel=3,
                    )
            return {}
        mine: Mapping[str, Payload]
        mine = {name: payload for name, payload in self._mine(payloads).items() if name in recipe.senders}
        if self.mechanism(channel) is not None:
            with self._timed("protection"):
                mine = self._released(channel, mine, around)
        hidden = self.backend(channel).min_clients > 1
        result = self._aggregation.aggregate(recipe, mine, lambda sent: self._account(channel, sent, hidden))
        spent = time.perf_counter() - start - (self.seconds.get("protection", 0.0) - protecting)
        self.seconds["exchange"] = self.seconds.get("exchange", 0.0) + spent
        return result

    def _send(
        self,
        channel: str,
        outgoing: Mapping[str, dict[str, Tensor]],
        routes: Callable[[str], list[tuple[str, str]]],
        account: Callable[[Mapping[str, float]], None] | None = None,
        kind: str = "exchange",
    ) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Carry finished messages of local clients along the routes of each sender, and book them."""
        sizes = self._messenger.announce(
            channel, {name: wire_size(payload) for name, payload in outgoing.items()}, KINDS.index(kind)
        )
        ways = [way for sender in sizes for way in routes(sender)]
        if account is not None:
            account(dict.fromkeys((sender for sender, _ in ways), 1.0))
        for sender, receiver in ways:
            self._messenger.book(channel, sender, receiver, sizes[sender])
        return self._messenger.deliver(channel, outgoing, sizes, ways)

    def _heard(self, channel: str, absent_too: bool) -> list[str]:
        return names_of(self.clients if absent_too else self.present(channel))

    def _names(self, argument: str, clients: Iterable[Client | str] | None) -> set[str]:
        """Names of ``clients``, or of the whole roster; ``argument`` is for the error message."""
        if clients is None:
            return set(self._messenger.rank_of)
        names = {clients} if isinstance(clients, str) else set(names_of(clients))
        unknown = sorted(names - self._messenger.rank_of.keys())
        if unknown or isinstance(clients, str):
            raise RosterError(
                f"{argument} must list clients of {list(self._messenger.rank_of)}, got {unknown or clients!r}"
            )
        return names

    def _released(
        self, channel: str, payloads: Mapping[str, Payload], around: Mapping[str, Payload] | None
    ) -> dict[str, dict[str, Tensor]]:
        """What leaves local clients: detached copies, or what a mechanism makes of them."""
        mechanism = self.mechanism(channel)
        if mechanism is None:
            return {name: _detached(payload) for name, payload in payloads.items()}
        released: dict[str, dict[str, Tensor]] = {}
        for name, payload in payloads.items():
            for tensor in payload.values():
                self._messenger.check_finite(channel, name, tensor)
            if not self._messenger.failed:
                try:
                    released[name] = mechanism.release(payload, None if around is None else around.get(name, {}))
                except InputError as error:
                    self.fail(type(error)(f"client {name!r}, channel {channel!r}: {error}"))
        return released

    def _account(self, channel: str, sent: Mapping[str, float], hidden: bool) -> None:
        """Book what clients have released; in a hidden sum, the noise of all of them covers each.

        A client's share w of a sum with noise w_j z C from each client j is a Gaussian mechanism of multiplier
        z |w| / w, at least z |w| as the largest weight is 1.
        """
        mechanism = self.mechanism(channel)
        if mechanism is None:
            return
        together = math.hypot(*sent.values()) if hidden else 1.0
        self.accounts["message"].record(sent, mechanism.noise_multiplier)
        self.accounts["sum"].record(sent, mechanism.noise_multiplier * together)

    def _mine(self, payloads: Mapping[str, _T]) -> dict[str, _T]:
        for name in payloads:
            if name not in self._messenger.rank_of:
                raise RosterError(f"sender {name!r} is not one of the clients {list(self._messenger.rank_of)}")
            if not self.is_local(name):
                raise RosterError(
                    f"sender {name!r} is hosted by rank {self._messenger.rank_of[name]}, not by rank "
                    f"{self.transport.rank}: give the payloads of local clients only"
                )
        return {name: payloads[name] for name in self._messenger.rank_of if name in payloads}

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def state_dict(self) -> dict[str, Any]:
        """Round counter, ledger, participation and the server's memory, as values that load with ``weights_only``.

        Random streams and participation are pure functions of the seed and the round, so the seed is their state.
        """
        return {
            "roster": [[client.name, client.role] for client in self.clients],
            "seed": self.seed,
            "round_idx": self.round_idx,
            "batch_idx": self.batch_idx,
            "calls": self._messenger.call,
            "ledger": self.ledger.state_dict(),
            "seconds": dict(self.seconds),
            "accounts": {against: account.state_dict() for against, account in self.accounts.items()},
            **self._aggregation.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` left off.

        Raises:
            RosterError: If the state belongs to another roster.
        """
        self.check_roster(state)
        self.seed = state["seed"]
        self.round_idx, self.batch_idx = state["round_idx"], state["batch_idx"]
        self._messenger.call = max(self._messenger.call, state["calls"])  # never repeats: see `RoundId`
        self.ledger.load_state_dict(state["ledger"])
        self.seconds = dict(state["seconds"])
        for against, account in self.accounts.items():
            account.load_state_dict(state["accounts"][against])
        self._aggregation.load_state_dict(state)
        self._present.clear()

    def check_roster(self, state: Mapping[str, Any]) -> None:
        """Raise a `RosterError` unless ``state``, made by `state_dict`, belongs to this roster."""
        roster = [[client.name, client.role] for client in self.clients]
        if [list(item) for item in state["roster"]] != roster:
            raise RosterError(
                f"the checkpoint belongs to another federation: it has {_roster_text(state['roster'])}, this run has "
                f"{_roster_text(roster)}. Give the same clients, in the same order, and the same target"
            )

    def __repr__(self) -> str:
        names = ", ".join(client.name for client in self.sources)
        return f"Federation(sources=[{names}], target={self.target.name!r}, round_idx={self.round_idx})"


def _detached(payload: Payload) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in payload.items()}


def check_kinds(argument: str, given: object, kind: type) -> None:
    """Raise a `TypeError` unless ``given`` is ``None``, a ``kind``, or a mapping to them."""
    values = list(given.values()) if isinstance(given, Mapping) else [] if given is None else [given]
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(
                f"{argument} must be a {kind.__name__}, a mapping from channels to them, or None, got {value!r}: give "
                "an object, such as fedlit.privacy.PairwiseMasking(), and not its class"
            )


def _roster_text(roster: Iterable[Sequence[str]]) -> str:
    return ", ".join(f"{name} ({role})" for name, role in roster)
