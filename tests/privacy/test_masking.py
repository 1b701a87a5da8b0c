"""Pairwise masking: exact sums whoever vanishes, and no way for server, client or wire to learn or change more."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fedlit.privacy import (
    AuthenticationError,
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
from fedlit.privacy.driver import close_round, run_steps
from fedlit.privacy.frames import pack_fields, unpack_fields
from fedlit.privacy.links import KeyPair, digest
from fedlit.privacy.masking import PairwiseMasking
from fedlit.privacy.masking_round import (
    HEADER_BYTES,
    MaskedRound,
    _neighbours,
    _tail,
    authenticate,
    authenticated,
    binding,
    default_degree,
    party,
)
from masking_parties import (
    STAGES,
    Lies,
    Parties,
    Wire,
    addressed_to,
    agreed_by,
    collude,
    fates_of,
    names_of,
    question,
)

COUNTED = ["confirm", "unmask"]
"""Whoever vanishes before one of these has given its vector."""


def majority(*args: Any, **given: Any) -> PairwiseMasking:
    """With the fewest shares and confirmations that a backend takes, and for any two clients: what holds for them."""
    return PairwiseMasking(*args, **({"threshold": 0.501, "colluders": 0} | given))


def vectors_of(names: Sequence[str], length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(length, generator=generator) for name in names}


def integer_sum(
    vectors: Mapping[str, Tensor], among: Sequence[str] | None = None, fraction_bits: int = 20
) -> list[int]:
    """The oracle: exact rational arithmetic on Python's integers."""
    rows = [
        [round(Fraction(number) * 2**fraction_bits) for number in vectors[name].tolist()]
        for name in (vectors if among is None else among)
    ]
    return [sum(column) for column in zip(*rows, strict=True)]


# --- sums


@pytest.mark.parametrize("modulus_bits", [32, 64])
@pytest.mark.parametrize(
    ("num_clients", "neighbours"), [(2, None), (3, None), (10, None), (20, 4), (21, None), (30, 6)]
)
def test_sums_are_those_of_plain_and_of_integers(num_clients: int, neighbours: int | None, modulus_bits: int) -> None:
    backend = majority(modulus_bits=modulus_bits, neighbours=neighbours)  # type: ignore[arg-type]
    vectors = vectors_of(names_of(num_clients), 40)
    payloads = {name: {"w": vector.reshape(8, 5), "n": torch.tensor([3, -7])} for name, vector in vectors.items()}
    secure, plain = backend.sum(payloads), Plain(FixedPoint()).sum(payloads)
    assert all(torch.equal(secure[key], plain[key]) and secure[key].dtype == plain[key].dtype for key in plain)
    assert Parties(backend, names_of(num_clients)).sum(vectors) == integer_sum(vectors)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_numbers_of_any_number_of_clients_add_up_exactly(data: st.DataObject) -> None:
    names = names_of(data.draw(st.integers(2, 16)))
    length = data.draw(st.integers(0, 6))
    dtype = data.draw(st.sampled_from([torch.float16, torch.float32, torch.float64]))
    numbers = st.floats(-32, 32, width={torch.float16: 16, torch.float32: 32, torch.float64: 64}[dtype])
    vectors = {
        name: torch.tensor(data.draw(st.lists(numbers, min_size=length, max_size=length)), dtype=dtype)
        for name in names
    }
    backend = majority(modulus_bits=data.draw(st.sampled_from([32, 64])))
    assert Parties(backend, names).sum(vectors) == integer_sum(vectors)


@pytest.mark.parametrize(("modulus_bits", "length"), [(32, 32768), (32, 65535), (32, 70001), (64, 16384), (64, 50001)])
def test_vectors_longer_than_a_chunk_of_keystream_add_up(modulus_bits: int, length: int) -> None:
    names = names_of(4)
    vectors = vectors_of(names, length)
    got = Parties(majority(modulus_bits=modulus_bits), names).sum(vectors, {"c2": "vector"})  # type: ignore[arg-type]
    codec = FixedPoint()
    assert torch.equal(torch.tensor(got), sum(codec.encode(vectors[name]) for name in ("c0", "c1", "c3")))


def test_sums_at_the_edge_of_the_ring_do_not_wrap() -> None:
    names, bound = names_of(4), 500.0
    backend = majority(FixedPoint(20, bound))
    vectors = {name: torch.tensor([bound, -bound, 0.0]) for name in names}
    assert Parties(backend, names).sum(vectors) == [4 * 500 * 2**20, -4 * 500 * 2**20, 0]


def test_a_message_has_four_or_eight_bytes_per_number_and_a_short_header() -> None:
    for bits in (32, 64):
        parties = Parties(majority(modulus_bits=bits), names_of(2))  # type: ignore[arg-type]
        parties.agree()
        message = parties.clients["c0"].protect(torch.zeros(1000))
        assert len(message) == 1000 * bits // 8 + HEADER_BYTES
        assert HEADER_BYTES == 72
        assert parties.backend.describe().bytes_per_number == bits / 8


def test_protecting_leaves_the_vector_as_it_is_and_takes_views_and_gradients() -> None:
    names = names_of(3)
    base = torch.randn(20, requires_grad=True)
    vectors = {name: base[::2] for name in names}
    before = base.detach().clone()
    assert Parties(majority(), names).sum(vectors) == integer_sum({name: before[::2] for name in names})
    assert torch.equal(base.detach(), before)


def test_a_party_may_have_any_name() -> None:
    names = ["server", "client server", "commitment", "", "é🙂"]
    vectors = vectors_of(names)
    assert Parties(majority(), names).sum(vectors, {"": "vector"}) == integer_sum(
        vectors, [name for name in names if name]
    )


# --- clients that vanish


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("modulus_bits", [32, 64])
def test_a_round_survives_clients_that_vanish_at_any_stage(stage: str, modulus_bits: int) -> None:
    names = names_of(7)
    vectors = vectors_of(names)
    parties = Parties(majority(modulus_bits=modulus_bits), names)  # type: ignore[arg-type]
    counted = names if stage in COUNTED else ["c0", "c2", "c4", "c5"]
    assert parties.sum(vectors, {"c1": stage, "c3": stage, "c6": stage}) == integer_sum(vectors, counted)
    # and so does the next one, in which everybody is back
    assert parties.sum(vectors) == integer_sum(vectors)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.data())
def test_a_round_completes_with_a_majority_and_never_without(number: int, data: st.DataObject) -> None:
    names = names_of(number)
    vectors = vectors_of(names)
    lasts = data.draw(st.lists(st.sampled_from([*STAGES, "stays"]), min_size=number, max_size=number))
    vanish = {name: last for name, last in zip(names, lasts, strict=True) if last != "stays"}
    parties = Parties(majority(), names)
    if number - len(vanish) >= number // 2 + 1:
        counted = [name for name in names if vanish.get(name, "unmask") in COUNTED]
        assert parties.sum(vectors, vanish) == integer_sum(vectors, counted)
    else:
        with pytest.raises(QuorumError):
            parties.sum(vectors, vanish)


@pytest.mark.parametrize("stage", STAGES)
def test_a_sparse_graph_survives_clients_that_vanish(stage: str) -> None:
    names = names_of(26)
    vectors = vectors_of(names)
    parties = Parties(majority(neighbours=8), names)
    vanish = {"c3": stage, "c11": stage, "c20": stage, "c25": stage}
    counted = names if stage in COUNTED else [name for name in names if name not in vanish]
    # shares 9, of which 5 are needed: whichever four vanish, five stay
    assert parties.sum(vectors, vanish) == integer_sum(vectors, counted)


