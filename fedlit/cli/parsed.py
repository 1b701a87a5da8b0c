"""Command lines that jsonargparse has parsed, and in one line what it and constructors report of an error.

The report of jsonargparse is read as text, as its errors keep no more. What is not understood stays as it is.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from operator import or_
from pydoc import locate
from traceback import extract_tb
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from fedlit.cli.arguments import LINKED
from fedlit.cli.command import INSTALL, causes, name_of
from fedlit.cli.known import did_you_mean, known, nearest
from fedlit.cli.mistakes import MEANT, Given, no_such_argument, placed, short
from fedlit.federation.names import how_to_quote

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "dict": "a mapping",
    "NoneType": "null",
    **dict.fromkeys(("list", "tuple", "Sequence", "Iterable", "Iterator"), "a list"),
}
_SIMPLE = ("int", "float", "bool")
_MANY = {"int": "whole numbers", "float": "numbers", "str": "texts"}

_KEY = re.compile(r'Parser key "([^"]+)":(.*)')
_PROBLEM = re.compile(r"Problem with given class_path '([^']+)':(.*)")
_CALLABLE = re.compile(r"Type (.*?) expects a function or a callable class: (.*)")
_GOT_CLASS = re.compile(r"Got value: Namespace\(class_path='([^']+)'")
_LACKING = re.compile(r"the following arguments are required: (.*)")
_SEVERAL = re.compile(r"Multiple subclasses with name (\w+)\..*: (.*?)\.?$")
_NO_REASON = ("Errors:", "Given value type:", "Does not validate", "Subclass types", "a class path", "a dict")
_EXPECTED = re.compile(r"Expected an? (?:<class '(?:[\w.]*\.)?(\w+)'>|typing\.(Literal\[.*?\]))")

_OF_EXPERIMENTS = ("seeds", "targets", "compare", "jobs", "fresh")
"""Keys that list the runs of an experiment, and are not of a single one."""

_REASON = re.compile(r"^ *- (?:Problem with given class_path .*:\n *)?(.+)$", re.MULTILINE)
"""Why one of an argument's types was not taken, in the words of jsonargparse or of a constructor."""

_HOMES = {"optimizer": "torch.optim", "lr_scheduler": "torch.optim.lr_scheduler"}
"""Modules of the classes that are meant by keys whose type is any callable."""

_NOT_A_REASON = ("Does not validate against any", "Expected a", "Not a valid", "Parser key")
"""Beginnings of jsonargparse's reasons for types that were not meant."""


@dataclass
class _Place:
    """Where in a report a reason stands: at a key, or at a class that was tried there."""

    indent: int
    key: str = ""
    cls: str = ""
    types: str = ""
    """Those that the key might have had."""
    value: str = ""
    reasons: list[str] = field(default_factory=list)


def explain(message: str, given: Given, keys: Collection[str]) -> str:
    """The message to print for a report of jsonargparse on what was given to a parser that takes some keys itself."""
    unknown = re.search(
        r"(?:does not accept option|Option) '([^']+)'(?: is not accepted)?|unrecognized arguments: (\S+)", message
    )
    if unknown is not None and "Parser key" not in message:
        return _unknown_key(unknown[1] or unknown[2], given, keys)
    lacking = re.match(_LACKING, message)
    if lacking is not None:
        names = " and no ".join(name.split(".")[-1] for name in lacking[1].split(", "))
        return f"no {names} was given: add --config experiments/first, or another, or --model FedAvg --data Digits"
    option = re.match(r"argument (\S+): expected", message)
    if option is not None:
        return f"{option[1]}: its value is missing: write {option[1]} VALUE"
    chains = [chain for chain in _chains(message) if chain[-1].reasons]
    if not chains:
        return message
    for chain in chains:
        several = next(filter(None, map(_SEVERAL.search, chain[-1].reasons)), None)
        if several is not None:
            key, paths = _key_of(chain), sorted(several[2].split(", "), key=lambda path: not path.startswith("fedlit."))
            text = f"there are several classes {several[1]}: write {' or '.join(paths)}"
            return placed(given.where(key), key, text)
    chain = max(chains, key=len)
    key = _key_of(chain)
    lacking = next(filter(None, (re.match(_LACKING, reason) for reason in chain[-1].reasons)), None)
    if lacking is not None:
        key += f".init_args.{lacking[1]}"
    return placed(given.where(key), key, _reason(chain, key, given))


