"""Adversarial adaptation: losses of discriminators and critics that distinguish two domains, and their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def domain_loss(logits: Tensor, is_source: bool, weights: Tensor | None = None) -> Tensor:
    """One domain's part of a discriminator's loss, which is of its own samples alone.

    Args:
        logits: Of the discriminator, shape (B,): D = sigmoid(logit) is the probability of a source.
        is_source: Whether the samples are a source's, with the loss -log D, or the target's, with -log(1 - D).
        weights: Of the samples, shape (B,); ``None`` is 1 each.

    Returns:
        Mean over the samples, a scalar.

    Raises:
        ValueError: If shapes do not fit, or there are no samples.

    >>> domain_loss(torch.zeros(3), True)  # log 2, at D = 1/2
    tensor(0.6931)
    """
    if logits.dim() != 1 or not len(logits):
        raise ValueError(
            f"logits must have shape (B,) with at least one sample, got {tuple(logits.shape)}: of a discriminator that "
            "ends in one unit, take squeeze(1)"
        )
    if weights is not None and weights.shape != logits.shape:
        raise ValueError(
            f"weights must have the shape of logits, {tuple(logits.shape)}, got {tuple(weights.shape)}: one per sample"
        )
    losses = F.softplus(-logits if is_source else logits)
    return (losses if weights is None else weights * losses).mean()


def domain_adversarial_loss(source_logits: Sequence[Tensor], target_logits: Tensor) -> Tensor:
    r"""Loss of a domain discriminator, which it lowers and extractors raise.

    .. math:: L_D = \frac12 \Big[ \frac1K \sum_k \mathbb E_k[-\log D] + \mathbb E_T[-\log(1 - D)] \Big]

    Args:
        source_logits: One tensor of shape (B,) per source, of any number of samples; D = sigmoid(logit) is the
            probability of a source.
        target_logits: Of the target's samples, shape (B,).

    Returns:
        A scalar; log 2 where D is 1/2 everywhere.

    Raises:
        ValueError: If there is no source, or a tensor has another shape or no samples.

    References:
        Ganin et al., JMLR 2016; for several sources their mean.
    """
    if not len(source_logits):
        raise ValueError("source_logits must have one tensor per source, got none: without one there is no loss")
    sources = torch.stack([domain_loss(logits, True) for logits in source_logits]).mean()
    return (sources + domain_loss(target_logits, False)) / 2


def reversal_weight(progress: float) -> float:
    r"""Weight of the reversed gradient as training goes on, which spares features that mean nothing yet.

    .. math:: \lambda_p = \frac{2}{1 + e^{-10 p}} - 1

    Args:
        progress: p, share of the training that is over, from 0 to 1.

    Returns:
        From 0 to 0.99991.

    Raises:
        ValueError: If ``progress`` is not in [0, 1].

    References:
        Ganin et al., JMLR 2016.
    """
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must be from 0 to 1, got {progress}: it is a share of the training")
    return math.tanh(5 * progress)  # the same number


def annealing(progress: float) -> float:
    r"""Factor of the length of steps as training goes on: short ones at its end wander less.

    .. math:: \mu_p = \frac{1}{(1 + 10 p)^{0.75}}

    Args:
        progress: p, share of the training that is over, from 0 to 1.

    Returns:
        From 1 down to 0.166.

    Raises:
        ValueError: If ``progress`` is not in [0, 1].

    References:
        Ganin et al., JMLR 2016, for the learning rate.
    """
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must be from 0 to 1, got {progress}: it is a share of the training")
    return float((1 + 10 * progress) ** -0.75)


def gradient_penalty(critic: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    r"""How far a critic's slope is from 1 where it is looked at, which keeps it about 1-Lipschitz.

    .. math:: \frac1n \sum_i \big( \lVert \nabla c(x_i) \rVert - 1 \big)^2

    Args:
        critic: c, from points, shape (n, d), to one number each, shape (n,) or (n, 1). It must take every point by
            itself, which BatchNorm does not.
        points: Shape (n, d); they are constants, only the critic gets a gradient.

    Returns:
        A scalar with a graph.

    Raises:
        ValueError: If points are not of shape (n, d), or none.

    References:
        Gulrajani et al., NeurIPS 2017.
    """
    if points.dim() != 2 or not len(points):
        raise ValueError(f"points must have shape (n, d) with n at least 1, got {tuple(points.shape)}: flatten them")
    with torch.enable_grad():
        constants = points.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(critic(constants).sum(), constants, create_graph=True)
    norms = (slopes.square().sum(dim=1) + 1e-12).sqrt()  # whose derivative at a slope of 0 exists
    return (norms - 1).square().mean()


def multilinear_map(features: Tensor, probabilities: Tensor) -> Tensor:
    """Features that carry predicted classes: the outer product of both, flattened.

    Args:
        features: Shape (B, d).
        probabilities: Of classes, shape (B, C).

    Returns:
        Shape (B, C d), class by class.

    Raises:
        ValueError: If shapes do not fit.

    References:
        Long et al., NeurIPS 2018 (CDAN).
    """
    if features.dim() != 2 or probabilities.dim() != 2 or len(features) != len(probabilities):
        raise ValueError(
            "features must have shape (B, d) and probabilities (B, C), of the same samples, got "
            f"{tuple(features.shape)} and {tuple(probabilities.shape)}"
        )
    return (probabilities[:, :, None] * features[:, None, :]).flatten(1)


def entropy_weights(probabilities: Tensor) -> Tensor:
    r"""Weights of samples whose predictions are certain, for a domain loss that looks at predictions.

    .. math:: w_i \propto 1 + e^{-H(p_i)}

    Args:
        probabilities: Of classes, shape (B, C), of samples of one domain.

    Returns:
        Shape (B,), with mean 1, as constants.

    Raises:
        ValueError: If there are no samples, or the shape is another.

    References:
        Long et al., NeurIPS 2018 (CDAN+E).
    """
    if probabilities.dim() != 2 or not len(probabilities):
        raise ValueError(f"probabilities must have shape (B, C), B at least 1, got {tuple(probabilities.shape)}")
    weights = 1 + torch.exp(-torch.special.entr(probabilities.detach()).sum(dim=1))
    return weights / weights.mean()
