"""Ciphertexts of a scheme as one body, the way messages carry them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedlit.privacy.shared_key import HomomorphicKey


def encrypted(key: HomomorphicKey, vector: Tensor) -> bytes:
    """Body of a vector."""
    return b"".join(key.encrypt(vector))


def added(key: HomomorphicKey, bodies: Sequence[bytes], length: int) -> bytes:
    """Body of the sum of vectors of ``length`` numbers."""
    total: deque[Any] = deque()
    for body in bodies:
        key.add(total, body, length)
    return b"".join(key.write(total))
