"""Plug-ins: classes of other installed packages, which the command knows by their short names as it knows fedlit's own.

A package offers them as entry points in the group ``fedlit.KIND``, each called like its class::

    [project.entry-points."fedlit.methods"]
    FedShrink = "my_package.methods:FedShrink"
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

import fedlit.callbacks
import fedlit.data
import fedlit.methods
import fedlit.models
import fedlit.privacy
from fedlit.data import DomainDataModule
from fedlit.module import FederatedModule
from fedlit.privacy import SecureAggregation, TwoPartyAffine


@dataclass(frozen=True)
class Kind:
    """A kind of class that a configuration may name."""

    home: ModuleType  # package of fedlit's own
    bases: tuple[type, ...]  # of which a class must derive from one

    def own(self) -> dict[str, type]:
        """Classes of this kind that fedlit has itself and that can be built, by name."""
        public = {name: getattr(self.home, name) for name in self.home.__all__}
        return {
            name: thing
            for name, thing in public.items()
            if isinstance(thing, type) and issubclass(thing, self.bases) and not inspect.isabstract(thing)
        }


KINDS = {
    "methods": Kind(fedlit.methods, (FederatedModule,)),
    "data": Kind(fedlit.data, (DomainDataModule,)),
    "privacy": Kind(fedlit.privacy, (SecureAggregation, TwoPartyAffine)),
    "models": Kind(fedlit.models, (nn.Module,)),
    "validators": Kind(fedlit.callbacks, (Callback,)),
}
"""By the last word of their entry-point group."""


@dataclass(frozen=True)
class PlugIn:
    """A class of another package."""

    kind: str  # one of `KINDS`
    thing: type
    distribution: str  # installed package that offers it


@cache
def load_plugins() -> tuple[PlugIn, ...]:
    """Import what installed packages offer, once; what cannot be used is reported by name and left out.

    That is all that short names need: jsonargparse looks for them among the subclasses that were imported.
    """
    plug_ins: list[PlugIn] = []
    for kind in KINDS:
        owners = dict.fromkeys(KINDS[kind].own(), "fedlit")
        for entry in sorted(entry_points(group=f"fedlit.{kind}"), key=lambda entry: (_distribution(entry), entry.name)):
            try:
                thing = _load(entry, KINDS[kind], owners)
            except Exception as error:  # whatever its import raises is no concern of runs without it
                reason = f"{type(error).__name__}: {error}"
                _report(f"plug-in {entry.name!r} of {_distribution(entry)} (fedlit.{kind}) is left out: {reason}")
            else:
                owners[entry.name] = _distribution(entry)
                plug_ins.append(PlugIn(kind, thing, _distribution(entry)))
    return tuple(plug_ins)


def _load(entry: EntryPoint, kind: Kind, owners: dict[str, str]) -> type:
    """The class of an entry point; imported only if its name is still free, as two would make the name ambiguous."""
    if (entry.attr or "").split(".")[-1] != entry.name:
        raise ValueError(f"short names are names of classes, so {entry.value!r} must be called like its class")
    if entry.name in owners:
        raise ValueError(
            f"{owners[entry.name]} has a class of that name: rename it, or write its class path, "
            f"{entry.module}.{entry.attr}, in configurations"
        )
    thing = entry.load()
    if not (isinstance(thing, type) and issubclass(thing, kind.bases)):
        raise TypeError(f"{entry.value!r} is no subclass of {' or '.join(base.__name__ for base in kind.bases)}")
    return thing


def _distribution(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else entry.dist.name


@rank_zero_only
def _report(text: str) -> None:
    print(f"fedlit: {text}", file=sys.stderr, flush=True)
