"""CORAL: the distance between two domains' covariances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedlit.checks import check, check_at_least
from fedlit.functional.checks import check_pair, check_shape


def coral_loss(x: Tensor, y: Tensor) -> Tensor:
    r"""Squared distance of the covariances of two domains, a scalar that gradients pass through.

    .. math:: \frac{1}{4 p^2} \left\|C_x - C_y\right\|_F^2, \qquad
              C_x = \frac{1}{n-1} \sum_i (x_i - \bar x)(x_i - \bar x)^\top

    Means play no part; it grows with the fourth power of the unit of the samples.

    Args:
        x: Samples of the first domain, shape (n, p), n at least 2.
        y: Samples of the second domain, shape (k, p), k at least 2.

    Example:
        >>> x = torch.tensor([[1.0], [-1.0]])  # variance 2
        >>> coral_loss(x, 2 * x)  # and 8
        tensor(9.)

    References:
        Sun and Saenko, Deep CORAL, ECCV workshops 2016, equations 1 to 3.
    """
    check_pair(x, y)
    for name, samples in (("x", x), ("y", y)):
        check_at_least(name, len(samples), 2, "samples, to have a covariance")
    a, b = (len(z) / (len(z) - 1) * second_moments(z.double(), z.double().mean(dim=0)) for z in (x, y))
    return ((a - b).square().sum() / (4 * x.shape[1] ** 2)).to(x.dtype)


def second_moments(x: Tensor, center: Tensor) -> Tensor:
    r"""Mean of :math:`(x_i - c)(x_i - c)^\top`, as a vector of p (p + 1) / 2 numbers that gradients pass through.

    It has the upper triangle by rows, with what is off the diagonal times :math:`\sqrt 2`, so that the squared length
    of a difference of two is the squared Frobenius norm of that of the matrices.

    Args:
        x: Samples, shape (n, p), at least one.
        center: c, shape (p,): their mean, or another point.
    """
    check_shape("x", x, "n > 0", "p")
    check_shape("center (c)", center, x.shape[1])
    apart = x - center
    rows, columns = torch.triu_indices(x.shape[1], x.shape[1], device=x.device)
    twice = torch.where(rows == columns, x.new_tensor(1.0), x.new_tensor(math.sqrt(2)))
    return (apart.T @ apart / len(x))[rows, columns] * twice


def central_moments(moments: Tensor) -> Tensor:
    r"""Second moments about the mean, as of `second_moments`, from those about 0 of samples with a 1 beside them.

    Of the matrix :math:`\begin{pmatrix} A & b \\ b^\top & w \end{pmatrix}`, with the sum w of the samples' weights,
    that is the Schur complement :math:`A - b b^\top / w`. A enters with the factor 1, so a summand of it, such as
    another domain's negative second moments, is kept.

    Args:
        moments: As `second_moments` returns them of p numbers and a 1, shape ((p + 1) (p + 2) / 2,); w is not 0.
    """
    p = (math.isqrt(8 * len(moments) + 1) - 3) // 2 if moments.dim() == 1 else 0
    fits = p >= 1 and len(moments) == (p + 1) * (p + 2) // 2
    check(fits, "moments", "of shape ((p + 1) (p + 2) / 2,) with p at least 1", tuple(moments.shape))
    _, columns = torch.triu_indices(p + 1, p + 1, device=moments.device)
    inner, last = columns < p, columns == p
    beside = moments[last][:-1] / math.sqrt(2)
    return moments[inner] - second_moments(beside[None], torch.zeros_like(beside)) / moments[-1]
