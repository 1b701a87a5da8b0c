"""FedDANN (f-DANN): domain-adversarial training (Ganin et al., JMLR 2016, section 4.2) over several sources.

With FADE (Hong et al., KDD 2021), which averages discriminators, and CDAN (Long et al., NeurIPS 2018).

Differences from the papers:

- Ganin et al. have one source and no federation. Here all sources together weigh as much as the target, and every
  client has an extractor of its own within a round. The discriminator is the central one: its gradient is a secure sum.
- FADE averages discriminators that local steps have driven to their client's one domain: such means distinguish little.
  That is ``sync="round"``, with weights by which one plain step is the central one.
- CDAN's map of predictions and features is their full outer product; for wide features the paper has a random one.

Differences from FADE's published code: it multiplies models by two sets of weights at once, which shrinks their sum;
its CDAN weights multiply a loss that is averaged already, and cancel; it starts the discriminator anew whenever its
loss passes 10; one client trains per round; the round is chosen by test accuracy of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from fedlit.checks import check_positive, refuse
from fedlit.federation import Client
from fedlit.functional import domain_loss, entropy_weights, loss_from_gradient, multilinear_map
from fedlit.functional import reversal_weight as scheduled
from fedlit.methods.domain_adversarial import DomainAdversarial, check_weight, domain_shares
from fedlit.run.options import ReplicaSpec, Requires
from fedlit.run.param_groups import check_ratio
from fedlit.run.tasks import Classification


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
            has it: a number; ``"planned"``, all rounds of the run (constant if it has no planned end); or ``None``,
            constant. A run that is resumed goes by the rounds that are planned then.
        conditional: Show D the outer product of class probabilities and features, with samples weighted by how certain
            their predictions are (CDAN).
        squared: Take half the square of each client's part, so that clients with a large one weigh more (FADE).
        discriminator_lr_ratio: D's learning rate in units of the other networks', positive; 10 beside a pretrained
            extractor. Schedules that scale rates keep it.
        kwargs: ``sync`` and ``average`` of `DomainAdversarial`, and those of `FederatedModule`.

    Raises:
        ValueError: If an argument is out of range, or ``conditional`` has no classes.

    Notes:
        Everybody learns the sum of D's gradients in each step, over present clients that have a batch. With one source
        each side finds the other's by subtracting its own. A single client's, which is read where no backend hides it,
        reveals the features of a batch of one sample up to a factor.

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
        check_weight("reversal_weight (lambda)", reversal_weight)
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

    def client_param_groups(self) -> list[dict[str, Any]]:
        """Two per local client: of the network that predicts, and of D."""
        groups: list[dict[str, Any]] = []
        for group in super().client_param_groups():
            discriminator = self.replicas[group["client"]].discriminator
            groups += [group, {"params": list(discriminator.parameters()), "client": group["client"]}]
        return groups

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