def _unknown_key(word: str, given: Given, keys: Collection[str]) -> str:
    if not word.startswith("-") and not given.where(word):
        return f"{word!r} belongs to no option: write --config {word} for a configuration"
    key = word.lstrip("-").partition("=")[0]
    where = "" if word.startswith("-") else given.where(key)
    place = f"--{key}" if not where or where.startswith("--") else f"{where}: {key}"
    parent, _, last = key.rpartition(".")
    there = {each.rpartition(".")[2]: each for each in keys if each.rpartition(".")[0] == parent}
    anywhere = {each.rpartition(".")[2]: each for each in keys}
    guess = MEANT.get(last) or there.get(nearest(last, there) or "") or anywhere.get(nearest(last, anywhere) or "")
    what = f"Lightning's Trainer has no argument {last!r}" if parent == "trainer" else f"there is no {key!r}"
    return f"{place}: {what}: " + ("fedlit fit --help has all" if guess is None else f"did you mean {guess!r}?")


def _chains(message: str) -> list[list[_Place]]:
    """Every place of a report with those above it."""
    stack: list[_Place] = []
    chains: list[list[_Place]] = []
    pending = [(len(line) - len(line.lstrip(" -")), line.lstrip(" -")) for line in message.splitlines()]
    while pending:
        indent, line = pending.pop(0)
        if not line:
            continue
        key, problem, called = _KEY.match(line), _PROBLEM.match(line), _CALLABLE.match(line)
        if key or problem or called:
            while stack and stack[-1].indent >= indent:
                stack.pop()
            if called:
                cls = _GOT_CLASS.search(message[message.index(called[2][:20]) :])
                stack.append(_Place(indent, cls="" if cls is None else cls[1], types=called[1]))
            else:
                stack.append(_Place(indent, key=key[1] if key else "", cls=problem[1] if problem else ""))
            rest = (key or problem or called)[2]  # type: ignore[index]
            chains.append([*stack])
            if rest.strip():
                pending.insert(0, (indent + 1, rest.strip()))
            continue
        while len(stack) > 1 and stack[-1].indent > indent:
            stack.pop()
        if not stack:
            continue
        if line.startswith("Subtypes: "):
            stack[-1].types = line.removeprefix("Subtypes: ")
        elif line.startswith("Given value: "):
            holder = next((each for each in reversed(stack) if each.key), stack[-1])
            holder.value = holder.value or line.removeprefix("Given value: ")
        elif not line.startswith(_NO_REASON):
            stack[-1].reasons.append(line)
    return chains


def _key_of(chain: Sequence[_Place]) -> str:
    key = ""
    for before, place in zip([None, *chain], chain, strict=False):
        if place.key:
            key += (".init_args." if before is not None and not before.key else "." if key else "") + place.key
    return key


def _reason(chain: Sequence[_Place], key: str, given: Given) -> str:
    place = chain[-1]
    types = place.types or next((each.types for each in reversed(chain) if each.types), "")
    own = given.value(key)
    value = place.value if own is None else str(own)
    is_simple = not value.startswith("{") and any(
        match[1] in _SIMPLE or match[2] for match in map(_EXPECTED.match, place.reasons) if match
    )
    for reason in [] if is_simple else place.reasons:
        option = re.match(r"Option '([^']+)' is not accepted", reason)
        if option is not None:
            # params are what a method gives an optimizer
            takes = [name for name in arguments_of(place.cls) if name != "params"]
            return no_such_argument(place.cls, f"{key}.{option[1]}", takes, given)
        if re.match(_LACKING, reason) is not None:
            name, above = place.cls.split(".")[-1], short(key.rpartition(".init_args.")[0])
            return f"is missing, and {name} needs it: fedlit fit --{above}.help {name} shows what it takes"
        attribute = re.match(r"module '([^']+)' has no attribute '([^']+)'", reason)
        if attribute is not None:
            near = nearest(attribute[2], names_of(attribute[1]))
            guess = ": fedlit list has fedlit's own" if near is None else f": did you mean '{attribute[1]}.{near}'?"
            return f"{attribute[1]} has no class {attribute[2]!r}{guess}"
        module = re.match(r"No module named '([^']+)'", reason)
        if module is not None:
            return f"there is no module {module[1]!r}, where {place.cls!r} should be: mend the path, or install it"
        path = re.match(r"Expected a dot import path string: (\S+?)(?:\. Got value.*)?$", reason)
        if path is not None:
            known_here = names_of(_HOMES.get(short(key).rpartition(".")[2], types))
            return f"there is no class {path[1]!r}{did_you_mean(path[1], known_here)} fedlit list has fedlit's own"
        other = re.match(r"Import path (\S+) does not correspond to a subclass of (\w+)", reason)
        if other is not None:
            return f"{other[1]} is no {other[2]}{did_you_mean(other[1].split('.')[-1], names_of(types))} fedlit list"
    return _of_another_type(place, types, value[:80], given.below(key))


