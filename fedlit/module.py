"""FederatedModule: the contract of every method: what it defines by overriding, and what it uses."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlit.federation import (
    Channel,
    Client,
    Everyone,
    Federation,
    NotTrainedError,
    Participation,
    RosterError,
    Summed,
)
from fedlit.federation.client import make_roster
from fedlit.federation.labels import TaskName, guard
from fedlit.federation.ledger import SERVER
from fedlit.federation.metrics import METRICS
from fedlit.models import Replica, make_classifier, part_of
from fedlit.models.copies import check_copyable, check_part, check_tied, forget_compiled_
from fedlit.run import checkpoint as checkpoints
from fedlit.run.evaluation import Evaluation, log_everywhere
from fedlit.run.label_scale import label_channels
from fedlit.run.local import (
    batch_positions,
    build,
    in_step,
    in_streams,
    labelled_samples,
    present_learners,
    samples_in_step,
    training_inputs,
)
from fedlit.run.optimisation import ClientOptimisation, default_optimizer, with_schedules
from fedlit.run.param_groups import check_param_groups, check_parts, make
from fedlit.run.progress import progress, rounds_of_run
from fedlit.run.record import RoundRecord
from fedlit.run.refinement import CHANNELS as REFINEMENT
from fedlit.run.replicas import Replicas, SharedWeights
from fedlit.run.rounds import Rounds
from fedlit.run.tasks import make_task
from fedlit.run.trainer_checks import check_trainer
from fedlit.run.trust_region import check_trust_region, copy_weights, hold_back_, limit_now
from fedlit.run.vectorisation import stack
from fedlit.run.warmup import check_warmup, is_share

Batch: TypeAlias = Mapping[str, Sequence[Any]]
"""``{client: (inputs, labels)}`` of local clients; those that sit out a step are missing."""

Weighting: TypeAlias = Literal["samples", "sqrt", "uniform"]
"""What clients count by in a mean: their training samples, the square root of these, or alike."""


class FederatedModule(ClientOptimisation):
    """Base of all methods: supervised local training, and the hooks in which a method communicates.

    A method defines who trains (`learners`), on what loss (`loss`), and what is exchanged when a round starts
    (`on_round_start`) and ends (`on_round_end`). It reads ``self.federation`` and never asks which process it is on.

    Metrics: ``source/NAME/loss`` and ``target/loss`` (training loss, mean over the round), ``train/loss`` (their mean
    over clients), ``.../grad_norm`` (before clipping, where gradients are clipped), ``source/NAME/acc`` and
    ``source/acc`` (validation accuracy of each source's own replica, and their mean), ``target/score`` (label-free, the
    default to select by: mutual information between the target's inputs and predicted classes, in [0, 1]). In
    regression ``r2`` takes the place of ``acc`` (share of variance explained, at most 1), and there is no score;
    training losses are of standardised labels (``scale_labels``), and ``source/NAME/eval_loss`` is the mean squared
    error in the labels' unit. All processes log equal numbers.

    Args:
        clients: The roster, at least two names or `Client` objects.
        target: Name of the client adapted to.
        num_classes: Number of classes; in regression, of numbers to predict.
        extractor: Network from inputs to features; each client gets a copy with the same initial weights.
        classifier: Network from features to logits, or in regression to numbers; ``None`` is a linear layer on
            ``extractor.out_features``.
        task: ``"classification"`` (cross-entropy) or ``"regression"`` (mean squared error).
        scale_labels: In regression, let networks learn labels that are standardised: less the mean of all training
            labels, over their deviation, so that a learning rate means the same whatever the labels' unit is. These are
            the sources' labels, and the target's if it trains on them; sums over the channel "label_statistics" give
            both numbers when a run starts. A checkpoint keeps them, and a module that is trained again. What is
            predicted is in the labels' unit. ``False`` sends nothing, and leaves labels as the data have them.
        class_weights: What losses of samples of each class are multiplied by, ``num_classes`` numbers; or
            ``"balanced"``: each client weighs by its own labelled training samples, so that all classes that it has
            count alike, and nobody else has to know how many there are.
        optimizer: Makes the optimiser from parameter groups.
        param_groups: Settings of the optimiser for a client, for a part of its networks or for both, such as
            ``[{"part": "classifier", "lr": 0.1}, {"client": "webcam", "weight_decay": 0.0}]``; a part is a module of
            the replicas, such as ``"extractor"``, or one within it. Of entries that meet the same parameters the later
            one counts. A client's schedule goes by the rates of its parts.
        reset_optimizer: Clear momenta and other optimiser state when a round starts, as where clients remember nothing
            between rounds; learning-rate schedules go on. ``False`` keeps each client's state. With Adam it makes a
            difference: its first steps are as long as its learning rate, and weights grow faster.
        lr_scheduler: Makes a learning-rate schedule from an optimiser; each client has its own.
        schedule_interval: What advances a client's schedule: the ``"round"`` s or ``"step"`` s it took part in.
        weighting: Weights of clients in a mean: by number of training ``"samples"``; by its square root
            (``"sqrt"``), so that small ones count beside large ones; or ``"uniform"``.
        local_norm: Keep normalisation layers local, parameters and statistics (FedBN, Li et al., ICLR 2021).
        batchnorm_average: How clients' BatchNorm statistics are averaged. The mean of their ``"variances"`` lacks the
            spread of their means, and is smaller than the variance of all their data; that of their second
            ``"moments"`` is just that variance. Second moments are larger: the bound of a fixed-point grid holds for
            var + mean^2 then.
        warmup_rounds: Rounds of FedAvg over the sources before the method proper starts; a number below 1 is their
            share of the planned rounds; it comes to at least 100 local steps of the largest source, as far as three
            quarters of the rounds have them. As an attribute, a share stands as 1 until a run is planned.
        refine: When the run ends, let the target's own samples correct its predictions: neighbours are alike, and each
            class has its share. A linear classifier that is fitted to what comes of it takes the place of the target's,
            unless, of two classifiers that the target sends, the one fitted to its refined classes gets less than four
            fifths as many of the sources' samples right as the one fitted to its predicted classes; the sources learn
            these two, and the target how many of all samples they get right. No label of the target is needed. It is
            logged as ``refine/taken``; where it cannot be done a warning states why. ``"network"``: before that, the
            target's network below the classifier is trained too, on the corrected predictions (SHOT; 15 passes over its
            samples): for networks that the federation trains, from random weights above all.
        trust_region: How far a target that trains without labels may move its features in all steps after the warm-up
            together, in units of their spread, positive; steps that would use more than their share are shortened, and
            shares fall over the planned rounds. So weights and rates of an adaptation mean the same for inputs of any
            scale. It takes two more passes through the extractor in each of the target's steps. ``None`` is no limit.
        vectorize: Train all local clients in one vectorised call; pays for many clients with tiny equal networks.
            Equal to training one by one within float tolerance; with dropout, the numbers drawn depend on placement.

    Raises:
        RosterError: If the clients make no federation.
        ValueError: If an argument is out of range, or the extractor does not state its ``out_features``.
    """

    replicas: Replicas[nn.Module]
    """What each local client holds; a method that builds a class of its own annotates it with that."""

    target_temperature: float
    """What its process divides the target's logits by when it predicts; 1 unless `Calibration` has found another."""

    uses_unlabelled_target: ClassVar[bool] = False
    """Whether the target trains on its unlabelled samples too, rather than on its labelled ones alone."""

    default_participation: ClassVar[Participation] = Everyone()
    """Which clients are present in a round unless the strategy is given another rule."""

    trains_when_absent: ClassVar[bool] = False
    """Whether clients that are absent in a round go on training; they neither send nor receive in any case."""

    statistics_stand_still: ClassVar[bool] = False
    """Whether BatchNorm is in evaluation mode after a warm-up, so that it takes batches of one sample."""

    several_models: ClassVar[bool] = False
    """Whether a client's parameter groups are different models, whose gradients are clipped each by itself."""

    own_rates: ClassVar[Mapping[str, str]] = {}
    """Parts of a replica that the method steps without the optimiser, each with the argument that is its rate."""

    stays_local: ClassVar[tuple[str, ...]] = ()
    """Beginnings of names in a replica's state that never leave the client."""

    parts_apart: ClassVar[str] = ""
    """Why extractor and classifier can share no weight, where they are trained or sent each by itself."""

    classes_only: ClassVar[bool] = False
    """Whether the method cannot do regression."""

    weighs_classes: ClassVar[bool] = True
    """Whether the method's loss is that of its task, in which classes can have weights."""

    alternative_names: ClassVar[tuple[str, ...]] = ()
    """Names of all that `alternatives` may return."""

    needs_target_labels: ClassVar[bool] = False
    """Whether the method cannot do without labels of the target; a run without them is refused at its start."""

    trains_sources: ClassVar[bool] = True
    """Whether sources train; where the target does alone, labels are standardised by its own, and nothing is sent."""

    matches_distributions: ClassVar[bool] = False
    """Whether the method makes the features of all clients alike as a whole, whatever their classes: a run warns at
    its start where sources have their classes in unequal shares."""

    adaptation_weight: ClassVar[str] = ""
    """Name of the argument that weighs what a method does beside learning labels; a collapse is warned of with it."""

    watched_by: ClassVar[tuple[str, ...]] = ()
    """Class paths of callbacks that show what is special to the method; the command adds them."""

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        classifier: nn.Module | None = None,
        *,
        task: TaskName = "classification",
        scale_labels: bool = True,
        class_weights: Literal["balanced"] | list[float] | None = None,
        optimizer: OptimizerCallable = default_optimizer,
        param_groups: list[dict[str, Any]] | None = None,
        reset_optimizer: bool = False,
        lr_scheduler: LRSchedulerCallable | None = None,
        schedule_interval: Literal["round", "step"] = "round",
        weighting: Weighting = "samples",
        local_norm: bool = False,
        batchnorm_average: Literal["variances", "moments"] = "variances",
        warmup_rounds: int | float = 0,
        refine: bool | Literal["network"] = False,
        trust_region: float | None = None,
        vectorize: bool = False,
    ) -> None:
        super().__init__()
        if self.classes_only and task != "classification":
            raise ValueError(f"{type(self).__name__} is about classes: task must be 'classification', got {task!r}")
        self.task = make_task(task, num_classes, class_weights)
        self.scale_labels = scale_labels
        if class_weights is not None and not self.weighs_classes:
            raise ValueError(
                f"class_weights={class_weights!r} would do nothing in the loss of {type(self).__name__}: leave them out"
            )
        if class_weights is not None and vectorize:
            raise ValueError("vectorize=True has a loss without class_weights built in: train without one of both")
        check_trust_region(trust_region, type(self).__name__, self.uses_unlabelled_target)
        check_warmup(warmup_rounds)
        if refine not in (False, True, "network"):
            raise ValueError(f"refine must be true (the classifier), 'network' or false, got {refine!r}")
        if refine and task != "classification":
            raise ValueError(
                f"refine={refine!r} refines class probabilities, which task={task!r} lacks: give refine=False"
            )
        if weighting not in get_args(Weighting):
            raise ValueError(f"weighting must be one of {list(get_args(Weighting))}, got {weighting!r}")
        if batchnorm_average not in ("variances", "moments"):
            raise ValueError(f"batchnorm_average must be 'variances' or 'moments', got {batchnorm_average!r}")
        if local_norm and batchnorm_average == "moments":
            raise ValueError(
                "batchnorm_average='moments' averages what local_norm=True keeps at its client: leave one of both out"
            )
        if schedule_interval not in ("round", "step"):
            raise ValueError(f"schedule_interval must be 'round' or 'step', got {schedule_interval!r}")
        self.clients = make_roster(clients, target)
        self.target = next(client for client in self.clients if client.is_target)
        self.num_classes = num_classes
        for part, network in (("extractor", extractor), ("classifier", classifier)):
            if isinstance(network, nn.Module):
                check_copyable(part, network)
        # In a tuple, so that the originals are not registered: only clients' copies belong in the checkpoint.
        self.originals = (extractor, make_classifier(extractor, num_classes) if classifier is None else classifier)
        apart = "refine fits a classifier by itself" if refine else self.parts_apart
        check_tied(*self.originals, apart, self.stays_local)
        check_param_groups(param_groups, [client.name for client in self.clients], self.own_rates, type(self).__name__)
        for name, function in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
            if not callable(function) and (function is not None or name == "optimizer"):
                example = {"optimizer": "torch.optim.Adam, lr=0.001", "lr_scheduler": "StepLR, step_size=10"}[name]
                raise TypeError(
                    f"{name} must be a function that makes one, such as functools.partial({example}), got {function!r}"
                )
        self.optimizer, self.param_groups = optimizer, param_groups
        self.reset_optimizer = reset_optimizer
        self.lr_scheduler, self.schedule_interval = lr_scheduler, schedule_interval
        self.weighting = weighting
        self.local_norm = local_norm
        self.batchnorm_average = batchnorm_average
        self.warmup = warmup_rounds
        self.warmup_rounds = 1 if is_share(warmup_rounds) else int(warmup_rounds)
        self.refine = refine
        self.trust_region, self.held_back = trust_region, False
        self.vectorize = vectorize
        self.replicas = Replicas()
        self.save_hyperparameters(
            ignore=["clients", "extractor", "classifier", "optimizer", "lr_scheduler", "module"], logger=False
        )
        self.save_hyperparameters({"clients": [client.name for client in self.clients]}, logger=False)
        self.target_temperature = 1.0
        self.record = RoundRecord()
        moments = batchnorm_average == "moments"
        self.shared = SharedWeights(self.replicas, self.originals, self.stays_local, local_norm, moments)
        self._own_federation: Federation | None = None
        self._target_batch: Sequence[Any] | None = None  # of this local step

    # ---------------------------------------------------------------- what a method overrides

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Messages between clients, from the arguments where they matter; default: none."""
        return ()

    def build_replica(self) -> nn.Module:
        """What one client holds; called once per client, each time from the same random state."""
        return Replica(*copy.deepcopy(self.originals))

    def build_target(self, replica: Any) -> nn.Module:
        """What the target holds, made of what `build_replica` gave it; default: just that."""
        same: nn.Module = replica
        return same

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Clients that take local steps in round ``round_idx``, as far as present; default: all with labels."""
        return tuple(client for client in self.clients if client.labelled)

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Loss of one client on its batch, a scalar; default: `label_loss`.

        Its labels are those of the data; in regression they are standardised, as outputs of networks are.
        """
        return self.label_loss(client, batch)

    def label_loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """What a warm-up lowers, too, a scalar; default: the task's loss on the client's labelled samples."""
        return self.task.loss(client, self.replicas[client](batch[0]), batch[1])

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Losses of local clients in this step, by name. Override it to exchange something in every local step."""
        method = FederatedModule.loss if self.warming_up else type(self).loss
        if self._stacked is not None:
            return self._stacked.losses_in_stream(self, batch)
        return {client.name: method(self, client, samples) for client, samples in self.in_streams(batch)}

    def on_round_start(self, round_idx: int) -> None:
        """Exchange what a method needs before its local steps; default: nothing."""

    def on_round_end(self, round_idx: int) -> None:
        """Exchange what a method has learnt in its local steps; default: nothing."""

    def close_run(self, round_idx: int) -> None:
        """Send what is sent once more when a run ends, after its last round or where it is stopped; default: nothing.

        Args:
            round_idx: The last round.
        """

    def average_warmup_(self) -> None:
        """The exchange of a round of ``warmup_rounds``: FedAvg over the sources; default: of all shared weights."""
        self.average_("weights", among=self.sources)

    def prepare_predictions(self) -> None:
        """Make what is predicted with, before an evaluation or prediction and when training ends; default: nothing."""

    def can_predict(self, client: Client) -> bool:
        """Whether a local client has something to predict with yet; its evaluation waits until then."""
        return True

    def alternatives(self, inputs: Tensor) -> dict[str, Tensor]:
        """Other predictions of the target, logits by name, that are scored beside its own; default: none.

        Args:
            inputs: A batch of the target's, where it is hosted.
        """
        return {}

    def public_state(self) -> Any:
        """What all processes note alike beside weights, in plain data, for those that come back; default: nothing."""

    def welcome_(self, state: Any, back: Collection[str]) -> None:
        """Take the server's `public_state`, as clients come back that were lost; default: nothing.

        Args:
            state: The server's.
            back: Their names. They have what their last checkpoint has, or nothing.
        """

    def client_param_groups(self) -> list[dict[str, Any]]:
        """One parameter group per local client, which carries its name under ``"client"``.

        Clipping, schedules and checkpoints go by that key; a method with several optimisers gives each of them such
        groups.
        """
        groups: list[dict[str, Any]] = []
        for client in self.federation.local_clients:
            params = [param for param in self.replicas[client].parameters() if param.requires_grad]
            groups.append({"params": params, "client": client.name})
        return groups

    def make_optimizer(self) -> Optimizer:
        """One optimiser over all local clients."""
        # torch makes no optimiser of nothing, which is what a process of the server alone trains
        nothing = {"params": [nn.Parameter(torch.zeros(()))], "client": SERVER}
        groups = self.client_param_groups()
        check_parts(self, groups)
        return make(self, groups) if groups else self.optimizer([nothing])

    # ---------------------------------------------------------------- what a method uses

    @property
    def federation(self) -> Federation:
        """The strategy's federation; under any other strategy, one of this process's own with the plain backend."""
        federation = None if self._trainer is None else getattr(self._trainer.strategy, "federation", None)
        if isinstance(federation, Federation):
            return federation
        if self._own_federation is None:
            self._own_federation = self.make_federation(participation=self.default_participation)
        return self._own_federation

    def make_federation(self, **choices: Any) -> Federation:
        """The federation of this method; called by the strategy.

        Args:
            choices: Arguments of `Federation`; ``channels`` are those of others, such as callbacks.
        """
        warmup = [Summed("weights", "weights, while warming up", up="sources")] if self.warmup_rounds else []
        refinement = REFINEMENT if self.refine else ()
        labels = label_channels(self)
        channels = [*self.channels, *warmup, *labels, *refinement, METRICS, *choices.pop("channels", ())]
        train = any("learners" in (channel.up, channel.to) for channel in channels)
        learners = self.learners(self.warmup_rounds) if train else None
        return Federation(self.clients, self.target.name, channels=channels, learners=learners, **choices)

    @property
    def sources(self) -> tuple[Client, ...]:
        """Labelled clients other than the target, in roster order."""
        return tuple(client for client in self.clients if not client.is_target)

    @property
    def own_labels(self) -> bool:
        """Whether labels may be of any form in training, as where a loss from outside of fedlit reads them."""
        readers = (type(self).label_loss, type(self).loss, type(self).losses, type(self).training_step)
        return any(not str(getattr(reader, "__module__", "")).startswith("fedlit.") for reader in readers)

    @property
    def warming_up(self) -> bool:
        """Whether this round is one of the ``warmup_rounds``."""
        return self.federation.round_idx < self.warmup_rounds

    def planned_rounds(self) -> int | None:
        """Rounds of the run after its warm-up; ``None`` if it has no planned end."""
        rounds = rounds_of_run(self.trainer)
        return None if rounds is None else rounds - self.warmup_rounds

    @property
    def progress(self) -> float:
        """Share of the planned rounds after the warm-up that are over, from 0 to 1, equal on all processes.

        It stays the same within a round: 0 in the warm-up and in the first round after it, (R - 1)/R in the last of R.
        A run that ``max_steps`` ends earlier does not get there. A schedule of rates by it, with ``schedule_interval``
        "round": ``lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda _: annealing(module.progress))``.

        Raises:
            ValueError: If the run has no planned end.
        """
        return progress(self)

    def present_learners(self) -> tuple[Client, ...]:
        """Clients that take local steps in this round."""
        return present_learners(self, self.federation.round_idx)

    def in_step(self, channel: str, *others: str, step: int | None = None) -> tuple[Client, ...]:
        """Clients that participate on all these channels and have a batch in a local step, wherever they are hosted.

        Local epochs differ in length: who has run out of samples sits out the rest of the round.

        Args:
            channel: Of the round under way.
            others: Further ones.
            step: Of the round, from 0; ``None`` is the one under way.
        """
        present = [self.federation.present(channel) for channel in (channel, *others)]
        return in_step(self, [client for client in present[0] if all(client in each for each in present)], step)

    def samples_in_step(self, clients: Sequence[Client]) -> dict[str, int]:
        """How many samples each of these clients, which are `in_step`, has in its batch, wherever it is hosted."""
        return samples_in_step(self, clients)

    def in_streams(self, batch: Batch, purpose: str = "train") -> Iterator[tuple[Client, Sequence[Any]]]:
        """Local clients of ``batch`` in roster order with their samples, each inside a random stream of its own.

        Args:
            batch: Of this local step.
            purpose: Distinguishes streams of one client and step, if it is gone through more than once.
        """
        return in_streams(self, batch, purpose)

    def average_(
        self,
        channel: str,
        among: Iterable[Client],
        to: Iterable[Client] | None = None,
        part: str | tuple[str, ...] | None = None,
        absent_too: bool = False,
    ) -> None:
        """Replace the shared weights of ``to`` by the mean over ``among``, as far as they are present.

        Args:
            channel: Over which they are sent.
            among: Clients whose weights are averaged, weighted by ``weighting``.
            to: Clients that receive the mean; ``None`` is all that the channel is declared for.
            part: Sub-module of the replicas to which this is restricted, such as ``"classifier"``, or several.
            absent_too: See `Federation.mean`.

        Raises:
            ValueError: If a weight of these parts is tied to one of another part, which would change too.
        """
        federation, among = self.federation, tuple(among)
        named = (part,) if isinstance(part, str) else part
        parts = ("",) if named is None else tuple(f"{name}." for name in named)
        local = [client.name for client in among if federation.is_local(client)]
        for name in local if named is not None else ():
            check_part(self.replicas[name], parts)
        states = {name: {k: t for k, t in self.shared_state(name).items() if k.startswith(parts)} for name in local}
        payloads = {name: self.shared.to_average(name, state) for name, state in states.items()}
        around = {name: self.shared.to_average(name, state) for name, state in self.shared.received.items()}
        self.load_shared_(federation.mean(channel, payloads, among, to, self.mean_weights, around, absent_too))

    @property
    def mean_weights(self) -> Mapping[str, float] | None:
        """Weights of clients in a mean, by name, according to ``weighting``; ``None`` where all count alike."""
        if self.weighting == "uniform":
            return None
        sizes = self.federation.weights
        return sizes if self.weighting == "samples" else {name: math.sqrt(size) for name, size in sizes.items()}

    def shared_state(self, client: str, frozen_too: bool = False) -> dict[str, Tensor]:
        """Weights of a local client that leave it, by name: see `SharedWeights`.

        Args:
            client: Its name.
            frozen_too: Whether frozen ones are among them, which everybody has from the start.
        """
        return self.shared.of(client, frozen_too)

    def received_part(self, part: str) -> dict[str, dict[str, Tensor]]:
        """What local clients last received of one of their parts: what a mechanism clips messages about it around.

        Args:
            part: Name of a sub-module of the replicas, such as ``"classifier"``.
        """
        return {client: part_of(state, part) for client, state in self.shared.received.items()}

    def load_shared_(self, received: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write received weights into local replicas: ``{client: {name: tensor}}``."""
        self.shared.write_(received)

    def fetch_warmup_(self, round_idx: int) -> None:
        """In the first round after a warm-up, let clients that were away at its end fetch its result."""
        if self.warmup_rounds and round_idx == self.warmup_rounds:
            self.load_shared_(self.federation.catch_up("weights", absent_too=True))

    def labelled_samples(self, clients: Sequence[Client]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """All labelled training samples of local clients, once and always in one order: see `labelled_samples`."""
        return labelled_samples(self, clients)

    def training_inputs(self, client: Client) -> Iterator[Tensor]:
        """Inputs of all training samples of a local client, with labels or not, in batches.

        They are in the order of its dataset: `batch_positions` finds the samples of a local step among them.

        Args:
            client: Hosted here.
        """
        return training_inputs(self, client)

    def batch_positions(self, client: Client) -> Tensor:
        """Where the samples of a local client's batch in this local step are in its dataset, int64, shape (batch,).

        Args:
            client: Hosted here.
        """
        return batch_positions(self, client)

    def log_everywhere(self, metrics: Mapping[str, float]) -> None:
        """Log numbers that are equal on all processes, in whatever hook."""
        log_everywhere(self.trainer, self, metrics)

    # ---------------------------------------------------------------- Lightning's hooks

    def configure_model(self) -> None:
        """Build the replicas of local clients, all from the same random state, and keep nobody else's."""
        if not len(self.replicas):
            build(self)
            forget_compiled_(self.replicas)
        for client in self.clients:
            if client.name in self.replicas and not self.federation.is_local(client):
                del self.replicas[client.name]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Weights of local clients' replicas, which are built first, by ``replicas.CLIENT.NAME``."""
        self.configure_model()
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load `state_dict` of this process or of one that hosts more clients; replicas are built first.

        A checkpoint file has clients' weights elsewhere: see `load_from_checkpoint`.

        Raises:
            RosterError: If there are no weights of clients in it, or ``strict`` and a local client's are missing.
            ValueError: If it is another part of a checkpoint.
        """
        self.configure_model()
        return super().load_state_dict(checkpoints.local_part(self, state_dict, strict), strict, assign)

    def configure_callbacks(self) -> list[pl.Callback]:
        """Run rounds, and evaluate; refuse a Trainer that does not go with them."""
        if self._trainer is not None:
            check_trainer(self.trainer)
        attached = [] if self._trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        return [kind() for kind in (Rounds, Evaluation) if not any(isinstance(each, kind) for each in attached)]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimiser over all local clients, and a schedule per client."""
        return with_schedules(self.make_optimizer(), self.lr_scheduler, self.schedule_interval)

    def on_fit_start(self) -> None:
        """Refuse data that the method cannot train on, forget what a previous run left, and stack the replicas."""
        if self.needs_target_labels and not self.target.labelled:
            raise RosterError(
                f"{type(self).__name__} trains on target labels, but target {self.target.name!r} has none: give the "
                "data module target_labels (a number of samples, or a share such as 1.0)"
            )
        federation, self.target_temperature = self.federation, 1.0
        channels = federation.channels
        self.shared.start_(
            federation.local_clients,
            remembers=bool(channels.mechanisms),
            sends="weights" in channels,
            blurs="weights" in channels and channels["weights"].mechanism is not None,
        )
        self.record.start_run_()
        own_loss = type(self).loss is not FederatedModule.loss or type(self).losses is not FederatedModule.losses
        self._stacked = stack(self, own_loss) if self.vectorize else None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One local step of every client in ``batch``: the sum of their losses.

        Each client's parameters only meet the gradient of its own loss, so this is exactly independent training.
        """
        if not self.target.labelled:  # the loader has seen to it, unless it is not fedlit's
            batch = guard(batch, self.target.name, keep=False)
        batch = {name: self.task.standardised(name, samples) for name, samples in batch.items()}
        self._target_batch = batch.get(self.target.name)
        learners = {client.name for client in self.present_learners()}
        compute = FederatedModule.losses if self.warming_up else type(self).losses
        with self.federation.stepping():
            losses = compute(self, {name: samples for name, samples in batch.items() if name in learners})
        # A step in which no local client trains must still have a graph: never None with several processes.
        if not losses:
            return torch.zeros((), device=self.device, requires_grad=True)
        loss = self.record.add_(losses)
        if self.automatic_optimization and torch.is_grad_enabled() and not loss.requires_grad:
            raise NotTrainedError(
                f"the losses of {list(losses)} depend on no weight that is trained: all are frozen (requires_grad), or "
                "outputs are detached; leave something to train, or take a method that trains nothing by gradients"
            )
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take a step; a target without labels that has a trust region keeps within its share of that."""
        limited = self.trust_region is not None and not self.warming_up and not self.target.labelled
        if self.trust_region is None or not limited or not self.federation.is_local(self.target):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        extractor = cast(nn.Module, self.replicas[self.target].extractor)
        before = copy_weights(extractor)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self._target_batch is not None:
            with self.trainer.precision_plugin.forward_context():
                hold_back_(extractor, before, self._target_batch[0], limit_now(self, self.trust_region))
            self.held_back |= any(param.grad is not None for param in extractor.parameters())

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the target, shape (batch, num_classes): logits, or numbers in the labels' unit, float64."""
        return self.task.in_unit(self.target.name, self.replicas[self.target](inputs))

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Outputs of local clients on their own samples, by name, as of `forward`; no label of the target is read."""
        names = [client.name for client in self.clients if client.name in batch and self.can_predict(client)]
        return {name: self.task.in_unit(name, self.replicas[name](batch[name][0])) for name in names}

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Class probabilities, or numbers, of each client in ``batch``, by name, of shape (batch, num_classes)."""
        temperatures = {self.target.name: self.target_temperature}
        outputs = {name: self.task.in_unit(name, self.replicas[name](samples[0])) for name, samples in batch.items()}
        return {name: self.task.predictions(each, temperatures.get(name, 1.0)) for name, each in outputs.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put each client's state under its name in ``checkpoint["clients"]``; all else is equal on all processes.

        A method adds what it keeps by client there, after it has called this.
        """
        checkpoints.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped; for validation and testing, only the weights are of interest.

        Raises:
            RosterError: If it belongs to another roster or method, or is too old to go on from.
        """
        if "federation" in checkpoint:
            checkpoints.load(self, checkpoint)
