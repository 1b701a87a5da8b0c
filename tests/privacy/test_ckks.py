"""CKKS: sums within the declared bound, and what must not get through. Bytes of keys and ciphertexts: see test_bfv."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tenseal")

from fedlit.privacy import DecodeError, FixedPoint, InputError, KeyCheckError, Plain, PrivacyError, RangeError, RoundId
from fedlit.privacy.ckks import CKKS, PARAMETERS
from fedlit.privacy.driver import run_steps
from fedlit.privacy.tenseal_keys import Context, Parameters, split

SLOTS = 2048
BACKEND = CKKS()


@pytest.fixture(scope="module")
def halves():
    """Private and public half of one key pair."""
    return BACKEND.scheme.generate()


@pytest.fixture(scope="module")
def client_key(halves):
    return BACKEND.scheme.private_key(*halves)


@pytest.fixture(scope="module")
def server_key(halves):
    return BACKEND.scheme.public_key(halves[1])


@pytest.fixture(scope="module")
def parties():
    """Three clients and a server that share a key."""
    names = ["a", "b", "c"]
    clients, server = {name: BACKEND.client(name) for name in names}, BACKEND.server()
    for party in (*clients.values(), server):
        party.enrol(names)
    run_steps(BACKEND.enrolment, clients, server)
    return clients, server


def open_round(clients, server, call):
    for party in (*clients.values(), server):
        party.open_round(RoundId(0, "update", call), list(clients))


def payload(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(13, 5, generator=generator),
        "moments": 100 * torch.randn(7, generator=generator, dtype=torch.float64),
        "steps": torch.randint(-(10**8), 10**8, (3,), generator=generator),
        "empty": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("num_clients", [2, 3, 60])
def test_sums_and_means_are_within_the_bound_and_wide_entries_exact(num_clients):
    payloads = {f"client {i}": payload(i) for i in range(num_clients)}
    weights = {name: 1.0 + i % 7 for i, name in enumerate(payloads)}
    on_grid = Plain(FixedPoint())
    sums, exact = BACKEND.sum(payloads), on_grid.sum(payloads)
    for name in ("moments", "steps", "empty"):
        assert torch.equal(sums[name], exact[name]), name
    truth = sum(payload["weights"].double() for payload in payloads.values())
    float32 = 2.0**-24 * truth.abs().max()  # of the result's type
    assert (sums["weights"] - truth).abs().max() <= BACKEND.error_bound(num_clients) + float32
    means, exact = BACKEND.mean(payloads, weights), on_grid.mean(payloads, weights)
    assert torch.equal(means["steps"], exact["steps"])
    assert (means["weights"] - exact["weights"]).abs().max() <= on_grid.error_bound(num_clients)


@settings(deadline=None, max_examples=25)
@given(values=st.lists(st.floats(-32, 32), min_size=1, max_size=20), num_clients=st.integers(2, 64))
def test_sums_of_fresh_ciphertexts_are_within_the_declared_error(client_key, server_key, values, num_clients):
    vector = torch.tensor(values, dtype=torch.float64)
    bodies = [client_key.encrypt(vector) for _ in range(num_clients)]
    total = client_key.decrypt(server_key.add(bodies, len(vector)), len(vector), num_clients)
    assert (total - num_clients * vector).abs().max() <= BACKEND.error_bound(num_clients)


def test_a_decrypted_total_has_nothing_of_the_noise_that_the_key_could_be_computed_from(client_key, server_key):
    """Of equal numbers it is equal to the last bit, the exact sum of what is on the grid, whatever was drawn."""
    generator = torch.Generator().manual_seed(0)
    vectors = [64 * torch.rand(10 * SLOTS, generator=generator, dtype=torch.float64) - 32 for _ in range(10)]
    totals = []
    for _ in range(2):
        bodies = [client_key.encrypt(vector) for vector in vectors]
        totals.append(client_key.decrypt(server_key.add(bodies, 10 * SLOTS), 10 * SLOTS, 10))
    steps = sum(torch.round(vector * 2**21) for vector in vectors)  # below 2^53, so exact
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], steps / 2**21)


def test_the_fewer_clients_the_finer_the_grid():
    # half a step, 2^-22 = 2.4e-7, is above the noise of 64 clients, 64 * 2.7e-9 = 1.7e-7; a quarter of one is not
    assert [CKKS(max_clients=number).grid_bits for number in (64, 32, 4, 2)] == [21, 22, 25, 26]
    assert CKKS(max_clients=4).error_bound(3) == 3 * 2.0**-26


def test_noise_of_fresh_ciphertexts_is_that_of_42_coins_per_coefficient(client_key):
    # The slots of zeros are the real parts of the noise polynomial at primitive roots of unity of order 2N. By
    # Parseval the mean squared modulus there is N times the variance, and the real parts are half of it.
    (zeros,) = split(client_key.encrypt(torch.zeros(SLOTS)), 1)
    slots = client_key._context.decrypt(bytes(zeros), SLOTS, PARAMETERS.levels) * PARAMETERS.scale
    # The mean of 2048 squares of normal numbers deviates by sqrt(2 / 2048) = 3.1 %: 25 % are 8 deviations (1e-12).
    assert (slots**2).mean().item() == pytest.approx(PARAMETERS.degree / 2 * 42 / 4, rel=0.25)


def test_error_bound_by_hand():
    # 4096 coefficients off by 21 + 1/2 at scale 2^45, and 2^-39 of numbers up to 32
    assert BACKEND._noise_bound(3) == pytest.approx(3 * (4096 * 21.5 / 2**45 + 32 / 2**39), rel=1e-12)


def test_a_number_takes_at_most_33_bytes(client_key):
    assert len(client_key.encrypt(torch.ones(5 * SLOTS))) / (5 * SLOTS) <= BACKEND.describe().bytes_per_number <= 33


def test_server_has_no_private_key_and_cannot_decrypt(parties):
    clients, server = parties
    context = server._key._context
    assert context.is_private is False
    assert context._context.has_secret_key() is False
    with pytest.raises(ValueError, match="decryption"):
        context._context.decryptor()
    body = clients["a"]._key.encrypt(torch.ones(SLOTS))
    with pytest.raises(DecodeError, match="cannot be decrypted"):
        context.decrypt(body[4:], SLOTS, 1)


@pytest.mark.parametrize("position", [0, 30, 100, 1000, 30_000, -1])
def test_flipped_bits_are_refused_on_the_way_to_the_server_and_back(parties, position):
    clients, server = parties
    open_round(clients, server, 1)
    messages = {name: client.protect(torch.ones(5)) for name, client in clients.items()}
    messages["b"][position] ^= 1
    with pytest.raises(PrivacyError):
        server.aggregate(messages)
    messages["b"][position] ^= 1
    total = server.aggregate(messages)
    total[position] ^= 1
    with pytest.raises(PrivacyError):
        clients["a"].reveal(total, 3)


def test_total_under_another_key_is_refused(client_key, server_key):
    stranger = BACKEND.scheme.private_key(*BACKEND.scheme.generate())
    bodies = [client_key.encrypt(torch.ones(5)), stranger.encrypt(torch.ones(5))]
    for body in (bodies[1], server_key.add(bodies, 5)):
        with pytest.raises(DecodeError, match="another key"):
            client_key.decrypt(body, 5, 2)


def test_ciphertext_with_another_scale_is_refused(halves, server_key):
    import tenseal

    other = tenseal.ckks_vector(tenseal.context_from(halves[0]), [1.0] * SLOTS, 2.0**40).serialize()
    body = len(other).to_bytes(4, "little") + other
    with pytest.raises(DecodeError, match="scale"):
        server_key.add([body, body], SLOTS)


def test_keys_with_another_scale_or_of_another_pair_are_refused(halves):
    other_scale = Context.generate(Parameters("CKKS", 4096, (60, 49), scale=2.0**40)).save(private=True)
    with pytest.raises(KeyCheckError, match="its parameters differ"):
        BACKEND.scheme.private_key(other_scale, halves[1])
    with pytest.raises(KeyCheckError, match="does not belong"):
        BACKEND.scheme.private_key(BACKEND.scheme.generate()[0], halves[1])
    with pytest.raises(KeyCheckError, match="malformed"):
        BACKEND.scheme.public_key(halves[0])


def test_ciphertexts_of_one_vector_differ(client_key):
    first, second = (client_key.encrypt(torch.ones(5)) for _ in range(2))
    assert first[1000:1100] != second[1000:1100]


@pytest.mark.parametrize(
    ("value", "error"),
    [(float("nan"), InputError), (float("-inf"), InputError), (32.1, RangeError), (1e38, RangeError)],
)
def test_numbers_beyond_the_bound_are_refused(client_key, value, error):
    with pytest.raises(error):
        client_key.encrypt(torch.tensor([0.0, value]))


def test_grids_beyond_the_headroom_or_finer_than_the_error_are_refused():
    with pytest.raises(RangeError, match="plaintexts of CKKS"):
        CKKS(FixedPoint(10, 129.0))
    CKKS(FixedPoint(10, 128.0))
    with pytest.raises(RangeError, match="wide entries"):
        CKKS(FixedPoint(24, 8.0))
    CKKS(FixedPoint(24, 8.0), max_clients=10)
    with pytest.raises(ValueError, match="max_clients"):
        CKKS(max_clients=1)
    with pytest.raises(RangeError, match="max_clients is 2"):
        CKKS(max_clients=2).sum({name: {"x": torch.ones(1)} for name in "abc"})


def test_greatest_sums_do_not_wrap_around(client_key):
    backend = CKKS(FixedPoint(10, 128.0))
    key, server = backend.scheme.private_key(*(pair := backend.scheme.generate())), backend.scheme.public_key(pair[1])
    # the values of the constant polynomial: all of the sum is in one coefficient
    body = key.encrypt(torch.full((SLOTS,), -128.0))
    total = key.decrypt(server.add([body] * 64, SLOTS), SLOTS, 64)
    assert (total + 64 * 128).abs().max() <= backend.error_bound(64)


def test_a_backend_shows_its_settings():
    shown = "CKKS(codec=FixedPoint(fraction_bits=10, bound=2), max_clients=5)"
    assert repr(CKKS(FixedPoint(10, 2.0), max_clients=5)) == shown


def test_missing_tenseal_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(ImportError, match=r"pip install 'fedlit\[he\]'"):
        CKKS()


def test_description_tells_the_grid_and_what_totals_say():
    assert "learns the sum and nothing about the key" in BACKEND.describe().collusion
    assert BACKEND.describe().error.startswith("at most K * 2^-22 for K clients")


def test_no_context_but_a_clients_is_private():
    assert not Context.without_keys(PARAMETERS).is_private
    assert Context.generate(PARAMETERS).is_private
