"""Clients and a server that work together against single vectors under Paillier. Keys are short: no secrecy here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import QUICK
from fedlit.federation import Federation
from fedlit.federation.transport import Transport
from fedlit.privacy import (
    AuthenticationError,
    Paillier,
    PrivacyError,
    QuorumError,
    ReplayError,
    RoundId,
    Terms,
    TermsError,
    ThresholdPaillier,
)
from fedlit.privacy.driver import Parties
from fedlit.privacy.links import pack_fields, unpack_fields
from fedlit.privacy.masking.round import SERVER, authenticate, binding, party, read, write
from fedlit.privacy.shared_key import _unframe
from fedlit.privacy.threshold.arithmetic import ThresholdModulus
from fedlit.privacy.threshold.client import hash_of
from relayed import Change, Relayed, false_total, honest
from thread_transport import on_ranks

pytest.importorskip("phe")

NAMES = ["a", "b", "c", "d", "e"]
VICTIM, COLLUDER = "a", "b"
VECTORS = {name: torch.tensor([1.5 + place, -2.25 * place, 0.125]) for place, name in enumerate(NAMES)}


class Attack(Parties):
    """Honest clients, and a server of which everything is known; ``bodies`` are the vectors as it got them."""

    clients: dict[str, Any]
    server: Any

    def __init__(self, threshold: int | None = None, names: Sequence[str] = NAMES) -> None:
        super().__init__(ThresholdPaillier(threshold, **QUICK), names)
        self.names, self.call = list(names), 0
        self.enrol(self.names)
        self.backend: Any = self._backend

    @property
    def modulus(self) -> Any:
        return self.server._modulus

    def send(self, terms: Mapping[str, Terms] | None = None) -> None:
        """Open a round, and let all clients send their vectors."""
        for name, each in {**self.clients, SERVER: self.server}.items():
            each.open_round(RoundId(0, "w", self.call, (terms or {}).get(name)), self.names)
        self.call += 1
        self.run_step("terms", self.names)
        for name in self.names:
            self.server.add(name, self.clients[name].protect(VECTORS[name]))
        self.vectors = {name: (vector.body, vector.tags) for name, vector in self.server._round.vectors.items()}
        self.digest = self.server._round.digest

    def replace(self, name: str, body: bytes) -> None:
        """Let a client that works with the server have sent another vector."""
        client = self.clients[name]
        client._round.body = body
        tags = {
            peer: client._identity.link(party(peer)).tag(body, client._about("vector", name, peer, client._round))
            for peer in self.names
            if peer != name
        }
        self.vectors[name] = body, tags

    def ask(self, name: str, step: str, content: Mapping[str, bytes]) -> dict[str, bytes]:
        """Ask one client as the server can, and open its answer."""
        question = write(self.server._identity, party(name), step, self.digest, pack_fields(content))
        answer = self.clients[name].answer("confirm" if step == "survivors" else "decrypt", question)
        about = "tags" if step == "survivors" else "partials"
        body = read(self.server._identity, party(name), about, self.digest, answer)
        return unpack_fields(body) if about == "tags" else {"parts": body}

    def confirm(self, name: str, listed: Sequence[str]) -> dict[str, bytes]:
        return self.ask(name, "survivors", {peer: hash_of(self.vectors[peer][0]) for peer in listed})

    def decrypt(self, name: str, listed: Sequence[str], tags: Mapping[str, Mapping[str, bytes]]) -> list[int]:
        """Partial decryptions by one client, to which these clients have confirmed."""
        others = {peer: self.vectors[peer][1][name] + self.vectors[peer][0] for peer in listed if peer != name}
        confirmed = {peer: made[name] for peer, made in tags.items() if peer != name and name in made}
        answer = self.ask(name, "vectors", {"tags": pack_fields(confirmed), "vectors": pack_fields(others)})
        return list(self.modulus.read(answer["parts"], len(answer["parts"]) // self.modulus.ciphertext_bytes))

    def opened(self, partials: Mapping[str, list[int]]) -> int:
        """First plaintext, as the server puts it together, signed."""
        points = {self.names.index(name) + 1: parts for name, parts in partials.items()}
        return int(self.modulus.centre(self.modulus.combine(points, 1)[0]))

    def steps(self, name: str) -> list[int]:
        """A client's vector on the grid."""
        return list(self.backend.codec.encode(VECTORS[name]).tolist())


