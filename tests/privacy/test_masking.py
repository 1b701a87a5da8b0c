"""Pairwise masking: exact sums whoever vanishes, and no way for server, client or wire to learn or change more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from cuts import drawn
from fedlit.privacy import (
    BFV,
    CKKS,
    AuthenticationError,
    DecodeError,
    FixedPoint,
    InputError,
    KeyCheckError,
    Paillier,
    PairwiseMasking,
    PrivacyError,
    QuorumError,
    RangeError,
    ReplayError,
    RoundId,
    Tags,
    Terms,
    TermsError,
    ThresholdPaillier,
)
from fedlit.privacy.links import KEY_BYTES, TAG_BYTES, KeyPair, digest, pack_fields, unpack_fields
from fedlit.privacy.masking.graph import default_degree, draw, drawn_in, log2_failure
from fedlit.privacy.masking.round import MaskedRound, binding, party
from masking_parties import (
    STAGES,
    Lies,
    Parties,
    Recorder,
    Wire,
    addressed_to,
    agreed_by,
    collude,
    fates_of,
    integer_sum,
    names_of,
    question,
    vectors_of,
)
from refused import refused

COUNTED = ["confirm", "unmask"]
"""A client that vanishes before one of these has sent its vector."""


def majority(*args: Any, **given: Any) -> PairwiseMasking:
    """With the fewest shares and confirmations that a backend takes, and for any two clients: what holds for them."""
    return PairwiseMasking(*args, **({"threshold": 0.501, "colluders": 0} | given))


def parties_of(number: int, wire: Wire | None = None, **given: Any) -> Parties:
    return Parties(majority(**given), names_of(number), *([] if wire is None else [wire]))


# --- sums


@pytest.mark.parametrize(
    ("number", "neighbours", "bits"), [(2, None, 32), (3, None, 64), (10, None, 32), (20, 4, 64), (21, None, 32)]
)
def test_sums_are_those_of_integers(number: int, neighbours: int | None, bits: int) -> None:
    parties = parties_of(number, modulus_bits=bits, neighbours=neighbours)
    vectors = vectors_of(parties.names, 40)
    assert parties.sum(vectors) == integer_sum(vectors)


@pytest.mark.parametrize(("bits", "length"), [(32, 70001), (64, 50001)])
def test_vectors_longer_than_a_chunk_of_keystream_add_up(bits: int, length: int) -> None:
    parties = parties_of(4, modulus_bits=bits)
    vectors = vectors_of(parties.names, length)
    got = parties.sum(vectors, {"c2": "vector"})
    assert torch.equal(torch.tensor(got), sum(FixedPoint().encode(vectors[name]) for name in ("c0", "c1", "c3")))


def test_sums_at_the_edge_of_the_ring_do_not_wrap() -> None:
    parties = parties_of(4, codec=FixedPoint(20, 500.0))
    vectors = {name: torch.tensor([500.0, -500.0, 0.0]) for name in parties.names}
    assert parties.sum(vectors) == [4 * 500 * 2**20, -4 * 500 * 2**20, 0]


def test_a_party_may_have_any_name() -> None:
    names = ["server", "client server", "commitment", "", "é🙂"]
    vectors = vectors_of(names)
    assert Parties(majority(), names).sum(vectors, {"": "vector"}) == integer_sum(vectors, [n for n in names if n])


# --- clients that vanish


@settings(max_examples=20, deadline=None)
@given(st.integers(3, 7), st.sampled_from([32, 64]), st.data())
def test_a_round_completes_with_a_majority_and_never_without(number: int, bits: int, data: st.DataObject) -> None:
    parties = parties_of(number, modulus_bits=bits)
    vectors = vectors_of(parties.names)
    lasts = data.draw(st.lists(st.sampled_from([*STAGES, "stays"]), min_size=number, max_size=number))
    vanish = {name: last for name, last in zip(parties.names, lasts, strict=True) if last != "stays"}
    if number - len(vanish) >= number // 2 + 1:
        counted = [name for name in parties.names if vanish.get(name, "unmask") in COUNTED]
        assert parties.sum(vectors, vanish) == integer_sum(vectors, counted)
    else:
        with pytest.raises(QuorumError):
            parties.sum(vectors, vanish)
    assert parties.sum(vectors) == integer_sum(vectors), "everybody is back in the next round"


@pytest.mark.parametrize("stage", ["shares", "confirm"])
def test_a_sparse_graph_survives_clients_that_vanish(stage: str) -> None:
    parties = parties_of(26, neighbours=8)
    vectors = vectors_of(parties.names)
    vanish = {"c3": stage, "c11": stage, "c20": stage, "c25": stage}
    counted = parties.names if stage in COUNTED else [name for name in parties.names if name not in vanish]
    # shares 9, of which 5 are needed: whichever four vanish, five stay
    assert parties.sum(vectors, vanish) == integer_sum(vectors, counted)


def test_a_neighbourhood_of_which_too_few_stay_loses_the_round() -> None:
    parties = parties_of(24, neighbours=4)
    lost = parties.agree().holders("c0")[:3]
    messages = parties.protect()
    with pytest.raises(QuorumError, match="only 2 of the clients that hold shares of"):
        parties.server.aggregate({name: message for name, message in messages.items() if name not in lost})
    # the clients would not let a server do otherwise
    with pytest.raises(QuorumError, match="hold shares of"):
        parties.confirm("c0", fates_of(parties.names, lost))


def test_a_client_that_was_late_for_the_keys_takes_no_part() -> None:
    parties = parties_of(4)
    parties.open()
    sent = {name: parties.clients[name].send("keys") for name in parties.names if name != "c2"}
    relayed = parties.server.relay("keys", sent)
    for name, client in parties.clients.items():
        client.receive("keys", relayed.get(name, b""))
    assert parties.clients["c2"].send("shares") == b""
    parties.step("shares")
    with pytest.raises(ReplayError, match="'keys' comes next"):
        parties.clients["c2"].protect(torch.zeros(1))
    vectors = vectors_of(["c0", "c1", "c3"])
    parties.server.aggregate(parties.protect(vectors))
    assert parties.server.conclude(parties.close()).tolist() == integer_sum(vectors)


def test_answers_that_come_late_still_conclude_the_round() -> None:
    parties, _ = protected(3)
    confirmed = parties.confirmations()
    for few in ({}, {"c0": confirmed["c0"]}, {"c0": confirmed["c0"], "c1": b"", "c2": b""}):
        with pytest.raises(QuorumError):
            parties.server.ask("unmask", few)
    parties.server.ask("unmask", {name: confirmed[name] for name in ("c0", "c1")})
    answers = unmasked(parties, parties.server.ask("unmask", confirmed))
    with refused("shares", QuorumError):
        parties.server.conclude({"c0": answers["c0"], "c1": b""})
    assert parties.server.conclude(answers).tolist() == [0, 0]


def unmasked(parties: Parties, asked: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: parties.clients[name].answer("unmask", text) for name, text in asked.items()}


# --- thresholds, sizes, inputs


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("threshold", value) for value in (0.5, 1.01, 1)),
        ("modulus_bits", 16),
        ("neighbours", 1),
        ("colluders", 500),  # more than any round bears
    ],
)
def test_arguments_out_of_range_are_refused(argument: str, value: Any) -> None:
    with refused(argument):
        PairwiseMasking(**{argument: value})


@pytest.mark.parametrize(("threshold", "number"), [(2, 4), (5, 4), (10, 40)])
def test_numbers_of_shares_up_to_one_half_or_beyond_all_are_refused(threshold: int, number: int) -> None:
    backend = majority(threshold=threshold, neighbours=None if number <= 20 else 20)
    with refused("threshold", QuorumError):
        Parties(backend, names_of(number)).open()


@pytest.mark.parametrize(("threshold", "fewest"), [(0.501, 4), (None, 5), (1.0, 6), (5, 5)])
def test_the_threshold_decides_how_many_may_vanish(threshold: float | int | None, fewest: int) -> None:
    names = names_of(6)
    vectors = vectors_of(names)
    enough, too_few = ({name: "vector" for name in names[left:]} for left in (fewest, fewest - 1))
    assert parties_of(6, threshold=threshold).sum(vectors, enough) == integer_sum(vectors, names[:fewest])
    with pytest.raises(QuorumError, match=f"at least {fewest} must"):
        parties_of(6, threshold=threshold).sum(vectors, too_few)


def test_more_clients_than_the_ring_has_headroom_for_are_refused() -> None:
    with pytest.raises(RangeError, match="uint64 masks"):  # as float64, of totals
        PairwiseMasking(codec=FixedPoint(20, 2.0**32), modulus_bits=64)
    with pytest.raises(RangeError, match="uint32 masks"):
        PairwiseMasking(FixedPoint(30, 2.0), modulus_bits=32)
    parties = parties_of(2, modulus_bits=32)
    for each in (parties.server, parties.clients["c0"]):
        with pytest.raises(RangeError, match="sum of 64 clients can reach 2147483648"):
            each.open_round(RoundId(0, "update", 0), names_of(64))
    majority(modulus_bits=32).check_round(63)
    with pytest.raises(RangeError, match="uint64 masks"):
        majority(codec=FixedPoint(20, 2.0**27)).check_round(65)


@pytest.mark.parametrize(("number", "size"), [(2, 4), (63, 4), (64, 8), (250, 8)])
def test_the_ring_follows_from_the_number_of_clients(number: int, size: int) -> None:
    backend = majority()
    assert backend.ring(number) == 8 * size
    assert backend.describe_round(number).bytes_per_number == size
    if number > 64:  # a round of so many takes seconds
        return
    parties = parties_of(number)
    largest = {name: torch.tensor([32.0, -32.0, 0.5]) for name in parties.names}  # at the bound: 32 bits hold 63
    assert parties.sum(largest) == [number * 32 * 2**20, -number * 32 * 2**20, number * 2**19]
    parties.agree()
    short, long = (parties.clients["c0" if n == 1 else "c1"].protect(torch.zeros(n)) for n in (1, 11))
    assert len(long) - len(short) == 10 * size


@pytest.mark.slow
def test_three_hundred_clients_of_whom_some_vanish() -> None:
    parties = Parties(PairwiseMasking(), names_of(300))
    vectors = vectors_of(parties.names, 20)
    vanish = {f"c{index}": STAGES[index % 4 + 1] for index in range(0, 90, 5)}
    counted = [name for name in parties.names if vanish.get(name, "unmask") in COUNTED]
    assert parties.sum(vectors, vanish) == integer_sum(vectors, counted)


def test_a_vector_that_cannot_be_encoded_uses_up_no_mask() -> None:
    parties = parties_of(2)
    parties.agree()
    for bad in (torch.cat([torch.zeros(200_000), torch.tensor([torch.nan])]), torch.zeros(2, 2), torch.zeros(())):
        with pytest.raises(InputError):
            parties.clients["c0"].protect(bad)
    parties.server.aggregate(parties.protect())


# --- what is seen


def test_no_message_contains_a_vector_a_seed_or_a_private_key() -> None:
    recorder, secret = Recorder(), {}
    parties = parties_of(5)
    vectors = vectors_of(parties.names, 64)

    def spy(what: str, client: str, message: bytes) -> bytes:
        """Reads the clients' secrets once they exist."""
        opened = parties.clients[client]._round
        if what == "send shares" and opened is not None:
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

    parties.wire = spy
    parties.sum(vectors, {"c4": "vector"})
    assert len(secret) == 5 * 4 + 5 * 4 + 5 * 2
    for name, vector in vectors.items():
        secret[f"vector of {name}"] = vector.numpy().tobytes()[:16]
        secret[f"integers of {name}"] = FixedPoint().encode(vector).to(torch.int32).numpy().tobytes()[:16]
    assert {what for what, _, _ in recorder.carried} >= {
        *("receive shares", "vector", "ask confirm", "answer confirm", "ask unmask", "answer unmask")
    }
    for what, _, message in recorder.carried:
        assert not [name for name, value in secret.items() if value in message], what


