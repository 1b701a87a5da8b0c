"""Settings of an optimiser for a part of the networks or a client: ``{"part": "discriminator", "lr": 0.1}``.

Groups of one client are divided by the entries that match their parameters; later entries override earlier ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from fedlit.checks import check, check_one_of, refuse
from fedlit.run.local import initial_networks

if TYPE_CHECKING:
    from fedlit.run.run import Run

Entries: TypeAlias = list[dict[str, Any]]

MANY = 100
"""Groups of an optimiser beyond which they are made together, and a step is of those that are present alone."""

_WHICH = ("client", "part")
"""Keys of an entry that state where it applies; all others are settings."""


def check_param_groups(
    entries: Entries | None, clients: Collection[str], own_rates: Mapping[str, str], method: str
) -> None:
    """Raise a `ValueError` unless each entry states where it applies, and settings that an optimiser uses.

    ``own_rates`` are parts that the method steps without the optimiser, each with the argument that is its rate.
    """
    for index, entry in enumerate(entries or ()):
        name = f"param_groups[{index}]"
        is_entry = isinstance(entry, dict) and entry.keys() & {*_WHICH} and entry.keys() - {*_WHICH}
        rule = "a client, a part or both, and settings for it, such as {'part': 'classifier', 'lr': 0.1}"
        check(bool(is_entry), name, rule, entry, "settings of all parameters are the optimizer's")
        if "client" in entry:
            check_one_of(f"{name}['client']", entry["client"], clients)
        part = entry.get("part", "all")
        check(isinstance(part, str) and part != "", f"{name}['part']", "the name of a part", part)
        for stepped, rate in own_rates.items():
            rule = f"other than {stepped!r}, which {method} steps without the optimizer"
            check(not _is_in(part, stepped), f"{name}['part']", rule, part, f"give {rate}")


def check_ratio(entries: Entries | None, name: str, ratio: float, **where: str) -> None:
    """Raise a `ValueError` if an entry sets a rate that the argument ``name``, a ratio of rates, would scale.

    ``where`` is what it scales: a ``client`` or a ``part``; 1 scales nothing.
    """
    for index, entry in enumerate(entries or ()):
        scaled = all(_is_in(entry.get(key, ""), value) for key, value in where.items())
        rule = f"1 beside the lr of param_groups[{index}], which it would scale"
        check(ratio == 1 or "lr" not in entry or not scaled, name, rule, ratio, "leave one of both out")


def make(run: Run, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Return the method's optimiser over clients' parameter groups, divided by its entries.

    Raises:
        ValueError: If the optimiser lacks a setting, or a setting is out of range.
    """
    optimizer = over(run.optimizer, divide(run, groups))
    for index, entry in enumerate(run.local.param_groups or ()):
        for name, value in _settings(entry).items():
            _check_setting(f"param_groups[{index}]", name, value, optimizer)
    return optimizer


def over(maker: Callable[..., Optimizer], groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Return an optimiser over parameter groups; many plain ones of one of torch's are made as one.

    torch compares each group that is added with all before it. Other makers may look into the groups.
    """
    kind = maker.func if isinstance(maker, partial) else maker
    is_torch_s = str(getattr(kind, "__module__", "")).startswith(("torch.optim.", "fedlit.run.optimisation"))
    own = any(group.keys() - {"params", "client", "model"} for group in groups)
    if len(groups) <= MANY or own or not is_torch_s:
        return maker(list(groups))
    optimizer = maker([{"params": [param for group in groups for param in group["params"]]}])
    (whole,) = optimizer.param_groups
    optimizer.param_groups = [{**whole, **group} for group in groups]
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
            its_names = names[client].get(id(param), [""])
            which = tuple(
                index for index, entry in enumerate(entries) if any(_meets(entry, client, name) for name in its_names)
            )
            pieces.setdefault(which, []).append(param)
        for which, params in pieces.items() or [((), [])]:
            settings = {name: value for index in which for name, value in _settings(entries[index]).items()}
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
    for index, entry in enumerate(run.local.param_groups or ()):
        part, of = entry.get("part"), entry.get("client")
        if part is None:
            continue
        here = [replica for name, replica in local.items() if of in (None, name)]
        every = [each for replica in here for each in replica.named_parameters(remove_duplicate=False)]
        named = [param for name, param in every if _is_in(name, part)]
        if any(id(param) in trained for param in named):
            continue
        argument = f"param_groups[{index}]['part']"
        if named:
            why = f"it is frozen, or {run.name} does not train it by gradients"
            refuse(argument, "one that the optimizer trains", part, why)
        elsewhere = initial_networks(run, of)  # a client of another process may have it
        if not any(_is_in(name, part) for network in elsewhere for name, _ in network.named_parameters()):
            parts = dict.fromkeys(name.split(".")[0] for net in elsewhere for name, _ in net.named_parameters())
            whose = "a part of the networks" if of is None else f"a part of the networks of {of!r}"
            refuse(argument, whose, part, f"give one of {list(parts)}, or a module within one, as extractor.NAME")


def _settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an entry; configurations have lists in place of tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items() if name not in _WHICH
    }


def _check_setting(entry: str, name: str, value: Any, optimizer: Optimizer) -> None:
    optimizer_class = type(optimizer).__name__
    settings = sorted(optimizer.defaults)
    check(name in settings, entry, f"settings of {optimizer_class}", name, f"it has {settings}")
    default = optimizer.defaults[name]
    if isinstance(default, int | float) and not isinstance(default, bool):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        check(is_number, f"{entry}[{name!r}]", "a number, at least 0", value)
    elif isinstance(default, tuple):
        is_tuple = isinstance(value, tuple) and len(value) == len(default)
        check(is_tuple, f"{entry}[{name!r}]", f"{len(default)} numbers", value)


def _meets(entry: Mapping[str, Any], client: str, name: str) -> bool:
    """Return whether an entry is for a client's parameter of this name."""
    return entry.get("client", client) == client and ("part" not in entry or _is_in(name, entry["part"]))


def _is_in(name: str, part: str) -> bool:
    """Return whether a parameter or module of this name is a part, or within it."""
    return name == part or name.startswith(f"{part}.")
