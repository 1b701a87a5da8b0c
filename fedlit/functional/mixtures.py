"""Moments of a mixture of distributions, from those of its parts."""

from __future__ import annotations

from torch import Tensor

from fedlit.functional.checks import check_entries, check_same_shape, check_shape


def mixture_variance(means: Tensor, variances: Tensor, weights: Tensor) -> Tensor:
    r"""Variance of a mixture, shape (F,): the mean of its parts' variances, and the spread of their means.

    .. math:: v = \sum_k w_k \left[ v_k + (\mu_k - \mu)^2 \right] = \sum_k w_k (v_k + \mu_k^2) - \mu^2,
              \qquad \mu = \sum_k w_k \mu_k

    Args:
        means: Of the parts, mu_k, shape (K, F), of at least one part.
        variances: Of the parts about their means, v_k, not negative, shape (K, F).
        weights: Of the parts, shape (K,), finite and not negative, in any unit: they are divided by their sum.
    """
    check_shape("means", means, "K > 0", "F")
    check_same_shape("variances", variances, "means", means)
    check_shape("weights", weights, len(means), way_out="give one per part")
    check_entries(bool((variances >= 0).all()), "variances", "not negative", variances)
    fits = bool((weights.isfinite() & (weights >= 0)).all()) and bool(weights.sum() > 0)
    check_entries(fits, "weights", "finite, not negative and of positive sum", weights)
    return mixture_moments(means, variances, weights / weights.sum())[1]


def mixture_moments(means: Tensor, variances: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a mixture, each (F,), as `mixture_variance`; shares have sum 1, and nothing is checked."""
    mean = (shares[:, None] * means).sum(dim=0)
    # the first form of the formula: where means are large next to deviations, the second one loses digits
    return mean, (shares[:, None] * (variances + (means - mean).square())).sum(dim=0)
