"""BFV: exact sums of integers under lattice-based encryption (Fan and Vercauteren, 2012), 4096 to a ciphertext.

Adversary: a server that follows the protocol and reads all it gets.
Hidden:    every client's vector.   Not hidden: the sum, from the clients; its length, who took part.
Collusion: one client and the server together read every vector, since the clients share the private key.
Dropout:   a sum runs over those who sent.
Error:     half a step of the grid per client; the sum is exact.   Uplink: 16.1 bytes per number.
"""

from __future__ import annotations

from typing import Final, final

from fedlit.checks import check_between
from fedlit.privacy.base import Description
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.shared_key import SharedKeyAggregation
from fedlit.privacy.tenseal_keys import Parameters, VectorScheme

PARAMETERS: Final = Parameters("BFV", 4096, (60, 49), plain_modulus=17179754497)
"""The plain modulus is the largest prime below 2^34 that is 1 modulo 8192, as batching needs."""

_MAX_CLIENTS = 2**20
"""Noise of 21 and rounding per vector stay below q / 2t, about 2^25, which decryption needs."""


@final
class BFV(SharedKeyAggregation):
    """Encrypts grid integers with BFV, under a key that the clients share. Needs TenSEAL.

    Sums are bit for bit those of `Plain` on the same grid. 128 bits of security.

    Args:
        codec: Grid of the numbers; ``None`` is ``FixedPoint()``.
        max_clients: Maximum number of vectors in one sum, from 2 to 2**20.

    Raises:
        RangeError: If the sum of so many vectors does not fit the plaintexts.
        ImportError: If TenSEAL is not installed.
    """

    def __init__(self, codec: FixedPoint | None = None, max_clients: int = 64) -> None:
        check_between("max_clients", max_clients, 2, _MAX_CLIENTS)
        self.codec = FixedPoint() if codec is None else codec
        self.max_clients = int(max_clients)
        self.codec.check_headroom(self.max_clients, PARAMETERS.plain_modulus // 2, "the plaintexts of BFV")
        self.scheme = VectorScheme(PARAMETERS, self.codec, self.codec.round, self.codec.decode, self.error_bound)

    def describe(self) -> Description:
        """The server learns nothing; whoever has the key reads everything."""
        return Description(
            backend="BFV",
            adversary="a server that follows the protocol and reads all it gets; it has no key",
            hidden="every client's vector and the sum, from the server",
            revealed="the sum, to every client; the vectors' length and who took part, to the server",
            collusion="one client and the server together read every vector: the clients share the private key",
            dropouts="a sum runs over those who sent",
            bytes_per_number=PARAMETERS.bytes_per_number,
            error=self.codec.error_text(),
        )
