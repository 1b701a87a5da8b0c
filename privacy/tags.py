"""Totals that can be checked: tags that add up as the vectors do, under a key that the server has not.

Each client appends to its vector of integers X, written as rows of a matrix, two numbers t = u^T X v + s mod 2^64,
where u, v and s are drawn from a key that the clients share and from the sum that is under way. The tags of a total of
n vectors are the sum of their tags, with n s: without s, zero and all multiples of the total would pass.

A server that publishes another total, such as weights crafted to read data from the next update (Boenisch et al., When
the curious abandon honesty, 2023; Fowl et al., Robbing the Fed, 2022), passes with probability below 2^-55: a
difference of integers of 32 bits has a 2-adic valuation of at most 31, so that each tag vanishes with probability at
most 33 * 2^-33 (a linear family as in Carter and Wegman, 1981).

The check is lost, and confidentiality is not, if a client gives the key to the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from fedlit.privacy.errors import AuthenticationError, DecodeError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import derive

_TAGS = 2
_BITS = 64
_WIDTH = 1024  # of the matrix
_ROWS = 64  # that are taken at once, and stay in the cache

_Integers = NDArray[np.int64]


@final
class Tags:
    """Tags of one sum.

    Args:
        key: 32 bytes that clients share, and the server has not.
        about: Names the sum; no two under one key have the same.
        codec: Grid on which the vectors are.
        clients: Number of those who may send a vector, at least 1.
    """

    def __init__(self, key: bytes, about: bytes, codec: FixedPoint, clients: int) -> None:
        self._codec, self._clients = codec, clients
        self._key = derive(key, "tags of a total", about)
        # a tag is cut into numbers that the grid holds, which add up like any others
        self._bits = min(16, max(1, codec.limit.bit_length() - 1))
        self._per_tag = -(-_BITS // self._bits)
        self.count = _TAGS * self._per_tag
        """Numbers that are appended."""

    def append(self, vector: Tensor) -> Tensor:
        """Return a vector, shape (n,), on the CPU, and its tags, shape (n + count,)."""
        numbers = vector.numpy()

        def fill(start: int, integers: _Integers) -> None:
            self._codec.round_into(numbers[start : start + len(integers)], integers)

        parts = [
            (tag >> shift) % 2**self._bits
            for tag in self._compute(len(numbers), fill, 1)
            for shift in range(0, self._per_tag * self._bits, self._bits)
        ]
        return torch.cat([vector, torch.tensor(parts, dtype=vector.dtype) / self._codec.scale])

    def check(self, total: Tensor, added: int) -> Tensor:
        """Return a decoded total of so many vectors, shape (n + count,), without its tags: shape (n,).

        Raises:
            DecodeError: If it is shorter than its tags, or cannot be of so many vectors.
            AuthenticationError: If its tags are not those of its numbers.
        """
        if not 1 <= added <= self._clients:
            raise DecodeError(f"a total of {added} vectors is published, where {self._clients} clients may send one")
        if len(total) < self.count:
            raise DecodeError(f"a total of {len(total)} numbers has no {self.count} of its tags")
        integers = np.rint(total.cpu().double().numpy() * self._codec.scale).astype(np.int64)
        body, appended = integers[: -self.count], integers[-self.count :].tolist()

        def fill(start: int, out: _Integers) -> None:
            out[:] = body[start : start + len(out)]

        parts = [appended[i : i + self._per_tag] for i in range(0, self.count, self._per_tag)]
        sent = [sum(part << (i * self._bits) for i, part in enumerate(each)) % 2**_BITS for each in parts]
        if sent != self._compute(len(body), fill, added):
            raise AuthenticationError(
                "a total is not the sum of what the clients have sent: the server, or who relays for it, has changed "
                "it. Nothing of it was used"
            )
        return total[: -self.count]

    def _compute(self, length: int, fill: Callable[[int, _Integers], Any], added: int) -> list[int]:
        """Return both tags of the sum of so many vectors, whose integers ``fill`` writes from a position on."""
        stream = Cipher(algorithms.AES256(self._key), modes.CTR(bytes(16))).encryptor()

        def draw(rows: int, columns: int) -> _Integers:
            return np.frombuffer(stream.update(bytes(8 * rows * columns)), np.int64).reshape(rows, columns)

        right = draw(_TAGS, _WIDTH)
        tags = [added * int(offset) for offset in draw(_TAGS, 1)[:, 0]]
        block = np.empty((_ROWS, _WIDTH), np.int64)
        for start in range(0, length, block.size):
            filled = min(block.size, length - start)
            fill(start, block.reshape(-1)[:filled])
            block.reshape(-1)[filled:] = 0
            rows = block[: -(-filled // _WIDTH)]
            left = draw(_TAGS, _ROWS)[:, : len(rows)]
            for index, factors in enumerate(right):
                tags[index] += int(left[index] @ np.einsum("ij,j->i", rows, factors))  # wraps around at 2^64
        return [tag % 2**_BITS for tag in tags]
