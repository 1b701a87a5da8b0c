r"""Maximum mean discrepancy of a Gaussian kernel's Taylor polynomial: two domains meet in a few moments of each.

With :math:`u = \lVert x - y \rVert^2` the polynomial of degree D around a squared distance c is

.. math:: k_D(x, y) = e^{-\alpha c} \sum_{q=0}^{D} \frac{(-\alpha (u - c))^q}{q!} = \sum_{q=0}^{D} a_q u^q,
          \qquad
          u^q = \sum_{i + j + t = q} \frac{q! \, (-2)^t}{i! \, j! \, t!}
                \lVert x \rVert^{2i} \lVert y \rVert^{2j} \langle x^{\otimes t}, y^{\otimes t} \rangle .

So means over pairs of samples are products of each domain's means of :math:`\lVert x \rVert^{2i} x^{\otimes t}`, its
moments: 21 numbers for 4 features at degree 2, where single monomials have 87 products of 41 different ones. Equations
are those of Kang, Li and Zhang, Communicational and computational efficient federated domain adaptation, IEEE TPDS
2022, in whose section 4.3.1 a domain sends the sum over its batch of every monomial.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from fedlit.checks import check_at_least, check_one_of, check_positive
from fedlit.functional.checks import check_pair, check_samples, check_shape
from fedlit.functional.kernels import gaussian_kernel

Within = Literal["truncated", "exact"]


def num_taylor_moments(num_features: int, degree: int) -> int:
    """Number M of moments of a domain: sum over t <= D of (D - t + 1) times the entries of a symmetric t-tensor.

    Args:
        num_features: Number L of features, at least 1.
        degree: Degree D of the polynomial, from 1 to 3.
    """
    check_one_of("degree (D)", degree, (1, 2, 3))
    check_at_least("num_features (L)", num_features, 1)
    return sum((degree - t + 1) * math.comb(num_features + t - 1, t) for t in range(degree + 1))


def taylor_moments(x: Tensor, degree: int) -> Tensor:
    r"""Means of :math:`\lVert x \rVert^{2i} x^{\otimes t}` for all i + t <= D, shape (M,), float64; gradients pass.

    Of the symmetric tensors each different entry occurs once, times the square root of its multiplicity, so that inner
    products of moments are those of the tensors. The order is that of t, then of i, then of the entries' sorted
    indices; the first moment is the constant 1.

    Args:
        x: Samples, shape (n, L), at least one.
        degree: Degree D of the polynomial, from 1 to 3. Memory is that of n L^(D - 1) + M numbers.
    """
    check_one_of("degree (D)", degree, (1, 2, 3))
    check_samples("x", x)
    check_at_least("x", len(x), 1, "sample")
    a = x.double()
    squares = (a * a).sum(dim=1)
    powers = torch.stack([squares**i for i in range(degree + 1)], dim=1)  # (n, D + 1)
    return torch.cat([_symmetric_means(powers[:, : degree - t + 1], a, t).flatten() for t in range(degree + 1)])


def _symmetric_means(powers: Tensor, x: Tensor, t: int) -> Tensor:
    """Means of powers times the t-fold tensor product of x: shape (number of powers, entries of a symmetric tensor)."""
    length = x.shape[1]
    if t == 0:
        return powers.mean(dim=0)[:, None]
    if t == 1:
        return powers.T @ x / len(x)
    # the last factor by a matrix product over samples: no tensor of all n L^t products
    index, scale = _entries(length, t)
    index, scale = index.to(x.device), scale.to(x.device)
    rows = []
    for power in powers.unbind(dim=1):
        left = x * power[:, None]
        if t == 3:
            left = (left[:, :, None] * x[:, None, :]).flatten(1)
        full = (left.T @ x / len(x)).flatten()
        rows.append(full[index] * scale)
    return torch.stack(rows)


@lru_cache(maxsize=8)
def _entries(length: int, t: int) -> tuple[Tensor, Tensor]:
    """Flat indices of a symmetric tensor's different entries, and the square roots of their multiplicities."""
    indices = torch.combinations(torch.arange(length), t, with_replacement=True)
    positions = (indices * length ** torch.arange(t - 1, -1, -1)).sum(dim=1)
    # t! over the factorials of how often each index occurs in the sorted row
    runs = torch.ones(len(indices))
    current = torch.ones(len(indices))
    for before, after in zip(indices.T[:-1], indices.T[1:], strict=True):
        current = torch.where(before == after, current + 1, 1.0)
        runs = runs * current
    return positions, (math.factorial(t) / runs.double()).sqrt()


