"""GALA (Reichart, Baykara et al., arXiv 2510.08150, 2025): two random groups of sources come to agree on the target.

We know the paper from summaries, which leave its schedule open. Here it is the one of FACT (Schrod et al., 2023): the
sources train on their labels, by which their classifiers drift apart; on the models that they end with, the target
trains in the next round. There:

- Each local step deals the sources into two groups anew. The classifiers take one plain gradient step up the groups'
  discrepancy (``classifier_lr``), and the extractor descends it. The target's copies of classifiers are replaced after
  the round, so that they cannot forget their labels, which the target does not have.
- The target adds the sources' weighted changes to its own, of the same round; in FACT it trains after them.
- Distances of centroids are divided by their mean, so that the temperature has no unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.func import functional_call

import fedlit.functional as fn
from fedlit import ReplicaSpec, Requires
from fedlit.checks import check_at_least, check_positive, refuse
from fedlit.federation import Channel, Client, Open
from fedlit.methods.combined_updates import Update, WeighedUpdates
from fedlit.run.local import evaluating


class GALA(WeighedUpdates):
    r"""Sources weighted by their distance; groups of them agree on the target (Reichart, Baykara et al., 2025).

    .. math:: \theta \leftarrow \theta_T + \sum_k w_k \Delta_k, \qquad
              w = \operatorname{softmax}(-d_k / (\tau \bar d)), \qquad
              L_T = \Big\| \frac{1}{|A|} \sum_{k \in A} p_k - \frac{1}{|B|} \sum_{k \in B} p_k \Big\|_1

    Sources train on their labels. On the target p_k are the probabilities of source k's classifier on the common
    extractor, and A and B the halves into which a local step deals the sources. d_k is the distance of the mean
    features of source k and target when the round starts. A step costs as many classifiers as there are sources. Logged
    after each round: ``attention/SOURCE``, w.

    Args:
        target_lr_ratio: The target's learning rate in units of the sources', positive. It sets how far the extractor
            follows the discrepancy: at 1 features may lose their classes, on which everyone agrees as well.
        discrepancy_weight: Weight of the discrepancy beside the loss on the target's labels, at least 0. Without labels
            Adam's steps do not depend on it.
        classifier_lr: Rate of the gradient steps that raise the discrepancy, at least 0; 0 keeps the classifiers.
        temperature: tau, positive; large values weigh all sources alike.
        centroid_samples: Samples of a client that its mean features are of, the same in all rounds; at least 1.
        kwargs: See `CombinedUpdates` and `FederatedModule`.

    Raises:
        ValueError: With one source, which has none to agree with.

    Notes:
        In plaintext the target receives every source's update and mean features, and a source the new model. A round
        without the target changes nothing. Its first round after a warm-up, or the start, is the sources' alone.
    """

    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True, tasks=("classification",), adaptation_weight="target_lr_ratio"
    )
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(
        apart="the target trains the extractor alone, under the sources' classifiers"
    )

    def __init__(
        self,
        *args: Any,
        target_lr_ratio: float = 0.1,
        discrepancy_weight: float = 1.0,
        classifier_lr: float = 1.0,
        temperature: float = 0.1,
        centroid_samples: int = 256,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, target_lr_ratio=target_lr_ratio, **kwargs)
        check_at_least("discrepancy_weight", discrepancy_weight, 0)
        check_at_least("classifier_lr", classifier_lr, 0)
        check_positive("temperature (tau)", temperature)
        check_at_least("centroid_samples", centroid_samples, 1, "sample")
        if len(self.sources) < 2:
            names = [client.name for client in self.sources]
            refuse("clients", "of at least two sources, which are to agree", names, "FedDANN or FedDAN take one")
        self.discrepancy_weight = discrepancy_weight
        self.classifier_lr = classifier_lr
        self.temperature = temperature
        self.centroid_samples = centroid_samples
        self._classifiers: dict[str, Update] = {}  # of each source after its round, at the target
        self._centroids: dict[str, Tensor] = {}  # of each source in this round, at the target

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Updates and mean features to the target, and the new model."""
        return (
            Open("update", "what a source has changed", "sources", "target"),
            Open("centroid", "mean features of a source", "sources", "target"),
            Open("model", "the new weights", "target", "sources", unblurred="it is for the channel 'update' alone"),
        )

    # ---------------------------------------------------------------- a local step

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return the sources, and the target if it has labels or has got classifiers in a round before."""
        adapts = self.discrepancy_weight > 0 and round_idx > self.warmup_rounds
        return self.clients if self.target.labelled or adapts else self.sources

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return a source's loss on its labels; the target's on those that it has, and the groups' discrepancy."""
        if not client.is_target:
            return super().loss(client, batch)
        replica = self.replicas[client]
        features = replica.extractor(batch[0])
        outputs = replica.classifier(features)
        loss = self.task.loss(client, outputs, batch[1]) if client.labelled else cast(Tensor, 0 * outputs.sum())
        if len(self._classifiers) < 2 or not self.discrepancy_weight:
            return loss
        first = torch.randperm(len(self._classifiers)) < len(self._classifiers) // 2
        if self.classifier_lr:
            self.raise_(features.detach(), first)
        return loss + self.discrepancy_weight * fn.group_discrepancy(self.predictions(features), first)

    def predictions(self, features: Tensor) -> Tensor:
        """Return the probabilities of each source's classifier on the target's features, shape (S, n, C)."""
        classifier = self.replicas[self.target].classifier
        outputs = [functional_call(classifier, state, (features,)) for state in self._classifiers.values()]
        return torch.stack([each.softmax(dim=1) for each in outputs])

    def raise_(self, features: Tensor, first: Tensor) -> None:
        """Let the sources' classifiers take a gradient step up the discrepancy of two groups."""
        params = self.replicas[self.target].classifier.named_parameters()
        trained = [name for name, param in params if param.requires_grad]
        states = self._classifiers.values()
        weights = [state[name].requires_grad_() for state in states for name in trained if name in state]
        gradients = torch.autograd.grad(fn.group_discrepancy(self.predictions(features), first), weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.requires_grad_(False).add_(gradient, alpha=self.classifier_lr)

    def observe_(self, samples: Sequence[Any]) -> None:
        """Note nothing: no variance of the target's gradient is needed."""

    # ---------------------------------------------------------------- rounds

    def receive_updates(self, sources: Sequence[Client]) -> dict[str, Update]:
        """Receive updates of sources that send their mean features, too."""
        updates = super().receive_updates(sources)
        sent = {each.name: {"mean": self.centroid(each)} for each in sources if self.federation.is_local(each)}
        received = self.federation.exchange("centroid", sent, to=[self.target]).get(self.target.name, {})
        self._centroids = {name: message["mean"] for name, message in received.items()}
        return {name: update for name, update in updates.items() if name in self._centroids}

    @torch.no_grad()
    def centroid(self, client: Client) -> Tensor:
        """Return the mean features of a local client under the round's first weights, float32, shape (width,)."""
        extractor, prefix = self.replicas[client].extractor, "extractor."
        start = self.memory(client).start.items()
        state = {name.removeprefix(prefix): tensor for name, tensor in start if name.startswith(prefix)}
        with evaluating(extractor), self.trainer.precision_plugin.forward_context():
            inputs = self.run.samples.drawn(client, self.centroid_samples)
            features: Tensor = functional_call(extractor, state, (inputs,), tie_weights=True)
        return features.float().mean(dim=0)

    def weigh(self, updates: Mapping[str, Update]) -> dict[str, float]:
        """Return the sources' weights by the distance of their mean features; keep their classifiers."""
        start, prefix = self.memory(self.target).start, "classifier."
        names = [name for name in start if name.startswith(prefix)]
        for source, update in updates.items():
            self._classifiers[source] = {name.removeprefix(prefix): start[name] + update[name] for name in names}
        in_order = [client.name for client in self.sources if client.name in self._classifiers]
        self._classifiers = {source: self._classifiers[source] for source in in_order}  # groups are drawn by place
        if not updates:
            return {}
        own = self.centroid(self.target)
        distances = torch.stack([(self._centroids[source] - own).norm() for source in updates])
        return dict(zip(updates, fn.centroid_weights(distances, self.temperature).tolist(), strict=True))

    # ---------------------------------------------------------------- checkpoints

    def client_state(self, client: str) -> dict[str, Any]:
        """Return what a client remembers of a round under way, and the target's copies of classifiers."""
        held = {"classifiers": self._classifiers} if client == self.target.name else {}
        return super().client_state(client) | held

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore `client_state` and who lacks the newest model."""
        super().load_state(clients, public, resumes)
        held = clients.get(self.target.name, {}).get("classifiers", {})
        self._classifiers = move_data_to_device(held, self.federation.device or torch.device("cpu"))
