"""Totals of secure sums: how they travel down, and what is kept of them for clients that were absent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.federation import announced
from fedlit.federation.choices import Resolved
from fedlit.federation.errors import OutOfStepError, RosterError
from fedlit.federation.ledger import SERVER
from fedlit.federation.messenger import KINDS, Message, Messenger
from fedlit.federation.sums.conversation import Backends
from fedlit.federation.sums.received import REMEMBERED, ReceivedTotals, digest_of
from fedlit.federation.wire import part, schema_from, schema_text
from fedlit.privacy import AuthenticationError, DecodeError, QuorumError, SecureAggregation, Tags
from fedlit.privacy.packing import Schema, check_weight, unpack
from fedlit.privacy.tags import FALSE_TOTAL

_DOWNLOAD = KINDS.index("download")


@dataclass
class Total:
    """The total of a sum."""

    vector: Tensor  # as the server sends it: plaintext where it holds the key, so that no key outlives its round
    schema: Schema
    num_clients: int
    weighted: bool
    revealed: Tensor | None = None  # as clients of this process read it, where only clients can
    restored: bool = False  # from a checkpoint, so that no key opens ``vector`` any more
    tags: int = 0  # numbers at the end of ``vector`` by which its receivers check it
    summed: list[int] | None = None  # positions in the roster of those in it, where others have dropped out


class Totals:
    """Sends totals to their receivers, and keeps the last one of each channel for those that were absent."""

    def __init__(self, messenger: Messenger, channels: Mapping[str, Resolved], backends: Backends) -> None:
        self._messenger = messenger
        self._channels = channels
        self._backends = backends
        self._last: dict[str, Total] = {}
        self._versions: dict[str, dict[str, int]] = {}  # number of the newest total that each client has
        self._readers: dict[str, list[str]] = {}  # clients that have read the total kept for absent ones
        self.senders: dict[str, list[str]] = {}  # over whom a fixed channel was summed last
        self.received = ReceivedTotals()
        self._summed: dict[str, Sequence[str]] = {}  # whose vectors the last total has that was read here
        self._bound: dict[str, tuple[Sequence[str], int]] = {}  # who has to be in the next total, but for so many

    def _backend(self, channel: str) -> SecureAggregation:
        return self._channels[channel].backend

    # ---------------------------------------------------------------- on their way down

    def send(
        self,
        channel: str,
        total: Total | None,
        receivers: Sequence[str],
        shares: Mapping[str, float] | None = None,
        tags: Tags | None = None,
        senders: Sequence[str] = (),
    ) -> tuple[dict[str, dict[str, Tensor]], Total | None, bytes | None]:
        """Send a ``total`` of the server (elsewhere ``None``) to its receivers.

        ``shares`` are relative weights of those who announced a vector, to compare with the weight in the total, and
        ``tags`` are what its numbers, from ``senders``, are checked by: one from before is compared by the digest that
        others have of it.
        Returns payloads of local receivers; the total as they read it, if only clients can; and its digest, if it was
        read here and is remembered.
        """
        messenger, backend = self._messenger, self._backend(channel)
        message: Message = {}
        if total is not None:
            about_tags = [total.tags] if total.tags else []
            message = {
                "schema": schema_bytes(total.schema),
                "about": torch.tensor([total.num_clients, total.weighted, *about_tags], dtype=torch.int32),
                "sum": total.vector,
            }
            if total.summed is not None:
                message["counted"] = torch.tensor(total.summed, dtype=torch.int32)
        size, message = announced.broadcast(messenger, channel, message, _DOWNLOAD, receivers)
        if not size:
            raise DecodeError(f"the server announces no total over channel {channel!r}, which is due")
        for name in receivers:
            if not messenger.is_lost(name):
                messenger.book(channel, SERVER, name, size)
        local = [name for name in receivers if messenger.is_local(name)]
        result, read, digest = None, None, None
        if local:
            with self._backends.conversation(channel).working():
                num_clients, weighted, appended = _about(message)
                names = self._names_in(channel, message, senders) if senders else ()
                if senders:
                    self.check_senders(channel, names)  # before it is decrypted, where clients have the key
                    self._summed[channel] = names
                vector = self._revealed(backend, local[0], message, num_clients, tags is not None)
                text = part(message, "schema", torch.uint8).cpu().numpy().tobytes()
                if tags is not None:
                    rule = f"{len(names)}, as stated, and at least {backend.min_clients}"
                    valid = backend.min_clients <= num_clients == len(names)
                    check(valid, "vectors in a total", rule, num_clients, error=DecodeError)
                    vector = tags.of(text, weighted).check(vector, names)
                elif 0 < appended <= len(vector):
                    vector = vector[:-appended]
                if shares is not None:
                    check_weight(vector, backend.codec, {name: shares[name] for name in names})
                schema = schema_from(text)
                if self._binds(channel):
                    digest = digest_of(vector, text, num_clients, weighted)
                result = unpack(vector, schema, backend.codec, weighted, messenger.device)
                if backend.key_holder == "clients":
                    read = Total(part(message, "sum"), schema, num_clients, weighted, vector, tags=appended)
        messenger.check(channel)  # a total that one client cannot open is an error for all
        return ({} if result is None else dict.fromkeys(local, result)), read, digest

    def bind(self, channel: str, to: str, spare: int) -> None:
        """Refuse the next total of ``channel`` if more than ``spare`` of the vectors in the last of ``to`` lack in it.

        Refused by clients: before they send, before they confirm whose vectors it has, and before they decrypt it.
        """
        self._bound[channel] = (self._summed.get(to, ()), spare)

    def release(self, channel: str) -> None:
        """Forget what `bind` has bound, as the total is there."""
        self._bound.pop(channel, None)

    def check_senders(self, channel: str, names: Collection[str]) -> None:
        """Raise a `QuorumError` if a total over these clients is not what `bind` allows."""
        due, spare = self._bound.get(channel, ((), 0))
        missing = [name for name in due if name not in names]
        if len(missing) > spare:
            raise QuorumError(
                f"the sum over channel {channel!r} is without {missing}, who took part in the one before, on which it "
                f"rests: it may be without {spare} of these"
            )

    def _binds(self, channel: str) -> bool:
        """Whether totals of a channel are remembered, as some backend hides messages that they may shape."""
        return not self._channels[channel].declared.watched and any(each.hides for each in self._channels.values())

    def _names_in(self, channel: str, message: Message, senders: Sequence[str]) -> Sequence[str]:
        """Clients whose vectors a total has, of those who announced one."""
        # where nobody can drop out, a server that leaves out a vector that it cannot read is found out by the weight
        excusable = self._messenger.transport.losable or not self._channels[channel].hides
        if "counted" not in message or not excusable:
            return senders
        roster = list(self._messenger.rank_of)
        positions = part(message, "counted", torch.int32).tolist()
        names = [roster[position] for position in positions if 0 <= position < len(roster)]
        if len({*names} & {*senders}) < len(positions):
            raise DecodeError(f"a total is reported with vectors of {positions}, which are not all of {[*senders]}")
        return names

    def _revealed(
        self, backend: SecureAggregation, client: str, message: Message, num_clients: int, has_tags: bool
    ) -> Tensor:
        """Return the plaintext total that a client reads in a message."""
        if backend.key_holder == "clients":
            try:
                return self._backends.parties(backend).clients[client].reveal(part(message, "sum"), num_clients)
            except DecodeError:
                if not has_tags:
                    raise
                # the server, which must not learn whether decrypted numbers are in range, is sent what is raised here
                raise AuthenticationError(FALSE_TOTAL) from None
        return part(message, "sum") if backend.codec is None else backend.codec.decode(part(message, "sum"))

    # ---------------------------------------------------------------- for those who were absent

    def forget(self, channel: str) -> None:
        """Let go of the last total of a channel, as the next one takes its place."""
        self._last.pop(channel, None)

    def keep(
        self,
        channel: str,
        receivers: Sequence[str],
        absent: Collection[str],
        total: Total | None,
        digest: bytes | None,
    ) -> None:
        """Note who missed a total that was addressed to them, and keep it for `catch_up` if somebody did."""
        roster = self._messenger.rank_of
        versions = self._versions.setdefault(channel, dict.fromkeys(roster, 0))
        newest = max(versions.values()) + 1
        absent = {*absent, *self._messenger.lost}
        versions.update({name: newest for name in roster if name not in absent})
        if digest is not None:
            self.received.note(channel, newest, digest)
        self._last.pop(channel, None)
        self._readers.pop(channel, None)
        if absent or self._messenger.transport.losable:  # who is lost later may come back without it
            self._readers[channel] = [name for name in receivers if name not in absent]
            if total is not None:
                self._last[channel] = total

    def catch_up(self, channel: str, present: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Send the last total of ``channel`` to those of ``present`` that were absent when it was sent to them."""
        versions = self._versions.get(channel)
        if versions is None:
            return {}
        newest = max(versions.values())
        behind = [name for name in present if versions.get(name, 0) < newest and not self._messenger.is_lost(name)]
        if not behind:
            return {}
        total = self._last.get(channel)
        if total is not None and total.restored and self._backend(channel).key_holder == "clients":
            self._reissue(channel, total)
        result, _, digest = self.send(channel, total if self._messenger.hosts_server else None, behind)
        caught_up = [name for name in behind if not self._messenger.is_lost(name)]
        versions.update(dict.fromkeys(caught_up, newest))
        if digest is not None:
            self.received.note(channel, newest, digest)
        return result

    def _reissue(self, channel: str, total: Total) -> None:
        """After a resume no key opens the stored total: a client that has read it encrypts it anew for the others."""
        readers = [name for name in self._readers[channel] if not self._messenger.is_lost(name)]
        if not readers:
            raise QuorumError(
                f"the last total of channel {channel!r} was read by nobody before the checkpoint, and its key is gone: "
                "resume from a checkpoint of another round"
            )
        messenger, parties, author = self._messenger, self._backends.enrolled(channel), readers[0]
        messages: dict[str, Message] = {}
        if total.revealed is not None and messenger.is_local(author):
            with self._backends.conversation(channel).working():
                messages[author] = {"sum": parties.clients[author].reissue(total.revealed, total.num_clients)}
        sizes, arrived = announced.carry(messenger, channel, messages, _DOWNLOAD, up=True)
        if author not in sizes:
            raise DecodeError(f"client {author!r} announces no total over channel {channel!r}, which it has read")
        messenger.book(channel, author, SERVER, sizes[author])
        if arrived:
            total.vector = part(arrived[author], "sum")
        total.restored, total.tags = False, 0

    # ---------------------------------------------------------------- for those who come back

    def note(self, step: int, channel: str) -> None:
        """At the server, before the first round: keep the total for those who come back and cannot take part again."""
        messenger, total = self._messenger, self._last.get(channel)
        if messenger.settled or not messenger.transport.losable or not messenger.hosts_server:
            return
        number = max(self._versions.get(channel, {"": 0}).values())
        noted: dict[str, Any] = {"early": messenger.position[0], "channel": channel, "number": number}
        if total is not None:
            noted |= self._stored(channel, total)
        messenger.transport.note(step, noted)

    def recalled(
        self, channel: str, receivers: Sequence[str], noted: Mapping[str, Any]
    ) -> dict[str, dict[str, Tensor]]:
        """Return payloads of local receivers from a total before the first round, taken without this process."""
        messenger, backend = self._messenger, self._backend(channel)
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
        vector = noted["total"] if codec is None else codec.decode(noted["total"])
        if self._binds(channel):  # for its neighbours in the next hidden sum, who have read it at its time
            text = noted["schema"].numpy().tobytes()
            digest = digest_of(vector, text, noted["num_clients"], bool(noted["weighted"]))
            self.received.note(channel, int(noted["number"]), digest)
        result = unpack(vector, schema_in(noted["schema"]), codec, bool(noted["weighted"]), messenger.device)
        return dict.fromkeys([name for name in receivers if messenger.is_local(name)], result)

    def renew_keys(self) -> None:
        """Enrol anew before the next sum, as somebody has come back who has no key."""
        self._backends.forget()
        for channel, total in self._last.items():
            total.restored = total.restored or self._backend(channel).key_holder == "clients"

    @property
    def remembered(self) -> int:
        """Maximum number of totals that are remembered here, the same on all processes."""
        return REMEMBERED * sum(self._binds(channel) for channel in self._channels)

    def numbers(self) -> list[list[object]]:
        """Return the number of the newest total of each channel, the same on all processes."""
        return [[channel, max(of.values())] for channel, of in sorted(self._versions.items())]

    def versions(self) -> dict[str, dict[str, int]]:
        """Return the number of each channel's total that local clients have, by client; 0 is none."""
        names = [name for name in self._messenger.rank_of if self._messenger.is_local(name)]
        return {name: {channel: of.get(name, 0) for channel, of in self._versions.items()} for name in names}

    def welcome(self, versions: Mapping[str, Mapping[str, int]]) -> None:
        """Take the `versions` of clients that come back: `catch_up` sends them what is newer."""
        for channel, ours in self._versions.items():
            newest = max(ours.values())
            for name, theirs in versions.items():
                ours[name] = theirs.get(channel, 0) if theirs.get(channel, 0) <= newest else 0
            readers = self._readers.get(channel, [])
            self._readers[channel] = [name for name in readers if ours[name] == newest]

    def public_state(self) -> dict[str, Any]:
        """Return who has which total, and which there are, without their numbers."""
        state = self.state_dict()
        stored = {channel: {**item, "total": torch.empty(0)} for channel, item in state["server"].items()}
        return {key: state[key] for key in ("versions", "readers", "summed")} | {"server": stored}

    def come_back(self, public: Mapping[str, Any]) -> None:
        """Take the `public_state` of the server, and keep of what was read here what is still the newest."""
        versions, read = self.versions(), self.state_dict()["clients"]
        newest = {channel: max(of.values()) for channel, of in public["versions"].items()}
        kept = {
            name: {
                channel: total
                for channel, total in totals.items()
                if versions[name].get(channel) == newest.get(channel)
            }
            for name, totals in read.items()
        }
        self.load_state_dict(
            {**public, "clients": kept, "digests": {name: self.received.state_dict() for name in kept}}
        )

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return who has which total, and the totals kept for absent clients; no key is ever saved.

        Entries are equal on all processes, but for ``"server"``, from where it lives, ``"clients"``, totals that only
        clients can read, as local ones have read them, and their ``"digests"`` of all that they have received.
        """
        names = [name for name in self._messenger.rank_of if self._messenger.is_local(name)]
        return {
            "versions": {channel: dict(versions) for channel, versions in self._versions.items()},
            "readers": {channel: list(readers) for channel, readers in self._readers.items()},
            "summed": {channel: list(senders) for channel, senders in self.senders.items()},
            "digests": {name: self.received.state_dict() for name in names},
            "server": {channel: self._stored(channel, total) for channel, total in self._last.items()},
            "clients": {
                name: {
                    channel: total.revealed
                    for channel, total in self._last.items()
                    if total.revealed is not None and name in self._readers[channel]
                }
                for name in names
            },
        }

    def _stored(self, channel: str, total: Total) -> dict[str, Any]:
        # totals that only clients can decrypt are useless without their key, and leak some of it beside plaintexts
        by_server = self._backend(channel).key_holder == "server"
        return {
            "total": total.vector.cpu() if by_server else torch.empty(0),
            "schema": schema_bytes(total.schema),
            "num_clients": total.num_clients,
            "weighted": total.weighted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` left off, with new keys: no message made before is accepted after."""
        self._backends.forget()
        self._versions = {channel: dict(versions) for channel, versions in state["versions"].items()}
        self._readers = {channel: list(readers) for channel, readers in state["readers"].items()}
        self.senders = {channel: list(senders) for channel, senders in state.get("summed", {}).items()}
        self.received.load_state_dict(state.get("digests", {}).values())
        self._last = {}
        for channel, item in state["server"].items():
            read = [totals[channel] for totals in state["clients"].values() if channel in totals]
            if self._messenger.hosts_server or self._backend(channel).key_holder == "clients":
                schema, weighted = schema_in(item["schema"]), bool(item["weighted"])
                revealed = read[0] if read else None
                self._last[channel] = Total(
                    item["total"], schema, item["num_clients"], weighted, revealed, restored=True
                )


@lru_cache(maxsize=256)
def schema_bytes(schema: Schema) -> Tensor:
    """Return a schema as it is sent."""
    return torch.frombuffer(bytearray(schema_text(schema)), dtype=torch.uint8)


def schema_in(message: Tensor) -> Schema:
    """Inverse of `schema_bytes`."""
    return schema_from(message.numpy().tobytes())


def _about(message: Message) -> tuple[int, bool, int]:
    """Number of vectors in a total, whether they are weighted, and how many tags it has."""
    about = part(message, "about", torch.int32).tolist()
    if len(about) not in (2, 3):
        raise DecodeError(f"a total is described by {len(about)} numbers, not by 2, or by 3 where it has tags")
    return about[0], bool(about[1]), sum(about[2:])
