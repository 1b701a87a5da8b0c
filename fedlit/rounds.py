"""Counts communication rounds and tells the module when one starts and ends.

A callback, because `on_train_batch_end` of callbacks runs before ModelCheckpoint saves and before validation: a
checkpoint holds the state after aggregation, and validation sees the aggregated model. (The module's own hook runs
after ModelCheckpoint's; `on_train_epoch_end` runs after validation.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import rank_zero_warn

from fedlit.federation import FederatedLoader, Federation


class CountsRounds(Protocol):
    """What the round counter asks of a module: `FederatedModule` is one."""

    automatic_optimization: bool

    @property
    def federation(self) -> Federation:
        """Whose counter it is."""

    def plan_rounds(self, loader: FederatedLoader) -> None:
        """Cut training data into rounds."""

    def open_round(self) -> None:
        """Start a round."""

    def close_round(self) -> None:
        """End a round."""


@dataclass
class _PlannedSource(_DataLoaderSource):
    """Whoever gives the training data, which are cut into rounds at once: Lightning asks for their length next."""

    module: CountsRounds

    def dataloader(self) -> Any:
        loader = super().dataloader()
        if isinstance(loader, FederatedLoader):
            self.module.plan_rounds(loader)
        return loader


class Rounds(Callback):
    """Attached by every `FederatedModule` through ``configure_callbacks``.

    Callbacks with a method ``on_round_start(trainer, module, round_idx)`` or ``on_round_end(trainer, module,
    round_idx)`` are called at those times, after the module itself.
    """

    batches_per_round: int
    _started: float
    _talked: float

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See to it that training data are cut into rounds where no `FederatedStrategy` does it."""
        if stage == "fit" and getattr(trainer.strategy, "federation", None) is None:
            source = trainer.fit_loop._data_source
            trainer.fit_loop._data_source = _PlannedSource(source.instance, source.name, cast(CountsRounds, pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the length of a round, and refuse settings that would stop inside one."""
        module = cast(CountsRounds, pl_module)
        loader = trainer.train_dataloader
        whole = trainer.num_training_batches
        if whole == float("inf"):
            raise TypeError("training data without a length have no rounds: give a FederatedLoader({client: dataset})")
        for optimizer in trainer.optimizers:
            if any(group.get("client") is None for group in optimizer.param_groups):
                raise ValueError(
                    "each parameter group of an optimizer needs the key 'client' with a client's name: build the "
                    "groups with client_param_groups(), or as it does"
                )
        if isinstance(loader, FederatedLoader):
            self.batches_per_round = min(loader.batches_per_round, int(whole))
        else:
            self.batches_per_round = int(whole)
        accumulate = trainer.accumulate_grad_batches
        if trainer.max_steps != -1 and module.automatic_optimization:
            steps = -(-self.batches_per_round // accumulate)
            if trainer.max_steps % steps:
                raise ValueError(
                    f"max_steps={trainer.max_steps} stops inside a round of {steps} optimiser steps: give a multiple "
                    f"of {steps}, or limit max_epochs"
                )
        if any(isinstance(cb, Timer) and cb._interval == "step" for cb in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "max_time stops inside a round: give Trainer(callbacks=[Timer(duration, interval='epoch')]) instead"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Open a round at its first batch."""
        module = cast(CountsRounds, pl_module)
        if module.federation.batch_idx == 0:
            module.open_round()
            _notify("on_round_start", trainer, module, module.federation.round_idx)
        self._started = time.perf_counter()
        self._talked = _talking(module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the round at its last batch, and start counting the next one."""
        module = cast(CountsRounds, pl_module)
        federation = module.federation
        local = time.perf_counter() - self._started - (_talking(module) - self._talked)
        federation.seconds["local"] = federation.seconds.get("local", 0.0) + local
        federation.batch_idx += 1
        last_of_epoch = batch_idx + 1 >= trainer.num_training_batches
        if federation.batch_idx >= self.batches_per_round or last_of_epoch:
            self._close(trainer, module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close a round in which training was stopped early: what has been learnt is still to be aggregated."""
        module = cast(CountsRounds, pl_module)
        federation = module.federation
        if federation.batch_idx:
            self._close(trainer, module)
        used = federation.ledger.bytes_by_channel()
        silent = sorted(federation.named_channels - used.keys())
        if silent and used:
            rank_zero_warn(
                f"drops or privacy name the channels {silent}, on which nothing was ever sent; this run has "
                f"{sorted(used)}: check the spelling"
            )

    def _close(self, trainer: Trainer, module: CountsRounds) -> None:
        federation = module.federation
        round_idx = federation.round_idx
        module.close_round()
        federation.round_idx, federation.batch_idx = round_idx + 1, 0
        _notify("on_round_end", trainer, module, round_idx)


def _talking(module: CountsRounds) -> float:
    """Seconds spent in exchanges so far; a method may exchange within a local step."""
    seconds = module.federation.seconds
    return seconds.get("exchange", 0.0) + seconds.get("protection", 0.0)


def _notify(hook: str, trainer: Trainer, module: CountsRounds, round_idx: int) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        method = getattr(callback, hook, None)
        if method is not None:
            method(trainer, module, round_idx)
