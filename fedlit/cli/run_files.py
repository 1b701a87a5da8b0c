"""What the command adds to a run: its configuration in loggers, its rows up to an interruption, warnings of repeats."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_warn

from fedlit.federation.client import names_of
from fedlit.federation.leaks import hidden_senders, over_other_senders, over_other_targets
from fedlit.module import FederatedModule
from fedlit.privacy import PrivacyWarning


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` as Lightning does, and logs the configuration to W&B, TensorBoard and others."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log to all loggers but those of CSV files, which lie next to ``config.yaml``."""
        loggers = [logger for logger in trainer.loggers if not isinstance(logger, CSVLogger)]
        config = yaml.safe_load(self.parser.dump(self.config, skip_none=False)) if loggers else {}
        for logger in loggers:
            logger.log_hyperparams(config)


def go_on(logger: CSVLogger, checkpoint: Path) -> None:
    """Keep the rows that an interrupted run wrote until a checkpoint, which Lightning would delete."""
    path = Path(logger.log_dir, "metrics.csv")
    if not path.is_file():
        return
    last = torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"]
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    logger.experiment.metrics += [row for row in rows if int(row["step"]) <= last]
    logger.experiment.save()


class WarnOfRepeats(Callback):
    """Warns, before a run of an experiment trains, of sums that reveal single messages beside those of its other runs.

    Args:
        targets: Of the experiment.
        senders: Of earlier runs, by target and seed: the method, and who sent on its hidden channels. Filled here.
    """

    def __init__(self, targets: Sequence[str], senders: dict[tuple[str, int], Any]) -> None:
        self.targets = targets
        self.senders = senders

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The channels of the run are known now."""
        assert isinstance(pl_module, FederatedModule)
        federation, name = pl_module.federation, type(pl_module).__name__
        channels = federation.channels
        method, before = self.senders.setdefault(
            (federation.target.name, federation.seed), (name, hidden_senders(channels))
        )
        for sentence in (
            *over_other_targets(channels, names_of(federation.clients), self.targets),
            *over_other_senders(channels, before, method),
        ):
            rank_zero_warn(sentence, category=PrivacyWarning)
