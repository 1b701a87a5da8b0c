"""``fedlit {fit,validate,test,predict} --config ...``: the Lightning CLI, over methods, data and federation.

``fedlit fit`` also runs small experiments: every combination of ``--seeds``, ``--targets`` and ``--compare`` is trained
one after the other, and one closing table has them all.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, product
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

# So that short names such as `FedAvg`, `MLP` and `federated` are known.
import fedlit.methods
import fedlit.models
import fedlit.strategy  # noqa: F401
from fedlit.callbacks import (
    AggregationCurves,
    CommunicationLedger,
    DictionaryPictures,
    OracleAccuracy,
    RoundProgressBar,
    RoundTimer,
    RunSummary,
    closing_table,
    summarise,
)
from fedlit.data import DatasetLayoutError, DatasetNotFoundError, DomainDataModule
from fedlit.federation import FederationError, RosterError
from fedlit.methods import FedDA, FedDaDiL
from fedlit.module import FederatedModule
from fedlit.privacy import PrivacyError

_LINKED = ("clients", "target", "num_classes", "task")
"""Arguments of the model that come from the data module."""

_EXTRAS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "phe": "paillier",
    "gmpy2": "paillier",
    "tenseal": "he",
    "dp_accounting": "dp",
}
"""Optional libraries, and the extra that installs each."""

_INSTALL = "pip install 'fedlit["
"""How an `ImportError` of fedlit names the extra that is missing."""

_REASON = re.compile(r"^ *- (?:Problem with given class_path .*:\n *)?(.+)$", re.MULTILINE)
"""Why one of an argument's types was not taken, in the words of jsonargparse or of a constructor."""

_NOT_A_REASON = ("Does not validate against any", "Expected a", "Not a valid", "Parser key")
"""What jsonargparse says of types that were not meant."""


_KEY_VALUE = re.compile(r"[A-Za-z_][\w.]*=")

_ENTRY = ("class_path", "init_args", "name", "data", "trainer")
"""What a mapping in ``compare`` may hold."""


