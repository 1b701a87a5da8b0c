"""Ranks, neighbourhoods, propagation and class shares: against scipy, scikit-learn, POT, and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import ot
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import norm
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor

from fedlit import functional as fn
from fedlit.checks import ArgumentError
from fedlit.functional import refinement


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def predictions(n: int = 40, num_classes: int = 3, seed: int = 1) -> Tensor:
    return (2 * normal(n, num_classes, seed=seed)).softmax(dim=1)


def clusters(n: int = 60, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Three directions of samples, and the direction of each."""
    labels = torch.arange(n) % 3
    return F.one_hot(labels, 8).double() * 5 + normal(n, 8, seed=seed), labels


def test_normal_scores_by_hand_and_equal_values_share_a_rank() -> None:
    x = torch.tensor([[3.0, 7.0], [1.0, 7.0], [3.0, 7.0], [9.0, 7.0]])
    expected = norm.ppf(np.array([2.5, 1, 2.5, 4]) / 5)
    found = fn.normal_scores(x)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)
    assert found[:, 1].tolist() == [0.0] * 4


def test_a_graph_has_cosines_to_the_third_of_all_that_are_near_one_way_or_the_other() -> None:
    x, k = normal(25, 4), 3
    cosines = cosine_similarity(x.numpy())
    near = cosines - 2 * np.eye(25)
    chosen = np.zeros((25, 25), bool)
    for i, row in enumerate(near):
        chosen[i, np.argsort(-row)[:k]] = True
    expected = np.where(chosen | chosen.T, np.maximum(cosines, 0) ** 3, 0)
    found = fn.neighbour_graph(x, k).toarray()
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert (found == found.T).all()
    assert (np.diag(found) == 0).all()
    np.testing.assert_allclose(fn.neighbour_graph(7 * x, k).toarray(), found)


