"""Optimal transport between labelled samples, and barycenters of them with free support (Montesuma et al., ECAI 2023).

All samples weigh the same unless weights are given. A plan pi between n and m samples has shape (n, m), rows that sum
to 1/n (or to the weights) and columns to 1/m. Plans are found exactly (`ot.emd`), or with an entropic penalty, in
float64 and without a graph. What is made of them has gradients in which the plans are constant: that is the gradient of
the transport cost wherever it has one (envelope theorem).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import ot
import torch
from torch import Tensor

from fedlit.functional.kernels import check_pair, squared_distances

LabelCost = float | Literal["adaptive"]
"""Weight beta of labels in a cost: a number, or the largest squared distance of features at hand, which lets a plan
join samples of different classes only where it has to."""


def check_label_cost(label_cost: LabelCost) -> None:
    """Refuse a weight beta of labels that is negative, not finite, or another word than ``"adaptive"``."""
    if label_cost != "adaptive" and (isinstance(label_cost, str) or not 0 <= label_cost < math.inf):
        raise ValueError(f"label_cost (beta) must be at least 0 and finite, or 'adaptive', got {label_cost!r}")


def check_entropy(entropy: float | None) -> None:
    """Refuse a weight of the entropy that is not positive and finite; ``None`` is exact transport."""
    if entropy is not None and not 0 < entropy < math.inf:
        raise ValueError(f"entropy must be positive and finite, or None for exact transport, got {entropy}")


def joint_cost(
    x: Tensor, x2: Tensor, y: Tensor | None = None, y2: Tensor | None = None, label_cost: LabelCost = "adaptive"
) -> Tensor:
    r"""Cost of moving each sample to each other one, by features and, if both sides have them, by labels.

    .. math:: C_{ij} = \|x_i - x'_j\|_2^2 + \beta \|y_i - y'_j\|_2^2

    Args:
        x: Samples, shape (n, d).
        x2: Samples, shape (m, d).
        y: Class probabilities of ``x``, shape (n, C); ``None`` leaves labels out.
        y2: Class probabilities of ``x2``, shape (m, C).
        label_cost: beta, at least 0. ``"adaptive"`` is a constant for the gradient, but another one in each call.

    Returns:
        Shape (n, m), float64.

    Raises:
        ValueError: If shapes do not fit, only one side has labels, or beta is negative.

    References:
        Montesuma et al. 2024 (FedDaDiL), equation 6; ``"adaptive"`` is from its code.
    """
    _check_pair(x, x2, y, y2)
    return _with_labels(squared_distances(x, x2), y, y2, label_cost)


def balanced_weights(y: Tensor) -> Tensor:
    r"""Weights of samples with which all classes among them weigh the same.

    .. math:: w_i = \frac{1}{|\{c : m_c > 0\}|} \sum_{c : m_c > 0} \frac{y_{ic}}{m_c}, \qquad m_c = \sum_i y_{ic}

    Args:
        y: Class probabilities, shape (n, C).

    Returns:
        Shape (n,), float64, with sum 1.

    Raises:
        ValueError: If there are no samples, or an entry is negative or not finite, or all are 0.
    """
    if y.dim() != 2 or not len(y) or not bool((y.isfinite() & (y >= 0)).all()) or not bool(y.any()):
        raise ValueError(
            f"y must be class probabilities of shape (n, C), with n at least 1, got shape {tuple(y.shape)}"
        )
    shares = y.double()[:, y.any(dim=0)]
    return (shares / shares.sum(dim=0)).mean(dim=1)


@torch.no_grad()
def nearest_class_mean(x: Tensor, x2: Tensor, y2: Tensor) -> Tensor:
    """Class of the nearest class mean of labelled samples.

    Args:
        x: Samples, shape (n, d).
        x2: Labelled samples, shape (m, d).
        y2: Their class probabilities, shape (m, C). A class that none of them has is nobody's.

    Returns:
        Classes, shape (n,), int64.

    Raises:
        ValueError: If shapes do not fit.
    """
    _check_pair(x, x2, None, None)
    _check_pair(x2, x2, y2, y2)
    mass = y2.sum(dim=0)
    means = y2.T.to(x2.dtype) @ x2 / mass.clamp(min=torch.finfo(mass.dtype).tiny)[:, None]
    return squared_distances(x, means).masked_fill(mass == 0, math.inf).argmin(dim=1)


def transport_plan(cost: Tensor, entropy: float | None = None, weights: Tensor | None = None) -> Tensor:
    """Plan of least cost between samples.

    Args:
        cost: Shape (n, m).
        entropy: ``None`` is exact, on the CPU. A positive number is the weight of the entropy in units of the largest
            cost (Sinkhorn, in the log domain), on the device of ``cost``.
        weights: Of the rows, shape (n,), positive, with sum 1; ``None`` are equal ones. Columns weigh the same.

    Returns:
        Shape (n, m), float64, without a graph. An exact one has at most n + m - 1 entries other than 0; where several
        plans cost the same, it is one of them.

    Raises:
        ValueError: If a cost is not finite, the entropy not positive, or weights are not positive with sum 1.
    """
    costs = cost.detach().double()
    if costs.dim() != 2 or 0 in costs.shape or not bool(costs.isfinite().all()):
        raise ValueError(
            f"cost must be a matrix of finite numbers, got shape {tuple(cost.shape)} with "
            f"{int((~costs.isfinite()).sum())} others: there is no plan for samples that are NaN or infinite, or none"
        )
    rows, columns = (torch.full((size,), 1 / size, dtype=torch.float64, device=cost.device) for size in costs.shape)
    if weights is not None:
        rows = weights.detach().double()
        if rows.shape != costs.shape[:1] or not bool((rows > 0).all()) or abs(float(rows.sum()) - 1) > 1e-6:
            raise ValueError(
                f"weights must be {len(costs)} positive numbers, one per row of cost, with sum 1, got shape "
                f"{tuple(rows.shape)} with sum {float(rows.sum()):.6g}"
            )
        rows = rows / rows.sum()  # exactly the mass of the columns, whatever they were rounded to
    if entropy is None:
        plan = ot.emd(*(each.cpu().numpy() for each in (rows, columns, costs)), numItermax=1_000_000)
        return torch.from_numpy(plan).to(cost.device)
    check_entropy(entropy)
    scale = float(costs.max()) or 1.0
    found: Tensor = ot.sinkhorn(
        rows, columns, costs / scale, reg=entropy, method="sinkhorn_log", numItermax=2000, warn=False
    )
    off = float((found.sum(dim=0) / columns - 1).abs().max())
    if off > 0.01:
        warnings.warn(
            f"Sinkhorn's iterations have not converged: a column's weight is off by {off:.1%}, with entropy={entropy}; "
            "raise it, or take None for exact transport",
            stacklevel=2,
        )
    return found


def joint_ot_loss(
    x: Tensor,
    x2: Tensor,
    y: Tensor | None = None,
    y2: Tensor | None = None,
    label_cost: LabelCost = "adaptive",
    entropy: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Least cost of transport between two samples, T_c with labels and T_2 without.

    Args:
        x: Samples, shape (n, d).
        x2: Samples, shape (m, d).
        y: Class probabilities of ``x``, shape (n, C); ``None`` leaves labels out.
        y2: Class probabilities of ``x2``, shape (m, C).
        label_cost: See `joint_cost`.
        entropy: Of the plan, see `transport_plan`; the loss is its cost, without the entropy.
        weights: Of the samples in ``x``, shape (n,), see `transport_plan`.

    Returns:
        A scalar in the dtype of ``x``, with the gradient of a constant plan.

    Raises:
        ValueError: If shapes do not fit, or weights are not positive with sum 1.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0]]), torch.eye(2)
        >>> joint_ot_loss(x, x + 3, y, y, label_cost=100.0)  # each point moves by 3, and keeps its class
        tensor(9.)

    References:
        Montesuma et al. 2024 (FedDaDiL), equations 4, 6 and 11.
    """
    cost = joint_cost(x, x2, y, y2, label_cost)
    return (transport_plan(cost, entropy, weights) * cost).sum().to(x.dtype)


