"""Trains a LightningModule of the user's by a method: a copy at each client, with its own optimisers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

from fedlit.checks import refuse
from fedlit.federation import Client, NotTrainedError
from fedlit.federation.batch_parts import whole
from fedlit.federation.descriptions import described
from fedlit.federation.labels import TaskName, with_known_labels
from fedlit.federation.ledger import SERVER
from fedlit.federation.nested import num_samples
from fedlit.module import Batch, FederatedModule
from fedlit.run.optimisation import default_optimizer
from fedlit.run.own_optimisers import ClientOptimizer, OwnOptimisers, placeholder, together
from fedlit.run.tasks import Task, Unscored
from fedlit.run.turns import independent
from fedlit.wrapped.evaluation import Log, SelfEvaluated, call_step
from fedlit.wrapped.outputs import LoggedNumbers, Outputs

_REFUSED = {
    **dict.fromkeys(
        ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
        "change samples in the dataset, or in training_step",
    ),
    **dict.fromkeys(
        (
            *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
            *("on_before_optimizer_step", "on_before_zero_grad", "backward", "optimizer_step", "optimizer_zero_grad"),
            *("lr_scheduler_step", "configure_gradient_clipping"),
        ),
        "do it in training_step, with automatic_optimization = False if it is about single steps",
    ),
    **dict.fromkeys(("setup", "configure_model", "configure_sharded_model"), "build the network in __init__"),
    **dict.fromkeys(("on_fit_start", "on_fit_end"), "do it in on_train_start or on_train_end"),
    **dict.fromkeys(
        [f"on_{stage}_model_{what}" for stage in ("validation", "test") for what in ("eval", "train")],
        "do it in on_validation_epoch_start and on_validation_epoch_end",
    ),
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "keep the state in buffers of the module"),
    "configure_callbacks": "give the callbacks to the Trainer",
}
"""Hooks of the module that would not be called, and what to do about it."""


def check_module(module: object) -> None:
    """Refuse what is no LightningModule, trains a federation already, or overrides a hook that would not be called."""
    name = type(module).__name__
    if isinstance(module, FederatedModule):
        raise TypeError(f"{name} is a federated method, and needs no wrapper: give it to the Trainer as it is")
    if isinstance(getattr(module, "_orig_mod", None), pl.LightningModule):
        raise TypeError(
            "module is compiled as a whole, and clients train copies: give the LightningModule itself, and compile "
            "networks in it (self.net = torch.compile(self.net))"
        )
    if not isinstance(module, pl.LightningModule):
        raise TypeError(
            f"module must be a LightningModule of the package lightning (lightning.pytorch), got {name}: a network "
            "without a training_step is the extractor of a method, such as fedlit.methods.FedAvg"
        )
    for needed in ("training_step", "configure_optimizers"):
        if not is_overridden(needed, module):
            raise ValueError(f"{name} has no {needed}, which every client is to train with: write it")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            f"{name}.training_step takes dataloader_iter, and clients have batches: take (batch, batch_idx)"
        )
    for hook, advice in _REFUSED.items():
        if hasattr(pl.LightningModule, hook) and is_overridden(hook, module):
            raise ValueError(f"{name} overrides {hook}, which clients' copies would not be called by: {advice}")


class Wrapped(SelfEvaluated):
    """Mixed in before a method, it trains a LightningModule in place of an extractor and a classifier: see `Federated`.

    Args:
        module: A LightningModule, not changed.
    """

    acts_on_steps: ClassVar[bool] = True
    """Whether the method has a loss beside the module's, or chooses whose gradients are applied."""

    def __init__(
        self,
        module: pl.LightningModule,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int | None = None,
        *,
        task: TaskName = "classification",
        scale_labels: bool = False,
        **kwargs: Any,
    ) -> None:
        check_module(module)
        if num_classes is None and task != "classification":
            refuse("task", "left out without num_classes, as the module evaluates its outputs by itself", task)
        outputs = nn.Identity() if num_classes is None else Outputs(num_classes, task, type(module).__name__)
        # by name, as the command reads from this call which arguments are left
        super().__init__(
            clients=clients,
            target=target,
            num_classes=cast(int, num_classes),
            extractor=module,
            classifier=outputs,
            task=task,
            scale_labels=scale_labels,
            **kwargs,
        )
        # what the other processes and a checkpoint's next run compare
        kind = type(module)
        text = f"{kind.__module__}.{kind.__qualname__}({described(dict(module.hparams))})"
        self.save_hyperparameters({"module": text}, logger=False)
        self._refuse_what_the_module_has()
        if not module.automatic_optimization and self.acts_on_steps:
            raise ValueError(
                f"{type(module).__name__} steps its optimizers by itself (automatic_optimization = False), so that "
                f"{type(self).__name__} cannot add to its loss or choose its gradients: take fedlit.Federated, which "
                "is FedAvg, or FederatedAdaBN"
            )
        self.automatic_optimization = module.automatic_optimization
        self.run.own_labels = True  # training_step of the module defines what labels are
        self._logged = LoggedNumbers(
            self.evaluates("validation") or self.evaluates("test"), is_overridden("on_train_epoch_end", module)
        )
        self._warned_of_moved = False
        self._silent: dict[str, bool] = {}
        self._stepped, self._reads_labels = set(), {}
        self.run.parts.append(self._logged)

    def _refuse_what_the_module_has(self) -> None:
        name = type(self).__name__
        local, makes = self.run.local, "configure_optimizers of the module"
        step = "training_step of the module"
        split = (
            "it has to know where features end and the classifier begins: give these two parts of the module as "
            "extractor and classifier to a method of fedlit.methods instead"
        )
        for argument, refused, why in (
            ("optimizer", local.optimizer is not default_optimizer, f"{makes} makes it"),
            ("param_groups", local.param_groups is not None, f"{makes} makes them"),
            ("lr_scheduler", local.lr_scheduler is not None, f"{makes} makes it"),
            ("schedule_interval", local.schedule_interval != "round", f"{makes} has interval"),
            ("class_weights", self.hparams.get("class_weights") is not None, f"{step} weighs"),
            ("scale_labels", self.run.outputs.scales_labels, f"{step} is given labels as they are, and scales"),
            ("vectorize", local.vectorize, f"{step} is called for each client"),
            ("recompute", local.recompute, split),
            ("refine", self.hparams.get("refine"), split),
            ("trust_region", self.hparams.get("trust_region"), split),
            ("mixing", self.hparams.get("mixing") is not None, split),
        ):
            if refused:
                raise ValueError(f"{name} takes no {argument}: {why}")

    def _make_task(self, name: TaskName, num_classes: int | None, class_weights: Any) -> Task:
        return Unscored() if num_classes is None else super()._make_task(name, num_classes, class_weights)

    def part_of_module(self, argument: str, part: str) -> nn.Module:
        """Return the part of the module that an argument names; a `ValueError` if there is none."""
        module = self.originals[0]
        parts: dict[str, nn.Module] = dict(module.named_modules())
        if not part or part not in parts:
            near = [name for name in parts if name and name.count(".") == 0]
            raise ValueError(
                f"{argument}={part!r} is no part of {type(module).__name__}, which has {near}: name one of these, or a "
                "part within one"
            )
        return parts[part]

    @property
    def monitor_hint(self) -> str:
        """What a user who monitors a number of the module has to know."""
        name = type(self.originals[0]).__name__
        steps = ["training_step", *(f"{stage}_step" for stage in ("validation", "test") if self.evaluates(stage))]
        return (
            f"Numbers that {', '.join(steps)} of {name} logs are those of one client each, source/NAME/... and "
            "target/...; those of an evaluation have a mean over sources, source/..., and where they read labels of "
            "the target they are oracle/target/..., by which nothing may be selected."
        )

    # ---------------------------------------------------------------- a client's own module

    @contextmanager
    def at_work(self, client: Client | str, log: Log | None = None, module: Any = None) -> Iterator[pl.LightningModule]:
        """Give a local client's copy of the module, or another ``module``, as if the Trainer had it alone."""
        name = client if isinstance(client, str) else client.name
        module = self.replicas[name].extractor if module is None else module
        module.trainer = self.trainer
        # methods of one object, which no copy of it takes along
        mine: dict[str, Callable[..., Any]] = {"log": partial(self._logged.note, name, 1) if log is None else log}
        if not self.automatic_optimization:
            mine["optimizers"] = lambda use_pl_optimizer=True: _alone_or_all(
                [ClientOptimizer(each, name, module) for each in self.trainer.optimizers]
            )
            mine["lr_schedulers"] = lambda: _alone_or_all(
                [cast(Any, config.scheduler).schedules[name] for config in self.trainer.lr_scheduler_configs]
            )
        module.__dict__.update(mine)
        try:
            yield module
        finally:
            for each in mine:
                del module.__dict__[each]
            module.trainer = None

    def build_replica(self) -> Any:
        """A copy of the module, whose metrics are its own."""
        replica = super().build_replica()
        for part in replica.modules():
            if isinstance(part, Metric):
                part.distributed_available_fn = _nowhere  # other processes have other clients
        return replica

    def label_loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """What the client's own ``training_step`` gives of its labelled samples: a scalar, or None for no step."""
        if client.is_target:
            batch = with_known_labels(batch)
            if not num_samples(batch[1]):
                return 0 * sum(param.sum() for param in self.replicas[client].parameters())  # type: ignore[return-value]
        with self.at_work(client, partial(self._logged.note, client.name, num_samples(batch[0]))) as module:
            loss = self._called(module, batch)
        self._silent[client.name] = loss is None and self._silent.get(client.name, True)
        return loss

    def _called(self, module: pl.LightningModule, batch: Sequence[Any]) -> Tensor:
        given = call_step(module, "training_step", whole(batch), self.federation.batch_idx)
        loss = given.get("loss") if isinstance(given, Mapping) else given
        if loss is None and not self.automatic_optimization:
            return torch.zeros((), device=self.device)
        if loss is None and not self.acts_on_steps:
            rank_zero_warn(f"{type(module).__name__}.training_step has given None: such a batch trains nothing")
            return cast(Tensor, None)  # `Run.local_losses` leaves the client out of this step
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{given!r:.60}"
            raise TypeError(
                f"{type(module).__name__}.training_step must give the loss, a scalar tensor, or a mapping with it "
                f"under 'loss', got {got}"
            )
        return loss.reshape(())

    # ---------------------------------------------------------------- optimisation

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimisers that each local client's copy of the module makes, and its schedules."""
        made = {}
        precision: Any = self.trainer.precision_plugin
        if not self.automatic_optimization and getattr(precision, "scaler", None) is not None:
            rule = "one without a scaler of losses beside automatic_optimization = False, whose steps would not undo it"
            refuse("precision", rule, precision.precision, "give 'bf16-mixed' or '32-true'")
        for client in self.federation.local_clients:
            with self.at_work(client) as module:
                made[client.name] = OwnOptimisers.of(module)
        if not made:
            module = self.originals[0]  # type: ignore[assignment]
            made[SERVER] = placeholder(OwnOptimisers.of(module), SERVER)
        return together(made, self.automatic_optimization)

    @independent
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One local step of every client in ``batch``."""
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            # Lightning counts steps of optimisers, and all processes have to count alike whoever trains where
            counted: Any = self.trainer.strategy._lightning_optimizers[0]
            counted._on_before_step()
            counted._on_after_step()
        return loss

    # ---------------------------------------------------------------- hooks

    def on_train_start(self) -> None:
        """Of each client's copy of the module."""
        self._silent.clear()
        self.call_copies("on_train_start")

    def on_train_epoch_start(self) -> None:
        """Of each client's copy of the module."""
        self.call_copies("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        """Of each client's copy of the module."""
        self.call_copies("on_train_epoch_end")
        if self._logged.waits:
            self._logged.end_epoch(self.run)
        for client in self.federation.local_clients:
            self._warn_of_moved(client.name)
            if self._silent.get(client.name):
                name = type(self.originals[0]).__name__
                rule = f"{name}.training_step must give the loss, and gave None for all batches of client"
                self.federation.fail(NotTrainedError(f"{rule} {client.name!r} so far: return the loss"))

    def on_train_end(self) -> None:
        """Of each client's copy of the module."""
        self.call_copies("on_train_end")

    def _warn_of_moved(self, client: str) -> None:
        moved = [] if self._warned_of_moved else self.run.weights.moved_frozen(client)
        if moved:
            self._warned_of_moved = True
            rank_zero_warn(
                f"frozen weights of client {client!r} have changed in training, {moved[0]!r} and {len(moved) - 1} "
                "more. Frozen weights are not sent: each client keeps its own, and one that trains nothing, such as a "
                "target without labels, those of the start. If predictions use them, as of a moving average, register "
                "them as buffers, which are averaged"
            )


def _nowhere() -> bool:
    """Return that there are no processes that a metric could wait for."""
    return False


def _alone_or_all(several: list[Any]) -> Any:
    """As Lightning gives optimisers and schedules: a single one by itself."""
    return (several[0] if len(several) == 1 else several) if several else None