def test_a_neighbourhood_of_which_too_few_stay_loses_the_round() -> None:
    parties = Parties(majority(neighbours=4), names_of(24))
    agreed = parties.agree()
    lost = agreed.neighbours("c0")[:3]
    messages = {name: client.protect(torch.zeros(2)) for name, client in parties.clients.items() if name not in lost}
    with pytest.raises(QuorumError, match="only 2 of the clients that hold shares of"):
        parties.server.aggregate(messages)
    # the clients would not let a server do otherwise
    fates = {name: "dropped" if name in lost else "survived" for name in parties.names}
    with pytest.raises(QuorumError, match="hold shares of"):
        parties.confirm("c0", fates)


def test_a_client_that_was_late_for_the_keys_takes_no_part() -> None:
    parties = Parties(majority(), names_of(4))
    parties.open()
    sent = {name: parties.clients[name].send("keys") for name in parties.names if name != "c2"}
    relayed = parties.server.relay("keys", sent)
    for name, client in parties.clients.items():
        client.receive("keys", relayed.get(name, b""))
    assert parties.clients["c2"].send("shares") == b""
    parties.step("shares")
    with pytest.raises(ReplayError, match="left out"):
        parties.clients["c2"].protect(torch.zeros(1))
    vectors = vectors_of(["c0", "c1", "c3"])
    parties.server.aggregate({name: parties.clients[name].protect(vectors[name]) for name in vectors})
    answers = parties.close()
    assert parties.server.conclude(answers).tolist() == integer_sum(vectors)


def test_a_round_that_lacks_answers_can_be_concluded_when_they_come() -> None:
    parties = Parties(majority(), names_of(3))
    parties.agree()
    vectors = vectors_of(parties.names)
    parties.server.aggregate({name: parties.clients[name].protect(vectors[name]) for name in vectors})
    answers = parties.close()
    with pytest.raises(QuorumError, match="needs 2 shares, got 1"):
        parties.server.conclude({"c0": answers["c0"], "c1": b""})
    assert parties.server.conclude(answers).tolist() == integer_sum(vectors)


def test_confirmations_that_come_late_can_still_be_relayed() -> None:
    parties, _ = protected(3)
    asked = parties.server.ask("confirm", {})
    answers = {name: parties.clients[name].answer("confirm", asked[name]) for name in parties.names}
    for few in ({}, {"c0": answers["c0"]}, {"c0": answers["c0"], "c1": b"", "c2": b""}):
        with pytest.raises(QuorumError, match="confirmed who survived"):
            parties.server.ask("unmask", few)
    parties.server.ask("unmask", {name: answers[name] for name in ("c0", "c1")})
    asked = parties.server.ask("unmask", answers)
    total = parties.server.conclude({name: parties.clients[name].answer("unmask", asked[name]) for name in asked})
    assert total.tolist() == [0, 0]


# --- thresholds, sizes, inputs


