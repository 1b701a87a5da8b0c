"""PlainAffine: y = A m + b with the moments in the open, and the grids of the protocols that hide them."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.privacy.affine import AffineGrid, AffineSource, AffineTarget, TwoPartyAffine
from fedlit.privacy.base import Description
from fedlit.privacy.errors import DecodeError, KeyCheckError


def read_floats(body: bytes, count: int) -> Tensor:
    """Numbers from their bytes, float64; a `DecodeError` if they are not so many."""
    size = torch.float64.itemsize
    check(len(body) == count * size, f"bytes of {count} numbers", f"{size} each", len(body), error=DecodeError)
    return torch.frombuffer(bytearray(body), dtype=torch.float64)


class _PlainSource(AffineSource):
    def public_key(self) -> bytes:
        return b""

    def _encrypt(self, moments: Tensor) -> bytes:
        if self._backend.grid is not None:
            self._backend.grid.moments.check(moments)
        return moments.numpy().tobytes()

    def _decrypt(self, body: bytes, num_outputs: int) -> bytes:
        return body


class _PlainTarget(AffineTarget):
    _outputs: Tensor  # from `_evaluate` on

    def _load_key(self, public: bytes) -> None:
        check(not public, "public key", "empty, as PlainAffine has none", len(public), error=KeyCheckError)

    def _evaluate(self, body: bytes, matrix: Tensor, offset: Tensor) -> bytes:
        moments, grid = read_floats(body, matrix.shape[1]), self._backend.grid
        if grid is None:
            self._outputs = matrix @ moments + offset
        else:
            grid.largest_output(len(moments))
            products = grid.matrix.encode(matrix) @ grid.moments.encode(moments)
            self._outputs = grid.decode(products + grid.encode_offset(offset))
        return b""

    def _unmask(self, body: bytes) -> Tensor:
        return self._outputs


@final
class PlainAffine(TwoPartyAffine):
    """Sends the moments as they are: T reads them. The reference that other backends are compared with.

    Args:
        grid: ``None`` computes in float64. With grids, y is bit for bit that of every exact backend on the same grids.
    """

    source_type, target_type = _PlainSource, _PlainTarget
    reveal_moments = True

    def __init__(self, grid: AffineGrid | None = None) -> None:
        self.grid = grid

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
            collusion="not applicable: nothing is hidden from the target",
            dropouts="none: both parties are needed",
            bytes_per_number=float(torch.float64.itemsize),
            error="float64 rounding only" if self.grid is None else self.grid.error_text(),
        )
