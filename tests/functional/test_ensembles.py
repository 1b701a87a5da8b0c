"""Combinations of models: weights by hand, and what the mean of models that err apart is worth."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array
from torch import Tensor

from fedlit import functional as fn

NUMBER, NUM_CLASSES = 240, 3


def data(seed: int = 0) -> tuple[csr_array, Tensor]:
    """Neighbourhoods of samples in three groups, and the group of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(NUMBER) % NUM_CLASSES
    x = 2 * F.one_hot(labels, 8).double() + torch.randn(NUMBER, 8, generator=generator).double()
    return fn.neighbour_graph(x), labels


def model(labels: Tensor, wrong: float, seed: int) -> Tensor:
    """Probabilities of a model that errs on a share of the samples, wherever they are."""
    generator = torch.Generator().manual_seed(seed)
    errs = torch.rand(len(labels), generator=generator) < wrong
    other = (labels + 1 + torch.randint(2, (len(labels),), generator=generator)) % NUM_CLASSES
    return 0.8 * F.one_hot(torch.where(errs, other, labels), NUM_CLASSES).double() + 0.2 / NUM_CLASSES


def accuracy(p: Tensor, labels: Tensor) -> float:
    return float((p.argmax(dim=1) == labels).double().mean())


def test_models_that_say_the_same_share_one_weight() -> None:
    graph, labels = data()
    first, second = model(labels, 0.3, 1), model(labels, 0.3, 2)
    found = fn.combine_predictions([first, first, second], graph, power=1.0)
    classes = [fn.refine_labels(p, graph).argmax(dim=1) for p in (first, second)]
    alike = float((classes[0] == classes[1]).double().mean())
    by_hand = torch.tensor([1 / (2 + alike), 1 / (2 + alike), 1 / (1 + 2 * alike)])
    torch.testing.assert_close(found.weights.float(), by_hand / by_hand.sum())
    twice = fn.combine_predictions([first, second], graph, power=1e6)
    torch.testing.assert_close(twice.weights, torch.tensor([0.5, 0.5]).double())
    torch.testing.assert_close(fn.combine_predictions([first, first, second], graph, power=1e6).p, twice.p)
    alone = fn.refine_labels(fn.refine_labels(first, graph), graph)
    found = fn.combine_predictions([first, first], graph, power=0.0).p
    assert torch.equal(found.argsort(dim=1), alone.argsort(dim=1))
    share = fn.neighbour_agreement(first.argmax(dim=1), graph)
    assert float(found.amax(dim=1).mean()) == pytest.approx(share, abs=1e-6)


def test_models_that_err_apart_are_better_together_than_the_best() -> None:
    graph, labels = data()
    models = [model(labels, 0.45, seed) for seed in range(5)]
    best = max(accuracy(fn.refine_labels(p, graph), labels) for p in models)
    together = accuracy(fn.combine_predictions(models, graph).p, labels)
    assert together > best > max(accuracy(p, labels) for p in models)


def test_a_collapsed_model_is_left_out_and_the_order_does_not_matter() -> None:
    graph, labels = data()
    models = [model(labels, 0.3, seed) for seed in range(3)]
    constant = torch.tensor([0.98, 0.01, 0.01]).double().repeat(NUMBER, 1)
    chance = model(labels, 2 / 3, 9)
    found = fn.combine_predictions([*models, constant, chance], graph)
    assert found.weights[3:].tolist() == [0, 0]
    assert float(found.weights.sum()) == pytest.approx(1)
    alone = fn.combine_predictions(models, graph)
    torch.testing.assert_close(found.p, alone.p)
    torch.testing.assert_close(found.weights[:3], alone.weights)
    torch.testing.assert_close(fn.combine_predictions(models[::-1], graph).p, alone.p)


def test_neighbours_agree_by_hand() -> None:
    graph = csr_array(torch.tensor([[0, 2, 1, 0], [2, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).double().numpy())
    # the first two have the other, heavier than the third, of their class; the third has none, the last no neighbour
    assert fn.neighbour_agreement(torch.tensor([0, 0, 1, 1]), graph) == pytest.approx(2 / 3)
    assert fn.neighbour_agreement(torch.tensor([0, 1]), csr_array((2, 2))) == 0.0
    with pytest.raises(ValueError, match="graph must be of shape"):
        fn.neighbour_agreement(torch.tensor([0, 1, 2]), graph)


def test_what_does_not_fit_is_refused() -> None:
    graph, labels = data()
    p = model(labels, 0.3, 1)
    with pytest.raises(ValueError, match="predictions must be at least 1 model's, got 0"):
        fn.combine_predictions([], graph)
    with pytest.raises(ValueError, match=r"predictions must be of shape \(240, 3\)"):
        fn.combine_predictions([p, p[:, :2]], graph)
    with pytest.raises(ValueError, match=r"least_share \(s\) must be .* got 1.5"):
        fn.combine_predictions([p], graph, least_share=1.5)
    with pytest.raises(ValueError, match=r"power \(gamma\) must be at least 0, got -1"):
        fn.combine_predictions([p], graph, power=-1)
