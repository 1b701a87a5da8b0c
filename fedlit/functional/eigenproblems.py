"""Symmetric eigenproblems of transfer component analysis: matrices W that keep scatter and close gaps of domains."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from torch import Tensor

from fedlit.checks import check_between, check_one_of, check_positive, refuse

Scaling = Literal["constraint", "unit"]

# The largest m = 100 eigenpairs, one core, in seconds: at size 1000 LAPACK's evr takes 0.6 (evx 0.9, Lanczos 1.2,
# torch.linalg.eigh 3 to 10); at 1500 evr takes 0.39 and Lanczos 0.26, at 3000 2.6 and 1.2. All agree to 1e-12.
_LANCZOS_FROM = 1500


def check_problem(num_components: int, gamma: float, scaling: str, highest: int, why: str) -> None:
    """Refuse numbers for which the problems of this family have no solution."""
    way_out = f"{highest} is {why}; ask for fewer components"
    check_between("num_components (m)", num_components, 1, highest, way_out)
    check_positive("gamma", gamma, "take a small one to weigh the distance between domains most")
    check_one_of("scaling", scaling, get_args(Scaling))


def centre(matrix: Tensor) -> Tensor:
    """H A: subtract from every column its mean."""
    return matrix - matrix.mean(dim=0)


def solve_primal(
    scatter: Tensor, gaps: Tensor, gamma: float, num_components: int, norm: float
) -> tuple[Tensor, Tensor]:
    r"""Solve max W^T C W against W^T (V V^T + gamma I) W by a symmetric eigenproblem.

    With R = (V V^T + gamma I)^(-1/2), eigenvectors Y of R C R give W = R Y Lambda^(-1/2) and so W^T C W = I.

    Args:
        scatter: C, shape (w, w), symmetric, float64.
        gaps: V, shape (w, k), or (w,) for a single column.
        gamma: Positive.
        num_components: Columns of W.
        norm: Frobenius norm of the matrix that C was computed from, which bounds its rounding error.

    Returns:
        W of shape (w, m) and eigenvalues of shape (m,), descending.
    """
    left, right = _whitening(gaps, gamma)
    half = scatter - left @ (right.T @ scatter)
    pencil = half - (half @ right) @ left.T
    values, vectors = _top_eigenpairs(pencil, num_components)
    _check_rank(values, len(scatter), norm)
    weights = (vectors - left @ (right.T @ vectors)) / values.sqrt()
    return weights, values / gamma


def solve_dual(gram: Tensor, contrast: Tensor, gamma: float, num_components: int) -> tuple[Tensor, Tensor]:
    r"""Solve A_R U = U Lambda, with A_R = 1/gamma H (K - K l l^T K / (gamma + l^T K l)) H.

    Returns D = 1/gamma (I - l l^T K / (gamma + l^T K l)) H U Lambda^(-1), for which H K D = U, and Lambda. K is not
    inverted, being singular as soon as two samples coincide.
    """
    reached = gram @ contrast
    weight = gamma + (contrast @ reached).item()
    pencil = centre(centre(gram - torch.outer(reached / weight, reached)).T)
    values, vectors = _top_eigenpairs(pencil, num_components)
    _check_rank(values, len(gram), torch.linalg.matrix_norm(gram).item())
    vectors = centre(vectors) / values
    return vectors - torch.outer(contrast / weight, reached @ vectors), values / gamma


def scaled(weights: Tensor, scaling: Scaling) -> Tensor:
    """Make the entry of largest magnitude in every column positive, since eigenvectors have no sign."""
    largest = weights.gather(0, weights.abs().argmax(dim=0, keepdim=True))
    weights = weights * torch.where(largest < 0, -1.0, 1.0)
    return weights / weights.norm(dim=0) if scaling == "unit" else weights


def _top_eigenpairs(matrix: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues of a symmetric float64 matrix, descending, and their eigenvectors as columns."""
    size = len(matrix)
    dense = matrix.cpu().numpy()
    pairs = _lanczos(dense, number) if size >= _LANCZOS_FROM and 10 * number <= size else None
    if pairs is None:
        first = size - number
        pairs = scipy.linalg.eigh(dense, subset_by_index=[first, size - 1], driver="evr", check_finite=False)
        if len(pairs[0]) < number:  # of equal eigenvalues, as of a multiple of the identity, evr can return none
            values, vectors = scipy.linalg.eigh(dense, driver="evd", check_finite=False)
            pairs = values[first:], vectors[:, first:]
    order = np.argsort(-pairs[0], kind="stable")
    values, vectors = pairs[0][order], np.ascontiguousarray(pairs[1][:, order])
    return torch.from_numpy(values).to(matrix.device), torch.from_numpy(vectors).to(matrix.device)


def _lanczos(matrix: Any, number: int) -> tuple[Any, Any] | None:
    # from a fixed start the same matrix gives the same numbers
    start = np.random.default_rng(0).standard_normal(len(matrix))
    try:
        pairs: tuple[Any, Any] = scipy.sparse.linalg.eigsh(
            matrix, k=number, which="LA", v0=start, ncv=2 * number + 20, maxiter=20
        )
    except scipy.sparse.linalg.ArpackNoConvergence:
        return None  # eigenvalues in a cluster, as for a bandwidth far below all distances
    return pairs


def _check_rank(eigenvalues: Tensor, size: int, norm: float) -> None:
    """Refuse components that are round-off: eigenvalues below that of a matrix of this size and norm."""
    floor = 10 * math.sqrt(size) * torch.finfo(torch.float64).eps * norm
    rank = int((eigenvalues > floor).sum())
    if rank < len(eigenvalues):
        rule = f"at most {rank}, the numerical rank of the centred features"
        refuse("num_components (m)", rule, len(eigenvalues), "more would be noise; or choose a smaller bandwidth")


def _whitening(gaps: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Matrices L and Q, shape (w, k), of (V V^T + gamma I)^(-1/2) = (I - L Q^T) / sqrt(gamma)."""
    if gaps.dim() == 1:  # of rank one, without a decomposition
        length = gaps.square().sum().item()
        shrink = (1 - math.sqrt(gamma / (gamma + length))) / length if length > 0 else 0.0
        return (shrink * gaps)[:, None], gaps[:, None]
    directions, lengths, _ = torch.linalg.svd(gaps, full_matrices=False)
    return directions * (1 - (gamma / (gamma + lengths.square())).sqrt()), directions
