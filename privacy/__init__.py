"""Backends that carry a sum of clients' vectors; they know tensors and bytes, not Lightning."""

from fedlit.privacy.base import AggregationClient, AggregationServer, Description, RoundId, SecureAggregation
from fedlit.privacy.differential import Accountant, GaussianMechanism
from fedlit.privacy.errors import (
    AuthenticationError,
    DecodeError,
    InputError,
    KeyCheckError,
    PrivacyError,
    QuorumError,
    RangeError,
    ReplayError,
)
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.plain import Plain

__all__ = [
    "Accountant",
    "AggregationClient",
    "AggregationServer",
    "AuthenticationError",
    "DecodeError",
    "Description",
    "FixedPoint",
    "GaussianMechanism",
    "InputError",
    "KeyCheckError",
    "Plain",
    "PrivacyError",
    "QuorumError",
    "RangeError",
    "ReplayError",
    "RoundId",
    "SecureAggregation",
]
