"""CORAL: source samples are given the target's covariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import OneToOneFeatureMixin
from sklearn.utils.validation import _num_samples, check_is_fitted, validate_data
from torch import Tensor

from fedlit.checks import check_at_least
from fedlit.functional import Ridge, coral_map
from fedlit.shallow.base import DomainTransformer, masked, source_mask, tensor_of


class CORAL(OneToOneFeatureMixin, DomainTransformer):  # type: ignore[misc]
    """Correlation alignment: source samples are whitened and given the target's covariance; target samples stay.

    ``fit_transform(X, y, sample_domain)`` moves the source's rows, to which a classifier is then fitted;
    ``transform(X)`` takes samples for the target's, as a predicting pipeline does, and leaves them as they are.

    Args:
        reg: Multiple r of the identity added to both covariances, at least 0. ``"auto"`` takes a tenth of the mean
            variance of each domain's features. The paper's 1 presumes z-scores.
        center: Whether source samples are moved to the target's mean as well, which the paper does not do. Without it,
            the source's mean is mapped as if it were a part of its spread: center features that are not z-scores.

    Attributes:
        aligner_: Matrix A, shape (p, p): source rows become ``x @ aligner_ + offset_``.
        n_features_in_: Number of features p.
        offset_: Shape (p,); zero without ``center``.

    References:
        Sun, Feng and Saenko, AAAI 2016, Algorithm 1; :func:`fedlit.functional.coral_map`.
    """

    def __init__(self, reg: Ridge = "auto", *, center: bool = False) -> None:
        self.reg = reg
        self.center = center

    def _fit(self, samples: NDArray[Any], source: NDArray[np.bool_], y: ArrayLike | None) -> None:
        covariances, means = [], []
        for name, rows in (("source", samples[source]), ("target", samples[~source])):
            check_at_least(f"sample_domain ({name})", len(rows), 2, "samples for a covariance")
            exact = tensor_of(rows)
            means.append(exact.mean(dim=0))
            centred = exact - means[-1]
            covariances.append(centred.T @ centred / (len(rows) - 1))
        self._map = coral_map(covariances[0], covariances[1], self.reg)
        shift = means[1] - means[0] @ self._map
        self._shift: Tensor = shift if self.center else torch.zeros_like(shift)
        self.aligner_ = self._map.numpy()
        self.offset_ = self._shift.numpy()

    def fit_transform(
        self, X: ArrayLike, y: Any = None, sample_domain: ArrayLike | None = None, **fit_params: Any
    ) -> NDArray[Any]:
        """Fit the map, and move the source's rows by it: those of ``sample_domain``, or whose label is not masked."""
        self.fit(X, y, sample_domain=sample_domain, **fit_params)
        if sample_domain is None and (without := masked(y, _num_samples(X))).any():
            sample_domain = np.where(without, -1, 1)
        return self.transform(X, sample_domain=sample_domain)

    def transform(self, X: ArrayLike, sample_domain: ArrayLike | None = None) -> NDArray[Any]:
        """Move the source's rows of samples, shape (k, p); without ``sample_domain`` all are the target's, and stay."""
        check_is_fitted(self)
        samples = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        moved: NDArray[Any] = samples.copy()
        if sample_domain is not None:
            source = source_mask(sample_domain, samples, both=False)
            moved[source] = (tensor_of(samples[source]) @ self._map + self._shift).numpy()
        return moved
