"""Channels: messages between clients, declared once by the method or callback that sends them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, final, get_args

from fedlit.checks import check, check_one_of
from fedlit.federation.ledger import KEYS

Parties = Literal["everyone", "sources", "target", "learners"]
"""Senders or receivers; ``"learners"`` are those that take local steps."""

NAME_BYTES = 32
"""Most bytes of a channel's name in UTF-8: it travels in the header of every exchange."""

_WORDS = {"sources": "the sources", "target": "the target", "learners": "those who train"}


@dataclass(frozen=True)
class Channel:
    """Declaration of messages, of one of the types below.

    Args:
        name: 1 to 32 bytes of UTF-8; the same in the ledger and in configurations.
        contents: What a message holds, in a line.
        up: Senders: ``"everyone"``, ``"sources"``, ``"target"`` or ``"learners"``.
        to: Receivers, likewise.
        how_often: In words, such as ``"every round"`` or ``"once"``.
        unblurred: Why no mechanism of differential privacy can blur it; empty if one can.
        otherwise: Argument of the method that makes it a channel of another type, as an order ("give ..."); shown where
            a choice for that type is refused.
        watched: Whether it is for watching alone: the method would train the same without it.
        fixed: Whether a client's message is the same whenever it is sent, as nothing that training changes is in it.
            Sums of such messages over different clients reveal single ones.
        derived: Whether a message is computed from sums that its sender has received, and nothing of its own. Where a
            mechanism of differential privacy is for all channels, what these sums say is blurred already.
        samples: Whether a message holds single samples: their inputs, or a vector of features for each. No backend
            hides these from a receiver; a run warns of it at its start.

    Raises:
        ValueError: If the name is empty, too long, or that of another channel's keys, or an argument is out of range.
    """

    name: str
    contents: str = ""
    up: Parties = "everyone"
    to: Parties = "everyone"
    how_often: str = "every round"
    unblurred: str = field(default="", kw_only=True)
    otherwise: str = field(default="", kw_only=True)
    watched: bool = field(default=False, kw_only=True)
    fixed: bool = field(default=False, kw_only=True)
    derived: bool = field(default=False, kw_only=True)
    samples: bool = field(default=False, kw_only=True)

    kind: ClassVar[str]
    """Type in words."""

    def __post_init__(self) -> None:
        valid = 0 < len(self.name.encode()) <= NAME_BYTES and not self.name.endswith(KEYS)
        check(valid, "name of a channel", f"1 to {NAME_BYTES} bytes of UTF-8, not ending in {KEYS!r}", self.name)
        for argument, value in (("up", self.up), ("to", self.to)):
            check_one_of(f"{argument} of channel {self.name!r}", value, get_args(Parties))

    def __str__(self) -> str:
        """Contents, senders, receivers and frequency, in a line."""
        up, to = _WORDS.get(self.up, self.up), _WORDS.get(self.to, self.to)
        return f"{self.contents or self.name}, from {up} to {to}, {self.how_often}"


@final
@dataclass(frozen=True)
class Summed(Channel):
    """Messages of which only the sum or mean arrives, through a privacy backend (`Federation.mean`, ``sum``).

    Args:
        too_few: In a round in which fewer clients send than the backend can hide, ``"raise"`` ends the run, and
            ``"skip"`` sends nothing, with a warning the first time.
        singly: Whether messages go one by one, by `Federation.exchange`, where the backend hides nothing.
        beside: Name of another summed channel, whose senders this one asks something first. It has the same backend
            and mechanism, which are chosen by the other's name alone, and is used only where these hide and do not
            blur.
    """

    too_few: Literal["raise", "skip"] = field(default="raise", kw_only=True)
    singly: bool = field(default=False, kw_only=True)
    beside: str | None = field(default=None, kw_only=True)

    kind: ClassVar[str] = "summed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of(f"too_few of channel {self.name!r}", self.too_few, ("raise", "skip"))


@final
@dataclass(frozen=True)
class Open(Channel):
    """Messages from client to client (`Federation.exchange`), in the clear."""

    kind: ClassVar[str] = "in the clear"


@final
@dataclass(frozen=True)
class Pairwise(Channel):
    """A linear map of the sender's vector that the receiver learns by a two-party protocol (`Federation.affine`).

    Args:
        beside: Name of a summed channel. If it is given, this one is used only where that one hides single messages
            and a protocol was chosen for this one; otherwise always, by default in the clear.
    """

    beside: str | None = field(default=None, kw_only=True)

    kind: ClassVar[str] = "pairwise"
