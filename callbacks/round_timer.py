"""RoundTimer: seconds of each round by phase."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fedlit.callbacks.shared import federated
from fedlit.run.component import Component
from fedlit.run.run import Run

PHASES = ("local", "exchange", "protection")


class RoundTimer(Callback, Component):
    """Log the seconds of each round, by phase.

    ``time/local_s`` (local steps), ``time/exchange_s`` (messages, and waiting for the other processes),
    ``time/protection_s`` (the privacy backend) and ``time/round_s`` (all of it, and the validation before). They are
    those of process 0 and only go to loggers: processes differ in them, so nothing may monitor them.

    Attributes:
        resumed_s: Seconds that the run had trained when the checkpoint it resumes from was written; 0.0 if from none.
    """

    def __init__(self) -> None:
        self.resumed_s = 0.0
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._before: dict[str, float] = {}
        self._spent = 0.0
        self._since = time.perf_counter()
        self._resumed = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here, or from where a resumed round was left."""
        if not self._resumed:
            self.resumed_s = 0.0
            self._before = dict(federated(pl_module, self).federation.seconds)
            self._spent = 0.0
        self._resumed = False
        self._since = self._started = time.perf_counter()
        self._ended = None

    def on_round_end(self, run: Run) -> None:
        """Log the seconds since the last round ended."""
        seconds = dict(run.federation.seconds)
        metrics = {f"time/{phase}_s": seconds.get(phase, 0.0) - self._before.get(phase, 0.0) for phase in PHASES}
        metrics["time/round_s"] = self._elapsed()
        self._before, self._spent, self._since = seconds, 0.0, time.perf_counter()
        for logger in run.trainer.loggers:
            logger.log_metrics(metrics, step=run.trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._ended = time.perf_counter()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the time of the round under way, so that a resumed run's sums are whole; clocks differ by process."""
        trained = self.resumed_s + (self._ended or time.perf_counter()) - self._started
        clock = {"before": dict(self._before), "spent": self._elapsed(), "trained": trained}
        checkpoint.setdefault("server", {})["clock"] = clock

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        clock = checkpoint.get("server", {}).get("clock")
        if clock is not None:
            self._before, self._spent, self.resumed_s = dict(clock["before"]), clock["spent"], clock["trained"]
            self._resumed = True

    def _elapsed(self) -> float:
        return self._spent + time.perf_counter() - self._since
