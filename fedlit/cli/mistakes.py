"""Mistakes in a command line and its configurations, in one line each: where it is, what is wrong, what to write.

`check` finds those that need no class: files that are not there, misspelt keys, classes and arguments of fedlit's own.
The others are found by jsonargparse; see `fedlit.cli.parsed`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fedlit.cli.arguments import content_of, options, trees
from fedlit.cli.known import KINDS, did_you_mean, known, nearest, offered
from fedlit.configs import flat

SUBCOMMANDS = ("fit", "validate", "test", "predict")

TOP = (
    *("config", "seed_everything", "trainer", "model", "data", "ckpt_path", "print_config", "help"),
    *("seeds", "targets", "compare", "select", "jobs", "fresh", "seat"),
    *("verbose", "return_predictions", "weights_only"),  # of Lightning's subcommands
)
"""What a configuration may have at its top, and a command line after two hyphens."""

_CLASS = {"class_path", "init_args", "dict_kwargs"}
"""Keys of a mapping that names a class."""

_ENTRY = {*_CLASS, "name", "data", "trainer"}
"""Keys of an entry of compare."""

_HELP = ("help", "print_config", "h")

MEANT = dict.fromkeys(("epochs", "max_epoch", "rounds", "num_rounds", "max_rounds"), "trainer.max_epochs")
"""What other words mean; an epoch is a round."""

_SYNONYMS = {"learning_rate": "lr", "n_classes": "num_classes", "batchsize": "batch_size", "path": "root"}
"""As other libraries call arguments."""


@dataclass
class Given:
    """What a command line and its configurations set, in their order."""

    sources: list[tuple[str, dict[str, Any]]]  # a file, or an option with its hyphens, and what it sets, from the top
    # the class that is named last at a key; keys go without ``init_args``
    classes: dict[str, str] = field(default_factory=lambda: {"trainer.strategy": "fedlit.FederatedStrategy"})

    @classmethod
    def of(cls, args: Sequence[str]) -> Given:
        """Read them; ends the command at a file that is none, or no mapping of keys."""
        sources: list[tuple[str, dict[str, Any]]] = []
        for key, value in options(args):
            if key not in ("config", "c"):
                sources += trees([f"--{key.removesuffix('+')}" + ("" if value is None else f"={value}")])
            elif value is not None and _is_read(value):
                sources.append((value, _whole(value)))
        return cls(sources)

    @cached_property
    def _leaves(self) -> dict[str, tuple[str, object]]:
        """Where each key without ``init_args`` was given last, and what, in the order of these places."""
        leaves: dict[str, tuple[str, object]] = {}
        for where, tree in self.sources:
            for key, value in flat(tree).items():
                leaves.pop(short(key), None)
                leaves[short(key)] = where, value
        return leaves

    def where(self, key: str) -> str:
        """The file or option that gives a key, what is below it, or the nearest thing above it; empty if none does."""
        wanted = short(key)
        while wanted:
            inside = [where for leaf, (where, _) in self._leaves.items() if f"{leaf}.".startswith(f"{wanted}.")]
            if inside:
                return inside[-1]
            wanted = wanted.rpartition(".")[0]
        return ""

    def value(self, key: str) -> object:
        """What was given last at a key; ``None`` if that is no leaf."""
        return self._leaves.get(short(key), ("", None))[1]

    def keys_below(self, key: str) -> list[str]:
        """Keys that were given below one, without ``init_args``."""
        return [leaf for leaf in self._leaves if leaf.startswith(f"{short(key)}.")]

    def below(self, key: str) -> list[object]:
        """What was given last at a key, and at each one below it."""
        return [value for leaf, (_, value) in self._leaves.items() if f"{leaf}.".startswith(f"{short(key)}.")]

    def without_effect(self) -> Iterator[str]:
        """A sentence for each option whose value a configuration after it replaces by another."""
        earlier: dict[str, tuple[str, object]] = {}
        for where, tree in self.sources:
            values = {short(key): value for key, value in flat(tree).items()}
            if where.startswith("--"):
                earlier |= {key: (where, value) for key, value in values.items()}
                continue
            for key in earlier.keys() & values.keys():
                option, value = earlier.pop(key)
                with suppress(yaml.YAMLError):
                    value = yaml.safe_load(value) if isinstance(value, str) else value
                if str(value) != str(values[key]):
                    yield f"{option} has no effect, as {where} after it sets {values[key]!r}: put it behind"

    def elsewhere(self, key: str) -> str | None:
        """Another key that ends with the same word, as an option has it."""
        word = key.rpartition(".")[2]
        others = [leaf for leaf in self._leaves if leaf.endswith(f".{word}") and leaf.count(".") > 1]
        return next((leaf for leaf in others if leaf != short(key)), None)


def check(args: Sequence[str]) -> None:
    """End the command at a mistake that is found without importing a class."""
    given = Given.of(args)
    if any(word in _HELP for key, _ in options(args) for word in key.split(".")):
        return
    for where, tree in given.sources:
        _Walk(given, where).top(tree)
    for part, example in (("model.optimizer", "Adam"), ("model.lr_scheduler", "StepLR")):
        keys = given.keys_below(part)
        has_class = part in given.classes or f"{part}.class_path" in keys or isinstance(given.value(part), str)
        if keys and not has_class:
            refuse(given.where(keys[0]), keys[0], f"name the class that has it, too: --{part} {example}, or another")
    for line in given.without_effect():
        print(f"fedlit: {line}", file=sys.stderr)


def arguments_by_key(args: Sequence[str]) -> dict[str, Sequence[str]]:
    """Arguments of the class of fedlit at each key that takes one, for a command line that may have mistakes."""
    given = Given.of(args)
    for where, tree in given.sources:
        with suppress(SystemExit):
            _Walk(given, where).top(tree)
    return {key: _Walk._arguments(cls) or () for key, cls in given.classes.items()}


def refuse(where: str, key: str, text: str) -> NoReturn:
    """End the command with a mistake at a key of a file, or of an option with its hyphens."""
    sys.exit(f"fedlit: {placed(where, key, text)}")


def placed(where: str, key: str, text: str) -> str:
    """Put file or option, and key, before the text of a mistake; an option that is the key is named once."""
    return ": ".join(filter(None, [where, "" if short(key) == where.lstrip("-") else key, text]))


def no_such_argument(cls: str, key: str, takes: Collection[str], given: Given) -> str:
    """That a class has no argument as the key ends with, and which was meant."""
    word = key.rpartition(".")[2]
    name, guess, other = cls.split(".")[-1], nearest(word, takes), given.elsewhere(key)
    text = f"{name} has no argument {word!r}"
    guess = _SYNONYMS[word] if _SYNONYMS.get(word) in takes else guess
    if guess is not None:
        return f"{text}: did you mean {guess!r}?"
    if other is not None:
        return f"{text}: did you mean {other!r}?"
    return f"{text}: it takes {', '.join(takes)}" if takes else f"{text}: it takes none"


@dataclass
class _Walk:
    """Goes through one file or option."""

    given: Given
    where: str

    def _refuse(self, key: str, text: str) -> NoReturn:
        refuse(self.where, self._long(key), text)

    def _long(self, key: str) -> str:
        """A key as configurations have it, with ``init_args`` below those at which a class was named."""
        parts: list[str] = []
        for part in short(key).split("."):
            parts += ["init_args"] if short(".".join(parts)) in self.given.classes else []
            parts.append(part)
        return ".".join(parts)

    def top(self, tree: dict[str, Any]) -> None:
        for key, value in sorted(tree.items(), key=lambda item: item[0] == "compare"):  # after the data's class
            first, _, rest = str(key).partition(".")
            if rest:  # jsonargparse takes dotted keys, too
                self.top({first: {rest: value}})
            elif key in SUBCOMMANDS and isinstance(value, dict):
                self.top(value)
            elif key not in TOP:
                self._unknown(str(key))
            elif key == "compare":
                self._compare(value)
            elif key in ("model", "data") and isinstance(value, list):
                self._refuse(key, f"must be one class, got the list {value}: write {key}: and below it class_path")
            else:
                self.value(str(key), value)

    def _unknown(self, key: str) -> None:
        guess = MEANT.get(key) or nearest(key, TOP)
        if guess is not None:  # what is near none may be of another version of Lightning, or of a class
            self._refuse(key, f"there is no {key!r}: did you mean {guess!r}?")
        of = [part for part in ("data", "model") if key in (self._takes(part) or ())]
        if of:
            self._refuse(key, f"there is no {key!r}: did you mean '{of[0]}.{key}'?")

    def _compare(self, entries: Any) -> None:
        if isinstance(entries, dict):
            self._refuse(
                "compare", "must be a list of methods, got a mapping: put a hyphen before each, as in - FedAvg"
            )
        for place, entry in enumerate(entries if isinstance(entries, list) else ()):
            key = f"compare.{place}"
            if isinstance(entry, str) and "/" not in entry and not entry.endswith((".yaml", ".yml")):
                self._name(key, entry, "methods")
            elif isinstance(entry, dict) and isinstance(entry.get("class_path"), str):
                self._name(key, entry["class_path"], "methods")
                self._beside(key, entry, _ENTRY)
                self._keys(f"{key}.data", self.given.classes.get("data", ""), entry.get("data"))
                self.given.classes[key] = entry["class_path"]
                self._keys(key, entry["class_path"], entry.get("init_args"))

    def value(self, key: str, value: Any) -> None:
        """What stands at a key, which may name a class, or give arguments to one that was named before."""
        classes, kind = self.given.classes, {"model": "methods", "data": "data"}.get(key)
        if isinstance(value, str):
            if key in classes or kind is not None or self._arguments(value) is not None:
                self._forget(key)
                if re.fullmatch(r"[A-Za-z_][\w.]*", value) and not Path(value).exists():  # or a text or a file has it
                    self._name(key, value, kind)
                    classes[key] = value
        elif isinstance(value, list):
            for place, each in enumerate(value):
                self.value(f"{key}.{place}", each)
        elif isinstance(value, dict):
            path = value.get("class_path")
            if isinstance(path, str):
                self._name(key, path, kind)
                if classes.get(key) != path:
                    self._forget(key)
                classes[key] = path
                self._beside(key, value, _CLASS)
            elif key == "trainer.callbacks" and not self.where.startswith("--"):
                self._refuse(key, f"must be a list, got the mapping {value}: write - class_path: NAME below it")
            elif (
                value
                and all(isinstance(each, dict) and "class_path" in each for each in value.values())
                and not {*value} & {*(self._takes(key) or ())}
            ):
                self._forget(key)  # no arguments of a class, but a class for each channel
            arguments = value.get("init_args", None if path is not None else value)
            if key in classes:
                self._keys(key, classes[key], arguments)
            elif path is None:
                for word, each in value.items():
                    self.value(f"{key}.{word}", each)

    def _beside(self, key: str, value: dict[str, Any], known_there: Collection[str]) -> None:
        """Arguments that stand where their class is named."""
        word = next((str(each) for each in value if each not in known_there), None)
        if word is not None:
            name = value["class_path"].rpartition(".")[2]
            text = f"stands beside class_path: put it below init_args, which has the arguments of {name}"
            refuse(self.where, f"{self._long(key)}.{word}", text)

    def _keys(self, key: str, cls: str, arguments: Any) -> None:
        """What a class is given."""
        if not isinstance(arguments, dict):
            return
        takes = self._arguments(cls)
        for word, value in arguments.items():
            if takes is not None and word not in takes and word not in _CLASS:
                self._refuse(f"{key}.{word}", no_such_argument(cls, f"{key}.{word}", takes, self.given))
            self.value(f"{key}.{word}", value)

    def _forget(self, key: str) -> None:
        for each in [each for each in self.given.classes if each == key or each.startswith(f"{key}.")]:
            del self.given.classes[each]

    def _takes(self, key: str) -> Sequence[str] | None:
        return self._arguments(self.given.classes.get(key, ""))

    @staticmethod
    def _arguments(cls: str) -> Sequence[str] | None:
        """Of a class of fedlit's own by its path or short name; ``None`` of others."""
        table = known().arguments
        if "." in cls:
            return table.get(cls)
        paths = [path for path in table if path.endswith(f".{cls}") and not any(cls in offered(kind) for kind in KINDS)]
        return table[paths[0]] if paths else None

    def _name(self, key: str, name: str, kind: str | None) -> None:
        """A class that there is not."""
        parent, _, word = name.rpartition(".")
        paths = known().arguments
        if parent:
            there = [path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == parent]
            guess = None if word in there else nearest(word, there)
            if guess is not None:
                self._refuse(key, f"{parent} has no class {word!r}: did you mean '{parent}.{guess}'?")
        elif kind is not None and "fedlit.module" not in sys.modules:  # or it may be one that the caller has made
            names = [row.name for row in known().listed[kind]]
            if name not in names and name not in offered(kind):
                guess = did_you_mean(name, [*names, *offered(kind)])
                refuse(
                    self.where, key, f"there is no class {name!r}{guess} fedlit list {kind} has all, others need a path"
                )


