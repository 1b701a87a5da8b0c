r"""Sums under lattice-based encryption, whose ciphertexts are vectors of TenSEAL: `BFV` and `CKKS`.

BFV (Fan and Vercauteren, 2012) adds integers exactly, 4096 to a ciphertext; CKKS (Cheon et al., 2017) adds reals
approximately, 2048 to a ciphertext.

Adversary: a server that follows the protocol and reads all it gets.
Hidden:    every client's vector.   Not hidden: the sum, from the clients; its length, who took part.
Collusion: one client and the server together read every vector, since the clients share the private key.
Dropout:   a sum runs over those who sent.
Error:     half a step of a grid per client; for CKKS that is 2.4e-7 for up to 64 clients.
Uplink:    16.1 bytes per number for BFV, 32.1 for CKKS.

A total that CKKS decrypts holds the noise of its encryption, and so reveals something about the key: with the
ciphertexts and enough exact digits of one decrypted total, whoever has neither key nor vectors computes the private key
(Li and Micciancio, 2021). So numbers are rounded to a grid before they are encrypted, and totals when they are
decrypted, with a step of more than twice the noise: what comes out is the exact sum of what went in, to the last bit,
whatever the noise was, and reveals nothing more than the sum does. The sum is the clients' nevertheless.

Why noise stays below half a step: n reals in the slots are the values, at n points on the unit circle, of a polynomial
with N = 2n coefficients, which are multiplied by the scale, rounded, and get noise. A slot of the sum is off by the
value of the polynomial of all errors, so by at most

.. math:: K \cdot N \cdot (1/2 + 21) / \mathrm{scale},

since fresh noise under the private key is at most 21. Two Fourier transforms in double precision, of which each has a
relative error below 12 * 7 * 2^-53 in the Euclidean norm (Higham, 2002, theorem 24.2), add at most
sqrt(N) * 2^-46 of the largest number each.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlit.checks import check_between, check_count
from fedlit.privacy.base import Description
from fedlit.privacy.errors import DecodeError, KeyCheckError, RangeError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import Buffer
from fedlit.privacy.shared_key import HomomorphicKey, SharedKeyAggregation
from fedlit.privacy.tenseal_keys import LARGEST_NOISE, Context, Parameters, join, load_tenseal, refusing, split

BFV_PARAMETERS: Final = Parameters("BFV", 4096, (60, 49), plain_modulus=17179754497)
"""The plain modulus is the largest prime below 2^34 that is 1 modulo 8192, as batching needs."""

CKKS_PARAMETERS: Final = Parameters("CKKS", 4096, (60, 49), scale=2.0**45)

_MAX_CLIENTS = 2**20
"""Of BFV: noise of 21 and rounding per vector stay below q / 2t, about 2^25, which decryption needs."""

_CAPACITY = 2.0**13
"""Of CKKS: coefficients stay below q / 2, about 2^59, with half of it to spare; none exceeds scale times the largest
number."""


class VectorAggregation(SharedKeyAggregation):
    """Base of backends whose ciphertexts are TenSEAL's vectors; the server holds no key, only parameters.

    The public half of a key pair is an encryption of zeros, as are all public keys of such schemes.
    """

    parameters: ClassVar[Parameters]

    def __init__(self, codec: FixedPoint | None, max_clients: int) -> None:
        load_tenseal()  # fail where the backend is made, not in its first round
        self.codec = FixedPoint() if codec is None else codec
        self.max_clients = int(max_clients)

    @abstractmethod
    def encode(self, numbers: Tensor) -> Tensor:
        """What is encrypted for floating-point numbers within the codec's bound."""

    @abstractmethod
    def decode(self, numbers: Tensor) -> Tensor:
        """Reals, float64, of what `encode` returned, or of a decrypted sum of it."""

    def generate_keys(self) -> tuple[bytes, bytes]:
        """A fresh key pair: a private context, an encryption of zeros."""
        context = Context.generate(self.parameters)
        return context.save(private=True), context.encrypt(self.encode(torch.zeros(self.parameters.slots)))

    def load_key(self, public: bytes, private: bytes | None = None) -> HomomorphicKey:
        """See `SharedKeyAggregation`; the halves belong together if zeros decrypt to zeros."""
        parameters = self.parameters
        if private is None:
            context = Context.without_keys(parameters)
            with refusing(KeyCheckError, "the public key is malformed"):
                context.read(public, parameters.slots, parameters.levels)
            return _VectorKey(self, context)
        context = Context.load(parameters, private, private=True)
        with refusing(KeyCheckError, "the public key is malformed"):
            zeros = self.decode(context.decrypt(public, parameters.slots, parameters.levels))
        if float(zeros.abs().max()) > self.error_bound(1):
            raise KeyCheckError("the private key does not belong to the public key")
        return _VectorKey(self, context)

    def largest_total(self, num_clients: int) -> float:
        """Greatest absolute value of an entry of a decrypted total, in reals."""
        return num_clients * (self.codec.limit + 0.5) / self.codec.scale + self.error_bound(num_clients)

    def _described(self, adversary: str, collusion: str, error: str) -> Description:
        return Description(
            backend=type(self).__name__,
            adversary=adversary,
            hidden="every client's vector and the sum, from the server",
            revealed="the sum, to every client; the vectors' length and who took part, to the server",
            collusion="one client and the server together read every vector: the clients share the private key"
            + collusion,
            dropouts="a sum runs over those who sent",
            bytes_per_number=self.parameters.ciphertext_bytes(self.parameters.levels) / self.parameters.slots,
            error=error,
        )


