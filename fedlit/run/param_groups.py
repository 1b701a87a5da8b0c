"""Settings of an optimiser for a part of the networks or a client: ``{"part": "discriminator", "lr": 0.1}``.

Groups of one client are divided by the entries that match their parameters; later entries override earlier ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from fedlit.run.local import initial_networks

if TYPE_CHECKING:
    from fedlit.run.run import Run

Entries: TypeAlias = list[dict[str, Any]]

_WHICH = ("client", "part")
"""Keys of an entry that state where it applies; all others are settings."""


def check_param_groups(
    entries: Entries | None, clients: Collection[str], own_rates: Mapping[str, str], method: str
) -> None:
    """Raise a `ValueError` unless each entry states where it applies, and settings that an optimiser uses.

    ``own_rates`` are parts that the method steps without the optimiser, each with the argument that is its rate.
    """
    for place, entry in enumerate(entries or ()):
        if not isinstance(entry, dict) or not entry.keys() & {*_WHICH} or not entry.keys() - {*_WHICH}:
            raise ValueError(
                f"param_groups[{place}] must name a client, a part or both, and settings for it, such as "
                f"{{'part': 'classifier', 'lr': 0.1}}, got {entry!r}: what is for all parameters is the optimizer's"
            )
        if "client" in entry and entry["client"] not in clients:
            raise ValueError(
                f"param_groups[{place}] names client {entry['client']!r}, which is not one of {list(clients)}"
            )
        if "part" in entry and not (isinstance(entry["part"], str) and entry["part"]):
            raise ValueError(f"param_groups[{place}] must name its part in text, got {entry['part']!r}")
        for part, rate in own_rates.items():
            if _is_in(entry.get("part", ""), part):
                raise ValueError(
                    f"param_groups[{place}] would do nothing, as {method} steps part {part!r} without the optimizer: "
                    f"give {rate}"
                )


def check_ratio(entries: Entries | None, name: str, ratio: float, **where: str) -> None:
    """Raise a `ValueError` if an entry sets a rate that the argument ``name``, a ratio of rates, would scale.

    ``where`` is what it scales: a ``client`` or a ``part``; 1 scales nothing.
    """
    for place, entry in enumerate(entries or ()):
        scaled = all(_is_in(entry.get(key, ""), value) for key, value in where.items())
        if ratio != 1 and "lr" in entry and scaled:
            raise ValueError(
                f"{name}={ratio} would scale the lr that param_groups[{place}] gives: leave one of both out"
            )


def make(run: Run, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Return the method's optimiser over clients' parameter groups, divided by its entries.

    Raises:
        ValueError: If the optimiser lacks a setting, or a setting is out of range.
    """
    optimizer = run.optimizer(divide(run, groups))
    for place, entry in enumerate(run.local.param_groups or ()):
        for name, value in _settings(entry).items():
            _check_setting(f"param_groups[{place}]", name, value, optimizer)
    return optimizer


def divide(run: Run, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divide parameter groups by the sets of entries that match their parameters.

    Groups made of one carry its number among its client's under ``"model"``, by which they are clipped.
    """
    entries = run.local.param_groups
    if not entries:
        return list(groups)
    names: dict[str, dict[int, list[str]]] = {}
    divided: list[dict[str, Any]] = []
    number: Counter[str] = Counter()
    for group in groups:
        client = group["client"]
        if client not in names:
            names[client] = {}
            for name, param in run.replicas[client].named_parameters(remove_duplicate=False):
                names[client].setdefault(id(param), []).append(name)  # a tied one has several
        pieces: dict[tuple[int, ...], list[Tensor]] = {}
        for param in group["params"]:
            own = names[client].get(id(param), [""])
            which = tuple(
                place for place, entry in enumerate(entries) if any(_meets(entry, client, name) for name in own)
            )
            pieces.setdefault(which, []).append(param)
        for which, params in pieces.items() or [((), [])]:
            settings = {name: value for place in which for name, value in _settings(entries[place]).items()}
            divided.append({**group, **settings, "params": params, "model": number[client]})
        number[client] += 1
    return divided


def check_parts(run: Run, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise a `ValueError` if an entry is for a part that clients lack, or that none of the groups trains.

    Without groups of local clients, nothing is checked.
    """
    trained = {id(param) for group in groups for param in group["params"]}
    if not trained:
        return
    local = {client.name: run.replicas[client] for client in run.federation.local_clients}
    for place, entry in enumerate(run.local.param_groups or ()):
        part, of = entry.get("part"), entry.get("client")
        if part is None:
            continue
        here = [replica for name, replica in local.items() if of in (None, name)]
        every = [each for replica in here for each in replica.named_parameters(remove_duplicate=False)]
        named = [param for name, param in every if _is_in(name, part)]
        if any(id(param) in trained for param in named):
            continue
        if named:
            raise ValueError(
                f"param_groups[{place}] is for part {part!r}, which the optimizer does not train: it is frozen, or "
                f"{run.name} does not train it by gradients"
            )
        elsewhere = initial_networks(run, of)  # a client of another process may have it
        if not any(_is_in(name, part) for network in elsewhere for name, _ in network.named_parameters()):
            parts = dict.fromkeys(name.split(".")[0] for net in elsewhere for name, _ in net.named_parameters())
            whose = "nobody has" if of is None else f"{of!r} does not have"
            raise ValueError(
                f"param_groups[{place}] is for part {part!r}, which {whose}: give one of {list(parts)}, or a module "
                "within one, as extractor.NAME"
            )


def _settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an entry; configurations have lists in place of tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items() if name not in _WHICH
    }


def _check_setting(place: str, name: str, value: Any, optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if name not in optimizer.defaults:
        raise ValueError(f"{place} sets {name!r}, which {kind} does not have: it has {sorted(optimizer.defaults)}")
    default = optimizer.defaults[name]
    if isinstance(default, int | float) and not isinstance(default, bool):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise ValueError(f"{place} sets {name} of {kind}, which must be a number, at least 0, got {value!r}")
    elif isinstance(default, tuple) and not (isinstance(value, tuple) and len(value) == len(default)):
        raise ValueError(f"{place} sets {name} of {kind}, which must be {len(default)} numbers, got {value!r}")


def _meets(entry: Mapping[str, Any], client: str, name: str) -> bool:
    """Return whether an entry is for a client's parameter of this name."""
    return entry.get("client", client) == client and ("part" not in entry or _is_in(name, entry["part"]))


def _is_in(name: str, part: str) -> bool:
    """Return whether a parameter or module of this name is a part, or within it."""
    return name == part or name.startswith(f"{part}.")