@pytest.mark.parametrize("threshold", [0.5, 0.2, 0.0, -1.0, 1.01])
def test_fractions_up_to_one_half_are_refused_as_thresholds(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold as a fraction must be above 0\.5"):
        PairwiseMasking(threshold=threshold)


@pytest.mark.parametrize(("threshold", "number"), [(2, 4), (2, 5), (3, 6), (5, 4), (10, 40)])
def test_numbers_of_shares_up_to_one_half_or_beyond_all_are_refused(threshold: int, number: int) -> None:
    backend = majority(threshold=threshold, neighbours=None if number <= 20 else 20)
    with pytest.raises(QuorumError, match="threshold must be more than half of the"):
        Parties(backend, names_of(number)).open()


@pytest.mark.parametrize(("threshold", "fewest"), [(0.501, 4), (None, 5), (0.8, 5), (1.0, 6), (5, 5)])
def test_the_threshold_decides_how_many_may_vanish(threshold: float | int | None, fewest: int) -> None:
    names = names_of(6)
    vectors = vectors_of(names)
    for left in (fewest, fewest - 1):
        vanish = {name: "vector" for name in names[left:]}
        parties = Parties(majority(threshold=threshold), names)
        if left == fewest:
            assert parties.sum(vectors, vanish) == integer_sum(vectors, names[:left])
        else:
            with pytest.raises(QuorumError, match=f"at least {fewest} must"):
                parties.sum(vectors, vanish)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modulus_bits": 16}, "modulus_bits must be 32 or 64, got 16"),
        ({"threshold": 1}, "at least 2, got 1"),
        ({"neighbours": 3}, "neighbours must be even and at least 2, got 3"),
        ({"neighbours": 0}, "neighbours must be even"),
        ({"codec": FixedPoint(30, 2.0)}, "uint32 masks hold only"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PairwiseMasking(**arguments)  # type: ignore[arg-type]


def test_more_clients_than_the_ring_has_headroom_for_are_refused() -> None:
    Parties(majority(neighbours=2), names_of(63)).open()
    parties = Parties(majority(neighbours=2), names_of(64))
    with pytest.raises(RangeError, match=r"sum of 64 clients can reach 2147483648 .* uint32 masks"):
        parties.server.open_round(RoundId(0, "update", 0), parties.names)
    with pytest.raises(RangeError, match="sum of 64 clients"):
        parties.clients["c0"].open_round(RoundId(0, "update", 0), parties.names)
    Parties(majority(neighbours=2, modulus_bits=64), names_of(64)).open()


def test_one_client_alone_is_refused_by_every_party() -> None:
    parties = Parties(majority(), names_of(3))
    for each in (parties.server, parties.clients["c0"]):
        with pytest.raises(QuorumError, match="a sum over 1 client"):
            each.open_round(RoundId(0, "update", 0), ["c0"])
    with pytest.raises(QuorumError, match="a sum over 1 client"):
        PairwiseMasking().sum({"c0": {"w": torch.zeros(1)}})


@pytest.mark.parametrize(
    ("vector", "error"),
    [
        (torch.tensor([0.0, torch.nan]), InputError),
        (torch.tensor([torch.inf]), InputError),
        (torch.tensor([-torch.inf]), InputError),
        (torch.tensor([0.0, 32.1]), RangeError),
        (torch.tensor([-1e30]), RangeError),
        (torch.tensor([1, 2]), InputError),
        (torch.zeros(2, 2), InputError),
        (torch.tensor(1.0), InputError),
    ],
)
def test_what_cannot_be_encoded_is_refused_and_uses_up_no_mask(vector: Tensor, error: type[PrivacyError]) -> None:
    parties = Parties(majority(), names_of(2))
    parties.agree()
    with pytest.raises(error):
        parties.clients["c0"].protect(vector)
    parties.server.aggregate({name: client.protect(torch.ones(1)) for name, client in parties.clients.items()})


def test_a_number_beyond_the_bound_is_found_at_the_end_of_a_long_vector() -> None:
    parties = Parties(majority(), names_of(2))
    parties.agree()
    vector = torch.zeros(200_000)
    vector[-1] = 33.0
    with pytest.raises(RangeError, match="bound is 32"):
        parties.clients["c0"].protect(vector)


# --- what is seen


class Recorder:
    """A wire that keeps what it carries."""

    def __init__(self) -> None:
        self.carried: list[tuple[str, str, bytes]] = []

    def __call__(self, what: str, client: str, message: bytes) -> bytes:
        self.carried.append((what, client, message))
        return message


def test_no_message_contains_a_vector_a_seed_or_a_private_key() -> None:
    recorder = Recorder()
    parties = Parties(majority(), names_of(5), recorder)
    vectors = vectors_of(parties.names, 64)
    secret: dict[str, bytes] = {}

    class Spy:
        """Reads the clients' secrets once they exist."""

        def __call__(self, what: str, client: str, message: bytes) -> bytes:
            opened = parties.clients[client]._round
            if what == "send shares" and opened is not None and opened.agreed is not None:
                secret[f"seed {client}"] = opened.seed
                secret[f"round key {client}"] = opened.keys.private_bytes()
                secret[f"identity {client}"] = parties.clients[client]._identity._keys.private_bytes()
                secret[f"own mask {client}"] = opened.agreed.self_mask_key(opened.seed)
                for peer, key in opened.mask_keys.items():
                    secret[f"mask {client} {peer}"] = key
                for owner, (of_seed, of_key) in opened.shares.items():
                    secret[f"share {client} {owner}"] = of_seed
                    secret[f"key share {client} {owner}"] = of_key
            return recorder(what, client, message)

    parties.wire = Spy()
    parties.sum(vectors, {"c4": "vector"})
    assert len(secret) == 5 * 4 + 5 * 4 + 5 * 2
    codec = FixedPoint()
    for name, vector in vectors.items():
        secret[f"vector of {name}"] = vector.numpy().tobytes()[:16]
        secret[f"integers of {name}"] = codec.encode(vector).to(torch.int32).numpy().tobytes()[:16]
    assert {what for what, _, _ in recorder.carried} >= {
        *("send identities", "receive shares", "vector", "ask confirm", "answer confirm", "ask unmask", "answer unmask")
    }
    for what, _, message in recorder.carried:
        assert not [name for name, value in secret.items() if value in message], what


def test_equal_vectors_of_clients_and_rounds_become_unrelated_messages() -> None:
    parties = Parties(majority(), names_of(3))
    rows = []
    for _ in range(2):
        parties.agree()
        rows += [client.protect(torch.zeros(5000))[HEADER_BYTES:] for client in parties.clients.values()]
    for one, other in itertools.combinations(rows, 2):
        assert (one == other).float().mean() < 0.01  # bytes of chance agree in 1 of 256 places
    for row in rows:
        assert abs(row.float().mean() - 127.5) < 7 * 73.9 / len(row) ** 0.5  # 7 standard deviations (3e-12)


def test_seeding_every_generator_does_not_make_masks_repeat() -> None:
    def uplink() -> Tensor:
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global generator is the point
        random.seed(1)
        parties = Parties(majority(), names_of(2))
        parties.agree()
        return parties.clients["c0"].protect(torch.zeros(5000))[HEADER_BYTES:]

    assert (uplink() == uplink()).float().mean() < 0.01


def test_nothing_that_is_printed_shows_a_key() -> None:
    parties = Parties(majority(), names_of(2))
    parties.agree()
    client = parties.clients["c0"]
    assert client._round is not None
    assert repr(parties.backend) == (
        "PairwiseMasking(codec=FixedPoint(fraction_bits=20, bound=32), modulus_bits=32, threshold=0.501, "
        "neighbours=None, colluders=0)"
    )
    shown = repr([client, client._round, client._identity, client._round.agreed, parties.server, parties.server._round])
    assert client._round.keys.private_bytes().hex() not in shown
    assert repr(client._round.seed) not in shown
    assert "mask_keys" not in shown


def test_a_client_forgets_a_round_with_its_answer() -> None:
    parties = Parties(majority(), names_of(3))
    parties.sum(vectors_of(parties.names))
    assert all(client._round is None for client in parties.clients.values())
    assert parties.server._round is None


def test_the_description_claims_what_holds() -> None:
    description = PairwiseMasking(threshold=0.8).describe()
    assert (description.backend, description.bytes_per_number) == ("PairwiseMasking", 4.0)
    assert "0.8" in description.collusion
    assert "first use" in description.adversary
    assert "sparse graph" in description.revealed
    assert "2q - n" in description.collusion
    assert PairwiseMasking().error_bound(10) == 10 * 2.0**-21


# --- attacks: keys


LOW_ORDER = [
    # RFC 7748's curve has a subgroup of order 8: the coordinates of its points, and their other encodings
    bytes(32),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    (2**255 - 18).to_bytes(32, "little"),
]


@pytest.mark.parametrize("key", LOW_ORDER)
def test_low_order_identity_keys_are_refused(key: bytes) -> None:
    def wire(what: str, client: str, message: bytes) -> bytes:
        return key if (what, client) == ("send identities", "c1") else message

    with pytest.raises(KeyCheckError, match="low order"):
        Parties(majority(), names_of(3), wire)

    parties = Parties(majority(), names_of(3))
    directory = {"server": parties.server._identity.public}
    directory |= {party(name): client._identity.public for name, client in parties.clients.items()}
    stranger = parties.backend.client("c0")
    stranger.enrol(parties.names)
    directory |= {party("c0"): stranger._identity.public, party("c1"): key}
    with pytest.raises(KeyCheckError, match="low order"):
        stranger.receive("identities", pack_fields(directory))


@pytest.mark.parametrize("key", LOW_ORDER)
def test_low_order_round_keys_are_refused_by_the_server_and_by_clients(key: bytes) -> None:
    parties = Parties(majority(), names_of(3))
    parties.open()
    sent = {name: client.send("keys") for name, client in parties.clients.items()}
    bad, opening = parties.clients["c1"], parties.server._round
    assert opening is not None
    about = binding("keys", party("c1"), opening.opening)
    with pytest.raises(KeyCheckError, match="low order"):
        parties.server.relay("keys", sent | {"c1": authenticate(bad._identity.link("server"), about, key)})
    keys = {name: message[-32:] for name, message in sent.items()}
    with pytest.raises(KeyCheckError, match="low order"):
        parties.clients["c0"].receive(
            "keys", parties.tell("keys", "c0", opening.opening, pack_fields({**keys, "c1": key}))
        )


def directory_of(parties: Parties) -> dict[str, bytes]:
    keys = {party(name): client._identity.public for name, client in parties.clients.items()}
    return {"server": parties.server._identity.public, **keys}


@pytest.mark.parametrize("changed", ["client c1", "server"])
def test_a_client_refuses_an_identity_key_that_has_changed(changed: str) -> None:
    parties = Parties(majority(), names_of(3))
    client = parties.clients["c0"]
    client.enrol(parties.names)
    with pytest.raises(KeyCheckError, match=f"the identity key of '{changed}' is not the one that 'client c0' knows"):
        client.receive("identities", pack_fields(directory_of(parties) | {changed: KeyPair().public}))


def test_the_server_refuses_an_identity_key_that_has_changed() -> None:
    parties = Parties(majority(), names_of(3))
    parties.clients["c2"] = parties.backend.client("c2")
    with pytest.raises(KeyCheckError, match="'client c2'"):
        parties.enrol()


def test_enrolling_again_with_the_same_keys_and_more_clients_is_fine() -> None:
    parties = Parties(majority(), names_of(3))
    parties.names = names_of(4)
    parties.clients["c3"] = parties.backend.client("c3")
    parties.enrol()
    vectors = vectors_of(parties.names)
    assert parties.sum(vectors) == integer_sum(vectors)


def other_encoding(key: bytes) -> bytes:
    """The same point: X25519 ignores the highest bit."""
    return key[:-1] + bytes([key[-1] ^ 0x80])


@pytest.mark.parametrize("encode", [bytes, other_encoding])
@pytest.mark.parametrize("original", ["client c0", "client c1", "server"])
def test_one_identity_key_under_two_names_is_refused(original: str, encode: Callable[[bytes], bytes]) -> None:
    parties = Parties(majority(), names_of(3))
    client = parties.backend.client("c0")
    client.enrol(parties.names)
    directory = directory_of(parties) | {party("c0"): client._identity.public}
    with pytest.raises(KeyCheckError, match="the same identity key"):
        client.receive("identities", pack_fields(directory | {"client c2": encode(directory[original])}))


@pytest.mark.parametrize("change", ["own", "missing", "stranger", "short"])
def test_a_directory_other_than_the_roster_is_refused(change: str) -> None:
    parties = Parties(majority(), names_of(3))
    directory = directory_of(parties)
    if change == "own":
        directory["client c0"] = KeyPair().public
    elif change == "missing":
        del directory["client c2"]
    elif change == "stranger":
        directory["client x"] = KeyPair().public
    else:
        directory["client c2"] = bytes(31)
    with pytest.raises(KeyCheckError):
        parties.clients["c0"].receive("identities", pack_fields(directory))


def test_whoever_takes_the_place_of_a_client_with_another_identity_is_found_out() -> None:
    parties = Parties(majority(), names_of(3))
    false = parties.backend.client("c1")
    false.enrol(parties.names)
    false._identity.pin(directory_of(parties) | {party("c1"): false._identity.public})
    parties.open()
    false.open_round(RoundId(0, "update", 0), parties.names)
    sent = {name: client.send("keys") for name, client in (parties.clients | {"c1": false}).items()}
    with pytest.raises(AuthenticationError):
        parties.server.relay("keys", sent)


def test_a_swapped_round_key_is_found_before_anything_is_masked() -> None:
    """The server gives c0 a key of its own as that of c1: what c1 seals for c0 is bound to other keys."""
    parties = Parties(majority(), names_of(3))
    parties.open()
    assert parties.server._round is not None
    relayed = parties.server.relay("keys", {name: client.send("keys") for name, client in parties.clients.items()})
    opening = parties.server._round.opening
    about = binding("keys", "server", opening)
    keys = unpack_fields(authenticated(parties.clients["c0"]._identity.link("server"), about, relayed["c0"]))
    relayed["c0"] = parties.tell("keys", "c0", opening, pack_fields({**keys, "c1": KeyPair().public}))
    for name, client in parties.clients.items():
        client.receive("keys", relayed[name])
    digests = {name: agreed_by(client).digest for name, client in parties.clients.items()}
    assert digests["c0"] != digests["c1"] == digests["c2"]
    # an honest server would stop here, as the tag of c0 covers another digest
    sent = {name: client.send("shares") for name, client in parties.clients.items()}
    with pytest.raises(AuthenticationError):
        parties.server.relay("shares", sent)
    # this one strips the tags, and relays with fresh ones
    deals = {name: unpack_fields(message[28:]) for name, message in sent.items()}
    for victim in ("c0", "c1"):
        body = pack_fields({owner: b"" if owner == victim else deal[party(victim)] for owner, deal in deals.items()})
        with pytest.raises(AuthenticationError, match="does not open"):
            parties.clients[victim].receive("shares", parties.tell("shares", victim, digests[victim], body))
        with pytest.raises(ReplayError):
            parties.clients[victim].protect(torch.zeros(3))


def test_clients_that_are_told_different_rosters_cannot_open_each_others_shares() -> None:
    parties = Parties(majority(), names_of(5))
    parties.open()
    assert parties.server._round is not None
    opening = parties.server._round.opening
    keys = {name: client.send("keys")[-32:] for name, client in parties.clients.items()}
    told = {"c0": ["c0", "c1", "c2"], "c1": ["c0", "c1", "c2", "c3"]}
    for name, among in told.items():
        body = pack_fields({peer: keys[peer] for peer in among})
        parties.clients[name].receive("keys", parties.tell("keys", name, opening, body))
    deal = unpack_fields(parties.clients["c1"].send("shares")[28:])
    body = pack_fields({"c0": b"", "c1": deal[party("c0")], "c2": b""})
    with pytest.raises(AuthenticationError, match="does not open"):
        parties.clients["c0"].receive(
            "shares", parties.tell("shares", "c0", agreed_by(parties.clients["c0"]).digest, body)
        )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("half", QuorumError),
        ("stranger", AuthenticationError),
        ("copy", KeyCheckError),
        ("own", KeyCheckError),
        ("left out", KeyCheckError),
        ("short", KeyCheckError),
    ],
)
def test_round_keys_other_than_of_a_majority_of_the_round_are_refused(change: str, error: type[PrivacyError]) -> None:
    parties = Parties(majority(), names_of(4))
    parties.open()
    assert parties.server._round is not None
    keys = {name: client.send("keys")[-32:] for name, client in parties.clients.items()}
    changed = {
        "half": {name: keys[name] for name in ("c0", "c1")},
        "stranger": {**keys, "x": KeyPair().public},
        "copy": {**keys, "c2": keys["c1"]},
        "own": {**keys, "c0": KeyPair().public},
        "left out": {name: key for name, key in keys.items() if name != "c0"},
        "short": {**keys, "c2": bytes(31)},
    }[change]
    with pytest.raises(error):
        parties.clients["c0"].receive(
            "keys", parties.tell("keys", "c0", parties.server._round.opening, pack_fields(changed))
        )
    assert parties.clients["c0"].send("shares") == b""


