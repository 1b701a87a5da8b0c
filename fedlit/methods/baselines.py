"""The baselines of Jiang, Zhang and Koyejo (Principled Federated Domain Adaptation, ICLR 2024, section 5, appendix C).

SourceOnly, the floor that every method is compared with, averages the sources' updates alone; FinetuneOffline trains
the target after it for as many local epochs as rounds before; TargetOnly and Oracle train the target alone, on its few
labels or on all of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlit import FederatedModule, Phase, Requires, Run
from fedlit.checks import check_count
from fedlit.federation import Channel, Client, FederatedLoader, RosterError, Summed
from fedlit.methods.fedavg import FedAvg
from fedlit.methods.target_rate import TargetRate
from fedlit.module import Batch


class SourceOnly(FedAvg):
    """FedAvg over the sources, no adaptation: the baseline (as in Jiang et al., ICLR 2024, section 5).

    The target receives the model and adds nothing, even if it has labels.
    """

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """The sources."""
        return self.sources


class FineTuning(Phase):
    """Training of the target alone, the last phase of ``method``; nothing is sent."""

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


class ThenAlone(SourceOnly):
    """`SourceOnly` for some rounds, then a `last_phase` of the target alone.

    Args:
        federated_rounds: Rounds over the sources, at least 1; the rounds after them train the target alone.
    """

    def __init__(self, *args: Any, federated_rounds: int = 10, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_count("federated_rounds", federated_rounds, 1)
        self.federated_rounds = federated_rounds

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The weights, while federated."""
        return (Summed("weights", "weights of the network", up="sources", how_often="every federated round"),)

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """Federated rounds after a warm-up."""
        return max(0, self.federated_rounds - self.warmup_rounds)

    def on_run_start(self, run: Run) -> None:
        """Warn if no round is left for the target."""
        super().on_run_start(run)
        planned = run.clock.planned_rounds()
        if planned is not None and planned <= self.federated_rounds and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"{run.name} never trains the target: all of {planned} rounds (max_epochs) are over the sources: raise "
                f"max_epochs, or lower federated_rounds ({self.federated_rounds})"
            )

    @property
    def last_phase(self) -> Phase:
        """Training at the target."""
        return FineTuning(self)

    def phases(self) -> tuple[Phase, ...]:
        """A warm-up, the federated rounds, and those of the target."""
        return *super().phases(), self.last_phase


class FinetuneOffline(TargetRate, ThenAlone):
    """`SourceOnly` for some rounds, then `TargetOnly` from its model (baseline of Jiang et al., ICLR 2024, section 5).

    Args:
        federated_rounds: Rounds over the sources, at least 1; the rounds after them train the target alone. Give the
            Trainer twice as many rounds for the paper's setting: 20, what the command trains by default, for 10.
        target_lr_ratio: The learning rate of fine-tuning in units of the sources', positive.
        kwargs: See `TargetRate` and `FederatedModule`.

    Raises:
        RosterError: When training starts, if the target has no labels.
    """

    requires: ClassVar[Requires] = Requires(target_labels=True)


class TargetOnly(FederatedModule):
    """The target trains on its own labelled samples; nothing is sent (as in Jiang et al., ICLR 2024, section 5).

    Raises:
        RosterError: When training starts, if the target has no labels.
    """

    requires: ClassVar[Requires] = Requires(target_labels=True, sources=False)

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """The target."""
        return (self.target,)


class Oracle(TargetOnly):
    """`TargetOnly` with all of the target's training labels, a reference (as in Jiang et al., ICLR 2024, section 5).

    It is no upper bound: a method that trains on many sources as well can be above it. Its data module must be given
    ``target_labels: 1.0``.

    Raises:
        RosterError: When training starts, on every process, if the target is not fully labelled.
    """

    def on_run_start(self, run: Run) -> None:
        """Refuse a target that hides some labels."""
        loader = self.trainer.train_dataloader
        name = self.target.name
        error: RosterError | None = None
        if isinstance(loader, FederatedLoader) and name in loader.datasets:  # the process that hosts the target knows
            labelled, every = loader.sizes({name})[name], loader.sizes()[name]
            if labelled < every:
                error = RosterError(
                    f"Oracle trains on all target labels, but {labelled} of {every} training samples of target "
                    f"{name!r} have one: set target_labels to 1.0, or use TargetOnly"
                )
        self.federation.check("target labels", error)
