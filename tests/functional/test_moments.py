"""What moments give: CORAL and its map, linear discriminants, and variances of mixtures, by scipy and sklearn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from fedlit import functional as fn


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(9, 3, generator=generator, dtype=torch.float64) @ torch.tensor(
        [[2.0, 1.0, 0.0], [0.0, 1.0, 0.5], [0.3, 0.0, 1.0]], dtype=torch.float64
    )
    return x, y


def test_coral_is_a_quarter_of_the_mean_squared_difference_of_covariances() -> None:
    x, y = samples()
    expected = (torch.cov(x.T) - torch.cov(y.T)).square().mean() / 4
    torch.testing.assert_close(fn.coral_loss(x, y), expected, rtol=1e-13, atol=0)


def test_second_moments_as_a_vector_have_the_distances_of_the_matrices() -> None:
    x, y = samples()
    center = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)
    matrices = [(z - center).T @ (z - center) / len(z) for z in (x, y)]
    vectors = [fn.second_moments(z, center) for z in (x, y)]
    assert vectors[0].shape == (6,)
    expected = (matrices[0] - matrices[1]).square().sum()
    torch.testing.assert_close((vectors[0] - vectors[1]).square().sum(), expected, rtol=1e-13, atol=0)


def test_central_moments_of_added_ones_are_the_covariance_less_what_was_added() -> None:
    x, y = samples()
    shares = [0.7 / len(x), 0.6 / len(y)]
    wider = [torch.cat([z, torch.ones(len(z), 1, dtype=z.dtype)], dim=1) for z in (x, y)]
    zero = torch.zeros(4, dtype=torch.float64)
    total = sum(share * len(z) * fn.second_moments(z, zero) for share, z in zip(shares, wider, strict=True))
    pooled = torch.cat([x, y])
    by_sample = torch.cat([torch.full_like(z[:, 0], share) for share, z in zip(shares, (x, y), strict=True)])
    mean = (by_sample[:, None] * pooled).sum(0) / by_sample.sum()
    expected = by_sample.sum() * torch.cov(pooled.T, aweights=by_sample, correction=0)
    about_mean = fn.second_moments((by_sample.sqrt()[:, None] * (pooled - mean)) * len(pooled) ** 0.5, zero[:3])
    torch.testing.assert_close(fn.central_moments(total), about_mean, rtol=1e-12, atol=1e-12)
    rows, columns = torch.triu_indices(3, 3)
    twice = torch.where(rows == columns, x.new_tensor(1.0), x.new_tensor(2.0).sqrt())
    torch.testing.assert_close(fn.central_moments(total), expected[rows, columns] * twice, rtol=1e-12, atol=1e-12)
    added = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0, 5.0, 0.0, 6.0, 0.0, 0.0], dtype=torch.float64)
    gap = fn.central_moments(total + added) - fn.central_moments(total)
    torch.testing.assert_close(gap, added[[0, 1, 2, 4, 5, 7]], rtol=1e-12, atol=1e-12)


def covariances(num_samples: int = 50) -> tuple[Tensor, Tensor]:
    draws = np.random.default_rng(0)
    samples = [draws.normal(size=(num_samples, 4)) @ draws.normal(size=(4, 4)) for _ in range(2)]
    return tuple(torch.tensor(np.cov(x.T)) for x in samples)


@pytest.mark.parametrize("reg", ["auto", 0.0, 1.0])
def test_corals_map_takes_one_covariance_to_the_other(reg: Any) -> None:
    source, target = covariances()
    ridges = [float(c.trace()) / 40 if reg == "auto" else reg for c in (source, target)]
    a = fn.coral_map(source, target, reg)
    s, t = (c + ridge * torch.eye(4) for c, ridge in zip((source, target), ridges, strict=True))
    torch.testing.assert_close(a.T @ s @ a, t)
    powers = scipy.linalg.fractional_matrix_power(s.numpy(), -0.5) @ scipy.linalg.fractional_matrix_power(
        t.numpy(), 0.5
    )
    np.testing.assert_allclose(a, powers, atol=1e-9)


def classes_of(generator: torch.Generator, size: int = 90, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Classes of unequal sizes and a covariance that is not round."""
    labels = (torch.arange(size) % (classes + 1)).clamp(max=classes - 1)
    mixing = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    centres = 2 * torch.randn(classes, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return noise @ mixing + centres[labels], labels


def moments(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    hot = torch.nn.functional.one_hot(y, classes).to(x.dtype)
    return x.T @ x / len(x), x.T @ hot / len(x), hot.mean(dim=0)


@pytest.mark.parametrize("shrinkage", [0.01, 0.3, 1.0])
def test_discriminants_agree_with_scikit_learn(shrinkage: float, generator: torch.Generator) -> None:
    x, y = classes_of(generator)
    weights, biases = fn.linear_discriminant(*moments(x, y, 3), shrinkage)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(weights.numpy(), oracle.coef_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(biases.numpy(), oracle.intercept_, rtol=1e-9, atol=1e-9)
    logits = x @ weights.T + biases
    probabilities = oracle.predict_proba(x.numpy())
    np.testing.assert_allclose(logits.softmax(dim=1).numpy(), probabilities, rtol=1e-7, atol=1e-9)


def test_a_class_without_samples_is_never_predicted_and_changes_nothing_else(generator: torch.Generator) -> None:
    x, y = classes_of(generator)
    weights, biases = fn.linear_discriminant(*moments(x, y, 4))
    without, other_biases = fn.linear_discriminant(*moments(x, y, 3))
    assert weights.isfinite().all()
    assert biases.isfinite().all()
    torch.testing.assert_close(weights[:3], without)
    torch.testing.assert_close(biases[:3], other_biases)
    assert not weights[3].any()
    assert float(biases[3]) == -1e9
    for far in (1.0, 1e3, -1e3):  # there the other logits are far below the log of any small prior
        logits = far * x @ weights.T + biases
        assert not (logits.argmax(dim=1) == 3).any()
    assert float(logits[:, :3].max(dim=1).values.min()) < -100


def test_a_mixtures_variance_is_that_of_all_samples_together(generator: torch.Generator) -> None:
    parts = [torch.randn(n, 3, generator=generator, dtype=torch.float64) * (n / 9) + n for n in (5, 9, 14)]
    means = torch.stack([part.mean(dim=0) for part in parts])
    variances = torch.stack([part.var(dim=0, correction=0) for part in parts])
    found = fn.mixture_variance(means, variances, torch.tensor([5.0, 9.0, 14.0], dtype=torch.float64))
    np.testing.assert_allclose(found.numpy(), np.var(torch.cat(parts).numpy(), axis=0), rtol=1e-12)
    lost = (variances * torch.tensor([[5.0], [9.0], [14.0]]) / 28).sum(dim=0)
    assert bool((found > 2 * lost).all())  # what a mean of variances lacks


def test_large_means_lose_no_digits() -> None:
    """E[x^2] - E[x]^2 in float32 would be 0 or 16 here."""
    means, variances = torch.full((2, 1), 1e4), torch.ones(2, 1)
    assert fn.mixture_variance(means, variances, torch.ones(2)).item() == pytest.approx(1.0)
