"""FADA (Peng, Huang, Zhu and Saenko, ICLR 2020), Algorithm 1: attention over sources, and a domain identifier for each.

Differences from the paper:

- Attention compares clusters by their squared scatter over that of all samples. The paper's sum of distances shrinks
  with the features, so that one source gets all the weight (``attention="paper"``). Gains are of a whole round;
  clusterings continue from each other, on the same samples.
- Equation 5's source term, which makes sources easier to identify, is left out: sources train on labels alone, or are
  reversed like the target (``reverse="both"``). Equations 6 to 8 are an option of sources (``disentangle=True``).
- Source and target exchange gradients of the identifier; the paper sends it features of every batch.
- The target keeps the changes of its steps, but for statistics of BatchNorm, which are the sources': a sum of changes
  may have variances below 0.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

import fedlit.functional as fn
from fedlit import ReplicaSpec, Requires
from fedlit.checks import check, check_at_least, check_count, check_one_of, check_positive
from fedlit.federation import Channel, Client, Open
from fedlit.federation.nested import Inputs, num_samples
from fedlit.methods.combined_updates import UPDATE_ALONE, Update, WeighedUpdates
from fedlit.models import AdversarialReplica, DisentanglingReplica, feature_width, make_discriminator, part_of
from fedlit.models.copies import copied
from fedlit.models.disentangling import DISENTANGLING
from fedlit.module import Batch
from fedlit.run.replicas import Replicas


class FADA(WeighedUpdates):
    r"""The sources' updates, weighted by how well they cluster the target (Peng et al., ICLR 2020, Algorithm 1).

    .. math:: \theta \leftarrow \theta_T + \sum_i \alpha_i \, \Delta_i, \qquad
              \alpha = \operatorname{softmax}(\text{gain} / \tau)

    Sources train on their labels. With each the target shares an identifier that separates their features, which the
    target's extractor learns to mislead. A source's gain is by how much its update alone lowers the scatter of the
    target's features within k-means clusters, one per class. Logged after each round: ``attention/SOURCE``, alpha, of
    the sources in it.

    Args:
        hidden: Units of the hidden layer of all identifiers, and of the estimator of mutual information.
        identifier_weight: Weight lambda of the loss against identifiers, at least 0.
        identifier_lr: Learning rate of the identifiers' plain gradient steps, positive.
        reverse: Whose extractors mislead identifiers: the ``"target"``'s, or those of ``"both"`` sides.
        attention: ``"relative"``, gains in shares of the samples' scatter; ``"paper"``, equation 3; ``"uniform"``.
        temperature: tau, positive; with ``attention="paper"`` give its 1.
        attention_samples: Samples of the target that are clustered, the same in all rounds.
        disentangle: Split features at the sources in a part that predicts the class and a rest that does not, with
            little mutual information, which together reconstruct them.
        mi_weight: Weight of the mutual information of the two parts, at least 0.
        kwargs: See `CombinedUpdates` and `FederatedModule`.

    Notes:
        The target receives every source's update, and a source the new model, in plaintext. In each local step source
        and target exchange gradients of their identifier; those of one sample reveal its features up to a factor. A
        round without the target changes nothing. Networks that split features are not sent.
    """

    replicas: Replicas[AdversarialReplica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True,
        tasks=("classification",),
        matches_distributions=True,
        adaptation_weight="identifier_weight",
    )
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(
        local=("discriminator.", *DISENTANGLING), own_rates={"discriminator": "identifier_lr"}
    )

    def __init__(
        self,
        *args: Any,
        hidden: int = 64,
        identifier_weight: float = 0.1,
        identifier_lr: float = 0.03,
        reverse: Literal["target", "both"] = "target",
        attention: Literal["relative", "paper", "uniform"] = "relative",
        temperature: float = 0.05,
        attention_samples: int = 256,
        disentangle: bool = False,
        mi_weight: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_count("hidden", hidden, 1, "unit")
        check_at_least("identifier_weight (lambda)", identifier_weight, 0)
        check_at_least("mi_weight", mi_weight, 0)
        for name, value in (("identifier_lr", identifier_lr), ("temperature (tau)", temperature)):
            check_positive(name, value)
        check_one_of("reverse", reverse, ("target", "both"))
        check_one_of("attention", attention, ("relative", "paper", "uniform"))
        check(
            attention_samples >= self.num_classes,
            "attention_samples",
            f"at least the {self.num_classes} classes, a cluster for each",
            attention_samples,
        )
        self.hidden = hidden
        self.identifier_weight = identifier_weight
        self.identifier_lr = identifier_lr
        self.reverse = reverse
        self.attention = attention
        self.temperature = temperature
        self.attention_samples = attention_samples
        self.disentangle = disentangle
        self.mi_weight = mi_weight
        self._warned = False

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Gradients of identifiers, updates to the target, and the new model."""
        drowned = "its noise would drown the learning rates sent beside an update: take align_magnitudes=False"
        return (
            Open("identifier", "gradient by an identifier's weights", how_often="every local step"),
            Open("update", "what a source has changed", "sources", "target", unblurred=drowned * self.align_magnitudes),
            Open("model", "the new weights", "target", "sources", unblurred=UPDATE_ALONE),
        )

    def build_replica(self) -> AdversarialReplica:
        """Return extractor, classifier, the source's identifier, and networks that disentangle features."""
        extractor, classifier = copied(self.originals)
        identifiers = nn.ModuleList([make_discriminator(feature_width(extractor), self.hidden)])
        if self.disentangle:
            return DisentanglingReplica(extractor, classifier, identifiers, self.num_classes, self.hidden)
        return AdversarialReplica(extractor, classifier, identifiers)

    def build_target(self, replica: AdversarialReplica) -> AdversarialReplica:
        """Return the target's replica, with the identifiers of all sources in their order."""
        (identifier,) = cast(nn.ModuleList, replica.discriminator)
        identifiers = nn.ModuleList(copy.deepcopy(identifier) for _ in self.sources)
        return AdversarialReplica(replica.extractor, replica.classifier, identifiers)

    # ---------------------------------------------------------------- a local step: equations 4 to 8

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Step the identifiers; return each client's loss on its labels, plus that by which extractors mislead them."""
        losses, features = {}, {}
        for client, samples in self.run.in_streams(batch):
            replica = self.replicas[client]
            own = replica.extractor(samples[0])
            outputs = replica.classifier(own)
            losses[client.name] = self.task.loss(client, outputs, samples[1]) if client.labelled else 0 * outputs.sum()
            if isinstance(replica, DisentanglingReplica):  # equations 6 to 8
                label_loss = partial(self.task.loss, client, labels=samples[1])
                losses[client.name] = losses[client.name] + replica.disentangling_loss(own, label_loss, self.mi_weight)
            features[client.name] = own if own.requires_grad else own.clone().requires_grad_()  # of a frozen extractor
        able = self.run.in_step("identifier")
        met = [client for client in able if not client.is_target] if self.target in able else []
        if not met:
            return losses
        self.step_identifiers_(met, {name: own.detach() for name, own in features.items()})
        reversing = [client for client in (*met, self.target) if client.is_target or self.reverse == "both"]
        for client in (each for each in reversing if each.name in features):
            own, others = features[client.name], met if client.is_target else [client]
            judged = [self.identifier(client, source)(own) for source in others]
            misled = torch.stack([fn.domain_loss(logits, client.is_target) for logits in judged]).mean()
            (gradient,) = torch.autograd.grad(misled, own)
            weight = self.identifier_weight
            loss = fn.loss_from_gradient(own, weight * gradient, weight * misled.detach())
            losses[client.name] = losses[client.name] + loss
        return losses

    def step_identifiers_(self, sources: Sequence[Client], features: Mapping[str, Tensor]) -> None:
        """Let each pair exchange its gradients and descend their sum; features are those of local clients."""
        target = self.target
        sides = [(source, each, other) for source in sources for each, other in ((source, target), (target, source))]
        sides = [(source, each, other) for source, each, other in sides if each.name in features]
        sent: dict[str, dict[str, Update]] = {}
        for source, client, other in sides:
            weights = dict(self.identifier(client, source).named_parameters())
            loss = fn.domain_loss(self.identifier(client, source)(features[client.name]), not client.is_target)
            gradients = torch.autograd.grad(loss, list(weights.values()))
            sent.setdefault(client.name, {})[other.name] = dict(zip(weights, gradients, strict=True))
        received = self.federation.exchange("identifier", sent)
        for source, client, other in sides:
            own, others = sent[client.name][other.name], received.get(client.name, {}).get(other.name)
            if others is not None:
                for name, weight in self.identifier(client, source).named_parameters():
                    weight.data.sub_(self.identifier_lr / 2 * (own[name] + others[name]))

    def identifier(self, client: Client, source: Client) -> nn.Module:
        """Return a local client's copy of a source's identifier."""
        identifiers = cast(nn.ModuleList, self.replicas[client].discriminator)
        return identifiers[self.sources.index(source) if client.is_target else 0]

    # ---------------------------------------------------------------- rounds: equation 3

    @torch.no_grad()
    def weigh(self, updates: Mapping[str, Update]) -> dict[str, float]:
        """Return the attention on sources, of sum 1, from their updates; called where the target is hosted."""
        gains = torch.zeros(len(updates), dtype=torch.float64)
        inputs, number = None, 0
        if self.attention != "uniform" and len(updates) > 1:
            inputs = self.run.samples.drawn(self.target, self.attention_samples)
            number = num_samples(inputs)
        if number >= self.num_classes:
            scatter = fn.relative_scatter if self.attention == "relative" else fn.intra_cluster_distance
            moved = (self.features(inputs, update) for update in updates.values())
            before, seed = self.features(inputs, {}), self.federation.seed
            gains = fn.clustering_gains(before, moved, self.num_classes, scatter, seed)
        elif number and not self._warned:
            self._warned = True
            warnings.warn(
                f"the target has {number} samples, fewer than the {self.num_classes} classes that are to be its "
                "clusters: all sources get the same attention",
                stacklevel=2,
            )
        return dict(zip(updates, (gains / self.temperature).softmax(dim=0).tolist(), strict=True))

    def features(self, inputs: Inputs, update: Update) -> Tensor:
        """Return the target's features after one update alone, in evaluation mode, shape (n, width)."""
        state = self.weights_of(self.target)
        if update:
            layers, statistics = self.parts(state)
            state = layers | {name: self.memory(self.target).start[name] for name in statistics}
        changed = part_of(update, "extractor")
        moved = {name: tensor + changed.get(name, 0) for name, tensor in part_of(state, "extractor").items()}
        return self.features_with(self.target, moved, inputs)
