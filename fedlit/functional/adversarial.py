"""Adversarial adaptation: losses of discriminators and critics that distinguish two domains, and their inputs.

CDAN is of Long et al., NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.checks import check, check_between
from fedlit.functional.checks import check_same_shape, check_shape


def domain_loss(logits: Tensor, is_source: bool, weights: Tensor | None = None) -> Tensor:
    """One domain's part of a discriminator's loss: the mean over its samples, a scalar.

    Args:
        logits: Of the discriminator, shape (B,): D = sigmoid(logit) is the probability of a source.
        is_source: Whether samples have the loss -log D of a source, or -log(1 - D) of the target.
        weights: Of the samples, shape (B,); ``None`` is 1 each.
    """
    check_shape("logits", logits, "B > 0", way_out="of a discriminator that ends in one unit, take squeeze(1)")
    if weights is not None:
        check_same_shape("weights", weights, "logits", logits)
    losses = F.softplus(-logits if is_source else logits)
    return (losses if weights is None else weights * losses).mean()


def domain_adversarial_loss(source_logits: Sequence[Tensor], target_logits: Tensor) -> Tensor:
    r"""Loss of a domain discriminator, which it lowers and extractors raise: log 2 where D is 1/2 everywhere.

    .. math:: L_D = \frac12 \Big[ \frac1K \sum_k \mathbb E_k[-\log D] + \mathbb E_T[-\log(1 - D)] \Big]

    See Ganin et al., JMLR 2016; of several sources their mean.

    Args:
        source_logits: One tensor of shape (B,) per source, at least one; see `domain_loss`.
        target_logits: Of the target's samples, shape (B,).
    """
    check(
        len(source_logits) > 0, "source_logits", "one tensor per source", source_logits, "without one there is no loss"
    )
    sources = torch.stack([domain_loss(logits, True) for logits in source_logits]).mean()
    return (sources + domain_loss(target_logits, False)) / 2


def reversal_weight(progress: float) -> float:
    r"""Weight of the reversed gradient, which grows over training from 0 to 0.99991 (Ganin et al., JMLR 2016).

    .. math:: \lambda_p = \frac{2}{1 + e^{-10 p}} - 1

    Args:
        progress: p, share of the training that is over, from 0 to 1.
    """
    check_between("progress (p)", progress, 0, 1, "it is a share of the training")
    return math.tanh(5 * progress)  # the same number


def annealing(progress: float) -> float:
    r"""Factor of the length of steps, which falls over training from 1 to 0.166 (Ganin et al., for the learning rate).

    .. math:: \mu_p = \frac{1}{(1 + 10 p)^{0.75}}

    Args:
        progress: p, share of the training that is over, from 0 to 1.
    """
    check_between("progress (p)", progress, 0, 1, "it is a share of the training")
    return float((1 + 10 * progress) ** -0.75)


def gradient_penalty(critic: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    r"""Deviation of a critic's slope from 1, which keeps it about 1-Lipschitz: a scalar (Gulrajani et al., NIPS 2017).

    .. math:: \frac1n \sum_i \big( \lVert \nabla c(x_i) \rVert - 1 \big)^2

    Args:
        critic: c, from shape (n, d) to (n,) or (n, 1); without BatchNorm, as it must take each point by itself.
        points: Shape (n, d), at least one; only the critic gets a gradient.
    """
    check_shape("points", points, "n > 0", "d", way_out="flatten them")
    with torch.enable_grad():
        constants = points.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(critic(constants).sum(), constants, create_graph=True)
    norms = (slopes.square().sum(dim=1) + 1e-12).sqrt()  # with 1e-12 the root has a derivative at a slope of 0
    return (norms - 1).square().mean()


def multilinear_map(features: Tensor, probabilities: Tensor) -> Tensor:
    """Outer product of features and predicted classes, flattened class by class, shape (B, C d) (CDAN).

    Args:
        features: Shape (B, d).
        probabilities: Of classes, shape (B, C).
    """
    check_shape("features", features, "B", "d")
    check_shape("probabilities", probabilities, len(features), "C")
    return (probabilities[:, :, None] * features[:, None, :]).flatten(1)


def entropy_weights(probabilities: Tensor) -> Tensor:
    r"""Weights of samples whose predictions are certain, shape (B,), with mean 1, as constants (CDAN+E).

    .. math:: w_i \propto 1 + e^{-H(p_i)}

    Args:
        probabilities: Of classes, shape (B, C), of samples of one domain, at least one.
    """
    check_shape("probabilities", probabilities, "B > 0", "C")
    weights = 1 + torch.exp(-torch.special.entr(probabilities.detach()).sum(dim=1))
    return weights / weights.mean()
