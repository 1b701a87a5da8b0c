"""BFV: sums bit for bit those of Plain, and what must not get through."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tenseal")

from fedlit.privacy import (
    DecodeError,
    FixedPoint,
    InputError,
    KeyCheckError,
    Plain,
    PrivacyError,
    QuorumError,
    RangeError,
    ReplayError,
    RoundId,
)
from fedlit.privacy.bfv import BFV, PARAMETERS
from fedlit.privacy.driver import run_steps
from fedlit.privacy.tenseal_keys import Context, Parameters

SLOTS = 4096
BACKEND = BFV()


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
    """Three clients and a server that share a key, with every message of the enrolment."""
    names = ["a", "b", "c"]
    clients, server = {name: BACKEND.client(name) for name in names}, BACKEND.server()
    for party in (*clients.values(), server):
        party.enrol(names)
    messages: list[bytes] = []
    for step in BACKEND.enrolment:
        sent = {name: client.send(step) for name, client in clients.items()}
        relayed = server.relay(step, sent)
        messages += [*sent.values(), *relayed.values()]
        for name, client in clients.items():
            client.receive(step, relayed.get(name, b""))
    return clients, server, messages


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


def assert_equal(ours, theirs):
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("num_clients", [2, 3, 60])
def test_sums_and_means_are_bit_for_bit_those_of_plain(num_clients):
    payloads = {f"client {i}": payload(i) for i in range(num_clients)}
    weights = {name: 1.0 + i % 7 for i, name in enumerate(payloads)}
    plain = Plain(FixedPoint())
    assert_equal(BACKEND.mean(payloads, weights), plain.mean(payloads, weights))
    assert_equal(BACKEND.sum(payloads), plain.sum(payloads))


@settings(deadline=None, max_examples=25)
@given(
    values=st.lists(st.floats(-32, 32, width=32), min_size=1, max_size=20),
    num_clients=st.integers(2, 64),
)
def test_extremes_of_all_clients_add_up_exactly(client_key, server_key, values, num_clients):
    vector = torch.tensor(values)
    bodies = [client_key.encrypt(vector)] * num_clients
    total = client_key.decrypt(server_key.add(bodies, len(vector)), len(vector), num_clients)
    assert torch.equal(total, num_clients * FixedPoint().decode(FixedPoint().encode(vector)))


@pytest.mark.parametrize("length", [1, SLOTS - 1, SLOTS, SLOTS + 1, 3 * SLOTS])
def test_vectors_of_any_length_keep_their_entries_and_size(client_key, server_key, length):
    vectors = [torch.linspace(-5, 7, length), torch.linspace(3, -1, length).double()]
    bodies = [client_key.encrypt(vector) for vector in vectors]
    total = client_key.decrypt(server_key.add(bodies, length), length, 2)
    assert torch.equal(total, sum(FixedPoint().decode(FixedPoint().encode(vector)) for vector in vectors))
    if length % SLOTS == 0:
        assert max(map(len, bodies)) / length <= BACKEND.describe().bytes_per_number <= 16.5


def test_sum_over_those_who_sent_needs_no_absent_client(parties):
    clients, server, _ = parties
    open_round(clients, server, 1)
    messages = {name: clients[name].protect(torch.tensor([1.0, 2.0])) for name in ("a", "c")}
    assert clients["b"].reveal(server.aggregate(messages), 2).tolist() == [2.0, 4.0]


def test_plain_modulus_is_a_prime_below_2_to_34_for_4096_slots():
    modulus = PARAMETERS.plain_modulus
    assert modulus < 2**34
    assert modulus % (2 * SLOTS) == 1
    assert (modulus % np.arange(2, 2**17 + 1) != 0).all()
    assert all(
        any(other % d == 0 for d in range(2, 2**17)) for other in range(modulus + 2 * SLOTS, 2**34, 2 * SLOTS)
    ), "a larger one is prime"


def test_server_has_no_private_key_and_cannot_decrypt(parties):
    _, server, _ = parties
    context = server._key._context
    assert context.is_private is False
    assert context._context.has_secret_key() is False
    for half in (context._context.decryptor, context._context.encryptor, context._context.secret_key):
        with pytest.raises(ValueError, match="context"):
            half()
    ciphertext = Context.generate(PARAMETERS).encrypt(torch.ones(SLOTS, dtype=torch.int64))
    with pytest.raises(DecodeError, match="cannot be decrypted"):
        context.decrypt(ciphertext, SLOTS, 1)


def test_messages_hold_neither_plaintext_nor_private_key(parties):
    clients, server, enrolment = parties
    private = clients["a"]._key._context.save(private=True)
    secret = private[-2000:]  # the compressed private polynomial
    vector = torch.full((SLOTS,), 1.2345)
    open_round(clients, server, 2)
    messages = {name: client.protect(vector) for name, client in clients.items()}
    total = server.aggregate(messages)
    seen = [*enrolment, *(m.numpy().tobytes() for m in messages.values()), total.numpy().tobytes()]
    plaintexts = [vector.numpy().tobytes()[:8], FixedPoint().encode(vector).numpy().tobytes()[:16], secret]
    assert not any(plaintext in message for plaintext in plaintexts for message in seen)


def test_seeding_generators_repeats_no_ciphertext(client_key):
    def seeded():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global generator is what a user would seed
        torch.manual_seed(1)
        return client_key.encrypt(torch.ones(3)), BACKEND.scheme.generate()

    (first, keys), (second, other_keys) = seeded(), seeded()
    assert first[1000:1100] != second[1000:1100]
    assert keys[0] != other_keys[0]


@pytest.mark.parametrize("position", [0, 30, 100, 200, 1000, 30_000, -1])
def test_flipped_bits_are_refused_on_the_way_to_the_server_and_back(parties, position):
    clients, server, _ = parties
    open_round(clients, server, 3)
    messages = {name: client.protect(torch.ones(5)) for name, client in clients.items()}
    messages["b"][position] ^= 4
    with pytest.raises(PrivacyError):
        server.aggregate(messages)
    messages["b"][position] ^= 4
    total = server.aggregate(messages)
    total[position] ^= 4
    with pytest.raises(PrivacyError):
        clients["a"].reveal(total, 3)


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, 65_000), junk=st.binary(max_size=40))
def test_bytes_that_are_no_ciphertexts_are_refused(client_key, server_key, cut, junk):
    body = client_key.encrypt(torch.ones(5))
    for damaged in (body[:cut][:-1] + junk, body[: cut % 300] + junk + body[cut % 300 + len(junk) + 1 :]):
        with pytest.raises(PrivacyError):
            server_key.add([body, damaged], 5)
        with pytest.raises(PrivacyError):
            client_key.decrypt(damaged, 5, 2)


def test_bodies_with_too_many_too_few_or_oversized_ciphertexts_are_refused(client_key, server_key):
    body = client_key.encrypt(torch.ones(5))
    hostile = (2**24).to_bytes(4, "little") + bytes(2**24)
    for damaged in (b"", body + body, hostile, bytes(400), body + b"\0\0\0"):
        with pytest.raises(DecodeError):
            server_key.add([damaged, damaged], 5)
    for length in (SLOTS + 1, 2**62):
        with pytest.raises(DecodeError):
            client_key.decrypt(body, length, 2)


def test_total_under_another_key_is_refused(client_key):
    stranger = BACKEND.scheme.private_key(*BACKEND.scheme.generate())
    with pytest.raises(DecodeError, match="another key"):
        client_key.decrypt(stranger.encrypt(torch.ones(5)), 5, 2)


def test_ciphertext_of_other_parameters_is_refused(client_key, server_key):
    from fedlit.privacy.ckks import CKKS

    scheme = CKKS().scheme
    body = scheme.private_key(*scheme.generate()).encrypt(torch.ones(5))
    with pytest.raises(DecodeError, match="not a ciphertext"):
        server_key.add([body, body], 5)
    with pytest.raises(DecodeError, match="not a ciphertext"):
        client_key.decrypt(body, 5, 2)


def test_ciphertext_that_does_not_fill_the_slots_is_refused(halves, client_key):
    import tenseal

    ciphertext = tenseal.bfv_vector(tenseal.context_from(halves[0]), [1, 2, 3]).serialize()
    with pytest.raises(DecodeError, match="3 numbers"):
        client_key.decrypt(len(ciphertext).to_bytes(4, "little") + ciphertext, 3, 2)


def test_halves_of_different_keys_are_refused(halves):
    private, public = BACKEND.scheme.generate()
    for pair in ((halves[0], public), (private, halves[1])):
        with pytest.raises(KeyCheckError, match="does not belong"):
            BACKEND.scheme.private_key(*pair)


def test_malformed_keys_are_refused(halves):
    private, public = halves
    weak = Context.generate(Parameters("BFV", 2048, (30, 24), plain_modulus=12289)).save(private=True)
    server_side = Context.without_keys(PARAMETERS).save(private=False)
    for bad in (b"", private[:-9], bytes(300), private + private, weak, server_side):
        with pytest.raises(KeyCheckError):
            BACKEND.scheme.private_key(bad, public)
    for bad in (b"", public[:-9], bytes(300), public + public, private):
        with pytest.raises(KeyCheckError):
            BACKEND.scheme.public_key(bad)
        with pytest.raises(KeyCheckError):
            BACKEND.scheme.private_key(private, bad)


@pytest.mark.parametrize(
    ("value", "error"),
    [(float("nan"), InputError), (float("inf"), InputError), (32.1, RangeError), (-1e30, RangeError)],
)
def test_numbers_that_cannot_be_encoded_are_refused(client_key, value, error):
    with pytest.raises(error):
        client_key.encrypt(torch.tensor([0.0, value]))


def test_more_clients_than_there_is_headroom_for_are_refused():
    with pytest.raises(RangeError, match="plaintexts of BFV"):
        BFV(FixedPoint(24, 32.0))
    BFV(FixedPoint(24, 32.0), max_clients=15)
    with pytest.raises(ValueError, match="max_clients"):
        BFV(max_clients=1)
    with pytest.raises(RangeError, match="max_clients is 2"):
        BFV(max_clients=2).sum({name: {"x": torch.ones(1)} for name in "abc"})


def test_one_client_and_used_rounds_are_refused(parties):
    clients, server, _ = parties
    with pytest.raises(QuorumError):
        BACKEND.sum({"a": {"x": torch.ones(1)}})
    open_round(clients, server, 4)
    clients["a"].protect(torch.ones(1))
    with pytest.raises(ReplayError):
        clients["a"].protect(torch.ones(1))


def test_a_swapped_public_half_fails_the_enrolment():
    names = ["a", "b"]
    clients, server = {name: BACKEND.client(name) for name in names}, BACKEND.server()
    for party in (*clients.values(), server):
        party.enrol(names)
    run_steps(BACKEND.enrolment[:1], clients, server)
    relayed = server.relay("keys", {name: client.send("keys") for name, client in clients.items()})
    from fedlit.privacy.frames import pack_fields, unpack_fields

    deal = {**unpack_fields(relayed["b"]), "public": BACKEND.scheme.generate()[1]}
    with pytest.raises(PrivacyError):
        clients["b"].receive("keys", pack_fields(deal))


def test_nothing_printed_shows_a_key(halves, client_key):
    private = halves[0]
    for shown in (client_key, client_key._context, BACKEND.scheme, PARAMETERS):
        assert repr(private[-20:])[2:-1] not in repr(shown)


def test_a_backend_shows_its_settings():
    shown = "BFV(codec=FixedPoint(fraction_bits=10, bound=2), max_clients=5)"
    assert repr(BFV(FixedPoint(10, 2.0), max_clients=5)) == shown


def test_missing_tenseal_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(ImportError, match=r"pip install 'fedlit\[he\]'"):
        BFV()


def test_description_says_who_must_not_collude():
    description = BACKEND.describe()
    assert "one client and the server together" in description.collusion
    assert description.error == FixedPoint().error_text()
