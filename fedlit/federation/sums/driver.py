"""Secure means and sums over the processes of a federation."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedlit.federation.channel import Summed
from fedlit.federation.choices import Resolved
from fedlit.federation.errors import DivergedError, FederationError, LostClientsError, PayloadError
from fedlit.federation.identities import Identities
from fedlit.federation.journal import Sum
from fedlit.federation.leaks import over_other_clients
from fedlit.federation.ledger import SERVER
from fedlit.federation.messenger import KINDS, Message, Messenger
from fedlit.federation.release import Releases
from fedlit.federation.sums.conversation import Backends
from fedlit.federation.sums.totals import Total, Totals, schema_bytes, schema_in
from fedlit.federation.wire import part, to_host, wire_size
from fedlit.privacy import FixedPoint, InputError, Plain, PrivacyError, PrivacyWarning, QuorumError, Tags, Terms, links
from fedlit.privacy.driver import Parties
from fedlit.privacy.packing import Payload, Schema, check_equal, pack, relative_weights, schema_of

_LONG = 1 << 20
"""Numbers from which on a plain vector is made when the server adds it, so that one is in memory at a time."""

_CHECKED = 3
"""Clients from which on totals have tags: each of two knows the other's vector anyway."""


@dataclass(frozen=True)
class Recipe:
    """Of whom and for whom a secure mean or sum is taken."""

    channel: str
    senders: Sequence[str]  # in roster order; some may turn out to send nothing
    receivers: Sequence[str]  # present clients, in roster order
    absent: frozenset[str]  # clients that should have received the total and are not present
    weights: Mapping[str, float] | None  # of a mean, by client; ``None`` is a sum
    step: Sum = ()  # by which the journal knows it


