"""The two-party affine exchange under CKKS against numpy, and what must not get through."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tenseal")

from fedlit.privacy import (
    AuthenticationError,
    DecodeError,
    FixedPoint,
    InputError,
    KeyCheckError,
    RangeError,
    RoundId,
)
from fedlit.privacy import affine_ckks as exchange
from fedlit.privacy.affine import AffineGrid
from fedlit.privacy.affine_ckks import LARGEST_OUTPUT, PARAMETERS, RESCALING_PRIME, CKKSAffine
from fedlit.privacy.affine_plain import PlainAffine
from fedlit.privacy.tenseal_keys import Context, join

BACKEND = CKKSAffine(reveal_moments=True)
SLOTS = 4096


@pytest.fixture(scope="module")
def parties():
    """A source, and a target that has its key."""
    source, target = BACKEND.source(), BACKEND.target()
    target.receive_key(source.public_key())
    return source, target


_call = iter(range(10**6))


def opened(parties):
    round_id = RoundId(0, "moments", next(_call))
    for party in parties:
        party.open_round(round_id)
    return parties


def exchanged(parties, moments, matrix, offset):
    source, target = opened(parties)
    reply = target.evaluate(source.protect(moments, len(offset)), matrix, offset)
    return target.reveal(source.unlock(reply))


def computed(parties, moments, matrix, offset):
    """An exchange without the frames around its messages."""
    source, target = parties
    moments, matrix, offset = moments.double(), matrix.double(), offset.double()
    source._num_moments = len(moments)  # as `protect` does
    reply = target._evaluate(source._encrypt(moments), matrix, offset)
    return target._unmask(source._decrypt(reply, len(offset)))


def problem(num_moments: int, num_outputs: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_moments,), (num_outputs, num_moments), (num_outputs,))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def assert_close(outputs, moments, matrix, offset):
    expected = matrix.numpy() @ moments.numpy() + offset.numpy()
    error = np.abs(outputs.numpy() - expected).max()
    assert outputs.dtype == torch.float64
    assert error <= min(1e-4, BACKEND.error_bound(len(moments)))


@pytest.mark.parametrize(
    ("num_moments", "num_outputs"),
    [(1, 1), (5, SLOTS - 3), (3, 2 * SLOTS), (33, 17)],
)
def test_outputs_are_those_of_numpy_for_any_shape(parties, num_moments, num_outputs):
    arguments = problem(num_moments, num_outputs)
    assert_close(exchanged(parties, *arguments), *arguments)


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 1000), st.sampled_from([1e-6, 1.0, 30.0]))
def test_outputs_are_within_the_declared_error(parties, num_moments, num_outputs, seed, size):
    moments, matrix, offset = problem(num_moments, num_outputs, seed)
    arguments = moments.clamp(-1, 1) * size, matrix.clamp(-1, 1) * size, offset.clamp(-1, 1) * size
    outputs = computed(parties, *arguments)
    assert (outputs - PlainAffine()(*arguments)).abs().max() <= BACKEND.error_bound(num_moments)


def test_moments_in_several_ciphertexts_add_up(parties, monkeypatch):
    monkeypatch.setattr(exchange, "_BLOCK", 8)
    arguments = problem(21, 30)
    assert_close(computed(parties, *arguments), *arguments)


def test_rescaling_leaves_no_systematic_error_and_little_at_all(parties, monkeypatch):
    monkeypatch.setattr(exchange, "_ANSWER_NOISE", 1e-15)
    outputs = computed(parties, torch.full((16,), 25.0), torch.full((4, 16), 25.0), torch.zeros(4))
    # taken for 2^40, the prime would make them wrong by 1.3e-7 of 10000
    assert (outputs - 10_000).abs().max() < 1e-5
    assert RESCALING_PRIME < 2**40
    assert RESCALING_PRIME % (2 * 2 * SLOTS) == 1
    assert (RESCALING_PRIME % np.arange(2, 2**20 + 1) != 0).all()
    moments, matrix, offset = problem(50, 500)
    for inputs in ((moments, matrix, offset), (moments, 0 * matrix, offset), (moments, matrix, 0 * offset)):
        assert (computed(parties, *inputs) - PlainAffine()(*inputs)).abs().max() < 1e-6


@pytest.mark.parametrize("tiny", [1e-13, 3e-9, 2.0**-24])
@pytest.mark.parametrize(("num_moments", "num_outputs"), [(2, 2), (1, SLOTS)])
def test_tiny_entries_are_computed_with_or_count_as_zeros(parties, tiny, num_moments, num_outputs):
    moments, offset = torch.ones(num_moments), torch.zeros(num_outputs)
    alone, around = torch.zeros(num_outputs, num_moments), torch.full((num_outputs, num_moments), tiny)
    alone[0, -1] = tiny  # in a diagonal of zeros: the least that a polynomial can be made of
    around.fill_diagonal_(1.0)
    for matrix in (alone, around):
        outputs = computed(parties, moments, matrix, offset)
        assert (outputs - PlainAffine()(moments, matrix, offset)).abs().max() <= BACKEND.error_bound(num_moments)


def test_a_product_that_tenseal_cannot_make_is_refused(parties, monkeypatch):
    monkeypatch.setattr(exchange, "_SMALLEST_ENTRY", 0.0)  # SEAL then makes a product that hides nothing
    source, target = opened(parties)
    message = source.protect(torch.ones(2), 2)
    with pytest.raises(DecodeError, match="multiplied by A"):
        target.evaluate(message, torch.tensor([[1.0, 1e-13], [1e-13, 1.0]]), torch.zeros(2))


def test_matrices_that_tenseal_gets_wrong_are_refused():
    context = Context.generate(PARAMETERS)
    vector = context.vector(torch.ones(5, dtype=torch.float64))
    with pytest.raises(ValueError, match="too large"):
        context.multiply(vector, torch.ones(5, SLOTS - 3, dtype=torch.float64))


def test_replies_are_masked_afresh_and_encryption_is_random_whatever_is_seeded(parties):
    source, target = parties
    moments, matrix, offset = problem(3, 200)
    seen, messages = [], set()
    for _ in range(2):
        random.seed(0)
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global generator is what a user would seed
        opened(parties)
        message = source.protect(moments, 200)
        messages.add(message[-1000:-900])
        target.evaluate(message, matrix, offset)
        seen.append(target._mask)
    assert len(messages) == 2
    both = torch.cat(seen)
    assert not torch.equal(*seen)
    assert both.abs().max() <= 2**18
    assert torch.equal(both * 2**34, (both * 2**34).round())
    assert both.std() == pytest.approx(2**18 / 3**0.5, rel=0.15)  # uniform; 15 % are 6.7 deviations (2e-11)
    assert both.abs().median() > 2**15


def test_the_target_cannot_decrypt(parties):
    source, target = parties
    assert target._context.is_private is False
    with pytest.raises(ValueError, match="decryption"):
        target._context._context.decryptor()
    with pytest.raises(DecodeError, match="cannot be decrypted"):
        target._context.decrypt(source._context.encrypt(torch.ones(3)), 3, PARAMETERS.levels)
    assert len(source.public_key()) <= PARAMETERS.context_bytes(private=False)


def test_messages_hold_neither_moments_nor_outputs(parties):
    source, target = opened(parties)
    moments, matrix, offset = problem(3, 4)
    message = source.protect(moments, 4)
    reply = target.evaluate(message, matrix, offset)
    answer = source.unlock(reply)
    outputs = target.reveal(answer)
    plaintexts = [tensor.numpy().tobytes()[:8] for tensor in (moments, matrix, offset, outputs)]
    assert not any(text in sent for text in plaintexts for sent in (source.public_key(), message, reply, answer))


def test_malformed_private_and_foreign_keys_are_refused(parties):
    source, _ = parties
    public = source.public_key()
    without_rotations = Context.load(PARAMETERS, public, private=False)._context.serialize(True, False, False, False)
    other = Context.generate(type(PARAMETERS)("CKKS", 4096, (60, 49), scale=2.0**40)).save(private=False)
    for bad in (b"", bytes(100), public[:-50], public + public, source._context.save(True), without_rotations, other):
        with pytest.raises(KeyCheckError):
            BACKEND.target().receive_key(bad)
    target = BACKEND.target()
    with pytest.raises(KeyCheckError, match="no public key"):
        target.open_round(RoundId(0, "x", 0))


def test_messages_under_another_key_are_refused(parties):
    stranger = BACKEND.source()
    moments, matrix, offset = problem(3, 4)
    source, target = opened(parties)
    stranger.open_round(RoundId(0, "x", 0))
    with pytest.raises(AuthenticationError):
        target.evaluate(stranger.protect(moments, 4), matrix, offset)
    foreign = stranger._context.multiply(stranger._context.vector(moments), matrix.T).serialize()
    source.protect(moments, 4)
    with pytest.raises(DecodeError, match="another key"):
        source._decrypt(join([foreign]), 4)


def test_bodies_of_another_size_or_form_are_refused(parties):
    source, target = opened(parties)
    moments, matrix, offset = problem(3, 4)
    source.protect(moments, 4)
    fresh = source._encrypt(moments)
    for body in (b"", fresh[:-1], fresh + fresh, bytes(300), (2**30).to_bytes(4, "little") + bytes(2**20)):
        with pytest.raises(DecodeError):
            target._evaluate(body, matrix, offset)
        with pytest.raises(DecodeError):
            source._decrypt(body, 4)
    with pytest.raises(DecodeError, match="4 numbers"):  # of another count
        target._evaluate(source._encrypt(torch.ones(4)), matrix, offset)
    source._num_moments = 3
    with pytest.raises(DecodeError):  # its own ciphertext, not rescaled
        source._decrypt(fresh, 3)
    target._evaluate(fresh, matrix, offset)
    for answer in (b"", bytes(31), bytes(40), torch.full((4,), torch.nan).double().numpy().tobytes(), bytes(32)):
        with pytest.raises(DecodeError):
            target._unmask(answer)
        target._evaluate(fresh, matrix, offset)


def test_numbers_beyond_the_bounds_are_refused(parties):
    source, target = opened(parties)
    one, nan = torch.ones(1, 1), float("nan")
    for moment, error in ((33.0, RangeError), (nan, InputError)):
        with pytest.raises(error):
            source.protect(torch.tensor([moment]), 1)
    message = source.protect(torch.tensor([32.0]), 1)
    for matrix, offset, error in (
        (33 * one, one[0], RangeError),
        (one, 33 * one[0], RangeError),
        (nan * one, one[0], InputError),
        (torch.zeros(1, 2), one[0], InputError),
    ):
        with pytest.raises(error):
            target.evaluate(message, matrix, offset)


def test_outputs_that_could_wrap_around_are_refused_and_the_largest_are_right(parties):
    moments, offset = torch.full((16,), 32.0), torch.zeros(1)
    with pytest.raises(RangeError, match="a number of y could reach"):
        computed(parties, moments, torch.full((1, 16), 32.0), offset + 0.01)
    outputs = computed(parties, moments, torch.full((1, 16), -32.0), offset)
    assert outputs.item() == pytest.approx(-LARGEST_OUTPUT, abs=BACKEND.error_bound(16))


def test_bounds_of_the_grid_size_the_error():
    narrow = CKKSAffine(AffineGrid(matrix=FixedPoint(20, 1.0)))
    assert narrow.error_bound(64) < BACKEND.error_bound(64) < 1e-3
    assert narrow.error_bound(1) >= 10 * 2**-17  # the source's own noise
