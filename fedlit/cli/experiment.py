"""The runs that one ``fedlit fit`` stands for: every method of ``compare`` on every target with every seed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import chain, product
from pathlib import Path
from pydoc import locate
from types import MappingProxyType
from typing import Any

import yaml
from lightning.fabric.utilities.seed import max_seed_value

from fedlit.callbacks import RunSummary
from fedlit.cli.arguments import as_word, content_of, find_config, flow, options, refuse_linked
from fedlit.cli.folders import ExperimentFolder
from fedlit.cli.lightning_cli import FedlitCLI, Parsed, WarnOfRepeats, in_plain_words
from fedlit.cli.mistakes import installed
from fedlit.cli.nearest import did_you_mean
from fedlit.configs import flat
from fedlit.remote import Seat

_ENTRY = ("class_path", "init_args", "name", "data", "trainer")
"""What a mapping in ``compare`` may hold."""

_LISTS = ("callbacks", "logger", "plugins")
"""Arguments of the Trainer that hold several objects, each of which stands for itself."""

_NOTHING = "False"
"""What a configuration has that turns such an argument off, as `_class_of` has it."""


@dataclass(frozen=True)
class Method:
    """An entry of ``compare``: what its runs add to the command line, and what the closing table calls them.

    Args:
        name: ``None`` is the name of the configuration's class.
        arguments: Command line arguments; none is the method of the configuration.
        preset: Arguments for data and Trainer, which give way to those of the command line.
    """

    name: str | None = None
    arguments: tuple[str, ...] = ()
    preset: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls,
        entry: str | dict[str, Any],
        explicit: Collection[str] = (),
        given: Collection[str] = (),
        listed: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> Method:
        """Read a configuration, a class, or a mapping that has one.

        Args:
            explicit: Keys that the experiment sets.
            given: Those of them that options of the command line set.
            listed: By list of the Trainer, such as ``"callbacks"``, classes that the experiment has in it. Those of a
                configuration come beside them, but for classes that are there already.
            entry: A configuration is one that is installed, such as ``methods/fed_mmd``, or a file, and is called by
                its file, or by its class if it is what is shipped for that; what the experiment sets in data and
                trainer stays, and what the command line sets in model. A class gets the arguments of its shipped
                configuration, as far as the experiment sets nothing else. A mapping has ``class_path`` and may have
                ``init_args``, ``name`` (by default the class and those ``init_args`` that are no mappings) and, in
                ``data`` and ``trainer``, arguments that differ from the configuration's.
        """
        if isinstance(entry, str):
            file = find_config(entry)
            if os.path.isfile(file):
                return cls._configured(file, explicit, given, listed)
            if "/" in entry or entry.endswith((".yaml", ".yml")):
                guess = did_you_mean(entry.removeprefix("configs/").removesuffix(".yaml"), installed())
                sys.exit(f"fedlit: compare: {entry!r} is no file and no installed configuration{guess} fedlit list")
            shipped = _shipped(entry if "." in entry else f"fedlit.methods.{entry}")
            init_args = {} if shipped is None else _model_of(shipped).get("init_args", {})
            own = (
                as_word(f"model.init_args.{key}", value)
                for key, value in init_args.items()
                if not any(_within(each, f"model.{key}") for each in explicit)
            )
            return cls(None, (f"--model={entry}", *own))
        sections = {key: entry.get(key) or {} for key in ("init_args", "data", "trainer")}
        known = isinstance(entry.get("class_path"), str) and set(entry) <= set(_ENTRY)
        if not known or not all(isinstance(section, dict) for section in sections.values()):
            sys.exit(
                "fedlit: an entry of compare must be a class path or a mapping with class_path and, if need be, "
                f"{', '.join(_ENTRY[1:])}, got {entry}"
            )
        sections["model.init_args"] = init_args = sections.pop("init_args")
        given = {
            section: [as_word(f"{section}.{name}", value) for name, value in values.items()]
            for section, values in sections.items()
        }
        arguments = (f"--model={entry['class_path']}", *given.pop("model.init_args"))
        shown = [f"{name}={value}" for name, value in init_args.items() if not isinstance(value, dict)]
        name = entry["class_path"].split(".")[-1] + (f"({', '.join(shown)})" if shown else "")
        return cls(str(entry.get("name") or name), arguments, tuple(chain.from_iterable(given.values())))

    @classmethod
    def _configured(
        cls,
        file: str,
        explicit: Collection[str],
        given: Collection[str],
        listed: Mapping[str, Collection[str]],
    ) -> Method:
        content = content_of(file)
        if not isinstance(content, dict):
            sys.exit(f"fedlit: {file} in compare must be a configuration, with model and so on, got {content!r}")
        own = dict(content)
        if isinstance(own.get("trainer"), dict):
            own["trainer"] = _beside_lists(own["trainer"], listed)
        own |= {key: _unless(explicit, own[key], key) for key in ("data", "trainer") if key in own}
        model = content.get("model")
        if isinstance(model, dict):
            own["model"] = _unless({*given} - {"model.class_path"}, model, "model", branches=True)
        path = model.get("class_path") if isinstance(model, dict) else model
        name = path.split(".")[-1] if path and _shipped(path) == file else Path(file).stem
        return cls(name, (f"--config={file if own == content else flow(own)}",))

    def beside(self, given: set[str]) -> Method:
        """The same without presets for keys that the user gives; these without ``init_args``."""
        return replace(self, preset=tuple(word for word in self.preset if not given & _keys(word)))

    def command(self, args: Sequence[str]) -> list[str]:
        """The whole command line: configurations, what this method presets, what the user gave, and what it must have.

        What the user gave before the last configuration about something that is preset is given again after it, and
        what the user appends to a list that this method sets (``KEY+=``) is appended to that.
        """
        places = [place for place, arg in enumerate(args) if arg.startswith(("--config", "-c"))]
        after = 1 if not places else places[-1] + (1 if "=" in args[places[-1]] else 2)
        preset = [key for word in self.preset for key in _keys(word)]
        again = [
            f"--{key}={value}"
            for key, value in options(args[:after])
            if value is not None and any(_within(_base(key), each) or _within(each, _base(key)) for each in preset)
        ]
        own = {key for word in self.arguments for key in _keys(word)}
        return [*args[:after], *self.preset, *again, *args[after:], *self.arguments, *_appended(args, own)]


def _appended(args: Sequence[str], keys: Collection[str]) -> list[str]:
    """Words that append to lists of these keys, and those that then give arguments to what was appended."""
    begun: set[str] = set()
    words = []
    for key, value in options(args):
        base = _base(key)
        if key.endswith("+") and any(_within(each, base) for each in keys):
            begun.add(base)
        elif not any(_within(base, each) and base != each for each in begun):
            continue
        if value is not None:
            words.append(f"--{key}={value}")
    return words


def _beside_lists(trainer: dict[str, Any], listed: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Arguments of the Trainer, whose lists are appended to those that the experiment has."""
    found = {}
    for name, value in trainer.items():
        if name not in listed:
            found[name] = value
            continue
        if _NOTHING in listed[name]:
            continue
        items = value if isinstance(value, list) else [value]
        kept = [item for item in items if isinstance(item, str | dict) and _class_of(item) not in listed[name]]
        if kept:
            found[f"{name}+"] = kept
    return found


