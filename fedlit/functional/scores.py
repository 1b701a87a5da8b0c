"""Scores of predictions that need no labels of the scored domain; the higher, the better."""

from __future__ import annotations

import math
from dataclasses import dataclass

import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.checks import check, check_at_least, check_between, check_positive
from fedlit.functional.checks import check_samples, check_shape
from fedlit.functional.kernels import squared_distances


def certainty_score(mean_entropy: float | Tensor, num_classes: int) -> Tensor:
    r"""Certainty of predictions: one minus their mean entropy as a share of its maximum, a scalar in [0, 1].

    .. math:: 1 - \frac{1}{n \log C} \sum_i H(p_i)

    See Morerio et al., Minimal-entropy correlation alignment, ICLR 2018.

    Args:
        mean_entropy: Entropy of each sample's prediction in nats, averaged over samples.
        num_classes: Number of classes C, at least 2.
    """
    highest = _max_entropy(num_classes)
    return torch.clamp(1 - torch.as_tensor(mean_entropy, dtype=torch.float64) / highest, 0.0, 1.0)


def diversity_score(mean_probabilities: Tensor) -> Tensor:
    r"""Evenness of predicted classes: the entropy of the mean prediction as a share of its maximum, in [0, 1].

    .. math:: \frac{H(\bar p)}{\log C}

    See Musgrave et al., Three new validators, arXiv 2208.07360.

    Args:
        mean_probabilities: Predicted class probabilities averaged over samples, shape (C,), sums to 1; C at least 2.
    """
    highest = _max_entropy(mean_probabilities.numel())
    return torch.clamp(torch.special.entr(mean_probabilities).sum() / highest, 0.0, 1.0)


def information_score(mean_probabilities: Tensor, mean_entropy: float | Tensor) -> Tensor:
    r"""Mutual information between inputs and predicted classes, as a share of its maximum, a scalar in [0, 1].

    .. math:: \frac{H(\bar p) - \frac{1}{n}\sum_i H(p_i)}{\log C}

    High when predictions are certain and all classes occur. It is not an accuracy: a confidently wrong model can score
    high. See Bridle, Heading and MacKay, NeurIPS 1991; as a validator, Musgrave et al., arXiv 2208.07360.

    Args:
        mean_probabilities: As for `diversity_score`.
        mean_entropy: Entropy of each sample's prediction in nats, averaged over samples.
    """
    highest = _max_entropy(mean_probabilities.numel())
    marginal = torch.special.entr(mean_probabilities).sum()
    return torch.clamp((marginal - mean_entropy) / highest, 0.0, 1.0)


def soft_neighbourhood_density(probabilities: Tensor, temperature: float = 0.05) -> Tensor:
    r"""Mean entropy of each prediction's similarities to the others, as a share of its maximum, in [0, 1], float64.

    .. math:: \frac{1}{n \log (n - 1)} \sum_i H(q_i), \quad
        q_{ij} \propto \exp\left(\frac{p_i^\top p_j}{|p_i| |p_j| \, \tau}\right), \; j \ne i

    Equal predictions have 1: it does not show whether a model has collapsed. See Saito et al., Tune it the right way,
    ICCV 2021, equations 2 to 4, where it is not divided by its maximum; their code leaves a sample out of its
    neighbours by a small similarity rather than altogether.

    Args:
        probabilities: Predicted class probabilities of target samples, shape (n, C), of at least three samples.
        temperature: tau, positive.
    """
    check_samples("probabilities", probabilities)
    check_at_least("probabilities", len(probabilities), 3, "samples, to have neighbours")
    check_positive("temperature (tau)", temperature)
    unit = F.normalize(probabilities.double(), dim=1)
    similarities = unit @ unit.T / temperature
    similarities.fill_diagonal_(-math.inf)
    density: Tensor = torch.special.entr(similarities.softmax(dim=1)).sum(dim=1).mean()
    return density / math.log(len(probabilities) - 1)


def calibrated_information(logits: Tensor, temperature: float) -> Tensor:
    r"""`information_score`, float64, at a temperature that equalises the confidence of different methods.

    .. math:: I(\operatorname{softmax}(z / T))

    Args:
        logits: z of target samples, shape (n, C).
        temperature: T, positive: the one at which labels of held-out source samples are likeliest, see `losses_at` and
            `best_temperature`, so that the logits' scale does not matter.
    """
    check_samples("logits", logits)
    check_at_least("logits", len(logits), 1, "sample")
    check_positive("temperature (T)", temperature)
    log_p = (logits.double() / temperature).log_softmax(dim=1)
    return information_score(log_p.exp().mean(dim=0), -(log_p.exp() * log_p).sum(dim=1).mean())