def _of_another_type(place: _Place, types: str, value: str, leaves: Sequence[object]) -> str:
    got = re.search(r"Got value: (.*)", "\n".join(place.reasons))
    if got is not None and not value:
        value = got[1][:80]
    choices = [
        word
        for reason in place.reasons
        for expected in _EXPECTED.finditer(reason)
        for word in re.findall(r"'([^']*)'", expected[2] or "")
    ]
    if choices:
        return f"must be one of {', '.join(choices)}, got {value!r}{did_you_mean(value, choices).removesuffix(':')}"
    lists = [f"a list of {_MANY[each]}" for each in re.findall(r"list\[(\w+)\]", types) if each in _MANY]
    plain = [] if lists else [match[1] for reason in place.reasons for match in _EXPECTED.finditer(reason) if match[1]]
    if lists and "NoneType" in types:
        plain = ["NoneType"]
    wanted = [*dict.fromkeys(lists), *dict.fromkeys(_WORDS.get(each, f"a {each}") for each in plain)]
    if not wanted:
        return place.reasons[0].partition(". Got value")[0]
    advice = ""
    if any("a list" in each for each in wanted) and value[:1] not in "[{" and value != "null":
        advice = f": write [{value}]"
    if any("text" in each for each in wanted):
        odd = [each for each in _inner(leaves) if each is not None]
        advice = next((f": {how}" for how in map(how_to_quote, odd) if how), advice)
    got_text = f"got {value}" if value[:1] in ("[", "{") or re.fullmatch(r"-?[\d.]+", value) else f"got {value!r}"
    return f"must be {' or '.join(wanted)}, {got_text}{advice}"


def _inner(values: Sequence[object]) -> Iterator[object]:
    """Values that are no lists, of lists of any depth."""
    for value in values:
        yield from _inner(value) if isinstance(value, list) else (value,)


def arguments_of(cls: str | type) -> list[str]:
    """Names of what a class, or that of a path, is made with, those that it hands on to its bases included."""
    thing = locate(cls) if isinstance(cls, str) else cls
    return [*_types_of(thing)] if isinstance(thing, type) else []


@cache
def _types_of(cls: type) -> Mapping[str, Any]:
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(cls, "made", fail_untyped=False)
    actions = {action.dest: action for action in parser._actions}
    types = {name: getattr(actions[name], "_typehint", None) or actions[name].type for name in added if name in actions}
    return {name.removeprefix("made."): types.get(name) for name in added}


def refuse_nulls(config: Mapping[str, Any], taken: Collection[str] = ()) -> None:
    """End the command where an argument of a class of fedlit is null and may not be, which jsonargparse lets pass.

    Keys that are ``taken`` are null until they are linked.
    """
    for part in ("data", "model"):
        for key, kind in _nulls(part, config.get(part)):
            if key not in taken:
                words = " or ".join(dict.fromkeys(map(_in_words, _members(kind))))
                sys.exit(f"fedlit: {key} must be {words}, got null: leave it out for its default")


def _nulls(key: str, value: object) -> Iterator[tuple[str, Any]]:
    """Keys of arguments that are null and may not be, with their types."""
    cls = locate(str(value["class_path"])) if isinstance(value, Namespace) and "class_path" in value else None
    if not isinstance(value, Namespace) or not isinstance(cls, type) or not cls.__module__.startswith("fedlit."):
        return
    types = _types_of(cls)
    init_args = value.get("init_args")
    for name, each in (vars(init_args) if isinstance(init_args, Namespace) else {}).items():
        kind = types.get(name)
        if each is not None:
            yield from _nulls(f"{key}.init_args.{name}", each)
        elif not any(member in (None, NoneType, Any, object) for member in _members(kind)):
            yield f"{key}.init_args.{name}", kind


