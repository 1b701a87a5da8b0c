"""Client: one data holder, and the rules that make a list of them a roster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fedlit.checks import check, check_at_least, check_one_of, refuse
from fedlit.federation.errors import PeerFailedError, RosterError, about
from fedlit.federation.names import alike, check_texts, difference, folded, not_text, shown
from fedlit.federation.nested import Shape
from fedlit.privacy import DecodeError

Role = Literal["source", "target"]

_NAME = re.compile(r"[^\s./:]([^./:\n]*[^\s./:])?")
_RESERVED = ("server",)

MOST_SAMPLES = 2**40
"""Of one client: no data set has more, and a client that reports more wants to own every mean."""


@dataclass(frozen=True)
class Client:
    """One data holder.

    Args:
        name: Unique in the federation; the key of this client's batches, metrics and weights. Without dots, slashes,
            colons, outer blanks and invisible characters.
        role: ``"source"`` (labelled) or ``"target"`` (the domain adapted to).
        labelled: Whether its training data carry labels, some or all. ``None`` means: sources do, the target does not.
        num_samples: Number of training samples, the weight of this client in a mean weighted by samples; ``None`` is
            filled in from its data when training starts. Clients are compared without it.

    Raises:
        RosterError: If the name or role is unusable, ``num_samples`` is not from 1 to 2^40, or a source is unlabelled.
    """

    name: str
    role: Role = "source"
    labelled: bool | None = None
    num_samples: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        problem = not_text(self.name)
        if problem is not None:
            text = f"client name must be a non-empty string (text), {problem}, or rename the client"
            raise about("name", self.name, RosterError(text))
        usable = bool(_NAME.fullmatch(self.name)) and self.name.isprintable() and folded(self.name) not in _RESERVED
        rule = f"a non-empty text without '.', '/', ':', outer blanks and invisible signs, other than {_RESERVED}"
        name = shown([self.name])[1:-1]
        check(usable, "name of a client", rule, self.name, "rename the client", RosterError, name)
        check_one_of(f"role of client {self.name!r}", self.role, ("source", "target"), "", RosterError)
        if self.labelled is None:
            object.__setattr__(self, "labelled", self.role == "source")
        if self.role == "source" and not self.labelled:
            way_out = "only the target may be unlabelled"
            refuse(f"labelled of source {self.name!r}", "True", self.labelled, way_out, RosterError)
        if self.num_samples is not None:
            way_out = "leave the client out or give it data"
            check_at_least(f"num_samples of {self.name!r}", self.num_samples, 1, "sample", way_out, RosterError)
            few_enough = self.num_samples <= MOST_SAMPLES
            way_out = "find out what runs there, or leave it out"
            check(few_enough, f"num_samples of {self.name!r}", "at most 2^40", self.num_samples, way_out, RosterError)

    @property
    def is_target(self) -> bool:
        """Whether this client is the domain adapted to."""
        return self.role == "target"


class Facts(NamedTuple):
    """Sizes and shapes of a client's data, which it reports when it joins; never samples.

    Args:
        num_samples: Training samples it will use.
        input_shape: Shape of one input; of several tensors, see `fedlit.federation.nested.Shape`.
    """

    num_samples: int
    input_shape: Shape


def introductions(reported: Sequence[object], rank_of: Mapping[str, int]) -> dict[str, Facts]:
    """Return `Facts` by client from the reports of each rank; a `DecodeError` if they are no facts of its clients."""
    facts: dict[str, Facts] = {}
    for rank, share in enumerate(reported):
        for name, fact in share.items() if isinstance(share, dict) else [("", share)]:
            number, shape = fact if isinstance(fact, tuple) and len(fact) == 2 else (-1, ())
            sizes = (number, *_sizes(shape))
            if rank_of.get(name) != rank or not all(type(size) is int and size >= 0 for size in sizes):
                raise DecodeError(
                    f"rank {rank} introduces client {name!r} by {str(fact)[:100]}: a rank reports the number of "
                    "samples and the shape of one for each client that it hosts"
                )
            facts[name] = Facts(number, shape)
    return facts


def _sizes(shape: object) -> tuple[object, ...]:
    """All sizes in a shape that was received; -1 for what is no size."""
    if isinstance(shape, tuple) and any(isinstance(part, tuple) for part in shape):
        sizes: list[object] = []
        for part in shape:
            path, shape_of_one = part if isinstance(part, tuple) and len(part) == 2 else (None, None)
            sizes += shape_of_one if isinstance(path, str) and isinstance(shape_of_one, tuple) else (-1,)
        return tuple(sizes)
    return shape if isinstance(shape, tuple) else (-1,)


def reports_by_client(reported: Sequence[object], rank_of: Mapping[str, int], label: str) -> dict[str, Any]:
    """Merge the mappings that each rank reported about ``label`` for its clients, in roster order.

    Raises:
        PeerFailedError: If a rank reported that it could not.
        DecodeError: If a rank reports for clients that it does not host, or not for all that it hosts.
    """
    for rank, share in enumerate(reported):
        local = [name for name, host in rank_of.items() if host == rank]
        if share is None:
            raise PeerFailedError(
                f"the process of {local or 'the server'} (rank {rank}) could not report its {label}: the error raised "
                "there states why"
            )
        if not isinstance(share, dict) or sorted(share) != sorted(local):
            raise DecodeError(f"rank {rank} hosts {local}, and reports {label} of others: {str(share)[:100]}")
    return {name: reported[rank][name] for name, rank in rank_of.items()}  # type: ignore[index]


def make_roster(clients: Iterable[Client | str], target: str) -> tuple[Client, ...]:
    """Turn names or `Client` objects into a checked roster; those named get their role from ``target``.

    Raises:
        RosterError: If there are fewer than two clients, a name occurs twice or two differ in capitals, blanks or
            Unicode normal form alone, the target is not among them, or a client's role contradicts it.
    """
    clients = tuple(clients)
    check_texts("target", target, RosterError)
    roster = tuple(
        client if isinstance(client, Client) else Client(client, role="target" if client == target else "source")
        for client in clients
    )
    names = [client.name for client in roster]
    check(len(roster) >= 2, "clients", "at least 2 clients", len(roster), f"they are {names}", RosterError)
    duplicates = sorted(name for name, number in Counter(names).items() if number > 1)
    check(not duplicates, "clients", "unique", duplicates, f"they are {names}", RosterError)
    for group in alike(names):
        text = (
            f"client names {shown(group)} differ in {difference(group)}: if they are one client, write its name "
            "alike everywhere; if not, rename one"
        )
        raise about("clients", group, RosterError(text))
    check_one_of("target", target, names, "", RosterError)
    for client in clients:
        if isinstance(client, Client) and client.is_target != (client.name == target):
            text = (
                f"client {client.name!r} has role {client.role!r}, but the target is {target!r}: give "
                f"Client({target!r}, role='target', labelled=...), and the role 'source' to all others"
            )
            raise about("role", client.role, RosterError(text))
    return roster


def names_of(clients: Iterable[Client | str]) -> list[str]:
    """Names of ``clients``, which may already be names."""
    return [client.name if isinstance(client, Client) else client for client in clients]


def place(clients: Sequence[Client], world_size: int, placement: Sequence[Sequence[str]] | None = None) -> list[int]:
    """Rank that hosts each client, in roster order.

    ``placement`` has client names per rank; ``None`` deals out contiguous shares of near-equal size. The first may be
    empty: then process 0 is the server's alone.

    Raises:
        RosterError: If there are more processes than clients, or ``placement`` does not place each client once and
            give every rank but the first at least one.
    """
    names = [client.name for client in clients]
    apart = placement is not None and len(placement) > 1 and not placement[0]
    if world_size > len(clients) + apart:
        text = (
            f"{world_size} processes for {len(clients)} clients {names}: a process without a client has nothing to "
            f"train, use devices={len(clients)} or fewer"
        )
        raise about("devices", world_size, RosterError(text))
    if placement is None:
        return [index * world_size // len(clients) for index in range(len(clients))]
    placed = sorted(name for share in placement for name in share)
    valid = len(placement) == world_size and placed == sorted(names) and all(placement[apart:])
    rule = f"a list for each of {world_size} processes, with each of {names} once, where only the first may be empty"
    check(valid, "placement", rule, list(placement), "", RosterError)
    rank_of = {name: rank for rank, share in enumerate(placement) for name in share}
    return [rank_of[name] for name in names]
