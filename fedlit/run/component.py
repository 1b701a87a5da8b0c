"""What takes part in a run: `Component`, and the `Phase` s that a method trains in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedlit.federation import Channel, Client

if TYPE_CHECKING:
    from fedlit.run.run import Run


class Component:
    """Something that takes part in a run: it declares channels, acts when rounds start and end, and keeps state.

    A run has one ordered list of components: the method's phases, its parts, the Trainer's callbacks and the data
    module, as far as they derive from this class. Hooks, checkpoints and returns of sites go over that list. All hooks
    are called on all processes, in lockstep.
    """

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Messages between clients; default: none."""
        return ()

    def on_run_start(self, run: Run) -> None:
        """Prepare, before the first round of a run or the one that a checkpoint goes on with."""

    def on_round_start(self, run: Run) -> None:
        """Exchange what is needed before the local steps of a round."""

    def on_round_end(self, run: Run) -> None:
        """Exchange what the local steps of a round have found."""

    def on_run_end(self, run: Run) -> None:
        """Exchange what is sent once more after the last round, planned or where training was stopped."""

    def on_evaluation_start(self, run: Run) -> None:
        """Make what is predicted with, before an evaluation or prediction and when training ends."""

    def client_state(self, client: str) -> dict[str, Any]:
        """Return what a checkpoint keeps under the name of a local client; keys are the component's own."""
        return {}

    def public_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps that is equal everywhere, in plain data; a site that returns receives it."""
        return {}

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore `client_state` of local clients and `public_state` from a checkpoint.

        Args:
            clients: By name of a local client, what the checkpoint keeps under it, of all components.
            public: The checkpoint itself.
            resumes: Whether training goes on from it, rather than evaluation and prediction alone.
        """

    def on_return(self, public: Mapping[str, Any], clients: Collection[str]) -> None:
        """Go on with clients that were disconnected and return.

        Args:
            public: The server's `public_state`, of all components.
            clients: Their names. They have what their last checkpoint has, or nothing.
        """


class Phase(Component):
    """Some rounds of a run with their own learners, loss and exchanges; its round hooks are called in these alone.

    Attributes:
        rounds: How many; ``None`` is all that are left.
    """

    rounds: int | None = None

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return the clients that take local steps in a round, as far as they are present."""
        raise NotImplementedError

    def losses(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        """Return the losses of local clients in a local step, by name, each a scalar."""
        raise NotImplementedError
