"""BFV and CKKS: exact sums, noise within its bound, and bytes of keys and ciphertexts that must not get through."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("tenseal")

import tenseal

from backends import Recorded
from bodies import added, encrypted
from fedlit.privacy import BFV, CKKS, DecodeError, FixedPoint, KeyCheckError, PrivacyError, RangeError, RoundId
from fedlit.privacy.driver import Parties
from fedlit.privacy.links import pack_fields, unpack_fields
from fedlit.privacy.tenseal_keys import Context, Parameters, split
from refused import refused


class Setup(SimpleNamespace):
    """A backend, a key pair as bytes and as both parties load it, and parties that share another one."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend=backend, parameters=backend.parameters, slots=backend.parameters.slots)
        self.private, self.public = backend.generate_keys()
        self.client_key = backend.load_key(self.public, self.private)
        self.server_key = backend.load_key(self.public)
        self.parties, self.wire = Parties(backend, "abc"), Recorded()
        self.parties.enrol("abc", self.wire)

    def total(self, bodies: list[bytes], length: int) -> Tensor:
        return self.client_key.decrypt(added(self.server_key, bodies, length), length, len(bodies))


@pytest.fixture(scope="module")
def bfv() -> Setup:
    return Setup(BFV())


@pytest.fixture(scope="module")
def ckks() -> Setup:
    return Setup(CKKS())


@pytest.fixture(scope="module", params=["bfv", "ckks"])
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.getfixturevalue(request.param)


def test_a_forked_process_leaves_the_contexts_that_it_inherits_alone(bfv: Setup) -> None:
    """A context's destructor joins threads that a child lacks: one that was collected there hung it, or aborted it."""
    gc.collect()
    gc.disable()  # the context is to be garbage at the fork, found by a collection of the child's
    try:
        garbage = SimpleNamespace(context=bfv.backend.load_key(*bfv.backend.generate_keys()[::-1]))
        garbage.itself = garbage
        del garbage
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        child.join(30)
        code = child.exitcode
        child.kill()
    finally:
        gc.enable()
    assert code == 0
    gc.collect()


def test_a_decrypted_total_has_nothing_of_the_noise_that_the_key_could_be_computed_from(ckks: Setup) -> None:
    """Of equal numbers it is equal to the last bit, the exact sum of what is on the grid, whatever was drawn."""
    generator, length = torch.Generator().manual_seed(0), 10 * ckks.slots
    vectors = [64 * torch.rand(length, generator=generator, dtype=torch.float64) - 32 for _ in range(10)]
    totals = [ckks.total([encrypted(ckks.client_key, vector) for vector in vectors], length) for _ in range(2)]
    steps = sum(torch.round(vector * 2**21) for vector in vectors)  # below 2^53, so exact
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], steps / 2**21)


def test_the_fewer_clients_the_finer_the_grid() -> None:
    # half a step, 2^-22 = 2.4e-7, is above the noise of 64 clients, 64 * 2.7e-9 = 1.7e-7; a quarter of one is not
    assert [CKKS(max_clients=number).grid_bits for number in (64, 32, 4, 2)] == [21, 22, 25, 26]
    assert CKKS(max_clients=4).error_bound(3) == 3 * 2.0**-26


def test_noise_of_fresh_ciphertexts_is_that_of_42_coins_per_coefficient(ckks: Setup) -> None:
    # The slots of zeros are the real parts of the noise polynomial at primitive roots of unity of order 2N. By
    # Parseval the mean squared modulus there is N times the variance, and the real parts are half of it.
    (zeros,) = split(encrypted(ckks.client_key, torch.zeros(ckks.slots)), 1)
    slots = ckks.client_key._context.decrypt(bytes(zeros), ckks.slots, ckks.parameters.levels) * ckks.parameters.scale
    # The mean of 2048 squares of normal numbers deviates by sqrt(2 / 2048) = 3.1 %: 25 % are 8 deviations (1e-12).
    assert (slots**2).mean().item() == pytest.approx(ckks.parameters.degree / 2 * 42 / 4, rel=0.25)


