"""Transfer component analysis: with a kernel, with its regularised variant, and with random Fourier features."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from torch import Tensor

from fedlit.checks import check_at_least, check_between, check_one_of, check_positive, refuse
from fedlit.functional.checks import check_finite, check_pair, check_samples, check_shape
from fedlit.functional.random_features import (
    CHUNK,
    RandomFeatureSums,
    double_features,
    random_feature_sums,
    random_fourier_features,
    summed,
)

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
    r"""Solve max W^T C W against W^T (V V^T + gamma I) W: W of shape (w, m) and eigenvalues (m,), descending.

    C is symmetric, of shape (w, w), V of shape (w, k) or (w,); ``norm`` is that of the matrix that C was computed from,
    which bounds its rounding error. With R = (V V^T + gamma I)^(-1/2), eigenvectors Y of R C R give W = R Y
    Lambda^(-1/2).
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

    Return D = 1/gamma (I - l l^T K / (gamma + l^T K l)) H U Lambda^(-1), for which H K D = U, and Lambda. K is not
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


_KEPT = 2**24
"""Random features (128 MB) that are kept for the projection rather than computed again."""


@dataclass(frozen=True)
class TransferComponents:
    """Samples of two domains in a common subspace, and the map that takes new samples there.

    All tensors have the dtype of the samples; the map keeps its weights in float64.

    Attributes:
        source: Projected source samples, shape (nS, m).
        target: Projected target samples, shape (nT, m).
        eigenvalues: Largest eigenvalues of the pencil, with its factor 1/gamma, shape (m,), descending. Each is the
            variance kept (scatter of the projected samples) per unit of what the problem minimises.
        aligner: Matrix W, one column per component: shape (nS + nT, m) with a kernel, (2N, m) with frequencies. The
            entry of largest magnitude in each column is positive.
        mapping: Map of samples to components, both in float64, for `project`.
    """

    source: Tensor
    target: Tensor
    eigenvalues: Tensor
    aligner: Tensor
    mapping: Callable[[Tensor], Tensor]

    def project(self, x: Tensor) -> Tensor:
        """Map samples of either domain, shape (k, p), to components of shape (k, m), in the dtype of ``x``."""
        check_samples("x", x)
        check_finite("x", x)
        with torch.no_grad():
            return self.mapping(x.double()).to(x.dtype)


def check_domains(xs: Tensor, xt: Tensor) -> None:
    """Refuse domains that are empty, not finite, or of different features."""
    check_pair(xs, xt, ("xs", "xt"))
    for name, x in (("xs", xs), ("xt", xt)):
        check_finite(name, x)
        check_at_least(name, len(x), 1, "sample")


