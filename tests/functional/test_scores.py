"""Label-free scores: by hand, against scipy and numpy, and against ratios of densities that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch import Tensor

from fedlit.functional import (
    SourceMoments,
    certainty_score,
    diversity_score,
    importance_weighted_scores,
    information_score,
    random_fourier_features,
    sample_frequencies,
    soft_neighbourhood_density,
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


def test_a_collapsed_model_is_certain_and_not_diverse() -> None:
    one = torch.tensor([1.0, 0.0])
    assert [float(certainty_score(0.0, 2)), float(diversity_score(one)), float(information_score(one, 0.0))] == [
        1,
        0,
        0,
    ]


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


def test_moments_of_two_sources_are_those_of_the_pool() -> None:
    generator = torch.Generator().manual_seed(2)
    phi, losses = torch.randn(20, 4, generator=generator), torch.rand(20, generator=generator)
    whole = SourceMoments.of(phi, losses)
    halves = [SourceMoments.of(phi[:10], losses[:10]), SourceMoments.of(phi[10:], losses[10:])]
    for name in ("phi", "square", "loss", "square_loss"):
        mean = (getattr(halves[0], name) + getattr(halves[1], name)) / 2
        torch.testing.assert_close(mean, getattr(whole, name))


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


def test_equal_weights_need_no_control() -> None:
    source = SourceMoments.of(torch.ones(4, 1), torch.tensor([1.0, 0, 0, 0]))
    iwv, dev = importance_weighted_scores(source, torch.ones(1), ridge=1.0)
    assert float(dev) == float(iwv) == pytest.approx(1 - 0.25 / 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: certainty_score(0.0, 1), "at least 2 classes, got 1"),
        (lambda: soft_neighbourhood_density(torch.ones(2, 2)), "at least 3 samples to have neighbours, got 2"),
        (lambda: soft_neighbourhood_density(torch.ones(3, 2), 0.0), "temperature must be positive, got 0.0"),
        (
            lambda: importance_weighted_scores(SourceMoments.of(torch.ones(2, 3), torch.ones(2)), torch.ones(2)),
            r"target must have shape \(3,\), as the sources' mean, got \(2,\)",
        ),
        (
            lambda: importance_weighted_scores(SourceMoments.of(torch.ones(2, 3), torch.ones(2)), torch.ones(3), 0.0),
            "ridge must be positive, got 0.0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
