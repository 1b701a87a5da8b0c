"""Refine uncertain class probabilities: neighbours are alike, and each class has its share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import scipy.sparse.linalg
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.checks import check, check_at_least, check_between
from fedlit.functional.checks import check_entries, check_finite, check_samples, check_shape
from fedlit.functional.discriminant import MIN_PRIOR, linear_discriminant

_FLOOR = 1e-12
"""Least probability: a class that a prediction rules out could get no share, however the others are scaled."""

_CHUNK = 1024
"""Samples whose cosines with all are in memory at a time."""

_DENSE = 2000
"""Samples from which on labels spread further, see benchmarks/refine.py (sizes)."""

_MANY = 20_000
"""Samples beyond which the nearest ones are looked for in near cells, in leading directions first; and at a time."""

_DIRECTIONS, _CANDIDATES = 128, 40
"""Leading directions, and samples that are nearest in these, of which the nearest ones are taken."""

_GATHERED = 64 * _CANDIDATES
"""Candidates whose features are in memory at a time."""

_CELLS, _REACH = 256, 5
"""Cells of many samples, and the part of all samples (a fifth) among which those of a cell look for the nearest."""

_SHRINKAGE = 0.5
"""Of the covariance of Gaussian classes, whose labels are guesses."""


def normal_scores(x: Tensor) -> Tensor:
    r"""Scores of each feature by rank: the quantiles of a standard normal distribution, shape (n, d).

    .. math:: z_{ij} = \Phi^{-1}\!\left(\frac{r_{ij}}{n + 1}\right)

    with the rank r of a value within its feature, from 1; equal values share their mean rank, so a constant feature
    becomes 0. See van der Waerden, Order tests for the two-sample problem and their power, 1952.

    Args:
        x: Samples, shape (n, d), at least one.
    """
    check_samples("x", x)
    check(len(x) > 0 and not bool(x.isnan().any()), "x", "of at least 1 sample and no NaN", tuple(x.shape))
    ranks = scipy.stats.rankdata(x.detach().cpu().numpy(), axis=0)
    scores: Tensor = torch.special.ndtri(torch.from_numpy(ranks / (len(x) + 1))).to(x)
    return scores


def neighbour_graph(x: Tensor, num_neighbors: int = 5) -> scipy.sparse.csr_array:
    """Neighbourhoods by angle: symmetric weights, shape (n, n), sparse, float64.

    That of two samples, one of which is among the nearest of the other, is their cosine to the power of 3, and at least
    0. Beyond 20,000 samples, the nearest are those of the 40 (or 8 ``num_neighbors``) that are nearest in the 128
    directions in which the samples are longest, looked for in the fifth of all samples whose cells (256, by k-means)
    are nearest to one's own.

    Args:
        x: Samples, shape (n, d).
        num_neighbors: Nearest others that a sample is tied to, from 1 to n - 1; it may be one of the nearest of more.
    """
    check_samples("x", x)
    check_between("num_neighbors", num_neighbors, 1, len(x) - 1, "give more samples")
    check_finite("x", x)
    if len(x) <= _MANY:
        points = F.normalize(x.detach().double(), dim=1)
        nearest = [_nearest(points, first, num_neighbors) for first in range(0, len(x), _CHUNK)]
    else:
        # float32 would lose the ends of float64's range before they have length 1
        points = torch.cat([F.normalize(part.double(), dim=1).float() for part in torch.split(x.detach(), _CHUNK)])
        nearest = [_nearest_in_cells(points, num_neighbors)]
    cosines, others = (torch.cat(parts).cpu().numpy() for parts in zip(*nearest, strict=True))
    ends = np.arange(0, others.size + 1, num_neighbors)
    one_way = scipy.sparse.csr_array(
        (np.maximum(cosines, 0.0).reshape(-1) ** 3, others.reshape(-1), ends), (len(x),) * 2
    )
    return scipy.sparse.csr_array(one_way.maximum(one_way.T))


def propagate_labels(graph: scipy.sparse.csr_array, p: Tensor, alpha: float = 0.7) -> Tensor:
    r"""Class probabilities, each mixed with those along the paths of a graph; shape (n, C), float64, rows sum to 1.

    .. math:: (I - \alpha S)^{-1} P, \qquad S = D^{-1/2} A D^{-1/2}

    with rows scaled to sum 1; D has the sums of the rows of A. A sample without neighbours keeps its prediction. See
    Zhou et al., Learning with local and global consistency, NeurIPS 2003.

    Args:
        graph: A, symmetric and not negative, shape (n, n), as of `neighbour_graph`.
        p: P, shape (n, C), not negative, no row all 0.
        alpha: Weight of a step along an edge, in [0, 1).
    """
    _check_probabilities(p)
    check(graph.shape == (len(p), len(p)), "graph", f"of shape (n, n) for the n = {len(p)} rows of p", graph.shape)
    check(0 <= alpha < 1, "alpha", "in [0, 1)", alpha)
    degrees = np.asarray(graph.sum(axis=1)).reshape(-1)
    root = scipy.sparse.diags_array(np.where(degrees > 0, degrees, 1.0) ** -0.5)
    system = scipy.sparse.eye_array(len(p)) - alpha * (root @ graph @ root)
    # eigenvalues are from 1 - alpha to 1 + alpha: conjugate gradients take some tens of steps, whatever n is
    columns = [_solve(system, column) for column in p.detach().double().cpu().numpy().T]
    return _rows(torch.from_numpy(np.stack(columns, axis=1)).clamp(min=0)).to(p.device)


def to_class_shares(p: Tensor, shares: Tensor, num_iterations: int = 1000, tolerance: float = 1e-9) -> Tensor:
    r"""Class probabilities nearest to ``p`` with fixed means, float64, by Sinkhorn's scaling of rows and columns.

    .. math:: \min_Q \sum_{ic} q_{ic} \log\frac{q_{ic}}{p_{ic}} \quad \text{with}\quad
              \sum_c q_{ic} = 1, \ \frac1n \sum_i q_{ic} = \pi_c

    See Cuturi, NeurIPS 2013; of labels, Asano, Rupprecht and Vedaldi, ICLR 2020.

    Args:
        p: Probabilities, shape (n, C), not negative, no row all 0; those below 1e-12 count as that.
        shares: Mean pi of each class, shape (C,), sums to 1.
        num_iterations: Maximal number of scalings of the columns.
        tolerance: Largest distance of a mean from its share at which it ends before.
    """
    _check_probabilities(p)
    check_shape("shares (pi)", shares, p.shape[1], way_out="give one per class")
    wanted = shares.double().to(p.device)
    fits = bool((wanted >= 0).all()) and abs(float(wanted.sum()) - 1) <= 1e-6
    check_entries(fits, "shares (pi)", "not negative and of sum 1", shares)
    q = _rows(p.detach().double().clamp(min=_FLOOR))
    for _ in range(num_iterations):
        means = q.mean(dim=0)
        if bool(((means - wanted).abs() <= tolerance).all()):
            break
        # where no sample has anything left of a class, there is nothing to scale
        q = _rows(q * torch.where(means > 0, wanted / means, 0.0))
    return q


def to_confidence(p: Tensor, confidence: float) -> Tensor:
    r"""Powers of class probabilities, scaled to sum 1, float64, whose mean confidence is the one asked for.

    .. math:: \frac1n\sum_i \max_c \frac{p_{ic}^k}{\sum_b p_{ib}^k} = \frac1C + \kappa \Bigl(1 - \frac1C\Bigr)

    Powers keep the order of a sample's classes, and undo what training for longer does to probabilities. Where no power
    gets there, as where classes are equally probable, the nearest one is taken.

    Args:
        p: Class probabilities, shape (n, C); no row all 0.
        confidence: kappa, in (0, 1): 0 would be equal probabilities, 1 one class alone.
    """
    _check_probabilities(p)
    check(0 < confidence < 1, "confidence (kappa)", "in (0, 1)", confidence)
    logits = p.detach().double().clamp(min=torch.finfo(torch.float64).tiny).log()
    logits = logits - logits.amax(dim=1, keepdim=True)
    wanted = (1 + confidence * (p.shape[1] - 1)) / p.shape[1]
    low, high = -12.0, 12.0  # of log k: confidence grows with it
    for _ in range(60):
        middle = (low + high) / 2
        surer = float((math.exp(middle) * logits).softmax(dim=1).amax(dim=1).mean()) > wanted
        low, high = (low, middle) if surer else (middle, high)
    return (math.exp(high) * logits).softmax(dim=1)


def adaptive_shares(p: Tensor, doubt: float = 1.0) -> Tensor:
    r"""Shares of classes, the nearer to equal ones the less confident predictions are; shape (C,), float64, sum 1.

    .. math:: (1 - \rho)\, \bar p + \rho / C, \qquad
              \rho = \min\Bigl(1, c\,\bigl(1 - \tfrac1n\sum_i \max_c p_{ic}\bigr)\Bigr)

    Args:
        p: Class probabilities, shape (n, C); rows sum to 1.
        doubt: c, at least 0; 0 trusts the mean prediction.
    """
    _check_probabilities(p)
    check_at_least("doubt (c)", doubt, 0)
    p = p.detach().double()
    rho = min(1.0, doubt * (1 - float(p.amax(dim=1).mean())))
    return (1 - rho) * p.mean(dim=0) + rho / p.shape[1]


def neighbour_agreement(classes: Tensor, graph: scipy.sparse.csr_array) -> float:
    """Share of samples, in [0, 1], whose class is the one that their neighbours are of, each by its weight.

    It estimates how often classes are right that were predicted without the neighbourhoods, as far as a sample's
    neighbours are of its true class and err apart. Samples without neighbours do not count; without any it is 0.

    Args:
        classes: Predicted classes, int64, shape (n,).
        graph: As of `neighbour_graph`, shape (n, n).
    """
    check(graph.shape == (len(classes), len(classes)), "graph", f"of shape (n, n), n = {len(classes)}", graph.shape)
    votes = torch.from_numpy(graph @ F.one_hot(classes.cpu()).double().numpy())
    there = votes.sum(dim=1) > 0
    agrees = (votes.argmax(dim=1) == classes.cpu())[there]
    return float(agrees.double().mean()) if len(agrees) else 0.0


def refine_labels(
    p: Tensor,
    features: Tensor | scipy.sparse.csr_array,
    *,
    graph: scipy.sparse.csr_array | None = None,
    num_neighbors: int = 5,
    alpha: float | None = None,
    doubt: float = 1.0,
    confidence: float = 0.5,
    with_model: bool | None = None,
) -> Tensor:
    """Class probabilities of a domain's samples, float64, by those of their neighbours and by shares of the classes.

    Predictions get the same confidence (`to_confidence`), and spread over neighbourhoods (`propagate_labels`). The
    result gives the shares of the classes (`adaptive_shares`). The predictions are scaled to these (`to_class_shares`),
    spread and scaled again.

    With a model of the domain, Gaussian classes of one covariance are fitted to the samples and their refined classes
    (`linear_discriminant`, shrinkage 0.5), in the 128 directions in which samples vary most. The mean of what they
    predict and of ``p``, both of the same confidence, is refined in place of ``p``.

    Args:
        p: Predictions, shape (n, C); rows sum to 1.
        features: Of the same samples, shape (n, d), centred, as angles are compared; or their `neighbour_graph`, and no
            model is fitted.
        graph: Neighbourhoods, if they are known or of other features; ``None`` takes the `neighbour_graph` of these.
        num_neighbors: See `neighbour_graph`; without effect where that is passed.
        alpha: See `propagate_labels`; ``None`` is 0.7, and from 2,000 samples on, whose neighbours are nearer, 0.8 with
            a model and 0.9 without.
        doubt: See `adaptive_shares`.
        confidence: See `to_confidence`.
        with_model: Whether a model takes part, which takes features; ``None`` takes one of three classes or more.
    """
    _check_probabilities(p)
    check(features.shape[0] == len(p), "features", f"of the {len(p)} samples of p", features.shape[0])
    dense = len(p) >= _DENSE
    if isinstance(features, Tensor):
        check_samples("features", features)
        graph = neighbour_graph(features, num_neighbors) if graph is None else graph
        with_model = p.shape[1] > 2 if with_model is None else with_model
    else:
        check(graph is None, "graph", "left out where features are one", "two graphs", "give features of the samples")
        check(not with_model, "with_model", "left out without features", with_model, "give features of the samples")
        graph = features
    if alpha is None:
        alpha = (0.8 if with_model else 0.9) if dense else 0.7
    confident = to_confidence(p, confidence).cpu()
    refined = _spread(confident, graph, alpha, doubt)
    if with_model:
        assert isinstance(features, Tensor)
        own = _gaussian_classes(features.cpu(), refined.argmax(dim=1), p.shape[1])
        both = (confident + to_confidence(own, confidence)) / 2
        refined = _spread(to_confidence(both, confidence), graph, alpha, doubt)
    return refined.to(p.device)


def _spread(p: Tensor, graph: scipy.sparse.csr_array, alpha: float, doubt: float) -> Tensor:
    """Probabilities by neighbours, scaled before and after to the shares of classes that neighbours have."""
    shares = adaptive_shares(propagate_labels(graph, p, alpha), doubt)
    return to_class_shares(propagate_labels(graph, to_class_shares(p, shares), alpha), shares)


def _gaussian_classes(x: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Class probabilities of samples by Gaussian classes of one covariance that are fitted to them."""
    check_finite("features", x)
    x = x.detach() / x.detach().abs().amax().clamp(min=torch.finfo(x.dtype).tiny)  # squares are finite
    mean = x.mean(dim=0, dtype=torch.float64)
    directions = _directions(x[:: -(-len(x) // _DENSE)].double() - mean, _DIRECTIONS)
    z = torch.cat([(part.double() - mean) @ directions for part in torch.split(x, _MANY)])
    known = F.one_hot(classes, num_classes).to(z)
    shares, moments = known.mean(dim=0), z.T @ known / len(z)
    within = z - (moments / shares.clamp(min=MIN_PRIOR)).T[classes]
    if float(within.square().sum()) <= _FLOOR * float(z.square().sum()):  # each class is a point
        return known
    weight, bias = linear_discriminant(z.T @ z / len(z), moments, shares, _SHRINKAGE)
    return (z @ weight.T + bias).softmax(dim=1)


def _check_probabilities(p: Tensor) -> None:
    check_shape("p", p, "n > 0", "C > 0")
    fits = bool(p.isfinite().all()) and bool((p >= 0).all()) and bool((p.sum(dim=1) > 0).all())
    check_entries(fits, "p", "class probabilities, with no row all 0", p)


def _rows(p: Tensor) -> Tensor:
    """Rows scaled to sum 1."""
    return p / p.sum(dim=1, keepdim=True)


def _leading(points: Tensor, number: int) -> Tensor:
    """Coordinates of points along the directions in which they are longest in the mean square, shape (n, number)."""
    return points if points.shape[1] <= number else points @ _directions(points, number).to(points)


def _directions(points: Tensor, number: int) -> Tensor:
    """Directions in which points are longest in the mean square, orthogonal, shape (d, number) or fewer, float64.

    Where there are fewer points than features, products of the points give them; beyond the points' rank they are 0.
    """
    if len(points) >= points.shape[1]:
        directions: Tensor = torch.linalg.eigh((points.T @ points).double())[1][:, -number:]
        return directions
    squares, combinations = (each[..., -number:] for each in torch.linalg.eigh((points @ points.T).double()))
    there = squares > _FLOOR * squares[-1]
    directions = points.T.double() @ combinations * torch.where(there, squares, torch.inf).rsqrt()
    return directions


def _nearest_in_cells(points: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """As `_nearest` for all points, but among those of near cells, and in leading directions first.

    Cells are of spherical k-means, and points of a cell are compared with those of the cells nearest to it (an inverted
    file, as of Jégou, Douze and Schmid, IEEE TPAMI 2011).
    """
    leading, wanted = _leading(points, _DIRECTIONS), min(max(_CANDIDATES, 8 * number), len(points) - 1)
    centres = F.normalize(leading[:: -(-len(points) // _CELLS)], dim=1)
    for _ in range(4):
        cells = torch.cat([(part @ centres.T).argmax(dim=1) for part in torch.split(leading, _MANY)])
        centres = F.normalize(torch.zeros_like(centres).index_add_(0, cells, leading), dim=1)
    sizes = torch.bincount(cells, minlength=len(centres))
    members = torch.split(cells.argsort(stable=True), sizes.tolist())
    order = (centres @ centres.T).argsort(dim=1, descending=True, stable=True)
    found = torch.empty(len(points), number, dtype=torch.int64, device=points.device)
    cosines = torch.empty(len(points), number, dtype=torch.float64, device=points.device)
    for cell, rows in enumerate(members):
        enough = sizes[order[cell]].cumsum(dim=0) >= max(len(points) // _REACH, wanted + 1)
        near = order[cell, : int(enough.double().argmax()) + 1].tolist()
        others = torch.cat([rows, *(members[each] for each in near if each != cell)])
        there = leading[others]  # the cell's own first
        for first in range(0, len(rows), _CHUNK):
            own, (_, nearest) = rows[first : first + _CHUNK], _nearest(there, first, wanted, len(rows))
            cosines[own], found[own] = _nearest_of(points, own, others[nearest], number)
    return cosines, found


def _nearest_of(points: Tensor, rows: Tensor, candidates: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """As `_nearest` for some points, among candidates alone, shape (rows, candidates); cosines in float64."""
    found = []
    size = max(1, _GATHERED // candidates.shape[1])
    for own, others in zip(torch.split(points[rows], size), torch.split(candidates, size), strict=True):
        near = others.gather(1, torch.einsum("nd,ncd->nc", own, points[others]).topk(number).indices)
        found.append((torch.einsum("nd,ncd->nc", own.double(), points[near].double()), near))
    cosines, others = (torch.cat(parts) for parts in zip(*found, strict=True))
    return cosines, others


def _nearest(points: Tensor, first: int, number: int, end: int | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and indices of the points nearest to each of a chunk, itself left out; points have length 1."""
    chunk = points[first:end][:_CHUNK]
    cosines = chunk @ points.T
    rows = torch.arange(len(chunk), device=points.device)
    cosines[rows, first + rows] = -torch.inf
    nearest = cosines.topk(number)
    return nearest.values, nearest.indices


def _solve(system: Any, right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    solution: npt.NDArray[np.float64] = scipy.sparse.linalg.cg(system, right, rtol=1e-12, atol=0.0)[0]
    return solution