@pytest.mark.parametrize(("width", "part", "least"), [(8, 1, 1.0), (128, 1, 1.0), (300, 1, 0.97), (128, 5, 0.98)])
def test_many_samples_find_their_neighbours_in_leading_directions_and_near_cells(
    width: int, part: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = clusters(1100)[0] @ normal(8, width, seed=4) + normal(1100, width, seed=5)  # two chunks
    exact = fn.neighbour_graph(x)
    monkeypatch.setattr(refinement, "_MANY", 100)
    monkeypatch.setattr(refinement, "_REACH", part)
    found = fn.neighbour_graph(x)
    assert (found.diagonal() == 0).all()
    both = (exact > 0).multiply(found > 0)
    assert both.sum() >= least * (exact > 0).sum()
    np.testing.assert_allclose((found - exact).multiply(both).data, 0, atol=1e-6)
    assert (found != found.T).nnz == 0


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_many_samples_of_any_length_have_neighbours(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = clusters(300)[0]
    exact = fn.neighbour_graph(scale * x)
    monkeypatch.setattr(refinement, "_MANY", 100)
    monkeypatch.setattr(refinement, "_REACH", 1)
    np.testing.assert_allclose((fn.neighbour_graph(scale * x) - exact).toarray(), 0, atol=1e-6)


@pytest.mark.parametrize("kind", ["one point", "no length", "two points"])
def test_many_samples_that_are_alike_have_as_many_neighbours(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are in one cell, or two, and the other cells are empty."""
    x = torch.ones(700, 3) if kind == "one point" else torch.zeros(700, 3)
    if kind == "two points":
        x[:350, 0], x[350:, 1] = 1.0, 1.0
    monkeypatch.setattr(refinement, "_MANY", 100)
    found = fn.neighbour_graph(x)
    assert (found.diagonal() == 0).all()
    same = (x @ x.T > 0).numpy()
    np.testing.assert_allclose(found.toarray(), same * (found.toarray() > 0), atol=1e-6)
    assert (np.asarray((found > 0).sum(axis=1)) >= 5 * same.any(axis=1)).all()


def test_of_few_candidates_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(30, 4)
    exact = fn.neighbour_graph(x, 29)
    monkeypatch.setattr(refinement, "_MANY", 1)
    np.testing.assert_allclose(fn.neighbour_graph(x, 29).toarray(), exact.toarray(), atol=1e-6)


def test_samples_at_right_angles_and_zeros_are_nobodys_neighbours() -> None:
    x = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, 0], [2, 0]])
    found = fn.neighbour_graph(x, 1).toarray()
    assert found[0, 4] == found[4, 0] == pytest.approx(1)
    assert found.sum() == pytest.approx(2)


def test_propagation_solves_the_dense_system() -> None:
    graph, p, alpha = fn.neighbour_graph(normal(40, 3), 4), predictions(), 0.7
    weights = graph.toarray()
    degrees = weights.sum(axis=1)
    walk = weights / np.sqrt(np.outer(degrees, degrees))
    expected = np.linalg.solve(np.eye(40) - alpha * walk, p.numpy())
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(fn.propagate_labels(graph, p, alpha), expected, atol=1e-10)


def test_class_shares_are_those_of_the_transport_plan_of_pot() -> None:
    p, shares = predictions(), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    plan = ot.sinkhorn(np.full(40, 1 / 40), shares.numpy(), -p.log().numpy(), reg=1.0, stopThr=1e-13)
    found = fn.to_class_shares(p, shares)
    np.testing.assert_allclose(found, 40 * plan, atol=1e-7)
    torch.testing.assert_close(found.mean(dim=0), shares, atol=1e-8, rtol=0)


def test_class_shares_that_are_met_or_nobodys() -> None:
    p = predictions()
    torch.testing.assert_close(fn.to_class_shares(p, p.mean(dim=0)), p)
    even = torch.cat([p, p[:, [1, 2, 0]], p[:, [2, 0, 1]]])
    torch.testing.assert_close(fn.to_class_shares(even, torch.full((3,), 1 / 3)), even)
    without = fn.to_class_shares(p, torch.tensor([0.5, 0.5, 0.0]))
    assert (without[:, 2] == 0).all()
    torch.testing.assert_close(without.sum(dim=1), torch.ones(40, dtype=torch.float64))


def test_a_class_that_predictions_rule_out_gets_its_share_all_the_same() -> None:
    p = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    torch.testing.assert_close(fn.to_class_shares(p, torch.tensor([0.5, 0.5])), torch.full((2, 2), 0.5).double())


def test_adaptive_shares_by_hand() -> None:
    p = torch.tensor([[0.8, 0.2], [1.0, 0.0]])  # mean .9 and .1, and as sure as .9
    torch.testing.assert_close(fn.adaptive_shares(p, 2.0), torch.tensor([0.82, 0.18]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(fn.adaptive_shares(p, 0.0), p.double().mean(dim=0))
    assert fn.adaptive_shares(p, 100.0).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("power", [0.01, 1.0, 7.0, 60.0])
def test_confidence_is_the_one_asked_whatever_power_came_before(power: float) -> None:
    p = predictions()
    found = fn.to_confidence((power * p.log()).softmax(dim=1), 0.4)
    assert float(found.amax(dim=1).mean()) == pytest.approx(1 / 3 + 0.4 * 2 / 3, abs=1e-12)
    torch.testing.assert_close(found, fn.to_confidence(p, 0.4), atol=1e-9, rtol=0)
    assert torch.equal(found.argsort(dim=1), p.argsort(dim=1))


def test_confidence_by_hand_and_where_no_power_gets_there() -> None:
    p = torch.tensor([[0.8, 0.2]])  # 16 to 1 if squared
    torch.testing.assert_close(
        fn.to_confidence(p, 15 / 17), torch.tensor([[16 / 17, 1 / 17]]).double(), atol=1e-7, rtol=0
    )
    even = torch.full((4, 5), 0.2)
    torch.testing.assert_close(fn.to_confidence(even, 0.9), even.double())
    sure = torch.eye(3)
    assert fn.to_confidence(sure, 0.5).isfinite().all()


def test_the_recipe_is_its_steps() -> None:
    x, _ = clusters(40)
    p = predictions()
    graph = fn.neighbour_graph(x, 4)
    as_sure = fn.to_confidence(p, 0.4)
    shares = fn.adaptive_shares(fn.propagate_labels(graph, as_sure, 0.6), 1.5)
    step = fn.propagate_labels(graph, fn.to_class_shares(as_sure, shares), 0.6)
    found = fn.refine_labels(p, x, num_neighbors=4, alpha=0.6, doubt=1.5, confidence=0.4, with_model=False)
    torch.testing.assert_close(found, fn.to_class_shares(step, shares))
    torch.testing.assert_close(found.mean(dim=0), shares, atol=1e-8, rtol=0)


@pytest.mark.parametrize(("number", "alpha"), [(1999, 0.7), (2000, 0.9)])
def test_labels_of_many_samples_spread_further_and_those_of_three_classes_have_a_model(
    number: int, alpha: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 4, generator=generator, dtype=torch.float64)
    p = (x[:, :3] + torch.randn(number, 3, generator=generator, dtype=torch.float64)).softmax(dim=1)
    graph = fn.neighbour_graph(x)
    found = fn.refine_labels(p, graph)
    assert torch.equal(found, fn.refine_labels(p, graph, alpha=alpha))
    assert not torch.equal(found, fn.refine_labels(p, graph, alpha=1.6 - alpha))
    assert torch.equal(fn.refine_labels(p, x, with_model=False), found)
    with_model = fn.refine_labels(p, x, graph=graph, alpha=0.8 if number == 2000 else 0.7, with_model=True)
    assert not torch.equal(with_model, found)
    assert torch.equal(fn.refine_labels(p, x), with_model)
    two = p[:, :2] / p[:, :2].sum(dim=1, keepdim=True)  # neighbourhoods tell too little of these
    assert torch.equal(fn.refine_labels(two, x), fn.refine_labels(two, graph))


@pytest.mark.parametrize("width", [6, 140, 400])  # fewer and more than the directions that are taken, and than samples
def test_the_model_of_a_domain_is_gaussian_classes_of_its_refined_ones(width: int) -> None:
    """scikit-learn as oracle."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    x = torch.randn(300, width, generator=generator, dtype=torch.float64) * torch.linspace(1, 0.1, width)
    x[:, :3] += 1.5 * F.one_hot(labels, 3)
    p = (F.one_hot(labels, 3) + torch.randn(300, 3, generator=generator)).double().softmax(dim=1)
    graph = fn.neighbour_graph(x - x.mean(dim=0))
    first = fn.refine_labels(p, graph, alpha=0.6, confidence=0.4)
    z = PCA(min(width, 128)).fit_transform(x.numpy())
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.5).fit(z, first.argmax(dim=1).numpy())
    both = fn.to_confidence(p, 0.4) + fn.to_confidence(torch.tensor(oracle.predict_proba(z)), 0.4)
    expected = fn.refine_labels(both / 2, graph, alpha=0.6, confidence=0.4)
    found = fn.refine_labels(p, x - x.mean(dim=0), alpha=0.6, confidence=0.4, with_model=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(found, first, atol=1e-3)


@pytest.mark.parametrize(
    ("features", "given", "named"),
    [
        (normal(10), {}, "features"),
        (torch.full((10, 4), torch.nan), {}, "features"),
        (normal(9, 4), {}, "features"),
        (None, {"with_model": True}, "with_model"),
        (None, {"graph": fn.neighbour_graph(normal(10, 4), 2)}, "graph"),
    ],
)
def test_features_that_allow_no_model_are_refused(features: Any, given: dict[str, Any], named: str) -> None:
    graph = fn.neighbour_graph(normal(10, 4), 2)
    given = {"graph": graph, "with_model": True} if features is not None else given
    with pytest.raises(ArgumentError, match=named):
        fn.refine_labels(predictions(10), graph if features is None else features, **given)


@pytest.mark.parametrize("scale", [1e-160, 1e160])
def test_a_model_does_not_depend_on_units(scale: float) -> None:
    x, p = normal(80, 5), predictions(80)
    graph = fn.neighbour_graph(x)
    found = fn.refine_labels(p, x * scale, graph=graph, with_model=True)
    torch.testing.assert_close(found, fn.refine_labels(p, x, graph=graph, with_model=True))


def test_a_model_of_samples_that_are_one_point_a_class_is_their_classes() -> None:
    labels = torch.arange(60) % 3
    x = F.one_hot(labels, 3).double()
    p = 0.7 * F.one_hot(labels, 3).double() + 0.1
    found = fn.refine_labels(p, x - x.mean(dim=0), with_model=True)
    assert torch.equal(found.argmax(dim=1), labels)
    assert found.isfinite().all()
