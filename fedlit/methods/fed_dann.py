"""FedDANN (f-DANN): domain-adversarial training (Ganin et al., JMLR 2016, equation 9) over several sources.

With FADE (Hong et al., KDD 2021, Algorithm 1), which averages discriminators, and CDAN (Long et al., NeurIPS 2018).

Differences from the papers:

- Ganin et al. have one source and no federation. Here all sources together weigh as much as the target, and every
  client has an extractor of its own within a round. The discriminator is the central one: its gradient is a secure sum.
- FADE averages discriminators that local steps have driven to their client's one domain: such means tell little apart.
  That is ``sync="round"``, with weights by which one plain step is the central one.
- CDAN's map of predictions and features is their full outer product; for wide features the paper has a random one.

Differences from FADE's published code: it multiplies models by two sets of weights at once, which shrinks their sum;
its CDAN weights multiply a loss that is averaged already, and cancel; it starts the discriminator anew whenever its
loss passes 10; one client trains per round; the round is chosen by test accuracy of the target.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedlit.federation import Channel, Client, FederatedLoader, Summed
from fedlit.functional import domain_loss, entropy_weights, loss_from_gradient, multilinear_map
from fedlit.functional import reversal_weight as scheduled
from fedlit.methods.fedavg import FedAvg
from fedlit.models import AdversarialReplica, feature_width, make_discriminator
from fedlit.module import Batch
from fedlit.training.replicas import Replicas
from fedlit.training.tasks import Classification

EVERY_STEP = "discriminator_gradient"
"""Channel of the discriminator's gradients."""

EVERY_ROUND = "discriminator"
"""Channel of the discriminator itself."""


