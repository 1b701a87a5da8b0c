"""The entropy term of minimax entropy (Saito, Kim, Sclaroff, Darrell and Saenko, ICCV 2019)."""

from __future__ import annotations

from torch import Tensor

from fedlit.functional.checks import check_shape

_TINY = 1e-5
"""As published; it keeps log p finite, and moves the loss of a uniform prediction by C times as much."""


def minimax_entropy_loss(logits: Tensor) -> Tensor:
    r"""Negative mean entropy of predictions, from -log C (all uniform) to 0 (all certain), up to C times 1e-5.

    .. math:: L = \frac{1}{B} \sum_i \sum_c p_{ic} \log(p_{ic} + 10^{-5}), \qquad p_i = \text{softmax}(\text{logits}_i)

    A classifier that lowers it makes predictions uncertain: its class weights move towards the samples. An extractor
    that raises it (of which the gradient is reversed) gathers the samples about them.

    Args:
        logits: Shape (B, C), of at least one sample and class; another is a ValueError.

    References:
        Saito et al., ICCV 2019, equation 5, with its sign.

    >>> minimax_entropy_loss(torch.zeros(3, 2))
    tensor(-0.6931)
    """
    check_shape("logits", logits, "B > 0", "C > 0", way_out="leave the term out where there is no sample")
    p = logits.softmax(dim=1)
    return (p * (p + _TINY).log()).sum(dim=1).mean()
