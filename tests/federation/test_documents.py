"""Plain data on the wire."""

from __future__ import annotations

import math
import os
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlit.federation import PayloadError
from fedlit.federation.documents import document, fingerprint, read_document
from fedlit.federation.wire import encode
from fedlit.privacy import DecodeError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.integers() | st.text(max_size=3) | st.tuples(st.integers(), st.booleans())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(st.integers(), max_size=1)  # of more, repr has any order
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def structure(text: bytes, **tensors: Tensor) -> Tensor:
    """A message with this text in the place of its structure."""
    return encode({"structure": torch.tensor(list(text), dtype=torch.uint8), **tensors})


@given(VALUES)
def test_plain_data_come_back_with_their_types(value: Any) -> None:
    back = read_document(document(value, "a test"))
    assert repr(back) == repr(value)  # a NaN is not equal to itself, and True is equal to 1
    assert fingerprint(back) == fingerprint(value)


def test_tensors_arrays_and_dictionaries_of_optimisers_come_back() -> None:
    value = {
        "state": {0: {"step": torch.tensor(3.0), "sum": torch.arange(6).reshape(2, 3)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0], "flag": torch.tensor([True])}],
        "milestones": Counter({3: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "array": np.array([[1.5, math.nan]]),
        "number": np.float64(2.5),
        "empty": [torch.empty(0, 3), b"", (), {}],
    }
    back = read_document(document(value, "a test"))
    assert fingerprint(back) == fingerprint(value)
    assert type(back["milestones"]) is Counter
    assert list(back["ordered"]) == ["b", "a"]
    assert back["array"].dtype == np.float64
    assert back["param_groups"][0]["betas"] == (0.9, 0.999)
    assert type(back["state"][0]["step"]) is Tensor


class Runs:
    """Whoever unpickles it makes a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("stolen",)


@pytest.mark.parametrize("value", [Runs(), [lambda: 1], {"a": torch.float32}, np.array([Runs()]), 1j])
def test_objects_are_refused_by_name_before_they_are_sent(value: Any) -> None:
    with pytest.raises(PayloadError, match=r"^checkpoint(\[.*\])? is .* which no message can"):
        document(value, "checkpoint")


def test_what_is_pickled_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(Runs())
    for message in (torch.tensor(list(pickled), dtype=torch.uint8), structure(pickled)):
        with pytest.raises(DecodeError):
            read_document(message)
    assert not Path("stolen").exists()
    pickle.loads(pickled)
    assert Path("stolen").exists(), "or this test shows nothing"


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"",
            b"[",
            b"{}",
            b"[]",
            b'["nothing",1]',
            b'["tensor"]',
            b'["tensor",7]',
            b'["tensor",0,0]',
            b'["tensor",[]]',
        ),
        *(b'["float","1"]', b'["dict",[1]]', b'["dict",1]', b'["dict",[["list"],1]]', b'["set",["list"]]'),
        *(b'["Counter",[["list"],1]]', b"\xff", b"NaN", b"9" * 10_000),
        b'["list",' * 200 + b"1" + b"]" * 200,
        b"[" * 100_000,
    ],
)
def test_what_is_no_document_is_an_error_of_one_kind(text: bytes) -> None:
    with pytest.raises(DecodeError, match="is no document"):
        read_document(structure(text, **{"0": torch.zeros(2)}))


def test_fingerprints_tell_apart_what_is_different_and_nothing_else() -> None:
    different: list[Any] = [
        1, 1.0, True, "1", b"1", None, [1], {1: 1}, {"1": 1}, [1, 1], [[1], 1], [1, [1]], {1}, "", math.nan,
        torch.tensor(1), torch.tensor(1.0), torch.tensor([1]), np.array(1), torch.zeros(2, 1), torch.zeros(1, 2),
    ]  # fmt: skip
    assert len({fingerprint(value) for value in different}) == len(different)
    for one, other in (
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1, 2], (1, 2)),
        (math.nan, float("nan")),
        (object(), object()),
        ({"b", "a", "c"}, {"c", "b", "a"}),
        (torch.arange(6).reshape(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]])),
    ):
        assert fingerprint(one) == fingerprint(other)
