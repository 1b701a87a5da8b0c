"""Replica of methods that match moments: a network, and the means received from the other clients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedlit.models.replica import Replica

STAYS_LOCAL = ("others", "share", "reference")
"""Prefixes of the names in a replica's state that never leave its client."""


class MatchingReplica(Replica):
    """A client's network, and the other clients' part of a difference of means.

    The difference is ``others + share * own``, with the client's mean ``own``. Its parts are in the state, as is the
    reference, the scale of the features in a mean, so that a checkpoint within a round has them.

    Args:
        extractor: See `Replica`.
        classifier: See `Replica`.
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
