"""Transfer component analysis, exact and with random features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin
from torch import Tensor

from fedlit.checks import check, check_at_least, check_between, check_one_of
from fedlit.functional import (
    Kernel,
    Scaling,
    TransferComponents,
    r_tca,
    random_fourier_features,
    rf_tca,
    sample_frequencies,
    tca,
)
from fedlit.shallow.base import KERNELS, DomainTransformer, median_distance, tensor_of


def _gap_by_chance(scatter: float, num_source: int, num_target: int) -> float:
    """Mean of l^T A l over all assignments of the samples to domains of these sizes, from the trace of H A.

    Under such assignments the mean of l l^T is H (1/nS + 1/nT) / (n - 1).
    """
    chance = scatter * (1 / num_source + 1 / num_target) / (num_source + num_target - 1)
    # samples that all coincide have no scatter but for round-off, and are refused later for their rank
    return max(chance, float(np.finfo(np.float64).eps))


class _TransferTransformer(ClassNamePrefixFeaturesOutMixin, DomainTransformer):  # type: ignore[misc]
    """Shared parts of the estimators: checks, the split into domains, default scales, and the projection."""

    def __init__(
        self,
        n_components: int = 100,
        *,
        gamma: float | None = None,
        kernel: Kernel = "gaussian",
        bandwidth: float | None = None,
        scaling: Scaling = "unit",
    ) -> None:
        self.n_components = n_components
        self.gamma = gamma
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.scaling = scaling

    def fit(self, X: ArrayLike, y: Any = None, sample_domain: ArrayLike | None = None) -> Self:
        """Fit the components common to source and target.

        Args:
            X: Samples of both domains in any order, shape (n, p). Computed in float64, also for float32 samples.
            y: Ignored; here for pipelines.
            sample_domain: Domain of each sample, shape (n,), integers: positive for source, negative for target.
                Required.

        Raises:
            ValueError: If a parameter or ``sample_domain`` is out of range, or there are fewer independent components
                than ``n_components``.
            TypeError: If ``sample_domain`` is not a vector of integers.
        """
        samples, source = self._prepared(X, sample_domain)
        self._check_parameters(len(samples))
        self.bandwidth_ = median_distance(samples, self.kernel) if self.bandwidth is None else float(self.bandwidth)
        rows = tensor_of(samples)
        is_source = torch.from_numpy(source)
        self._solve(rows[is_source], rows[~is_source])
        self._n_features_out = self.n_components
        return self

    def _check_parameters(self, num_samples: int) -> None:
        check_one_of("kernel", self.kernel, KERNELS)
        check_between("n_components (m)", self.n_components, 1, num_samples - 1, "it is below the number of samples")

    def _solve(self, source: Tensor, target: Tensor) -> None:
        raise NotImplementedError

    def _keep(self, gamma: float, components: TransferComponents) -> None:
        self.gamma_ = gamma
        self.eigenvalues_ = components.eigenvalues.numpy()
        self.aligner_ = components.aligner.numpy()
        self._mapping = components.mapping  # and not the projected training samples


class _KernelTransformer(_TransferTransformer):
    """Shared parts of the estimators with an n x n kernel matrix."""

    _components: Callable[..., TransferComponents]

    def _scatter(self, gram: Tensor) -> float:
        """Trace of H A, where l^T A l is the distance between domains that is penalised."""
        raise NotImplementedError

    def _solve(self, source: Tensor, target: Tensor) -> None:
        kernel = partial(KERNELS[self.kernel], bandwidth=self.bandwidth_)
        if self.gamma is None:
            samples = torch.cat([source, target])
            gamma = _gap_by_chance(self._scatter(kernel(samples, samples)), len(source), len(target))
        else:
            gamma = float(self.gamma)
        components = type(self)._components(source, target, self.n_components, gamma, kernel, self.scaling)
        self._keep(gamma, components)


def _feature_total(samples: Tensor, frequencies: Tensor) -> Tensor:
    """Sum of random Fourier features over samples, of which a few thousand are in memory at a time."""
    total = samples.new_zeros(2 * len(frequencies))
    for start in range(0, len(samples), 4096):
        total += random_fourier_features(samples[start : start + 4096], frequencies).sum(dim=0)
    return total


class TCA(_KernelTransformer):
    """Transfer component analysis: features that keep variance and bring the domains' means together.

    Fit a classifier to ``transform(X[source])`` only; it is meant to hold for ``transform(X[target])``. Time grows with
    the cube of the number of samples, memory with its square.

    Args:
        n_components: Number of components m, below the number of samples.
        gamma: Weight of the regularisation against the distance between domains |K l|^2, positive. ``None`` takes
            that distance as it would be by chance: its mean if samples were assigned to domains at random. A shift of
            the domains beyond chance is then all but removed.
        kernel: ``"gaussian"``, ``"laplace"`` or ``"cauchy"``.
        bandwidth: Kernel width sigma, a length in the units of the samples. ``None`` takes the median distance between
            training samples of both domains (between 1000 of them, if there are more).
        scaling: ``"unit"`` gives every column of W length 1, so that components keep their unequal variances;
            ``"constraint"`` gives all of them the same variance, as the paper's problem states.

    Attributes:
        aligner_: Matrix W, shape (n, m), rows in the order source, target.
        bandwidth_: Kernel width used.
        eigenvalues_: Eigenvalues of the components, shape (m,), descending.
        gamma_: Regularisation used.
        n_features_in_: Number of features p.

    References:
        Pan et al., Domain adaptation via transfer component analysis, IEEE TNN 2011; :func:`fedlit.functional.tca`.

    Example:
        >>> import numpy as np
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> labels = np.arange(80) % 2
        >>> domain = np.where(np.arange(80) < 40, 1, -1)
        >>> noise = np.random.default_rng(0).normal(size=(80, 2))
        >>> samples = noise + np.stack([6 * labels, 6 * (domain < 0)], axis=1)
        >>> components = TCA(n_components=2).fit_transform(samples, sample_domain=domain)
        >>> source = domain > 0
        >>> classifier = KNeighborsClassifier().fit(components[source], labels[source])
        >>> classifier.score(components[~source], labels[~source]) > 0.9
        True
    """

    _components = staticmethod(tca)

    def _scatter(self, gram: Tensor) -> float:
        return (gram - gram.mean(dim=0)).square().sum().item()


class RTCA(_KernelTransformer):
    """Transfer component analysis regularised in the kernel's space, of which :class:`RFTCA` is the fast version.

    Use and cost are those of :class:`TCA`; the components are others.

    Args:
        n_components: Number of components m, below the number of samples.
        gamma: Weight of the regularisation against the distance between domains l^T K l, positive. ``None`` takes
            that distance as it would be by chance, as :class:`TCA` does.
        kernel: ``"gaussian"``, ``"laplace"`` or ``"cauchy"``.
        bandwidth: Kernel width sigma, as for :class:`TCA`.
        scaling: ``"unit"`` or ``"constraint"``, as for :class:`TCA`.

    Attributes:
        aligner_: Matrix W, shape (n, m), rows in the order source, target.
        bandwidth_: Kernel width used.
        eigenvalues_: Eigenvalues of the components, shape (m,), descending.
        gamma_: Regularisation used.
        n_features_in_: Number of features p.

    References:
        FedRF-TCA (arXiv 2311.04686), R-TCA; :func:`fedlit.functional.r_tca`.
    """

    _components = staticmethod(r_tca)

    def _scatter(self, gram: Tensor) -> float:
        return (gram.trace() - gram.mean(dim=0).sum()).item()


class RFTCA(_TransferTransformer):
    """Transfer component analysis with random Fourier features: time linear in the number of samples.

    Use is that of :class:`TCA`. Each entry of the kernel is estimated with a standard deviation below
    ``1 / sqrt(2 * n_frequencies)``: where samples differ little, take more frequencies.

    Args:
        n_components: Number of components m, below the number of samples and at most twice ``n_frequencies``.
        gamma: Weight of the regularisation against the squared distance between the domains' mean features, positive.
            ``None`` takes that distance as it would be by chance, as :class:`TCA` does.
        kernel: Which kernel the features estimate: ``"gaussian"``, ``"laplace"`` or ``"cauchy"``.
        bandwidth: Kernel width sigma, as for :class:`TCA`.
        scaling: ``"unit"`` or ``"constraint"``, as for :class:`TCA`.
        n_frequencies: Number of random frequencies N.
        random_state: Seed of the frequencies, an integer.

    Attributes:
        aligner_: Matrix W, shape (2N, m).
        bandwidth_: Kernel width used.
        eigenvalues_: Eigenvalues of the components, shape (m,), descending.
        frequencies_: Random frequencies Omega, shape (N, p).
        gamma_: Regularisation used.
        n_features_in_: Number of features p.

    References:
        FedRF-TCA (arXiv 2311.04686), Algorithm 1; :func:`fedlit.functional.rf_tca`.
    """

    def __init__(
        self,
        n_components: int = 100,
        *,
        gamma: float | None = None,
        kernel: Kernel = "gaussian",
        bandwidth: float | None = None,
        scaling: Scaling = "unit",
        n_frequencies: int = 500,
        random_state: int = 0,
    ) -> None:
        super().__init__(n_components, gamma=gamma, kernel=kernel, bandwidth=bandwidth, scaling=scaling)
        self.n_frequencies = n_frequencies
        self.random_state = random_state

    def _check_parameters(self, num_samples: int) -> None:
        super()._check_parameters(num_samples)
        check_at_least("n_frequencies (N)", self.n_frequencies, 1)
        way_out = "it is at most twice n_frequencies; ask for fewer components or more frequencies"
        check_between("n_components (m)", self.n_components, 1, 2 * self.n_frequencies, way_out)
        seed = self.random_state
        check(isinstance(seed, int | np.integer), "random_state", "an integer, to repeat fits", seed, error=TypeError)

    def _solve(self, source: Tensor, target: Tensor) -> None:
        dimensions = self.n_frequencies, source.shape[1]
        frequencies = sample_frequencies(*dimensions, self.bandwidth_, self.kernel, int(self.random_state))
        if self.gamma is None:
            num_samples = len(source) + len(target)
            total = _feature_total(source, frequencies) + _feature_total(target, frequencies)
            # features have length 1, so that their scatter is known from their mean
            scatter = num_samples - total.square().sum().item() / num_samples
            gamma = _gap_by_chance(scatter, len(source), len(target))
        else:
            gamma = float(self.gamma)
        components = rf_tca(source, target, self.n_components, gamma, frequencies, self.scaling)
        self.frequencies_ = frequencies.numpy()
        self._keep(gamma, components)
