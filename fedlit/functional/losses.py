"""Losses of single clients: of discriminators and critics, alignment, received gradients, entropies, parts of features.

CDAN is of Long et al., NeurIPS 2018, FADA of Peng et al., ICLR 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.checks import check, check_between, check_positive
from fedlit.functional.checks import check_entries, check_finite, check_same_shape, check_shape


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


_FLOOR = 0.01
"""Least spread, as a share of the features' squared length: it bounds the relative loss by 2 / 0.01."""


def alignment_loss(aligned: Tensor, other: Tensor, *, unbiased: bool = False, relative: bool = False) -> Tensor:
    r"""Squared distance of a mini-batch's mean to a received mean, a scalar, with two remedies for its faults.

    .. math:: L = \left\|\bar f - W^\top\mu\right\|^2, \qquad f_j = W^\top s_j

    - The mean of b samples is noisy: :math:`E L` exceeds the distance of the true means by :math:`\mathrm{tr}\,
      \mathrm{Cov}(f) / b`, whose gradient shrinks the features. ``unbiased`` subtracts :math:`S / b`, with the batch's
      spread :math:`S = \frac{1}{b-1}\sum_j\|f_j - \bar f\|^2`.
    - W = 0 minimises L. ``relative`` divides it by :math:`S + 0.01 Q` with the squared length
      :math:`Q = \frac{1}{b}\sum_j\|f_j\|^2 + \|W^\top\mu\|^2`, which no scaling of W changes: the trace form of
      RF-TCA's constraint :math:`W^\top C W = I`. Q bounds it where a batch's samples are alike. Equation 11 of
      FedRF-TCA (arXiv 2311.04686) has neither remedy.

    Args:
        aligned: f of the client's batch, shape (b, m), at least one sample.
        other: :math:`W^\top\mu`, the received mean in the same space, shape (m,).
        unbiased: Subtract the expected contribution of the batch's noise; one sample alone does not show it.
        relative: Divide by the batch's spread; for one sample alone, which has none, by Q.
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


def loss_from_gradient(inputs: Tensor, gradient: Tensor, value: Tensor | float = 0.0) -> Tensor:
    r"""A scalar, float64, whose gradient by ``inputs`` was received from the client that computes it.

    .. math:: L = \langle x, g \rangle - \langle x, g \rangle_{\text{constant}} + v, \qquad
              \partial L / \partial x = g

    By the chain rule, backpropagation through it is that of the sender's loss.

    Args:
        inputs: x, such as features, with their graph; any shape.
        gradient: g, of the same shape.
        value: v of the sender's loss, for logging.
    """
    check_same_shape("gradient", gradient, "inputs", inputs)
    linear = (inputs * gradient.detach().to(inputs)).sum().double()
    return linear - linear.detach() + value


def information_maximisation_loss(logits: Tensor) -> Tensor:
    r"""Negative mutual information of samples and predicted classes in a batch, from -log C to 0, in nats.

    .. math:: L = \frac{1}{B} \sum_i H(p_i) - H(\bar p), \qquad p_i = \text{softmax}(\text{logits}_i)

    Low where predictions are certain and all classes occur. A batch should have several samples of each class, as its
    mean prediction stands for the classes' shares. See Liang, Hu and Feng, ICML 2020, equations 3 and 4.

    Args:
        logits: Shape (B, C), of at least one sample and class.
    """
    check_shape("logits", logits, "B > 0", "C > 0", way_out="leave the term out where there is no sample")
    log_p = logits.log_softmax(dim=1)
    log_mean = log_p.logsumexp(dim=0) - math.log(len(logits))  # its gradient is finite where a class has probability 0
    loss: Tensor = (log_mean.exp() * log_mean).sum() - (log_p.exp() * log_p).sum(dim=1).mean()
    return loss


_TINY = 1e-5
"""As published; it keeps log p finite, and moves the loss of a uniform prediction by C times as much."""


def minimax_entropy_loss(logits: Tensor) -> Tensor:
    r"""Negative mean entropy of predictions, from -log C (all uniform) to 0 (all certain), up to C times 1e-5.

    .. math:: L = \frac{1}{B} \sum_i \sum_c p_{ic} \log(p_{ic} + 10^{-5}), \qquad p_i = \text{softmax}(\text{logits}_i)

    A classifier that lowers it moves its class weights towards the samples; an extractor that raises it (whose gradient
    is reversed) gathers the samples about them. See Saito et al., ICCV 2019, equation 5.

    Args:
        logits: Shape (B, C), of at least one sample and class.
    """
    check_shape("logits", logits, "B > 0", "C > 0", way_out="leave the term out where there is no sample")
    p = logits.softmax(dim=1)
    return (p * (p + _TINY).log()).sum(dim=1).mean()


def group_discrepancy(probabilities: Tensor, first: Tensor) -> Tensor:
    r"""Mean L1 distance of two groups' mean predictions, in [0, 2] (GALA, arXiv 2510.08150).

    .. math:: L = \frac{1}{n} \sum_i \left| \bar p_{Ai} - \bar p_{Bi} \right|_1, \quad
              \bar p_{Ai} = \frac{1}{|A|} \sum_{k \in A} p_{ki}

    Args:
        probabilities: Of each of S predictors, shape (S, n, C), of at least two predictors, one sample and one class.
        first: Which predictors are group A, bool, shape (S,): neither none nor all.
    """
    check_shape("probabilities", probabilities, "S > 0", "n > 0", "C > 0")
    check(len(probabilities) > 1, "probabilities", "of at least two predictors", tuple(probabilities.shape))
    rule = f"bool, of shape ({len(probabilities)},), with a True and a False"
    fits = first.shape == probabilities.shape[:1] and first.dtype == torch.bool and bool(first.any() & ~first.all())
    check(fits, "first", rule, first.tolist())
    apart = probabilities[first].mean(dim=0) - probabilities[~first].mean(dim=0)
    return apart.abs().sum(dim=1).mean()


def centroid_weights(distances: Tensor, temperature: float) -> Tensor:
    r"""Weights of sources, of sum 1, by the distance of their mean features from the target's (GALA).

    .. math:: w = \operatorname{softmax}(-d_k / (\tau \bar d))

    Dividing by the mean distance makes them the same in any unit of features; the paper has the distances themselves.

    Args:
        distances: d, at least 0, shape (S,) of at least one source; if all are 0, weights are equal. Weights are
            float64.
        temperature: tau, positive.
    """
    check_shape("distances", distances, "S > 0")
    check_finite("distances", distances)
    check_entries(bool((distances >= 0).all()), "distances", "at least 0", distances)
    check_positive("temperature", temperature)
    distances = distances.double()
    relative = distances / distances.mean() if distances.any() else distances
    return (-relative / temperature).softmax(dim=0)


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    r"""Cross-entropy of predictions to the uniform distribution: at least log C, if all are uniform (FADA, equation 7).

    .. math:: L = -\frac{1}{B C} \sum_i \sum_c \log p_{ic}, \qquad p_i = \text{softmax}(\text{logits}_i)

    Args:
        logits: Shape (B, C), of at least one sample and class.
    """
    check_shape("logits", logits, "B > 0", "C > 0")
    return -logits.log_softmax(dim=1).mean()


def mutual_information_bound(joint: Tensor, independent: Tensor) -> Tensor:
    r"""Donsker and Varadhan's lower bound on the mutual information of two variables, in nats, a scalar.

    .. math:: I(X; Y) \ge \mathbb E_{(x, y)} \, T(x, y) - \log \mathbb E_{x, \, y'} \, e^{T(x, y')}

    with equality for :math:`T = \log p(x, y) / (p(x) \, p(y))`, up to a constant. Of few pairs it is too high in the
    mean, and a critic T that remembers these very pairs may raise it without limit. See Belghazi et al., ICML 2018
    (MINE); FADA, equation 8.

    Args:
        joint: T of pairs that belong together, such as of one sample, shape (n,), n at least 1.
        independent: T of pairs drawn independently, such as of two samples, shape (m,), m at least 1.
    """
    check_shape("joint", joint, "n > 0")
    check_shape("independent", independent, "m > 0")
    return joint.mean() - (independent.logsumexp(dim=0) - math.log(len(independent)))
