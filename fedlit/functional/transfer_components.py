"""Transfer component analysis: with a kernel, with its regularised variant, and with random Fourier features."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from torch import Tensor

from fedlit.functional.kernels import check_pair, check_samples
from fedlit.functional.random_features import random_fourier_features

Scaling = Literal["constraint", "unit"]

# rows whose features are held at once: 32 MB at N = 500, and long enough for matrix products at full speed
_CHUNK = 4096
_KEPT = 2**24  # random features (128 MB) that are kept for the projection rather than computed again

# The largest m = 100 eigenpairs, one core, in seconds: at size 1000 LAPACK's evr takes 0.6 (evx 0.9, Lanczos 1.2,
# torch.linalg.eigh 3 to 10); at 1500 evr takes 0.39 and Lanczos 0.26, at 3000 2.6 and 1.2. All agree to 1e-12.
_LANCZOS_FROM = 1500


@dataclass(frozen=True)
class TransferComponents:
    """Samples of two domains in a common subspace, and the map that takes new samples there.

    All tensors have the dtype of the samples. The map keeps its weights in float64, so that :meth:`project` agrees
    with ``source`` and ``target`` on the samples it was fitted to even where components have little variance.

    Attributes:
        source: Projected source samples, shape (nS, m).
        target: Projected target samples, shape (nT, m).
        eigenvalues: Largest eigenvalues of the pencil, with its factor 1/gamma, shape (m,), descending. Each is the
            variance kept (scatter of the projected samples) per unit of what the problem minimises.
        aligner: Matrix W, one column per component: shape (nS + nT, m) where a kernel was given, (2N, m) where
            frequencies were. The sign of each column makes its entry of largest magnitude positive.
        mapping: What :meth:`project` calls: takes samples to components, both in float64.
    """

    source: Tensor
    target: Tensor
    eigenvalues: Tensor
    aligner: Tensor
    mapping: Callable[[Tensor], Tensor]

    def project(self, x: Tensor) -> Tensor:
        """Take samples of either domain, shape (k, p), to components of shape (k, m), in the dtype of ``x``.

        They need not be among those the components were computed from.

        Raises:
            ValueError: If ``x`` is not of shape (k, p) or not finite.
            TypeError: If ``x`` is not of a floating type.
        """
        _check_finite("x", x)
        with torch.no_grad():
            return self.mapping(x.double()).to(x.dtype)


@dataclass(frozen=True)
class RandomFeatureSums:
    r"""What RF-TCA needs to know of one domain (or client): sums over its random Fourier features.

    Sums of clients' sums are those of the pooled samples: ``first + second``. The size does not depend on how many
    samples there are. They are not private: one sample's sums are its features.

    Attributes:
        second_moment: Sum of :math:`\phi \phi^\top` over samples, shape (2N, 2N), float64.
        total: Sum of :math:`\phi` over samples, shape (2N,), float64.
        count: Number of samples.
    """

    second_moment: Tensor
    total: Tensor
    count: int

    @classmethod
    def of(cls, features: Tensor) -> RandomFeatureSums:
        """Sums over the rows of a matrix of random Fourier features, shape (n, 2N), in float64 on the same device.

        Raises:
            ValueError: If ``features`` is not of shape (n, 2N) or not finite.
            TypeError: If ``features`` are not of a floating type.
        """
        _check_finite("features", features)
        rows = features.double()
        return cls(second_moment=rows.T @ rows, total=rows.sum(dim=0), count=len(rows))

    def __add__(self, other: RandomFeatureSums) -> RandomFeatureSums:
        if not isinstance(other, RandomFeatureSums):
            return NotImplemented
        if self.total.shape != other.total.shape:
            raise ValueError(
                "sums must be over equally many features (2N), "
                f"got {len(self.total)} and {len(other.total)}: use the same frequencies at all clients"
            )
        return RandomFeatureSums(
            second_moment=self.second_moment + other.second_moment,
            total=self.total + other.total,
            count=self.count + other.count,
        )


def _check_finite(name: str, x: Tensor) -> None:
    check_samples(name, x)
    # the sum is not finite if an entry is not, unless huge entries overflow it
    if not x.sum(dtype=torch.float64).isfinite() and not x.isfinite().all():
        raise ValueError(f"{name} must be finite, got NaN or infinity: the data or the network before it has diverged")


def check_problem(num_components: int, gamma: float, scaling: str, most: int, why: str) -> None:
    """Refuse numbers that the problems of this family have no solution for."""
    if not 1 <= num_components <= most:
        raise ValueError(
            f"num_components (m) must be between 1 and {most}, {why}, got {num_components}: ask for fewer components"
        )
    if not (math.isfinite(gamma) and gamma > 0):
        raise ValueError(
            f"gamma must be positive and finite, got {gamma}: without it the problem has no unique solution; "
            "take a small one to weigh the distance between domains most"
        )
    if scaling not in get_args(Scaling):
        raise ValueError(f"scaling must be one of {list(get_args(Scaling))}, got {scaling!r}")


def check_domains(xs: Tensor, xt: Tensor) -> None:
    """Refuse domains that are empty, not finite, or of different features."""
    for name, x in (("xs", xs), ("xt", xt)):
        _check_finite(name, x)
        if len(x) < 1:
            raise ValueError(f"{name} must hold at least 1 sample, got none: both domains are needed")
    check_pair(xs, xt, ("xs", "xt"))


def _contrast(num_source: int, num_target: int, like: Tensor) -> Tensor:
    """Vector l: 1/nS on source rows and -1/nT on target rows."""
    ones = like.new_ones(num_source + num_target)
    return torch.cat([ones[:num_source] / num_source, -ones[num_source:] / num_target])


def centre(matrix: Tensor) -> Tensor:
    """H A: subtract from every column its mean."""
    return matrix - matrix.mean(dim=0)


def _top_eigenpairs(matrix: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues of a symmetric float64 matrix, descending, and their eigenvectors as columns."""
    size = len(matrix)
    dense = matrix.cpu().numpy()
    found = _lanczos(dense, number) if size >= _LANCZOS_FROM and 10 * number <= size else None
    if found is None:
        first = size - number
        found = scipy.linalg.eigh(dense, subset_by_index=[first, size - 1], driver="evr", check_finite=False)
        if len(found[0]) < number:  # of equal eigenvalues, as of a multiple of the identity, evr can find none
            values, vectors = scipy.linalg.eigh(dense, driver="evd", check_finite=False)
            found = values[first:], vectors[:, first:]
    order = np.argsort(-found[0], kind="stable")
    values, vectors = found[0][order], np.ascontiguousarray(found[1][:, order])
    return torch.from_numpy(values).to(matrix.device), torch.from_numpy(vectors).to(matrix.device)


