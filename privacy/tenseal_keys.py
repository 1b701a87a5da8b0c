"""Contexts and ciphertexts of TenSEAL, with the checks before any of their bytes are loaded.

The clients of a sum all hold the private key, so they encrypt with it (TenSEAL's symmetric type): that hides as much
from whoever lacks it as encryption with a public key, in half the time and with less noise. The server that adds needs
the encryption parameters, which are constants of a backend, and no key at all.

Contexts without the private key are always loaded from bytes, never made public in place: TenSEAL's
``make_context_public`` leaves a working decryptor behind. SEAL draws its randomness from the operating system.
"""

from __future__ import annotations

import gc
import importlib
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from fedlit.privacy import seal_format
from fedlit.privacy.errors import DecodeError, KeyCheckError, PrivacyError
from fedlit.privacy.links import Buffer

_LENGTH = struct.Struct("<I")
_HEADER_BYTES = 256
"""More than what SEAL, TenSEAL and `join` write around the polynomials: parameters' hash, sizes, scale, frames."""

_PARAMETERS, _PUBLIC, _PRIVATE = 1, 2, 3
"""Fields of TenSEAL's contexts; those of their public halves follow."""
_PUBLIC_KEY, _SCALE, _ROTATION_KEYS = 1, 3, 5

LARGEST_NOISE = 21
"""Greatest coefficient of fresh noise: SEAL draws it from the centred binomial distribution over 42 bits."""


def load_tenseal() -> Any:
    """The module ``tenseal``; raises an `ImportError` if it is not installed."""
    try:
        tenseal = importlib.import_module("tenseal")
    except ImportError as error:
        raise ImportError("BFV and CKKS need TenSEAL: pip install 'fedlit[he]'") from error
    _keep_contexts_in_children()
    return tenseal


