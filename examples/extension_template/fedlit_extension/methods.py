"""FedEntropy: FedAvg whose target lowers the entropy of its predictions (Grandvalet and Bengio, NeurIPS 2004).

The first line names the paper, and its algorithm box if there is one: `fedlit list` shows what is in brackets.

Differences from the paper: there is no federation in it; one network sees labelled and unlabelled samples together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlit import Client, Requires
from fedlit.methods import FedAvg


class FedEntropy(FedAvg):
    """FedAvg over sources and target, which lowers the entropy of its predictions instead of a supervised loss.

    Args:
        entropy_weight: Weight of the entropy in the target's loss, at least 0.

    Raises:
        ValueError: If ``entropy_weight`` is negative.
    """

    requires: ClassVar[Requires] = Requires(unlabelled_target=True, tasks=("classification",))

    def __init__(self, *args: Any, entropy_weight: float = 0.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if entropy_weight < 0:
            raise ValueError(f"entropy_weight must be at least 0, got {entropy_weight}: entropy is to be lowered")
        self.entropy_weight = entropy_weight

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Everyone; FedAvg averages over them when the round ends."""
        return self.clients

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Cross-entropy of a source; of the target the mean entropy, and the cross-entropy of labels that it may have.

        Only the inputs ``batch[0]`` of an unlabelled target can be read: its labels raise.
        """
        if not client.is_target:
            return super().loss(client, batch)
        predictions = self.replicas[client.name](batch[0]).softmax(dim=1)
        entropy = self.entropy_weight * torch.special.entr(predictions).sum(dim=1).mean()
        return entropy + super().loss(client, batch) if client.labelled else entropy
