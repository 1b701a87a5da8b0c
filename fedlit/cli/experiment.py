"""``fedlit {fit,validate,test,predict}``; of fit, every method of ``compare`` on every target with every seed."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import product
from pathlib import Path
from pydoc import locate
from typing import Any

import yaml
from lightning.fabric.utilities.seed import max_seed_value

from fedlit.callbacks import RunSummary
from fedlit.callbacks.report.run_folder import read_runs
from fedlit.callbacks.selection import as_json, select
from fedlit.callbacks.shared import write_whole
from fedlit.cli.arguments import as_word, content_of, find_config, options, refuse_linked, trees
from fedlit.cli.combination import combine
from fedlit.cli.command import is_question
from fedlit.cli.folders import SELECTED, ExperimentFolder, fingerprint, first_process
from fedlit.cli.known import did_you_mean
from fedlit.cli.lightning_cli import FedlitCLI, in_sweep
from fedlit.cli.mistakes import installed
from fedlit.cli.parsed import Parsed, in_plain_words
from fedlit.cli.plan import Plan, print_table, say
from fedlit.configs import flat, flow

_ENTRY = ("class_path", "init_args", "name", "data", "trainer")
"""What a mapping in ``compare`` may hold."""

_LISTS = ("callbacks", "logger", "plugins")
"""Arguments of the Trainer that hold several objects, each of which stands for itself."""

_NOTHING = "False"
"""What a configuration has that turns such an argument off, as `_class_of` has it."""

_OF_TWO_TYPES = ("target_labels", "overfit_batches", "val_check_interval", "limit_{}_batches")
"""Ends of parameters that take a number if whole, and a share if not: 1 and 1.0 are one and all."""


@dataclass(frozen=True)
class Method:
    """What the runs of a method add to the command line, and what the closing table calls them."""

    name: str | None = None  # ``None`` is the name of the configuration's class
    arguments: tuple[str, ...] = ()  # command line arguments; none is the method of the configuration
    preset: tuple[str, ...] = ()  # arguments for data and Trainer, which give way to those of the command line

    def command(self, args: Sequence[str]) -> list[str]:
        """The whole command line: configurations, what this method presets, what the user gave, and what it must have.

        What the user gave before the last configuration about something that is preset is given again after it, and
        what the user appends to a list that this method sets (``KEY+=``) is appended to that.
        """
        configs = [index for index, arg in enumerate(args) if arg.startswith(("--config", "-c"))]
        after = 1 if not configs else configs[-1] + (1 if "=" in args[configs[-1]] else 2)
        preset = [key for word in self.preset for key in _keys(word)]
        again = [
            f"--{key}={value}"
            for key, value in options(args[:after])
            if value is not None and any(_within(_base(key), each) or _within(each, _base(key)) for each in preset)
        ]
        own = {key for word in self.arguments for key in _keys(word)}
        return [*args[:after], *self.preset, *again, *args[after:], *self.arguments, *_appended(args, own)]


@dataclass(frozen=True)
class _Context:
    """What an experiment sets itself, beside what it compares."""

    explicit: Collection[str] = ()  # keys that it sets
    given: Collection[str] = ()  # those of them that options of the command line set
    # by list of the Trainer, such as ``"callbacks"``, the classes in it
    listed: Mapping[str, Collection[str]] = field(default_factory=dict)


def read_methods(entries: Sequence[str | dict[str, Any]], args: Sequence[str]) -> tuple[Method, ...]:
    """The method of the configuration, and those that it is compared with.

    A configuration, such as ``methods/fed_mmd`` or a file, is called by its file, or by its class if it is what is
    shipped for that. What the experiment sets in data and trainer stays, and what the command line sets in model; its
    lists come beside the experiment's. A class gets the arguments of its shipped configuration, as far as the
    experiment sets nothing else. A mapping is called by its class and those ``init_args`` that are no mappings.
    """
    context = _Context(_explicit(args), _explicit(args, configurations=False), _listed(args))
    keys = {_short(key) for key, _ in options(args)}
    methods = [Method()]
    for entry in entries:
        method = _of_text(entry, context) if isinstance(entry, str) else _of_mapping(entry)
        # what the user gives takes the place of presets
        methods.append(replace(method, preset=tuple(word for word in method.preset if not keys & _keys(word))))
    return tuple(methods)


def name_of(config: str) -> str | None:
    """What a configuration is called among methods that are compared; ``None`` if it is no file."""
    file = find_config(config)
    return _configured(file, _Context()).name if os.path.isfile(file) else None


def _of_text(entry: str, context: _Context) -> Method:
    file = find_config(entry)
    if os.path.isfile(file):
        return _configured(file, context)
    if "/" in entry or entry.endswith((".yaml", ".yml")):
        guess = did_you_mean(entry.removeprefix("configs/").removesuffix(".yaml"), installed())
        sys.exit(f"fedlit: compare: {entry!r} is no file and no installed configuration{guess} fedlit list")
    shipped = shipped_for(entry if "." in entry else f"fedlit.methods.{entry}")
    init_args = {} if shipped is None else _model_of(shipped).get("init_args", {})
    own = (
        as_word(f"model.init_args.{key}", value)
        for key, value in init_args.items()
        if not any(_within(each, f"model.{key}") for each in context.explicit)
    )
    return Method(None, (f"--model={entry}", *own))


def _of_mapping(entry: dict[str, Any]) -> Method:
    sections = {key: entry.get(key) or {} for key in ("init_args", "data", "trainer")}
    is_class = isinstance(entry.get("class_path"), str) and set(entry) <= set(_ENTRY)
    if not is_class or not all(isinstance(section, dict) for section in sections.values()):
        sys.exit(
            "fedlit: an entry of compare must be a class path or a mapping with class_path and, if need be, "
            f"{', '.join(_ENTRY[1:])}, got {entry}"
        )
    init_args = sections.pop("init_args")
    own = [as_word(f"model.init_args.{key}", value) for key, value in init_args.items()]
    preset = [as_word(f"{part}.{key}", value) for part, values in sections.items() for key, value in values.items()]
    shown = [f"{name}={value}" for name, value in init_args.items() if not isinstance(value, dict)]
    name = entry["class_path"].split(".")[-1] + (f"({', '.join(shown)})" if shown else "")
    return Method(str(entry.get("name") or name), (f"--model={entry['class_path']}", *own), tuple(preset))


def _configured(file: str, context: _Context) -> Method:
    content = content_of(file)
    if not isinstance(content, dict):
        sys.exit(f"fedlit: {file} in compare must be a configuration, with model and so on, got {content!r}")
    own = dict(content)
    if isinstance(own.get("trainer"), dict):
        own["trainer"] = _beside_lists(own["trainer"], context.listed)
    own |= {key: _unless(context.explicit, own[key], key) for key in ("data", "trainer") if key in own}
    model = content.get("model")
    if isinstance(model, dict):
        own["model"] = _unless({*context.given} - {"model.class_path"}, model, "model", branches=True)
    path = model.get("class_path") if isinstance(model, dict) else model
    name = path.split(".")[-1] if path and shipped_for(path) == file else Path(file).stem
    return Method(name, (f"--config={file if own == content else flow(own)}",))


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
    """Arguments of the Trainer, whose lists are appended to the experiment's, without classes that are in these."""
    result = {}
    for name, value in trainer.items():
        if name not in listed:
            result[name] = value
        elif _NOTHING not in listed[name]:
            items = value if isinstance(value, list) else [value]
            kept = [item for item in items if isinstance(item, str | dict) and _class_of(item) not in listed[name]]
            if kept:
                result[f"{name}+"] = kept
    return result


