"""Per-client optimisation: parameter groups, clipping and learning-rate schedules.

All clients of a process share one optimiser, with parameter groups per client. Each client's parameters only meet the
gradient of its loss, so this is exactly independent local training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fedlit.checks import refuse
from fedlit.federation import Client
from fedlit.federation.ledger import SERVER
from fedlit.run.component import Phase
from fedlit.run.options import ReplicaSpec, Requires
from fedlit.run.replicas import Replicas
from fedlit.run.tasks import Task

if TYPE_CHECKING:
    from fedlit.run.run import Run


def default_optimizer(params: Iterable[Any]) -> Optimizer:
    """Return SGD with learning rate 0.01 and momentum 0.9, fused: one call for all clients' tensors."""
    optimizer = SGD(params, lr=0.01, momentum=0.9, fused=True)
    optimizer.register_step_pre_hook(_complete_momentum)
    return optimizer


def _complete_momentum(optimizer: Optimizer, *_: object) -> None:
    """Set the momentum of weights that join later to 0, as fused SGD takes all of a group with momentum or none."""
    for group in optimizer.param_groups:
        new = [param for param in group["params"] if optimizer.state.get(param, {}).get("momentum_buffer") is None]
        for param in new if len(new) < len(group["params"]) else ():
            if param.requires_grad:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def client_norms(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the norm of each client's gradient over all of its parameter groups; clients without one are left out."""
    norms: dict[str, Tensor] = {}
    for client, params in _by_client(optimizer).items():
        gradients = [param.grad for param in params if param.grad is not None]
        if gradients:
            norms[client] = torch.nn.utils.get_total_norm(gradients)
    return norms


def clip_client_gradients(
    optimizer: Optimizer, clip_val: float, algorithm: str = "norm", by_group: bool = False
) -> dict[str, Tensor]:
    """Clip each client's gradient by itself, never the sum over clients; return the norms before, as `client_norms`.

    Args:
        optimizer: With parameter groups that carry a ``"client"`` key.
        clip_val: Maximum norm, or maximum absolute entry.
        algorithm: ``"norm"`` or ``"value"``.
        by_group: Clip each model of a client by itself: each parameter group, or those with one number under
            ``"model"``.
    """
    norms = client_norms(optimizer)
    for client, params in _by_model(optimizer) if by_group else _by_client(optimizer).items():
        gradients = [param.grad for param in params if param.grad is not None]
        if gradients and algorithm == "value":
            torch.nn.utils.clip_grad_value_(params, clip_val)
        elif gradients:
            norm = torch.nn.utils.get_total_norm(gradients) if by_group else norms[client]
            torch.nn.utils.clip_grads_with_norm_(params, clip_val, norm)
    return norms


def _by_client(optimizer: Optimizer) -> dict[str, list[Tensor]]:
    params: dict[str, list[Tensor]] = {}
    for group in optimizer.param_groups:
        params.setdefault(group["client"], []).extend(group["params"])
    return params


def _by_model(optimizer: Optimizer) -> list[tuple[str, list[Tensor]]]:
    models: dict[tuple[str, int], list[Tensor]] = {}
    for place, group in enumerate(optimizer.param_groups):
        models.setdefault((group["client"], group.get("model", place)), []).extend(group["params"])
    return [(client, params) for (client, _), params in models.items()]


def with_schedules(
    optimizer: Optimizer, build: Callable[[Optimizer], LRScheduler] | None, interval: str
) -> OptimizerLRScheduler:
    """Return an optimiser and a schedule for each local client (``None`` for none), in Lightning's form."""
    if not isinstance(optimizer, Optimizer):
        rule, way_out = "a maker of a torch.optim.Optimizer", "give functools.partial(torch.optim.Adam, lr=0.001)"
        refuse("optimizer", rule, optimizer, way_out, TypeError)
    if build is None:
        return optimizer
    schedules = ClientSchedules(optimizer, build, interval)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedules, "interval": "step"}}  # type: ignore[return-value]


