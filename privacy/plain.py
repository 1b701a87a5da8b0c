"""Plain sums: no secrecy, the reference that every other backend is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedlit.privacy.base import Description, RoundId, SecureAggregation


@final
class Plain(SecureAggregation):
    """Sends vectors as they are. The server reads every client's vector."""

    key_holder: ClassVar[Literal["server", "clients"]] = "server"
    min_clients: ClassVar[int] = 1

    def open_round(self, clients: Sequence[str], round_id: RoundId) -> None:
        """Nothing to agree on."""

    def protect(self, client: str, vector: Tensor) -> Tensor:
        """The vector itself."""
        return vector

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        """Sum in the order given.

        Float addition does not associate bit by bit, and results must not depend on where a client is hosted.
        """
        vectors = iter(messages.values())
        total = next(vectors).clone()
        for vector in vectors:
            total += vector
        return total

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        """The total itself."""
        return total

    def error_bound(self, num_clients: int) -> float:
        """0: nothing is added to the rounding of floats."""
        return 0.0

    def describe(self) -> Description:
        """Everything is revealed."""
        return Description(
            backend="Plain",
            adversary="none: the server is trusted",
            hidden="nothing",
            revealed="every client's vector, to the server",
            collusion="not applicable",
            dropouts="a sum runs over those who sent",
            bytes_per_number=float(torch.float32.itemsize),
            error="float32 rounding only",
        )
