"""The loss with which a client moves its aligned features towards the other side's mean."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_SPREAD = 1e-12


def alignment_loss(aligned: Tensor, other: Tensor, *, unbiased: bool = False, relative: bool = False) -> Tensor:
    r"""Squared distance of a mini-batch's mean to a mean that was received, and two remedies for its faults.

    .. math:: L = \left\|\bar f - W^\top\mu\right\|^2, \qquad f_j = W^\top s_j

    - The mean of b samples is noisy: :math:`E L` exceeds the distance of the true means by :math:`\mathrm{tr}\,
      \mathrm{Cov}(f) / b`, whatever the alignment, and its gradient shrinks the features. ``unbiased`` subtracts
      :math:`S / b`, with the batch's own spread :math:`S = \frac{1}{b-1}\sum_j\|f_j - \bar f\|^2`. (The noise of the
      received mean is constant for the extractor; only the other side could subtract it for W.)
    - L is homogeneous of degree 2 in W, so W = 0 minimises it. ``relative`` gives :math:`L / S`, which no scaling of
      W changes: the trace form of RF-TCA's constraint :math:`W^\top C W = I`. It makes ``unbiased`` a constant,
      :math:`L / S - 1 / b`.

    Args:
        aligned: f of the client's own batch, shape (b, m).
        other: :math:`W^\top\mu`, the received mean in the same space, shape (m,).
        unbiased: Subtract the expected contribution of the batch's own noise; a batch of one sample stays as it is.
        relative: Divide by the batch's spread; a batch of one sample stays as it is.

    Returns:
        A scalar that gradients pass through; at least 0 unless ``unbiased``.

    Raises:
        ValueError: If the shapes do not fit.

    References:
        FedRF-TCA (arXiv 2311.04686), equation 11, which has neither remedy.
    """
    if aligned.dim() != 2 or other.shape != aligned.shape[1:] or not len(aligned):
        raise ValueError(
            "aligned must have shape (b, m) with at least 1 sample and other (m,), "
            f"got {tuple(aligned.shape)} and {tuple(other.shape)}"
        )
    mean = aligned.mean(dim=0)
    loss = (mean - other).square().sum()
    size = len(aligned)
    if size == 1 or not (unbiased or relative):
        return loss
    spread = (aligned - mean).square().sum() / (size - 1)
    if unbiased:
        loss = loss - spread / size
    if relative:
        loss = loss / torch.clamp(spread, min=_LEAST_SPREAD)
    return loss
