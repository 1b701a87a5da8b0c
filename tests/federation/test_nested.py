"""Inputs of several tensors: their samples, parts and shapes, against the same of single tensors."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlit.federation import Facts
from fedlit.federation.client import introductions
from fedlit.federation.labels import known_samples
from fedlit.federation.nested import (
    concatenate,
    in_words,
    leaves,
    mapped,
    num_samples,
    pieces,
    rebuilt,
    sample_shape,
    take,
    vectors,
)
from fedlit.privacy import DecodeError

A, B = torch.arange(12.0).reshape(6, 2), torch.arange(6.0).reshape(6, 1) - 6


class Named(NamedTuple):
    image: Tensor
    age: Tensor


@dataclass(frozen=True)
class Record:
    image: Tensor
    age: Tensor


FORMS: dict[str, tuple[Any, list[str]]] = {
    "tensor": (A, [""]),
    "dict": ({"image": A, "age": B}, ["['age']", "['image']"]),
    "ordered": (OrderedDict(image=A, age=B), ["['age']", "['image']"]),
    "list": ([A, B], ["[0]", "[1]"]),
    "tuple": ((A, B), ["[0]", "[1]"]),
    "named": (Named(A, B), ["[0]", "[1]"]),
    "dataclass": (Record(A, B), [".age", ".image"]),
    "deep": ({"x": [A, {"y": (B,)}], 3: B}, ["['x'][0]", "['x'][1]['y'][0]", "[3]"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_structure_is_taken_apart_and_put_together(form: str) -> None:
    inputs, paths = FORMS[form]
    found = leaves(inputs)
    assert list(found) == sorted(paths)
    assert num_samples(inputs) == 6
    again = rebuilt(inputs, found)
    assert type(again) is type(inputs)
    assert all(again_leaf is found[path] for path, again_leaf in leaves(again).items())
    doubled = leaves(mapped(lambda leaf: 2 * leaf, inputs))
    assert all(torch.equal(doubled[path], 2 * leaf) for path, leaf in found.items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "rows", [torch.tensor([4, 0, 0]), torch.arange(6) % 2 == 0, slice(1, 3), torch.empty(0, dtype=torch.int64)]
)
def test_samples_are_taken_of_each_tensor(form: str, rows: Any) -> None:
    inputs, _ = FORMS[form]
    taken = take(inputs, rows)
    assert type(taken) is type(inputs)
    for path, leaf in leaves(inputs).items():
        assert torch.equal(leaves(taken)[path], leaf[rows])


@pytest.mark.parametrize("form", FORMS)
def test_pieces_put_together_are_the_whole(form: str) -> None:
    inputs, _ = FORMS[form]
    parts = list(pieces(inputs, 4))
    assert [num_samples(part) for part in parts] == [4, 2]
    for path, leaf in leaves(concatenate(parts)).items():
        assert torch.equal(leaf, leaves(inputs)[path])


def test_what_stays_beside_tensors_goes_along() -> None:
    batch = {"x": A, "names": list("abcdef"), "array": np.arange(6), "scale": 3.0}
    taken = take(batch, torch.tensor([5, 1]))
    assert taken["names"] == ["f", "b"]
    assert taken["array"].tolist() == [5, 1]
    assert taken["scale"] == 3.0
    assert take(list("abc"), torch.tensor([True, False, True])) == ["a", "c"]
    assert concatenate([["a"], ["b", "c"]]) == ["a", "b", "c"]
    assert mapped(Tensor.double, batch)["names"] == list("abcdef")
    with pytest.raises(TypeError, match="of type set"):
        take({"t": {1, 2}}, slice(0, 1))
    with pytest.raises(TypeError, match="got ndarray"):
        leaves(batch)
    with pytest.raises(ValueError, match="must have the tensors"):
        concatenate([{"a": A}, {"b": A}])


def test_the_order_of_a_dictionary_plays_no_part() -> None:
    one, other = {"image": A, "age": B}, {"age": B, "image": A}
    assert torch.equal(vectors(one), vectors(other))
    assert torch.equal(vectors(one), torch.cat([B, A], dim=1))
    assert sample_shape(one) == sample_shape(other) == (("['age']", (1,)), ("['image']", (2,)))
    assert torch.equal(concatenate([one, other])["image"], torch.cat([A, A]))
    assert in_words(sample_shape(one)) == "['age'] (1,), ['image'] (2,)"
    assert in_words(sample_shape(A)) == "(2,)"


def test_only_floating_rows_are_vectors() -> None:
    assert vectors(A) is A
    for other in (A.long(), A[:, 0], {"x": A, "pixels": torch.zeros(6, 1, 2, 2)}, ["text"] * 6):
        assert vectors(other) is None


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (torch.tensor([0, -1, 2]), [True, False, True]),
        (torch.tensor([0.0, float("nan"), 2.0]), [True, False, True]),
        (torch.tensor([[0, -1], [-1, -1], [1, 1]]), [True, False, True]),
        (torch.tensor([[0.0, 1.0], [1.0, float("nan")], [1.0, 1.0]]), [True, False, True]),
        ({"boxes": torch.zeros(3, 4), "class": torch.tensor([1, -1, 0])}, [True, False, True]),
        (["cat", "dog", "cat"], [True, True, True]),
    ],
)
def test_samples_with_a_label_are_found_in_labels_of_every_form(labels: Any, expected: list[bool]) -> None:
    assert known_samples(labels).tolist() == expected


def test_shapes_of_several_tensors_are_introduced_and_others_refused() -> None:
    shape = (("['age']", (1,)), ("['image']", (3, 8, 8)))
    assert introductions([{"a": (7, shape)}], {"a": 0}) == {"a": Facts(7, shape)}
    one = ("x", (1,))
    for bad in (one, (("x", 1),), ((1, (2,)),), (("x", (-1,)),), (("x", ("y",)),), (one, 5), [one]):
        with pytest.raises(DecodeError, match="rank 0 introduces client 'a'"):
            introductions([{"a": (7, bad)}], {"a": 0})
