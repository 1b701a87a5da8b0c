"""Rounds: the callback that opens and closes them.

A callback, because `on_train_batch_end` of callbacks runs before ModelCheckpoint saves and before validation, so that
both see the aggregated model. The module's hook runs after ModelCheckpoint's, and `on_train_epoch_end` after
validation.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import rank_zero_warn

from fedlit.checks import refuse
from fedlit.federation import DivergedError, FederatedLoader
from fedlit.federation.leaks import with_samples
from fedlit.privacy import PrivacyWarning
from fedlit.run.checkpoint import arrange
from fedlit.run.component import Phase
from fedlit.run.ending import save_again, warn_of_missing
from fedlit.run.optimisation import ClientSchedules, check_resumed
from fedlit.run.planning import change_optimizer, plan_rounds, set_epoch_length
from fedlit.run.returns import come_together, welcome
from fedlit.run.run import Run, run_of
from fedlit.run.standstill import Standstill
from fedlit.run.tasks import Regression
from fedlit.run.threads import choose_threads, set_threads
from fedlit.run.trainer_checks import check_modes, explain_monitor


@dataclass
class _PlannedSource(_DataLoaderSource):
    """Source of the training data that cuts them into rounds at once, as Lightning asks for their length next."""

    run: Run

    def dataloader(self) -> Any:
        loader = super().dataloader()
        if isinstance(loader, FederatedLoader):
            plan_rounds(self.run, loader)
        return loader


class Rounds(Callback):
    """Run the rounds of a federated module, which attaches it through ``configure_callbacks``."""

    _started: float
    _exchanging: float
    _called: bool
    _trains: bool = False
    _threads: int | None = None  # chosen in this run, or in the one that it goes on from
    _standstill: Standstill

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Without a `FederatedStrategy`, do its part: declare channels, and cut data into rounds."""
        if getattr(trainer.strategy, "federation", None) is not None:
            return
        run = run_of(pl_module)
        run.declare_channels()
        if stage == "fit":
            for sentence in with_samples(run.federation.channels):
                rank_zero_warn(sentence, category=PrivacyWarning)
            source = trainer.fit_loop._data_source
            trainer.fit_loop._data_source = _PlannedSource(source.instance, source.name, run)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let optimisers read each client's state in a checkpoint."""
        check_modes(trainer)
        self._trains = False
        for optimizer in trainer.optimizers:
            optimizer.register_load_state_dict_pre_hook(arrange)
            optimizer.register_load_state_dict_pre_hook(check_resumed)  # of the state as it is arranged

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine the length of a round, refuse limits that would stop inside one, and start all components."""
        run, loader = run_of(pl_module), trainer.train_dataloader
        if trainer.num_training_batches == float("inf"):
            rule = "data with a length, without which there are no rounds"
            refuse("train_dataloaders", rule, loader, "give FederatedLoader({client: dataset})", TypeError)
        _check_optimizers(run)
        self._set_threads(run, loader)
        self._trains, self._called, run.clock.last_round = True, False, -1
        run.federation.roster.call_back(())
        labels_scaled = isinstance(run.task, Regression) and run.outputs.scales_labels
        if labels_scaled and not isinstance(loader, FederatedLoader):
            rank_zero_warn(
                f"labels are learnt in the unit that the data have them in: scale_labels reads them from a "
                f"FederatedLoader, and training data come from a {type(loader).__name__}. Give "
                "FederatedLoader({client: dataset}), or scale_labels=False and labels of mean 0 and deviation 1"
            )
        _check_ends(run)
        if run.federation.transport.losable:
            self._called = come_together(run)
            if not run.federation.local_clients:  # the server has compared networks, and needs shapes alone
                for network in run.originals:
                    network.to("meta")
        self._standstill = Standstill(run, trainer.optimizers)
        for each in run.components:  # after the return of sites, which sets the round that they start in
            each.on_run_start(run)

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint takes over: the number of threads, if it was chosen."""
        return {} if self._threads is None else {"num_threads": self._threads}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        kept = state_dict.get("num_threads")
        self._threads = kept if type(kept) is int else None

    def _set_threads(self, run: Run, loader: Any) -> None:
        """Let all processes have as many threads as are best for the first, if that is left to fedlit."""
        strategy = run.trainer.strategy
        if getattr(strategy, "num_threads", None) != "auto":
            return
        if self._threads is None:  # one tries, and the others wait, or they would disturb each other
            chosen = choose_threads(run, loader) if run.trainer.is_global_zero else 0
            self._threads = strategy.broadcast(chosen) if run.trainer.world_size > 1 else chosen
        set_threads(self._threads)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the epoch the length of its rounds, which differs between phases."""
        set_epoch_length(run_of(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Open a round at its first batch."""
        run = run_of(pl_module)
        if run.clock.step == 0:
            self._open(run)
        self._started = time.perf_counter()
        self._exchanging = _exchanging(run)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the local step, and close the round at its last batch."""
        run = run_of(pl_module)
        federation = run.federation
        local = time.perf_counter() - self._started - (_exchanging(run) - self._exchanging)
        federation.seconds["local"] = federation.seconds.get("local", 0.0) + local
        federation.batch_idx += 1
        last_of_epoch = batch_idx + 1 >= trainer.num_training_batches
        if federation.batch_idx >= run.clock.batches_in() or last_of_epoch:
            losses = run.record.mean_losses()
            # a module that steps by itself may give its loss without a graph
            with_graph = run.record.graphs if pl_module.automatic_optimization else losses
            error = self._standstill.check_(losses, with_graph, federation.round_idx)
            if error is not None:
                federation.fail(error)
            self._close(run)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close a round and a run that were stopped early, so that their local steps are aggregated.

        Across organisations, wait for those who have been lost, and let them fetch the result.
        """
        run = run_of(pl_module)
        transport = run.federation.transport
        if run.clock.step:
            self._close(run)
        if not transport.over:
            welcome(run, run.federation.last_call(), over=True)
        returned = run.federation.roster.returned
        if returned:
            run.phase().on_round_start(run)  # as before a round, in which those who return fetch what they have missed
        if run.clock.round_idx > run.clock.warmup_rounds and (returned or run.clock.last_round < 0):
            self._finish(run, run.clock.round_idx - 1)
            run.prepare_predictions()
            save_again(run)
        if returned:
            run.federation.compare_totals()  # as no sum follows in which clients would
        warn_of_missing(run)
        run.federation.raise_left()
        self._standstill.end_()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if no round was left to train, which Lightning does not report."""
        if self._trains:
            return
        rounds, limit = run_of(pl_module).clock.round_idx, trainer.limit_train_batches
        asked = f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}, limit_train_batches={limit}"
        if rounds and limit and trainer.should_stop:
            rank_zero_warn(
                f"no round is trained: the checkpoint has {rounds} rounds, after which the method ends, "
                f"whatever is asked for ({asked})"
            )
        elif rounds and limit:
            rank_zero_warn(
                f"no round is trained: the checkpoint has {rounds} rounds, and no more are asked for ({asked}): for "
                "more raise max_epochs"
            )
        else:
            rank_zero_warn(f"no round is trained, and the model is as it was before ({asked})")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Explain an error about a monitored metric that is not logged."""
        explain_monitor(trainer, pl_module, exception)

    def _open(self, run: Run) -> None:
        federation = run.federation
        if federation.transport.losable and not self._called:
            welcome(run, federation.roll_call(run.requires.adapts))
        self._called = False
        run.record.start_round_()
        if run.local.reset_optimizer:
            for optimizer in run.trainer.optimizers:
                optimizer.state.clear()
        for each in run.active():
            each.on_round_start(run)
        self._standstill.start_round_(run.present_learners())

    def _close(self, run: Run) -> None:
        """Report and check losses, aggregate, log, and advance the counter and schedules."""
        federation, round_idx = run.federation, run.clock.round_idx
        failed = federation.failed  # an exchange of this round's end raises it everywhere, if there is one
        losses = run.record.mean_losses()
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
        for name, norms in run.record.norms.items():
            numbers[name]["grad_norm"] = float(torch.stack(norms).mean())
        reported = federation.report(numbers, ["loss", "grad_norm"])
        method, *others = run.active()
        method.on_round_end(run)  # the phase first: parts and callbacks see the aggregated model
        # before the checkpoint of the last round is written; but who is lost may come back: see `on_train_end`
        if self._is_last(run) and not federation.transport.lost:
            self._finish(run, round_idx)
        metrics = run.metric_names(reported)
        if reported:
            metrics["train/loss"] = sum(row["loss"] for row in reported.values()) / len(reported)
        if failed:
            federation.raise_left()
        run.log({**metrics, "round": float(round_idx)})
        for each in others:
            each.on_round_end(run)
        federation.round_idx, federation.batch_idx = round_idx + 1, 0
        for config in run.trainer.lr_scheduler_configs:  # from here on: one may go by the progress of the next round
            if isinstance(config.scheduler, ClientSchedules) and config.scheduler.interval == "round":
                config.scheduler.step(list(losses), losses)
        if run.offload is not None:
            for optimizer in run.trainer.optimizers:
                run.offload.keep_states_(optimizer)
            run.offload.release_all()
        if change_optimizer(run, round_idx):  # before the round's checkpoint, which the next phase goes on from
            self._standstill.watch_(run.trainer.optimizers)

    def _finish(self, run: Run, last_round: int) -> None:
        """Close a run after its last round; a second time, for those who return, the method's phases alone."""
        again, run.clock.last_round = run.clock.last_round >= 0, last_round
        for each in run.components:
            if not again or isinstance(each, Phase):
                each.on_run_end(run)

    def _is_last(self, run: Run) -> bool:
        """Return whether the current round is the last planned one, outside of the warm-up."""
        trainer = run.trainer
        if run.clock.warming_up:
            return False
        if 0 <= trainer.max_steps <= trainer.global_step:
            return True
        return run.clock.round_idx + 1 == run.clock.all_rounds()