@cache
def _keep_contexts_in_children() -> None:
    """Let forked processes, as of a DataLoader, never collect an inherited context.

    A context's destructor joins its threads, which a fork does not copy: the child would hang or abort.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


@dataclass(frozen=True)
class Parameters:
    """One set of encryption parameters; SEAL refuses sets below 128 bits of security."""

    name: Literal["BFV", "CKKS"]
    degree: int  # of the polynomials, a power of two
    prime_bits: tuple[int, ...]  # of the coefficient modulus; the last prime is for key switching, not in ciphertexts
    plain_modulus: int = 0  # BFV: a prime, 1 modulo 2 * degree
    scale: float = 1.0  # CKKS: by which numbers are multiplied before they are rounded
    evaluation_keys: bool = False  # whether who computes gets a public key to encrypt with, and keys to rotate slots

    @property
    def slots(self) -> int:
        """Numbers in one ciphertext."""
        return self.degree if self.name == "BFV" else self.degree // 2

    @property
    def levels(self) -> int:
        """Primes of the coefficient modulus of a fresh ciphertext."""
        return len(self.prime_bits) - 1

    def ciphertext_bytes(self, levels: int) -> int:
        """Maximum size of a ciphertext: two polynomials, one word per coefficient and prime, and headers."""
        return 2 * self.degree * levels * 8 + _HEADER_BYTES

    def context_bytes(self, private: bool) -> int:
        """Maximum size of a context: one polynomial of the private key, or two for each key and prime of the others."""
        polynomial = self.degree * len(self.prime_bits) * 8
        if private:
            return polynomial + _HEADER_BYTES
        num_keys = 2 * self.degree.bit_length() if self.evaluation_keys else 0  # rotations by powers of two, both ways
        return 2 * polynomial * self.levels * num_keys + _HEADER_BYTES


class Context:
    """One party's TenSEAL context; decrypts if it is private. Made by `generate`, `load` or `without_keys`."""

    def __init__(self, parameters: Parameters, context: Any) -> None:
        tenseal = load_tenseal()
        self.parameters = parameters
        self._plain = tenseal.plain_tensor
        self._vector = getattr(tenseal, f"{parameters.name}Vector")
        self._context = context

    @classmethod
    def generate(cls, parameters: Parameters) -> Context:
        """A private context with fresh keys."""
        tenseal = load_tenseal()
        encryption = (
            tenseal.ENCRYPTION_TYPE.ASYMMETRIC if parameters.evaluation_keys else tenseal.ENCRYPTION_TYPE.SYMMETRIC
        )
        context = tenseal.context(
            getattr(tenseal.SCHEME_TYPE, parameters.name),
            parameters.degree,
            parameters.plain_modulus,
            list(parameters.prime_bits),
            encryption_type=encryption,
            n_threads=1,
        )
        if parameters.name == "CKKS":
            context.global_scale = parameters.scale
        if parameters.evaluation_keys:
            context.generate_galois_keys()
        return cls(parameters, context)

    @classmethod
    def load(cls, parameters: Parameters, data: bytes, private: bool) -> Context:
        """A context from what `save` returned.

        Raises a `KeyCheckError` at anything else: of other parameters, without the keys, with a private key unasked.
        """
        what = f"{'private' if private else 'public'} key of {parameters.name}"
        if len(data) > parameters.context_bytes(private):
            raise KeyCheckError(f"a {what} cannot have {len(data)} bytes")
        with refusing(KeyCheckError, f"not a {what}"):
            _check_context(parameters, data)
            context = load_tenseal().context_from(data, n_threads=1)
            if context.is_private() != private:
                raise ValueError("it has no private key" if private else "it has a private key")
            if _save(context) != _bytes_without_keys(parameters):
                raise ValueError(f"its parameters differ from {parameters}, or were written by another TenSEAL")
            if parameters.evaluation_keys and not private:
                context.public_key(), context.galois_keys()  # raise if there are none
        return cls(parameters, context)

    @classmethod
    def without_keys(cls, parameters: Parameters) -> Context:
        """A context that can add."""
        return cls(parameters, load_tenseal().context_from(_bytes_without_keys(parameters), n_threads=1))

    @property
    def is_private(self) -> bool:
        """Whether this context can decrypt."""
        return bool(self._context.is_private())

    def save(self, private: bool) -> bytes:
        """The private key, or the others, with the parameters."""
        return _save(self._context, private, self.parameters.evaluation_keys and not private)

    def vector(self, numbers: Tensor) -> Any:
        """TenSEAL's encrypted vector of at most as many numbers as there are slots: int64 for BFV, else float64."""
        return self._vector(self._context, self._as_plain(numbers))

    def encrypt(self, numbers: Tensor) -> bytes:
        """Ciphertext of such a vector."""
        return bytes(self.vector(numbers).serialize())

    def read(self, ciphertext: bytes, count: int, levels: int) -> Any:
        """TenSEAL's vector of the ciphertext of ``count`` numbers with ``levels`` primes left, or a `DecodeError`."""
        what = f"not a ciphertext of {count} numbers with the parameters of {self.parameters.name}"
        if len(ciphertext) > self.parameters.ciphertext_bytes(levels):
            raise DecodeError(f"{what}: {len(ciphertext)} bytes")
        with refusing(DecodeError, what):
            _check_vector(self.parameters, ciphertext, levels)
            vector = self._vector.load(self._context, ciphertext)
            parts = vector.ciphertext()
            if vector.size() != count or len(parts) != 1:
                raise ValueError(f"{vector.size()} numbers in {len(parts)} parts")
            form = parts[0].size(), parts[0].coeff_modulus_size(), parts[0].scale
            if form != (2, levels, self.parameters.scale):
                raise ValueError(f"{form[0]} polynomials, {form[1]} primes, scale {form[2]:g}")
        return vector

    def decrypt(self, ciphertext: bytes, count: int, levels: int) -> Tensor:
        """Numbers of a ciphertext, int64 for BFV, else float64; under another key, they are noise. Raises as `read`."""
        vector = self.read(ciphertext, count, levels)
        with refusing(DecodeError, "the ciphertext cannot be decrypted"):
            return torch.tensor(vector.decrypt(), dtype=torch.int64 if self.parameters.name == "BFV" else torch.float64)

    def multiply(self, vector: Any, matrix: Tensor) -> Any:
        """Vector times matrix, by the diagonal method, rescaled.

        TenSEAL is silently wrong if the rows and columns are more than the slots by two or more, which is refused.
        """
        if sum(matrix.shape) - 1 > self.parameters.slots:
            raise ValueError(f"a matrix of shape {tuple(matrix.shape)} is too large for {self.parameters.slots} slots")
        return vector.matmul(self._as_plain(matrix))

    def _as_plain(self, numbers: Tensor) -> Any:
        return self._plain(numbers.numpy(), dtype="float" if numbers.is_floating_point() else "int")

    def __repr__(self) -> str:
        return f"Context({self.parameters}, is_private={self.is_private})"


