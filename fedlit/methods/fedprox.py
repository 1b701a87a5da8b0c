"""FedProx (Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, MLSys 2020), Algorithm 2.

Differences from the paper: clients are weighted as in FedAvg (by samples, or uniformly) rather than sampled in
proportion to their data; inexact local solutions are given by the local steps, not by a gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from fedlit.federation import Client
from fedlit.methods.fedavg import FedAvg
from fedlit.models import Anchor


class FedProx(FedAvg):
    """FedAvg whose local losses hold clients near the model of the round's start: loss + (mu / 2) |w - w_round|^2.

    Sends: "weights", as FedAvg.

    Args:
        mu: Strength of the proximal term, at least 0; 0 is FedAvg. The paper tries 0.001 to 1.

    Raises:
        ValueError: If ``mu`` is negative.
    """

    stays_local: ClassVar[tuple[str, ...]] = ("anchor.",)  # everybody knows it already

    def __init__(self, *args: Any, mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if mu < 0:
            raise ValueError(f"mu must be at least 0, got {mu}: it weighs the pull towards the round's first model")
        self.mu = mu

    def build_replica(self) -> nn.Module:
        """A network and its anchor w_round, as buffers, so that a checkpoint within a round has it."""
        replica = super().build_replica()
        replica.add_module("anchor", Anchor(replica.parameters()))
        return replica

    def on_round_start(self, round_idx: int) -> None:
        """Fetch the current model, and remember it as the anchor."""
        super().on_round_start(round_idx)
        self.anchor_()

    def anchor_(self) -> None:
        """Set w_round to the current weights of each local client."""
        for client in self.federation.local_clients:
            self._anchor(client).move_(self.replicas[client.name].parameters())

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Cross-entropy plus the proximal term."""
        distance = self._anchor(client).squared_distance(self.replicas[client.name].parameters())
        return super().loss(client, batch) + 0.5 * self.mu * distance

    def _anchor(self, client: Client) -> Anchor:
        anchor = self.replicas[client.name].get_submodule("anchor")
        assert isinstance(anchor, Anchor)
        return anchor
