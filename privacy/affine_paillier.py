"""The two-party affine exchange under Paillier's cryptosystem.

S encrypts each moment. T raises the ciphertexts to its coefficients, several rows of A to one ciphertext, adds b and a
mask, and multiplies by fresh noise; S decrypts; T takes the mask off.

Adversary: T honest but curious; S even malicious.
Hidden:    m from T, beyond what y reveals. A, b and y from S, whatever its computing power: the mask is uniform in Z_n
           and the noise uniform among the n-th residues, so that every reply is a uniform element of Z*_{n^2}. Only a
           malicious S that observes whether T found y in range learns that much.

What a malicious T can pack. S cannot see what is under the mask, and a plaintext has room for dozens of moments. So S
answers with the lowest bits of a plaintext only: as many as the numbers of y in it have. T takes its mask off modulo
that power of two, which is right unless plaintext and mask exceed n together, a chance of 2^-80. Whatever T has packed,
it obtains no more bits than an honest one; it still chooses what they say, also of moments that it holds under the same
key from earlier exchanges.
"""

from __future__ import annotations

import functools
import hashlib
import math
import secrets
from typing import final

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.privacy import cores
from fedlit.privacy.affine import AffineGrid, AffineSource, AffineTarget, TwoPartyAffine
from fedlit.privacy.affine_bound import COLLUSION, of_moments, of_outputs
from fedlit.privacy.base import Description
from fedlit.privacy.errors import DecodeError, KeyCheckError
from fedlit.privacy.links import field_of, pack_fields, unpack_fields
from fedlit.privacy.paillier_arithmetic import (
    RECOMMENDED_KEY_BITS,
    PowerTable,
    PrivateModulus,
    PublicModulus,
    Slots,
    check_settings,
    from_bytes,
    generate,
    product_of_powers,
    to_bytes,
)

_NUM_ROOTS = 8
_SPARE_BITS = 80
_SMALL_PRIMES_UP_TO = 2**16


