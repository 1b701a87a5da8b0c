"""Replica of FADA: which pairs the estimator receives, and that statistics of whole features do not move."""

from __future__ import annotations

import copy

import torch
from torch import nn

from adversaries import Extractor
from fedlit.models import DisentanglingReplica


def replica(classifier: nn.Module) -> DisentanglingReplica:
    torch.manual_seed(0)
    return DisentanglingReplica(Extractor(), classifier, nn.Identity(), num_classes=3, hidden=6)


def test_all_of_it_has_the_number_type_of_the_classifier() -> None:
    own = replica(nn.Linear(4, 3).double())
    assert {weight.dtype for weight in own.parameters()} == {torch.float64}
    invariant, specific = own.disentangle(torch.randn(5, 4).double())
    assert invariant.shape == specific.shape == (5, 4)
    assert own.reconstruct(invariant, specific).shape == (5, 4)
    assert own.class_identifier(specific).shape == (5, 3)


def test_parts_are_compared_with_those_of_another_sample_in_the_batch_each() -> None:
    class Sum(nn.Module):
        def forward(self, pairs: torch.Tensor) -> torch.Tensor:
            seen.append(pairs[:, 0] - pairs[:, -1])
            return pairs[:, 0]

    own, seen = replica(nn.Linear(4, 3).double()), []
    own.estimator = Sum()
    numbers = torch.arange(6.0)[:, None].expand(6, 4)
    own.information(numbers, numbers)
    assert seen[0].tolist() == [0] * 6
    assert seen[1].tolist() == [-5, 1, 1, 1, 1, 1]


def test_the_classifier_reads_a_part_with_the_statistics_of_the_batch_and_keeps_none_of_them() -> None:
    classifier = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    own, part = replica(classifier), torch.randn(5, 4).double()
    before = copy.deepcopy(classifier.state_dict())
    logits = own.classify(part)
    for key, value in classifier.state_dict().items():
        assert torch.equal(value, before[key])
    assert torch.equal(logits, classifier(part))
    assert not torch.equal(classifier.state_dict()["0.running_mean"], before["0.running_mean"])
