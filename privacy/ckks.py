r"""CKKS: approximate sums of reals under lattice-based encryption (Cheon et al., 2017), 2048 to a ciphertext.

Adversary: a server that follows the protocol and reads all it gets.
Hidden:    every client's vector.   Not hidden: the sum, from the clients; its length, who took part.
Collusion: one client and the server together read every vector, since the clients share the private key.
Dropout:   a sum runs over those who sent.
Error:     half a step of a grid per client, 2.4e-7 for up to 64 clients.   Uplink: 32.1 bytes per number.

A decrypted total holds the noise of its encryption, and so reveals something about the key: with the ciphertexts and
enough exact digits of one decrypted total, whoever has neither key nor vectors computes the private key (Li and
Micciancio, 2021). So numbers are rounded to a grid before they are encrypted, and totals when they are decrypted, with
a step of more than twice the noise: what comes out is the exact sum of what went in, to the last bit, whatever the
noise was, and reveals nothing more than the sum does. The sum is the clients' nevertheless.

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
from typing import Final, final

from torch import Tensor

from fedlit.checks import check_at_least
from fedlit.privacy.base import Description
from fedlit.privacy.errors import RangeError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.shared_key import SharedKeyAggregation
from fedlit.privacy.tenseal_keys import LARGEST_NOISE, Parameters, VectorScheme

PARAMETERS: Final = Parameters("CKKS", 4096, (60, 49), scale=2.0**45)

_CAPACITY = 2.0**13
"""Coefficients stay below q / 2, about 2^59, with half of it to spare; none exceeds scale times the largest number."""


@final
class CKKS(SharedKeyAggregation):
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

    def __init__(self, codec: FixedPoint | None = None, max_clients: int = 64) -> None:
        check_at_least("max_clients", max_clients, 2)
        self.codec = FixedPoint() if codec is None else codec
        self.max_clients = int(max_clients)
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
        self.scheme = VectorScheme(PARAMETERS, self.codec, self._on_grid, self._on_grid, self.error_bound)

    def _on_grid(self, numbers: Tensor) -> Tensor:
        return (numbers.double() * 2.0**self.grid_bits).round() / 2.0**self.grid_bits

    def error_bound(self, num_clients: int) -> float:
        """Half a step of the grid per client: the sum of what is on it is exact."""
        return num_clients * 2.0 ** -(self.grid_bits + 1)

    def _noise_bound(self, num_clients: int) -> float:
        """Noise, rounding and floating-point error, each at its worst: see the module. It does not happen by chance."""
        encryption = PARAMETERS.degree * (LARGEST_NOISE + 0.5) / PARAMETERS.scale
        transforms = 2 * math.sqrt(PARAMETERS.degree) * 2.0**-46 * self.codec.bound
        return num_clients * (encryption + transforms)

    def describe(self) -> Description:
        """The server learns nothing, unless it is shown totals; whoever has the key reads everything."""
        return Description(
            backend="CKKS",
            adversary="a server that follows the protocol, reads all it gets and has no key",
            hidden="every client's vector and the sum, from the server",
            revealed="the sum, to every client; the vectors' length and who took part, to the server",
            collusion=(
                "one client and the server together read every vector: the clients share the private key. A decrypted "
                "total is rounded to a grid, so that whoever sees it learns the sum and nothing about the key"
            ),
            dropouts="a sum runs over those who sent",
            bytes_per_number=PARAMETERS.bytes_per_number,
            error=f"at most K * 2^-{self.grid_bits + 1} for K clients, numbers up to {self.codec.bound:g}; noise is "
            "rounded away, and the sum of what was encrypted is exact",
        )
