"""What a client keeps of a round: its weights at the start, learning rates, and statistics of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedlit.functional import BatchStatistics


class Anchor(nn.Module):
    """Weights at the start of a round, near which training is held: buffers, so that a checkpoint within it has them.

    Args:
        params: Parameters to copy; later calls pass as many, of the same shapes, in the same order.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        for index, param in enumerate(params):
            self.register_buffer(str(index), param.detach().clone())

    @torch.no_grad()
    def move_(self, params: Iterable[Tensor]) -> None:
        """Copy the present values of parameters."""
        torch._foreach_copy_(list(self.buffers()), list(params))

    def squared_distance(self, params: Iterable[Tensor]) -> Tensor:
        """Sum of squared differences to parameters: a scalar with a graph."""
        pairs = zip(params, self.buffers(), strict=True)
        return torch.stack([(param - anchor).square().sum() for param, anchor in pairs]).sum()


class RoundMemory:
    """Weights at the start of a round, learning rates since, and statistics of gradients at that start.

    Args:
        keep_gradients: Keep all gradients that are observed too: one copy of the parameters each.

    Attributes:
        start: ``{name: tensor}``, empty outside of rounds.
        path: Sum of the learning rates of the steps so far.
        statistics: Of the gradients observed so far.
        gradients: The gradients observed so far, if they are kept.
    """

    def __init__(self, keep_gradients: bool = False) -> None:
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

    def record_(self, rate: float) -> None:
        """Note a step by its learning rate, which is not negative."""
        self.path += rate

    @contextmanager
    def at_start(self, module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
        """Take a module back to the round's start for a while; afterwards it is restored, buffers included.

        ``state`` has the parameters and buffers of the module that are in `start`.
        """
        tensors = [*module.parameters(), *module.buffers()]
        kept = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            torch._foreach_copy_([state[name] for name in self.start], list(self.start.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(tensors, kept)

    def observe_(self, gradient: dict[str, Tensor]) -> None:
        """Note the gradient of one more batch at `start`, by name."""
        self.statistics.add(gradient)
        if self.keep_gradients:
            self.gradients.append({name: tensor.detach().clone() for name, tensor in gradient.items()})

    @torch.no_grad()
    def update(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``state`` less `start`."""
        return {name: tensor.detach() - self.start[name].to(tensor.device) for name, tensor in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return values that load with ``weights_only``, so that a run can be resumed within a round."""
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
