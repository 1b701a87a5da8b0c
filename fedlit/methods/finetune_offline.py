"""FinetuneOffline: FedAvg over the sources, then training at the target alone.

As "Finetune_Offline" in Jiang, Zhang and Koyejo (Principled Federated Domain Adaptation, ICLR 2024, section 5 and
appendix C): the same number of local epochs of fine-tuning as rounds of FedAvg before.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fedlit.federation import Channel, Client, Summed
from fedlit.methods.fedavg import FedAvg
from fedlit.run.options import Requires
from fedlit.run.run import Run


class FinetuneOffline(FedAvg):
    """`SourceOnly` for some rounds, then `TargetOnly` from its model (baseline of Jiang et al., ICLR 2024, section 5).

    Args:
        federated_rounds: Rounds over the sources, at least 1; the rounds after them train the target alone. Give the
            Trainer twice as many rounds for the paper's setting: 20, what the command trains by default, for 10.

    Raises:
        ValueError: If ``federated_rounds`` is below 1.
        RosterError: When training starts, if the target has no labels.
    """

    requires: ClassVar[Requires] = Requires(target_labels=True)

    def __init__(self, *args: Any, federated_rounds: int = 10, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if federated_rounds < 1:
            raise ValueError(f"federated_rounds must be at least 1, got {federated_rounds}")
        self.federated_rounds = federated_rounds

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The weights, while federated."""
        return (Summed("weights", "weights of the network", up="sources", how_often="every federated round"),)

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """The sources, then the target."""
        return self.sources if round_idx < self.federated_rounds else (self.target,)

    def on_round_end(self, run: Run) -> None:
        """Average the sources while federated; fine-tuning is offline."""
        if run.clock.round_idx < self.federated_rounds:
            super().on_round_end(run)
