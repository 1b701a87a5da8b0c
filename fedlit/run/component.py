"""Components, which take part in a run, and phases, in which a method trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from fedlit.checks import check_at_least
from fedlit.federation import Channel, Client

if TYPE_CHECKING:
    from fedlit.run.run import Run


class Component:
    """Take part in a run: declare channels, act when rounds start and end, and keep state.

    A run has one ordered list of components: the method's phases, its parts, the Trainer's callbacks and the data
    module, as far as they derive from this class. Hooks, checkpoints and returns go over that list. All hooks are
    called on all processes, in lockstep.
    """

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Messages between clients; default: none."""
        return ()

    def on_run_start(self, run: Run) -> None:
        """Prepare, before the first round of a run or of its continuation from a checkpoint."""

    def on_round_start(self, run: Run) -> None:
        """Exchange what the local steps of a round need."""

    def on_round_end(self, run: Run) -> None:
        """Exchange the results of the local steps of a round."""

    def on_run_end(self, run: Run) -> None:
        """Exchange once more after the last round, whether planned or stopped early."""

    def on_evaluation_start(self, run: Run) -> None:
        """Prepare predictions, before an evaluation or prediction and when training ends."""

    def client_state(self, client: str) -> dict[str, Any]:
        """Return a local client's state for a checkpoint, under keys that no other component uses."""
        return {}

    def public_state(self) -> dict[str, Any]:
        """Return state for a checkpoint that is equal on all processes, in plain data; a returning site receives it."""
        return {}

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore `client_state` of local clients and `public_state` from a checkpoint.

        Args:
            clients: By local client, its state of all components.
            public: The checkpoint itself.
            resumes: Whether training goes on from it, rather than evaluation or prediction alone.
        """

    def on_return(self, public: Mapping[str, Any], clients: Collection[str]) -> None:
        """Go on with clients that were disconnected and return.

        Args:
            public: The server's `public_state`, of all components.
            clients: Their names; they have the state of their last checkpoint, or none.
        """


@dataclass(frozen=True)
class PhaseSettings:
    """Local training in a phase, as far as it differs from that of the run.

    Args:
        optimizer: Makes the optimiser of its rounds from parameter groups; ``None`` is the run's, which goes on with
            its state. Learning-rate schedules start anew with an optimiser.
        batch_size: Samples per client and batch, at least 1; ``None`` is the data module's.
        local_steps: Optimiser steps per client and round, at least 1; ``None`` is the strategy's.
    """

    optimizer: OptimizerCallable | None = None
    batch_size: int | None = None
    local_steps: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("batch_size", self.batch_size), ("local_steps", self.local_steps)):
            if number is not None:
                check_at_least(name, number, 1)


RUN_SETTINGS = PhaseSettings()
"""Settings of a phase that are all the run's."""


class Phase(Component):
    """A span of rounds with its learners, loss and exchanges; its round hooks are called in these rounds alone.

    Attributes:
        rounds: Number of rounds; ``None`` is all that are left.
        settings: Optimiser, batch size and local steps, where they differ from the run's.
    """

    rounds: int | None = None
    settings: PhaseSettings = RUN_SETTINGS

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return the clients that take local steps in a round, as far as they are present."""
        raise NotImplementedError

    def losses(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        """Return the losses of local clients in a local step, by name, each a scalar."""
        raise NotImplementedError