def join(ciphertexts: Iterable[bytes]) -> bytes:
    """Ciphertexts one after the other, each behind its length."""
    body = bytearray()
    for ciphertext in ciphertexts:
        body += _LENGTH.pack(len(ciphertext))
        body += ciphertext
    return bytes(body)


def split(body: Buffer, count: int) -> list[memoryview]:
    """The ``count`` ciphertexts in a body, not loaded; inverse of `join`. Raises a `DecodeError` at another count."""
    ciphertexts: list[memoryview] = []
    rest = memoryview(body)
    while rest and len(ciphertexts) <= count:
        size = _LENGTH.unpack_from(rest)[0] if len(rest) >= _LENGTH.size else len(rest)
        if _LENGTH.size + size > len(rest):
            raise DecodeError(f"the last ciphertext is truncated: {len(rest)} of {_LENGTH.size + size} bytes")
        ciphertexts.append(rest[_LENGTH.size : _LENGTH.size + size])
        rest = rest[_LENGTH.size + size :]
    if rest or len(ciphertexts) != count:
        raise DecodeError(f"a body of {len(body)} bytes does not hold {count} ciphertexts")
    return ciphertexts


def _check_vector(parameters: Parameters, data: bytes, levels: int) -> None:
    """Raise a `ValueError` unless SEAL can load TenSEAL's vector from ``data``, which aborts at some bytes."""
    parts = list(seal_format.fields(data))
    if [number for number, _ in parts] != ([1, 2, 3] if parameters.name == "CKKS" else [1, 2]):
        raise ValueError("it is not made of sizes, one ciphertext and, for CKKS, a scale")
    sizes, ciphertext = parts[0][1], parts[1][1]
    if not (isinstance(sizes, bytes) and isinstance(ciphertext, bytes)) or len(sizes) > _LENGTH.size + 1:
        raise ValueError("its sizes are not those of one vector")
    seal_format.check_ciphertext(ciphertext, parameters.degree, levels)


def _check_context(parameters: Parameters, data: bytes) -> None:
    """Likewise of a context: encryption parameters, then public halves, the private key, the type of encryption."""
    degree, primes = parameters.degree, len(parameters.prime_bits)
    encryption = next(iter(seal_format.fields(_bytes_without_keys(parameters))))
    for number, held in seal_format.fields(data):
        if number == _PARAMETERS and (number, held) != encryption:
            raise ValueError(f"its parameters differ from {parameters}, or were written by another TenSEAL")
        if number not in (_PUBLIC, _PRIVATE):
            continue
        if not isinstance(held, bytes):
            raise ValueError("its keys are a number")
        for key_type, key in seal_format.fields(held):
            if not isinstance(key, bytes) or (number, key_type) == (_PUBLIC, _SCALE):
                continue
            if number == _PRIVATE and key_type == 1:
                seal_format.check_secret_key(key, degree, primes)
            elif number == _PUBLIC and key_type == _PUBLIC_KEY:
                seal_format.check_ciphertext(key, degree, primes)
            elif number == _PUBLIC and key_type == _ROTATION_KEYS:
                seal_format.check_rotation_keys(key, degree, primes, 2 * degree.bit_length())
            else:
                raise ValueError(f"it holds a key of type {key_type}, which is not used")


def _save(context: Any, private: bool = False, evaluation_keys: bool = False) -> bytes:
    return bytes(
        context.serialize(
            save_public_key=evaluation_keys,
            save_secret_key=private,
            save_galois_keys=evaluation_keys,
            save_relin_keys=False,
        )
    )


@cache
def _bytes_without_keys(parameters: Parameters) -> bytes:
    """A context of parameters only. TenSEAL makes none without keys, so another's keys are left out of its bytes."""
    return _save(Context.generate(parameters)._context)


@contextmanager
def refusing(error: type[PrivacyError], what: str) -> Iterator[None]:
    """Turn whatever TenSEAL raises over bytes of others into a `PrivacyError`."""
    try:
        yield
    except Exception as refused:  # it raises RuntimeError, ValueError, IndexError, MemoryError and others
        raise error(f"{what}: {refused}") from refused
