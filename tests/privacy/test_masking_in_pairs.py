"""Masked rounds that no client may leave: pairs of masks alone, four messages a client, and as little to read."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fedlit.privacy import (
    AuthenticationError,
    DecodeError,
    KeyCheckError,
    PairwiseMasking,
    PrivacyError,
    QuorumError,
    ReplayError,
    RoundId,
    Terms,
    TermsError,
)
from fedlit.privacy.links import KEY_BYTES, TAG_BYTES, KeyPair, digest, pack_fields, unpack_fields
from fedlit.privacy.masking.round import Masks, binding, party
from masking_parties import (
    Parties,
    Recorder,
    Wire,
    agreed_by,
    fates_of,
    integer_sum,
    names_of,
    question,
    vectors_of,
)


def parties_of(number: int = 4, wire: Wire | None = None) -> Parties:
    backend = PairwiseMasking(threshold=1.0, colluders=0)
    return Parties(backend, names_of(number), *([] if wire is None else [wire]))


# --- sums


@pytest.mark.parametrize(
    ("number", "threshold", "bits"), [(2, None, 32), (3, None, 64), (4, 1.0, 32), (5, 5, 32), (20, 1.0, 64)]
)
def test_sums_are_those_of_integers(number: int, threshold: float | None, bits: int) -> None:
    backend = PairwiseMasking(threshold=threshold, modulus_bits=bits, colluders=0)
    assert not backend.recovers(number)
    parties = Parties(backend, names_of(number))
    for seed in (0, 1):  # a second round has other keys
        vectors = vectors_of(parties.names, 40_000, seed)
        assert parties.sum(vectors) == integer_sum(vectors)


@pytest.mark.parametrize(
    ("number", "threshold", "neighbours"),
    [(4, None, None), (3, 0.6, None), (5, 4, None), (21, 1.0, 8), (30, None, None)],
)
def test_clients_share_secrets_where_one_may_vanish_or_the_graph_is_sparse(
    number: int, threshold: float | None, neighbours: int | None
) -> None:
    backend = PairwiseMasking(threshold=threshold, neighbours=neighbours, colluders=0)
    assert backend.recovers(number)
    assert backend.steps(number) == (("keys", "shares"), ("confirm", "unmask"))


def test_a_round_has_three_messages_of_each_client_in_place_of_nine() -> None:
    """Beside the total. With shares: keys, shares, who survived and what unmasks, both ways, and the vector."""
    wire = Recorder()
    parties = parties_of(4, wire)
    wire.carried.clear()
    parties.sum(vectors_of(parties.names))
    assert [what for what, client, _ in wire.carried if client == "c2"] == ["send keys", "receive keys", "vector"]
    shared = Recorder()
    with_shares = Parties(PairwiseMasking(), names_of(4), shared)
    shared.carried.clear()
    with_shares.sum(vectors_of(with_shares.names))
    assert sum(client == "c2" for _, client, _ in shared.carried) == 9


@pytest.mark.parametrize("stage", ["keys", "vector"])
def test_a_client_that_vanishes_ends_the_round(stage: str) -> None:
    parties = parties_of(4)
    with pytest.raises(QuorumError, match="only 3 clients"):
        parties.sum(vectors_of(parties.names), {"c1": stage})
    if stage == "keys":
        with pytest.raises(ReplayError):
            parties.clients["c0"].protect(torch.zeros(3))


# --- what a server that lies can do


def relayed(parties: Parties, sent: Mapping[str, bytes], to: str, keys: Mapping[str, bytes] | None = None) -> bytes:
    """What a server relays to one client, from what all sent, with other round keys of some."""
    deals = {name: unpack_fields(message[TAG_BYTES + KEY_BYTES :]) for name, message in sent.items()}
    own = {name: message[TAG_BYTES:][:KEY_BYTES] for name, message in sent.items()} | dict(keys or {})
    fields = {name: own[name] + (b"" if name == to else deals[name][party(to)]) for name in deals}
    return parties.tell("keys", to, parties.opening(), pack_fields(fields))


def test_a_swapped_round_key_is_found_before_anything_is_masked() -> None:
    """The server gives c0 a key of its own as that of c1, to know the mask that the two share."""
    parties = parties_of()
    sent, _ = parties.round_keys()
    client = parties.clients["c0"]
    with pytest.raises(AuthenticationError, match="does not open"):
        client.receive("keys", relayed(parties, sent, "c0", {"c1": KeyPair().public}))
    with pytest.raises(ReplayError):
        client.protect(torch.zeros(3))
    client.receive("keys", relayed(parties, sent, "c0"))  # as an honest server relays it
    client.protect(torch.zeros(3))


def test_a_round_key_of_before_is_found_out_or_gives_masks_that_do_not_cancel() -> None:
    """The server repeats to c1 all that c0 sent when the same round was opened before."""
    parties = parties_of(3)
    before, _ = parties.round_keys()
    parties.rounds -= 1
    sent, _ = parties.round_keys()
    mixed = sent | {"c0": before["c0"]}
    for name in ("c1", "c2"):
        parties.clients[name].receive("keys", relayed(parties, mixed, name))
    with pytest.raises(KeyCheckError, match="another round key"):
        parties.clients["c0"].receive("keys", relayed(parties, mixed, "c0"))
    parties.clients["c0"].receive("keys", relayed(parties, sent, "c0"))
    digests = {name: agreed_by(client).digest for name, client in parties.clients.items()}
    assert digests["c0"] != digests["c1"] == digests["c2"]
    masks = {name: {*client._round.mask_keys.values()} for name, client in parties.clients.items() if client._round}
    assert not masks["c0"] & (masks["c1"] | masks["c2"])
    assert len(masks["c1"] & masks["c2"]) == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"c3": None}, QuorumError),
        ({"x": b"c1"}, AuthenticationError),
        ({"c2": b"c1"}, KeyCheckError),
        ({"c2": bytes(31)}, KeyCheckError),
        ({"c2": bytes(32)}, KeyCheckError),
        ({"c0": None}, KeyCheckError),
        ({"c1": b"c2 for c0"}, AuthenticationError),
    ],
    ids=["left out", "stranger", "copy", "short", "low order", "own", "of another"],
)
def test_other_keys_than_those_of_all_are_refused(
    change: Mapping[str, bytes | None], error: type[PrivacyError]
) -> None:
    parties = parties_of()
    sent, _ = parties.round_keys()
    fields = unpack_fields(relayed(parties, sent, "c0")[TAG_BYTES:])
    given = {b"c1": fields["c1"], b"c2 for c0": fields["c1"][:KEY_BYTES] + fields["c2"][KEY_BYTES:]}
    changed = {name: given.get(text, text) for name, text in (fields | dict(change)).items() if text is not None}
    with pytest.raises(error):
        parties.clients["c0"].receive("keys", parties.tell("keys", "c0", parties.opening(), pack_fields(changed)))
    with pytest.raises(ReplayError):
        parties.clients["c0"].protect(torch.zeros(3))


def with_terms(parties: Parties, terms: Mapping[str, Terms]) -> dict[str, bytes]:
    """Open a round in which each client has received these terms; what it sends in the step ``keys``."""
    parties.open()
    for name, client in parties.clients.items():
        client.open_round(RoundId(7, "update", 7, terms[name]), list(parties.names))
    parties.server.open_round(RoundId(7, "update", 7, terms["c0"]), list(parties.names))
    return {name: client.send("keys") for name, client in parties.clients.items()}


def weighing(**samples: int) -> dict[str, Terms]:
    """Terms in which each client has received another number of samples of c2."""
    return {name: Terms({"the roster": [*samples], "the weights": number}) for name, number in samples.items()}


def test_terms_that_differ_are_named_by_the_server_and_by_clients_if_it_hides_it() -> None:
    parties = parties_of(3)
    sent = with_terms(parties, weighing(c0=10**12, c1=10**12, c2=10))
    with pytest.raises(TermsError, match="they differ in the weights"):
        parties.server.relay("keys", sent)
    for name, client in parties.clients.items():
        with pytest.raises(TermsError, match="they differ in the weights"):
            client.receive("keys", relayed(parties, sent, name))
        with pytest.raises(ReplayError):
            client.protect(torch.zeros(2))


def test_earlier_totals_that_differ_are_found_before_anything_is_masked() -> None:
    """Another model for one client: refused by it and by all others; a client that was absent has fewer, and may."""
    parties = parties_of(4)
    true, false = digest("total"), digest("another total")
    totals = {"c0": {("w", 3): true, ("w", 2): true}, "c1": {("w", 3): false}, "c2": {("w", 3): true}, "c3": {}}
    sent = with_terms(parties, {name: Terms({}, of, places=4) for name, of in totals.items()})
    for name in ("c0", "c1", "c2"):
        with pytest.raises(TermsError, match="in earlier totals"):
            parties.clients[name].receive("keys", relayed(parties, sent, name))
    totals["c1"] = {("w", 3): true}
    sent = with_terms(parties, {name: Terms({}, of, places=4) for name, of in totals.items()})
    for name, client in parties.clients.items():
        client.receive("keys", relayed(parties, sent, name))
        client.protect(torch.zeros(2))


def test_clients_that_received_different_rosters_refuse_each_others_keys() -> None:
    parties = parties_of(4)
    sent, _ = parties.round_keys()
    fewer = ["c0", "c1", "c2"]
    parties.clients["c0"].open_round(RoundId(0, "update", 0), fewer)
    sent["c0"] = parties.clients["c0"].send("keys")
    with pytest.raises(PrivacyError):
        parties.server.relay("keys", sent)
    opened = parties.clients["c0"]._round
    assert opened is not None
    fields = unpack_fields(relayed(parties, sent, "c0")[TAG_BYTES:])
    body = pack_fields({name: fields[name] for name in fewer})
    with pytest.raises(AuthenticationError, match="does not open"):
        parties.clients["c0"].receive("keys", parties.tell("keys", "c0", opened.opening, body))


def test_nothing_is_confirmed_or_released_whatever_the_server_asks() -> None:
    parties = parties_of(4)
    agreed = parties.agree()
    parties.protect()
    for name, client in parties.clients.items():
        assert client._round is None  # nor is the key of the round kept
        asked = parties.tell("survivors", name, agreed.digest, question(fates_of(parties.names, ["c3"])))
        for step in ("confirm", "unmask"):
            with pytest.raises(ReplayError):
                client.answer(step, asked)
        with pytest.raises(ReplayError):
            client.protect(torch.zeros(2))
        assert client.send("shares") == b""


def test_a_server_with_all_but_two_clients_reads_the_sum_of_these_and_neither_vector() -> None:
    """It takes off every mask that a colluder shares: the one that the two share is left, in each of their vectors."""
    parties = parties_of(4)
    agreed = parties.agree()
    held = {name: dict(parties.clients[name]._round.mask_keys) for name in ("c2", "c3")}  # type: ignore[union-attr]
    vectors = vectors_of(parties.names, 200)
    left = {}
    for name in ("c0", "c1"):
        message = parties.clients[name].protect(vectors[name])
        numbers, _ = parties.server._numbers(name, message, agreed, 0)
        row = numbers.copy()
        for colluder, keys in held.items():
            adds = agreed.adds(colluder, name)  # what it adds, the other subtracts
            Masks([keys[name]] if adds else [], [] if adds else [keys[name]], agreed.dtype).apply(row)
        left[name] = torch.from_numpy(row.view(agreed.signed_dtype).copy()).long()
    together = (left["c0"] + left["c1"]).to(torch.int32)
    assert together.tolist() == integer_sum(vectors, ["c0", "c1"])
    for name, row in left.items():
        assert (row != torch.tensor(integer_sum(vectors, [name]))).float().mean() > 0.95


def test_one_flipped_bit_anywhere_never_gives_a_wrong_sum() -> None:
    vectors = vectors_of(names_of(3), 3)
    quiet = Recorder()
    Parties(PairwiseMasking(), names_of(3), quiet).sum(vectors)
    generator = torch.Generator().manual_seed(0)
    for index, (_, _, message) in enumerate(quiet.carried):
        for where in torch.rand(6, generator=generator).tolist():
            seen = []

            def flip(what: str, client: str, text: bytes, index: int = index, where: float = where) -> bytes:
                seen.append(what)  # noqa: B023
                if len(seen) != index + 1:  # noqa: B023
                    return text
                changed = bytearray(text)
                changed[int(where * len(text))] ^= 4
                return bytes(changed)

            assert message
            with pytest.raises(PrivacyError):
                Parties(PairwiseMasking(), names_of(3), flip).sum(vectors)


@pytest.mark.parametrize("body", [b"", bytes(KEY_BYTES - 1), bytes(KEY_BYTES), bytes(KEY_BYTES) + b"\xff" * 4], ids=len)
def test_fields_of_hostile_size_under_valid_tags_are_refused(body: bytes) -> None:
    parties = parties_of(3)
    sent, _ = parties.round_keys()
    with pytest.raises((DecodeError, KeyCheckError)):
        parties.server.relay("keys", sent | {"c1": parties.forge("keys", "c1", parties.opening(), body)})


def test_clients_of_which_some_share_secrets_do_not_understand_each_other() -> None:
    parties = parties_of(4)
    parties.clients["c1"]._backend = PairwiseMasking()
    with pytest.raises(PrivacyError):
        parties.agree()
    with pytest.raises(ReplayError):
        parties.clients["c0"].protect(torch.zeros(2))


def test_terms_of_a_round_are_bound_to_its_receiver() -> None:
    parties = parties_of(3)
    sent, keys = parties.round_keys()
    deal = unpack_fields(sent["c0"][TAG_BYTES + KEY_BYTES :])
    link = parties.clients["c2"]._identity.link(party("c0"))
    about = binding("terms", party("c0"), digest("round key", parties.opening(), keys["c0"]), party("c2"))
    link.open(deal[party("c2")], about)
    with pytest.raises(AuthenticationError):
        link.open(deal[party("c1")], about)
