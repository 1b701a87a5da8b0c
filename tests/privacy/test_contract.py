"""The contract of all backends, one row each: a new backend is tested by adding a row to BACKENDS."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import backends
import fedlit.privacy
from fedlit.federation import Federation
from fedlit.privacy import (
    CKKS,
    FixedPoint,
    InputError,
    PairwiseMasking,
    Plain,
    PrivacyError,
    QuorumError,
    RangeError,
    RoundId,
    SecureAggregation,
    driver,
)

BACKENDS: dict[str, Any] = {
    "plain": lambda: Plain(FixedPoint()),
    **backends.BACKENDS,
    "masking64": lambda: PairwiseMasking(modulus_bits=64, colluders=0),
}
SECRET = [name for name in BACKENDS if name != "plain"]
EXACT = [name for name in BACKENDS if name != "ckks"]
NAMES = [f"client {index}" for index in range(12)]

patient = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Parties(driver.Parties):
    """All parties of a backend, enrolled once; records every byte that clients send."""

    def __init__(self, backend: SecureAggregation, roster: Sequence[str]) -> None:
        super().__init__(backend, roster)
        self.backend, self.roster, self.calls, self.wire = backend, list(roster), 0, backends.Recorded()
        self.uplinks = self.wire.up
        self.enrol(self.roster, self.wire)

    def open(self, names: Sequence[str]) -> None:
        self.calls += 1
        self.open_round(RoundId(self.calls, "test", self.calls), list(names), self.wire)

    def protect(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        messages = {name: self.clients[name].protect(vector) for name, vector in vectors.items()}
        self.uplinks += [message.numpy().tobytes() for message in messages.values()]
        return messages

    def opened(self, messages: Mapping[str, Tensor]) -> Tensor:
        total = self.server.aggregate(messages)
        if self.backend.closing:
            total = self.server.conclude(self.ask_survivors(list(messages), self.wire))
        holder = self.server if self.backend.key_holder == "server" else self.clients[self.roster[0]]
        return holder.reveal(total, len(messages))

    def sum(self, vectors: Mapping[str, Tensor], names: Sequence[str] | None = None) -> Tensor:
        self.open(list(vectors) if names is None else names)
        return self.opened(self.protect(vectors))


@pytest.fixture(scope="module")
def enrolled() -> dict[str, Parties]:
    return {}


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in backends.NEEDS:
        pytest.importorskip(backends.NEEDS[request.param])
    return str(request.param)


@pytest.fixture
def parties(name: str, enrolled: dict[str, Parties]) -> Parties:
    """All clients, enrolled once per backend."""
    if name not in enrolled:
        enrolled[name] = Parties(BACKENDS[name](), NAMES)
    return enrolled[name]


def exact_sum(vectors: Mapping[str, Tensor], fraction_bits: int = 20) -> list[float]:
    """Sum on the grid by exact rational arithmetic, apart from every line of the package."""
    columns = zip(*(vector.tolist() for vector in vectors.values()), strict=True)
    return [
        float(Fraction(sum(round(Fraction(x) * 2**fraction_bits) for x in column), 2**fraction_bits))
        for column in columns
    ]


numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 32.0, -32.0, 2.0**-20, -(2.0**-21), 1e-30, 31.999998]), st.floats(-32, 32, width=32)
)


def test_every_backend_is_in_the_table() -> None:
    for library in {*backends.NEEDS.values()}:
        pytest.importorskip(library)
    exported = [getattr(fedlit.privacy, name) for name in fedlit.privacy.__all__]
    made = {item for item in exported if isinstance(item, type) and issubclass(item, SecureAggregation)}
    made -= {fedlit.privacy.RobustPlain}  # which adds nothing up: see test_robust.py
    assert {type(make()) for make in BACKENDS.values()} == {item for item in made if not item.__abstractmethods__}


@patient
@given(data=st.data())
def test_a_sum_is_the_exact_one_or_within_the_declared_error(parties: Parties, data: st.DataObject) -> None:
    num_clients = data.draw(st.integers(2, len(NAMES)), label="K")
    length = data.draw(st.integers(1, 12), label="n")
    chosen = data.draw(st.permutations(NAMES), label="who")[:num_clients]
    senders = [name for name in NAMES if name in chosen]
    vectors = {
        name: torch.tensor(data.draw(st.lists(numbers, min_size=length, max_size=length)), dtype=torch.float32)
        for name in senders
    }
    before = {name: vector.clone() for name, vector in vectors.items()}
    total = parties.sum(vectors)
    assert total.shape == (length,)
    assert all(torch.equal(vectors[name], before[name]) for name in senders)
    if isinstance(parties.backend, CKKS):
        true = torch.stack([vector.double() for vector in vectors.values()]).sum(dim=0)
        assert float((total - true).abs().max()) <= parties.backend.error_bound(num_clients)
    else:
        assert total.double().tolist() == exact_sum(vectors)


def test_vectors_of_any_length_in_one_pack(parties: Parties) -> None:
    for length in (0, 1, 4097):
        vectors = {name: torch.linspace(-3, 3, length) * (i + 1) for i, name in enumerate(NAMES[:3])}
        total = parties.sum(vectors).double()
        assert total.shape == (length,)
        if length:
            error = parties.backend.error_bound(3)
            assert float((total - sum(vector.double() for vector in vectors.values())).abs().max()) <= error


@pytest.mark.parametrize("name", SECRET, indirect=True)
def test_a_sum_of_one_hides_nothing_and_is_refused(parties: Parties) -> None:
    with pytest.raises(QuorumError, match="hides nothing of fewer than"):
        parties.backend.sum({"a": {"w": torch.zeros(2)}})
    with pytest.raises(QuorumError):
        parties.sum({NAMES[0]: torch.zeros(2)})
    with pytest.raises(QuorumError):  # two have opened the round, one sends
        parties.sum({NAMES[0]: torch.zeros(2)}, NAMES[:2])
    assert parties.sum({name: torch.ones(2) for name in NAMES[:2]}).tolist() == pytest.approx([2.0, 2.0], abs=1e-6)


@pytest.mark.parametrize(
    ("bad", "error"),
    [(float("nan"), InputError), (float("inf"), InputError), (33.0, RangeError), (-1e30, RangeError)],
)
def test_nan_infinity_and_overflow_are_refused_at_the_client(
    parties: Parties, bad: float, error: type[Exception]
) -> None:
    names = NAMES[:3]
    parties.open(names)
    with pytest.raises(error):
        parties.clients[names[0]].protect(torch.tensor([0.5, bad, 1.0]))


@pytest.mark.parametrize("name", SECRET, indirect=True)
def test_a_client_that_opens_a_round_and_sends_nothing_is_left_out(parties: Parties) -> None:
    vectors = {name: torch.tensor([1.5, -2.25]) * (i + 1) for i, name in enumerate(NAMES[:5])}
    total = parties.sum({name: vectors[name] for name in NAMES[:5] if name != NAMES[2]}, NAMES[:5])
    assert total.tolist() == pytest.approx([1.5 * 12, -2.25 * 12], abs=1e-6)


@pytest.mark.parametrize("name", SECRET, indirect=True)
def test_equal_vectors_never_look_equal(parties: Parties) -> None:
    vector = torch.full((50,), 0.75)
    bodies: list[bytes] = []
    for _ in range(2):
        random.seed(0)
        torch.manual_seed(0)
        parties.open(NAMES[:3])
        messages = parties.protect({name: vector for name in NAMES[:3]})
        bodies += [message.numpy().tobytes()[-150:] for message in messages.values()]
        parties.opened(messages)
    assert len(set(bodies)) == 6


@pytest.mark.parametrize("name", SECRET, indirect=True)
def test_no_uplink_contains_four_neighbouring_numbers_in_any_type_and_byte_order(parties: Parties) -> None:
    generator = torch.Generator().manual_seed(3)
    vectors = {name: torch.randn(64, generator=generator) for name in NAMES[:4]}
    before = len(parties.uplinks)
    parties.sum(vectors)
    sent = parties.uplinks[before:]
    assert len(sent) >= 4
    for vector in vectors.values():
        grid = (vector.double() * 2**20).round()
        for tensor in (vector, vector.double(), grid.int(), grid.long()):
            for four in tensor.numpy().reshape(16, 4):
                assert not any(
                    text in uplink for text in (four.tobytes(), four.byteswap().tobytes()) for uplink in sent
                )


@pytest.mark.parametrize("name", SECRET, indirect=True)
def test_replayed_late_and_misattributed_vectors_are_refused(parties: Parties) -> None:
    a, b, c = NAMES[:3]

    def protected(*names: str) -> dict[str, Tensor]:
        parties.open(names)
        return parties.protect({name: torch.ones(4) for name in names})

    old = protected(a, b, c)
    parties.opened(old)
    with pytest.raises(PrivacyError):  # the round is over
        parties.server.aggregate(old)
    new = protected(a, b, c)
    with pytest.raises(PrivacyError):  # made for another round
        parties.server.aggregate({**new, a: old[a]})
    new = protected(a, b, c)
    with pytest.raises(PrivacyError):  # one's vector in another's name
        parties.server.aggregate({a: new[b], b: new[a], c: new[c]})
    new = protected(a, b)
    with pytest.raises(PrivacyError):  # of somebody who is not in this round
        parties.server.aggregate({**new, c: old[c]})
    with pytest.raises(PrivacyError):  # a second vector under the first one's masks or in the first one's place
        parties.clients[a].protect(torch.ones(4))


@pytest.mark.parametrize("name", SECRET, indirect=True)
def test_a_vector_of_another_federation_is_refused(name: str, parties: Parties) -> None:
    stranger = Parties(BACKENDS[name](), NAMES[:3])
    stranger.calls = parties.calls
    names = NAMES[:3]
    parties.open(names)
    stranger.open(names)
    ours, theirs = (some.protect({name: torch.ones(4) for name in names}) for some in (parties, stranger))
    with pytest.raises(PrivacyError):
        parties.server.aggregate({**ours, names[0]: theirs[names[0]]})


@pytest.mark.parametrize("name", SECRET, indirect=True)
@patient
@given(data=st.data())
def test_a_flipped_bit_or_a_cut_message_never_makes_a_wrong_sum(parties: Parties, data: st.DataObject) -> None:
    names = NAMES[:3]
    parties.open(names)
    messages = parties.protect({name: torch.ones(4) for name in names})
    victim = data.draw(st.sampled_from(names))
    message = bytearray(messages[victim].numpy().tobytes())
    change = data.draw(st.sampled_from(["flip", "cut", "extend", "empty", "noise"]))
    if change == "flip":
        message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif change == "cut":
        del message[data.draw(st.integers(0, len(message) - 1)) :]
    elif change == "extend":
        message += bytes(data.draw(st.integers(1, 5000)))
    elif change == "empty":
        message.clear()
    else:
        message[:] = data.draw(st.binary(min_size=1, max_size=500))
    spoilt = torch.frombuffer(message, dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(PrivacyError):
        parties.server.aggregate({**messages, victim: spoilt})


@pytest.mark.parametrize("name", SECRET, indirect=True)
def test_vectors_of_unequal_length_are_refused(parties: Parties) -> None:
    names = NAMES[:3]
    parties.open(names)
    with pytest.raises(PrivacyError):
        parties.opened(parties.protect({name: torch.ones(4 + (name == names[1])) for name in names}))


@pytest.mark.parametrize("name", ["paillier", "bfv", "ckks"], indirect=True)
def test_a_total_that_was_changed_does_not_open(parties: Parties) -> None:
    names = NAMES[:3]
    parties.open(names)
    total = parties.server.aggregate(parties.protect({name: torch.ones(4) for name in names}))
    for place in (0, 30, 80, len(total) - 1):
        spoilt = total.clone()
        spoilt[place] ^= 4
        with pytest.raises(PrivacyError):
            parties.clients[names[0]].reveal(spoilt, 3)
    with pytest.raises(PrivacyError):
        parties.clients[names[0]].reveal(total, 2)
    assert parties.clients[names[1]].reveal(total, 3).tolist() == pytest.approx([3.0] * 4, abs=1e-6)


def test_the_description_is_complete_and_states_the_cost_of_a_number(parties: Parties) -> None:
    description = parties.backend.describe()
    assert description.backend == type(parties.backend).__name__
    assert all(vars(description).values())
    names, length = NAMES[:2], 4096 if "aillier" in description.backend else 16 * 4096
    parties.open(names)
    message = parties.protect({name: torch.linspace(-1, 1, length) for name in names})[names[0]]
    opens = 2 if description.backend == "ThresholdPaillier" else 1  # who opens a sum sends parts of it, too
    sent = opens * message.numel() * message.element_size()
    assert sent / length == pytest.approx(description.bytes_per_number, rel=0.03)


def test_a_federation_gives_what_plain_sums_give(name: str) -> None:
    """Weighted means and sums with a client that sends nothing, one that is absent, and one that only receives."""
    generator = torch.Generator().manual_seed(1)
    sent = {
        client: {"w": torch.randn(6, 2, generator=generator), "n": torch.tensor(index)}
        for index, client in enumerate("abct")
    }
    results = []
    for backend in (Plain(FixedPoint()), BACKENDS[name]()):
        fed = Federation([*sent], "t", privacy=backend)
        results.append([
            fed.mean("w", sent, weights={"a": 3.0, "b": 1.0, "c": 0.5, "t": 2.0}),
            fed.sum("w", sent, among=["a", "b", "c"], to=["t"]),
            fed.mean("w", {client: sent[client] for client in "abc"}),  # t is asked and sends nothing
        ])  # fmt: skip
    for plain, ours in zip(*results, strict=True):
        assert plain.keys() == ours.keys()
        for client in plain:
            assert plain[client].keys() == ours[client].keys()
            for ours_entry, entry in zip(ours[client].values(), plain[client].values(), strict=True):
                torch.testing.assert_close(ours_entry, entry, rtol=0, atol=0 if name in EXACT else 1e-5)