def _listed(args: Sequence[str]) -> dict[str, set[str]]:
    """By list of the Trainer that an experiment sets or appends to, the classes in it."""
    found: dict[str, set[str]] = {}
    for key, value in options(args):
        name = key.removeprefix("trainer.")
        if value is None or not (key in ("config", "c", "trainer") or _base(name) in _LISTS):
            continue
        content = content_of(value)
        if key in ("config", "c"):
            content = content.get("trainer") if isinstance(content, dict) else None
        elif key != "trainer":
            content = {name: content}
        given = content if isinstance(content, dict) else {}
        for name in _LISTS:
            if given.get(name) is not None:
                found[name] = set()  # what was there before is replaced
            for items in (given[each] for each in (name, f"{name}+") if given.get(each) is not None):
                classes = map(_class_of, items if isinstance(items, list) else [items])
                found.setdefault(name, set()).update(classes)
    return found


def _class_of(item: object) -> str:
    """Name of the class that an entry of a list has, without its module."""
    path = item.get("class_path") if isinstance(item, dict) else item
    return str(path).rpartition(".")[2]


def _shipped(path: str) -> str | None:
    """The configuration that is shipped for a class; of several, the plainest."""
    folder = files("fedlit.configs").joinpath("methods")
    found = [str(file) for file in folder.iterdir() if file.name.endswith(".yaml")]
    return min((file for file in found if _model_of(file).get("class_path") == path), key=len, default=None)


