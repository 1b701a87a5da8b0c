"""Optimal transport between labelled samples.

All samples weigh the same unless weights are passed. A plan pi between n and m samples has shape (n, m), rows that sum
to 1/n (or to the weights) and columns to 1/m. Plans are computed exactly (`ot.emd`), or with an entropic penalty, in
float64 (FedDaDiL: Montesuma et al. 2024; "adaptive" costs are from its code). Gradients take plans as constants: that
is the gradient of the transport cost wherever it has one.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch
from torch import Tensor

from fedlit.checks import check, check_positive, refuse
from fedlit.functional.checks import check_entries, check_finite, check_pair, check_shape
from fedlit.functional.kernels import squared_distances

LabelCost = float | Literal["adaptive"]
"""Weight beta of labels in a cost: a number, or the largest squared distance of features, which lets a plan join
samples of different classes only where it has to."""


def check_label_cost(label_cost: LabelCost) -> None:
    """Refuse a weight beta of labels that is negative, not finite, or a string other than ``"adaptive"``."""
    fits = label_cost == "adaptive" or (not isinstance(label_cost, str) and 0 <= label_cost < math.inf)
    check(fits, "label_cost (beta)", "at least 0 and finite, or 'adaptive'", label_cost)


def check_entropy(entropy: float | None) -> None:
    """Refuse a weight of the entropy that is not positive and finite; ``None`` is exact transport."""
    if entropy is not None:
        check_positive("entropy", entropy, "or take None for exact transport")


def joint_cost(
    x: Tensor, x2: Tensor, y: Tensor | None = None, y2: Tensor | None = None, label_cost: LabelCost = "adaptive"
) -> Tensor:
    r"""Cost of moving each sample to each other, by features and labels, shape (n, m), float64 (FedDaDiL, equation 6).

    .. math:: C_{ij} = \|x_i - x'_j\|_2^2 + \beta \|y_i - y'_j\|_2^2

    Args:
        x: Samples, shape (n, d).
        x2: Samples, shape (m, d).
        y: Class probabilities of ``x``, shape (n, C); ``None`` leaves labels out.
        y2: Class probabilities of ``x2``, shape (m, C).
        label_cost: beta, at least 0. ``"adaptive"`` is a constant for the gradient, but another one in each call.
    """
    check_labelled_pair(x, x2, y, y2)
    return add_label_cost(squared_distances(x, x2), y, y2, label_cost)


def balanced_weights(y: Tensor) -> Tensor:
    r"""Weights of samples with which all occurring classes weigh the same, shape (n,), float64, with sum 1.

    .. math:: w_i = \frac{1}{|\{c : m_c > 0\}|} \sum_{c : m_c > 0} \frac{y_{ic}}{m_c}, \qquad m_c = \sum_i y_{ic}

    Args:
        y: Class probabilities, shape (n, C).
    """
    check_shape("y", y, "n > 0", "C")
    check_entries(bool((y.isfinite() & (y >= 0)).all()) and bool(y.any()), "y", "class probabilities", y)
    shares = y.double()[:, y.any(dim=0)]
    return (shares / shares.sum(dim=0)).mean(dim=1)


@torch.no_grad()
def nearest_class_mean(x: Tensor, x2: Tensor, y2: Tensor) -> Tensor:
    """Class of the nearest class mean of labelled samples, shape (n,), int64.

    Args:
        x: Samples, shape (n, d).
        x2: Labelled samples, shape (m, d).
        y2: Their class probabilities, shape (m, C). A class without samples is never the nearest.
    """
    check_labelled_pair(x, x2, None, None)
    check_labelled_pair(x2, x2, y2, y2)
    mass = y2.sum(dim=0)
    means = y2.T.to(x2.dtype) @ x2 / mass.clamp(min=torch.finfo(mass.dtype).tiny)[:, None]
    return squared_distances(x, means).masked_fill(mass == 0, math.inf).argmin(dim=1)


def transport_plan(cost: Tensor, entropy: float | None = None, weights: Tensor | None = None) -> Tensor:
    """Plan of minimal cost between samples, shape (n, m), float64, without a graph.

    Args:
        cost: Shape (n, m).
        entropy: ``None`` is exact, on the CPU, with at most n + m - 1 entries other than 0. A positive number is the
            weight of the entropy in units of the largest cost (Sinkhorn, in the log domain), on the device of ``cost``.
        weights: Of the rows, shape (n,), positive, with sum 1; ``None`` are equal ones. Columns weigh the same.
    """
    import ot  # takes a second, which methods without transport can do without

    costs = cost.detach().double()
    check_shape("cost", costs, "n > 0", "m > 0")
    check_finite("cost", costs)
    rows, columns = (torch.full((size,), 1 / size, dtype=torch.float64, device=cost.device) for size in costs.shape)
    if weights is not None:
        rows = weights.detach().double()
        check_shape("weights", rows, len(costs), way_out="give one per row of cost")
        fits = bool((rows > 0).all()) and abs(float(rows.sum()) - 1) <= 1e-6
        check_entries(fits, "weights", "positive with sum 1", rows)
        rows = rows / rows.sum()  # exactly the mass of the columns, however they were rounded
    if entropy is None:
        plan = ot.emd(*(each.cpu().numpy() for each in (rows, columns, costs)), numItermax=1_000_000)
        return torch.from_numpy(plan).to(cost.device)
    check_entropy(entropy)
    scale = float(costs.max()) or 1.0
    entropic: Tensor = ot.sinkhorn(
        rows, columns, costs / scale, reg=entropy, method="sinkhorn_log", numItermax=2000, warn=False
    )
    error = float((entropic.sum(dim=0) / columns - 1).abs().max())
    if error > 0.01:
        warnings.warn(
            f"Sinkhorn's iterations have not converged: a column's weight is off by {error:.1%}, with "
            f"entropy={entropy}; raise it, or take None for exact transport",
            stacklevel=2,
        )
    return entropic


def joint_ot_loss(
    x: Tensor,
    x2: Tensor,
    y: Tensor | None = None,
    y2: Tensor | None = None,
    label_cost: LabelCost = "adaptive",
    entropy: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Minimal cost of transport between two samples, T_c with labels and T_2 without: a scalar, with a constant plan.

    See FedDaDiL, equations 4, 6 and 11.

    Args:
        x: As for `joint_cost`.
        x2: As for `joint_cost`.
        y: As for `joint_cost`.
        y2: As for `joint_cost`.
        label_cost: As for `joint_cost`.
        entropy: Of the plan, see `transport_plan`; the loss is its cost, without the entropy.
        weights: Of the samples in ``x``, shape (n,), see `transport_plan`.
    """
    cost = joint_cost(x, x2, y, y2, label_cost)
    return (transport_plan(cost, entropy, weights) * cost).sum().to(x.dtype)


