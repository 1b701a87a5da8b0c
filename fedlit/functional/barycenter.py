"""Wasserstein barycenters of labelled samples, with a free support (Montesuma et al., ECAI 2023)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlit.checks import check, check_at_least
from fedlit.functional.checks import check_entries, check_shape
from fedlit.functional.wasserstein import LabelCost, add_label_cost, check_labelled_pair, transport_plan


@dataclass(frozen=True)
class Barycenter:
    """A barycenter of labelled samples.

    Args:
        support: Its samples, shape (n, d), with the gradient of constant plans.
        labels: Their class probabilities, shape (n, C), likewise; ``None`` for samples without.
        plans: From each distribution's samples to it, of shapes (n_k, n), float64.
        objective: Weighted mean of the costs of transport before each update.
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

    It lowers the mean cost of transport to the distributions' samples, weighted by the coordinates; with a label cost
    that is a number, no update raises it. Labels stay probabilities. Inner products of all pairs of samples are held,
    in float64, so that updates do not depend on d. See Montesuma et al. 2023 (DaDiL), algorithm 1; Montesuma et al.
    2024 (FedDaDiL), equation 14; Cuturi and Doucet, ICML 2014. Unlike in their code the objective is weighted by the
    coordinates, and the start is near the result.

    Args:
        supports: Samples of K distributions, of shapes (n_k, d).
        labels: Their class probabilities, of shapes (n_k, C), or ``None``.
        coordinates: alpha, shape (K,), at least 0, with sum 1. Gradients reach it.
        num_points: n; ``None`` is that of the distribution with the largest coordinate.
        label_cost: See `joint_cost`.
        init: Support and labels to start from, of shapes (n, d) and (n, C). ``None`` takes n of those of the
            distribution with the largest coordinate, evenly over their order.
        num_iterations: Maximal number of updates, at least 1.
        tol: Stop when the objective falls by less than this share of itself.
        entropy: Of the plans, see `transport_plan`.

    Example:
        >>> supports = [torch.tensor([[0.0], [1.0]]), torch.tensor([[10.0], [11.0]])]
        >>> labels = [torch.eye(2), torch.eye(2)]
        >>> wasserstein_barycenter(supports, labels, torch.tensor([0.5, 0.5])).support.squeeze(1).sort().values
        tensor([5., 6.])
    """
    _check_barycenter(supports, labels, coordinates, num_points, num_iterations)
    labels = None if labels is None else [each.to(supports[0].dtype) for each in labels]
    weights = coordinates.detach().double().clamp(min=0)
    weights /= weights.sum()  # exactly 1, however coordinates were rounded
    largest = int(weights.argmax())
    exact = None if labels is None else [each.detach().double() for each in labels]
    geometry = _Geometry(supports)
    if init is None:
        size = len(supports[largest])
        evenly = torch.linspace(0, size - 1, num_points or size, dtype=torch.float64)
        rows = evenly.round().long().to(coordinates.device)
        geometry.start_at(largest, rows)
        y = None if exact is None else exact[largest][rows]
    else:
        x, y = init
        check_labelled_pair(x, supports[0], y, None if labels is None else labels[0])
        check(num_points in (None, len(x)), "init", f"of num_points={num_points} samples", len(x))
        geometry.start(x)
        y = None if y is None else y.detach().double()
    objective: list[float] = []
    plans: list[Tensor] = []
    moves: list[Tensor] = []
    for _ in range(num_iterations):
        plans, total = [], 0.0
        for k in range(len(supports)):
            cost = add_label_cost(geometry.cost(k), None if exact is None else exact[k], y, label_cost)
            plans.append(transport_plan(cost, entropy))
            total += float(weights[k]) * float((plans[-1] * cost).sum())
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


class _Geometry:
    """Distances between samples of K distributions, of shapes (n_k, d), and points that are means of them.

    They need inner products of the samples alone, so that the cost of an iteration does not depend on d.
    """

    inner: list[Tensor]
    """Inner products of the points with the samples, of shapes (n, n_k)."""

    lengths: Tensor
    """Squared lengths of the points, shape (n,)."""

    def __init__(self, supports: Sequence[Tensor]) -> None:
        self.centre = supports[0].detach().double().mean(dim=0)  # near which products keep small distances
        self.samples = [support.detach().double() - self.centre for support in supports]
        self.products: dict[tuple[int, int], Tensor] = {}
        for j, x in enumerate(self.samples):
            for k in range(j, len(self.samples)):
                self.products[j, k] = x @ self.samples[k].T
                self.products[k, j] = self.products[j, k].T

    def start(self, points: Tensor) -> None:
        """Move the points to samples of shape (n, d)."""
        points = points.detach().double() - self.centre
        self.inner = [points @ x.T for x in self.samples]
        self.lengths = (points * points).sum(dim=1)

    def start_at(self, j: int, rows: Tensor) -> None:
        """Move the points to some of the samples of distribution j."""
        self.inner = [self.products[j, k][rows] for k in range(len(self.samples))]
        self.lengths = self.products[j, j].diagonal()[rows]

    def cost(self, k: int) -> Tensor:
        """Squared distances between the samples of distribution k and the points, shape (n_k, n), float64."""
        lengths = self.products[k, k].diagonal()[:, None] + self.lengths
        return torch.add(lengths, self.inner[k].T, alpha=-2).clamp_min_(0)

    def move_(self, shares: Sequence[Tensor]) -> None:
        """Move the points to means of the samples, whose shares (n, n_k) in each point sum to 1 over all k."""
        number = len(shares)
        self.inner = [
            torch.stack([shares[j] @ self.products[j, k] for j in range(number)]).sum(dim=0) for k in range(number)
        ]
        lengths = [(shares[k] * self.inner[k]).sum(dim=1).to_dense() for k in range(number)]
        self.lengths = torch.stack(lengths).sum(dim=0)


def _mean_image(moves: Sequence[Tensor], sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The points n sum_k alpha_k pi_k^T X_k, shape (n, ...), in the dtype of the X_k."""
    dtype = sources[0].dtype
    images = [move.to(dtype) @ samples for move, samples in zip(moves, sources, strict=True)]
    weighted: list[Tensor] = [weight * image for weight, image in zip(weights.to(dtype), images, strict=True)]
    return functools.reduce(torch.add, weighted)