def test_nothing_that_is_printed_shows_a_key() -> None:
    parties = parties_of(2)
    parties.agree()
    client = parties.clients["c0"]
    assert client._round is not None
    shown = repr([client, client._round, client._identity, client._round.agreed, parties.server, parties.server._round])
    assert client._round.keys.private_bytes().hex() not in shown
    assert repr(client._round.seed) not in shown
    assert "mask_keys" not in shown


# --- attacks: keys


LOW_ORDER = [
    # RFC 7748's curve has a subgroup of order 8: the coordinates of its points, and their other encodings
    bytes(32),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    (2**255 - 19).to_bytes(32, "little"),
]


def newcomer(parties: Parties, name: str = "c0") -> tuple[Any, dict[str, bytes]]:
    """A client with another identity than the enrolled one of its name, and the directory with it."""
    client = parties.backend.client(name)
    client.enrol(parties.names)
    return client, parties.directory() | {party(name): client.send("identities")}


@pytest.mark.parametrize("key", LOW_ORDER)
def test_low_order_keys_are_refused_by_the_server_and_by_clients(key: bytes) -> None:
    def wire(what: str, client: str, message: bytes) -> bytes:
        return key if (what, client) == ("send identities", "c1") else message

    with pytest.raises(KeyCheckError, match="low order"):
        parties_of(3, wire)
    parties = parties_of(3)
    client, directory = newcomer(parties)
    with pytest.raises(KeyCheckError, match="low order"):
        client.receive("identities", pack_fields(directory | {party("c1"): key}))
    sent, keys = parties.round_keys()
    with pytest.raises(KeyCheckError, match="low order"):
        parties.server.relay("keys", sent | {"c1": parties.forge("keys", "c1", parties.opening(), key)})
    with pytest.raises(KeyCheckError, match="low order"):
        parties.tell_keys("c0", {**keys, "c1": key})


