"""Classes that one source alone has: their part of a sum by class would be that source's own, whatever hides the rest.

So sources first sum up who has which class, and leave classes of one source out of what they then send. Whoever reads
the first sum learns how many sources have a class, not which, nor how many samples; a source that alone has one learns
nothing else of that class. Of a class that two sources have, each of the two can subtract its own part from the sum.

Where sources have dropped out since, or are reported to have, a class could be left to one: clients refuse the second
sum unless each class that is sent was at two sources more than are missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from fedlit.checks import check_one_of
from fedlit.federation.channel import Summed
from fedlit.federation.errors import RosterError
from fedlit.federation.federation import Federation
from fedlit.privacy import PrivacyWarning

CLASS_SOURCES = "class_sources"
"""Usual name of the channel."""

LoneClasses: TypeAlias = Literal["leave_out", "send"]
"""What a source does with classes that it alone has, where a backend hides what it sends."""


def check_lone_classes(choice: object) -> None:
    """Refuse what is none of `LoneClasses`."""
    check_one_of("lone_classes", choice, get_args(LoneClasses))


def class_sources(of: Summed, name: str = CLASS_SOURCES) -> Summed:
    """Declare the channel on which the sources of ``of`` sum up who has which class; see `find_lone_classes`."""
    contents = "how many sources have samples of each class"
    return Summed(name, contents, "sources", how_often=of.how_often, watched=of.watched, fixed=of.fixed, beside=of.name)


def find_lone_classes(
    federation: Federation, over: str, counts: Mapping[str, Tensor], follows: str, absent_too: bool = False
) -> dict[str, Tensor]:
    """Return which classes one source alone has, shape (C,), by local client, before sums by class are sent.

    All processes call it, and sources leave these classes out. It warns each source that has one. Nothing is sent, and
    none are returned, where the sums are hidden from nobody or blurred, or ``over`` is not declared.

    Args:
        federation: Of the clients.
        over: A channel of `class_sources`.
        counts: Samples of each class by local source, shape (C,).
        follows: What becomes of the classes that are left out, for the warning.
        absent_too: Whether sources that are not present send all the same, as in `Federation.mean`.
    """
    if over not in federation.channels:
        return {}
    channel = federation.channels[over]
    if not channel.hides or channel.mechanism is not None:
        return {}
    assert isinstance(channel.declared, Summed)
    of = str(channel.declared.beside)
    among = None if absent_too else [client for client in federation.present(of) if not client.is_target]
    marks = {name: {"there": (own > 0).float()} for name, own in counts.items()}
    totals = federation.sum(over, marks, among=among, absent_too=absent_too)
    numbers = {name: total["there"].round().long().cpu() for name, total in totals.items()}
    for each in numbers.values():
        if bool((each == 1).any()) and not bool((each > 1).any()):
            way_out = "give lone_classes='send' to let each source's sums of its own classes be seen"
            error: Any = RosterError(f"no class is at two sources, so that channel {of!r} may send none: {way_out}")
            error.public = str(error)  # no sample is in it, and all have received the sum
            federation.fail(error)
        elif bool((each > 1).any()):
            federation.bind(of, over, int(each[each > 1].min()) - 2)
    found = {name: each == 1 for name, each in numbers.items()}
    for name, own in counts.items():
        if name not in numbers:
            continue
        found[name] |= (own.cpu() > 0) & (numbers[name] < 2)  # also where the sum is without this source
        lone = torch.nonzero((own.cpu() > 0) & found[name]).flatten().tolist()
        if lone:
            warnings.warn(
                f"of the classes {lone} client {name!r} alone has samples: it leaves them out of what it sends over "
                f"channel {of!r}, where their part of the sum would be its own, and {follows}. Give "
                "lone_classes='send' to have them sent",
                PrivacyWarning,
                stacklevel=3,
            )
    return found
