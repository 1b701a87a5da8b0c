"""FixedPoint: reals on a grid of integers, so that sums are exact whatever carries them."""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlit.checks import check, check_positive
from fedlit.privacy.errors import InputError, RangeError

_MAX_BITS = 52
"""Integers up to 2**53 are exact in float64, and one bit is for rounding at the bound."""

_MAX_FRACTION_BITS = 60
"""So that no product with the scale leaves float32."""


@final
class FixedPoint:
    """Encodes x as the nearest integer to ``x * 2**fraction_bits``, half to even.

    NaN, infinity and numbers beyond the bound raise an error; nothing wraps around.

    Args:
        fraction_bits: Binary digits after the point, 0 to 60. One number is off by at most
            ``2**-(fraction_bits + 1)``.
        bound: Greatest absolute value of a number, positive.

    Raises:
        ValueError: If an argument is out of range, or the grid has more than 2**52 steps up to ``bound``.
    """

    def __init__(self, fraction_bits: int = 20, bound: float = 32.0) -> None:
        rule = f"an integer from 0 to {_MAX_FRACTION_BITS}"
        fits = fraction_bits in range(_MAX_FRACTION_BITS + 1) and not isinstance(fraction_bits, bool)
        check(fits, "fraction_bits", rule, fraction_bits)
        check_positive("bound", bound)
        self.fraction_bits = int(fraction_bits)
        self.bound = float(bound)
        self.scale = 2.0**self.fraction_bits
        self.limit = round(self.bound * self.scale)
        steps = f"{bound:g} * 2**{fraction_bits}"
        check(
            1 <= self.limit <= 2**_MAX_BITS,
            "bound",
            f"from 1 to 2**{_MAX_BITS} steps of 2**-fraction_bits",
            bound,
            "change one of them",
            shown=steps,
        )

    def check(self, vector: Tensor) -> None:
        """Raise unless every entry of a floating-point ``vector`` can be encoded.

        An `InputError` at NaN, infinity or another type, a `RangeError` beyond the bound.
        """
        is_floating = vector.is_floating_point()
        check(is_floating, "vector", "of floating-point numbers", vector.dtype, "convert it", InputError)
        if not vector.numel():
            return
        low, high = (float(end) for end in torch.aminmax(vector))
        largest = max(-low, high)  # NaN anywhere makes both ends NaN
        if not math.isfinite(low) or not math.isfinite(high):
            raise InputError("cannot encode NaN or infinity: the model has diverged")
        if round(largest * self.scale) > self.limit:
            raise RangeError(
                f"the largest number is {largest:g} in absolute value, but the fixed-point bound is {self.bound:g}: "
                "raise bound (and lower fraction_bits if the backend then lacks headroom), or clip the numbers"
            )

    def encode(self, vector: Tensor) -> Tensor:
        """Integers of a vector of any shape, as int64; errors as `check`."""
        self.check(vector)
        return self.round(vector)

    def round(self, vector: Tensor) -> Tensor:
        """As `encode`, without `check`: for chunks of a checked vector."""
        if vector.dtype == torch.float16:
            vector = vector.float()  # which has room for the product
        # float32 * 2**k and its rounding are exact, as long as the product has no more than 24 bits to round
        return (vector * self.scale).round_().to(torch.int64)

    def round_into(self, numbers: NDArray[np.floating[Any]], integers: NDArray[np.signedinteger[Any]]) -> None:
        """As `round`, from float32 or float64 into integers that hold the result.

        For chunks that stay in the cache: torch would wake its threads for each, and on a busy machine wait for them.
        """
        scaled = numbers * numbers.dtype.type(self.scale)
        np.rint(scaled, out=scaled)
        np.copyto(integers, scaled, casting="unsafe")

    def decode(self, integers: Tensor) -> Tensor:
        """Reals of a (sum of) encoded vector(s), as float64: exact up to 2**53 steps."""
        return integers.to(torch.float64, copy=True).div_(self.scale)

    def largest_sum(self, num_clients: int) -> int:
        """Greatest absolute value of a sum of encoded numbers of ``num_clients`` clients."""
        return num_clients * self.limit

    def check_headroom(self, num_clients: int, capacity: int, what: str) -> None:
        """Raise a `RangeError` unless sums over ``num_clients`` stay within ``capacity`` in absolute value.

        ``what`` has that capacity, for the message: "uint32 masks".
        """
        if self.largest_sum(num_clients) > capacity:
            raise RangeError(
                f"the sum of {num_clients} clients can reach {self.largest_sum(num_clients)} in fixed point, but "
                f"{what} hold only |x| <= {capacity}: lower fraction_bits ({self.fraction_bits}) or bound "
                f"({self.bound:g})"
            )

    def error_bound(self, num_clients: int) -> float:
        """Greatest absolute error of one entry of a sum: half a step per client."""
        return num_clients / self.scale / 2

    def error_text(self) -> str:
        """The error of one entry of a sum, in words."""
        return f"at most K * 2^-{self.fraction_bits + 1} for K clients, numbers up to {self.bound:g}; the sum is exact"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FixedPoint):
            return NotImplemented
        return (self.fraction_bits, self.bound) == (other.fraction_bits, other.bound)

    def __hash__(self) -> int:
        return hash((self.fraction_bits, self.bound))

    def __repr__(self) -> str:
        return f"FixedPoint(fraction_bits={self.fraction_bits}, bound={self.bound:g})"