def other_encoding(key: bytes) -> bytes:
    """The same point: X25519 ignores the highest bit."""
    return key[:-1] + bytes([key[-1] ^ 0x80])


@pytest.mark.parametrize(
    ("changed", "key", "message"),
    [
        ("client c0", lambda keys: KeyPair().public, "is not the one"),
        ("server", lambda keys: KeyPair().public, "is not the one"),
        ("client c2", lambda keys: None, "but the roster is"),
        ("client x", lambda keys: KeyPair().public, "but the roster is"),
        ("client c2", lambda keys: bytes(31), "must be of 32 bytes"),
        *(
            ("client c2", lambda keys, one=one, encode=encode: encode(keys[one]), "the same identity key")
            for one in ("client c0", "client c1", "server")
            for encode in (bytes, other_encoding)
        ),
    ],
)
def test_a_client_refuses_a_directory_of_changed_missing_or_repeated_keys(
    changed: str, key: Callable[[Mapping[str, bytes]], bytes | None], message: str
) -> None:
    parties = parties_of(3)
    client, directory = (
        (parties.clients["c0"], parties.directory()) if message == "is not the one" else newcomer(parties)
    )
    directory[changed] = key(directory)  # type: ignore[assignment]
    with pytest.raises(KeyCheckError, match=message):
        client.receive("identities", pack_fields({name: each for name, each in directory.items() if each is not None}))


def test_the_server_refuses_an_identity_key_that_has_changed() -> None:
    parties = parties_of(3)
    parties.clients["c2"] = parties.backend.client("c2")
    with pytest.raises(KeyCheckError, match="'client c2'"):
        parties.enrol()


def test_enrolling_again_with_the_same_keys_and_more_clients_is_fine() -> None:
    parties = parties_of(3)
    parties.names = names_of(4)
    parties.clients["c3"] = parties.backend.client("c3")
    parties.enrol()
    vectors = vectors_of(parties.names)
    assert parties.sum(vectors) == integer_sum(vectors)


def test_a_client_with_the_name_of_another_and_another_identity_is_found_out() -> None:
    parties = parties_of(3)
    false, directory = newcomer(parties, "c1")
    false._identity.pin(directory)
    parties.open()
    false.open_round(RoundId(0, "update", 0), parties.names)
    sent = {name: client.send("keys") for name, client in (parties.clients | {"c1": false}).items()}
    with pytest.raises(AuthenticationError):
        parties.server.relay("keys", sent)


def test_a_swapped_round_key_is_found_before_anything_is_masked() -> None:
    """The server gives c0 a key of its own as that of c1: what c1 encrypts for c0 is bound to other keys."""
    parties = parties_of(3)
    sent, keys = parties.round_keys()
    relayed = parties.server.relay("keys", sent)
    parties.tell_keys("c0", {**keys, "c1": KeyPair().public})
    for name in ("c1", "c2"):
        parties.clients[name].receive("keys", relayed[name])
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


def with_terms(parties: Parties, terms: Mapping[str, Terms]) -> None:
    """Open a round in which each client has received these terms."""
    parties.open()
    for name, client in parties.clients.items():
        client.open_round(RoundId(parties.rounds, "update", parties.rounds, terms[name]), list(parties.names))
    server_round = RoundId(parties.rounds, "update", parties.rounds, next(iter(terms.values())))
    parties.server.open_round(server_round, list(parties.names))


VIEWS = {"c0": 10**12, "c1": 10**12, "c2": 10}  # of the samples that c2 has: the others are to weigh next to nothing


def test_terms_that_differ_are_named_before_anything_is_masked() -> None:
    parties = parties_of(3)
    with_terms(parties, {name: Terms({"the roster": [*VIEWS], "the weights": n}) for name, n in VIEWS.items()})
    with pytest.raises(TermsError, match="they differ in the weights"):
        parties.step("keys")
    with pytest.raises(ReplayError):
        parties.clients["c2"].protect(torch.zeros(2))


def test_a_server_that_hides_that_terms_differ_is_found_out_by_the_clients() -> None:
    """It relays keys as if all had sent the same terms: each client finds others in its peers' encrypted shares."""
    parties = parties_of(3)
    with_terms(parties, {name: Terms({"the weights": n}) for name, n in VIEWS.items()})
    sent = {name: client.send("keys") for name, client in parties.clients.items()}
    for name in parties.names:
        parties.tell_keys(name, {peer: message[TAG_BYTES:][:KEY_BYTES] for peer, message in sent.items()})
    deals = {name: unpack_fields(client.send("shares")[TAG_BYTES:]) for name, client in parties.clients.items()}
    for victim, client in parties.clients.items():
        body = pack_fields({owner: deal.get(party(victim), b"") for owner, deal in deals.items()})
        message = parties.tell("shares", victim, agreed_by(client).digest, body)
        with pytest.raises(TermsError, match="the weights"):
            client.receive("shares", message)
        with pytest.raises(ReplayError):
            client.protect(torch.zeros(2))


