"""How clients' samples are cut into rounds: batch sizes, local steps, and who learns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Batch size and local steps of the rounds from one on.

    Args:
        first_round: Index of the first of these rounds.
        batch_size: Samples per client and batch; ``None`` is the loader's.
        local_steps: Optimiser steps per client and round; ``None`` is one local epoch.
    """

    first_round: int = 0
    batch_size: int | None = None
    local_steps: int | None = None

    def number(self, round_idx: int, batch_idx: int, steps: int, per_pass: int) -> int:
        """Number of a client's batch among those of all rounds, of ``steps`` batches; passes have ``per_pass``."""
        if self.local_steps is None:  # a local epoch is the pass of its round
            return round_idx * per_pass + batch_idx
        # local steps go on where the last round stopped; the first pass of a pace is that of its first round
        return self.first_round * per_pass + (round_idx - self.first_round) * steps + batch_idx


@dataclass(frozen=True)
class RoundPlan:
    """Division of each client's samples into rounds.

    Args:
        sizes: Training samples of every client of the federation, also of those hosted elsewhere.
        learners: Names of clients that train in a round, by round index; batches of the others are not fetched.
        position: The round and the batch within it at which the next epoch starts.
        paces: Batch sizes and local steps, by first round in ascending order; those of one epoch are equal.
        rounds_per_epoch: Rounds in one epoch of the Trainer.
        accumulate: Batches per optimiser step; the batches of a round are padded to a multiple of it.
        labelled_only: Clients that train on their labelled samples alone.
    """

    sizes: Mapping[str, int]
    learners: Callable[[int], Collection[str]]
    position: Callable[[], tuple[int, int]]
    paces: Sequence[Pace] = (Pace(),)
    rounds_per_epoch: int = 1
    accumulate: int = 1
    labelled_only: Collection[str] = ()

    def pace(self, round_idx: int) -> Pace:
        """Return the pace of a round."""
        return next(each for each in reversed(self.paces) if each.first_round <= round_idx)
