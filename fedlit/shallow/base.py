"""Shared parts of the estimators: checks of samples and their domains, and transforming by a common map."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import pdist
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
from torch import Tensor

from fedlit.checks import check, is_missing, refuse
from fedlit.functional import Kernel, cauchy_kernel, gaussian_kernel, laplace_kernel

KERNELS = {"gaussian": gaussian_kernel, "laplace": laplace_kernel, "cauchy": cauchy_kernel}

# pairs of 1000 samples are half a million distances, whose median is known to about a percent
_MEDIAN_SAMPLES = 1000
_SIGNS = "positive for source and negative for target"
ONE_DOMAIN = (
    "there is no sample_domain, and no masked label in y: all samples are taken for both domains, and nothing is "
    f"adapted. Give sample_domain, {_SIGNS} (in a Pipeline STEP__sample_domain, or with metadata routing "
    "set_fit_request(sample_domain=True)), or mask the target's labels by -1 or NaN"
)


def median_distance(samples: NDArray[Any], kernel: Kernel) -> float:
    """Median distance between samples, in the norm that the kernel is a function of."""
    if len(samples) > _MEDIAN_SAMPLES:
        samples = samples[np.random.default_rng(0).permutation(len(samples))[:_MEDIAN_SAMPLES]]
    median = float(np.median(pdist(samples, "cityblock" if kernel == "laplace" else "euclidean")))
    rule = "set, since most samples coincide"
    check(median > 0, "bandwidth (sigma)", rule, None, "the median distance is 0; give a positive length")
    return median


def masked(y: ArrayLike | None, num_samples: int, *, by_number: bool = True) -> NDArray[np.bool_]:
    """Samples without a label: NaN, ``None`` and pandas' NA, and ``by_number`` -1 of whole numbers.

    -1 is a class where there is one other at most. Of several labels of each sample all or none are masked.
    """
    if y is None:
        return np.zeros(num_samples, dtype=bool)
    labels = np.asarray(y)
    if labels.dtype.kind not in "iufb":  # of texts numpy makes words of NaN
        values = y.tolist() if hasattr(y, "tolist") else np.asarray(y, dtype=object).tolist()
        rows = [row if isinstance(row, list | tuple) else [row] for row in values]
        missing = np.array([[is_missing(each) for each in row] for row in rows])
    elif labels.dtype.kind == "f":
        missing = np.isnan(labels)
    else:  # -1 and 1 alone are classes
        several = by_number and labels.dtype.kind == "i" and len({*np.unique(labels).tolist()} - {-1}) > 1
        missing = (labels == -1) & several
    check(len(missing) == num_samples, "y", f"of {num_samples} samples, as X", None, shown=str(len(missing)))
    missing = missing.reshape(num_samples, -1)
    mixed = missing.any(axis=1) & ~missing.all(axis=1)
    check(not mixed.any(), "y", "with all labels of a sample, or none", None, shown=f"some of sample {mixed.argmax()}")
    return np.asarray(missing.all(axis=1))


def without_missing(labels: Any) -> Any:
    """Labels, none of which is missing, in an array of their own type."""
    return np.array(labels.tolist()) if str(getattr(labels, "dtype", "")) == "object" else labels


def known_source(
    sample_domain: ArrayLike | None, samples: NDArray[Any], y: ArrayLike | None
) -> NDArray[np.bool_] | None:
    """Return a mask of the source's rows, from ``sample_domain`` or else from which labels are masked.

    ``None`` if there is neither.
    """
    if sample_domain is not None:
        return source_mask(sample_domain, samples)
    without = masked(y, len(samples))
    check(not without.all(), "y", "of some samples, those of the source", None, shown="labels that are all masked")
    return ~without if without.any() else None


def source_mask(
    sample_domain: ArrayLike, samples: NDArray[Any], *, both: bool = True, argument: str = "sample_domain"
) -> NDArray[np.bool_]:
    """Mark the source's rows; ``both`` domains must have some."""
    domain = np.asarray(sample_domain)
    if domain.ndim != 1 or domain.dtype.kind not in "iu":
        shown = f"shape {domain.shape} of {domain.dtype}"
        refuse(argument, f"a vector of integers, {_SIGNS}", domain, error=TypeError, shown=shown)
    check_consistent_length(samples, domain)
    check(not (domain == 0).any(), argument, _SIGNS, 0)
    source: NDArray[np.bool_] = domain > 0
    check(not both or 0 < source.sum() < len(source), argument, f"of both domains, {_SIGNS}", int(domain[0]))
    return source


class DomainTransformer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer that is fitted to samples of both domains, in float64 whatever the samples."""

    _mapping: Callable[[Tensor], Tensor]

    def fit(self, X: ArrayLike, y: ArrayLike | None = None, sample_domain: ArrayLike | None = None) -> Self:
        """Fit the map that is common to both domains, or moves the source's samples.

        Args:
            X: Samples of both domains in any order, shape (n, p).
            y: Classes, where the estimator needs them; otherwise ignored.
            sample_domain: Domain of each sample, shape (n,), integers: positive for source, negative for target.
                ``None`` takes samples whose label in ``y`` is masked for the target's: -1 of whole numbers, NaN or
                ``None``. Where none is, all samples are taken for both domains, and a warning is given.

        Raises:
            ValueError: If a parameter or ``sample_domain`` is out of range, or the samples vary in too few directions.
            TypeError: If ``sample_domain`` is not a vector of integers.
        """
        samples = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        source = known_source(sample_domain, samples, y)
        if source is None:
            warnings.warn(ONE_DOMAIN, stacklevel=2)
            source = np.arange(2 * len(samples)) < len(samples)
            samples, y = np.concatenate([samples, samples]), None if y is None else np.concatenate([np.asarray(y)] * 2)
        self._fit(samples, source, y)
        return self

    def _fit(self, samples: NDArray[Any], source: NDArray[np.bool_], y: ArrayLike | None) -> None:
        raise NotImplementedError

    def transform(self, X: ArrayLike) -> NDArray[Any]:
        """Project samples of either domain, shape (k, p): components, a row for each, float32 for float32 samples."""
        check_is_fitted(self)
        samples = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        projected = self._mapping(tensor_of(samples))
        return projected.numpy().astype(samples.dtype)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def tensor_of(samples: NDArray[Any]) -> Tensor:
    """Copy to a float64 tensor: arrays of pandas or of a memory map are read-only, which tensors cannot be."""
    return torch.tensor(samples, dtype=torch.float64)


def linear_map(aligner: Tensor, x: Tensor) -> Tensor:
    """Rows of samples times a matrix."""
    return x @ aligner
