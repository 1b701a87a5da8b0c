"""Int16: sums of 16-bit integers, half the bytes of floats. It hides nothing.

What a backend must say: who is assumed to look, what they do not learn, what somebody learns nevertheless. Do not claim
more than holds. For one that hides something, with keys and steps, read `fedlit.privacy.PairwiseMasking`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedlit.privacy import AggregationClient, AggregationServer, Description, FixedPoint, QuorumError, SecureAggregation

LARGEST = torch.iinfo(torch.int16).max


@final
class Int16(SecureAggregation):
    """Sends numbers as 16-bit integers. The server reads every client's vector.

    Args:
        fraction_bits: Binary digits after the point; numbers may then be up to 32767 / 2^fraction_bits.
    """

    key_holder: ClassVar[Literal["server", "clients"]] = "server"
    min_clients: ClassVar[int] = 1

    def __init__(self, fraction_bits: int = 12) -> None:
        self.codec = FixedPoint(fraction_bits, LARGEST / 2**fraction_bits)

    def client(self, name: str) -> AggregationClient:
        """Rounds its vector."""
        return _Int16Client(name, self.codec)

    def server(self) -> AggregationServer:
        """Adds integers, in 64 bits."""
        return _Int16Server(self.codec)

    def error_bound(self, num_clients: int) -> float:
        """Half a step of the grid per client."""
        return self.codec.error_bound(num_clients)

    def describe(self) -> Description:
        """Everything is revealed."""
        return Description(
            backend="Int16",
            adversary="none: the server is trusted",
            hidden="nothing",
            revealed="every client's vector, to the server",
            collusion="not applicable",
            dropouts="a sum runs over those who sent",
            bytes_per_number=2.0,
            error=self.codec.error_text(),
        )


@final
class _Int16Client(AggregationClient):
    def __init__(self, name: str, codec: FixedPoint) -> None:
        super().__init__(name)
        self._codec = codec

    def protect(self, vector: Tensor) -> Tensor:
        return self._codec.encode(vector).to(torch.int16)  # NaN, infinity and what does not fit are refused


@final
class _Int16Server(AggregationServer):
    def __init__(self, codec: FixedPoint) -> None:
        self._codec = codec

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        if not messages:
            raise QuorumError("there is no vector to add")
        return torch.stack(list(messages.values())).sum(dim=0, dtype=torch.int64)

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        return self._codec.decode(total)
