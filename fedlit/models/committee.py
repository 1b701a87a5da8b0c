"""Replicas of FedMMD: extractor and classifier, and at the target all sources' classifiers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.models.replica import Replica

STAYS_LOCAL = ("center", "members.", "informed")
"""Prefixes of the names in a replica's state that never leave its client."""


class MomentReplica(Replica):
    """A client's network, whose features have moments that domains compare.

    Args:
        extractor: See `Replica`; features have shape (batch, L).
        classifier: See `Replica`.
        unit_norm: Scale features to length 1 for the moments, and to sqrt(L), a variance of about 1, for the
            classifier.
    """

    center: Tensor

    def __init__(self, extractor: nn.Module, classifier: nn.Module, unit_norm: bool) -> None:
        super().__init__(extractor, classifier)
        self.unit_norm = unit_norm
        # squared distance that the round's kernel is expanded around, -1 before there is one; in the state for
        # checkpoints within a round
        self.register_buffer("center", torch.tensor(-1.0, dtype=torch.float64))

    def features(self, x: Tensor) -> Tensor:
        """Features of a batch, shape (batch, L)."""
        z: Tensor = self.extractor(x)
        return F.normalize(z, dim=1) if self.unit_norm else z

    def readable(self, features: Tensor) -> Tensor:
        """Features as a classifier takes them, shape (batch, L)."""
        return features * math.sqrt(features.shape[1]) if self.unit_norm else features

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of inputs."""
        return cast(Tensor, self.classifier(self.readable(self.features(x))))


class Committee(MomentReplica):
    """The target's network: the mean prediction of the sources' classifiers on its features.

    Members count once their classifier has arrived; until one has, it predicts with its own, that of the pre-training.

    Args:
        replica: The target's without a committee; its parts are taken over.
        members: Names of the sources.
        of_logits: Classifiers give logits, whose probabilities are averaged, rather than numbers.
    """

    informed: Tensor

    def __init__(self, replica: MomentReplica, members: Sequence[str], of_logits: bool = True) -> None:
        super().__init__(replica.extractor, replica.classifier, replica.unit_norm)
        self.names = list(members)
        self.of_logits = of_logits
        self.members = nn.ModuleList(copy.deepcopy(replica.classifier).requires_grad_(False) for _ in members)
        self.register_buffer("informed", torch.zeros(len(members), dtype=torch.bool))

    def receive_(self, name: str, classifier: Mapping[str, Tensor]) -> None:
        """Load the state of a source's classifier, without its local part."""
        index = self.names.index(name)
        self.members[index].load_state_dict(classifier, strict=False)
        self.informed[index] = True

    def forward(self, x: Tensor) -> Tensor:
        """Log of the mean class probabilities, or the mean of the numbers, shape (batch, num_classes)."""
        features = self.readable(self.features(x))
        if not self.informed.any():
            return cast(Tensor, self.classifier(features))
        received = [member for member, informed in zip(self.members, self.informed.tolist(), strict=True) if informed]
        each = torch.stack([member(features) for member in received])
        if not self.of_logits:
            return each.mean(dim=0)
        return each.log_softmax(dim=2).logsumexp(dim=0) - math.log(len(each))