def moments_to_send(num_features: int, degree: int, unit_norm: bool) -> Tensor:
    r"""Index of each moment in ``[1, what is sent]``, shape (M,): ``received[index]`` are all moments.

    If all samples have length 1, :math:`\lVert x \rVert^{2i} x^{\otimes t}` does not depend on i.

    Args:
        num_features: Number L of features.
        degree: Degree D of the polynomial, from 1 to 3.
        unit_norm: Whether all samples have length 1.
    """
    number = num_taylor_moments(num_features, degree)
    if not unit_norm:
        return torch.arange(number)
    indices = [torch.zeros(degree + 1, dtype=torch.long)]
    sent = 0
    for t in range(1, degree + 1):
        size = math.comb(num_features + t - 1, t)
        indices.append(torch.arange(1 + sent, 1 + sent + size).repeat(degree - t + 1))
        sent += size
    return torch.cat(indices)


def taylor_coefficients(alpha: float, degree: int, center: float = 0.0) -> tuple[float, ...]:
    r"""Coefficients :math:`a_0, ..., a_D` of the polynomial in the squared distance.

    Args:
        alpha: Kernel parameter, positive, in units of 1 / features squared: :math:`1 / (2 \sigma^2)`.
        degree: Degree D, from 1 to 3.
        center: Squared distance c around which exp is expanded, not negative; 0 in the paper.
    """
    _check_polynomial(alpha, degree, center)
    shifted = [math.exp(-alpha * center) * (-alpha) ** q / math.factorial(q) for q in range(degree + 1)]
    return tuple(
        math.fsum(shifted[q] * math.comb(q, p) * (-center) ** (q - p) for q in range(p, degree + 1))
        for p in range(degree + 1)
    )


def repelling_distance(alpha: float, degree: int, center: float = 0.0) -> float:
    r"""Squared distance beyond which the truncated kernel grows with distance, so that alignment pushes pairs apart.

    .. math:: k_D'(u) = -\alpha \, k_{D-1}(u), \quad \text{of which } k_1 \text{ is negative beyond } c + 1 / \alpha

    It is infinite at degrees 1 and 3, whose slope keeps its sign.

    Args:
        alpha: As for `taylor_coefficients`.
        degree: As for `taylor_coefficients`.
        center: As for `taylor_coefficients`.
    """
    _check_polynomial(alpha, degree, center)
    return center + 1 / alpha if degree == 2 else math.inf


def mean_squared_distance(moments: Tensor, other: Tensor, num_features: int, degree: int) -> Tensor:
    """Mean squared distance between the samples of two domains, from their moments; not negative up to rounding.

    Args:
        moments: Of one domain, shape (M,).
        other: Of the other one, shape (M,).
        num_features: Number L of features.
        degree: Degree D of the moments.
    """
    number = num_taylor_moments(num_features, degree)
    check_shape("moments", moments, number)
    check_shape("other", other, number)
    mine, theirs = (_blocks(each, num_features, degree) for each in (moments, other))
    return mine[0][1, 0] + theirs[0][1, 0] - 2 * mine[1][0] @ theirs[1][0]


