"""Threshold decryption of Paillier's ciphertexts: shares of the exponent, partial decryptions, proofs of knowledge.

The exponent d is 0 modulo lambda = lcm(p - 1, q - 1) and 1 modulo n, so that c^d = (1 + n)^m = 1 + m n modulo n^2
(Damgard and Jurik, 2001). It is shared over the integers, as in threshold RSA (Rabin, 1998; Shoup, 2000):
with Delta = N! for N clients, f is a polynomial of degree t - 1 with f(0) = Delta d, and client i has f(i). Lagrange's
coefficients at 0, times Delta, are integers, so that t clients' powers c^f(i) give c^(Delta^2 d).
"""

from __future__ import annotations

import functools
import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import final
from weakref import WeakValueDictionary

from fedlit.checks import check
from fedlit.privacy import cores
from fedlit.privacy.errors import AuthenticationError, DecodeError, KeyCheckError, QuorumError
from fedlit.privacy.links import digest
from fedlit.privacy.paillier_arithmetic import FixedBase, PublicModulus, from_bytes, to_bytes

_HIDING_BITS = 128
"""Shares are as far from independent of the exponent as 2^-128, and noise from uniform; also bits of a challenge."""


def deal(private: bytes, public: bytes, threshold: int, holders: int) -> list[bytes]:
    """Shares of the decryption exponent for ``holders`` clients, equally long, of which ``threshold`` decrypt together.

    Any ``threshold - 1`` of them look alike whatever the exponent d is: another one, d', adds to the polynomial
    Delta (d' - d) times the product of (j - x) / j over these clients j. Its coefficients are integers below
    n^2 Delta (N + 1), and the random ones of the polynomial are drawn from a range 2^128 N times as long.
    """
    half = len(private) // 2
    p, q = (int.from_bytes(part, "big") for part in (private[:half], private[half:]))
    order = math.lcm(p - 1, q - 1)
    exponent = order * pow(order, -1, int.from_bytes(public, "big"))
    delta = math.factorial(holders)
    largest = holders * delta * (holders + 1) << (16 * len(public) + _HIDING_BITS)
    coefficients = [delta * exponent, *(secrets.randbelow(largest) for _ in range(threshold - 1))]
    size = (largest * threshold * holders**threshold).bit_length() // 8 + 1
    values = (sum(each * holder**power for power, each in enumerate(coefficients)) for holder in range(1, holders + 1))
    return [to_bytes([value], size) for value in values]