def test_parties_with_other_settings_do_not_understand_each_other() -> None:
    for other in (majority(FixedPoint(19)), majority(modulus_bits=64), majority(threshold=1.0)):
        parties = Parties(majority(), names_of(3))
        parties.clients["c1"]._backend = other
        with pytest.raises(AuthenticationError):
            parties.agree()


# --- attacks: survivors


def protected(number: int = 5, neighbours: int | None = None) -> tuple[Parties, MaskedRound]:
    parties = Parties(majority(neighbours=neighbours), names_of(number))
    agreed = parties.agree()
    parties.server.aggregate({name: client.protect(torch.zeros(2)) for name, client in parties.clients.items()})
    return parties, agreed


def test_nobody_confirms_two_lists_nor_one_twice() -> None:
    parties, _ = protected()
    parties.confirm("c0", fates_of(parties.names))
    for second in (fates_of(parties.names, ["c1"]), fates_of(parties.names)):
        with pytest.raises(ReplayError, match="has confirmed who survived"):
            parties.confirm("c0", second)


def test_nobody_gives_shares_twice() -> None:
    parties, agreed = protected()
    tags = {name: parties.confirm(name, fates_of(parties.names)) for name in parties.names}
    asked = parties.tell("tags", "c0", agreed.digest, pack_fields(addressed_to("c0", tags)))
    parties.clients["c0"].answer("unmask", asked)
    with pytest.raises(ReplayError, match="has left it"):
        parties.clients["c0"].answer("unmask", asked)


def test_nobody_gives_shares_before_it_has_confirmed() -> None:
    parties, _ = protected()
    tags = {name: parties.confirm(name, fates_of(parties.names)) for name in parties.names[1:]}
    with pytest.raises(ReplayError, match="before it has confirmed"):
        parties.unmask("c0", addressed_to("c0", tags))


@pytest.mark.parametrize(
    ("fates", "error"),
    [
        ({"c0": "dropped"}, AuthenticationError),
        ({"c1": "dropped", "c2": "dropped", "c3": "dropped"}, QuorumError),
        ({"c1": None}, DecodeError),
        ({"x": "survived"}, DecodeError),
        ({"c1": "both"}, DecodeError),
        ({"c1": ""}, DecodeError),
    ],
)
def test_a_question_that_does_not_part_the_clients_in_two_is_refused(
    fates: dict[str, str | None], error: type[PrivacyError]
) -> None:
    parties, _ = protected()
    whole: dict[str, str | None] = {**fates_of(parties.names), **fates}
    with pytest.raises(error):
        parties.confirm("c0", {name: fate for name, fate in whole.items() if fate is not None})
    # nothing was confirmed, so the honest question still is
    assert set(parties.confirm("c0", fates_of(parties.names))) == {"c1", "c2", "c3", "c4"}


def test_a_client_in_both_lists_is_refused() -> None:
    parties, agreed = protected(3)
    body = bytearray(question({"c0": "survived", "c1": "survived", "c2": "dropped", "cX": "survived"}))
    body[body.index(b"cX") : body.index(b"cX") + 2] = b"c2"
    with pytest.raises(DecodeError, match="'c2' comes twice"):
        parties.clients["c0"].answer("confirm", parties.tell("survivors", "c0", agreed.digest, bytes(body)))


