"""A few numbers of each client, sent to everybody for logging and model selection."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from fedlit.federation.channel import Open
from fedlit.federation.choices import Resolved
from fedlit.federation.ledger import SERVER
from fedlit.federation.messenger import KINDS, Messenger
from fedlit.federation.release import Releases
from fedlit.federation.wire import wire_size
from fedlit.privacy import DecodeError

METRICS = Open(
    "metrics",
    "losses, gradient norms and scores",
    how_often="every round and every evaluation",
    unblurred="the argument reports chooses how it is sent",
    watched=True,
)
"""Numbers that clients of every run send for logging and model selection."""

ORACLE = Open(
    "oracle",
    "scores on the target's hidden labels",
    how_often="every evaluation",
    unblurred="no federation could know it",
    watched=True,
)
"""Numbers of evaluations that read hidden labels of the target."""

_NUMBER = torch.zeros((), dtype=torch.float64)


def share_numbers(
    messenger: Messenger,
    releases: Releases,
    resolved: Resolved,
    values: Mapping[str, Mapping[str, float]],
    names: Sequence[str],
    round_idx: int,
    present: Collection[str],
) -> dict[str, dict[str, float]]:
    """Send numbers of local clients to the server, and the table ``{client: {name: number}}`` of all to everyone.

    ``names`` are those there may be, the same on every process; clients and names may be left out. Numbers go through
    the mechanism of the channel, if it has one. Clients that report or are ``present`` are sent the table.
    """
    clients, channel = list(messenger.rank_of), resolved.name
    hosts = torch.tensor(list(messenger.rank_of.values()))
    if resolved.mechanism is not None:
        values = {client: releases.numbers(resolved, client, mine) for client, mine in values.items()}
    # Flags mark the numbers that are reported: NaN is a value that a metric may have.
    table = torch.zeros(2, len(clients), len(names), dtype=torch.float64)
    rows = {client: row for row, client in enumerate(clients)}
    for client, mine in values.items():
        for column, name in enumerate(names):
            if name in mine:
                table[0, rows[client], column], table[1, rows[client], column] = mine[name], 1.0
    reporting = table[1].any(dim=1).nonzero()[:, 0].tolist()
    # The kind has the number of names too: tables of unequal size cannot be gathered. 8 stands for any size above 0:
    # the numbers travel in the table, and are booked below.
    kind = KINDS.index("report") + len(names)
    announced = messenger.announce(channel, {clients[row]: 8 for row in reporting}, kind)
    releases.account(resolved, dict.fromkeys(announced, 1.0))
    tables = messenger.all_gather(table, channel)
    for rank, theirs in enumerate(tables):
        if bool(theirs[:, hosts != rank].any()):
            raise DecodeError(f"rank {rank} reports numbers of clients that it does not host over channel {channel!r}")
    table = torch.stack(tables).sum(dim=0)
    reported = {
        clients[row]: {
            name: number for name, number, known in zip(names, *table[:, row].tolist(), strict=True) if known
        }
        for row in table[1].any(dim=1).nonzero()[:, 0].tolist()
    }
    sizes = {client: wire_size(dict.fromkeys(mine, _NUMBER)) for client, mine in reported.items()}
    for client, own in sizes.items():
        messenger.ledger.record(round_idx, channel, client, SERVER, own)
    receivers, size = reported.keys() | {*present}, sum(sizes.values())
    for client in clients if reported else ():
        if client in receivers:
            messenger.ledger.record(round_idx, channel, SERVER, client, size)
    return reported
