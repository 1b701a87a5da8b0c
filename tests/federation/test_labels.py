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

SEALED = torch.tensor([0, 2])
LOGITS = torch.zeros(2, 3)

ATTEMPTS: dict[str, Callable[[Any], Any]] = {
    "index": lambda y: y[0],
    "mask": lambda y: y[y == 1],
    "assign": lambda y: operator.setitem(y, 0, 1),
    "len": len,
    "iterate": lambda y: [label for label in y],
    "list": list,
    "contains": lambda y: 1 in y,
    "bool": bool,
    "equal": lambda y: y == 1,
    "not equal": lambda y: y != y,
    "less": lambda y: y < 1,
    "add": lambda y: y + 1,
    "add from the left": lambda y: 1 + y,
    "times": lambda y: 2 * y,
    "negate": lambda y: -y,
    "int": int,
    "float": float,
    "range": lambda y: range(y),
    "shape": lambda y: y.shape,
    "method": lambda y: y.long(),
    "tolist": lambda y: y.tolist(),
    "numpy": np.asarray,
    "numpy array of": lambda y: np.array([y]),
    "numpy index": lambda y: np.zeros(3)[y],
    "numpy method": lambda y: y.numpy(),
    "torch.tensor": torch.tensor,
    "torch.as_tensor": torch.as_tensor,
    "torch.stack": lambda y: torch.stack([y]),
    "torch.cat": lambda y: torch.cat([LOGITS, y]),
    "torch.equal": lambda y: torch.equal(SEALED, y),
    "tensor == guard": lambda y: y == SEALED,
    "tensor + guard": lambda y: SEALED + y,
    "guard + tensor": lambda y: y + SEALED,
    "gather": lambda y: LOGITS.gather(1, y),
    "tensor index": lambda y: LOGITS[y],
    "cross entropy": lambda y: F.cross_entropy(LOGITS, y),
    "cross entropy by keyword": lambda y: F.cross_entropy(LOGITS, target=y),
    "nll": lambda y: F.nll_loss(LOGITS, y),
    "one hot": F.one_hot,
    "torchmetrics": lambda y: MulticlassAccuracy(3)(LOGITS, y),
}


@pytest.mark.parametrize("sealed", [None, SEALED], ids=["empty", "sealed"])
@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_every_attempt_to_read_raises(attempt: Callable[[Any], Any], sealed: torch.Tensor | None) -> None:
    with pytest.raises(LabelGuardError, match="labels of target client 'webcam' are not available"):
        attempt(GuardedLabels("webcam", sealed))


def test_the_hash_is_refused_too() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(GuardedLabels("t"))


def test_printing_shows_the_client_and_no_label() -> None:
    assert repr(GuardedLabels("webcam", SEALED)) == str(GuardedLabels("webcam", SEALED)) == "GuardedLabels('webcam')"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y))])
def test_copies_and_pickles_stay_guarded(duplicate: Callable[[GuardedLabels], GuardedLabels]) -> None:
    twin = duplicate(GuardedLabels("t", SEALED))
    assert torch.equal(reveal_for_oracle(twin), SEALED)
    with pytest.raises(LabelGuardError):
        len(twin)


def test_moving_a_batch_keeps_the_guard_and_moves_the_labels() -> None:
    moved = move_data_to_device({"t": (LOGITS, GuardedLabels("t", SEALED))}, torch.device("meta"))["t"][1]
    assert reveal_for_oracle(moved).device.type == "meta"
    assert reveal_for_oracle(GuardedLabels("t", SEALED).to(torch.int8)).dtype == torch.int8
    with pytest.raises(LabelGuardError):
        reveal_for_oracle(GuardedLabels("t").to("cpu"))


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_lightning_finds_the_size_of_a_guarded_batch() -> None:
    """`self.log` without a batch size looks into every iterable of the batch; the guard must not look like one."""
    assert extract_batch_size({"a": (LOGITS, SEALED), "t": (LOGITS, GuardedLabels("t"))}) == 2


def test_only_sealed_labels_are_revealed_and_plain_ones_pass() -> None:
    assert torch.equal(reveal_for_oracle(GuardedLabels("t", SEALED)), SEALED)
    assert reveal_for_oracle(SEALED) is SEALED
    with pytest.raises(LabelGuardError, match="give the data module target_labels"):
        reveal_for_oracle(GuardedLabels("t"))


def test_guarding_a_batch_touches_one_clients_labels_only() -> None:
    extra = torch.ones(2)
    batch = {"a": (LOGITS, SEALED), "t": [LOGITS, SEALED, extra]}
    guarded = guard(batch, "t", keep=True)
    assert guarded["a"] is batch["a"]
    inputs, labels, rest = guarded["t"]
    assert inputs is LOGITS
    assert rest is extra
    assert reveal_for_oracle(labels) is SEALED
    assert batch["t"][1] is SEALED  # the batch given is left as it was


def test_labels_that_are_not_kept_are_thrown_away() -> None:
    with pytest.raises(LabelGuardError):
        reveal_for_oracle(guard({"t": (LOGITS, SEALED)}, "t", keep=False)["t"][1])


@pytest.mark.parametrize("batch", [{}, {"a": (LOGITS, SEALED)}, {"t": (LOGITS,)}, {"t": (LOGITS, GuardedLabels("t"))}])
def test_a_batch_without_labels_of_the_client_is_left_as_it_is(batch: dict[str, Any]) -> None:
    assert guard(batch, "t", keep=True) is batch
