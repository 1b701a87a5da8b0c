"""The geodesic flow kernel as features."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Self

import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin

from fedlit.functional import geodesic_flow_factor, principal_axes, subspace_dimension
from fedlit.shallow.base import DomainTransformer, linear_map, tensor_of


class GFK(ClassNamePrefixFeaturesOutMixin, DomainTransformer):  # type: ignore[misc]
    """Geodesic flow kernel: features of which inner products are averaged over subspaces from source to target.

    Each domain is its principal subspace. Features are ``x @ aligner_``, linear in the samples, for both domains the
    same, and ``aligner_ @ aligner_.T`` is the kernel, so that nearest neighbours and linear or kernel machines on them
    are those of the kernel. Features of samples should be on one scale, such as z-scores.

    Args:
        n_components: Dimension d of each domain's subspace, at most half the number of features and less than the
            number of samples of either domain; there are 2 d features. ``"auto"`` takes the smallest at which both
            subspaces disagree with that of all samples (subspace disagreement), which no label is needed for.

    Attributes:
        aligner_: Matrix F, shape (p, 2 d).
        n_components_: Dimension used.
        n_features_in_: Number of features p.

    References:
        Gong et al., Geodesic flow kernel for unsupervised domain adaptation, CVPR 2012, equations 5 and 6, and
        section 3.4; :func:`fedlit.functional.geodesic_flow_kernel`.

    Example:
        >>> import numpy as np
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> labels, domain = np.arange(200) % 2, np.repeat([1, -1], 100)
        >>> samples = np.random.default_rng(0).normal(size=(200, 6), scale=0.3)
        >>> samples[:, 0] += 4 * labels
        >>> samples[:, 1] += np.where(domain < 0, 2 * labels, 0)
        >>> features = GFK(n_components=1).fit_transform(samples, sample_domain=domain)
        >>> source = domain > 0
        >>> classifier = KNeighborsClassifier(1).fit(features[source], labels[source])
        >>> classifier.score(features[~source], labels[~source]) > 0.9
        True
    """

    def __init__(self, n_components: int | Literal["auto"] = 20) -> None:
        self.n_components = n_components

    def fit(self, X: ArrayLike, y: Any = None, sample_domain: ArrayLike | None = None) -> Self:
        """Find the subspaces, and the features of the kernel between them.

        Args:
            X: Samples of both domains in any order, shape (n, p).
            y: Ignored; here for pipelines.
            sample_domain: Domain of each sample, shape (n,), integers: positive for source, negative for target.
                Required.

        Returns:
            The fitted estimator.

        Raises:
            ValueError: If ``n_components`` is out of range, a domain varies in fewer directions, or ``sample_domain``
                is missing, holds a zero or only one domain.
            TypeError: If ``sample_domain`` is not a vector of integers.
        """
        samples, source = self._prepared(X, sample_domain)
        domains = [tensor_of(samples[source]), tensor_of(samples[~source])]
        axes = [principal_axes(rows) for rows in domains]
        ranks = [each.shape[1] for each in axes]
        most = min(samples.shape[1] // 2, *ranks)
        if most < 1:
            raise ValueError(
                f"a subspace of at most half the features, in which both domains vary, needs more than n_features = "
                f"{samples.shape[1]} with source and target samples that vary in {ranks[0]} and {ranks[1]} directions: "
                "give at least 2 features, and 2 different samples of each domain"
            )
        if self.n_components == "auto":
            pooled = principal_axes(torch.cat(domains))
            self.n_components_ = subspace_dimension(axes[0][:, :most], axes[1][:, :most], pooled[:, :most])
        elif isinstance(self.n_components, str) or not 1 <= self.n_components <= most:
            raise ValueError(
                f"n_components (d) must be between 1 and {most}, or 'auto', got {self.n_components!r}: at most "
                f"half the {samples.shape[1]} features, and the directions in which source ({ranks[0]}) and target "
                f"({ranks[1]}) samples vary"
            )
        else:
            self.n_components_ = int(self.n_components)
        source_axes, target_axes = (each[:, : self.n_components_] for each in axes)
        factor = geodesic_flow_factor(source_axes, target_axes)
        self.aligner_ = factor.numpy()
        self._mapping = partial(linear_map, factor)
        self._n_features_out = 2 * self.n_components_
        return self