class FedlitCLI(LightningCLI):
    """Lightning's CLI with the federation's defaults.

    Clients, target, number of classes and task are written once, in the data module, and linked to the model.
    """

    summary: RunSummary | None = None

    def __init__(
        self, args: list[str], run_classes: bool = True, one_of_many: bool = False, name: str | None = None
    ) -> None:
        self._run_classes = run_classes
        self._one_of_many = one_of_many
        self._name = name
        super().__init__(
            FederatedModule,
            DomainDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            seed_everything_default=0,
            trainer_defaults={
                "strategy": "federated",
                "accelerator": "cpu",
                "max_epochs": 20,
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
                "log_every_n_steps": 1,
            },
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the data's roster into the model; add the experiment's axes."""
        for name in _LINKED:
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        parser.add_argument("--seeds", type=list[int] | None, default=None, help="Repeat the run with each seed.")
        parser.add_argument(
            "--targets",
            type=list[str] | None,
            default=None,
            help="Repeat the run with each of these clients as the target; [all] takes every client in turn.",
        )
        parser.add_argument(
            "--compare",
            type=list[str | dict] | None,  # type: ignore[type-arg]  # jsonargparse would build classes out of Any
            default=None,
            help="Train these methods too, on the same data: class paths, or mappings of class_path, init_args, a name "
            "for the closing table, and what is different in data and trainer.",
        )

    def before_instantiate_classes(self) -> None:
        """Say so if no data or model was chosen, which jsonargparse would leave for a later, darker error."""
        for key, example in (("model", "FedAvg"), ("data", "fedlit.data.Digits")):
            if self._get(self.config, key) is None:
                self.parser.error(f"no {key} was given: add --{key} {example}, or a --config that has it")

    def _parse_ckpt_path(self) -> None:
        """Keep the configuration as given: Lightning would overwrite it by the checkpoint's without a word."""

    def instantiate_classes(self) -> None:
        """Build data, model and Trainer, unless only the configuration is wanted."""
        if not self._run_classes:
            return
        try:
            super().instantiate_classes()
        except (ValueError, TypeError) as error:
            text = _plain_words(error)
            if _INSTALL in text:  # an ImportError, before jsonargparse made another error of it
                raise ImportError(text) from error
            missing = next((item for item in _chain(error) if isinstance(item, ModuleNotFoundError)), None)
            if missing is not None:
                raise missing from error
            key = _key_of(text, self.config[self.subcommand])
            sys.exit(f"fedlit: {type(error).__name__}: {text}{'' if key is None else f' ({key})'}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A Trainer with fedlit's callbacks, except those that the configuration has already."""
        config = self._get(self.config_init, "trainer")
        given = config.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        extra: list[Callback] = [OracleAccuracy(), CommunicationLedger(print_table=not self._one_of_many), RoundTimer()]
        if isinstance(self.model, FedDA):
            extra.append(AggregationCurves())
        if isinstance(self.model, FedDaDiL):
            extra.append(DictionaryPictures())
        if config.get("enable_progress_bar") is not False and (sys.stdout.isatty() or not self._one_of_many):
            extra.append(RoundProgressBar())
        else:
            kwargs["enable_progress_bar"] = False
        kinds = tuple(type(callback) for callback in given)
        kwargs["callbacks"] = [*given, *(callback for callback in extra if not isinstance(callback, kinds))]
        if config.get("logger") in (None, True):
            kwargs["logger"] = CSVLogger(config.get("default_root_dir") or "runs", name=type(self.model).__name__)
        local = os.environ.get("LOCAL_WORLD_SIZE")
        if "TORCHELASTIC_RUN_ID" in os.environ and local is not None and config.get("devices") in ("auto", 1):
            kwargs["devices"] = int(local)  # torchrun has started the processes already
            kwargs["num_nodes"] = int(os.environ["WORLD_SIZE"]) // int(local)
        return super().instantiate_trainer(**kwargs)

    def predict(self, **kwargs: Any) -> None:
        """Write the target's predicted classes and their probabilities to ``predictions.csv``, in the data's order."""
        batches: Any = self.trainer.predict(**kwargs)
        log_dir = self.trainer.log_dir
        target = self.model.target.name
        rows = [row for batch in batches or () if target in batch for row in batch[target].tolist()]
        if rows and log_dir is not None:  # the process that hosts the target writes
            folder = Path(log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            names = self.datamodule.classes
            with (folder / "predictions.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["predicted", *names])
                writer.writerows([names[row.index(max(row))], *row] for row in rows)
            print(f"predictions of {len(rows)} samples of {target!r} are in {folder / 'predictions.csv'}", flush=True)

    def _run_subcommand(self, subcommand: str) -> None:
        if not self._run_classes:
            return
        assert isinstance(self.model, FederatedModule)
        path = self.config[subcommand].get("ckpt_path")
        if path is not None and path not in ("best", "last", "hpc") and not Path(path).is_file():
            sys.exit(f"fedlit: ckpt_path {str(path)!r} is not a file: give the path of a checkpoint")
        start = time.perf_counter()
        super()._run_subcommand(subcommand)
        if subcommand != "fit":
            return
        seconds = time.perf_counter() - start
        # The final model, which no target label has helped to choose.
        self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)
        self.summary = summarise(self.trainer, self.model, seconds, self._name)
        log_dir = self.trainer.log_dir  # asked of every process: Lightning agrees on it between them
        if self.trainer.is_global_zero and log_dir is not None:
            folder = Path(log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").write_text(self.summary.to_json())


@dataclass(frozen=True)
class Method:
    """An entry of ``compare``: what its runs add to the command line, and what the closing table calls them.

    Args:
        name: ``None`` is the name of the configuration's class.
        arguments: Command line arguments; none is the method of the configuration.
        preset: Arguments for data and Trainer, which those of the command line go before.
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


def _as_argument(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Args:
        name: Of its method in the closing table; ``None`` is its class.
        arguments: Command line arguments that it adds.
        preset: Those that come before the user's own.
    """

    name: str | None
    arguments: tuple[str, ...]
    preset: tuple[str, ...] = ()

    def __str__(self) -> str:
        own = [*self.preset, *self.arguments]
        return " ".join([*([] if self.name is None else [f"{self.name}:"]), *own]) or "as configured"

    def command(self, args: Sequence[str]) -> list[str]:
        """The whole command line: configurations, what this run presets, what the user gave, and what it must have.

        Args:
            args: Of the user.
        """
        places = [place for place, arg in enumerate(args) if arg.startswith(("--config", "-c"))]
        after = 1 if not places else places[-1] + (1 if "=" in args[places[-1]] else 2)
        return [*args[:after], *self.preset, *args[after:], *self.arguments]


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
            targets = _all_clients(args)
        methods = (Method(), *map(Method.parse, config.get("compare") or ()))
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
        return cls(methods, tuple(targets), tuple(config.get("seeds") or (None,)))

    def runs(self) -> list[Run]:
        """All combinations, methods changing slowest."""
        runs = []
        for method, target, seed in product(self.methods, self.targets, self.seeds):
            extra = [] if seed is None else [f"--seed_everything={seed}"]
            extra += [] if target is None else [f"--data.target={target}"]
            runs.append(Run(method.name, (*extra, *method.arguments), method.preset))
        return runs


def main(args: list[str] | None = None) -> None:
    """Entry point of the ``fedlit`` command.

    Args:
        args: Command line arguments; ``None`` takes those of the process.
    """
    quieten()
    try:
        _main(_normalise(sys.argv[1:] if args is None else args))
    except (RosterError, FederationError, PrivacyError, DatasetNotFoundError, DatasetLayoutError) as error:
        sys.exit(f"fedlit: {type(error).__name__}: {error}")
    except ImportError as error:
        advice = _what_to_install(error)
        if advice is None:
            raise
        sys.exit(f"fedlit: {advice}")


def _what_to_install(error: ImportError) -> str | None:
    """The extra that is missing, in a sentence; ``None`` if it is another library."""
    if _INSTALL in str(error):
        return str(error)
    library = (error.name or "").split(".")[0]
    extra = _EXTRAS.get(library) or next((e for name, e in _EXTRAS.items() if f"`{name}" in str(error)), None)
    if extra is None:
        return None
    return f"this configuration needs an optional library: {_INSTALL}{extra}]' ({error})"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _plain_words(error: Exception) -> str:
    """What a constructor said, out of what jsonargparse makes of it when the argument could have other types."""
    text = str(error)
    if not text.startswith("Does not validate"):
        return text
    reasons = [reason for reason in _REASON.findall(text) if not reason.startswith(_NOT_A_REASON)]
    return reasons[-1] if reasons else text


def _key_of(text: str, config: Any) -> str | None:
    """Where the configuration has the argument that an error begins with; ``None`` if in no place, or in several."""
    keys = [key for key in config.keys() if key.split(".")[-1] == text.split(" ")[0]]  # noqa: SIM118 (no mapping)
    return keys[0] if len(keys) == 1 else None


def _main(args: list[str]) -> None:
    _refuse_linked(args)
    if "fit" not in args[:1] or {"-h", "--help", "--print_config"} & {arg.split("=")[0] for arg in args}:
        FedlitCLI(args)
        return
    runs = Experiment.parse(args).runs()
    if len(runs) > 1 and any(arg.split("=")[0] == "--ckpt_path" for arg in args):
        sys.exit(
            f"fedlit: --ckpt_path resumes one run, but this is {len(runs)} runs (seeds, targets, compare): resume "
            "each by itself, with --seeds null --targets null --compare null"
        )
    for run in runs:
        _refuse_linked([*run.preset, *run.arguments])
    summaries: list[RunSummary] = []
    try:
        for number, run in enumerate(runs):
            if len(runs) > 1:
                _say(f"run {number + 1} of {len(runs)}: {run}")
            cli = FedlitCLI(run.command(args), one_of_many=len(runs) > 1, name=run.name)
            assert cli.summary is not None
            summaries.append(cli.summary)
    finally:  # a run that fails does not take the others' results with it
        if summaries:
            _print_table(summaries)


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


@rank_zero_only
def _print_table(summaries: list[RunSummary]) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 140).print(closing_table(summaries))


def _all_clients(args: list[str]) -> tuple[str, ...]:
    """Names of the domains that take part; builds the data module, and nothing else."""
    cli = FedlitCLI(args, run_classes=False)
    config = cli.config[cli.subcommand]
    data = cli._parser(cli.subcommand).instantiate_classes(_only_data(config))["data"]
    return tuple(client.name for client in data.check_roster())


def _only_data(config: Any) -> Any:
    config = config.clone()
    for key in ("model", "trainer"):
        config.pop(key, None)
    return config


def _normalise(args: list[str]) -> list[str]:
    """Find installed configurations by name, and accept what W&B agents write."""
    result: list[str] = []
    for arg in args:
        previous = result[-1] if result else ""
        if previous in ("--config", "-c"):
            arg = _find_config(arg)
        elif arg.startswith(("--config=", "-c=")):
            key, _, path = arg.partition("=")
            arg = f"{key}={_find_config(path)}"
        elif result and _KEY_VALUE.match(arg) and not (previous.startswith("-") and "=" not in previous):
            arg = f"--{arg}"  # wandb's ${args_no_hyphens}
        if arg.endswith("=None") or (arg == "None" and previous.startswith("--")):
            arg = arg.removesuffix("None") + "null"  # wandb writes Python's None
        result.append(arg)
    return result


def _find_config(name: str) -> str:
    """A file, or one of the configurations installed with fedlit: ``experiments/digits`` from any directory."""
    if Path(name).exists() or "\n" in name:
        return name
    for candidate in (name.removeprefix("configs/"), f"{name.removeprefix('configs/')}.yaml"):
        installed = files("fedlit.configs").joinpath(candidate)
        if candidate and installed.is_file():
            return str(installed)
    return name


def _refuse_linked(args: list[str]) -> None:
    """Refuse model arguments that come from the data: jsonargparse would ignore them without a word."""
    found = []
    paths = []
    for previous, arg in zip(["", *args], args, strict=False):
        key = arg.split("=")[0]
        if key in {f"--model.{infix}{name}" for name in _LINKED for infix in ("", "init_args.")}:
            found.append(key.removeprefix("--"))
        if previous in ("--config", "-c"):
            paths.append(arg)
        elif key in ("--config", "-c") and "=" in arg:
            paths.append(arg.partition("=")[2])
    for path in paths:
        if Path(path).is_file():
            content = yaml.safe_load(Path(path).read_text())
            model = content.get("model") if isinstance(content, dict) else None
            given = model.get("init_args") if isinstance(model, dict) else None
            if isinstance(given, dict):
                found += [f"model.init_args.{name} in {path}" for name in _LINKED if name in given]
    if found:
        sys.exit(
            f"fedlit: {', '.join(found)}: clients, target, num_classes and task are taken from the data module; give "
            "them there (--data.target, --data.clients)"
        )


def quieten() -> None:
    """Silence messages of libraries that a user of fedlit can do nothing about."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter is intended.*")
    warnings.filterwarnings("ignore", message=".*Total length of `list` across ranks is zero.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers which may be a bottleneck.*")
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
    warnings.filterwarnings("ignore", message=".*Experiment logs directory .* exists and is not empty.*")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).addFilter(_no_tips)
        logging.getLogger(name).setLevel(logging.WARNING)


def _no_tips(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(word in text for word in ("litlogger", "litmodels", "💡 Tip"))


if __name__ == "__main__":
    main()
