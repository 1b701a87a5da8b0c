r"""The two-party affine exchange under CKKS: approximate, faster than Paillier for many moments, and less private.

S encrypts all moments in one ciphertext. T multiplies it by A (diagonal method, Halevi and Shoup, 2014, one plaintext
multiplication and rotations of the slots), adds a fresh encryption of b plus a mask, and S decrypts.

Adversary: T honest but curious; S honest.
Hidden:    m from T, beyond what y reveals. y from S, but for 2^-19 of its size: CKKS has no room for more.
Not:       A from an S that studies noise. `PaillierAffine` hides A and y from S, whatever it computes.

The mask of a number of y is uniform in [-2^18, 2^18), in steps of 2^-34: what S sees for y and for y' differs by
|y - y'| / 2^19 in total variation. A mask acts on the real parts of the slots. In their imaginary parts, S finds the
noise of its own ciphertext, which it knows, multiplied by A, under rounding noise of the same order: about one linear
combination of each row of A per exchange.

What S answers could reveal to T something of the key, since a T that knows y otherwise sees the noise in it (Li and
Micciancio, 2021). So S adds Gaussian noise: of n numbers, T learns at most n / 2 times the squared ratio of the two
deviations in nats (Li et al., 2022, section 4), which is below 1e-7 for a row of A of norm 1.

Why `CKKSAffine.error_bound` holds. The noise of a fresh ciphertext, of a rescaled one and of one with a prime dropped
is the rounding of two polynomials of N = 8192 coefficients, the second times the private key. Roundings are independent
and at most 1/2, and the key is ternary, so with Hoeffding's inequality a slot of unit weight is off by at most

.. math:: \frac{9.4}{2} \sqrt{N / 2}\,(1 + 9.4 \sqrt{N}) < 2^{18}

units of the scale 2^40, but for a chance of 1e-19, and a row of A by that times its norm. Rounding when numbers are
encoded stays below 9.4 / 2 * sqrt(N / 2) < 2^9 units, and a Fourier transform in double precision adds at most 2^-40
of the largest number (as in `fedlit.privacy.lattices`). Rotations act at scale 2^80: their noise is far below a unit.

Entries of A below 2^-28 count as 0. By Parseval's identity the polynomial of a diagonal with an entry a has a
coefficient of at least sqrt(2) |a| / N; if all were rounded to 0, SEAL would refuse the product, which hides nothing.
"""

from __future__ import annotations

import math
import secrets
from typing import Final, final

import torch
from torch import Tensor

from fedlit.privacy.affine import AffineGrid, AffineSource, AffineTarget, TwoPartyAffine
from fedlit.privacy.affine_bound import COLLUSION, of_moments, of_outputs
from fedlit.privacy.affine_plain import read_floats
from fedlit.privacy.base import Description
from fedlit.privacy.errors import DecodeError, RangeError
from fedlit.privacy.tenseal_keys import Context, Parameters, join, load_tenseal, refusing, split

PARAMETERS: Final = Parameters("CKKS", 8192, (60, 40, 60), scale=2.0**40, evaluation_keys=True)

RESCALING_PRIME: Final = 1099511480321
"""The largest prime below 2^40 that is 1 modulo 2 * 8192, SEAL's choice. TenSEAL takes it for 2^40 when it rescales."""

LARGEST_OUTPUT: Final = 2.0**14
"""With masks up to 2^18, a masked y stays within 2^19: half of a modulus of 60 bits, over the scale."""

_SMALLEST_ENTRY = 2.0**-28
_LARGEST_MASK = 2.0**18
_MASK_BITS = 53
_ANSWER_NOISE = 2.0**-17
_DEVIATIONS = 10

_OUTPUT_BITS = 36
"""More than log2((2^18 + 2^14 + 1) / 2^-17): what a number that S answers with tells through S's noise (Shannon)."""

_BLOCK = PARAMETERS.slots // 2


