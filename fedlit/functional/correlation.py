"""CORAL: the distance between two domains' covariances, and the linear map that makes them equal."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedlit.checks import check, check_at_least
from fedlit.functional.checks import check_finite, check_pair, check_same_shape, check_shape


def coral_loss(x: Tensor, y: Tensor) -> Tensor:
    r"""Squared distance of the covariances of two domains, a scalar that gradients pass through.

    .. math:: \frac{1}{4 p^2} \left\|C_x - C_y\right\|_F^2, \qquad
              C_x = \frac{1}{n-1} \sum_i (x_i - \bar x)(x_i - \bar x)^\top

    See Sun and Saenko, Deep CORAL, ECCV workshops 2016, equations 1 to 3.

    Args:
        x: Samples of the first domain, shape (n, p), n at least 2.
        y: Samples of the second domain, shape (k, p), k at least 2.
    """
    check_pair(x, y)
    for name, samples in (("x", x), ("y", y)):
        check_at_least(name, len(samples), 2, "samples, to have a covariance")
    a, b = (len(z) / (len(z) - 1) * second_moments(z.double(), z.double().mean(dim=0)) for z in (x, y))
    return ((a - b).square().sum() / (4 * x.shape[1] ** 2)).to(x.dtype)


def second_moments(x: Tensor, center: Tensor) -> Tensor:
    r"""Mean of :math:`(x_i - c)(x_i - c)^\top`, as a vector of p (p + 1) / 2 numbers that gradients pass through.

    It has the upper triangle by rows, with what is off the diagonal times :math:`\sqrt 2`: squared lengths of
    differences are squared Frobenius norms of those of the matrices.

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
    that is :math:`A - b b^\top / w`. A summand of A, such as another domain's negative second moments, is kept.

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


Ridge = float | Literal["auto"]
"""Multiple r of the identity that is added to a covariance, or a tenth of that covariance's mean eigenvalue."""


def _spectrum(name: str, covariance: Tensor, reg: Ridge) -> tuple[Tensor, Tensor]:
    """Eigenvalues, with r added, and eigenvectors."""
    check_finite(name, covariance)
    matrix = covariance.double()
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    ridge = float(values.mean()) / 10 if reg == "auto" else float(reg)
    return values.clamp(min=0) + ridge, vectors


@torch.no_grad()
def coral_map(source_covariance: Tensor, target_covariance: Tensor, reg: Ridge = "auto") -> Tensor:
    r"""Matrix A, shape (p, p), that gives the source's samples ``x @ A`` the target's covariance.

    .. math:: A = (C_S + r_S I)^{-1/2} (C_T + r_T I)^{1/2}, \qquad A^\top (C_S + r_S I) A = C_T + r_T I

    See Sun, Feng and Saenko, AAAI 2016, Algorithm 1. Symmetric square roots by eigenvalues, in place of powers of
    matrices that need not be real after rounding.

    Args:
        source_covariance: C_S, shape (p, p); with r added it must have an inverse.
        target_covariance: C_T, shape (p, p).
        reg: r of both, at least 0. ``"auto"`` takes a tenth of the mean eigenvalue of each, whatever the units of the
            samples; the paper's 1 presumes z-scores, and for samples of length 1 it leaves next to nothing of the map.
            0 needs more samples than features.
    """
    width = math.isqrt(source_covariance.numel())
    check_shape("source_covariance", source_covariance, width, width)
    check_same_shape("target_covariance", target_covariance, "source_covariance", source_covariance)
    fits = reg == "auto" or (not isinstance(reg, str) and 0 <= reg < math.inf)
    check(fits, "reg (r)", "at least 0 and finite, or 'auto'", reg)
    source, axes = _spectrum("source_covariance", source_covariance, reg)
    target, target_axes = _spectrum("target_covariance", target_covariance, reg)
    invertible = float(source[0]) > len(source) * torch.finfo(torch.float64).eps * float(source[-1])
    rule, way_out = "invertible with reg (r) added", "give a positive reg, or fewer features"
    check(invertible, "source_covariance", rule, f"reg = {reg!r}", way_out)
    whiten = (axes / source.sqrt()) @ axes.T
    colour = (target_axes * target.sqrt()) @ target_axes.T
    return (whiten @ colour).to(torch.promote_types(source_covariance.dtype, target_covariance.dtype))
