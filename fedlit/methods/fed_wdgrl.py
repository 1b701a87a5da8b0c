"""FedWDGRL (f-WDGRL): Wasserstein distance guided representation learning (Shen et al., AAAI 2018, Algorithm 1).

Differences from the paper:

- It has one source and no federation. Here the critic's gradient is a secure sum, by which all clients step alike.
- Its slope is held near 1 at features of both sides. The paper adds points between pairs of a source's and the
  target's, which no client has; for a linear critic all choices are the same.
- The critic takes plain gradient steps with its rate, in place of Adam's, so that absent clients catch up by its
  weights alone. By default it takes one in each local step, and not 5 or 10.
- Labels count from the first step, and there is no schedule, as in the paper.

Differences from published code: a well-known port penalises the slope over the batch in place of that over features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from fedlit.checks import check_at_least, check_count, check_positive
from fedlit.federation import Client
from fedlit.functional import gradient_penalty, loss_from_gradient
from fedlit.methods.fed_dann import DomainAdversarial, domain_shares
from fedlit.run.options import ReplicaSpec, Requires


class FedWDGRL(DomainAdversarial):
    r"""FedAvg that lowers the Wasserstein distance between domains (Shen et al., AAAI 2018, Algorithm 1).

    .. math:: W = \frac1K \sum_k \mathbb E_k[c(f)] - \mathbb E_T[c(f)], \qquad
              \max_c \; W - \frac\gamma2 \Big[ \frac1K \sum_k P_k + P_T \Big], \qquad
              P = \mathbb E \big[ (\lVert \nabla c(f) \rVert - 1)^2 \big]

    A critic c, which all clients train, estimates W. Classifiers and extractors lower the task's loss + lambda W. Parts
    weigh in extractors as the uniform mean over K sources and the target undoes it: see `FedDANN`. Everybody learns the
    sum of the critic's gradients in each of its steps.

    Args:
        hidden: Units of the critic's hidden layer.
        wasserstein_weight: lambda, at least 0. The paper has .1 for Office-Caltech, and .00045 for digits.
        penalty_weight: gamma, at least 0; the paper's is 10.
        critic_steps: Steps of the critic in each local step, at least 1; each is an exchange, if they are summed.
        critic_lr: Learning rate of the critic's steps, positive.
        kwargs: ``sync`` and ``average`` of `DomainAdversarial`, and those of `FederatedModule`.
    """

    requires: ClassVar[Requires] = replace(DomainAdversarial.requires, adaptation_weight="wasserstein_weight")
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(own_rates={"discriminator": "critic_lr"})
    gradient_channel: ClassVar[str] = "critic_gradient"
    model_channel: ClassVar[str] = "critic"

    def __init__(
        self,
        *args: Any,
        hidden: int = 100,
        wasserstein_weight: float = 0.1,
        penalty_weight: float = 10.0,
        critic_steps: int = 1,
        critic_lr: float = 0.03,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, hidden=hidden, **kwargs)
        check_at_least("wasserstein_weight (lambda)", wasserstein_weight, 0)
        check_at_least("penalty_weight (gamma)", penalty_weight, 0)
        check_count("critic_steps", critic_steps, 1, "in each local step")
        check_positive("critic_lr", critic_lr)
        self.wasserstein_weight = wasserstein_weight
        self.penalty_weight = penalty_weight
        self.critic_steps = critic_steps
        self.critic_lr = critic_lr

    def adversarial_losses(
        self, opponents: Sequence[Client], features: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The critic's steps on features as they are; then what extractors lower, W by its critic."""
        here = [client for client in opponents if client.name in features]
        for _ in range(self.critic_steps):
            self.step_critics_(opponents, {client.name: features[client.name].detach() for client in here})
        losses, shares = {}, domain_shares(opponents)
        for client in here:
            own = features[client.name]
            part = self.part_of_distance(client, own)
            (by_features,) = torch.autograd.grad(part, own)
            weight = self.wasserstein_weight * (len(opponents) - 1) * shares[client.name]
            losses[client.name] = loss_from_gradient(own, weight * by_features, weight * part.detach())
        return losses

    def step_critics_(self, opponents: Sequence[Client], features: Mapping[str, Tensor]) -> None:
        """One step of the critic; features are those of local opponents, as constants."""
        gradients = {}
        for client in (each for each in opponents if each.name in features):
            critic, own = self.replicas[client].discriminator, features[client.name]
            loss = self.penalty_weight * gradient_penalty(critic, own) - self.part_of_distance(client, own)
            by_weights = torch.autograd.grad(loss, list(critic.parameters()), materialize_grads=True)
            gradients[client.name] = parameters_to_vector(by_weights)
        for name, gradient in self.pooled(gradients, opponents).items():
            weights = list(self.replicas[name].discriminator.parameters())
            for weight, each in zip(weights, torch.split(gradient, [w.numel() for w in weights]), strict=True):
                weight.data.sub_(self.critic_lr * each.view_as(weight))

    def part_of_distance(self, client: Client, features: Tensor) -> Tensor:
        """One client's part of W, a scalar: twice its mean of c, less than 0 at the target, of which W is in shares."""
        mean: Tensor = self.replicas[client].discriminator(features).mean()
        return -2 * mean if client.is_target else 2 * mean
