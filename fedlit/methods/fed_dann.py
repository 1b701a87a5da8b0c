"""Domain-adversarial training over several sources: FedDANN (Ganin et al., JMLR 2016, section 4.2), FADE and CDAN.

FADE (Hong et al., KDD 2021) averages discriminators; CDAN is of Long et al., NeurIPS 2018. `DomainAdversarial` is what
FedDANN and FedWDGRL share: a network D that compares domains, whose loss is a sum of parts, each of one client's
features, so that its gradient is one secure sum: D learns from pooled data that nobody pools.

Differences from the papers:

- Ganin et al. have one source and no federation. Here all sources together weigh as much as the target, and every
  client has its extractor within a round.
- FADE averages discriminators that local steps have driven to their client's one domain: such means distinguish little.
  That is ``sync="round"``, with weights by which one plain step is the central one.
- CDAN's map of predictions and features is their full outer product; for wide features the paper has a random one.

Differences from FADE's published code: it multiplies models by two sets of weights at once, which shrinks their sum;
its CDAN weights multiply a loss that is averaged already, and cancel; it starts the discriminator anew whenever its
loss passes 10; one client trains per round; the round is chosen by test accuracy of the target.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from fedlit import ReplicaSpec, Requires, Run
from fedlit.checks import check_at_least, check_count, check_one_of, check_positive, refuse
from fedlit.federation import Channel, Client, Summed
from fedlit.functional import domain_loss, entropy_weights, loss_from_gradient, multilinear_map
from fedlit.functional import reversal_weight as scheduled
from fedlit.methods.fedavg import FedAvg
from fedlit.methods.shared import divided
from fedlit.models import AdversarialReplica, feature_width, make_discriminator
from fedlit.models.copies import copied
from fedlit.module import Batch
from fedlit.run.param_groups import check_ratio
from fedlit.run.replicas import Replicas
from fedlit.run.tasks import Classification


class DomainAdversarial(FedAvg, ABC):
    """FedAvg, and the D that clients train in local steps against their extractors; a subclass defines the losses.

    Args:
        hidden: Units of D's hidden layer.
        sync: ``"step"`` sums gradients of D in local steps; ``"round"`` averages, at the round's end, the D's of
            clients, each of which sees one domain, so that their mean distinguishes little.
        average: Whose extractors and classifiers are averaged: ``"all"``, or those with labels (``"sources"``), so that
            the target's extractor teaches D alone, and without an adversary it is `FedAvg`.
        kwargs: See `FederatedModule`.
    """

    replicas: Replicas[AdversarialReplica]
    requires: ClassVar[Requires] = Requires(unlabelled_target=True, matches_distributions=True)

    gradient_channel: ClassVar[str]
    """Over which D's gradients are summed."""

    model_channel: ClassVar[str]
    """Over which D itself is averaged."""

    def __init__(
        self,
        *args: Any,
        hidden: int,
        sync: Literal["step", "round"] = "step",
        average: Literal["all", "sources"] = "all",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_count("hidden", hidden, 1, "unit")
        check_one_of("sync", sync, ("step", "round"))
        check_one_of("average", average, ("all", "sources"))
        self.hidden = hidden
        self.sync = sync
        self.average = average

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The weights, and what D is made of."""
        gradient = Summed(
            self.gradient_channel, "gradient by D's weights", how_often="every local step", too_few="skip"
        )
        model = Summed(self.model_channel, "D's weights", too_few="skip")
        return (*super().channels, *((gradient,) if self.sync == "step" else ()), model)

    def build_replica(self) -> AdversarialReplica:
        """Extractor, classifier and D."""
        networks = copied(self.originals)
        return AdversarialReplica(*networks, make_discriminator(self.judged_width(), self.hidden))

    def judged_width(self) -> int:
        """Width of what D is shown; default: of the features."""
        return feature_width(self.originals[0])

    def client_param_groups(self) -> list[dict[str, Any]]:
        """Two per local client: of the network that predicts, and of D, unless it has a rate of its own."""
        groups = divided(super().client_param_groups(), lambda client: self.replicas[client].discriminator)
        return groups[::2] if "discriminator" in self.replica_spec.own_rates else groups

    # ---------------------------------------------------------------- a local step

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Each client's loss on its labels, and against D."""
        losses, features, outputs = {}, {}, {}
        for client, samples in self.run.in_streams(batch):
            replica, name = self.replicas[client], client.name
            own = replica.extractor(samples[0])
            features[name] = own if own.requires_grad else own.clone().requires_grad_()  # of a frozen extractor
            outputs[name] = replica.classifier(features[name])
            nothing = 0 * outputs[name].sum()
            losses[name] = self.task.loss(client, outputs[name], samples[1]) if client.labelled else nothing
        opponents = self.opponents()
        if opponents:
            for name, loss in self.adversarial_losses(opponents, features, outputs).items():
                losses[name] = losses[name] + loss
        return losses

    @abstractmethod
    def adversarial_losses(
        self, opponents: Sequence[Client], features: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return what is added to the losses of local opponents, by name; all processes call it.

        Features and outputs are of local clients' batches, of shapes (B, width) and (B, num_classes).
        """

    def opponents(self, step: int | None = None) -> list[Client]:
        """Return whose domains D compares in a ``step`` of the round, by default the current one.

        Nobody if a side is missing, or too few are there to hide.
        """
        first = self.gradient_channel if self.sync == "step" else self.model_channel
        able = self.run.in_step(first, self.model_channel, step=step)
        summed = self.federation.senders(first, able)
        met = [client for client in able if client.name in summed]
        return met if self.target in met and len(met) > 1 else []

    def pooled(self, gradients: Mapping[str, Tensor], opponents: Sequence[Client]) -> dict[str, Tensor]:
        """Return by what local clients change D: the sum of all parts' gradients in their shares, or each its gradient.

        Gradients are by name of a local client, of the client's part by all of D's weights, shape (number of weights,).
        """
        if self.sync == "round":
            return {**gradients}
        shares = domain_shares(opponents)
        parts = {name: {"gradient": shares[name] * own} for name, own in gradients.items()}
        total = self.federation.sum(self.gradient_channel, parts, among=opponents, to=opponents)
        return {name: message["gradient"] for name, message in total.items()}

    # ---------------------------------------------------------------- rounds

    def on_round_start(self, run: Run) -> None:
        """Clients that were away fetch the current networks."""
        super().on_round_start(run)
        self.run.weights.catch_up(self.model_channel)

    def on_round_end(self, run: Run) -> None:
        """Average extractors and classifiers, and the D's of those who met in the last step in which anybody did.

        With ``sync="step"`` these are equal, and their mean is for the others.
        """
        among = [client for client in self.clients if client.labelled or self.average == "all"]
        self.run.weights.average_("weights", among, part=("extractor", "classifier"))
        federation = self.federation
        met = next(filter(None, map(self.opponents, reversed(range(federation.batch_idx)))), [])
        sent = {
            client.name: {k: t for k, t in self.run.weights.of(client.name).items() if k.startswith("discriminator.")}
            for client in met
            if federation.is_local(client)
        }
        if met:
            shares, around = domain_shares(met), self.run.weights.received
            self.run.weights.load_(federation.mean(self.model_channel, sent, met, weights=shares, around=around))

    def on_fit_start(self) -> None:
        """Warn where a sum of two hides nothing from the two, and of discriminators of one domain each."""
        super().on_fit_start()
        if self.sync == "round":
            rank_zero_warn(
                f"{type(self).__name__} with sync='round' averages discriminators that each client trains on its one "
                "domain. Such a mean distinguishes domains badly, and may take the target's features anywhere: its "
                "target has ended up to 18 points below SourceOnly, with standardised inputs. Take sync='step' "
                "(FedDANN), whose discriminator is that of all domains' samples, or compare with SourceOnly"
            )
        if self.sync == "step" and len(self.sources) == 1 and self.federation.channels[self.gradient_channel].hides:
            warnings.warn(
                f"gradients over {self.gradient_channel!r} are summed over {self.sources[0].name!r} and the target "
                "alone: each learns the other's by subtracting its own, and they are hidden from the server only",
                stacklevel=2,
            )


def domain_shares(opponents: Sequence[Client]) -> dict[str, float]:
    """Weights of clients' parts in D's loss: 1/(2K) of each of K sources, 1/2 of the target."""
    return {client.name: 0.5 if client.is_target else 0.5 / (len(opponents) - 1) for client in opponents}


class FedDANN(DomainAdversarial):
    r"""FedAvg against a discriminator D of domains (Ganin et al., JMLR 2016, section 4.2).

    .. math:: L_D = \frac12 \Big[ \frac1K \sum_k \mathbb E_k[-\log D(f)] + \mathbb E_T[-\log(1 - D(f))] \Big]

    D lowers it and extractors raise it with weight lambda. It is a sum of parts that need a single client's features
    each, and so is its gradient by D's weights: a secure sum in every local step trains the D of pooled data. Parts
    weigh in extractors as the uniform mean over K sources and the target undoes it: with one plain step in a round and
    ``weighting="uniform"``, a round is a step of centralised training, at K / (K + 1) times the learning rate.
    With ``conditional`` it is CDAN (Long et al., NeurIPS 2018).

    Args:
        hidden: Units of D's hidden layer.
        reversal_weight: lambda, at least 0.
        schedule_rounds: Rounds after the warm-up in which lambda grows from 0, as `fedlit.functional.reversal_weight`
            has it: a number; ``"planned"``, all rounds of the run (constant if it has no planned end; a resumed run
            goes by the rounds that are planned then); or ``None``, constant.
        conditional: Show D the outer product of class probabilities and features, with samples weighted by how certain
            their predictions are (CDAN).
        squared: Take half the square of each client's part, so that clients with a large one weigh more (FADE).
        discriminator_lr_ratio: D's learning rate in units of the other networks', positive; 10 beside a pretrained
            extractor. Schedules that scale rates keep it.
        kwargs: ``sync`` and ``average`` of `DomainAdversarial`, and those of `FederatedModule`.

    Notes:
        Everybody learns the sum of D's gradients in each step, over present clients that have a batch. With one source
        each side finds the other's by subtraction. A single client's, which is read where no backend hides it, reveals
        the features of a batch of one sample up to a factor.

        Steps without the target or without a source, or with fewer than the backend can hide, pass without a domain
        loss. Clients that run out of samples miss D's last steps of a round and receive it at its end; with momentum or
        Adam, their optimiser states, and so within a round their D's, differ a little from then on.
    """

    requires: ClassVar[Requires] = replace(DomainAdversarial.requires, adaptation_weight="reversal_weight")
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(several_models=True)
    gradient_channel: ClassVar[str] = "discriminator_gradient"
    model_channel: ClassVar[str] = "discriminator"

    def __init__(
        self,
        *args: Any,
        hidden: int = 64,
        reversal_weight: float = 1.0,
        schedule_rounds: int | Literal["planned"] | None = "planned",
        conditional: bool = False,
        squared: bool = False,
        discriminator_lr_ratio: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, hidden=hidden, **kwargs)
        check_at_least("reversal_weight (lambda)", reversal_weight, 0)
        if schedule_rounds not in (None, "planned") and not (isinstance(schedule_rounds, int) and schedule_rounds > 0):
            refuse("schedule_rounds", "at least 1 round, 'planned' or null (constant)", schedule_rounds)
        if conditional and not isinstance(self.task, Classification):
            refuse("conditional", "False without task='classification', as it shows D class probabilities", conditional)
        check_positive("discriminator_lr_ratio", discriminator_lr_ratio)
        self.reversal_weight = reversal_weight
        self.schedule_rounds = schedule_rounds
        self.conditional = conditional
        self.squared = squared
        check_ratio(self.run.local.param_groups, "discriminator_lr_ratio", discriminator_lr_ratio, part="discriminator")
        self.discriminator_lr_ratio = discriminator_lr_ratio

    def judged_width(self) -> int:
        """Width of the features, or of their outer product with class probabilities."""
        return super().judged_width() * (self.num_classes if self.conditional else 1)

    def adversarial_losses(
        self, opponents: Sequence[Client], features: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Losses by which extractors raise the domain loss in one step, and D's lower it."""
        losses, gradients = {}, {}
        # times K, as the mean over clients at the round's end divides a single client's step
        shares, reversal = domain_shares(opponents), self.reversal() * (len(opponents) - 1)
        for client in (each for each in opponents if each.name in features):
            name, own = client.name, features[client.name]
            part = self.part_of_domain_loss(client, own, outputs[name])
            weights = self.replicas[client].discriminator.parameters()
            by_features, *by_weights = torch.autograd.grad(part, [own, *weights])
            losses[name] = loss_from_gradient(own, -reversal * shares[name] * by_features, part.detach())
            gradients[name] = parameters_to_vector(by_weights)
        for name, gradient in self.pooled(gradients, opponents).items():
            weights = self.replicas[name].discriminator.parameters()
            losses[name] = losses[name] + loss_from_gradient(parameters_to_vector(weights), gradient)
        return losses

    def part_of_domain_loss(self, client: Client, features: Tensor, outputs: Tensor) -> Tensor:
        """One client's part of L_D, not weighted, a scalar; from features (B, width) and outputs (B, num_classes)."""
        weights = None
        if self.conditional:
            probabilities = outputs.detach().softmax(dim=1)
            features, weights = multilinear_map(features, probabilities), entropy_weights(probabilities)
        part = domain_loss(self.replicas[client].discriminator(features), not client.is_target, weights)
        return part.square() / 2 if self.squared else part

    def reversal(self) -> float:
        """Lambda in this round."""
        rounds = self.run.clock.planned_rounds() if isinstance(self.schedule_rounds, str) else self.schedule_rounds
        if rounds is None:
            return self.reversal_weight
        return self.reversal_weight * scheduled(self.run.clock.share_over(rounds))

    def make_optimizer(self) -> Optimizer:
        """As configured, with D's learning rate scaled."""
        optimizer = super().make_optimizer()
        replicas = [self.replicas[client] for client in self.federation.local_clients]
        scaled = {id(param) for replica in replicas for param in replica.discriminator.parameters()}
        for group in optimizer.param_groups:
            if any(id(param) in scaled for param in group["params"]):
                group["lr"] = group["lr"] * self.discriminator_lr_ratio
        return optimizer


class FADE(FedDANN):
    """`FedDANN` with averaged discriminators and squared losses (Hong et al., KDD 2021).

    Args:
        sync: See `DomainAdversarial`.
        squared: See `FedDANN`.
        kwargs: Further ones of `FedDANN`.
    """

    def __init__(
        self, *args: Any, sync: Literal["step", "round"] = "round", squared: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, sync=sync, squared=squared, **kwargs)