def _lanczos(matrix: Any, number: int) -> tuple[Any, Any] | None:
    # from a fixed start the same matrix gives the same numbers
    start = np.random.default_rng(0).standard_normal(len(matrix))
    try:
        found: tuple[Any, Any] = scipy.sparse.linalg.eigsh(
            matrix, k=number, which="LA", v0=start, ncv=2 * number + 20, maxiter=20
        )
    except scipy.sparse.linalg.ArpackNoConvergence:
        return None  # eigenvalues in a cluster, as for a bandwidth far below all distances
    return found


def _check_rank(eigenvalues: Tensor, size: int, norm: float) -> None:
    """Refuse components that are round-off: eigenvalues below that of a matrix of this size and norm."""
    floor = 10 * math.sqrt(size) * torch.finfo(torch.float64).eps * norm
    rank = int((eigenvalues > floor).sum())
    if rank < len(eigenvalues):
        raise ValueError(
            f"num_components (m) is {len(eigenvalues)}, but the centred features of these samples have numerical rank "
            f"{rank}, and further components would be noise: ask for at most {rank}, or choose a smaller bandwidth"
        )


def _whitening(gaps: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Matrices L and Q, shape (w, k), of (V V^T + gamma I)^(-1/2) = (I - L Q^T) / sqrt(gamma)."""
    if gaps.dim() == 1:  # of rank one, without a decomposition
        length = gaps.square().sum().item()
        shrink = (1 - math.sqrt(gamma / (gamma + length))) / length if length > 0 else 0.0
        return (shrink * gaps)[:, None], gaps[:, None]
    directions, lengths, _ = torch.linalg.svd(gaps, full_matrices=False)
    return directions * (1 - (gamma / (gamma + lengths.square())).sqrt()), directions


def solve_primal(
    scatter: Tensor, gaps: Tensor, gamma: float, num_components: int, norm: float
) -> tuple[Tensor, Tensor]:
    r"""Solve max W^T C W against W^T (V V^T + gamma I) W by a symmetric eigenproblem.

    With R = (V V^T + gamma I)^(-1/2), which differs from a multiple of the identity by the rank of V, eigenvectors Y of
    R C R give W = R Y Lambda^(-1/2) and so W^T C W = I.

    Args:
        scatter: C, shape (w, w), symmetric, float64.
        gaps: V, shape (w, k), or (w,) for a single column.
        gamma: Positive.
        num_components: Columns of W.
        norm: Frobenius norm of what C was computed from, of which its rounding is a part.

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


def _solve_dual(gram: Tensor, contrast: Tensor, gamma: float, num_components: int) -> tuple[Tensor, Tensor]:
    r"""Solve A_R U = U Lambda, with A_R = 1/gamma H (K - K l l^T K / (gamma + l^T K l)) H.

    No inverse of K is needed, which is singular as soon as two samples coincide. Returns
    D = 1/gamma (I - l l^T K / (gamma + l^T K l)) H U Lambda^(-1), for which H K D = U, and Lambda.
    """
    reached = gram @ contrast
    weight = gamma + (contrast @ reached).item()
    pencil = centre(centre(gram - torch.outer(reached / weight, reached)).T)
    values, vectors = _top_eigenpairs(pencil, num_components)
    _check_rank(values, len(gram), torch.linalg.matrix_norm(gram).item())
    vectors = centre(vectors) / values
    return vectors - torch.outer(contrast / weight, reached @ vectors), values / gamma


def scaled(weights: Tensor, scaling: Scaling) -> Tensor:
    """Make the entry of largest magnitude in every column positive, since eigenvectors have no sign of their own."""
    largest = weights.gather(0, weights.abs().argmax(dim=0, keepdim=True))
    weights = weights * torch.where(largest < 0, -1.0, 1.0)
    return weights / weights.norm(dim=0) if scaling == "unit" else weights


def map_by_kernel(samples: Tensor, aligner: Tensor, kernel: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """Components of new samples, from the kernel with those that they were found from."""
    return kernel(x, samples.to(x.device)) @ aligner.to(x.device)


def _map_by_features(frequencies: Tensor, aligner: Tensor, x: Tensor) -> Tensor:
    rows = [random_fourier_features(chunk, frequencies) @ aligner.to(x.device) for chunk in torch.split(x, _CHUNK)]
    return torch.cat(rows)


def _features(chunk: Tensor, frequencies: Tensor) -> Tensor:
    return random_fourier_features(chunk.double(), frequencies)


def kernel_matrix(samples: Tensor, kernel: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Kernel between all samples, float64, checked for its shape and for NaN."""
    gram = kernel(samples, samples)
    if gram.shape != (len(samples), len(samples)):
        raise ValueError(
            f"kernel must map samples of shapes (n, p) and (k, p) to shape (n, k), got {tuple(gram.shape)} "
            f"for n = k = {len(samples)}"
        )
    if not gram.isfinite().all():
        raise ValueError("kernel must be finite on the samples, got NaN or infinity: lower the samples' scale")
    return gram.double()


def _components(
    xs: Tensor, xt: Tensor, aligner: Tensor, eigenvalues: Tensor, features: Tensor, mapping: Callable[[Tensor], Tensor]
) -> TransferComponents:
    dtype = torch.promote_types(xs.dtype, xt.dtype)
    return TransferComponents(
        source=features[: len(xs)].to(dtype),
        target=features[len(xs) :].to(dtype),
        eigenvalues=eigenvalues.to(dtype),
        aligner=aligner.to(dtype),
        mapping=mapping,
    )


@torch.no_grad()
def tca(
    xs: Tensor,
    xt: Tensor,
    num_components: int,
    gamma: float,
    kernel: Callable[[Tensor, Tensor], Tensor],
    scaling: Scaling = "constraint",
) -> TransferComponents:
    r"""Transfer component analysis: keep variance, bring the domains' means together.

    .. math:: \min_W \operatorname{tr}(W^\top K \ell \ell^\top K W) + \gamma \operatorname{tr}(W^\top W)
              \quad \text{subject to} \quad W^\top K H K W = I_m

    Here K is the kernel matrix of all n samples, source first, :math:`\ell` is 1/nS on source rows and -1/nT on target
    rows, and H subtracts the mean. Solved as a symmetric eigenproblem in float64. Components of equal eigenvalue are
    determined up to a rotation.

    Args:
        xs: Source samples, shape (nS, p).
        xt: Target samples, shape (nT, p).
        num_components: Number of components m, at most nS + nT - 1 and the numerical rank of K.
        gamma: Weight of the regularisation, positive. Its useful scale is the squared length of K l.
        kernel: Positive semi-definite kernel of shapes (n, p), (k, p) -> (n, k), such as
            ``partial(gaussian_kernel, bandwidth=5.0)``. It is called with float64 samples.
        scaling: ``"constraint"`` fulfils the constraint above, so that centred components are orthonormal over
            samples; ``"unit"`` gives every column of W length 1. Both span the same space.

    Returns:
        The components; its aligner W has shape (nS + nT, m).

    Raises:
        ValueError: If a number is out of range, shapes do not fit, or samples are not finite.
        TypeError: If samples are not of a floating type.

    References:
        Pan et al., Domain adaptation via transfer component analysis, IEEE TNN 2011; Feng et al. (FedRF-TCA, 2023),
        equation 3 and Lemma 1 with the factor 1/gamma that is missing there. The published code divides gamma by
        the squared length of l, and mixes scaled and unscaled l.
    """
    samples, contrast = _prepared(xs, xt, num_components, gamma, scaling)
    gram = kernel_matrix(samples, kernel)
    centred = centre(gram)
    norm = torch.linalg.matrix_norm(gram).item() ** 2
    weights, eigenvalues = solve_primal(centred.T @ centred, gram @ contrast, gamma, num_components, norm)
    weights = scaled(weights, scaling)
    mapping = partial(map_by_kernel, samples, weights, kernel)
    return _components(xs, xt, weights, eigenvalues, gram @ weights, mapping)


@torch.no_grad()
def r_tca(
    xs: Tensor,
    xt: Tensor,
    num_components: int,
    gamma: float,
    kernel: Callable[[Tensor, Tensor], Tensor],
    scaling: Scaling = "constraint",
) -> TransferComponents:
    r"""Transfer component analysis regularised in the kernel's own space; the limit of :func:`rf_tca`.

    .. math:: \min_W \operatorname{tr}(W^\top K \ell \ell^\top K W) + \gamma \operatorname{tr}(W^\top K W)
              \quad \text{subject to} \quad W^\top K H K W = I_m

    Notation as in :func:`tca`. It is another problem than that of :func:`tca`, with other components. It needs K
    rather than its square, and so resolves twice as many decades of eigenvalues.

    Args:
        xs: Source samples, shape (nS, p).
        xt: Target samples, shape (nT, p).
        num_components: Number of components m, at most nS + nT - 1 and the numerical rank of K.
        gamma: Weight of the regularisation, positive. Its useful scale is l^T K l, the biased squared maximum mean
            discrepancy between the domains.
        kernel: Positive semi-definite kernel of shapes (n, p), (k, p) -> (n, k), as for :func:`tca`.
        scaling: ``"constraint"`` fulfils the constraint above, ``"unit"`` does not, as for :func:`tca`.

    Returns:
        The components; its aligner W has shape (nS + nT, m).

    Raises:
        ValueError: If a number is out of range, shapes do not fit, or samples are not finite.
        TypeError: If samples are not of a floating type.

    References:
        Feng et al. (FedRF-TCA, 2023), R-TCA and Lemma 2. The published code has no R-TCA: its function of that name
        computes RF-TCA, and another repeats vanilla TCA.
    """
    samples, contrast = _prepared(xs, xt, num_components, gamma, scaling)
    gram = kernel_matrix(samples, kernel)
    weights, eigenvalues = _solve_dual(gram, contrast, gamma, num_components)
    weights = scaled(weights, scaling)
    mapping = partial(map_by_kernel, samples, weights, kernel)
    return _components(xs, xt, weights, eigenvalues, gram @ weights, mapping)


def _prepared(xs: Tensor, xt: Tensor, num_components: int, gamma: float, scaling: str) -> tuple[Tensor, Tensor]:
    check_domains(xs, xt)
    most = len(xs) + len(xt) - 1
    check_problem(num_components, gamma, scaling, most, "the number of samples less 1")
    samples = torch.cat([xs.double(), xt.double()])
    return samples, _contrast(len(xs), len(xt), samples)


def _chunks(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Cut and join batches to ``size`` rows each, so that sums do not depend on how samples came in batches."""
    held: list[Tensor] = []
    rows = 0
    for batch in batches:
        _check_finite("batches", batch)
        for piece in torch.split(batch, size):
            while len(piece):
                head, piece = piece[: size - rows], piece[size - rows :]
                held.append(head)
                rows += len(head)
                if rows == size:
                    yield torch.cat(held)
                    held, rows = [], 0
    if held:
        yield torch.cat(held)


def _summed(chunks: Iterable[Tensor]) -> RandomFeatureSums:
    """Sums over chunks of random Fourier features in float64."""
    second: Tensor | None = None
    total: Tensor | None = None
    count = 0
    for features in chunks:
        width = features.shape[1]
        if second is None or total is None:
            second, total = features.new_zeros(width, width), features.new_zeros(width)
        # of a symmetric matrix, three quarters are enough
        half = width // 2
        cosines, sines = features[:, :half], features[:, half:]
        second[:half, :half].addmm_(cosines.T, cosines)
        second[half:, half:].addmm_(sines.T, sines)
        second[:half, half:].addmm_(cosines.T, sines)
        total += features.sum(dim=0)
        count += len(features)
    if second is None or total is None:
        raise ValueError("batches must hold at least 1 sample, got none")
    half = len(total) // 2
    second[half:, :half] = second[:half, half:].T
    return RandomFeatureSums(second_moment=second, total=total, count=count)


@torch.no_grad()
def random_feature_sums(batches: Iterable[Tensor], frequencies: Tensor) -> RandomFeatureSums:
    """Sums over the random Fourier features of one domain's samples, in one pass.

    Memory is for 4096 rows of features and one matrix of 2N x 2N, whatever the number of samples. Features and sums
    are float64 whatever the samples, and rows are regrouped before they are summed: the same samples in the same
    order give the same bits in whatever batches they come.

    Args:
        batches: Samples in batches of shape (b, p), such as a list, a generator or ``x.split(1000)``. Batches may
            differ in size.
        frequencies: Matrix Omega, shape (N, p), from :func:`sample_frequencies`.

    Returns:
        The sums, on the device of the samples.

    Raises:
        ValueError: If there are no samples, shapes do not fit, or samples are not finite.
        TypeError: If samples are not of a floating type.

    References:
        The scatter of Feng et al. (FedRF-TCA, 2023), Algorithm 1, as a sum over samples, which the paper does not use.
    """
    return _summed(_features(chunk, frequencies) for chunk in _chunks(batches, _CHUNK))


def _aligner_from_sums(
    source: RandomFeatureSums, target: RandomFeatureSums, num_components: int, gamma: float
) -> tuple[Tensor, Tensor]:
    pooled = source + target
    gap = source.total / source.count - target.total / target.count
    scatter = pooled.second_moment - torch.outer(pooled.total, pooled.total / pooled.count)
    norm = torch.linalg.matrix_norm(pooled.second_moment).item()
    return solve_primal(scatter, gap, gamma, num_components, norm)


@torch.no_grad()
def rf_tca_from_sums(
    source: RandomFeatureSums,
    target: RandomFeatureSums,
    num_components: int,
    gamma: float,
    scaling: Scaling = "constraint",
) -> tuple[Tensor, Tensor]:
    """Aligner of RF-TCA from sums over each domain's random Fourier features; see :func:`rf_tca`.

    Args:
        source: Sums over the source's features.
        target: Sums over the target's features, from the same frequencies.
        num_components: Number of components m, at most 2N, the number of samples less 1, and the features' rank.
        gamma: Weight of the regularisation, positive.
        scaling: ``"constraint"`` or ``"unit"``, as in :func:`rf_tca`.

    Returns:
        Aligner W of shape (2N, m) and eigenvalues of shape (m,), descending, both float64.

    Raises:
        ValueError: If a number is out of range or the sums do not fit together.

    References:
        Feng et al. (FedRF-TCA, 2023), Algorithm 1, solved as a symmetric problem.
    """
    for name, sums in (("source", source), ("target", target)):
        if sums.count < 1:
            raise ValueError(f"{name} must be sums over at least 1 sample, got count {sums.count}")
    most = min(len(source.total), source.count + target.count - 1)
    check_problem(num_components, gamma, scaling, most, "the lesser of 2N and the number of samples less 1")
    weights, eigenvalues = _aligner_from_sums(source, target, num_components, gamma)
    return scaled(weights, scaling), eigenvalues


@torch.no_grad()
def rf_tca(
    xs: Tensor, xt: Tensor, num_components: int, gamma: float, frequencies: Tensor, scaling: Scaling = "constraint"
) -> TransferComponents:
    r"""Transfer component analysis with random Fourier features: linear in the number of samples.

    .. math:: \min_W \operatorname{tr}(W^\top S \ell \ell^\top S^\top W) + \gamma \operatorname{tr}(W^\top W)
              \quad \text{subject to} \quad W^\top S H S^\top W = I_m

    Here S (2N x n) has the features of all samples as columns, source first; l and H are as in :func:`tca`. The
    components approach those of :func:`r_tca` with the frequencies' kernel, at the rate :math:`N^{-1/2}`. They do not
    depend on the order of the frequencies. With fewer features than samples the problem is solved from sums over
    samples, with more from inner products of samples.

    Args:
        xs: Source samples, shape (nS, p).
        xt: Target samples, shape (nT, p).
        num_components: Number of components m, at most 2N, nS + nT - 1, and the numerical rank of S H.
        gamma: Weight of the regularisation, positive. Its useful scale is the squared length of S l.
        frequencies: Matrix Omega, shape (N, p), from :func:`sample_frequencies`.
        scaling: ``"constraint"`` fulfils the constraint above, so that centred components are orthonormal over
            samples; ``"unit"`` gives every column of W length 1, as the published code does. Both span the same
            space, but weigh its directions differently.

    Returns:
        The components; its aligner W has shape (2N, m).

    Raises:
        ValueError: If a number is out of range, shapes do not fit, or samples are not finite.
        TypeError: If samples are not of a floating type.

    References:
        Feng et al. (FedRF-TCA, 2023), Algorithm 1 and equation 9, as the symmetric problem of the same eigenvalues and
        with the factor 1/gamma that is missing there. The published code normalises the rows of the features
        afterwards, which undoes the alignment, and mixes scaled and unscaled l.
    """
    check_domains(xs, xt)
    num_features, num_samples = 2 * len(frequencies), len(xs) + len(xt)
    most = min(num_features, num_samples - 1)
    check_problem(num_components, gamma, scaling, most, "the lesser of 2N and the number of samples less 1")
    kept: list[Tensor] | None = None
    if num_features <= num_samples:
        if num_features * num_samples <= _KEPT:
            halves = [[_features(c, frequencies) for c in torch.split(x, _CHUNK)] for x in (xs, xt)]
            source, target = (_summed(chunks) for chunks in halves)
            kept = [*halves[0], *halves[1]]
        else:
            source, target = (random_feature_sums([x], frequencies) for x in (xs, xt))
        weights, eigenvalues = _aligner_from_sums(source, target, num_components, gamma)
    else:
        features = random_fourier_features(torch.cat([xs.double(), xt.double()]), frequencies)
        contrast = _contrast(len(xs), len(xt), features)
        dual, eigenvalues = _solve_dual(features @ features.T, contrast, gamma, num_components)
        weights = features.T @ dual
    weights = scaled(weights, scaling)
    mapping = partial(_map_by_features, frequencies, weights)
    if kept is None:
        projected = torch.cat([mapping(x.double()) for x in (xs, xt)])
    else:
        projected = torch.cat([chunk @ weights for chunk in kept])
    return _components(xs, xt, weights, eigenvalues, projected, mapping)