def test_one_client_and_the_server_read_every_vector_under_a_shared_key_and_none_under_shares() -> None:
    shared: Any = Parties(Paillier(**QUICK), NAMES)
    shared.enrol(NAMES)
    shared.open_round(RoundId(0, "w", 0), NAMES)
    message = shared.clients[VICTIM].protect(VECTORS[VICTIM])
    _, length, _, body = _unframe(shared.server._keys[1], f"vector of {VICTIM}", message)
    assert torch.equal(shared.clients[COLLUDER]._keys[0].decrypt(body, length, 1), VECTORS[VICTIM].double())

    attack = Attack()  # 4 of 5
    attack.send()
    body = unpack_fields(attack.vectors[VICTIM][0])["vector"]
    ciphertexts = attack.modulus.read(body, 1)
    for colluders in (NAMES[1:2], NAMES[1:4]):  # one, and t - 1
        shares = {NAMES.index(name) + 1: attack.clients[name]._key[1] for name in colluders}
        few = ThresholdModulus(int(attack.modulus.n).to_bytes(64, "big"), 512, len(shares), 5)
        partials = {point: few.decrypt_partly(ciphertexts, share, 1) for point, share in shares.items()}
        with pytest.raises(AuthenticationError):
            few.combine(partials, 1)
    shares = {NAMES.index(name) + 1: attack.clients[name]._key[1] for name in NAMES[1:]}  # t of them do open it
    partials = {point: attack.modulus.decrypt_partly(ciphertexts, share, 1) for point, share in shares.items()}
    numbers = attack.backend.slots.unpack([attack.modulus.centre(m) for m in attack.modulus.combine(partials, 1)], 3)
    assert numbers == attack.steps(VICTIM)


@pytest.mark.parametrize("listed", [[VICTIM], [VICTIM, COLLUDER], [VICTIM, "b", "c"], ["b", "c", "d", "e"]])
def test_a_server_that_asks_for_a_vector_or_for_a_sum_of_few_is_refused(listed: list[str]) -> None:
    attack = Attack()
    attack.send()
    with pytest.raises((QuorumError, AuthenticationError)):
        attack.confirm(VICTIM, listed)
    with pytest.raises(ReplayError):  # without confirmation
        attack.decrypt(VICTIM, listed, {})


def test_the_helper_of_these_attacks_opens_the_sum_that_all_confirm() -> None:
    attack = Attack()
    attack.send()
    tags = {name: attack.confirm(name, NAMES) for name in NAMES}
    partials = {name: attack.decrypt(name, NAMES, tags) for name in NAMES[1:]}
    total = attack.backend.slots.unpack([attack.opened(partials)], 3)
    assert total == [sum(column) for column in zip(*map(attack.steps, NAMES), strict=True)]
    for name in NAMES[1:]:  # once
        with pytest.raises(ReplayError):
            attack.decrypt(name, NAMES, tags)
        with pytest.raises(ReplayError):
            attack.confirm(name, NAMES)


def multiplied(attack: Attack) -> bytes:
    """The victim's vector moved to the slots behind the sum, as the colluder's own."""
    mine = unpack_fields(attack.vectors[COLLUDER][0])
    (ciphertext,) = attack.modulus.read(unpack_fields(attack.vectors[VICTIM][0])["vector"], 1)
    moved = pow(ciphertext, int(attack.backend.slots.base) ** 3, attack.modulus.square)
    return pack_fields({**mine, "vector": attack.modulus.write([moved])})


def read_through_the_colluder(attack: Attack) -> list[int]:
    attack.send()
    attack.replace(COLLUDER, multiplied(attack))
    tags = {name: attack.confirm(name, NAMES) for name in NAMES}
    plaintext = attack.opened({name: attack.decrypt(name, NAMES, tags) for name in NAMES})
    return list(attack.backend.slots.unpack([plaintext], 6))[3:]


def test_a_client_cannot_send_the_vector_of_another_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuthenticationError, match="client 'b'"):
        read_through_the_colluder(Attack())
    # the attack itself: without the proof, the victim's vector comes out beside the sum
    monkeypatch.setattr(ThresholdModulus, "check_known", lambda self, body, count, *more: self.read(body, count))
    attack = Attack()
    assert read_through_the_colluder(attack) == attack.steps(VICTIM)


