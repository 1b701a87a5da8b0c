"""What is done to command line arguments before Lightning's parser reads them."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fedlit.configs import flat, flow

LINKED = ("clients", "target", "num_classes", "task")
"""Arguments of the model that come from the data module."""

_LINKED_KEY = re.compile(rf"(?:(?:fit|validate|test|predict)\.)?model\.(?:init_args\.)?(?:{'|'.join(LINKED)})(?=\.|$)")

_KEY_VALUE = re.compile(r"[A-Za-z_][\w.]*=")

_NULLS = ("null", "None", "~", "")
"""Texts that an option takes for no value."""


def normalise(args: list[str]) -> list[str]:
    """Find installed configurations by name, and accept what W&B agents write."""
    result: list[str] = []
    for arg in args:
        previous = result[-1] if result else ""
        if previous in ("--config", "-c"):
            arg = find_config(arg)
        elif arg.startswith(("--config=", "-c=")):
            key, _, path = arg.partition("=")
            arg = f"{key}={find_config(path)}"
        elif result and _KEY_VALUE.match(arg) and not (previous.startswith("-") and "=" not in previous):
            arg = f"--{arg}"  # wandb's ${args_no_hyphens}
        if arg.endswith("=None") or (arg == "None" and previous.startswith("--")):
            arg = arg.removesuffix("None") + "null"  # wandb writes Python's None
        if arg == "null" and previous.startswith("--") and "=" not in previous and _is_deep(previous[2:]):
            arg = f"{result.pop()}=null"
        key, _, value = arg.removeprefix("--").partition("=")
        # jsonargparse would make it the text "None" there
        result.append(as_word(key, None) if value == "null" and _is_deep(key) else arg)
    return result


def _is_deep(key: str) -> bool:
    """Whether a dotted key is of an object that is an argument of another, as a network is of a model."""
    parts = [part for part in key.split(".") if part != "init_args"]
    return len(parts) > {"model": 2, "data": 2, "trainer": 3}.get(parts[0], len(parts))


def find_config(name: str) -> str:
    """A file, or one of the configurations installed with fedlit: ``experiments/digits`` from any directory."""
    if "\n" in name or name.startswith("{") or Path(name).exists():  # whole configurations are longer than names can be
        return name
    for candidate in (name.removeprefix("configs/"), f"{name.removeprefix('configs/')}.yaml"):
        installed = files("fedlit.configs").joinpath(candidate)
        if candidate and installed.is_file():
            return str(installed)
    return name


def as_word(key: str, value: object, text: str | None = None) -> str:
    """An argument of the command line that gives a key a plain value of the same type.

    It is ``--KEY=text``, by default the value as YAML, if that reads as the same value, and a configuration otherwise:
    ``None`` in a list, an infinite number or the text "null" would be another value.
    """
    text = (value if isinstance(value, str) else flow(value)) if text is None else text
    reads = _reads_as(text, value) and not (value is None and _is_deep(key))
    return f"--{key}={text}" if reads else f"--config={flow(nested(key, value))}"


def nested(key: str, value: object) -> Any:
    """The tree that has a value at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _reads_as(text: str, value: object) -> bool:
    """Whether an option takes a text for this value, and not for one of another type."""
    if isinstance(value, str):
        return text == value and value not in _NULLS
    if value is None or isinstance(value, bool | int):
        return True
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        return type_true(yaml.safe_load(text)) == type_true(value)
    except yaml.YAMLError:
        return False


def type_true(value: object) -> str:
    """A text that two plain values have in common only if they are equal and of equal types: not 1, 1.0 and true."""
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{key!r}: {type_true(each)}' for key, each in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(type_true, value))}]"
    return repr(value)


def options(args: Iterable[str]) -> list[tuple[str, str | None]]:
    """Keys without their hyphens, and values, in one word or in two; words that belong to no key are left out."""
    pairs: list[tuple[str, str | None]] = []
    for word, after in pairwise([*args, "--"]):
        key, is_assigned, value = word.partition("=")
        if word.startswith("-"):
            pairs.append((key.lstrip("-"), value if is_assigned else None if after.startswith("--") else after))
    return pairs


def trees(args: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Each configuration's name, or option with its hyphens, and the tree of keys that it sets."""
    for key, value in options(args):
        if key in ("config", "c"):
            yield value or "", {} if value is None else content_of(value)
            continue
        tree: Any = value
        if value is not None and (key in ("model", "data", "trainer") or key.endswith("init_args")):
            tree = content_of(value)
        elif value is not None and value.startswith(("{", "[")):
            with suppress(yaml.YAMLError):  # as [*.csv], which jsonargparse takes for text
                tree = yaml.safe_load(value)
        yield f"--{key}", nested(key, tree)


def refuse_linked(args: list[str]) -> None:
    """Refuse model arguments that come from the data: jsonargparse would ignore them without a word."""
    refused: list[str] = []
    for where, tree in trees(args):
        linked = dict.fromkeys(match[0] for match in map(_LINKED_KEY.match, flat(tree)) if match)
        refused += [name if where.startswith("--") else f"{name} in {where}" for name in linked]
    if refused:
        sys.exit(
            f"fedlit: {', '.join(refused)}: clients, target, num_classes and task are taken from the data module; give "
            "them there (--data.target, --data.clients)"
        )


def refuse_nameless(args: list[str]) -> None:
    """Refuse a configuration or an option that sets arguments of data or a model before anything names its class."""
    named: set[str] = set()
    for where, tree in trees(args):
        if isinstance(tree, str):  # a configuration that is no file, which is another mistake
            return
        for name in ("data", "model"):
            if not isinstance(tree, dict) or name not in tree:
                continue
            of, is_option = tree[name], where.startswith("--")
            if isinstance(of, dict) and not {"class_path", "help"} & of.keys() and name not in named:
                sets = f"{where} sets arguments of {name} ({', '.join(map(str, of))})"
                sys.exit(
                    f"fedlit: {f'{where} sets an argument of {name}' if is_option else sets}, and nothing before it "
                    f"names its class: put --{name}, or the configuration that has it, before it"
                )
            if of is not None or is_option:
                named.add(name)


class _Twice(yaml.constructor.ConstructorError):
    """A key that a mapping has twice."""


class _Once(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML takes the last without a word."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._seen: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Called for each mapping before it is made, and again by those that merge it: then it has others' keys."""
        keys = [] if id(node) in self._seen else [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        self._seen.add(id(node))
        lines: dict[str, int] = {}
        for key in keys:
            if key.value in lines:
                problem = f"{key.value!r} is in line {lines[key.value]} too, and only the last would count: keep one"
                raise _Twice(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        super().flatten_mapping(node)


@lru_cache(64)
def _parsed(text: str) -> Any:
    """A command looks at each of its configurations several times."""
    return yaml.load(text, _Once)  # a SafeLoader


def content_of(text: str) -> Any:
    """Parse YAML, or the file of that name."""
    where = "the command line"
    if os.path.isfile(text):  # which takes long texts, too
        where, text = text, Path(text).read_text()
    try:
        return deepcopy(_parsed(text))
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = where if mark is None else f"{where}, line {mark.line + 1}, column {mark.column + 1}"
        if problem is not None and "'\\t'" in problem:
            sys.exit(f"fedlit: {place}: there is a tab, and YAML indents by spaces: write spaces in its place")
        if isinstance(error, _Twice):
            sys.exit(f"fedlit: {place}: {problem}")
        context = f"{getattr(error, 'context', None) or ''}: ".removeprefix(": ")
        sys.exit(f"fedlit: {place}: this is no YAML, and must be mended: {context}{problem or error}")
