"""The runs that one ``fedlit fit`` stands for: every method of ``compare`` on every target with every seed."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pydoc import locate
from typing import Any

from lightning.fabric.utilities.seed import max_seed_value

from fedlit.cli.arguments import options
from fedlit.cli.lightning_cli import FedlitCLI, in_plain_words

_ENTRY = ("class_path", "init_args", "name", "data", "trainer")
"""What a mapping in ``compare`` may hold."""


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
    def parse(cls, entry: str | dict[str, Any]) -> Method:
        """Read a class path, or a mapping that has one.

        Args:
            entry: A mapping has ``class_path`` and may have ``init_args``, ``name`` (by default the class and those
                ``init_args`` that are no mappings) and, in ``data`` and ``trainer``, arguments that differ from the
                configuration's.
        """
        if isinstance(entry, str):
            return cls(None, (f"--model={entry}",))
        sections = {key: entry.get(key) or {} for key in ("init_args", "data", "trainer")}
        if (
            not isinstance(entry.get("class_path"), str)
            or set(entry) - set(_ENTRY)
            or not all(isinstance(section, dict) for section in sections.values())
        ):
            sys.exit(
                "fedlit: an entry of compare must be a class path or a mapping with class_path and, if need be, "
                f"{', '.join(_ENTRY[1:])}, got {entry}"
            )
        init_args = sections.pop("init_args")
        sections["model.init_args"] = init_args
        given = {
            section: [f"--{section}.{name}={_as_argument(value)}" for name, value in values.items()]
            for section, values in sections.items()
        }
        arguments = (f"--model={entry['class_path']}", *given.pop("model.init_args"))
        shown = [f"{name}={value}" for name, value in init_args.items() if not isinstance(value, dict)]
        name = entry["class_path"].split(".")[-1] + (f"({', '.join(shown)})" if shown else "")
        return cls(str(entry.get("name") or name), arguments, tuple(chain.from_iterable(given.values())))

    def beside(self, given: Collection[str]) -> Method:
        """The same without presets for keys that the user gives.

        Args:
            given: These keys, without ``init_args``.
        """
        kept = (f"--{key}={value}" for key, value in options(self.preset) if _short(key) not in given)
        return replace(self, preset=tuple(kept))


def _as_argument(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Args:
        name: Of its method in the closing table; ``None`` is its class.
        arguments: Command line arguments that it adds.
        preset: Those that give way to the user's own.
    """

    name: str | None
    arguments: tuple[str, ...]
    preset: tuple[str, ...] = ()

    def __str__(self) -> str:
        own = [*self.preset, *self.arguments]
        return " ".join([*([] if self.name is None else [f"{self.name}:"]), *own]) or "as configured"

    def command(self, args: Sequence[str]) -> list[str]:
        """The whole command line: configurations, what this run presets, what the user gave, and what it must have.

        What the user gave before the last configuration about something that is preset is given again after it.

        Args:
            args: Of the user.
        """
        places = [place for place, arg in enumerate(args) if arg.startswith(("--config", "-c"))]
        after = 1 if not places else places[-1] + (1 if "=" in args[places[-1]] else 2)
        preset = [_short(key) for key, _ in options(self.preset)]
        again = [
            f"--{key}={value}"
            for key, value in options(args[:after])
            if value is not None and any(_within(_short(key), each) or _within(each, _short(key)) for each in preset)
        ]
        return [*args[:after], *self.preset, *again, *args[after:], *self.arguments]


def _short(key: str) -> str:
    """A key as jsonargparse also takes it, without the words for a class's arguments."""
    return key.replace(".init_args", "")


def _within(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


@dataclass(frozen=True)
class Experiment:
    """The runs that one ``fedlit fit`` stands for.

    Args:
        methods: The method of the configuration, and those it is compared with.
        targets: Client names; ``None`` is the target of the configuration.
        seeds: ``None`` is the seed of the configuration.
    """

    methods: tuple[Method, ...] = (Method(),)
    targets: tuple[str | None, ...] = (None,)
    seeds: tuple[int | None, ...] = (None,)

    @classmethod
    def parse(cls, args: list[str]) -> Experiment:
        """Read the experiment's axes from command line and configuration files."""
        config = FedlitCLI(args, run_classes=False).config
        config = config.get(config.get("subcommand") or "", config)
        targets: Sequence[str | None] = config.get("targets") or (None,)
        if list(targets) == ["all"]:
            targets = all_clients(args)
        elif len(targets) > 1:  # one that there is not is found by the first run
            known = all_clients(args)
            unknown = [target for target in targets if target not in known]
            if unknown:
                sys.exit(f"fedlit: targets {unknown} are not among the clients {list(known)}")
        given = {_short(key) for key, _ in options(args)}
        methods = (Method(), *(Method.parse(entry).beside(given) for entry in config.get("compare") or ()))
        names = [method.name or method.arguments[0].split(".")[-1].split("=")[-1] for method in methods[1:]]
        configured = config.get("model")
        if configured is not None:
            names.append(str(configured.get("class_path")).split(".")[-1])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            sys.exit(
                f"fedlit: two methods of this experiment are called {twice[0]!r}: give an entry of compare a name of "
                "its own, or leave it out (--compare null trains the configured method alone)"
            )
        seeds: Sequence[int | None] = config.get("seeds") or (None,)
        axes: dict[str, Sequence[object]] = {"seeds": seeds, "targets": targets}
        for axis, values in axes.items():
            again = next((value for value in values if values.count(value) > 1), None)
            if again is not None:
                sys.exit(f"fedlit: {axis} has {again!r} twice, and equal runs are no repetitions: name it once")
        for seed in seeds:
            if seed is not None and not 0 <= seed <= max_seed_value:
                sys.exit(f"fedlit: seeds must be between 0 and {max_seed_value}, got {seed}")
        return cls(methods, tuple(targets), tuple(seeds))

    def check(self, args: Sequence[str]) -> None:
        """Find what cannot work in a method before the first run trains.

        Args:
            args: Of the user.
        """
        for run in replace(self, targets=(None,), seeds=(None,)).runs():
            cli = FedlitCLI(run.command(args), run_classes=False)
            config = cli.config[cli.subcommand]
            method = None if config.get("model") is None else locate(config.model.class_path)
            if getattr(method, "needs_target_labels", False) and config.get("data.init_args.target_labels") == 0:
                sys.exit(
                    f"fedlit: {run.name or config.model.class_path.split('.')[-1]} trains on target labels, but "
                    "data.init_args.target_labels is 0: give a number of samples, or a share such as 1.0"
                )

    def runs(self) -> list[Run]:
        """All combinations, methods changing slowest."""
        runs = []
        for method, target, seed in product(self.methods, self.targets, self.seeds):
            extra = [] if seed is None else [f"--seed_everything={seed}"]
            extra += [] if target is None else [f"--data.target={target}"]
            runs.append(Run(method.name, (*extra, *method.arguments), method.preset))
        return runs


def all_clients(args: list[str]) -> tuple[str, ...]:
    """Names of the domains that take part; builds the data module, and nothing else."""
    cli = FedlitCLI(args, run_classes=False)
    config = cli.config[cli.subcommand]
    with in_plain_words(config):
        data = cli._parser(cli.subcommand).instantiate_classes(_only_data(config))["data"]
    return tuple(client.name for client in data.check_roster())


def _only_data(config: Any) -> Any:
    config = config.clone()
    for key in ("model", "trainer"):
        config.pop(key, None)
    return config