def test_masks_of_clients_with_different_terms_do_not_cancel() -> None:
    """Even if clients did not compare terms: pairs derive other masks, of which the sum is left."""
    parties = parties_of(2)
    keys = {name: KeyPair() for name in parties.names}
    publics = {name: pair.public for name, pair in keys.items()}
    rounds = {
        name: parties.backend.agree(b"", list(parties.names), parties.clients[name]._identity, publics, terms.digest)
        for name, terms in (("c0", Terms({"the weights": 1})), ("c1", Terms({"the weights": 2})))
    }
    ours, theirs = rounds["c0"].mask_key(keys["c0"], "c0", "c1"), rounds["c1"].mask_key(keys["c1"], "c1", "c0")
    assert ours != theirs
    assert rounds["c0"].mask_key(keys["c1"], "c1", "c0") == ours  # with equal terms they are the same


def test_clients_that_received_different_rosters_cannot_open_each_others_shares() -> None:
    parties = parties_of(5)
    _, keys = parties.round_keys()
    for name, number in {"c0": 3, "c1": 4}.items():
        parties.tell_keys(name, {peer: keys[peer] for peer in names_of(number)})
    deal = unpack_fields(parties.clients["c1"].send("shares")[28:])
    body = pack_fields({"c0": b"", "c1": deal[party("c0")], "c2": b""})
    about = agreed_by(parties.clients["c0"]).digest
    with pytest.raises(AuthenticationError, match="does not open"):
        parties.clients["c0"].receive("shares", parties.tell("shares", "c0", about, body))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"c2": None, "c3": None}, QuorumError),
        ({"x": KeyPair().public}, AuthenticationError),
        ({"c2": "c1"}, KeyCheckError),
        ({"c0": KeyPair().public}, KeyCheckError),
        ({"c0": None}, KeyCheckError),
        ({"c2": bytes(31)}, KeyCheckError),
    ],
    ids=["half", "stranger", "copy", "own", "left out", "short"],
)
def test_round_keys_other_than_of_a_majority_of_the_round_are_refused(
    change: dict[str, Any], error: type[PrivacyError]
) -> None:
    parties = parties_of(4)
    _, keys = parties.round_keys()
    changed = {name: keys.get(key, key) for name, key in (keys | change).items() if key is not None}
    with pytest.raises(error):
        parties.tell_keys("c0", changed)
    assert parties.clients["c0"].send("shares") == b""


@pytest.mark.parametrize("other", [{"codec": FixedPoint(19)}, {"modulus_bits": 64}, {"threshold": 0.8}])
def test_parties_with_other_settings_do_not_understand_each_other(other: dict[str, Any]) -> None:
    parties = parties_of(5)
    parties.clients["c1"]._backend = majority(**other)
    with pytest.raises(AuthenticationError):
        parties.agree()


# --- attacks: survivors


def protected(number: int = 5) -> tuple[Parties, MaskedRound]:
    parties = parties_of(number)
    agreed = parties.agree()
    parties.server.aggregate(parties.protect())
    return parties, agreed


