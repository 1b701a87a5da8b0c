"""A decrypted total of CKKS and what was on the wire give the private key, unless the total is rounded first.

A sum of ciphertexts is a pair of polynomials with c0 + c1 s = m + e modulo q, where s is the private key and m + e the
plaintext with its noise. Decrypted numbers are the real parts of the values of (m + e) / scale at roots of unity: half
of what there is to know about it. Whoever has enough of their digits for two ciphertexts, as any vector of more than
2048 numbers has, solves for s (Li and Micciancio, 2021). A checkpoint had these digits: the total that is kept for
clients who are away. On a grid above the noise the numbers are those of the sum that went in, whatever e was, and the
equations have e in them, unknown.
"""

from __future__ import annotations

import re
import struct
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tenseal")

from fedlit.federation import Federation, Schedule
from fedlit.federation.messenger import Messenger
from fedlit.privacy import CKKS
from fedlit.privacy.ckks import PARAMETERS
from fedlit.privacy.tenseal_keys import Context

zstandard = pytest.importorskip("zstandard")

N = PARAMETERS.degree
SCALE = PARAMETERS.scale
NAMES = ["a", "b", "c", "t"]


# ---------------------------------------------------------------- polynomials modulo q


@cache
def prime() -> int:
    """The largest prime of 60 bits that is 1 modulo 2N, as SEAL takes them."""
    q = (2**60 - 1) // (2 * N) * (2 * N) + 1
    while any(pow(base, q - 1, q) != 1 for base in (2, 3, 5, 7, 11, 13, 17)):
        q -= 2 * N
    return q


