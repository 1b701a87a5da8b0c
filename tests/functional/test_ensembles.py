"""Combinations of models: weights by hand, and what the mean of models that err apart is worth."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array
from sklearn.metrics import mutual_info_score
from torch import Tensor

from fedlit import functional as fn

NUMBER, NUM_CLASSES = 240, 3


def samples(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples in three groups, and the group of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(NUMBER) % NUM_CLASSES
    return 3 * F.one_hot(labels, 8).double() + torch.randn(NUMBER, 8, generator=generator).double(), labels


def data() -> tuple[csr_array, Tensor]:
    """Neighbourhoods of the samples, and labels."""
    x, labels = samples()
    return fn.neighbour_graph(x), labels


def model(wrong: float, seed: int) -> Tensor:
    """Probabilities by the nearest of three centres, which are off by so much of their distance."""
    generator = torch.Generator().manual_seed(seed)
    centres = F.one_hot(torch.arange(NUM_CLASSES), 8).double()
    centres = centres + wrong * torch.randn(NUM_CLASSES, 8, generator=generator).double()
    return (samples()[0] @ F.normalize(centres, dim=1).T).softmax(dim=1)


def accuracy(p: Tensor, labels: Tensor) -> float:
    return float((p.argmax(dim=1) == labels).double().mean())


def test_models_that_say_the_same_share_one_weight() -> None:
    graph, _ = data()
    first, second = model(0.5, 1), model(0.5, 2)
    found = fn.combine_predictions([first, first, second], graph, sharpness=0.0, power=1.0)
    classes = [p.argmax(dim=1) for p in (first, second)]
    alike = float((classes[0] == classes[1]).double().mean())
    by_hand = torch.tensor([1 / (2 + alike), 1 / (2 + alike), 1 / (1 + 2 * alike)])
    torch.testing.assert_close(found.weights.float(), by_hand / by_hand.sum())
    twice = fn.combine_predictions([first, second], graph, sharpness=0.0, power=1e6)
    torch.testing.assert_close(twice.weights, torch.tensor([0.5, 0.5]).double())
    thrice = fn.combine_predictions([first, first, second], graph, sharpness=0.0, power=1e6)
    torch.testing.assert_close(thrice.p, twice.p)


def test_weights_and_probabilities_by_hand() -> None:
    graph, _ = data()
    models = [model(wrong, seed) for seed, wrong in enumerate((0.2, 0.7))]
    found = fn.combine_predictions(models, graph, sharpness=4.0, power=0.0)
    for p, information in zip(models, found.information.tolist(), strict=True):
        first, second = (p.argmax(dim=1).numpy()[ends] for ends in graph.nonzero())
        entropy = scipy.stats.entropy(np.bincount(p.argmax(dim=1), minlength=NUM_CLASSES))
        by_hand = mutual_info_score(first, second) / entropy
        assert information == pytest.approx(by_hand)
    expected = (4 * found.information / found.information.max()).softmax(dim=0)
    torch.testing.assert_close(found.weights, expected)
    mean = sum(w * fn.to_confidence(p, 0.5) for w, p in zip(expected, models, strict=True))
    assert torch.equal(found.p.argsort(dim=1), fn.refine_labels(mean, graph).argsort(dim=1))
    share = fn.neighbour_agreement(mean.argmax(dim=1), graph)
    assert float(found.p.amax(dim=1).mean()) == pytest.approx(share, abs=1e-6)


def test_models_that_err_apart_are_better_together_than_the_best() -> None:
    graph, labels = data()
    models = [model(0.6, seed) for seed in range(8)]
    best = max(accuracy(fn.refine_labels(p, graph), labels) for p in models)
    together = accuracy(fn.combine_predictions(models, graph).p, labels)
    assert together > best > max(accuracy(p, labels) for p in models)


def test_collapsed_and_random_models_do_not_matter_nor_does_the_order() -> None:
    graph, labels = data()
    models = [model(0.4, seed) for seed in range(3)]
    constant = torch.tensor([0.98, 0.01, 0.01]).double().repeat(NUMBER, 1)
    chance = torch.rand(NUMBER, NUM_CLASSES, generator=torch.Generator().manual_seed(9)).double()
    found = fn.combine_predictions([*models, constant, chance], graph)
    assert float(found.weights.sum()) == pytest.approx(1)
    assert float(found.weights[3:].sum()) < 1e-6
    alone = fn.combine_predictions(models, graph)
    assert accuracy(found.p, labels) > accuracy(alone.p, labels) - 0.02
    torch.testing.assert_close(fn.combine_predictions(models[::-1], graph).p, alone.p)


def test_with_two_classes_neighbourhoods_neither_weigh_nor_refine() -> None:
    graph, _ = data()
    models = [p[:, :2] / p[:, :2].sum(dim=1, keepdim=True) for p in (model(0.3, 1), model(0.9, 2))]
    found = fn.combine_predictions(models, graph)
    torch.testing.assert_close(found.weights, torch.tensor([0.5, 0.5]).double())
    mean = sum(fn.to_confidence(p, 0.5) for p in models) / 2
    assert torch.equal(found.p.argmax(dim=1), mean.argmax(dim=1))


def test_neighbours_agree_by_hand() -> None:
    graph = csr_array(torch.tensor([[0, 2, 1, 0], [2, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).double().numpy())
    # the first two have the other, heavier than the third, of their class; the third has none, the last no neighbour
    assert fn.neighbour_agreement(torch.tensor([0, 0, 1, 1]), graph) == pytest.approx(2 / 3)
    assert fn.neighbour_agreement(torch.tensor([0, 1]), csr_array((2, 2))) == 0.0
    with pytest.raises(ValueError, match="graph must be of shape"):
        fn.neighbour_agreement(torch.tensor([0, 1, 2]), graph)


def test_what_does_not_fit_is_refused() -> None:
    graph, _ = data()
    p = model(0.3, 1)
    with pytest.raises(ValueError, match="predictions must be at least 1 model's, got 0"):
        fn.combine_predictions([], graph)
    with pytest.raises(ValueError, match=r"predictions must be of shape \(240, 3\)"):
        fn.combine_predictions([p, p[:, :2]], graph)
    with pytest.raises(ValueError, match=r"sharpness \(beta\) must be at least 0, got -1"):
        fn.combine_predictions([p], graph, sharpness=-1)
    with pytest.raises(ValueError, match=r"power \(gamma\) must be at least 0, got -1"):
        fn.combine_predictions([p], graph, power=-1)
