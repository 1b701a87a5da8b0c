"""Optimisers and schedules that each client's module makes, merged into ones over all clients of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
)
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import LBFGS, Optimizer

from fedlit.checks import check
from fedlit.run.optimisation import ClientSchedules, ClientView
from fedlit.run.turns import stepping


@dataclass(frozen=True)
class OwnOptimisers:
    """Optimisers and Lightning's descriptions of schedules that one client's ``configure_optimizers`` makes."""

    optimizers: list[Optimizer]
    schedules: list[Any]

    @classmethod
    def of(cls, module: pl.LightningModule) -> OwnOptimisers:
        """Call ``configure_optimizers``; a `ValueError` if clients cannot have its result separately."""
        given = module.configure_optimizers()

        def check_made(holds: bool, rule: str, value: Any, way_out: str = "") -> None:
            check(holds, "configure_optimizers", rule, value, way_out)

        check_made(given is not None, "of optimizers, without which clients train nothing", given)
        optimizers, schedules, monitor = _configure_optimizers(cast(Any, given))
        if module.automatic_optimization:
            made = _configure_schedulers_automatic_opt(schedules, monitor)
        else:
            made = _configure_schedulers_manual_opt(schedules)
        check_made(
            not module.automatic_optimization or len(optimizers) == 1,
            "of one optimizer, as Lightning steps several in no fixed order",
            len(optimizers),
            "set automatic_optimization = False in the module, and step each in training_step",
        )
        params = {id(param) for param in module.parameters()}
        for optimizer in optimizers:
            rule = "of an optimizer with a parameter group for each client"
            check_made(not isinstance(optimizer, LBFGS), rule, "LBFGS", "take another, such as torch.optim.Adam")
            are_own = all(id(param) in params for group in optimizer.param_groups for param in group["params"])
            way_out = "take self.parameters() when it is called, as each client trains a copy of the module"
            check_made(are_own, "of the module's parameters", optimizer, way_out)
        for schedule in made:
            rule, way_out = "of a schedule with frequency=1", "give the schedule the longer period"
            check_made(schedule.frequency == 1, rule, schedule.frequency, way_out)
            if getattr(schedule, "reduce_on_plateau", False):
                rule = "of a schedule that monitors train_loss, the mean of a client's training_step"
                way_out = "set 'monitor': 'train_loss', as a copy's schedule knows no number of an evaluation"
                check_made(schedule.monitor in ("loss", "train_loss"), rule, schedule.monitor, way_out)
        return cls(optimizers, made)


class ClientOptimizer(ClientView):
    """One client's parameter groups as an optimiser that steps them alone, for a module that steps by itself."""

    def __init__(self, optimizer: Optimizer, client: str, module: pl.LightningModule) -> None:
        super().__init__(optimizer, client)
        self._module = module

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let no parameters of other optimisers take gradients meanwhile."""
        self._module.toggle_optimizer(self)
        yield
        self._module.untoggle_optimizer(self)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the client's parameters that have a gradient."""
        with stepping(self.optimizer, self.param_groups):
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the client's gradients to None; with 0, absent clients would be stepped."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State by parameter, of all clients."""
        return self.optimizer.state


def together(made: Mapping[str, OwnOptimisers], automatic: bool) -> OptimizerLRScheduler:
    """Merge each optimiser and schedule over clients, in roster order; ``automatic``: Lightning steps it.

    Raises:
        ValueError: If clients' modules do not all make as many, of the same classes.
    """
    first = next(iter(made.values()))
    kinds = [[type(each) for each in own.optimizers] for own in made.values()]
    counts = [len(own.schedules) for own in made.values()]
    if any(kind != kinds[0] for kind in kinds) or len(set(counts)) > 1:
        raise ValueError(
            "configure_optimizers gives clients other optimizers or schedules than each other: "
            f"{dict(zip(made, ([kind.__name__ for kind in each] for each in kinds), strict=True))}, and "
            f"{dict(zip(made, counts, strict=True))} schedules; give all the same"
        )
    merged = [_over_clients({name: own.optimizers[i] for name, own in made.items()}) for i in range(len(kinds[0]))]
    stepped = [[each is schedule.scheduler.optimizer for each in first.optimizers] for schedule in first.schedules]
    schedules = [
        _schedules_of({name: own.schedules[i] for name, own in made.items()}, merged[each.index(True)], automatic)
        for i, each in enumerate(stepped)
    ]
    if automatic:
        each = {"lr_scheduler": {"scheduler": schedules[0], "interval": "step"}} if schedules else {}
        return cast(OptimizerLRScheduler, {"optimizer": merged[0], **each})
    return cast(OptimizerLRScheduler, (merged, schedules))


def _over_clients(own: Mapping[str, Optimizer]) -> Optimizer:
    (first, merged), *others = own.items()
    for group in merged.param_groups:
        group["client"] = first
    for name, optimizer in others:
        for group in optimizer.param_groups:
            merged.add_param_group({**group, "client": name})
        merged.state.update(optimizer.state)  # of those that have one from the start
    return merged


def _schedules_of(own: Mapping[str, Any], optimizer: Optimizer, automatic: bool) -> ClientSchedules:
    """Return the clients' schedules, which from now on write into the groups of the shared optimiser."""

    def taken_over(view: ClientView) -> Any:
        schedule = own[view.client].scheduler
        for each in _with_parts(schedule):
            each.optimizer = view
        _mark_as_stepped(view)
        return schedule

    interval = next(iter(own.values())).interval
    advanced = {"step": "step", "epoch": "round"}[interval] if automatic else "by the module"
    return ClientSchedules(optimizer, taken_over, advanced)


def _with_parts(schedule: Any) -> Iterator[Any]:
    """Yield a schedule and those that it is made of."""
    yield schedule
    for part in getattr(schedule, "_schedulers", ()):
        yield from _with_parts(part)


def _mark_as_stepped(view: ClientView) -> None:
    """Mark a view as stepped for torch's check of the order of calls: the shared optimiser steps."""

    def step(closure: Any = None) -> None:
        pass

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    view.step = step  # type: ignore[method-assign]
    view._opt_called = True  # type: ignore[attr-defined]


def placeholder(own: OwnOptimisers, client: str) -> OwnOptimisers:
    """Reduce optimisers to a single number each, for a process without clients, which trains nothing."""
    for optimizer in own.optimizers:
        del optimizer.param_groups[1:]
        optimizer.param_groups[0] |= {"params": [nn.Parameter(torch.zeros(()))], "client": client}
    return own
