"""CORAL (Sun, Feng and Saenko, AAAI 2016): a linear map that gives one domain the covariance of another."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.functional.checks import check_finite, check_same_shape, check_shape

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
    r"""Matrix A that whitens the source's samples and gives them the target's covariance: rows of ``x @ A``.

    .. math:: A = (C_S + r_S I)^{-1/2} (C_T + r_T I)^{1/2}, \qquad A^\top (C_S + r_S I) A = C_T + r_T I

    Args:
        source_covariance: C_S, shape (p, p).
        target_covariance: C_T, shape (p, p).
        reg: r of both, at least 0. ``"auto"`` takes a tenth of the mean eigenvalue of each, whatever the units of the
            samples; the paper's 1 presumes that every feature has variance 1 (z-scores), and for samples of length 1
            it leaves next to nothing of the map. 0 needs more samples than features.

    Returns:
        A, shape (p, p), in the dtype of the covariances; the identity where both are equal.

    Raises:
        ValueError: If shapes do not fit, r is out of range, or the source's covariance has no inverse.

    Example:
        >>> coral_map(torch.diag(torch.tensor([4.0, 1.0])), torch.eye(2), reg=0.0)
        tensor([[0.5000, 0.0000],
                [0.0000, 1.0000]])

    References:
        Sun, Feng and Saenko, AAAI 2016, Algorithm 1. Symmetric square roots by eigenvalues, in place of powers of
        matrices that need not be real after rounding.
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
