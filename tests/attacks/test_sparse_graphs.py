"""A server and colluders that want sums of few out of a sparse masked round: by its graph, its keys or its lists."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from cuts import drawn, graph_of
from fedlit.privacy import AuthenticationError, KeyCheckError, PairwiseMasking, QuorumError
from fedlit.privacy.links import KeyPair, pack_fields, unpack_fields
from fedlit.privacy.masking.graph import default_degree, draw
from fedlit.privacy.masking.round import KEY_BYTES, TAG_BYTES, MaskedRound, party
from masking_parties import Colluding, Parties, agreed_by, fates_of, names_of


def sparse(number: int, neighbours: int) -> Parties:
    """With few shares needed, so that small rounds have what larger ones have by default."""
    return Parties(PairwiseMasking(threshold=0.501, neighbours=neighbours, colluders=0), names_of(number))


def announced_in(parties: Parties) -> dict[str, bytes]:
    """Keys and draws of an open round."""
    size = KEY_BYTES + math.ceil(len(parties.names) / 8)
    return {name: client.send("keys")[TAG_BYTES:][:size] for name, client in parties.clients.items()}


def test_a_colluder_that_announces_last_redraws_nothing_between_honest_clients() -> None:
    """It tries keys and draws of its own; before, each key gave another graph."""
    parties = sparse(24, 4)
    parties.open()
    announced, honest = announced_in(parties), parties.names[:-1]
    identity = parties.clients["c0"]._identity

    def among_the_honest(last: bytes | None) -> list[set[str]]:
        tried = {name: announced[name] for name in honest} | ({} if last is None else {"c23": last})
        agreed = parties.backend.agree(parties.opening(), parties.names, identity, tried, b"")
        return [{*agreed.neighbours(name)} - {"c23"} for name in honest]

    before = among_the_honest(announced["c23"])
    for attempt in range(20):
        last = KeyPair().public + draw(bytes([attempt] * 32), bytes(32), parties.names, "c23", 4)
        assert among_the_honest(last) == before
    assert among_the_honest(None) == before, "nor by announcing nothing"


def test_a_round_that_is_opened_again_has_the_same_draws() -> None:
    parties = sparse(24, 4)
    parties.open()
    first = announced_in(parties)
    parties.rounds = 0
    parties.open()
    again = announced_in(parties)
    assert {name: text[KEY_BYTES:] for name, text in again.items()} == {
        n: text[KEY_BYTES:] for n, text in first.items()
    }
    assert all(again[name][:KEY_BYTES] != first[name][:KEY_BYTES] for name in first)


def test_a_server_that_changes_a_draw_is_found_out() -> None:
    parties = sparse(24, 4)
    parties.open()
    announced = announced_in(parties)
    announced["c3"] = announced["c3"][:KEY_BYTES] + draw(bytes(32), bytes(32), parties.names, "c3", 4)
    with pytest.raises(KeyCheckError, match="neighbours"):
        parties.tell_keys("c3", announced)


def test_a_server_that_takes_the_place_of_a_neighbour_is_found_out_by_who_drew_it() -> None:
    """It swaps the key of a client that has not drawn the victim, and so would send it no share."""
    parties = sparse(24, 4)
    parties.open()
    announced = announced_in(parties)
    honest = parties.backend.agree(parties.opening(), parties.names, parties.clients["c0"]._identity, announced, b"")
    victim, swapped = next(
        (name, peer) for name in parties.names for peer in honest.holders(name) if name not in honest.holders(peer)
    )
    lie = {**announced, swapped: KeyPair().public + announced[swapped][KEY_BYTES:]}
    for name in parties.names:
        parties.tell_keys(name, announced if name == swapped else lie)
    deals = {name: unpack_fields(client.send("shares")[TAG_BYTES:]) for name, client in parties.clients.items()}
    body = pack_fields({owner: deal.get(party(victim), b"") for owner, deal in deals.items()})
    message = parties.tell("shares", victim, agreed_by(parties.clients[victim]).digest, body)
    with pytest.raises(AuthenticationError, match="does not open"):
        parties.clients[victim].receive("shares", message)


def hidden_from(agreed: MaskedRound, victim: str, helper: str, seed: int) -> tuple[list[str], list[str]] | None:
    """Whom to leave out for a victim, and whom to report to all others as dropped, so that no neighbour of it is left.

    Its neighbours are split at random such that nobody refuses: ``None`` if that fails.
    """
    generator = np.random.default_rng(seed)
    drawn_honest = [peer for peer in agreed.holders(victim) if peer not in (victim, helper)]
    others = [peer for peer in agreed.neighbours(victim) if peer not in (*drawn_honest, helper)]
    spare, most = len(agreed.holders(victim)) - agreed.threshold, len(agreed.clients) - agreed.quorum
    for _ in range(200):
        generator.shuffle(drawn_honest)
        left_out, gone = drawn_honest[:spare], drawn_honest[spare:]
        for peer in others:
            (left_out if generator.random() < 0.5 else gone).append(peer)
        unheard = [*gone, victim]  # the victim has another list to confirm
        if max(len(left_out), len(unheard)) <= most and all(
            len({*agreed.holders(name)} & {*lost}) <= spare for name in agreed.clients for lost in (left_out, unheard)
        ):
            return left_out, gone
    return None


@pytest.mark.parametrize("attested", [True, False])
def test_a_victim_with_a_shorter_list_of_clients_is_not_read_by_one_colluder(attested: bool) -> None:
    """One of its holders colludes; some of its neighbours it does not mask with, the others are reported as dropped.

    Half of its holders, and the colluder, would release shares of its seed, had it not to attest with whom it masked.
    """
    for attempt in itertools.count():
        parties = sparse(24, 8)
        parties.open()
        parties.step("keys")
        agreed = agreed_by(parties.clients["c0"])
        victim = "c0"
        helper = agreed.holders(victim)[0]
        found = hidden_from(agreed, victim, helper, attempt)
        if found is not None:
            break
    left_out, gone = found
    if not attested:
        for client in parties.clients.values():
            agreed_by(client).complete = True  # as if the confirmations were enough
    names = parties.names
    few = [name for name in names if name not in left_out]
    lying = Colluding(parties, dict.fromkeys(names, names) | {victim: few}, colluding=[helper])
    honest = [name for name in names if name not in (helper, victim, *gone)]
    lying.ask({name: gone for name in honest})
    assert len(lying.released) >= agreed.quorum - 1
    assert ({victim} in lying.readable(agreed.threshold)) == (not attested)
    assert parties.backend.colluders_borne(24) <= 1


@pytest.mark.parametrize(("number", "share"), [(25, 3), (50, 5)])
def test_no_choice_of_dropouts_cuts_the_graph_that_clients_draw(number: int, share: int) -> None:
    """A greedy server with a third or a fifth of the clients: see benchmarks/sparse_graphs.py for more, and before."""
    quorum = 2 * number // 3 + 1
    few = min(math.ceil(number / share), 2 * quorum - number - 1)
    degree = default_degree(number, None, few)
    for seed in range(3):
        graph = drawn(np.random.default_rng(seed), number, degree, 2 * (degree + 1) // 3 + 1, quorum, few)
        assert graph.smallest() is None


def test_a_lie_to_all_alike_cuts_a_graph_of_too_few_neighbours() -> None:
    """So that the search above can fail: what it finds with two neighbours each, a server carries out."""
    for _ in range(100):
        number, degree = 24, 2
        parties = sparse(number, degree)
        parties.open()
        parties.step("keys")
        agreed = agreed_by(parties.clients["c0"])
        colluding = parties.names[:1]
        graph = graph_of(agreed, colluding)
        part = graph.smallest()
        if part is not None:
            break
    assert part is not None
    inside = {parties.names[index] for index in np.flatnonzero(part)}
    gone = [parties.names[index] for index in np.flatnonzero(graph.dropped(part[None])[0])]
    lying = Colluding(parties, dict.fromkeys(parties.names, parties.names), colluding=colluding)
    lying.ask({name: gone for name in parties.names if name not in (*gone, *colluding)})
    assert inside in lying.readable(agreed.threshold)


def test_false_dropouts_of_all_steps_together_are_bounded_by_every_client() -> None:
    """Of nine clients seven must survive: one left out with its key, one with its shares, and no more after that."""
    parties = Parties(PairwiseMasking(), names_of(9))
    _, keys = parties.round_keys()
    announced = names_of(8)
    for name in announced:
        parties.tell_keys(name, {peer: keys[peer] for peer in announced})
    deals = {name: unpack_fields(parties.clients[name].send("shares")[TAG_BYTES:]) for name in announced}
    shared = names_of(7)
    for name in shared:
        body = pack_fields({owner: deals[owner].get(party(name), b"") for owner in shared})
        digest = agreed_by(parties.clients[name]).digest
        parties.clients[name].receive("shares", parties.tell("shares", name, digest, body))
        parties.mask(name, torch.zeros(2))
    for name in shared[:-1]:
        with pytest.raises(QuorumError, match="only 6 clients survived"):
            parties.confirm(name, fates_of(shared, shared[-1:]))
        assert set(parties.confirm(name, fates_of(shared))) == {*shared} - {name}
