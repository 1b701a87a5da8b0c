"""Arguments that functions refuse, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import eye, ones, tensor, zeros

from fedlit import functional as fn
from fedlit.functional.set_union import read_union, union_table
from refused import refused

NAN, INF = math.nan, math.inf
UPDATE, LONGER, OTHER = {"a": ones(2)}, {"a": ones(3)}, {"b": ones(2)}
X, Y = eye(4), ones(4, 3) / 3
GAUSSIAN = partial(fn.gaussian_kernel, bandwidth=1.0)
OMEGA = fn.sample_frequencies(4, 3, 1.0)
PAIR = ones(5, 3) * torch.arange(5.0)[:, None], torch.arange(12.0).view(4, 3).sin()
SUMS = {"second_moment": 4 * eye(3), "class_sums": ones(3, 2), "class_counts": ones(2), "target": PAIR[1]}
ROTATION = torch.linalg.qr(torch.arange(36.0).view(6, 6).sin()).Q


def basis(width: int) -> torch.Tensor:
    return ROTATION[:, :width]


def tca(method: Callable[..., Any] = fn.tca, **changed: Any) -> Any:
    given = {"xs": PAIR[0], "xt": PAIR[1], "num_components": 1, "gamma": 1.0, "kernel": GAUSSIAN} | changed
    if method is fn.rf_tca:
        given["frequencies"] = OMEGA
        del given["kernel"]
    return method(**given)


def jda(**changed: Any) -> Any:
    given = {"xs": PAIR[0], "ys": torch.arange(5) % 2, "xt": PAIR[1], "num_components": 1}
    return fn.jda(**(given | changed))


def jda_sums(**changed: Any) -> Any:
    return fn.jda_from_sums(**({"num_components": 1} | SUMS | changed))


def barycenter(supports: Any = (X,), labels: Any = None, coordinates: Any = None, **changed: Any) -> Any:
    alpha = ones(len(supports)) / max(len(supports), 1) if coordinates is None else coordinates
    return fn.wasserstein_barycenter(supports, labels, alpha, **changed)


def scores(target: torch.Tensor = ones(3), ridge: float = 0.1) -> Any:  # noqa: B008
    return fn.importance_weighted_scores(fn.SourceMoments.of(ones(2, 3), ones(2)), target, ridge)


BATCH = {"a": ones(2)}
EMPTY_SUMS = fn.RandomFeatureSums(zeros(8, 8), zeros(8), 0)
SOME_SUMS, WIDER_SUMS = (fn.random_feature_sums([PAIR[0]], fn.sample_frequencies(n, 3, 1.0)) for n in (4, 5))

REFUSED: list[tuple[str, Callable[[], Any]]] = [
    # adversarial
    ("source_logits", lambda: fn.domain_adversarial_loss([], zeros(2))),
    ("weights", lambda: fn.domain_loss(zeros(2), True, ones(3))),
    *(("progress", partial(f, 1.1)) for f in (fn.reversal_weight, fn.annealing)),
    ("points", lambda: fn.gradient_penalty(torch.sum, zeros(3))),
    ("features", lambda: fn.multilinear_map(zeros(2), zeros(2, 2))),
    ("probabilities", lambda: fn.multilinear_map(zeros(2, 3), zeros(3, 2))),
    # aggregation and updates
    ("updates", lambda: fn.fedavg([])),
    ("updates", lambda: fn.fedavg([UPDATE, LONGER])),
    *(("weights", partial(fn.fedavg, [UPDATE] * 2, w)) for w in ([1, -0.5], [0, 0], [1], ones(2, 1))),
    ("sources", lambda: fn.fedda(UPDATE, [], 0.5)),
    ("updates", lambda: fn.fedgp(UPDATE, [UPDATE, OTHER], 0.5)),
    *(("beta", partial(rule, UPDATE, [UPDATE], NAN)) for rule in (fn.fedda, fn.fedgp)),
    ("granularity", lambda: fn.fedgp(UPDATE, [UPDATE], 0.5, granularity="block")),  # type: ignore[arg-type]
    ("norms_squared", lambda: fn.projection_coefficients(ones(1), -ones(1))),
    ("inner", lambda: fn.projection_coefficients(ones(2), ones(1))),
    ("coefficients", lambda: fn.scale_layers(UPDATE, ones(2))),
    # alignment
    ("other", lambda: fn.alignment_loss(zeros(4, 3), zeros(4))),
    # auto-weighting
    ("target_variance", lambda: fn.auto_weights(-1.0, 1.0)),
    ("distance", lambda: fn.auto_weights(1.0, tensor([1.0, INF]))),
    ("rule", lambda: fn.auto_beta([BATCH] * 2, [BATCH], "median")),  # type: ignore[arg-type]
    ("sources", lambda: fn.auto_beta([BATCH] * 2, [])),
    ("count", lambda: fn.auto_beta([BATCH], [BATCH])),
    # calibration
    ("labels", lambda: fn.fit_temperature(ones(4, 3), zeros(3).long())),
    *(("labels", partial(fn.fit_temperature, ones(4, 3), labels)) for labels in (3 * ones(4).long(), -ones(4).long())),
    ("labels", lambda: fn.brier_score(ones(4, 3), ones(4))),
    ("logits", lambda: fn.fit_temperature(tensor([[NAN, 1.0]]), zeros(1).long())),
    ("logits", lambda: fn.losses_at(ones(0, 3), zeros(0).long(), fn.temperature_grid())),
    ("number", lambda: fn.temperature_grid(2)),
    ("losses", lambda: fn.best_temperature(fn.temperature_grid(), zeros(40))),
    ("costs", lambda: fn.decide(ones(4, 3), zeros(2, 2))),
    # clustering
    ("num_clusters", lambda: fn.k_means(zeros(3, 2), 4)),
    ("x", lambda: fn.k_means(zeros(3), 1)),
    ("clusters", lambda: fn.k_means(zeros(3, 2), 2, zeros(2).long())),
    ("clusters", lambda: fn.relative_scatter(zeros(3, 2), zeros(3))),
    # correlation and CORAL's map
    *(("moments", partial(fn.central_moments, ones(number))) for number in (1, 4)),
    ("y", lambda: fn.coral_loss(X, X[:1])),
    ("center", lambda: fn.second_moments(X, ones(2))),
    ("target_covariance", lambda: fn.coral_map(eye(3), eye(4))),
    *(("reg", partial(fn.coral_map, eye(3), eye(3), reg)) for reg in (-1.0, "none")),
    ("source_covariance", lambda: fn.coral_map(ones(3, 3), eye(3), 0.0)),
    # linear classifiers
    ("second_moment", lambda: fn.linear_discriminant(ones(4, 3), ones(4, 2), ones(2))),
    ("priors", lambda: fn.linear_discriminant(eye(4), ones(4, 2), ones(3))),
    ("class_moments", lambda: fn.linear_discriminant(eye(4), ones(4), ones(2))),
    *(("shrinkage", partial(fn.linear_discriminant, eye(4), ones(4, 2), ones(2), s)) for s in (0.0, 1.1)),
    ("second_moment", lambda: fn.linear_discriminant(eye(2) / 2, eye(2) / 2, ones(2) / 2)),  # classes without spread
    ("y", lambda: fn.softmax_regression(X, Y[:3])),
    ("penalty", lambda: fn.softmax_regression(X, Y, 0.0)),
    # losses of logits, and of pairs
    ("logits", lambda: fn.uniform_cross_entropy(zeros(3))),
    ("logits", lambda: fn.information_maximisation_loss(zeros(2, 0))),
    ("logits", lambda: fn.minimax_entropy_loss(zeros(3))),
    ("probabilities", lambda: fn.group_discrepancy(zeros(1, 3, 2), torch.tensor([True]))),
    ("first", lambda: fn.group_discrepancy(zeros(2, 3, 2), torch.tensor([True, True]))),
    ("first", lambda: fn.group_discrepancy(zeros(2, 3, 2), torch.tensor([1, 0]))),
    ("distances", lambda: fn.centroid_weights(torch.tensor([1.0, -1.0]), 0.1)),
    ("distances", lambda: fn.centroid_weights(zeros(0), 0.1)),
    ("temperature", lambda: fn.centroid_weights(ones(2), 0.0)),
    ("joint", lambda: fn.mutual_information_bound(zeros(2, 1), zeros(2))),
    ("gradient", lambda: fn.loss_from_gradient(ones(2, 3), ones(2, 1))),
    # subspaces
    ("source_basis", lambda: fn.geodesic_flow_kernel(basis(2), basis(3))),
    ("source_basis", lambda: fn.geodesic_flow_kernel(basis(4), basis(4))),
    ("source_basis", lambda: fn.geodesic_flow_factor(2 * basis(2), basis(2))),
    ("target_basis", lambda: fn.geodesic_flow_factor(basis(2), zeros(6))),
    ("num_axes", lambda: fn.principal_axes(torch.arange(12.0).view(4, 3).sin(), 5)),
    # kernels and random features
    ("bandwidth", lambda: fn.cauchy_kernel(X, X, 0.0)),
    ("y", lambda: fn.gaussian_kernel(X, X[:, :2], 1.0)),
    ("x", lambda: fn.laplace_kernel(X[0], X, 1.0)),
    ("num", lambda: fn.sample_frequencies(0, 2, 1.0)),
    ("kernel", lambda: fn.sample_frequencies(2, 2, 1.0, "rbf")),  # type: ignore[arg-type]
    ("frequencies", lambda: fn.random_fourier_features(ones(5, 2), OMEGA)),
    ("x", lambda: fn.random_fourier_features(ones(3), OMEGA)),
    # discrepancies
    ("x", lambda: fn.mmd_squared(X[:1], X, 1.0)),
    ("aligner", lambda: fn.rff_mmd_squared(ones(4), ones(4), ones(6, 2))),
    ("num_kernels", lambda: fn.kernel_ladder(X, 2 * X, num_kernels=0)),
    ("factor", lambda: fn.kernel_ladder(X, 2 * X, factor=1.0)),
    ("middle", lambda: fn.kernel_ladder(ones(3, 2), ones(2, 2))),
    *(("bandwidths", partial(fn.multi_kernel_mmd, X, X, widths)) for widths in ([], [1.0, 0.0])),
    ("frequencies", lambda: fn.mixture_frequencies(OMEGA, [1.0, 2.0, 3.0])),
    # mixtures
    ("means", lambda: fn.mixture_variance(zeros(3), zeros(3), ones(3))),
    ("variances", lambda: fn.mixture_variance(zeros(2, 1), tensor([[1.0], [-2.0]]), ones(2))),
    ("weights", lambda: fn.mixture_variance(zeros(2, 1), ones(2, 1), zeros(2))),
    # knowledge of several sources
    *(("gate", partial(vote, X[None], 1.0)) for vote in (fn.knowledge_vote, fn.consensus_focus, fn.confident_votes)),
    ("probabilities", lambda: fn.knowledge_vote(X, 0.9)),
    ("rule", lambda: fn.consensus_focus(X[None], 0.9, "mean")),  # type: ignore[arg-type]
    ("probabilities", lambda: fn.consensus_focus(ones(17, 1, 1), 0.5, "shapley")),
    ("probabilities", lambda: fn.between_class_variance(zeros(0, 3))),
    ("mixup", lambda: fn.mixup(X, X, -1.0)),
    ("logits", lambda: fn.hard_vote(zeros(3, 4))),
    # refinement
    ("x", lambda: fn.normal_scores(zeros(0, 3))),
    ("num_neighbors", lambda: fn.neighbour_graph(eye(3), 3)),
    *(
        (argument, partial(lambda p, alpha: fn.propagate_labels(fn.neighbour_graph(eye(3), 1), p, alpha), p, alpha))
        for argument, p, alpha in (
            ("graph", ones(4, 2), 0.5),
            ("alpha", ones(3, 2), 1.0),
            ("p", tensor([[1.0, 0], [0, 0], [1, 1]]), 0.5),
        )
    ),
    *(("shares", partial(fn.to_class_shares, Y, tensor(s))) for s in ([0.5, 0.5], [0.6, 0.6, -0.2], [0.5, 0.4, 0.2])),
    ("doubt", lambda: fn.adaptive_shares(Y, -1)),
    *(("confidence", partial(fn.to_confidence, Y, confidence)) for confidence in (0.0, 1.0)),
    # scores
    ("num_classes", lambda: fn.certainty_score(0.0, 1)),
    ("probabilities", lambda: fn.soft_neighbourhood_density(ones(2, 2))),
    ("temperature", lambda: fn.soft_neighbourhood_density(ones(3, 2), 0.0)),
    ("target", lambda: scores(ones(2))),
    ("ridge", lambda: scores(ridge=0.0)),
    ("logits", lambda: fn.calibrated_information(ones(0, 3), 1.0)),
    ("num_neighbours", lambda: fn.nearest_neighbours(ones(5, 2), 5)),
    ("neighbours", lambda: fn.neighbourhood_information(ones(3).long(), ones(2, 1).long(), 2)),
    ("size", lambda: fn.feature_hash(ones(2, 3), 0)),
    ("counts", lambda: fn.class_mean_match(*2 * (ones(2, 3), ones(3)))),
    # tables
    ("total", lambda: read_union(union_table([str(number).encode() for number in range(400)], 32), 32)),
    ("elements", lambda: union_table([b"x" * 63], 32)),
    # Taylor moments
    *(
        (argument, partial(fn.taylor_mmd_squared, x, y, alpha, degree, center, within))  # type: ignore[arg-type]
        for argument, x, y, alpha, degree, center, within in (
            ("degree", X, X, 0.1, 4, None, "exact"),
            ("center", X, X, 0.1, 2, -1.0, "exact"),
            ("within", X, X, 0.1, 2, None, "near"),
            ("x", X[:1], X, 0.1, 2, None, "exact"),
            ("y", X, X[:, :2], 0.1, 2, None, "exact"),
        )
    ),
    ("num_features", lambda: fn.num_taylor_moments(0, 2)),
    ("moments", lambda: fn.pair_with_kernel(ones(20), 4, (1.0, 1.0, 1.0))),
    ("other", lambda: fn.mean_squared_distance(ones(21), ones(20), 4, 2)),
    ("x", lambda: fn.exact_within_domain_mean(ones(1, 2), 1.0)),
    # transfer components
    *(("num_components", partial(tca, method, num_components=9)) for method in (fn.tca, fn.r_tca, fn.rf_tca)),
    ("gamma", lambda: tca(fn.rf_tca, gamma=0.0)),
    ("xt", lambda: tca(fn.r_tca, xt=PAIR[1] / 0)),
    ("num_components", lambda: tca(xs=ones(3, 2), xt=ones(4, 2))),  # rank 0
    ("scaling", lambda: tca(scaling="none")),
    ("xt", lambda: tca(xt=PAIR[1][:0])),
    ("xs", lambda: tca(xs=PAIR[0][0])),
    ("kernel", lambda: tca(kernel=lambda x, y: x.sum(dim=1))),
    ("target", lambda: fn.rf_tca_from_sums(SOME_SUMS, EMPTY_SUMS, 1, 1.0)),
    ("total", lambda: SOME_SUMS + WIDER_SUMS),
    ("batches", lambda: fn.random_feature_sums([], OMEGA)),
    # joint distributions
    ("num_components", lambda: jda(num_components=4)),
    ("num_iterations", lambda: jda(num_iterations=0)),
    ("labelling", lambda: jda(labelling="vote")),
    ("second_moment", lambda: jda_sums(second_moment=eye(4))),
    ("class_counts", lambda: jda_sums(class_counts=zeros(2))),
    # transport
    ("x2", lambda: fn.joint_cost(X, X[:, :3])),
    ("y", lambda: fn.joint_cost(X, X, Y)),
    ("label_cost", lambda: fn.joint_cost(X, X, Y, Y, "fixed")),  # type: ignore[arg-type]
    ("cost", lambda: fn.transport_plan(tensor([[NAN]]))),
    ("entropy", lambda: fn.transport_plan(X, 0.0)),
    ("weights", lambda: fn.transport_plan(X, weights=ones(4))),
    ("y", lambda: fn.balanced_weights(-Y)),
    ("y", lambda: fn.nearest_class_mean(X, X, Y[:2])),
    ("v", lambda: fn.project_simplex(tensor([INF]))),
    ("supports", lambda: barycenter([])),
    ("labels", lambda: barycenter(labels=[5 * ones(4, 2)])),
    *(("coordinates", partial(barycenter, [X, X], coordinates=a)) for a in (ones(1), ones(2), tensor([1.5, -0.5]))),
    ("num_iterations", lambda: barycenter(num_iterations=0)),
    ("init", lambda: barycenter(num_points=3, init=(X, None))),
]


@pytest.mark.parametrize(("argument", "call"), REFUSED)
def test_bad_arguments_are_refused_by_name(argument: str, call: Callable[[], Any]) -> None:
    with refused(argument):
        call()


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: fn.coral_loss(X.long(), X)),
        ("ys", lambda: jda(ys=zeros(5))),
        ("xs", lambda: tca(xs=PAIR[0].long())),
        ("logits", lambda: fn.hard_vote(zeros(2, 3, 4).long())),
    ],
)
def test_other_types_of_numbers_are_refused(argument: str, call: Callable[[], Any]) -> None:
    with refused(argument, TypeError):
        call()


def test_errors_do_not_show_private_coordinates() -> None:
    with refused("coordinates") as caught:
        barycenter([X, X], coordinates=tensor([0.12345, 0.57655]))
    assert "0.5765" not in f"{caught.value} {vars(caught.value)}"
