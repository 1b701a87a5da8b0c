"""What keeps two parts of features apart: predictions that give nothing away, and a bound on what parts share."""

from __future__ import annotations

import math

from torch import Tensor


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    r"""Cross-entropy of predictions to the uniform distribution: minimal where they distinguish no class from another.

    .. math:: L = -\frac{1}{B C} \sum_i \sum_c \log p_{ic}, \qquad p_i = \text{softmax}(\text{logits}_i)

    Args:
        logits: Shape (B, C), of at least one sample and class.

    Returns:
        A scalar, at least log C, which it is where all predictions are uniform.

    Raises:
        ValueError: If logits have another shape, or there are none.

    References:
        Peng et al., ICLR 2020 (FADA), equation 7.

    >>> uniform_cross_entropy(torch.zeros(3, 2))  # log 2
    tensor(0.6931)
    """
    if logits.dim() != 2 or not logits.numel():
        raise ValueError(f"logits must have shape (B, C) with at least one sample and class, got {tuple(logits.shape)}")
    return -logits.log_softmax(dim=1).mean()


def mutual_information_bound(joint: Tensor, independent: Tensor) -> Tensor:
    r"""Donsker and Varadhan's lower bound on the mutual information of two variables, from a critic T of their pairs.

    .. math:: I(X; Y) \ge \mathbb E_{(x, y)} \, T(x, y) - \log \mathbb E_{x, \, y'} \, e^{T(x, y')}

    with equality for :math:`T = \log p(x, y) / (p(x) \, p(y))`, up to a constant. Of few pairs it is too high in the
    mean, by as much as the logarithm of a mean is below that of the expectation; and a critic that knows these very
    pairs may raise it without limit.

    Args:
        joint: T of pairs that belong together, such as of one sample, shape (n,).
        independent: T of pairs that were drawn independently, such as of two samples, shape (m,).

    Returns:
        A scalar in nats. A critic with one value for all pairs has 0, a bad one less.

    Raises:
        ValueError: If there are no pairs of a kind, or a shape is another.

    References:
        Belghazi et al., ICML 2018 (MINE); Peng et al., ICLR 2020 (FADA), equation 8.

    >>> mutual_information_bound(torch.tensor([3.0, 3.0]), torch.tensor([1.0, 1.0]))
    tensor(2.)
    """
    for name, each in (("joint", joint), ("independent", independent)):
        if each.dim() != 1 or not len(each):
            raise ValueError(f"{name} must have shape (n,) with at least one pair, got {tuple(each.shape)}")
    return joint.mean() - (independent.logsumexp(dim=0) - math.log(len(independent)))
