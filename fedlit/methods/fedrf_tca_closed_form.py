"""RF-TCA and JDA of a whole federation in closed form: one round, one secure mean, no training. Not in the papers.

RF-TCA (Feng et al., arXiv 2311.04686, Algorithm 1) needs of the data only their mean random features and second
moments, and JDA (Long et al., ICCV 2013, Algorithm 1) of the sources those and sums by class; these add up over
clients. So the aligner is that of the pooled data, which nobody has seen. The classifier, too, follows from moments:
linear discriminant analysis of the aligned source features.

Differences of FedJDA from its paper: features are random Fourier features; a target sample takes the class of the
nearest class mean, as the nearest source sample is not known. The published code's factor C and its columns of length 1
are kept, its faults not: see `jda`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedlit import ReplicaSpec, Requires
from fedlit.checks import check, check_count, check_one_of, refuse
from fedlit.federation import Client
from fedlit.federation.lone_classes import LoneClasses
from fedlit.functional import (
    Kernel,
    RandomFeatureSums,
    Scaling,
    jda_from_sums,
    linear_discriminant,
    rf_tca_from_sums,
    sample_frequencies,
)
from fedlit.methods.closed_form import ClosedForm
from fedlit.models import AlignedReplica, feature_width
from fedlit.models.aligned import STAYS_LOCAL, check_widths
from fedlit.models.copies import copied
from fedlit.run.replicas import Replicas
from fedlit.run.weights import Weighting


class FedRFTCAClosedForm(ClosedForm):
    """RF-TCA from one secure mean of moments (own; RF-TCA is of Feng et al., arXiv 2311.04686, Algorithm 1).

    Its extractor is fixed (the identity on features computed beforehand, or a pretrained network): every client goes
    once through its data and adds up random features s, their outer products, and for sources s times the label.
    The target receives the sources' means only, adds its moments, solves for aligner and classifier, and sends
    both to everyone. Then the run stops. With ``warmup_rounds`` this is the round after them, and the extractor is the
    one trained in them. Sources that are absent in it (by default nobody) are left out and get no model.

    Args:
        extractor: Network from inputs to features, used as it is.
        num_frequencies: Number N of random frequencies.
        num_components: Width m of the aligned features, at most 2N.
        bandwidth: Kernel width sigma, in units of the features (of length 1 with ``unit_norm``).
        kernel: Kernel that the random features stand for.
        unit_norm: Scale extracted features to length 1, so that one bandwidth fits all extractors.
        gamma: Weight of RF-TCA's regularisation, positive; ``None`` takes its useful scale, the squared distance
            between the domains' mean features.
        shrinkage: Of the classifier's covariance: see `linear_discriminant`.
        lone_classes: Where a backend hides the moments, those of a class that one source alone has are its own:
            ``"leave_out"`` that source's samples of it, so that nobody predicts the class, or ``"send"`` them.
        weighting: Weights of sources in the mean: by ``"samples"`` (pooled data), ``"sqrt"`` or ``"uniform"``.
        kwargs: See `FederatedModule`.

    Raises:
        RosterError: If the round did not go through all training samples of a client, or the target or every source is
            absent in it.

    Notes:
        The moments are N (2N + 1) + 2N (C + 1) + C numbers in float64, the model is 2N m + (m + 1) C.

        With a privacy backend the target learns the sources' weighted mean moments (with one source, its own exactly),
        class shares and class means included; with ``lone_classes="send"`` those of a class that one source alone has
        are that source's own, which it cannot notice. Left out, samples of it are in no moment, and the source weighs
        as before. The sources learn W and the classifier, which reveal something of the target: as W^T C W = I, the
        pooled scatter C on the span of W follows from W, all of it for m = 2N, and a source that knows the other
        sources' share, as a single source does, can subtract it.
    """

    replicas: Replicas[AlignedReplica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True,
        ignores_target_labels=True,
        tasks=("classification",),
        class_weights=False,
        matches_distributions=True,
    )
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=STAYS_LOCAL, frozen_statistics=True)
    problem: ClassVar[str] = "RF-TCA"
    solution: ClassVar[tuple[str, ...]] = ("aligner.weight", "classifier.weight", "classifier.bias")
    solution_words: ClassVar[str] = "W and the classifier"

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        *,
        num_frequencies: int = 500,
        num_components: int = 100,
        bandwidth: float = 1.0,
        kernel: Kernel = "gaussian",
        unit_norm: bool = True,
        gamma: float | None = None,
        shrinkage: float = 0.1,
        lone_classes: LoneClasses = "leave_out",
        weighting: Weighting = "samples",
        **kwargs: Any,
    ) -> None:
        check_widths(num_frequencies, num_components, bandwidth, kernel)
        check(0 < shrinkage <= 1, "shrinkage", "in (0, 1]", shrinkage, "it is the weight of the identity")
        if gamma is not None and not 0 < gamma < math.inf:
            refuse("gamma", "positive and finite, or null to take the useful scale from the data", gamma)
        classifier = nn.Linear(num_components, num_classes)
        super().__init__(
            clients, target, num_classes, extractor, classifier,
            lone_classes=lone_classes, weighting=weighting, **kwargs,
        )  # fmt: skip
        self.num_frequencies = num_frequencies
        self.num_components = num_components
        self.bandwidth = bandwidth
        self.kernel = kernel
        self.unit_norm = unit_norm
        self.gamma = gamma
        self.shrinkage = shrinkage

    @property
    def contents(self) -> str:
        """Moments of random features."""
        return "mean random features, their products, and sums by class"

    def features(self, client: Client, inputs: Any) -> Tensor:
        """Return random features of a batch of a local client, shape (b, 2N)."""
        return self.replicas[client].random_features(inputs)

    @property
    def factor(self) -> float:
        """N: entries of the outer products are of the order 1/N, and all that is sent is then in [-1, 1]."""
        return self.num_frequencies

    def solve(self, mean: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return aligner and classifier, as entries of a replica's state, from the sources' mean `moments`."""
        own = self._sums[self.target.name]
        first, second = mean["first"].double(), self.second_moment(mean)
        present = self.federation.present("moments")
        count = sum(client.num_samples or 0 for client in present if not client.is_target)
        pooled = RandomFeatureSums(second * count, first * count, count)
        by_class = mean["by_class"].double()
        aligner = self.align(pooled, by_class * count, own)
        weight, bias = linear_discriminant(
            aligner.T @ second @ aligner, aligner.T @ by_class[:-1], by_class[-1], self.shrinkage
        )
        model = zip(self.solution, (aligner.T, weight, bias), strict=True)
        return {name: tensor.float().contiguous() for name, tensor in model}

    def align(self, sources: RandomFeatureSums, by_class: Tensor, own: RandomFeatureSums) -> Tensor:
        """Return W, shape (2N, m), from sums over all sources and over the target's samples.

        ``by_class`` has the sources' sums of random features by class, and in its last row their numbers of samples,
        shape (2N + 1, C).
        """
        gamma = self.gamma
        if gamma is None:
            gamma = float((sources.total / sources.count - own.total / own.count).square().sum())
        aligner, _ = rf_tca_from_sums(sources, own, self.num_components, gamma)
        return aligner

    def build_replica(self) -> nn.Module:
        """The extractor as given, frequencies from the seed, and room for aligner and classifier."""
        extractor, classifier = copied(self.originals)
        width = feature_width(extractor)
        sample = partial(sample_frequencies, self.num_frequencies, width, self.bandwidth, self.kernel)
        aligner = nn.Linear(2 * self.num_frequencies, self.num_components, bias=False)
        return AlignedReplica(extractor, sample, self.federation.seed, aligner, classifier, self.unit_norm)


