"""Warnings of a target whose predictions collapse or get worse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import TensorDataset

from fedlit import Run, methods
from fedlit.run.component import Component
from fedlit.run.evaluation import CollapseWatch
from refused import slow
from small_federation import Blobs, build, trainer

EVEN = {"a": 25, "b": 25, "c": 25, "d": 25}  # as many as 4 classes: variety 3


def warned(run: Any, module: Any, text: str, data: Any = None, fit_alone: bool = True) -> list[str]:
    """Warnings of a fit, or of fit, test and predict, that contain a text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, data or Blobs())
        if not fit_alone:
            run.test(module, Blobs(), verbose=False)
            run.predict(module, Blobs())
    return [str(each.message) for each in caught if text in str(each.message)]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02)


def test_predictions_of_one_class_are_warned_of_once_in_each_stage(tmp_path):
    module = build(optimizer=lambda params: torch.optim.SGD(params, lr=1e-6))
    module.originals[1].bias.data += torch.tensor([0.0, 0.0, 100.0, 0.0])
    texts = warned(trainer(2, [], tmp_path), module, "predictions for target", fit_alone=False)
    assert len(texts) == 3
    assert all(text.startswith("all 30 predictions for target 'webcam' are of class 2, ") for text in texts)
    assert all("max_epochs" in text and "optimizer" in text and "warmup_rounds" in text for text in texts)


class Spoiled(pl.Callback, Component):
    def __init__(self, round_idx: int, spoil: Callable[[Any], object]) -> None:
        self.round_idx, self.spoil = round_idx, spoil

    def on_round_end(self, run: Run) -> None:
        if run.clock.round_idx == self.round_idx:
            for client in run.federation.local_clients:
                self.spoil(run.replicas[client])


def one_class(replica: Any) -> None:
    replica.classifier.bias.data[2] += 1000.0


def mixed(replica: Any) -> None:
    """Networks stay confident and know nothing: features change faster than samples lie apart."""
    replica.extractor.register_forward_hook(lambda *call: 20 * torch.sin(1e4 * call[2]))


def test_a_collapse_is_warned_of_once_in_the_round_where_it_starts(tmp_path):
    (text,) = warned(trainer(6, [Spoiled(3, one_class)], tmp_path), build(methods.FedDANN), "have got worse")
    assert "FedDANN for target 'webcam' have got worse by round 3: 100% of them are of class 2" in text
    assert all(way in text for way in ("validator/trust", "trust_region", "reversal_weight", "warmup_rounds"))


def test_classes_that_mix_in_a_confident_network_are_warned_of_but_not_among_images(tmp_path):
    spoiled = [Spoiled(4, mixed)]
    (text,) = warned(trainer(8, spoiled, tmp_path), build(optimizer=adam), "have got worse")
    assert "by round 6: near samples are put into different classes" in text
    data = Blobs()
    for part in data.parts.values():
        for name, (x, y) in {name: each.tensors for name, each in part.items()}.items():
            part[name] = TensorDataset(x[:, None, None], y)
    assert not warned(trainer(8, spoiled, tmp_path), build(optimizer=adam), "near samples", data)


@pytest.mark.parametrize("method", [methods.SourceOnly, slow(methods.FedDANN)])
def test_a_run_that_learns_is_not_warned_about(method, tmp_path):
    assert not warned(trainer(6, [], tmp_path), build(method), "predictions")


def test_a_quarter_of_the_variety_is_a_collapse():
    watch = CollapseWatch()
    assert not watch.see(EVEN, 0.5, 0)
    assert not watch.see({"a": 50, "b": 50}, 0.5, 1)  # 2 classes: 1, more than a quarter of 3
    assert watch.see({"a": 94, "b": 6}, 0.9, 2) == "94% of them are of class a, and the largest class had 25% before"
    assert not watch.see({"a": 100}, 0.9, 3)  # once
    assert not CollapseWatch().see({"a": 9}, 0.0, 0)  # too few to tell

    watch = CollapseWatch()
    assert not watch.see({"a": 60}, 0.0, 0)  # has not learnt yet
    assert not watch.see({"a": 30, "b": 30}, 0.1, 1)
    assert watch.see({"a": 60}, 0.1, 2).startswith("100% of them")


@pytest.mark.parametrize(
    ("scores", "informations", "warns_at"),
    [
        ([0.4, 0.37, 0.39, 0.37, 0.37, 0.37, 0.37], None, 5),  # a fall begins below 0.38; a run of two is none
        ([0.5] * 8, [0.4, 0.31, 0.29, 0.29, 0.31, 0.29, 0.29, 0.29], 7),  # below three quarters of the best
        ([0.5] * 4, [0.1, 0.06, 0.06, 0.06], None),  # of little, a quarter of 0.2 is asked: noise
    ],
)
def test_a_score_that_stays_below_its_best_is_a_collapse(scores, informations, warns_at):
    watch = CollapseWatch()
    found = [
        watch.see(EVEN, score, place, *([] if informations is None else [informations[place]]))
        for place, score in enumerate(scores)
    ]
    assert [place for place, text in enumerate(found) if text] == ([] if warns_at is None else [warns_at])
    if warns_at is not None:
        assert "was 0.400 after round 0, and has been lower in 3 validations" in found[warns_at]
