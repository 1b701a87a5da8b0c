"""Totals that can be checked: tags that add up as the vectors do, under a key that the server has not.

Each client appends to its vector of integers its Poly1305 authenticator (Bernstein, The Poly1305-AES message
authentication code, FSE 2005): a polynomial in r modulo 2^130 - 5, whose coefficients are the numbers, four or two of
them packed into each, plus an offset. So the authenticators of vectors add up to that of their total as long as sums of
numbers do not run into their neighbours. All clients share r, which is drawn from a key that they have, from the sum
that is under way and from what the numbers mean; offsets are the client's own, as multiples of one vector would
otherwise pass for the total.

A server that publishes another total, such as weights crafted to read data from the next update (Boenisch et al., When
the curious abandon honesty, 2023; Fowl et al., Robbing the Fed, 2022), passes with probability of at most
(4 K + 4) L 2^-106 for K clients and L coefficients, which is below 2^-68 for 1000 clients and 1e8 numbers: two totals
whose numbers are within what the clients can add up to, which is checked, have different polynomials.

The check is lost, and confidentiality is not, if a client gives the key to the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from numpy.typing import NDArray
from torch import Tensor

from fedlit.privacy.errors import AuthenticationError, DecodeError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import derive, digest

_PRIME = 2**130 - 5
_WRAP = 2**128  # an authenticator is cut off there
_CLAMP = 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
_COEFFICIENT = 16  # bytes
_CHUNK = 1 << 15  # numbers, which stay in the cache

_Integers = NDArray[np.signedinteger[Any]]


FALSE_TOTAL = (
    "a total is not the sum of what the clients have sent: the server, or who relays for it, has changed it. Nothing "
    "of it was used"
)
"""Error text for every false total, whatever its numbers: what is wrong with it would tell the server about them."""


@final
class Tags:
    """Tags of one sum.

    Args:
        key: 32 bytes that clients share, and the server has not.
        about: Names the sum; no two under one key have the same.
        codec: Grid on which the vectors are.
        num_clients: That may send one.
    """

    def __init__(self, key: bytes, about: bytes, codec: FixedPoint, num_clients: int) -> None:
        self._codec, self._num_clients = codec, num_clients
        self._key = derive(key, "tags of a total", about)
        self._packed = np.dtype(np.int32 if 2 * codec.largest_sum(num_clients) < 2**32 else np.int64)
        # an authenticator is cut into numbers that the grid holds, which add up like any others
        self._bits = min(16, max(1, codec.limit.bit_length() - 1))
        self.count = -(-128 // self._bits)
        """Numbers that are appended."""

    def of(self, schema: bytes, weighted: bool) -> Tags:
        """Return the tags of vectors that mean this: their entries, and whether a weight is at the end."""
        return Tags(self._key, digest("vectors", schema, weighted), self._codec, self._num_clients)

    def append(self, vector: Tensor, client: str) -> Tensor:
        """Return a client's vector, shape (n,), on the CPU, and its tags, shape (n + count,)."""
        numbers, running = vector.numpy(), self.begin(client)
        block = np.empty(_CHUNK, np.int64)
        for start in range(0, len(numbers), _CHUNK):
            integers = block[: len(numbers[start : start + _CHUNK])]
            self._codec.round_into(numbers[start : start + _CHUNK], integers)
            running.take(integers)
        tags = torch.from_numpy(self.numbers(running)).to(vector.dtype)
        return torch.cat([vector, tags / self._codec.scale])

    def begin(self, client: str) -> Running:
        """Begin the tags of a client's vector."""
        return Running(self._r + self._offset(client), self._packed, self._codec.limit)

    def numbers(self, running: Running) -> NDArray[np.int64]:
        """Return the integers to append to the vector that has been taken in, shape (count,)."""
        authenticator, _ = running.finish()
        return np.array([(authenticator >> at) % 2**self._bits for at in self._places()], np.int64)

    def check(self, total: Tensor, clients: Sequence[str]) -> Tensor:
        """Return a decoded total of the clients' vectors, shape (n + count,), without its tags: shape (n,).

        Raises:
            DecodeError: If it is shorter than its tags.
            AuthenticationError: If its tags are not those of its numbers, or a number is beyond what they add up to.
        """
        if total.dim() != 1 or len(total) < self.count:
            raise DecodeError(f"a total of shape {tuple(total.shape)} is no row with {self.count} tags at its end")
        largest = self._codec.largest_sum(len(clients))
        running = Running(self._r + bytes(_COEFFICIENT), self._packed, largest)
        reals, rest = total.cpu().double().numpy(), len(total) - self.count
        for start in range(0, rest, _CHUNK):
            running.take(self._integers(reals[start : min(start + _CHUNK, rest)], largest))
        parts = self._integers(reals[rest:], largest)
        sent = sum(part << at for part, at in zip(parts.tolist(), self._places(), strict=True))
        sent -= sum(int.from_bytes(self._offset(client), "little") for client in clients)
        if not self._is_sum(sent, *running.finish(), len(clients)):
            raise AuthenticationError(FALSE_TOTAL)
        return total[: -self.count]

    def _integers(self, reals: NDArray[np.float64], largest: int) -> NDArray[np.int64]:
        """Integers of some numbers of a total, none of them beyond ``largest``."""
        scaled = reals * self._codec.scale
        if len(scaled) and not -largest <= scaled.min() <= scaled.max() <= largest:  # NaN neither
            raise AuthenticationError(FALSE_TOTAL)
        integers = scaled.astype(np.int64)
        if not np.array_equal(integers, scaled):  # or clients could hold totals that differ by half a step
            raise AuthenticationError(FALSE_TOTAL)
        return integers

    def _is_sum(self, sent: int, authenticator: int, coefficients: int, num_clients: int) -> bool:
        """Whether authenticators of ``num_clients`` vectors, without offsets, can have the sum ``sent``."""
        r = int.from_bytes(self._r, "little") & _CLAMP
        # Poly1305 adds 2^128 to each coefficient: here once, and in the sum once for each client
        # r is 1 with probability 2^-106
        powers = r * (pow(r, coefficients, _PRIME) - 1) * pow(r - 1, -1, _PRIME)
        difference = authenticator + (num_clients - 1) * _WRAP * powers - sent
        # each polynomial lost at most three times 2^128 when it was cut off, and each offset one
        lost = difference * pow(_WRAP, -1, _PRIME) % _PRIME
        return lost <= 4 * num_clients or lost >= _PRIME - 3

    @property
    def _r(self) -> bytes:
        return derive(self._key, "r", length=_COEFFICIENT)

    def _offset(self, client: str) -> bytes:
        return derive(self._key, "offset", client, length=_COEFFICIENT)

    def _places(self) -> range:
        """First bits of the numbers that an authenticator is cut into."""
        return range(0, self.count * self._bits, self._bits)


@final
class Running:
    """The authenticator of a vector whose integers are taken in from the front to the back."""

    def __init__(self, key: bytes, packed: np.dtype[Any], largest: int) -> None:
        self._authenticator = Poly1305(key)
        self._block = np.empty(_CHUNK, packed)
        self._bytes = self._block.data.cast("B")
        self._largest = packed.type(largest)
        self._taken = 0

    def take(self, integers: _Integers) -> None:
        """Take in the next integers, shape (n,), none of them beyond ``largest``."""
        for start in range(0, len(integers), _CHUNK):
            chunk = integers[start : start + _CHUNK]
            block = self._block[: len(chunk)]
            # without a sign from here on, as the numbers are a coefficient's digits
            np.add(chunk, self._largest, out=block, casting="unsafe")
            self._authenticator.update(self._bytes[: block.nbytes])
        self._taken += len(integers) * self._block.itemsize

    def finish(self) -> tuple[int, int]:
        """Return the authenticator, in [0, 2^128), and how many coefficients the polynomial has."""
        self._authenticator.update(bytes(-self._taken % _COEFFICIENT))
        return int.from_bytes(self._authenticator.finalize(), "little"), -(-self._taken // _COEFFICIENT)
