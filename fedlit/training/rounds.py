"""Rounds: cuts training data into them, and runs what happens when one starts and ends.

A callback, because `on_train_batch_end` of callbacks runs before ModelCheckpoint saves and before validation: a
checkpoint holds the state after aggregation, and validation sees the aggregated model. (The module's own hook runs
after ModelCheckpoint's; `on_train_epoch_end` runs after validation.)
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from fedlit.federation import DivergedError, FederatedLoader, RosterError, RoundPlan
from fedlit.federation.channel import declared_by
from fedlit.federation.leaks import with_samples
from fedlit.federation.nested import mapped
from fedlit.federation.streams import torch_streams
from fedlit.privacy import PrivacyWarning
from fedlit.training.checkpoints import arrange
from fedlit.training.label_scale import label_scales
from fedlit.training.label_shift import warn_of_unequal_classes
from fedlit.training.local import present_learners
from fedlit.training.method import Method, metric_names
from fedlit.training.monitors import check_modes, explain_monitor
from fedlit.training.optimisation import ClientSchedules, check_resumed
from fedlit.training.progress import rounds_of_run
from fedlit.training.refinement import refine_
from fedlit.training.replicas import check_local_norm
from fedlit.training.returns import adapts, come_together, welcome
from fedlit.training.samples import SampleCheck
from fedlit.training.standstill import Standstill
from fedlit.training.tasks import Classification, Regression
from fedlit.training.warmup import is_share, warmup_of


def plan_rounds(
    method: Method, loader: FederatedLoader, local_steps: int | None = None, rounds_per_epoch: int = 1
) -> None:
    """Cut training data of local clients into rounds; called on all processes by the strategy, or by `Rounds`.

    Raises:
        RosterError: On every process, if clients' data do not fit together, or are not those of the checkpoint, or
            BatchNorm would have to train on a batch of one sample.
        ValueError: If clients would keep normalisation layers that never saw data, or a warm-up is a share of a run
            without a planned end.
    """
    federation, target, trainer = method.federation, method.target, method.trainer
    loader.guarded = None if target.labelled else target.name
    labelled_only = () if method.uses_unlabelled_target or not target.labelled else (target.name,)
    loader.check = check = SampleCheck(method, loader)
    federation.all_gather("training samples", check.start)
    facts = loader.facts(labelled_only)
    federation.introduce(facts)
    endless = trainer.max_epochs is None or trainer.max_epochs < 0
    num_rounds = 1000 if endless else int(trainer.max_epochs or 0) * rounds_per_epoch
    if is_share(method.warmup) and trainer.max_steps > 0 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ValueError(
            f"warmup_rounds={method.warmup} is a share of max_epochs' rounds, and max_steps={trainer.max_steps} may "
            "end the run before: leave max_steps out, or give warmup_rounds as a number of rounds"
        )
    samples = {client.name: client.num_samples or 0 for client in federation.clients}
    kept = method.record.of_checkpoint("warmup_rounds") if is_share(method.warmup) else None
    if kept is None:
        batches = [loader.num_batches(samples[source.name], source.name) for source in method.sources]
        steps = local_steps or math.ceil(max(batches) / trainer.accumulate_grad_batches)
        method.warmup_rounds = warmup_of(method.warmup, None if endless else num_rounds, max(1, steps))
    else:
        method.warmup_rounds = kept
    if 0 < num_rounds <= method.warmup_rounds and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"{type(method).__name__} never starts: all of {num_rounds} rounds (max_epochs) are of its warm-up, FedAvg "
            f"over the sources: raise max_epochs, or lower warmup_rounds ({method.warmup_rounds})"
        )
    ever = {client.name for round_idx in range(num_rounds) for client in method.learners(round_idx)}
    ever |= {client.name for client in method.sources} if method.warmup_rounds else set()
    if method.local_norm:
        check_local_norm(method.originals, [client.name for client in method.clients if client.name not in ever])
    resumes = method.record.resumes
    plan = {"seed": loader.seed, "local_steps": local_steps, "rounds_per_epoch": rounds_per_epoch, "samples": samples}
    method.record.plan_(plan | ({"warmup_rounds": method.warmup_rounds} if is_share(method.warmup) else {}))

    warn_of_unequal_classes(method, loader)
    if isinstance(method.task, Classification) and method.task.balanced:
        for client in federation.local_clients:
            if client.labelled and client.name in loader.datasets:
                method.task.balance_(client.name, count_labels(loader, client.name, method.task.num_classes))

    if isinstance(method.task, Regression) and method.scale_labels:
        method.task.scales = label_scales(method, method.task, loader, resumes)

    sizes = {name: size for name, size in samples.items() if name in ever}
    num_batches = None if local_steps is None else num_rounds * local_steps * trainer.accumulate_grad_batches
    federation.check("batches", check_batches(method, loader, sizes, num_batches) if facts else None)

    def learners(round_idx: int) -> Collection[str]:
        return {client.name for client in present_learners(method, round_idx)}

    loader.plan(
        RoundPlan(
            sizes=sizes,  # the largest sets a round's length
            learners=learners,
            position=lambda: (federation.round_idx, federation.batch_idx),
            local_steps=local_steps,
            rounds_per_epoch=rounds_per_epoch,
            accumulate=trainer.accumulate_grad_batches,
            labelled_only=labelled_only,
        )
    )


def count_labels(loader: FederatedLoader, client: str, num_classes: int) -> torch.Tensor:
    """How many labelled training samples a local client has of each class, shape (num_classes,)."""
    labels = torch.cat([batch[client][1] for batch in loader.in_order([client])])
    return torch.bincount(labels, minlength=num_classes)


def check_batches(
    method: Method, loader: FederatedLoader, sizes: Mapping[str, int], num_batches: int | None
) -> RosterError | None:
    """An error if BatchNorm would meet a batch of one sample, from which it has no variance.

    Args:
        method: Of which the networks given are tried on one sample, unless their statistics stand still.
        loader: Of the training data of at least one client.
        sizes: Training samples by client.
        num_batches: Of each client in all rounds; ``None`` is whole passes.
    """
    names = [client.name for client in method.sources if method.warmup_rounds]
    for name in names if method.statistics_stand_still else sizes:
        size, batch_size = sizes[name], loader.batch_size_of(name)
        alone = 1 in (batch_size, size % batch_size) and (batch_size == 1 or not loader.drop_last)
        reached = num_batches is None or batch_size == 1 or math.ceil(size / batch_size) <= num_batches
        if alone and reached and _fails_on_one(method.originals, loader):
            cure = "raise batch_size"
            if batch_size > 1:
                cure = "set drop_last=True, which leaves the last batch out, or another batch_size"
            return RosterError(
                f"client {name!r} trains on {size} samples with batch_size={batch_size}, which makes a batch of 1 "
                f"sample, and BatchNorm cannot be trained on that: {cure}, or use GroupNorm"
            )
    return None


def _fails_on_one(networks: tuple[nn.Module, nn.Module], loader: FederatedLoader) -> bool:
    """Whether torch refuses to train BatchNorm on one sample; it takes one image, whose pixels are many values."""
    norms = [any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in n.modules()) for n in networks]
    if not any(norms):
        return False
    try:
        extractor, classifier = (network.cpu() for network in copy.deepcopy(networks))
        with torch.no_grad(), torch_streams():
            dtype = next((param.dtype for param in extractor.parameters()), torch.float32)
            inputs = loader.samples(next(iter(loader.datasets)))[0]
            features = extractor(mapped(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, inputs))
            if norms[1]:
                classifier(features)
    except Exception as error:  # of inputs of another kind, on which a network cannot be tried so
        return "more than 1 value per channel" in str(error)
    return False


@dataclass
class _PlannedSource(_DataLoaderSource):
    """Whoever gives the training data, which are cut into rounds at once: Lightning asks for their length next."""

    method: Method

    def dataloader(self) -> Any:
        loader = super().dataloader()
        if isinstance(loader, FederatedLoader):
            plan_rounds(self.method, loader)
        return loader


class Rounds(Callback):
    """Attached by every `FederatedModule` through ``configure_callbacks``.

    Callbacks with a method ``on_round_start(trainer, module, round_idx)`` or ``on_round_end(trainer, module,
    round_idx)`` are called at those times, after the module itself.
    """

    batches_per_round: int
    _started: float
    _talked: float
    _run_closed: bool
    _called: bool
    _trains: bool = False
    _standstill: Standstill

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do what a `FederatedStrategy` does, where there is none: see to channels, and to the cutting into rounds."""
        if getattr(trainer.strategy, "federation", None) is not None:
            return
        method = cast(Method, pl_module)
        method.federation.channels.declare(declared_by(trainer.callbacks))  # type: ignore[attr-defined]
        if stage == "fit":
            for sentence in with_samples(method.federation.channels):
                rank_zero_warn(sentence, category=PrivacyWarning)
        if stage == "fit":
            source = trainer.fit_loop._data_source
            trainer.fit_loop._data_source = _PlannedSource(source.instance, source.name, method)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See to it that optimisers find each client's state in a checkpoint."""
        check_modes(trainer)
        self._trains = False
        for optimizer in trainer.optimizers:
            optimizer.register_load_state_dict_pre_hook(arrange)
            optimizer.register_load_state_dict_pre_hook(check_resumed)  # of the state as it is arranged

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the length of a round, and refuse settings that would stop inside one."""
        method = cast(Method, pl_module)
        loader = trainer.train_dataloader
        whole = trainer.num_training_batches
        if whole == float("inf"):
            raise TypeError("training data without a length have no rounds: give a FederatedLoader({client: dataset})")
        for optimizer in trainer.optimizers:
            if any(group.get("client") is None for group in optimizer.param_groups):
                raise ValueError(
                    "each parameter group of an optimizer needs the key 'client' with a client's name: build the "
                    "groups with client_param_groups(), or as it does"
                )
            own = bool(method.federation.local_clients)
            if own and method.param_groups and not any("model" in group for group in optimizer.param_groups):
                raise ValueError(
                    f"param_groups would do nothing, as {type(method).__name__} configures an optimizer without "
                    "make_optimizer(): give the settings there"
                )
        self._trains, self._run_closed, self._called = True, False, False
        self.batches_per_round = int(whole)
        if isinstance(loader, FederatedLoader):
            self.batches_per_round = min(loader.batches_per_round, self.batches_per_round)
        elif isinstance(method.task, Regression) and method.scale_labels:
            rank_zero_warn(
                f"labels are learnt in the unit that the data have them in: scale_labels reads them from a "
                f"FederatedLoader, and training data come from a {type(loader).__name__}. Give "
                "FederatedLoader({client: dataset}), or scale_labels=False and labels of mean 0 and deviation 1"
            )
        if trainer.max_steps != -1 and method.automatic_optimization:
            steps = -(-self.batches_per_round // trainer.accumulate_grad_batches)
            if trainer.max_steps % steps:
                raise ValueError(
                    f"max_steps={trainer.max_steps} stops inside a round of {steps} optimiser steps: give a multiple "
                    f"of {steps}, or limit max_epochs"
                )
        if any(isinstance(cb, Timer) and cb._interval == "step" for cb in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "max_time stops inside a round: give Trainer(callbacks=[Timer(duration, interval='epoch')]) instead"
            )
        if method.federation.transport.losable:
            self._called = come_together(trainer, method, self.batches_per_round)
            if not method.federation.local_clients:  # the server has compared networks, and needs shapes alone
                for network in method.originals:
                    network.to("meta")
        self._standstill = Standstill(method, trainer.optimizers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Open a round at its first batch."""
        method = cast(Method, pl_module)
        if method.federation.batch_idx == 0:
            self._open(trainer, method)
        self._started = time.perf_counter()
        self._talked = _talking(method)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the round at its last batch, and start counting the next one."""
        method = cast(Method, pl_module)
        federation = method.federation
        local = time.perf_counter() - self._started - (_talking(method) - self._talked)
        federation.seconds["local"] = federation.seconds.get("local", 0.0) + local
        federation.batch_idx += 1
        self._standstill.note_gradients_()
        last_of_epoch = batch_idx + 1 >= trainer.num_training_batches
        if federation.batch_idx >= self.batches_per_round or last_of_epoch:
            losses = method.record.mean_losses()
            # a module that steps by itself may give its loss without a graph
            with_graph = method.record.graphs if method.automatic_optimization else losses
            error = self._standstill.check_(losses, with_graph, federation.round_idx)
            if error is not None:
                federation.fail(error)
            self._close(trainer, method)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close a round and a run in which training was stopped early: what was learnt is still to be aggregated."""
        method = cast(Method, pl_module)
        if method.federation.batch_idx:
            self._close(trainer, method)
        if method.federation.round_idx > method.warmup_rounds and not self._run_closed:
            self._finish(method, method.federation.round_idx - 1)
        method.federation.raise_left()
        self._standstill.end_()
        trained = method.federation.round_idx > method.warmup_rounds and method.federation.is_local(method.target)
        if method.trust_region is not None and trained and not method.held_back:
            warnings.warn(
                f"trust_region={method.trust_region} has done nothing: it limits steps that the target takes without "
                f"labels, and {method.target.name!r} took none in {type(method).__name__}: leave it out",
                stacklevel=2,
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if nothing was left to train, which Lightning does not report."""
        if self._trains:
            return
        rounds, limit = cast(Method, pl_module).federation.round_idx, trainer.limit_train_batches
        asked = f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}, limit_train_batches={limit}"
        if rounds and limit:
            rank_zero_warn(
                f"no round is trained: the checkpoint has {rounds} rounds, and no more are asked for ({asked}): for "
                "more raise max_epochs"
            )
        else:
            rank_zero_warn(f"no round is trained, and the model is as it was before ({asked})")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Name what to monitor, where something monitors what is not logged."""
        explain_monitor(trainer, pl_module, exception)

    def _open(self, trainer: Trainer, method: Method) -> None:
        federation = method.federation
        if federation.transport.losable and not self._called:
            welcome(trainer, method, federation.roll_call(adapts(method)), self.batches_per_round)
        self._called = False
        method.record.start_round_()
        if method.reset_optimizer:
            for optimizer in trainer.optimizers:
                optimizer.state.clear()
        if method.warming_up:
            method.load_shared_(federation.catch_up("weights"))
        else:
            method.on_round_start(federation.round_idx)
        _notify("on_round_start", trainer, method, federation.round_idx)
        self._standstill.start_round_(present_learners(method, federation.round_idx))

    def _close(self, trainer: Trainer, method: Method) -> None:
        """Check and log the losses, communicate, advance schedules and the counter."""
        federation, round_idx = method.federation, method.federation.round_idx
        failed = federation.failed  # an exchange of this round's end raises it everywhere, if there is one
        losses = method.record.mean_losses()
        for name, loss in losses.items():
            if not math.isfinite(loss):
                federation.fail(
                    DivergedError(
                        f"the training loss of client {name!r} is {loss} in round {round_idx}: lower the learning "
                        "rate, clip gradients (Trainer(gradient_clip_val=...)), or scale inputs and labels if they "
                        "are large"
                    )
                )
        federation.see_who_is_there()
        numbers = {name: {"loss": loss} for name, loss in losses.items()}
        for name, norms in method.record.norms.items():
            numbers[name]["grad_norm"] = float(torch.stack(norms).mean())
        reported = federation.report(numbers, ["loss", "grad_norm"])
        if method.warming_up:
            method.average_warmup_()
        else:
            method.on_round_end(round_idx)
            if self._is_last(trainer, round_idx):
                self._finish(method, round_idx)
        metrics = metric_names(method, reported)
        if reported:
            metrics["train/loss"] = sum(row["loss"] for row in reported.values()) / len(reported)
        if failed:
            federation.raise_left()
        method.log_everywhere({**metrics, "round": float(round_idx)})
        federation.round_idx, federation.batch_idx = round_idx + 1, 0
        for config in trainer.lr_scheduler_configs:  # from here on, as one may go by the progress of the next round
            if isinstance(config.scheduler, ClientSchedules) and config.scheduler.interval == "round":
                config.scheduler.step(list(losses), losses)
        _notify("on_round_end", trainer, method, round_idx)

    def _finish(self, method: Method, round_idx: int) -> None:
        """Close a run once, after its last round."""
        method.close_run(round_idx)
        if method.refine:
            refine_(method)
        self._run_closed = True

    def _is_last(self, trainer: Trainer, round_idx: int) -> bool:
        """Whether a round is the last one of the run, as far as it was planned."""
        if 0 <= trainer.max_steps <= trainer.global_step:
            return True
        return round_idx + 1 == rounds_of_run(trainer)


def _talking(method: Method) -> float:
    """Seconds spent in exchanges so far; a method may exchange within a local step."""
    seconds = method.federation.seconds
    return seconds.get("exchange", 0.0) + seconds.get("protection", 0.0)


def _notify(hook: str, trainer: Trainer, method: Method, round_idx: int) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if hasattr(callback, hook):
            getattr(callback, hook)(trainer, method, round_idx)
