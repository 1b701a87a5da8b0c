"""Plain sums: no secrecy, the reference that every other backend is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.privacy.base import AggregationClient, AggregationServer, Description, RoundId, SecureAggregation
from fedlit.privacy.errors import DecodeError, QuorumError
from fedlit.privacy.fixed_point import FixedPoint


@final
class Plain(SecureAggregation):
    """Sends vectors as they are. The server reads every client's vector.

    Args:
        codec: ``None`` adds floats in order. With a grid, numbers are rounded to it before they are added, and sums
            are bit for bit those of every exact backend on the same grid.
    """

    key_holder: ClassVar[Literal["server", "clients"]] = "server"
    min_clients: int = 1

    def __init__(self, codec: FixedPoint | None = None) -> None:
        self.codec = codec

    def client(self, name: str) -> AggregationClient:
        """Sends its vector."""
        return _PlainClient(name, self.codec)

    def server(self) -> AggregationServer:
        """Adds vectors."""
        return _PlainServer(self.codec)

    def error_bound(self, num_clients: int) -> float:
        """0 for floats: nothing is added to their rounding. On a grid, half a step per client."""
        return 0.0 if self.codec is None else self.codec.error_bound(num_clients)

    def describe(self) -> Description:
        """Everything is revealed."""
        return Description(
            backend="Plain",
            adversary="none: the server is trusted",
            hidden="nothing",
            revealed="every client's vector, to the server",
            collusion="not applicable",
            dropouts="a sum runs over those who sent",
            bytes_per_number=float(torch.float32.itemsize if self.codec is None else torch.int64.itemsize),
            error="float32 rounding only" if self.codec is None else self.codec.error_text(),
        )


@final
class _PlainClient(AggregationClient):
    def __init__(self, name: str, codec: FixedPoint | None) -> None:
        super().__init__(name)
        self._codec = codec

    def protect(self, vector: Tensor) -> Tensor:
        return vector if self._codec is None else self._codec.encode(vector)


@final
class _PlainServer(AggregationServer):
    def __init__(self, codec: FixedPoint | None) -> None:
        self._codec = codec
        self.on_grid = codec is not None
        self._total: Tensor | None = None

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        self._total = None

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        """Sum in the order given.

        Float addition does not associate bit by bit, and results must not depend on where a client is hosted.
        """
        self._total = None
        for name, vector in messages.items():
            self.add(name, vector)
        return self.total()

    def add(self, name: str, message: Tensor) -> None:
        """Add a vector, of which nothing is kept."""
        dtypes = (torch.float32, torch.float64) if self._codec is None else (torch.int64,)
        total, self._total = self._total, None
        form = (message.dtype, tuple(message.shape))
        expected = form if total is None else (total.dtype, tuple(total.shape))
        equal = message.dim() == 1 and form == expected
        check(equal, "vectors", f"rows of equal type and length, as {expected}", form, error=DecodeError)
        types = " or ".join(map(str, dtypes))
        check(message.dtype in dtypes, "vectors", f"of {types}", message.dtype, error=DecodeError)
        self._total = message.clone() if total is None else total.add_(message)

    def total(self) -> Tensor:
        """Sum of the vectors that were added."""
        total, self._total = self._total, None
        if total is None:
            raise QuorumError("there is no vector to add")
        return total

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        return total if self._codec is None else self._codec.decode(total)