def test_the_noise_bound_by_hand(ckks: Setup) -> None:
    # 4096 coefficients off by 21 + 1/2 at scale 2^45, and 2^-39 of numbers up to 32
    assert ckks.backend._noise_bound(3) == pytest.approx(3 * (4096 * 21.5 / 2**45 + 32 / 2**39), rel=1e-12)


def test_the_plain_modulus_is_the_largest_prime_below_2_to_34_for_4096_slots(bfv: Setup) -> None:
    modulus, step = bfv.parameters.plain_modulus, 2 * bfv.slots
    assert modulus < 2**34
    assert modulus % step == 1
    assert (modulus % np.arange(2, 2**17 + 1) != 0).all()
    assert all(any(other % d == 0 for d in range(2, 2**17)) for other in range(modulus + step, 2**34, step))


def test_the_greatest_sums_do_not_wrap_around() -> None:
    setup = Setup(CKKS(FixedPoint(10, 128.0)))
    # the values of the constant polynomial: all of the sum is in one coefficient
    body = encrypted(setup.client_key, torch.full((setup.slots,), -128.0))
    total = setup.total([body] * 64, setup.slots)
    assert (total + 64 * 128).abs().max() <= setup.backend.error_bound(64)


@pytest.mark.parametrize(("backend", "number"), [(BFV, 1), (BFV, 2**20 + 1), (CKKS, 1)])
def test_numbers_of_clients_out_of_range_are_refused(backend: Any, number: int) -> None:
    with refused("max_clients"):
        backend(max_clients=number)


def test_grids_beyond_the_headroom_or_finer_than_the_error_are_refused() -> None:
    for call, message in (
        (lambda: BFV(FixedPoint(24, 32.0)), "plaintexts of BFV"),
        (lambda: CKKS(FixedPoint(10, 129.0)), "plaintexts of CKKS"),
        (lambda: CKKS(FixedPoint(24, 8.0)), "wide entries"),
    ):
        with pytest.raises(RangeError, match=message):
            call()
    BFV(FixedPoint(24, 32.0), max_clients=15)
    CKKS(FixedPoint(10, 128.0))
    CKKS(FixedPoint(24, 8.0), max_clients=10)


