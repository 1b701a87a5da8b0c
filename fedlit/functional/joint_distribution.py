"""Joint distribution adaptation (Long et al., ICCV 2013): TCA that brings the means of classes together as well.

The target's classes are guessed in the components of the iteration before, and the components computed again. All this
needs of the sources are sums over samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.checks import check_at_least, check_one_of, check_positive, refuse
from fedlit.functional.checks import check_finite, check_shape
from fedlit.functional.transfer_components import (
    Scaling,
    TransferComponents,
    centre,
    check_domains,
    check_problem,
    components,
    kernel_matrix,
    map_by_kernel,
    scaled,
    solve_primal,
)
from fedlit.functional.wasserstein import nearest_class_mean

Labelling = Literal["neighbour", "class_mean"]
"""Class of a target sample: that of the nearest source sample by angle, or of the nearest class mean."""

_CHUNK = 4096
"""Target samples that are compared with all source samples at once."""

_MIN_SHARE = 1e-6
"""Share of the source's samples below which a class has none: the error of an inexact secure sum of nothing."""


@dataclass(frozen=True)
class JointComponents(TransferComponents):
    """Components of `jda`, with the classes of their last iteration.

    Attributes:
        pseudo_labels: Class of each target sample in these components, shape (nT,), as in ``ys``.
        num_iterations: Iterations made; fewer than allowed where pseudo-labels came twice in a row.
    """

    pseudo_labels: Tensor
    num_iterations: int


@dataclass(frozen=True)
class JointAligner:
    """Result of `jda_from_sums`.

    Attributes:
        aligner: W, shape (w, m), float64.
        eigenvalues: Of the components, shape (m,), descending, float64.
        pseudo_labels: Class of each target sample, shape (nT,), from 0 to C - 1.
        num_iterations: Iterations made.
    """

    aligner: Tensor
    eigenvalues: Tensor
    pseudo_labels: Tensor
    num_iterations: int


def _seen(class_counts: Tensor) -> Tensor:
    """Mark the classes that the source has."""
    return class_counts > _MIN_SHARE * class_counts.sum()