@cache
def root() -> int:
    """The least of the primitive 2N-th roots of unity modulo q."""
    q = prime()
    psi = next(r for r in (pow(base, (q - 1) // (2 * N), q) for base in range(2, 100)) if pow(r, N, q) == q - 1)
    powers, square = [psi], psi * psi % q
    for _ in range(N - 1):
        powers.append(powers[-1] * square % q)
    return min(powers)


def _transform(values: np.ndarray, omega: int) -> np.ndarray:
    """Values of a polynomial at the powers of an N-th root of unity: integers of any size, in numpy's objects."""
    if len(values) == 1:
        return values
    even, odd = (_transform(values[start::2], omega * omega % prime()) for start in (0, 1))
    twisted = odd * _powers(omega, len(values) // 2) % prime()
    return np.concatenate([even + twisted, even - twisted]) % prime()


@cache
def _powers(base: int, count: int) -> np.ndarray:
    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * base % prime())
    return np.array(powers, dtype=object)


def _reversed() -> np.ndarray:
    bits = N.bit_length() - 1
    return np.array([int(format(place, f"0{bits}b")[::-1], 2) for place in range(N)])


def to_values(coefficients: np.ndarray) -> np.ndarray:
    """In SEAL's order, as it writes ciphertexts."""
    return _transform(coefficients % prime() * _powers(root(), N) % prime(), root() ** 2 % prime())[_reversed()]


def to_coefficients(values: np.ndarray) -> np.ndarray:
    """Inverse, between -q / 2 and q / 2."""
    q, ordered = prime(), np.empty_like(values)
    ordered[_reversed()] = values
    found = _transform(ordered, pow(root(), -2, q)) * pow(N, -1, q) % q * _powers(pow(root(), -1, q), N) % q
    return np.where(found > q // 2, found - q, found)


# ---------------------------------------------------------------- what CKKS makes of numbers


def _places() -> np.ndarray:
    """Of the slots among the odd powers of the complex root of unity."""
    return np.array([pow(3, slot, 2 * N) // 2 for slot in range(N // 2)])


def twice_plaintext(numbers: np.ndarray) -> np.ndarray:
    """Coefficients of p(X) + p(1 / X), where the values of p have these real parts, times the scale."""
    values = np.empty(N, dtype=complex)
    values[_places()] = numbers
    values[N - 1 - _places()] = numbers
    found = (np.fft.fft(values) / N * np.exp(-1j * np.pi * np.arange(N) / N)).real * 2 * SCALE
    return np.array([round(each) for each in found.tolist()], dtype=object)


def numbers_of(coefficients: np.ndarray) -> np.ndarray:
    """What a plaintext's slots hold."""
    twisted = coefficients.astype(float) * np.exp(1j * np.pi * np.arange(N) / N)
    return (np.fft.ifft(twisted) * N)[_places()].real / SCALE


# ---------------------------------------------------------------- the attack


HEADER = re.compile(rb"\x5e\xa1\x10\x04.\x02\x00\x00", re.DOTALL)
"""Begins what SEAL has compressed."""


def polynomials(message: bytes) -> list[np.ndarray]:
    """The two of a ciphertext, within whatever is around it on the wire."""
    content = zstandard.ZstdDecompressor().decompressobj().decompress(ciphertexts(message)[0][16:])
    rows = np.frombuffer(content, dtype="<u8", offset=struct.calcsize("<32sBQQQdQ") + 24).astype(object)
    assert len(rows) == 2 * N
    return [rows[:N], rows[N:]]


def ciphertexts(message: bytes) -> list[bytes]:
    """Those of a message, one after the other."""
    starts = [found.start() for found in HEADER.finditer(message)]
    return [message[start:end] for start, end in zip(starts, [*starts[1:], len(message)], strict=True)]


def solve(total: np.ndarray, message: bytes) -> np.ndarray:
    """What must be s, in values, if these are the decrypted numbers of two ciphertexts.

    Of each, with X -> 1 / X as a second equation: c1 s + c1' s' = p + p' - c0 - c0'. The values of c' are those of c in
    the opposite order.
    """
    q = prime()
    sides, ones = [], []
    for numbers, ciphertext in zip(np.split(total, 2), ciphertexts(message), strict=True):
        c0, c1 = polynomials(ciphertext)
        sides.append(to_values(twice_plaintext(numbers)) - c0 - c0[::-1])
        ones.append(c1)
    determinant = (ones[0] * ones[1][::-1] - ones[1] * ones[0][::-1]) % q
    inverse = np.array([pow(int(each), -1, q) for each in determinant], dtype=object)
    return (sides[0] * ones[1][::-1] - sides[1] * ones[0][::-1]) * inverse % q


def share_of_a_key(candidate: np.ndarray) -> float:
    """How many coefficients are as a private key's: -1, 0 or 1."""
    return float(np.mean(np.abs(to_coefficients(candidate)) <= 1))


def read(message: bytes, key: np.ndarray) -> np.ndarray:
    """Decrypt the first ciphertext of what somebody has sent."""
    c0, c1 = polynomials(message)
    return numbers_of(to_coefficients((c0 + c1 * key) % prime()))


def vector(seed: int) -> torch.Tensor:
    """As small as a round's changes of weights: of larger numbers, doubles lack the last digits of the noise."""
    return 0.01 * torch.randn(N, generator=torch.Generator().manual_seed(seed))


def test_a_raw_total_gives_the_key_and_every_message() -> None:
    """So that the test below can fail: TenSEAL's numbers, as they come."""
    clients, server = Context.generate(PARAMETERS), Context.without_keys(PARAMETERS)
    halves, totals, numbers = [vector(seed).double().split(N // 2) for seed in range(3)], [], []
    sent = [[clients.encrypt(half) for half in each] for each in halves]
    for place in range(2):
        first, second, third = (server.read(messages[place], N // 2, 1) for messages in sent)
        totals.append((first + second + third).serialize())
        numbers.append(clients.decrypt(totals[-1], N // 2, 1).numpy())
    key = solve(np.concatenate(numbers), b"".join(totals))
    assert share_of_a_key(key) == 1.0
    for each, messages in zip(halves, sent, strict=True):
        np.testing.assert_allclose(read(messages[0], key), each[0].numpy(), atol=1e-9)


def test_a_checkpoint_and_the_traffic_do_not_give_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is away, so the total is kept for it; somebody has the file, and what went over the wire."""
    uplinks: dict[str, bytes] = {}
    totals: list[bytes] = []
    to_server, broadcast = Messenger.to_server, Messenger.broadcast

    def up(self: Messenger, channel: str, messages: Any, sizes: Any) -> Any:
        uplinks.update({name: each["sum"].numpy().tobytes() for name, each in messages.items() if "sum" in each})
        return to_server(self, channel, messages, sizes)

    def down(self: Messenger, channel: str, message: Any, *others: Any) -> Any:
        totals.append(message["sum"].numpy().tobytes())
        return broadcast(self, channel, message, *others)

    monkeypatch.setattr(Messenger, "to_server", up)
    monkeypatch.setattr(Messenger, "broadcast", down)
    federation = Federation(NAMES, "t", privacy=CKKS(), participation=Schedule([["a", "b", "c"]]), seed=0)
    federation.sum("update", {name: {"x": vector(seed)} for seed, name in enumerate("abc")})
    kept = federation.state_dict()["clients"]["a"]["update"]
    expected = sum(vector(seed).double() for seed in range(3))
    assert float((kept - expected).abs().max()) < 1e-5, "it is the total"
    candidate = solve(kept.numpy(), totals[0])
    assert share_of_a_key(candidate) < 0.01, "the private key follows from the checkpoint and the traffic"
    difference = np.abs(read(uplinks["a"], candidate) - vector(0).numpy()[: N // 2])
    assert float(np.median(difference)) > 1.0, "a client's vector is read"
