"""What a client remembers of a round under way: the weights it started from, and the steps it has taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedlit.functional import BatchStatistics


class RoundMemory:
    """Weights at the start of a round, learning rates since, and statistics of the gradients if they are asked for.

    Args:
        watched: Keep mean and variance of the steps' gradients, in one copy of the parameters.
        keep_gradients: Keep all of these too: as many copies as there are steps in a round.

    Attributes:
        start: ``{name: tensor}``, empty outside of rounds.
        path: Sum of the learning rates of the steps so far.
        statistics: Of the gradients so far.
        gradients: The gradients so far, if they are kept.
    """

    def __init__(self, watched: bool = False, keep_gradients: bool = False) -> None:
        self.watched = watched
        self.keep_gradients = keep_gradients
        self.forget_()

    def forget_(self) -> None:
        """Leave the round."""
        self.start: dict[str, Tensor] = {}
        self.path = 0.0
        self.statistics = BatchStatistics()
        self.gradients: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def begin_(self, state: Mapping[str, Tensor]) -> None:
        """Start a round from these weights."""
        self.forget_()
        self.start = {name: tensor.detach().clone() for name, tensor in state.items()}

    @torch.no_grad()
    def record_(self, params: Mapping[str, Tensor], rate: float) -> None:
        """Note a step that has just been taken.

        Args:
            params: Trained parameters by their names in `start`, with the gradients of the step (none counts as 0).
            rate: Its learning rate, not negative.
        """
        self.path += rate
        if not self.watched:
            return
        gradient = {
            name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in params.items()
        }
        self.statistics.add(gradient)
        if self.keep_gradients:
            self.gradients.append({name: tensor.clone() for name, tensor in gradient.items()})

    @torch.no_grad()
    def update(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the round has changed so far: ``state`` less `start`."""
        return {name: tensor.detach() - self.start[name].to(tensor.device) for name, tensor in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as values that load with ``weights_only``, so that a run can be resumed within a round."""
        return {
            "start": self.start,
            "path": self.path,
            "mean": self.statistics.mean,
            "squares": self.statistics.squares,
            "count": self.statistics.count,
            "gradients": self.gradients,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` left off."""
        self.start, self.path = dict(state["start"]), state["path"]
        self.statistics = BatchStatistics(dict(state["mean"]), state["squares"], state["count"])
        self.gradients = list(state["gradients"])