class FedDANN(FedAvg):
    r"""FedAvg with extractors that make domains hard to tell apart for a discriminator D, which all clients train.

    .. math:: L_D = \frac12 \Big[ \frac1K \sum_k \mathbb E_k[-\log D(f)] + \mathbb E_T[-\log(1 - D(f))] \Big]

    D lowers it and extractors raise it with weight lambda. It is a sum of parts that need a single client's features
    each, and so is its gradient by D's weights: a secure sum in every local step trains the D of pooled data. Parts
    weigh in extractors as the uniform mean over K sources and the target undoes it: with one plain step in a round and
    ``weighting="uniform"``, a round is a step of centralised training, at K / (K + 1) times the learning rate.

    Args:
        hidden: Units of D's hidden layer.
        sync: ``"step"`` sums gradients of D in every local step; ``"round"`` lets every client train a D of its own,
            which are averaged at the round's end. Those see one domain each, and their mean tells little apart.
        reversal_weight: lambda, at least 0.
        schedule_rounds: Rounds after the warm-up in which lambda grows from 0, as `fedlit.functional.reversal_weight`
            has it: a number; ``"planned"``, all rounds of the run (constant if it has no planned end); or ``None``,
            constant. A run that is resumed goes by the rounds that are planned then.
        conditional: Show D the outer product of class probabilities and features, with samples weighted by how certain
            their predictions are (CDAN).
        squared: Take half the square of each client's part, so that clients with a large one weigh more (FADE).
        average: Whose extractors and classifiers are averaged: ``"all"``, or those with labels (``"sources"``), so that
            the target's extractor teaches D alone, and without reversal it is `FedAvg`.
        discriminator_lr_ratio: D's learning rate in units of the other networks', positive; 10 beside a pretrained
            extractor. Schedules that scale rates keep it.
        kwargs: See `FederatedModule`.

    Raises:
        ValueError: If an argument is out of range, or ``conditional`` has no classes.

    Notes:
        Everybody learns the sum of D's gradients in each step, over present clients that have a batch. With one source
        each side finds the other's by subtracting its own. A single client's, which is read where no backend hides it,
        tells the features of a batch of one sample up to a factor.

        Steps without the target or without a source, or with fewer than the backend can hide, pass without a domain
        loss. Clients that run out of samples miss D's last steps of a round and receive it at its end; with momentum or
        Adam, their optimiser states, and so within a round their D's, differ a little from then on.
    """

    replicas: Replicas[AdversarialReplica]
    uses_unlabelled_target: ClassVar[bool] = True
    several_models: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        hidden: int = 64,
        sync: Literal["step", "round"] = "step",
        reversal_weight: float = 1.0,
        schedule_rounds: int | Literal["planned"] | None = "planned",
        conditional: bool = False,
        squared: bool = False,
        average: Literal["all", "sources"] = "all",
        discriminator_lr_ratio: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if hidden < 1:
            raise ValueError(f"hidden must be at least 1 unit, got {hidden}")
        if sync not in ("step", "round"):
            raise ValueError(f"sync must be 'step' or 'round', got {sync!r}")
        if not 0 <= reversal_weight < math.inf:
            raise ValueError(
                f"reversal_weight (lambda) must be at least 0 and finite, got {reversal_weight}: the gradient is "
                "reversed already"
            )
        if schedule_rounds not in (None, "planned") and not (isinstance(schedule_rounds, int) and schedule_rounds > 0):
            raise ValueError(
                f"schedule_rounds must be at least 1 round, 'planned' or null (constant), got {schedule_rounds!r}"
            )
        if conditional and not isinstance(self.task, Classification):
            raise ValueError("conditional=True shows D class probabilities: leave it out, or task='classification'")
        if average not in ("all", "sources"):
            raise ValueError(f"average must be 'all' or 'sources', got {average!r}")
        if not 0 < discriminator_lr_ratio < math.inf:
            raise ValueError(f"discriminator_lr_ratio must be positive and finite, got {discriminator_lr_ratio}")
        self.hidden = hidden
        self.sync = sync
        self.reversal_weight = reversal_weight
        self.schedule_rounds = schedule_rounds
        self.conditional = conditional
        self.squared = squared
        self.average = average
        self.discriminator_lr_ratio = discriminator_lr_ratio

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The weights, and what D is made of."""
        gradient = Summed(EVERY_STEP, "gradient by D's weights", how_often="every local step", too_few="skip")
        weights = Summed(EVERY_ROUND, "D's weights", too_few="skip")
        return (*super().channels, *((gradient,) if self.sync == "step" else ()), weights)

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Everyone: the target on its unlabelled samples."""
        return self.clients

    # ---------------------------------------------------------------- a local step

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Each client's loss on its labels, and its part of the domain loss."""
        losses, features, outputs = {}, {}, {}
        for client, samples in self.in_streams(batch):
            replica, name = self.replicas[client], client.name
            features[name] = replica.extractor(samples[0])
            outputs[name] = replica.classifier(features[name])
            nothing = 0 * outputs[name].sum()
            losses[name] = self.task.loss(client, outputs[name], samples[1]) if client.labelled else nothing
        for name, loss in self.adversarial_losses(features, outputs).items():
            losses[name] = losses[name] + loss
        return losses

    def adversarial_losses(self, features: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Losses whose gradients are those that extractors and D's descend, of local clients that meet in this step.

        Features and outputs are of local clients' batches, of shapes (B, width) and (B, num_classes).
        """
        opponents = self.opponents()
        shares = domain_shares(opponents)
        reversal = self.reversal() * (len(opponents) - 1)
        losses: dict[str, Tensor] = {}
        gradients: dict[str, dict[str, Tensor]] = {}
        for client in (each for each in opponents if each.name in features):
            name, own = client.name, features[client.name]
            own = own if own.requires_grad else own.clone().requires_grad_()  # those of a frozen extractor
            weights = dict(self.replicas[client].discriminator.named_parameters())
            part = self.part_of_domain_loss(client, own, outputs[name])
            by_features, *by_weights = torch.autograd.grad(part, [own, *weights.values()])
            losses[name] = loss_from_gradient(own, -reversal * shares[name] * by_features, part.detach())
            # averaged with their shares at the round's end, if they are not summed now
            share = shares[name] if self.sync == "step" else 1.0
            gradients[name] = {key: share * each for key, each in zip(weights, by_weights, strict=True)}
        if opponents and self.sync == "step":
            gradients = self.federation.sum(EVERY_STEP, gradients, among=opponents, to=opponents)
        for name, gradient in gradients.items():
            for key, weight in self.replicas[name].discriminator.named_parameters():
                losses[name] = losses[name] + loss_from_gradient(weight, gradient[key])
        return losses

    def part_of_domain_loss(self, client: Client, features: Tensor, outputs: Tensor) -> Tensor:
        """One client's part of L_D, not weighted, a scalar; from features (B, width) and outputs (B, num_classes)."""
        weights = None
        if self.conditional:
            probabilities = outputs.detach().softmax(dim=1)
            features, weights = multilinear_map(features, probabilities), entropy_weights(probabilities)
        part = domain_loss(self.replicas[client].discriminator(features), not client.is_target, weights)
        return part.square() / 2 if self.squared else part

    def opponents(self, step: int | None = None) -> list[Client]:
        """Between whom D tells domains apart in a step of the round; nobody if a side is missing, or too few to hide.

        Without ``step`` it is the one under way.
        """
        first = EVERY_STEP if self.sync == "step" else EVERY_ROUND
        able = self.in_step(first, EVERY_ROUND, step=step)
        summed = self.federation.senders(first, able)
        met = [client for client in able if client.name in summed]
        return met if self.target in met and len(met) > 1 else []

    def reversal(self) -> float:
        """Lambda in this round."""
        trainer, rounds = self.trainer, self.schedule_rounds
        loader, epochs = trainer.train_dataloader, trainer.max_epochs
        if rounds == "planned":
            planned = isinstance(loader, FederatedLoader) and epochs is not None and epochs >= 0
            per_epoch = math.ceil(trainer.num_training_batches / loader.batches_per_round) if planned else 0
            rounds = epochs * per_epoch - self.warmup_rounds if planned else None
        if rounds is None:
            return self.reversal_weight
        return self.reversal_weight * scheduled(min(1.0, (self.federation.round_idx - self.warmup_rounds) / rounds))

    # ---------------------------------------------------------------- rounds

    def on_round_start(self, round_idx: int) -> None:
        """Clients that were away fetch the current networks."""
        super().on_round_start(round_idx)
        self.load_shared_(self.federation.catch_up(EVERY_ROUND))

    def on_round_end(self, round_idx: int) -> None:
        """Average extractors and classifiers; and D's of those who met in the last step in which anybody did.

        With ``sync="step"`` these are equal, and their mean is for the others.
        """
        among = [client for client in self.clients if client.labelled or self.average == "all"]
        self.average_("weights", among, part=("extractor", "classifier"))
        federation = self.federation
        met = next(filter(None, map(self.opponents, reversed(range(federation.batch_idx)))), [])
        sent = {
            client.name: {
                key: t for key, t in self.shared_state(client.name).items() if key.startswith("discriminator.")
            }
            for client in met
            if federation.is_local(client)
        }
        if met:
            shares, around = domain_shares(met), self.shared.received
            self.load_shared_(federation.mean(EVERY_ROUND, sent, met, weights=shares, around=around))

    # ---------------------------------------------------------------- set-up

    def build_replica(self) -> AdversarialReplica:
        """Extractor, classifier and discriminator."""
        extractor, classifier = (copy.deepcopy(network) for network in self.originals)
        width = feature_width(extractor) * (self.num_classes if self.conditional else 1)
        return AdversarialReplica(extractor, classifier, make_discriminator(width, self.hidden))

    def client_param_groups(self) -> list[dict[str, Any]]:
        """Two parameter groups per local client: of the network that predicts, and of D."""
        groups: list[dict[str, Any]] = []
        for client in self.federation.local_clients:
            replica = self.replicas[client]
            network = [*replica.extractor.parameters(), *replica.classifier.parameters()]
            for params in (network, replica.discriminator.parameters()):
                groups.append({"params": [p for p in params if p.requires_grad], "client": client.name})
        return groups

    def make_optimizer(self) -> Optimizer:
        """As configured, with D's learning rate scaled."""
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups[1::2]:
            group["lr"] = group["lr"] * self.discriminator_lr_ratio
        return optimizer

    def on_fit_start(self) -> None:
        """Warn where a sum of two hides nothing from the two."""
        super().on_fit_start()
        if self.sync == "step" and len(self.sources) == 1 and self.federation.channels[EVERY_STEP].hides:
            warnings.warn(
                f"D's gradients are summed over {self.sources[0].name!r} and the target alone: each learns the other's "
                "by subtracting its own, and they are hidden from the server only",
                stacklevel=2,
            )


class FADE(FedDANN):
    """FedDANN as Hong et al. have it: discriminators are averaged like all else, and losses are squared.

    Args:
        sync: See `FedDANN`.
        squared: See `FedDANN`.
        kwargs: Further ones of `FedDANN`.
    """

    def __init__(
        self, *args: Any, sync: Literal["step", "round"] = "round", squared: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, sync=sync, squared=squared, **kwargs)


def domain_shares(opponents: list[Client]) -> dict[str, float]:
    """Weights of parts in L_D by client: 1/(2K) of each of K sources, 1/2 of the target."""
    return {client.name: 0.5 if client.is_target else 0.5 / (len(opponents) - 1) for client in opponents}
