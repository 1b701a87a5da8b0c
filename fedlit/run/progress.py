"""How far a run has come: the share of its rounds that are over, by which schedules go."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from fedlit.federation import FederatedLoader
from fedlit.run.method import Method


def rounds_of_run(trainer: Trainer) -> int | None:
    """Rounds in the ``max_epochs`` of a run, its warm-up among them; ``None`` if it has no planned end.

    It has none before its training data are read, nor on other data than a `FederatedLoader`'s.
    """
    loader, epochs = trainer.train_dataloader, trainer.max_epochs
    if not isinstance(loader, FederatedLoader) or epochs is None or epochs < 0:
        return None
    return epochs * math.ceil(trainer.num_training_batches / loader.batches_per_round)


def steps_after_warmup(method: Method) -> int | None:
    """Local steps of a target that misses none, in the rounds after the warm-up.

    ``None`` if the run has no planned end, or no such round, which is warned of where rounds are planned.
    """
    trainer, target, rounds = method.trainer, method.target, rounds_of_run(method.trainer)
    loader = trainer.train_dataloader
    if rounds is None or rounds <= method.warmup_rounds or not isinstance(loader, FederatedLoader):
        return None
    learns = sum(target in method.learners(round_idx) for round_idx in range(method.warmup_rounds, rounds))
    if not learns:
        return 0
    steps = min(loader.batches_of(target.name), int(trainer.num_training_batches)) // trainer.accumulate_grad_batches
    most = learns if trainer.max_steps < 0 else trainer.max_steps // max(1, steps) - method.warmup_rounds
    return max(0, min(learns, most)) * steps


def warn_of_few_steps(method: Method, seen: str, least: int = 100) -> None:
    """Warn if a run has fewer local steps after its warm-up than a method needs to hold what SourceOnly reaches.

    Args:
        method: Whose run it is.
        seen: What fewer came to, in a sentence.
        least: Steps from which on there is no warning.
    """
    steps = steps_after_warmup(method)
    if steps is None or steps >= least or method.trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    rank_zero_warn(
        f"the target of {type(method).__name__} has {steps} local steps after the warm-up, which may be too few: "
        f"{seen}. Plan more rounds (max_epochs) or steps (local_steps), or compare with SourceOnly (--compare)"
    )


def share_over(method: Method, rounds: int) -> float:
    """Share of so many rounds after the warm-up that lie before the one under way, from 0 (as in the warm-up) to 1."""
    over = method.federation.round_idx - method.warmup_rounds
    return min(1.0, over / rounds) if over > 0 and rounds > 0 else float(over > 0)


def progress(method: Method) -> float:
    """See `FederatedModule.progress`."""
    trainer = method.trainer
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and trainer.train_dataloader is None:
        return 0.0  # optimisers and their schedules are made before data are read
    rounds = method.planned_rounds()
    if rounds is None:
        raise ValueError(
            f"progress is a share of the planned rounds, and a run with max_epochs={trainer.max_epochs} on a "
            f"{type(trainer.train_dataloader).__name__} has no planned end: give max_epochs, and train on a "
            "fedlit.data.DomainDataModule or a FederatedLoader"
        )
    return share_over(method, rounds)
