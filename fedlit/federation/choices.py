"""Backends, protocols and mechanisms that a user chose, resolved for each declared channel before the first round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedlit.checks import check
from fedlit.federation.channel import Channel, Open, Pairwise, Parties, Summed
from fedlit.federation.client import Client
from fedlit.federation.errors import ChannelError, about
from fedlit.privacy import (
    Description,
    GaussianMechanism,
    Plain,
    PlainAffine,
    QuorumError,
    SecureAggregation,
    TwoPartyAffine,
)

Reports = GaussianMechanism | Literal["exact", "off"]
"""Reports of numbers for logging: with noise that is accounted for, as they are, or not at all."""

_PROTECTS: dict[str, type[Channel]] = {"privacy": Summed, "two_party": Pairwise}
"""Type of channel that each choice protects."""


@dataclass(frozen=True)
class Resolved:
    """A channel of a run: its declaration, and what was chosen for it."""

    declared: Channel
    senders: tuple[str, ...]  # who may send, in roster order
    receivers: tuple[str, ...]
    backend: SecureAggregation  # of its sums
    protocol: TwoPartyAffine | None = None  # of what pairs compute over it
    mechanism: GaussianMechanism | None = None  # of differential privacy
    encrypted: bool = False  # whether what goes from client to client is encrypted between them

    @property
    def name(self) -> str:
        """Of the channel."""
        return self.declared.name

    @property
    def hides(self) -> bool:
        """Whether its backend keeps single messages from those who receive the sum."""
        return isinstance(self.declared, Summed) and self.backend.min_clients > 1

    @property
    def singly(self) -> bool:
        """Whether its messages go one by one, as no backend masks them."""
        return isinstance(self.declared, Summed) and self.declared.singly and not self.hides

    @property
    def sent(self) -> str:
        """Protection, contents, senders, receivers and frequency, in a line."""
        kind = Open.kind if self.singly else self.declared.kind
        kind = f"single samples, {kind}" if self.declared.samples else kind
        if self.encrypted and kind.endswith(Open.kind) and not self.declared.watched:
            kind += " to who receives it, encrypted on its way"
        return f"{kind}: {self.declared}"

    @property
    def description(self) -> Description | None:
        """Description of its backend or protocol; ``None`` where messages go from client to client in plaintext."""
        if isinstance(self.declared, Summed) and not self.singly:
            return self.backend.describe_round(len(self.senders))
        return None if self.protocol is None else self.protocol.describe()

    def everyone(self, argument: str) -> set[str]:
        """Return all senders (``"among"``) or receivers (``"to"``), where a call does not name them."""
        parties, names = (self.declared.to, self.receivers) if argument == "to" else (self.declared.up, self.senders)
        if parties == "learners":
            raise ChannelError(f"{argument} must be given over channel {self}: learners may differ between rounds")
        return {*names}

    @property
    def way_out(self) -> str:
        """End of an error that refuses a choice: the argument that changes the channel's type."""
        return f"; or {self.declared.otherwise}" if self.declared.otherwise else ""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.sent})"