def joint_gaps(class_sums: Tensor, class_counts: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
    r"""Columns V of the discrepancy that JDA penalises: :math:`\Phi^\top M \Phi = V V^\top` with :math:`\|M\|_F = 1`.

    .. math:: M \propto C e_0 e_0^\top + \sum_c e_c e_c^\top

    :math:`e_0` is 1/nS on source samples and -1/nT on target samples, :math:`e_c` the same within class c, over classes
    that both sides have. So :math:`\Phi^\top e_c` is a difference of means, and the norm follows from counts alone, as
    :math:`e_0^\top e_c = 1/n_S + 1/n_T` and :math:`e_c^\top e_{c'} = 0`. V has shape (w, 1 + number of such classes).

    Args:
        class_sums: Sum of the source's features by class, shape (w, C), float64.
        class_counts: Source samples by class, shape (C,), float64; classes without any do not count towards C.
        target: The target's features, shape (nT, w), float64.
        labels: The target's classes, shape (nT,), from 0 to C - 1; ``None`` leaves the class terms out.
    """
    num_source, num_target = class_counts.sum(), len(target)
    seen = _seen(class_counts)
    weight = int(seen.sum())  # C before the first term is the published code's; the paper has 1
    both = 1 / num_source + 1 / num_target
    gap = class_sums.sum(dim=1) / num_source - target.mean(dim=0)
    columns, squares = [math.sqrt(weight) * gap[:, None]], (weight * both).square()
    if labels is not None:
        members = F.one_hot(labels, len(class_counts)).to(target)
        counts = members.sum(dim=0)
        there = seen & (counts > 0)
        source_means = class_sums[:, there] / class_counts[there]
        columns.append(source_means - (target.T @ members)[:, there] / counts[there])
        # diagonal entries of the classes' inner products, and those with e_0, twice each
        squares = squares + (1 / class_counts[there] + 1 / counts[there]).square().sum()
        squares = squares + 2 * int(there.sum()) * weight * both.square()
    return torch.cat(columns, dim=1) / squares.sqrt().sqrt()


def _nearest_mean(class_sums: Tensor, class_counts: Tensor, target: Tensor, aligner: Tensor) -> Tensor:
    """Class of the nearest class mean, shape (nT,), among classes that the source has."""
    seen = _seen(class_counts)
    means = (class_sums / torch.where(seen, class_counts, 1.0)).T @ aligner
    return nearest_class_mean(target @ aligner, means, torch.diag(seen.to(means)))


def _nearest_neighbour(source: Tensor, classes: Tensor, target: Tensor, aligner: Tensor) -> Tensor:
    """Class of the source sample at the smallest angle, shape (nT,)."""
    references = F.normalize(source @ aligner, dim=1)
    chunks = torch.split(F.normalize(target @ aligner, dim=1), _CHUNK)
    return classes[torch.cat([(rows @ references.T).argmax(dim=1) for rows in chunks])]


def _iterated(
    scatter: Tensor,
    norm: float,
    gaps: Callable[[Tensor | None], Tensor],
    label: Callable[[Tensor], Tensor],
    num_components: int,
    gamma: float,
    num_iterations: int,
    scaling: Scaling,
) -> JointAligner:
    """Solve without class terms, then with those of the classes guessed in the components before."""
    check_at_least("num_iterations", num_iterations, 1, "iteration", "one alone is TCA")
    labels: Tensor | None = None
    iteration = 0
    while iteration < num_iterations:
        iteration += 1
        weights, eigenvalues = solve_primal(scatter, gaps(labels), gamma, num_components, norm)
        weights = scaled(weights, scaling)
        before, labels = labels, label(weights)
        if before is not None and torch.equal(before, labels):
            break
    assert labels is not None
    return JointAligner(weights, eigenvalues, labels, iteration)


def _check_labels(ys: Tensor, num_source: int) -> None:
    if ys.is_floating_point() or ys.is_complex() or ys.dtype == torch.bool:
        refuse("ys", "class labels of an integer type", ys.dtype, "convert them with ys.long()", TypeError)
    check_shape("ys", ys, num_source, way_out="give one class for each source sample")


@torch.no_grad()
def jda(
    xs: Tensor,
    ys: Tensor,
    xt: Tensor,
    num_components: int,
    gamma: float = 1.0,
    kernel: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    num_iterations: int = 10,
    labelling: Labelling = "neighbour",
    scaling: Scaling = "constraint",
) -> JointComponents:
    r"""Joint distribution adaptation: keep variance, bring the means of domains and of their classes together.

    .. math:: \min_W \operatorname{tr}(W^\top \Phi^\top M \Phi W) + \gamma \operatorname{tr}(W^\top W)
              \quad \text{subject to} \quad W^\top \Phi^\top H \Phi W = I_m

    The rows of :math:`\Phi` are the samples themselves, or with a kernel those of its matrix, source first; M is that
    of `joint_gaps` and H subtracts the mean. The first iteration has no class terms: it is `tca` with ``gamma`` times
    the squared length of l. Each further one takes the classes that the target has in the components before. See Long
    et al., ICCV 2013, equations 4, 6 and 8, and Algorithm 1. The factor C before the first term of M is that of the
    published Python code, in which this term is wrong from the third iteration on, as a variable is used twice, and a
    class without pseudo-labels divides by zero.

    Args:
        xs: Source samples, shape (nS, p).
        ys: Their classes, shape (nS,), any integers.
        xt: Target samples, shape (nT, p).
        num_components: Number of components m, at most nS + nT - 1 and the numerical rank of the centred features.
        gamma: Weight of the regularisation (the paper's lambda), positive. As M has length 1, its useful scale is the
            variance of the features, below 1 for samples of length 1.
        kernel: As for `tca`; ``None`` takes the samples as they are.
        num_iterations: Maximal number of iterations, at least 1.
        labelling: ``"neighbour"`` gives a target sample the class of the source sample at the smallest angle in the
            components, as published; ``"class_mean"`` that of the nearest class mean, as in `jda_from_sums`.
        scaling: As for `tca`; the published code has ``"unit"``, by which pseudo-labels differ.
    """
    check_domains(xs, xt)
    _check_labels(ys, len(xs))
    check_one_of("labelling", labelling, get_args(Labelling))
    num_samples = len(xs) + len(xt)
    highest, why = num_samples - 1, "the number of samples less 1"
    if kernel is None and xs.shape[1] < highest:
        highest, why = xs.shape[1], "the number of features (p)"
    check_problem(num_components, gamma, scaling, highest, why)
    samples = torch.cat([xs.double(), xt.double()])
    features = samples if kernel is None else kernel_matrix(samples, kernel)
    source, target = features[: len(xs)], features[len(xs) :]
    names, classes = ys.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    members = F.one_hot(classes, len(names)).to(source)
    class_sums, class_counts = source.T @ members, members.sum(dim=0)
    if labelling == "neighbour":
        label = partial(_nearest_neighbour, source, classes, target)
    else:
        label = partial(_nearest_mean, class_sums, class_counts, target)
    centred = centre(features)
    scatter, norm = centred.T @ centred, torch.linalg.matrix_norm(features).item() ** 2
    gaps = partial(joint_gaps, class_sums, class_counts, target)
    solution = _iterated(scatter, norm, gaps, label, num_components, gamma, num_iterations, scaling)
    aligner = solution.aligner
    mapping = partial(_map, aligner) if kernel is None else partial(map_by_kernel, samples, aligner, kernel)
    found = components(xs, xt, aligner, solution.eigenvalues, features @ aligner, mapping)
    return JointComponents(
        **vars(found), pseudo_labels=names[solution.pseudo_labels], num_iterations=solution.num_iterations
    )


def _map(aligner: Tensor, x: Tensor) -> Tensor:
    return x @ aligner.to(x.device)


@torch.no_grad()
def jda_from_sums(
    second_moment: Tensor,
    class_sums: Tensor,
    class_counts: Tensor,
    target: Tensor,
    num_components: int,
    gamma: float = 1.0,
    *,
    num_iterations: int = 10,
    scaling: Scaling = "constraint",
) -> JointAligner:
    """Joint distribution adaptation from sums over the source's samples, and the target's samples themselves.

    Every iteration is that of `jda` with ``labelling="class_mean"``: sums over several sources, added up once, are
    enough for all of them (not in the paper).

    Args:
        second_moment: Sum over the source's samples of f f^T, shape (w, w).
        class_sums: Sum of f by class, shape (w, C).
        class_counts: Samples by class, shape (C,), at least 0; not whole numbers where sources are weighted.
        target: The target's samples, shape (nT, w).
        num_components: Number of components m, at most w and the number of samples less 1.
        gamma: As for `jda`.
        num_iterations: As for `jda`.
        scaling: As for `jda`.
    """
    check_shape("class_sums", class_sums, "w", "C")
    width, num_classes = class_sums.shape
    check_shape("second_moment", second_moment, width, width)
    check_shape("class_counts", class_counts, num_classes)
    check_shape("target", target, "nT > 0", width)
    second, sums, counts, rows = (each.double() for each in (second_moment, class_sums, class_counts, target))
    names = ("second_moment", "class_sums", "class_counts", "target")
    for name, each in zip(names, (second, sums, counts, rows), strict=True):
        check_finite(name, each, "have the features diverged?")
    num_source = float(counts.sum())
    check_positive("class_counts (their sum)", num_source, "the source needs samples")
    highest = min(width, round(num_source) + len(rows) - 1)
    check_problem(num_components, gamma, scaling, highest, "the lesser of w and the number of samples less 1")
    pooled = second + rows.T @ rows
    total = sums.sum(dim=1) + rows.sum(dim=0)
    scatter = pooled - torch.outer(total, total / (num_source + len(rows)))
    norm = torch.linalg.matrix_norm(pooled).item()
    gaps, label = partial(joint_gaps, sums, counts, rows), partial(_nearest_mean, sums, counts, rows)
    return _iterated(scatter, norm, gaps, label, num_components, gamma, num_iterations, scaling)