class Sums:
    """Runs a secure sum from clients' payloads to receivers; each party of a backend works where it lives."""

    def __init__(
        self, messenger: Messenger, channels: Mapping[str, Resolved], releases: Releases, timed: Callable[[str], Any]
    ) -> None:
        self._messenger = messenger
        self._channels = channels
        self._releases = releases
        self._timed = timed
        self._backends = Backends(messenger, channels, timed)
        self.totals = Totals(messenger, channels, self._backends)
        self._identities: Identities | None = None
        self._skipped: set[str] = set()  # channels on which a mean was skipped, and a warning given
        self._sent = False  # whether vectors of the sum under way have left their clients

    def identify(self, identities: Identities) -> None:
        """Enrol with the keys that clients have stated."""
        self._identities = self._backends.identities = identities
        self._backends.forget()

    def welcome(self) -> None:
        """Let clients that have come back state their keys, if none were stated on purpose, before the next sum."""
        if self._backends.identities is None:
            self._identities = None

    def run(
        self, recipe: Recipe, payloads: Mapping[str, Payload], around: Mapping[str, Payload] | None
    ) -> dict[str, dict[str, Tensor]]:
        """Return payloads of local receivers from those of local senders.

        A sum that fails because a client drops out before a vector has left anybody is taken over the others. One that
        cannot do without clients that have dropped out is a `LostClientsError`, on all processes alike.
        """
        transport, journal = self._messenger.transport, self._messenger.journal
        if journal is not None:  # also for a sum that was taken without this process: they are numbered alike
            recipe = replace(recipe, step=journal.next_sum(self._messenger.step, recipe.channel))
        recalled = transport.recall()
        if recalled is not None:
            return self.totals.recalled(recipe.channel, recipe.receivers, recalled)
        start = transport.step
        while True:
            recipe = replace(recipe, senders=[name for name in recipe.senders if not self._messenger.is_lost(name)])
            lost, self._sent = transport.lost, False
            try:
                result = self._run(recipe, payloads, around)
            except (FederationError, PrivacyError) as error:
                if journal is not None and not self._sent:
                    journal.withdraw(recipe.step)
                if self._sent or transport.lost == lost:
                    if transport.lost and isinstance(error, QuorumError):
                        raise self._without_lost(recipe, error) from error
                    raise
                self._backends.forget(self._channels[recipe.channel].backend)  # to enrol without the lost client
                continue
            self.totals.note(start, recipe.channel)
            self.totals.release(recipe.channel)
            return result

    def _without_lost(self, recipe: Recipe, error: QuorumError) -> LostClientsError:
        messenger = self._messenger
        lost = messenger.lost
        return LostClientsError(
            f"the sum over channel {recipe.channel!r} of round {messenger.round_idx} cannot be had without {lost}, who "
            f"have dropped out ({error}): start these again, and all go back to their checkpoints, by themselves under "
            "fedlit serve and join, and repeat the round"
        )

    def _run(
        self, recipe: Recipe, payloads: Mapping[str, Payload], around: Mapping[str, Payload] | None
    ) -> dict[str, dict[str, Tensor]]:
        resolved, senders = self._channels[recipe.channel], recipe.senders
        declared, needed = resolved.declared, resolved.backend.min_clients
        skips = isinstance(declared, Summed) and declared.too_few == "skip"
        if skips and 0 < len(senders) < needed:  # on all processes alike
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
        before = self.totals.senders.setdefault(channel.name, [*senders])
        self.totals.senders[channel.name] = [*senders]
        if before != [*senders] and channel.hides and self._messenger.hosts_server:
            warnings.warn(over_other_clients(channel, before, senders), PrivacyWarning, stacklevel=6)

    # ---------------------------------------------------------------- one sum

    def _aggregate(self, recipe: Recipe, payloads: Mapping[str, Payload]) -> dict[str, dict[str, Tensor]]:
        channel, messenger, backend = recipe.channel, self._messenger, self._channels[recipe.channel].backend
        working = self._backends.conversation(channel).working
        with working():  # a failure here keeps vectors back
            self.totals.check_senders(channel, recipe.senders)
        shares = self._shares(recipe, payloads, backend.codec)
        tags = self._tags(recipe)
        vectors, schema = self._vectors(recipe, payloads, shares)
        messages: dict[str, Message] = {name: {} for name in vectors}
        parties = self._backends.enrolled(channel) if recipe.senders else self._backends.parties(backend)
        if recipe.senders and len(recipe.senders) >= backend.min_clients:
            terms = self._terms(recipe, schema)
            self._backends.open_round(channel, recipe.senders, terms, recipe.weights is not None)
            own = None if tags is None else tags.of(schema.numpy().tobytes(), recipe.weights is not None)
            for name in [*vectors] if not messenger.failed else ():
                with working(name):
                    content = None if shares is None else [*payloads[name].values()]
                    # a client's vector is in its message then, and goes: long ones fill memory
                    hidden = self._protected(recipe, parties, name, vectors.pop(name), content, own)
                    messages[name] = {"schema": schema, "sum": hidden}
        vectors.clear()
        kind = KINDS.index("sum" if recipe.weights is None else "mean")
        sizes = messenger.announce(
            channel, {name: wire_size(message) for name, message in messages.items()}, kind, recipe.weights
        )
        sizes = self._readable(recipe, sizes)
        if not sizes:
            return {}
        self._sent = True
        if len(sizes) < backend.min_clients:
            raise (LostClientsError if messenger.transport.lost else FederationError)(
                f"a sum over channel {channel!r} in round {messenger.round_idx} would run over {list(sizes)} alone, "
                f"but {type(backend).__name__} hides nothing of fewer than {backend.min_clients} clients: let more "
                "clients take part, or give this channel another backend"
            )
        for name, size in sizes.items():
            messenger.book(channel, name, SERVER, size)
        sent = {name: 1.0 if shares is None else shares[name] for name in sizes}
        self._releases.account(self._channels[channel], sent)  # whatever happens after
        if messenger.transport.losable and messenger.hosts_server:  # the next total takes its place
            self.totals.forget(channel)

        def made(name: str) -> Tensor:
            return pack(payloads[name], None, None if shares is None else shares[name])

        total = self._total(recipe, parties, messages, sizes, made)
        if total is not None and tags is not None:
            total.tags = tags.count
        messages.clear()
        if backend.closing:
            total = self._unmask(recipe, parties, list(sizes), total)
        if total is not None and backend.key_holder == "server":
            with working():
                if parties.server.on_grid:
                    total.vector = _narrowed(total.vector)
                else:
                    vector = parties.server.reveal(total.vector, total.num_clients)
                    total.vector = vector if backend.codec is None else _on_grid(vector, backend.codec)
        shared = sent if shares is not None else None
        result, read, digest = self.totals.send(channel, total, recipe.receivers, shared, tags, list(sizes))
        if total is not None:
            # clone(): the entries of a sum that receivers got are views of its total
            kept = total.vector.clone() if result else total.vector
            if total.tags and backend.key_holder == "server":  # who is sent it later cannot check them
                kept, total.tags = kept[: -total.tags], 0
            read = replace(total, vector=kept, revealed=read.revealed if read else None)
        self.totals.keep(channel, recipe.receivers, recipe.absent, read, digest)
        return result

    def _protected(
        self,
        recipe: Recipe,
        parties: Parties,
        name: str,
        vector: Tensor,
        content: Sequence[Tensor] | None,
        tags: Tags | None,
    ) -> Tensor:
        """Return what a client sends of its vector, which its journal knows from then on."""
        resolved, journal = self._channels[recipe.channel], self._messenger.journal
        if journal is not None and resolved.hides:
            journal.release(name, recipe.step, vector, recipe.senders, not resolved.declared.fixed, content)
            if resolved.backend.closing and not parties.closing:  # the total has all of them, as nobody is asked
                journal.survivors(name, recipe.step, recipe.senders)
        party = parties.clients[name]
        return party.protect(vector) if tags is None else party.protect_tagged(vector, tags)

    def _tags(self, recipe: Recipe) -> Tags | None:
        """Return what the total is checked by, under a backend that hides vectors on a grid."""
        resolved, messenger = self._channels[recipe.channel], self._messenger
        grid = resolved.backend.grid
        if not resolved.hides or grid is None or len(messenger.rank_of) < _CHECKED:
            return None
        if self._identities is None:
            self._identities = Identities(messenger)
            self._identities.meet()
        return Tags(
            self._identities.shared_key(), links.digest(recipe.channel, *messenger.position), grid, len(recipe.senders)
        )

    def _terms(self, recipe: Recipe, schema: Tensor) -> Terms:
        """What all senders must have received alike, and what local ones are about to send."""
        if not self._channels[recipe.channel].hides:
            return Terms()
        weights = recipe.weights
        return Terms(
            {
                "the roster": list(self._messenger.rank_of),
                "the receivers": list(recipe.receivers),
                "the weights": None if weights is None else [[name, weights.get(name)] for name in recipe.senders],
                "the entries that are sent": schema.numpy().tobytes(),
                "the numbers of earlier totals": self.totals.numbers(),
            },
            self.totals.received.listed(),
            self.totals.remembered,
        )

    def _shares(
        self, recipe: Recipe, payloads: Mapping[str, Payload], codec: FixedPoint | None
    ) -> dict[str, float] | None:
        """Relative weights of the senders that have one; all processes give the same, see `Messenger.announce`."""
        if recipe.weights is None:
            return None
        try:
            relative_weights(recipe.weights, list(payloads), codec)
            positive = {name: weight for name, weight in recipe.weights.items() if 0 < weight < math.inf}
            return relative_weights(positive, [name for name in recipe.senders if name in positive], codec)
        except InputError as error:
            self._messenger.fail(PayloadError(str(error)))
            return None

    def _vectors(
        self, recipe: Recipe, payloads: Mapping[str, Payload], shares: Mapping[str, float] | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Flat vectors of local clients, and their schema; none if a failure waits."""
        nothing, working = torch.empty(0, dtype=torch.uint8), self._backends.conversation(recipe.channel).working
        if not payloads or self._messenger.failed:
            return {}, nothing
        schemas = {name: schema_of(payload) for name, payload in payloads.items()}
        codec, vectors = self._channels[recipe.channel].backend.codec, {}
        schema = nothing
        with working():
            schema = schema_bytes(check_equal(schemas, f"payloads of channel {recipe.channel!r}", PayloadError))
        if self._messenger.failed:
            return {}, nothing
        later = self._makes_later(recipe, next(iter(payloads.values())))
        for name, payload in payloads.items():
            share = None if shares is None else shares[name]
            with working(name):
                if later:
                    for tensor in payload.values():
                        self._messenger.check_finite(recipe.channel, name, tensor)
                    self._messenger.on_read(name)
                    form = {key: torch.empty_like(tensor, device="meta") for key, tensor in payload.items()}
                    vectors[name] = pack(form, None, share)
                    continue
                vector = pack(payload, codec, share)
                if codec is not None or self._messenger.transport.world_size > 1:
                    vector = to_host(vector)  # where those of other processes arrive, and where codecs work
                self._messenger.check_finite(recipe.channel, name, vector)
                vectors[name] = vector
        return vectors, schema

    def _makes_later(self, recipe: Recipe, payload: Payload) -> bool:
        """Whether vectors are on the meta device until the server adds them: long plain ones in one process."""
        backend, alone = self._channels[recipe.channel].backend, self._messenger.transport.world_size == 1
        plain = isinstance(backend, Plain) and backend.codec is None
        floats = all(tensor.is_floating_point() for tensor in payload.values())
        return plain and alone and floats and sum(tensor.numel() for tensor in payload.values()) >= _LONG

    def _readable(self, recipe: Recipe, sizes: dict[Any, int]) -> dict[Any, int]:
        """Leave out vectors that are announced with more than twice the median size: on all processes alike.

        A process that runs fedlit fails with it, and all with that process, as its payloads are other ones.
        """
        usual = statistics.median(sizes.values()) if sizes else 0
        limit = 2 * usual if len(sizes) > 2 else math.inf
        for name in [name for name, size in sizes.items() if size > limit and self._messenger.is_local(name)]:
            self._messenger.fail(
                PayloadError(
                    f"client {name!r} would send {sizes[name]} bytes over channel {recipe.channel!r}, and the others "
                    f"about {usual:.0f}: payloads must agree in names, types and shapes to be added"
                )
            )
        self._warn_left_out(recipe, {name: f"of {size} bytes" for name, size in sizes.items() if size > limit})
        return {name: size for name, size in sizes.items() if size <= limit}

    def _warn_left_out(self, recipe: Recipe, left_out: Mapping[str, str]) -> None:
        if left_out and self._messenger.hosts_server:
            names = ", ".join(f"client {name!r} ({why})" for name, why in left_out.items())
            warnings.warn(
                f"vectors are left out of the sum over channel {recipe.channel!r} in round "
                f"{self._messenger.round_idx}: {names}. A client that runs fedlit would have reported an error: find "
                "out what runs there",
                stacklevel=6,
            )

    def _total(
        self,
        recipe: Recipe,
        parties: Parties,
        messages: dict[str, Message],
        sizes: Mapping[str, int],
        made: Callable[[str], Tensor],
    ) -> Total | None:
        """At the server: the protected total of vectors, each added as it comes, or as it is ``made`` of a client."""
        messenger, working = self._messenger, self._backends.conversation(recipe.channel).working
        schemas: dict[str, Schema] = {}
        in_plaintext = self._channels[recipe.channel].backend.codec is None
        left_out: dict[str, str] = {}

        def take(name: str, message: Message) -> None:
            with working():
                vector = part(message, "sum")
                later = vector.is_meta
                vector = made(name) if later else vector
                # a process checks what its clients send: what comes from elsewhere could spoil the mean of all
                if in_plaintext and not messenger.is_local(name) and not bool(torch.isfinite(vector).all()):
                    left_out[name] = "not finite"
                    return
                schemas[name] = schema_in(part(message, "schema", torch.uint8))
                if not messenger.failed:
                    check_equal(schemas, f"payloads of channel {recipe.channel!r}", PayloadError)
                    parties.server.add(name, vector)
                if later:
                    messenger.on_read(name)

        messenger.gather_each(recipe.channel, messages, sizes, take)
        self._warn_left_out(recipe, left_out)
        if left_out and not schemas:
            messenger.fail(DivergedError(f"no vector of channel {recipe.channel!r} is finite: {[*left_out]}"))
        if not messenger.hosts_server or not schemas or messenger.failed:
            return None
        with working():
            total = Total(
                parties.server.total(), next(iter(schemas.values())), len(schemas), recipe.weights is not None
            )
            if len(schemas) < len(sizes):
                total.summed = [position for position, name in enumerate(messenger.rank_of) if name in schemas]
            return total
        return None

    def _unmask(self, recipe: Recipe, parties: Parties, senders: Sequence[str], total: Total | None) -> Total | None:
        """Ask those who sent for what removes the masks of their total."""
        check = partial(self.totals.check_senders, recipe.channel)
        conversation = self._backends.conversation(recipe.channel, recipe.step, check)
        answers = parties.ask_survivors(senders, conversation, has_total=total is not None)
        if total is not None:
            with conversation.working():
                return replace(total, vector=parties.server.conclude(answers))
        return None


def _on_grid(total: Tensor, codec: FixedPoint) -> Tensor:
    """Return the integers that a decoded total came from, in 4 bytes if they fit."""
    return _narrowed((total * codec.scale).round().to(torch.int64))


def _narrowed(total: Tensor) -> Tensor:
    """Return integers in 4 bytes if they fit, and else in 8."""
    smallest, largest = (int(each) for each in total.aminmax()) if total.numel() else (0, 0)
    return total.to(torch.int32 if smallest > -(2**31) and largest < 2**31 else torch.int64)
