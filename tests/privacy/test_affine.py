"""The two-party affine exchange against numpy and plain integers. Small keys test arithmetic; they keep no secret."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlit.privacy import (
    AuthenticationError,
    DecodeError,
    FixedPoint,
    InputError,
    KeyCheckError,
    PrivacyError,
    RangeError,
    ReplayError,
    RoundId,
    cores,
)
from fedlit.privacy import affine as affine_module
from fedlit.privacy import affine_paillier as exchange_module
from fedlit.privacy import paillier_arithmetic as arithmetic
from fedlit.privacy.affine import AffineGrid, AffineSource, AffineTarget, TwoPartyAffine
from fedlit.privacy.affine_paillier import PaillierAffine
from fedlit.privacy.affine_plain import PlainAffine
from fedlit.privacy.links import pack_fields, unpack_fields
from refused import refused

phe = pytest.importorskip("phe.paillier")
BITS = 512
PLAINTEXT, CIPHERTEXT = BITS // 8, BITS // 4
ROUND = RoundId(3, "moments", 7)


def paillier(**arguments: Any) -> PaillierAffine:
    """Of small keys, and any number of outputs: tests/attacks/test_moments.py has the default."""
    return PaillierAffine(**{"key_bits": BITS, "insecure_test_keys": True, "reveal_moments": True, **arguments})


def problem(num_moments: int, num_outputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_moments,), (num_outputs, num_moments), (num_outputs,))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def parties(backend: TwoPartyAffine, round_id: RoundId = ROUND) -> tuple[AffineSource, AffineTarget]:
    source, target = backend.source(), backend.target()
    target.receive_key(source.public_key())
    source.open_round(round_id)
    target.open_round(round_id)
    return source, target


@pytest.fixture(params=["PlainAffine", "PlainAffine on a grid", "PaillierAffine"])
def backend(request: pytest.FixtureRequest) -> TwoPartyAffine:
    grid = AffineGrid() if "grid" in request.param else None
    return paillier() if request.param == "PaillierAffine" else PlainAffine(grid)


Met = tuple[AffineSource, AffineTarget]


@pytest.fixture
def met() -> Met:
    """Parties under Paillier with a key and an open round."""
    return parties(paillier())


# -------------------------------------------------------------------------------- results


@pytest.mark.parametrize(("num_moments", "num_outputs"), [(1, 1), (3, 7), (7, 3), (21, 40)])
def test_y_is_a_m_plus_b_within_the_declared_error(backend: TwoPartyAffine, num_moments: int, num_outputs: int) -> None:
    moments, matrix, offset = problem(num_moments, num_outputs)
    outputs = backend(moments, matrix, offset)
    expected = matrix.numpy().astype(np.float64) @ moments.numpy().astype(np.float64) + offset.numpy()
    assert outputs.dtype == torch.float64
    assert np.abs(outputs.numpy() - expected).max() <= backend.error_bound(num_moments) + 1e-12


@settings(max_examples=25, deadline=None)
@given(
    num_moments=st.integers(1, 12),
    num_outputs=st.integers(1, 30),
    moment_bits=st.integers(0, 30),
    matrix_bits=st.integers(0, 20),
    extreme=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_paillier_is_bit_for_bit_plain_on_the_same_grid(
    num_moments: int, num_outputs: int, moment_bits: int, matrix_bits: int, extreme: bool, seed: int
) -> None:
    grid = AffineGrid(FixedPoint(moment_bits, 4.0), FixedPoint(matrix_bits, 3.0), FixedPoint(0, 100.0))
    moments, matrix, offset = problem(num_moments, num_outputs, seed)
    if extreme:
        moments, matrix, offset = moments.sign() * 4, matrix.sign() * 3, offset.sign() * 100
    else:
        moments, matrix = moments.clamp(-4, 4), matrix.clamp(-3, 3)
    ours, theirs = paillier(grid=grid), PlainAffine(grid)
    assert torch.equal(ours(moments, matrix, offset), theirs(moments, matrix, offset))


def test_plain_on_a_grid_is_the_sum_of_integers() -> None:
    grid = AffineGrid(FixedPoint(10, 8.0), FixedPoint(12, 8.0), FixedPoint(5, 8.0))
    moments, matrix, offset = problem(4, 3)
    m, a = (moments.double() * 2**10).round().long().tolist(), (matrix.double() * 2**12).round().long().tolist()
    b = (offset.double() * 2**5).round().long().tolist()
    expected = [
        (sum(x * y for x, y in zip(row, m, strict=True)) + (c << 17)) / 2**22 for row, c in zip(a, b, strict=True)
    ]
    assert PlainAffine(grid)(moments, matrix, offset).tolist() == expected


def test_inputs_stay_as_they_are_and_graphs_are_cut(backend: TwoPartyAffine) -> None:
    moments, matrix, offset = problem(3, 2)
    copies = [tensor.clone() for tensor in (moments, matrix, offset)]
    outputs = backend(moments.requires_grad_(), matrix.requires_grad_(), offset)
    assert not outputs.requires_grad
    assert all(torch.equal(*pair) for pair in zip(copies, (moments, matrix, offset), strict=True))


def test_y_is_the_same_without_gmpy2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "gmpy2", lambda: None)
    inputs = problem(3, 12)
    assert torch.equal(paillier()(*inputs), PlainAffine(AffineGrid())(*inputs))


@settings(max_examples=30, deadline=None)
@given(
    bases=st.lists(st.integers(1, 2**64), min_size=1, max_size=4),
    exponents=st.lists(st.integers(-(2**60), 2**60), min_size=4, max_size=4),
    shifts=st.lists(st.integers(0, 70), min_size=4, max_size=4),
)
def test_shared_squarings_give_the_product_of_powers(bases: list[int], exponents: list[int], shifts: list[int]) -> None:
    modulus = 2**89 - 1
    factors, expected = [], 1
    for base, exponent, shift in zip(bases, exponents, shifts, strict=False):
        factors += arithmetic.PowerTable(base, modulus).factors(exponent, shift)
        expected = expected * pow(base, exponent << shift, modulus) % modulus
    assert arithmetic.product_of_powers(factors, modulus) == expected


def test_several_numbers_share_a_reply() -> None:
    of = paillier()
    per_reply = of.slots(4).count
    # |y| <= 4 * 2^50 + 2^45 steps, so 54 bits with the sign, and n has 512, of which 80 stay free
    assert per_reply == (511 - 80) // 54
    for num_outputs in (1, per_reply, per_reply + 1, 3 * per_reply):
        source, target = parties(of)
        moments, matrix, offset = problem(4, num_outputs)
        reply = target.evaluate(source.protect(moments, num_outputs), matrix, offset)
        body = unpack_fields(reply)["body"]
        assert len(body) == math.ceil(num_outputs / per_reply) * CIPHERTEXT
        assert len(target.reveal(source.unlock(reply))) == num_outputs


# -------------------------------------------------------------------------------- what each party sees


def moduli(source: AffineSource) -> arithmetic.PrivateModulus:
    return source._modulus  # type: ignore[attr-defined, no-any-return]


def unlocked(target: AffineTarget, source: AffineSource, inputs: tuple[Tensor, Tensor, Tensor], call: int) -> list[int]:
    """Plaintexts of a reply, by ``phe``."""
    for party in (source, target):
        party.open_round(RoundId(0, "moments", call))
    moments, matrix, offset = inputs
    body = unpack_fields(target.evaluate(source.protect(moments, len(offset)), matrix, offset))["body"]
    modulus = moduli(source)
    public = phe.PaillierPublicKey(int(modulus.n))
    private = phe.PaillierPrivateKey(public, int(modulus._p.prime), int(modulus._q.prime))
    return [
        private.raw_decrypt(int.from_bytes(body[i : i + CIPHERTEXT], "big")) for i in range(0, len(body), CIPHERTEXT)
    ]


def test_the_source_sees_uniform_plaintexts_whatever_a_is(met: Met) -> None:
    source, target = met
    n = int(moduli(source).n)
    zero = torch.zeros(3), torch.zeros(1, 3), torch.zeros(1)
    seen = [unlocked(target, source, zero, call)[0] for call in range(160)]
    assert len(set(seen)) == 160
    # the top bit, a middle one and the lowest each vary as a fair coin would: 7 standard deviations are 44 (2e-12)
    for values in ([v > n // 2 for v in seen], [v >> (BITS // 2) & 1 for v in seen], [v & 1 for v in seen]):
        assert 36 < sum(values) < 124


def test_the_noise_of_a_reply_is_fresh(met: Met) -> None:
    """S knows the noise of its own ciphertexts: were none added, it would recognise A in that of the reply."""
    source, target = met
    modulus = moduli(source)
    n = int(modulus.n)
    message = source.protect(torch.ones(2), 1)
    noise = set()
    for _ in range(5):
        target.open_round(ROUND)
        reply = target.evaluate(message, torch.ones(1, 2), torch.zeros(1))
        ciphertext = int.from_bytes(unpack_fields(reply)["body"], "big")
        (plaintext,) = modulus.decrypt([ciphertext], 1)
        noise.add(ciphertext * (1 - int(plaintext) * n) % n**2)
    assert len(noise) == 5


def test_messages_hold_neither_moments_nor_the_private_key(met: Met) -> None:
    source, target = met
    moments, matrix, offset = problem(3, 2)
    messages = [source.public_key(), source.protect(moments, 2)]
    messages += [target.evaluate(messages[1], matrix, offset)]
    messages += [source.unlock(messages[2])]
    modulus = moduli(source)
    secrets_ = [int(part.prime).to_bytes(BITS // 16, "big") for part in (modulus._p, modulus._q)]
    secrets_ += [moments.numpy().tobytes(), moments.double().numpy().tobytes(), offset.numpy().tobytes()]
    for message in messages:
        assert not any(secret in message for secret in secrets_)
    assert "_modulus" in vars(target)
    assert not isinstance(vars(target)["_modulus"], arithmetic.PrivateModulus)


# -------------------------------------------------------------------------------- refused inputs


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(("value", "error"), [(math.nan, InputError), (math.inf, InputError), (-33, RangeError)])
def test_numbers_that_cannot_be_encoded_are_refused(
    backend: TwoPartyAffine, index: int, value: float, error: type[PrivacyError]
) -> None:
    inputs = problem(3, 2)
    inputs[index].view(-1)[-1] = value
    if error is RangeError and backend.grid is None:
        assert torch.isfinite(backend(*inputs)).all()
    else:
        with pytest.raises(error):
            backend(*inputs)


@pytest.mark.parametrize("of", [PlainAffine, PaillierAffine])
def test_an_output_that_might_not_fit_is_refused(of: type[PlainAffine] | type[PaillierAffine]) -> None:
    grid = AffineGrid(FixedPoint(25, 8.0), FixedPoint(30, 4.0))
    arguments = {} if of is PlainAffine else {"key_bits": BITS, "insecure_test_keys": True, "reveal_moments": True}
    assert of(grid, **arguments)(*(torch.ones(3), torch.ones(1, 3), torch.ones(1))).tolist() == [4.0]
    with pytest.raises(RangeError, match="fraction_bits"):
        of(grid, **arguments)(*(torch.ones(8), torch.ones(1, 8), torch.ones(1)))


def test_shapes_and_types_are_checked(backend: TwoPartyAffine) -> None:
    moments, matrix, offset = problem(3, 2)
    for wrong in (
        (moments[:2], matrix, offset),
        (moments, matrix, offset[:1]),
        (moments, matrix[0], offset),
        (moments.long(), matrix, offset),
        (torch.zeros(0), torch.zeros(2, 0), offset),
    ):
        with pytest.raises(InputError):
            backend(*wrong)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("max_outputs", lambda: parties(PlainAffine())[0].protect(torch.ones(1), 0)),
        ("offset", lambda: AffineGrid(FixedPoint(2), FixedPoint(2), FixedPoint(5))),
        ("key_bits", lambda: PaillierAffine(key_bits=1024)),
        ("workers", lambda: paillier(workers=0)),
    ],
)
def test_arguments_out_of_range_are_refused(argument: str, call: Callable[[], object]) -> None:
    with refused(argument):
        call()


# -------------------------------------------------------------------------------- refused messages


def test_parties_speak_in_order(backend: TwoPartyAffine) -> None:
    source, target = backend.source(), backend.target()
    moments, matrix, offset = problem(3, 2)
    with pytest.raises(KeyCheckError, match="receive_key"):
        target.open_round(ROUND)
    with pytest.raises(ReplayError, match="open_round"):
        source.protect(moments, 2)
    source, target = parties(backend)
    calls: list[Callable[[bytes], Any]] = [
        lambda _: source.protect(moments, 2),
        lambda message: target.evaluate(message, matrix, offset),
        source.unlock,
        target.reveal,
    ]
    for early in calls[2:]:
        with pytest.raises(ReplayError):
            early(b"")
    message = b""
    for call in calls:
        answer = call(message)
        with pytest.raises(ReplayError):
            call(message)
        message = answer


def test_messages_of_another_round_are_refused(backend: TwoPartyAffine) -> None:
    moments, matrix, offset = problem(3, 2)
    source, target = parties(backend)
    old = source.protect(moments, 2)
    old_reply = target.evaluate(old, matrix, offset)
    old_answer = source.unlock(old_reply)
    for party in (source, target):
        party.open_round(RoundId(3, "moments", 8))
    with pytest.raises(ReplayError, match="another round"):
        target.evaluate(old, matrix, offset)
    message = source.protect(moments, 2)
    with pytest.raises(ReplayError, match="another round"):
        source.unlock(old_reply)
    target.evaluate(message, matrix, offset)
    with pytest.raises(ReplayError, match="another round"):
        target.reveal(old_answer)


def test_targets_of_one_key_have_the_same_ciphertexts_and_answers_of_their_own() -> None:
    backend = paillier()
    moments, matrix, offset = problem(3, 2)
    first = backend.source()
    sources, targets = {"a": first, "b": first.for_another()}, {name: backend.target() for name in "ab"}
    for name, target in targets.items():
        target.receive_key(sources[name].public_key())
        for party in (sources[name], target):
            party.open_round(ROUND, name)
    messages = {name: source.protect(moments, 2) for name, source in sources.items()}
    body = slice(-3 * CIPHERTEXT - 32, -32)  # before the hash
    assert messages["a"][body] == messages["b"][body]
    with pytest.raises(ReplayError):  # the other's message, with the same ciphertexts
        targets["b"].evaluate(messages["a"], matrix, offset)
    replies = {name: target.evaluate(messages[name], matrix, offset) for name, target in targets.items()}
    with pytest.raises(ReplayError):  # what is under b's mask is unlocked for b alone
        sources["a"].unlock(replies["b"])
    answer = sources["b"].unlock(replies["b"])
    exact = matrix.double() @ moments.double() + offset.double()
    assert float((targets["b"].reveal(answer) - exact).abs().max()) <= backend.error_bound(3)
    # the next exchange has fresh ciphertexts, also of the same moments
    sources["b"].open_round(RoundId(4, "moments", 8), "b")
    assert sources["b"].protect(moments, 2)[body] != messages["b"][body]


def test_messages_of_another_step_are_refused(met: Met) -> None:
    """Above all S must not decrypt its own moments for T; and ciphertexts of equal moments differ."""
    source, _ = met
    message = source.protect(torch.ones(5), 5)
    body = unpack_fields(message)["body"]
    assert len({body[i : i + CIPHERTEXT] for i in range(0, len(body), CIPHERTEXT)}) == 5
    with pytest.raises(AuthenticationError, match="another step"):
        source.unlock(message)


def test_messages_under_a_foreign_key_are_refused() -> None:
    of = paillier()
    moments, matrix, offset = problem(3, 2)
    (source, target), (other_source, other_target) = parties(of), parties(of)
    message, other_message = source.protect(moments, 2), other_source.protect(moments, 2)
    with pytest.raises(AuthenticationError, match="another public key"):
        target.evaluate(other_message, matrix, offset)
    reply, other_reply = target.evaluate(message, matrix, offset), other_target.evaluate(other_message, matrix, offset)
    with pytest.raises(AuthenticationError, match="another public key"):
        source.unlock(other_reply)
    source.unlock(reply)
    with pytest.raises(AuthenticationError, match="another public key"):
        target.reveal(other_source.unlock(other_reply))


@pytest.mark.parametrize("message", [b"", b"\0" * 1000, bytes(10**6), pack_fields({"body": b"x"})])
def test_other_bytes_are_refused(backend: TwoPartyAffine, message: bytes) -> None:
    source, target = parties(backend)
    moments, matrix, offset = problem(3, 2)
    good = source.protect(moments, 2)
    with pytest.raises(DecodeError):
        target.evaluate(message, matrix, offset)
    with pytest.raises(DecodeError):
        source.unlock(message)
    target.evaluate(good, matrix, offset)
    with pytest.raises(DecodeError):
        target.reveal(message)


def test_a_refused_reply_is_the_only_one_of_its_round(met: Met) -> None:
    """S answers one reply of T in a round, so that T cannot learn from which ciphertexts are refused."""
    source, target = met
    moments, matrix, offset = problem(3, 2)
    good = target.evaluate(source.protect(moments, 2), matrix, offset)
    bad = affine_module._frame("evaluate", bound_to(source), 2, bytes(CIPHERTEXT))
    with pytest.raises(DecodeError):
        source.unlock(bad)
    for reply in (bad, good):
        with pytest.raises(ReplayError):
            source.unlock(reply)


def test_a_message_that_was_changed_on_its_way_is_refused_and_may_be_sent_again(met: Met) -> None:
    source, target = met
    moments, matrix, offset = problem(3, 2)
    message = source.protect(moments, 2)
    for position in range(len(message) - 40, len(message) - 500, -37):
        with pytest.raises(PrivacyError):
            target.evaluate(
                message[:position] + bytes([message[position] ^ 4]) + message[position + 1 :], matrix, offset
            )
    reply = target.evaluate(message, matrix, offset)
    with pytest.raises(AuthenticationError):
        source.unlock(reply[:-1] + bytes([reply[-1] ^ 1]))
    assert len(target.reveal(source.unlock(reply))) == 2


def test_a_reply_longer_than_agreed_is_refused(met: Met) -> None:
    source, target = met
    moments, matrix, offset = problem(3, 5)
    reply = target.evaluate(source.protect(moments, 4), matrix, offset)
    with pytest.raises(DecodeError, match="max_outputs"):
        source.unlock(reply)


@pytest.mark.parametrize(
    "hostile",
    [
        *(lambda n, p, size=size: bytes(size) for size in (0, 1, CIPHERTEXT - 1, CIPHERTEXT, CIPHERTEXT + 1, 10**6)),
        lambda n, p: n.to_bytes(CIPHERTEXT, "big"),
        lambda n, p: (5 * p).to_bytes(CIPHERTEXT, "big"),
        lambda n, p: (n * n).to_bytes(CIPHERTEXT, "big"),
        lambda n, p: b"\xff" * CIPHERTEXT,
    ],
)
def test_bytes_that_are_no_ciphertext_are_refused_by_both(hostile: Callable[[int, int], bytes], met: Met) -> None:
    source, target = met
    bad = hostile(int(moduli(source).n), int(moduli(source)._p.prime))
    message = source.protect(torch.ones(1), 1)
    with pytest.raises(DecodeError):
        target.evaluate(affine_module._frame("protect", bound_to(target), 1, bad), torch.ones(1, 1), torch.ones(1))
    target.evaluate(message, torch.ones(1, 1), torch.ones(1))
    with pytest.raises(DecodeError):
        target.reveal(affine_module._frame("unlock", bound_to(target), 1, bad))
    with pytest.raises(DecodeError):
        source.unlock(affine_module._frame("evaluate", bound_to(source), 1, bad))


def bound_to(party: AffineSource | AffineTarget) -> bytes:
    assert party._round is not None
    return party._round


def test_an_answer_that_is_no_y_is_refused(met: Met) -> None:
    source, target = met
    largest = AffineGrid().largest_output(2)
    for number in (largest + 1, -largest - 1):
        target._evaluate(source._encrypt(torch.ones(2).double()), torch.ones(1, 2).double(), torch.ones(1).double())
        bits = (2 * largest).bit_length()
        answer = (number + target._masks[0]) % 2**bits  # type: ignore[attr-defined]
        with pytest.raises(DecodeError, match="out of range"):
            target._unmask(int(answer).to_bytes(-(-bits // 8), "big"))


# -------------------------------------------------------------------------------- the source's key


def key_message(n: int, roots: bytes = arithmetic.to_bytes([1] * 8, PLAINTEXT)) -> bytes:
    return pack_fields({"modulus": n.to_bytes(PLAINTEXT, "big"), "roots": roots})


@pytest.mark.parametrize(
    ("publics", "reason"),
    [
        (lambda: [paillier(key_bits=768).source().public_key(), key_message(1), key_message(2 ** (BITS - 1))], "bits"),
        (lambda: [bytes(10**6), b"xx", b"", pack_fields({"modulus": bytes(PLAINTEXT)})], "malformed"),
        (lambda: [key_message((2 ** (BITS - 1) // 65521 + 1 | 1) * 65521)], "factor below 65536"),
    ],
)
def test_malformed_keys_are_refused(publics: Callable[[], list[bytes]], reason: str) -> None:
    for public in publics():
        with pytest.raises(KeyCheckError, match=reason):
            paillier().target().receive_key(public)


def test_a_modulus_without_a_proof_and_another_key_than_before_are_refused(met: Met) -> None:
    public = paillier().source().public_key()
    fields = unpack_fields(public)
    proof = fields["roots"]
    for roots in (b"", proof[1:], proof + b"\0", bytes(len(proof)), b"\xff" * 8 * PLAINTEXT):
        with pytest.raises(KeyCheckError, match="proof"):
            paillier().target().receive_key(pack_fields({**fields, "roots": roots}))
    with pytest.raises(KeyCheckError, match="another public key than before"):
        met[1].receive_key(public)


def test_a_square_as_modulus_is_refused_however_its_owner_answers() -> None:
    """Modulo p^2 most numbers have no p^2-th root; the owner shows roots of what has some, or anything."""
    p = int(pytest.importorskip("gmpy2").next_prime(3 << (BITS // 2 - 2)))
    n = p * p
    assert n.bit_length() == BITS
    challenges = exchange_module._challenges(arithmetic.PublicModulus(n.to_bytes(PLAINTEXT, "big"), BITS))
    inverse = pow(n, -1, p - 1)
    shown = [pow(challenge, inverse, n) for challenge in challenges]
    with pytest.raises(KeyCheckError, match="is wrong"):
        paillier().target().receive_key(key_message(n, arithmetic.to_bytes(shown, PLAINTEXT)))