def barycentric_mapping(plan: Tensor, x2: Tensor) -> Tensor:
    r"""Image of each sample under a plan: T(x_i) = n \sum_j \pi_{ij} x'_j, shape (n, d) (FedDaDiL, equation 3).

    Args:
        plan: Shape (n, m), with rows that sum to 1/n.
        x2: Samples at which it ends, shape (m, d).
    """
    return (len(plan) * plan.to(x2.dtype)) @ x2


def project_simplex(v: Tensor) -> Tensor:
    """Nearest point of the probability simplex, for each row, computed in float64 (Duchi et al., ICML 2008, figure 1).

    Args:
        v: Shape (..., k), finite.
    """
    fits = v.dim() > 0 and v.shape[-1] > 0 and bool(v.isfinite().all())
    check_entries(fits, "v", "finite, with a last dimension of at least 1", v)
    exact = v.double()
    ordered = exact.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(dim=-1) - 1
    rank = torch.arange(1, v.shape[-1] + 1, dtype=torch.float64, device=v.device)
    support = (ordered * rank > excess).sum(dim=-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support
    return (exact - threshold).clamp_min(0).to(v.dtype)


def add_label_cost(cost: Tensor, y: Tensor | None, y2: Tensor | None, label_cost: LabelCost) -> Tensor:
    """Add costs by labels to those by features, if both sides have labels."""
    if y is None or y2 is None:
        return cost
    check_label_cost(label_cost)
    weight = float(cost.detach().max()) if isinstance(label_cost, str) else label_cost
    return cost + weight * squared_distances(y, y2)


def check_labelled_pair(x: Tensor, x2: Tensor, y: Tensor | None, y2: Tensor | None) -> None:
    """Refuse samples of different features, and labels that are not a row per sample on both sides or neither."""
    check_pair(x, x2, ("x", "x2"), symbol="d")
    if y is not None and y2 is not None:
        check_shape("y", y, len(x), "C", way_out="give a row of class probabilities per sample")
        check_shape("y2", y2, len(x2), y.shape[1])
    elif y is not y2:
        refuse("y", "of both samples or of neither", "labels of one", "those without are compared by features")
