"""Descriptions are equal for equal arguments, in whatever process they are made."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlit.federation.descriptions import described
from fedlit.federation.documents import fingerprint


class Mode(Enum):
    FAST = 1


@dataclass
class Options:
    names: set[str] = field(default_factory=lambda: {"a", "b"})
    mode: Mode = Mode.FAST


class Thing:
    pass


def double(x: float) -> float:
    return 2 * x


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (np.float32(0.5), "0.5"),
        ({"b", "a"}, "{'a', 'b'}"),
        (frozenset({3, 1}), "{1, 3}"),
        ({"x": [1, (2.5,)]}, "{'x': [1, (2.5)]}"),
        (double, f"{__name__}.double"),
        (nn.ReLU, "torch.nn.modules.activation.ReLU"),
        (partial(double, x=1), f"partial({__name__}.double, x=1)"),
        (Mode.FAST, f"{__name__}.Mode.FAST"),
        (Options(), f"{__name__}.Options(names={{'a', 'b'}}, mode={__name__}.Mode.FAST)"),
        (Thing(), f"{__name__}.Thing"),
        (PurePosixPath("a/b"), "PurePosixPath('a/b')"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_description_has_contents_and_no_addresses(value: Any, text: str) -> None:
    assert described(value) == text


def test_functions_of_one_scope_are_described_alike() -> None:
    made = [lambda x, k=k: k * x for k in range(2)]
    assert described(made[0]) == described(made[1])
    assert "0x" not in described([*made, Thing().__class__, object(), double])


@pytest.mark.parametrize("make", [np.arange, torch.arange])
def test_arrays_and_networks_are_described_by_all_their_numbers(make: Any) -> None:
    one, other = make(5000), make(5000)
    assert described(one) == described(other)
    other[2500] += 1  # where repr has dots
    assert repr(make(5000)) == repr(other)
    assert described(one) != described(other)
    network = nn.Linear(2, 2)
    twin = copy.deepcopy(network)
    assert described(network) == described(twin)
    nn.init.constant_(twin.bias, 1)
    assert described(network) != described(twin)


def test_what_contains_itself_has_an_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert described(endless).count("...") == 1


def test_arrays_of_objects_have_a_fingerprint_of_their_contents() -> None:
    makes = [np.array([["a" * 50], {"b": 1}], dtype=object) for _ in range(2)]
    assert fingerprint(makes[0]) == fingerprint(makes[1])
    assert fingerprint(makes[0]) != fingerprint(np.array([["b"], {"b": 1}], dtype=object))


@pytest.mark.slow
def test_descriptions_do_not_depend_on_the_seed_of_hashes() -> None:
    code = (
        "from fedlit.federation.descriptions import described;"
        "print(described({'a': set('abcdefgh'), 'f': print, 'g': lambda x: x, 'h': {('x', frozenset('pq')): 1}}))"
    )
    command = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(command, env={"PYTHONHASHSEED": seed}, check=True, capture_output=True).stdout
        for seed in ("1", "2")
    )
    assert first == second
