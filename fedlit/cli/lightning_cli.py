"""Lightning's CLI with the federation's defaults: one run of one method."""

from __future__ import annotations

import csv
import logging
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning
import torch
import yaml
from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined, unused-ignore]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

# So that short names such as `FedAvg`, `MLP` and `federated` are known.
import fedlit.methods
import fedlit.models
import fedlit.strategy  # noqa: F401
from fedlit.callbacks import (
    CommunicationLedger,
    RoundProgressBar,
    RunRecord,
    RunSummary,
    TrustedRound,
    Validators,
)
from fedlit.callbacks.run_record import RunLogger, claim, lacking
from fedlit.callbacks.shared import federated
from fedlit.callbacks.tracking import Artifacts, hides_from_others, log_settings, public, tags_at_start
from fedlit.cli.arguments import LINKED
from fedlit.cli.catalogue import load_plugins
from fedlit.cli.folders import first_process
from fedlit.cli.parsed import Parsed, Parser, in_a_line, in_plain_words, keep_whole_numbers, refuse_nulls
from fedlit.data import DatasetLayoutError, DatasetNotFoundError, DomainDataModule
from fedlit.federation import FederationError, RosterError
from fedlit.federation.choices import Channels
from fedlit.module import FederatedModule
from fedlit.privacy import PrivacyError
from fedlit.remote import Seat
from fedlit.run.checkpoint_files import files_of
from fedlit.run.tasks import Regression
from fedlit.strategy import FederatedStrategy

CLEAR_ERRORS = (
    *(RosterError, FederationError, PrivacyError, DatasetNotFoundError, DatasetLayoutError),
    MisconfigurationException,  # of Lightning
)
"""Errors whose message states all that a user can do."""

_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "seeds": (list[int] | None, None, "Repeat the run with each seed."),
    "targets": (
        *(list[str] | None, None),
        "Repeat the run with each of these clients as the target; [all] takes every client in turn.",
    ),
    "compare": (
        *(list[str | dict] | None, None),  # type: ignore[type-arg]  # jsonargparse would build classes out of Any
        "Train these methods too, on the same data: configurations (methods/fed_mmd, or a file), classes, which get "
        "their shipped configuration where this one sets nothing else, or mappings of class_path, init_args, a name "
        "for the closing table, and what is different in data and trainer.",
    ),
    "seat": (
        *(dict[str, Any] | None, None),
        "Place of this process in a federation across organisations, for fedlit serve and join.",
    ),
    "jobs": (int, 1, "Runs of an experiment that are trained side by side."),
    "select": (
        *(Literal["best", "combine"] | None, None),
        "best: print, without labels of the target, which method of compare to take and after which round, and keep a "
        "checkpoint of it: the most trusted one, see fedlit.callbacks.Validators. combine: then also average what all "
        "of them predict at the target, and train a network of the configuration on that.",
    ),
    "fresh": (
        *(bool, False),
        "Train all runs of an experiment again; otherwise those that the same command has finished are taken as they "
        "are.",
    ),
}
"""Options of experiments beside Lightning's: type, default and help."""

JOURNALS = "journals"
"""Folder of the journals of a run's processes, in the run's."""

