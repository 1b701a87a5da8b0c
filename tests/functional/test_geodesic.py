"""The geodesic flow kernel against its integral, and subspaces against scipy and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from fedlit import functional as fn


def basis(num_features: int, num_axes: int, seed: int) -> Tensor:
    draws = torch.randn(num_features, num_axes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(draws).Q


def integral(p_s: Tensor, p_t: Tensor, nodes: int = 40) -> np.ndarray:
    """Phi(t) Phi(t)^T along the geodesic exp(t log), written with scipy's matrix functions, by Gauss quadrature.

    The tangent at the source is Delta = Q Sigma V^T with Q Sigma' V^T = (I - P P^T) P_T (P^T P_T)^-1, Sigma = arctan.
    """
    p, q = p_s.numpy(), p_t.numpy()
    away = (np.eye(len(p)) - p @ p.T) @ q @ np.linalg.inv(p.T @ q)
    u, tangents, vh = np.linalg.svd(away, full_matrices=False)
    delta = u @ np.diag(np.arctan(tangents)) @ vh
    generator = delta @ p.T - p @ delta.T
    total = np.zeros((len(p), len(p)))
    for node, weight in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
        phi = scipy.linalg.expm((node + 1) / 2 * generator) @ p
        total += weight / 2 * phi @ phi.T
    return total


@pytest.mark.parametrize(("num_features", "num_axes"), [(6, 3), (9, 1), (12, 4)])
def test_it_is_the_integral_over_the_geodesic(num_features: int, num_axes: int) -> None:
    p_s, p_t = basis(num_features, num_axes, 0), basis(num_features, num_axes, 1)
    np.testing.assert_allclose(fn.geodesic_flow_kernel(p_s, p_t), integral(p_s, p_t), atol=1e-12)
    factor = fn.geodesic_flow_factor(p_s, p_t)
    assert factor.shape == (num_features, 2 * num_axes)
    torch.testing.assert_close(factor @ factor.T, fn.geodesic_flow_kernel(p_t, p_s))


@pytest.mark.parametrize("angle", [1e-12, 1e-9, 1e-6, 1e-3, 0.5, math.pi / 2 - 1e-9])
def test_one_angle_is_the_formula_however_small(angle: float) -> None:
    axes = torch.eye(4).double()
    turned = axes[:, :1] * math.cos(angle) + axes[:, 1:2] * math.sin(angle)
    g = fn.geodesic_flow_kernel(axes[:, :1], turned)
    # of the series where differences of cosines have no digits left
    ratio = math.sin(2 * angle) / (2 * angle)
    cross = math.sin(angle) ** 2 / (2 * angle)
    expected = torch.tensor([[(1 + ratio) / 2, cross], [cross, (1 - ratio) / 2]], dtype=torch.float64)
    torch.testing.assert_close(g[:2, :2], expected, atol=1e-15, rtol=1e-12)
    assert float(torch.linalg.eigvalsh(g).min()) > -1e-16


def test_principal_axes_are_those_of_scikit_learn() -> None:
    x = np.random.default_rng(0).normal(size=(30, 6)) @ np.diag([5, 4, 3, 2, 1, 0.5]) + 7
    found = fn.principal_axes(torch.tensor(x), 4).numpy()
    expected = PCA(4).fit(x).components_.T
    np.testing.assert_allclose(np.abs(found.T @ expected), np.eye(4), atol=1e-9)
    assert fn.principal_axes(torch.tensor(x)).shape == (6, 6)
    assert fn.principal_axes(torch.tensor(x[:4])).shape == (6, 3)


def test_the_dimension_is_where_both_domains_have_left_the_pooled_axes() -> None:
    """Angles by scipy; with equal axes nothing disagrees, and the largest dimension is taken."""
    draws = np.random.default_rng(0)
    xs, xt = (torch.tensor(draws.normal(size=(40, 12)) * np.arange(12, 0, -1)) for _ in range(2))
    axes = [fn.principal_axes(x, 6) for x in (xs, xt, torch.cat([xs, xt]))]
    largest = [
        [scipy.linalg.subspace_angles(side[:, :d].numpy(), axes[2][:, :d].numpy())[0] for d in range(1, 7)]
        for side in axes[:2]
    ]
    disagreement = np.sin(largest).mean(axis=0)
    for tolerance in (0.2, 0.5, 0.8):
        expected = next((d for d in range(1, 6) if disagreement[d - 1] >= 1 - tolerance), 6)
        assert fn.subspace_dimension(*axes, tolerance) == expected
    assert len({fn.subspace_dimension(*axes, tolerance) for tolerance in (0.2, 0.5, 0.8)}) > 1
    assert fn.subspace_dimension(axes[0], axes[0], axes[0]) == 6
