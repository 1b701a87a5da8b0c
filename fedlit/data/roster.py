"""Clients of a run: which domains they are, whether the model has the same, and whether their data fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlit.checks import check
from fedlit.data.samples import DatasetLayoutError
from fedlit.data.source import DomainSource
from fedlit.federation.errors import RosterError
from fedlit.federation.names import alike, difference, shown


def choose_clients(source: DomainSource, names: Sequence[str] | None, target: str | None) -> tuple[list[str], str]:
    """Return the names of the clients, in order, and the target, from what the user named; the last one by default.

    Raises:
        RosterError: If one is no domain, or too much like another.
    """
    known = source.domain_names()
    clients = known if names is None else list(names)
    _check_alike(clients if target is None else [*clients, target], known)
    unknown = [name for name in clients if name not in known]
    if unknown and not (source.elsewhere or (source.spread and len(unknown) < len(clients))):
        raise RosterError(f"clients {unknown} are not among the domains of {type(source).__name__}: {known}")
    if target is None:
        if not clients:
            raise RosterError(f"clients is empty: name at least 2 of the domains {known}")
        return clients, clients[-1]
    if target not in (clients if source.spread else known):
        raise RosterError(f"target {target!r} is not among the domains of {type(source).__name__}: {known}")
    return clients, target


def check_same_clients(federation: Any, names: Sequence[str], target: str) -> None:
    """Refuse a model with other clients, or another target, than the data.

    Raises:
        RosterError: If they differ.
    """
    members = [client.name for client in getattr(federation, "clients", ())] or [*names]
    adapted = getattr(getattr(federation, "target", None), "name", target)
    for argument, model, data in (("clients", sorted(members), sorted(names)), ("target", adapted, target)):
        if model != data:
            raise RosterError(
                f"the model's {argument} {model!r} and the data module's {data!r} must be the same: give the model "
                f"{argument}=data.{argument}"
            )


def agreed(key: str, facts: Mapping[str, Mapping[str, Any]], way_out: str) -> Any:
    """Return what all clients announced alike under one key; else raise an error with the first two that differ."""
    (first, expected), *others = facts.items()
    for name, each in others:
        if each[key] != expected[key]:
            raise DatasetLayoutError(
                f"{key} of the clients must be the same, but {first!r} has {expected[key]} and {name!r} has "
                f"{each[key]}: {way_out}"
            )
    return expected[key]


def check_common(facts: Mapping[str, Mapping[str, Any]], unshared_classes: bool) -> None:
    """Refuse clients with other classes or shapes than others, and classes of one client only unless they may be.

    Raises:
        DatasetLayoutError: If clients do not fit together.
    """
    classes = agreed("classes", facts, "name all classes, in one order, in the configuration of each client")
    shapes = {name: shape for name, each in facts.items() for shape in each["shapes"]}
    if len(set(shapes.values())) > 1:
        raise DatasetLayoutError(
            f"samples of all clients must have one shape, got {shapes}: extract the same features at each client, "
            "or leave the odd one out of clients"
        )
    if unshared_classes or any(each["has"] is None for each in facts.values()):
        return
    for label, class_name in enumerate(classes):
        holders = [name for name, each in facts.items() if each["has"][label]]
        if len(holders) == 1:
            raise DatasetLayoutError(
                f"class {class_name!r} occurs at client {holders[0]!r} only, and at none of the others: leave the "
                "class out of the data, or choose clients that share it"
            )


def _check_alike(wanted: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a client whose name differs from a domain's in capitals, blanks or normal form alone."""
    for group in alike([*wanted, *known]):
        if set(group) & set(wanted):
            here = [name for name in group if name in known]
            raise RosterError(
                f"clients {shown(group)} differ in {difference(group)}, and the data here are of {shown(here)}: if "
                "they are one client, write its name alike everywhere, in data and configuration; if not, rename one"
            )


def check_classes(classes: list[str] | None) -> None:
    """Refuse ``classes`` that the user names if they are no list of texts, or fewer than two different ones."""
    at_least_two = classes is None or len(set(classes)) >= max(2, len(classes))
    check(at_least_two, "classes", "at least 2 names, each once", classes)