def short(key: str) -> str:
    """A key as an option may have it, without the words for a class's arguments and for a subcommand."""
    parts = [part for part in key.split(".") if part != "init_args"]
    return ".".join(parts[1:] if parts and parts[0] in SUBCOMMANDS else parts)


def _is_read(name: str) -> bool:
    """Whether a configuration is a file, or should be one: no text, no address, nothing that can be read but once."""
    path, is_other = Path(name).expanduser(), any(sign in name for sign in ("\n", "{", "://"))
    return not is_other and (path.is_file() or path.is_dir() or not path.exists())


def _whole(name: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    if path.is_dir():
        sys.exit(f"fedlit: --config {name} is a folder: give a file in it")
    if not path.is_file():
        guess = did_you_mean(name.removeprefix("configs/").removesuffix(".yaml"), installed())
        sys.exit(f"fedlit: --config {name} is no file and no installed configuration{guess} fedlit list has more")
    content = content_of(str(path))
    if not isinstance(content, dict):
        got = "nothing" if content is None else f"{type(content).__name__} {str(content)[:40]!r}"
        sys.exit(f"fedlit: {name} must have keys, such as data:, model: and trainer:, got {got}")
    return content


def installed(kind: str = "") -> list[str]:
    """Names of the configurations that come with fedlit, such as ``experiments/first``; without folder if of a kind."""
    if kind:
        return sorted(name.removeprefix(f"{kind}/") for name in installed() if name.startswith(f"{kind}/"))
    folders = [each for each in files("fedlit.configs").iterdir() if each.is_dir()]
    return [
        f"{folder.name}/{file.name.removesuffix('.yaml')}"
        for folder in folders
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    ]
