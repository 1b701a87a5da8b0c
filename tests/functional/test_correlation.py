"""CORAL: by torch's covariance, its gradient by hand, and what it does not change with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedlit.functional import central_moments, coral_loss, second_moments


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


def test_its_gradient_is_the_covariances_difference_times_the_centred_sample() -> None:
    """dL/dx_i = (C_x - C_y)(x_i - mean) / (p^2 (n - 1))."""
    x, y = samples()
    (got,) = torch.autograd.grad(coral_loss(x.requires_grad_(), y), x)
    difference = torch.cov(x.detach().T) - torch.cov(y.T)
    expected = (x.detach() - x.detach().mean(0)) @ difference / (9 * 11)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)


def test_means_play_no_part_and_units_count_to_the_fourth_power() -> None:
    x, y = samples()
    value = coral_loss(x, y)
    torch.testing.assert_close(coral_loss(x + 7, y - 3), value, rtol=1e-11, atol=0)
    torch.testing.assert_close(coral_loss(2 * x, 2 * y), 16 * value, rtol=1e-12, atol=0)
    assert float(coral_loss(x, x.flip(0) + 1)) == pytest.approx(0, abs=1e-25)


def test_whitening_and_colouring_brings_it_to_zero() -> None:
    x, y = samples()
    roots = [torch.linalg.cholesky(torch.cov(z.T)) for z in (x, y)]
    coloured = torch.linalg.solve_triangular(roots[0], x.T, upper=False).T @ roots[1].T
    assert float(coral_loss(x, y)) > 0.01
    assert float(coral_loss(coloured, y)) < 1e-25


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