class FedJDA(FedRFTCAClosedForm):
    """JDA from one secure mean over the sources (own; JDA is of Long et al., ICCV 2013, Algorithm 1).

    As `FedRFTCAClosedForm`, with the means of classes brought together, too: the target solves RF-TCA first, gives each
    of its samples the class of the nearest class mean in the components, solves again with these classes, and so on
    until they stay. More iterations cost no message.

    Args:
        num_iterations: Most iterations, the first of which is without classes.
        gamma: Weight of the regularisation (the paper's lambda), positive. Its useful scale is the variance of random
            features, below 1.
        scaling: ``"unit"`` gives every column of W length 1, as published, so that components keep their unequal
            variances; ``"constraint"`` gives all the same. The nearest class mean depends on it.
        kwargs: See `FedRFTCAClosedForm`.

    Notes:
        The target keeps the random features of all its samples (n_T x 2N numbers) until they are classified. What is
        sent is as for `FedRFTCAClosedForm`; W and the classifier follow from the means of the guessed classes too.
    """

    problem: ClassVar[str] = "JDA"

    def __init__(
        self, *args: Any, num_iterations: int = 10, gamma: float = 1.0, scaling: Scaling = "unit", **kwargs: Any
    ) -> None:
        check_count("num_iterations", num_iterations, 1, way_out="one alone is RF-TCA")
        check_one_of("scaling", scaling, ("unit", "constraint"))
        if gamma is None:
            refuse("gamma", "positive and finite", gamma, "the paper's is 1")
        super().__init__(*args, gamma=gamma, **kwargs)
        self.num_iterations = num_iterations
        self.scaling = scaling
        self._rows: list[Tensor] = []

    def add_(self, client: Client, features: Tensor, labels: Tensor | None) -> None:
        """The target keeps its random features as well, for they are classified in each iteration."""
        super().add_(client, features, labels)
        if client.is_target:
            self._rows.append(features)

    def forget_(self) -> None:
        """Leave neither sums nor features for another run."""
        super().forget_()
        self._rows.clear()

    def align(self, sources: RandomFeatureSums, by_class: Tensor, own: RandomFeatureSums) -> Tensor:
        """Return W of the last iteration."""
        assert self.gamma is not None
        sums = sources.second_moment, by_class[:-1], by_class[-1], torch.cat(self._rows)
        return jda_from_sums(
            *sums, self.num_components, self.gamma, num_iterations=self.num_iterations, scaling=self.scaling
        ).aligner
