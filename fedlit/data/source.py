"""What a data set states about itself; which of its domains are clients, and whether their data fit together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedlit.checks import check, refuse
from fedlit.data.raw_inputs import RawInputs
from fedlit.data.samples import Domain, Transform, check_data
from fedlit.federation.errors import RosterError
from fedlit.federation.labels import TaskName
from fedlit.federation.names import alike, difference, shown


class DomainSource(ABC):
    """Domains with one set of classes, loaded one at a time.

    Attributes:
        unshared_classes: Whether a class may occur at one client only: an error unless the data set makes such shifts.
        spread: Whether clients' data may lie on different machines, where others' clients are known by name alone.
        elsewhere: Whether this process has no client's data, as that of a server apart.
        task: ``"classification"`` or ``"regression"``.
    """

    unshared_classes = False
    spread = False
    elsewhere: bool = False
    task: TaskName = "classification"

    @abstractmethod
    def domain_names(self) -> list[str]:
        """Return names of all domains, in the order in which they are the clients by default."""

    def is_here(self, domain: str) -> bool:
        """Return whether this process can read the data of a domain; those that others host need not be there."""
        return domain in self.domain_names()

    @abstractmethod
    def class_names(self) -> list[str]:
        """Return names of the classes, in the order of the labels; in regression, of the numbers to predict."""

    @abstractmethod
    def load(self, domain: str) -> Domain:
        """Return all samples of one domain, with their true labels."""

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        """Normalise a client's samples, with statistics of the samples at ``train`` (positions) only."""
        return x

    def transform(self, training: bool) -> Transform | None:
        """Return what is done to each batch of samples, or ``None``; `DomainDataset` says how it may draw numbers."""
        return None

    def raw_inputs(self) -> RawInputs | None:
        """Return the target's samples as their owner has them, and the network that prepares them, for an export.

        ``None`` where models take samples as `load` gives them. A data module that overrides `finish`, or whose
        `transform` changes numbers in evaluation, overrides this too.
        """
        return None

    def ids(self, client: str, stage: str) -> list[str] | None:
        """Return names of a client's samples in a stage ("train", "val", "test" or "predict"), ``None`` without any."""
        return None


def choose_clients(source: DomainSource, names: Sequence[str] | None, target: str | None) -> tuple[list[str], str]:
    """Return the clients, in order, and the target, by default the last; refuse what is no domain, or like another."""
    known = source.domain_names()
    clients = known if names is None else list(names)
    _check_alike(clients if target is None else [*clients, target], known)
    unknown = [name for name in clients if name not in known]
    some_elsewhere = source.elsewhere or (source.spread and len(unknown) < len(clients))
    rule = f"at least 2 domains of {type(source).__name__}, {known}"
    check(bool(clients) and (not unknown or some_elsewhere), "clients", rule, clients and unknown, error=RosterError)
    if target is None:
        return clients, clients[-1]
    if target not in (clients if source.spread else known):
        raise RosterError(f"target {target!r} is not among the domains of {type(source).__name__}: {known}")
    return clients, target


def check_same_clients(federation: Any, names: Sequence[str], target: str) -> None:
    """Refuse a model with other clients, or another target, than the data, by a `RosterError`."""
    members = [client.name for client in getattr(federation, "clients", ())] or [*names]
    adapted = getattr(getattr(federation, "target", None), "name", target)
    for argument, model, data in (("clients", sorted(members), sorted(names)), ("target", adapted, target)):
        rule, way_out = f"those of the data module, {data!r}", f"give the model {argument}=data.{argument}"
        check(model == data, f"{argument} (of the model)", rule, model, way_out, RosterError)


def agreed(key: str, facts: Mapping[str, Mapping[str, Any]], way_out: str) -> Any:
    """Return what all clients announced alike under one key; else raise an error with the first two that differ."""
    (first, expected), *others = facts.items()
    for name, each in others:
        shown = f"{expected[key]} of {first!r} and {each[key]} of {name!r}"
        check_data(each[key] == expected[key], key, "the same at all clients", shown, way_out)
    return expected[key]


def check_common(facts: Mapping[str, Mapping[str, Any]], unshared_classes: bool) -> None:
    """Refuse clients with other classes or shapes than others, and classes of one client only unless they may be."""
    classes = agreed("classes", facts, "name all classes, in one order, in the configuration of each client")
    shapes = {name: shape for name, each in facts.items() for shape in each["shapes"]}
    way_out = "extract the same features at each client, or leave the odd one out of clients"
    check_data(len(set(shapes.values())) < 2, "shapes of samples", "the same at all clients", shapes, way_out)
    if unshared_classes or any(each["has"] is None for each in facts.values()):
        return
    for label, class_name in enumerate(classes):
        holders = [name for name, each in facts.items() if each["has"][label]]
        way_out = "leave the class out of the data, or choose clients that share it"
        shown = f"{class_name!r} of {holders} alone"
        check_data(len(holders) != 1, "classes", "those of several clients", shown, way_out)


def _check_alike(wanted: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a client whose name differs from a domain's in capitals, blanks or normal form alone."""
    for group in alike([*wanted, *known]):
        if set(group) & set(wanted):
            here = shown(name for name in group if name in known)
            got = f"{shown(group)}, which differ in {difference(group)}, with data of {here} here"
            way_out = "write one client's name alike everywhere, in data and configuration, or rename one of two"
            refuse("clients", "different names", group, way_out, RosterError, got)


def check_classes(classes: list[str] | None) -> None:
    """Refuse ``classes`` that the user names if they are no list of texts, or fewer than two different ones."""
    at_least_two = classes is None or len(set(classes)) >= max(2, len(classes))
    check(at_least_two, "classes", "at least 2 names, each once", classes)
