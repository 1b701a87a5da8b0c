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

from fedlit.functional import (
    SourceMoments,
    best_temperature,
    calibrated_information,
    certainty_score,
    class_mean_match,
    diversity_score,
    feature_hash,
    importance_weighted_scores,
    information_score,
    losses_at,
    nearest_neighbours,
    neighbourhood_information,
    random_fourier_features,
    sample_frequencies,
    soft_neighbourhood_density,
    standardised_directions,
    temperature_grid,
    trust_score,
)


def predictions(n: int = 30, num_classes: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn(n, num_classes, generator=generator, dtype=torch.float64)).softmax(dim=1)


def test_entropies_are_scipys() -> None:
    p = predictions()
    mean, each = p.mean(dim=0), torch.special.entr(p).sum(dim=1).mean()
    base = math.log(4)
    assert float(certainty_score(each, 4)) == pytest.approx(1 - entropy(p.numpy(), axis=1).mean() / base)
    assert float(diversity_score(mean)) == pytest.approx(entropy(mean.numpy()) / base)
    assert float(information_score(mean, each)) == pytest.approx(
        (entropy(mean.numpy()) - entropy(p.numpy(), axis=1).mean()) / base
    )


def test_neighbourhood_density_is_that_of_every_row_by_itself() -> None:
    p = predictions().numpy()
    unit = p / np.linalg.norm(p, axis=1, keepdims=True)
    rows = []
    for i in range(len(p)):
        similarity = np.delete(unit @ unit[i], i) / 0.1
        rows.append(entropy(np.exp(similarity - similarity.max())))
    expected = np.mean(rows) / math.log(len(p) - 1)
    assert float(soft_neighbourhood_density(torch.from_numpy(p), 0.1)) == pytest.approx(expected)


def test_equal_predictions_are_the_densest_neighbourhood() -> None:
    assert float(soft_neighbourhood_density(torch.full((5, 3), 1 / 3))) == pytest.approx(1.0)
    assert float(soft_neighbourhood_density(torch.eye(8))) == pytest.approx(1.0), "all alike far from each other"
    pairs = torch.eye(4).repeat_interleave(2, dim=0)
    assert float(soft_neighbourhood_density(pairs)) < 0.01, "one neighbour each"


def test_weights_of_two_places_are_the_ratio_of_their_shares() -> None:
    """Sources have both places equally often and err at the second; of the target's samples a quarter is there."""
    places = torch.eye(2, dtype=torch.float64)
    source = SourceMoments.of(places, torch.tensor([0.0, 1.0]))
    iwv, dev = importance_weighted_scores(source, torch.tensor([0.75, 0.25]), ridge=1e-9)
    assert float(iwv) == pytest.approx(0.75)
    assert float(dev) == pytest.approx(0.75), "weights of mean 1 leave nothing to correct"


def test_scores_of_moments_are_those_of_the_samples() -> None:
    """DEV as You et al.'s code writes it, on weights of every sample by itself."""
    generator = torch.Generator().manual_seed(1)
    frequencies = sample_frequencies(6, 3, 1.0)
    source = random_fourier_features(torch.randn(50, 3, generator=generator), frequencies).double()
    target = random_fourier_features(0.5 + torch.randn(40, 3, generator=generator), frequencies).double().mean(dim=0)
    losses = torch.rand(50, generator=generator).double()
    iwv, dev = importance_weighted_scores(SourceMoments.of(source, losses), target, ridge=0.3)
    phi = source.numpy()
    theta = np.linalg.solve(phi.T @ phi / 50 + 0.3 / 12 * np.eye(12), target.numpy())
    weight = phi @ theta
    weighted = weight * losses.numpy()
    eta = -np.cov(weighted, weight)[0, 1] / np.var(weight, ddof=1)
    assert float(iwv) == pytest.approx(1 - weighted.mean())
    assert float(dev) == pytest.approx(1 - (weighted.mean() + eta * weight.mean() - eta))
    assert abs(float(dev) - float(iwv)) > 1e-4


