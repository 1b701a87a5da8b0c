"""Heads in closed form from moments that clients can add up: ridge regression on labels, and diagonal Gaussian classes.

All moments are means over samples of features f, shape (p,), and of labels y, one-hot, shape (C,). So they are the
pooled data's, whoever holds which sample: regression on them equals what AFL (He et al., CVPR 2025, arXiv 2405.16240)
merges from clients' own solutions by its absolute aggregation law.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlit.checks import check, check_positive
from fedlit.functional.checks import check_finite, check_shape
from fedlit.functional.discriminant import MIN_PRIOR, NEVER

_SMALLEST_VARIANCE = 1e-6
"""Of a feature within a class, next to the mean over features."""

_SMALLEST_RATIO = 1e-5
"""Of variances within classes to mean squares: less is the rounding of fixed-point grids."""


@dataclass(frozen=True)
class LabelMoments:
    r"""Means over samples of features and one-hot labels; those of several clients' pooled samples are means of theirs.

    Attributes:
        second: Of :math:`f f^\top`, shape (p, p).
        first: Of :math:`f`, shape (p,).
        by_class: Of :math:`f y^\top`, shape (p, C).
        priors: Of :math:`y`, shape (C,), sums to 1.
    """

    second: Tensor
    first: Tensor
    by_class: Tensor
    priors: Tensor

    def __post_init__(self) -> None:
        check_shape("by_class", self.by_class, "p", "C")
        width, num_classes = self.by_class.shape
        check_shape("second", self.second, width, width)
        check_shape("first", self.first, width)
        check_shape("priors", self.priors, num_classes)
        for name in ("second", "first", "by_class", "priors"):
            check_finite(name, getattr(self, name), "have the features diverged?")

    def squared_error(self, weight: Tensor, bias: Tensor) -> float:
        r"""Mean of :math:`\|y - W f - b\|^2` over the samples, for W of shape (C, p) and b of shape (C,)."""
        fitted = (weight @ self.by_class).trace() + bias @ self.priors
        outputs = (weight @ self.second @ weight.T).trace() + 2 * bias @ (weight @ self.first)
        total = self.priors.sum()
        return float(total - 2 * fitted + outputs + total * bias.square().sum())


class RidgePath:
    r"""Ridge regression of one-hot labels on features, for any penalty after one eigendecomposition.

    .. math:: \min_{W, b} \; \mathrm{mean} \|y - W f - b\|^2 + \lambda \|W\|^2

    The intercept b is not penalised, so that outputs of a sample sum to 1. With sums over n samples in place of means,
    as in AFL, the penalty is n times as large.

    Args:
        moments: Of the training samples.
    """

    def __init__(self, moments: LabelMoments) -> None:
        self._mean, self._priors = moments.first.double(), moments.priors.double()
        covariance = moments.second.double() - torch.outer(self._mean, self._mean)
        values, self._vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
        self._values = values.clamp(min=0)  # rounding, or noise on the moments, makes some negative
        self._crossed = self._vectors.T @ (moments.by_class.double() - torch.outer(self._mean, self._priors))

    def at(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Return W, shape (C, p), and b, shape (C,), float64, for a positive penalty."""
        check_positive("penalty", penalty)
        weight = (self._vectors @ (self._crossed / (self._values + penalty)[:, None])).T
        return weight, self._priors - weight @ self._mean


def diagonal_discriminant(
    squares: Tensor, by_class: Tensor, priors: Tensor, shrinkage: float = 0.1
) -> tuple[Tensor, Tensor]:
    r"""Quadratic discriminant analysis from moments: Gaussian classes, whose features are independent.

    With means :math:`\mu_c` and variances :math:`v_c = (1 - s)\,\mathrm{var}_c + s \sum_c \pi_c \mathrm{var}_c`
    of each feature,

    .. math:: \mathrm{logit}_c(f) = \log\pi_c
        - \tfrac12 \sum_i \left[ (f_i - \mu_{ci})^2 / v_{ci} + \log v_{ci} \right]

    which is linear in features and their squares. See Turazza et al. (GH-OFL, arXiv 2602.01186).

    Args:
        squares: Mean over samples of :math:`f^2` times the indicator of each class, shape (p, C).
        by_class: Mean of :math:`f` times the indicator, shape (p, C).
        priors: Share pi of each class, shape (C,), sums to 1; a class of share 0 is never predicted.
        shrinkage: s in (0, 1].

    Returns:
        Weights of features and, behind them, of their squares, shape (C, 2p), and biases, shape (C,), float64.
    """
    check_shape("by_class", by_class, "p", "C")
    check_shape("squares", squares, *by_class.shape)
    check_shape("priors", priors, by_class.shape[1])
    check(0 < shrinkage <= 1, "shrinkage (s)", "in (0, 1]", shrinkage, "it is the weight of the pooled variance")
    for name, tensor in (("squares", squares), ("by_class", by_class), ("priors", priors)):
        check_finite(name, tensor, "have the features diverged?")
    shares = priors.double().clamp(min=MIN_PRIOR)
    means = by_class.double() / shares
    variances = (squares.double() / shares - means.square()).clamp(min=0)
    pooled = variances @ priors.double().clamp(min=0)
    rule, way_out = "of samples that vary within classes", "without a variance classes cannot be separated"
    varies = bool(pooled.sum() > _SMALLEST_RATIO * squares.double().sum())
    check(varies, "squares", rule, float(pooled.sum()), way_out)
    variances = (1 - shrinkage) * variances + shrinkage * pooled[:, None]
    variances = variances.clamp(min=_SMALLEST_VARIANCE * float(pooled.mean()))
    weights = torch.cat([means / variances, -0.5 / variances]).T
    biases = shares.log() - 0.5 * (means.square() / variances + variances.log()).sum(dim=0)
    unseen = priors <= 0
    return weights.masked_fill(unseen[:, None], 0.0), biases.masked_fill(unseen, NEVER)