def test_nobody_confirms_before_it_has_sent_its_vector() -> None:
    parties = Parties(majority(), names_of(3))
    parties.agree()
    with pytest.raises(ReplayError, match="given no vector"):
        parties.confirm("c0", fates_of(parties.names))


def test_shares_need_confirmations_of_a_threshold_of_clients() -> None:
    parties, agreed = protected(7)
    tags = {name: parties.confirm(name, fates_of(parties.names, ["c6"])) for name in parties.names[:6]}
    to_c0 = addressed_to("c0", tags)
    assert agreed.threshold == 4
    for few in ([], ["c1"], ["c1", "c2"]):
        with pytest.raises(QuorumError, match=rf"only {1 + len(few)} clients confirm .* client 'c0' received"):
            parties.unmask("c0", {name: to_c0[name] for name in few})
    # it was asked in vain, and may be asked again, but about the same list only
    shares = parties.unmask("c0", {name: to_c0[name] for name in ("c1", "c2", "c3")})
    assert set(shares) == set(parties.names)


@pytest.mark.parametrize(
    "forge",
    [
        lambda tags, last: tags["c1"]["c0"][:-1] + bytes([tags["c1"]["c0"][-1] ^ 1]),
        lambda tags, last: bytes(28),
        lambda tags, last: b"",
        lambda tags, last: tags["c1"]["c0"] * 1000,
        lambda tags, last: tags["c1"]["c2"],  # made for somebody else
        lambda tags, last: tags["c2"]["c0"],  # made by somebody else
        lambda tags, last: tags["c0"]["c1"],  # one's own, sent back along the same link
        lambda tags, last: last["c1"]["c0"],  # of another round
    ],
)
def test_a_wrong_tag_counts_as_none(
    forge: Callable[[dict[str, dict[str, bytes]], dict[str, dict[str, bytes]]], bytes],
) -> None:
    parties, _ = protected(4)
    last = {name: parties.confirm(name, fates_of(parties.names)) for name in parties.names}
    parties.agree()
    for client in parties.clients.values():
        client.protect(torch.zeros(2))
    tags = {name: parties.confirm(name, fates_of(parties.names)) for name in parties.names}
    right = addressed_to("c0", tags)
    with pytest.raises(QuorumError, match="only 2 clients confirm"):
        parties.unmask("c0", {"c1": forge(tags, last), "c2": right["c2"]})
    # nor can one client with a wrong tag stop the others
    assert set(parties.unmask("c0", {**right, "c1": forge(tags, last)})) == set(parties.names)


def test_tags_of_strangers_of_oneself_and_of_those_who_vanished_do_not_count() -> None:
    parties, agreed = protected(5)
    tags = {name: parties.confirm(name, fates_of(parties.names, ["c4"])) for name in ("c0", "c1")}
    view = agreed.view(parties.names, parties.names[:4])
    vanished = parties.clients["c4"]._identity.link(party("c0")).tag(view, agreed.confirmation("c4", "c0"))
    with pytest.raises(QuorumError, match="only 2 clients confirm"):
        parties.unmask("c0", {"c0": tags["c0"]["c1"], "c1": tags["c1"]["c0"], "c4": vanished, "x": vanished})


def test_a_client_with_a_wrong_confirmation_does_not_stop_the_round() -> None:
    parties, agreed = protected(4)
    asked = parties.server.ask("confirm", {})
    answers = {name: parties.clients[name].answer("confirm", text) for name, text in asked.items()}
    about, link = binding("tags", party("c3"), agreed.digest), parties.clients["c3"]._identity.link("server")
    answers["c3"] = authenticate(link, about, pack_fields({name: bytes(28) for name in ("c0", "c1", "c2")}))
    asked = parties.server.ask("unmask", answers)
    total = parties.server.conclude({name: parties.clients[name].answer("unmask", asked[name]) for name in asked})
    assert total.tolist() == [0, 0]


def lies(shared: Mapping[str, Sequence[str]], neighbours: int | None = None) -> Lies:
    parties = Parties(majority(neighbours=neighbours), list(shared))
    parties.open()
    parties.step("keys")
    return Lies(parties, shared)


def circle_of(agreed: MaskedRound) -> list[str]:
    """Clients in the order in which the next ones are neighbours."""
    return sorted(agreed.clients, key=lambda name: digest("place on the circle", agreed.digest, name))


