"""Paillier's cryptosystem on raw integers: keys, noise, slots and wire format, for `Paillier` and `PaillierAffine`.

A ciphertext of m is c = (1 + m n) r^n mod n^2 (Paillier, 1999, with g = n + 1), as in ``phe``, which decrypts it.
Everything works on Python's integers too; ``gmpy2`` makes it 8 to 17 times faster.
"""

from __future__ import annotations

import functools
import math
import secrets
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, final
from weakref import WeakValueDictionary

from fedlit.checks import check, check_at_least
from fedlit.privacy import cores
from fedlit.privacy.errors import DecodeError, KeyCheckError, PrivacyWarning, RangeError
from fedlit.privacy.links import Buffer

RECOMMENDED_KEY_BITS = 3072
"""As strong as a 128-bit block cipher (NIST SP 800-57 part 1, table 2)."""

_MIN_KEY_BITS = 2048
_MAX_KEY_BITS = 16384

_SMALLEST_PART = 64
"""Ciphertexts of `RECOMMENDED_KEY_BITS` that a core should have to encrypt: 0.1 s, where forking takes 0.01 s."""

PIECE = 1 << 13
"""Ciphertexts that are made or read at a time: 6 MiB of `RECOMMENDED_KEY_BITS`, and seconds of work."""


def check_settings(key_bits: int, insecure_test_keys: bool, workers: int | None) -> None:
    """Refuse, with a `ValueError`, keys that can be factored or that ``phe`` does not make, and fewer than one worker.

    Warns of weak keys; raises an `ImportError` if ``phe`` is missing.
    """
    rule = f"a multiple of 16 from 64 to {_MAX_KEY_BITS}"
    check(key_bits % 16 == 0 and 64 <= key_bits <= _MAX_KEY_BITS, "key_bits", rule, key_bits)
    if not insecure_test_keys:
        way_out = "shorter ones can be factored; pass insecure_test_keys=True where nothing is secret"
        check_at_least("key_bits", key_bits, _MIN_KEY_BITS, way_out=way_out)
        if key_bits < RECOMMENDED_KEY_BITS:
            warnings.warn(
                f"Paillier keys of {key_bits} bits are weaker than a 128-bit cipher: {RECOMMENDED_KEY_BITS} bits are "
                "not",
                PrivacyWarning,
                stacklevel=3,
            )
    if workers is not None:
        check_at_least("workers", workers, 1)
    _phe()


def _phe() -> Any:
    """The ``phe.paillier`` module, which makes keys; its primes come from the operating system's random source."""
    try:
        return import_module("phe.paillier")
    except ImportError as error:
        raise ImportError("Paillier keys need the phe library: pip install 'fedlit[paillier]'") from error


def _fast(number: int) -> int:
    """``number`` as the fastest available type of integer."""
    library = cores.gmpy2()
    return number if library is None else library.mpz(number)


@final
class Slots:
    """Several signed numbers as the digits of one integer, such that adding integers adds the numbers.

    No number, sums included, exceeds ``largest`` in absolute value, or it would reach into the next slot; ``base`` is
    at least ``2 * largest + 1``, and all integers stay below n / 2^(1 + ``spare_bits``). A `RangeError` if not even one
    number fits.
    """

    def __init__(self, largest: int, base: int, key_bits: int, spare_bits: int = 0) -> None:
        self.largest = largest
        self.base = _fast(base)
        # |integers| <= (base**count - 1) / 2, and n is at least 2**(key_bits - 1)
        self.count = 0
        while base ** (self.count + 1) * 2**spare_bits <= 2 ** (key_bits - 1):
            self.count += 1
        rule = f"at least {base.bit_length() + 1 + spare_bits}, to hold one number up to {largest}"
        check(self.count > 0, "key_bits", rule, key_bits, error=RangeError)
        self._shift = largest * (base**self.count - 1) // (base - 1)

    def integers(self, length: int) -> int:
        """Number of integers that hold ``length`` numbers."""
        return -(-length // self.count)

    def pack(self, numbers: Sequence[int]) -> list[int]:
        """Integers that hold ``numbers``; free slots at the end are 0."""
        return [self._join(numbers[first : first + self.count]) for first in range(0, len(numbers), self.count)]

    def _join(self, digits: Sequence[int]) -> int:
        joined = _fast(0)
        for digit in reversed(digits):
            joined = joined * self.base + digit
        return joined

    def unpack(self, integers: Sequence[int], length: int) -> list[int]:
        """Inverse of `pack`; raises a `DecodeError` if an integer holds more, or free slots are not 0."""
        numbers: list[int] = []
        for integer in integers:
            rest = integer + self._shift
            for _ in range(self.count):
                rest, digit = divmod(rest, self.base)
                numbers.append(int(digit) - self.largest)
            if rest:
                raise DecodeError(
                    "a decrypted number is out of range: the ciphertext was made under another key, was changed, or "
                    "holds a sum of more vectors than announced"
                )
        if any(numbers[length:]) or max(map(abs, numbers), default=0) > self.largest:
            raise DecodeError("decrypted numbers are out of range: the ciphertext was not made by this protocol")
        return numbers[:length]


def to_bytes(numbers: Sequence[int], size: int) -> bytes:
    """Big-endian, ``size`` bytes each."""
    return b"".join(int(number).to_bytes(size, "big") for number in numbers)


def check_bytes(body: Buffer, count: int, size: int, what: str) -> None:
    """Raise a `DecodeError` unless there are ``size`` bytes for each of ``count`` numbers."""
    check(len(body) == count * size, f"bytes of {count} {what}", f"{size} each", len(body), error=DecodeError)


def from_bytes(body: Buffer, count: int, size: int, limit: int, what: str) -> list[int]:
    """Inverse of `to_bytes` for exactly ``count`` numbers in [0, ``limit``); raises a `DecodeError` at others."""
    check_bytes(body, count, size, what)
    numbers = [_fast(int.from_bytes(body[first : first + size], "big")) for first in range(0, len(body), size)]
    if any(number >= limit for number in numbers):
        raise DecodeError(f"{what} must be less than the modulus: made under another key, or changed")
    return numbers


class PublicModulus:
    """The public half of a key, n (big-endian), and what can be done with it; a `KeyCheckError` if n is malformed."""

    def __init__(self, public: bytes, key_bits: int) -> None:
        bits = len(public) * 8
        check(bits == key_bits, "public key of Paillier", f"of {key_bits} bits", bits, error=KeyCheckError)
        n = int.from_bytes(public, "big")
        if n.bit_length() != key_bits or n % 2 == 0:
            raise KeyCheckError(f"a Paillier modulus of {key_bits} bits must be odd and have its top bit set")
        self.n = _fast(n)
        self.square = self.n * self.n
        self.plaintext_bytes = key_bits // 8
        self.ciphertext_bytes = 2 * self.plaintext_bytes

    @property
    def smallest_part(self) -> int:
        """Minimum number of ciphertexts for which a core should be made to encrypt by forking."""
        return math.ceil(_SMALLEST_PART * (RECOMMENDED_KEY_BITS / (8 * self.plaintext_bytes)) ** 3)

    def embed(self, plaintext: int) -> int:
        """(1 + n)^plaintext mod n^2: a ciphertext without noise, which hides nothing yet."""
        return (1 + plaintext % self.n * self.n) % self.square

    def centre(self, plaintext: int) -> int:
        """Signed integer below n / 2 of a plaintext in [0, n)."""
        return plaintext - self.n if 2 * plaintext > self.n else plaintext

    def random_unit(self) -> int:
        """A uniform number coprime to n; its n-th power is noise."""
        while math.gcd(unit := secrets.randbelow(int(self.n)), int(self.n)) != 1:
            pass
        return _fast(unit)

    def read_pieces(self, body: Buffer, count: int) -> Iterator[list[int]]:
        """As `read`, of at most ``PIECE`` ciphertexts at a time."""
        check_bytes(body, count, self.ciphertext_bytes, "ciphertexts")
        size = self.ciphertext_bytes
        return (
            self.read(body[first * size : (first + PIECE) * size], min(PIECE, count - first))
            for first in range(0, count, PIECE)
        )

    def read(self, body: Buffer, count: int) -> list[int]:
        """Ciphertexts from their bytes; raises a `DecodeError` if their number or size is wrong.

        Likewise if one shares a factor with n, as 0 and n do: it is no ciphertext, and would spoil whatever it meets.
        """
        ciphertexts = from_bytes(body, count, self.ciphertext_bytes, self.square, "ciphertexts")
        product = functools.reduce(lambda x, y: x * y % self.n, ciphertexts, _fast(1))
        if math.gcd(int(product), int(self.n)) != 1:
            raise DecodeError("a ciphertext is not invertible modulo n^2: it was made by no honest party")
        return ciphertexts

    def write(self, ciphertexts: Sequence[int]) -> bytes:
        """Bytes of ciphertexts."""
        return to_bytes(ciphertexts, self.ciphertext_bytes)


@final
class PrivateModulus(PublicModulus):
    """Both halves of a key, n and p q, big-endian; a `KeyCheckError` if they do not belong together.

    Encryption by the owner is fast because r^n is computed modulo p^2 and q^2 apart, from precomputed powers of one
    random n-th residue, as Damgard, Jurik and Nielsen (2010, section 4.2) do modulo n^2. Unlike theirs, exponents are
    not short but uniform below the group orders p - 1 and q - 1, and drawn for each apart: noise is uniform in the
    group that this residue generates, which is all n-th residues or a large part of them. As in their paper, a power
    map carries the composite residuosity assumption over to such a group; nothing is assumed of short exponents.
    """

    def __init__(self, private: bytes, public: bytes, key_bits: int) -> None:
        super().__init__(public, key_bits)
        half = key_bits // 16
        size = len(private)
        check(size == 2 * half, "private key of Paillier", f"of {2 * half} bytes", size, error=KeyCheckError)
        p, q = (_fast(int.from_bytes(part, "big")) for part in (private[:half], private[half:]))
        if p * q != self.n or 1 in (p, q) or p == q:
            raise KeyCheckError("the private and the public half of this Paillier key do not belong together")
        self._p, self._q = _PrimeSquare(p, q), _PrimeSquare(q, p)
        self._q_inverse = pow(q, -1, p)
        self._q_square_inverse = pow(q * q, -1, p * p)

    def encrypt(self, plaintexts: Sequence[int], workers: int | None = 1) -> list[int]:
        """Ciphertexts of signed integers below n / 2, each with fresh noise.

        Cores share the work by forking: the products are so short that threads would spend longer on the interpreter
        lock than on them. Noise comes from the operating system, so that no two processes draw the same.
        """
        _ = self._p.powers, self._q.powers  # made before the fork, for all processes
        body = cores.spread_forked(self._encrypt, plaintexts, self.ciphertext_bytes, workers, self.smallest_part)
        return from_bytes(body, len(plaintexts), self.ciphertext_bytes, self.square, "ciphertexts")

    def _encrypt(self, plaintexts: Sequence[int]) -> bytes:
        return self.write([self.embed(plaintext) * self._noise() % self.square for plaintext in plaintexts])

    def _noise(self) -> int:
        modulo_p, modulo_q = self._p.noise(), self._q.noise()
        difference = (modulo_p - modulo_q) * self._q_square_inverse % self._p.square
        return modulo_q + self._q.square * difference

    def decrypt(self, ciphertexts: Sequence[int], workers: int | None) -> list[int]:
        """Plaintexts in [0, n) of ciphertexts that are coprime to n (Paillier, 1999, section 7)."""
        return cores.spread(self._decrypt, ciphertexts, workers)

    def _decrypt(self, ciphertext: int) -> int:
        return self._modulo_n(self._p.decrypt(ciphertext), self._q.decrypt(ciphertext))

    def roots(self, numbers: Sequence[int]) -> list[int]:
        """n-th roots modulo n; they exist, and only the key's owner can take them."""
        p, q = self._p.prime, self._q.prime
        of_p, of_q = pow(self.n, -1, p - 1), pow(self.n, -1, q - 1)
        return [self._modulo_n(pow(number, of_p, p), pow(number, of_q, q)) for number in numbers]

    def _modulo_n(self, modulo_p: int, modulo_q: int) -> int:
        """The number that has these remainders (Chinese remainder theorem)."""
        return modulo_q + self._q.prime * ((modulo_p - modulo_q) * self._q_inverse % self._p.prime)

    def __repr__(self) -> str:
        return f"PrivateModulus(key_bits={self.plaintext_bytes * 8})"


@final
class _PrimeSquare:
    """The key owner's work modulo the square of one prime factor of n."""

    def __init__(self, prime: int, other: int) -> None:
        self.prime = prime
        self.square = prime * prime
        # L((1 + n)^(prime - 1) mod prime^2) = (prime - 1) * other = -other modulo the prime
        self._scale = pow(-other, -1, prime)

    @functools.cached_property
    def powers(self) -> FixedBase:
        """Powers of a random n-th residue; modulo the square, these are the powers with exponent ``prime``."""
        residue = pow(_fast(1 + secrets.randbelow(int(self.prime) - 1)), self.prime, self.square)
        return FixedBase(residue, self.square, -(-int(self.prime).bit_length() // 8))

    def noise(self) -> int:
        """A fresh random n-th residue."""
        return self.powers.power(secrets.randbelow(int(self.prime) - 1))

    def decrypt(self, ciphertext: int) -> int:
        """The plaintext modulo the prime."""
        power = pow(ciphertext % self.square, self.prime - 1, self.square)
        return (power - 1) // self.prime * self._scale % self.prime


@final
class FixedBase:
    """Powers of one number, by multiplying precomputed ones: one for each of the largest exponent's bytes."""

    def __init__(self, base: int, modulus: int, exponent_bytes: int) -> None:
        self._modulus = modulus
        self._rows: list[list[int]] = []
        for _ in range(exponent_bytes):
            row = [_fast(1)]
            for _ in range(255):
                row.append(row[-1] * base % modulus)
            self._rows.append(row)
            base = row[-1] * base % modulus

    def power(self, exponent: int) -> int:
        """base^exponent mod modulus."""
        product, modulus = _fast(1), self._modulus
        for row, digit in zip(self._rows, exponent.to_bytes(len(self._rows), "little"), strict=True):
            product = product * row[digit] % modulus
        return product


def generate(key_bits: int) -> tuple[bytes, bytes]:
    """A fresh key pair from ``phe``: p and q, and n, big-endian."""
    public, private = _phe().generate_paillier_keypair(n_length=key_bits)
    return to_bytes([private.p, private.q], key_bits // 16), to_bytes([public.n], key_bits // 8)


_loaded: WeakValueDictionary[tuple[bytes, bytes, int], PrivateModulus] = WeakValueDictionary()


def load_private(private: bytes, public: bytes, key_bits: int) -> PrivateModulus:
    """A key pair; parties of one process that hold the same one share its tables while one of them lives."""
    modulus = _loaded.get((private, public, key_bits))
    if modulus is None:
        modulus = _loaded[private, public, key_bits] = PrivateModulus(private, public, key_bits)
    return modulus


def window_digits(exponent: int) -> list[tuple[int, int]]:
    """Signed odd digits of an integer: exponent = sum of digit * 2^position, few of them (NAF of width 5).

    Reference: Hankerson, Menezes, Vanstone (2004), Guide to elliptic curve cryptography, algorithm 3.35.
    """
    digits: list[tuple[int, int]] = []
    position = 0
    while exponent:
        zeros = (exponent & -exponent).bit_length() - 1
        exponent >>= zeros
        position += zeros
        digit = exponent & 31
        if digit > 16:
            digit -= 32
        digits.append((position, digit))
        exponent -= digit
    return digits


@final
class PowerTable:
    """Small odd powers of one number and of its inverse modulo ``modulus``, to be shared by many products of powers."""

    def __init__(self, base: int, modulus: int) -> None:
        self._powers: dict[int, int] = {}
        for sign, power in ((1, base), (-1, pow(base, -1, modulus))):
            square = power * power % modulus
            for digit in range(1, 16, 2):
                self._powers[sign * digit] = power
                power = power * square % modulus

    def factors(self, exponent: int, shift: int = 0) -> list[tuple[int, int]]:
        """Pairs (position, factor): base^(exponent * 2^shift) is the product of the factor^(2^position)."""
        return [(position + shift, self._powers[digit]) for position, digit in window_digits(exponent)]


def product_of_powers(factors: Iterable[tuple[int, int]], modulus: int) -> int:
    """Product of factor^(2^position) over pairs (position, factor): all share the squarings (Straus, 1964)."""
    at: defaultdict[int, list[int]] = defaultdict(list)
    for position, factor in factors:
        at[position].append(factor)
    product = _fast(1)
    for position in range(max(at, default=0), -1, -1):
        product = product * product % modulus
        for factor in at[position]:
            product = product * factor % modulus
    return product
