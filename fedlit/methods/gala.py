"""GALA (Reichart, Baykara et al., arXiv 2510.08150, 2025): two random groups of sources come to agree on the target.

We know the paper from summaries, which leave its schedule open. Here it is the one of FACT (Schrod et al., 2023): the
sources train on their labels, by which their classifiers drift apart, and in the next round the target trains the
common extractor under these classifiers. There:

- Groups are drawn anew for each of the target's batches. The classifiers take one gradient step up the discrepancy
  (``classifier_lr``), the extractor descends it, and the step of the classifiers is undone: without their labels, which
  the target does not have, they would forget them.
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
from fedlit import ReplicaSpec, Requires, Run
from fedlit.checks import check_at_least, check_count, check_positive, refuse
from fedlit.federation import Channel, Client, Open
from fedlit.methods.combined_updates import UPDATE_ALONE, Update, WeighedUpdates
from fedlit.methods.shared import check_moves_features
from fedlit.models import Replica, part_of
from fedlit.run.replicas import Replicas


class GALA(WeighedUpdates):
    r"""Sources weighted by their distance; groups of them agree on the target (Reichart, Baykara et al., 2025).

    .. math:: \theta \leftarrow \theta_T + \sum_k w_k \Delta_k, \qquad
              w = \operatorname{softmax}(-d_k / (\tau \bar d)), \qquad
              L_T = \Big\| \frac{1}{|A|} \sum_{k \in A} p_k - \frac{1}{|B|} \sum_{k \in B} p_k \Big\|_1

    Delta_k is what source k changes in a round on its labels, theta_T the target's network after it, whose running
    statistics of BatchNorm are left out. L_T is the loss of the target's extractor: p_k are the probabilities that
    source k's classifier of the round before has on it, A a random half of the sources in each batch, B the others. d_k
    is the distance of the mean features of source k and target, with the weights of the round's start and each client's
    own normalisation, dbar its mean over the sources in the round. A batch of the target goes twice through a
    classifier of each source. Logged after each round: ``attention/SOURCE``, w, of the sources in it.

    Args:
        target_lr_ratio: The target's learning rate in units of the sources', positive. It sets how far the extractor
            follows L_T. At 1 all samples may get the same features, on which every classifier agrees, too.
        discrepancy_weight: Weight of L_T beside the loss on the target's labels, at least 0. Without labels Adam's
            steps do not depend on it.
        classifier_lr: Rate of the step by which classifiers raise L_T, at least 0; 0 leaves them as they are. Chosen on
            digits (``experiments/digits_baselines``, accuracy on the target's labels, two seeds).
        temperature: tau, positive. At the default a source that is 20% nearer than the mean has 7 times the weight of
            one at the mean; with large values all have the same.
        centroid_samples: Samples of a client that its mean features are of, the same in all rounds; at least 1.
        kwargs: See `CombinedUpdates` and `FederatedModule`; ``align_magnitudes`` is not for GALA, whose target may take
            no step in a round.

    Raises:
        ValueError: With one source, which has none to agree with, or where nothing of the extractor or the classifier
            is trained.

    Notes:
        In plaintext the target receives every source's update and mean features (which differential privacy of "update"
        does not blur), and a source the new model. A round without the target changes nothing. The target trains from
        the second round after a warm-up, with labels from the first.
    """

    replicas: Replicas[Replica]
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
        classifier_lr: float = 0.3,
        temperature: float = 0.1,
        centroid_samples: int = 256,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, target_lr_ratio=target_lr_ratio, **kwargs)
        check_at_least("discrepancy_weight", discrepancy_weight, 0)
        check_at_least("classifier_lr", classifier_lr, 0)
        check_positive("temperature (tau)", temperature)
        check_count("centroid_samples", centroid_samples, 1, "sample")
        if len(self.sources) < 2:
            names = [client.name for client in self.sources]
            refuse("clients", "of at least two sources, which are to agree", names, "FedDANN or FedDAN take one")
        if self.align_magnitudes:
            refuse("align_magnitudes", "False for GALA, whose target may take no step in a round", True, "leave it out")
        check_moves_features(self)
        if not any(param.requires_grad for param in self.originals[1].parameters()):
            raise ValueError("GALA compares the sources' classifiers, and of this one nothing is trained: unfreeze it")
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
            Open("centroid", "mean features of a source", "sources", "target", unblurred=UPDATE_ALONE),
            Open("model", "the new weights", "target", "sources", unblurred=UPDATE_ALONE),
        )

    # ---------------------------------------------------------------- a local step

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return the sources, and the target, if it has no labels from the second round after a warm-up."""
        adapts = self.discrepancy_weight > 0 and round_idx > self.warmup_rounds
        return self.clients if self.target.labelled or adapts else self.sources

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return a source's loss on its labels; the target's on those that it has, and the groups' discrepancy."""
        if not client.is_target:
            return super().loss(client, batch)
        replica = self.replicas[client]
        features = replica.extractor(batch[0])
        loss = cast(Tensor, 0 * features.sum())
        if client.labelled:
            loss = self.task.loss(client, replica.classifier(features), batch[1])
        number = len(self._classifiers)
        if number < 2 or not self.discrepancy_weight:
            return loss
        first = torch.randperm(number) < number // 2
        states = self.raised(features.detach(), first) if self.classifier_lr else [*self._classifiers.values()]
        found = self.predictions(features, states)
        return loss + self.discrepancy_weight * fn.group_discrepancy(found, first)

    def raised(self, features: Tensor, first: Tensor) -> list[Update]:
        """Return the sources' classifiers after a gradient step up the discrepancy of two groups on one batch."""
        params = self.replicas[self.target].classifier.named_parameters()
        trained = [name for name, param in params if param.requires_grad]
        states = [dict(state) for state in self._classifiers.values()]
        places = [(state, name) for state in states for name in trained if name in state]
        for state, name in places:
            state[name] = state[name].detach().requires_grad_()
        apart = fn.group_discrepancy(self.predictions(features, states), first)
        gradients = torch.autograd.grad(apart, [state[name] for state, name in places]) if places else ()
        for (state, name), gradient in zip(places, gradients, strict=True):
            state[name] = state[name].detach() + self.classifier_lr * gradient
        return states

    def predictions(self, features: Tensor, states: Sequence[Update]) -> Tensor:
        """Return probabilities of classifiers on the target's features, shape (S, n, C); no buffer of any changes."""
        classifier = self.replicas[self.target].classifier
        buffers = dict(classifier.named_buffers())
        outputs = []
        for state in states:
            kept = {name: state.get(name, buffer).clone() for name, buffer in buffers.items()}
            outputs.append(functional_call(classifier, {**state, **kept}, (features,)))
        return torch.stack([each.softmax(dim=1) for each in outputs])

    # ---------------------------------------------------------------- rounds

    def on_round_start(self, run: Run) -> None:
        """Forget the classifiers of a run before; note what the round starts from."""
        if run.clock.round_idx == 0:
            self._classifiers = {}
        super().on_round_start(run)

    def receive_updates(self, sources: Sequence[Client]) -> dict[str, Update]:
        """Receive updates of sources that send their mean features, too."""
        updates = super().receive_updates(sources)
        sent = {each.name: {"mean": self.centroid(each)} for each in sources if self.federation.is_local(each)}
        received = self.federation.exchange("centroid", sent, to=[self.target]).get(self.target.name, {})
        self._centroids = {name: message["mean"] for name, message in received.items()}
        return {name: update for name, update in updates.items() if name in self._centroids}

    @torch.no_grad()
    def centroid(self, client: Client) -> Tensor:
        """Return the mean features of a local client with the weights of the round's start, float32, shape (width,)."""
        state = part_of(self.memory(client).start, "extractor")
        with self.trainer.precision_plugin.forward_context():
            features = self.features_with(client, state, self.run.samples.drawn(client, self.centroid_samples))
        return features.float().mean(dim=0)

    def weigh(self, updates: Mapping[str, Update]) -> dict[str, float]:
        """Return the sources' weights by the distance of their mean features; keep their classifiers."""
        start = part_of(self.memory(self.target).start, "classifier")
        for source, update in updates.items():
            changed = part_of(update, "classifier")
            self._classifiers[source] = {name: tensor + changed[name] for name, tensor in start.items()}
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
