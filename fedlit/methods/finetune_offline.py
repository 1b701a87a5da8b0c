"""FinetuneOffline: FedAvg over the sources, then training at the target alone.

As "Finetune_Offline" in Jiang, Zhang and Koyejo (Principled Federated Domain Adaptation, ICLR 2024, section 5 and
appendix C): the same number of local epochs of fine-tuning as rounds of FedAvg before.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fedlit.checks import check_at_least
from fedlit.federation import Channel, Client, Summed
from fedlit.methods.fedavg import FedAvg
from fedlit.module import Batch
from fedlit.run.component import Phase
from fedlit.run.options import Requires
from fedlit.run.run import Run


class FineTuning(Phase):
    """Training at the target alone; nothing is sent.

    Args:
        method: Of which it is the last phase.
    """

    def __init__(self, method: FedAvg) -> None:
        self._method = method

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """The target."""
        return (self._method.target,)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Its loss on its labels."""
        return self._method.losses(batch)

    def on_round_start(self, run: Run) -> None:
        """A target that was absent in the last federated round fetches its result first."""
        run.weights.catch_up("weights")


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
        check_at_least("federated_rounds", federated_rounds, 1)
        self.federated_rounds = federated_rounds

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The weights, while federated."""
        return (Summed("weights", "weights of the network", up="sources", how_often="every federated round"),)

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """Federated rounds after a warm-up."""
        return max(0, self.federated_rounds - self.warmup_rounds)

    def phases(self) -> tuple[Phase, ...]:
        """A warm-up, the federated rounds, and fine-tuning at the target."""
        return *super().phases(), FineTuning(self)

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """The sources."""
        return self.sources
