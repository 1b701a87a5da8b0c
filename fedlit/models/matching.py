"""What one client holds where domains are matched by moments: a network, and what it has received from the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedlit.models.replica import Replica

STAYS_LOCAL = ("others", "share", "reference")
"""Beginnings of the names in a replica's state that never leave its client."""


class MatchingReplica(Replica):
    """A client's own network, and a difference of means as far as its own is not in it.

    The difference is ``others + share * own``, with the client's mean ``own``. It is in the state, as is the reference,
    the scale of the features that its mean refers to, so that a checkpoint within a round has both.

    Args:
        extractor: Turns a batch of inputs into features, shape (batch, width).
        classifier: Turns features into logits, shape (batch, num_classes).
        num_moments: Numbers in a mean.
    """

    others: Tensor
    share: Tensor
    reference: Tensor

    def __init__(self, extractor: nn.Module, classifier: nn.Module, num_moments: int) -> None:
        super().__init__(extractor, classifier)
        dtype = torch.promote_types(next(extractor.parameters()).dtype, torch.float32)
        self.register_buffer("others", torch.zeros(num_moments, dtype=dtype))
        self.register_buffer("share", torch.zeros((), dtype=dtype))  # 0 where nothing was received
        self.register_buffer("reference", torch.zeros(1, dtype=dtype))
