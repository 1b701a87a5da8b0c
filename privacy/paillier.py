"""Secure aggregation under Paillier's cryptosystem (Paillier, 1999), many numbers to a ciphertext.

Adversary: an honest-but-curious server; it holds the public key only.
Hidden:    every client's vector, from the server. Not hidden: the sum from the clients, its length, who took part.
Dropout:   a client lost within a round is left out of its sum; nothing has to be recovered.
Error:     that of the fixed-point grid; the sum itself is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from fedlit.checks import check_count
from fedlit.privacy.base import Description
from fedlit.privacy.errors import DecodeError, KeyCheckError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import Buffer
from fedlit.privacy.paillier_arithmetic import (
    PIECE,
    RECOMMENDED_KEY_BITS,
    PrivateModulus,
    PublicModulus,
    Slots,
    check_settings,
    generate,
    load_private,
)
from fedlit.privacy.shared_key import HomomorphicKey, SharedKeyAggregation


@final
class Paillier(SharedKeyAggregation):
    """Adds Paillier ciphertexts; the clients share one key, the server never has it.

    Ciphertexts are ordinary ones, which ``phe`` decrypts. Each packs as many fixed-point numbers as fit, with headroom
    for ``max_clients`` of them in the sum, so that no exponent and no magnitude is visible. Needs
    ``pip install 'fedlit[paillier]'``.

    Cores share a client's two long tasks: the encryption of its vector, by forked processes that live for one call,
    where the platform can fork, and the decryption of the total, by threads, where ``gmpy2`` is installed. Adding
    ciphertexts, at the server, takes one core.

    Args:
        codec: Grid on which numbers travel; ``None`` is ``FixedPoint()``.
        key_bits: Bits of the modulus, a multiple of 16. Less than 3072 gives a warning, less than 2048 is refused.
        max_clients: Maximum number of vectors in one sum, at least 2; more take more room in every ciphertext.
        insecure_test_keys: Allow keys of any size, where nothing is secret.
        workers: At most this many cores share the encryption or decryption of a long vector; ``None`` is the number
            of cores that the process may use.

    Raises:
        ValueError: If an argument is out of range.
        RangeError: If the sum of so many vectors exceeds 63 bits, or does not fit the key.
        ImportError: If ``phe`` is missing.
    """

    def __init__(
        self,
        codec: FixedPoint | None = None,
        key_bits: int = RECOMMENDED_KEY_BITS,
        max_clients: int = 64,
        insecure_test_keys: bool = False,
        workers: int | None = None,
    ) -> None:
        check_settings(key_bits, insecure_test_keys, workers)
        check_count("max_clients", max_clients, 2)
        self.codec = FixedPoint() if codec is None else codec
        self.key_bits = key_bits
        self.max_clients = max_clients
        self.workers = workers
        self.codec.check_headroom(max_clients, 2**63 - 1, "63 bits")
        largest = self.codec.largest_sum(max_clients)
        self.slots = Slots(largest, 2 * largest + 1, key_bits)

    def __repr__(self) -> str:
        return f"Paillier(codec={self.codec}, key_bits={self.key_bits}, max_clients={self.max_clients})"

    def generate_keys(self) -> tuple[bytes, bytes]:
        """A fresh key pair: private half, public half."""
        return generate(self.key_bits)

    def load_key(self, public: bytes, private: bytes | None = None) -> HomomorphicKey:
        """See `SharedKeyAggregation`."""
        if private is None:
            return _PaillierKey(PublicModulus(public, self.key_bits), self)
        return _PaillierKey(load_private(private, public, self.key_bits), self)

    def check_headroom(self, num_clients: int) -> None:
        """Raise a `RangeError` unless the sum of so many vectors fits the slots."""
        self.codec.check_headroom(num_clients, self.slots.largest, f"slots for max_clients ({self.max_clients})")

    def describe(self) -> Description:
        """Adversary, what is hidden and revealed, tolerated dropouts, cost."""
        return Description(
            backend="Paillier",
            adversary="the server, honest but curious, and anybody on the wire; "
            f"as long as moduli of {self.key_bits} bits cannot be factored, nor composite residues recognised",
            hidden="every client's vector, from the server",
            revealed="the sum, to the clients; its length and who took part, to the server",
            collusion="one client and the server together read every vector: the clients share the key",
            dropouts="any: a sum runs over those who sent, at least two",
            bytes_per_number=self.key_bits / 4 / self.slots.count,
            error=self.codec.error_text(),
        )


@final
class _PaillierKey(HomomorphicKey):
    def __init__(self, modulus: PublicModulus, backend: Paillier) -> None:
        self._modulus, self._backend, self._slots = modulus, backend, backend.slots

    def _private(self) -> PrivateModulus:
        if not isinstance(self._modulus, PrivateModulus):
            raise KeyCheckError("only clients, which have the private half, encrypt and decrypt")
        return self._modulus

    def encrypt(self, vector: Tensor) -> Iterator[bytes]:
        codec = self._backend.codec
        codec.check(vector)
        for chunk in torch.split(vector.detach(), PIECE * self._slots.count):
            plaintexts = self._slots.pack(codec.round(chunk).tolist())
            yield self._modulus.write(self._private().encrypt(plaintexts, self._backend.workers))

    def decrypt(self, body: Buffer, length: int, num_clients: int) -> Tensor:
        codec, pieces = self._backend.codec, self._modulus.read_pieces(body, self._slots.integers(length))
        total = torch.empty(length, dtype=torch.float64)
        for ciphertexts, chunk in zip(pieces, torch.split(total, PIECE * self._slots.count), strict=True):
            plaintexts = self._private().decrypt(ciphertexts, self._backend.workers)
            numbers = self._slots.unpack([self._modulus.centre(plaintext) for plaintext in plaintexts], len(chunk))
            integers = torch.tensor(numbers, dtype=torch.int64)
            if int(integers.abs().max()) > codec.largest_sum(num_clients):
                raise DecodeError(f"a decrypted number exceeds what {num_clients} clients can add up to")
            chunk.copy_(codec.decode(integers))
        return total

    def add(self, total: deque[Any], body: Buffer, length: int) -> None:
        is_first = not total
        for ciphertexts in self._modulus.read_pieces(body, self._slots.integers(length)):
            if is_first:
                total.extend(ciphertexts)
                continue
            for ciphertext in ciphertexts:  # once round, so that their order stays
                total.append(total.popleft() * ciphertext % self._modulus.square)

    def write(self, total: deque[Any]) -> Iterator[bytes]:
        while total:
            yield self._modulus.write([total.popleft() for _ in range(min(PIECE, len(total)))])