class _CKKSSource(AffineSource):
    _backend: CKKSAffine

    def __init__(self, backend: CKKSAffine) -> None:
        super().__init__(backend)
        self._context = Context.generate(PARAMETERS)
        self._public = self._context.save(private=False)

    def public_key(self) -> bytes:
        return self._public

    def _encrypt(self, moments: Tensor) -> bytes:
        self._backend.grid.moments.check(moments)
        return join(self._context.encrypt(block) for block in torch.split(moments, _BLOCK))

    def _decrypt(self, body: bytes, num_outputs: int) -> bytes:
        sizes = _output_sizes(self._num_moments, num_outputs)
        ciphertexts = split(body, len(sizes))
        pairs = zip(ciphertexts, sizes, strict=True)
        # rescaled: one prime is left
        masked = torch.cat([self._context.decrypt(bytes(ciphertext), size, levels=1) for ciphertext, size in pairs])
        if not float(masked.abs().max()) <= LARGEST_OUTPUT + _LARGEST_MASK + 1:
            raise DecodeError("the reply decrypts to numbers beyond any masked y: it was made under another key")
        random = secrets.SystemRandom()
        noise = torch.tensor([random.gauss(0.0, _ANSWER_NOISE) for _ in masked], dtype=torch.float64)
        return (masked + noise).numpy().tobytes()


class _CKKSTarget(AffineTarget):
    _backend: CKKSAffine
    _context: Context  # from `_load_key` on
    _mask: Tensor  # these from `_evaluate` on
    _largest: Tensor

    def _load_key(self, public: bytes) -> None:
        self._context = Context.load(PARAMETERS, public, private=False)

    def _evaluate(self, body: bytes, matrix: Tensor, offset: Tensor) -> bytes:
        context, blocks = self._context, _blocks(matrix.shape[1])
        self._largest = self._check_range(matrix, offset)
        pairs = zip(split(body, len(blocks)), blocks, strict=True)
        moments = [context.read(bytes(ciphertext), size, PARAMETERS.levels) for ciphertext, size in pairs]
        self._mask = _fresh_mask(len(offset))
        sizes = _output_sizes(matrix.shape[1], len(offset))
        kept = torch.where(matrix.abs() < _SMALLEST_ENTRY, 0.0, matrix)
        rows = torch.split(kept * (RESCALING_PRIME / 2.0**40), sizes)

        def reply(rows: Tensor, masked_offset: Tensor) -> bytes:
            # encrypted, the mask brings noise of its own, under which that from A is harder to make out
            total = context.vector(masked_offset)
            for vector, columns in zip(moments, torch.split(rows, blocks, dim=1), strict=True):
                total.add_(context.multiply(vector, columns.T))
            return bytes(total.serialize())

        with refusing(DecodeError, "these moments cannot be multiplied by A"):  # such as ciphertexts without noise
            return join(map(reply, rows, torch.split(offset + self._mask, sizes)))

    def _check_range(self, matrix: Tensor, offset: Tensor) -> Tensor:
        """Greatest absolute value of each number of y, if none can be beyond what the ciphertexts hold."""
        grid = self._backend.grid
        grid.matrix.check(matrix)
        grid.offset.check(offset)
        largest = matrix.abs().sum(1) * grid.moments.bound + offset.abs()
        if float(largest.max()) > LARGEST_OUTPUT:
            raise RangeError(
                f"a number of y could reach {float(largest.max()):g}, more than {LARGEST_OUTPUT:g}: lower the bound of "
                f"the moments ({grid.moments.bound:g}), or scale A and b down"
            )
        return largest

    def _unmask(self, body: bytes) -> Tensor:
        outputs = read_floats(body, len(self._mask)) - self._mask
        self._mask = torch.zeros(0)
        if not bool((outputs.abs() <= self._largest + 1).all()):  # NaN is not
            raise DecodeError("the answer holds numbers that y cannot reach: it was decrypted with another key")
        return outputs


