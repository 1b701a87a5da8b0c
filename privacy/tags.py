"""Totals that can be checked: tags that add up as the vectors do, under a key that the server has not.

Each client appends to its vector of integers X, written as rows of a matrix, two numbers t = u^T X v + s mod 2^64,
where u, v and s are drawn from a key that the clients share, from the sum that is under way and from what the numbers
mean, and s from the client too: otherwise multiples of one vector would pass for the total. The tags of a total are the
sum of the tags of its vectors.

A server that publishes another total, such as weights crafted to read data from the next update (Boenisch et al., When
the curious abandon honesty, 2023; Fowl et al., Robbing the Fed, 2022), passes with probability below 2^-55
for grids whose totals have 32 bits: numbers beyond what the clients can add up to are refused, so that a difference has
a 2-adic valuation of at most 31, and each tag vanishes with probability at most 33 * 2^-33 (a linear family as in
Carter and Wegman, 1981).

The check is lost, and confidentiality is not, if a client gives the key to the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from fedlit.privacy.errors import AuthenticationError, DecodeError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import derive, digest

_TAGS = 2
_BITS = 64
_WIDTH = 1024  # of the matrix
BLOCK = 32 * _WIDTH
"""Numbers that are taken in at once, and stay in the cache."""

_Integers = NDArray[np.int64]


@final
class Tags:
    """Tags of one sum.

    Args:
        key: 32 bytes that clients share, and the server has not.
        about: Names the sum; no two under one key have the same.
        codec: Grid on which the vectors are.
    """

    def __init__(self, key: bytes, about: bytes, codec: FixedPoint) -> None:
        self._codec = codec
        self._key = derive(key, "tags of a total", about)
        # a tag is cut into numbers that the grid holds, which add up like any others
        self._bits = min(16, max(1, codec.limit.bit_length() - 1))
        self._per_tag = -(-_BITS // self._bits)
        self.count = _TAGS * self._per_tag
        """Numbers that are appended."""

    def of(self, schema: bytes, weighted: bool) -> Tags:
        """Return the tags of vectors that mean this: their entries, and whether a weight is at the end."""
        return Tags(self._key, digest("vectors", schema, weighted), self._codec)

    def append(self, vector: Tensor, client: str) -> Tensor:
        """Return a client's vector, shape (n,), on the CPU, and its tags, shape (n + count,)."""
        numbers, running = vector.numpy(), self.begin(client)
        block = np.empty(BLOCK, np.int64)
        for start in range(0, len(numbers), BLOCK):
            integers = block[: len(numbers[start : start + BLOCK])]
            self._codec.round_into(numbers[start : start + BLOCK], integers)
            running.take(integers)
        tags = torch.from_numpy(self.numbers(running)).to(vector.dtype)
        return torch.cat([vector, tags / self._codec.scale])

    def begin(self, client: str) -> Running:
        """Begin the tags of a client's vector."""
        return Running(self._key, [client])

    def numbers(self, running: Running) -> _Integers:
        """Return the integers to append to the vector that has been taken in, shape (count,)."""
        shifts = range(0, self._per_tag * self._bits, self._bits)
        return np.array([(tag >> shift) % 2**self._bits for tag in running.tags for shift in shifts], np.int64)

    def check(self, total: Tensor, clients: Sequence[str]) -> Tensor:
        """Return a decoded total of the clients' vectors, shape (n + count,), without its tags: shape (n,).

        Raises:
            DecodeError: If it is shorter than its tags.
            AuthenticationError: If its tags are not those of its numbers, or a number is beyond what they add up to.
        """
        if len(total) < self.count:
            raise DecodeError(f"a total of {len(total)} numbers has no {self.count} of its tags")
        largest = self._codec.largest_sum(len(clients)) / self._codec.scale
        if not bool((total.abs() <= largest).all()):  # NaN neither
            raise AuthenticationError(f"a total has numbers beyond the {largest:g} that its clients can add up to")
        integers = np.rint(total.cpu().double().numpy() * self._codec.scale).astype(np.int64)
        body, appended, running = integers[: -self.count], integers[-self.count :].tolist(), Running(self._key, clients)
        for start in range(0, len(body), BLOCK):
            running.take(body[start : start + BLOCK])
        parts = [appended[i : i + self._per_tag] for i in range(0, self.count, self._per_tag)]
        sent = [sum(part << (i * self._bits) for i, part in enumerate(each)) % 2**_BITS for each in parts]
        if sent != running.tags:
            raise AuthenticationError(
                "a total is not the sum of what the clients have sent: the server, or who relays for it, has changed "
                "it. Nothing of it was used"
            )
        return total[: -self.count]


@final
class Running:
    """Both tags of the sum of some clients' vectors, whose integers are taken in from the front to the back."""

    def __init__(self, key: bytes, clients: Sequence[str]) -> None:
        self._stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
        self._right = self._draw(_TAGS, _WIDTH)
        offsets = [derive(key, "offset", client, length=8 * _TAGS) for client in clients]
        cuts = [slice(8 * index, 8 * index + 8) for index in range(_TAGS)]
        self._tags = [sum(int.from_bytes(each[cut], "little") for each in offsets) for cut in cuts]

    @property
    def tags(self) -> list[int]:
        """Tags of what has been taken in, in [0, 2^64)."""
        return [tag % 2**_BITS for tag in self._tags]

    def take(self, integers: NDArray[np.signedinteger[Any]]) -> None:
        """Take in the next integers, shape (n,), where n is a multiple of 1024, unless they are the last."""
        rows = np.zeros((-(-len(integers) // _WIDTH), _WIDTH), np.int64)
        rows.reshape(-1)[: len(integers)] = integers
        left = self._draw(len(rows), _TAGS)
        for index, factors in enumerate(self._right):
            # products and sums wrap around at 2^64
            self._tags[index] += int(left[:, index] @ np.einsum("ij,j->i", rows, factors))

    def _draw(self, rows: int, columns: int) -> _Integers:
        return np.frombuffer(self._stream.update(bytes(8 * rows * columns)), np.int64).reshape(rows, columns)