@final
class BFV(VectorAggregation):
    """Encrypts grid integers with BFV, under a key that the clients share. Needs TenSEAL.

    Sums are bit for bit those of `Plain` on the same grid. 128 bits of security.

    Args:
        codec: Grid of the numbers; ``None`` is ``FixedPoint()``.
        max_clients: Maximum number of vectors in one sum, from 2 to 2**20.

    Raises:
        RangeError: If the sum of so many vectors does not fit the plaintexts.
        ImportError: If TenSEAL is not installed.
    """

    parameters = BFV_PARAMETERS

    def __init__(self, codec: FixedPoint | None = None, max_clients: int = 64) -> None:
        check_count("max_clients", max_clients, 2)
        check_between("max_clients", max_clients, 2, _MAX_CLIENTS)
        super().__init__(codec, max_clients)
        self.codec.check_headroom(self.max_clients, self.parameters.plain_modulus // 2, "the plaintexts of BFV")

    def encode(self, numbers: Tensor) -> Tensor:
        """Integers of the grid."""
        return self.codec.round(numbers)

    def decode(self, numbers: Tensor) -> Tensor:
        """Reals of integers of the grid."""
        return self.codec.decode(numbers)

    def describe(self) -> Description:
        """The server learns nothing; whoever has the key reads everything."""
        adversary = "a server that follows the protocol and reads all it gets; it has no key"
        return self._described(adversary, "", self.codec.error_text())


@final
class CKKS(VectorAggregation):
    """Encrypts reals with CKKS, under a key that the clients share. Needs TenSEAL.

    Numbers are rounded to a grid of its own, the finest that noise cannot blur: the fewer ``max_clients``, the finer.
    It is at least as fine as the codec's, which bounds numbers and serves the digits of wide entries. Twice the size of
    `BFV`. 128 bits of security.

    Args:
        codec: Bound of the numbers; ``None`` is ``FixedPoint()``.
        max_clients: Maximum number of vectors in one sum, at least 2.

    Raises:
        RangeError: If the sum of so many vectors does not fit the plaintexts, or its error could reach half a step.
        ImportError: If TenSEAL is not installed.
    """

    parameters = CKKS_PARAMETERS

    def __init__(self, codec: FixedPoint | None = None, max_clients: int = 64) -> None:
        check_count("max_clients", max_clients, 2)
        super().__init__(codec, max_clients)
        self.codec.check_headroom(self.max_clients, int(_CAPACITY * self.codec.scale), "the plaintexts of CKKS")
        half_step, error = 0.5 / self.codec.scale, self._noise_bound(self.max_clients)
        if error >= half_step:
            raise RangeError(
                f"a sum of {self.max_clients} vectors may be off by {error:.1e}, but half a step of the grid is "
                f"{half_step:.1e}, so wide entries could be wrong: lower fraction_bits ({self.codec.fraction_bits}) "
                "or max_clients"
            )
        self.grid_bits = math.ceil(-math.log2(error)) - 2
        """Binary places of the grid that totals are on: the finest whose half step is above all noise."""

    @property
    def grid(self) -> FixedPoint:
        """See `SecureAggregation`: finer than the codec's."""
        # the codec rounds before it compares, so that half a step of it is beyond the bound
        return FixedPoint(self.grid_bits, self.codec.bound + 1 / self.codec.scale)

    def encode(self, numbers: Tensor) -> Tensor:
        """Reals on the grid, which a decrypted sum of them is rounded to as well."""
        return (numbers.double() * 2.0**self.grid_bits).round() / 2.0**self.grid_bits

    decode = encode

    def error_bound(self, num_clients: int) -> float:
        """Half a step of the grid per client: the sum of what is on it is exact."""
        return num_clients * 2.0 ** -(self.grid_bits + 1)

    def _noise_bound(self, num_clients: int) -> float:
        """Noise, rounding and floating-point error, each at its worst: see the module. It does not happen by chance."""
        encryption = self.parameters.degree * (LARGEST_NOISE + 0.5) / self.parameters.scale
        transforms = 2 * math.sqrt(self.parameters.degree) * 2.0**-46 * self.codec.bound
        return num_clients * (encryption + transforms)

    def describe(self) -> Description:
        """The server learns nothing, unless it is shown totals; whoever has the key reads everything."""
        return self._described(
            "a server that follows the protocol, reads all it gets and has no key",
            ". A decrypted total is rounded to a grid, so that whoever sees it learns the sum and nothing about the "
            "key",
            f"at most K * 2^-{self.grid_bits + 1} for K clients, numbers up to {self.codec.bound:g}; noise is rounded "
            "away, and the sum of what was encrypted is exact",
        )


@final
class _VectorKey(HomomorphicKey):
    def __init__(self, backend: VectorAggregation, context: Context) -> None:
        self._backend, self._context = backend, context
        self._slots, self._levels = backend.parameters.slots, backend.parameters.levels

    def encrypt(self, vector: Tensor) -> Iterator[bytes]:
        self._backend.codec.check(vector)
        for chunk in torch.split(vector.detach().cpu(), self._slots):
            # zeros fill the last ciphertext up: all have the same form, and decrypt can check every slot
            yield join([self._context.encrypt(pad(self._backend.encode(chunk), (0, self._slots - len(chunk))))])

    def decrypt(self, body: Buffer, length: int, num_clients: int) -> Tensor:
        ciphertexts = split(body, -(-length // self._slots))
        largest = self._backend.largest_total(num_clients)
        total = torch.empty(len(ciphertexts) * self._slots, dtype=torch.float64)
        for ciphertext, chunk in zip(ciphertexts, torch.split(total, self._slots), strict=True):
            chunk.copy_(self._backend.decode(self._context.decrypt(bytes(ciphertext), self._slots, self._levels)))
            if not float(chunk.abs().max()) <= largest:  # NaN is not
                raise DecodeError(
                    f"a total decrypts to numbers beyond {largest:g}, which {num_clients} clients cannot reach: it was "
                    "encrypted under another key, or changed"
                )
        return total[:length]

    def add(self, total: deque[Any], body: Buffer, length: int) -> None:
        ciphertexts = split(body, -(-length // self._slots))
        vectors = (self._context.read(bytes(ciphertext), self._slots, self._levels) for ciphertext in ciphertexts)
        if not total:
            total.extend(vectors)
            return
        for sum_, vector in zip(total, vectors, strict=True):
            with refusing(DecodeError, "ciphertexts cannot be added"):  # such as, of CKKS, one and its negative
                sum_.add_(vector)

    def write(self, total: deque[Any]) -> Iterator[bytes]:
        while total:
            yield join([total.popleft().serialize()])
