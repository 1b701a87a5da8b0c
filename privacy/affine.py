"""TwoPartyAffine: y = A m + b between two parties, one with m, the other with A and b, who alone learns y.

S, the source, holds the moments m (M,) and a key pair; T, the target, holds the matrix A (k, M) and the offset b (k,).
Whoever runs an exchange carries byte strings between them::

    S.public_key()        -> T.receive_key        once; the key lasts for many exchanges
    S.open_round, T.open_round                    each exchange, with the same `RoundId` and name of T
    S.protect(m, k)       -> T.evaluate(., A, b)  encrypted moments
    T.evaluate(., A, b)   -> S.unlock             encrypted A m + b under a mask that only T knows
    S.unlock(.)           -> T.reveal             the same decrypted, still under the mask
    T.reveal(.)           =  y

`TwoPartyAffine.__call__` runs both parties in one process and is the pattern for carrying the bytes oneself.

Every message names its step, its round and the public key, with a hash over all of it: mix-ups, replays, foreign keys
and damage on the way are refused. The hash has no key, so the two need an authenticated channel (TLS) where somebody
might forge: S unlocks what it believes to come from T.

S counts what it grants about the same moments, and refuses numbers that determine them: `fedlit.privacy.affine_bound`.
"""

from __future__ import annotations

import copy
import struct
from abc import ABC, abstractmethod
from hashlib import sha256
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from fedlit.checks import check, check_at_least, refuse
from fedlit.privacy.affine_bound import Granted, most_outputs
from fedlit.privacy.base import Description, RoundId
from fedlit.privacy.errors import (
    AuthenticationError,
    DecodeError,
    InputError,
    KeyCheckError,
    RangeError,
    ReplayError,
)
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import digest, field_of, pack_fields, round_digest, unpack_fields

_LENGTH = struct.Struct("<Q")
_FLOAT_BITS = 64


class _AffineParty(ABC):
    """What both parties keep: the settings that they share, and the open exchange."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._round: bytes | None = None
        self._round_id: RoundId | None = None
        self._count = 0

    @final
    def open_round(self, round_id: RoundId, target: str = "target") -> None:
        """Begin an exchange with ``target``, whose name tells it from others; forgets what an earlier one left."""
        # keys may have megabytes: `digest` would first write them out as text
        fingerprint = digest("fedlit affine key", sha256(self._public_key()).digest())
        self._round, self._count = round_digest(round_id, ["source", target]) + fingerprint, 0
        self._round_id = round_id

    @abstractmethod
    def _public_key(self) -> bytes:
        """Of S; a `KeyCheckError` if there is none yet."""

    def _opened(self, answering: bool) -> bytes:
        """Binding of the open exchange, before this party's first message or, ``answering``, after it."""
        if self._round is None or bool(self._count) != answering:
            hint = "an answer is due once, after this party's first message" if answering else "call open_round first"
            raise ReplayError(f"no exchange is open for this step, each of which is taken once: {hint}")
        return self._round


