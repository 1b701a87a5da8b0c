"""Losses that keep two parts of features apart: uninformative predictions, and a bound on shared information."""

from __future__ import annotations

import math

from torch import Tensor

from fedlit.functional.checks import check_shape


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    r"""Cross-entropy of predictions to the uniform distribution: minimal, log C, where all are uniform.

    .. math:: L = -\frac{1}{B C} \sum_i \sum_c \log p_{ic}, \qquad p_i = \text{softmax}(\text{logits}_i)

    Args:
        logits: Shape (B, C), of at least one sample and class; another is a ValueError.

    References:
        Peng et al., ICLR 2020 (FADA), equation 7.

    >>> uniform_cross_entropy(torch.zeros(3, 2))  # log 2
    tensor(0.6931)
    """
    check_shape("logits", logits, "B > 0", "C > 0")
    return -logits.log_softmax(dim=1).mean()


def mutual_information_bound(joint: Tensor, independent: Tensor) -> Tensor:
    r"""Donsker and Varadhan's lower bound on the mutual information of two variables, from a critic T of their pairs.

    .. math:: I(X; Y) \ge \mathbb E_{(x, y)} \, T(x, y) - \log \mathbb E_{x, \, y'} \, e^{T(x, y')}

    with equality for :math:`T = \log p(x, y) / (p(x) \, p(y))`, up to a constant. Of few pairs it is too high in the
    mean, and a critic that remembers these very pairs may raise it without limit.

    Args:
        joint: T of pairs that belong together, such as of one sample, shape (n,); at least one pair.
        independent: T of pairs that were drawn independently, such as of two samples, shape (m,); at least one.

    Returns:
        A scalar in nats. A critic with one value for all pairs has 0, a bad one less.

    References:
        Belghazi et al., ICML 2018 (MINE); Peng et al., ICLR 2020 (FADA), equation 8.

    >>> mutual_information_bound(torch.tensor([3.0, 3.0]), torch.tensor([1.0, 1.0]))
    tensor(2.)
    """
    check_shape("joint", joint, "n > 0")
    check_shape("independent", independent, "m > 0")
    return joint.mean() - (independent.logsumexp(dim=0) - math.log(len(independent)))