def test_a_shifted_target_is_foreseen() -> None:
    """Errors are on one side of 0, where the target lies more; both should tell what its own labels would."""
    generator = torch.Generator().manual_seed(3)
    frequencies = sample_frequencies(32, 1, 1.0)
    x, shifted = torch.randn(4000, 1, generator=generator), 0.7 + torch.randn(4000, 1, generator=generator)
    source = SourceMoments.of(random_fourier_features(x, frequencies), (x[:, 0] > 0).float())
    target = random_fourier_features(shifted, frequencies).mean(dim=0)
    truth = 1 - float((shifted > 0).float().mean())
    plain = 1 - float((x > 0).float().mean())
    iwv, dev = importance_weighted_scores(source, target, ridge=0.1)
    assert abs(plain - truth) > 0.2
    assert float(iwv) == pytest.approx(truth, abs=0.05)
    assert float(dev) == pytest.approx(truth, abs=0.05)


def samples(n: int = 60, width: int = 5, seed: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) * torch.arange(1.0, width + 1) + 2


def test_standardised_directions_are_sklearns() -> None:
    x = samples()
    expected = normalize(StandardScaler().fit_transform(x.double().numpy()))
    np.testing.assert_allclose(standardised_directions(x).numpy(), expected, atol=1e-12)
    moved = standardised_directions(x * torch.tensor([1e-3, 2, 1, 40, 1]) + torch.arange(5))
    torch.testing.assert_close(moved, standardised_directions(x), atol=1e-4, rtol=0)
    constant = torch.cat([x, torch.full((60, 1), 0.1)], dim=1)
    torch.testing.assert_close(standardised_directions(constant)[:, :5], standardised_directions(x))
    assert not standardised_directions(constant)[:, 5].any()
    torch.testing.assert_close(standardised_directions(x.reshape(60, 5, 1)), standardised_directions(x))


@pytest.mark.parametrize(("number", "k"), [(30, 3), (100, 5), (1500, 10)])
def test_neighbours_are_sklearns(number: int, k: int) -> None:
    x = samples(number).double()
    expected = NearestNeighbors(n_neighbors=k).fit(x.numpy()).kneighbors(return_distance=False)
    np.testing.assert_array_equal(nearest_neighbours(x).numpy(), expected)
    assert torch.equal(nearest_neighbours(x, 2), nearest_neighbours(x)[:, :2])


def test_neighbourhood_information_is_sklearns_mutual_information_of_pairs() -> None:
    x = standardised_directions(samples())
    classes = torch.randint(3, (60,), generator=torch.Generator().manual_seed(5)) % 4
    classes[x[:, 0] > 0] = 3
    neighbours = nearest_neighbours(x)
    others = classes[neighbours].flatten().numpy()
    expected = mutual_info_score(classes.repeat_interleave(3).numpy(), others) / math.log(4)
    assert float(neighbourhood_information(classes, neighbours, 4)) == pytest.approx(expected)
    assert 0.05 < expected < 0.95


def test_constant_predictions_have_no_information_and_other_names_change_none() -> None:
    neighbours = nearest_neighbours(samples())
    classes = (samples()[:, 0] > 2).long() + (samples()[:, 1] > 2).long()
    renamed = torch.tensor([2, 0, 1])[classes]
    assert float(neighbourhood_information(torch.full((60,), 1), neighbours, 3)) == 0
    assert float(neighbourhood_information(renamed, neighbours, 3)) == pytest.approx(
        float(neighbourhood_information(classes, neighbours, 3))
    )
    assert float(calibrated_information(torch.tensor([[4.0, 0, 0]]).repeat(9, 1), 0.5)) == pytest.approx(0, abs=1e-12)


