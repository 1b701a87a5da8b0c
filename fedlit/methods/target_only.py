"""TargetOnly and Oracle: the target trains alone, on its few labels or on all of them.

As "Target Only" and "Oracle" in Jiang, Zhang and Koyejo (Principled Federated Domain Adaptation, ICLR 2024, section
5): the target's own gradient alone, and supervised training with all target data.
"""

from __future__ import annotations

from typing import ClassVar

from fedlit.federation import Client, FederatedLoader, RosterError
from fedlit.module import FederatedModule
from fedlit.run.options import Requires
from fedlit.run.run import Run


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
            given, all_of_them = loader.sizes({name})[name], loader.sizes()[name]
            if given < all_of_them:
                error = RosterError(
                    f"Oracle trains on all target labels, but {given} of {all_of_them} training samples of target "
                    f"{name!r} have one: set target_labels to 1.0, or use TargetOnly"
                )
        self.federation.check("target labels", error)
