"""The label guard: every way to look at guarded labels raises."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.data import extract_batch_size
from torchmetrics.classification import MulticlassAccuracy

from fedlit.federation import GuardedLabels, LabelGuardError, reveal_for_oracle
from fedlit.federation.labels import guard

LABELS = torch.tensor([0, 2])
LOGITS = torch.zeros(2, 3)

ATTEMPTS: dict[str, Callable[[Any], Any]] = {
    "index": lambda y: y[0],
    "assign": lambda y: operator.setitem(y, 0, 1),
    "len": len,
    "iterate": lambda y: [label for label in y],
    "contains": lambda y: 1 in y,
    "bool": bool,
    "equal": lambda y: y == 1,
    "add": lambda y: y + 1,
    "int": int,
    "shape": lambda y: y.shape,
    "numpy": np.asarray,
    "torch.tensor": torch.tensor,
    "tensor == guard": lambda y: y == LABELS,
    "gather": lambda y: LOGITS.gather(1, y),
    "cross entropy": lambda y: F.cross_entropy(LOGITS, y),
    "one hot": F.one_hot,
    "torchmetrics": lambda y: MulticlassAccuracy(3)(LOGITS, y),
}


@pytest.mark.parametrize("labels", [None, LABELS], ids=["empty", "full"])
@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_every_attempt_to_read_raises(attempt: Callable[[Any], Any], labels: torch.Tensor | None) -> None:
    guarded = GuardedLabels("webcam", labels)
    with pytest.raises(LabelGuardError, match="client 'webcam'"):
        attempt(guarded)
    with pytest.raises(TypeError, match="unhashable"):
        hash(guarded)
    assert repr(guarded) == str(guarded) == "GuardedLabels('webcam')"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y))])
def test_copies_and_pickles_stay_guarded(duplicate: Callable[[GuardedLabels], GuardedLabels]) -> None:
    twin = duplicate(GuardedLabels("t", LABELS))
    assert torch.equal(reveal_for_oracle(twin), LABELS)
    with pytest.raises(LabelGuardError):
        len(twin)


def test_moving_a_batch_keeps_the_guard_and_moves_the_labels() -> None:
    moved = move_data_to_device({"t": (LOGITS, GuardedLabels("t", LABELS))}, torch.device("meta"))["t"][1]
    assert reveal_for_oracle(moved).device.type == "meta"
    assert reveal_for_oracle(GuardedLabels("t", LABELS).to(torch.int8)).dtype == torch.int8
    with pytest.raises(LabelGuardError):
        reveal_for_oracle(GuardedLabels("t").to("cpu"))


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_lightning_finds_the_size_of_a_guarded_batch() -> None:
    """`self.log` without a batch size looks into every iterable of the batch; the guard must not look like one."""
    assert extract_batch_size({"a": (LOGITS, LABELS), "t": (LOGITS, GuardedLabels("t"))}) == 2


def test_only_guarded_labels_are_revealed_and_plain_ones_pass() -> None:
    assert torch.equal(reveal_for_oracle(GuardedLabels("t", LABELS)), LABELS)
    assert reveal_for_oracle(LABELS) is LABELS
    with pytest.raises(LabelGuardError, match="give the data module target_labels"):
        reveal_for_oracle(GuardedLabels("t"))


def test_guarding_a_batch_touches_one_clients_labels_only() -> None:
    extra = torch.ones(2)
    batch = {"a": (LOGITS, LABELS), "t": [LOGITS, LABELS, extra]}
    guarded = guard(batch, "t", keep=True)
    assert guarded["a"] is batch["a"]
    inputs, labels, rest = guarded["t"]
    assert inputs is LOGITS
    assert rest is extra
    assert reveal_for_oracle(labels) is LABELS
    assert batch["t"][1] is LABELS  # the batch is left as it was
    with pytest.raises(LabelGuardError):
        reveal_for_oracle(guard({"t": (LOGITS, LABELS)}, "t", keep=False)["t"][1])


@pytest.mark.parametrize("batch", [{}, {"a": (LOGITS, LABELS)}, {"t": (LOGITS,)}, {"t": (LOGITS, GuardedLabels("t"))}])
def test_a_batch_without_labels_of_the_client_is_left_as_it_is(batch: dict[str, Any]) -> None:
    assert guard(batch, "t", keep=True) is batch