def test_a_proof_of_another_client_or_round_or_ciphertext_is_none() -> None:
    attack = Attack()
    attack.send()
    vector, proof = (unpack_fields(attack.vectors[VICTIM][0])[name] for name in ("vector", "proof"))
    check = attack.modulus.check_known
    about = binding("vector", party(VICTIM), attack.digest)
    check(vector, 1, proof, about, 1)
    other = unpack_fields(attack.vectors[COLLUDER][0])["vector"]
    size = attack.modulus.ciphertext_bytes
    forged: list[tuple[bytes, bytes, bytes]] = [
        (vector, proof, binding("vector", party(COLLUDER), attack.digest)),
        (vector, proof, binding("vector", party(VICTIM), bytes(32))),
        (other, proof, about),
        (vector, bytes(len(proof)), about),
        (vector, proof[:size] + bytes(size), about),
        (vector, proof[:-1] + bytes([proof[-1] ^ 1]), about),
        (vector, proof[1:], about),
    ]
    for body, shown, bound_to in forged:
        with pytest.raises(PrivacyError):
            check(body, 1, shown, bound_to, 1)


def test_two_lists_of_vectors_are_not_both_confirmed() -> None:
    """The difference of two sums would be the victim's vector; one client confirms whatever the server wants."""
    attack = Attack()
    attack.send()
    lists = {"all": NAMES, "without": NAMES[1:]}
    told = {"a": "all", "c": "all", "d": "without", "e": "without"}
    tags = {name: attack.confirm(name, lists[which]) for name, which in told.items()}
    for which, listed in lists.items():
        attack.clients[COLLUDER]._round.due = "confirm"
        both = {**tags, COLLUDER: attack.confirm(COLLUDER, listed)}
        for name in (name for name, seen in told.items() if seen == which):
            with pytest.raises(QuorumError):
                attack.decrypt(name, listed, both)


def test_a_server_cannot_put_its_own_vectors_in_the_place_of_others() -> None:
    attack = Attack()
    attack.send()
    zeros, proof = attack.modulus.encrypt([0], binding("vector", party("c"), attack.digest), 1)
    body = pack_fields({**unpack_fields(attack.vectors["c"][0]), "vector": zeros, "proof": proof})
    tags = {peer: bytes(28) for peer in NAMES}
    honest, attack.vectors["c"] = attack.vectors["c"], (body, tags)
    confirmed = {name: attack.confirm(name, NAMES) for name in NAMES if name != "c"}
    with pytest.raises(AuthenticationError):  # which nobody but c can tag
        attack.decrypt(VICTIM, NAMES, confirmed)
    attack.vectors["c"] = body, honest[1]
    with pytest.raises(AuthenticationError):
        attack.decrypt(VICTIM, NAMES, confirmed)
    attack.vectors["c"] = honest  # in place of the one on the list
    with pytest.raises(AuthenticationError, match="not the one on the confirmed list"):
        attack.decrypt(VICTIM, NAMES, confirmed)


def test_vectors_of_an_earlier_round_are_in_no_later_one() -> None:
    attack = Attack()
    attack.send()
    old = attack.vectors
    attack.send()
    attack.vectors = {**old, VICTIM: attack.vectors[VICTIM]}
    tags = {VICTIM: attack.confirm(VICTIM, NAMES)}
    for name in NAMES[1:]:
        with pytest.raises(AuthenticationError):
            attack.confirm(name, NAMES)
    with pytest.raises(QuorumError):
        attack.decrypt(VICTIM, NAMES, tags)
    for client in attack.clients.values():  # nor is the same round opened twice under one key
        with pytest.raises(ReplayError, match="calls are counted upwards"):
            client.open_round(RoundId(0, "w", 1), NAMES)