class _PaillierSource(AffineSource):
    _backend: PaillierAffine

    def __init__(self, backend: PaillierAffine) -> None:
        super().__init__(backend)
        private, public = generate(backend.key_bits)
        self._modulus = PrivateModulus(private, public, backend.key_bits)
        challenges = _challenges(self._modulus)
        self._message = pack_fields(
            {"modulus": public, "roots": to_bytes(self._modulus.roots(challenges), self._modulus.plaintext_bytes)}
        )

    def public_key(self) -> bytes:
        return self._message

    def _encrypt(self, moments: Tensor) -> bytes:
        self._backend.grid.largest_output(len(moments))
        numbers = self._backend.grid.moments.encode(moments).tolist()
        return self._modulus.write(self._modulus.encrypt(numbers))

    def _decrypt(self, body: bytes, num_outputs: int) -> bytes:
        sizes = _bits(self._backend.slots(self._num_moments), num_outputs)
        plaintexts = self._modulus.decrypt(self._modulus.read(body, len(sizes)), self._backend.workers)
        lowest = (plaintext % 2**bits for plaintext, bits in zip(plaintexts, sizes, strict=True))
        return b"".join(to_bytes([number], -(-bits // 8)) for number, bits in zip(lowest, sizes, strict=True))


class _PaillierTarget(AffineTarget):
    _backend: PaillierAffine
    _modulus: PublicModulus  # from `_load_key` on
    _slots: Slots  # these from `_evaluate` on
    _masks: list[int]
    _length: int

    def _load_key(self, public: bytes) -> None:
        try:
            fields = unpack_fields(public)
            n, roots = field_of(fields, "modulus"), field_of(fields, "roots")
        except DecodeError as error:
            raise KeyCheckError(f"the source's public key is malformed: {error}") from error
        modulus = PublicModulus(n, self._backend.key_bits)
        _check_no_bad_factor(modulus, roots)
        self._modulus = modulus

    def _evaluate(self, body: bytes, matrix: Tensor, offset: Tensor) -> bytes:
        modulus, grid, num_moments = self._modulus, self._backend.grid, matrix.shape[1]
        slots = self._backend.slots(num_moments)
        rows: list[list[int]] = grid.matrix.encode(matrix).tolist()
        offsets = slots.pack(grid.encode_offset(offset).tolist())
        tables = [PowerTable(ciphertext, modulus.square) for ciphertext in modulus.read(body, num_moments)]
        slot_bits = slots.base.bit_length() - 1

        def product(first_row: int) -> int:
            """Noise times the ciphertexts raised to the coefficients of the rows that share one reply."""
            noise = PowerTable(modulus.random_unit(), modulus.square)
            factors = noise.factors(modulus.n)  # fresh noise, without which S recognises A in that of its ciphertexts
            for slot, row in enumerate(rows[first_row : first_row + slots.count]):
                for table, entry in zip(tables, row, strict=True):
                    factors += table.factors(entry, shift=slot * slot_bits)
            return product_of_powers(factors, modulus.square)

        products = cores.spread(product, range(0, len(rows), slots.count), self._backend.workers)
        self._slots, self._length = slots, len(rows)
        self._masks = [secrets.randbelow(int(modulus.n)) for _ in offsets]
        return modulus.write(
            [
                power * modulus.embed(packed + mask) % modulus.square
                for power, packed, mask in zip(products, offsets, self._masks, strict=True)
            ]
        )

    def _unmask(self, body: bytes) -> Tensor:
        plaintexts, first = [], 0
        sizes = _bits(self._slots, self._length)
        size = sum(-(-bits // 8) for bits in sizes)
        check(len(body) == size, "bytes of the answer", f"{size}", len(body), error=DecodeError)
        for bits, mask in zip(sizes, self._masks, strict=True):
            last = first + -(-bits // 8)
            (masked,) = from_bytes(body[first:last], 1, last - first, 2**bits, "masked plaintexts")
            number = (masked - mask) % 2**bits
            plaintexts.append(number - 2**bits if number >= 2 ** (bits - 1) else number)
            first = last
        self._masks = []
        outputs = self._slots.unpack(plaintexts, self._length)
        return self._backend.grid.decode(torch.tensor(outputs, dtype=torch.int64))


@final
class PaillierAffine(TwoPartyAffine):
    """Computes y = A m + b on Paillier ciphertexts, exactly on the grids. Needs ``pip install 'fedlit[paillier]'``.

    Args:
        grid: Grids of m, A and b; ``None`` is ``AffineGrid()``. Their bounds size the slots of the replies.
        key_bits: Bits of the modulus, a multiple of 16. Less than 3072 gives a warning, less than 2048 is refused.
        insecure_test_keys: Allow keys of any size, where nothing is secret.
        workers: At most this many cores share the work; ``None`` is the number of cores.
        reveal_moments: Let the target ask for numbers from which it can solve for the source's moments: see
            `fedlit.privacy.affine_bound`. They are not hidden then.

    Raises:
        ValueError: If an argument is out of range.
        ImportError: If ``phe`` is missing.
    """

    grid: AffineGrid
    source_type, target_type = _PaillierSource, _PaillierTarget

    def __init__(
        self,
        grid: AffineGrid | None = None,
        key_bits: int = RECOMMENDED_KEY_BITS,
        insecure_test_keys: bool = False,
        workers: int | None = None,
        reveal_moments: bool = False,
    ) -> None:
        check_settings(key_bits, insecure_test_keys, workers)
        self.reveal_moments = reveal_moments
        self.grid = AffineGrid() if grid is None else grid
        self.key_bits = key_bits
        self.workers = workers

    def __repr__(self) -> str:
        return f"PaillierAffine(grid={self.grid}, key_bits={self.key_bits})"

    def slots(self, num_moments: int) -> Slots:
        """Layout of entries of y in a plaintext.

        Raises a `RangeError` if so many moments need more than 63 bits, or not even one entry fits the key.

        The base is a power of two, so that an entry of A has as few binary digits in the exponent as on its grid.
        """
        largest = self.grid.largest_output(num_moments)
        return Slots(largest, 2 ** (2 * largest).bit_length(), self.key_bits, _SPARE_BITS)

    def error_bound(self, num_moments: int) -> float:
        """That of the grids: the arithmetic is exact."""
        return self.grid.error_bound(num_moments)

    def describe(self) -> Description:
        """Adversary, what is hidden and revealed, tolerated dropouts, cost."""
        return Description(
            backend="PaillierAffine",
            adversary="the target, honest but curious, as long as moduli of "
            f"{self.key_bits} bits cannot be factored, nor composite residues recognised; the source, even malicious",
            hidden=f"{of_moments(self.reveal_moments)}; A, b and y, from the source, whatever it computes",
            revealed=f"{of_outputs(self.reveal_moments)}. A malicious target obtains no more bits than these numbers "
            "have, but chooses what they say, also of earlier moments under the same key; the sizes of A, to both",
            collusion=COLLUSION,
            dropouts="none: both parties are needed",
            bytes_per_number=self.key_bits / 4,
            error=self.grid.error_text(),
        )


def _bits(slots: Slots, length: int) -> list[int]:
    """Bits that the numbers of y take in each plaintext."""
    slot_bits = int(slots.base).bit_length() - 1
    return [slot_bits * min(slots.count, length - first) for first in range(0, length, slots.count)]


def _challenges(modulus: PublicModulus) -> list[int]:
    """Numbers modulo n that its owner cannot choose, whose n-th roots are to be shown."""
    size = modulus.plaintext_bytes
    n = to_bytes([modulus.n], size)
    # 16 bytes more than n has, so that the remainder is as good as uniform
    stream = hashlib.shake_256(b"fedlit affine modulus" + n).digest(_NUM_ROOTS * (size + 16))
    blocks = (stream[first : first + size + 16] for first in range(0, len(stream), size + 16))
    return [int.from_bytes(block, "big") % modulus.n for block in blocks]


def _check_no_bad_factor(modulus: PublicModulus, roots: bytes) -> None:
    """Raise a `KeyCheckError` unless n-th powers permute the numbers modulo n, which lets replies hide A from S.

    The owner shows n-th roots of `_challenges`. Were the map no permutation, some prime factor of n would divide
    phi(n), and at most one number in so many would have a root: with no prime below 2^16 in n, eight roots leave a
    chance of 2^-128. It also rules out that n is divisible by a square. T never needs n to be hard to factor.

    References:
        Goldberg, Reyzin, Sagga, Baldimtsi (2019), Efficient noninteractive certification of RSA moduli and beyond,
        section 3.
    """
    if math.gcd(_small_primes(), int(modulus.n)) != 1:
        raise KeyCheckError(f"the source's modulus has a prime factor below {_SMALL_PRIMES_UP_TO}: refuse this source")
    try:
        shown = from_bytes(roots, _NUM_ROOTS, modulus.plaintext_bytes, modulus.n, "roots")
    except DecodeError as error:
        raise KeyCheckError(f"the source's proof that its modulus is sound is malformed: {error}") from error
    for root, challenge in zip(shown, _challenges(modulus), strict=True):
        if pow(root, modulus.n, modulus.n) != challenge:
            raise KeyCheckError("the source's proof that its modulus is sound is wrong: refuse this source")


@functools.cache
def _small_primes() -> int:
    """Product of the primes below 2^16."""
    sieve = bytearray([1]) * _SMALL_PRIMES_UP_TO
    for number in range(2, math.isqrt(_SMALL_PRIMES_UP_TO) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, _SMALL_PRIMES_UP_TO, number)))
    return math.prod(number for number in range(2, _SMALL_PRIMES_UP_TO) if sieve[number])
