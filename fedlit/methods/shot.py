"""SHOT (Liang, Hu and Feng, ICML 2020), section 3; T3A (Iwasawa and Matsuo, NeurIPS 2021), Algorithm 1: source-free.

Differences from the papers, which have one source and no federation: the sources train by FedAvg, and the network is
the user's, without SHOT's bottleneck and weight normalisation. T3A goes once through all of the target's training
samples rather than through a stream of test batches; its one choice, how many samples a class keeps, is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.func import functional_call

from fedlit import Phase, Requires, Run
from fedlit.checks import check_at_least, check_between, check_count
from fedlit.federation import Client
from fedlit.functional import centroid_labels, information_maximisation_loss, nearest_prototypes
from fedlit.methods.baselines import FineTuning, SourceOnly, ThenAlone
from fedlit.methods.shared import check_moves_features
from fedlit.models import Replica
from fedlit.module import Batch
from fedlit.run.local import evaluating
from fedlit.run.refinement import NoRefinementError, looked_at, set_
from fedlit.run.replicas import Replicas


class Adaptation(FineTuning):
    """SHOT's training of the target's extractor."""

    def __init__(self, method: SHOT) -> None:
        super().__init__(method)
        self._shot = method

    def on_round_start(self, run: Run) -> None:
        """Make pseudo-labels of all of the target's training samples anew."""
        super().on_round_start(run)
        self._shot.make_pseudo_labels_()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Return the target's loss in this step."""
        return self._shot.run.local_losses(self._shot.adaptation_loss, batch)


class SHOT(ThenAlone):
    """FedAvg over the sources, then the target's extractor adapts to its fixed classifier (Liang et al., ICML 2020).

    The target's predictions become certain and diverse, and follow pseudo-labels: of the nearest class centroid, which
    it computes from its features and predictions when a round starts. Labels of the target are not used, and nothing
    is sent in these rounds.

    Args:
        extractor: Network from inputs to features.
        classifier: Network from features to logits; ``None`` is a linear layer.
        federated_rounds: Number of rounds over the sources, at least 1; those after them adapt the target, so that the
            Trainer needs more: half as many again, say.
        pseudo_weight: Weight beta of the cross-entropy on pseudo-labels, at least 0 (0.3 in the paper, 0.1 for digits).
        label_smoothing: Of the sources' labels, in [0, 1].
        kwargs: See `FederatedModule`.
    """

    replicas: Replicas[Replica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True,
        ignores_target_labels=True,
        tasks=("classification",),
        class_weights=False,
        trains_on_information=True,
    )

    def __init__(self, *args: Any, pseudo_weight: float = 0.3, label_smoothing: float = 0.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_at_least("pseudo_weight (beta)", pseudo_weight, 0)
        check_between("label_smoothing", label_smoothing, 0, 1)
        check_moves_features(self)
        self.pseudo_weight = pseudo_weight
        self.label_smoothing = label_smoothing
        self._pseudo_labels: Tensor | None = None  # of the target's training samples, at its process

    @property
    def last_phase(self) -> Phase:
        """Adaptation at the target."""
        return Adaptation(self)

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return a source's cross-entropy with smoothed labels."""
        return F.cross_entropy(self.replicas[client](batch[0]), batch[1], label_smoothing=self.label_smoothing)

    def make_pseudo_labels_(self) -> None:
        """Compute the pseudo-labels at the process of the target."""
        if not self.federation.is_local(self.target):
            return
        network = self.replicas[self.target]
        with evaluating(network), self.trainer.precision_plugin.forward_context():
            features = [network.extractor(inputs) for inputs in self.run.samples.inputs(self.target)]
            p = [network.classifier(each).softmax(dim=1) for each in features]
        self._pseudo_labels = centroid_labels(torch.cat(features), torch.cat(p)).cpu()

    def adaptation_loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return equation 7: information maximisation, and cross-entropy on pseudo-labels; the classifier is fixed."""
        assert self._pseudo_labels is not None
        network = self.replicas[client]
        fixed = {name: param.detach() for name, param in network.classifier.named_parameters()}
        logits: Tensor = functional_call(network.classifier, fixed, (network.extractor(batch[0]),))
        known = self._pseudo_labels[self.run.samples.positions(client)].to(logits.device)
        return information_maximisation_loss(logits) + self.pseudo_weight * F.cross_entropy(logits, known)

    def client_state(self, client: str) -> dict[str, Any]:
        """Return the target's pseudo-labels, for a run that goes on within a round."""
        there = client == self.target.name and self._pseudo_labels is not None
        return {"pseudo_labels": self._pseudo_labels} if there else {}

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore the target's pseudo-labels."""
        self._pseudo_labels = clients.get(self.target.name, {}).get("pseudo_labels")


class T3A(SourceOnly):
    """FedAvg over the sources, then a classifier of class prototypes at the target (Iwasawa and Matsuo, NeurIPS 2021).

    A class's prototype is the mean of directions: of its weights in the sources' classifier, and of the features of
    those target samples that are predicted of it with the least entropy. It is in closed form, and nothing is sent;
    until then, in validations too, the model is that of `SourceOnly`.

    Args:
        num_kept: Samples M that a class keeps, at least 1; ``None`` keeps all (the paper tries 1, 5, 20, 50, 100, all).
        kwargs: See `FederatedModule`; the network ends in a linear layer.
    """

    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True, ignores_target_labels=True, tasks=("classification",), changes_at_end=True
    )

    def __init__(self, *args: Any, num_kept: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if num_kept is not None:
            check_count("num_kept (M)", num_kept, 1, "sample", "None keeps all")
        self.num_kept = num_kept

    def on_run_end(self, run: Run) -> None:
        """Replace the target's last layer."""
        if not self.federation.is_local(self.target):
            return
        try:
            layers, features, p = looked_at(run)
        except NoRefinementError as reason:
            rank_zero_warn(f"T3A leaves the target's classifier as the sources made it: {reason}")
            return
        for layer in layers:
            weight = nearest_prototypes(layer.weight.detach().cpu(), features, p, self.num_kept)
            # as long as the sources' on average, so that probabilities are about as certain
            scale = layer.weight.detach().norm() / math.sqrt(len(weight))
            set_(layer, weight.to(layer.weight) * scale, torch.zeros_like(layer.weight[:, 0]))
