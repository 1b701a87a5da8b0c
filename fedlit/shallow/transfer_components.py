"""Transfer component analysis, exact and with random features, and joint distribution adaptation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, column_or_1d
from torch import Tensor

from fedlit.checks import check, check_at_least, check_between, check_one_of, refuse
from fedlit.functional import (
    Kernel,
    Labelling,
    Scaling,
    TransferComponents,
    jda,
    r_tca,
    random_fourier_features,
    rf_tca,
    sample_frequencies,
    tca,
)
from fedlit.shallow.base import KERNELS, DomainTransformer, masked, median_distance, tensor_of, without_missing


class TCA(ClassNamePrefixFeaturesOutMixin, DomainTransformer):  # type: ignore[misc]
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

    _components: Callable[..., TransferComponents] = staticmethod(tca)

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

    def _fit(self, samples: NDArray[Any], source: NDArray[np.bool_], y: ArrayLike | None) -> None:
        self._check_parameters(len(samples))
        self.bandwidth_ = median_distance(samples, self.kernel) if self.bandwidth is None else float(self.bandwidth)
        rows, is_source = tensor_of(samples), torch.from_numpy(source)
        found = self._solve(rows[is_source], rows[~is_source])
        self.eigenvalues_ = found.eigenvalues.numpy()
        self.aligner_ = found.aligner.numpy()
        self._mapping = found.mapping  # and not the projected training samples
        self._n_features_out = self.n_components

    def _check_parameters(self, num_samples: int) -> None:
        check_one_of("kernel", self.kernel, KERNELS)
        check_between("n_components (m)", self.n_components, 1, num_samples - 1, "it is below the number of samples")

    def _solve(self, source: Tensor, target: Tensor) -> TransferComponents:
        kernel = partial(KERNELS[self.kernel], bandwidth=self.bandwidth_)
        samples = torch.cat([source, target])
        self.gamma_ = self._scale(lambda: self._scatter(kernel(samples, samples)), len(source), len(target))
        return type(self)._components(source, target, self.n_components, self.gamma_, kernel, self.scaling)

    def _scale(self, scatter: Callable[[], float], num_source: int, num_target: int) -> float:
        """Gamma, or the mean of l^T A l over all assignments of samples to domains, from the trace of H A (scatter)."""
        if self.gamma is not None:
            return float(self.gamma)
        # under such assignments the mean of l l^T is H (1/nS + 1/nT) / (n - 1)
        chance = scatter() * (1 / num_source + 1 / num_target) / (num_source + num_target - 1)
        # samples that all coincide have no scatter but for round-off, and are refused later for their rank
        return max(chance, float(np.finfo(np.float64).eps))

    def _scatter(self, gram: Tensor) -> float:
        """Trace of H A, where l^T A l is the distance between domains that is penalised."""
        return (gram - gram.mean(dim=0)).square().sum().item()


class RTCA(TCA):
    """Transfer component analysis regularised in the kernel's space, of which :class:`RFTCA` is the fast version.

    Use, cost, parameters and attributes are those of :class:`TCA`; the components are others. ``gamma`` weighs against
    the distance l^T K l.

    References:
        FedRF-TCA (arXiv 2311.04686), R-TCA; :func:`fedlit.functional.r_tca`.
    """

    _components = staticmethod(r_tca)

    def _scatter(self, gram: Tensor) -> float:
        return (gram.trace() - gram.mean(dim=0).sum()).item()


class RFTCA(TCA):
    """Transfer component analysis with random Fourier features: time linear in the number of samples.

    Use, parameters and attributes are those of :class:`TCA`. Each entry of the kernel is estimated with a standard
    deviation below ``1 / sqrt(2 * n_frequencies)``: where samples differ little, take more frequencies. ``gamma``
    weighs against the squared distance between the domains' mean features.

    Args:
        n_components: Number of components m, below the number of samples and at most twice ``n_frequencies``.
        n_frequencies: Number of random frequencies N.
        random_state: Seed of the frequencies, an integer.

    Attributes:
        aligner_: Matrix W, shape (2N, m).
        frequencies_: Random frequencies Omega, shape (N, p).

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

    def _solve(self, source: Tensor, target: Tensor) -> TransferComponents:
        dimensions = self.n_frequencies, source.shape[1]
        frequencies = sample_frequencies(*dimensions, self.bandwidth_, self.kernel, int(self.random_state))

        def scatter() -> float:
            number = len(source) + len(target)
            total = _feature_total(source, frequencies) + _feature_total(target, frequencies)
            # features have length 1, so that their scatter is known from their mean
            return number - total.square().sum().item() / number

        self.gamma_ = self._scale(scatter, len(source), len(target))
        self.frequencies_ = frequencies.numpy()
        return rf_tca(source, target, self.n_components, self.gamma_, frequencies, self.scaling)


