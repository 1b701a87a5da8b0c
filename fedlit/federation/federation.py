"""Federation: the roster on its processes, and what clients say to each other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedlit.federation import errors
from fedlit.federation.client import Client, Facts, make_roster, names_of, place
from fedlit.federation.errors import (
    DivergedError,
    FederationError,
    OutOfStepError,
    PayloadError,
    PeerFailedError,
    RosterError,
)
from fedlit.federation.ledger import SERVER, Ledger
from fedlit.federation.packing import pack, unpack, vector_dtype
from fedlit.federation.participation import Everyone, Participation
from fedlit.federation.streams import global_seed
from fedlit.federation.transport import OneProcess, Transport
from fedlit.federation.wire import Payload, Schema, decode, encode, schema_from, schema_of, schema_text, wire_size
from fedlit.privacy import Plain, RoundId, SecureAggregation

_NUMBER = torch.zeros((), dtype=torch.float64)
_T = TypeVar("_T")
_NAME_BYTES = 32
_FRAME_WORDS = 4 + _NAME_BYTES // 8  # kind, call, round, failed; channel name
_KINDS = ("exchange", "sum", "mean", "download", "check", "report")


@dataclass
class _Published:
    """The server's memory of the last total of a channel, for clients that were away.

    The total is plain where the server holds the key, so that no key need outlive its round.
    """

    total: Tensor
    schema: Schema
    num_clients: int
    weighted: bool


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
        privacy: Backend for sums, one for all channels or one per channel; channels without one use `Plain`.
        seed: Of participation and random streams; ``None`` takes the one given to ``seed_everything``.

    Attributes:
        round_idx: Communication round under way, from 0; no epoch restarts it.
        batch_idx: Batch within the round.
        device: Where received tensors are put; ``None`` leaves them where they arrive. The strategy sets it.
        ledger: What crossed so far.
        seconds: Time spent so far by phase: ``"exchange"`` and ``"protection"``; others may add theirs.

    Raises:
        RosterError: If roster, target, placement or participation do not fit together.
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
        privacy: SecureAggregation | Mapping[str, SecureAggregation] | None = None,
        seed: int | None = None,
    ) -> None:
        self.clients = make_roster(clients, target)
        self.transport = OneProcess() if transport is None else transport
        self.participation = Everyone() if participation is None else participation
        self.drops = dict(drops or {})
        self.seed = global_seed() if seed is None else seed
        for rule in (self.participation, *self.drops.values()):
            rule.check(self.clients)
        self._default_backend = privacy if isinstance(privacy, SecureAggregation) else Plain()
        self._backends = dict(privacy) if isinstance(privacy, Mapping) else {}
        ranks = place(self.clients, self.transport.world_size, placement)
        self._rank_of = {client.name: rank for client, rank in zip(self.clients, ranks, strict=True)}
        self.round_idx = 0
        self.batch_idx = 0
        self.device: torch.device | None = None
        self.ledger = Ledger()
        self.seconds: dict[str, float] = {}
        self._call = 0
        self._failure: FederationError | RosterError | None = None
        self._present: dict[tuple[int, str | None], tuple[Client, ...]] = {}
        self._published: dict[str, _Published] = {}
        self._version: dict[str, dict[str, int]] = {}

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
        return self._rank_of[name] == self.transport.rank

    @property
    def hosts_server(self) -> bool:
        """Whether the server lives in this process."""
        return self.transport.rank == 0

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
    ) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Send messages from client to client.

        Args:
            channel: Kind of message, at most 32 bytes of UTF-8.
            payloads: ``{sender: {name: tensor}}`` of local clients; shapes may differ between clients. Senders that
                are not present on the channel are left out.
            to: Receivers of every message, or receivers by sender; ``None`` is everyone. A client does not send to
                itself; receivers that are not present are left out.

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
            heard = names_of(self.present(channel))
            routing = {name: self._names("to", some) for name, some in to.items()} if isinstance(to, Mapping) else None
            everyone = self._names("to", None if isinstance(to, Mapping) else to)
            self._names("to", routing)
            outgoing = {name: _detached(payload) for name, payload in self._mine(payloads).items() if name in heard}
            self._check_finite(channel, outgoing)
            sizes = self._announce(channel, {name: wire_size(payload) for name, payload in outgoing.items()}, 0)
            routes: list[tuple[str, str]] = []
            for sender in sizes:
                wanted = everyone if routing is None else routing.get(sender, set())
                routes += [(sender, name) for name in heard if name in wanted and name != sender]
            for sender, receiver in routes:
                self.ledger.record(self.round_idx, channel, sender, receiver, sizes[sender])
            return self._deliver(channel, outgoing, sizes, routes)

    def mean(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        among: Iterable[Client | str] | None = None,
        to: Iterable[Client | str] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> dict[str, dict[str, Tensor]]:
        """Weighted mean of payloads, through the channel's privacy backend: only the mean arrives.

        Args:
            channel: Kind of message.
            payloads: ``{client: {name: tensor}}`` of local clients, equal names and shapes for all. Integer entries
                are averaged and rounded.
            among: Whose payloads count, if they are present; ``None`` is everyone who gave one.
            to: Who receives the mean, if present; ``None`` is everyone.
            weights: By client, positive; ``None`` is uniform. They travel inside the sum.

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
        shares = {name: 1.0 for name in self._rank_of} if weights is None else dict(weights)
        return self._aggregate(channel, payloads, among, to, shares)

    def sum(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        among: Iterable[Client | str] | None = None,
        to: Iterable[Client | str] | None = None,
    ) -> dict[str, dict[str, Tensor]]:
        """Sum of payloads, through the channel's privacy backend; otherwise as `mean`."""
        return self._aggregate(channel, payloads, among, to, None)

    def catch_up(self, channel: str) -> dict[str, dict[str, Tensor]]:
        """Send the last mean or sum of ``channel`` to present clients that were away when it was sent to them.

        Returns:
            ``{receiver: {name: tensor}}`` for local receivers that were behind.
        """
        versions = self._version.get(channel)
        if versions is None:
            return {}
        newest = max(versions.values())
        behind = [name for name in names_of(self.present(channel)) if versions.get(name, 0) < newest]
        if not behind:
            return {}
        with self._timed("exchange"):
            result = self._publish(channel, self._published.get(channel), behind)
        versions.update(dict.fromkeys(behind, newest))
        return result

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
            clients = list(self._rank_of)
            values = self._mine(values)
            # Flags say which numbers are given: NaN is a number that a metric may have.
            table = torch.zeros(2, len(clients), len(names), dtype=torch.float64)
            for row, client in enumerate(clients):
                for column, name in enumerate(names):
                    if name in values.get(client, {}):
                        table[0, row, column], table[1, row, column] = values[client][name], 1.0
            given = table[1].any(dim=1).tolist()
            # The kind tells the number of names too: tables of unequal size cannot be gathered.
            kind = _KINDS.index("report") + len(names)
            self._announce(channel, {name: 8 for name, some in zip(clients, given, strict=True) if some}, kind)
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
        return self._backends.get(channel, self._default_backend)

    @property
    def named_channels(self) -> set[str]:
        """Channels that ``drops`` or ``privacy`` name."""
        return {*self.drops, *self._backends}

    def fail(self, error: FederationError | RosterError) -> None:
        """Keep a local failure until the next exchange, which then raises it on every process."""
        self._failure = self._failure or error

    def check(self, about: str, error: FederationError | RosterError | None) -> None:
        """Raise a local ``error`` on every process; all of them call it, those without an error give ``None``.

        Args:
            about: What is checked, at most 32 bytes of UTF-8.
            error: What this process has found.
        """
        if error is not None:
            self.fail(error)
        self._announce(about, {}, _KINDS.index("check"))

    # ---------------------------------------------------------------- aggregation

    def _aggregate(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        among: Iterable[Client | str] | None,
        to: Iterable[Client | str] | None,
        weights: Mapping[str, float] | None,
    ) -> dict[str, dict[str, Tensor]]:
        start = time.perf_counter()
        protecting = self.seconds.get("protection", 0.0)
        backend = self.backend(channel)
        heard = names_of(self.present(channel))
        counted, addressed = self._names("among", among), self._names("to", to)
        wanted = [name for name in heard if name in counted]
        mine = {name: payload for name, payload in self._mine(payloads).items() if name in wanted}
        shares = None if weights is None else self._relative(weights, wanted, mine)
        vectors, schema = self._vectors(channel, mine, shares)
        self._check_finite(channel, {name: {"": vector} for name, vector in vectors.items()})
        messages: dict[str, dict[str, Tensor]] = {}
        if self._failure is None and wanted:
            with self._timed("protection"):
                backend.open_round(wanted, RoundId(self.round_idx, channel, self._call))
                for name, vector in vectors.items():
                    messages[name] = {"schema": schema, "sum": backend.protect(name, vector)}
        kind = _KINDS.index("sum" if weights is None else "mean")
        sizes = self._announce(channel, {name: wire_size(message) for name, message in messages.items()}, kind)
        if not sizes:
            return {}
        if len(sizes) < backend.min_clients:
            raise FederationError(
                f"a sum over channel {channel!r} in round {self.round_idx} would run over {list(sizes)} alone, but "
                f"{type(backend).__name__} hides nothing of fewer than {backend.min_clients} clients: let more clients "
                "take part, or give this channel another backend"
            )
        for name, size in sizes.items():
            self.ledger.record(self.round_idx, channel, name, SERVER, size)
        arrived = self._to_server(channel, messages, sizes)
        published = None
        if self.hosts_server:
            schemas = {name: message["schema"] for name, message in arrived.items()}
            if self._check_schemas(channel, schemas):
                with self._timed("protection"):
                    total = backend.aggregate({name: message["sum"] for name, message in arrived.items()})
                    if backend.key_holder == "server":
                        total = backend.reveal(total, len(arrived))
                text = next(iter(schemas.values()))
                published = _Published(total, _schema_in(text), len(arrived), shares is not None)
        receivers = [name for name in heard if name in addressed]
        result = self._publish(channel, published, receivers)
        self._remember(channel, published, away=addressed.difference(heard))
        spent = time.perf_counter() - start - (self.seconds.get("protection", 0.0) - protecting)
        self.seconds["exchange"] = self.seconds.get("exchange", 0.0) + spent
        return result

    def _remember(self, channel: str, published: _Published | None, away: set[str]) -> None:
        """Note who missed a total that was addressed to them, and keep it for `catch_up` if somebody did."""
        versions = self._version.setdefault(channel, dict.fromkeys(self._rank_of, 0))
        newest = max(versions.values()) + 1
        versions.update({name: newest for name in self._rank_of if name not in away})
        self._published.pop(channel, None)
        if published is not None and away:
            # clone(): the entries of a sum that receivers got are views of its total
            self._published[channel] = replace(published, total=published.total.clone())

    def _vectors(
        self, channel: str, mine: Mapping[str, Payload], shares: Mapping[str, float] | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Flat vectors of local clients; a weighted one is multiplied by its share and carries it as last entry."""
        if not mine:
            return {}, torch.empty(0, dtype=torch.uint8)
        schemas = {name: schema_of(payload) for name, payload in mine.items()}
        first = next(iter(schemas))
        for name, schema in schemas.items():
            if schema != schemas[first]:
                self.fail(PayloadError(_schema_difference(channel, first, schemas[first], name, schema)))
                return {}, torch.empty(0, dtype=torch.uint8)
        dtype = vector_dtype(schemas[first])
        vectors = {}
        for name, payload in mine.items():
            vector = pack(payload, dtype)
            if self.transport.world_size > 1:
                vector = vector.cpu()  # where those of other processes arrive
            if shares is not None:
                vector = torch.cat([vector.mul_(shares[name]), vector.new_tensor([shares[name]])])
            vectors[name] = vector
        return vectors, _schema_bytes(schemas[first])

    def _check_schemas(self, channel: str, texts: Mapping[str, Tensor]) -> bool:
        first = next(iter(texts))
        for name, text in texts.items():
            if not torch.equal(text, texts[first]):
                theirs = _schema_in(texts[first])
                self.fail(PayloadError(_schema_difference(channel, first, theirs, name, _schema_in(text))))
                return False
        return True

    def _publish(
        self, channel: str, published: _Published | None, receivers: Sequence[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Send a total down, to be revealed there if clients hold the key."""
        backend = self.backend(channel)
        message: dict[str, Tensor] = {}
        if published is not None:
            message = {
                "schema": _schema_bytes(published.schema),
                "about": torch.tensor([published.num_clients, published.weighted], dtype=torch.int32),
                "sum": published.total,
            }
        kind = _KINDS.index("download")
        sizes = self._announce(channel, {SERVER: wire_size(message)} if message else {}, kind)
        for name in receivers:
            self.ledger.record(self.round_idx, channel, SERVER, name, sizes[SERVER])
        local = [name for name in receivers if self.is_local(name)]
        message = self._from_server(channel, message, sizes[SERVER], receivers)
        if not local:
            return {}
        total = message["sum"]
        num_clients, weighted = message["about"].tolist()
        if backend.key_holder == "clients":
            with self._timed("protection"):
                total = backend.reveal(total, num_clients)
        if weighted:
            total = total[:-1] / total[-1]
        total = total if self.device is None else total.to(self.device)
        result = unpack(total, _schema_in(message["schema"]))
        return dict.fromkeys(local, result)

    # ---------------------------------------------------------------- between processes

    def _announce(self, channel: str, sizes: Mapping[str, int], kind: int) -> dict[str, int]:
        """Tell all processes which exchange this is and how long each message will be; returns the sizes of all.

        Also the place where a failure of one process becomes an error on all of them.
        """
        name = channel.encode()
        if not 0 < len(name) <= _NAME_BYTES:
            raise ValueError(f"channel must have 1 to {_NAME_BYTES} bytes of UTF-8, got {channel!r}")
        failure, self._failure = self._failure, None
        call, self._call = self._call, self._call + 1  # a call that fails is never repeated: see `RoundId`
        if self.transport.world_size == 1:
            if failure is not None:
                raise failure
            return dict(sizes)
        parties = [*self._rank_of, SERVER]
        head = [kind, call, self.round_idx, failure is not None]
        words = torch.frombuffer(bytearray(name.ljust(_NAME_BYTES)), dtype=torch.int64)
        body = torch.tensor([sizes.get(party, 0) for party in parties], dtype=torch.int64)
        frame = torch.cat([torch.tensor(head, dtype=torch.int64), words, body])
        frames = self.transport.all_gather(frame, f"exchange {channel!r} of round {self.round_idx}")
        if any(bool(other[3]) for other in frames):
            self._raise_everywhere(failure)
        for rank, other in enumerate(frames):
            if not torch.equal(other[:_FRAME_WORDS], frames[0][:_FRAME_WORDS]):
                raise OutOfStepError(
                    f"processes are out of step: rank 0 is in {_describe(frames[0])}, rank {rank} in "
                    f"{_describe(other)}. Every process must call the same exchanges in the same order"
                )
        # The server's size is rank 0's word; a client's that of the rank which hosts it.
        largest = torch.stack([other[_FRAME_WORDS:] for other in frames]).max(dim=0).values.tolist()
        return {party: size for party, size in zip(parties, largest, strict=True) if size}

    def _raise_everywhere(self, failure: FederationError | RosterError | None) -> None:
        told = self.transport.all_gather_object(None if failure is None else (type(failure).__name__, str(failure)))
        if failure is not None:
            raise failure
        rank, (kind, text) = next((rank, item) for rank, item in enumerate(told) if item is not None)
        known = getattr(errors, kind, PeerFailedError)
        raise known(f"{text} [raised by rank {rank}]")

    def _deliver(
        self,
        channel: str,
        outgoing: Mapping[str, dict[str, Tensor]],
        sizes: Mapping[str, int],
        routes: Sequence[tuple[str, str]],
    ) -> dict[str, dict[str, dict[str, Tensor]]]:
        rank = self.transport.rank
        # One copy per receiving process, however many clients it hosts: (sender, receiving rank), in route order.
        crossings = list(dict.fromkeys((sender, self._rank_of[receiver]) for sender, receiver in routes))
        crossings = [(sender, there) for sender, there in crossings if self._rank_of[sender] != there]
        encoded = {sender: encode(outgoing[sender]) for sender, _ in crossings if self._rank_of[sender] == rank}
        outbox = [(there, encoded[sender]) for sender, there in crossings if sender in encoded]
        senders = [sender for sender, there in crossings if there == rank]
        inbox = [(self._rank_of[sender], sizes[sender]) for sender in senders]
        messages = self.transport.swap(outbox, inbox, f"exchange {channel!r} of round {self.round_idx}")
        arrived = {
            sender: {name: tensor.to(self.device) for name, tensor in decode(message).items()}
            for sender, message in zip(senders, messages, strict=True)
        }
        arrived.update(outgoing)
        received: dict[str, dict[str, dict[str, Tensor]]] = {}
        for sender, receiver in routes:
            if self.is_local(receiver):
                received.setdefault(receiver, {})[sender] = arrived[sender]
        return received

    def _to_server(
        self, channel: str, messages: Mapping[str, dict[str, Tensor]], sizes: Mapping[str, int]
    ) -> dict[str, dict[str, Tensor]]:
        if self.transport.world_size == 1:
            return {name: messages[name] for name in sizes}
        doing = f"exchange {channel!r} of round {self.round_idx}"
        if not self.hosts_server:
            self.transport.swap([(0, encode(messages[name])) for name in sizes if name in messages], [], doing)
            return {}
        senders = [name for name in sizes if name not in messages]
        arrived = self.transport.swap([], [(self._rank_of[name], sizes[name]) for name in senders], doing)
        decoded = {name: decode(message) for name, message in zip(senders, arrived, strict=True)}
        return {name: messages[name] if name in messages else decoded[name] for name in sizes}

    def _from_server(
        self, channel: str, message: dict[str, Tensor], size: int, receivers: Sequence[str]
    ) -> dict[str, Tensor]:
        doing = f"exchange {channel!r} of round {self.round_idx}"
        ranks = sorted({self._rank_of[name] for name in receivers} - {0})
        if self.hosts_server:
            if ranks:
                encoded = encode(message)
                self.transport.swap([(rank, encoded) for rank in ranks], [], doing)
            return message
        if self.transport.rank in ranks:
            return decode(self.transport.swap([], [(0, size)], doing)[0])
        return {}

    # ---------------------------------------------------------------- small things

    def _names(self, argument: str, clients: Iterable[Client | str] | None) -> set[str]:
        """Names of ``clients``, or of the whole roster; ``argument`` is for the error message."""
        if clients is None:
            return set(self._rank_of)
        names = {clients} if isinstance(clients, str) else set(names_of(clients))
        unknown = sorted(names - self._rank_of.keys())
        if unknown or isinstance(clients, str):
            raise RosterError(f"{argument} must list clients of {list(self._rank_of)}, got {unknown or clients!r}")
        return names

    def _relative(self, weights: Mapping[str, float], among: Sequence[str], senders: Iterable[str]) -> dict[str, float]:
        """Weights divided by the largest, so that premultiplied vectors stay within the bounds of plain ones."""
        missing = [name for name in senders if name not in weights]
        bad = {name: weights[name] for name in senders if name in weights and not 0 < weights[name] < float("inf")}
        if missing:
            self.fail(PayloadError(f"weights must name every client that sends, missing {missing}"))
        elif bad:
            self.fail(
                PayloadError(f"weights must be positive and finite, got {bad}: leave a client out with `among` instead")
            )
        good = {name: float(weights[name]) for name in among if 0 < weights.get(name, 0) < float("inf")}
        largest = max(good.values(), default=1.0)
        return {name: good.get(name, largest) / largest for name in among}

    def _mine(self, payloads: Mapping[str, _T]) -> dict[str, _T]:
        for name in payloads:
            if name not in self._rank_of:
                raise RosterError(f"sender {name!r} is not one of the clients {list(self._rank_of)}")
            if not self.is_local(name):
                raise RosterError(
                    f"sender {name!r} is hosted by rank {self._rank_of[name]}, not by rank {self.transport.rank}: give "
                    "the payloads of local clients only"
                )
        return {name: payloads[name] for name in self._rank_of if name in payloads}

    def _check_finite(self, channel: str, payloads: Mapping[str, Payload]) -> None:
        for name, payload in payloads.items():
            for tensor in payload.values():
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    self.fail(
                        DivergedError(
                            f"client {name!r} would send NaN or infinity over channel {channel!r} in round "
                            f"{self.round_idx}: its training has diverged, lower the learning rate or clip gradients"
                        )
                    )

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
            "calls": self._call,
            "ledger": self.ledger.state_dict(),
            "seconds": dict(self.seconds),
            "versions": {channel: dict(versions) for channel, versions in self._version.items()},
            "published": {
                channel: {
                    "total": item.total.cpu(),
                    "schema": _schema_bytes(item.schema),
                    "num_clients": item.num_clients,
                    "weighted": item.weighted,
                }
                for channel, item in self._published.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` left off.

        Raises:
            RosterError: If the state belongs to another roster.
        """
        self.check_roster(state)
        self.seed = state["seed"]
        self.round_idx, self.batch_idx, self._call = state["round_idx"], state["batch_idx"], state["calls"]
        self.ledger.load_state_dict(state["ledger"])
        self.seconds = dict(state["seconds"])
        self._version = {channel: dict(versions) for channel, versions in state["versions"].items()}
        self._present.clear()
        self._published = {
            channel: _Published(item["total"], _schema_in(item["schema"]), item["num_clients"], bool(item["weighted"]))
            for channel, item in state["published"].items()
            if self.hosts_server
        }

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


@lru_cache(maxsize=256)
def _schema_bytes(schema: Schema) -> Tensor:
    return torch.frombuffer(bytearray(schema_text(schema)), dtype=torch.uint8)


def _schema_in(message: Tensor) -> Schema:
    return schema_from(message.numpy().tobytes())


def _schema_difference(channel: str, first: str, schema: Schema, name: str, other: Schema) -> str:
    ours = {entry[0]: entry[1:] for entry in schema}
    theirs = {entry[0]: entry[1:] for entry in other}
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    detail = f"{keys[0]!r} is {ours.get(keys[0])} there and {theirs.get(keys[0])} here" if keys else "the order differs"
    return f"payloads of channel {channel!r} must agree to be added: client {name!r} differs from {first!r}, {detail}"


def _describe(frame: Tensor) -> str:
    name = frame[4:_FRAME_WORDS].numpy().tobytes().decode(errors="replace").rstrip()
    kind = _KINDS[min(int(frame[0]), len(_KINDS) - 1)]
    return f"{kind} of channel {name!r} (call {int(frame[1])}, round {int(frame[2])})"


def _roster_text(roster: Iterable[Sequence[str]]) -> str:
    return ", ".join(f"{name} ({role})" for name, role in roster)
