"""Fitting to the source's samples alone, and choosing by sources that are left out in turn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone, is_regressor
from sklearn.model_selection import LeaveOneGroupOut
from sklearn.utils import _safe_indexing, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _num_samples, check_consistent_length, check_is_fitted

from fedlit.checks import check, refuse
from fedlit.shallow.base import ONE_DOMAIN, known_source, masked, source_mask, without_missing


def _has(name: str) -> Any:
    def check_it(self: OnSource) -> bool:
        getattr(getattr(self, "estimator_", self.estimator), name)
        return True

    return check_it


class OnSource(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """An estimator that is fitted to the source's samples, those of the target having no labels.

    As the last step of a Pipeline after one of the estimators of this package, all of which take samples of both
    domains in `fit`.

    Args:
        estimator: Classifier or regressor.

    Attributes:
        estimator_: The one that was fitted.

    Example:
        >>> import numpy as np
        >>> from sklearn.linear_model import LogisticRegression
        >>> from sklearn.pipeline import make_pipeline
        >>> from fedlit.shallow import CORAL, OnSource
        >>> draws = np.random.default_rng(0)
        >>> labels = np.arange(200) % 2
        >>> target = np.arange(200) >= 100
        >>> samples = draws.normal(size=(200, 3)) + np.outer(3 * labels, [1, 0, 0])
        >>> samples[target] *= [1, 8, 8]
        >>> known = np.where(target, -1, labels)  # labels of the target are masked
        >>> model = make_pipeline(CORAL(), OnSource(LogisticRegression())).fit(samples, known)
        >>> float(np.mean(model.predict(samples[target]) == labels[target])) > 0.8
        True
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator

    def fit(self, X: Any, y: Any, sample_domain: ArrayLike | None = None) -> Self:
        """Fit the estimator to rows of the source.

        Args:
            X: Samples, shape (n, p).
            y: Labels, of which those of the target are not read, and samples of the source without one are left out.
            sample_domain: Domain of each sample, positive for source, negative for target; ``None`` takes those whose
                label is masked (-1 of whole numbers, NaN, ``None``) for the target's. Where it is given, -1 masks
                classes alone, no numbers.
        """
        number = _num_samples(X)
        # -1 may be a number like others that a regressor is to learn
        self._by_number = sample_domain is None or not is_regressor(self.estimator)
        rows = known_source(sample_domain, np.empty((number, 0)), y)
        if rows is None:
            warnings.warn(ONE_DOMAIN, stacklevel=2)
        else:
            check_consistent_length(X, y)
            if sample_domain is not None:  # a source may have samples without a label
                without = masked(y, number, by_number=self._by_number)
                numbers = int((rows & without & ~masked(y, number, by_number=False)).sum())
                if numbers:
                    warnings.warn(
                        f"{numbers} samples of the source have the label -1 and are left out, as -1 says that there is "
                        "none: if it is a class, number the classes from 0",
                        stacklevel=2,
                    )
                rows &= ~without
            chosen = np.flatnonzero(rows)
            check(len(chosen) > 0, "y", "of some samples of the source", None, shown="none of them with a label")
            X, y = _safe_indexing(X, chosen), without_missing(_safe_indexing(y, chosen))
        self.estimator_ = clone(self.estimator).fit(X, y)
        return self

    @property
    def classes_(self) -> NDArray[Any]:
        """Classes of the source."""
        classes: NDArray[Any] = self.estimator_.classes_
        return classes

    @property
    def n_features_in_(self) -> int:
        """Number of features."""
        return int(self.estimator_.n_features_in_)

    def predict(self, X: Any) -> Any:
        """Predictions of the estimator."""
        check_is_fitted(self)
        return self.estimator_.predict(X)

    @available_if(_has("predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """Probabilities of the classes, shape (n, C)."""
        check_is_fitted(self)
        return self.estimator_.predict_proba(X)

    @available_if(_has("decision_function"))  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> Any:
        """Scores of the classes."""
        check_is_fitted(self)
        return self.estimator_.decision_function(X)

    def score(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> float:
        """Score of the estimator, such as its accuracy, on samples with a label.

        Samples whose label is masked are left out with a warning. In `cross_val_score` and `GridSearchCV` that holds
        without ``scoring``: a scorer by name would count the masked label -1 as a class that is never predicted.

        Raises:
            ValueError: If all labels are masked.
        """
        check_is_fitted(self)
        without = np.zeros(1, dtype=bool) if y is None else self._unlabelled(y, _num_samples(X))
        if without.any():
            way_out = "score labelled samples: in cross-validation cv=LeaveOneSourceOut() with groups tests on sources"
            check(not without.all(), "y", "of some samples with a label", None, way_out, shown="masked labels alone")
            warnings.warn(
                f"{without.sum()} of {len(without)} samples have a masked label and are not scored: the score is "
                "of the source alone, and not of the target: cv=LeaveOneSourceOut() with groups tests on sources that "
                "were not trained on, which comes nearest to a target without labels",
                stacklevel=2,
            )
            rows = np.flatnonzero(~without)
            X, y = _safe_indexing(X, rows), without_missing(_safe_indexing(y, rows))
            sample_weight = None if sample_weight is None else _safe_indexing(np.asarray(sample_weight), rows)
        return float(self.estimator_.score(X, y, sample_weight=sample_weight))

    def _unlabelled(self, y: Any, number: int) -> NDArray[np.bool_]:
        """Samples whose label is masked: as in `fit`, and -1 where that is no class, however few classes are here."""
        labels, classes = np.asarray(y), getattr(self.estimator_, "classes_", None)
        if labels.ndim == 1 and labels.dtype.kind == "i" and isinstance(classes, np.ndarray):
            return np.asarray((labels == -1) & (-1 not in classes.tolist()))
        return masked(y, number, by_number=self._by_number)

    def __sklearn_tags__(self) -> Any:
        tags, inner = super().__sklearn_tags__(), get_tags(self.estimator)
        tags.estimator_type = inner.estimator_type
        tags.classifier_tags, tags.regressor_tags = inner.classifier_tags, inner.regressor_tags
        tags.target_tags, tags.input_tags = inner.target_tags, inner.input_tags
        return tags


class LeaveOneSourceOut(LeaveOneGroupOut):  # type: ignore[misc]
    """Splits in which each source in turn is tested, and the others are trained on with the target.

    For ``cv`` of GridSearchCV: ``fit(X, y, groups=domains, sample_domain=domains)``, or with ``groups`` alone where the
    target's labels are masked. A source that is left out stands for the target, whose labels nobody has.
    """

    def split(
        self, X: Any, y: Any = None, groups: ArrayLike | None = None
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Rows to train and to test on, for each source.

        Args:
            X: Samples, of which the number counts.
            y: Not read.
            groups: Domain of each sample, integers: a positive number for each source, negative for the target.

        Raises:
            ValueError: If there are not two sources at least.
            TypeError: If ``groups`` is not a vector of integers.
        """
        domains = self._domains(X, groups)
        for source in np.unique(domains[domains > 0]):
            yield np.flatnonzero(domains != source), np.flatnonzero(domains == source)

    def get_n_splits(self, X: Any = None, y: Any = None, groups: ArrayLike | None = None) -> int:
        """Number of sources."""
        domains = self._domains(X, groups)
        return len(np.unique(domains[domains > 0]))

    @staticmethod
    def _domains(X: Any, groups: ArrayLike | None) -> NDArray[Any]:
        if groups is None:
            refuse("groups", "the domain of each sample, positive for sources and negative for the target", None)
        domains = np.asarray(groups)
        source_mask(domains, domains[:, None] if X is None else X, both=False, argument="groups")
        sources = np.unique(domains[domains > 0])
        check(len(sources) > 1, "groups", "of at least two sources, a positive number for each", sources.tolist())
        return domains
