"""FixedPoint: rounding to the grid, and that nothing ever wraps."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlit.privacy import FixedPoint, InputError, RangeError
from refused import refused


def test_numbers_go_to_the_nearest_step_half_to_even_by_hand() -> None:
    codec = FixedPoint(fraction_bits=2, bound=8.0)
    numbers = torch.tensor([0.0, 0.25, 0.3, -0.3, 0.125, 0.375, -0.125, 7.99])
    assert codec.encode(numbers).tolist() == [0, 1, 1, -1, 0, 2, 0, 32]
    assert codec.decode(codec.encode(numbers)).tolist() == [0, 0.25, 0.25, -0.25, 0, 0.5, 0, 8.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_decoding_leaves_the_integers_as_they_are(dtype: torch.dtype) -> None:
    integers = torch.tensor([4, -8], dtype=dtype)
    assert FixedPoint(fraction_bits=2).decode(integers).tolist() == [1.0, -2.0]
    assert integers.tolist() == [4, -8]


@given(st.lists(st.floats(-32, 32, width=32), min_size=1), st.integers(0, 20), st.booleans())
def test_encoding_agrees_with_exact_rational_arithmetic(numbers: list[float], fraction_bits: int, wide: bool) -> None:
    codec = FixedPoint(fraction_bits, bound=32.0)
    vector = torch.tensor(numbers, dtype=torch.float64 if wide else torch.float32)
    assert codec.encode(vector).tolist() == [round(Fraction(number) * 2**fraction_bits) for number in numbers]


@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [math.inf], [-math.inf, 0.0], [1]])
def test_nan_infinity_and_integers_are_refused(bad: list[float]) -> None:
    with pytest.raises(InputError):
        FixedPoint().encode(torch.tensor(bad))
    assert FixedPoint().encode(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("number", [32.01, -32.01, 1e30])
def test_numbers_past_the_bound_are_refused_and_those_at_it_are_not(number: float) -> None:
    codec = FixedPoint()
    assert codec.encode(torch.tensor([32.0, -32.0])).tolist() == [2**25, -(2**25)]
    with pytest.raises(RangeError, match="fixed-point bound is 32: raise bound"):
        codec.encode(torch.tensor([0.0, number]))


def test_half_a_step_past_the_bound_does_not_round_past_the_limit() -> None:
    codec = FixedPoint(fraction_bits=0, bound=3.0)
    assert codec.encode(torch.tensor([3.0, -3.4, 2.5])).tolist() == [3, -3, 2]
    with pytest.raises(RangeError):  # half to even would make it 4
        codec.encode(torch.tensor([3.5]))
    assert FixedPoint(20, 0.3).encode(torch.tensor([0.3])).tolist() == [314573]  # a bound between two steps


def test_headroom_is_checked_with_the_numbers_named() -> None:
    codec = FixedPoint()
    codec.check_headroom(63, 2**31 - 1, "uint32 masks")
    with pytest.raises(RangeError, match=r"sum of 64 clients can reach 2147483648 .* uint32 masks hold only"):
        codec.check_headroom(64, 2**31 - 1, "uint32 masks")


@pytest.mark.parametrize(
    ("argument", "fraction_bits", "bound"),
    [
        ("fraction_bits", -1, 32.0),
        ("fraction_bits", 150, 2.0**-100),
        ("bound", 20, 0.0),
        ("bound", 50, 8.0),
        ("bound", 0, 0.5),
    ],
)
def test_impossible_grids_are_refused(argument: str, fraction_bits: Any, bound: float) -> None:
    with refused(argument):
        FixedPoint(fraction_bits, bound)