@cache
def _model_of(file: str) -> dict[str, Any]:
    model: dict[str, Any] = yaml.safe_load(Path(file).read_text(encoding="utf-8"))["model"]
    return model


def _unless(explicit: Collection[str], tree: Any, above: str, branches: bool = False) -> Any:
    """What a configuration has below a key, without leaves that are set already, and if so without branches."""
    if not isinstance(tree, dict):
        return tree
    return {
        name: _unless(explicit, branch, f"{above}.{name}", branches)
        for name, branch in tree.items()
        if (isinstance(branch, dict) and not branches) or not _is_set(_short(f"{above}.{name}"), branch, explicit)
    }


def _is_set(key: str, branch: object, explicit: Collection[str]) -> bool:
    """Whether the experiment sets a key, or entries of the list at it; what is appended to a list never stands back."""
    return (key in explicit and not key.endswith("+")) or (
        isinstance(branch, list) and any(each.startswith(f"{key}.") for each in explicit)
    )


def _keys(word: str) -> set[str]:
    """Keys that a word of `as_word` sets, without ``init_args``."""
    ((key, value),) = options([word])
    if key != "config" or value is None:
        return {_short(key)}
    return {*map(_short, flat(content_of(value)))}


def _explicit(args: Sequence[str], configurations: bool = True) -> set[str]:
    """Leaves that options set, and configuration files or not, without ``init_args``."""
    found: set[str] = set()
    for key, value in options(args):
        content: object = {key: None}
        if key in ("config", "c") and value is not None:
            content = content_of(value) if configurations else {}
        elif key in ("model", "data", "trainer") and value is not None:
            whole = content_of(value)
            content = {key: whole if isinstance(whole, dict) else {"class_path": whole}}
        elif key.endswith("init_args") and value is not None:
            content = {key: content_of(value)}
        found.update(map(_short, flat(content)))
    return found


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Args:
        method: What is trained.
        target: Client name; ``None`` is the target of the configuration.
        seed: ``None`` is the seed of the configuration.
    """

    method: Method
    target: str | None
    seed: int | None

    def __str__(self) -> str:
        axes = {"seed_everything": self.seed, "data.target": self.target}
        own = [*self.method.preset, *(f"--{key}={value}" for key, value in axes.items() if value is not None)]
        own += self.method.arguments
        return " ".join([*([] if self.method.name is None else [f"{self.method.name}:"]), *own]) or "as configured"


def _short(key: str) -> str:
    """A key as jsonargparse also takes it, without the words for a class's arguments."""
    return key.replace(".init_args", "")


def _base(key: str) -> str:
    """A key without the sign of what is appended to it, as `_short` has it."""
    return _short(key.removesuffix("+"))


