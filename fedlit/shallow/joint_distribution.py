"""Joint distribution adaptation."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, column_or_1d

from fedlit.checks import check_at_least, check_between, check_one_of, refuse
from fedlit.functional import Kernel, Labelling, Scaling, jda
from fedlit.shallow.base import KERNELS, DomainTransformer, median_distance, tensor_of


class JDA(ClassNamePrefixFeaturesOutMixin, DomainTransformer):  # type: ignore[misc]
    """Joint distribution adaptation: components that bring the domains' means together, and those of each class.

    The target's classes are guessed in the components of the iteration before, until the guesses stay as they are. A
    classifier fitted to ``transform(X[source])`` is meant to hold for ``transform(X[target])``. Time grows with the
    cube of the number of features, or with a kernel of samples, in each iteration.

    Args:
        n_components: Number of components m, below the number of samples, and without a kernel at most p.
        gamma: Weight of the regularisation (the paper's lambda), positive; 1 is the paper's, for samples of length 1.
        kernel: ``None`` takes the samples as they are (the published code's "primal"), and else ``"gaussian"``,
            ``"laplace"`` or ``"cauchy"``.
        bandwidth: Kernel width sigma, a length in the units of the samples. ``None`` takes the median distance between
            training samples of both domains (between 1000 of them, if there are more).
        scaling: ``"unit"`` gives every column of W length 1, as published, so that components keep their unequal
            variances; ``"constraint"`` gives all of them the same variance, as the paper's problem states.
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

    Example:
        >>> import numpy as np
        >>> labels, domain = np.arange(80) % 2, np.repeat([1, -1], 40)
        >>> noise = np.random.default_rng(0).normal(size=(80, 2))
        >>> samples = noise + np.stack([6 * labels, 6 * (domain < 0)], axis=1)
        >>> fitted = JDA(n_components=1, labelling="class_mean").fit(samples, labels, sample_domain=domain)
        >>> bool((fitted.pseudo_labels_ == labels[domain < 0]).mean() > 0.9)
        True
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

    def fit(self, X: ArrayLike, y: ArrayLike, sample_domain: ArrayLike | None = None) -> Self:
        """Fit the components common to source and target, and guess the target's classes in them.

        Args:
            X: Samples of both domains in any order, shape (n, p). Computed in float64, also for float32 samples.
            y: Classes, shape (n,), numbers or strings. Those of target samples are not read, and may be anything.
            sample_domain: Domain of each sample, shape (n,), integers: positive for source, negative for target.
                Required.

        Raises:
            ValueError: If a parameter or ``sample_domain`` is out of range, ``y`` is missing or no classes, or there
                are fewer independent components than ``n_components``.
            TypeError: If ``sample_domain`` is not a vector of integers.
        """
        if y is None:
            # scikit-learn's checks look for these words
            refuse("y", "the source's classes", y, "JDA requires y to be passed, but the target y is None")
        samples, source = self._prepared(X, sample_domain)
        labels = column_or_1d(y, warn=True)
        check_consistent_length(samples, labels)
        check_classification_targets(labels[source])
        names, classes = np.unique(labels[source], return_inverse=True)
        num_samples, num_features = samples.shape
        kernel, highest = None, num_samples - 1
        if self.kernel is None:
            highest = min(num_features, highest)
        else:
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
        self._mapping = solution.mapping  # and not the projected training samples
        self._n_features_out = self.n_components
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags
