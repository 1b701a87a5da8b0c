"""Federated minimax entropy: its steps against the two players' gradients, and what is left of it without entropy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit import Client
from fedlit.federation import UNLABELLED, GuardedLabels
from fedlit.functional import minimax_entropy_loss
from fedlit.methods import FedAvg, FedMME
from fedlit.models import MLP
from helpers import build, digits, same, trainer, weights


def untrained(labelled: bool = True, **kwargs: Any) -> FedMME:
    torch.manual_seed(0)
    target = Client("c2", role="target", labelled=labelled)
    module = FedMME(["c0", "c1", target], "c2", 2, MLP(5, [6], out_features=4), **kwargs)
    module.configure_model()
    return module


def batch(labels: list[int]) -> tuple[Tensor, Tensor]:
    x = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(1))
    return x, torch.tensor(labels)


def gradients(module: FedMME, samples: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Of the target's loss, by the extractor's and by the classifier's weights."""
    replica = module.replicas["c2"]
    parts = [list(replica.extractor.parameters()), list(replica.classifier.parameters())]
    loss = module.loss(module.target, samples)
    found = torch.autograd.grad(loss, [*parts[0], *parts[1]])
    return list(found[: len(parts[0])]), list(found[len(parts[0]) :])


def by_hand(module: FedMME, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine logits over T, and the features that they are of."""
    features = module.replicas["c2"].extractor(x)
    directions = module.replicas["c2"].classifier.weight
    lengths = features.norm(dim=1, keepdim=True)
    return (features / lengths) @ directions.T / module.temperature, features


def test_the_classifier_raises_the_entropy_and_the_extractor_lowers_it() -> None:
    module = untrained(entropy_weight=0.3)
    x, labels = batch([0, UNLABELLED, 1, UNLABELLED, UNLABELLED])
    logits, _ = by_hand(module, x)
    supervised = F.cross_entropy(logits[[0, 2]], labels[[0, 2]])
    entropy = -(logits[[1, 3, 4]].softmax(1) * (logits[[1, 3, 4]].softmax(1) + 1e-5).log()).sum(1).mean()
    replica = module.replicas["c2"]
    params = [*replica.extractor.parameters(), replica.classifier.weight]
    first = torch.autograd.grad(supervised, params, retain_graph=True)
    second = torch.autograd.grad(entropy, params)
    of_extractor, of_classifier = gradients(module, (x, labels))
    for ours, own, game in zip(of_extractor, first, second, strict=False):
        torch.testing.assert_close(ours, own + 0.3 * game)  # its step goes down the entropy
    torch.testing.assert_close(of_classifier[0], first[-1] - 0.3 * second[-1])  # and this one up
    value = float(module.loss(module.target, (x, labels)).detach())
    assert value == pytest.approx(float((supervised - 0.3 * entropy).detach()), rel=1e-5)


def test_hidden_labels_leave_the_game_alone() -> None:
    module = untrained(labelled=False)
    x, _ = batch([0] * 6)
    of_extractor, of_classifier = gradients(module, (x, GuardedLabels("c2")))
    other = untrained()
    other.replicas["c2"].load_state_dict(module.replicas["c2"].state_dict())
    unlabelled = gradients(other, (x, torch.full((6,), UNLABELLED)))
    for ours, theirs in zip((*of_extractor, *of_classifier), (*unlabelled[0], *unlabelled[1]), strict=True):
        torch.testing.assert_close(ours, theirs)
    logits, _ = by_hand(module, x)
    ascent = torch.autograd.grad(0.1 * minimax_entropy_loss(logits), list(module.replicas["c2"].extractor.parameters()))
    for ours, theirs in zip(of_extractor, ascent, strict=True):
        torch.testing.assert_close(ours, -theirs)


def test_predictions_do_not_know_how_long_features_are_and_nothing_is_like_no_class() -> None:
    module = untrained()
    replica = module.replicas["c2"]
    features = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(replica.classify(features), replica.classify(100 * features))
    cosines = F.cosine_similarity(features[:, None], replica.classifier.weight[None], dim=2)
    expected = cosines * replica.classifier.weight.norm(dim=1) / 0.05
    torch.testing.assert_close(replica.classify(features), expected)
    nothing = torch.zeros(1, 4, requires_grad=True)
    minimax_entropy_loss(replica.classify(nothing)).backward()
    assert replica.classify(nothing).abs().sum() == 0
    assert nothing.grad is not None
    assert bool(nothing.grad.isfinite().all())


class CosineAvg(FedAvg):
    """FedAvg of the same network."""

    temperature = 0.05
    build_replica = FedMME.build_replica  # type: ignore[assignment]


def test_without_entropy_it_is_fedavg_to_the_last_bit() -> None:
    data = digits(target_labels=1.0)
    head = nn.Linear(16, 10, bias=False)
    modules = [
        build(FedMME, data, classifier=head, entropy_weight=0.0),
        build(CosineAvg, data, classifier=head),
    ]
    for module in modules:
        trainer(2).fit(module, data)
    for client in ("clean", "blended", "fonts"):
        assert same(*(weights(module, client) for module in modules))


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_target_without_labels_is_warned_of(rounds: int) -> None:
    data = digits()
    way_out = "" if rounds else ", or at least warmup_rounds"
    with pytest.warns(UserWarning, match=f"target 'fonts' has no labels, .* target_labels{way_out}"):
        trainer(2, strategy={"local_steps": 1}).fit(build(FedMME, data, warmup_rounds=rounds), data)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no labels")
        trainer(1, strategy={"local_steps": 1}).fit(build(FedMME, data, entropy_weight=0.0), data)