_FORM = (
    *("params", "client", "model", "initial_lr", "foreach", "fused", "capturable", "differentiable"),
    *("max_lr", "min_lr", "max_momentum", "base_momentum"),
)
"""Keys of a parameter group that are no settings of the algorithm, but of how it runs, or of a schedule."""

_MOVING = (
    *("last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "mode_worse", "T_cur", "T_i", "verbose"),
)
"""Entries of a schedule's state that change while it runs, and one of old versions."""

_PLAIN = (bool, int, float, str, tuple, list, type(None))
"""Types of settings that can be compared and shown."""

_ANEW = "of that run, or train anew from its weights (load_from_checkpoint)"
"""The way out of a checkpoint whose settings do not fit."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """Describe the changed ones among settings that can be compared, by key."""
    return {
        key: f"{key} was {before[key]!r} and is {now[key]!r}"
        for key in keys
        if isinstance(now[key], _PLAIN) and now[key] != before[key]
    }


def check_resumed(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Compare a checkpoint's optimiser with the one that loads it; warn of changed settings.

    Groups must be in its order (`arrange`). Another algorithm is a `ValueError`.
    """
    name, changed = type(optimizer).__name__, dict[str, str]()
    for now, before in zip(optimizer.param_groups, state["param_groups"], strict=True):
        unknown = [key for key in before if key not in now and key not in _FORM]
        if unknown:
            raise ValueError(
                f"the checkpoint's optimizer has the settings {unknown}, which {name} lacks: resume with the optimizer "
                + _ANEW
            )
        was_scheduled, is_scheduled = "initial_lr" in before, "initial_lr" in now
        rate = "initial_lr" if was_scheduled and is_scheduled else "lr"
        if was_scheduled and not is_scheduled:
            changed["lr_scheduler"] = "lr_scheduler was given and is None"
        elif float(now[rate]) != float(before[rate]):
            changed["lr"] = f"lr was {before[rate]} and is {now[rate]}"
        # schedules move these: cyclic ones momentum, too
        moved = ("lr", "betas", "momentum") if "base_momentum" in before else ("lr",)
        changed |= changes(before, now, [key for key in now if key in before and key not in (*_FORM, *moved)])
    if changed:
        rank_zero_warn(
            f"the optimizer {name} goes on with the settings that the checkpoint has, not with this run's: "
            f"{'; '.join(changed.values())}. To train with others, start anew from its weights (load_from_checkpoint)"
        )


def _check_schedule(schedule: Any, state: Mapping[str, Any]) -> None:
    """Compare a checkpoint's learning-rate schedule, as `check_resumed`."""
    name, now = type(schedule).__name__, schedule.state_dict()
    settings = [{key for key in each if key[0] != "_" and key not in _MOVING} for each in (state, now)]
    if settings[0] != settings[1]:
        raise ValueError(
            f"the checkpoint's schedule of learning rates has the settings {sorted(settings[0])}, and {name} has "
            f"{sorted(settings[1])}: resume with the lr_scheduler {_ANEW}"
        )
    if changed := changes(state, now, sorted(settings[0])):
        rank_zero_warn(
            f"the schedule {name} goes on with the settings that the checkpoint has: {'; '.join(changed.values())}"
        )


class ClientView(Optimizer):
    """One client's parameter groups as an optimiser for a scheduler; shares the groups and never steps."""

    def __init__(self, optimizer: Optimizer, client: str) -> None:
        # Not Optimizer.__init__: it would copy the groups, and the scheduler must write into the shared ones.
        self.optimizer = optimizer
        self.client = client
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of this client."""
        # Looked up afresh each time: loading a checkpoint gives the optimiser new groups.
        return [group for group in self.optimizer.param_groups if group["client"] == self.client]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: torch wraps this method to count the client's steps."""


class ClientSchedules:
    """A learning-rate schedule for each client, which advances only when that client takes part.

    Args:
        optimizer: With parameter groups that carry a ``"client"`` key.
        build: Makes a scheduler for one client's groups.
        interval: ``"round"`` or ``"step"``; anything else leaves advancing to others.
    """

    def __init__(self, optimizer: Optimizer, build: Callable[[ClientView], LRScheduler], interval: str) -> None:
        self.optimizer = optimizer
        self.interval = interval
        clients = dict.fromkeys(group["client"] for group in optimizer.param_groups)
        self.views = {client: ClientView(optimizer, client) for client in clients}
        self.schedules = {client: build(view) for client, view in self.views.items()}
        for group in optimizer.param_groups:  # which a schedule that waits for a plateau leaves out
            group.setdefault("initial_lr", group["lr"])

    def step(self, clients: Collection[str], losses: Mapping[str, float]) -> None:
        """Advance the schedules of ``clients``; those that react to a plateau receive the client's loss."""
        for client, schedule in self.schedules.items():
            if client in clients:
                self.views[client].step()
                if isinstance(schedule, ReduceLROnPlateau):
                    if client in losses:
                        schedule.step(losses[client])
                else:
                    schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each client's schedule, by name."""
        return {client: schedule.state_dict() for client, schedule in self.schedules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the schedules of local clients; the state may hold others too."""
        clients = [client for client in self.schedules if client != SERVER]  # at which nothing is scheduled
        for client in clients[:1]:  # others are made alike
            _check_schedule(self.schedules[client], state[client])
        for client, schedule in self.schedules.items():
            if client in clients:
                schedule.load_state_dict(state[client])


class ClientOptimisation(pl.LightningModule, ABC):
    """Lightning's optimisation hooks, client by client, where all clients of a process share an optimiser.

    A `Run` is made of such a module, which declares its clients, networks and phases.
    """

    run: Run
    clients: tuple[Client, ...]
    target: Client
    task: Task
    originals: tuple[nn.Module, nn.Module]

    replicas: Replicas[nn.Module]
    """Replica of each local client; a method with a replica class of another type annotates it."""

    requires: ClassVar[Requires] = Requires()
    """Requirements of the method for a run."""

    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec()
    """How replicas are trained, and which of their weights leave a client."""

    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of a run, in order."""

    @abstractmethod
    def build_replica(self) -> nn.Module:
        """Return the modules of one client; called once per client, each time from the same random state."""

    @abstractmethod
    def build_target(self, replica: Any) -> nn.Module:
        """Return the target's modules, made from those of `build_replica`."""

    def on_after_backward(self) -> None:
        """Hand stacked gradients back to the clients' parameters."""
        if self.run.stacked is not None:
            self.run.stacked.scatter_gradients()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take a step, of one client after the other if they are large; a target within its trust region."""
        region, plain = self.run.trust_region, getattr(optimizer, "optimizer", optimizer)  # not Lightning's proxy
        turns, clients = self.run.turns, self.run.turns.of(plain)
        for place, client in enumerate(clients):
            with turns.take(plain, clients, place):
                moves_target = client in (None, self.target.name)
                with nullcontext() if region is None or not moves_target else region.limited(self.run):
                    super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
                self.on_step_taken(plain)

    def on_step_taken(self, optimizer: Optimizer) -> None:
        """Do what follows a step of the clients in ``optimizer``'s groups, while their gradients are there."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Set gradients to None, so that an absent client's optimiser state does not change."""
        if self.run.turns.has_zeroed:
            self.run.turns.has_zeroed = False
            return
        optimizer.zero_grad(set_to_none=True)
        if self.run.stacked is not None:
            self.run.stacked.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip each client's gradient by itself."""
        if gradient_clip_val:
            algorithm, several = str(gradient_clip_algorithm or "norm"), self.run.spec.several_models
            self.run.record.add_norms_(clip_client_gradients(optimizer, gradient_clip_val, algorithm, several))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance per-client schedules that count steps; those that count rounds advance when a round ends."""
        steps = self.run.record.steps
        if not isinstance(scheduler, ClientSchedules):
            super().lr_scheduler_step(scheduler, metric)
        elif scheduler.interval == "step" and steps:
            names, values = steps[-1]
            scheduler.step(names, dict(zip(names, values.tolist(), strict=True)))