@final
class ThresholdModulus(PublicModulus):
    """A public key, n (big-endian), whose decryption exponent ``holders`` clients have shares of.

    Noise is a power of a random n-th residue with an exponent longer than its order by 128 bits, so that it is uniform
    in the group that this residue generates: as in `PrivateModulus`, but without the factors, and three times slower.

    A `KeyCheckError` if n is malformed, or has small factors.
    """

    def __init__(self, public: bytes, key_bits: int, threshold: int, holders: int) -> None:
        super().__init__(public, key_bits)
        self.threshold = threshold
        self._delta = math.factorial(holders)
        if math.gcd(self._delta, int(self.n)) != 1:
            raise KeyCheckError("a Paillier modulus must have no small factors: it was made by no honest party")
        self._scale = pow(self._delta**2, -1, int(self.n))

    @functools.cached_property
    def _noise(self) -> tuple[int, FixedBase]:
        """A random unit, and powers of its n-th power modulo n^2. Nobody has to keep either secret."""
        unit = self.random_unit()
        return unit, FixedBase(pow(unit, self.n, self.square), self.square, self.plaintext_bytes + _HIDING_BITS // 8)

    def _exponent(self) -> int:
        return secrets.randbits(8 * self.plaintext_bytes + _HIDING_BITS)

    def encrypt(self, plaintexts: Sequence[int], about: bytes, workers: int | None) -> tuple[bytes, bytes]:
        """Bytes of ciphertexts of signed integers below n / 2; and a proof, bound to ``about``, of knowing these.

        The proof is one of knowledge of all plaintexts at once: with challenges e_j, a ciphertext a of random y, and
        z = y + sum_j e_j m_j, the product of a and all c_j^e_j is a ciphertext of z, whose noise w^n is shown too
        (Cramer, Damgard and Nielsen, 2001, with the small exponents of Bellare, Garay and Rabin, 1998). Challenges are
        hashes.
        """
        unit, powers = self._noise
        exponents = [self._exponent() for _ in plaintexts]

        def encrypted(part: Sequence[int]) -> bytes:
            products = (self.embed(plaintexts[place]) * powers.power(exponents[place]) for place in part)
            return self.write([product % self.square for product in products])

        places = range(len(plaintexts))
        body = cores.spread_forked(encrypted, places, self.ciphertext_bytes, workers, self.smallest_part)
        masking, exponent = secrets.randbelow(int(self.n)), self._exponent()
        first = self.write([self.embed(masking) * powers.power(exponent) % self.square])
        challenges = self._challenges(body, first, about)
        response = sum((e * m for e, m in zip(challenges, plaintexts, strict=True)), masking) % self.n
        exponent += sum(e * x for e, x in zip(challenges, exponents, strict=True))
        return body, first + to_bytes([response, pow(unit, exponent, self.n)], self.plaintext_bytes)

    def check_known(self, body: bytes, count: int, proof: bytes, about: bytes, workers: int | None) -> list[int]:
        """Ciphertexts from the bytes of ``count`` of them, once their proof has been checked.

        Raises a `DecodeError` if one or the other is malformed, an `AuthenticationError` if the proof is none.
        """
        size = self.ciphertext_bytes + 2 * self.plaintext_bytes
        check(len(proof) == size, "bytes of a proof", str(size), len(proof), error=DecodeError)
        ciphertexts = self.read(body, count)
        (first,) = self.read(proof[: self.ciphertext_bytes], 1)
        response, root = from_bytes(proof[self.ciphertext_bytes :], 2, self.plaintext_bytes, self.n, "responses")
        challenges = self._challenges(body, proof[: self.ciphertext_bytes], about)
        pairs = [*zip(ciphertexts, challenges, strict=True)]
        raised = cores.spread(
            lambda place: pow(pairs[place][0], pairs[place][1], self.square), range(len(pairs)), workers
        )
        product = functools.reduce(lambda x, y: x * y % self.square, raised, first)
        if product != self.embed(response) * pow(root, self.n, self.square) % self.square:
            raise AuthenticationError("the sender of a vector does not show that it knows what its ciphertexts hold")
        return ciphertexts

    def _challenges(self, body: bytes, first: bytes, about: bytes) -> list[int]:
        size = _HIDING_BITS // 8
        hashed = hashlib.shake_256(digest("plaintexts are known", about, str(self.n)) + first + body)
        stream = hashed.digest(size * (len(body) // self.ciphertext_bytes))
        return [int.from_bytes(stream[start : start + size], "big") for start in range(0, len(stream), size)]

    def multiply(self, vectors: Sequence[Sequence[int]]) -> list[int]:
        """Ciphertexts of the sum of vectors."""
        return [functools.reduce(lambda x, y: x * y % self.square, column) for column in zip(*vectors, strict=True)]

    def decrypt_partly(self, ciphertexts: Sequence[int], share: int, workers: int | None) -> list[int]:
        """Partial decryptions by the holder of a share."""
        return cores.spread(lambda ciphertext: pow(ciphertext, share, self.square), ciphertexts, workers)

    def combine(self, partials: Mapping[int, Sequence[int]], workers: int | None) -> list[int]:
        """Plaintexts in [0, n), from partial decryptions by holder (counted from 1).

        Raises a `QuorumError` if there are fewer than the threshold, an `AuthenticationError` if they do not fit.
        """
        holders = sorted(partials)
        if len(holders) < self.threshold:
            raise QuorumError(f"only {len(holders)} clients decrypt, but {self.threshold} must: too few are left")
        plaintexts = self._combined(partials, holders[: self.threshold], workers)
        others = holders[-self.threshold :]
        # no client has the same weight in two sets: a wrong one changes what one of them gives
        if others != holders[: self.threshold] and self._combined(partials, others, workers) != plaintexts:
            raise _misfit()
        return plaintexts

    def _combined(
        self, partials: Mapping[int, Sequence[int]], holders: Sequence[int], workers: int | None
    ) -> list[int]:
        weights = {holder: self._weight(holder, holders) for holder in holders}

        def combined(place: int) -> int:
            powers = (pow(partials[holder][place], weights[holder], self.square) for holder in holders)
            return functools.reduce(lambda x, y: x * y % self.square, powers)

        products = cores.spread(combined, range(len(partials[holders[0]])), workers)
        if any(product % self.n != 1 for product in products):
            raise _misfit()
        return [product // self.n * self._scale % self.n for product in products]

    def _weight(self, holder: int, holders: Sequence[int]) -> int:
        """Lagrange's coefficient at 0, times Delta: an integer."""
        others = [other for other in holders if other != holder]
        return self._delta * math.prod(others) // math.prod(other - holder for other in others)


def _misfit() -> AuthenticationError:
    return AuthenticationError(
        "partial decryptions do not fit each other: a client has sent a wrong one, or has a share of another key"
    )


_loaded: WeakValueDictionary[tuple[bytes, int, int, int], ThresholdModulus] = WeakValueDictionary()


def load(public: bytes, key_bits: int, threshold: int, holders: int) -> ThresholdModulus:
    """A public key; parties of one process that have the same one share its tables while one of them lives."""
    key = (public, key_bits, threshold, holders)
    modulus = _loaded.get(key)
    if modulus is None:
        modulus = _loaded[key] = ThresholdModulus(*key)
    return modulus
