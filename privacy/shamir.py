"""Secrets of 32 bytes cut into shares, of which a threshold restores them and fewer reveal nothing (Shamir, 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from fedlit.checks import check, check_at_least, check_between
from fedlit.privacy.errors import DecodeError, QuorumError

PRIME = 2**256 + 297
"""Order of the field: the smallest prime above every secret."""
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, points: Sequence[int]) -> dict[int, bytes]:
    """Shares by point: 33 bytes, values of a random polynomial of degree ``threshold - 1`` that is the secret at 0.

    Raises a `ValueError` unless the secret has 32 bytes, the threshold is at least 1 and at most the number of points,
    and these differ and are at least 1.
    """
    check(len(secret) == SECRET_BYTES, "secret", f"of {SECRET_BYTES} bytes", len(secret))
    check_between("threshold", threshold, 1, len(points))
    apart = len(set(points)) == len(points) and all(1 <= point < PRIME for point in points)
    check(apart, "points", "different and at least 1", points)
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {point: _evaluate(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in points}


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret from ``{point: share}``, of which the first ``threshold`` are used.

    Wrong shares give a wrong secret: check it against something published by its owner. Raises a `QuorumError` if there
    are fewer than the threshold, a `DecodeError` if they are not shares of a secret of 32 bytes.
    """
    check_at_least("shares", len(shares), threshold, "for a secret", "too few clients are left", QuorumError)
    values = {point: int.from_bytes(share, "big") for point, share in list(shares.items())[:threshold]}
    for point, value in values.items():
        if len(shares[point]) != SHARE_BYTES or value >= PRIME or not 1 <= point < PRIME:
            raise DecodeError(f"share at point {point} is no {SHARE_BYTES} bytes of a number below the prime")
    secret = _interpolate_at_zero(values)
    if secret >> (8 * SECRET_BYTES):
        raise DecodeError(f"the shares at points {list(values)} are not of one secret of {SECRET_BYTES} bytes")
    return secret.to_bytes(SECRET_BYTES, "big")


def _evaluate(coefficients: Sequence[int], point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value


def _interpolate_at_zero(values: Mapping[int, int]) -> int:
    """Lagrange's formula at 0, as one fraction: inverting is the slow part, and so happens once."""
    numerator, denominator = 0, 1
    for point, value in values.items():
        above, below = value, 1
        for other in values:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        numerator = (numerator * below + above * denominator) % PRIME
        denominator = denominator * below % PRIME
    return numerator * pow(denominator, -1, PRIME) % PRIME