@final
class CKKSAffine(TwoPartyAffine):
    """Computes y = A m + b on CKKS ciphertexts, approximately. Needs ``pip install 'fedlit[he]'``.

    Whoever wants A hidden from S takes `PaillierAffine`: see the module. 128 bits of security. Entries of A below
    2^-28 in absolute value count as 0.

    Args:
        grid: Bounds of m, A and b, which are not rounded to it; ``None`` is ``AffineGrid()``. Numbers of y may be up
            to 2^14 in absolute value, which T makes sure of for its A and b and any moments within their bound.
        reveal_moments: Let T ask for numbers from which it can solve for the moments: see
            `fedlit.privacy.affine_bound`. They are not hidden then.

    Raises:
        ImportError: If TenSEAL is not installed.
    """

    grid: AffineGrid
    source_type, target_type = _CKKSSource, _CKKSTarget

    def __init__(self, grid: AffineGrid | None = None, reveal_moments: bool = False) -> None:
        load_tenseal()
        self.grid = AffineGrid() if grid is None else grid
        self.reveal_moments = reveal_moments

    def output_bits(self, num_moments: int) -> int:
        """Bits that S answers with for one number of y, at most, whatever T has packed."""
        return _OUTPUT_BITS

    def error_bound(self, num_moments: int) -> float:
        """Noise, roundings and S's own noise, but for a chance of 1e-19: see the module."""
        moment, entry = self.grid.moments.bound, self.grid.matrix.bound
        num_blocks = len(_blocks(num_moments))
        # fresh moments times A; each block's product rescaled, T's mask fresh and with a prime dropped
        ciphertexts = 2.0**-22 * (math.sqrt(num_moments) * entry + num_blocks + 2)
        encodings = num_moments * ((moment + entry) * 2.0**-31 + moment * entry * 2.0**-39)
        dropped = num_moments * moment * _SMALLEST_ENTRY
        masks = 2 * 2.0**-40 * 2.0**19
        return ciphertexts + encodings + dropped + masks + _DEVIATIONS * _ANSWER_NOISE

    def describe(self) -> Description:
        """Adversary, what is hidden and revealed, tolerated dropouts, cost."""
        return Description(
            backend="CKKSAffine",
            adversary="the target, honest but curious; the source, honest, for it does not study noise",
            hidden=f"{of_moments(self.reveal_moments)}; y, from the source, up to what its mask leaves",
            revealed=f"{of_outputs(self.reveal_moments)}. A malicious target obtains at most {_OUTPUT_BITS} bits for "
            "each number, but chooses what they say, also of earlier moments under the same key; the sizes of A, to "
            "both; y, to the source, behind a mask of 18 bits, under "
            "which two values of a number differ by their distance / 2^19 in total variation; to a source that studies "
            "the noise of what it decrypts, about one linear combination of each row of A per exchange",
            collusion=COLLUSION,
            dropouts="none: both parties are needed",
            bytes_per_number=PARAMETERS.ciphertext_bytes(PARAMETERS.levels) / _BLOCK,
            error=f"noise with a standard deviation of {_ANSWER_NOISE:.1e}, and below {self.error_bound(100):.1e} for "
            "100 moments",
        )


def _blocks(num_moments: int) -> list[int]:
    """Numbers of moments in each ciphertext: half of its slots, that blocks of A have as much room for rows."""
    return [min(_BLOCK, num_moments - first) for first in range(0, num_moments, _BLOCK)]


def _output_sizes(num_moments: int, num_outputs: int) -> list[int]:
    """Numbers of y in each reply: as many as `Context.multiply` allows."""
    size = PARAMETERS.slots + 1 - min(_BLOCK, num_moments)
    return [min(size, num_outputs - first) for first in range(0, num_outputs, size)]


def _fresh_mask(count: int) -> Tensor:
    """Uniform multiples of 2^-34 in [-2^18, 2^18), shape (``count``,), float64."""
    integers = torch.tensor([secrets.randbits(_MASK_BITS) for _ in range(count)], dtype=torch.float64)
    return (integers * 2.0 ** (1 - _MASK_BITS) - 1) * _LARGEST_MASK