@pytest.mark.parametrize(
    ("fates", "error"),
    [
        ({"c0": "dropped"}, AuthenticationError),
        ({"c1": "dropped", "c2": "dropped", "c3": "dropped"}, QuorumError),
        ({"c1": None}, DecodeError),
        ({"x": "survived"}, DecodeError),
        ({"c1": "both"}, DecodeError),
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
    body = question({"c0": "survived", "c1": "survived", "c2": "dropped", "cX": "survived"}).replace(b"cX", b"c2")
    with pytest.raises(DecodeError, match="'c2' comes twice"):
        parties.clients["c0"].answer("confirm", parties.tell("survivors", "c0", agreed.digest, body))


def test_shares_need_confirmations_of_a_threshold_of_clients() -> None:
    parties, agreed = protected(7)
    tags = {name: parties.confirm(name, fates_of(parties.names, ["c6"])) for name in parties.names[:6]}
    to_c0 = addressed_to("c0", tags)
    assert agreed.threshold == 4
    for few in ([], ["c1"], ["c1", "c2"]):
        with pytest.raises(QuorumError, match=rf"only {1 + len(few)} clients confirm"):
            parties.unmask("c0", {name: to_c0[name] for name in few})
    # it was asked in vain, and may be asked again, but about the same list only
    assert set(parties.unmask("c0", {name: to_c0[name] for name in ("c1", "c2", "c3")})) == set(parties.names)


Answers = dict[str, dict[str, bytes]]


@pytest.mark.parametrize(
    "forge",
    [
        lambda tags, last: tags["c1"]["c0"][:-1] + bytes([tags["c1"]["c0"][-1] ^ 1]),
        lambda tags, last: b"",
        lambda tags, last: tags["c1"]["c0"] * 1000,
        lambda tags, last: tags["c1"]["c2"],  # made for somebody else
        lambda tags, last: tags["c2"]["c0"],  # made by somebody else
        lambda tags, last: tags["c0"]["c1"],  # made by the receiver, sent back along the same link
        lambda tags, last: last["c1"]["c0"],  # of another round
    ],
)
def test_a_wrong_tag_counts_as_none(forge: Callable[[Answers, Answers], bytes]) -> None:
    parties, _ = protected(4)
    last = {name: parties.confirm(name, fates_of(parties.names)) for name in parties.names}
    parties.agree()
    parties.protect()
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
    wrong = pack_fields({name: bytes(28) for name in ("c0", "c1", "c2")})
    answers = parties.confirmations() | {"c3": parties.forge("tags", "c3", agreed.digest, wrong)}
    assert parties.server.conclude(unmasked(parties, parties.server.ask("unmask", answers))).tolist() == [0, 0]


def with_keys(names: Sequence[str], neighbours: int | None = None) -> Parties:
    parties = Parties(majority(neighbours=neighbours), names)
    parties.open()
    parties.step("keys")
    return parties


def test_a_server_that_reports_something_else_to_everybody_reads_no_vector() -> None:
    # Without confirmations this gave it the vector of c4, masked with c2 and c3 only: three shares of each one's key.
    names = names_of(5)
    lying = Lies(with_keys(names), dict.fromkeys(names, names) | {"c4": ["c2", "c3", "c4"]})
    assert lying.masked_with["c4"] == {"c2", "c3"}
    lying.ask({"c0": ["c2", "c3"], "c1": ["c2", "c3"], "c2": ["c1", "c3"], "c3": ["c1", "c2"], "c4": []})
    assert lying.released == []
    # nor is there another view on which anybody would act
    for name in names[:4]:
        with pytest.raises(ReplayError):
            lying.parties.confirm(name, fates_of(names))


@pytest.mark.parametrize("number", [3, 4, 5])
def test_different_survivor_lists_never_give_both_secrets_of_one_client(number: int) -> None:
    names = names_of(number)
    threshold, target = number // 2 + 1, names[-1]
    for misled in itertools.product([True, False], repeat=number - 1):
        lying = Lies(with_keys(names), dict.fromkeys(names, names))
        lying.ask({name: [target] if gone else [] for name, gone in zip(names, (*misled, False), strict=True)})
        of_key, of_seed = lying.keys.get(target, set()), lying.seeds.get(target, set())
        assert not (of_key and of_seed)
        assert len(of_key) == (sum(misled) if sum(misled) >= threshold else 0)
        assert len(of_seed) == (number - sum(misled) if number - sum(misled) >= threshold else 0)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_a_lying_server_reports_it_reads_the_sum_of_all_survivors_at_most(data: st.DataObject) -> None:
    names = names_of(data.draw(st.integers(3, 6)))
    threshold = len(names) // 2 + 1

    def a_few(of: Sequence[str], at_most: int) -> list[str]:
        return data.draw(st.lists(st.sampled_from(of), max_size=at_most, unique=True)) if of and at_most else []

    # a majority receives the same, lest nothing at all be released; the others whatever it takes
    honest = data.draw(st.integers(threshold, len(names)))
    out = a_few(names[honest:], len(names) - threshold)
    common = [name for name in names if name not in out]
    gone = a_few(common[threshold:], len(common) - threshold)
    shared, dropped = dict.fromkeys(names, common), dict.fromkeys(names, gone)
    for name in names[honest:]:
        missing = a_few([other for other in names if other != name], len(names) - threshold)
        shared[name] = [other for other in names if other not in missing]
        dropped[name] = a_few(shared[name], len(shared[name]) - threshold)
    lying = Lies(with_keys(names), shared)
    lying.ask(dropped)
    assert len({(tuple(shared[name]), frozenset(dropped[name])) for name in lying.released}) <= 1
    assert lying.readable(threshold) in ([], [{name for name in common if name not in gone}])


@pytest.mark.parametrize("number", [4, 6, 9, 20])
def test_a_lying_server_and_the_colluders_that_a_round_bears_read_no_vector(number: int) -> None:
    backend, names = PairwiseMasking(), names_of(number)
    borne = backend.colluders_borne(number)
    assert borne >= max(1, number // 3 - 1)
    lying = collude(backend, names, borne)
    assert all(len(group - set(names[:borne])) >= 2 for group in lying.readable(backend.shares_needed(number)))
    halves = {name in names[borne : borne + (number - borne) // 2] for name in lying.released}
    assert len(halves) <= 1, "clients act on one view at most"


@pytest.mark.parametrize(("number", "threshold"), [(3, 0.51), (19, 0.51), (9, 0.67)])
def test_beyond_what_a_round_bears_every_vector_is_read(number: int, threshold: float) -> None:
    """So that the test above can fail: with 2q - n colluders two views are confirmed, and no mask stays."""
    backend = PairwiseMasking(threshold=threshold, colluders=0)
    two_views = 2 * backend.confirmations_needed(number) - number
    lying = collude(backend, names_of(number), two_views)
    honest = names_of(number)[two_views:]
    assert sorted(lying.released) == sorted(honest)
    readable = lying.readable(backend.shares_needed(number))
    assert all({name} in readable for name in honest)


@pytest.mark.parametrize(
    ("number", "borne"), [(2, 0), (3, 1), (4, 1), (5, 2), (6, 3), (7, 2), (8, 3), (9, 4), (10, 3), (20, 7)]
)
def test_colluders_borne_by_hand(number: int, borne: int) -> None:
    """q is the first number above 2n/3: min(2q - n - 1, q - 2)."""
    assert PairwiseMasking(colluders=0).colluders_borne(number) == borne


def test_rounds_that_bear_too_few_colluders_are_refused_unless_asked_for_by_name() -> None:
    for refusing, number in (
        (PairwiseMasking(), 2),
        (PairwiseMasking(threshold=0.51), 5),
        (PairwiseMasking(colluders=3), 7),
    ):
        with pytest.raises(QuorumError, match="may collude"):
            refusing.check_round(number)
    PairwiseMasking(threshold=0.51, colluders=0).check_round(5)
    PairwiseMasking(threshold=0.7).check_round(5)
    assert PairwiseMasking(colluders=3).min_clients == 6
    assert "of 5 clients, 2 may collude with it" in PairwiseMasking().describe_round(5).collusion


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("threshold", value) for value in ("0.9", [0.7], True)),
        *(("neighbours", value) for value in (2.5, "3", True)),
        *(("colluders", value) for value in (1.5, "1", None)),
    ],
)
def test_arguments_of_another_type_are_refused(argument: str, value: Any) -> None:
    with refused(argument):
        PairwiseMasking(**{argument: value})


@pytest.mark.parametrize("kind", [BFV, CKKS, Paillier, ThresholdPaillier])
@pytest.mark.parametrize("number", [2.5, "64", True, None])
def test_numbers_of_clients_that_are_none_are_refused(kind: Any, number: Any) -> None:
    with refused("max_clients"):
        kind(max_clients=number)
    with refused("fraction_bits"):
        FixedPoint(True)


@pytest.mark.parametrize("vanished", ["c3", None])
def test_a_client_that_sends_a_wrong_share_is_found_out(vanished: str | None) -> None:
    parties = parties_of(4)
    parties.agree()
    messages = parties.protect()
    parties.server.aggregate({name: message for name, message in messages.items() if name != vanished})
    opened, victim = parties.clients["c0"]._round, vanished or "c1"
    assert opened is not None
    opened.shares[victim] = bytes(32) + b"\x01", bytes(32) + b"\x01"
    answers = parties.close()
    with pytest.raises(AuthenticationError, match=f"of client '{victim}' do not fit"):
        parties.server.conclude(answers)


# --- attacks: replays, strangers, changed messages


def test_a_vector_that_comes_twice_is_refused() -> None:
    parties = parties_of(3)
    parties.agree()
    messages = parties.protect()
    parties.server.add("c0", messages["c0"])
    with pytest.raises(ReplayError, match="already"):
        parties.server.add("c0", messages["c0"])


@pytest.mark.parametrize(
    "what",
    [
        *(f"{direction} {step}" for step in ("keys", "shares") for direction in ("send", "receive")),
        *(f"{direction} {step}" for step in ("confirm", "unmask") for direction in ("ask", "answer")),
    ],
)
def test_messages_of_the_last_round_are_refused_in_this_one(what: str) -> None:
    recorder = Recorder()
    parties = parties_of(3, recorder)
    vectors = vectors_of(parties.names)
    parties.sum(vectors)
    last = {step: message for step, client, message in recorder.carried if client == "c1"}
    parties.wire = lambda step, client, message: last[what] if (step, client) == (what, "c1") else message
    with pytest.raises(AuthenticationError):
        parties.sum(vectors)


def test_parties_enrol_before_they_open_a_round_and_open_it_with_themselves() -> None:
    parties, names, round_id = parties_of(3), names_of(2), RoundId(0, "update", 0)
    for wrong in (
        lambda: parties.clients["c0"].enrol(["x", "y"]),
        lambda: parties.backend.client("c0").open_round(round_id, names),
        lambda: parties.backend.server().open_round(round_id, names),
        lambda: parties.clients["c2"].open_round(round_id, names),
    ):
        with pytest.raises(KeyCheckError, match=r"not in|run the enrolment steps first"):
            wrong()


def test_each_step_is_taken_once_and_in_order() -> None:
    recorder = Recorder()
    parties = parties_of(3, recorder)
    client, server = parties.clients["c0"], parties.server
    at_client: dict[str, Callable[[], Any]] = {
        "keys": lambda: client.receive("keys", b"x"),
        "shares": lambda: client.receive("shares", b"x"),
        "vector": lambda: client.protect(torch.zeros(2)),
        "confirm": lambda: client.answer("confirm", b""),
        "unmask": lambda: client.answer("unmask", b""),
    }
    at_server: dict[str, Callable[[], Any]] = {
        "keys": lambda: server.relay("keys", {"c0": b"x"}),
        "shares": lambda: server.relay("shares", {"c0": b"x"}),
        "vectors": lambda: server.aggregate({}),
        "answers": lambda: server.conclude({}),
    }

    def check(client_due: str | None, server_due: str | None) -> None:
        for calls, due in ((at_client, client_due), (at_server, server_due)):
            for call in (call for step, call in calls.items() if step != due):
                with pytest.raises(ReplayError):
                    call()

    check(None, None)
    parties.open()
    check("keys", "keys")
    parties.step("keys")
    check("shares", "shares")
    parties.step("shares")
    check("vector", "vectors")
    messages = parties.protect()
    check("confirm", "vectors")
    server.aggregate(messages)
    check("confirm", "answers")
    confirmed = parties.confirmations()
    check("unmask", "answers")
    answers = unmasked(parties, server.ask("unmask", confirmed))
    check(None, "answers")
    server.conclude(answers)
    check(None, None)


def test_strangers_are_refused() -> None:
    parties = parties_of(3)
    with pytest.raises(QuorumError, match="did not enrol"):
        parties.server.relay("identities", {"c0": KeyPair().public})
    parties.open()
    with pytest.raises(AuthenticationError, match="'x'"):
        parties.server.relay("keys", {"x": b"?"})
    parties.agree()
    messages = parties.protect()
    with pytest.raises(AuthenticationError, match="'x'"):
        parties.server.aggregate({**messages, "x": messages["c0"]})
    with pytest.raises(AuthenticationError):  # one client's vector under another's name
        parties.server.aggregate({**messages, "c1": messages["c0"]})
    parties.server.aggregate({name: messages[name] for name in ("c0", "c1")})
    answers = parties.confirmations()
    with pytest.raises(AuthenticationError, match=r"\['c2'\] cannot send tags"):
        parties.server.ask("unmask", {**answers, "c2": b"x"})
    with pytest.raises(AuthenticationError):  # one client's confirmations under another's name
        parties.server.ask("unmask", {**answers, "c1": answers["c0"]})
    parties.server.ask("unmask", answers)
    with pytest.raises(AuthenticationError, match="without being asked"):
        parties.server.conclude({"c2": b"x"})


@pytest.mark.parametrize(
    "damage",
    [
        lambda message: message[:-1],
        lambda message: message.view(torch.int32),
        lambda message: message.reshape(1, -1),
        lambda message: message.float(),
        lambda message: torch.cat([message[:64], torch.full((8,), 255, dtype=torch.uint8), message[72:]]),
    ],
)
def test_a_vector_of_hostile_size_is_refused_and_an_honest_one_then_taken(damage: Callable[[Tensor], Tensor]) -> None:
    parties = parties_of(2)
    parties.agree()
    messages = parties.protect()
    with pytest.raises(DecodeError):
        parties.server.aggregate({**messages, "c1": damage(messages["c1"])})
    parties.server.aggregate(messages)


def test_messages_need_not_be_aligned_or_contiguous() -> None:
    parties = parties_of(2, modulus_bits=64)
    parties.agree()
    vectors = vectors_of(parties.names, 1000)
    messages = parties.protect(vectors)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), messages["c0"]])[1:]
    parties.server.aggregate({"c0": shifted, "c1": messages["c1"].repeat_interleave(2)[::2]})
    assert parties.server.conclude(parties.close()).tolist() == integer_sum(vectors)


