"""Transport, barycenters and projections: POT and scipy as oracles, and identities that hold exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import ot
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from sklearn.neighbors import NearestCentroid
from torch import Tensor

from fedlit import functional as fn


def samples(n: int, d: int = 4, seed: int = 0, shift: float = 0.0) -> Tensor:
    return shift + torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def probabilities(n: int, classes: int = 3, seed: int = 0) -> Tensor:
    return samples(n, classes, seed + 100).softmax(dim=1)


def test_costs_are_those_of_pot() -> None:
    x, x2, y, y2 = samples(7), samples(5, seed=1), probabilities(7), probabilities(5, seed=1)
    features, labels = ot.dist(x.numpy(), x2.numpy()), ot.dist(y.numpy(), y2.numpy())
    np.testing.assert_allclose(fn.joint_cost(x, x2), features, atol=1e-12)
    np.testing.assert_allclose(fn.joint_cost(x, x2, y, y2, 2.5), features + 2.5 * labels, atol=1e-12)
    np.testing.assert_allclose(fn.joint_cost(x, x2, y, y2), features + features.max() * labels, atol=1e-12)


@pytest.mark.parametrize("entropy", [None, 0.05])
def test_a_weight_is_as_many_copies_of_a_sample(entropy: float | None) -> None:
    x, x2, copies = samples(4), samples(6, seed=1), torch.tensor([1, 3, 2, 2])
    cost = fn.joint_cost(x, x2)
    plan = fn.transport_plan(cost, entropy, copies / copies.sum())
    torch.testing.assert_close(plan.sum(dim=1), copies.double() / 8, atol=1e-7, rtol=1e-4)
    repeated = fn.joint_cost(x.repeat_interleave(copies, dim=0), x2)
    expected = float((fn.transport_plan(repeated, entropy) * repeated).sum())
    assert float((plan * cost).sum()) == pytest.approx(expected, rel=1e-6)
    if entropy is None:
        assert float(fn.joint_ot_loss(x, x2, weights=copies / copies.sum())) == pytest.approx(expected, rel=1e-12)
        uniform = torch.full((6,), 1 / 6, dtype=torch.float64)
        assert expected == pytest.approx(float(ot.emd2(copies.double() / 8, uniform, cost)), rel=1e-12)


def test_balanced_weights_give_each_class_there_is_the_same_mass() -> None:
    classes = torch.tensor([0, 0, 0, 2, 2, 3])  # nobody of class 1
    weights = fn.balanced_weights(F.one_hot(classes, 4))
    torch.testing.assert_close(weights, torch.tensor([1 / 9] * 3 + [1 / 6] * 2 + [1 / 3], dtype=torch.float64))
    soft = probabilities(7)
    mass = fn.balanced_weights(soft)[:, None] * soft
    torch.testing.assert_close(fn.balanced_weights(soft).sum(), torch.tensor(1.0, dtype=torch.float64))
    assert bool((mass > 0).all())
    torch.testing.assert_close(fn.balanced_weights(torch.eye(3)), torch.full((3,), 1 / 3, dtype=torch.float64))


def test_nearest_class_means_are_those_of_scikit_learn() -> None:
    x, x2, classes = samples(40), samples(30, seed=1), torch.arange(30) % 3
    expected = NearestCentroid().fit(x2.numpy(), classes.numpy()).predict(x.numpy())
    np.testing.assert_array_equal(fn.nearest_class_mean(x, x2, F.one_hot(classes, 3).double()), expected)
    # a class without samples is nobody's, also where the origin is nearest
    around = fn.nearest_class_mean(0.01 * x, x2 + 5, F.one_hot(classes, 4).double())
    assert int(around.max()) < 3


def test_losses_are_those_of_pot_with_its_gradient() -> None:
    """The envelope theorem: ot.emd2 differentiates likewise."""
    x, x2 = samples(8).requires_grad_(), samples(6, seed=1)
    y, y2 = probabilities(8).requires_grad_(), probabilities(6, seed=1)
    loss = fn.joint_ot_loss(x, x2, y, y2, 3.0)
    theirs_x, theirs_y = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
    cost = ot.dist(theirs_x, x2) + 3.0 * ot.dist(theirs_y, y2)
    uniform = torch.full((8,), 1 / 8, dtype=torch.float64), torch.full((6,), 1 / 6, dtype=torch.float64)
    theirs = ot.emd2(*uniform, cost)
    assert float(loss) == pytest.approx(float(theirs), rel=1e-12)
    loss.backward()
    theirs.backward()
    torch.testing.assert_close(x.grad, theirs_x.grad)
    torch.testing.assert_close(y.grad, theirs_y.grad)


def test_barycentric_mappings_keep_the_mean() -> None:
    x, x2 = samples(6), samples(9, seed=1)
    mapped = fn.barycentric_mapping(fn.transport_plan(fn.joint_cost(x, x2)), x2)
    torch.testing.assert_close(mapped.mean(dim=0), x2.mean(dim=0))


def atoms(sizes: tuple[int, ...] = (12, 12, 12), d: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    return (
        [samples(n, d, seed, 2.0 * seed) for seed, n in enumerate(sizes)],
        [probabilities(n, seed=seed) for seed, n in enumerate(sizes)],
    )


ALPHA = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)


@pytest.mark.parametrize(
    ("label_cost", "num_points", "sizes"),
    [(0.0, None, (12, 12, 12)), (1.5, 7, (9, 12, 15)), ("adaptive", 20, (9, 12, 15)), ("adaptive", None, (9, 12, 15))],
)
def test_means_are_weighted_means_and_labels_stay_probabilities(
    label_cost: Any, num_points: int | None, sizes: tuple[int, ...]
) -> None:
    supports, labels = atoms(sizes)
    for iterations in (1, 2, 10):
        found = fn.wasserstein_barycenter(supports, labels, ALPHA, num_points, label_cost, num_iterations=iterations)
        assert found.labels is not None
        expected = sum(a * x.mean(dim=0) for a, x in zip(ALPHA, supports, strict=True))
        torch.testing.assert_close(found.support.mean(dim=0), expected)
        expected = sum(a * y.mean(dim=0) for a, y in zip(ALPHA, labels, strict=True))
        torch.testing.assert_close(found.labels.mean(dim=0), expected)
        torch.testing.assert_close(found.labels.sum(dim=1), torch.ones(len(found.labels), dtype=torch.float64))
        assert bool((found.labels >= 0).all())
        assert len(found.support) == (sizes[0] if num_points is None else num_points)


def test_a_single_distribution_is_its_own_barycenter_after_one_step() -> None:
    (x, *_), (y, *_) = atoms()
    start = (x[torch.randperm(12, generator=torch.Generator().manual_seed(3))] + 0.01, y)
    for supports, labels, alpha in (
        ([x], [y], torch.ones(1)),
        ([x, samples(12, seed=5)], [y, probabilities(12, seed=5)], torch.tensor([1.0, 0.0])),
    ):
        found = fn.wasserstein_barycenter(
            supports, labels, alpha.double(), label_cost=0.0, init=start, num_iterations=1
        )
        order = [int((found.support[i] - x).square().sum(dim=1).argmin()) for i in range(12)]
        assert sorted(order) == list(range(12))
        torch.testing.assert_close(found.support, x[order])
        torch.testing.assert_close(found.labels, y[order])


def test_it_is_that_of_pot_from_the_same_start() -> None:
    supports, _ = atoms((9, 12, 15))
    start = samples(10, seed=9)
    weights = [np.full(len(x), 1 / len(x)) for x in supports]
    theirs = ot.lp.free_support_barycenter(
        [x.numpy() for x in supports], weights, start.numpy(), weights=ALPHA.numpy(), numItermax=5, stopThr=0.0
    )
    ours = fn.wasserstein_barycenter(supports, None, ALPHA, init=(start, None), num_iterations=5, tol=-1.0)
    np.testing.assert_allclose(ours.support, theirs, atol=1e-10)


def test_gradients_reach_atoms_labels_and_coordinates_with_constant_plans() -> None:
    supports, labels = atoms()
    leaves = [each.requires_grad_() for each in (*supports, *labels)]
    alpha = ALPHA.clone().requires_grad_()
    target, classes = samples(10, seed=7, shift=1.0), probabilities(10, seed=7)
    found = fn.wasserstein_barycenter(supports, labels, alpha)
    assert found.labels is not None
    loss = fn.joint_ot_loss(target, found.support, classes, found.labels, 2.0)
    found.support.retain_grad()
    found.labels.retain_grad()
    loss.backward()
    g, h = found.support.grad, found.labels.grad
    assert g is not None
    assert h is not None
    for k in range(3):
        torch.testing.assert_close(leaves[k].grad, 12 * ALPHA[k] * found.plans[k] @ g)
        torch.testing.assert_close(leaves[3 + k].grad, 12 * ALPHA[k] * found.plans[k] @ h)
        by_alpha = (g * (12 * found.plans[k].T @ supports[k])).sum() + (h * (12 * found.plans[k].T @ labels[k])).sum()
        torch.testing.assert_close(alpha.grad[k], by_alpha)  # type: ignore[index]


def test_coordinates_in_half_precision_sum_to_one_as_well_as_they_can() -> None:
    supports = [torch.randn(4, 2, generator=torch.Generator().manual_seed(k)).bfloat16() for k in range(3)]
    alpha = fn.project_simplex(torch.full((3,), 1 / 3).bfloat16())
    assert float(alpha.double().sum()) != pytest.approx(1.0, abs=1e-4)
    found = fn.wasserstein_barycenter(supports, None, alpha)
    assert found.support.dtype == torch.bfloat16
    assert found.support.isfinite().all()


def test_too_little_entropy_for_sinkhorn_is_told() -> None:
    generator = torch.Generator().manual_seed(0)
    cost = torch.rand(30, 30, generator=generator)
    with pytest.warns(UserWarning, match=r"not converged: a column's weight is off by .* with entropy=1e-06"):
        fn.transport_plan(cost, 1e-6)


def test_projections_are_the_nearest_points_of_the_simplex() -> None:
    for seed in range(20):
        v = 2 * samples(1, 5, seed)[0]
        ours = fn.project_simplex(v)
        best = minimize(
            lambda w, v=v: ((w - v.numpy()) ** 2).sum(),
            np.full(5, 0.2),
            bounds=[(0, 1)] * 5,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            tol=1e-12,
        )
        np.testing.assert_allclose(ours, best.x, atol=1e-5)
