"""Ditto (Li, Hu, Beirami and Smith, ICML 2021), Algorithm 1.

Differences from the paper: w and v take their steps on the same batches, with the same optimiser; the paper has them
apart, with a number of steps for each. v starts as the first w that its client trains, which after a warm-up is its
result.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from fedlit.checks import check_at_least
from fedlit.federation import Client
from fedlit.methods.personalised import Personalised, PersonalReplica
from fedlit.models import Anchor
from fedlit.run.options import ReplicaSpec
from fedlit.run.replicas import Replicas
from fedlit.run.run import Run


class AnchoredPersonalReplica(PersonalReplica):
    """Both models of a client, and the w of the round's start that v is held near."""

    def __init__(self, extractor: nn.Module, classifier: nn.Module) -> None:
        super().__init__(extractor, classifier)
        self.anchor = Anchor(self.personal.parameters())  # buffers, so that a checkpoint within a round has them


class Ditto(Personalised):
    """FedAvg of w, and at each client a local model v_k that is held near it (Li et al., ICML 2021, Algorithm 1).

    v_k minimises F_k(v) + (lam / 2) |v - w|^2, where w is the averaged model of the round's start. Each client is
    evaluated by its v_k, which never leaves it.

    Args:
        lam: Strength lambda of the pull towards w, at least 0: with 0 the v_k are trained locally, with a large one
            they are w. Steps of SGD need learning rate * lam < 2. Jiang et al. (ICLR 2024) take 1.

    Raises:
        ValueError: If ``lam`` is negative or not finite.
        RosterError: When training starts, if the target has no labels.
    """

    replicas: Replicas[AnchoredPersonalReplica]
    replica_spec: ClassVar[ReplicaSpec] = replace(Personalised.replica_spec, local=("personal", "anchor."))

    def __init__(self, *args: Any, lam: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_at_least("lam (lambda)", lam, 0, way_out="it weighs the pull towards the averaged model")
        self.lam = lam

    def build_replica(self) -> AnchoredPersonalReplica:
        """Both models, and the anchor."""
        return AnchoredPersonalReplica(*copy.deepcopy(self.originals))

    def on_round_start(self, run: Run) -> None:
        """Fetch the current w, and remember it."""
        super().on_round_start(run)
        for client in self.federation.local_clients:
            replica = self.replicas[client]
            network = [*replica.extractor.parameters(), *replica.classifier.parameters()]
            replica.anchor.move_(dict.fromkeys(network))  # tied ones once

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Cross-entropies of w and v, plus the pull of v towards the w of the round's start."""
        replica = self.replicas[client]
        distance = replica.anchor.squared_distance(replica.personal.parameters())
        return super().loss(client, batch) + 0.5 * self.lam * distance