VECTORS = vectors_of(names_of(4), 3)
ALL_MESSAGES = 4 * (3 * 2 + 1 + 2 * 2) - 5
"""Each client: three steps both ways, a vector, and two steps with a question and an answer; c3 drops out of five."""


class Damage:
    """A wire that changes one message, chosen by its number."""

    def __init__(self, index: int, change: Callable[[bytes], bytes]) -> None:
        self.index, self.change, self.seen = index, change, 0

    def __call__(self, what: str, client: str, message: bytes) -> bytes:
        self.seen += 1
        return self.change(message) if self.seen == self.index + 1 else message


def outcome(wire: Wire) -> list[int] | None:
    """Sum of the first three of four clients, the last of which vanishes before its vector; None if refused."""
    try:
        return parties_of(4, wire).sum(VECTORS, {"c3": "vector"})
    except PrivacyError:
        return None


def test_the_messages_counted_here_are_all() -> None:
    wire = Damage(-1, bytes)
    assert outcome(wire) == integer_sum(VECTORS, ["c0", "c1", "c2"])
    assert wire.seen == ALL_MESSAGES


@settings(max_examples=50, deadline=None)
@given(st.integers(0, ALL_MESSAGES - 1), st.floats(0, 1, exclude_max=True))
def test_one_flipped_bit_anywhere_never_gives_a_wrong_sum(index: int, where: float) -> None:
    def flip(message: bytes) -> bytes:
        bit = int(where * 8 * len(message))
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    assert outcome(Damage(index, flip)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda message: b"x",
        lambda message: message + message,
        lambda message: b"\xff" * 100_000,
        lambda message: message[:28] + b"\xff" * 4 + message[32:],  # a count of four billion fields
    ],
)
def test_messages_of_hostile_size_are_refused_wherever_they_come(change: Callable[[bytes], bytes]) -> None:
    for index in range(ALL_MESSAGES):
        assert outcome(Damage(index, change)) is None, index


