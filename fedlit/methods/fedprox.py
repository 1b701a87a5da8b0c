"""FedProx (Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, MLSys 2020), Algorithm 2.

Differences from the paper: clients are weighted as in FedAvg (by samples, or uniformly) rather than sampled in
proportion to their data; inexact local solutions are given by the local steps, not by a gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from fedlit import ReplicaSpec, Run
from fedlit.checks import check_at_least
from fedlit.federation import Client
from fedlit.methods.fedavg import FedAvg
from fedlit.models import Anchor, Replica
from fedlit.models.copies import copied
from fedlit.run.replicas import Replicas


class AnchoredReplica(Replica):
    """A client's network, and the weights w_round that they are held near."""

    def __init__(self, extractor: nn.Module, classifier: nn.Module) -> None:
        super().__init__(extractor, classifier)
        self.anchor = Anchor(self.parameters())  # buffers, so that a checkpoint within a round has them


class FedProx(FedAvg):
    """FedAvg with the local loss F_k(w) + (mu / 2) |w - w_round|^2 (Li et al., MLSys 2020, Algorithm 2).

    Args:
        mu: Strength of the proximal term, at least 0; 0 is FedAvg. The paper tries 0.001 to 1.
    """

    replicas: Replicas[AnchoredReplica]
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=("anchor.",))  # everybody has it already

    def __init__(self, *args: Any, mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_at_least("mu", mu, 0, way_out="it weighs the pull towards the round's first model")
        self.mu = mu

    def build_replica(self) -> AnchoredReplica:
        """A network and its anchor."""
        return AnchoredReplica(*copied(self.originals))

    def on_round_start(self, run: Run) -> None:
        """Fetch the current model, and remember it as the anchor."""
        super().on_round_start(run)
        for client in self.federation.local_clients:
            self.replicas[client].anchor.move_(self.replicas[client].parameters())

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Cross-entropy plus the proximal term."""
        replica = self.replicas[client]
        return super().loss(client, batch) + 0.5 * self.mu * replica.anchor.squared_distance(replica.parameters())
