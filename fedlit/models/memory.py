"""What a client remembers of a round under way: the weights it started from, and the steps it has taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedlit.functional import BatchStatistics


class RoundMemory:
    """Weights at the start of a round, learning rates since, and statistics of the steps if they are asked for.

    Args:
        watched: Keep mean and variance of the steps, each divided by its learning rate (a gradient, under SGD), in two
            copies of the parameters.
        keep_steps: Keep all of these too: as many copies as there are steps in a round.

    Attributes:
        start: ``{name: tensor}``, empty outside of rounds.
        path: Sum of the learning rates of the steps so far.
        statistics: Of the steps so far.
        steps: The steps so far, if they are kept.
    """

    def __init__(self, watched: bool = False, keep_steps: bool = False) -> None:
        self.watched = watched
        self.keep_steps = keep_steps
        self.forget_()

    def forget_(self) -> None:
        """Leave the round."""
        self.start: dict[str, Tensor] = {}
        self.path = 0.0
        self.statistics = BatchStatistics()
        self.steps: list[dict[str, Tensor]] = []
        self._previous: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin_(self, state: Mapping[str, Tensor]) -> None:
        """Start a round from these weights."""
        self.forget_()
        self.start = {name: tensor.detach().clone() for name, tensor in state.items()}
        if self.watched:
            self._previous = {name: tensor.clone() for name, tensor in self.start.items()}

    @torch.no_grad()
    def record_(self, params: Mapping[str, Tensor], rate: float) -> None:
        """Note a step that has just been taken.

        Args:
            params: Parameters after it, by their names in `start`.
            rate: Its learning rate, positive.
        """
        self.path += rate
        if not self.watched:
            return
        names = list(params)
        now = [params[name].detach() for name in names]
        before = [self._previous[name].to(tensor.device) for name, tensor in params.items()]
        steps = torch._foreach_div(torch._foreach_sub(now, before), rate)
        step = dict(zip(names, steps, strict=True))
        self.statistics.add(step)
        if self.keep_steps:
            self.steps.append(step)
        for name, tensor in zip(names, now, strict=True):
            self._previous[name] = tensor.clone()

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
            "steps": self.steps,
            "previous": self._previous,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` left off."""
        self.start, self.path = dict(state["start"]), state["path"]
        self.statistics = BatchStatistics(dict(state["mean"]), state["squares"], state["count"])
        self.steps, self._previous = list(state["steps"]), dict(state["previous"])
