"""The end of a run that stops early or has lost processes: checkpoints of its result, and who is missing."""

from __future__ import annotations

import os
import warnings
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fedlit.federation import FederatedLoader, Federation
from fedlit.run.run import Run


def save_again(run: Run) -> None:
    """Write the checkpoints of the last round anew; a site that has come back after it writes its first."""
    trainer, epochs = run.trainer, run.trainer.fit_loop.epoch_progress.current
    at_its_end = run.clock.round_idx % run.clock.rounds_per_epoch == 0
    epochs.completed -= at_its_end  # as in the last epoch, whose number is in files and their names
    try:
        for each in trainer.checkpoint_callbacks:
            if not isinstance(each, ModelCheckpoint):
                continue
            if each._last_checkpoint_saved:
                if each._last_global_step_saved == trainer.global_step:
                    _write(trainer, each)
            elif run.federation.transport.losable:  # this process has trained no round
                numbers = each._monitor_candidates(trainer)
                each._save_topk_checkpoint(trainer, numbers)
                each._save_last_checkpoint(trainer, numbers)
    finally:
        epochs.completed += at_its_end


def _write(trainer: Trainer, kept: ModelCheckpoint) -> None:
    """Write a callback's files of the last round, but not a best one that may be of an earlier."""
    names = [kept._last_checkpoint_saved, kept.last_model_path, *([] if kept.monitor else [kept.best_model_path])]
    for path in sorted({os.path.realpath(name) for name in names if name}):  # last.ckpt may be a link
        trainer.save_checkpoint(path, kept.save_weights_only)


def skip_nothing(run: Run, loader: FederatedLoader) -> None:
    """Across organisations, let a run start whose planned rounds are over, as others may fetch its result in it.

    Lightning would skip it. `come_together` sets the counters again, before Lightning looks for a round to train.
    """
    trainer, loop = run.trainer, cast(Any, run.trainer.fit_loop)
    if run.federation.transport.losable and run.clock.round_idx == (trainer.max_epochs or 0) * loader.rounds_per_epoch:
        loop.epoch_progress.current.processed, trainer.should_stop = 0, False


def missing_from(federation: Federation) -> list[str]:
    """Return names of the clients that are lost."""
    return [name for name, rank in federation.roster.rank_of.items() if rank in federation.transport.lost]


def warn_of_missing(run: Run) -> None:
    """Warn that the run ends without clients, which do not have its result."""
    missing = missing_from(run.federation)
    if missing:
        clock = run.clock
        planned, epochs = clock.round_idx == clock.all_rounds(), -(-clock.round_idx // clock.rounds_per_epoch)
        early = "" if planned else f" with max_epochs={epochs}, as this run stopped early"
        warnings.warn(
            f"the run ends without {missing}, who were lost and did not come back in time after the last round "
            "(wait_for of the server's seat), and do not have its result. To give it to them, start the server and all "
            f"sites again{early}, each from its last checkpoint, as the same command does: no round is trained again",
            stacklevel=2,
        )
