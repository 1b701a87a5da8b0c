"""Scores of a diagnosis: area under the ROC curve with its interval, and predictive values at a prevalence."""

from __future__ import annotations

from math import nan, sqrt
from statistics import NormalDist

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.functional.checks import check_shape


def auroc_interval(scores: Tensor, positive: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    r"""Area under the ROC curve, and the lower and upper end of its confidence interval by DeLong's variance.

    .. math:: \theta \pm z \sqrt{\frac{\operatorname{var}_i V_i}{m} + \frac{\operatorname{var}_j W_j}{n}}

    V_i is the share of the n negatives whose score is below that of positive i, and W_j the share of the m positives
    whose score is above that of negative j, ties counting half; variances are those of samples, and ends beyond 0 and 1
    are cut off.

    Args:
        scores: Shape (m + n,), higher for positives.
        positive: Which samples are positive, bool, shape (m + n,).
        confidence: In (0, 1).

    Returns:
        Three numbers in [0, 1]; all NaN without a positive or a negative sample, and the ends NaN with one of either
        alone, or where the variance is 0, as at areas of 0 and 1: such samples show no uncertainty.

    References:
        DeLong et al., Comparing the areas under two or more correlated receiver operating characteristic curves,
        Biometrics 1988.
    """
    check_shape("positive", positive, len(scores), way_out="give one per sample")
    check(0 < confidence < 1, "confidence", "above 0 and below 1", confidence)
    above, below = scores.double()[positive], scores.double()[~positive]
    if not len(above) or not len(below) or bool(scores.isnan().any()):
        return nan, nan, nan

    def places(values: Tensor, among: Tensor) -> Tensor:
        """Share of ``among`` below each value."""
        ordered = among.sort().values
        counts = sum(torch.searchsorted(ordered, values.contiguous(), right=right) for right in (False, True))
        return torch.as_tensor(counts).double() / (2 * len(among))

    v, w = places(above, below), 1 - places(below, above)
    area = float(v.mean())
    if min(len(v), len(w)) < 2:
        return area, nan, nan
    variance = float(v.var() / len(v) + w.var() / len(w))
    if variance == 0:
        return area, nan, nan
    margin = NormalDist().inv_cdf((1 + confidence) / 2) * sqrt(variance)
    return area, max(area - margin, 0.0), min(area + margin, 1.0)


def predictive_values(sensitivity: float, specificity: float, prevalence: float) -> tuple[float, float]:
    r"""Positive and negative predictive value at a prevalence, by Bayes' rule: the shares of results that are right.

    .. math:: \frac{s p}{s p + (1 - c)(1 - p)}, \qquad \frac{c (1 - p)}{c (1 - p) + (1 - s) p}

    Args:
        sensitivity: s, share of positives that are found, in [0, 1].
        specificity: c, share of negatives that are found, in [0, 1].
        prevalence: p, share of positives where the test is used, in [0, 1].

    Returns:
        Two numbers in [0, 1]; NaN where no result is positive, or none negative.
    """
    true_positive, false_negative = sensitivity * prevalence, (1 - sensitivity) * prevalence
    true_negative, false_positive = specificity * (1 - prevalence), (1 - specificity) * (1 - prevalence)
    positive, negative = true_positive + false_positive, true_negative + false_negative
    return true_positive / positive if positive else nan, true_negative / negative if negative else nan
