"""Replica of FedDaDiL: an encoder, the public atoms, and the client's coordinates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.functional import project_simplex, softmax_regression
from fedlit.models.replica import Replica, feature_width

STAYS_LOCAL = ("coordinates", "started", "fitted", "reconstruction.", "ensemble.")
"""Prefixes of the names in a replica's state that never leave its client."""


class Dictionary(nn.Module):
    """K atoms: distributions of n labelled points each.

    Args:
        num_atoms: K, at least 1.
        num_points: n, at least 1.
        width: Number d of features.
        num_classes: Number C of classes.

    Attributes:
        points: Shape (K, n, d).
        labels: Class probabilities, shape (K, n, C); at first the points are divided equally between the classes.
    """

    def __init__(self, num_atoms: int, num_points: int, width: int, num_classes: int) -> None:
        super().__init__()
        classes = torch.arange(num_points) % num_classes
        one_hot = F.one_hot(classes, num_classes).float()
        self.points = nn.Parameter(torch.randn(num_atoms, num_points, width) / width**0.5)
        self.labels = nn.Parameter(one_hot.repeat(num_atoms, 1, 1))


class DictionaryReplica(Replica):
    """A client's encoder, dictionary, barycentric coordinates, and classifiers.

    Args:
        extractor: The encoder, with features of shape (batch, d).
        classifier: Predicts until there is a dictionary.
        dictionary: The atoms.
        unit_norm: Scale features to length 1, other than for ``classifier``.
        ensembling: Predict with classifiers of the atoms (E) rather than of the reconstruction (R).
    """

    started: Tensor
    """True once there is a dictionary."""

    fitted: Tensor
    """True while the classifiers of the reconstruction and of the atoms fit the present dictionary."""

    def __init__(
        self, extractor: nn.Module, classifier: nn.Module, dictionary: Dictionary, unit_norm: bool, ensembling: bool
    ) -> None:
        super().__init__(extractor, classifier)
        num_atoms, _, num_classes = dictionary.labels.shape
        width = feature_width(extractor)
        self.dictionary = dictionary
        self.coordinates = nn.Parameter(torch.full((num_atoms,), 1 / num_atoms))
        self.unit_norm = unit_norm
        self.ensembling = ensembling
        self.reconstruction = nn.Linear(width, num_classes).requires_grad_(False)
        self.ensemble = nn.ModuleList(nn.Linear(width, num_classes).requires_grad_(False) for _ in range(num_atoms))
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("fitted", torch.tensor(False))

    def features(self, x: Tensor) -> Tensor:
        """Features of a batch, shape (batch, d)."""
        z: Tensor = self.extractor(x)
        return F.normalize(z, dim=1) if self.unit_norm else z

    def forward(self, x: Tensor) -> Tensor:
        """Log of the class probabilities, shape (batch, C), up to a constant."""
        if not self.started:  # phase 1, which is FedAvg: the length of features matters to a classifier
            return super().forward(x)
        if not self.fitted:
            raise RuntimeError(
                "the dictionary has moved since classifiers were fitted to it: call the method's "
                "prepare_predictions(), as validation, test and prediction by a Trainer do"
            )
        features = self.features(x)
        return self.by_ensemble(features) if self.ensembling else self.by_reconstruction(features)

    def by_reconstruction(self, features: Tensor) -> Tensor:
        """Logits of the classifier that was fitted to the client's barycenter (R)."""
        logits: Tensor = self.reconstruction(features)
        return logits

    def by_ensemble(self, features: Tensor) -> Tensor:
        """Log of the atoms' class probabilities, weighted by the coordinates (E, equation 15)."""
        each = torch.stack([head(features).log_softmax(dim=1) for head in self.ensemble])
        weights = self.coordinates.detach().clamp(min=0).log().to(each)
        return (weights[:, None, None] + each).logsumexp(dim=0)

    def projected(self) -> tuple[Tensor, Tensor]:
        """The atoms' labels and the coordinates, on their simplices."""
        return project_simplex(self.dictionary.labels), project_simplex(self.coordinates)

    @torch.no_grad()
    def project_(self) -> None:
        """Put labels and coordinates back on their simplices."""
        labels, coordinates = self.projected()
        self.dictionary.labels.copy_(labels)
        self.coordinates.copy_(coordinates)

    @torch.no_grad()
    def fit_(self, reconstruction: tuple[Tensor, Tensor], penalty: float, atoms: bool) -> None:
        """Fit a classifier to the client's barycenter, (n, d) and (n, C), and one to each atom if asked (section 3.4).

        The penalty is that of `softmax_regression`.
        """
        heads = [self.reconstruction]
        samples = [reconstruction]
        if atoms:
            heads += list(self.ensemble)  # type: ignore[arg-type]
            samples += zip(self.dictionary.points, self.projected()[0], strict=True)
        for head, (points, labels) in zip(heads, samples, strict=True):
            weight, bias = softmax_regression(points, labels, penalty)
            head.weight.copy_(weight)
            head.bias.copy_(bias)
        self.fitted.fill_(True)