def test_empty_messages_are_as_good_as_vanished_clients() -> None:
    right = {tuple(integer_sum(VECTORS, names)) for names in itertools.combinations(names_of(4), 3)}
    for index in range(ALL_MESSAGES):
        total = outcome(Damage(index, lambda message: b""))
        assert total is None or tuple(total) in right, index


def test_fields_of_hostile_size_under_valid_tags_are_refused() -> None:
    parties = parties_of(3)
    agreed = parties.agree()
    messages = parties.protect()
    hostile = [b"", b"\xff" * 4, b"\xff" * 1000]
    for body in (*hostile, bytes(4), bytes(1000)):
        with pytest.raises(DecodeError):
            parties.clients["c0"].answer("confirm", parties.tell("survivors", "c0", agreed.digest, body))
    parties.server.aggregate({name: messages[name] for name in ("c1", "c2")})
    answers = parties.confirmations()
    for body in (*hostile, pack_fields({}), pack_fields({"c2": bytes(27)})):
        with pytest.raises(DecodeError):
            parties.server.ask("unmask", {**answers, "c1": parties.forge("tags", "c1", agreed.digest, body)})
    parties.server.ask("unmask", answers)
    for body in (*hostile, bytes(1000)):
        with pytest.raises(DecodeError):
            parties.clients["c1"].answer("unmask", parties.tell("tags", "c1", agreed.digest, body))
    link = parties.clients["c1"]._identity.link("server")
    for body in (*hostile, pack_fields({}), pack_fields({"c0": b"", "c1": b"", "c2": b""})):
        with pytest.raises(PrivacyError):
            parties.server.conclude({"c1": link.seal(body, binding("unmask", party("c1"), agreed.digest))})


# --- the graph


@pytest.mark.parametrize(("number", "degree"), [(21, 3), (21, 14), (40, 6)])
def test_each_client_draws_its_neighbours_and_others_in_each_round(number: int, degree: int) -> None:
    parties = parties_of(number, neighbours=degree)
    names = parties.names

    def graph() -> dict[str, tuple[str, ...]]:
        parties.open()
        parties.step("keys")
        agreed = agreed_by(parties.clients["c0"])
        for name in names:
            *drawn, last = agreed.holders(name)
            assert last == name
            assert len(set(drawn) - {name}) == degree
            assert agreed.owners(name) == (*[peer for peer in names if name in agreed.holders(peer)[:-1]], name)
            assert {*drawn, *agreed.owners(name)} - {name} == {*agreed.neighbours(name)}
        return {name: agreed.neighbours(name) for name in names}

    first = graph()
    assert graph() != first
    parties.rounds -= 1  # opened again, with other keys
    assert graph() != first
    parties.rounds = 0
    assert graph() == first, "a round that is repeated has the graph it had"


def test_draws_are_uniform() -> None:
    """Each of 8 clients is drawn by the first with probability 3 / 7: 7 counts, chi-square at 1e-9."""
    names, degree, number = names_of(8), 3, 7000
    drawn = [
        drawn_in(draw(bytes(32), digest("round", i), names, "c0", degree), names, "c0", degree) for i in range(number)
    ]
    counts = [sum(name in one for one in drawn) for name in names]
    assert counts[0] == 0
    # counts are of draws without replacement: their covariance is n p (1 - p) 7 / 6 (I - 1 / 7)
    expected, p = number * degree / 7, degree / 7
    statistic = sum((count - expected) ** 2 for count in counts[1:]) / (number * p * (1 - p) * 7 / 6)
    assert statistic < stats.chi2(6).isf(1e-9)


@pytest.mark.parametrize("change", [lambda bits: bits ^ 1, lambda bits: bits | 1 << 5, lambda bits: bits | 1 << 23])
def test_draws_of_other_numbers_of_oneself_or_of_nobody_are_refused(change: Callable[[int], int]) -> None:
    names = names_of(21)
    announced = draw(bytes(32), bytes(32), names, "c5", 4)
    assert len(drawn_in(announced, names, "c5", 4)) == 4
    wrong = change(int.from_bytes(announced, "little")).to_bytes(3, "little")
    for each in (wrong, announced[:2], b""):
        with pytest.raises(DecodeError, match="c5"):
            drawn_in(each, names, "c5", 4)


def test_rounds_of_up_to_20_clients_are_complete() -> None:
    assert [default_degree(few) for few in (2, 3, 20)] == [1, 2, 19]
    assert [draw(bytes(32), b"", names_of(few), "c0", few - 1) for few in (2, 20)] == [b"", b""]


