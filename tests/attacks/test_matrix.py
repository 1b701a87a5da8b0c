"""What clients, alone and together, and a lying server read of a sum, by backend: see the matrix of docs/privacy.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import backends
from fedlit.federation import Federation, FederationError
from fedlit.federation.transport import Outgoing, Transport, Way
from fedlit.federation.wire import decode
from fedlit.privacy import (
    AuthenticationError,
    GaussianMechanism,
    PairwiseMasking,
    Plain,
    PrivacyError,
    QuorumError,
    ThresholdPaillier,
)
from fedlit.privacy.differential import epsilon_of, spent_by
from fedlit.privacy.driver import Parties
from fedlit.privacy.links import TAG_BYTES, KeyPair, Link, derive, pack_fields, unpack_fields
from fedlit.privacy.paillier_arithmetic import PrivateModulus
from fedlit.privacy.shared_key import _about_deal, _frame, _unframe
from fedlit.privacy.tags import FALSE_TOTAL
from fedlit.privacy.threshold import client as threshold_client
from relayed import Relayed, honest
from thread_transport import on_ranks

NAMES = ["a", "b", "c", "d"]
PLACEMENT = [[], *([name] for name in NAMES)]  # the server apart
LENGTH = 512
BACKENDS = {"plain": Plain, **backends.BACKENDS}


def backend(name: str) -> Any:
    return Plain() if name == "plain" else backends.backend(name)


def vector(name: str) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(NAMES.index(name)))


class Tapped(Relayed):
    """A rank of which all that arrives is noted."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, honest)
        self.arrived: list[bytes] = []

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        frames = super().meet(frame, doing)
        self.arrived += [each.numpy().tobytes() for rank, each in enumerate(frames) if rank != self.rank]
        return frames

    def swap(self, ways: list[Way], outgoing: list[Outgoing], doing: str) -> list[Tensor | None]:  # type: ignore[override]
        arrived = super().swap(ways, outgoing, doing)
        self.arrived += [each.numpy().tobytes() for each in arrived if each is not None]
        return arrived