class Channels(Mapping[str, Resolved]):
    """The channels of a run by name, each with what was chosen for it; arguments as of `Federation`.

    Attributes:
        encrypted: Whether messages from client to client are encrypted between them.
        reports: How numbers for logging are sent.

    Raises:
        ChannelError: If a choice names an unknown channel, or one that cannot take it; if a choice by channel leaves
            one in plaintext; if fewer can ever send than a backend can hide.
        TypeError: If a declaration or a choice has another type.
    """

    def __init__(
        self,
        declared: Iterable[Channel] | None,  # ``None`` lets a federation without a method send over any name
        roster: Sequence[Client],
        learners: Collection[str] | None = None,
        participating: Collection[str] = (),  # channels with a rule of participation
        encrypted: bool | None = None,
        reports: Reports | None = None,
        **choices: Any,
    ) -> None:
        check_choices(reports=reports, **choices)
        self._roster = roster
        self._learners = [client.name for client in roster if client.labelled] if learners is None else learners
        self._choices = choices
        self.encrypted = self._protect_something() if encrypted is None else encrypted
        self.reports: Reports = reports or ("off" if self._all("differential_privacy") else "exact")
        self._plain = Plain()  # one object, whose parties serve all channels
        self._any_name = declared is None
        self._resolved: dict[str, Resolved] = {}
        channels = [*(declared or ())]
        for channel in channels:
            check(
                isinstance(channel, Summed | Open | Pairwise),
                "channels",
                "Summed, Open or Pairwise",
                channel,
                "",
                TypeError,
            )
        if not self._any_name:
            chosen_by = [channel.name for channel in channels if not _beside(channel)]
            self._check_names(chosen_by, participating)
        self.declare(channels)

    def __getitem__(self, name: str) -> Resolved:
        if name in self._resolved:
            return self._resolved[name]
        if self._any_name:
            return self._resolve(Summed(name))
        raise ChannelError(
            f"channel {name!r} is not declared, and what is not declared cannot be sent: add it to `channels` of the "
            f"method, which has {[*self]}"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._resolved

    def __iter__(self) -> Iterator[str]:
        return iter(self._resolved)

    def __len__(self) -> int:
        return len(self._resolved)

    @property
    def mechanisms(self) -> list[GaussianMechanism]:
        """Of differential privacy, over all channels and of reports; none if it is off."""
        reports = [self.reports] if isinstance(self.reports, GaussianMechanism) else []
        return self._all("differential_privacy") + reports

    def over(
        self, name: str, kind: type[Channel], senders: Collection[str] = (), receivers: Collection[str] = ()
    ) -> Resolved:
        """The channel of this name and kind, between these clients.

        Raises:
            ChannelError: If it is not declared, or for other clients, or of another kind.
        """
        if self._any_name:
            if name not in self._resolved or type(self[name].declared) is not kind:
                self._resolved[name] = self._resolve(kind(name))
                self._check(self[name])
            return self[name]
        channel = self[name]
        declared = channel.declared
        if not isinstance(declared, kind) and not (kind is Open and channel.singly):
            raise ChannelError(f"a message that is {kind.kind} cannot go over channel {channel}: declare it so")
        for verb, parties, some, able in (
            ("send", declared.up, senders, channel.senders),
            ("receive", declared.to, receivers, channel.receivers),
        ):
            known = frozenset(able)
            others = [client for client in some if client not in known]
            if others and parties != "learners":  # who learns may change from round to round
                raise ChannelError(f"{others} cannot {verb} over channel {channel}: declare who does")
        return channel

    # ---------------------------------------------------------------- before the first round

    def declare(self, channels: Iterable[Channel]) -> None:
        """Lay what was chosen over more channels; of several of one name the first counts."""
        if self._any_name:
            return
        # backwards, so that of one name the first declaration is what stays in the dictionary
        new = {channel.name: channel for channel in reversed([*channels]) if channel.name not in self}
        self._resolved |= {name: self._resolve(channel) for name, channel in reversed(new.items())}
        for name in reversed(new):
            self._check(self[name])
        self._check_two_party()

    def _check(self, channel: Resolved) -> None:
        self._check_kind(channel)
        self._check_left_out(channel)
        self._check_blurred(channel)
        self._check_number(channel)

    def _resolve(self, channel: Channel) -> Resolved:
        backend = self._chosen("privacy", channel) or self._plain
        mechanism = self._chosen("differential_privacy", channel)
        if channel.unblurred and (channel.watched or channel.derived):
            mechanism = None
        protocol = None
        if isinstance(channel, Pairwise):
            protocol = self._chosen("two_party", channel) or (PlainAffine() if channel.beside is None else None)
        senders, receivers = (self._members(parties) for parties in (channel.up, channel.to))
        return Resolved(channel, senders, receivers, backend, protocol, mechanism, self.encrypted)

    def _members(self, parties: Parties) -> tuple[str, ...]:
        if parties == "learners":
            return tuple(client.name for client in self._roster if client.name in self._learners)
        return tuple(client.name for client in self._roster if parties == "everyone" or parties.startswith(client.role))

    def _chosen(self, option: str, channel: Channel) -> Any:
        choice = self._choices.get(option)
        return choice.get(_beside(channel) or channel.name) if isinstance(choice, Mapping) else choice

    def _all(self, option: str) -> list[Any]:
        return _values(self._choices.get(option))

    def _protect_something(self) -> bool:
        return any(backend.min_clients > 1 for backend in self._all("privacy")) or any(
            not isinstance(protocol, PlainAffine) for protocol in self._all("two_party")
        )

    def _by_name(self, option: str) -> Mapping[str, Any]:
        choice = self._choices.get(option)
        return choice if isinstance(choice, Mapping) else {}

    def _check_names(self, declared: Sequence[str], participating: Collection[str]) -> None:
        named = {option: [*self._by_name(option)] for option in self._choices} | {"heard": [*participating]}
        for option, names in named.items():
            unknown = [name for name in names if name not in declared]
            if unknown:
                has = [*dict.fromkeys(declared)]
                text = f"{option} names the channels {unknown}, which this run does not have: it has {has}"
                raise about(option, unknown, ChannelError(text))

    def _check_kind(self, channel: Resolved) -> None:
        """Refuse a protection that its messages would not pass."""
        for option, kind in _PROTECTS.items():
            if not isinstance(channel.declared, kind):
                chosen = channel.name in self._by_name(option)
                if option == "privacy" and isinstance(self._choices.get(option), SecureAggregation):
                    chosen = self._choices[option].min_clients > 1 and bool(channel.declared.otherwise)
                if chosen:
                    text = f"{option} does not protect channel {channel}: leave it out for this channel"
                    raise about(option, channel, ChannelError(text + channel.way_out))

    def _check_left_out(self, channel: Resolved) -> None:
        """Refuse that what one channel sends is in the clear only because another one was named."""
        for option, kind in _PROTECTS.items():
            named, declared = self._by_name(option), channel.declared
            optional = isinstance(declared, Pairwise | Summed) and declared.beside is not None
            if named and isinstance(declared, kind) and declared.name not in named and not optional:
                plain = Plain if kind is Summed else PlainAffine
                text = (
                    f"{option} names the channels {[*named]}, but not {channel.name!r}, whose messages would be sent "
                    f"in the clear ({declared}): add it, if only with fedlit.privacy.{plain.__name__}()"
                )
                raise about(option, named, ChannelError(text))

    def _check_blurred(self, channel: Resolved) -> None:
        chosen = channel.mechanism is not None or channel.name in self._by_name("differential_privacy")
        if chosen and channel.declared.unblurred:
            able = [each.name for each in self.values() if not each.declared.unblurred]
            text = (
                f"differential_privacy cannot blur channel {channel}: {channel.declared.unblurred}. Give it by "
                f"channel, for some of {able}"
            )
            raise about("differential_privacy", channel, ChannelError(text))

    def _check_number(self, channel: Resolved) -> None:
        if not channel.hides:
            return
        try:
            channel.backend.check_clients(len(channel.senders))
        except QuorumError as error:
            raise ChannelError(
                f"{[*channel.senders]} alone can send over channel {channel}: {error}, or give this channel "
                "fedlit.privacy.Plain(), which hides nothing"
            ) from error

    def _check_two_party(self) -> None:
        """Refuse protocols by which nothing would be computed, or that would hide what is seen anyway."""
        pairwise = {
            channel.name: channel.declared for channel in self.values() if isinstance(channel.declared, Pairwise)
        }
        ways = "".join(channel.way_out for channel in self.values())
        if self._choices.get("two_party") and not pairwise and ways:
            text = f"two_party is given, but no channel of this run is pairwise: leave it out{ways}"
            raise about("two_party", self._choices["two_party"], ChannelError(text))
        for name, declared in pairwise.items():
            beside = declared.beside
            if beside is not None and self[name].protocol is not None and not self[beside].hides:
                text = (
                    f"two_party for {name!r} keeps from others what they could see anyway, as channel {beside!r} is "
                    "open: give the strategy privacy, such as fedlit.privacy.PairwiseMasking(), or leave two_party out"
                )
                raise about("two_party", self[name].protocol, ChannelError(text))


def check_choices(
    privacy: object = None, two_party: object = None, differential_privacy: object = None, reports: object = None
) -> None:
    """Raise a `TypeError` unless each is ``None``, of its kind, or a mapping from channels to that.

    ``reports`` is no mapping, but may be ``"exact"`` or ``"off"``.
    """
    valid = reports is None or reports in ("exact", "off") or isinstance(reports, GaussianMechanism)
    check(valid, "reports", "'exact', 'off' or a GaussianMechanism", reports, "", TypeError)
    for argument, choice, kind in (
        ("privacy", privacy, SecureAggregation),
        ("two_party", two_party, TwoPartyAffine),
        ("differential_privacy", differential_privacy, GaussianMechanism),
    ):
        rule = f"a {kind.__name__}, a mapping from channels to them, or None"
        way_out = "give an object, such as fedlit.privacy.PairwiseMasking(), and not its class"
        for value in _values(choice):
            check(isinstance(value, kind), argument, rule, value, way_out, TypeError)


def _beside(channel: Channel) -> str | None:
    """Name of the channel by which backend and mechanism of a summed one are chosen, if it is not its own."""
    return channel.beside if isinstance(channel, Summed) else None


def _values(choice: Any) -> list[Any]:
    """Choices for all channels, or for one by one."""
    return [*choice.values()] if isinstance(choice, Mapping) else [] if choice is None else [choice]