def _listed(args: Sequence[str]) -> dict[str, set[str]]:
    """By list of the Trainer that an experiment sets or appends to, the classes in it."""
    listed: dict[str, set[str]] = {}
    for _, tree in trees(args):
        trainer = tree.get("trainer") if isinstance(tree, dict) else None
        for key, items in trainer.items() if isinstance(trainer, dict) else ():
            name = key.removesuffix("+")
            items = content_of(items) if isinstance(items, str) else items  # an option may be false, or null
            if name not in _LISTS or items is None or (isinstance(items, dict) and "class_path" not in items):
                continue  # or arguments of what was appended before
            if key == name:
                listed[name] = set()  # what was there before is replaced
            listed.setdefault(name, set()).update(map(_class_of, items if isinstance(items, list) else [items]))
    return listed


def _class_of(item: object) -> str:
    path = item.get("class_path") if isinstance(item, dict) else item
    return str(path).rpartition(".")[2]


def shipped_for(path: str) -> str | None:
    """The configuration that is shipped for a class; of several, the plainest."""
    folder = files("fedlit.configs").joinpath("methods")
    configs = [str(file) for file in folder.iterdir() if file.name.endswith(".yaml")]
    return min((file for file in configs if _model_of(file).get("class_path") == path), key=len, default=None)


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
    return {_short(key)} if key != "config" or value is None else {*map(_short, flat(content_of(value)))}


