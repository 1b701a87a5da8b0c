"""Scores of predictions that need no labels of the domain they are scored on; the higher, the better."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.functional.kernels import check_samples, squared_distances


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

    High when predictions are certain and all classes occur. It distinguishes a collapsed model from a working one
    without labels; it is not an accuracy, and a confidently wrong model can score high.

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
        A scalar in [0, 1], float64. Equal predictions have 1: it does not show whether a model has collapsed.

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


def calibrated_information(logits: Tensor, temperature: float) -> Tensor:
    r"""`information_score` of predictions at a temperature that makes models of different methods equally sure.

    .. math:: I(\operatorname{softmax}(z / T))

    Args:
        logits: z of target samples, shape (n, C).
        temperature: T, positive: the one at which labels of held-out source samples are likeliest, see `losses_at` and
            `best_temperature`. It grows with the logits, so that their scale does not matter; and a model that errs
            on the sources gets a high one.

    Returns:
        A scalar in [0, 1], float64.

    Raises:
        ValueError: If there is no sample, there are fewer than two classes, or the temperature is not positive.

    References:
        Guo et al., On calibration of modern neural networks, ICML 2017, for the temperature.
    """
    check_samples("logits", logits)
    if not len(logits):
        raise ValueError("logits must hold at least one sample, got none")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive, got {temperature}")
    log_p = (logits.double() / temperature).log_softmax(dim=1)
    return information_score(log_p.exp().mean(dim=0), -(log_p.exp() * log_p).sum(dim=1).mean())


def standardised_directions(x: Tensor) -> Tensor:
    r"""Samples standardised by their own mean and deviation, and scaled to length 1.

    What differs between domains by a shift or a scale of a feature is gone, and angles are left.

    Args:
        x: Samples of one client, shape (n, ...), which are flattened.

    Returns:
        Shape (n, d), float64; a constant feature is 0, and so is a sample that is the mean.

    Raises:
        ValueError: If there is no sample.
    """
    if not len(x):
        raise ValueError("x must hold at least one sample, got none")
    flat = x.detach().flatten(1).double()
    constant = flat.amin(dim=0) == flat.amax(dim=0)  # the computed deviation may be a rounding error instead of 0
    deviation = flat.std(dim=0, correction=0).masked_fill(constant, 1.0)
    return F.normalize((flat - flat.mean(dim=0)) / deviation, dim=1)


def feature_hash(x: Tensor, size: int, seed: int = 0) -> Tensor:
    """Fewer numbers per sample, with about the same inner products: each feature is added to one of them or subtracted.

    Args:
        x: Samples, shape (n, d).
        size: k, at least 1.
        seed: Of the draw of the number to which each feature goes, and of its sign.

    Returns:
        Shape (n, k), on the device and of the type of ``x``; up to k features are left as they are, followed by zeros.

    Raises:
        ValueError: If ``size`` is less than 1.

    References:
        Weinberger et al., Feature hashing for large scale multitask learning, ICML 2009.
    """
    check_samples("x", x)
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    width = x.shape[1]
    if width <= size:
        return F.pad(x, (0, size - width))
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(size, (width,), generator=generator)
    signs = 2 * torch.randint(2, (width,), generator=generator) - 1
    return x.new_zeros(len(x), size).index_add_(1, places.to(x.device), x * signs.to(x))


def nearest_neighbours(x: Tensor, num_neighbours: int | None = None) -> Tensor:
    """The other samples that each is nearest to.

    Args:
        x: Samples, shape (n, d), n at least 4.
        num_neighbours: k, from 1 to n - 1; ``None`` is n / 20, but at least 3 and at most 10.

    Returns:
        Their places, nearest first, int64, shape (n, k).

    Raises:
        ValueError: If there are too few samples.
    """
    check_samples("x", x)
    number = len(x)
    if number < 4:
        raise ValueError(f"x must have at least 4 samples to have 3 neighbours each, got {number}")
    k = min(10, max(3, number // 20)) if num_neighbours is None else num_neighbours
    if not 1 <= k < number:
        raise ValueError(f"num_neighbours must be from 1 to {number - 1} of {number} samples, got {k}")
    found = []
    for start in range(0, number, _ROWS):
        distances = squared_distances(x[start : start + _ROWS], x)
        own = torch.arange(len(distances), device=x.device)
        distances[own, start + own] = math.inf
        found.append(distances.topk(k, dim=1, largest=False).indices)
    return torch.cat(found)


_ROWS = 1024
"""Of the matrix of distances that are held at a time."""


def neighbourhood_information(classes: Tensor, neighbours: Tensor, num_classes: int) -> Tensor:
    r"""Mutual information of a sample's predicted class and that of its neighbours, as a share of its greatest value.

    .. math:: \frac{1}{\log C} \sum_{ab} M_{ab} \log \frac{M_{ab}}{M_{a \cdot} M_{\cdot b}}, \quad
        M_{ab} = \frac{1}{n k} \left|\{(i, j) : j \in N(i), \hat y_i = a, \hat y_j = b\}\right|

    High when near samples are of one class and all classes occur. Which class is called what does not matter.

    Args:
        classes: Predicted classes, int64, shape (n,), from 0.
        neighbours: N, places of each sample's neighbours, int64, shape (n, k); to compare models, those in features
            that no model has made, see `standardised_directions` and `nearest_neighbours`.
        num_classes: Number of classes C, at least 2.

    Returns:
        A scalar in [0, 1], float64; 0 if all predictions are of one class.

    Raises:
        ValueError: If shapes do not fit, or there are fewer than two classes.

    Example:
        >>> two = torch.tensor([[1], [0], [3], [2]])  # two pairs of neighbours
        >>> neighbourhood_information(torch.tensor([0, 0, 1, 1]), two, num_classes=2)
        tensor(1., dtype=torch.float64)
        >>> neighbourhood_information(torch.tensor([0, 1, 0, 1]), two, num_classes=4)
        tensor(0.5000, dtype=torch.float64)
    """
    most = _most_entropy(num_classes)
    if neighbours.dim() != 2 or classes.shape != neighbours.shape[:1] or not len(classes):
        raise ValueError(
            "neighbours must be a row for each of the classes, at least one, got shapes "
            f"{tuple(neighbours.shape)} and {tuple(classes.shape)}"
        )
    pairs = (classes[:, None] * num_classes + classes[neighbours]).flatten()
    joint = torch.bincount(pairs, minlength=num_classes**2).double().reshape(num_classes, num_classes) / len(pairs)
    entropies = [torch.special.entr(each).sum() for each in (joint.sum(dim=0), joint.sum(dim=1), joint)]
    return torch.clamp((entropies[0] + entropies[1] - entropies[2]) / most, 0.0, 1.0)


def class_mean_match(class_sums: Tensor, counts: Tensor, source_sums: Tensor, source_counts: Tensor) -> Tensor:
    r"""How alike the means of predicted classes at the target are to those of the sources' classes, by angle.

    .. math:: \frac{1}{C'} \sum_c \cos\left(m^T_c - m^T, \; m^S_c - m^S\right)

    over the C' classes that the sources have; one that is never predicted counts 0. It falls where classes are mixed
    up, which neither `calibrated_information` nor `neighbourhood_information` sees.

    Args:
        class_sums: Sums of the target's samples over predicted classes, shape (C, d), as of `standardised_directions`.
        counts: Samples in them, shape (C,), not all 0.
        source_sums: The same of the sources' samples and their labels, times any number.
        source_counts: Times the same number.

    Returns:
        A scalar in [-1, 1], float64.

    Raises:
        ValueError: If shapes do not fit, or nobody has a sample.
    """
    shapes = [class_sums.shape, source_sums.shape, (*counts.shape, *class_sums.shape[1:])]
    if class_sums.dim() != 2 or len(set(shapes)) > 1 or counts.shape != source_counts.shape:
        raise ValueError(
            "sums must have shape (C, d) and counts (C,), got "
            f"{[tuple(each.shape) for each in (class_sums, counts, source_sums, source_counts)]}"
        )
    if not (float(counts.sum()) > 0 and float(source_counts.sum()) > 0):
        raise ValueError("counts and source_counts must be of at least one sample each, got none")

    def centred(sums: Tensor, numbers: Tensor) -> Tensor:
        sums, numbers = sums.double(), numbers.double()
        means = sums / torch.where(numbers > 0, numbers, 1.0)[:, None] - sums.sum(dim=0) / numbers.sum()
        return torch.where((numbers > 0)[:, None], means, 0.0)

    cosines = F.cosine_similarity(centred(class_sums, counts), centred(source_sums, source_counts), dim=1)
    return cosines[source_counts > 0].mean()


def trust_score(calibrated: Tensor, neighbourhood: Tensor, match: Tensor, source_accuracy: Tensor) -> Tensor:
    """How far a model can be trusted at a target without labels, whichever method it is of: a product of four scores.

    Each of them is low for models that another takes for good ones: `calibrated_information` for those whose sureness
    means nothing on the sources, `neighbourhood_information` for those that separate what is alike,
    `class_mean_match` for those that mix classes up, and accuracy for those that forget what the sources taught them.

    Args:
        calibrated: Of `calibrated_information`, a scalar.
        neighbourhood: Of `neighbourhood_information`, a scalar.
        match: Of `class_mean_match`, a scalar.
        source_accuracy: Share of the sources' validation samples that are predicted right, a scalar in [0, 1].

    Returns:
        A scalar in [0, 1]; 0 where ``match`` is below 0. It is no accuracy, and depends on the data: compare models of
        one target with it.
    """
    return calibrated * neighbourhood * match.clamp(min=0.0) * source_accuracy


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
