"""The clock of a run: round, local step, planned rounds and warm-up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn

from fedlit.checks import check, refuse

if TYPE_CHECKING:
    from fedlit.run.run import Run

WARMUP_STEPS = 100
"""Minimum of local steps in a warm-up that is a share of the rounds: with fewer, classes are not separated yet. In 15
rounds of 10 steps, a half left FedRF-TCA up to 5.3 points below SourceOnly, and 100 steps 2.2.
"""

LONGEST = 0.75
"""Share of a run's rounds beyond which `WARMUP_STEPS` does not lengthen a warm-up."""


def is_share(warmup: int | float) -> bool:
    """Return whether a warm-up is a share of the planned rounds."""
    return 0 < warmup < 1


def warmup_of(warmup: int | float, planned: int | None, steps: int) -> int:
    """Return the rounds of a warm-up, which leaves at least one round to the method.

    A share of the ``planned`` rounds is rounded down, and raised to `WARMUP_STEPS` local steps (``steps`` in a round)
    up to `LONGEST` of the run. A `ValueError` if a run without a planned end (``None``) has a share.
    """
    if not is_share(warmup):
        return int(warmup)
    if planned is None:
        refuse(
            "warmup_rounds",
            "a number of rounds in a run without a planned end (max_epochs=-1)",
            warmup,
            "give max_epochs, or a number of rounds",
        )
    rounds = math.floor(warmup * planned + 1e-9)  # 0.29 of 100 are 29
    return max(rounds, min(math.ceil(WARMUP_STEPS / steps), math.floor(LONGEST * planned)))


def limited(trainer: Trainer, batches: int) -> int:
    """Return an epoch's batches after the Trainer's ``limit_train_batches``."""
    return int(_parse_num_batches(RunningStage.TRAINING, batches, trainer.limit_train_batches))


class Clock:
    """Count rounds and local steps of a run.

    Args:
        run: Whose clock it is.
        warmup: A number of rounds, or below 1 a share of the planned ones.

    Attributes:
        warmup: As passed.
        warmup_rounds: In rounds; a share is 1 until the run is planned.
        last_round: Index of the last round, once the run ends.

    Raises:
        ValueError: If ``warmup`` is neither.
    """

    def __init__(self, run: Run, warmup: int | float) -> None:
        is_number = warmup >= 0 and float(warmup).is_integer()
        rule = "a number of rounds, at least 0, or a share of the planned ones, above 0 and below 1"
        check(is_share(warmup) or is_number, "warmup_rounds", rule, warmup)
        self._run = run
        self.warmup = warmup
        self.warmup_rounds = 1 if is_share(warmup) else int(warmup)
        self.last_round = -1

    @property
    def round_idx(self) -> int:
        """Index of the current round, from 0."""
        return self._run.federation.round_idx

    @property
    def step(self) -> int:
        """Index of the current local step in the round, from 0."""
        return self._run.federation.batch_idx

    @property
    def warming_up(self) -> bool:
        """Whether the current round is part of the warm-up."""
        return self.round_idx < self.warmup_rounds

    def all_rounds(self) -> int | None:
        """Return the rounds of ``max_epochs``, the warm-up included.

        ``None`` without a planned end, before training data are read, or on other data than a `FederatedLoader`'s.
        """
        trainer, loader = self._run.trainer, self._run.samples.loader
        epochs = trainer.max_epochs
        if loader is None or epochs is None or epochs < 0:
            return None
        return epochs * self.rounds_per_epoch

    def batches_in(self, round_idx: int | None = None) -> int:
        """Return the batches of a round, as far as the Trainer does not limit them; ``None`` is the current round."""
        trainer, loader = self._run.trainer, self._run.samples.loader
        if loader is None:
            return int(trainer.num_training_batches)
        batches = loader.batches_in(round_idx)
        return min(batches, limited(trainer, batches * loader.rounds_per_epoch))

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds in an epoch of the Trainer, as far as it does not limit them."""
        trainer, loader = self._run.trainer, self._run.samples.loader
        return 1 if loader is None else math.ceil(limited(trainer, len(loader)) / self.batches_in())

    def rounds_of(self, max_steps: int) -> tuple[int, int]:
        """Return the whole rounds in so many optimiser steps of a run, and the steps left over."""
        loader, accumulate = self._run.samples.loader, self._run.trainer.accumulate_grad_batches
        starts = [0] if loader is None else loader.first_rounds
        for start, end in zip(starts, [*starts[1:], math.inf], strict=True):
            steps = math.ceil(self.batches_in(start) / accumulate)
            if max_steps < (end - start) * steps:
                break
            max_steps -= int(end - start) * steps
        return start + max_steps // steps, max_steps % steps

    def planned_rounds(self) -> int | None:
        """Return the rounds after the warm-up; ``None`` without a planned end."""
        rounds = self.all_rounds()
        return None if rounds is None else rounds - self.warmup_rounds

    def share_over(self, rounds: int) -> float:
        """Return the share of ``rounds`` rounds after the warm-up that are over, from 0 (also in the warm-up) to 1."""
        over = self.round_idx - self.warmup_rounds
        return min(1.0, over / rounds) if over > 0 and rounds > 0 else float(over > 0)

    @property
    def progress(self) -> float:
        """Share of the planned rounds after the warm-up that are over, from 0 to 1, equal on all processes.

        Constant within a round: 0 in the warm-up and the first round after it, (R - 1)/R in the last of R. A schedule
        of rates by it, with ``schedule_interval`` "round": ``lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda
        _: annealing(module.run.clock.progress))``.

        Raises:
            ValueError: If the run has no planned end.
        """
        trainer = self._run.trainer
        if trainer.max_epochs is not None and trainer.max_epochs >= 0 and trainer.train_dataloader is None:
            return 0.0  # optimisers and their schedules are made before data are read
        rounds = self.planned_rounds()
        if rounds is None:
            refuse(
                "max_epochs",
                "a number of rounds, of which progress is a share, and training data a FederatedLoader",
                trainer.max_epochs,
                "give max_epochs, and train on a fedlit.data.DomainDataModule or a FederatedLoader",
                shown=f"{trainer.max_epochs} on a {type(trainer.train_dataloader).__name__}",
            )
        return self.share_over(rounds)

    def target_steps(self) -> int | None:
        """Return the local steps after the warm-up of a target that is never absent.

        ``None`` without a planned end, or without a round after the warm-up (planning warns of that).
        """
        run, rounds, loader = self._run, self.all_rounds(), self._run.samples.loader
        if rounds is None or rounds <= self.warmup_rounds or loader is None:
            return None
        trainer, target = run.trainer, run.target
        if trainer.max_steps >= 0:
            rounds = min(rounds, self.rounds_of(trainer.max_steps)[0])
        learns = (round_idx for round_idx in range(self.warmup_rounds, rounds) if target in run.learners(round_idx))
        batches = (min(loader.batches_of(target.name, each), self.batches_in(each)) for each in learns)
        return sum(each // trainer.accumulate_grad_batches for each in batches)

    def warn_of_few_steps(self, seen: str, enough: int = 100) -> None:
        """Warn if the target has fewer than ``enough`` local steps after the warm-up; ``seen`` states their effect."""
        steps = self.target_steps()
        if steps is None or steps >= enough or self._run.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        rank_zero_warn(
            f"the target of {self._run.name} has {steps} local steps after the warm-up, which may be too few: "
            f"{seen}. Plan more rounds (max_epochs) or steps (local_steps), or compare with SourceOnly (--compare)"
        )
