"""The run that a method's components take part in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from fedlit.federation import Client, Federation
from fedlit.federation.streams import enter_stream, torch_streams
from fedlit.run.clock import Clock
from fedlit.run.component import Component, Phase
from fedlit.run.local_samples import LocalSamples
from fedlit.run.offload import DiskOffload
from fedlit.run.options import LocalTraining
from fedlit.run.outputs import Outputs
from fedlit.run.record import RoundRecord
from fedlit.run.replicas import Replicas
from fedlit.run.trust_region import TrustRegion
from fedlit.run.turns import Turns
from fedlit.run.vectorisation import StackedReplicas
from fedlit.run.weights import Averaging, SharedWeights

if TYPE_CHECKING:
    from fedlit.run.optimisation import ClientOptimisation


class Run:
    """The federation, weights and samples of a module's clients, the clock and the log, as passed to components.

    Args:
        module: The method, whose declarations, networks and phases it has.
        local: How clients take local steps.
        averaging: How means of their weights are taken.
        warmup: Rounds of warm-up, or their share.

    Attributes:
        clients: All clients, in roster order.
        target: The client adapted to.
        weights: Weights that clients share.
        samples: Training samples of local clients.
        clock: Rounds and local steps.
        record: Losses and gradient norms of the round.
        outputs: Interpretation of the networks' outputs.
        parts: Further components of the method.
        trust_region: Of a target that trains without labels; ``None`` is no limit.
        own_labels: Whether a loss from outside of fedlit reads labels, which may have any form.
        stacked: Replicas that are trained in one call, in a run that is vectorised.
        turns: Whose turn it is where clients take a local step one after the other.
        offload: Files in which weights and optimiser states of local clients lie; ``None`` is memory.
    """

    def __init__(
        self, module: ClientOptimisation, local: LocalTraining, averaging: Averaging, warmup: int | float
    ) -> None:
        self.module = module
        self.clients, self.target = module.clients, module.target
        self.task, self.local = module.task, local
        self.requires, self.spec = type(module).requires, type(module).replica_spec
        self.originals: tuple[nn.Module, nn.Module] = module.originals
        self.replicas: Replicas[nn.Module] = module.replicas
        self._phases = tuple[Phase, ...]()
        self._there: tuple[object, object, tuple[Client, ...]] = ((), (), ())  # learners, those present, and both
        self._own_federation: Federation | None = None
        self.clock = Clock(self, warmup)
        self.samples = LocalSamples(self)
        self.weights = SharedWeights(self, averaging)
        self.record = RoundRecord(self)
        self.outputs = Outputs(self)
        self.trust_region: TrustRegion | None = None
        self.parts: list[Component] = [self.outputs, self.record, self.weights]
        self.own_labels = False
        self.stacked: StackedReplicas | None = None
        self.turns = Turns(self)
        self.offload: DiskOffload | None = None

    # ---------------------------------------------------------------- who and where

    @property
    def name(self) -> str:
        """Name of the method's class."""
        return type(self.module).__name__

    @cached_property
    def sources(self) -> tuple[Client, ...]:
        """Labelled clients other than the target, in roster order."""
        return tuple(client for client in self.clients if not client.is_target)

    @cached_property
    def labelled(self) -> tuple[Client, ...]:
        """Clients with labels, in roster order."""
        return tuple(client for client in self.clients if client.labelled)

    @cached_property
    def uses_target_labels(self) -> bool:
        """Whether the target has labels that the method makes something of."""
        return bool(self.target.labelled) and not self.requires.ignores_target_labels

    @cached_property
    def _places(self) -> dict[str, int]:
        return {client.name: place for place, client in enumerate(self.clients)}

    @property
    def device(self) -> torch.device:
        """Device of the networks."""
        return self.module.device

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer; a `RuntimeError` if none is attached."""
        return self.module.trainer

    @property
    def is_attached(self) -> bool:
        """Whether there is a Trainer."""
        return self.module._trainer is not None

    @property
    def is_fitting(self) -> bool:
        """Whether the Trainer fits, rather than evaluates or predicts."""
        return self.is_attached and self.trainer.state.fn == TrainerFn.FITTING

    @property
    def federation(self) -> Federation:
        """The strategy's federation; under any other strategy, one of this process with the plain backend."""
        trainer = self.module._trainer
        federation = None if trainer is None else getattr(trainer.strategy, "federation", None)
        if isinstance(federation, Federation):
            return federation
        if self._own_federation is None:
            self._own_federation = self.make_federation(participation=self.requires.participation)
        return self._own_federation

    def make_federation(self, **choices: Any) -> Federation:
        """Return a federation with the channels of all components; ``choices`` are arguments of `Federation`."""
        channels = [channel for each in self.components for channel in each.channels]
        train = any("learners" in (channel.up, channel.to) for channel in channels)
        learners = self.learners(self.clock.warmup_rounds) if train else None
        return Federation(self.clients, self.target.name, channels=channels, learners=learners, **choices)

    # ---------------------------------------------------------------- components

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of the method, in order."""
        if not self._phases:
            self._phases = self.module.phases()
        return self._phases

    def phase(self, round_idx: int | None = None) -> Phase:
        """Return the phase of a round; ``None`` is the current round."""
        left = self.clock.round_idx if round_idx is None else round_idx
        *others, last = self.phases
        for phase in others:
            if phase.rounds is None or left < phase.rounds:
                return phase
            left -= phase.rounds
        return last

    @property
    def optimizer(self) -> OptimizerCallable:
        """Maker of the optimiser in the current round."""
        return self.phase().settings.optimizer or self.local.optimizer

    @property
    def components(self) -> list[Component]:
        """All components, in the order in which their hooks are called."""
        attached: list[object] = []
        if self.is_attached:
            attached = [*self.trainer.callbacks, self.trainer.datamodule]  # type: ignore[attr-defined]
        return [*reversed(self.phases), *self.parts, *(each for each in attached if isinstance(each, Component))]

    def active(self) -> Iterator[Component]:
        """Yield the components whose round hooks are called in the current round: all but other phases."""
        now = self.phase()
        yield from (each for each in self.components if each is now or not isinstance(each, Phase))

    def release(self, client: str) -> None:
        """Let a local client's weights and optimiser state leave memory until they are used, if they lie in files."""
        if self.offload is not None:
            self.offload.release(client)

    def declare_channels(self) -> None:
        """Declare the channels of components that were attached after the federation was made."""
        self.federation.channels.declare([channel for each in self.components for channel in each.channels])

    def prepare_predictions(self) -> None:
        """Call the components' `Component.on_evaluation_start`."""
        for each in self.components:
            each.on_evaluation_start(self)

    # ---------------------------------------------------------------- who trains

    def learners(self, round_idx: int | None = None) -> tuple[Client, ...]:
        """Return the clients that take local steps in a round, present or not; ``None`` is the current round."""
        round_idx = self.clock.round_idx if round_idx is None else round_idx
        return self.phase(round_idx).learners(round_idx)

    def present_learners(self, round_idx: int | None = None) -> tuple[Client, ...]:
        """Return the present clients that take local steps in any round; ``None`` is the current round."""
        round_idx = self.clock.round_idx if round_idx is None else round_idx
        everybody = self.requires.trains_when_absent and round_idx >= self.clock.warmup_rounds
        roster, learners = self.federation.roster, self.learners(round_idx)
        if everybody:
            return tuple(client for client in learners if client.name not in roster.away)
        there = roster.present(round_idx)
        if self._there[0] is not learners or self._there[1] is not there:  # once for a round, not for each local step
            names = {client.name for client in there}
            self._there = learners, there, tuple(client for client in learners if client.name in names)
        return self._there[2]

    def in_step(self, channel: str, *others: str, step: int | None = None) -> tuple[Client, ...]:
        """Return the clients that participate on all these channels and have a batch in a local step.

        Local epochs differ in length: a client without samples left sits out the rest of the round.
        """
        step = self.clock.step if step is None else step
        participants = [self.federation.present(each) for each in (channel, *others)]
        able = [client for client in participants[0] if all(client in each for each in participants)]
        loader = self.samples.loader
        if loader is None:
            return tuple(able)
        learning = {client.name for client in self.present_learners()}
        return tuple(client for client in able if client.name in learning and step < loader.batches_of(client.name))

    def in_streams(
        self, batch: Mapping[str, Sequence[Any]], purpose: str = "train"
    ) -> Iterator[tuple[Client, Sequence[Any]]]:
        """Yield local clients of ``batch`` in roster order with their samples, each inside a separate random stream.

        ``purpose`` distinguishes streams of one client and step that are used more than once.
        """
        seed, moment = self.federation.seed, (self.clock.round_idx, self.clock.step)
        with torch_streams(self.device):
            for place in sorted(self._places[name] for name in batch if name in self._places):
                client = self.clients[place]
                enter_stream(seed, purpose, client.name, *moment, device=self.device)
                yield client, batch[client.name]

    def local_losses(
        self, loss: Callable[[Client, Sequence[Any]], Tensor], batch: Mapping[str, Sequence[Any]]
    ) -> dict[str, Tensor]:
        """Return the losses of local clients by a function of one client and its batch, without those of None."""
        if self.stacked is not None:
            return self.stacked.losses_in_stream(self, batch)
        losses = {client.name: loss(client, samples) for client, samples in self.in_streams(batch)}
        return {name: each for name, each in losses.items() if each is not None}

    # ---------------------------------------------------------------- the log

    def log(self, metrics: Mapping[str, float], of: Client | None = None) -> None:
        """Log numbers that are equal on all processes, in any hook.

        All are there to monitor. Loggers get those of clients that `Federation.shows`: of the client ``of``, or by the
        names of `metric_names`.
        """
        trainer = self.trainer
        shown = {name: value for name, value in metrics.items() if self._is_shown(name, of)}
        if trainer.evaluating:  # a Trainer returns what is logged so; no reduction, and the key exists everywhere
            others = {name: value for name, value in metrics.items() if name not in shown}
            for numbers, to_loggers in ((shown, True), (others, False)):
                self.module.log_dict(numbers, logger=to_loggers, batch_size=1, sync_dist=True, rank_zero_only=True)
            return
        # at once, and without the quarter of a millisecond that `self.log` takes for each
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        for logger in trainer.loggers:
            logger.log_metrics(dict(shown), step=trainer.global_step)

    def _is_shown(self, name: str, of: Client | None) -> bool:
        owner = self._owner(name) if of is None else of
        return owner is None or self.federation.shows(owner)

    def _owner(self, name: str) -> str | None:
        """Return whose number it is, by the names of `metric_names`; ``None`` is nobody's."""
        role, *parts = name.split("/")
        if role == "target" and parts:
            return self.target.name
        is_source = role == "source" and len(parts) > 1 and parts[0] in self.federation.roster.rank_of
        return parts[0] if is_source and parts[0] != self.target.name else None

    def metric_names(self, reported: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return clients' numbers by their log names: ``source/NAME/...``, ``target/...``."""
        target = self.target.name
        return {
            f"{'target' if client == target else f'source/{client}'}/{name}": value
            for client, row in reported.items()
            for name, value in row.items()
        }


def run_of(module: pl.LightningModule) -> Run:
    """Return the run of a federated module, as Lightning hands it to callbacks."""
    run: Run = cast(Any, module).run
    return run
