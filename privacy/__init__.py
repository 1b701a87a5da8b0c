"""Backends that carry a sum of clients' vectors; they know tensors and bytes, not Lightning."""

from fedlit.privacy.affine import AffineGrid, AffineSource, AffineTarget, TwoPartyAffine
from fedlit.privacy.affine_ckks import CKKSAffine
from fedlit.privacy.affine_paillier import PaillierAffine
from fedlit.privacy.affine_plain import PlainAffine
from fedlit.privacy.base import AggregationClient, AggregationServer, Description, RoundId, SecureAggregation
from fedlit.privacy.differential import Accountant, GaussianMechanism
from fedlit.privacy.errors import (
    AuthenticationError,
    DecodeError,
    InputError,
    KeyCheckError,
    PrivacyError,
    PrivacyWarning,
    QuorumError,
    RangeError,
    ReplayError,
    SolvableError,
    TermsError,
)
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.lattices import BFV, CKKS
from fedlit.privacy.masking import PairwiseMasking
from fedlit.privacy.paillier import Paillier
from fedlit.privacy.plain import Plain
from fedlit.privacy.robust import RobustPlain
from fedlit.privacy.tags import Tags
from fedlit.privacy.terms import Terms
from fedlit.privacy.threshold import ThresholdPaillier

__all__ = [
    "BFV",
    "CKKS",
    "Accountant",
    "AffineGrid",
    "AffineSource",
    "AffineTarget",
    "AggregationClient",
    "AggregationServer",
    "AuthenticationError",
    "CKKSAffine",
    "DecodeError",
    "Description",
    "FixedPoint",
    "GaussianMechanism",
    "InputError",
    "KeyCheckError",
    "Paillier",
    "PaillierAffine",
    "PairwiseMasking",
    "Plain",
    "PlainAffine",
    "PrivacyError",
    "PrivacyWarning",
    "QuorumError",
    "RangeError",
    "ReplayError",
    "RobustPlain",
    "RoundId",
    "SecureAggregation",
    "SolvableError",
    "Tags",
    "Terms",
    "TermsError",
    "ThresholdPaillier",
    "TwoPartyAffine",
]
