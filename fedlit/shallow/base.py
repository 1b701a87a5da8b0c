"""What the estimators share: checks of samples and their domains, and transforming by a common map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import pdist
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
from torch import Tensor

from fedlit.functional import Kernel, cauchy_kernel, gaussian_kernel, laplace_kernel

KERNELS = {"gaussian": gaussian_kernel, "laplace": laplace_kernel, "cauchy": cauchy_kernel}

# pairs of 1000 samples are half a million distances, whose median is known to about a percent
_MEDIAN_SAMPLES = 1000


def median_distance(samples: NDArray[Any], kernel: Kernel) -> float:
    """Median distance between samples, in the norm that the kernel is a function of."""
    if len(samples) > _MEDIAN_SAMPLES:
        samples = samples[np.random.default_rng(0).permutation(len(samples))[:_MEDIAN_SAMPLES]]
    median = float(np.median(pdist(samples, "cityblock" if kernel == "laplace" else "euclidean")))
    if median == 0:
        raise ValueError(
            "bandwidth (sigma) cannot be the median distance between samples, which is 0 as most samples coincide: "
            "give a positive length"
        )
    return median


def source_mask(sample_domain: ArrayLike | None, samples: NDArray[Any], *, both: bool = True) -> NDArray[np.bool_]:
    """Which rows are source samples, after checking that every row is of either domain, and that ``both`` are there."""
    if sample_domain is None:
        raise ValueError(
            "sample_domain is required: one integer per sample, positive for source and negative for target; "
            "in a Pipeline pass it as STEP__sample_domain"
        )
    domain = np.asarray(sample_domain)
    if domain.ndim != 1 or domain.dtype.kind not in "iu":
        raise TypeError(
            "sample_domain must be a vector of integers, positive for source and negative for target, "
            f"got shape {domain.shape} of {domain.dtype}"
        )
    check_consistent_length(samples, domain)
    if (domain == 0).any():
        raise ValueError(
            f"sample_domain must be positive for source and negative for target, got {int((domain == 0).sum())} zeros"
        )
    source: NDArray[np.bool_] = domain > 0
    if both and (source.all() or not source.any()):
        present = "source (positive)" if source.all() else "target (negative)"
        raise ValueError(f"sample_domain must have samples of both domains, got only {present} ones")
    return source


def check_components(n_components: int, most: int, why: str) -> None:
    """Refuse a number of components out of range, under its name in scikit-learn."""
    if not 1 <= n_components <= most:
        raise ValueError(f"n_components (m) must be between 1 and {most}, {why}, got {n_components}")


def check_kernel(kernel: str) -> None:
    """Refuse a kernel that is not known."""
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel must be one of {list(get_args(Kernel))}, got {kernel!r}")


class DomainTransformer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer that is fitted to samples of both domains, in float64 whatever the samples."""

    _mapping: Callable[[Tensor], Tensor]

    def _prepared(self, X: ArrayLike, sample_domain: ArrayLike | None) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Samples, checked, and which of them are the source's."""
        samples = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        return samples, source_mask(sample_domain, samples)

    def transform(self, X: ArrayLike) -> NDArray[Any]:
        """Project samples of either domain.

        Args:
            X: Samples, shape (k, p).

        Returns:
            Components, a row for each sample, float32 for float32 samples and else float64.
        """
        check_is_fitted(self)
        samples = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        projected = self._mapping(tensor_of(samples))
        return projected.numpy().astype(samples.dtype)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def tensor_of(samples: NDArray[Any]) -> Tensor:
    """A float64 copy, for arrays of pandas or of a memory map are read-only, which tensors cannot be."""
    return torch.tensor(samples, dtype=torch.float64)


def linear_map(aligner: Tensor, x: Tensor) -> Tensor:
    """Rows of samples times a matrix."""
    return x @ aligner