def standardised_directions(x: Tensor) -> Tensor:
    r"""Samples standardised by their mean and deviation and scaled to length 1, shape (n, d), float64.

    Args:
        x: Samples of one client, at least one, shape (n, ...), which are flattened. A constant feature becomes 0, and
            so does a sample that is the mean.
    """
    check_at_least("x", len(x), 1, "sample")
    flat = x.detach().flatten(1).double()
    constant = flat.amin(dim=0) == flat.amax(dim=0)  # the computed deviation may be a rounding error instead of 0
    deviation = flat.std(dim=0, correction=0).masked_fill(constant, 1.0)
    return F.normalize((flat - flat.mean(dim=0)) / deviation, dim=1)


def feature_hash(x: Tensor, size: int, seed: int = 0) -> Tensor:
    """Shape (n, k), with about the same inner products: each feature is added to one of k numbers, or subtracted.

    See Weinberger et al., Feature hashing for large scale multitask learning, ICML 2009.

    Args:
        x: Samples, shape (n, d); up to k features are left as they are, followed by zeros.
        size: k, at least 1.
        seed: Of the draw of the number to which each feature goes, and of its sign.
    """
    check_samples("x", x)
    check_at_least("size (k)", size, 1)
    width = x.shape[1]
    if width <= size:
        return F.pad(x, (0, size - width))
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randint(size, (width,), generator=generator)
    signs = 2 * torch.randint(2, (width,), generator=generator) - 1
    return x.new_zeros(len(x), size).index_add_(1, columns.to(x.device), x * signs.to(x))


def nearest_neighbours(x: Tensor, num_neighbours: int | None = None) -> Tensor:
    """Indices of the other samples nearest to each, nearest first, int64, shape (n, k).

    Args:
        x: Samples, shape (n, d), n at least 4.
        num_neighbours: k, from 1 to n - 1; ``None`` is n / 20, but at least 3 and at most 10.
    """
    check_samples("x", x)
    number = len(x)
    check_at_least("x", number, 4, "samples, to have 3 neighbours each")
    k = min(10, max(3, number // 20)) if num_neighbours is None else num_neighbours
    check_between("num_neighbours (k)", k, 1, number - 1)
    nearest = []
    for start in range(0, number, _ROWS):
        distances = squared_distances(x[start : start + _ROWS], x)
        rows = torch.arange(len(distances), device=x.device)
        distances[rows, start + rows] = math.inf  # a sample is no neighbour of itself
        nearest.append(distances.topk(k, dim=1, largest=False).indices)
    return torch.cat(nearest)


_ROWS = 1024
"""Of the matrix of distances that are held at a time."""


def neighbourhood_information(classes: Tensor, neighbours: Tensor | scipy.sparse.csr_array, num_classes: int) -> Tensor:
    r"""Mutual information of a sample's predicted class and that of its neighbours as a share of its maximum, float64.

    .. math:: \frac{1}{\log C} \sum_{ab} M_{ab} \log \frac{M_{ab}}{M_{a \cdot} M_{\cdot b}}, \quad
        M_{ab} = \frac{1}{n k} \left|\{(i, j) : j \in N(i), \hat y_i = a, \hat y_j = b\}\right|

    High when near samples are of one class and all classes occur. The names of classes do not matter.

    Args:
        classes: Predicted classes, int64, shape (n,), from 0.
        neighbours: N, indices of each sample's neighbours, int64, shape (n, k); or the graph whose edges lead to them,
            shape (n, n), sparse, as of `neighbour_graph`. To compare models, those in features that no model has made,
            see `standardised_directions` and `nearest_neighbours`.
        num_classes: Number of classes C, at least 2.
    """
    highest = _max_entropy(num_classes)
    check_shape("classes", classes, "n > 0")
    if isinstance(neighbours, Tensor):
        check_shape("neighbours (N)", neighbours, len(classes), "k")
        pairs = (classes[:, None] * num_classes + classes[neighbours]).flatten()
    else:
        whole = (len(classes), len(classes))
        check(neighbours.shape == whole, "neighbours (N)", f"of shape {whole}", neighbours.shape)
        ends = (torch.from_numpy(each.astype("int64")).to(classes.device) for each in neighbours.nonzero())
        first, second = (classes[each] for each in ends)
        pairs = first * num_classes + second
    joint = torch.bincount(pairs, minlength=num_classes**2).double().reshape(num_classes, num_classes)
    joint = joint / joint.sum().clamp(min=1)
    entropies = [torch.special.entr(each).sum() for each in (joint.sum(dim=0), joint.sum(dim=1), joint)]
    return torch.clamp((entropies[0] + entropies[1] - entropies[2]) / highest, 0.0, 1.0)


def class_mean_match(class_sums: Tensor, counts: Tensor, source_sums: Tensor, source_counts: Tensor) -> Tensor:
    r"""Mean cosine of the target's means of predicted classes with those of the sources' classes, in [-1, 1], float64.

    .. math:: \frac{1}{C'} \sum_c \cos\left(m^T_c - m^T, \; m^S_c - m^S\right)

    over the C' classes that the sources have; one that is never predicted counts 0. It falls where classes are mixed
    up, which neither `calibrated_information` nor `neighbourhood_information` sees.

    Args:
        class_sums: Sums of the target's samples over predicted classes, shape (C, d), as of `standardised_directions`.
        counts: Samples in them, shape (C,), not all 0.
        source_sums: The same of the sources' samples and their labels, times any number.
        source_counts: Times the same number.
    """
    check_shape("class_sums", class_sums, "C", "d")
    num_classes, width = class_sums.shape
    check_shape("source_sums", source_sums, num_classes, width)
    for name, numbers in (("counts", counts), ("source_counts", source_counts)):
        check_shape(name, numbers, num_classes)
        check_positive(name, float(numbers.sum()), "at least one sample is needed")

    def centred(sums: Tensor, numbers: Tensor) -> Tensor:
        sums, numbers = sums.double(), numbers.double()
        means = sums / torch.where(numbers > 0, numbers, 1.0)[:, None] - sums.sum(dim=0) / numbers.sum()
        return torch.where((numbers > 0)[:, None], means, 0.0)

    cosines = F.cosine_similarity(centred(class_sums, counts), centred(source_sums, source_counts), dim=1)
    return cosines[source_counts > 0].mean()


def trust_score(calibrated: Tensor, neighbourhood: Tensor, match: Tensor, source_accuracy: Tensor) -> Tensor:
    """Trust in a model of any method at a target without labels: a product of four scores, in [0, 1].

    Each is low for models that another takes for good ones. It is no accuracy, and depends on the data: compare models
    of one target with it.

    Args:
        calibrated: Of `calibrated_information`, a scalar.
        neighbourhood: Of `neighbourhood_information`, a scalar.
        match: Of `class_mean_match`, a scalar; below 0 it counts as 0.
        source_accuracy: Share of the sources' validation samples that are predicted right, a scalar in [0, 1].
    """
    return calibrated * neighbourhood * match.clamp(min=0.0) * source_accuracy


@dataclass(frozen=True)
class SourceMoments:
    """Means over labelled source samples of m features phi, and of their products with a loss; all float64.

    A mean of several sources' moments is that of their mixture, each with its weight as share.

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
        """Moments of samples, from their features phi, shape (n, m), and their losses, shape (n,)."""
        phi, each = features.double(), losses.double()[:, None]
        number = len(phi)
        return cls(phi.mean(dim=0), phi.T @ phi / number, (each * phi).mean(dim=0), phi.T @ (each * phi) / number)


def importance_weights(square: Tensor, target: Tensor, ridge: float = 0.1) -> Tensor:
    r"""Coefficients theta of features that estimate the ratio of target to source density, shape (m,), float64.

    .. math:: w(z) = \theta^\top \phi(z), \quad
        \theta = \left(E_S[\phi \phi^\top] + \tfrac{\lambda}{m} I\right)^{-1} E_T[\phi]

    The mean of f over the target is then estimated as that of w f over the sources, from E_S[f phi] alone. See
    Kanamori, Hido and Sugiyama (uLSIF), JMLR 2009, who cut off negative weights, as moments alone do not allow.

    Args:
        square: E_S[phi phi^T] of the sources' samples, shape (m, m).
        target: Mean features E_T[phi] of the target's samples, shape (m,).
        ridge: lambda, positive; features have length 1.
    """
    check_positive("ridge (lambda)", ridge)
    size = len(square)
    check_shape("target", target, size)
    identity = torch.eye(size, dtype=torch.float64, device=square.device)
    theta: Tensor = torch.linalg.solve(square.double() + ridge / size * identity, target.double())
    return theta


def importance_weighted_scores(source: SourceMoments, target: Tensor, ridge: float = 0.1) -> tuple[Tensor, Tensor]:
    r"""Accuracy on the target, estimated on source samples by importance weights and with a control variate.

    Of the errors l and weights w(z) = theta^T phi(z), see `importance_weights`, importance-weighted validation gives
    1 - E_S[w l]; deep embedded validation takes 1 - (E_S[w l] + eta (E_S[w] - 1)), where eta = -Cov(w l, w) / Var(w)
    minimises the variance. Returns both, scalars, float64, which may lie outside [0, 1]. See Sugiyama et al., JMLR
    2007; You et al., Towards accurate model selection in deep unsupervised domain adaptation (DEV), ICML 2019, who take
    the weights from a classifier of domains, which needs all samples in one place.

    Args:
        source: Moments of the features and of the sources' errors (0 or 1, or another loss).
        target: Mean features E_T[phi] of the target's samples, shape (m,).
        ridge: lambda, positive; features have length 1.
    """
    theta = importance_weights(source.square, target, ridge)
    weight, risk = theta @ source.phi, theta @ source.loss
    variance = theta @ source.square @ theta - weight.square()
    covariance = theta @ source.square_loss @ theta - risk * weight
    some = variance > 1e-12 * weight.square()  # beyond rounding; equal weights need no control
    control = torch.where(some, -covariance / variance, 0.0)
    return 1 - risk, 1 - (risk + control * (weight - 1))


def _max_entropy(num_classes: int) -> float:
    check_at_least("num_classes (C)", num_classes, 2)
    return math.log(num_classes)