def _within(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


@dataclass(frozen=True)
class Experiment:
    """The runs that one ``fedlit fit`` stands for.

    Args:
        args: Of the user.
        parsed: The same, parsed.
        methods: The method of the configuration, and those it is compared with.
        targets: Client names; ``None`` is the target of the configuration.
        seeds: ``None`` is the seed of the configuration.
    """

    args: list[str]
    parsed: Parsed
    methods: tuple[Method, ...]
    targets: tuple[str | None, ...]
    seeds: tuple[int | None, ...]

    @classmethod
    def parse(cls, args: list[str]) -> Experiment:
        """Read the experiment's axes from command line and configuration files."""
        cli = FedlitCLI(args, run_classes=False)
        parsed = Parsed(cli._parser(cli.subcommand), cli.config)
        targets: Sequence[str | None] = parsed.arguments.targets or (None,)
        if list(targets) == ["all"]:
            targets = all_clients(parsed)
        elif len(targets) > 1:  # one that there is not is found by the first run
            known = all_clients(parsed)
            unknown = [target for target in targets if target not in known]
            if unknown:
                sys.exit(f"fedlit: targets {unknown} are not among the clients {list(known)}")
        given, explicit = {_short(key) for key, _ in options(args)}, _explicit(args)
        entries = parsed.arguments.compare or ()
        options_set = _explicit(args, configurations=False)
        listed = _listed(args)
        methods = (Method(), *(Method.parse(entry, explicit, options_set, listed).beside(given) for entry in entries))
        names = [method.name or method.arguments[0].split(".")[-1].split("=")[-1] for method in methods[1:]]
        names.append(parsed.arguments.model.class_path.split(".")[-1])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            sys.exit(
                f"fedlit: two methods of this experiment are called {twice[0]!r}: give an entry of compare a name of "
                "its own, or leave it out (--compare null trains the configured method alone)"
            )
        if parsed.arguments.select is not None and len(methods) == 1:
            sys.exit(
                "fedlit: select chooses among methods: name others in compare, or, for the round of one method, "
                "monitor validator/trust (--trainer.callbacks+=Validators --trainer.callbacks+=TrustedRound)"
            )
        seeds: Sequence[int | None] = parsed.arguments.seeds or (None,)
        axes: dict[str, Sequence[object]] = {"seeds": seeds, "targets": targets}
        for axis, values in axes.items():
            again = next((value for value in values if values.count(value) > 1), None)
            if again is not None:
                sys.exit(f"fedlit: {axis} has {again!r} twice, and equal runs are no repetitions: name it once")
        for seed in seeds:
            if seed is not None and not 0 <= seed <= max_seed_value:
                sys.exit(f"fedlit: seeds must be between 0 and {max_seed_value}, got {seed}")
        return cls(args, parsed, methods, tuple(targets), tuple(seeds))

    @cached_property
    def runs(self) -> list[Run]:
        """All combinations, methods changing slowest."""
        return [Run(*each) for each in product(self.methods, self.targets, self.seeds)]

    @cached_property
    def _repeats(self) -> WarnOfRepeats | None:
        targets = [target for target in self.targets if target is not None]
        return WarnOfRepeats(targets, {}) if len(self.runs) > 1 else None

    @cached_property
    def by_method(self) -> dict[Method, Parsed]:
        """The configuration with each method: parsed once for all targets and seeds, on which it does not depend."""
        for method in self.methods:
            refuse_linked([*method.preset, *method.arguments])
        return {Method(): self.parsed} | {
            method: self.parsed.instead(method.command(self.args)[1:]) for method in self.methods if method != Method()
        }

    def check(self) -> None:
        """Find methods that need labels of the target where it has none, before the first run trains."""
        for method, parsed in self.by_method.items():
            path = parsed.arguments.model.class_path
            needs_labels = getattr(getattr(locate(path), "requires", None), "target_labels", False)
            if needs_labels and parsed.arguments.get("data.init_args.target_labels") == 0:
                sys.exit(
                    f"fedlit: {method.name or path.split('.')[-1]} trains on target labels, but "
                    "data.init_args.target_labels is 0: give a number of samples, or a share such as 1.0"
                )

    def configuration(self, run: Run) -> Parsed:
        """What one of `runs` is trained with."""
        return self.by_method[run.method].on(run.target, run.seed)

    @cached_property
    def folder(self) -> ExperimentFolder:
        """Where it keeps what it has done."""
        root = Path(self.parsed.arguments.trainer.default_root_dir or "runs")
        return ExperimentFolder(root, [self.configuration(run).text for run in self.runs])

    def start(
        self,
        run: Run,
        place: Callable[[Path], Path] | None = None,
        checkpoint: Path | None = None,
        seat: Seat | None = None,
    ) -> RunSummary:
        """Train and evaluate one of `runs`.

        Args:
            run: Which.
            place: Makes its folder in the one that is given; ``None`` takes the next number.
            checkpoint: Of this run, in that folder: where it was interrupted and goes on.
            seat: In a federation across organisations.
        """
        cli = FedlitCLI(
            self.configuration(run),
            one_of_many=len(self.runs) > 1,
            name=run.method.name,
            repeats=self._repeats,
            place=place,
            checkpoint=checkpoint,
            seat=seat,
        )
        assert cli.summary is not None
        return cli.summary


def all_clients(parsed: Parsed) -> tuple[str, ...]:
    """Names of the domains that take part; builds the data module, and nothing else."""
    config = parsed.arguments.clone()
    for key in ("model", "trainer"):
        config.pop(key)
    with in_plain_words(config):
        data = parsed.parser.instantiate_classes(config)["data"]
    return tuple(client.name for client in data.check_roster())
