"""RoundProgressBar: one bar over communication rounds."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedlit.callbacks.shared import clock, federated, megabytes
from fedlit.module import FederatedModule
from fedlit.run.component import Component
from fedlit.run.run import Run

_SECONDS_BETWEEN_REFRESHES = 0.1
_METRICS = {"target_score": "target/score", "loss": "train/loss"}
_log = logging.getLogger("fedlit.rounds")
"""Takes a line for each round where a program reads them (``--log json``)."""
_LINES = 10
"""Lines that a run leaves in a log file."""


class RoundProgressBar(ProgressBar, Component):
    """Show ``round 12/50 | target score 0.71 | loss 0.35 | 3.2 MB | ETA 0:41``.

    A bar on a terminal; elsewhere a line for every tenth of the rounds, or for each with ``--log json``. MB are all
    bytes sent so far. It takes no time in local steps, and shows nothing while validating or testing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total: int | None = None
        self._done = 0
        self._shown = 0  # rounds done when last shown
        self._refreshed = 0.0
        self._start: tuple[int, float] | None = None

    @property
    def is_enabled(self) -> bool:
        """Whether this process shows the bar."""
        return self._enabled

    def disable(self) -> None:
        """Show nothing; Lightning calls it on all processes but the first."""
        self._enabled = False
        self._stop()

    def enable(self) -> None:
        """Show the bar again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget a previous run."""
        self._stop()
        self._start = None
        self._done = self._shown = federated(pl_module, self).federation.round_idx

    def on_round_start(self, run: Run) -> None:
        """Set up the bar in the first round, when the total number is known."""
        self._set_up(run, run.clock.round_idx)

    def _set_up(self, run: Run, first: int) -> None:
        """Start the clock before round ``first``."""
        if self._start is not None or not self._enabled:
            return
        self._start = (first, time.perf_counter())
        self._total = _total_rounds(run.trainer, federated(run.module, self), run.clock.round_idx)
        if sys.stdout.isatty():
            # refreshed by hand: a refreshing thread would slow down every local step
            self._progress = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.description}", markup=False),
                console=Console(),
                auto_refresh=False,
            )
            self._task = self._progress.add_task("", total=self._total, completed=run.clock.round_idx)
            self._progress.start()
            self._show(run.trainer, federated(run.module, self))

    def on_round_end(self, run: Run) -> None:
        """Move on by one round; the last one of an epoch is shown after its validation."""
        # a run that resumes within a round has no start of it
        self._set_up(run, run.clock.round_idx + 1)
        self._done = run.clock.round_idx + 1
        if not run.trainer.is_last_batch:
            self._show(run.trainer, federated(run.module, self))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the round together with the score of its validation."""
        self._show(trainer, federated(pl_module, self))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the final state on the screen."""
        self._show(trainer, federated(pl_module, self), last=True)
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show(self, trainer: Trainer, module: FederatedModule, last: bool = False) -> None:
        if not self._enabled or self._start is None:
            return
        if self._progress is not None:
            now = time.perf_counter()
            if last or now - self._refreshed >= _SECONDS_BETWEEN_REFRESHES:
                self._refreshed = now
                self._progress.update(self._task, description=self._line(trainer, module), completed=self._done)
                self._progress.refresh()
        elif not sys.stdout.isatty() and self._done > self._shown and _log.isEnabledFor(logging.INFO):
            self._shown = self._done
            _log.info(self._line(trainer, module), extra={"fields": self._fields(trainer, module)})
        elif not sys.stdout.isatty() and (self._due() or (last and self._done > self._shown)):
            self._shown = self._done
            print(self._line(trainer, module), flush=True)

    def _due(self) -> bool:
        if self._total is None:
            return self._done // _LINES > self._shown // _LINES
        return self._done * _LINES // self._total > self._shown * _LINES // self._total

    def _fields(self, trainer: Trainer, module: FederatedModule) -> dict[str, int | float | None]:
        """What the line says, for programs."""
        known = {"round": self._done, "rounds": self._total, "bytes": module.federation.ledger.total_bytes}
        return known | _numbers(trainer)

    def _line(self, trainer: Trainer, module: FederatedModule) -> str:
        parts = [f"round {self._done}" + ("" if self._total is None else f"/{self._total}")]
        parts += [f"{name.replace('_', ' ')} {value:.2f}" for name, value in _numbers(trainer).items()]
        parts.append(f"{megabytes(module.federation.ledger.total_bytes)} MB")
        assert self._start is not None
        first, since = self._start
        if self._total is not None and first < self._done < self._total:
            pace = (time.perf_counter() - since) / (self._done - first)
            parts.append(f"ETA {clock(pace * (self._total - self._done))}")
        return " | ".join(parts)


def _numbers(trainer: Trainer) -> dict[str, float]:
    """Metrics that are shown, as far as they are logged."""
    metrics: dict[str, Any] = trainer.callback_metrics
    return {name: float(metrics[metric]) for name, metric in _METRICS.items() if metrics.get(metric) is not None}


def _total_rounds(trainer: Trainer, module: FederatedModule, round_idx: int) -> int | None:
    """Rounds until the Trainer stops by itself; ``None`` if it does not."""
    clock, limits = module.run.clock, []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs * clock.rounds_per_epoch)
    if trainer.max_steps > 0 and module.automatic_optimization:
        limits.append(clock.rounds_of(trainer.max_steps)[0])
    # a run that goes on from another Trainer's federation has rounds behind it that this one does not count
    return max(min(limits), round_idx + 1) if limits else None