def test_a_server_that_tells_everybody_something_else_reads_no_vector() -> None:
    """Without confirmations, this gave it the vector of c4.

    c4 hears that only c2, c3 and itself share secrets, so these are its masks. c0 and c1 hear that c2 and c3 vanished,
    c2 that c3 did, and c3 that c2 did: three shares of each one's round key, and enough of the seed of c4.
    """
    names = names_of(5)
    lying = lies(dict.fromkeys(names, names) | {"c4": ["c2", "c3", "c4"]})
    assert lying.masked_with["c4"] == {"c2", "c3"}
    lying.ask({"c0": ["c2", "c3"], "c1": ["c2", "c3"], "c2": ["c1", "c3"], "c3": ["c1", "c2"], "c4": []})
    assert lying.released == []
    # nor is there another view on which anybody would act
    for name in names[:4]:
        with pytest.raises(ReplayError):
            lying.parties.confirm(name, fates_of(names))


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7])
def test_different_survivor_lists_never_give_both_secrets_of_one_client(number: int) -> None:
    """However a lying server splits the clients, they act on one list at most."""
    names = names_of(number)
    threshold = number // 2 + 1
    for told in itertools.product([True, False], repeat=number - 1):
        lying = lies(dict.fromkeys(names, names))
        target = names[-1]
        lying.ask({name: [target] if gone else [] for name, gone in zip(names, (*told, False), strict=True)})
        of_key, of_seed = lying.keys.get(target, set()), lying.seeds.get(target, set())
        assert not (of_key and of_seed)
        assert len(of_key) == (sum(told) if sum(told) >= threshold else 0)
        assert len(of_seed) == (number - sum(told) if number - sum(told) >= threshold else 0)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_a_lying_server_tells_it_reads_the_sum_of_all_survivors_at_most(data: st.DataObject) -> None:
    names = names_of(data.draw(st.integers(3, 6)))
    threshold = len(names) // 2 + 1

    def a_few(of: Sequence[str], at_most: int) -> list[str]:
        return data.draw(st.lists(st.sampled_from(of), max_size=at_most, unique=True)) if of and at_most else []

    # a majority hears the same, lest nothing at all be released; the others whatever it takes
    honest = data.draw(st.integers(threshold, len(names)))
    out = a_few(names[honest:], len(names) - threshold)
    common = [name for name in names if name not in out]
    gone = a_few(common[threshold:], len(common) - threshold)
    shared, dropped = {}, {}
    for place, name in enumerate(names):
        if place < honest:
            shared[name], dropped[name] = common, gone
        else:
            missing = a_few([other for other in names if other != name], len(names) - threshold)
            shared[name] = [other for other in names if other not in missing]
            dropped[name] = a_few(shared[name], len(shared[name]) - threshold)
    lying = lies(shared)
    lying.ask(dropped)
    views = {(tuple(shared[name]), frozenset(dropped[name])) for name in lying.released}
    assert len(views) <= 1
    survivors = [name for name in common if name not in gone]
    assert lying.readable(threshold) in ([], [set(survivors)])


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7, 8, 9, 19, 20])
def test_a_lying_server_and_the_colluders_that_a_round_bears_read_no_vector(number: int) -> None:
    """The first attack of two views: one colluder that confirmed both read every vector for odd n."""
    backend = PairwiseMasking()
    borne = backend.colluders_borne(number)
    assert borne >= max(1, number // 3 - 1)
    names = names_of(number)
    lying = collude(backend, names, borne)
    readable = lying.readable(backend.shares_needed(number))
    assert not readable or all(len(group - set(names[:borne])) >= 2 for group in readable)
    halves = {name in names[borne : borne + (number - borne) // 2] for name in lying.released}
    assert len(halves) <= 1, "clients act on one view at most"


@pytest.mark.parametrize(("number", "threshold"), [(3, 0.51), (5, 0.51), (7, 0.51), (19, 0.51), (6, 0.6), (9, 0.67)])
def test_beyond_what_a_round_bears_every_vector_is_read(number: int, threshold: float) -> None:
    """So that the test above can fail: with 2q - n colluders two views are confirmed, and no mask stays."""
    backend = PairwiseMasking(threshold=threshold, colluders=0)
    two_views = 2 * backend.confirmations_needed(number) - number
    lying = collude(backend, names_of(number), two_views)
    honest = names_of(number)[two_views:]
    assert sorted(lying.released) == sorted(honest)
    assert [{name} for name in honest if {name} in lying.readable(backend.shares_needed(number))] == [
        {name} for name in honest
    ]


@pytest.mark.parametrize(
    ("number", "borne"), [(2, 0), (3, 1), (4, 1), (5, 2), (6, 3), (7, 2), (8, 3), (9, 4), (10, 3), (20, 7)]
)
def test_colluders_borne_by_hand(number: int, borne: int) -> None:
    """q is the first number above 2n/3: min(2q - n - 1, q - 2)."""
    assert PairwiseMasking(colluders=0).colluders_borne(number) == borne


def test_rounds_that_bear_too_few_colluders_are_refused_unless_asked_for_by_name() -> None:
    with pytest.raises(QuorumError, match=r"of so many 0 may collude .*colluders=1.* ask for fewer colluders by name"):
        PairwiseMasking().check_clients(2)
    with pytest.raises(QuorumError, match=r"of so many 0 may collude"):
        PairwiseMasking(threshold=0.51).check_round(5)
    PairwiseMasking(threshold=0.51, colluders=0).check_round(5)
    PairwiseMasking(threshold=0.7).check_round(5)
    assert PairwiseMasking(colluders=3).min_clients == 6
    with pytest.raises(QuorumError, match="of so many 2 may collude"):
        PairwiseMasking(colluders=3).check_clients(7)
    with pytest.raises(ValueError, match="colluders must be 0 or more, got -1"):
        PairwiseMasking(colluders=-1)
    with pytest.raises(ValueError, match=r"colluders=500 are borne by no round of less than 200 clients"):
        PairwiseMasking(colluders=500)
    assert "of 5 clients, 2 may collude with it" in PairwiseMasking().describe_round(5).collusion


def test_a_sparse_graph_does_not_act_on_two_lists_either() -> None:
    """An attack that each neighbourhood for itself would not notice, so that all must agree.

    The four outer ones of eight neighbours, and their centre, hear that the four inner ones share no secrets. So the
    centre masks with the outer ones only, and the five confirm to each other that nobody vanished: a threshold. All
    others hear that the outer ones vanished, and would give shares of their round keys. Of the centre's seed they
    have four shares, and it would give the fifth itself, if its neighbourhood were all that counts.
    """
    names = names_of(30)
    parties = Parties(majority(neighbours=8), names)
    parties.open()
    parties.step("keys")
    agreed = agreed_by(parties.clients["c0"])
    circle = circle_of(agreed)
    inner, outer, centre = [[circle[step] for step in steps] for steps in ((1, 2, -1, -2), (3, 4, -3, -4), (0,))]
    assert {*inner, *outer} == {*agreed.neighbours(circle[0])}
    few, misled = [name for name in names if name not in inner], [*centre, *outer]
    assert len(misled) == agreed.threshold
    lying = Lies(parties, {name: few if name in misled else names for name in names})
    assert lying.masked_with[circle[0]] == set(outer)
    lying.ask({name: [] if name in misled else outer for name in names})
    assert lying.released == []


def test_a_lie_to_all_alike_reads_sums_of_a_threshold_in_a_sparse_graph() -> None:
    """The limit that `describe` names: dropping arcs of the circle cuts the others into groups."""
    names = names_of(24)
    parties = Parties(majority(neighbours=4), names)
    parties.open()
    parties.step("keys")
    agreed = agreed_by(parties.clients["c0"])
    circle = circle_of(agreed)
    gone = [circle[place] for place in (0, 1, 5, 6)]
    lying = Lies(parties, dict.fromkeys(names, names))
    lying.ask({name: gone for name in names})
    assert sorted(map(len, lying.readable(agreed.threshold))) == [3, 17]
    assert agreed.threshold == 3


def test_a_server_that_mixes_answers_to_different_lists_gets_nothing() -> None:
    parties, _ = protected(4)
    honest = parties.server.ask("confirm", {})
    answers = {name: parties.clients[name].answer("confirm", honest[name]) for name in ("c2", "c3")}
    for name in ("c0", "c1"):
        tags = parties.confirm(name, fates_of(parties.names, ["c3"]))
        link, bound_to = parties.clients[name]._identity.link("server"), agreed_by(parties.clients[name]).digest
        answers[name] = authenticate(
            link, binding("tags", party(name), bound_to), pack_fields({**tags, "c3": bytes(28)})
        )
    for name, asked in parties.server.ask("unmask", answers).items():
        with pytest.raises(QuorumError, match="only 2 clients confirm"):
            parties.clients[name].answer("unmask", asked)


@pytest.mark.parametrize("number", [2, 5, 10])
def test_a_confirmation_costs_28_bytes_and_a_name_per_pair(number: int) -> None:
    recorder = Recorder()
    parties = Parties(majority(), names_of(number), recorder)
    parties.sum(vectors_of(parties.names))
    sizes = {len(message) for what, _, message in recorder.carried if what in ("answer confirm", "ask unmask")}
    assert sizes == {28 + 4 + (number - 1) * (6 + 2 + 28)}


@pytest.mark.parametrize("vanished", ["c3", None])
def test_a_client_that_gives_a_wrong_share_is_found_out(vanished: str | None) -> None:
    parties = Parties(majority(), names_of(4))
    parties.agree()
    there = [name for name in parties.names if name != vanished]
    parties.server.aggregate({name: parties.clients[name].protect(torch.zeros(2)) for name in there})
    opened = parties.clients["c0"]._round
    assert opened is not None
    victim = vanished or "c1"
    opened.shares[victim] = bytes(32) + b"\x01", bytes(32) + b"\x01"
    answers = parties.close()
    with pytest.raises(AuthenticationError, match=f"of client '{victim}' do not fit"):
        parties.server.conclude(answers)


# --- attacks: replays, strangers, changed messages


def test_vectors_of_another_round_are_refused() -> None:
    parties = Parties(majority(), names_of(3))
    parties.agree()
    old = {name: client.protect(torch.zeros(2)) for name, client in parties.clients.items()}
    parties.agree()
    new = {name: client.protect(torch.zeros(2)) for name, client in parties.clients.items()}
    with pytest.raises(ReplayError, match="vector of client 'c1' was made for another round"):
        parties.server.aggregate(new | {"c1": old["c1"]})
    parties.server.aggregate(new)


def test_vectors_that_come_late_or_twice_are_refused() -> None:
    parties = Parties(majority(), names_of(3))
    parties.agree()
    messages = {name: client.protect(torch.zeros(2)) for name, client in parties.clients.items()}
    parties.server.aggregate({name: messages[name] for name in ("c0", "c1")})
    with pytest.raises(ReplayError, match="too late, or twice"):
        parties.server.aggregate(messages)
    answers = parties.close()
    parties.server.conclude(answers)
    for again in (lambda: parties.server.aggregate(messages), lambda: parties.server.conclude(answers)):
        with pytest.raises(ReplayError, match="no round is open"):
            again()


def test_a_client_protects_once_per_round() -> None:
    parties = Parties(majority(), names_of(2))
    parties.agree()
    parties.clients["c0"].protect(torch.zeros(2))
    with pytest.raises(ReplayError, match="how two differ"):
        parties.clients["c0"].protect(torch.ones(2))


@pytest.mark.parametrize("step", ["keys", "shares"])
def test_messages_of_the_last_round_do_not_open_this_one(step: str) -> None:
    recorder = Recorder()
    parties = Parties(majority(), names_of(3), recorder)
    parties.agree()
    last = {(what, client): message for what, client, message in recorder.carried}
    for direction in ("send", "receive"):

        def replay(what: str, client: str, message: bytes, direction: str = direction) -> bytes:
            return last[what, client] if (what, client) == (f"{direction} {step}", "c1") else message

        parties.wire = replay
        with pytest.raises(AuthenticationError):
            parties.agree()


@pytest.mark.parametrize("step", ["confirm", "unmask"])
def test_questions_and_answers_of_the_last_round_are_refused_in_this_one(step: str) -> None:
    recorder = Recorder()
    parties = Parties(majority(), names_of(3), recorder)
    parties.sum(vectors_of(parties.names))
    last = {(what, client): message for what, client, message in recorder.carried}
    for direction in ("ask", "answer"):

        def replay(what: str, client: str, message: bytes, direction: str = direction) -> bytes:
            return last[what, client] if (what, client) == (f"{direction} {step}", "c1") else message

        parties.wire = replay
        with pytest.raises(AuthenticationError):
            parties.sum(vectors_of(parties.names))


def test_steps_are_heard_once() -> None:
    recorder = Recorder()
    parties = Parties(majority(), names_of(3), recorder)
    parties.agree()
    heard = {what: message for what, client, message in recorder.carried if client == "c0"}
    for step in ("keys", "shares"):
        with pytest.raises(ReplayError, match="before"):
            parties.clients["c0"].receive(step, heard[f"receive {step}"])
    for step in ("keys", "shares"):
        sent = {client: message for what, client, message in recorder.carried if what == f"send {step}"}
        with pytest.raises(ReplayError, match="have been relayed"):
            parties.server.relay(step, sent)


def test_steps_out_of_order_are_refused() -> None:
    backend = majority()
    client, server = backend.client("c0"), backend.server()
    names = names_of(2)
    with pytest.raises(KeyCheckError, match="not in the roster"):
        client.enrol(["x", "y"])
    with pytest.raises(KeyCheckError, match="run the enrolment steps first"):
        client.open_round(RoundId(0, "update", 0), names)
    with pytest.raises(KeyCheckError, match="run the enrolment steps first"):
        server.open_round(RoundId(0, "update", 0), names)
    parties = Parties(backend, names_of(3))
    with pytest.raises(KeyCheckError, match="not in the round"):
        parties.clients["c2"].open_round(RoundId(0, "update", 0), names)
    for wrong in (
        lambda: parties.clients["c0"].protect(torch.zeros(1)),
        lambda: parties.clients["c0"].answer("confirm", b""),
        lambda: parties.clients["c0"].answer("unmask", b""),
        lambda: parties.clients["c0"].send("keys"),
        lambda: parties.server.aggregate({}),
        lambda: parties.server.relay("keys", {"c0": b"x"}),
    ):
        with pytest.raises(ReplayError):
            wrong()
    parties.open()
    for wrong in (
        lambda: parties.clients["c0"].protect(torch.zeros(1)),
        lambda: parties.clients["c0"].receive("shares", b"x"),
        lambda: parties.server.aggregate({}),
        lambda: parties.server.relay("shares", {"c0": b"x"}),
        lambda: parties.server.ask("confirm", {}),
        lambda: parties.server.ask("unmask", {}),
    ):
        with pytest.raises(ReplayError):
            wrong()


def test_strangers_are_refused() -> None:
    parties = Parties(majority(), names_of(3))
    with pytest.raises(QuorumError, match="did not enrol"):
        parties.server.relay("identities", {"c0": KeyPair().public})
    parties.open()
    with pytest.raises(AuthenticationError, match="'x'"):
        parties.server.relay("keys", {"x": b"?"})
    parties.agree()
    messages = {name: client.protect(torch.zeros(2)) for name, client in parties.clients.items()}
    with pytest.raises(AuthenticationError, match="'x'"):
        parties.server.aggregate({**messages, "x": messages["c0"]})
    with pytest.raises(AuthenticationError):  # one client's vector under another's name
        parties.server.aggregate({**messages, "c1": messages["c0"]})
    parties.server.aggregate({name: messages[name] for name in ("c0", "c1")})
    answers = {
        name: parties.clients[name].answer("confirm", asked)
        for name, asked in parties.server.ask("confirm", {}).items()
    }
    with pytest.raises(AuthenticationError, match=r"\['c2'\] sent tags"):
        parties.server.ask("unmask", {**answers, "c2": b"x"})
    with pytest.raises(AuthenticationError):  # one client's confirmations under another's name
        parties.server.ask("unmask", {**answers, "c1": answers["c0"]})
    parties.server.ask("unmask", answers)
    with pytest.raises(AuthenticationError, match="was not asked"):
        parties.server.conclude({"c2": b"x"})


def test_vectors_of_different_lengths_are_refused() -> None:
    parties = Parties(majority(), names_of(2))
    parties.agree()
    with pytest.raises(DecodeError, match="equally long"):
        parties.server.aggregate(
            {"c0": parties.clients["c0"].protect(torch.zeros(2)), "c1": parties.clients["c1"].protect(torch.zeros(3))}
        )


@pytest.mark.parametrize(
    "damage",
    [
        lambda message: message[:0],
        lambda message: message[:10],
        lambda message: message[:-1],
        lambda message: torch.cat([message, message[:4]]),
        lambda message: message.view(torch.int32),
        lambda message: message.reshape(1, -1),
        lambda message: message.float(),
        lambda message: torch.cat([message[:64], torch.full((8,), 255, dtype=torch.uint8), message[72:]]),
    ],
)
def test_a_vector_of_hostile_size_is_refused_and_an_honest_one_then_taken(damage: Callable[[Tensor], Tensor]) -> None:
    parties = Parties(majority(), names_of(2))
    parties.agree()
    messages = {name: client.protect(torch.ones(2)) for name, client in parties.clients.items()}
    with pytest.raises(DecodeError):
        parties.server.aggregate({**messages, "c1": damage(messages["c1"])})
    parties.server.aggregate(messages)


def test_messages_need_not_be_aligned_or_contiguous() -> None:
    parties = Parties(majority(modulus_bits=64), names_of(2))
    parties.agree()
    vectors = vectors_of(parties.names, 1000)
    messages = {name: parties.clients[name].protect(vectors[name]) for name in vectors}
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), messages["c0"]])[1:]
    strided = messages["c1"].repeat_interleave(2)[::2]
    parties.server.aggregate({"c0": shifted, "c1": strided})
    answers = parties.close()
    assert parties.server.conclude(answers).tolist() == integer_sum(vectors)


