"""SplitDANN: domain-adversarial training with the discriminator cut in two (Ganin and Lempitsky, ICML 2015).

Differences from the paper: there is no federation in it, and one source. Here every client holds the first layer of the
discriminator (the critic), and the target alone the rest (the judge); all sources together weigh as much as the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit import Client, ReplicaSpec, Requires
from fedlit.federation import Channel, Open, Summed
from fedlit.functional import loss_from_gradient
from fedlit.methods import FedAvg


class SplitDANN(FedAvg):
    """FedAvg over everyone, with extractors that make the domains hard to tell apart for a discriminator.

    Args:
        adversarial_weight: Weight lambda of the reversed gradient, at least 0.
        width: Outputs of the critic for each sample.

    Raises:
        ValueError: If ``adversarial_weight`` is negative.

    Notes:
        The target learns ``width`` numbers of each sample of a source's batch; each source the gradient by its own.
    """

    requires: ClassVar[Requires] = Requires(unlabelled_target=True)
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=("judge",))

    def __init__(self, *args: Any, adversarial_weight: float = 0.3, width: int = 16, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if adversarial_weight < 0:
            raise ValueError(f"adversarial_weight must be at least 0, got {adversarial_weight}: gradients are reversed")
        self.adversarial_weight = adversarial_weight
        self.width = width

    @property
    def channels(self) -> tuple[Channel, ...]:
        """FedAvg's, and three of every local step."""
        return (
            *super().channels,
            Open("hidden", "the critic's outputs", "sources", "target", "every local step", samples=True),
            Open("verdicts", "gradient by them of the domain loss", "target", "sources", "every local step"),
            Summed("critic", "gradient by its weights", "learners", "learners", "every local step", too_few="skip"),
        )

    def build_replica(self) -> nn.Module:
        """Extractor, classifier and critic."""
        replica: Any = super().build_replica()
        replica.critic = nn.Linear(self.originals[0].out_features, self.width)
        return replica

    def build_target(self, replica: Any) -> nn.Module:
        """The judge too."""
        replica.judge = nn.Sequential(nn.ReLU(), nn.Linear(self.width, 1))
        return replica

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Everyone."""
        return self.clients

    def losses(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        """The task's loss less lambda times the domain loss, which critic and judge lower."""
        losses, features, hidden = {}, {}, {}
        for client, (inputs, labels, *_) in self.run.in_streams(batch):
            replica, name = self.replicas[client], client.name
            features[name] = replica.extractor(inputs)
            hidden[name] = replica.critic(features[name])
            outputs = replica.classifier(features[name])
            losses[name] = self.task.loss(client, outputs, labels) if client.labelled else 0 * outputs.sum()
        active = self.run.in_step("hidden", "verdicts", "critic")  # the same on every process, as all calls have to be
        if self.target not in active or len(active) == 1:
            return losses
        hidden = {client.name: hidden[client.name] for client in active if client.name in hidden}
        slopes = self._judged(hidden, losses)
        gradients = {}
        for name, slope in slopes.items():
            weights = dict(self.replicas[name].critic.named_parameters())
            by_features, *by_weight = torch.autograd.grad(hidden[name], [features[name], *weights.values()], slope)
            losses[name] = losses[name] + loss_from_gradient(features[name], -self.adversarial_weight * by_features)
            gradients[name] = dict(zip(weights, by_weight, strict=True))
        for name, total in self.federation.sum("critic", gradients, among=active, to=active).items():
            for key, weight in self.replicas[name].critic.named_parameters():
                losses[name] = losses[name] + loss_from_gradient(weight, total[key])
        return losses

    def _judged(self, hidden: Mapping[str, Tensor], losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradient of the domain loss by the hidden values of each local client; the target's loss gets that loss."""
        target = self.target.name
        sent = {name: {"h": values} for name, values in hidden.items() if name != target}
        received = self.federation.exchange("hidden", sent)
        slopes = {}
        if target in received:
            leaves = {name: message["h"] for name, message in received[target].items()}
            leaves = {target: hidden[target].detach()} | leaves
            domain_loss = self.domain_loss({name: leaf.requires_grad_() for name, leaf in leaves.items()})
            losses[target] = losses[target] + domain_loss  # whose graph ends at the leaves: only the judge learns
            by_leaf = torch.autograd.grad(domain_loss, list(leaves.values()), retain_graph=True)
            slopes = dict(zip(leaves, by_leaf, strict=True))
        own = {name: slope for name, slope in slopes.items() if name == target}
        verdicts = {target: {name: {"g": slope} for name, slope in slopes.items() if name != target}} if slopes else {}
        return own | {name: by[target]["g"] for name, by in self.federation.exchange("verdicts", verdicts).items()}

    def domain_loss(self, hidden: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy of the judge between the target (0) and sources (1), which share a weight of 1."""
        total = torch.zeros(())
        for name, values in hidden.items():
            logits = self.replicas[self.target].judge(values)
            is_source = float(name != self.target.name)
            loss = F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, is_source))
            total = total + (loss / (len(hidden) - 1) if is_source else loss)
        return total