def pair_with_kernel(moments: Tensor, num_features: int, coefficients: Sequence[float]) -> Tensor:
    r"""Moments h, shape (M,), for a domain's moments g: :math:`\langle f, h \rangle` is the mean kernel with f.

    It is linear and symmetric: ``f @ pair_with_kernel(g) == g @ pair_with_kernel(f)``. See equation 11.

    Args:
        moments: Moments g of one domain, shape (M,).
        num_features: Number L of features.
        coefficients: Of the polynomial, see `taylor_coefficients`: one more than the degree.
    """
    degree = len(coefficients) - 1
    check_shape("moments", moments, num_taylor_moments(num_features, degree))
    blocks = []
    for t, block in enumerate(_blocks(moments, num_features, degree)):
        weights = block.new_zeros(degree - t + 1, degree - t + 1)
        for i in range(degree - t + 1):
            for j in range(degree - t - i + 1):
                q = i + j + t
                multinomial = math.factorial(q) / (math.factorial(i) * math.factorial(j) * math.factorial(t))
                weights[i, j] = coefficients[q] * multinomial * (-2.0) ** t
        blocks.append((weights @ block).flatten())
    return torch.cat(blocks)


def within_domain_mean(moments: Tensor, num_samples: int, num_features: int, coefficients: Sequence[float]) -> Tensor:
    """Unbiased mean of the truncated kernel over pairs of one domain's samples, a scalar (see equations 4 and 5).

    Args:
        moments: Of the domain, shape (M,).
        num_samples: Number n of samples, at least 2.
        num_features: Number L of features.
        coefficients: Of the polynomial.
    """
    check_at_least("num_samples (n)", num_samples, 2, "samples, to have pairs")
    everything = moments @ pair_with_kernel(moments, num_features, coefficients)
    return (num_samples * everything - coefficients[0]) / (num_samples - 1)


def exact_within_domain_mean(x: Tensor, alpha: float) -> Tensor:
    """Mean of the Gaussian kernel over pairs of different samples of one domain, a scalar, float64 (equations 4 and 5).

    Args:
        x: Samples, shape (n, L), at least 2.
        alpha: Kernel parameter, positive.
    """
    check_at_least("x", len(x), 2, "samples, to have pairs")
    samples = x.double()
    kernel = torch.exp(-alpha * (samples[:, None] - samples[None]).square().sum(dim=2))
    return (kernel.sum() - kernel.diagonal().sum()) / (len(samples) * (len(samples) - 1))


