"""A LightningModule of one's own, trained by every client on its own data: `Federated`, and with more than FedAvg.

Its ``training_step`` is the loss, and its ``configure_optimizers`` makes the optimisers, of each client's own copy.
Whatever else the module does while it trains is either done by each copy, too, or refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

from fedlit.federation import Client
from fedlit.federation.descriptions import described
from fedlit.federation.labels import TaskName, known_samples
from fedlit.federation.ledger import SERVER
from fedlit.federation.nested import num_samples, take
from fedlit.methods import FedAvg, FedCORAL, FedDAN, FedProx
from fedlit.methods.mean_matching import MomentMatching
from fedlit.models import feature_width
from fedlit.module import Batch, FederatedModule
from fedlit.run.component import Component
from fedlit.run.optimisation import default_optimizer
from fedlit.run.own_optimisers import ClientOptimizer, OwnOptimisers, placeholder, together
from fedlit.run.run import Run

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
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "keep the state in buffers of the module"),
    "configure_callbacks": "give the callbacks to the Trainer",
}
"""Hooks of the module that would not be called, and what to do about it."""

_TAKEN = ("loss", "grad_norm", "acc", "score", "r2", "eval_loss")
"""Names under which fedlit logs numbers of clients."""


class Outputs(nn.Module):
    """What a module's ``forward`` gives, as logits of classes or as numbers, shape (batch, num_classes).

    For two classes, one logit of the second class for each sample, shape (batch,) or (batch, 1), will do: it stands
    beside a 0 for the first.

    Args:
        num_classes: Number of classes, or of numbers to predict.
        task: ``"classification"`` or ``"regression"``.
        name: Of the module, for errors.
    """

    def __init__(self, num_classes: int, task: TaskName, name: str) -> None:
        super().__init__()
        self.num_classes, self.task, self.name = num_classes, task, name

    def forward(self, outputs: Any) -> Tensor:
        """Outputs of shape (batch, num_classes)."""
        if isinstance(outputs, Tensor):
            if outputs.ndim == 1:
                outputs = outputs.unsqueeze(1)
            if self.task == "classification" and self.num_classes == 2 and outputs.shape[1:] == (1,):
                outputs = torch.cat([torch.zeros_like(outputs), outputs], dim=1)
            if outputs.shape[1:] == (self.num_classes,):
                known: Tensor = outputs
                return known
        given = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        what = "logits" if self.task == "classification" else "numbers"
        raise TypeError(
            f"{self.name}.forward gives {given}; clients are evaluated, and the target predicted, with {what} of shape "
            f"(batch, {self.num_classes}), which num_classes sets: let forward give those"
        )


class LoggedNumbers(Component):
    """Numbers that clients' copies of a module log, reported by client when a round ends."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, list[Any]]] = {}

    def note(self, client: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``self.log`` of a client's copy."""
        numbers = self._numbers.setdefault(client, {}).setdefault(name, [])
        if isinstance(value, Metric):
            numbers[:] = [value]
        else:
            numbers.append(value.detach() if isinstance(value, Tensor) else float(value))

    def on_run_start(self, run: Run) -> None:
        """Forget what was logged in another run."""
        self._numbers = {}

    def on_round_end(self, run: Run) -> None:
        """Log the mean over the round's steps of each number, of each client under its name."""
        federation, logged, self._numbers = run.federation, self._numbers, {}
        if federation.channels.reports == "off":
            return
        own = {client: {name: _number(each) for name, each in numbers.items()} for client, numbers in logged.items()}
        names = {name for numbers in own.values() for name in numbers}
        received = federation.transport.all_gather(sorted(names), "names of logged numbers")
        everywhere = sorted({str(name) for each in received if isinstance(each, list) for name in each})
        if everywhere:
            reported = federation.report(own, everywhere)
            renamed = {
                client: {f"own_{name}" if name in _TAKEN else name: each for name, each in numbers.items()}
                for client, numbers in reported.items()
            }
            run.log(run.metric_names(renamed))


class Wrapped(FederatedModule):
    """Mixed in before a method, it trains a LightningModule in place of an extractor and a classifier.

    Raises:
        TypeError: If the module is no LightningModule.
        ValueError: If it does something in training that its copies would not, or is given what it has its own of.
    """

    adds_to_the_loss: ClassVar[bool] = True
    """Whether the method has a loss of its own beside the module's."""

    def __init__(
        self,
        module: pl.LightningModule,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        *,
        task: TaskName = "classification",
        scale_labels: bool = False,
        **kwargs: Any,
    ) -> None:
        check_module(module)
        outputs = Outputs(num_classes, task, type(module).__name__)
        super().__init__(
            clients=clients,
            target=target,
            num_classes=num_classes,
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
        if not module.automatic_optimization and self.adds_to_the_loss:
            raise ValueError(
                f"{type(module).__name__} steps its optimizers by itself (automatic_optimization = False), so that "
                f"{type(self).__name__} cannot add to its loss: take fedlit.Federated, which is FedAvg"
            )
        self.automatic_optimization = module.automatic_optimization
        self.run.own_labels = True  # training_step of the module defines what labels are
        self._logged = LoggedNumbers()
        self.run.parts.append(self._logged)

    def _refuse_what_the_module_has(self) -> None:
        name = type(self).__name__
        local, makes = self.run.local, "configure_optimizers of the module"
        own: dict[str, tuple[bool, str]] = {
            "optimizer": (local.optimizer is not default_optimizer, f"{makes} makes it"),
            "param_groups": (local.param_groups is not None, f"{makes} makes them"),
            "lr_scheduler": (local.lr_scheduler is not None, f"{makes} makes it"),
            "schedule_interval": (local.schedule_interval != "round", f"{makes} has interval"),
            "class_weights": (self.hparams.get("class_weights") is not None, "training_step of the module weighs"),
            "scale_labels": (
                self.run.outputs.scales_labels,
                "training_step of the module is given labels as they are, and scales",
            ),
            "vectorize": (local.vectorize, "training_step of the module is called for each client"),
        }
        for argument, (given, why) in own.items():
            if given:
                raise ValueError(f"{name} takes no {argument}: {why}")
        for argument in ("refine", "trust_region"):
            if self.hparams.get(argument):
                raise ValueError(
                    f"{name} takes no {argument}, which has to know where features end and the classifier begins: give "
                    "these two parts of the module as extractor and classifier to a method of fedlit.methods instead"
                )

    @property
    def monitor_hint(self) -> str:
        """What a user who monitors a number of the module has to know."""
        name = type(self.originals[0]).__name__
        return (
            f"Numbers that training_step of {name} logs are those of one client each, source/NAME/... and target/...; "
            f"validation_step of {name} is not called, as clients are evaluated by its forward."
        )

    # ---------------------------------------------------------------- a client's own module

    @contextmanager
    def at_work(self, client: Client | str) -> Iterator[pl.LightningModule]:
        """A local client's copy of the module, as if the Trainer had it alone."""
        name = client if isinstance(client, str) else client.name
        module: Any = self.replicas[name].extractor
        module.trainer = self.trainer
        # methods of one object, which no copy of it takes along
        mine: dict[str, Callable[..., Any]] = {"log": partial(self._logged.note, name)}
        if not self.automatic_optimization:
            mine["optimizers"] = lambda use_pl_optimizer=True: _alone_or_all(
                [ClientOptimizer(each, name) for each in self.trainer.optimizers]
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
                part.sync_on_compute, part.dist_sync_on_step = False, False  # others have other clients
        return replica

    def label_loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """What the client's own ``training_step`` gives of its labelled samples, a scalar."""
        if client.is_target:
            known = known_samples(batch[1])
            batch = [take(each, known) for each in batch]
            if not known.any():
                return 0 * sum(param.sum() for param in self.replicas[client].parameters())  # type: ignore[return-value]
        with self.at_work(client) as module:
            return self._called(module, batch)

    def _called(self, module: pl.LightningModule, batch: Sequence[Any]) -> Tensor:
        step = module.training_step
        numbered = len(inspect.signature(step).parameters) > 1
        given = step(batch, self.federation.batch_idx) if numbered else step(batch)
        loss = given.get("loss") if isinstance(given, Mapping) else given
        if loss is None and not self.automatic_optimization:
            return torch.zeros((), device=self.device)
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
        for client in self.federation.local_clients:
            with self.at_work(client) as module:
                made[client.name] = OwnOptimisers.of(module)
        if not made:
            module = self.originals[0]  # type: ignore[assignment]
            made[SERVER] = placeholder(OwnOptimisers.of(module), SERVER)
        return together(made, self.automatic_optimization)

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

    def _call_copies(self, hook: str) -> None:
        for client, _ in self.run.in_streams({client.name: () for client in self.federation.local_clients}, hook):
            with self.at_work(client) as module:
                getattr(module, hook)()

    def on_train_start(self) -> None:
        """Of each client's copy of the module."""
        self._call_copies("on_train_start")

    def on_train_epoch_start(self) -> None:
        """Of each client's copy of the module."""
        self._call_copies("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        """Of each client's copy of the module."""
        self._call_copies("on_train_epoch_end")

    def on_train_end(self) -> None:
        """Of each client's copy of the module."""
        self._call_copies("on_train_end")


class Federated(Wrapped, FedAvg):
    """A LightningModule of one's own, trained by FedAvg: each client has a copy, and copies are averaged after a round.

    The module is as it is in one's project: its ``training_step(batch, batch_idx)`` is called with a client's samples,
    as the client's dataset has them in a batch, and gives the loss; its ``configure_optimizers`` makes the optimiser,
    with any groups and schedules, of each copy. A module with several optimisers steps them by itself, as Lightning has
    it (``automatic_optimization = False``); each client's are its own. What ``training_step`` gives to ``self.log``
    is logged by client, ``source/NAME/...``, as the mean over a round. Schedules of an ``"epoch"`` advance after
    each round that the client took part in, those of a ``"step"`` after each of its steps. The hooks `on_train_start`,
    `on_train_epoch_start`, `on_train_epoch_end` and `on_train_end` are each copy's own.

    Evaluation is fedlit's, of what ``forward`` gives: ``validation_step``, ``test_step`` and ``predict_step`` of the
    module are not called.

    Args:
        module: Not changed; of its hooks, those that single clients' copies cannot have are refused by name.
        clients: The roster, at least two names or `Client` objects.
        target: Name of the client adapted to.
        num_classes: Number of classes; in regression, of numbers to predict.
        task: ``"classification"`` or ``"regression"``: how clients are evaluated.
        scale_labels: ``False``: ``training_step`` is given numbers as they are, and ``forward`` gives numbers in their
            unit. A module that learns them standardised does both itself.
        kwargs: See `FederatedModule`: ``weighting``, ``local_norm``, ``batchnorm_average`` and ``reset_optimizer``.

    Raises:
        TypeError: If the module is no LightningModule, or, when it is evaluated, ``forward`` gives something else than
            outputs of shape (batch, num_classes).
        ValueError: If the module does something in training that its copies would not, or an argument is given that
            the module has its own of.
    """

    adds_to_the_loss: ClassVar[bool] = False


class FederatedProx(Wrapped, FedProx):
    """`Federated`, whose copies are held near the round's first model: see `FedProx`.

    Args:
        module: See `Federated`.
        mu: Strength of the proximal term, at least 0.
        kwargs: See `Federated`.
    """


class WrappedMatching(Wrapped, MomentMatching):
    """Mixed in before a method that matches features, it takes those of a part of the module.

    Args:
        features: Name of the part of the module that gives features, such as ``"backbone"``, of shape (batch, ...),
            flattened to (batch, width). They are those of its first call in a ``training_step``, and of the target's in
            ``forward``.
        width: Number of features; ``None`` is ``out_features`` of that part.

    Raises:
        ValueError: If the module has no such part, or the part does not state its width.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        *,
        features: str,
        width: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._part, self._width = features, width
        self._losses: dict[str, Tensor] = {}
        super().__init__(module, clients, target, num_classes, **kwargs)

    def matched_width(self) -> int:
        """Width of the features of the part."""
        module = self.originals[0]
        parts = dict(module.named_modules())
        if not self._part or self._part not in parts:
            near = [name for name in parts if name and name.count(".") == 0]
            raise ValueError(
                f"features={self._part!r} is no part of {type(module).__name__}, which has {near}: name the one that "
                "gives the features to match"
            )
        if self._width is not None:
            return self._width
        try:
            return feature_width(parts[self._part])
        except TypeError as error:
            raise ValueError(
                f"the part features={self._part!r} of {type(module).__name__} does not state how many features it "
                "gives: give width"
            ) from error

    def features(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Features of a client's batch: of a source while it takes its ``training_step``."""
        module = self.replicas[client].get_submodule("extractor")
        seen: list[Tensor] = []
        handle = module.get_submodule(self._part).register_forward_hook(lambda _, inputs, out: seen.append(out))
        try:
            if client.is_target:
                module(batch[0])  # all samples are matched, and some have labels at most
            else:
                self._losses[client.name] = self.label_loss(client, batch)
        finally:
            handle.remove()
        found = seen[0].flatten(1) if seen and isinstance(seen[0], Tensor) else None
        number = num_samples(batch[0])
        if found is None or found.shape != (number, self.width):
            got = tuple(seen[0].shape) if isinstance(seen[0] if seen else None, Tensor) else f"{seen[:1]!r:.60}"
            raise ValueError(
                f"the part features={self._part!r} gave {got} when it was first called with a batch of client "
                f"{client.name!r}, and is to give features of shape ({number}, {self.width}): name another part "
                "of the module, or give width"
            )
        return found

    def loss_of_features(self, client: Client, features: Tensor, batch: Sequence[Any]) -> Tensor:
        """What a source's ``training_step`` gave when its features were seen, and the target's now."""
        return self.label_loss(client, batch) if client.is_target else self._losses.pop(client.name)


class FederatedDAN(WrappedMatching, FedDAN):
    """`Federated`, whose copies also make the features of all clients alike, by means of random features: see `FedDAN`.

    Args:
        module: See `Federated`.
        features: Name of the part of the module that gives features.
        width: Number of features; ``None`` is ``out_features`` of that part.
        kwargs: See `Federated` and `FedDAN`.
    """


class FederatedCORAL(WrappedMatching, FedCORAL):
    """`Federated`, whose copies also make covariances of the features of all clients alike: see `FedCORAL`.

    Args:
        module: See `Federated`.
        features: Name of the part of the module that gives features.
        width: Number of features; ``None`` is ``out_features`` of that part.
        kwargs: See `Federated` and `FedCORAL`.
    """


def check_module(module: object) -> None:
    """Refuse what cannot be trained by each client by itself.

    Raises:
        TypeError: If it is no LightningModule, or one that trains a federation already.
        ValueError: If it overrides a hook that would not be called.
    """
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


def _alone_or_all(several: list[Any]) -> Any:
    """As Lightning gives optimisers and schedules: a single one by itself."""
    return (several[0] if len(several) == 1 else several) if several else None


def _number(values: list[Any]) -> float:
    """Mean of a round's numbers, or what a metric comes to, which starts anew then."""
    if isinstance(values[0], Metric):
        number = float(values[0].compute())
        values[0].reset()
        return number
    return float(sum(float(each) for each in values)) / len(values)
