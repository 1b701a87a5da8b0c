"""SHOT and T3A: what is fixed, what is sent, pseudo-labels and prototypes by hand, and going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from fedlit import functional as fn
from fedlit.methods import SHOT, T3A, SourceOnly
from fedlit.models import MLP
from helpers import loader, same, trainer, weights

NAMES = ["c0", "c1", "c2"]


def data(size: int = 90) -> dict[str, TensorDataset]:
    """Three directions; the target's are turned, so that the sources' classifier is wrong about many of its samples."""
    found = {}
    for index, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(index)
        labels = torch.arange(size) % 3
        centres = F.one_hot(torch.arange(3), 6).float() * 3
        if name == "c2":
            centres = centres * 0.55 + 0.45 * centres.roll(1, 0)
        found[name] = TensorDataset(centres[labels] + 0.4 * torch.randn(size, 6, generator=generator), labels)
    return found


def make(method: type[Any], **kwargs: Any) -> Any:
    torch.manual_seed(0)
    given = {"optimizer": lambda params: SGD(params, lr=0.05)} | kwargs
    return method(NAMES, "c2", 3, MLP(6, [12]), **given)


def fitted(method: type[Any], rounds: int, **kwargs: Any) -> Any:
    module = make(method, **kwargs)
    trainer(rounds).fit(module, loader(data(), batch_size=16))
    return module


def accuracy(module: Any) -> float:
    x, y = data()["c2"].tensors
    return float((module.replicas["c2"].eval()(x).argmax(dim=1) == y).double().mean())


def test_labels_of_centroids_are_scikit_learns_nearest() -> None:
    generator = torch.Generator().manual_seed(3)
    features, p = torch.randn(40, 5, generator=generator), torch.randn(40, 3, generator=generator).softmax(dim=1)
    x, labels = features.double().numpy(), None
    weights_of = p.double().numpy()
    for _ in range(2):
        centroids = weights_of.T @ x / weights_of.sum(axis=0)[:, None]
        labels = cosine_similarity(x, centroids).argmax(axis=1)
        weights_of = np.eye(3)[labels]
    assert fn.centroid_labels(features, p).tolist() == labels.tolist()
    nobody = torch.cat([p, torch.zeros(40, 1)], dim=1)
    assert fn.centroid_labels(features, nobody).tolist() == labels.tolist()
    with pytest.raises(ValueError, match="num_passes must be at least 1, got 0"):
        fn.centroid_labels(features, p, 0)


def test_prototypes_by_hand_keep_the_most_certain_samples() -> None:
    weight = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    features = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 5.0]])
    p = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]])
    every = fn.nearest_prototypes(weight, features, p)
    expected = F.normalize(torch.tensor([[1 + 0.6 + 1, 0.8], [0.0, 1 + 1]]).double(), dim=1)
    torch.testing.assert_close(every, expected)
    one = fn.nearest_prototypes(weight, features, p, 1)
    torch.testing.assert_close(one, torch.eye(2).double())  # the second sample is the more certain one of its class


def test_shot_moves_the_extractor_alone_and_sends_nothing_of_it() -> None:
    module, before = fitted(SHOT, 8, federated_rounds=4), fitted(SHOT, 4, federated_rounds=4)
    assert same(weights(module, "c0"), weights(before, "c0"))
    ours, theirs = weights(module, "c2"), weights(before, "c2")
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]) == name.startswith("classifier"), name
    assert accuracy(module) > accuracy(before)
    rounds = {entry.round_idx for entry in module.federation.ledger if entry.channel == "weights"}
    assert rounds == {0, 1, 2, 3}


def test_shot_without_smoothing_trains_the_sources_as_source_only_does() -> None:
    plain = fitted(SourceOnly, 3)
    assert same(weights(fitted(SHOT, 3, federated_rounds=3, label_smoothing=0.0), "c0"), weights(plain, "c0"))
    assert not same(weights(fitted(SHOT, 3, federated_rounds=3), "c0"), weights(plain, "c0"))


def test_shot_goes_on_from_a_checkpoint_in_its_last_phase(tmp_path: Path) -> None:
    every = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    straight = make(SHOT, federated_rounds=2)
    trainer(5, [every], enable_checkpointing=True).fit(straight, loader(data(), batch_size=16))
    resumed = make(SHOT, federated_rounds=2)
    path = tmp_path / "epoch=2.ckpt"
    trainer(5).fit(resumed, loader(data(), batch_size=16), ckpt_path=path, weights_only=True)
    assert same(weights(resumed, "c2"), weights(straight, "c2"))


def test_t3a_has_the_classifier_of_prototypes_at_the_target_alone() -> None:
    module, plain = fitted(T3A, 2, num_kept=5), fitted(SourceOnly, 2)
    assert same(weights(module, "c0"), weights(plain, "c0"))
    x = data()["c2"].tensors[0]
    network = plain.replicas["c2"].eval()
    with torch.no_grad():
        features, p = network.extractor(x), network(x).softmax(dim=1)
    layer = network.classifier
    assert isinstance(layer, nn.Linear)
    weight = fn.nearest_prototypes(layer.weight.detach(), features, p, 5).float()
    found = weights(module, "c2")
    scale: Tensor = layer.weight.detach().norm() / 3**0.5
    torch.testing.assert_close(found["classifier.weight"], weight * scale, atol=1e-5, rtol=1e-4)
    assert found["classifier.bias"].tolist() == [0, 0, 0]
    assert accuracy(module) > accuracy(plain)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pseudo_weight \(beta\) must be at least 0, got -1"):
        make(SHOT, pseudo_weight=-1.0)
    with pytest.raises(ValueError, match=r"label_smoothing must be .* got 2"):
        make(SHOT, label_smoothing=2.0)
    for number in (0, 2.5, True):
        rule = rf"num_kept \(M\) must be an integer of at least 1 sample, got {number}: None keeps all"
        with pytest.raises(ValueError, match=rule):
            make(T3A, num_kept=number)