def _check_barycenter(
    supports: Sequence[Tensor],
    labels: Sequence[Tensor] | None,
    coordinates: Tensor,
    num_points: int | None,
    num_iterations: int,
) -> None:
    number = len(supports)
    check_at_least("supports", number, 1, "distribution")
    check(labels is None or len(labels) == number, "labels", f"one tensor per support, {number}", len(labels or ()))
    for k, support in enumerate(supports):
        y, y2 = (None, None) if labels is None else (labels[k], labels[0])
        check_labelled_pair(support, supports[0], y, y2)
    check_shape("coordinates (alpha)", coordinates, number, way_out="give one per distribution")
    for each in labels or ():
        sums = each.detach().double().sum(dim=1)
        fits = bool((each >= -0.01).all()) and bool(((sums - 1).abs() <= 0.01).all())
        way_out = "take torch.nn.functional.one_hot of classes, or project_simplex"
        check_entries(fits, "labels", "probabilities, at least 0 with sum 1 in each row", each, way_out)
    alpha = coordinates.detach().double()
    error = max(1e-4, len(alpha) * torch.finfo(coordinates.dtype).eps)
    fits = bool((alpha >= -1e-6).all()) and abs(float(alpha.sum()) - 1) <= error
    shown = f"a minimum of {float(alpha.min()):.3g} and sum {float(alpha.sum()):.6g}"  # the others may be private
    check(fits, "coordinates (alpha)", "at least 0 with sum 1", shown, "project them with project_simplex")
    check(num_points is None or num_points >= 1, "num_points (n)", "at least 1", num_points)
    check_at_least("num_iterations", num_iterations, 1)
