"""Replica of Co-MDA's target: two networks, which predict together."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from fedlit.models.replica import Replica

STAYS_LOCAL = ("peer.",)
"""Prefixes of the names in a replica's state that never leave its client."""


class Twins(Replica):
    """A network and its peer, with the same extractor and another classifier at first; it predicts their mean.

    Args:
        replica: The target's network without a peer; its parts are taken over.
        classifier: The peer's, with other random weights.
    """

    def __init__(self, replica: Replica, classifier: nn.Module) -> None:
        super().__init__(replica.extractor, replica.classifier)
        self.peer = Replica(copy.deepcopy(replica.extractor), classifier)

    def own(self, x: Tensor) -> Tensor:
        """Logits of the network without its peer, shape (batch, num_classes)."""
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        """Log of both networks' mean probabilities, shape (batch, num_classes)."""
        each = torch.stack([self.own(x), self.peer(x)]).log_softmax(dim=2)
        return each.logsumexp(dim=0) - math.log(2)

    @torch.no_grad()
    def start_peer_(self) -> None:
        """Copy this network's extractor to the peer, as after a warm-up, and not its classifier."""
        state = copy.deepcopy(self.extractor.state_dict())  # values of get_extra_state would be shared otherwise
        self.peer.extractor.load_state_dict(state)