def _explicit(args: Sequence[str], configurations: bool = True) -> set[str]:
    """Leaves that options set, and configuration files or not, without ``init_args``."""
    leaves: set[str] = set()
    for where, tree in trees(args):
        key = where.removeprefix("--")
        if where == key:
            leaves.update(flat(tree) if configurations else ())
        elif key in ("model", "data", "trainer"):
            leaves.update(flat(tree if isinstance(tree[key], dict) else {key: {"class_path": tree[key]}}))
        else:
            leaves.update(flat(tree) if key.endswith("init_args") else [key])
    return {*map(_short, leaves)}


def _short(key: str) -> str:
    """A key as jsonargparse also takes it, without the words for a class's arguments."""
    return key.replace(".init_args", "")


def _base(key: str) -> str:
    """A key without the sign of what is appended to it, as `_short` has it."""
    return _short(key.removesuffix("+"))


def _within(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


@dataclass(frozen=True)
class Run:
    """One run of an experiment."""

    method: Method  # what is trained
    target: str | None  # client name; ``None`` is the target of the configuration
    seed: int | None  # ``None`` is the seed of the configuration

    def __str__(self) -> str:
        axes = {"seed_everything": self.seed, "data.target": self.target}
        own = [*self.method.preset, *(f"--{key}={value}" for key, value in axes.items() if value is not None)]
        own += self.method.arguments
        return " ".join([*([] if self.method.name is None else [f"{self.method.name}:"]), *own]) or "as configured"


class Experiment(Plan):
    """The runs that one ``fedlit fit`` stands for, by its command line with configuration files."""

    runs: list[Run]

    def __init__(self, args: list[str], one_target: bool = False) -> None:
        cli = FedlitCLI(args, run_classes=False)
        self.args = args
        self.parsed = Parsed(cli._parser(cli.subcommand), cli.config)
        arguments = self.parsed.arguments
        targets = arguments.targets or [None]
        if one_target and targets == ["all"]:  # the clients are found in the data, which are not read yet
            sys.exit("fedlit: targets=[all] is several runs, and this is for one: give --targets=null, and data.target")
        self.targets = targets if one_target else self._targets(targets)
        self.seeds: Sequence[int | None] = arguments.seeds or [None]
        self.methods = read_methods(arguments.compare or (), args)
        self._check()
        self.targets_tried = [target for target in self.targets if target is not None]
        self.runs = [Run(*each) for each in product(self.methods, self.targets, self.seeds)]  # methods change slowest

    def _targets(self, targets: Sequence[str | None]) -> Sequence[str | None]:
        """Targets that there are; of a single one the first run finds out."""
        if len(targets) > 1 or targets == ["all"]:
            clients = all_clients(self.parsed)
            if targets == ["all"]:
                return clients
            unknown = [target for target in targets if target not in clients]
            if unknown:
                sys.exit(f"fedlit: targets {unknown} are not among the clients {list(clients)}")
        return targets

    def _check(self) -> None:
        names = [method.name or method.arguments[0].split(".")[-1].split("=")[-1] for method in self.methods[1:]]
        names.append(self.parsed.arguments.model.class_path.split(".")[-1])
        if twice := _twice(names):
            sys.exit(
                f"fedlit: two methods of this experiment are called {min(map(str, twice))!r}: give an entry of compare "
                "a name of its own, or leave it out (--compare null trains the configured method alone)"
            )
        if self.parsed.arguments.select is not None:
            self._check_select()
        axes: dict[str, Sequence[object]] = {"seeds": self.seeds, "targets": self.targets}
        for axis, values in axes.items():
            if twice := _twice(values):
                sys.exit(f"fedlit: {axis} has {twice[0]!r} twice, and equal runs are no repetitions: name it once")
        for seed in self.seeds:
            if seed is not None and not 0 <= seed <= max_seed_value:
                sys.exit(f"fedlit: seeds must be between 0 and {max_seed_value}, got {seed}")

    def _check_select(self) -> None:
        """End before anything is trained of which nothing could be selected."""
        arguments = self.parsed.arguments
        if len(self.methods) == 1:
            sys.exit(
                "fedlit: select chooses among methods: name others in compare, or, for the round of one method, "
                "monitor validator/trust (--trainer.callbacks+=Validators --trainer.callbacks+=TrustedRound)"
            )
        if (arguments.data.get("init_args") or {}).get("val_fraction") == 0:
            sys.exit(
                "fedlit: select compares models on validation samples, and data.val_fraction is 0: give "
                "--data.val_fraction 0.2"
            )
        if arguments.select == "combine":
            if arguments.trainer.enable_checkpointing is False:
                sys.exit(
                    "fedlit: select=combine reads the methods' checkpoints: give --trainer.enable_checkpointing true"
                )
            if not self.in_one_process:
                sys.exit(
                    "fedlit: select=combine trains a network of the target in one process: give --trainer.devices 1"
                )

    @cached_property
    def by_method(self) -> dict[Method, Parsed]:
        """The configuration with each method: parsed once for all targets and seeds, on which it does not depend."""
        for method in self.methods:
            refuse_linked([*method.preset, *method.arguments])
        first, *others = self.methods
        return {first: self.parsed} | {each: self.parsed.instead(each.command(self.args)[1:]) for each in others}

    def configuration(self, number: int) -> Parsed:
        """The arguments that a run is trained with."""
        run = self.runs[number]
        return self.by_method[run.method].on(run.target, run.seed)

    def name(self, number: int) -> str | None:
        """The run's name in tables; ``None`` for its method's class."""
        return self.runs[number].method.name

    @cached_property
    def folder(self) -> ExperimentFolder:
        """Where finished runs are noted: a folder named by the configurations of all runs."""
        each = [fingerprint(self.configuration(number).text) for number in range(len(self.runs))]
        return ExperimentFolder(self.root, f"experiment_{fingerprint(*each)[:12]}", len(each), each.__getitem__)

    def run(self, args: list[str]) -> None:
        """Train the runs that are not finished, and close; first find methods that need labels where there are none."""
        for method, parsed in self.by_method.items():
            path = parsed.arguments.model.class_path
            needs_labels = getattr(getattr(locate(path), "requires", None), "target_labels", False)
            if needs_labels and parsed.arguments.get("data.init_args.target_labels") == 0:
                sys.exit(
                    f"fedlit: {method.name or path.split('.')[-1]} trains on target labels, but "
                    "data.init_args.target_labels is 0: give a number of samples, or a share such as 1.0"
                )
        super().run(args)

    def close(self, done: Mapping[int, RunSummary], failed: Collection[int]) -> None:
        """Print and write the closing table, and which method to take the model of."""
        summaries, sentences = [*done.values()], list[str]()
        try:
            if first_process() and not self.is_dry and self.parsed.arguments.select is not None:
                combined, sentences = self._select(done, failed)
                summaries += combined
        finally:  # what fails at the end does not take the results with it
            print_table(summaries)
            if first_process() and not self.is_dry:
                self.write_tables(summaries)
        for each in sentences:
            say(each)

    @property
    def base(self) -> str:
        """Name in tables of the configuration's own method."""
        return str(self.parsed.arguments.model.class_path).split(".")[-1]

    def taught(self, teacher: str) -> Parsed:
        """The arguments of a network of the configuration that learns what a file has."""
        of_model = {"teacher": teacher, "refine": False, "warmup_rounds": 0, "trust_region": None}
        words = [as_word(f"model.init_args.{name}", value) for name, value in of_model.items()]
        method = Method(None, ("--model=fedlit.methods.TargetDistillation", *words, "--select=null"))
        return self.parsed.instead(method.command(self.args)[1:])

    def _select(self, done: Mapping[int, RunSummary], failed: Collection[int]) -> tuple[list[RunSummary], list[str]]:
        """Networks of combinations, and sentences on what is selected and combined."""
        places = [self.folder.folder_of(number) for number in done]
        selections = select({str(place): read_runs([place])[0] for place in places if place is not None})
        write_whole(self.folder.path / SELECTED, as_json(selections))
        sentences = [str(each) for each in selections]
        if not selections:
            why = "as where the target has no validation samples (val_fraction of the data) or reports are off"
            sentences.append(f"nothing is selected: no validation has logged validator/trust, {why}")
        if self.parsed.arguments.select != "combine":
            return [], sentences
        if len(done) + len(failed) < len(self.runs):  # one that fails is left out
            return [], [
                *sentences,
                f"nothing is combined before all runs are finished, and {len(done)} of {len(self.runs)} are",
            ]
        if failed:
            sentences.append(
                f"nothing of the runs that failed is combined: {', '.join(str(self.runs[i]) for i in failed)}"
            )
        combined, more = combine(self, selections)
        return combined, sentences + more


def _twice(values: Sequence[object]) -> list[object]:
    return [value for place, value in enumerate(values) if value in values[:place]]


def all_clients(parsed: Parsed) -> tuple[str, ...]:
    """Names of the domains that take part; builds the data module, and nothing else."""
    config = parsed.arguments.clone()
    for key in ("model", "trainer"):
        config.pop(key)
    with in_plain_words(config):
        data = parsed.parser.instantiate(config)["data"]
    return tuple(client.name for client in data.check_roster())


def run_trainer(args: list[str]) -> None:
    """Run a subcommand of Lightning's CLI, of fit all runs that it stands for; ``args`` are normalised and checked."""
    if "fit" not in args[:1] or is_question(args):
        FedlitCLI(args)
        return
    _refuse_lost_types()
    experiment = Experiment(args)
    if experiment.parsed.arguments.get("seat") is not None:
        sys.exit("fedlit: fit has no seat: take it with fedlit serve (the server's) or fedlit join (a site's)")
    runs = experiment.runs
    if len(runs) > 1 and any(each.arguments.get("ckpt_path") for each in experiment.by_method.values()):
        sys.exit(
            f"fedlit: ckpt_path resumes one run, but this is {len(runs)} runs (seeds, targets, compare): resume "
            "each by itself, with --seeds null --targets null --compare null"
        )
    if len(runs) > 1 and in_sweep():
        sys.exit(
            f"fedlit: a trial of a W&B sweep is one run, but this is {len(runs)} (seeds, targets, compare): sweep over "
            "data.target, seed_everything and config, and give --seeds=null --targets=null --compare=null"
        )
    if len(runs) == 1:
        if experiment.parsed.arguments.fresh:
            experiment.set_journals_aside()
        print_table([experiment.start(0)])
        return
    experiment.run(args)


def _refuse_lost_types() -> None:
    """End a trial of W&B's service that may have been sent 1 for 1.0."""
    path = os.environ.get("WANDB_SWEEP_PARAM_PATH", "")
    if not in_sweep() or not os.path.isfile(path):
        return
    parameters = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    ends = [end.format(part) for end in _OF_TWO_TYPES for part in ("train", "val", "test", "predict")]
    for name, about in (parameters if isinstance(parameters, dict) else {}).items():
        value = about.get("value") if isinstance(about, dict) else None
        if type(value) is int and value == 1 and str(name).rpartition(".")[2] in ends:
            sys.exit(
                f"fedlit: the sweep gives {name}=1, and W&B's service sends 1.0 as 1, so that it may mean one or all: "
                "for all write '1.0' in quotes in the sweep file, for one put the option into its command"
            )
