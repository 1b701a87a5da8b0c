"""Moments of a mixture of distributions, from those of its parts."""

from __future__ import annotations

from torch import Tensor


def mixture_variance(means: Tensor, variances: Tensor, weights: Tensor) -> Tensor:
    r"""Variance of a mixture, feature by feature: the mean of its parts' variances, and the spread of their means.

    .. math:: v = \sum_k w_k \left[ v_k + (\mu_k - \mu)^2 \right] = \sum_k w_k (v_k + \mu_k^2) - \mu^2,
              \qquad \mu = \sum_k w_k \mu_k

    The first form is the one computed: where means are large next to deviations, the second one loses digits.

    Args:
        means: Of the parts, mu_k, shape (K, F), of at least one part.
        variances: Of the parts about their own means, v_k, not negative, shape (K, F).
        weights: Of the parts, shape (K,), finite and not negative, in any unit (such as numbers of samples): they are
            divided by their sum.

    Returns:
        Shape (F,), not negative. Gradients pass to all three.

    Raises:
        ValueError: If shapes do not fit, a variance is negative or not a number, or the weights are not finite, not
            negative and of positive sum.

    >>> mixture_variance(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([0.5, 0.5]))
    tensor([2.])
    """
    if means.dim() != 2 or means.shape[0] < 1:
        raise ValueError(f"means must have shape (K, F) with K of at least 1, got {tuple(means.shape)}")
    if variances.shape != means.shape:
        raise ValueError(
            f"variances must have the shape of means, {tuple(means.shape)}, got {tuple(variances.shape)}: give one "
            "of each for every part and feature"
        )
    if weights.shape != means.shape[:1]:
        raise ValueError(f"weights must have shape ({means.shape[0]},), one per part, got {tuple(weights.shape)}")
    if not bool((variances >= 0).all()):
        raise ValueError(f"variances must not be negative, got {float(variances.min())}: give them about each mean")
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool(weights.sum() > 0):
        raise ValueError(f"weights must be finite, not negative and of positive sum, got {weights.tolist()}")
    return mixture_moments(means, variances, weights / weights.sum())[1]


def mixture_moments(means: Tensor, variances: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a mixture, each (F,), as `mixture_variance`; shares have sum 1, and nothing is checked."""
    mean = (shares[:, None] * means).sum(dim=0)
    return mean, (shares[:, None] * (variances + (means - mean).square())).sum(dim=0)
