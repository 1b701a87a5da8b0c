"""Minimax entropy (Saito, Kim, Sclaroff, Darrell and Saenko, ICCV 2019), section 3 and figure 2, federated.

Differences from the paper, which has one source and no federation: each client lowers its part of the objective, which
is a sum over clients, and FedAvg takes the mean of their weights. Labelled and unlabelled samples of the target come in
one batch, in the proportion in which it has them.

Differences from the published code: one optimiser step on the sum of both losses in place of two steps, and no model is
chosen on labelled target samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from fedlit.checks import check_at_least, check_positive
from fedlit.federation import Client
from fedlit.federation.labels import GuardedLabels, known_labels
from fedlit.functional import minimax_entropy_loss
from fedlit.methods.fedavg import FedAvg
from fedlit.models import Replica, feature_width
from fedlit.models.copies import copied
from fedlit.run.options import ReplicaSpec, Requires
from fedlit.run.replicas import Replicas


class CosineReplica(Replica):
    """A client's network: ``classifier(f / |f|) / T`` of features f, shape (batch, width); T is positive."""

    def __init__(self, extractor: nn.Module, classifier: nn.Module, temperature: float) -> None:
        super().__init__(extractor, classifier)
        self.temperature = temperature

    def classify(self, features: Tensor) -> Tensor:
        """Logits of features, shape (batch, num_classes); features of length 0 are like no class."""
        logits: Tensor = self.classifier(F.normalize(features, dim=1)) / self.temperature
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of inputs."""
        return self.classify(self.extractor(x))


class FedMME(FedAvg):
    """FedAvg with minimax entropy on the target's unlabelled samples (Saito et al., ICCV 2019, section 3).

    The rows of the classifier W are directions that stand for the classes, and logits are W f / (|f| T). On unlabelled
    samples the classifier raises the entropy of predictions, by which its directions move towards the target's
    features, and the extractor lowers it, by which the features gather about them. It is made for a target with a few
    labels, which hold the directions by their classes; without any it is unstable, and a warning states that.

    Args:
        extractor: Network from inputs to features; each client gets a copy and trains it.
        classifier: Network from features of length 1 to similarities; ``None`` is a linear layer without bias.
        entropy_weight: Weight lambda of the entropy, at least 0; 0 leaves FedAvg with this classifier.
        temperature: T, positive: the smaller, the more certain. Gradients grow with 1 / T, by 20 as it is: learning
            rates have to be lower than with other classifiers.
        kwargs: See `FederatedModule`.
    """

    replicas: Replicas[CosineReplica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True, tasks=("classification",), trains_on_information=True
    )
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(
        apart="the classifier raises the entropy that the extractor lowers"
    )

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        classifier: nn.Module | None = None,
        *,
        entropy_weight: float = 0.1,
        temperature: float = 0.05,
        **kwargs: Any,
    ) -> None:
        check_at_least("entropy_weight (lambda)", entropy_weight, 0)
        check_positive("temperature (T)", temperature)
        if classifier is None:
            classifier = nn.Linear(feature_width(extractor), num_classes, bias=False)
        super().__init__(clients, target, num_classes, extractor, classifier, **kwargs)
        self.entropy_weight = entropy_weight
        self.temperature = temperature

    def build_replica(self) -> CosineReplica:
        """A network whose logits are cosines."""
        return CosineReplica(*copied(self.originals), self.temperature)

    def on_fit_start(self) -> None:
        """Warn where no label of the target holds the classifier's directions."""
        super().on_fit_start()
        if not self.target.labelled and self.entropy_weight:
            early = "" if self.warmup_rounds else ", or at least warmup_rounds, so that classes are separated first"
            rank_zero_warn(
                f"target {self.target.name!r} has no labels, and without them minimax entropy may move a class to any "
                f"cluster of its samples: give the data module target_labels{early}"
            )

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return everyone; without an entropy weight, clients with labels."""
        return tuple(client for client in self.clients if client.labelled or self.entropy_weight)

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Cross-entropy on labelled samples; at the target, the game on the others."""
        inputs, labels = batch[0], batch[1]
        if not client.is_target:
            return super().loss(client, batch)
        replica = self.replicas[client]
        features = replica.extractor(inputs)
        hidden = isinstance(labels, GuardedLabels)
        known = torch.zeros(len(features), dtype=torch.bool) if hidden else known_labels(labels)
        known = known.to(features.device)
        loss = 0 * features.sum() if hidden else self.task.loss(client, replica.classify(features), labels)
        unlabelled = features[~known]
        if self.entropy_weight and len(unlabelled):
            # in value f itself, and in its gradient -f: what the classifier lowers, the extractor raises
            reversed_features = 2 * unlabelled.detach() - unlabelled
            loss = loss + self.entropy_weight * minimax_entropy_loss(replica.classify(reversed_features))
        return loss