def barycentric_mapping(plan: Tensor, x2: Tensor) -> Tensor:
    r"""Where a plan takes each sample: T(x_i) = n \sum_j \pi_{ij} x'_j, shape (n, d).

    Args:
        plan: Shape (n, m), with rows that sum to 1/n.
        x2: Samples at which it ends, shape (m, d).

    References:
        Montesuma et al. 2024 (FedDaDiL), equation 3; n is the number of samples that are moved.
    """
    return (len(plan) * plan.to(x2.dtype)) @ x2


@dataclass(frozen=True)
class Barycenter:
    """A barycenter of labelled samples.

    Args:
        support: Its samples, shape (n, d), with the gradient of constant plans.
        labels: Their class probabilities, shape (n, C), likewise; ``None`` if there were none.
        plans: From each of the given samples to it, of shapes (n_k, n), float64.
        objective: Weighted mean of the costs of transport before each update, one for each iteration.
    """

    support: Tensor
    labels: Tensor | None
    plans: list[Tensor]
    objective: list[float]


def wasserstein_barycenter(
    supports: Sequence[Tensor],
    labels: Sequence[Tensor] | None,
    coordinates: Tensor,
    num_points: int | None = None,
    label_cost: LabelCost = "adaptive",
    init: tuple[Tensor, Tensor | None] | None = None,
    num_iterations: int = 10,
    tol: float = 1e-4,
    entropy: float | None = None,
) -> Barycenter:
    r"""Barycenter of labelled samples with a free support, by fixed-point iteration.

    .. math:: X \leftarrow n \sum_k \alpha_k \pi_k^T X_k, \qquad Y \leftarrow n \sum_k \alpha_k \pi_k^T Y_k.

    It lowers the mean cost of transport to the given samples, weighted by the coordinates. The mean of the support is
    that of the given ones, and labels stay probabilities. With a label cost that is a number, no update raises the
    objective. Inner products of all pairs of given samples are held, in float64, so that updates do not depend on d.

    Args:
        supports: Samples of K distributions, of shapes (n_k, d).
        labels: Their class probabilities, of shapes (n_k, C), or ``None``.
        coordinates: alpha, shape (K,), at least 0, with sum 1. Gradients reach it.
        num_points: n; ``None`` is that of the distribution with the largest coordinate.
        label_cost: See `joint_cost`.
        init: Support and labels to start from, of shapes (n, d) and (n, C). ``None`` takes n of those of the
            distribution with the largest coordinate, evenly over their order.
        num_iterations: Most updates, at least 1.
        tol: Stop when the objective falls by less than this share of itself.
        entropy: Of the plans, see `transport_plan`.

    Returns:
        The barycenter after the last update, in the dtype of the supports.

    Raises:
        ValueError: If shapes do not fit, coordinates are no weights, or a number is out of range.

    Example:
        >>> supports = [torch.tensor([[0.0], [1.0]]), torch.tensor([[10.0], [11.0]])]
        >>> labels = [torch.eye(2), torch.eye(2)]
        >>> wasserstein_barycenter(supports, labels, torch.tensor([0.5, 0.5])).support.squeeze(1).sort().values
        tensor([5., 6.])

    References:
        Montesuma et al. 2023 (DaDiL), algorithm 1; Montesuma et al. 2024 (FedDaDiL), equation 14; Cuturi and Doucet,
        ICML 2014. Unlike in their code the objective is weighted by the coordinates, and the start is near the result.
    """
    _check_barycenter(supports, labels, coordinates, num_points, num_iterations)
    labels = None if labels is None else [each.to(supports[0].dtype) for each in labels]
    weights = coordinates.detach().double().clamp(min=0)
    weights /= weights.sum()  # whatever they were rounded to
    largest = int(weights.argmax())
    exact = None if labels is None else [each.detach().double() for each in labels]
    geometry = _Geometry(supports)
    if init is None:
        size = len(supports[largest])
        evenly = torch.linspace(0, size - 1, num_points or size, dtype=torch.float64)
        places = evenly.round().long().to(coordinates.device)
        geometry.start_at(largest, places)
        y = None if exact is None else exact[largest][places]
    else:
        x, y = init
        _check_pair(x, supports[0], y, None if labels is None else labels[0])
        if num_points is not None and len(x) != num_points:
            raise ValueError(f"init must have num_points={num_points} samples, got {len(x)}")
        geometry.start(x)
        y = None if y is None else y.detach().double()
    objective: list[float] = []
    plans: list[Tensor] = []
    moves: list[Tensor] = []
    for _ in range(num_iterations):
        plans, total = [], 0.0
        for place in range(len(supports)):
            cost = _with_labels(geometry.cost(place), None if exact is None else exact[place], y, label_cost)
            plans.append(transport_plan(cost, entropy))
            total += float(weights[place]) * float((plans[-1] * cost).sum())
        objective.append(total)
        moves = [plan.shape[1] * plan.T for plan in plans]
        if entropy is None:  # nearly all entries are zeros, as none is with entropy
            moves = [move.to_sparse() for move in moves]
        if len(objective) > 1 and objective[-2] - total <= tol * abs(objective[-2]):
            break
        geometry.move_([weight * move for weight, move in zip(weights, moves, strict=True)])
        y = None if exact is None else _mean_image(moves, exact, weights)
    return Barycenter(
        _mean_image(moves, supports, coordinates),
        None if labels is None else _mean_image(moves, labels, coordinates),
        plans,
        objective,
    )


