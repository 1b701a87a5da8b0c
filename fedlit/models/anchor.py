"""Anchor: the weights at the start of a round, which training is held near."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Anchor(nn.Module):
    """Copies of parameters, as buffers, so that a checkpoint within a round has them.

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
