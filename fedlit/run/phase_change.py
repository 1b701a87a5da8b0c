"""Changes between phases, of which Lightning knows nothing: other optimisers, and epochs of other lengths."""

from __future__ import annotations

from fedlit.run.clock import limited
from fedlit.run.run import Run


def change_optimizer(run: Run, round_idx: int) -> bool:
    """Make the current round's optimiser, if that of round ``round_idx`` was another; return whether it was."""
    if run.phase(round_idx).settings.optimizer is run.phase().settings.optimizer:
        return False
    run.trainer.strategy.setup_optimizers(run.trainer)
    return True


def set_epoch_length(run: Run) -> None:
    """Set the length of the epoch that begins, which Lightning reads once in a run."""
    trainer, loader = run.trainer, run.samples.loader
    loop = trainer.fit_loop
    if loader is None or (batches := limited(trainer, len(loader))) == loop.max_batches:
        return
    loop.max_batches = batches
    assert loop._combined_loader is not None
    loop._combined_loader.limits = [batches]
    if not isinstance(trainer.val_check_interval, int) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))
