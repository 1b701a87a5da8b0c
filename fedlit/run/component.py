"""Components, which take part in a run, and phases, in which a method trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

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


class Phase(Component):
    """A span of rounds with its learners, loss and exchanges; its round hooks are called in these rounds alone.

    Attributes:
        rounds: Number of rounds; ``None`` is all that are left.
    """

    rounds: int | None = None

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return the clients that take local steps in a round, as far as they are present."""
        raise NotImplementedError

    def losses(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        """Return the losses of local clients in a local step, by name, each a scalar."""
        raise NotImplementedError
