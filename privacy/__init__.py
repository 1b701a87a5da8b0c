"""Backends that carry a sum of clients' vectors; they know tensors and bytes, not Lightning."""

from fedlit.privacy.base import Description, RoundId, SecureAggregation
from fedlit.privacy.plain import Plain

__all__ = ["Description", "Plain", "RoundId", "SecureAggregation"]