VECTORS = vectors_of(names_of(4), 3)
ALL_MESSAGES = 4 * (3 * 2 + 1 + 2 * 2) - 5
"""Each client: three steps both ways, a vector, and two steps with a question and an answer; c3 drops out of five."""


class Damage:
    """A wire that changes one message, told by its number."""

    def __init__(self, place: int, change: Callable[[bytes], bytes]) -> None:
        self.place, self.change, self.seen = place, change, 0

    def __call__(self, what: str, client: str, message: bytes) -> bytes:
        self.seen += 1
        return self.change(message) if self.seen == self.place + 1 else message


def outcome(wire: Wire) -> list[int] | None:
    """Sum of the first three of four clients, the last of which vanishes before its vector; None if refused."""
    try:
        return Parties(majority(), names_of(4), wire).sum(VECTORS, {"c3": "vector"})
    except PrivacyError:
        return None


def test_the_messages_counted_here_are_all() -> None:
    wire = Damage(-1, bytes)
    assert outcome(wire) == integer_sum(VECTORS, ["c0", "c1", "c2"])
    assert wire.seen == ALL_MESSAGES


@settings(max_examples=120, deadline=None)
@given(st.integers(0, ALL_MESSAGES - 1), st.floats(0, 1, exclude_max=True))
def test_one_flipped_bit_anywhere_never_gives_a_wrong_sum(place: int, where: float) -> None:
    def flip(message: bytes) -> bytes:
        bit = int(where * 8 * len(message))
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    assert outcome(Damage(place, flip)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda message: b"x",
        lambda message: message[: len(message) // 2],
        lambda message: message + b"\0",
        lambda message: message + message,
        lambda message: b"\xff" * len(message),
        lambda message: b"\xff" * 100_000,
        lambda message: message[:28] + b"\xff" * 4 + message[32:],  # a count of four billion fields
    ],
)
def test_messages_of_hostile_size_are_refused_wherever_they_come(change: Callable[[bytes], bytes]) -> None:
    for place in range(ALL_MESSAGES):
        assert outcome(Damage(place, change)) is None, place


