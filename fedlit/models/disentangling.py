"""Replica of a source of FADA that splits its features into a domain-invariant and a domain-specific part.

Differences from equations 6 to 8 of the paper (Peng, Huang, Zhu and Saenko, ICLR 2020):

- Disentanglers stay at the sources: the target takes extractors and classifiers alone. So classifiers learn from whole
  features too, from which all clients predict.
- All networks of a source take one step at a time. Class identifier and estimator see parts of features as constants,
  and the disentangler sees them as constants: equation 6 would let it help the class identifier that it misleads by
  equation 7, and equation 8 is raised by the estimator alone. Extractors have no gradient from equation 8 and from
  reconstruction, which features that shrink would lower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedlit.functional import loss_from_gradient, mutual_information_bound, uniform_cross_entropy
from fedlit.models.replica import AdversarialReplica, feature_width, make_discriminator

DISENTANGLING = ("disentangler.", "class_identifier.", "estimator.", "reconstructor.")
"""Prefixes of the names in a replica's state that take part in no prediction, and never leave their client."""


class DisentanglingReplica(AdversarialReplica):
    """A client's network with a disentangler of its features, a class identifier, an estimator and a reconstructor.

    Both parts have the features' width. All its networks but the linear reconstructor have one hidden layer.

    Args:
        extractor: See `AdversarialReplica`.
        classifier: See `AdversarialReplica`.
        discriminator: See `AdversarialReplica`.
        num_classes: Classes of the class identifier.
        hidden: Units of the hidden layer of class identifier and estimator.
    """

    def __init__(
        self, extractor: nn.Module, classifier: nn.Module, discriminator: nn.Module, num_classes: int, hidden: int
    ) -> None:
        super().__init__(extractor, classifier, discriminator)
        width, dtype = feature_width(extractor), next(classifier.parameters()).dtype
        split = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2 * width))
        identifier = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
        self.disentangler = split.to(dtype)
        self.class_identifier = identifier.to(dtype)
        self.estimator = make_discriminator(2 * width, hidden).to(dtype)
        self.reconstructor = nn.Linear(2 * width, width).to(dtype)

    def disentangle(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Domain-invariant and domain-specific part of features, each of shape (batch, width)."""
        invariant, specific = self.disentangler(features).chunk(2, dim=1)
        return invariant, specific

    def disentangling_loss(self, features: Tensor, label_loss: Callable[[Tensor], Tensor], mi_weight: float) -> Tensor:
        """Equations 6 and 7 of FADA, reconstruction and equation 8, each with gradients for the networks it trains.

        Args:
            features: With their graph, shape (batch, width). A batch of one sample has no equation 8.
            label_loss: Loss of logits on the batch's labels.
            mi_weight: Weight of the mutual information for the disentangler; for the estimator it is 1.
        """
        invariant, specific = self.disentangle(features)
        judged = specific.detach().requires_grad_()
        logits = self.class_identifier(judged)
        loss = label_loss(self.classify(invariant)) + label_loss(logits)
        confused = uniform_cross_entropy(logits)
        (gradient,) = torch.autograd.grad(confused, judged, retain_graph=True)  # and none by the identifier's weights
        loss = loss + loss_from_gradient(specific, gradient, confused.detach())
        constants = features.detach()
        parts = self.disentangle(constants)
        loss = loss + F.mse_loss(self.reconstruct(*parts), constants)
        if len(features) > 1:
            # in value the parts, and in gradient -mi_weight times: what the estimator raises, the disentangler lowers
            turned = [part.detach() - mi_weight * (part - part.detach()) for part in parts]
            loss = loss - self.information(*turned)
        return loss

    def reconstruct(self, invariant: Tensor, specific: Tensor) -> Tensor:
        """Features from their parts, shape (batch, width)."""
        return cast(Tensor, self.reconstructor(torch.cat([invariant, specific], dim=1)))

    def classify(self, invariant: Tensor) -> Tensor:
        """Logits of a part of features; BatchNorm's statistics stay those of whole features, as in predictions."""
        statistics = {name: buffer.clone() for name, buffer in self.classifier.named_buffers()}
        return cast(Tensor, functional_call(self.classifier, statistics, (invariant,)))

    def information(self, invariant: Tensor, specific: Tensor) -> Tensor:
        """The estimator's bound on the mutual information of the parts of at least two samples, a scalar in nats.

        A sample's invariant part is paired with its own specific part, and with that of the sample before it in the
        batch: a random order could pair some with themselves.
        """
        pairs, others = (torch.cat([invariant, each], dim=1) for each in (specific, specific.roll(1, dims=0)))
        return mutual_information_bound(self.estimator(pairs), self.estimator(others))