def logits_of(labels: Tensor, right: float, seed: int) -> Tensor:
    """Of three classes, in which the labels are found about so often."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(labels), 3, generator=generator, dtype=torch.float64)
    return noise + right * torch.nn.functional.one_hot(labels, 3)


def test_a_calibrated_score_is_the_same_however_logits_are_scaled() -> None:
    labels = torch.arange(300) % 3
    source, target = logits_of(labels, 2.0, 0), logits_of(labels, 2.0, 1)

    def score(scale: float) -> float:
        losses = losses_at(scale * source, labels, temperature_grid()).mean(dim=0)
        return float(calibrated_information(scale * target, best_temperature(temperature_grid(), losses)))

    def plain(scale: float) -> float:
        p = (scale * target).softmax(dim=1)
        return float(information_score(p.mean(dim=0), torch.special.entr(p).sum(dim=1).mean()))

    assert plain(3.0) - plain(0.5) > 0.3
    assert score(0.5) == pytest.approx(score(1.0), abs=2e-3)
    assert score(3.0) == pytest.approx(score(1.0), abs=2e-3)
    assert score(1.0) == pytest.approx(plain(2.0), abs=0.05), "twice such logits are the logarithms of probabilities"


def by_class(x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    one_hot = torch.nn.functional.one_hot(classes, 3).double()
    return one_hot.T @ x, one_hot.sum(dim=0)


def test_class_means_match_by_hand_and_by_sklearn() -> None:
    """Centres are (0, 0) on both sides; the first classes agree, the second are at right angles, the third absent."""
    target = (torch.tensor([[1.0, 0], [-1, 0], [0, 0]]), torch.tensor([1.0, 1, 0]))
    source = (torch.tensor([[3.0, 0], [0, 3], [-3, -3]]), torch.tensor([3.0, 3, 3]))
    assert float(class_mean_match(*target, *source)) == pytest.approx((1 + 0 + 0) / 3)
    x, y = standardised_directions(samples()), standardised_directions(samples(seed=9))
    a, b = torch.arange(60) % 3, torch.arange(60) // 20
    means = [
        [own[of == c].mean(dim=0).numpy() - own.mean(dim=0).numpy() for c in range(3)] for own, of in ((x, a), (y, b))
    ]
    expected = np.diag(cosine_similarity(*means)).mean()
    assert float(class_mean_match(*by_class(x, a), *(each / 60 for each in by_class(y, b)))) == pytest.approx(expected)


def test_mixed_up_classes_are_seen_by_their_means_alone() -> None:
    generator = torch.Generator().manual_seed(6)
    labels = torch.arange(90) % 3
    centres = 4 * torch.eye(3, 8)
    x, y = (standardised_directions(centres[labels] + torch.randn(90, 8, generator=generator)) for _ in range(2))
    neighbours, mixed = nearest_neighbours(y), (labels + 1) % 3
    own = by_class(x, labels)
    assert float(class_mean_match(*by_class(y, labels), *own)) > 0.9
    assert float(class_mean_match(*by_class(y, mixed), *own)) < 0
    both = [float(neighbourhood_information(each, neighbours, 3)) for each in (mixed, labels)]
    assert both[0] == pytest.approx(both[1])


def test_trust_is_a_product_and_none_in_mixed_up_classes() -> None:
    half, two_fifths, accuracy = torch.tensor(0.5), torch.tensor(0.4), torch.tensor(0.9)
    assert float(trust_score(half, two_fifths, torch.tensor(0.3), accuracy)) == pytest.approx(0.054)
    assert float(trust_score(half, two_fifths, torch.tensor(-0.3), accuracy)) == 0


def test_hashed_features_keep_inner_products_on_average() -> None:
    x = torch.nn.functional.normalize(samples(6, 300).double())
    hashed = torch.stack([feature_hash(x, 64, seed) for seed in range(400)])
    torch.testing.assert_close((hashed @ hashed.mT).mean(dim=0), x @ x.T, rtol=0, atol=0.03)
    assert torch.equal(feature_hash(x, 64), hashed[0])
    assert torch.equal(feature_hash(x, 300), x)
    assert torch.equal(feature_hash(x, 302), torch.nn.functional.pad(x, (0, 2)))