def _feature_total(samples: Tensor, frequencies: Tensor) -> Tensor:
    """Sum of random Fourier features over samples, of which a few thousand are in memory at a time."""
    total = samples.new_zeros(2 * len(frequencies))
    for start in range(0, len(samples), 4096):
        total += random_fourier_features(samples[start : start + 4096], frequencies).sum(dim=0)
    return total


class JDA(ClassNamePrefixFeaturesOutMixin, DomainTransformer):  # type: ignore[misc]
    """Joint distribution adaptation: components that bring the domains' means together, and those of each class.

    The target's classes are guessed in the components of the iteration before, until the guesses stay as they are. A
    classifier fitted to ``transform(X[source])`` is meant to hold for ``transform(X[target])``. `fit` needs the classes
    ``y``, numbers or strings, of the source's samples; those of the target's are not read, and may be anything. Time
    grows with the cube of the number of features, or with a kernel of samples, in each iteration.

    Args:
        n_components: Number of components m, below the number of samples, and without a kernel at most p.
        gamma: Weight of the regularisation (the paper's lambda), positive; 1 is the paper's, for samples of length 1.
        kernel: ``None`` takes the samples as they are (the published code's "primal"), and else ``"gaussian"``,
            ``"laplace"`` or ``"cauchy"``.
        bandwidth: Kernel width sigma, as for :class:`TCA`.
        scaling: ``"unit"``, as published, or ``"constraint"``, as for :class:`TCA`.
        labelling: How the target's classes are guessed: ``"neighbour"`` by the source sample at the smallest angle, as
            published, which is for samples centred beforehand or of length 1; or ``"class_mean"`` by the nearest mean
            of a class.
        max_iter: Maximal number of iterations, the first of which is without classes.

    Attributes:
        aligner_: Matrix W, shape (p, m), or with a kernel (n, m) with rows in the order source, target.
        bandwidth_: Kernel width used, if there is a kernel.
        eigenvalues_: Eigenvalues of the components, shape (m,), descending.
        n_features_in_: Number of features p.
        n_iter_: Iterations made.
        pseudo_labels_: Classes guessed last, shape (number of target samples,), in their order in ``X``.

    References:
        Long et al., ICCV 2013, Algorithm 1; :func:`fedlit.functional.jda`, which names errors of published code.
    """

    def __init__(
        self,
        n_components: int = 30,
        *,
        gamma: float = 1.0,
        kernel: Kernel | None = None,
        bandwidth: float | None = None,
        scaling: Scaling = "unit",
        labelling: Labelling = "neighbour",
        max_iter: int = 10,
    ) -> None:
        self.n_components = n_components
        self.gamma = gamma
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.scaling = scaling
        self.labelling = labelling
        self.max_iter = max_iter

    def _fit(self, samples: NDArray[Any], source: NDArray[np.bool_], y: ArrayLike | None) -> None:
        if y is None:
            # scikit-learn's checks look for these words
            refuse("y", "the source's classes", y, "JDA requires y to be passed, but the target y is None")
        labels = column_or_1d(y, warn=True)
        check_consistent_length(samples, labels)
        lacking = masked(labels, len(labels)) & source
        check(not lacking.any(), "y", "a class of each source sample", None, shown=f"{lacking.sum()} without one")
        labels = without_missing(labels[source])
        check_classification_targets(labels)
        names, classes = np.unique(labels, return_inverse=True)
        num_samples, num_features = samples.shape
        kernel, highest = None, min(num_samples - 1, num_features if self.kernel is None else num_samples)
        if self.kernel is not None:
            check_one_of("kernel", self.kernel, KERNELS)
        way_out = f"there are {num_samples} samples of {num_features} features"
        check_between("n_components (m)", self.n_components, 1, highest, way_out)
        if self.kernel is not None:
            self.bandwidth_ = median_distance(samples, self.kernel) if self.bandwidth is None else float(self.bandwidth)
            kernel = partial(KERNELS[self.kernel], bandwidth=self.bandwidth_)
        check_at_least("max_iter", self.max_iter, 1, "iteration", "one alone is TCA")
        solution = jda(
            tensor_of(samples[source]),
            torch.from_numpy(classes),
            tensor_of(samples[~source]),
            self.n_components,
            float(self.gamma),
            kernel,
            num_iterations=self.max_iter,
            labelling=self.labelling,
            scaling=self.scaling,
        )
        self.eigenvalues_ = solution.eigenvalues.numpy()
        self.aligner_ = solution.aligner.numpy()
        self.pseudo_labels_ = names[solution.pseudo_labels.numpy()]
        self.n_iter_ = solution.num_iterations
        self._mapping = solution.mapping
        self._n_features_out = self.n_components

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags
