"""k-means, how compact clusters are, and classes by centroids and prototypes: without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.checks import check, check_at_least, check_between
from fedlit.functional.checks import check_samples, check_shape


@torch.no_grad()
def k_means(
    x: Tensor, num_clusters: int, start: Tensor | None = None, seed: int = 0, max_iterations: int = 100
) -> Tensor:
    """Clusters of samples by Lloyd's algorithm, int64, shape (n,): a local minimum of squared distances to their means.

    A cluster that loses all its samples keeps its centre, and may end without any.

    Args:
        x: Samples, shape (n, d), at least as many as clusters.
        num_clusters: k, at least 1.
        start: Clusters of the samples to start from, shape (n,), such as those of the same samples in other features;
            ``None`` draws centres among the samples by k-means++.
        seed: Of that draw.
        max_iterations: Maximal number of passes; it ends before if no sample moves.
    """
    _check(x, start)
    check_between("num_clusters (k)", num_clusters, 1, len(x), "give more samples")
    x = x.detach().double()
    centres = _drawn(x, num_clusters, seed) if start is None else x.new_zeros(num_clusters, x.shape[1])
    clusters = torch.cdist(x, centres).argmin(dim=1) if start is None else start
    for _ in range(max_iterations):
        counts = torch.bincount(clusters, minlength=num_clusters)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, clusters, x)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
        moved = torch.cdist(x, centres).argmin(dim=1)
        if torch.equal(moved, clusters):
            break
        clusters = moved
    return clusters


@torch.no_grad()
def relative_scatter(x: Tensor, clusters: Tensor) -> Tensor:
    r"""Squared distances to cluster means over those to the mean of all samples: a scalar in [0, 1], float64.

    .. math:: J = \frac{\sum_r \sum_{i \in C_r} |x_i - \bar x_r|^2}{\sum_i |x_i - \bar x|^2}

    Neither moving, scaling nor turning the samples changes it; it is 0 if all of them are alike.

    Args:
        x: Samples, shape (n, d).
        clusters: Of each sample, shape (n,), from 0.
    """
    _check(x, clusters)
    x = x.detach().double()
    counts = torch.bincount(clusters)[:, None]
    means = torch.zeros(len(counts), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, clusters, x)
    within = (x - (means / counts.clamp(min=1))[clusters]).square().sum()
    total = (x - x.mean(dim=0)).square().sum()
    return within / total if total > 0 else torch.zeros_like(total)


@torch.no_grad()
def intra_cluster_distance(x: Tensor, clusters: Tensor) -> Tensor:
    r"""Distances between samples of a cluster, a scalar, float64, which scaling the samples scales (FADA, equation 3).

    .. math:: I = \sum_r \frac{1}{2 n_r} \sum_{i, j \in C_r} |x_i - x_j|

    Args:
        x: Samples, shape (n, d).
        clusters: Of each sample, shape (n,), from 0.
    """
    _check(x, clusters)
    x = x.detach().double()
    members = [x[clusters == cluster] for cluster in sorted({*clusters.tolist()})]
    return torch.stack([torch.cdist(own, own).sum() / (2 * len(own)) for own in members]).sum()


@torch.no_grad()
def clustering_gains(
    x: Tensor,
    moved: Iterable[Tensor],
    num_clusters: int,
    scatter: Callable[[Tensor, Tensor], Tensor] = relative_scatter,
    seed: int = 0,
) -> Tensor:
    r"""Gains in compactness of clusters by several changes of the same samples' features, shape (K,), float64.

    .. math:: \text{gain}_k = S(x, C) - S(x_k, C_k)

    Each clustering :math:`C_k` starts from C: another draw of centres could be a gain by itself. See Peng et al., ICLR
    2020 (FADA), equation 3.

    Args:
        x: Samples, shape (n, d).
        moved: Those samples after each change, K tensors of shape (n, d).
        num_clusters: Of k-means, from 1 to n.
        scatter: S, of samples and clusters, such as `intra_cluster_distance`.
        seed: Of the first centres.
    """
    start = k_means(x, num_clusters, seed=seed)
    before = scatter(x, start)
    gains = [before - scatter(each, k_means(each, num_clusters, start=start)) for each in moved]
    return torch.stack(gains) if gains else x.new_zeros(0, dtype=torch.float64)


def _drawn(x: Tensor, num_clusters: int, seed: int) -> Tensor:
    """Centres by k-means++: each the likelier the farther it is from those drawn before."""
    generator = torch.Generator().manual_seed(seed)
    centres = x[int(torch.randint(len(x), (1,), generator=generator))][None]
    for _ in range(1, num_clusters):
        nearest = torch.cdist(x, centres).min(dim=1).values.square().cpu()
        chances = nearest if nearest.sum() > 0 else torch.ones_like(nearest)  # all samples are centres already
        centres = torch.cat([centres, x[int(torch.multinomial(chances, 1, generator=generator))][None]])
    return centres


def _check(x: Tensor, clusters: Tensor | None) -> None:
    check_shape("x", x, "n > 0", "d")
    if clusters is not None:
        check_shape("clusters", clusters, len(x), way_out="give one per sample")
        check(not clusters.is_floating_point(), "clusters", "whole numbers", clusters.dtype)


def centroid_labels(features: Tensor, p: Tensor, num_passes: int = 2) -> Tensor:
    r"""Labels of the nearest class centroid by angle, int64, shape (n,), without labels to begin with.

    .. math:: c_k = \frac{\sum_i p_{ik} f_i}{\sum_i p_{ik}}, \qquad \hat y_i = \operatorname{argmax}_k \cos(f_i, c_k)

    In the passes after the first, p are the labels so far. A class that nobody is of has no centroid then. See Liang,
    Hu and Feng, ICML 2020, equations 4 to 6.

    Args:
        features: f, shape (n, d).
        p: Class probabilities, shape (n, C), not negative.
        num_passes: At least 1.
    """
    check_samples("features", features)
    check_shape("p", p, len(features), "C")
    check_at_least("num_passes", num_passes, 1)
    points, weights = F.normalize(features.double(), dim=1), p.double()
    labels = weights.argmax(dim=1)
    for _ in range(num_passes):
        # the length of a centroid does not matter
        cosines = points @ F.normalize(weights.T @ features.double(), dim=1).T
        labels = cosines.masked_fill(weights.sum(dim=0) <= 0, -2.0).argmax(dim=1)
        weights = F.one_hot(labels, p.shape[1]).double()
    return labels


def nearest_prototypes(weight: Tensor, features: Tensor, p: Tensor, num_kept: int | None = None) -> Tensor:
    r"""Directions that stand for classes: means of a classifier's and of the most certain samples', shape (C, d).

    .. math:: \omega_c \propto \sum_{s \in S_c} \frac{s}{|s|}

    with the row of the classifier and the features of those samples in S that are predicted of class c, as many as are
    kept of least entropy. Rows have length 1. See Iwasawa and Matsuo, Test-time classifier adjustment module, NeurIPS
    2021, Algorithm 1.

    Args:
        weight: Rows of a linear classifier, shape (C, d).
        features: Its inputs, shape (n, d).
        p: Its class probabilities, shape (n, C).
        num_kept: Samples of each class at most; ``None`` is all of them.
    """
    check_samples("features", features)
    check_shape("weight", weight, "C", features.shape[1])
    check_shape("p", p, len(features), len(weight))
    entropy, predicted = torch.special.entr(p.double()).sum(dim=1), p.argmax(dim=1)
    points, sums = F.normalize(features.double(), dim=1), F.normalize(weight.double(), dim=1)
    for label in range(len(weight)):
        of_class = (predicted == label).nonzero().squeeze(1)
        kept = of_class[entropy[of_class].argsort(stable=True)[:num_kept]]
        sums[label] += points[kept].sum(dim=0)
    return F.normalize(sums, dim=1)