@pytest.mark.parametrize("backend", [BFV, CKKS])
def test_a_missing_tenseal_names_the_extra(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(ImportError, match=r"pip install 'fedlit\[he\]'"):
        backend()


def test_the_server_has_no_private_key_and_cannot_decrypt(setup: Setup) -> None:
    context = setup.parties.server._keys[0]._context
    assert not context.is_private
    assert setup.parties.clients["b"]._keys[0]._context.is_private
    assert context._context.has_secret_key() is False
    for half in (context._context.decryptor, context._context.encryptor, context._context.secret_key):
        with pytest.raises(ValueError, match="context"):
            half()
    body = encrypted(setup.parties.clients["a"]._keys[0], torch.ones(setup.slots))
    with pytest.raises(DecodeError, match="cannot be decrypted"):
        context.decrypt(body[4:], setup.slots, setup.parameters.levels)


def test_messages_hold_no_private_key(setup: Setup) -> None:
    secret = (
        setup.parties.clients["a"]._keys[0]._context.save(private=True)[-2000:]
    )  # the compressed private polynomial
    setup.parties.open_round(RoundId(0, "update", 2), "abc", setup.wire)
    messages = {name: client.protect(torch.ones(setup.slots)) for name, client in setup.parties.clients.items()}
    total = setup.parties.server.aggregate(messages)
    seen = [
        *setup.wire.up,
        *setup.wire.down,
        *(m.numpy().tobytes() for m in messages.values()),
        total.numpy().tobytes(),
    ]
    assert not any(secret in message for message in seen)


def test_nothing_printed_shows_a_key(setup: Setup) -> None:
    for shown in (setup.client_key, setup.client_key._context, setup.backend, setup.parameters):
        assert repr(setup.private[-20:])[2:-1] not in repr(shown)


def test_bodies_with_too_many_too_few_or_oversized_ciphertexts_are_refused(setup: Setup) -> None:
    body = encrypted(setup.client_key, torch.ones(5))
    hostile = (2**24).to_bytes(4, "little") + bytes(2**24)
    for damaged in (b"", body + body, hostile, bytes(400), body + b"\0\0\0"):
        with pytest.raises(DecodeError):
            added(setup.server_key, [damaged, damaged], 5)
    for length in (setup.slots + 1, 2**62):
        with pytest.raises(DecodeError):
            setup.client_key.decrypt(body, length, 2)


def test_a_total_under_another_key_is_refused(setup: Setup) -> None:
    scheme = setup.backend
    stranger = encrypted(scheme.load_key(*reversed(scheme.generate_keys())), torch.ones(5))
    for body in (stranger, added(setup.server_key, [encrypted(setup.client_key, torch.ones(5)), stranger], 5)):
        with pytest.raises(DecodeError, match="another key"):
            setup.client_key.decrypt(body, 5, 2)


def test_ciphertexts_of_another_scheme_size_or_scale_are_refused(bfv: Setup, ckks: Setup) -> None:
    def body(ciphertext: bytes) -> bytes:
        return len(ciphertext).to_bytes(4, "little") + ciphertext

    short = tenseal.bfv_vector(tenseal.context_from(bfv.private), [1, 2, 3]).serialize()
    rescaled = tenseal.ckks_vector(tenseal.context_from(ckks.private), [1.0] * ckks.slots, 2.0**40).serialize()
    for setup, wrong, message in (
        (bfv, encrypted(ckks.client_key, torch.ones(5)), "not a ciphertext"),
        (bfv, body(short), "3 numbers"),
        (ckks, body(rescaled), "scale"),
    ):
        with pytest.raises(DecodeError, match=message):
            added(setup.server_key, [wrong, wrong], 5)
        with pytest.raises(DecodeError, match=message):
            setup.client_key.decrypt(wrong, 5, 2)


def test_halves_of_different_keys_are_refused(setup: Setup) -> None:
    private, public = setup.backend.generate_keys()
    for pair in ((public, setup.private), (setup.public, private)):
        with pytest.raises(KeyCheckError, match="does not belong"):
            setup.backend.load_key(*pair)


@pytest.mark.parametrize(
    "weak",
    [Parameters("BFV", 2048, (30, 24), plain_modulus=12289), Parameters("CKKS", 4096, (60, 49), scale=2.0**40)],
    ids=lambda parameters: parameters.name,
)
def test_malformed_keys_and_those_of_other_parameters_are_refused(weak: Parameters, bfv: Setup, ckks: Setup) -> None:
    setup = bfv if weak.name == "BFV" else ckks
    private, public, scheme = setup.private, setup.public, setup.backend
    server_side = Context.without_keys(setup.parameters).save(private=False)
    other = Context.generate(weak).save(private=True)
    for bad in (b"", private[:-9], bytes(300), private + private, other, server_side):
        with pytest.raises(KeyCheckError):
            scheme.load_key(public, bad)
    for bad in (b"", public[:-9], bytes(300), public + public, private):
        with pytest.raises(KeyCheckError):
            scheme.load_key(bad)
        with pytest.raises(KeyCheckError):
            scheme.load_key(bad, private)


def test_a_swapped_public_half_fails_the_enrolment() -> None:
    backend, names = BFV(), ["a", "b"]
    parties = Parties(backend, names)
    clients, server = parties.clients, parties.server
    for party in (*clients.values(), server):
        party.enrol(names)
    parties.run_step("identities", names)
    relayed = server.relay("keys", {name: client.send("keys") for name, client in clients.items()})
    deal = {**unpack_fields(relayed["b"]), "public": backend.generate_keys()[1]}
    with pytest.raises(PrivacyError):
        clients["b"].receive("keys", pack_fields(deal))


@pytest.mark.parametrize(("kind", "most"), [(BFV, 255), (CKKS, 186)])
def test_how_many_clients_fit_the_default_grid(kind: Any, most: int) -> None:
    assert kind(max_clients=most).max_clients == most
    with pytest.raises(RangeError, match="lower fraction_bits"):
        kind(max_clients=most + 1)
    assert BFV(FixedPoint(18), max_clients=1000).max_clients == 1000
