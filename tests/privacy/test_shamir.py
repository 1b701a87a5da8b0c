"""Shamir shares: numbers derived by hand, any threshold of them restores the secret, fewer reveal nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlit.privacy import DecodeError, QuorumError, shamir
from refused import refused

SECRET = bytes(range(32))


def as_share(value: int) -> bytes:
    return value.to_bytes(shamir.SHARE_BYTES, "big")


def test_the_field_is_of_the_smallest_prime_above_all_secrets() -> None:
    def is_probable_prime(number: int) -> bool:  # Fermat's test, to 40 bases
        return all(pow(base, number - 1, number) == 1 for base in range(2, 42))

    assert is_probable_prime(shamir.PRIME)
    assert not any(is_probable_prime(2**256 + step) for step in range(297))


def test_shares_of_a_parabola_by_hand() -> None:
    """f(x) = 5 + 3x + 2x^2 is 10, 19, 32, 49 at 1, 2, 3, 4, and 5 at 0."""
    shares = {1: as_share(10), 2: as_share(19), 3: as_share(32), 4: as_share(49)}
    five = (5).to_bytes(32, "big")
    assert shamir.combine(shares, 3) == five
    assert shamir.combine({4: shares[4], 2: shares[2], 3: shares[3]}, 3) == five


def test_values_wrap_around_the_prime_by_hand() -> None:
    """f(x) = 1 - x is 0 at 1 and -1, which is the prime less one, at 2."""
    assert shamir.combine({1: as_share(0), 2: as_share(shamir.PRIME - 1)}, 2) == (1).to_bytes(32, "big")


@given(st.data())
def test_any_threshold_of_shares_restores_any_secret(data: st.DataObject) -> None:
    secret = data.draw(st.binary(min_size=32, max_size=32) | st.sampled_from([bytes(32), b"\xff" * 32]))
    points = data.draw(st.lists(st.integers(1, 2**20), min_size=1, max_size=12, unique=True))
    threshold = data.draw(st.integers(1, len(points)))
    shares = shamir.split(secret, threshold, points)
    chosen = data.draw(st.permutations(points))[: data.draw(st.integers(threshold, len(points)))]
    assert shamir.combine({point: shares[point] for point in chosen}, threshold) == secret


def test_one_share_less_than_the_threshold_is_consistent_with_every_secret() -> None:
    """Two shares of a parabola, and any secret: exactly one parabola goes through them."""
    shares = shamir.split(SECRET, 3, [1, 2, 3])
    for other in (SECRET, bytes(32), b"\x07" * 32):
        # the value at 3 with which Lagrange's formula gives the other secret: f(0) = 3 f(1) - 3 f(2) + f(3)
        value = (
            int.from_bytes(other, "big") - 3 * int.from_bytes(shares[1], "big") + 3 * int.from_bytes(shares[2], "big")
        )
        assert shamir.combine({1: shares[1], 2: shares[2], 3: as_share(value % shamir.PRIME)}, 3) == other


def test_too_few_shares_are_refused() -> None:
    shares = shamir.split(SECRET, 3, [1, 2, 3])
    for some, threshold in (({1: shares[1], 2: shares[2]}, 3), ({}, 1)):
        with refused("shares", QuorumError):
            shamir.combine(some, threshold)


@pytest.mark.parametrize(
    "shares",
    [
        {1: b"", 2: as_share(1)},
        {1: bytes(32), 2: as_share(1)},
        {1: as_share(shamir.PRIME), 2: as_share(1)},
        {0: as_share(1), 2: as_share(1)},
        {1: as_share(1), shamir.PRIME + 1: as_share(1)},  # the same point twice
        {1: as_share(2**256), 2: as_share(2**256)},  # restore 2^256, which is no secret
    ],
)
def test_bytes_and_points_that_are_no_shares_are_refused(shares: dict[int, bytes]) -> None:
    with pytest.raises(DecodeError):
        shamir.combine(shares, 2)


@pytest.mark.parametrize(
    ("argument", "secret", "threshold", "points"),
    [
        ("secret", b"short", 2, [1, 2]),
        ("threshold", SECRET, 3, [1, 2]),
        ("points", SECRET, 2, [1, 1]),
        ("points", SECRET, 2, [1, shamir.PRIME + 1]),
    ],
)
def test_arguments_out_of_range_are_refused(argument: str, secret: bytes, threshold: int, points: list[int]) -> None:
    with refused(argument):
        shamir.split(secret, threshold, points)
