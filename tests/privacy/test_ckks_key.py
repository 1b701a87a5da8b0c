r"""Whether a checkpoint and recorded traffic give the private key of CKKS (Li and Micciancio, 2021).

The attack needs no key. A summed ciphertext is :math:`(c_0, c_1)` with :math:`c_0 + c_1 s = p` modulo a prime, where
the polynomial p is the encoded sum plus noise. A checkpoint holds the total for clients that are away, in float64. If
it is as it was decrypted, encoding it again and rounding gives p to the last bit, and the equation is solved for s.

TenSEAL decrypts real parts only, so what a total gives is :math:`p + \bar p`, with :math:`\bar p(X) = p(1 / X)`. Two
ciphertexts of a total are two equations in :math:`s` and :math:`\bar s`: enough.

What holds instead: noise never reaches half a step of the grid that numbers and totals are rounded to, so the total is
the exact sum of what was encrypted, independent of key and noise, and reveals nothing else. Encoded again it is p
without its noise, and what is left to solve is learning with errors, on which the scheme rests whatever plaintexts
are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("tenseal")

import tenseal

from fedlit.federation import Federation, Schedule
from fedlit.privacy.lattices import CKKS
from fedlit.privacy.lattices import CKKS_PARAMETERS as PARAMETERS
from fedlit.privacy.shared_key import SharedKeyClient, SharedKeyServer, _unframe
from fedlit.privacy.tenseal_keys import Context, split

N, SLOTS, SCALE = PARAMETERS.degree, PARAMETERS.slots, PARAMETERS.scale


@dataclass(frozen=True, repr=False)
class Run:
    """A round of three clients, of whom one is away."""

    checkpoint: Tensor  # the total, as kept for the client that is away
    total: list[bytes]  # its two ciphertexts
    uplinks: dict[str, list[bytes]]
    sent: dict[str, Tensor]  # numbers in them; like the key not for the attack, but to see whether it has worked
    private_key: bytes


def run_round() -> Run:
    backend, recorded = CKKS(), {}
    add, total, protect = SharedKeyServer.add, SharedKeyServer.total, SharedKeyClient.protect
    vectors: dict[str, Tensor] = {}

    def noting(client: SharedKeyClient, vector: Tensor) -> Tensor:
        vectors[client.name] = vector  # with its tags
        return protect(client, vector)

    def recording(server: Any, what: str, message: Tensor) -> Tensor:
        recorded[what] = [bytes(ciphertext) for ciphertext in split(_unframe(server._keys[1], what, message)[3], 2)]
        return message

    def adding(server: Any, name: str, message: Tensor) -> None:
        add(server, name, recording(server, f"vector of {name}", message))

    generator = torch.Generator().manual_seed(0)
    payloads = {
        name: {  # 4047 numbers, two digits of 20 more, the weight in the mean and 8 of tags: two ciphertexts
            "weights": torch.randn(4047, generator=generator),
            "moments": torch.randn(15, generator=generator, dtype=torch.float64),
            "steps": torch.randint(10**6, (5,), generator=generator),
        }
        for name in ("a", "b")
    }
    federation = Federation(["a", "b", "t"], "t", privacy=backend, participation=Schedule([["a", "b"]]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedKeyServer, "add", adding)
        patch.setattr(SharedKeyServer, "total", lambda server: recording(server, "total", total(server)))
        patch.setattr(SharedKeyClient, "protect", noting)
        federation.mean("model", payloads)
    client: Any = federation._sums._backends.parties(backend).clients["a"]
    return Run(
        checkpoint=federation.state_dict()["clients"]["a"]["model"],
        total=recorded["total"],
        uplinks={name: recorded[f"vector of {name}"] for name in payloads},
        sent=vectors,
        private_key=client._keys[0]._context.save(private=True),
    )


# what SEAL computes

PRIME = 1152921504606830593
"""The modulus of ciphertexts: SEAL's choice, the largest prime below 2^60 that is 1 modulo 2N."""
_roots = (pow(base, (PRIME - 1) // (2 * N), PRIME) for base in range(2, PRIME))
_root = next(root for root in _roots if pow(root, N, PRIME) == PRIME - 1)
ROOT = min(pow(_root, power, PRIME) for power in range(1, 2 * N, 2))  # the smallest of order 2N: SEAL's choice again
REVERSED = [int(f"{i:012b}"[::-1], 2) for i in range(N)]
TWIDDLES = np.array([pow(ROOT, power, PRIME) for power in REVERSED], dtype=object)
INVERSES = np.array([pow(ROOT, -power, PRIME) for power in REVERSED], dtype=object)
GROUPS = [2**level for level in range(12)]


def to_values(coefficients: np.ndarray) -> np.ndarray:
    """Values of a polynomial at the odd powers of `ROOT`, in bit-reversed order, as SEAL keeps ciphertexts."""
    values = coefficients.astype(object) % PRIME
    for groups in GROUPS:
        pairs = values.reshape(groups, 2, -1)
        first, second = pairs[:, 0].copy(), pairs[:, 1] * TWIDDLES[groups : 2 * groups, None]
        pairs[:, 0], pairs[:, 1] = (first + second) % PRIME, (first - second) % PRIME
    return values


def to_coefficients(values: np.ndarray) -> np.ndarray:
    """Inverse of `to_values`; coefficients from -`PRIME` / 2 to `PRIME` / 2."""
    values = values.copy()
    for groups in reversed(GROUPS):
        pairs = values.reshape(groups, 2, -1)
        first, second = pairs[:, 0].copy(), pairs[:, 1].copy()
        pairs[:, 0] = (first + second) % PRIME
        pairs[:, 1] = (first - second) * INVERSES[groups : 2 * groups, None] % PRIME
    return (values * pow(N, -1, PRIME) + PRIME // 2) % PRIME - PRIME // 2


def bar(values: np.ndarray) -> np.ndarray:
    return values[::-1]  # an odd power of the root and its inverse have complementary indices


TURNS = np.exp(1j * np.pi * np.arange(N) / N)
PLACES = np.array([(pow(3, slot, 2 * N) - 1) // 2 for slot in range(SLOTS)])
"""Slot j is the value at the power 3^j of the complex root of unity, and has its conjugate at the inverse."""


def encode_twice(numbers: np.ndarray) -> np.ndarray:
    r"""Coefficients of :math:`p + \bar p`, where p has slots whose real parts are ``numbers``."""
    values = np.empty(N)
    values[PLACES] = values[N - 1 - PLACES] = numbers
    return np.array([int(c) for c in np.rint(2 * SCALE * (np.fft.fft(values) / N / TURNS).real)], dtype=object)


def decode(coefficients: np.ndarray) -> np.ndarray:
    return (np.fft.ifft(coefficients.astype(float) * TURNS) * N)[PLACES].real / SCALE


def polynomials(ciphertext: bytes) -> tuple[np.ndarray, np.ndarray]:
    seal = Context.without_keys(PARAMETERS).read(ciphertext, SLOTS, levels=1).ciphertext()[0]
    both = np.array([seal[i] for i in range(2 * N)], dtype=object)  # values of c_0, then of c_1
    return both[:N], both[N:]


# the attack


def candidate_key(total: list[bytes], numbers: Tensor) -> np.ndarray:
    """Values of the private key, if ``numbers`` are what two ciphertexts decrypt to, with all digits."""
    (a_0, a_1), (b_0, b_1) = map(polynomials, total)
    p, q = (to_values(encode_twice(half)) for half in numbers.double().numpy().reshape(2, SLOTS))
    p, q = p - a_0 - bar(a_0), q - b_0 - bar(b_0)  # are a_1 s + bar(a_1 s) and b_1 s + bar(b_1 s)
    determinant = (a_1 * bar(b_1) - bar(a_1) * b_1) % PRIME
    return (p * bar(b_1) - q * bar(a_1)) * np.array([pow(int(d), -1, PRIME) for d in determinant]) % PRIME


def key_coefficients(key: np.ndarray) -> int:
    """How many coefficients of a candidate could be those of a key: -1, 0 or 1."""
    return int((np.abs(to_coefficients(key)) <= 1).sum())


def largest_error(key: np.ndarray, run: Run) -> float:
    """Of all clients' numbers, as read in their uplinks with a candidate for the key."""
    errors = []
    for name, ciphertexts in run.uplinks.items():
        read = [decode(to_coefficients((c_0 + c_1 * key) % PRIME)) for c_0, c_1 in map(polynomials, ciphertexts)]
        errors.append(np.abs(np.concatenate(read) - run.sent[name].double().numpy()).max())
    return float(max(errors))


@pytest.fixture(scope="module")
def run() -> Run:
    return run_round()


def test_the_attack_finds_the_key_from_a_total_that_is_not_rounded(run: Run) -> None:
    """The control: what TenSEAL decrypts with the private key gives the key, and with it every uplink."""
    context = tenseal.context_from(run.private_key)
    raw = torch.tensor([tenseal.ckks_vector_from(context, c).decrypt() for c in run.total], dtype=torch.float64)
    key = candidate_key(run.total, raw)
    assert key_coefficients(key) == N
    assert largest_error(key, run) < 1e-6  # what is not noise, 2e-11, is rounding to the grid, 2.4e-7


def test_a_checkpoint_and_recorded_traffic_do_not_give_the_key(run: Run) -> None:
    tags = sum(vector.double()[-8:] for vector in run.sent.values())  # which a client that attacks has seen too
    key = candidate_key(run.total, torch.cat([run.checkpoint, tags]))
    found, error = key_coefficients(key), largest_error(key, run)
    assert found == 0, f"the key has {N} coefficients, {found} were found; uplinks were read to {error:.1e}"
    assert error > 100  # numbers are up to 32: nothing was read
