"""Messages between clients and the server, announced and carried.

Short ones travel with their announcement where the transport can do that: across organisations this saves almost every
second call of a secure sum. They have left, then, when another process reports a failure; a process that has failed
itself sends none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedlit.federation.ledger import SERVER
from fedlit.federation.messenger import Message, Messenger
from fedlit.federation.transport import NO_BYTES, SHORT
from fedlit.federation.wire import decode, encode, wire_size
from fedlit.privacy import DecodeError


def carry(
    messenger: Messenger, channel: str, messages: Mapping[str, Message], kind: int, up: bool
) -> tuple[dict[str, int], dict[str, Message]]:
    """Carry a message of each local client to the server (``up``), or of the server to each client.

    Returns the sizes of all, and the messages that are for this process.
    """
    sizes, apart, arrived = _announce(messenger, channel, messages, kind, up)
    if apart:
        arrived |= (messenger.gather if up else messenger.scatter)(channel, messages, apart)
    if up and messenger.failed:
        return sizes, {}
    return sizes, {name: arrived[name] for name in sizes if name in arrived}


def broadcast(
    messenger: Messenger, channel: str, message: Message, kind: int, receivers: Sequence[str]
) -> tuple[int, Message]:
    """Carry one message of the server to the processes of these clients; return its size, 0 if there is none, and it.

    On processes without a receiver it is empty.
    """
    own = {SERVER: wire_size(message)} if message else {}
    ranks = {messenger.rank_of[name] for name in receivers} - {0}
    if not messenger.transport.encloses:
        size = messenger.announce(channel, own, kind).get(SERVER, 0)
        return size, messenger.broadcast(channel, message, size, receivers) if size else {}

    def short(size: int) -> bool:
        return size * len(ranks) <= SHORT

    enclosed = dict.fromkeys(ranks, encode(message)) if message and short(own[SERVER]) and not messenger.failed else {}
    sizes, arrived = messenger.announce_with(channel, own, kind, enclosed)
    size = sizes.get(SERVER, 0)
    if size and not short(size):
        return size, messenger.broadcast(channel, message, size, receivers)
    if messenger.transport.rank in ranks:
        (message,) = _parts(messenger, channel, arrived, 0, [size]) or [{}]
    return size, message


def _announce(
    messenger: Messenger, channel: str, messages: Mapping[str, Message], kind: int, up: bool
) -> tuple[dict[str, int], dict[str, int], dict[str, Message]]:
    """Return the sizes of all, of them those that are still to be carried, and messages that are here already."""
    transport, local = messenger.transport, {name: wire_size(message) for name, message in messages.items()}
    if not transport.encloses:
        sizes = messenger.announce(channel, local, kind)
        return sizes, sizes, {}
    ends = {name: (rank, 0) if up else (0, rank) for name, rank in messenger.rank_of.items()}
    outgoing: dict[int, list[Tensor]] = {}
    if sum(local.values()) <= SHORT and not messenger.failed:
        for name, message in messages.items():
            outgoing.setdefault(ends[name][1], []).append(encode(message))
    outgoing.pop(transport.rank, None)
    enclosed = {rank: torch.cat(parts) for rank, parts in outgoing.items()}
    sizes, blobs = messenger.announce_with(channel, local, kind, enclosed)
    total: Counter[int] = Counter()  # by sending rank, which all processes know now
    for name, size in sizes.items():
        total[ends[name][0]] += size
    inside = {name for name in sizes if total[ends[name][0]] <= SHORT and ends[name][0] != ends[name][1]}
    due: dict[int, list[str]] = {here: [] for here, there in ends.values() if there == transport.rank != here}
    for name in sizes:
        if name in inside and ends[name][1] == transport.rank:
            due[ends[name][0]].append(name)
    arrived: dict[str, Message] = {}
    for sender, names in due.items():
        arrived |= zip(names, _parts(messenger, channel, blobs, sender, [sizes[name] for name in names]), strict=False)
    return sizes, {name: size for name, size in sizes.items() if name not in inside}, arrived


def _parts(
    messenger: Messenger, channel: str, blobs: Mapping[int, Tensor], sender: int, sizes: Sequence[int]
) -> list[Message]:
    """Messages of these sizes that follow one another in a sender's bytes; none, and a failure, if they are others."""
    blob = blobs.get(sender, NO_BYTES)
    try:
        if len(blob) != sum(sizes):
            raise DecodeError(f"{len(blob)} bytes came, where {sum(sizes)} are announced")
        return [decode(part) for part in torch.split(blob, [*sizes])]
    except DecodeError as error:
        messenger.fail(DecodeError(f"channel {channel!r}: {error}"))
        return []
