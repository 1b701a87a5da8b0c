"""Transfer component analysis: with a kernel, with its regularised variant, and with random Fourier features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedlit.checks import check_at_least
from fedlit.functional.checks import check_finite, check_pair, check_samples, check_shape
from fedlit.functional.eigenproblems import Scaling, centre, check_problem, scaled, solve_dual, solve_primal
from fedlit.functional.random_features import (
    CHUNK,
    RandomFeatureSums,
    double_features,
    random_feature_sums,
    random_fourier_features,
    summed,
)

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
    rows, and H subtracts the mean. Components of equal eigenvalue are determined up to a rotation.

    Args:
        xs: Source samples, shape (nS, p).
        xt: Target samples, shape (nT, p).
        num_components: Number of components m, at most nS + nT - 1 and the numerical rank of K.
        gamma: Weight of the regularisation, positive. Its useful scale is the squared length of K l.
        kernel: Positive semi-definite kernel of shapes (n, p), (k, p) -> (n, k), such as
            ``partial(gaussian_kernel, bandwidth=5.0)``. It is called with float64 samples.
        scaling: ``"constraint"`` fulfils the constraint above, so that centred components are orthonormal over
            samples; ``"unit"`` gives every column of W length 1. Both span the same space.

    References:
        Pan et al., Domain adaptation via transfer component analysis, IEEE TNN 2011; Feng et al. (FedRF-TCA, 2023),
        equation 3 and Lemma 1 with the factor 1/gamma that is missing there. The published code divides gamma by
        the squared length of l, and mixes scaled and unscaled l.
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
    as many decades of eigenvalues.

    Args:
        xs: As for `tca`.
        xt: As for `tca`.
        num_components: As for `tca`.
        gamma: Weight of the regularisation, positive. Its useful scale is l^T K l, the biased squared maximum mean
            discrepancy between the domains.
        kernel: As for `tca`.
        scaling: As for `tca`.

    References:
        Feng et al. (FedRF-TCA, 2023), R-TCA and Lemma 2. The published code has no R-TCA: its function of that name
        computes RF-TCA, and another repeats vanilla TCA.
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

    Args:
        source: Sums over the source's features.
        target: Sums over the target's features, from the same frequencies.
        num_components: Number of components m, at most 2N, the number of samples less 1, and the features' rank.
        gamma: As for `rf_tca`.
        scaling: As for `rf_tca`.

    References:
        Feng et al. (FedRF-TCA, 2023), Algorithm 1, solved as a symmetric problem.
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
    approach those of `r_tca` with the frequencies' kernel, at the rate :math:`N^{-1/2}`.

    Args:
        xs: As for `tca`.
        xt: As for `tca`.
        num_components: Number of components m, at most 2N, nS + nT - 1, and the numerical rank of S H.
        gamma: Weight of the regularisation, positive. Its useful scale is the squared length of S l.
        frequencies: Matrix Omega, shape (N, p), from `sample_frequencies`.
        scaling: As for `tca`; the published code has ``"unit"``.

    References:
        Feng et al. (FedRF-TCA, 2023), Algorithm 1 and equation 9, as the symmetric problem of the same eigenvalues and
        with the factor 1/gamma that is missing there. The published code normalises the rows of the features
        afterwards, which undoes the alignment, and mixes scaled and unscaled l.
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
