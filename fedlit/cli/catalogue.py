"""What a configuration can name, read from the classes, their docstrings and the configurations; and plug-ins.

`fedlit.cli.known` keeps it in a file, as ``fedlit list`` need not import torch to print it, and the documentation has a
table of methods. After a change in classes::

    python -m fedlit.cli.catalogue

Plug-ins are classes of other packages with entry points in the group ``fedlit.KIND``, each called like its class::

    [project.entry-points."fedlit.methods"]
    FedShrink = "my_package.methods:FedShrink"
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from inspect import cleandoc, getmodule
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import yaml
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

import fedlit
import fedlit.callbacks
import fedlit.data
import fedlit.methods
import fedlit.models
import fedlit.privacy
from fedlit.callbacks import Validators
from fedlit.callbacks.validators import FROM_SOURCES, Validator
from fedlit.cli.known import FILE, Row
from fedlit.cli.parsed import arguments_of
from fedlit.data import DomainDataModule
from fedlit.federation import Channel, Client, Summed
from fedlit.models import Bottleneck, SmallCNN
from fedlit.module import FederatedModule
from fedlit.privacy import SecureAggregation, TwoPartyAffine
from fedlit.run.tasks import Classification

_NAMED = ("methods", "data", "models", "privacy", "callbacks", "federation")
"""Packages whose classes configurations name."""

_CITATION = re.compile(r"\(([^()]*\b\d{4}\b[^()]*)\)")
"""Brackets with a year, or with a number of arXiv."""

_SOURCE = re.compile(r" \([^()]*\b\d{4}\b[^()]*\)\.$")
"""The same at the end of a line, where it is not part of the sentence."""

_REFERENCE = re.compile(r"^References:\n +(.+?)[.:;](?:\s|\Z)", re.DOTALL | re.MULTILINE)

_EXPLAINED = re.compile(r"``([\w/]+)`` \(([^()]+)\)")


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


def rows(kind: str) -> list[Row]:
    """What fedlit has itself of a kind."""
    if kind == "validators":
        return _scores()
    own, home = KINDS[kind].own(), KINDS[kind].home.__name__
    if kind == "models":  # what can be an extractor; the others are what methods make of it
        own = {name: thing for name, thing in own.items() if "out_features" in thing.__annotations__}
    configured = _configurations(kind)
    return [_row(each, citation(each), "\n".join(configured.get(f"{home}.{name}", ()))) for name, each in own.items()]


def plugin_rows() -> list[tuple[str, Row]]:
    """Each class of another package that can be used, after its kind."""
    return [(each.kind, _row(each.thing, f"from {each.distribution}", "")) for each in load_plugins()]


def _row(thing: type, origin: str, extra: str) -> Row:
    return Row(thing.__name__, _SOURCE.sub(".", summary(thing)), origin, extra, sends(thing))


def arguments() -> dict[str, list[str]]:
    """Names of the arguments of each class of fedlit's own that a configuration may name, by its public path."""
    by_class: dict[str, list[str]] = {}
    for package in (fedlit, *(import_module(f"fedlit.{name}") for name in _NAMED)):
        for name in package.__all__:
            thing = getattr(package, name)
            if isinstance(thing, type) and not inspect.isabstract(thing) and not issubclass(thing, Exception):
                by_class[f"{package.__name__}.{name}"] = arguments_of(thing)
    return by_class


def made() -> str:
    """What `fedlit.cli.known` reads, as JSON: each row and each class in a line of its own."""
    listed = {kind: [asdict(row) for row in rows(kind)] for kind in KINDS}
    text = json.dumps({"listed": listed, "arguments": arguments()}, indent=1, ensure_ascii=False)
    return re.sub(r"\n(?: {4,}|   (?=\})|   (?=\")| {2}(?=\]))", " ", text) + "\n"


def sends(thing: type) -> str:
    """Channels that a method declares with its default arguments, without a warm-up, by how their messages go.

    Empty for another class, and for a method that needs more arguments.
    """
    if not issubclass(thing, FederatedModule):
        return ""
    by_kind: dict[str, list[str]] = {}
    made = instance_of(thing)
    if made is None:
        return ""
    for channel in made.channels:
        kind = way_of(channel)
        by_kind.setdefault(f"single samples, {kind}" if channel.samples else kind, []).append(channel.name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items()) or "nothing"


def way_of(channel: Channel) -> str:
    """How the messages of a channel are sent, as tables of methods name it."""
    hidden = isinstance(channel, Summed) and (channel.singly or channel.beside)
    return "summed by a backend that hides" if hidden else channel.kind


def instance_of(method: type[FederatedModule]) -> FederatedModule | None:
    """A method with its default arguments, without a warm-up; ``None`` if it needs more arguments."""
    clients: list[Client | str] = ["source", "another", Client("target", "target", labelled=True)]
    try:
        return method(clients, "target", 2, Bottleneck(SmallCNN(width=4), 2))  # narrow, and with BatchNorm
    except (TypeError, ValueError):
        return None


def summary(thing: object) -> str:
    """First line of the docstring of a class or module, without markup."""
    return _plain(cleandoc(thing.__doc__ or "").partition("\n")[0])


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def citation(thing: type) -> str:
    """Where a class is from, as its docstring or that of its module states; empty if they do not."""
    text = cleandoc(thing.__doc__ or "")
    for place, pattern in ((summary(thing), _CITATION), (summary(getmodule(thing)), _CITATION), (text, _REFERENCE)):
        match = pattern.search(place)
        if match is not None:
            return _plain(match.group(1))
    return ""


def _configurations(kind: str) -> dict[str, list[str]]:
    """Installed configurations by the class paths that they have, such as ``methods/fedavg``."""
    by_class: dict[str, list[str]] = {}
    folder = files("fedlit.configs").joinpath(kind)
    for file in sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else ():
        for path in _class_paths(yaml.safe_load(file.read_text(encoding="utf-8"))):
            by_class.setdefault(path, []).append(f"{kind}/{file.name.removesuffix('.yaml')}")
    return by_class


def _class_paths(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        for key, value in config.items():
            if key == "class_path":
                yield value
            else:
                yield from _class_paths(value)


def _scores() -> list[Row]:
    """Scores that need no target labels; the docstrings explain each in brackets after its name."""
    always = dict(_EXPLAINED.findall(FederatedModule.__doc__ or ""))
    chosen = dict(_EXPLAINED.findall(Validators.__doc__ or ""))
    quality, _, score = Classification.metrics
    logged = (f"source/{quality}", f"target/{score}")
    return [Row(name, _plain(always[name]), "every run", "no") for name in logged] + [
        Row(f"validator/{name}", _plain(chosen[name]), "callback Validators", "yes" if name in FROM_SOURCES else "no")
        for name in get_args(Validator)
    ]


def table_of_methods() -> str:
    """Return the table of the page of methods, in Markdown."""
    lines = ["| class | source | sends | configuration |", "|---|---|---|---|"]
    for row in rows("methods"):
        files_of = ", ".join(f"`configs/{name}.yaml`" for name in row.extra.split())
        lines.append(f"| `{row.name}` | {row.origin} | {row.sends} | {files_of} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return the page of methods with its table made anew."""
    before, rest = page.split("| class |", 1)
    return before + table_of_methods() + "\n\n" + rest.split("\n\n", 1)[1]


if __name__ == "__main__":
    Path(str(FILE)).write_text(made(), encoding="utf-8")
    page = Path(__file__).parents[2] / "docs" / "methods.md"
    if page.is_file():  # in a clone
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
