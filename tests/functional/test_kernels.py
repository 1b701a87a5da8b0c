"""Kernels against scikit-learn, numpy and numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.metrics import pairwise
from torch import Tensor

from fedlit.functional import cauchy_kernel, gaussian_kernel, laplace_kernel

KERNELS = [gaussian_kernel, laplace_kernel, cauchy_kernel]


@pytest.fixture
def pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (7, 5))


def test_values_by_hand() -> None:
    # the difference is (3, -4): |d|_2 = 5, |d|_1 = 7
    x, y = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    assert gaussian_kernel(x, y, 5.0).item() == pytest.approx(math.exp(-0.5), rel=1e-6)
    assert laplace_kernel(x, y, 7.0).item() == pytest.approx(math.exp(-1), rel=1e-6)
    assert cauchy_kernel(x, y, 1.0).item() == pytest.approx(1 / (10 * 17), rel=1e-6)
    assert cauchy_kernel(x, y, 2.0).item() == pytest.approx(1 / ((1 + 9 / 4) * (1 + 4)), rel=1e-6)


@pytest.mark.parametrize("bandwidth", [0.3, 1.0, 5.0])
def test_agree_with_scikit_learn_and_numpy(pair: tuple[Tensor, Tensor], bandwidth: float) -> None:
    x, y = pair
    rbf = pairwise.rbf_kernel(x.numpy(), y.numpy(), gamma=1 / (2 * bandwidth**2))
    np.testing.assert_allclose(gaussian_kernel(x, y, bandwidth).numpy(), rbf, rtol=1e-12)
    laplacian = pairwise.laplacian_kernel(x.numpy(), y.numpy(), gamma=1 / bandwidth)
    np.testing.assert_allclose(laplace_kernel(x, y, bandwidth).numpy(), laplacian, rtol=1e-12)
    difference = x.numpy()[:, None] - y.numpy()[None]
    cauchy = (1 / (1 + (difference / bandwidth) ** 2)).prod(axis=2)
    np.testing.assert_allclose(cauchy_kernel(x, y, bandwidth).numpy(), cauchy, rtol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_are_symmetric_positive_and_one_on_the_diagonal(
    kernel: Callable[..., Tensor], pair: tuple[Tensor, Tensor]
) -> None:
    x = torch.cat([pair[0], pair[0]])  # coincident samples
    gram = kernel(x, x, 1.0)
    torch.testing.assert_close(gram, gram.T)
    torch.testing.assert_close(gram[:7, 7:], gram[:7, :7])
    torch.testing.assert_close(gram.diagonal(), torch.ones(14, dtype=torch.float64))
    assert torch.linalg.eigvalsh(gram).min() > -1e-12


@pytest.mark.parametrize("kernel", KERNELS)
def test_near_samples_far_from_the_origin_keep_their_distance(kernel: Callable[..., Tensor]) -> None:
    """In float32, |x|^2 + |y|^2 - 2xy of samples at 1000 would have errors of 0.1: here the distances are exact."""
    x = torch.tensor([[1000.0, 1000.0], [1001.0, 1000.0]])
    torch.testing.assert_close(kernel(x, x, 1.0), kernel(x - 1000, x - 1000, 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keep_the_dtype(kernel: Callable[..., Tensor], dtype: torch.dtype, pair: tuple[Tensor, Tensor]) -> None:
    gram = kernel(pair[0].to(dtype), pair[1].to(dtype), 1.0)
    assert (gram.dtype, gram.shape) == (dtype, (7, 5))
    torch.testing.assert_close(gram.double(), kernel(*pair, 1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_agree_with_finite_differences(kernel: Callable[..., Tensor], pair: tuple[Tensor, Tensor]) -> None:
    x, y = (t.clone().requires_grad_() for t in pair)
    assert torch.autograd.gradcheck(lambda a, b: kernel(a, b, 1.5), (x, y))


@pytest.mark.parametrize("kernel", [gaussian_kernel, cauchy_kernel])
def test_gradient_between_coincident_samples_is_zero(kernel: Callable[..., Tensor]) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(kernel(x, torch.ones(2, 3), 1.0).sum(), x)
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_samples_give_an_empty_matrix(kernel: Callable[..., Tensor]) -> None:
    assert kernel(torch.ones(0, 2), torch.ones(3, 2), 1.0).shape == (0, 3)
    assert kernel(torch.ones(3, 2), torch.ones(0, 2), 1.0).shape == (3, 0)