class AffineSource(_AffineParty):
    """S: holds the moments and the key pair. A backend fills in `public_key`, `_encrypt` and `_decrypt`.

    Args:
        backend: Settings that both parties share.

    Attributes:
        granted: What was granted so far; one for all sources of whoever answers several receivers.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.granted = Granted()
        self._num_moments = 0  # of the open exchange
        self._encrypted: list[tuple[RoundId | None, Tensor, bytes]] = []  # the last moments, for all of one key pair

    @final
    def for_another(self) -> Self:
        """S for one more target: the same key pair and, in exchanges of one `RoundId`, the same ciphertexts.

        What was granted is counted together, too: targets may pool what they learn.
        """
        another = copy.copy(self)
        another._round = None
        return another

    @abstractmethod
    def public_key(self) -> bytes:
        """Message to T before the first exchange: the public half of the key; the same at every call."""

    def _public_key(self) -> bytes:
        return self.public_key()

    @final
    def protect(self, moments: Tensor, max_outputs: int) -> bytes:
        """Message to T: the moments, encrypted.

        Args:
            moments: Shape (M,), floating point; stays as it is.
            max_outputs: Maximum number of entries of y that S lets T learn; a longer reply is refused.

        Raises:
            InputError: If the moments cannot be encrypted: NaN, infinity, another shape.
            RangeError: If a moment is beyond the declared bound.
            SolvableError: If T could solve for the moments, from this and what was granted about them before.
            ReplayError: If no round is open: each serves one exchange.
        """
        bound_to = self._opened(answering=False)
        check_at_least("max_outputs", max_outputs, 1)
        # `_count` is set after: what cannot be encrypted leaves the round open
        moments = _check_floats("moments", moments, 1)
        body = self._encrypted_once(moments)
        self._num_moments = len(moments)
        most = self._backend.most_outputs(len(moments))
        if most is not None:
            self.granted.add(moments, int(max_outputs), most)
        self._count = int(max_outputs)
        return _frame("protect", bound_to, len(moments), body)

    def _encrypted_once(self, moments: Tensor) -> bytes:
        """Ciphertexts of the moments; those of another target's exchange, if it is of the same round."""
        for round_id, others, body in self._encrypted:
            if round_id == self._round_id and torch.equal(others, moments):
                return body
        body = self._encrypt(moments)
        self._encrypted[:] = [(self._round_id, moments.clone(), body)]
        return body

    @final
    def unlock(self, reply: bytes) -> bytes:
        """Message to T: its reply decrypted, still under T's mask. What S learns from it is in `describe`.

        Raises a `PrivacyError` if the reply was made for another exchange, for another key, is longer than agreed, or
        comes second, even after one that was refused: whoever may have chosen ciphertexts decrypted reads the moments.
        """
        bound_to = self._opened(answering=True)
        length, body = _unframe("evaluate", bound_to, reply)
        self._round = None  # before anything is decrypted: a refusal reveals something, too
        rule, agreed = f"1 to max_outputs ({self._count}), as agreed", 1 <= length <= self._count
        check(agreed, "numbers of the reply", rule, length, error=DecodeError)
        return _frame("unlock", bound_to, length, self._decrypt(body, length))

    @abstractmethod
    def _encrypt(self, moments: Tensor) -> bytes:
        """Ciphertexts of finite float64 moments, shape (M,), M > 0; raises a `RangeError` beyond the bound."""

    @abstractmethod
    def _decrypt(self, body: bytes, num_outputs: int) -> bytes:
        """Masked plaintexts of a reply of that many numbers; raises a `DecodeError` if the body is no such reply."""


class AffineTarget(_AffineParty):
    """T: holds A and b, learns y. A backend fills in `_load_key`, `_evaluate` and `_unmask`.

    Args:
        backend: Settings that both parties share.
    """

    _public: bytes | None = None

    @final
    def receive_key(self, public: bytes) -> None:
        """Take in the public key of S.

        Raises:
            KeyCheckError: If it is malformed or weak, or another one than before: make a new target for a new source.
        """
        if self._public is not None and public != self._public:
            raise KeyCheckError("the source sent another public key than before: make a new target for a new source")
        if self._public is None:
            self._load_key(public)
            self._public = public

    def _public_key(self) -> bytes:
        if self._public is None:
            raise KeyCheckError("the target has no public key yet: call receive_key first")
        return self._public

    @final
    def evaluate(self, message: bytes, matrix: Tensor, offset: Tensor) -> bytes:
        """Reply to S: A m + b, encrypted and masked afresh.

        Args:
            message: From `AffineSource.protect`.
            matrix: A, shape (k, M), floating point.
            offset: b, shape (k,), floating point.

        Raises:
            InputError: If A or b cannot be encoded, or have other shapes.
            RangeError: If an entry is beyond the declared bound, or y might be.
            PrivacyError: If the message is not of this exchange.
        """
        bound_to = self._opened(answering=False)
        num_moments, body = _unframe("protect", bound_to, message)
        matrix, offset = _check_floats("matrix", matrix, 2), _check_floats("offset", offset, 1)
        shape = (len(offset), num_moments)
        check(matrix.shape == shape, "matrix", f"of shape {shape}", tuple(matrix.shape), error=InputError)
        reply = _frame("evaluate", bound_to, len(offset), self._evaluate(body, matrix, offset))
        self._count = len(offset)
        return reply

    @final
    def reveal(self, message: bytes) -> Tensor:
        """Vector y = A m + b, shape (k,), float64, from what `AffineSource.unlock` returned.

        Raises a `PrivacyError` if the message is not the answer to the reply of this exchange, or comes twice.
        """
        length, body = _unframe("unlock", self._opened(answering=True), message)
        rule = f"{self._count}, as those of the reply"
        check(length == self._count, "numbers of the answer", rule, length, error=DecodeError)
        outputs = self._unmask(body)
        self._round = None
        return outputs

    @abstractmethod
    def _load_key(self, public: bytes) -> None:
        """Check and keep the public key; raises a `KeyCheckError`."""

    @abstractmethod
    def _evaluate(self, body: bytes, matrix: Tensor, offset: Tensor) -> bytes:
        """Masked ciphertexts of A m + b, with the mask kept for `_unmask`.

        ``body`` is what `AffineSource._encrypt` returned for M moments, or anything else: a `DecodeError`. A has shape
        (k, M), k and M > 0, and b (k,), both finite float64.
        """

    @abstractmethod
    def _unmask(self, body: bytes) -> Tensor:
        """y, shape (k,), float64, with the mask taken off and forgotten; raises a `DecodeError` on nonsense."""


