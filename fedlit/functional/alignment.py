"""The loss that moves a client's aligned features towards the other side's mean."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlit.functional.checks import check_shape

_FLOOR = 0.01
"""Least spread, as a share of the features' squared length: it bounds the relative loss by 2 / 0.01."""


def alignment_loss(aligned: Tensor, other: Tensor, *, unbiased: bool = False, relative: bool = False) -> Tensor:
    r"""Squared distance of a mini-batch's mean to a received mean, a scalar, with two remedies for its faults.

    .. math:: L = \left\|\bar f - W^\top\mu\right\|^2, \qquad f_j = W^\top s_j

    - The mean of b samples is noisy: :math:`E L` exceeds the distance of the true means by :math:`\mathrm{tr}\,
      \mathrm{Cov}(f) / b`, and its gradient shrinks the features. ``unbiased`` subtracts :math:`S / b`, with the
      batch's spread :math:`S = \frac{1}{b-1}\sum_j\|f_j - \bar f\|^2`. (The noise of the received mean is constant for
      the extractor; only the other side could subtract it for W.)
    - L is homogeneous of degree 2 in W, so W = 0 minimises it. ``relative`` divides it by :math:`S + 0.01 Q` with the
      squared length :math:`Q = \frac{1}{b}\sum_j\|f_j\|^2 + \|W^\top\mu\|^2`, which no scaling of W changes: the
      trace form of RF-TCA's constraint :math:`W^\top C W = I`. Q bounds it where a batch's samples are alike; without
      it, ``unbiased`` would subtract the constant :math:`1 / b`.

    Args:
        aligned: f of the client's batch, shape (b, m), at least one sample.
        other: :math:`W^\top\mu`, the received mean in the same space, shape (m,).
        unbiased: Subtract the expected contribution of the batch's noise; one sample alone does not show it.
        relative: Divide by the batch's spread; for one sample alone, which has none, by Q.

    References:
        FedRF-TCA (arXiv 2311.04686), equation 11, which has neither remedy.
    """
    check_shape("aligned", aligned, "b > 0", "m")
    check_shape("other", other, aligned.shape[1])
    mean = aligned.mean(dim=0)
    loss = (mean - other).square().sum()
    size = len(aligned)
    spread = (aligned - mean).square().sum() / max(size - 1, 1)
    if unbiased:
        loss = loss - spread / size
    if relative:
        length = aligned.square().sum() / size + other.square().sum()
        scale = spread + _FLOOR * length if size > 1 else length
        loss = loss / scale.clamp(min=torch.finfo(scale.dtype).tiny)
    return loss