def parts(messages: Sequence[bytes], part: str) -> list[Tensor]:
    """Parts of that name in all messages."""
    found = []
    for message in messages:
        try:
            content = decode(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        except ValueError:
            continue
        found += [content[part]] if part in content else []
    return found


def shows(messages: Sequence[bytes], numbers: Tensor) -> bool:
    """Whether four neighbouring numbers are in a message, as floats or integers of the grid."""
    grid = (numbers.double() * 2**20).round()
    fours = [
        four for each in (numbers, numbers.double(), grid.int(), grid.long()) for four in each.numpy().reshape(-1, 4)
    ]
    texts = [text for four in fours for text in (four.tobytes(), four.byteswap().tobytes())]
    return any(text in message for message in messages for text in texts)


def one_sum(transport: Transport, name: str, placement: Any = PLACEMENT) -> dict[str, Any]:
    """What arrives at a rank in a sum, what it reads of it, and its parties."""
    tapped = transport if isinstance(transport, Tapped) else Tapped(transport)
    protected = backend(name)
    federation = Federation(NAMES, "d", transport=tapped, placement=placement, privacy=protected, seed=0)
    own = {client.name: {"w": vector(client.name)} for client in federation.local_clients}
    totals = federation.sum("weights", own)
    parties = federation._sums._backends.parties(protected)
    return {"arrived": tapped.arrived, "totals": totals, "parties": parties}


@pytest.mark.parametrize("name", BACKENDS)
def test_another_client_receives_the_sum_and_no_vector(name: str) -> None:
    server, *clients = on_ranks(lambda transport: one_sum(transport, name), len(PLACEMENT))
    exact = torch.stack([vector(each) for each in NAMES]).sum(dim=0)
    for own, rank in zip(NAMES, clients, strict=True):
        torch.testing.assert_close(rank["totals"][own]["w"], exact, atol=1e-5, rtol=0)
        assert not any(shows(rank["arrived"], vector(other)) for other in NAMES if other != own)
        assert len(parts(rank["arrived"], "sum")) == 1, "the total, for which some have the key"
        keys = parts(rank["arrived"], "keys")
        if name in ("plain", "masking"):
            assert all(len(each) < 4 * LENGTH for each in keys), "no vector, masked or not"
    assert any(shows(server["arrived"], vector(each)) for each in NAMES) == (name == "plain")


@pytest.mark.parametrize("name", BACKENDS)
def test_clients_together_subtract_their_vectors_from_the_sum(name: str) -> None:
    total = backend(name).sum({each: {"w": vector(each)} for each in NAMES})["w"]
    for colluders in (1, 2, 3):
        rest = total - sum(vector(each) for each in NAMES[:colluders])
        torch.testing.assert_close(rest, sum(vector(each) for each in NAMES[colluders:]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", BACKENDS)
def test_two_sums_of_the_same_vectors_differ_by_the_vector_of_the_client_that_one_lacks(name: str) -> None:
    """At a client; of the server's view, see `test_another_client_receives_the_sum_and_no_vector`."""
    received = []
    for senders in (NAMES, NAMES[:3]):
        federation = Federation(NAMES, "d", privacy=backend(name), seed=0)
        received.append(federation.sum("weights", {each: {"w": vector(each)} for each in senders}, senders)["a"]["w"])
    torch.testing.assert_close(received[0] - received[1], vector("d"), atol=1e-5, rtol=0)


# -------------------------------------------------------------------------------- shares of a key


class WithoutLast(Tapped):
    """A rank to which the server has reported the last one as disconnected."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.losable, self.lost = True, frozenset({inner.world_size - 1})

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        inner: Any = self._inner
        for rank in range(self.world_size):
            inner._send(rank, frame)
        ranks = range(self.world_size)
        return [torch.zeros_like(frame) if rank in self.lost else inner._receive(rank, doing) for rank in ranks]


def vectors_at(messages: Sequence[bytes]) -> dict[str, Mapping[str, bytes]]:
    """Others' encrypted vectors, by client, as a client gets them to add them up."""
    for keys in parts(messages, "keys"):
        try:
            asked = unpack_fields(keys.numpy().tobytes()[TAG_BYTES:])
        except PrivacyError:
            continue
        if "vectors" in asked:
            vectors = unpack_fields(asked["vectors"])
            return {name: unpack_fields(each[TAG_BYTES:]) for name, each in vectors.items()}
    raise AssertionError("no vectors have arrived")


def opened(sent: Mapping[str, bytes], client: Any, decrypt: Callable[[list[Any]], list[Any]]) -> Tensor:
    """A vector, from its ciphertexts and what decrypts them."""
    (modulus, _), protected, length = client._key, client._backend, int.from_bytes(sent["length"], "big")
    ciphertexts = modulus.read(sent["vector"], protected.slots.integers(length))
    steps = protected.slots.unpack([modulus.centre(each) for each in decrypt(ciphertexts)], length)
    return protected.codec.decode(torch.tensor(steps[:LENGTH])).float()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """Private and public keys, as a dealer could keep them."""
    keys: list[tuple[bytes, bytes]] = []
    generate = threshold_client.generate
    monkeypatch.setattr(threshold_client, "generate", lambda bits: keys.append(generate(bits)) or keys[-1])
    return keys


def test_t_clients_read_every_vector_with_their_shares_and_without_the_server() -> None:
    """Each gets the vectors of all, to add them up."""
    _, *ranks = on_ranks(lambda transport: one_sum(transport, "threshold"), len(PLACEMENT))
    clients = {name: rank["parties"].clients[name] for name, rank in zip(NAMES, ranks, strict=True)}
    modulus = clients["a"]._key[0]
    assert modulus.threshold == 2
    for other, sent in vectors_at(ranks[0]["arrived"]).items():
        pair = [name for name in NAMES if name != other][:2]
        shares = {NAMES.index(name) + 1: clients[name]._key[1] for name in pair}

        def decrypt(ciphertexts: list[Any], shares: Mapping[int, int] = shares) -> list[Any]:
            partials = {at: modulus.decrypt_partly(ciphertexts, share, 1) for at, share in shares.items()}
            return list(modulus.combine(partials, 1))

        torch.testing.assert_close(opened(sent, clients["a"], decrypt), vector(other), atol=1e-6, rtol=0)


def test_who_deals_the_shares_reads_every_vector_alone_if_it_keeps_the_key(made: list[tuple[bytes, bytes]]) -> None:
    _, dealer, *_ = on_ranks(lambda transport: one_sum(transport, "threshold"), len(PLACEMENT))
    client, ((private, public),) = dealer["parties"].clients["a"], made
    key = PrivateModulus(private, public, client._backend.key_bits)
    sent = vectors_at(dealer["arrived"])
    assert [*sent] == NAMES[1:]
    for other, body in sent.items():
        read = opened(body, client, lambda ciphertexts: list(key.decrypt(ciphertexts, 1)))
        torch.testing.assert_close(read, vector(other), atol=1e-6, rtol=0)


def test_a_server_chooses_who_deals_by_whom_it_reports_as_disconnected(made: list[tuple[bytes, bytes]]) -> None:
    """So one client of its choice, other than the first, is enough, unless the run names the dealer."""
    placement = [[], ["b"], ["c"], ["d"], ["a"]]

    def on(transport: Transport) -> dict[str, Any]:
        return {} if transport.rank == 4 else one_sum(WithoutLast(transport), "threshold", placement)

    _, second, *_ = on_ranks(on, len(placement))
    client, ((private, public),) = second["parties"].clients["b"], made
    key = PrivateModulus(private, public, client._backend.key_bits)
    assert client._roster == ("b", "c", "d"), "the first of whom deals"
    for other, body in vectors_at(second["arrived"]).items():
        read = opened(body, client, lambda ciphertexts: list(key.decrypt(ciphertexts, 1)))
        torch.testing.assert_close(read, vector(other), atol=1e-6, rtol=0)


def test_a_dealer_that_is_named_is_not_another_whatever_the_server_reports() -> None:
    parties = Parties(ThresholdPaillier(dealer="a", **backends.QUICK), NAMES)
    with pytest.raises(QuorumError, match="dealer 'a' of the shares is not among the clients that enrol"):
        parties.clients["b"].enrol(NAMES[1:])
    parties = Parties(ThresholdPaillier(dealer="b", **backends.QUICK), NAMES)
    parties.clients["c"] = ThresholdPaillier(dealer="a", **backends.QUICK).client("c")
    with pytest.raises(AuthenticationError):  # b has dealt to it
        parties.enrol(NAMES)


# -------------------------------------------------------------------------------- keys that clients share


def forging(transport: Transport, bound: float) -> str:
    """The error of a process at a false total: the vector of a, plus ``K * 32 - bound`` in its first number."""
    protected = backends.backend("paillier")
    federation = Federation(NAMES, "d", transport=transport, placement=PLACEMENT, privacy=protected, seed=0)
    if transport.rank == 0:
        server: Any = federation._sums._backends.parties(protected).server
        add, kept = server.add, {}

        def note(name: str, message: Tensor) -> None:
            kept[name] = message
            add(name, message)

        def total() -> Tensor:
            key, link = server._keys
            about, length, _, body = _unframe(link, "vector of a", kept["a"])
            ciphertexts = key._modulus.read(body, protected.slots.integers(length))
            shift = protected.codec.largest_sum(len(NAMES)) - round(bound * protected.codec.scale)
            (plaintext,) = protected.slots.pack([shift])
            ciphertexts[0] = ciphertexts[0] * key._modulus.embed(plaintext) % key._modulus.square
            return _frame(link, "total", about, length, len(NAMES), [key._modulus.write(ciphertexts)])

        server.add, server.total = note, total
    own = {client.name: {"w": torch.tensor([1.5])} for client in federation.local_clients}
    try:
        federation.sum("weights", own)
    except (PrivacyError, FederationError) as error:
        return str(error)
    return ""


def test_a_false_total_under_a_shared_key_is_refused_with_one_error_whatever_its_numbers_are() -> None:
    """Or the server would learn whether a number of a client is above a bound, both of its choice."""
    for bound in (1.4, 1.6):  # the decrypted number is out of range, and in it
        refusals = on_ranks(lambda transport, bound=bound: forging(transport, bound), len(PLACEMENT))
        assert all(FALSE_TOTAL in each for each in refusals), refusals  # the first is the server's


def test_without_certificates_a_server_that_swaps_a_key_at_enrolment_is_dealt_the_private_key() -> None:
    parties: Any = Parties(backends.backend("paillier"), NAMES)
    own = KeyPair()
    for each in (*parties.clients.values(), parties.server):
        each.enrol(NAMES)
    sent = {name: client.send("identities") for name, client in parties.clients.items()}
    relayed = parties.server.relay("identities", sent)
    publics = {**unpack_fields(relayed["a"]), "client b": own.public}
    parties.clients["a"].receive("identities", pack_fields(publics))
    deal = unpack_fields(parties.clients["a"].send("keys"))
    about = _about_deal(NAMES, deal["public"])
    link = Link(derive(own.agree(sent["a"], "a"), about, "client b"), "client b")
    assert "private" in unpack_fields(link.open(deal["client b"], about))


# -------------------------------------------------------------------------------- noise


def test_clients_take_their_own_noise_off_a_sum() -> None:
    """So privacy/epsilon_sum is against those who add none; of the others, the fewer, the more is spent."""
    length, mechanism = 40_000, GaussianMechanism(clip_norm=1.0, noise_multiplier=2.0)
    zeros = {"w": torch.zeros(length)}
    noise = {name: mechanism.release(zeros)["w"] for name in NAMES}
    total = PairwiseMasking().sum({name: {"w": each} for name, each in noise.items()})["w"]
    for colluders, multiplier in ((0, 4.0), (1, 2 * 3**0.5), (3, 2.0)):
        rest = total - sum(noise[name] for name in NAMES[:colluders])
        assert float(rest.std()) == pytest.approx(multiplier, rel=0.02)
    federation = Federation(NAMES, "d", privacy=PairwiseMasking(), differential_privacy=mechanism, seed=0)
    federation.sum("w", {name: {"w": torch.zeros(2)} for name in NAMES})
    assert federation.epsilon("sum")["d"] == pytest.approx(epsilon_of(spent_by(4.0), mechanism.delta))
    assert federation.epsilon("message")["d"] == pytest.approx(epsilon_of(spent_by(2.0), mechanism.delta))
