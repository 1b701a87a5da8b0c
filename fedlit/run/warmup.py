"""The warm-up: rounds of FedAvg over the sources, before a method's own phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedlit.federation import Channel, Client, Summed
from fedlit.run.component import RUN_SETTINGS, Phase, PhaseSettings
from fedlit.run.turns import independent

if TYPE_CHECKING:
    from fedlit.run.run import Run


class WarmUp(Phase):
    """FedAvg over the sources (McMahan et al., AISTATS 2017, Algorithm 1).

    ``loss`` is that of one client on its labelled samples; ``parts`` are the averaged sub-modules, ``None`` all
    weights.
    """

    def __init__(
        self,
        run: Run,
        loss: Callable[[Client, Sequence[Any]], Tensor],
        parts: tuple[str, ...] | None = None,
        settings: PhaseSettings = RUN_SETTINGS,
    ) -> None:
        self._run = run
        self._loss = loss
        self._parts = parts
        self.settings = settings

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """Number of rounds; a share of the planned rounds is known when the run is planned."""
        return self._run.clock.warmup_rounds

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The weights, if there is a warm-up."""
        contents = "weights" if self._parts is None else f"weights of the {' and the '.join(self._parts)}"
        return (Summed("weights", f"{contents}, while warming up", up="sources"),) if self.rounds else ()

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return the sources."""
        return self._run.sources

    @independent
    def losses(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        """Return each source's loss on its labels."""
        return self._run.local_losses(self._loss, batch)

    def on_round_start(self, run: Run) -> None:
        """Let clients that were absent fetch the current model."""
        run.weights.catch_up("weights")

    def on_round_end(self, run: Run) -> None:
        """Average the sources' weights, for everyone."""
        run.weights.average_("weights", among=run.sources, part=self._parts)

    def on_return(self, public: Mapping[str, Any], clients: Any) -> None:
        """Let clients that return after the warm-up fetch its result."""
        if self.rounds and self._run.clock.round_idx > self.rounds:
            self._run.weights.catch_up("weights", absent_too=True)
