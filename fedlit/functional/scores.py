"""Scores of predictions that need no labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def information_score(mean_probabilities: Tensor, mean_entropy: float | Tensor) -> Tensor:
    r"""Mutual information between inputs and predicted classes, as a share of its greatest value.

    .. math:: \frac{H(\bar p) - \frac{1}{n}\sum_i H(p_i)}{\log C}

    High when predictions are certain and all classes occur. It tells a collapsed model from a working one without
    labels; it is not an accuracy, and a confidently wrong model can score high.

    Args:
        mean_probabilities: Predicted class probabilities averaged over samples, shape (C,), sums to 1.
        mean_entropy: Entropy of each sample's prediction in nats, averaged over samples.

    Returns:
        A scalar in [0, 1].

    Raises:
        ValueError: If there are fewer than two classes.

    References:
        Bridle, Heading and MacKay, Unsupervised classifiers, mutual information and phantom targets, NeurIPS 1991;
        as a validator in domain adaptation: Musgrave et al., Three new validators, arXiv 2208.07360.
    """
    num_classes = mean_probabilities.numel()
    if num_classes < 2:
        raise ValueError(f"mean_probabilities must have at least 2 classes, got {num_classes}")
    marginal = torch.special.entr(mean_probabilities).sum()
    return torch.clamp((marginal - mean_entropy) / math.log(num_classes), 0.0, 1.0)