def _members(kind: Any) -> list[Any]:
    """Types in a union, and values of literals; a type that is neither is alone."""
    if get_origin(kind) in (Union, UnionType):
        return [each for part in get_args(kind) for each in _members(part)]
    return [*get_args(kind)] if get_origin(kind) is Literal else [kind]


def _in_words(member: Any) -> str:
    """What one of `_members` is called in a message."""
    if not isinstance(member, type) and get_origin(member) is None:
        return repr(member)
    name = (get_origin(member) or member).__name__
    return _WORDS.get(name, f"a {name}")


def names_of(types: str) -> list[str]:
    """Names of imported classes that would do for types as jsonargparse prints them, or of the classes of a module."""
    names: list[str] = []
    for path in re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", types):
        thing = locate(path)
        if inspect.ismodule(thing):
            names += [name for name, each in vars(thing).items() if isinstance(each, type)]
        elif isinstance(thing, type):
            names += [each.__name__ for each in _with_subclasses(thing)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for each in cls.__subclasses__():
        yield from _with_subclasses(each)


_SUBCLASSES = "known subclasses: "
_FEW = 20
"""Classes of other packages that are named one by one."""


class HelpFormatter(DefaultHelpFormatter):
    """Names fedlit's own classes of those that an argument takes: of modules alone there are more than a thousand."""

    def _get_help_string(self, action: Any) -> str:
        text, begin, listed = str(super()._get_help_string(action)).partition(_SUBCLASSES)
        names = listed.rstrip(")").split(", ") if begin else []
        own = [name for name in names if name.startswith("fedlit.") and name.count(".") < 3]  # others are not public
        others = [name for name in names if not name.startswith("fedlit.")]
        if any(name.startswith("fedlit.models.") for name in own):  # any module is taken, but these are meant
            networks = {row.name for row in known().listed["models"]}
            own = [name for name in own if name.rpartition(".")[2] in networks]
        if len(others) > _FEW:
            named = [name for name in others if re.fullmatch(r"torch\.optim\.\w+", name)]
            others = [*named, f"and {len(others) - len(named)} of other packages"]
        return text + begin + ", ".join([*own, *others]) + ")" * listed.endswith(")")


class Parser(LightningArgumentParser):
    """Shows in the help of a method which of its arguments the data give, though its constructor needs them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The text of ``--help`` and of ``--model.help``."""
        for action in self._actions:
            part, _, name = action.dest.rpartition(".")
            if part in ("model", "model.init_args") and name in LINKED:
                action.required = False
                action.default = "what the data have"
                action.help = f"{action.help or ''} Taken from the data module, and not given here."
        groups: Any = self._action_groups  # data and model before the Trainer's many arguments
        groups.sort(key=lambda group: any(each.dest.startswith("trainer.") for each in group._group_actions))
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
        how = {"skip_link_targets": False, "skip_unset": False, "skip_validation": True}  # checked when parsed
        values = yaml.safe_load(self.parser.dump(arguments, format="yaml", **how))
        return {key: values[key] for key in ("model", "data")}

    @property
    def text(self) -> str:
        """Everything that a run is trained with, in plain text: two runs of one text come to the same."""
        arguments = self.arguments.clone()
        without = ("seat", "config", "trainer.default_root_dir", "trainer.enable_progress_bar")
        for key in (*_OF_EXPERIMENTS, *without, "trainer.strategy.init_args.allow_rejoin"):
            arguments.pop(key, None)
        text: str = self.parser.dump(arguments, format="json", skip_unset=True, skip_validation=True)
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
    nothing_said = re.search(r"Problem with given class_path '([^']+)':\s*(?:$|\n *- |\.? Got value:)", text)
    if nothing_said is not None:
        first = [each for each in causes(error) if each.__traceback__ is not None][-1]
        at = extract_tb(first.__traceback__)[-1]
        return f"{nothing_said[1]} cannot be made: {type(first).__name__} in {at.filename}, line {at.lineno}: {at.line}"
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
