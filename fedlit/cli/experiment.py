"""``fedlit {fit,validate,test,predict}``; of fit, every method of ``compare`` on every target with every seed."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from pydoc import locate

import yaml
from lightning.fabric.utilities.seed import max_seed_value

from fedlit.callbacks import RunSummary
from fedlit.callbacks.report.run_folder import read_runs
from fedlit.callbacks.run_record import write_whole
from fedlit.callbacks.selection import as_json, select
from fedlit.cli.arguments import refuse_linked
from fedlit.cli.command import is_question
from fedlit.cli.compare import Method, read_methods
from fedlit.cli.folders import SELECTED, ExperimentFolder, fingerprint, first_process
from fedlit.cli.lightning_cli import FedlitCLI, in_sweep
from fedlit.cli.parsed import Parsed, in_plain_words
from fedlit.cli.plan import Plan, print_table, say

_OF_TWO_TYPES = ("target_labels", "overfit_batches", "val_check_interval", "limit_{}_batches")
"""Ends of parameters that take a number if whole, and a share if not: 1 and 1.0 are one and all."""


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
    """The runs that one ``fedlit fit`` stands for.

    Args:
        args: Of the user: command line with its configuration files.
    """

    runs: list[Run]

    def __init__(self, args: list[str]) -> None:
        cli = FedlitCLI(args, run_classes=False)
        self.args = args
        self.parsed = Parsed(cli._parser(cli.subcommand), cli.config)
        arguments = self.parsed.arguments
        self.targets = self._targets(arguments.targets or [None])
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
        if self.parsed.arguments.select is not None and len(self.methods) == 1:
            sys.exit(
                "fedlit: select chooses among methods: name others in compare, or, for the round of one method, "
                "monitor validator/trust (--trainer.callbacks+=Validators --trainer.callbacks+=TrustedRound)"
            )
        axes: dict[str, Sequence[object]] = {"seeds": self.seeds, "targets": self.targets}
        for axis, values in axes.items():
            if twice := _twice(values):
                sys.exit(f"fedlit: {axis} has {twice[0]!r} twice, and equal runs are no repetitions: name it once")
        for seed in self.seeds:
            if seed is not None and not 0 <= seed <= max_seed_value:
                sys.exit(f"fedlit: seeds must be between 0 and {max_seed_value}, got {seed}")

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
        summaries = [*done.values()]
        print_table(summaries)
        if first_process() and not self.is_dry:
            self.write_tables(summaries)
            if self.parsed.arguments.select is not None:
                self._select(done)

    def _select(self, done: Mapping[int, RunSummary]) -> None:
        places = [self.folder.folder_of(number) for number in done]
        selections = select({str(place): read_runs([place])[0] for place in places if place is not None})
        write_whole(self.folder.path / SELECTED, as_json(selections))
        for each in selections:
            say(str(each))
        if not selections:
            say("nothing is selected: no validation has logged validator/trust, as where reports are off")


def _twice(values: Sequence[object]) -> list[object]:
    return [value for place, value in enumerate(values) if value in values[:place]]


def all_clients(parsed: Parsed) -> tuple[str, ...]:
    """Names of the domains that take part; builds the data module, and nothing else."""
    config = parsed.arguments.clone()
    for key in ("model", "trainer"):
        config.pop(key)
    with in_plain_words(config):
        data = parsed.parser.instantiate_classes(config)["data"]
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
