"""A learning rate of the target's own."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from fedlit import FederatedModule
from fedlit.checks import check_positive
from fedlit.run.param_groups import check_ratio


class TargetRate(FederatedModule):
    """A method whose target trains at a learning rate of its own.

    Args:
        target_lr_ratio: The target's learning rate in units of the sources', positive; kept by schedules that scale
            rates, not by those that set them (such as OneCycleLR).
        kwargs: See `FederatedModule`.
    """

    def __init__(self, *args: Any, target_lr_ratio: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_positive("target_lr_ratio", target_lr_ratio)
        check_ratio(self.run.local.param_groups, "target_lr_ratio", target_lr_ratio, client=self.target.name)
        self.target_lr_ratio = target_lr_ratio

    def make_optimizer(self) -> Optimizer:
        """Return the configured optimiser, with the target's learning rate scaled."""
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            if group["client"] == self.target.name:
                group["lr"] = group["lr"] * self.target_lr_ratio
        return optimizer
