"""Information maximisation: confident predictions of all classes on samples without labels."""

from __future__ import annotations

import math

from torch import Tensor

from fedlit.functional.checks import check_shape


def information_maximisation_loss(logits: Tensor) -> Tensor:
    r"""Negative mutual information of samples and predicted classes in a batch, from -log C to 0, in nats.

    .. math:: L = \frac{1}{B} \sum_i H(p_i) - H(\bar p), \qquad p_i = \text{softmax}(\text{logits}_i)

    Low where predictions are certain and all classes occur. A batch should have several samples of each class, as its
    mean prediction stands for the classes' shares.

    Args:
        logits: Shape (B, C), of at least one sample and class; another is a ValueError.

    References:
        Liang, Hu and Feng, Do we really need to access the source data?, ICML 2020, equations 3 and 4.

    >>> import torch
    >>> information_maximisation_loss(torch.tensor([[100.0, 0.0], [0.0, 100.0]]))
    tensor(-0.6931)
    """
    check_shape("logits", logits, "B > 0", "C > 0", way_out="leave the term out where there is no sample")
    log_p = logits.log_softmax(dim=1)
    log_mean = log_p.logsumexp(dim=0) - math.log(len(logits))  # its gradient is finite where a class has probability 0
    loss: Tensor = (log_mean.exp() * log_mean).sum() - (log_p.exp() * log_p).sum(dim=1).mean()
    return loss