def test_clients_that_have_received_other_terms_open_nothing_and_say_what_differs() -> None:
    attack = Attack()
    terms = {name: Terms({"the weights": [1, 10**12 if name != VICTIM else 1]}) for name in NAMES}
    with pytest.raises(TermsError, match="they differ in the weights"):
        attack.send(terms)
    # nor if the server keeps the victim's terms from the others, and theirs from it
    attack = Attack()
    relay = attack.server.relay

    def apart(step: str, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        relayed = relay(step, sent)
        for name in NAMES:
            bound_to = attack.server._round.digest
            stated = unpack_fields(read(attack.clients[name]._identity, SERVER, step, bound_to, relayed[name]))
            stated = {peer: each for peer, each in stated.items() if VICTIM not in (peer, name)}
            relayed[name] = write(attack.server._identity, party(name), step, bound_to, pack_fields(stated))
        return relayed

    attack.server.relay = apart
    with pytest.raises(QuorumError):  # the victim sends nothing
        attack.send(terms)
    # nor from the others alone, while it has theirs
    attack = Attack()
    attack.send()
    client = attack.clients["c"]
    client._round.agreeing = tuple(NAMES[1:])
    with pytest.raises(AuthenticationError, match="whose terms they have not shown"):
        attack.confirm("c", NAMES)


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda modulus, part: part * 5 % modulus.square, True),
        (lambda modulus, part: part * (1 + 7 * modulus.n) % modulus.square, False),
    ],
    ids=["at random", "by an amount"],
)
@pytest.mark.parametrize("answering", [5, 4])
def test_a_wrong_partial_decryption_is_found_out_unless_it_adds_an_amount_and_t_answer(
    change: Callable[[Any, int], int], noticed: bool, answering: int
) -> None:
    attack = Attack()
    attack.send()
    tags = {name: attack.confirm(name, NAMES) for name in NAMES}
    partials = {name: attack.decrypt(name, NAMES, tags) for name in NAMES[:answering]}
    right = attack.opened(partials)
    partials[COLLUDER] = [change(attack.modulus, part) for part in partials[COLLUDER]]
    if noticed or answering > 4:
        with pytest.raises(AuthenticationError, match="a client has sent a wrong one"):
            attack.opened(partials)
    else:  # as a client may add what it likes to its own vector
        assert attack.opened(partials) != right


def test_a_share_or_modulus_of_somebody_else_does_not_enrol() -> None:
    attack = Attack(names=NAMES[:3])
    client, server = attack.clients["b"], attack.server
    client.enrol(NAMES[:3])
    dealt = attack.clients["a"]
    dealt.enrol(NAMES[:3])
    message = unpack_fields(server.relay("keys", {"a": dealt.send("keys")})["b"])
    for swapped in ({**message, "public": int(attack.modulus.n + 2).to_bytes(64, "big")}, {**message, "share": b""}):
        with pytest.raises(AuthenticationError):
            client.receive("keys", pack_fields(swapped))
    client.receive("keys", pack_fields(message))


def sums(transport: Transport, change: Change) -> list[Tensor]:
    federation = Federation(
        NAMES[:4],
        "d",
        transport=Relayed(transport, change),
        placement=[[], *([name] for name in NAMES[:4])],
        privacy=ThresholdPaillier(**QUICK),
        seed=0,
    )
    payloads = {each.name: {"w": VECTORS[each.name]} for each in federation.local_clients}
    received: dict[str, Any] = {}
    for federation.round_idx in range(2):
        received = federation.sum("weights", payloads)
    return [entries["w"] for entries in received.values()]


def test_a_server_that_sends_another_total_to_one_client_obtains_no_further_one() -> None:
    ranks = on_ranks(lambda transport: sums(transport, honest), 5)
    expected = torch.stack([VECTORS[name] for name in NAMES[:4]]).sum(dim=0)
    assert [len(rank) for rank in ranks] == [0, 1, 1, 1, 1]
    assert all(torch.equal(total, expected) for rank in ranks for total in rank)
    with pytest.raises(AuthenticationError, match="not the sum"):  # by its tags
        on_ranks(lambda transport: sums(transport, partial(false_total, victim=1)), 5)


def test_messages_are_bound_to_their_sender_on_the_wire() -> None:
    attack = Attack()
    attack.send()
    forged: Tensor = torch.frombuffer(
        bytearray(authenticate(attack.clients["b"]._identity.link(SERVER), b"", b"")), dtype=torch.uint8
    )
    with pytest.raises(PrivacyError):
        attack.server.aggregate({name: forged for name in NAMES})
