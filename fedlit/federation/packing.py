"""Dicts of tensors as one flat vector, and back with shapes and types kept."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlit.federation.wire import Payload, Schema


def vector_dtype(schema: Schema) -> torch.dtype:
    """Type of the flat vector: float64 if an entry needs it (float64 or integers), else float32."""
    wide = any(dtype == torch.float64 or not dtype.is_floating_point for _, dtype, _ in schema)
    return torch.float64 if wide else torch.float32


def pack(payload: Payload, dtype: torch.dtype) -> Tensor:
    """Entries of ``payload`` one after the other, shape (n,)."""
    return torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in payload.values()])


def unpack(vector: Tensor, schema: Schema) -> dict[str, Tensor]:
    """Inverse of `pack`; integer entries are rounded half to even."""
    sizes = [torch.Size(shape).numel() for _, _, shape in schema]
    payload: dict[str, Tensor] = {}
    for (name, dtype, shape), part in zip(schema, torch.split(vector, sizes), strict=True):
        if not dtype.is_floating_point:
            part = part.round()
        payload[name] = part.to(dtype).reshape(shape)
    return payload