class TwoPartyAffine(ABC):
    """Makes the two parties; holds numbers and choices, no keys.

    Attributes:
        grid: Grids or bounds of m, A and b; ``None`` computes on floats.
        reveal_moments: Whether S grants numbers of y from which its moments can be solved; then they are not hidden.
        source_type: Class of S.
        target_type: Class of T.
    """

    grid: AffineGrid | None
    reveal_moments: bool = False
    source_type: ClassVar[type[AffineSource]]
    target_type: ClassVar[type[AffineTarget]]

    @final
    def source(self) -> AffineSource:
        """S, with a fresh key pair."""
        return self.source_type(self)

    @final
    def target(self) -> AffineTarget:
        """T, for one source."""
        return self.target_type(self)

    @final
    def most_outputs(self, num_moments: int) -> int | None:
        """Greatest number of entries of y that S grants about the same moments, in all; ``None`` is any number."""
        if self.reveal_moments:
            return None
        moment_bits = _FLOAT_BITS if self.grid is None else (2 * self.grid.moments.limit).bit_length()
        return most_outputs(num_moments, moment_bits, self.output_bits(num_moments))

    def output_bits(self, num_moments: int) -> int:
        """Bits that S answers with for one entry of y, at most."""
        return _FLOAT_BITS if self.grid is None else self.grid.output_bits(num_moments)

    @abstractmethod
    def error_bound(self, num_moments: int) -> float:
        """Greatest absolute error of one entry of y, for so many moments."""

    @abstractmethod
    def describe(self) -> Description:
        """Adversary, what is hidden and revealed, cost; ``bytes_per_number`` is that of one moment on its way to T."""

    @final
    def __call__(self, moments: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
        """Vector y = A m + b, shape (k,), float64, with both parties in this process; raises what they do."""
        source, target = self.source(), self.target()
        target.receive_key(source.public_key())
        for party in (source, target):
            party.open_round(RoundId(0, "affine", 0))
        reply = target.evaluate(source.protect(moments, len(offset)), matrix, offset)
        return target.reveal(source.unlock(reply))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(grid={self.grid})"


@final
class AffineGrid:
    """Grids of m, A and b, on which y = A m + b is an exact integer of at most 63 bits.

    Args:
        moments: Grid of m.
        matrix: Grid of A.
        offset: Grid of b; at most as fine as that of a product of m and A.

    Raises:
        ValueError: If the offset has more fraction bits than the products.
    """

    def __init__(
        self, moments: FixedPoint | None = None, matrix: FixedPoint | None = None, offset: FixedPoint | None = None
    ) -> None:
        self.moments = FixedPoint() if moments is None else moments
        self.matrix = FixedPoint() if matrix is None else matrix
        self.offset = FixedPoint() if offset is None else offset
        self.fraction_bits = self.moments.fraction_bits + self.matrix.fraction_bits
        self._shift = self.fraction_bits - self.offset.fraction_bits
        rule = f"of at most the {self.fraction_bits} fraction_bits of a product of moments and matrix"
        check(self._shift >= 0, "offset", rule, self.offset)

    def encode_offset(self, offset: Tensor) -> Tensor:
        """Steps of y in b, int64; errors as `FixedPoint.check`. `largest_output` checks whether they fit."""
        return self.offset.encode(offset) << self._shift

    def largest_output(self, num_moments: int) -> int:
        """Greatest absolute value of an entry of y, in its steps; raises a `RangeError` if it does not fit 63 bits."""
        largest = num_moments * self.moments.limit * self.matrix.limit + (self.offset.limit << self._shift)
        if largest >= 2**63:
            raise RangeError(f"an entry of y can reach {largest} steps, above 2^63 - 1: lower fraction_bits or bound")
        return largest

    def output_bits(self, num_moments: int) -> int:
        """Bits of an entry of y; errors as `largest_output`."""
        return (2 * self.largest_output(num_moments)).bit_length()

    def decode(self, outputs: Tensor) -> Tensor:
        """Reals of y, float64, from its steps."""
        return outputs.to(torch.float64) / 2.0**self.fraction_bits

    def error_bound(self, num_moments: int) -> float:
        """Greatest absolute error of an entry of y: each of m, A and b is off by at most half a step."""
        moment, entry, offset = (0.5 / grid.scale for grid in (self.moments, self.matrix, self.offset))
        products = self.matrix.bound * moment + self.moments.bound * entry + moment * entry
        # float64 has 53 bits, y up to 63
        rounding = self.largest_output(num_moments) / 2.0**self.fraction_bits * 2.0**-53
        return num_moments * products + offset + rounding

    def error_text(self) -> str:
        """The error of one entry of y, in words."""
        return (
            f"rounding of m, A and b to {self.moments.fraction_bits}, {self.matrix.fraction_bits} and "
            f"{self.offset.fraction_bits} binary places; A m + b is exact"
        )

    def __repr__(self) -> str:
        return f"AffineGrid(moments={self.moments}, matrix={self.matrix}, offset={self.offset})"


def _check_floats(name: str, tensor: Tensor, dim: int) -> Tensor:
    """``tensor`` as contiguous float64 on the CPU, without its graph, if it has numbers and all are finite."""
    if not tensor.is_floating_point() or tensor.dim() != dim or not tensor.numel():
        shown = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        refuse(name, f"one or more floats in {dim} dimension(s)", shown, error=InputError, shown=shown)
    finite = bool(torch.isfinite(tensor).all())
    check(finite, name, "finite", "NaN or infinity", "the model has diverged", InputError, "NaN or infinity")
    return tensor.detach().to("cpu", torch.float64).contiguous()


def _frame(step: str, bound_to: bytes, length: int, body: bytes) -> bytes:
    """A message: its binding, how many numbers it holds, the numbers, and a hash over all of it."""
    sizes = _LENGTH.pack(length)
    return pack_fields(
        {"bound": bound_to, "length": sizes, "body": body, "hash": digest("fedlit affine", step, bound_to, sizes, body)}
    )


def _unframe(step: str, bound_to: bytes, message: bytes) -> tuple[int, bytes]:
    """Count of numbers and body of a message; raises a `PrivacyError` unless it is the one expected now."""
    fields = unpack_fields(message)
    bound, sizes = field_of(fields, "bound", len(bound_to)), field_of(fields, "length", _LENGTH.size)
    body = field_of(fields, "body")
    if bound[32:] != bound_to[32:]:
        raise AuthenticationError(f"the message of step {step!r} was made for another public key")
    if bound != bound_to:
        raise ReplayError(f"the message of step {step!r} was made for another round")
    if field_of(fields, "hash") != digest("fedlit affine", step, bound, sizes, body):
        raise AuthenticationError(f"the message of step {step!r} was changed on its way, or is of another step")
    return _LENGTH.unpack(sizes)[0], body
