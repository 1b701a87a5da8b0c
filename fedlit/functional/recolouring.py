"""CORAL (Sun, Feng and Saenko, AAAI 2016): a linear map that gives one domain the covariance of another."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Ridge = float | Literal["auto"]
"""Multiple r of the identity that is added to a covariance, or a tenth of that covariance's mean eigenvalue."""


def _spectrum(name: str, covariance: Tensor, reg: Ridge) -> tuple[Tensor, Tensor]:
    """Eigenvalues, with r added, and eigenvectors."""
    if not covariance.isfinite().all():
        raise ValueError(f"{name} must be finite, got NaN or infinity: look at the samples")
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
        Sun, Feng and Saenko, Return of frustratingly easy domain adaptation, AAAI 2016, Algorithm 1. Symmetric square
        roots by eigenvalues, in place of powers of matrices that need not be real after rounding.
    """
    shapes = source_covariance.shape, target_covariance.shape
    if len(shapes[0]) != 2 or shapes[0] != shapes[1] or shapes[0][0] != shapes[0][1]:
        raise ValueError(
            f"source_covariance and target_covariance must both have shape (p, p), got {tuple(shapes[0])} and "
            f"{tuple(shapes[1])}"
        )
    if reg != "auto" and (isinstance(reg, str) or not 0 <= reg < math.inf):
        raise ValueError(f"reg (r) must be at least 0 and finite, or 'auto', got {reg!r}")
    source, axes = _spectrum("source_covariance", source_covariance, reg)
    target, target_axes = _spectrum("target_covariance", target_covariance, reg)
    if not float(source[0]) > len(source) * torch.finfo(torch.float64).eps * float(source[-1]):
        raise ValueError(
            f"source_covariance has no inverse with reg (r) = {reg!r}, as samples do not vary in all directions: "
            "give a positive reg, or fewer features"
        )
    whiten = (axes / source.sqrt()) @ axes.T
    colour = (target_axes * target.sqrt()) @ target_axes.T
    return (whiten @ colour).to(torch.promote_types(source_covariance.dtype, target_covariance.dtype))
