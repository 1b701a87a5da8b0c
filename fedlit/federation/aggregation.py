"""Aggregation: secure means and sums of clients' payloads, carried by a privacy backend."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedlit.federation.channel import Summed
from fedlit.federation.choices import Resolved
from fedlit.federation.errors import FederationError, OutOfStepError, PayloadError, RosterError
from fedlit.federation.leaks import over_other_clients
from fedlit.federation.ledger import KEYS, SERVER
from fedlit.federation.messenger import KINDS, Message, Messenger
from fedlit.federation.release import Releases
from fedlit.federation.wire import part, schema_from, schema_text, wire_size
from fedlit.privacy import (
    AggregationClient,
    AggregationServer,
    DecodeError,
    FixedPoint,
    InputError,
    PrivacyError,
    PrivacyWarning,
    QuorumError,
    RoundId,
    SecureAggregation,
)
from fedlit.privacy.packing import (
    Payload,
    Schema,
    check_weight,
    pack,
    relative_weights,
    schema_difference,
    schema_of,
    unpack,
)

_KEYS, _UNMASKING, _DOWNLOAD, _CHECK = (KINDS.index(kind) for kind in ("keys", "unmasking", "download", "check"))


@dataclass(frozen=True)
class Recipe:
    """What a secure mean or sum is to be taken of.

    Args:
        channel: Name of the channel.
        senders: Clients whose payloads count, in roster order; some may turn out to send nothing.
        receivers: Present clients that receive the total, in roster order.
        away: Clients that should have received it and are not present.
        weights: Of a mean, by client; ``None`` is a sum.
    """

    channel: str
    senders: Sequence[str]
    receivers: Sequence[str]
    away: frozenset[str]
    weights: Mapping[str, float] | None


@dataclass
class _Published:
    """The last total of a channel, for clients that were away.

    Attributes:
        total: As the server sends it: plain where the server holds the key, so that no key need outlive its round.
        revealed: As clients of this process read it, where only clients can; ``None`` if none here did.
        restored: Whether it comes from a checkpoint, so that no key opens ``total`` any more.
        counted: Places in the roster of those whose vectors it has, where others announced one and were lost.
    """

    total: Tensor
    schema: Schema
    num_clients: int
    weighted: bool
    revealed: Tensor | None = None
    restored: bool = False
    counted: list[int] | None = None


@dataclass
class _Parties:
    """The parties of one backend that live in this process."""

    clients: dict[str, AggregationClient]
    server: AggregationServer
    enrolled: bool = False


class Aggregation:
    """Runs each party of a backend in the process where it lives, and carries the messages between them.

    Args:
        messenger: Between the processes.
        channels: Of the run, which have the backends.
        releases: Of what leaves a client.
        timed: Context in which time counts as protection.
    """

    def __init__(
        self, messenger: Messenger, channels: Mapping[str, Resolved], releases: Releases, timed: Callable[[str], Any]
    ) -> None:
        self._messenger = messenger
        self._channels = channels
        self._releases = releases
        self._timed = timed
        self._parties: dict[int, _Parties] = {}  # by identity of the backend: one object may serve several channels
        self._published: dict[str, _Published] = {}
        self._version: dict[str, dict[str, int]] = {}
        self._readers: dict[str, list[str]] = {}  # of what is published, for those who were away
        self._skipped: set[str] = set()  # channels on which a mean was skipped, and a warning given
        self._summed: dict[str, list[str]] = {}  # over whom a fixed channel was summed last
        self._given = False  # whether vectors of the sum under way have left their clients

    def _backend(self, channel: str) -> SecureAggregation:
        return self._channels[channel].backend

    # ---------------------------------------------------------------- one aggregation

    def run(
        self, recipe: Recipe, payloads: Mapping[str, Payload], around: Mapping[str, Payload] | None
    ) -> dict[str, dict[str, Tensor]]:
        """Mean or sum of the senders' ``payloads`` (those of local clients), for local receivers.

        One that fails because a client is lost before a vector has left anybody is taken over the others.
        """
        transport = self._messenger.transport
        recalled = transport.recall()
        if recalled is not None:
            return self._recalled(recipe, recalled)
        start = transport.step
        while True:
            recipe = replace(recipe, senders=[name for name in recipe.senders if not self._messenger.is_lost(name)])
            lost, self._given = transport.lost, False
            try:
                result = self._run(recipe, payloads, around)
            except (FederationError, PrivacyError):
                if self._given or transport.lost == lost:
                    raise
                self._parties.pop(id(self._backend(recipe.channel)), None)  # to enrol anew, without the lost client
                continue
            self._note(start, recipe.channel)
            return result

    def _run(
        self, recipe: Recipe, payloads: Mapping[str, Payload], around: Mapping[str, Payload] | None
    ) -> dict[str, dict[str, Tensor]]:
        resolved, senders = self._channels[recipe.channel], recipe.senders
        declared, needed = resolved.declared, resolved.backend.min_clients
        skips = isinstance(declared, Summed) and declared.too_few == "skip"
        if skips and 0 < len(senders) < needed:  # as all processes find
            self._warn_skipped(resolved, senders)
            return {}
        if declared.fixed and senders:
            self._warn_repeated(resolved, senders)
        mine = {name: payload for name, payload in payloads.items() if name in senders}
        if resolved.mechanism is not None:
            with self._timed("protection"):
                mine = {name: self._releases.of(resolved, name, payload, around) for name, payload in mine.items()}
        return self._aggregate(recipe, mine)

    def _warn_skipped(self, channel: Resolved, senders: Sequence[str]) -> None:
        """Warn once that rounds pass without a message over a channel."""
        if self._messenger.hosts_server and channel.name not in self._skipped:
            needed = channel.backend.min_clients
            warnings.warn(
                f"round {self._messenger.round_idx} sends no mean over channel {channel.name!r}: {[*senders]} alone "
                f"would send, and {type(channel.backend).__name__} hides nothing of fewer than {needed} clients. "
                "Rounds like this pass without it; a participation such as "
                f"UniformSubset(at_least={needed}) has none of them",
                stacklevel=6,
            )
        self._skipped.add(channel.name)

    def _warn_repeated(self, channel: Resolved, senders: Sequence[str]) -> None:
        """Warn that two sums of the same messages over different clients reveal more than each."""
        before = self._summed.setdefault(channel.name, [*senders])
        self._summed[channel.name] = [*senders]
        if before != [*senders] and channel.hides and channel.mechanism is None and self._messenger.hosts_server:
            warnings.warn(over_other_clients(channel, before, senders), PrivacyWarning, stacklevel=6)

    def _aggregate(self, recipe: Recipe, payloads: Mapping[str, Payload]) -> dict[str, dict[str, Tensor]]:
        channel, messenger, backend = recipe.channel, self._messenger, self._backend(recipe.channel)
        shares = self._shares(recipe, payloads, backend.codec)
        vectors, schema = self._vectors(recipe, payloads, shares)
        messages: dict[str, Message] = {name: {} for name in vectors}
        parties = self._enrolled(channel) if recipe.senders else self._here(backend)
        if len(recipe.senders) >= backend.min_clients and recipe.senders:
            self._open(recipe, parties)
            for name, vector in vectors.items():
                with self._protecting(name, channel):
                    messages[name] = {"schema": schema, "sum": parties.clients[name].protect(vector)}
        vectors.clear()
        kind = KINDS.index("sum" if recipe.weights is None else "mean")
        sizes = messenger.announce(
            channel, {name: wire_size(message) for name, message in messages.items()}, kind, recipe.weights
        )
        if not sizes:
            return {}
        self._given = True
        if len(sizes) < backend.min_clients:
            raise FederationError(
                f"a sum over channel {channel!r} in round {messenger.round_idx} would run over {list(sizes)} alone, "
                f"but {type(backend).__name__} hides nothing of fewer than {backend.min_clients} clients: let more "
                "clients take part, or give this channel another backend"
            )
        for name, size in sizes.items():
            messenger.book(channel, name, SERVER, size)
        sent = {name: 1.0 if shares is None else shares[name] for name in sizes}
        self._releases.account(self._channels[channel], sent)  # whatever happens after
        if messenger.transport.losable and messenger.hosts_server:  # the next total takes its place
            self._published.pop(channel, None)
        published = self._total(recipe, parties, messages, sizes)
        messages.clear()
        if backend.closing:
            published = self._unmask(recipe, parties, list(sizes), published)
        if published is not None and backend.key_holder == "server":
            with self._protecting():
                if parties.server.on_grid:
                    published.total = _narrowed(published.total)
                else:
                    total = parties.server.reveal(published.total, published.num_clients)
                    published.total = total if backend.codec is None else _on_grid(total, backend.codec)
        result, seen = self._publish(channel, published, recipe.receivers, None if shares is None else sent)
        if published is not None:
            # clone(): the entries of a sum that receivers got are views of its total
            kept = published.total.clone() if result else published.total
            seen = replace(published, total=kept, revealed=seen.revealed if seen else None)
        self._remember(recipe, seen)
        return result

    def _shares(
        self, recipe: Recipe, payloads: Mapping[str, Payload], codec: FixedPoint | None
    ) -> dict[str, float] | None:
        """Relative weights of the senders that have one; all processes give the same, see `Messenger.announce`."""
        if recipe.weights is None:
            return None
        try:
            relative_weights(recipe.weights, list(payloads), codec)
            known = {name: weight for name, weight in recipe.weights.items() if 0 < weight < math.inf}
            return relative_weights(known, [name for name in recipe.senders if name in known], codec)
        except InputError as error:
            self._messenger.fail(PayloadError(str(error)))
            return None

    def _vectors(
        self, recipe: Recipe, payloads: Mapping[str, Payload], shares: Mapping[str, float] | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Flat vectors of local clients, and their schema; none if a failure waits."""
        nothing = torch.empty(0, dtype=torch.uint8)
        if not payloads or self._messenger.failed:
            return {}, nothing
        schemas = {name: schema_of(payload) for name, payload in payloads.items()}
        if not self._check_schemas(recipe.channel, schemas):
            return {}, nothing
        codec = self._backend(recipe.channel).codec
        try:
            text = _schema_bytes(next(iter(schemas.values())))
        except PayloadError as error:
            self._messenger.fail(error)
            return {}, nothing
        vectors = {}
        for name, payload in payloads.items():
            with self._protecting(name, recipe.channel):
                vector = pack(payload, codec, None if shares is None else shares[name])
                if codec is not None or self._messenger.transport.world_size > 1:
                    vector = vector.cpu()  # where those of other processes arrive, and where codecs work
                self._messenger.check_finite(recipe.channel, name, vector)
                vectors[name] = vector
        return vectors, text

    def _check_schemas(self, channel: str, schemas: Mapping[str, Schema]) -> bool:
        first = next(iter(schemas))
        for name, schema in schemas.items():
            if schema != schemas[first]:
                difference = schema_difference(first, schemas[first], name, schema)
                self._messenger.fail(
                    PayloadError(f"payloads of channel {channel!r} must agree to be added: {difference}")
                )
                return False
        return True

    def _total(
        self, recipe: Recipe, parties: _Parties, messages: Mapping[str, Message], sizes: Mapping[str, int]
    ) -> _Published | None:
        """At the server: the protected total of vectors that are added as they come."""
        messenger = self._messenger
        schemas: dict[str, Schema] = {}

        def take(name: str, message: Message) -> None:
            with self._protecting():
                schemas[name] = _schema_in(part(message, "schema", torch.uint8))
                if not messenger.failed and self._check_schemas(recipe.channel, schemas):
                    parties.server.add(name, part(message, "sum"))

        messenger.gather_each(recipe.channel, messages, sizes, take)
        if not messenger.hosts_server or not schemas or messenger.failed:
            return None
        with self._protecting():
            published = _Published(
                parties.server.total(), next(iter(schemas.values())), len(schemas), recipe.weights is not None
            )
            if len(schemas) < len(sizes):
                published.counted = [place for place, name in enumerate(messenger.rank_of) if name in schemas]
            return published
        return None

    def _remember(self, recipe: Recipe, seen: _Published | None) -> None:
        """Note who missed a total that was addressed to them, and keep it for `catch_up` if somebody did."""
        channel = recipe.channel
        versions = self._version.setdefault(channel, dict.fromkeys(self._messenger.rank_of, 0))
        newest = max(versions.values()) + 1
        away = {*recipe.away, *(name for name in self._messenger.rank_of if self._messenger.is_lost(name))}
        versions.update({name: newest for name in self._messenger.rank_of if name not in away})
        self._published.pop(channel, None)
        self._readers.pop(channel, None)
        if away or self._messenger.transport.losable:  # who is lost later may come back without it
            self._readers[channel] = [name for name in recipe.receivers if name not in away]
            if seen is not None:
                self._published[channel] = seen

    # ---------------------------------------------------------------- conversations of the backend

    def _enrolled(self, channel: str) -> _Parties:
        """The backend's parties; at their first use the whole roster enrols, but for clients that are lost."""
        backend, messenger = self._backend(channel), self._messenger
        parties = self._here(backend)
        if not parties.enrolled:
            roster = [name for name in messenger.rank_of if not messenger.is_lost(name)]
            with self._protecting():
                parties.server.enrol(roster)
                for client in parties.clients.values():
                    client.enrol(roster)
            for step in backend.enrolment:
                self._converse(channel, step, parties, roster)
            if backend.enrolment:
                messenger.announce(channel, {}, _CHECK)  # a client that refused its key fails here, on every process
            parties.enrolled = True
        return parties

    def _here(self, backend: SecureAggregation) -> _Parties:
        """The backend's parties in this process, made at their first use."""
        if id(backend) not in self._parties:
            local = [name for name in self._messenger.rank_of if self._messenger.is_local(name)]
            self._parties[id(backend)] = _Parties({name: backend.client(name) for name in local}, backend.server())
        return self._parties[id(backend)]

    def _open(self, recipe: Recipe, parties: _Parties) -> None:
        """Open a round between the senders."""
        call, round_idx = self._messenger.position
        round_id = RoundId(round_idx, recipe.channel, call)
        backend = self._backend(recipe.channel)
        with self._protecting():
            for name in recipe.senders:
                if name in parties.clients:
                    parties.clients[name].open_round(round_id, recipe.senders)
            if self._messenger.hosts_server:
                parties.server.open_round(round_id, recipe.senders)
        for step in backend.opening:
            self._converse(recipe.channel, step, parties, recipe.senders)

    def _converse(self, channel: str, step: str, parties: _Parties, names: Sequence[str]) -> None:
        """Run one step: every client sends a message, the server relays, every client receives one."""
        local = [name for name in names if name in parties.clients]
        sent: dict[str, bytes] = {}
        with self._protecting():
            sent = {name: parties.clients[name].send(step) for name in local}
        arrived = self._up(channel, sent, _KEYS)
        relayed: dict[str, bytes] = {}
        if self._messenger.hosts_server:
            with self._protecting():
                relayed = parties.server.relay(step, {name: arrived.get(name, b"") for name in names})
        received = self._down(channel, relayed, _KEYS)
        with self._protecting():
            for name in local:
                parties.clients[name].receive(step, received.get(name, b""))

    def _unmask(
        self, recipe: Recipe, parties: _Parties, senders: Sequence[str], published: _Published | None
    ) -> _Published | None:
        """Ask those who sent for what removes the masks of their total."""
        arrived: dict[str, bytes] = {}
        for step in self._backend(recipe.channel).closing:
            questions: dict[str, bytes] = {}
            if published is not None:
                with self._protecting():
                    questions = parties.server.ask(step, arrived)
            asked = self._down(recipe.channel, questions, _UNMASKING)
            answers: dict[str, bytes] = {}
            with self._protecting():
                answers = {name: parties.clients[name].answer(step, asked[name]) for name in senders if name in asked}
            arrived = self._up(recipe.channel, answers, _UNMASKING)
        if published is not None:
            with self._protecting():
                return replace(published, total=parties.server.conclude(arrived))
        return None

    def _up(self, channel: str, messages: Mapping[str, bytes], kind: int) -> dict[str, bytes]:
        """Carry messages of clients to the server."""
        return self._carry(channel, messages, kind, self._messenger.gather, lambda name: (name, SERVER))

    def _down(self, channel: str, messages: Mapping[str, bytes], kind: int) -> dict[str, bytes]:
        """Carry the server's message to each client."""
        return self._carry(channel, messages, kind, self._messenger.scatter, lambda name: (SERVER, name))

    def _carry(
        self,
        channel: str,
        texts: Mapping[str, bytes],
        kind: int,
        deliver: Callable[[str, Mapping[str, Message], Mapping[str, int]], dict[str, Message]],
        route: Callable[[str], tuple[str, str]],
    ) -> dict[str, bytes]:
        """Announce, book and deliver one text from or to each client; empty ones are not sent."""
        messages = {name: _note(text) for name, text in texts.items() if text}
        sizes = self._messenger.announce(channel, {n: wire_size(m) for n, m in messages.items()}, kind)
        for name, size in sizes.items():
            self._messenger.book(channel + KEYS, *route(name), size)
        arrived = deliver(channel, messages, sizes)
        with self._protecting():
            return {name: _text(note) for name, note in arrived.items()}
        return {}

    @contextmanager
    def _protecting(self, client: str | None = None, channel: str | None = None) -> Iterator[None]:
        """Time spent by a backend's parties; what they refuse fails on every process at the next announcement."""
        with self._timed("protection"):
            try:
                yield
            except InputError as error:
                where = "" if client is None else f"client {client!r}, channel {channel!r}: "
                self._messenger.fail(type(error)(f"{where}{error}"))
            except PrivacyError as error:
                self._messenger.fail(error)

    # ---------------------------------------------------------------- totals on their way down

    def _publish(
        self,
        channel: str,
        published: _Published | None,
        receivers: Sequence[str],
        shares: Mapping[str, float] | None = None,
    ) -> tuple[dict[str, dict[str, Tensor]], _Published | None]:
        """Send a total down: what local receivers get, and have seen of the total if clients alone can read it.

        ``shares`` are relative weights of those who announced a vector, to compare with that in the total.
        """
        messenger, backend = self._messenger, self._backend(channel)
        message: Message = {}
        if published is not None:
            message = {
                "schema": _schema_bytes(published.schema),
                "about": torch.tensor([published.num_clients, published.weighted], dtype=torch.int32),
                "sum": published.total,
            }
            if published.counted is not None:
                message["counted"] = torch.tensor(published.counted, dtype=torch.int32)
        sizes = messenger.announce(channel, {SERVER: wire_size(message)} if message else {}, _DOWNLOAD)
        if SERVER not in sizes:
            raise DecodeError(f"the server announces no total over channel {channel!r}, which is due")
        for name in receivers:
            if not messenger.is_lost(name):
                messenger.book(channel, SERVER, name, sizes[SERVER])
        local = [name for name in receivers if messenger.is_local(name)]
        message = messenger.broadcast(channel, message, sizes[SERVER], receivers)
        result, seen = None, None
        if local:
            with self._protecting():
                num_clients, weighted = _about(message)
                total = self._revealed(backend, local[0], message, num_clients)
                if shares is not None:
                    check_weight(total, backend.codec, self._counted(message, shares))
                schema = _schema_in(part(message, "schema", torch.uint8))
                result = unpack(total, schema, backend.codec, weighted, messenger.device)
                if backend.key_holder == "clients":
                    seen = _Published(part(message, "sum"), schema, num_clients, weighted, total)
        messenger.check(channel)  # a total that does not open for one is nobody's
        return ({} if result is None else dict.fromkeys(local, result)), seen

    def _counted(self, message: Message, shares: Mapping[str, float]) -> Mapping[str, float]:
        """Shares of those whose vectors a total has."""
        if "counted" not in message or not self._messenger.transport.losable:
            return shares
        roster = list(self._messenger.rank_of)
        places = part(message, "counted", torch.int32).tolist()
        names = [roster[place] for place in places if 0 <= place < len(roster)]
        if len({*names} & {*shares}) < len(places):
            raise DecodeError(f"a total is reported with vectors of {places}, which are not all of {[*shares]}")
        return {name: shares[name] for name in names}

    def _revealed(self, backend: SecureAggregation, client: str, message: Message, num_clients: int) -> Tensor:
        """What a client reads in a total."""
        if backend.key_holder == "clients":
            return self._here(backend).clients[client].reveal(part(message, "sum"), num_clients)
        return part(message, "sum") if backend.codec is None else backend.codec.decode(part(message, "sum"))

    def catch_up(self, channel: str, present: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Send the last total of ``channel`` to those of ``present`` that were away when it was sent to them."""
        versions = self._version.get(channel)
        if versions is None:
            return {}
        newest = max(versions.values())
        behind = [name for name in present if versions.get(name, 0) < newest and not self._messenger.is_lost(name)]
        if not behind:
            return {}
        published = self._published.get(channel)
        if published is not None and published.restored and self._backend(channel).key_holder == "clients":
            self._reissue(channel, published)
        result, _ = self._publish(channel, published if self._messenger.hosts_server else None, behind)
        still_away = [name for name in behind if self._messenger.is_lost(name)]
        versions.update({name: newest for name in behind if name not in still_away})
        return result

    def _reissue(self, channel: str, published: _Published) -> None:
        """After a resume no key opens the stored total: a client that has read it seals it anew for the others."""
        readers = [name for name in self._readers[channel] if not self._messenger.is_lost(name)]
        if not readers:
            raise QuorumError(
                f"the last total of channel {channel!r} was read by nobody before the checkpoint, and its key is gone: "
                "resume from a checkpoint of another round"
            )
        messenger, parties, author = self._messenger, self._enrolled(channel), readers[0]
        messages: dict[str, Message] = {}
        if published.revealed is not None and messenger.is_local(author):
            with self._protecting():
                sealed = parties.clients[author].reissue(published.revealed, published.num_clients)
                messages[author] = {"sum": sealed}
        sizes = messenger.announce(channel, {name: wire_size(message) for name, message in messages.items()}, _DOWNLOAD)
        if author not in sizes:
            raise DecodeError(f"client {author!r} announces no total over channel {channel!r}, which it has read")
        messenger.book(channel, author, SERVER, sizes[author])
        arrived = messenger.gather(channel, messages, sizes)
        if arrived:
            published.total = part(arrived[author], "sum")
        published.restored = False

    # ---------------------------------------------------------------- those who come back

    def _note(self, step: int, channel: str) -> None:
        """At the server, before the first round: keep the total for those who come back and cannot take part again."""
        messenger, published = self._messenger, self._published.get(channel)
        if messenger.settled or not messenger.transport.losable or not messenger.hosts_server:
            return
        noted: dict[str, Any] = {"early": messenger.position[0], "channel": channel}
        if published is not None:
            noted |= self._kept(channel, published)
        messenger.transport.note(step, noted)

    def _recalled(self, recipe: Recipe, noted: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """What local receivers got of a total of before the first round, which was taken without this process."""
        messenger, channel, backend = self._messenger, recipe.channel, self._backend(recipe.channel)
        if noted.get("channel") != channel:
            raise OutOfStepError(f"the run began with a sum over channel {noted.get('channel')!r}, and not {channel!r}")
        messenger.skip(noted["early"])
        if "total" not in noted:
            return {}
        if backend.key_holder == "clients":
            raise RosterError(
                f"what clients summed over channel {channel!r} before the first round is encrypted under a key that no "
                f"client has who comes back later ({type(backend).__name__}): give this channel a backend that lets "
                "the server read sums, such as PairwiseMasking, or start all sites again"
            )
        codec = backend.codec
        total = noted["total"] if codec is None else codec.decode(noted["total"])
        result = unpack(total, _schema_in(noted["schema"]), codec, bool(noted["weighted"]), messenger.device)
        return dict.fromkeys([name for name in recipe.receivers if messenger.is_local(name)], result)

    def forget(self) -> None:
        """Enrol anew before the next sum, as somebody has come back who has no key."""
        self._parties.clear()
        for channel, published in self._published.items():
            published.restored = published.restored or self._backend(channel).key_holder == "clients"

    def have(self) -> dict[str, dict[str, int]]:
        """Which total of each channel local clients have, by client."""
        names = [name for name in self._messenger.rank_of if self._messenger.is_local(name)]
        return {name: {channel: of.get(name, 0) for channel, of in self._version.items()} for name in names}

    def welcome(self, have: Mapping[str, Mapping[str, int]]) -> None:
        """Take from clients that come back what they ``have``: `catch_up` sends them what is newer."""
        for channel, versions in self._version.items():
            newest = max(versions.values())
            for name, mine in have.items():
                versions[name] = mine.get(channel, 0) if mine.get(channel, 0) <= newest else 0
            readers = self._readers.get(channel, [])
            self._readers[channel] = [name for name in readers if versions[name] == newest]

    def public_state(self) -> dict[str, Any]:
        """Who has which total, and which there are; of none what it is."""
        state = self.state_dict()
        kept = {channel: {**item, "total": torch.empty(0)} for channel, item in state["server"].items()}
        return {key: state[key] for key in ("versions", "readers", "summed")} | {"server": kept}

    def come_back(self, public: Mapping[str, Any]) -> None:
        """Take what `public_state` gave at the server, and keep of what was read here what is still the newest."""
        have, read = self.have(), self.state_dict()["clients"]
        newest = {channel: max(versions.values()) for channel, versions in public["versions"].items()}
        kept = {
            name: {
                channel: total for channel, total in totals.items() if have[name].get(channel) == newest.get(channel)
            }
            for name, totals in read.items()
        }
        self.load_state_dict({**public, "clients": kept})

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Who has which total, and the totals kept for those who were away; no key is ever saved.

        Returns:
            What all processes know; under ``"server"`` what the server keeps, where it lives; under ``"clients"``, by
            local client, totals that only clients can read, as it has read them.
        """
        names = [name for name in self._messenger.rank_of if self._messenger.is_local(name)]
        return {
            "versions": {channel: dict(versions) for channel, versions in self._version.items()},
            "readers": {channel: list(names) for channel, names in self._readers.items()},
            "summed": {channel: list(names) for channel, names in self._summed.items()},
            "server": {channel: self._kept(channel, item) for channel, item in self._published.items()},
            "clients": {
                name: {
                    channel: item.revealed
                    for channel, item in self._published.items()
                    if item.revealed is not None and name in self._readers[channel]
                }
                for name in names
            },
        }

    def _kept(self, channel: str, item: _Published) -> dict[str, Any]:
        # totals that only clients can decrypt are useless without their key, and leak some of it beside plaintexts
        by_server = self._backend(channel).key_holder == "server"
        return {
            "total": item.total.cpu() if by_server else torch.empty(0),
            "schema": _schema_bytes(item.schema),
            "num_clients": item.num_clients,
            "weighted": item.weighted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` left off, with new keys: no message made before is accepted after."""
        self._parties.clear()
        self._version = {channel: dict(versions) for channel, versions in state["versions"].items()}
        self._readers = {channel: list(names) for channel, names in state["readers"].items()}
        self._summed = {channel: list(names) for channel, names in state.get("summed", {}).items()}
        self._published = {}
        for channel, item in state["server"].items():
            read = [totals[channel] for totals in state["clients"].values() if channel in totals]
            if self._messenger.hosts_server or self._backend(channel).key_holder == "clients":
                self._published[channel] = _Published(
                    item["total"],
                    _schema_in(item["schema"]),
                    item["num_clients"],
                    bool(item["weighted"]),
                    read[0] if read else None,
                    restored=True,
                )


def _on_grid(total: Tensor, codec: FixedPoint) -> Tensor:
    """A decoded total as the integers it came from, in 4 bytes if they fit."""
    return _narrowed((total * codec.scale).round().to(torch.int64))


def _narrowed(places: Tensor) -> Tensor:
    """Integers, in 4 bytes if they fit, and else in 8."""
    least, most = (int(each) for each in places.aminmax()) if places.numel() else (0, 0)
    return places.to(torch.int32 if least > -(2**31) and most < 2**31 else torch.int64)


def _note(text: bytes) -> Message:
    return {"keys": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def _text(note: Message) -> bytes:
    return part(note, "keys", torch.uint8).cpu().numpy().tobytes()


@lru_cache(maxsize=256)
def _schema_bytes(schema: Schema) -> Tensor:
    return torch.frombuffer(bytearray(schema_text(schema)), dtype=torch.uint8)


def _about(message: Message) -> tuple[int, bool]:
    """Number of vectors in a total, and whether they are weighted."""
    about = part(message, "about", torch.int32).tolist()
    if len(about) != 2:
        raise DecodeError(f"a total is described by {len(about)} numbers, not 2")
    return about[0], bool(about[1])


def _schema_in(message: Tensor) -> Schema:
    return schema_from(message.numpy().tobytes())