def test_empty_messages_are_as_good_as_vanished_clients() -> None:
    right = {tuple(integer_sum(VECTORS, among)) for among in itertools.combinations(names_of(4), 3)}
    for place in range(ALL_MESSAGES):
        total = outcome(Damage(place, lambda message: b""))
        assert total is None or tuple(total) in right, place


def test_fields_of_hostile_size_under_valid_tags_are_refused() -> None:
    parties = Parties(majority(), names_of(3))
    agreed = parties.agree()
    client = parties.clients["c0"]
    client.protect(torch.zeros(1))
    for body in (b"", b"\xff" * 4, b"\xff" * 1000, bytes(4), bytes(1000)):
        with pytest.raises(DecodeError):
            client.answer("confirm", parties.tell("survivors", "c0", agreed.digest, body))
    parties.server.aggregate({name: parties.clients[name].protect(torch.zeros(1)) for name in ("c1", "c2")})
    link = parties.clients["c1"]._identity.link("server")
    answers = {
        name: parties.clients[name].answer("confirm", asked)
        for name, asked in parties.server.ask("confirm", {}).items()
    }
    about = binding("tags", party("c1"), agreed.digest)
    for body in (b"", b"\xff" * 1000, pack_fields({}), pack_fields({"c2": bytes(27)})):
        with pytest.raises(DecodeError):
            parties.server.ask("unmask", {**answers, "c1": authenticate(link, about, body)})
    parties.server.ask("unmask", answers)
    for body in (b"", b"\xff" * 4, b"\xff" * 1000, bytes(1000)):
        with pytest.raises(DecodeError):
            parties.clients["c1"].answer("unmask", parties.tell("tags", "c1", agreed.digest, body))
    for body in (b"", b"\xff" * 1000, pack_fields({}), pack_fields({"c0": b"", "c1": b"", "c2": b""})):
        with pytest.raises(PrivacyError):
            parties.server.conclude({"c1": link.seal(body, binding("unmask", party("c1"), agreed.digest))})


# --- the graph


@pytest.mark.parametrize(("number", "degree"), [(21, 2), (21, 14), (40, 6), (100, 30)])
def test_the_graph_is_regular_symmetric_and_connected(number: int, degree: int) -> None:
    names = names_of(number)
    graph = _neighbours(names, degree, b"seed")
    assert all(len(set(peers)) == degree and name not in peers for name, peers in graph.items())
    assert all(name in graph[peer] for name, peers in graph.items() for peer in peers)
    reached, frontier = {names[0]}, [names[0]]
    while frontier:
        new = [peer for peer in graph[frontier.pop()] if peer not in reached]
        reached.update(new)
        frontier += new
    assert reached == set(names)
    assert graph == _neighbours(names, degree, b"seed")
    assert graph != _neighbours(names, degree, b"another seed")


def test_up_to_twenty_clients_everybody_is_a_neighbour() -> None:
    assert [default_degree(number) for number in (2, 3, 20)] == [1, 2, 19]
    parties = Parties(majority(), names_of(20))
    assert all(len(parties.agree().neighbours(name)) == 19 for name in parties.names)


def test_beyond_twenty_clients_degrees_are_even_and_grow_slowly() -> None:
    degrees = [default_degree(number) for number in (21, 60, 100, 200, 500, 1000)]
    assert all(degree % 2 == 0 for degree in degrees)
    assert degrees == sorted(degrees)
    assert degrees[-1] < 150


def test_tails_are_those_of_scipy() -> None:
    for population, marked, drawn, least in [(20, 5, 14, 4), (99, 20, 42, 22), (999, 200, 118, 60), (20, 3, 5, 4)]:
        expected = stats.hypergeom(population, marked, drawn).sf(least - 1)
        assert _tail(population, marked, drawn, least) == pytest.approx(expected, rel=1e-6)


def test_clients_of_a_sparse_graph_deal_to_their_neighbours_only() -> None:
    recorder = Recorder()
    parties = Parties(majority(neighbours=4), names_of(24), recorder)
    agreed = parties.agree()
    deals = {client: unpack_fields(message[28:]) for what, client, message in recorder.carried if what == "send shares"}
    for name, deal in deals.items():
        assert set(deal) == {"commitment", *map(party, agreed.neighbours(name))}
    for client in parties.clients.values():
        assert agreed_by(client).neighbours("c7") == agreed.neighbours("c7")


def test_the_graph_is_another_in_each_round() -> None:
    parties = Parties(majority(neighbours=4), names_of(30))
    assert parties.agree().neighbours("c0") != parties.agree().neighbours("c0")


# --- size


@pytest.mark.slow
def test_ten_million_numbers_take_at_most_three_times_their_own_size() -> None:
    script = """
import resource, torch
from fedlit.privacy.base import RoundId
from fedlit.privacy.driver import run_steps
from fedlit.privacy.masking import PairwiseMasking
backend, names = PairwiseMasking(), [f"c{i}" for i in range(10)]
clients, server = {name: backend.client(name) for name in names}, backend.server()
for each in (*clients.values(), server): each.enrol(names)
run_steps(backend.enrolment, clients, server)
for each in (*clients.values(), server): each.open_round(RoundId(0, "update", 0), names)
run_steps(backend.opening, clients, server)
vector = torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
message = clients["c0"].protect(vector)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (4 * len(vector)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2  # beyond the vector itself, of which the message is 1


def test_all_parties_of_one_process_agree_with_run_steps() -> None:
    backend, names = majority(), names_of(3)
    clients, server = {name: backend.client(name) for name in names}, backend.server()
    for each in (*clients.values(), server):
        each.enrol(names)
    run_steps(backend.enrolment, clients, server)
    for each in (*clients.values(), server):
        each.open_round(RoundId(0, "update", 0), names)
    run_steps(backend.opening, clients, server)
    vectors = vectors_of(names)
    server.aggregate({name: clients[name].protect(vectors[name]) for name in names})
    total = close_round(backend.closing, clients, server)
    assert total.dtype == torch.int32
    assert server.reveal(total, 3).tolist() == [number / 2**20 for number in integer_sum(vectors)]
