"""FederatedModule, the base of all methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlit.checks import check, refuse
from fedlit.federation import Client, Federation, NotTrainedError, RosterError
from fedlit.federation.client import make_roster
from fedlit.federation.labels import TaskName, guard
from fedlit.federation.ledger import SERVER
from fedlit.models import Replica, make_classifier
from fedlit.models.copies import check_copyable, check_tied, copied, forget_compiled_
from fedlit.models.recomputed import recompute_
from fedlit.run import checkpoint as checkpoints
from fedlit.run.component import Phase
from fedlit.run.evaluation import Evaluation
from fedlit.run.local import build
from fedlit.run.loop import Rounds
from fedlit.run.optimisation import ClientOptimisation, default_optimizer, with_schedules
from fedlit.run.options import LocalTraining
from fedlit.run.param_groups import check_parts, make
from fedlit.run.refinement import Refinement
from fedlit.run.replicas import Replicas
from fedlit.run.run import Run
from fedlit.run.tasks import Task, make_task
from fedlit.run.trainer_checks import check_trainer
from fedlit.run.trust_region import TrustRegion
from fedlit.run.turns import independent
from fedlit.run.vectorisation import stack
from fedlit.run.warmup import WarmUp
from fedlit.run.weights import Averaging, Weighting

Batch: TypeAlias = Mapping[str, Sequence[Any]]
"""``{client: (inputs, labels)}`` of local clients; those that sit out a step are missing."""


class FederatedModule(ClientOptimisation, Phase):
    """Base of all methods: supervised local training, and the hooks in which a method communicates.

    A method defines who trains (`learners`), on what loss (`loss`), and what is exchanged when a round starts
    (`on_round_start`) and ends (`on_round_end`). It is the last `Phase` of its run, after a `WarmUp`; it reads
    ``self.run`` and never asks which process it is on.

    Metrics, equal on all processes: ``source/NAME/loss`` and ``target/loss`` (training loss, mean over the round),
    ``train/loss`` (their mean over clients), ``.../grad_norm`` (before clipping, where gradients are clipped),
    ``source/NAME/acc`` and ``source/acc`` (validation accuracy of each source's replica, and their mean),
    ``target/score`` (label-free, of rounds and settings of one method: mutual information between the target's inputs
    and predicted classes, in [0, 1]). In regression ``r2`` (share of variance explained, at most 1), ``rmse`` and
    ``mae`` (root mean squared and mean absolute error, in the labels' unit) replace ``acc``; of several numbers they
    are means over these, and ``source/NAME/rmse/NUMBER`` is that of one. There is no score, training losses are of
    standardised labels (``scale_labels``), and ``source/NAME/eval_loss`` is the mean squared error in the labels' unit.

    Args:
        clients: The roster, at least two names or `Client` objects.
        target: Name of the client adapted to.
        num_classes: Number of classes; in regression, of numbers to predict.
        extractor: Network from inputs to features; each client gets a copy with the same initial weights.
        classifier: Network from features to logits, or in regression to numbers; ``None`` is a linear layer on
            ``extractor.out_features``.
        task: ``"classification"`` (cross-entropy) or ``"regression"`` (mean squared error).
        scale_labels: In regression, train on labels less their mean and over their deviation, of the sources' training
            labels and the target's if it trains on them; the channel "label_statistics" sums both when a run starts,
            and checkpoints keep them. Predictions are in the labels' unit. ``False`` sends nothing.
        class_weights: Factors of losses by class, ``num_classes`` numbers; or ``"balanced"``: each client weighs by its
            labelled training samples, so that all its classes count alike, and sends no counts.
        optimizer: Makes the optimiser from parameter groups.
        param_groups: Settings of the optimiser for a client, a part of its networks or both: ``[{"part": "classifier",
            "lr": 0.1}, {"client": "webcam", "weight_decay": 0.0}]``; a part is a module of the replicas, such as
            ``"extractor"``, or one within it. Later entries override earlier ones. Schedules scale these rates.
        reset_optimizer: Clear momenta and other optimiser state when a round starts; learning-rate schedules go on.
            ``False`` keeps each client's state. Matters with Adam, whose first steps are as long as its learning rate.
        lr_scheduler: Makes a learning-rate schedule from an optimiser; each client has a separate one.
        schedule_interval: Unit that advances a client's schedule: the ``"round"`` s or ``"step"`` s it took part in.
        weighting: Weights of clients in a mean: by number of training ``"samples"``; by its square root (``"sqrt"``),
            so that small ones count beside large ones; or ``"uniform"``.
        local_norm: Keep normalisation layers local, parameters and statistics (FedBN, Li et al., ICLR 2021).
        batchnorm_average: How clients' BatchNorm statistics are averaged: the mean of ``"variances"`` lacks the spread
            of the clients' means; that of second ``"moments"`` is the variance of all data, and a fixed-point grid then
            bounds var + mean^2.
        warmup_rounds: Rounds of FedAvg over the sources before the method; below 1 a share of the planned rounds,
            raised to 100 local steps of the largest source within three quarters of the rounds. As an attribute, a
            share is 1 until a run is planned.
        refine: When the run ends, correct the target's predictions by neighbouring samples and class shares, and fit a
            linear classifier to them. It is kept unless, on the sources' samples, it gets less than seven tenths of the
            accuracy of a classifier of the uncorrected classes; the sources learn both classifiers (of classes, not
            probabilities), the target both accuracies. ``refine/taken`` is logged. ``"network"`` trains the target's
            network below the classifier first (SHOT; 15 passes): for networks trained from random weights above all.
        trust_region: How far a target that trains without labels may move its features in all steps after the warm-up,
            in units of their spread, positive; longer steps are shortened, and shares fall over the planned rounds.
            Takes two more passes through the extractor in each of the target's steps. ``None`` is no limit.
        vectorize: Train all local clients in one vectorised call; pays for many clients with tiny equal networks. Equal
            to training one by one within float tolerance; with dropout, the numbers drawn depend on placement. Shorter
            batches are padded, so that networks in which samples of a batch meet (BatchNorm) are refused then.
        recompute: Run extractors a second time in the backward pass, in place of keeping their activations of all
            clients until then: less memory for a third more time, and the same weights to the last bit. For methods
            that exchange in a local step; others keep the activations of one client at a time. Extractors
            may draw from default generators and those that are attributes of a layer; one whose second output differs
            otherwise is an error, as is one that changes its inputs in place.

    Raises:
        RosterError: If the clients make no federation.
        ValueError: If an argument is out of range, or the extractor does not state its ``out_features``.
    """

    alternative_names: ClassVar[tuple[str, ...]] = ()
    """Names of all that `alternatives` may return."""

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
        recompute: bool = False,
    ) -> None:
        super().__init__()
        name, requires, spec = type(self).__name__, type(self).requires, type(self).replica_spec
        check(task in (*requires.tasks, "classification"), "task", f"one of {list(requires.tasks)} with {name}", task)
        check(
            class_weights is None or requires.class_weights,
            "class_weights",
            f"left out, as they would do nothing in the loss of {name}",
            class_weights,
        )
        if class_weights is not None and vectorize:
            refuse("vectorize", "False beside class_weights, which its built-in loss lacks", vectorize)
        if recompute and vectorize:
            refuse("recompute", "False beside vectorize, which is for tiny networks", recompute)
        if refine and task != "classification":
            refuse("refine", f"False with task={task!r}, which has no class probabilities to refine", refine)
        self.task: Task = self._make_task(task, num_classes, class_weights)
        self.clients = make_roster(clients, target)
        self.target = next(client for client in self.clients if client.is_target)
        self.num_classes = num_classes
        for part, network in (("extractor", extractor), ("classifier", classifier)):
            if isinstance(network, nn.Module):
                check_copyable(part, network)
        # In a tuple, so that the originals are not registered: only clients' copies belong in the checkpoint.
        self.originals = (extractor, make_classifier(extractor, num_classes) if classifier is None else classifier)
        check_tied(*self.originals, "refine fits a classifier by itself" if refine else spec.apart, spec.local)
        local = LocalTraining(
            optimizer, param_groups, reset_optimizer, lr_scheduler, schedule_interval, vectorize, recompute
        )
        local.check([client.name for client in self.clients], spec.own_rates, name)
        self.replicas = Replicas()
        self.save_hyperparameters(
            ignore=["clients", "extractor", "classifier", "optimizer", "lr_scheduler", "module", "encoder"],
            logger=False,
        )
        self.save_hyperparameters({"clients": [client.name for client in self.clients]}, logger=False)
        self.run = Run(self, local, Averaging(weighting, local_norm, batchnorm_average), warmup_rounds)
        self.run.outputs.scales_labels = scale_labels
        readers = (type(self).label_loss, type(self).loss, type(self).losses, type(self).training_step)
        self.run.own_labels = any(not str(each.__module__).startswith("fedlit.") for each in readers)
        refinement = Refinement(refine, self.can_predict)
        self.run.parts[1:1] = [refinement] if refine else []
        if trust_region is not None:
            self.run.trust_region = TrustRegion(trust_region, self.run)
            self.run.parts.append(self.run.trust_region)

    def _make_task(self, name: TaskName, num_classes: int, class_weights: Any) -> Task:
        """Return the task that clients are trained for and evaluated by."""
        return make_task(name, num_classes, class_weights)

    # ---------------------------------------------------------------- what a method overrides

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of a run, in order; default: a warm-up, and the method itself for all other rounds."""
        return WarmUp(self.run, self.label_loss), self

    def build_replica(self) -> nn.Module:
        """Return the modules of one client; called once per client, each time from the same random state."""
        return Replica(*copied(self.originals))

    def build_target(self, replica: Any) -> nn.Module:
        """Return the target's modules, made from those of `build_replica`; default: the same."""
        same: nn.Module = replica
        return same

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return the clients that take local steps in a round, as far as present.

        Default: all with labels, and the target if `Requires` declares that it trains on unlabelled samples.
        """
        return self.clients if self.requires.unlabelled_target else self.run.labelled

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return the loss of one client on its batch, a scalar; default: `label_loss`.

        In regression its labels are standardised, as outputs of networks are.
        """
        return self.label_loss(client, batch)

    def label_loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return the loss of a warm-up, a scalar; default: the task's on the client's labelled samples."""
        return self.task.loss(client, self.replicas[client](batch[0]), batch[1])

    @independent
    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Return the losses of local clients in this step, by name; override it to exchange in every local step."""
        return self.run.local_losses(self.loss, batch)

    def can_predict(self, client: Client) -> bool:
        """Return whether a local client has something to predict with yet; its evaluation waits until then."""
        return True

    def alternatives(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return other predictions of the target for a batch of its inputs, logits by name, which are scored too."""
        return {}

    def client_param_groups(self) -> list[dict[str, Any]]:
        """Return one parameter group per local client, with its name under ``"client"``.

        Clipping, schedules and checkpoints use that key; a method with several optimisers gives each of them such
        groups.
        """
        groups: list[dict[str, Any]] = []
        for client in self.federation.local_clients:
            params = [param for param in self.replicas[client].parameters() if param.requires_grad]
            groups.append({"params": params, "client": client.name})
        return groups

    def make_optimizer(self) -> Optimizer:
        """Return one optimiser over all local clients."""
        # torch makes no optimiser of nothing, which is what a process of the server alone trains
        nothing = {"params": [nn.Parameter(torch.zeros(()))], "client": SERVER}
        groups = self.client_param_groups()
        check_parts(self.run, groups)
        return make(self.run, groups) if groups else self.run.optimizer([nothing])

    # ---------------------------------------------------------------- what a method uses

    @property
    def federation(self) -> Federation:
        """The strategy's federation; under any other strategy, one of this process with the plain backend."""
        return self.run.federation

    @property
    def sources(self) -> tuple[Client, ...]:
        """Labelled clients other than the target, in roster order."""
        return self.run.sources

    @property
    def warmup_rounds(self) -> int:
        """Rounds of the warm-up; a share of the planned rounds is 1 until a run is planned."""
        return self.run.clock.warmup_rounds

    # ---------------------------------------------------------------- Lightning's hooks

    def configure_model(self) -> None:
        """Build the replicas of local clients, all from the same random state, and delete others."""
        if not len(self.replicas):
            build(self.run)
            forget_compiled_(self.replicas)
            for replica in self.replicas.children() if self.run.local.recompute else ():
                recompute_(replica)
        for client in self.clients:
            if client.name in self.replicas and not self.federation.is_local(client):
                del self.replicas[client.name]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return weights of local clients' replicas by ``replicas.CLIENT.NAME``; replicas are built first."""
        self.configure_model()
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load `state_dict` of this process or of one with more clients; `load_from_checkpoint` reads checkpoint files.

        Raises:
            RosterError: If there are no weights of clients in it, or ``strict`` and a local client's are missing.
            ValueError: If it is another part of a checkpoint.
        """
        self.configure_model()
        state = checkpoints.local_part(self.run, state_dict, strict)
        return checkpoints.load_by_client(self, state, strict, assign)

    def configure_callbacks(self) -> list[pl.Callback]:
        """Attach the callbacks that run rounds and evaluate; refuse a Trainer that does not go with them."""
        if self._trainer is not None:
            check_trainer(self.trainer)
        attached = [] if self._trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        return [kind() for kind in (Rounds, Evaluation) if not any(isinstance(each, kind) for each in attached)]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return one optimiser over all local clients, and a schedule per client."""
        return with_schedules(self.make_optimizer(), self.run.local.lr_scheduler, self.run.local.schedule_interval)

    def on_fit_start(self) -> None:
        """Refuse data that the method cannot train on, and stack the replicas."""
        if self.requires.target_labels and not self.target.labelled:
            raise RosterError(
                f"{type(self).__name__} trains on target labels, but target {self.target.name!r} has none: give the "
                "data module target_labels (a number of samples, or a share such as 1.0)"
            )
        run = self.run
        if self.target.labelled and self.requires.ignores_target_labels:
            rank_zero_warn(
                f"{run.name} makes nothing of the labels that target {self.target.name!r} has: leave out target_labels "
                "of the data, or take a method that trains on them, such as FedAvg or FedDA"
            )
        if run.offload is not None:
            for client in self.federation.local_clients:
                run.offload.keep_weights_(client.name, self.replicas[client])  # in whatever precision they are now
        run.turns.start_()
        run.weights.start_()
        run.record.start_run_()
        own_loss = type(self).loss is not FederatedModule.loss or type(self).losses is not FederatedModule.losses
        run.stacked = stack(run, own_loss) if run.local.vectorize else None

    @independent
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Take one local step of every client in ``batch``, or of the one whose turn it is: return the sum of losses.

        Each client's parameters only meet the gradient of its loss, so this is exactly independent training.
        """
        run = self.run
        batch = run.turns.own(batch)
        if not self.target.labelled:  # the loader has seen to it, unless it is not fedlit's
            batch = guard(batch, self.target.name, keep=False)
        batch = {name: self.task.standardised(name, samples) for name, samples in batch.items()}
        if run.trust_region is not None:
            run.trust_region.see(batch.get(self.target.name))
        learners = {client.name for client in run.present_learners()}
        with self.federation.stepping():
            losses = run.phase().losses({name: samples for name, samples in batch.items() if name in learners})
        loss = run.record.add_(losses, goes_on=not run.turns.is_first)
        # A step in which no local client trains must still have a graph: never None with several processes.
        others_train = run.turns.client is not None and (not run.turns.is_last or run.record.trains)
        if not losses or (others_train and not loss.requires_grad):
            return loss.detach().to(self.device) + torch.zeros((), device=self.device, requires_grad=True)
        if self.automatic_optimization and torch.is_grad_enabled() and not loss.requires_grad:
            raise NotTrainedError(
                f"the losses of {list(losses)} depend on no weight that is trained: all are frozen (requires_grad), or "
                "outputs are detached; leave something to train, or take a method that trains nothing by gradients"
            )
        return loss

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the target's outputs, shape (batch, num_classes): logits, or numbers in the labels' unit, float64."""
        return self.task.in_unit(self.target.name, self.replicas[self.target](inputs))

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return local clients' outputs on their samples, by name, as of `forward`; no label of the target is read."""
        names = [client.name for client in self.clients if client.name in batch and self.can_predict(client)]
        outputs: dict[str, Tensor] = {}
        for name in names:
            outputs[name] = self.task.in_unit(name, self.replicas[name](batch[name][0]))
            self.run.release(name)
        return outputs

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return class probabilities, or numbers, by client in ``batch``, of shape (batch, num_classes)."""
        temperatures = {self.target.name: self.run.outputs.temperature}
        outputs = {name: self.task.in_unit(name, self.replicas[name](samples[0])) for name, samples in batch.items()}
        return {name: self.task.predictions(each, temperatures.get(name, 1.0)) for name, each in outputs.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put each client's state under its name in ``checkpoint["clients"]``; all else is equal on all processes."""
        checkpoints.save(self.run, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint; for validation and testing, only its weights matter.

        Raises:
            RosterError: If it belongs to another roster or method, or training cannot go on from it.
        """
        if "federation" in checkpoint:
            checkpoints.load(self.run, checkpoint)
