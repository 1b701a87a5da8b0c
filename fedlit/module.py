"""FederatedModule: what every method shares. A method adds its loss and what it sends."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlit.federation import (
    UNLABELLED,
    Client,
    DivergedError,
    Everyone,
    FederatedLoader,
    Federation,
    Participation,
    RosterError,
    RoundPlan,
)
from fedlit.federation.client import make_roster
from fedlit.federation.labels import TaskName, guard
from fedlit.federation.streams import enter_stream, torch_streams
from fedlit.models import Replica, make_classifier, part_of
from fedlit.optim import ClientSchedules, clip_client_gradients, default_optimizer
from fedlit.rounds import Rounds
from fedlit.tasks import Classification, Meter, make_task
from fedlit.vectorized import StackedReplicas

Batch: TypeAlias = Mapping[str, Sequence[Any]]
"""``{client: (inputs, labels)}`` of local clients; those that sit out a step are missing."""

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
"""Normalisation layers: what `local_norm` keeps at home."""


class Replicas(nn.Module):
    """Sub-modules by client name, any name a `Client` may have (``nn.ModuleDict`` refuses "type" or "keys")."""

    def __getitem__(self, client: str) -> nn.Module:
        try:
            module = self._modules[client]
        except KeyError:
            raise KeyError(
                f"client {client!r} is not hosted by this process, which has {list(self._modules)}"
            ) from None
        assert module is not None
        return module

    def __setitem__(self, client: str, module: nn.Module) -> None:
        self._modules[client] = module

    def __contains__(self, client: object) -> bool:
        return client in self._modules

    def __len__(self) -> int:
        return len(self._modules)


class FederatedModule(pl.LightningModule):
    """Base of all methods: supervised local training, and the hooks in which a method communicates.

    A method says who trains (`learners`), on what loss (`loss`), and what is exchanged when a round starts
    (`on_round_start`) and ends (`on_round_end`). It reads ``self.federation`` and never asks which process it is on.

    Metrics: ``source/NAME/loss`` and ``target/loss`` (training loss, mean over the round), ``train/loss`` (their mean
    over clients), ``.../grad_norm`` (before clipping, where gradients are clipped), ``source/NAME/acc`` and
    ``source/acc`` (validation accuracy of each source's own replica, and their mean), ``target/score`` (label-free, the
    default to select by: mutual information between the target's inputs and predicted classes, in [0, 1]). In
    regression ``r2`` takes the place of ``acc`` (share of variance explained, at most 1), and there is no score. All
    processes log equal numbers.

    Args:
        clients: The roster, at least two names or `Client` objects.
        target: Name of the client adapted to.
        num_classes: Number of classes; in regression, of numbers to predict.
        extractor: Network from inputs to features; each client gets a copy with the same initial weights.
        classifier: Network from features to logits, or in regression to numbers; ``None`` is a linear layer on
            ``extractor.out_features``.
        task: ``"classification"`` (cross-entropy) or ``"regression"`` (mean squared error).
        optimizer: Makes the optimiser from parameter groups.
        reset_optimizer: Clear momenta and other optimiser state when a round starts, as where clients remember nothing
            between rounds; learning-rate schedules go on. ``False`` keeps each client's state. With Adam it makes a
            difference: its first steps are as long as its learning rate, and weights grow faster.
        lr_scheduler: Makes a learning-rate schedule from an optimiser; each client has its own.
        schedule_interval: What advances a client's schedule: the ``"round"`` s or ``"step"`` s it took part in.
        weighting: Weights of clients in a mean: by number of training ``"samples"``, or ``"uniform"``.
        local_norm: Keep normalisation layers local, parameters and statistics (FedBN, Li et al., ICLR 2021).
        warmup_rounds: Rounds of FedAvg over the sources before the method proper starts.
        vectorize: Train all local clients in one vectorised call; pays for many clients with tiny equal networks.
            Equal to training one by one within float tolerance; with dropout, the numbers drawn depend on placement.

    Raises:
        RosterError: If the clients make no federation.
        ValueError: If an argument is out of range, or the extractor does not tell its ``out_features``.
    """

    uses_unlabelled_target: ClassVar[bool] = False
    """Whether the target trains on its unlabelled samples too, rather than on its labelled ones alone."""

    default_participation: ClassVar[Participation] = Everyone()
    """Who is present in a round unless the strategy is told."""

    trains_when_absent: ClassVar[bool] = False
    """Whether clients that are absent in a round go on training; they neither send nor receive in any case."""

    several_models: ClassVar[bool] = False
    """Whether a client's parameter groups are different models, whose gradients are clipped each by itself."""

    stays_local: ClassVar[tuple[str, ...]] = ()
    """Beginnings of names in a replica's state that never leave the client."""

    classes_only: ClassVar[bool] = False
    """Whether the method cannot do regression."""

    alternative_names: ClassVar[tuple[str, ...]] = ()
    """Names of all that `alternatives` may return."""

    needs_target_labels: ClassVar[bool] = False
    """Whether the method cannot do without labels of the target; a run without them is refused at its start."""

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        classifier: nn.Module | None = None,
        *,
        task: TaskName = "classification",
        optimizer: OptimizerCallable = default_optimizer,
        reset_optimizer: bool = False,
        lr_scheduler: LRSchedulerCallable | None = None,
        schedule_interval: Literal["round", "step"] = "round",
        weighting: Literal["samples", "uniform"] = "samples",
        local_norm: bool = False,
        warmup_rounds: int = 0,
        vectorize: bool = False,
    ) -> None:
        super().__init__()
        if self.classes_only and task != "classification":
            raise ValueError(f"{type(self).__name__} is about classes: task must be 'classification', got {task!r}")
        self.task = make_task(task, num_classes)
        if warmup_rounds < 0:
            raise ValueError(f"warmup_rounds must be at least 0, got {warmup_rounds}")
        if weighting not in ("samples", "uniform"):
            raise ValueError(f"weighting must be 'samples' or 'uniform', got {weighting!r}")
        if schedule_interval not in ("round", "step"):
            raise ValueError(f"schedule_interval must be 'round' or 'step', got {schedule_interval!r}")
        self.clients = make_roster(clients, target)
        self.target = next(client for client in self.clients if client.is_target)
        self.num_classes = num_classes
        # In a tuple, so that the originals are not registered: only clients' copies belong in the checkpoint.
        self.originals = (extractor, make_classifier(extractor, num_classes) if classifier is None else classifier)
        self.optimizer = optimizer
        self.reset_optimizer = reset_optimizer
        self.lr_scheduler = lr_scheduler
        self.schedule_interval = schedule_interval
        self.weighting = weighting
        self.local_norm = local_norm
        self.warmup_rounds = warmup_rounds
        self.vectorize = vectorize
        self.replicas = Replicas()
        self.save_hyperparameters(
            ignore=["clients", "extractor", "classifier", "optimizer", "lr_scheduler"], logger=False
        )
        self.save_hyperparameters({"clients": [client.name for client in self.clients]}, logger=False)
        self._own_federation: Federation | None = None
        self._plan: dict[str, Any] | None = None
        self._resumed = False
        self._stacked: StackedReplicas | None = None
        self._step_losses: list[tuple[list[str], Tensor]] = []
        self._resumed_losses: list[tuple[list[str], Tensor]] = []
        self._norms: dict[str, list[Tensor]] = {}
        self._shared: dict[str, dict[str, Tensor]] = {}
        self._public: dict[str, dict[str, Tensor]] = {}  # what each local client last received
        self._restored_public: dict[str, dict[str, Tensor]] = {}
        self._meters: dict[str, Meter] = {}

    # ---------------------------------------------------------------- what a method overrides

    def build_replica(self) -> nn.Module:
        """What one client holds; called once per client, each time from the same random state."""
        extractor, classifier = self.originals
        return Replica(copy.deepcopy(extractor), copy.deepcopy(classifier))

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Clients that take local steps in round ``round_idx``, as far as present; default: all with labels."""
        return tuple(client for client in self.clients if client.labelled)

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Loss of one client on its batch, a scalar; default: the task's on its labelled samples."""
        return self.task.loss(client, self.replicas[client.name](batch[0]), batch[1])

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Losses of local clients in this step, by name. Override it to exchange something in every local step."""
        method = FederatedModule.loss if self.warming_up else type(self).loss
        if self._stacked is not None:
            federation = self.federation
            with torch_streams(self.device):
                moment = (federation.round_idx, federation.batch_idx)
                enter_stream(federation.seed, "train together", *moment, device=self.device)
                return self._stacked.losses(batch)
        return {client.name: method(self, client, samples) for client, samples in self.in_streams(batch)}

    def average_warmup_(self) -> None:
        """The exchange of a round of ``warmup_rounds``: FedAvg over the sources; default: of all shared weights."""
        self.average_("weights", among=self.sources)

    def on_round_start(self, round_idx: int) -> None:
        """Exchange what a method needs before its local steps; default: nothing."""

    def on_round_end(self, round_idx: int) -> None:
        """Exchange what a method has learnt in its local steps; default: nothing."""

    # ---------------------------------------------------------------- what a method uses

    @property
    def federation(self) -> Federation:
        """The strategy's federation; under any other strategy, one of this process's own with the plain backend."""
        federation = None if self._trainer is None else getattr(self._trainer.strategy, "federation", None)
        if isinstance(federation, Federation):
            return federation
        if self._own_federation is None:
            self._own_federation = Federation(self.clients, self.target.name, participation=self.default_participation)
        return self._own_federation

    @property
    def sources(self) -> tuple[Client, ...]:
        """Labelled clients other than the target, in roster order."""
        return tuple(client for client in self.clients if not client.is_target)

    @property
    def warming_up(self) -> bool:
        """Whether this round is one of the ``warmup_rounds``."""
        return self.federation.round_idx < self.warmup_rounds

    def is_last(self, round_idx: int) -> bool:
        """Whether a round is the last one of the run, as far as it was planned.

        Args:
            round_idx: Of the round under way.
        """
        trainer = self.trainer
        if 0 <= trainer.max_steps <= trainer.global_step:
            return True
        loader = trainer.train_dataloader
        if trainer.max_epochs is None or trainer.max_epochs < 0 or not isinstance(loader, FederatedLoader):
            return False
        per_epoch = math.ceil(trainer.num_training_batches / loader.batches_per_round)
        return round_idx + 1 == trainer.max_epochs * per_epoch

    def present_learners(self) -> tuple[Client, ...]:
        """Clients that take local steps in this round."""
        return self._present_learners(self.federation.round_idx)

    def in_streams(self, batch: Batch, purpose: str = "train") -> Iterator[tuple[Client, Sequence[Any]]]:
        """Local clients of ``batch`` in roster order with their samples, each inside a random stream of its own.

        Args:
            batch: Of this local step.
            purpose: Tells streams of one client and step apart, if it is gone through more than once.
        """
        federation = self.federation
        moment = (federation.round_idx, federation.batch_idx)
        with torch_streams(self.device):
            for client in self.clients:
                if client.name in batch:
                    enter_stream(federation.seed, purpose, client.name, *moment, device=self.device)
                    yield client, batch[client.name]

    def average_(
        self,
        channel: str,
        among: Iterable[Client],
        to: Iterable[Client] | None = None,
        part: str | tuple[str, ...] | None = None,
        too_few: Literal["raise", "skip"] = "raise",
        absent_too: bool = False,
    ) -> None:
        """Replace the shared weights of ``to`` by the mean over ``among``, as far as they are present.

        Args:
            channel: Under which it is sent.
            among: Clients whose weights are averaged, weighted as ``weighting`` says.
            to: Clients that receive the mean; ``None`` is everyone.
            part: Sub-module of the replicas to which this is restricted, such as ``"classifier"``, or several.
            too_few: See `Federation.mean`.
            absent_too: See `Federation.mean`.
        """
        federation = self.federation
        among = tuple(among)
        present = {client.name for client in (self.clients if absent_too else federation.present(channel))}
        parts = tuple(f"{name}." for name in ((part,) if isinstance(part, str) else part or ()))
        payloads = {
            client.name: {
                name: tensor
                for name, tensor in self.shared_state(client.name).items()
                if part is None or name.startswith(parts)
            }
            for client in among
            if client.name in present and federation.is_local(client)
        }
        weights = federation.weights if self.weighting == "samples" else None
        mean = federation.mean(
            channel,
            payloads,
            among=among,
            to=to,
            weights=weights,
            around=self._public,
            too_few=too_few,
            absent_too=absent_too,
        )
        self.load_shared_(mean)

    def shared_state(self, client: str) -> dict[str, Tensor]:
        """Weights of a local client that leave it, by name: all, less normalisation layers with ``local_norm``.

        BatchNorm's count of batches always stays.
        """
        if client not in self._shared:
            replica = self.replicas[client]
            local: set[str] = set()
            if self.local_norm:
                for prefix, module in replica.named_modules():
                    if isinstance(module, NORMS):
                        local.update(f"{prefix}.{name}" for name in module.state_dict())
            state = replica.state_dict(keep_vars=True)
            # A count of batches is nobody else's business, and one integer would send all numbers in float64.
            local.update(name for name in state if name.endswith("num_batches_tracked"))
            local.update(name for name in state if name.startswith(self.stays_local))
            self._shared[client] = {name: tensor for name, tensor in state.items() if name not in local}
        return self._shared[client]

    def public_part(self, part: str) -> dict[str, dict[str, Tensor]]:
        """What local clients last received of one of their parts: what a mechanism clips messages about it around.

        Args:
            part: Name of a sub-module of the replicas, such as ``"classifier"``.
        """
        return {client: part_of(state, part) for client, state in self._public.items()}

    @torch.no_grad()
    def load_shared_(self, received: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write received weights into local replicas: ``{client: {name: tensor}}``."""
        for client, state in received.items():
            own = self.shared_state(client)
            torch._foreach_copy_([own[name] for name in state], list(state.values()))
            if self.federation.has_mechanism:
                self._public[client] = {**self._public.get(client, {}), **state}

    # ---------------------------------------------------------------- set-up

    def configure_model(self) -> None:
        """Build the replicas of local clients, all from the same random state."""
        if len(self.replicas):
            return
        federation = self.federation
        with torch_streams():
            for client in federation.local_clients:
                enter_stream(federation.seed, "initial weights")
                self.replicas[client.name] = self.build_replica()

    def configure_callbacks(self) -> list[pl.Callback]:
        """Count rounds."""
        attached = self._trainer is not None and any(isinstance(cb, Rounds) for cb in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if attached else [Rounds()]

    def client_param_groups(self) -> list[dict[str, Any]]:
        """One parameter group per local client, which carries its name under ``"client"``.

        Clipping, schedules and checkpoints go by that key; a method with several optimisers gives each of them such
        groups.
        """
        groups: list[dict[str, Any]] = []
        for client in self.federation.local_clients:
            params = [param for param in self.replicas[client.name].parameters() if param.requires_grad]
            groups.append({"params": params, "client": client.name})
        return groups

    def make_optimizer(self) -> Optimizer:
        """One optimiser over all local clients."""
        return self.optimizer(self.client_param_groups())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimiser over all local clients, and a schedule per client."""
        optimizer = self.make_optimizer()
        if self.lr_scheduler is None:
            return optimizer
        schedules = ClientSchedules(optimizer, self.lr_scheduler, self.schedule_interval)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedules, "interval": "step"}}  # type: ignore[return-value]

    def plan_rounds(self, loader: FederatedLoader, local_steps: int | None = None, rounds_per_epoch: int = 1) -> None:
        """Cut the training data into rounds; called on all processes by the strategy, or by whoever stands in for it.

        Args:
            loader: Of the local clients.
            local_steps: Optimiser steps per client and round; ``None`` is one local epoch.
            rounds_per_epoch: Rounds in one epoch of the Trainer.

        Raises:
            RosterError: On every process, if clients' data do not fit together.
        """
        federation = self.federation
        loader.guarded = None if self.target.labelled else self.target.name
        labelled_only = () if self.uses_unlabelled_target or not self.target.labelled else (self.target.name,)
        federation.introduce(loader.facts(labelled_only))
        trainer = self.trainer
        endless = trainer.max_epochs is None or trainer.max_epochs < 0
        ever = self._ever_learners(1000 if endless else int(trainer.max_epochs or 0) * rounds_per_epoch)
        self._check_normalisation(ever)
        self._check_resumed(
            {
                "seed": loader.seed,
                "local_steps": local_steps,
                "rounds_per_epoch": rounds_per_epoch,
                "samples": {client.name: client.num_samples for client in federation.clients},
            }
        )
        loader.plan(
            RoundPlan(
                sizes={client.name: client.num_samples or 0 for client in federation.clients if client.name in ever},
                learners=lambda round_idx: {client.name for client in self._present_learners(round_idx)},
                position=lambda: (federation.round_idx, federation.batch_idx),
                local_steps=local_steps,
                rounds_per_epoch=rounds_per_epoch,
                accumulate=trainer.accumulate_grad_batches,
                labelled_only=labelled_only,
            )
        )

    def _check_normalisation(self, learners: Collection[str]) -> None:
        """With ``local_norm``, a client that never trains would keep normalisation layers that never saw data."""
        idle = [client.name for client in self.clients if client.name not in learners]
        normalised = any(isinstance(part, NORMS) for network in self.originals for part in network.modules())
        if self.local_norm and idle and normalised:
            raise ValueError(
                f"local_norm=True leaves {idle}, who do not train, with untouched normalisation layers: give the "
                "target labels, use a method that trains there, or local_norm=False"
            )

    def _check_resumed(self, plan: dict[str, Any]) -> None:
        """Refuse to go on with other data or rounds than those the checkpoint was made with."""
        saved, self._plan = self._plan, plan
        changed = {} if saved is None else {k: (saved[k], new) for k, new in plan.items() if saved[k] != new}
        if self._resumed and changed:
            detail = ", ".join(f"{name} was {before} and is {now}" for name, (before, now) in changed.items())
            raise RosterError(
                f"the checkpoint cannot go on with other data or rounds: {detail}. Give the same seed, data, strategy"
            )
        self._resumed = False

    def _start_public(self) -> None:
        """What clients' messages are clipped around until they receive something: the weights they start with."""
        restored, self._restored_public, self._public = self._restored_public, {}, {}
        if self.federation.has_mechanism:
            for client in self.federation.local_clients:
                own = {name: tensor.detach().clone() for name, tensor in self.shared_state(client.name).items()}
                self._public[client.name] = restored.get(client.name, own)

    def _ever_learners(self, num_rounds: int) -> set[str]:
        """Clients that take local steps in some round; the largest of them sets the length of a round."""
        learners = {client.name for round_idx in range(num_rounds) for client in self.learners(round_idx)}
        return learners | ({client.name for client in self.sources} if self.warmup_rounds else set())

    def on_fit_start(self) -> None:
        """Refuse data that the method cannot train on, forget what a previous run left, and stack the replicas."""
        if self.needs_target_labels and not self.target.labelled:
            raise RosterError(
                f"{type(self).__name__} trains on target labels, but target {self.target.name!r} has none: give the "
                "data module target_labels (a number of samples, or a share such as 1.0)"
            )
        self._shared.clear()
        self._start_public()
        self._step_losses, self._resumed_losses = self._resumed_losses, []
        self._stacked = None
        if self.vectorize:
            if type(self).loss is not FederatedModule.loss or type(self).losses is not FederatedModule.losses:
                raise ValueError(f"vectorize=True needs the plain supervised loss, {type(self).__name__} has its own")
            if not isinstance(self.task, Classification):
                raise ValueError("vectorize=True has the loss of a classification built in: train without it")
            if not self.automatic_optimization:
                raise ValueError(
                    "vectorize=True needs automatic optimisation: it hands gradients to the clients itself"
                )
            replicas = {client.name: self.replicas[client.name] for client in self.federation.local_clients}
            self._stacked = StackedReplicas(replicas)

    # ---------------------------------------------------------------- training

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One local step of every client in ``batch``: the sum of their losses.

        Each client's parameters only meet the gradient of its own loss, so this is exactly independent training.
        """
        if not self.target.labelled:  # the loader has seen to it, unless it is not fedlit's
            batch = guard(batch, self.target.name, keep=False)
        learners = {client.name for client in self.present_learners()}
        compute = FederatedModule.losses if self.warming_up else type(self).losses
        losses = compute(self, {name: samples for name, samples in batch.items() if name in learners})
        # A step in which no local client trains must still have a graph: never None with several processes.
        total = torch.zeros((), device=self.device, requires_grad=True)
        if losses:
            stacked = torch.stack(list(losses.values()))
            self._step_losses.append((list(losses), stacked.detach()))
            total = stacked.sum()
        return total

    def on_after_backward(self) -> None:
        """Hand stacked gradients back to the clients' own parameters."""
        if self._stacked is not None:
            self._stacked.scatter_gradients()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear gradients to None, so that an absent client's optimiser state stands still."""
        optimizer.zero_grad(set_to_none=True)
        if self._stacked is not None:
            self._stacked.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each client's gradient by itself."""
        if gradient_clip_val:
            algorithm = str(gradient_clip_algorithm or "norm")
            norms = clip_client_gradients(optimizer, gradient_clip_val, algorithm, self.several_models)
            for name, norm in norms.items():
                self._norms.setdefault(name, []).append(norm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance per-client schedules that count steps; those that count rounds advance with `close_round`."""
        if not isinstance(scheduler, ClientSchedules):
            super().lr_scheduler_step(scheduler, metric)
        elif scheduler.interval == "step" and self._step_losses:
            names, values = self._step_losses[-1]
            scheduler.step(names, dict(zip(names, values.tolist(), strict=True)))

    def open_round(self) -> None:
        """Start a round; called by the round counter, not by users."""
        self._step_losses.clear()
        self._norms.clear()
        if self.reset_optimizer:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()
        if not self.warming_up:
            self.on_round_start(self.federation.round_idx)
        else:
            self.load_shared_(self.federation.catch_up("weights"))

    def close_round(self) -> None:
        """End a round: check and log the losses, communicate, advance the schedules."""
        federation = self.federation
        losses = self.round_losses()
        for name, loss in losses.items():
            if not math.isfinite(loss):
                federation.fail(
                    DivergedError(
                        f"the training loss of client {name!r} is {loss} in round {federation.round_idx}: lower the "
                        "learning rate, clip gradients (Trainer(gradient_clip_val=...)), or look at its data"
                    )
                )
        numbers = {name: {"loss": loss} for name, loss in losses.items()}
        for name, norms in self._norms.items():
            numbers[name]["grad_norm"] = float(torch.stack(norms).mean())
        told = federation.report(numbers, ["loss", "grad_norm"])
        if self.warming_up:
            self.average_warmup_()
        else:
            self.on_round_end(federation.round_idx)
        for config in self.trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, ClientSchedules) and config.scheduler.interval == "round":
                config.scheduler.step(list(losses), losses)
        metrics = {f"{self._prefix(name)}/{key}": value for name, row in told.items() for key, value in row.items()}
        if told:
            metrics["train/loss"] = sum(row["loss"] for row in told.values()) / len(told)
        metrics["round"] = float(federation.round_idx)
        self.log_now(metrics)

    def round_losses(self) -> dict[str, float]:
        """Training loss of each local client that trained in the round under way, or just over: mean over its steps."""
        return {name: math.fsum(values) / len(values) for name, values in self._losses_so_far().items()}

    def labelled_samples(self, clients: Sequence[Client]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """All labelled training samples of local clients, once and always in one order, on the device.

        Args:
            clients: Hosted here.

        Yields:
            Name of a client, and inputs and labels of a batch of its samples.

        Raises:
            TypeError: If training data come from another loader than a `FederatedLoader`.
        """
        loader, precision = self.trainer.train_dataloader, self.trainer.precision_plugin
        if not isinstance(loader, FederatedLoader):
            raise TypeError(
                f"{type(self).__name__} reads training samples from a FederatedLoader, got {type(loader).__name__}: "
                "give FederatedLoader({client: dataset})"
            )
        for batch in loader.in_order([client.name for client in clients]):
            batch = self.trainer.strategy.batch_to_device(precision.convert_input(batch))
            for name, (inputs, labels, *_) in batch.items():
                known = labels != UNLABELLED
                yield name, inputs[known], labels[known]

    def log_everywhere(self, metrics: Mapping[str, float]) -> None:
        """Log numbers that are equal on all processes at the end of an evaluation."""
        # no reduction, no warning, and the key exists everywhere
        self.log_dict(metrics, batch_size=1, sync_dist=True, rank_zero_only=True)

    def log_now(self, metrics: Mapping[str, float]) -> None:
        """Log numbers that are equal on all processes, at once and without the cost of `self.log`."""
        trainer = self.trainer
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=trainer.global_step)

    def _present_learners(self, round_idx: int) -> tuple[Client, ...]:
        if round_idx < self.warmup_rounds:
            learners, everybody = self.sources, False
        else:
            learners, everybody = self.learners(round_idx), self.trains_when_absent
        present = {client.name for client in self.federation.present_in(round_idx)}
        return tuple(client for client in learners if everybody or client.name in present)

    def _losses_so_far(self) -> dict[str, list[float]]:
        losses: dict[str, list[float]] = {}
        for names, values in self._step_losses:
            for name, value in zip(names, values.tolist(), strict=True):
                losses.setdefault(name, []).append(value)
        return losses

    def _prefix(self, client: str) -> str:
        return "target" if client == self.target.name else f"source/{client}"

    # ---------------------------------------------------------------- evaluation

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the target's replica, shape (batch, num_classes): logits, or in regression the numbers."""
        logits: Tensor = self.replicas[self.target.name](inputs)
        return logits

    def alternatives(self, inputs: Tensor) -> dict[str, Tensor]:
        """Other predictions of the target, logits by name, that are scored beside its own; default: none.

        Args:
            inputs: A batch of the target's, where it is hosted.
        """
        return {}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Outputs of each local client's replica on its own samples, by name; the target's labels are not read."""
        return self._evaluate(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """As `validation_step`."""
        return self._evaluate(batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Class probabilities, or numbers, of each client in ``batch``, by name, of shape (batch, num_classes)."""
        return {name: self.task.predictions(self.replicas[name](samples[0])) for name, samples in batch.items()}

    def _evaluate(self, batch: Batch) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        for name, samples in guard(batch, self.target.name, keep=True).items():
            outputs[name] = self.replicas[name](samples[0])
            if name not in self._meters:
                self._meters[name] = self.task.meter(name == self.target.name, self.device)
            self._meters[name].update(outputs[name], samples[1])
        return outputs

    def on_validation_epoch_start(self) -> None:
        """Start counting afresh."""
        self._meters.clear()

    def on_test_epoch_start(self) -> None:
        """Start counting afresh."""
        self._meters.clear()

    def on_validation_epoch_end(self) -> None:
        """Share and log the metrics."""
        self._log_evaluation()

    def on_test_epoch_end(self) -> None:
        """Share and log the metrics."""
        self._log_evaluation()

    def _log_evaluation(self) -> None:
        if self.trainer.sanity_checking:
            return
        values = {name: meter.compute() for name, meter in self._meters.items()}
        told = self.federation.report(values, list(self.task.metrics))
        metrics = {f"{self._prefix(name)}/{key}": value for name, row in told.items() for key, value in row.items()}
        quality = self.task.metrics[0]
        of_sources = [row[quality] for row in told.values() if quality in row]
        if of_sources:
            metrics[f"source/{quality}"] = sum(of_sources) / len(of_sources)
        self.log_everywhere(metrics)

    # ---------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the federation's state, and the losses of a round under way."""
        checkpoint["federation"] = self.federation.state_dict()
        checkpoint["method"] = class_path(self)
        checkpoint["plan"] = self._plan
        checkpoint["round_losses"] = self._losses_so_far() if self.federation.batch_idx else {}
        if self._public:
            checkpoint["public"] = dict(self._public)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped; for validation and testing, only the weights are of interest.

        Raises:
            RosterError: If it belongs to another roster.
        """
        if "federation" not in checkpoint:
            return
        self.federation.check_roster(checkpoint["federation"])
        if self._trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            if checkpoint["method"] != class_path(self):
                raise RosterError(
                    f"the checkpoint is one of {checkpoint['method']}, this run trains {class_path(self)}: resume "
                    "with the same method, or load the weights alone with load_from_checkpoint"
                )
            self._plan, self._resumed = checkpoint["plan"], checkpoint["plan"] is not None
            self.federation.load_state_dict(checkpoint["federation"])
            self._restored_public = dict(checkpoint.get("public", {}))
            for name, values in checkpoint["round_losses"].items():
                if self.federation.is_local(name):
                    self._resumed_losses += [([name], torch.tensor([value])) for value in values]


def class_path(module: FederatedModule) -> str:
    """Where a method is defined, which names it in checkpoints and between processes."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