def map_by_kernel(samples: Tensor, aligner: Tensor, kernel: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """Components of new samples, from the kernel with those of the fit."""
    return kernel(x, samples.to(x.device)) @ aligner.to(x.device)


def kernel_matrix(samples: Tensor, kernel: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Kernel between all samples, float64, checked for its shape and for NaN."""
    gram = kernel(samples, samples)
    check_shape("kernel", gram, len(samples), len(samples), way_out="it maps shapes (n, p) and (k, p) to (n, k)")
    check_finite("kernel", gram, "lower the samples' scale")
    return gram.double()


@torch.no_grad()
def tca(
    xs: Tensor,
    xt: Tensor,
    num_components: int,
    gamma: float,
    kernel: Callable[[Tensor, Tensor], Tensor],
    scaling: Scaling = "constraint",
) -> TransferComponents:
    r"""Transfer component analysis: keep variance, bring the domains' means together; W has shape (nS + nT, m).

    .. math:: \min_W \operatorname{tr}(W^\top K \ell \ell^\top K W) + \gamma \operatorname{tr}(W^\top W)
              \quad \text{subject to} \quad W^\top K H K W = I_m

    Here K is the kernel matrix of all n samples, source first, :math:`\ell` is 1/nS on source rows and -1/nT on target
    rows, and H subtracts the mean. Components of equal eigenvalue are determined up to a rotation. See Pan et al.,
    Domain adaptation via transfer component analysis, IEEE TNN 2011; Feng et al. (FedRF-TCA, 2023), equation 3 and
    Lemma 1 with the factor 1/gamma that is missing there. The published code divides gamma by the squared length of l,
    and mixes scaled and unscaled l.

    Args:
        xs: Source samples, shape (nS, p).
        xt: Target samples, shape (nT, p).
        num_components: Number of components m, at most nS + nT - 1 and the numerical rank of K.
        gamma: Weight of the regularisation, positive. Its useful scale is the squared length of K l.
        kernel: Positive semi-definite kernel of shapes (n, p), (k, p) -> (n, k), such as
            ``partial(gaussian_kernel, bandwidth=5.0)``. It is called with float64 samples.
        scaling: ``"constraint"`` fulfils the constraint above, so that centred components are orthonormal over
            samples; ``"unit"`` gives every column of W length 1. Both span the same space.
    """

    def solve(gram: Tensor, contrast: Tensor) -> tuple[Tensor, Tensor]:
        centred = centre(gram)
        norm = torch.linalg.matrix_norm(gram).item() ** 2
        return solve_primal(centred.T @ centred, gram @ contrast, gamma, num_components, norm)

    return _by_kernel(xs, xt, num_components, gamma, kernel, scaling, solve)


@torch.no_grad()
def r_tca(
    xs: Tensor,
    xt: Tensor,
    num_components: int,
    gamma: float,
    kernel: Callable[[Tensor, Tensor], Tensor],
    scaling: Scaling = "constraint",
) -> TransferComponents:
    r"""Transfer component analysis regularised in the kernel's space, the limit of `rf_tca`; W has shape (nS + nT, m).

    .. math:: \min_W \operatorname{tr}(W^\top K \ell \ell^\top K W) + \gamma \operatorname{tr}(W^\top K W)
              \quad \text{subject to} \quad W^\top K H K W = I_m

    Notation as in `tca`, from whose components these differ. It needs K rather than its square, and so resolves twice
    as many decades of eigenvalues. See Feng et al. (FedRF-TCA, 2023), R-TCA and Lemma 2. The published code has no
    R-TCA: its function of that name computes RF-TCA, and another repeats vanilla TCA.

    Args:
        xs: As for `tca`.
        xt: As for `tca`.
        num_components: As for `tca`.
        gamma: Weight of the regularisation, positive. Its useful scale is l^T K l, the biased squared maximum mean
            discrepancy between the domains.
        kernel: As for `tca`.
        scaling: As for `tca`.
    """
    solve = partial(solve_dual, gamma=gamma, num_components=num_components)
    return _by_kernel(xs, xt, num_components, gamma, kernel, scaling, solve)


@torch.no_grad()
def rf_tca_from_sums(
    source: RandomFeatureSums,
    target: RandomFeatureSums,
    num_components: int,
    gamma: float,
    scaling: Scaling = "constraint",
) -> tuple[Tensor, Tensor]:
    """Aligner W of `rf_tca`, shape (2N, m), and eigenvalues, descending, from sums over random Fourier features.

    See Feng et al. (FedRF-TCA, 2023), Algorithm 1, solved as a symmetric problem.

    Args:
        source: Sums over the source's features.
        target: Sums over the target's features, from the same frequencies.
        num_components: Number of components m, at most 2N, the number of samples less 1, and the features' rank.
        gamma: As for `rf_tca`.
        scaling: As for `rf_tca`.
    """
    for name, sums in (("source", source), ("target", target)):
        check_at_least(f"{name} (its count)", sums.count, 1, "sample")
    highest = min(len(source.total), source.count + target.count - 1)
    check_problem(num_components, gamma, scaling, highest, "the lesser of 2N and the number of samples less 1")
    weights, eigenvalues = _aligner_from_sums(source, target, num_components, gamma)
    return scaled(weights, scaling), eigenvalues


@torch.no_grad()
def rf_tca(
    xs: Tensor, xt: Tensor, num_components: int, gamma: float, frequencies: Tensor, scaling: Scaling = "constraint"
) -> TransferComponents:
    r"""Transfer component analysis with random Fourier features, linear in the number of samples; W has shape (2N, m).

    .. math:: \min_W \operatorname{tr}(W^\top S \ell \ell^\top S^\top W) + \gamma \operatorname{tr}(W^\top W)
              \quad \text{subject to} \quad W^\top S H S^\top W = I_m

    Here S (2N x n) has the features of all samples as columns, source first; l and H are as in `tca`. The components
    approach those of `r_tca` with the frequencies' kernel, at the rate :math:`N^{-1/2}`. See Feng et al. (FedRF-TCA,
    2023), Algorithm 1 and equation 9, as the symmetric problem of the same eigenvalues and with the factor 1/gamma that
    is missing there. The published code normalises the rows of the features afterwards, which undoes the alignment, and
    mixes scaled and unscaled l.

    Args:
        xs: As for `tca`.
        xt: As for `tca`.
        num_components: Number of components m, at most 2N, nS + nT - 1, and the numerical rank of S H.
        gamma: Weight of the regularisation, positive. Its useful scale is the squared length of S l.
        frequencies: Matrix Omega, shape (N, p), from `sample_frequencies`.
        scaling: As for `tca`; the published code has ``"unit"``.
    """
    check_domains(xs, xt)
    num_features, num_samples = 2 * len(frequencies), len(xs) + len(xt)
    highest = min(num_features, num_samples - 1)
    check_problem(num_components, gamma, scaling, highest, "the lesser of 2N and the number of samples less 1")
    kept: list[Tensor] | None = None
    if num_features <= num_samples:
        # from sums over samples
        if num_features * num_samples <= _KEPT:
            halves = [[double_features(c, frequencies) for c in torch.split(x, CHUNK)] for x in (xs, xt)]
            source, target = (summed(chunks) for chunks in halves)
            kept = [*halves[0], *halves[1]]
        else:
            source, target = (random_feature_sums([x], frequencies) for x in (xs, xt))
        weights, eigenvalues = _aligner_from_sums(source, target, num_components, gamma)
    else:
        # from inner products of samples, the smaller matrix
        features = random_fourier_features(torch.cat([xs.double(), xt.double()]), frequencies)
        contrast = _contrast(len(xs), len(xt), features)
        dual, eigenvalues = solve_dual(features @ features.T, contrast, gamma, num_components)
        weights = features.T @ dual
    weights = scaled(weights, scaling)
    mapping = partial(_map_by_features, frequencies, weights)
    if kept is None:
        projected = torch.cat([mapping(x.double()) for x in (xs, xt)])
    else:
        projected = torch.cat([chunk @ weights for chunk in kept])
    return components(xs, xt, weights, eigenvalues, projected, mapping)


def _by_kernel(
    xs: Tensor,
    xt: Tensor,
    num_components: int,
    gamma: float,
    kernel: Callable[[Tensor, Tensor], Tensor],
    scaling: Scaling,
    solve: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> TransferComponents:
    """Components by a kernel; ``solve`` makes W and eigenvalues of its matrix K and the vector l."""
    check_domains(xs, xt)
    check_problem(num_components, gamma, scaling, len(xs) + len(xt) - 1, "the number of samples less 1")
    samples = torch.cat([xs.double(), xt.double()])
    gram = kernel_matrix(samples, kernel)
    weights, eigenvalues = solve(gram, _contrast(len(xs), len(xt), samples))
    weights = scaled(weights, scaling)
    mapping = partial(map_by_kernel, samples, weights, kernel)
    return components(xs, xt, weights, eigenvalues, gram @ weights, mapping)


def _contrast(num_source: int, num_target: int, like: Tensor) -> Tensor:
    """Vector l: 1/nS on source rows and -1/nT on target rows."""
    ones = like.new_ones(num_source + num_target)
    return torch.cat([ones[:num_source] / num_source, -ones[num_source:] / num_target])


def _aligner_from_sums(
    source: RandomFeatureSums, target: RandomFeatureSums, num_components: int, gamma: float
) -> tuple[Tensor, Tensor]:
    pooled = source + target
    gap = source.total / source.count - target.total / target.count
    scatter = pooled.second_moment - torch.outer(pooled.total, pooled.total / pooled.count)
    norm = torch.linalg.matrix_norm(pooled.second_moment).item()
    return solve_primal(scatter, gap, gamma, num_components, norm)


def _map_by_features(frequencies: Tensor, aligner: Tensor, x: Tensor) -> Tensor:
    rows = [random_fourier_features(chunk, frequencies) @ aligner.to(x.device) for chunk in torch.split(x, CHUNK)]
    return torch.cat(rows)


def components(
    xs: Tensor, xt: Tensor, aligner: Tensor, eigenvalues: Tensor, features: Tensor, mapping: Callable[[Tensor], Tensor]
) -> TransferComponents:
    """Return components of all samples, source first, in the dtype of these."""
    dtype = torch.promote_types(xs.dtype, xt.dtype)
    return TransferComponents(
        source=features[: len(xs)].to(dtype),
        target=features[len(xs) :].to(dtype),
        eigenvalues=eigenvalues.to(dtype),
        aligner=aligner.to(dtype),
        mapping=mapping,
    )
