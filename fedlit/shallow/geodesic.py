"""The geodesic flow kernel as features."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin

from fedlit.checks import check, check_at_least
from fedlit.functional import geodesic_flow_factor, principal_axes, subspace_dimension
from fedlit.shallow.base import DomainTransformer, linear_map, tensor_of


class GFK(ClassNamePrefixFeaturesOutMixin, DomainTransformer):  # type: ignore[misc]
    """Geodesic flow kernel: features of which inner products are averaged over subspaces from source to target.

    Each domain is its principal subspace. Features are ``x @ aligner_``, the same map for both domains, and
    ``aligner_ @ aligner_.T`` is the kernel, so that nearest neighbours and linear or kernel machines on them are those
    of the kernel. Features of samples should be on one scale, such as z-scores.

    Args:
        n_components: Dimension d of each domain's subspace, at most half the number of features and less than the
            number of samples of either domain; there are 2 d features. ``"auto"`` takes the smallest at which both
            subspaces disagree with that of all samples, without labels.

    Attributes:
        aligner_: Matrix F, shape (p, 2 d).
        n_components_: Dimension used.
        n_features_in_: Number of features p.

    References:
        Gong et al., CVPR 2012, equations 5 and 6, and section 3.4; :func:`fedlit.functional.geodesic_flow_kernel`.
    """

    def __init__(self, n_components: int | Literal["auto"] = 20) -> None:
        self.n_components = n_components

    def _fit(self, samples: NDArray[Any], source: NDArray[np.bool_], y: ArrayLike | None) -> None:
        domains = [tensor_of(samples[source]), tensor_of(samples[~source])]
        axes = [principal_axes(rows) for rows in domains]
        ranks = [each.shape[1] for each in axes]
        highest = min(samples.shape[1] // 2, *ranks)
        directions = f"source and target samples vary in {ranks[0]} and {ranks[1]} directions"
        # scikit-learn looks for the name n_features in the error for a single feature
        check_at_least(
            "n_features (half of them)", highest, 1, way_out=f"n_features = {samples.shape[1]}, {directions}"
        )
        if self.n_components == "auto":
            pooled = principal_axes(torch.cat(domains))
            self.n_components_ = subspace_dimension(axes[0][:, :highest], axes[1][:, :highest], pooled[:, :highest])
        else:
            fits = not isinstance(self.n_components, str) and 1 <= self.n_components <= highest
            rule = f"from 1 to {highest}, half the features at most, or 'auto'"
            check(fits, "n_components (d)", rule, self.n_components, directions)
            self.n_components_ = int(self.n_components)
        source_axes, target_axes = (each[:, : self.n_components_] for each in axes)
        factor = geodesic_flow_factor(source_axes, target_axes)
        self.aligner_ = factor.numpy()
        self._mapping = partial(linear_map, factor)
        self._n_features_out = 2 * self.n_components_
