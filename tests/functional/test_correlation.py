"""CORAL: covariances by torch, and the map by fractional powers of matrices by scipy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from fedlit.functional import central_moments, coral_loss, coral_map, second_moments


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(9, 3, generator=generator, dtype=torch.float64) @ torch.tensor(
        [[2.0, 1.0, 0.0], [0.0, 1.0, 0.5], [0.3, 0.0, 1.0]], dtype=torch.float64
    )
    return x, y


def test_it_is_a_quarter_of_the_mean_squared_difference_of_covariances() -> None:
    x, y = samples()
    expected = (torch.cov(x.T) - torch.cov(y.T)).square().mean() / 4
    torch.testing.assert_close(coral_loss(x, y), expected, rtol=1e-13, atol=0)


def test_second_moments_as_a_vector_have_the_distances_of_the_matrices() -> None:
    x, y = samples()
    center = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)
    matrices = [(z - center).T @ (z - center) / len(z) for z in (x, y)]
    vectors = [second_moments(z, center) for z in (x, y)]
    assert vectors[0].shape == (6,)
    expected = (matrices[0] - matrices[1]).square().sum()
    torch.testing.assert_close((vectors[0] - vectors[1]).square().sum(), expected, rtol=1e-13, atol=0)


def test_central_moments_of_added_ones_are_the_covariance_less_what_was_added() -> None:
    x, y = samples()
    shares = [0.7 / len(x), 0.6 / len(y)]
    wider = [torch.cat([z, torch.ones(len(z), 1, dtype=z.dtype)], dim=1) for z in (x, y)]
    zero = torch.zeros(4, dtype=torch.float64)
    total = sum(share * len(z) * second_moments(z, zero) for share, z in zip(shares, wider, strict=True))
    pooled = torch.cat([x, y])
    by_sample = torch.cat([torch.full_like(z[:, 0], share) for share, z in zip(shares, (x, y), strict=True)])
    mean = (by_sample[:, None] * pooled).sum(0) / by_sample.sum()
    expected = by_sample.sum() * torch.cov(pooled.T, aweights=by_sample, correction=0)
    about_mean = second_moments((by_sample.sqrt()[:, None] * (pooled - mean)) * len(pooled) ** 0.5, zero[:3])
    torch.testing.assert_close(central_moments(total), about_mean, rtol=1e-12, atol=1e-12)
    rows, columns = torch.triu_indices(3, 3)
    twice = torch.where(rows == columns, x.new_tensor(1.0), x.new_tensor(2.0).sqrt())
    torch.testing.assert_close(central_moments(total), expected[rows, columns] * twice, rtol=1e-12, atol=1e-12)
    added = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0, 5.0, 0.0, 6.0, 0.0, 0.0], dtype=torch.float64)
    gap = central_moments(total + added) - central_moments(total)
    torch.testing.assert_close(gap, added[[0, 1, 2, 4, 5, 7]], rtol=1e-12, atol=1e-12)


def covariances(num_samples: int = 50) -> tuple[Tensor, Tensor]:
    draws = np.random.default_rng(0)
    samples = [draws.normal(size=(num_samples, 4)) @ draws.normal(size=(4, 4)) for _ in range(2)]
    return tuple(torch.tensor(np.cov(x.T)) for x in samples)


@pytest.mark.parametrize("reg", ["auto", 0.0, 1.0])
def test_it_takes_one_covariance_to_the_other(reg: Any) -> None:
    source, target = covariances()
    ridges = [float(c.trace()) / 40 if reg == "auto" else reg for c in (source, target)]
    a = coral_map(source, target, reg)
    s, t = (c + ridge * torch.eye(4) for c, ridge in zip((source, target), ridges, strict=True))
    torch.testing.assert_close(a.T @ s @ a, t)
    powers = scipy.linalg.fractional_matrix_power(s.numpy(), -0.5) @ scipy.linalg.fractional_matrix_power(
        t.numpy(), 0.5
    )
    np.testing.assert_allclose(a, powers, atol=1e-9)