def exact_between_domains_mean(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """Mean of the Gaussian kernel over pairs of two domains' samples, a scalar, float64 (equation 6, less its factor).

    Args:
        x: Samples of one domain, shape (n, L).
        y: Samples of the other, shape (m, L).
        alpha: Kernel parameter, positive.
    """
    return gaussian_kernel(x.double(), y.double(), 1 / math.sqrt(2 * alpha)).mean()


def gradient_map(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    r"""Matrix A, shape (n L, M), float64, by which the other domain's moments g become the gradient of the mean kernel.

    .. math:: \frac{\partial}{\partial x} \frac{1}{n k} \sum_{i,j} k_D(x_i, y_j) = A g

    A domain that must not see g puts A into a two-party affine exchange; it is dense: for few features or degree 1. See
    equation 15.

    Args:
        x: Samples, shape (n, L), to whose ``flatten()`` the rows belong.
        coefficients: Of the polynomial.
    """
    degree, length = len(coefficients) - 1, x.shape[1]

    def of_one(sample: Tensor) -> Tensor:
        return taylor_moments(sample[None], degree)

    slopes = torch.func.vmap(torch.func.jacfwd(of_one), chunk_size=8)(x.detach().double())  # (n, M, L)
    rows = slopes.transpose(1, 2).reshape(-1, slopes.shape[1]) / len(x)
    paired = torch.func.vmap(lambda g: pair_with_kernel(g, length, coefficients))(rows)  # the form is symmetric
    return paired


def taylor_mmd_squared(
    x: Tensor, y: Tensor, alpha: float, degree: int, center: float | None = None, within: Within = "truncated"
) -> Tensor:
    r"""Squared maximum mean discrepancy with the Taylor polynomial of a Gaussian kernel, unbiased, a scalar.

    .. math:: \frac{1}{n(n-1)} \sum_{i \ne j} k(x_i, x_j) + \frac{1}{k(k-1)} \sum_{i \ne j} k(y_i, y_j)
              - \frac{2}{n k} \sum_{i, j} k_D(x_i, y_j)

    At degree 1 it is linear matching of means: :math:`2 \alpha e^{-\alpha c}` times the unbiased estimate of the
    squared distance between the domains' means. See equations 3 to 7 and 11.

    Args:
        x: Samples of the first domain, shape (n, L), at least 2.
        y: Samples of the second domain, shape (k, L), at least 2.
        alpha: Kernel parameter, positive. For features of unit variance ``1 / (4 * L)`` keeps alpha times typical
            squared distances at 1/2, where few terms suffice.
        degree: Degree D of the polynomial, from 1 to 3.
        center: Squared distance around which exp is expanded, constant in gradients. ``None`` is the mean squared
            distance between the domains; with 0, the paper's, polynomials are far from the kernel.
        within: Kernel of the first two terms: ``"truncated"`` is the same polynomial; ``"exact"`` the Gaussian kernel,
            as in the paper, whose mixture does not vanish for equal distributions.

    Warns:
        UserWarning: If pairs of the two domains lie where the polynomial of even degree repels.
    """
    check_pair(x, y, symbol="L")
    for name, samples in (("x", x), ("y", y)):
        check_at_least(name, len(samples), 2, "samples")
    check_one_of("within", within, get_args(Within))
    _check_polynomial(alpha, degree, center or 0.0)
    length = x.shape[1]
    a, b = x.double(), y.double()
    origin = torch.cat([a, b]).detach().mean(dim=0)  # distances do not see it, and powers lose fewer digits
    a, b = a - origin, b - origin
    f, g = taylor_moments(a, degree), taylor_moments(b, degree)
    if center is None:
        center = float(mean_squared_distance(f.detach(), g.detach(), length, degree).clamp(min=0))
    _warn_of_repulsion(a.detach(), b.detach(), alpha, degree, center)
    coefficients = taylor_coefficients(alpha, degree, center)
    if within == "truncated":
        means = [within_domain_mean(each, n, length, coefficients) for each, n in ((f, len(a)), (g, len(b)))]
    else:
        means = [exact_within_domain_mean(each, alpha) for each in (a, b)]
    return (means[0] + means[1] - 2 * f @ pair_with_kernel(g, length, coefficients)).to(x.dtype)


def _warn_of_repulsion(x: Tensor, y: Tensor, alpha: float, degree: int, center: float) -> None:
    limit = repelling_distance(alpha, degree, center)
    if math.isinf(limit):
        return
    squared = torch.cdist(x, y).square()
    share = float((squared > limit).double().mean())
    if share > 0:
        warnings.warn(
            f"{share:.0%} of the pairs are further apart than {math.sqrt(limit):.3g}, where the Taylor kernel of "
            f"degree {degree} repels: lower alpha ({alpha:.3g}; the largest squared distance is "
            f"{float(squared.max()):.3g}), or take an odd degree",
            stacklevel=3,
        )


def _blocks(moments: Tensor, num_features: int, degree: int) -> list[Tensor]:
    """Moments by the order t of their tensors, each of shape (D - t + 1, entries)."""
    shapes = [(degree - t + 1, math.comb(num_features + t - 1, t)) for t in range(degree + 1)]
    parts = torch.split(moments, [rows * entries for rows, entries in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _check_polynomial(alpha: float, degree: int, center: float) -> None:
    check_one_of("degree (D)", degree, (1, 2, 3))
    check_positive("alpha", alpha, "for L features of unit variance take 1 / (4 L)")
    check_at_least("center (c)", center, 0)
