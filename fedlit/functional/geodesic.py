"""The geodesic flow kernel between two subspaces (Gong et al., CVPR 2012), and the principal axes that span them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedlit.checks import check, check_between
from fedlit.functional.checks import check_same_shape, check_samples

_ORTHONORMAL = 1e-4
"""Largest error of inner products of a basis that is taken for orthonormal, also in float32."""


def _checked_bases(source_basis: Tensor, target_basis: Tensor) -> tuple[Tensor, Tensor]:
    for name, basis in (("source_basis", source_basis), ("target_basis", target_basis)):
        matrix = basis.dim() == 2 and basis.is_floating_point()
        check(matrix, name, "a matrix of shape (D, d) of a floating type", f"{tuple(basis.shape)} of {basis.dtype}")
        width = basis.shape[1]
        error = (basis.double().T @ basis.double() - torch.eye(width).to(basis.device)).abs().max() if width else 0.0
        way_out = "give principal_axes(x, d), or the Q of torch.linalg.qr"
        check(bool(error <= _ORTHONORMAL), name, "of orthonormal columns", f"an error of {float(error):.2g}", way_out)
    check_same_shape("source_basis", source_basis, "target_basis", target_basis)
    num_features, num_axes = source_basis.shape
    way_out = f"subspaces of more than half of the {num_features} features always meet; give fewer columns"
    check_between("source_basis (number of columns d)", num_axes, 1, num_features // 2, way_out)
    return source_basis.double(), target_basis.double()


@torch.no_grad()
def geodesic_flow_factor(source_basis: Tensor, target_basis: Tensor) -> Tensor:
    r"""Map F, shape (D, 2d), to features whose inner products are the geodesic flow kernel: :math:`G = F F^\top`.

    With :math:`P_S^\top P_T = U \cos\Theta\, V^\top`, principal vectors :math:`a_i = P_S u_i` and :math:`b_i = P_T v_i`
    at an angle :math:`\theta_i`, and :math:`q_i` of length 1 in the plane of both and at a right angle to a_i, each
    plane has the kernel matrix

    .. math:: \tfrac12\begin{pmatrix} 1 + \frac{\sin 2\theta}{2\theta} & \frac{1 - \cos 2\theta}{2\theta} \\
              \frac{1 - \cos 2\theta}{2\theta} & 1 - \frac{\sin 2\theta}{2\theta} \end{pmatrix}

    on the axes (a_i, q_i), of which F has the Cholesky factor. The entry of largest magnitude in each column is
    positive. See Gong et al., CVPR 2012, equations 5 and 6. The published code takes the principal angles from a
    generalised SVD of a D x D orthogonal matrix, and features from a fractional power of G; neither is needed.

    Args:
        source_basis: Orthonormal basis P_S of the source's subspace, shape (D, d), d at most D / 2.
        target_basis: The target's, P_T, of the same shape.
    """
    p_s, p_t = _checked_bases(source_basis, target_basis)
    u, cosines, vh = torch.linalg.svd(p_s.T @ p_t)
    a, b = p_s @ u, p_t @ vh.T
    away = b - a * cosines
    sines = away.norm(dim=0)
    q = torch.where(sines > 0, away / sines.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    theta = torch.atan2(sines, cosines)  # arccos loses half the digits of small angles
    first = (1 + torch.sinc(2 * theta / math.pi)) / 2
    cross = theta.sin() * torch.sinc(theta / math.pi) / 2
    last = (1 - torch.sinc(2 * theta / math.pi)) / 2
    lead = first.sqrt()  # of numbers from 1/2 to 1
    rest = (last - (cross / lead).square()).clamp(min=0).sqrt()
    factor = torch.cat([a * lead + q * (cross / lead), q * rest], dim=1)
    largest = factor.gather(0, factor.abs().argmax(dim=0, keepdim=True))
    return (factor * torch.where(largest < 0, -1.0, 1.0)).to(
        torch.promote_types(source_basis.dtype, target_basis.dtype)
    )


@torch.no_grad()
def geodesic_flow_kernel(source_basis: Tensor, target_basis: Tensor) -> Tensor:
    r"""Geodesic flow kernel G, shape (D, D): inner products averaged over all subspaces from source to target.

    .. math:: G = \int_0^1 \Phi(t) \Phi(t)^\top dt

    The columns of :math:`\Phi(t)` are an orthonormal basis of the subspace at t on the shortest path (geodesic) from
    the source's at 0 to the target's at 1. G is symmetric and positive semi-definite, of rank 2d at most and trace d;
    it depends on the subspaces alone, not on their bases or which is the source's. See equation 5.

    Args:
        source_basis: As for `geodesic_flow_factor`.
        target_basis: As for `geodesic_flow_factor`.
    """
    factor = geodesic_flow_factor(source_basis, target_basis)
    kernel = factor @ factor.T
    return (kernel + kernel.T) / 2


@torch.no_grad()
def principal_axes(x: Tensor, num_axes: int | None = None) -> Tensor:
    """Orthonormal directions of largest variance of samples about their mean, shape (p, d), the largest first.

    Args:
        x: Samples, shape (n, p), finite.
        num_axes: Number of directions d, at most the numerical rank of the centred samples, which ``None`` takes.
    """
    check_samples("x", x)
    rows = x.double()
    _, lengths, axes = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
    floor = max(rows.shape) * torch.finfo(torch.float64).eps * float(rows.norm())
    rank = int((lengths > floor).sum())
    if num_axes is not None:
        check_between("num_axes (d)", num_axes, 1, rank, f"the {len(x)} samples vary in no more directions")
    first: Tensor = axes[: rank if num_axes is None else num_axes].T.to(x.dtype)
    return first


def subspace_dimension(source_axes: Tensor, target_axes: Tensor, pooled_axes: Tensor, tolerance: float = 0.01) -> int:
    r"""Smallest number of principal axes, from 1 to k, at which both domains disagree with the pooled subspace; else k.

    .. math:: \min\left\{d : \tfrac12 (\sin\alpha_d + \sin\beta_d) \geq 1 - \text{tolerance}\right\}

    :math:`\alpha_d` is the largest angle between the first d axes of the source and those of all samples,
    :math:`\beta_d` the target's. See section 3.4.

    Args:
        source_axes: Principal axes of the source, shape (D, k).
        target_axes: Those of the target, shape (D, k).
        pooled_axes: Those of both together, shape (D, k).
        tolerance: How far below 1 is taken for 1; the paper has 0, which only rounding can reach.
    """
    highest = pooled_axes.shape[1]
    products = [axes.double().T @ pooled_axes.double() for axes in (source_axes, target_axes)]
    for size in range(1, highest):
        smallest = [float(torch.linalg.svdvals(product[:size, :size])[-1]) for product in products]
        if sum(math.sqrt(max(0.0, 1 - cosine**2)) for cosine in smallest) / 2 >= 1 - tolerance:
            return size
    return highest
