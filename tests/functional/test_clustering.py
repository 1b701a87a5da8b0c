"""k-means against scikit-learn, and measures of its clusters against sums over all pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from fedlit.functional import clustering_gains, intra_cluster_distance, k_means, relative_scatter


def blobs(n: int = 60, k: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % k
    return 2 * torch.randn(k, 3, generator=generator)[labels] + torch.randn(n, 3, generator=generator), labels


@pytest.mark.parametrize("k", [1, 4, 6])
def test_from_the_same_clusters_it_ends_where_scikit_learn_does(k: int) -> None:
    """As long as no cluster is without samples on the way, which scikit-learn would move elsewhere."""
    x, _ = blobs()
    start = torch.randint(k, (len(x),), generator=torch.Generator().manual_seed(1))
    means = np.stack([x[start == cluster].double().numpy().mean(axis=0) for cluster in range(k)])
    found = k_means(x, k, start=start)
    other = KMeans(k, init=means, n_init=1, tol=0).fit(x.double().numpy())
    assert found.tolist() == other.labels_.tolist()
    total = float((x.double() - x.double().mean(dim=0)).square().sum())
    assert float(relative_scatter(x, found)) == pytest.approx(other.inertia_ / total, abs=1e-12)


def test_a_draw_of_centres_is_nearly_as_good_as_the_best_of_many_and_the_same_for_a_seed() -> None:
    x, _ = blobs()
    best = KMeans(4, n_init=50, random_state=0).fit(x.double().numpy()).inertia_
    total = float((x.double() - x.double().mean(dim=0)).square().sum())
    assert best / total <= float(relative_scatter(x, k_means(x, 4))) + 1e-12
    assert min(float(relative_scatter(x, k_means(x, 4, seed=seed))) for seed in range(10)) < 1.001 * best / total
    assert torch.equal(k_means(x, 4, seed=3), k_means(x, 4, seed=3))


def test_samples_that_are_alike_and_clusters_without_any_do_no_harm() -> None:
    assert float(relative_scatter(torch.ones(5, 2), k_means(torch.ones(5, 2), 3))) == 0
    x, _ = blobs()
    apart = k_means(x, 3, start=torch.zeros(len(x), dtype=torch.int64))
    assert apart.shape == (len(x),)
    assert float(relative_scatter(x, k_means(x[:4], 4)[torch.arange(60) % 4])) <= 1
    assert float(relative_scatter(x[:4], k_means(x[:4], 4))) == pytest.approx(0, abs=1e-12)


def test_intra_cluster_distance_is_a_sum_over_pairs_and_with_squares_the_inertia() -> None:
    x, labels = (each.numpy() for each in blobs())
    total, squares = 0.0, 0.0
    for cluster in range(4):
        own = x[labels == cluster].astype(np.float64)
        apart = [np.linalg.norm(a - b) for a in own for b in own]
        total += sum(apart) / (2 * len(own))
        squares += sum(np.square(apart)) / (2 * len(own))
    assert float(intra_cluster_distance(*blobs())) == pytest.approx(total)
    scatter = ((x - x.mean(axis=0)) ** 2).sum()
    assert float(relative_scatter(*blobs())) == pytest.approx(squares / scatter, abs=1e-6)


def test_a_gain_is_what_scatter_loses_and_clusters_go_on_from_those_before() -> None:
    x, _ = blobs()
    squeezed = x * torch.tensor([1.0, 1.0, 0.1])
    before = k_means(x, 4, seed=7)
    by_hand = relative_scatter(x, before) - relative_scatter(squeezed, k_means(squeezed, 4, start=before))
    gains = clustering_gains(x, [x, squeezed, 5 * x - 3], 4, seed=7)
    assert gains.tolist() == pytest.approx([0, float(by_hand), 0], abs=1e-7)
    assert abs(float(by_hand)) > 1e-3
    (shrunk,) = clustering_gains(x, [x / 2], 4, intra_cluster_distance, seed=7)
    assert float(shrunk) == pytest.approx(float(intra_cluster_distance(x, before)) / 2)
    assert clustering_gains(x, [], 4).shape == (0,)
