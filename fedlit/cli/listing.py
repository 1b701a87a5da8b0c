"""``fedlit list``: what a configuration can name, read from the classes, their docstrings and the configurations."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from inspect import cleandoc, getmodule
from typing import Any, get_args

import yaml
from rich.table import Table
from rich.text import Text

from fedlit.callbacks import Validators
from fedlit.callbacks.shared import show
from fedlit.callbacks.validators import FROM_SOURCES, Validator
from fedlit.cli.plugins import KINDS, load_plugins
from fedlit.federation import Client, Summed
from fedlit.models import Bottleneck, SmallCNN
from fedlit.module import FederatedModule
from fedlit.training.tasks import Classification

_CITATION = re.compile(r"\(([^()]*\b\d{4}\b[^()]*)\)")
"""Brackets with a year, or with a number of arXiv."""
_REFERENCE = re.compile(r"^References:\n +(.+?)[.:;](?:\s|\Z)", re.DOTALL | re.MULTILINE)
_EXPLAINED = re.compile(r"``([\w/]+)`` \(([^()]+)\)")


@dataclass(frozen=True)
class Row:
    """One thing that can be named.

    Args:
        name: By which it is named, or logged.
        what: It, in a line.
        origin: Paper, or distribution of a plug-in; of a score, what logs it.
        extra: Installed configurations that have it, by lines; of a score, whether it needs statistics of the sources.
        sends: Of a method, its channels by how messages go; see `sends`.
    """

    name: str
    what: str
    origin: str
    extra: str
    sends: str = ""


def list_command(args: list[str]) -> None:
    """Print what there is."""
    parser = argparse.ArgumentParser(
        prog="fedlit list",
        description="What a configuration can name: fedlit's own classes and those of plug-ins, and scores by which a "
        "model can be chosen without labels of the target.",
    )
    parser.add_argument("kind", nargs="?", choices=list(KINDS), help="what to list; everything if it is left out")
    kind = parser.parse_args(args).kind
    for each in KINDS if kind is None else (kind,):
        show(_table(each, by_lines=not sys.stdout.isatty()))


def rows(kind: str) -> list[Row]:
    """What there is of a kind: fedlit's own, then plug-ins."""
    added = [
        Row(plug_in.thing.__name__, summary(plug_in.thing), f"from {plug_in.distribution}", "", sends(plug_in.thing))
        for plug_in in load_plugins()
        if plug_in.kind == kind
    ]
    if kind == "validators":
        return [*_scores(), *added]
    own = KINDS[kind].own()
    if kind == "models":  # what can be an extractor; the others are what methods make of it
        own = {name: thing for name, thing in own.items() if "out_features" in thing.__annotations__}
    configurations = _configurations(kind)
    home = KINDS[kind].home.__name__
    return [
        Row(name, summary(thing), _citation(thing), "\n".join(configurations.get(f"{home}.{name}", ())), sends(thing))
        for name, thing in own.items()
    ] + added


def sends(thing: type) -> str:
    """Channels that a method declares with its default arguments, without a warm-up, by how their messages go.

    Of another class, or of a method that needs more arguments, nothing is told.
    """
    if not issubclass(thing, FederatedModule):
        return ""
    clients: list[Client | str] = ["source", "another", Client("target", "target", labelled=True)]
    try:
        method = thing(clients, "target", 2, Bottleneck(SmallCNN(width=4), 2))  # narrow, and with BatchNorm
    except (TypeError, ValueError):
        return ""
    by_kind: dict[str, list[str]] = {}
    for channel in method.channels:
        singly = isinstance(channel, Summed) and channel.singly
        by_kind.setdefault("summed by a backend that hides" if singly else channel.kind, []).append(channel.name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items()) or "nothing"


def summary(thing: object) -> str:
    """First line of the docstring of a class or module, without markup."""
    return _plain(cleandoc(thing.__doc__ or "").partition("\n")[0])


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def _citation(thing: type) -> str:
    """Where a class is from, as its docstring or that of its module says; empty if they do not."""
    text = cleandoc(thing.__doc__ or "")
    for place, pattern in ((summary(thing), _CITATION), (summary(getmodule(thing)), _CITATION), (text, _REFERENCE)):
        found = pattern.search(place)
        if found is not None:
            return _plain(found.group(1))
    return ""


def _configurations(kind: str) -> dict[str, list[str]]:
    """Installed configurations by the class paths that they have, such as ``methods/fedavg``."""
    found: dict[str, list[str]] = {}
    folder = files("fedlit.configs").joinpath(kind)
    for file in sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else ():
        for path in _class_paths(yaml.safe_load(file.read_text(encoding="utf-8"))):
            found.setdefault(path, []).append(f"{kind}/{file.name.removesuffix('.yaml')}")
    return found


def _class_paths(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        for key, value in config.items():
            if key == "class_path":
                yield value
            else:
                yield from _class_paths(value)


def _scores() -> list[Row]:
    """Scores that need no target labels; what they are is told in brackets after their names in the docstrings."""
    always = dict(_EXPLAINED.findall(FederatedModule.__doc__ or ""))
    chosen = dict(_EXPLAINED.findall(Validators.__doc__ or ""))
    quality, _, score = Classification.metrics
    logged = (f"source/{quality}", f"target/{score}")
    return [Row(name, _plain(always[name]), "every run", "no") for name in logged] + [
        Row(f"validator/{name}", _plain(chosen[name]), "callback Validators", "yes" if name in FROM_SOURCES else "no")
        for name in get_args(Validator)
    ]


def _table(kind: str, by_lines: bool) -> Table:
    """What there is of a kind; ``by_lines`` for other programs, or else for a screen, which may be narrow."""
    table = Table(title=kind)
    listed = rows(kind)
    names, last = [row.name for row in listed], [row.extra for row in listed]
    below = kind != "validators" and not by_lines and any(last)
    if below:
        names, last = ["\n  ".join([row.name, *row.extra.splitlines()]) for row in listed], []
    columns = {
        "name, and its configurations" if below else "name": names,
        "what it is": [row.what for row in listed],
        "where from": [row.origin for row in listed],
        "sends": [row.sends for row in listed],
        "source statistics" if kind == "validators" else "configuration": last,
    }
    for header, cells in columns.items():
        if any(cells):
            table.add_column(header, no_wrap=header.startswith("name"), min_width=12, overflow="fold")
    for row in zip(*filter(any, columns.values()), strict=True):
        table.add_row(*map(Text, row))
    return table
