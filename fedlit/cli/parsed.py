"""Command lines that jsonargparse has parsed, and what it and constructors refuse, in one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property, reduce
from operator import or_
from typing import Any, get_args

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from fedlit.cli.arguments import LINKED
from fedlit.cli.command import INSTALL, causes, name_of
from fedlit.cli.mistakes import Given
from fedlit.cli.reports import explain

_OF_EXPERIMENTS = ("seeds", "targets", "compare", "jobs", "fresh")
"""Keys that list the runs of an experiment, and are not of a single one."""

_REASON = re.compile(r"^ *- (?:Problem with given class_path .*:\n *)?(.+)$", re.MULTILINE)
"""Why one of an argument's types was not taken, in the words of jsonargparse or of a constructor."""

_NOT_A_REASON = ("Does not validate against any", "Expected a", "Not a valid", "Parser key")
"""Beginnings of jsonargparse's reasons for types that were not meant."""


class Parser(LightningArgumentParser):
    """Shows in the help of a method which of its arguments the data give, though its constructor needs them."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The text of ``--help`` and of ``--model.help``."""
        for action in self._actions:
            part, _, name = action.dest.rpartition(".")
            if part in ("model", "model.init_args") and name in LINKED:
                action.required = False
                action.default = "what the data have"
                action.help = f"{action.help or ''} Taken from the data module, and not given here."
        text: str = super().format_help(*args, **kwargs)
        return text


class Parsed:
    """A command line that its subcommand's parser has parsed once, for any number of runs."""

    def __init__(self, parser: LightningArgumentParser, config: Namespace) -> None:
        self.parser = parser
        self.config = config
        self.arguments: Namespace = config[config.subcommand]

    @cached_property
    def dump(self) -> dict[str, Any]:
        """Arguments of model and data as plain values, which checkpoints keep."""
        arguments = self.arguments.clone()
        arguments.pop("trainer")
        how = {"skip_link_targets": False, "skip_none": False, "skip_validation": True}  # checked when they were parsed
        values = yaml.safe_load(self.parser.dump(arguments, format="yaml", **how))
        return {key: values[key] for key in ("model", "data")}

    @property
    def text(self) -> str:
        """Everything that a run is trained with, in plain text: two runs of one text come to the same."""
        arguments = self.arguments.clone()
        for key in (*_OF_EXPERIMENTS, "seat", "config", "trainer.default_root_dir", "trainer.enable_progress_bar"):
            arguments.pop(key, None)
        text: str = self.parser.dump(arguments, format="json", skip_none=True, skip_validation=True)
        return text

    def instead(self, args: list[str]) -> Parsed:
        """Parse other arguments of the same subcommand."""
        config = self.config.clone()
        with in_a_line(self.parser, args):
            config[config.subcommand] = self.parser.parse_args(args)
        return Parsed(self.parser, config)

    def on(self, target: str | None, seed: int | None) -> Parsed:
        """The same for another target and seed; ``None`` is that of the configuration."""
        other = Parsed(self.parser, self.config.clone())
        other.dump = deepcopy(self.dump)
        if seed is not None:
            other.arguments.seed_everything = seed
        if target is not None:
            other.arguments.data.init_args.target = other.dump["data"]["init_args"]["target"] = target
        return other


def keep_whole_numbers(parser: LightningArgumentParser) -> None:
    """Let arguments that take whole numbers or others try the former first: 1 batch is not all of them, 1.0.

    The order of types in Lightning's unions depends on what was imported before: typing keeps one object for all that
    are equal.
    """
    for action in parser._actions:
        types = get_args(getattr(action, "_typehint", None))
        if int in types and float in types and types.index(float) < types.index(int):
            ordered = sorted(types, key=lambda each: each is not int)
            action._typehint = reduce(or_, ordered)  # type: ignore[attr-defined]


@contextmanager
def in_a_line(parser: LightningArgumentParser, args: Sequence[str]) -> Iterator[None]:
    """Print in one line what a parser refuses, and end."""
    try:
        yield
    except ArgumentError as error:
        keys = [action.dest for action in parser._actions]
        sys.exit(f"fedlit: {explain(str(error), Given.of(args), keys)}")


@contextmanager
def in_plain_words(config: Namespace) -> Iterator[None]:
    """Print in one line why something could not be made of a configuration, and under which key of it, and end."""
    try:
        yield
    except (ValueError, TypeError) as error:
        text = _plain_words(error)
        if INSTALL in text:  # an ImportError, before jsonargparse made another error of it
            raise ImportError(text) from error
        missing = next((item for item in causes(error) if isinstance(item, ModuleNotFoundError)), None)
        if missing is not None:
            raise missing from error
        place = _place_of(text, config)
        sys.exit(f"fedlit: {name_of(error)}: {text}{'' if place is None else f' ({place})'}")


def _plain_words(error: Exception) -> str:
    """A constructor's message, out of what jsonargparse makes of it when the argument could have other types."""
    text = str(error)
    if not text.startswith("Does not validate"):
        return text
    reasons = [reason for reason in _REASON.findall(text) if not reason.startswith(_NOT_A_REASON)]
    return reasons[-1] if reasons else text


def _place_of(text: str, config: Any) -> str | None:
    """Where the configuration has the argument that an error begins with; ``None`` if in no place, or in several.

    The file is named, too, if it has the value that counts, which an option may have replaced.
    """
    word = re.match(r"\w*", text)
    assert word is not None
    linked = [f"model.init_args.{name}" for name in LINKED]
    keys = [key for key in config.keys() if key.split(".")[-1] == word[0] and key not in linked]  # noqa: SIM118 (no mapping)
    if len(keys) != 1:
        return None
    files = [str(getattr(each, "relative", each)) for each in config.get("config") or ()]
    given = Given.of([f"--config={file}" for file in files if os.path.isfile(file)])
    file = given.where(keys[0])
    return f"{file}: {keys[0]}" if file and given.value(keys[0]) == config[keys[0]] else keys[0]
