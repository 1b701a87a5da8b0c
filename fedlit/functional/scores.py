"""Scores of predictions that need no labels of the domain they are scored on; the higher, the better."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.functional.kernels import check_samples


def certainty_score(mean_entropy: float | Tensor, num_classes: int) -> Tensor:
    r"""How certain predictions are: one minus their mean entropy as a share of its greatest value.

    .. math:: 1 - \frac{1}{n \log C} \sum_i H(p_i)

    Args:
        mean_entropy: Entropy of each sample's prediction in nats, averaged over samples.
        num_classes: Number of classes C, at least 2.

    Returns:
        A scalar in [0, 1].

    Raises:
        ValueError: If there are fewer than two classes.

    Example:
        >>> certainty_score(0.0, num_classes=10)  # sure of every sample
        tensor(1., dtype=torch.float64)

    References:
        Entropy as a validator: Morerio et al., Minimal-entropy correlation alignment, ICLR 2018.
    """
    most = _most_entropy(num_classes)
    return torch.clamp(1 - torch.as_tensor(mean_entropy, dtype=torch.float64) / most, 0.0, 1.0)


def diversity_score(mean_probabilities: Tensor) -> Tensor:
    r"""How evenly classes are predicted: the entropy of the mean prediction as a share of its greatest value.

    .. math:: \frac{H(\bar p)}{\log C}

    Args:
        mean_probabilities: Predicted class probabilities averaged over samples, shape (C,), sums to 1.

    Returns:
        A scalar in [0, 1].

    Raises:
        ValueError: If there are fewer than two classes.

    References:
        Musgrave et al., Three new validators and a large-scale benchmark ranking for unsupervised domain adaptation,
        arXiv 2208.07360.
    """
    most = _most_entropy(mean_probabilities.numel())
    return torch.clamp(torch.special.entr(mean_probabilities).sum() / most, 0.0, 1.0)


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
    most = _most_entropy(mean_probabilities.numel())
    marginal = torch.special.entr(mean_probabilities).sum()
    return torch.clamp((marginal - mean_entropy) / most, 0.0, 1.0)


def soft_neighbourhood_density(probabilities: Tensor, temperature: float = 0.05) -> Tensor:
    r"""How many others each prediction is close to: the entropy of its similarities, as a share of its greatest value.

    .. math:: \frac{1}{n \log (n - 1)} \sum_i H(q_i), \quad
        q_{ij} \propto \exp\left(\frac{p_i^\top p_j}{|p_i| |p_j| \, \tau}\right), \; j \ne i

    Args:
        probabilities: Predicted class probabilities of target samples, shape (n, C), of at least three samples.
        temperature: tau, positive.

    Returns:
        A scalar in [0, 1], float64. Equal predictions have 1: it does not tell a collapsed model from a working one.

    Raises:
        ValueError: If there are fewer than three samples, or the temperature is not positive.

    References:
        Saito et al., Tune it the right way, ICCV 2021, equations 2 to 4, where it is not divided by its greatest value;
        their code leaves a sample out of its own neighbours by a small similarity rather than altogether.
    """
    check_samples("probabilities", probabilities)
    if len(probabilities) < 3:
        raise ValueError(f"probabilities must have at least 3 samples to have neighbours, got {len(probabilities)}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive, got {temperature}")
    unit = F.normalize(probabilities.double(), dim=1)
    similarities = unit @ unit.T / temperature
    similarities.fill_diagonal_(-math.inf)
    density: Tensor = torch.special.entr(similarities.softmax(dim=1)).sum(dim=1).mean()
    return density / math.log(len(probabilities) - 1)


@dataclass(frozen=True)
class SourceMoments:
    """Means over labelled source samples of m features phi, and of their products with a loss; all float64.

    They are means of numbers of one sample each: a mean of several sources' is that of their mixture, each with the
    share that it is weighted by.

    Args:
        phi: E[phi], shape (m,).
        square: E[phi phi^T], shape (m, m).
        loss: E[l phi], shape (m,).
        square_loss: E[l phi phi^T], shape (m, m).
    """

    phi: Tensor
    square: Tensor
    loss: Tensor
    square_loss: Tensor

    @classmethod
    def of(cls, features: Tensor, losses: Tensor) -> SourceMoments:
        """Of samples at hand, from their features phi, shape (n, m), and their losses, shape (n,)."""
        phi, each = features.double(), losses.double()[:, None]
        number = len(phi)
        return cls(phi.mean(dim=0), phi.T @ phi / number, (each * phi).mean(dim=0), phi.T @ (each * phi) / number)


def importance_weights(square: Tensor, target: Tensor, ridge: float = 0.1) -> Tensor:
    r"""Coefficients of features that estimate how much likelier a sample is at the target than at the sources.

    .. math:: w(z) = \theta^\top \phi(z), \quad
        \theta = \left(E_S[\phi \phi^\top] + \tfrac{\lambda}{m} I\right)^{-1} E_T[\phi]

    The mean of f over the target is then estimated as that of w f over the sources, from E_S[f phi] alone.

    Args:
        square: E_S[phi phi^T] of the sources' samples, shape (m, m).
        target: Mean features E_T[phi] of the target's samples, shape (m,).
        ridge: lambda, positive; features have length 1.

    Returns:
        theta, shape (m,), float64. Weights w may be negative.

    Raises:
        ValueError: If the shapes do not fit, or ``ridge`` is not positive.

    References:
        Kanamori, Hido and Sugiyama, A least-squares approach to direct importance estimation (uLSIF), JMLR 2009, which
        cuts off negative weights, as moments alone do not allow.
    """
    if not 0 < ridge < math.inf:
        raise ValueError(f"ridge must be positive, got {ridge}")
    size = len(square)
    if target.shape != (size,):
        raise ValueError(f"target must have shape ({size},), as the sources' mean, got {tuple(target.shape)}")
    identity = torch.eye(size, dtype=torch.float64, device=square.device)
    theta: Tensor = torch.linalg.solve(square.double() + ridge / size * identity, target.double())
    return theta


def importance_weighted_scores(source: SourceMoments, target: Tensor, ridge: float = 0.1) -> tuple[Tensor, Tensor]:
    r"""Accuracy on the target, estimated on source samples that are weighted by how much they resemble the target's.

    Of the errors l and weights w(z) = theta^T phi(z), see `importance_weights`, importance-weighted validation gives
    1 - E_S[w l]; deep embedded validation takes 1 - (E_S[w l] + eta (E_S[w] - 1)), where eta = -Cov(w l, w) / Var(w)
    makes the variance smallest. Both are sums over single source samples for any theta, and so need their moments
    alone.

    Args:
        source: Moments of the features and of the sources' errors (0 or 1, or another loss).
        target: Mean features E_T[phi] of the target's samples, shape (m,).
        ridge: lambda, positive; features have length 1.

    Returns:
        The score of importance-weighted validation and that of deep embedded validation, scalars, float64. They may
        lie outside [0, 1].

    Raises:
        ValueError: If the shapes do not fit, or ``ridge`` is not positive.

    References:
        Sugiyama et al., Covariate shift adaptation by importance weighted cross validation, JMLR 2007; You et al.,
        Towards accurate model selection in deep unsupervised domain adaptation (DEV), ICML 2019, who take the weights
        from a classifier of domains, which needs all samples in one place.
    """
    theta = importance_weights(source.square, target, ridge)
    weight, risk = theta @ source.phi, theta @ source.loss
    variance = theta @ source.square @ theta - weight.square()
    covariance = theta @ source.square_loss @ theta - risk * weight
    some = variance > 1e-12 * weight.square()  # beyond rounding; equal weights need no control
    control = torch.where(some, -covariance / variance, 0.0)
    return 1 - risk, 1 - (risk + control * (weight - 1))


def _most_entropy(num_classes: int) -> float:
    if num_classes < 2:
        raise ValueError(f"predictions must be of at least 2 classes, got {num_classes}")
    return math.log(num_classes)