def project_simplex(v: Tensor) -> Tensor:
    """Nearest point of the probability simplex, for each row.

    Args:
        v: Shape (..., k).

    Returns:
        The same shape and dtype, entries at least 0 that sum to 1 over the last dimension; computed in float64.

    Raises:
        ValueError: If an entry is not finite.

    Example:
        >>> project_simplex(torch.tensor([0.75, 0.75, -1.0]))
        tensor([0.5000, 0.5000, 0.0000])

    References:
        Held, Wolfe and Crowder 1974; Duchi et al., ICML 2008, figure 1.
    """
    if v.dim() == 0 or v.shape[-1] == 0 or not bool(v.isfinite().all()):
        raise ValueError(f"v must have finite entries and a last dimension of at least 1, got shape {tuple(v.shape)}")
    exact = v.double()
    ordered = exact.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(dim=-1) - 1
    rank = torch.arange(1, v.shape[-1] + 1, dtype=torch.float64, device=v.device)
    support = (ordered * rank > excess).sum(dim=-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support
    return (exact - threshold).clamp_min(0).to(v.dtype)


class _Geometry:
    """Distances between given samples, of shapes (n_k, d), and points that are means of them.

    They need inner products of the given samples alone, which do not change as the points move: an iteration costs the
    same however many features there are.
    """

    inner: list[Tensor]
    """Inner products of the points with the given samples, of shapes (n, n_k)."""

    lengths: Tensor
    """Squared lengths of the points, shape (n,)."""

    def __init__(self, supports: Sequence[Tensor]) -> None:
        self.centre = supports[0].detach().double().mean(dim=0)  # near which products keep small distances
        self.given = [support.detach().double() - self.centre for support in supports]
        self.products: dict[tuple[int, int], Tensor] = {}
        for j, x in enumerate(self.given):
            for k in range(j, len(self.given)):
                self.products[j, k] = x @ self.given[k].T
                self.products[k, j] = self.products[j, k].T

    def start(self, points: Tensor) -> None:
        """Put the points at samples of shape (n, d)."""
        points = points.detach().double() - self.centre
        self.inner = [points @ x.T for x in self.given]
        self.lengths = (points * points).sum(dim=1)

    def start_at(self, place: int, which: Tensor) -> None:
        """Put the points at some of the samples of ``place``."""
        self.inner = [self.products[place, k][which] for k in range(len(self.given))]
        self.lengths = self.products[place, place].diagonal()[which]

    def cost(self, place: int) -> Tensor:
        """Squared distances between the samples of ``place`` and the points, shape (n_k, n), float64."""
        lengths = self.products[place, place].diagonal()[:, None] + self.lengths
        return torch.add(lengths, self.inner[place].T, alpha=-2).clamp_min_(0)

    def move_(self, shares: Sequence[Tensor]) -> None:
        """Put the points at means of the given samples, whose shares (n, n_k) in each point sum to 1 over all k."""
        number = len(shares)
        self.inner = [
            torch.stack([shares[j] @ self.products[j, k] for j in range(number)]).sum(dim=0) for k in range(number)
        ]
        lengths = [(shares[k] * self.inner[k]).sum(dim=1).to_dense() for k in range(number)]
        self.lengths = torch.stack(lengths).sum(dim=0)


def _mean_image(moves: Sequence[Tensor], given: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The points n sum_k alpha_k pi_k^T X_k, shape (n, ...), in the dtype of what is given."""
    dtype = given[0].dtype
    images = [move.to(dtype) @ samples for move, samples in zip(moves, given, strict=True)]
    weighted: list[Tensor] = [weight * image for weight, image in zip(weights.to(dtype), images, strict=True)]
    return functools.reduce(torch.add, weighted)


def _with_labels(cost: Tensor, y: Tensor | None, y2: Tensor | None, label_cost: LabelCost) -> Tensor:
    """Costs by features, and by labels if both sides have them."""
    if y is None or y2 is None:
        return cost
    check_label_cost(label_cost)
    weight = float(cost.detach().max()) if isinstance(label_cost, str) else label_cost
    return cost + weight * squared_distances(y, y2)


def _check_pair(x: Tensor, x2: Tensor, y: Tensor | None, y2: Tensor | None) -> None:
    check_pair(x, x2, ("x", "x2"), symbol="d")
    if (y is None) != (y2 is None):
        raise ValueError("y and y2 must both be given, or neither: samples without labels are compared by features")
    if y is not None and y2 is not None and (len(y), len(y2), y.shape[1:]) != (len(x), len(x2), y2.shape[1:]):
        raise ValueError(
            f"y and y2 must have a row of class probabilities for each sample, got shapes {tuple(y.shape)} and "
            f"{tuple(y2.shape)} for {len(x)} and {len(x2)} samples"
        )


def _check_barycenter(
    supports: Sequence[Tensor],
    labels: Sequence[Tensor] | None,
    coordinates: Tensor,
    num_points: int | None,
    num_iterations: int,
) -> None:
    if not len(supports):
        raise ValueError("supports must hold the samples of at least one distribution, got none")
    if labels is not None and len(labels) != len(supports):
        raise ValueError(f"labels must be given for each of {len(supports)} supports, got {len(labels)}")
    for place, support in enumerate(supports):
        own = None if labels is None else labels[place]
        _check_pair(support, supports[0], own, None if labels is None else labels[0])
    if coordinates.shape != (len(supports),):
        raise ValueError(
            f"coordinates must be one number for each of {len(supports)} supports, got shape {tuple(coordinates.shape)}"
        )
    for each in labels or ():
        sums = each.detach().double().sum(dim=1)
        if bool((each < -0.01).any()) or bool(((sums - 1).abs() > 0.01).any()):
            raise ValueError(
                f"labels must be probabilities, at least 0 with sum 1 in each row, got a least one of "
                f"{float(each.min()):.3g} and sums from {float(sums.min()):.3g} to {float(sums.max()):.3g}: take "
                "torch.nn.functional.one_hot of classes, or project_simplex"
            )
    alpha = coordinates.detach().double()
    off = max(1e-4, len(alpha) * torch.finfo(coordinates.dtype).eps)
    if not bool((alpha >= -1e-6).all()) or abs(float(alpha.sum()) - 1) > off:  # their values may be private
        raise ValueError(
            f"coordinates must be at least 0 with sum 1, got a least one of {float(alpha.min()):.3g} and sum "
            f"{float(alpha.sum()):.6g}: project them with project_simplex"
        )
    if num_points is not None and num_points < 1:
        raise ValueError(f"num_points must be at least 1, got {num_points}")
    if num_iterations < 1:
        raise ValueError(f"num_iterations must be at least 1, got {num_iterations}")