def _check_optimizers(run: Run) -> None:
    """Refuse parameter groups without a client, or without the settings of ``param_groups``."""
    for optimizer in run.trainer.optimizers:
        if any(group.get("client") is None for group in optimizer.param_groups):
            way_out = "build the groups with client_param_groups(), or as it does"
            refuse("configure_optimizers", "of groups with a client's name under 'client'", optimizer, way_out)
        is_divided = any("model" in group for group in optimizer.param_groups)
        if run.federation.local_clients and run.local.param_groups and not is_divided:
            rule = f"left out, as {run.name} configures an optimizer without make_optimizer()"
            refuse("param_groups", rule, run.local.param_groups, "give the settings there")


def _check_ends(run: Run) -> None:
    """Refuse limits of the Trainer that would end the run inside a round."""
    trainer = run.trainer
    if trainer.max_steps != -1 and run.module.automatic_optimization:
        rounds, left = run.clock.rounds_of(trainer.max_steps)
        if left:
            steps = -(-run.clock.batches_in(rounds) // trainer.accumulate_grad_batches)
            rule = f"the steps of whole rounds, and stops inside round {rounds}, of {steps} optimiser steps"
            ends = [str(end) for end in (trainer.max_steps - left, trainer.max_steps - left + steps) if end]
            refuse("max_steps", rule, trainer.max_steps, f"give {' or '.join(ends)}, or limit max_epochs")
    if any(isinstance(cb, Timer) and cb._interval == "step" for cb in trainer.callbacks):  # type: ignore[attr-defined]
        way_out = "give Trainer(callbacks=[Timer(duration, interval='epoch')])"
        refuse("max_time", "left out, as it stops inside a round", True, way_out)


def _exchanging(run: Run) -> float:
    """Return the seconds spent in exchanges so far; a method may exchange within a local step."""
    seconds = run.federation.seconds
    return seconds.get("exchange", 0.0) + seconds.get("protection", 0.0)