def bound_by_scipy(n: int, k: int, t: int, q: int, c: int) -> float:
    """The formula of `log2_failure`, with draws of three types as scipy's multivariate hypergeometric distribution."""
    h = n - c
    total = h * float(stats.hypergeom(n - 1, c, k).sf(t - 1))

    def of_draws(free: int, dropped: int) -> float:
        types = [free, dropped, n - 1 - free - dropped]
        few = range(min(k + 1 - t, dropped, k) + 1)
        return sum(float(stats.multivariate_hypergeom.pmf([k - j, j, 0], types, k)) for j in few if k - j <= free)

    for s in range(1, h // 2 + 1):
        one = math.comb(h, s) * float(stats.hypergeom(n - 1, c + s - 1, k).sf(t - 2)) ** s
        larger = 0.0
        for d in range(n - q + 1):
            r = h - s - d
            if r >= s:
                both = math.comb(h, s) * math.comb(h - s, d) * of_draws(c + s - 1, d) ** s * of_draws(c + r - 1, d) ** r
                total += both if both < one else 0
                larger = larger if both < one else one
        total += larger
    return min(0.0, math.log2(total))


@pytest.mark.parametrize("size", [(21, 6, 5, 15, 3), (21, 12, 9, 15, 8), (30, 12, 9, 21, 6), (24, 4, 3, 13, 0)])
def test_the_bound_is_the_formula_with_scipys_distributions(size: tuple[int, int, int, int, int]) -> None:
    assert log2_failure(*size) == pytest.approx(bound_by_scipy(*size), rel=1e-9, abs=1e-12)


def test_graphs_that_can_be_cut_are_no_more_than_the_bound_says() -> None:
    """Each of 400 graphs of ten clients, two of which collude, with every choice of clients to drop: 14 percent."""
    n, k, t, q, c = 10, 3, 3, 7, 2
    generator = np.random.default_rng(0)
    cut = 0
    for _ in range(400):
        graph = drawn(generator, n, k, t, q, c)
        held = graph.holders[c:, :c].sum(axis=1).max() >= t
        parts = np.array([[False] * c + list(bits) for bits in itertools.product([False, True], repeat=n - c)][1:-1])
        cut += held or bool((graph.excess(parts) == 0).any())
    bound = 2 ** log2_failure(n, k, t, q, c)
    assert cut > 0
    # by chance, were the probability the bound: 1e-9
    assert cut <= stats.binom(400, bound).isf(1e-9)


@pytest.mark.parametrize("number", [21, 30, 50])
def test_degrees_are_the_smallest_that_suffice(number: int) -> None:
    """Against a fifth of the clients; without a tenth, too few holders of shares stay with a probability of 2^-20."""
    colluding, dropping, quorum = math.ceil(number / 5), math.ceil(number / 10), 2 * number // 3 + 1

    def is_safe(degree: int) -> bool:
        threshold = 2 * (degree + 1) // 3 + 1
        stranded = number * float(stats.hypergeom(number - 1, dropping, degree).sf(degree - threshold))
        return stranded <= 2.0**-20 and bound_by_scipy(number, degree, threshold, quorum, colluding) <= -40

    degree = default_degree(number)
    assert is_safe(degree)
    assert not any(is_safe(fewer) for fewer in range(2, degree))


@pytest.mark.parametrize("number", [21, 25, 100])
def test_a_sparse_round_bears_a_fifth_of_its_clients_or_as_many_as_asked_for(number: int) -> None:
    backend, fifth = PairwiseMasking(modulus_bits=64), math.ceil(number / 5)
    quorum = 2 * number // 3 + 1
    borne = backend.colluders_borne(number)
    assert fifth <= borne <= 2 * quorum - number - 1
    assert backend.log2_failure(number, borne) <= -40 < backend.log2_failure(number, borne + 1)
    most = PairwiseMasking(modulus_bits=64, colluders=2 * quorum - number - 1)
    most.check_round(number)
    assert backend.degree(number) <= most.degree(number) < number - 1
    with pytest.raises(QuorumError, match="may collude"):
        PairwiseMasking(modulus_bits=64, neighbours=backend.degree(number), colluders=borne + 1).check_round(number)


def test_the_report_of_a_sparse_round_has_the_probability() -> None:
    text = PairwiseMasking().describe_round(40).collusion
    assert text.startswith(
        "of 40 clients, 9 may collude with it, but for a probability of 2^-47 a round over the 15 neighbours"
    )
    assert "probability" not in PairwiseMasking().describe_round(20).collusion


def test_clients_of_a_sparse_graph_deal_shares_to_those_that_they_drew_only() -> None:
    recorder = Recorder()
    parties = parties_of(24, recorder, neighbours=4)
    agreed = parties.agree()
    deals = {client: unpack_fields(message[28:]) for what, client, message in recorder.carried if what == "send shares"}
    sizes = set()
    for name, deal in deals.items():
        assert set(deal) == {"commitment", *map(party, agreed.neighbours(name))}
        sizes |= {(len(deal[party(peer)]), peer in agreed.holders(name)) for peer in agreed.neighbours(name)}
    assert len(sizes) == 2
    assert max(sizes)[0] - min(sizes)[0] == 66
    for client in parties.clients.values():
        assert agreed_by(client).neighbours("c7") == agreed.neighbours("c7")


@pytest.mark.parametrize("modulus_bits", [32, 64])
@pytest.mark.parametrize("length", [5, 40_000])
def test_tags_that_are_made_while_masking_are_those_of_the_vector(modulus_bits: int, length: int) -> None:
    """Chunks of the masks have other lengths than blocks of the tags."""
    parties = parties_of(3, modulus_bits=modulus_bits)
    codec, vectors = parties.backend.codec, vectors_of(parties.names, length)
    tags = Tags(bytes(32), b"a sum", codec, 3)
    for client in parties.clients.values():
        client._tags = tags
    total = parties.sum(vectors)
    expected = [codec.encode(tags.append(vector, name)) for name, vector in vectors.items()]
    assert total == torch.stack(expected).sum(dim=0).tolist()
    tags.check(codec.decode(torch.tensor(total)), parties.names)