_USAGE = """%(prog)s [--config FILE] [--KEY VALUE ...]
       what keys can name: fedlit list; how a key's class is made: fedlit fit --model.help FedAvg"""


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` as Lightning does, and logs the configuration to W&B, TensorBoard and others."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log to all loggers but those of CSV files, which lie next to ``config.yaml``."""
        loggers = [logger for logger in trainer.loggers if not isinstance(logger, CSVLogger)]
        if not loggers:
            return
        module = federated(pl_module, self)
        config = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
        named = [each.method for each in trainer.callbacks if isinstance(each, RunRecord)]  # type: ignore[attr-defined]
        tags = tags_at_start(trainer, module, next(iter(named), None))
        log_settings(loggers, public(config, hides_from_others(module)), tags)


class FedlitCLI(LightningCLI):
    """Lightning's CLI with the federation's defaults.

    Clients, target, number of classes and task are written once, in the data module, and linked to the model.
    """

    summary: RunSummary | None = None
    _parsers: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        args: list[str] | Parsed,
        run_classes: bool = True,
        one_of_many: bool = False,
        name: str | None = None,
        repeats: Callback | None = None,
        place: Callable[[Path], Path] | None = None,
        checkpoint: Path | None = None,
        seat: Seat | None = None,
        journals: Path | None = None,
    ) -> None:
        quieten()
        load_plugins()
        self._seat, self._journals = seat, journals
        self._run_classes = run_classes
        self._place = place
        self._checkpoint = checkpoint
        self._repeats = repeats
        self._one_of_many = one_of_many
        self._name = name
        super().__init__(
            FederatedModule,
            DomainDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            parser_kwargs={
                "description": "Federated domain adaptation on PyTorch Lightning.",
                "exit_on_error": False,
                **{subcommand: {"usage": _USAGE, "exit_on_error": False} for subcommand in self.subcommands()},
            },
            seed_everything_default=0,
            trainer_defaults={
                "strategy": {"class_path": "fedlit.FederatedStrategy", "init_args": {"num_threads": "auto"}},
                "accelerator": "cpu",
                "max_epochs": 20,
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
                "log_every_n_steps": 1,
            },
            args=args,  # type: ignore[arg-type]  # goes to `parse_arguments` as it is
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """As Lightning's, of fedlit's class."""
        parser = Parser(allow_abbrev=False, dump_header=[f"lightning.pytorch=={lightning.__version__}"], **kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="Configuration, as YAML or JSON.")
        return parser

    def setup_parser(self, *args: Any) -> None:
        """Build the parsers once in a process: they are the same for all runs, and take longer than a short run."""
        if not self._parsers:
            before = set(vars(self))
            super().setup_parser(*args)
            for parser in self._subcommand_parsers.values():
                keep_whole_numbers(parser)
            self._parsers.update({name: value for name, value in vars(self).items() if name not in before})
        vars(self).update(self._parsers)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse what was not parsed before."""
        if isinstance(args, Parsed):
            self.config, self.config_dump = args.config, args.dump
        else:
            with in_a_line(self._subcommand_parsers.get(args[0] if args else "", parser), args):
                super().parse_arguments(parser, args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the data's roster into the model; add the experiment's axes."""
        for name in LINKED:
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        for name, (type_, default, help_) in _OPTIONS.items():
            parser.add_argument(f"--{name}", type=type_, default=default, help=help_)

    def before_instantiate_classes(self) -> None:
        """End if no data or model was chosen, which jsonargparse would report later and less clearly."""
        for key, example in (("model", "FedAvg"), ("data", "fedlit.data.Digits")):
            if self._get(self.config, key) is None:
                sys.exit(f"fedlit: no {key} was given: add --{key} {example}, or a --config that has it")

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            sys.exit(f"fedlit: seed_everything: {error}")

    def _parse_ckpt_path(self) -> None:
        """Keep the configuration as given: Lightning would overwrite it by the checkpoint's without a word."""

    def instantiate_classes(self) -> None:
        """Build data, model and Trainer, unless only the configuration is wanted."""
        if not self._run_classes:
            return
        refuse_nulls(self.config[self.subcommand], [f"model.init_args.{name}" for name in LINKED])
        with in_plain_words(self.config[self.subcommand]):
            super().instantiate_classes()
        try:  # one is made now, and thrown away: the methods make theirs when training has begun
            self.model.run.local.optimizer([torch.nn.Parameter(torch.zeros(1, 1))])
        except (ValueError, TypeError) as error:
            sys.exit(f"fedlit: model.init_args.optimizer cannot be made: {error}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A Trainer with fedlit's callbacks, except those that the configuration has already."""
        config = self._get(self.config_init, "trainer")
        given = config.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        ledger = CommunicationLedger(print_table=not self._one_of_many)
        record = RunRecord(method=self._name, awaits_test=True)
        new: list[Callback] = lacking(given, self.model, ledger, record, self._repeats)
        if not any(isinstance(callback, ProgressBar) for callback in given):  # Lightning takes one
            if config.get("enable_progress_bar") is not False and (sys.stdout.isatty() or not self._one_of_many):
                new.append(RoundProgressBar())
            else:
                kwargs["enable_progress_bar"] = False
        kwargs["callbacks"] = [*given, *new, *self._selecting(given, config.get("enable_checkpointing") is not False)]
        kwargs["logger"] = self._loggers(config.get("logger"), config.get("default_root_dir") or "runs")
        local = os.environ.get("LOCAL_WORLD_SIZE")
        if "TORCHELASTIC_RUN_ID" in os.environ and local is not None and config.get("devices") in ("auto", 1):
            kwargs["devices"] = int(local)  # torchrun has started the processes already
            kwargs["num_nodes"] = int(os.environ["WORLD_SIZE"]) // int(local)
        trainer = super().instantiate_trainer(**kwargs)
        if self._seat is not None:
            if not isinstance(trainer.strategy, FederatedStrategy):
                sys.exit(f"fedlit: a seat is for a FederatedStrategy, got {type(trainer.strategy).__name__}")
            trainer.strategy.seat, trainer.strategy.stays_joined = self._seat, True
        elif isinstance(trainer.strategy, FederatedStrategy) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.strategy.journal = trainer.strategy.journal or str(self._journals or self._earlier() or JOURNALS)
        if isinstance(trainer.strategy, FederatedStrategy) and (self._seat is not None or trainer.world_size > 1):
            _keep_console(trainer.strategy)
        return trainer

    def _selecting(self, given: Sequence[Callback], checkpoints: bool) -> list[Callback]:
        """What ``select`` needs beside the callbacks given: a score in each validation, and the model that has most."""
        if self._get(self.config, "select") is None:
            return []
        if isinstance(getattr(self.model, "task", None), Regression):
            sys.exit(
                "fedlit: select compares class probabilities, and no score compares models of regression without "
                "labels of the target: leave select out"
            )
        validators = [each for each in given if isinstance(each, Validators)]
        if validators and not any("trust" in each.names for each in validators):
            sys.exit("fedlit: select compares models by 'trust': add it to the names of Validators")
        new: list[Callback] = [] if validators else [Validators(["trust", "class_means"])]
        if checkpoints:
            # a run goes on from its last round, whichever is trusted most
            new += [] if any(isinstance(each, ModelCheckpoint) for each in given) else [ModelCheckpoint()]
            new.append(TrustedRound())
        return new

    def _loggers(self, given: Logger | Iterable[Logger] | bool | None, folder: str) -> list[Logger] | bool:
        """Those given, after one that makes a folder for each run, in which fedlit's files are kept."""
        if given is False:
            if self._one_of_many:
                sys.exit(
                    "fedlit: trainer.logger=false leaves a run without a folder, and the runs of an experiment would "
                    "overwrite each other's files: leave it out, or run one at a time (--compare null and so on)"
                )
            return False
        loggers: list[Logger] = [] if given in (None, True) else [given] if isinstance(given, Logger) else list(given)  # type: ignore[arg-type]
        self._check_versions(loggers)
        if not any(isinstance(logger, CSVLogger) for logger in loggers):
            loggers.append(RunLogger(folder, name=type(self.model).__name__))
        # The folder of the first is that of the run.
        loggers.sort(key=lambda logger: not isinstance(logger, CSVLogger))
        first = loggers[0]
        assert isinstance(first, CSVLogger)
        if first_process() and first._version is None:
            # Lightning counts versions, and runs that start at the same moment would count to the same one.
            parent = Path(first.root_dir)
            place = self._place or partial(claim, name=os.environ.get("WANDB_RUN_ID") if in_sweep() else None)
            first._version = place(parent).name
            if self._checkpoint is not None:
                _keep_rows(first, self._checkpoint)
            if self._journals is None and (earlier := self._earlier()) is not None:  # for who goes on from this one
                Path(first.log_dir, JOURNALS).symlink_to(os.path.relpath(earlier, Path(first.log_dir).resolve()))
        return loggers

    def _earlier(self) -> Path | None:
        """The journals of the run that is resumed, if it has some."""
        checkpoint = self._get(self.config, "ckpt_path") if self.subcommand == "fit" else None
        if checkpoint is None:
            return None
        earlier = Path(checkpoint).expanduser().resolve().parent.parent / JOURNALS
        return earlier.resolve() if earlier.is_dir() else None

    def _check_versions(self, loggers: Iterable[Logger]) -> None:
        """Let no run take the place of another: a version, or an id of W&B, names one."""
        configured = self._get(self.config, "trainer").get("logger")
        for entry, logger in zip(configured if isinstance(configured, list) else [configured], loggers, strict=False):
            init_args = entry.get("init_args", {}) if isinstance(entry, Namespace) else {}
            given = [init_args.get("version"), init_args.get("id")]
            if isinstance(logger, WandbLogger) and not in_sweep():
                given.append(os.environ.get("WANDB_RUN_ID"))
            version = next((each for each in given if each is not None), None)
            if version is None:
                continue
            place = "trainer.logger or WANDB_RUN_ID" if isinstance(logger, WandbLogger) else "trainer.logger"
            named = f"version {version!r} of {type(logger).__name__} ({place}) names one run"
            if self._one_of_many:
                sys.exit(
                    f"fedlit: {named}, but this is several (seeds, targets, compare), and they would overwrite each "
                    "other: leave it out, or run one at a time (--compare null and so on)"
                )
            if isinstance(logger, CSVLogger) and (metrics := Path(logger.log_dir, "metrics.csv")).is_file():
                sys.exit(
                    f"fedlit: {named}, whose '{metrics}' would be deleted: leave it out, for a folder of this "
                    "run's own, or give another (a resumed run goes on in a new folder, too)"
                )

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        return kwargs if self._checkpoint is None else kwargs | {"ckpt_path": str(self._checkpoint)}

    def _run_subcommand(self, subcommand: str) -> None:
        if not self._run_classes:
            return
        assert isinstance(self.model, FederatedModule)
        self._check_ckpt_path(subcommand, self.config[subcommand].get("ckpt_path"))
        super()._run_subcommand(subcommand)
        if subcommand == "fit":
            # the final model, which no target label has helped to choose
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)
            record = next(each for each in self.trainer.callbacks if isinstance(each, RunRecord))  # type: ignore[attr-defined]
            self.summary = record.summary
            if any(isinstance(each, Artifacts) and each.predictions for each in self.trainer.callbacks):  # type: ignore[attr-defined]
                self.trainer.predict(self.model, datamodule=self.datamodule, return_predictions=False)
        if isinstance(self.trainer.strategy, FederatedStrategy):
            self.trainer.strategy.leave()
        for logger in self.trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()  # or W&B would take the next run for this one

    @staticmethod
    def _check_ckpt_path(subcommand: str, path: str | None) -> None:
        """Lightning finds no best or last of another process, and would go on with random weights."""
        where = "give the path of a checkpoint, such as runs/METHOD/version_N/checkpoints/*.ckpt"
        if path is None and subcommand != "fit":
            sys.exit(f"fedlit: {subcommand} without --ckpt_path would be of random weights: {where}")
        if path is not None and not files_of(path):
            sys.exit(f"fedlit: ckpt_path {str(path)!r} is not a file: {where}")
        if path is not None and not zipfile.is_zipfile(files_of(path)[0]):
            sys.exit(f"fedlit: ckpt_path {str(path)!r} is no checkpoint: {where}")


def _keep_rows(logger: CSVLogger, checkpoint: Path) -> None:
    """Keep the rows that an interrupted run wrote until a checkpoint, which Lightning would delete."""
    path = Path(logger.log_dir, "metrics.csv")
    if not path.is_file():
        return
    last = torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"]
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    logger.experiment.metrics += [row for row in rows if int(row["step"]) <= last]
    logger.experiment.save()


def _keep_console(strategy: FederatedStrategy) -> None:
    """Where something is hidden, keep W&B from sending what is printed, which may quote data, and the command."""
    if Channels([], [], encrypted=strategy.encrypted, privacy=strategy.privacy, two_party=strategy.two_party).encrypted:
        for name, value in {"CONSOLE": "off", "X_DISABLE_META": "true", "DISABLE_GIT": "true"}.items():
            os.environ.setdefault(f"WANDB_{name}", value)


def in_sweep() -> bool:
    """Whether an agent of a W&B sweep has started this process."""
    return "WANDB_SWEEP_ID" in os.environ


def quieten() -> None:
    """Silence messages of libraries that a user of fedlit can do nothing about."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter is intended.*")
    warnings.filterwarnings("ignore", message=".*Total length of `list` across ranks is zero.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers which may be a bottleneck.*")
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
    warnings.filterwarnings("ignore", message=".*The dirpath has changed from.*")
    warnings.filterwarnings("ignore", message=".*Experiment logs directory .* exists and is not empty.*")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).addFilter(_no_tips)
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.fedlit").setLevel(logging.INFO)  # fedlit's messages, by Lightning's handler


def _no_tips(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(word in text for word in ("litlogger", "litmodels", "💡 Tip"))
