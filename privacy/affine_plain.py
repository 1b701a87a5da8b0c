"""The two-party affine exchange in plaintext, without secrecy."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from fedlit.privacy.affine import AffineGrid, AffineSource, AffineTarget, TwoPartyAffine
from fedlit.privacy.base import Description
from fedlit.privacy.errors import DecodeError, KeyCheckError


@final
class PlainAffine(TwoPartyAffine):
    """Sends the moments as they are: T reads them. The reference that other backends are compared with.

    Args:
        grid: ``None`` computes in float64. With grids, y is bit for bit that of every exact backend on the same grids.
    """

    def __init__(self, grid: AffineGrid | None = None) -> None:
        self.grid = grid

    def source(self) -> AffineSource:
        """Sends its moments."""
        return _PlainSource(self.grid)

    def target(self) -> AffineTarget:
        """Computes y on its own."""
        return _PlainTarget(self.grid)

    def error_bound(self, num_moments: int) -> float:
        """0 for floats, beyond their rounding; else that of the grids."""
        return 0.0 if self.grid is None else self.grid.error_bound(num_moments)

    def describe(self) -> Description:
        """The moments are revealed."""
        return Description(
            backend="PlainAffine",
            adversary="none: the target is trusted",
            hidden="A, b and y, from the source",
            revealed="the moments, to the target",
            collusion="not applicable",
            dropouts="none: both parties are needed",
            bytes_per_number=float(torch.float64.itemsize),
            error="float64 rounding only" if self.grid is None else self.grid.error_text(),
        )


@final
class _PlainSource(AffineSource):
    def __init__(self, grid: AffineGrid | None) -> None:
        super().__init__()
        self._grid = grid

    def public_key(self) -> bytes:
        return b""

    def _encrypt(self, moments: Tensor) -> bytes:
        if self._grid is not None:
            self._grid.moments.check(moments)
        return moments.numpy().tobytes()

    def _decrypt(self, body: bytes, num_outputs: int) -> bytes:
        return body


@final
class _PlainTarget(AffineTarget):
    def __init__(self, grid: AffineGrid | None) -> None:
        super().__init__()
        self._grid = grid
        self._outputs = torch.zeros(0)

    def _load_key(self, public: bytes) -> None:
        if public:
            raise KeyCheckError(f"PlainAffine has no keys, got a public key of {len(public)} bytes")

    def _evaluate(self, body: bytes, matrix: Tensor, offset: Tensor) -> bytes:
        if len(body) != matrix.shape[1] * torch.float64.itemsize:
            raise DecodeError(f"{matrix.shape[1]} moments must be 8 bytes each, got {len(body)} bytes")
        moments = torch.frombuffer(bytearray(body), dtype=torch.float64)
        if self._grid is None:
            self._outputs = matrix @ moments + offset
        else:
            grid = self._grid
            grid.largest_output(len(moments))
            products = grid.matrix.encode(matrix) @ grid.moments.encode(moments)
            self._outputs = grid.decode(products + grid.encode_offset(offset))
        return b""

    def _unmask(self, body: bytes) -> Tensor:
        return self._outputs
