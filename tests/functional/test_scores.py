"""Label-free scores: by hand, against scipy and numpy, and against ratios of densities that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics import mutual_info_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler, normalize
from torch import Tensor

from fedlit import functional as fn


def predictions(n: int = 30, num_classes: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn(n, num_classes, generator=generator, dtype=torch.float64)).softmax(dim=1)


def test_entropies_are_scipys() -> None:
    p = predictions()
    mean, each = p.mean(dim=0), torch.special.entr(p).sum(dim=1).mean()
    base = math.log(4)
    assert float(fn.certainty_score(each, 4)) == pytest.approx(1 - entropy(p.numpy(), axis=1).mean() / base)
    assert float(fn.diversity_score(mean)) == pytest.approx(entropy(mean.numpy()) / base)
    assert float(fn.information_score(mean, each)) == pytest.approx(
        (entropy(mean.numpy()) - entropy(p.numpy(), axis=1).mean()) / base
    )
    calibrated = fn.calibrated_information(2 * p.log(), 2.0)
    assert float(calibrated) == pytest.approx(float(fn.information_score(mean, each)))


def test_neighbourhood_density_is_that_of_every_row_by_itself() -> None:
    p = predictions().numpy()
    unit = p / np.linalg.norm(p, axis=1, keepdims=True)
    rows = []
    for i in range(len(p)):
        similarity = np.delete(unit @ unit[i], i) / 0.1
        rows.append(entropy(np.exp(similarity - similarity.max())))
    expected = np.mean(rows) / math.log(len(p) - 1)
    assert float(fn.soft_neighbourhood_density(torch.from_numpy(p), 0.1)) == pytest.approx(expected)


def test_scores_of_moments_are_those_of_the_samples() -> None:
    """DEV as You et al.'s code writes it, on weights of every sample by itself."""
    generator = torch.Generator().manual_seed(1)
    frequencies = fn.sample_frequencies(6, 3, 1.0)
    source = fn.random_fourier_features(torch.randn(50, 3, generator=generator), frequencies).double()
    target = fn.random_fourier_features(0.5 + torch.randn(40, 3, generator=generator), frequencies).double().mean(dim=0)
    losses = torch.rand(50, generator=generator).double()
    iwv, dev = fn.importance_weighted_scores(fn.SourceMoments.of(source, losses), target, ridge=0.3)
    phi = source.numpy()
    theta = np.linalg.solve(phi.T @ phi / 50 + 0.3 / 12 * np.eye(12), target.numpy())
    weight = phi @ theta
    weighted = weight * losses.numpy()
    eta = -np.cov(weighted, weight)[0, 1] / np.var(weight, ddof=1)
    assert float(iwv) == pytest.approx(1 - weighted.mean())
    assert float(dev) == pytest.approx(1 - (weighted.mean() + eta * weight.mean() - eta))
    assert abs(float(dev) - float(iwv)) > 1e-4


def samples(n: int = 60, width: int = 5, seed: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) * torch.arange(1.0, width + 1) + 2


def test_standardised_directions_are_sklearns() -> None:
    x = samples()
    expected = normalize(StandardScaler().fit_transform(x.double().numpy()))
    np.testing.assert_allclose(fn.standardised_directions(x).numpy(), expected, atol=1e-12)
    moved = fn.standardised_directions(x * torch.tensor([1e-3, 2, 1, 40, 1]) + torch.arange(5))
    torch.testing.assert_close(moved, fn.standardised_directions(x), atol=1e-4, rtol=0)
    constant = torch.cat([x, torch.full((60, 1), 0.1)], dim=1)
    torch.testing.assert_close(fn.standardised_directions(constant)[:, :5], fn.standardised_directions(x))
    assert not fn.standardised_directions(constant)[:, 5].any()
    torch.testing.assert_close(fn.standardised_directions(x.reshape(60, 5, 1)), fn.standardised_directions(x))


@pytest.mark.parametrize(("number", "k"), [(30, 3), (1500, 10)])
def test_neighbours_are_sklearns(number: int, k: int) -> None:
    x = samples(number).double()
    expected = NearestNeighbors(n_neighbors=k).fit(x.numpy()).kneighbors(return_distance=False)
    np.testing.assert_array_equal(fn.nearest_neighbours(x).numpy(), expected)
    assert torch.equal(fn.nearest_neighbours(x, 2), fn.nearest_neighbours(x)[:, :2])


def test_neighbourhood_information_is_sklearns_mutual_information_of_pairs() -> None:
    x = fn.standardised_directions(samples())
    classes = torch.randint(3, (60,), generator=torch.Generator().manual_seed(5)) % 4
    classes[x[:, 0] > 0] = 3
    neighbours = fn.nearest_neighbours(x)
    others = classes[neighbours].flatten().numpy()
    expected = mutual_info_score(classes.repeat_interleave(3).numpy(), others) / math.log(4)
    assert float(fn.neighbourhood_information(classes, neighbours, 4)) == pytest.approx(expected)
    assert 0.05 < expected < 0.95


def by_class(x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    one_hot = torch.nn.functional.one_hot(classes, 3).double()
    return one_hot.T @ x, one_hot.sum(dim=0)


def test_class_means_match_by_hand_and_by_sklearn() -> None:
    """Centres are (0, 0) on both sides; the first classes agree, the second are at right angles, the third absent."""
    target = (torch.tensor([[1.0, 0], [-1, 0], [0, 0]]), torch.tensor([1.0, 1, 0]))
    source = (torch.tensor([[3.0, 0], [0, 3], [-3, -3]]), torch.tensor([3.0, 3, 3]))
    assert float(fn.class_mean_match(*target, *source)) == pytest.approx((1 + 0 + 0) / 3)
    x, y = fn.standardised_directions(samples()), fn.standardised_directions(samples(seed=9))
    a, b = torch.arange(60) % 3, torch.arange(60) // 20
    means = [
        [own[of == c].mean(dim=0).numpy() - own.mean(dim=0).numpy() for c in range(3)] for own, of in ((x, a), (y, b))
    ]
    expected = np.diag(cosine_similarity(*means)).mean()
    assert float(fn.class_mean_match(*by_class(x, a), *(each / 60 for each in by_class(y, b)))) == pytest.approx(
        expected
    )


def test_trust_is_a_product_and_none_in_mixed_up_classes() -> None:
    half, two_fifths, accuracy = torch.tensor(0.5), torch.tensor(0.4), torch.tensor(0.9)
    assert float(fn.trust_score(half, two_fifths, torch.tensor(0.3), accuracy)) == pytest.approx(0.054)
    assert float(fn.trust_score(half, two_fifths, torch.tensor(-0.3), accuracy)) == 0


def test_hashed_features_keep_inner_products_on_average() -> None:
    x = torch.nn.functional.normalize(samples(6, 300).double())
    hashed = torch.stack([fn.feature_hash(x, 64, seed) for seed in range(400)])
    torch.testing.assert_close((hashed @ hashed.mT).mean(dim=0), x @ x.T, rtol=0, atol=0.03)
    assert torch.equal(fn.feature_hash(x, 64), hashed[0])
    assert torch.equal(fn.feature_hash(x, 300), x)
    assert torch.equal(fn.feature_hash(x, 302), torch.nn.functional.pad(x, (0, 2)))
