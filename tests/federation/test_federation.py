"""Exchanges, means and sums of a federation in one process."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlit.federation import (
    SERVER,
    Client,
    DivergedError,
    Facts,
    Federation,
    FederationError,
    Fraction,
    PayloadError,
    RosterError,
    Schedule,
    Summed,
)
from fedlit.federation.sums import driver
from fedlit.functional import fedavg
from fedlit.privacy import FixedPoint, PairwiseMasking, Plain
from fedlit.privacy.masking.client import MaskingClient
from fedlit.privacy.masking.server import MaskingServer
from fedlit.privacy.packing import pack

NAMES = ["a", "b", "c", "t"]
X = torch.tensor([1.0, 2.0])


def federation(**arguments: Any) -> Federation:
    return Federation(NAMES, "t", **arguments)


def same(value: float, names: list[str] = NAMES) -> dict[str, dict[str, Tensor]]:
    return {name: {"x": torch.full((2,), value)} for name in names}


def size(payload: Mapping[str, Tensor]) -> int:
    """Bytes of a message, from the description of the wire format alone."""
    header = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in payload.items()]
    body = sum(t.numel() * t.element_size() for t in payload.values())
    return 4 + len(json.dumps(header, separators=(",", ":"))) + body


def uplink(payload: Mapping[str, Tensor], vector: Tensor, **more: Tensor) -> int:
    """Bytes of a message of a sum, which has the header of the payload as one entry."""
    body = sum(t.numel() * t.element_size() for t in payload.values())
    return size({"schema": torch.zeros(size(payload) - 4 - body, dtype=torch.uint8), **more, "sum": vector})


def downlink(payload: Mapping[str, Tensor], vector: Tensor) -> int:
    return uplink(payload, vector, about=torch.zeros(2, dtype=torch.int32))


def routes(received: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {(sender, receiver) for receiver, messages in received.items() for sender in messages}


# ---------------------------------------------------------------- roster


def test_introductions_bring_sizes() -> None:
    fed = federation()
    with pytest.raises(RosterError, match=r"got none for \['a', 'b', 'c', 't'\]"):
        _ = fed.weights
    fed.introduce({name: Facts(10 * (i + 1), (3, 8, 8)) for i, name in enumerate(NAMES)})
    assert fed.weights == {"a": 10, "b": 20, "c": 30, "t": 40}
    assert fed.present()[1].num_samples == 20
    given = Federation([Client("a", num_samples=3), Client("t", "target", num_samples=4)], "t")
    assert given.weights == {"a": 3, "t": 4}


@pytest.mark.parametrize(
    ("shape", "message"), [(None, r"\['c'\] have no training data"), ((3,), "client 'c' have shape")]
)
def test_introductions_that_do_not_fit_are_refused(shape: tuple[int] | None, message: str) -> None:
    facts = {name: Facts(1, (2,)) for name in "abt"} | ({"c": Facts(1, shape)} if shape else {})
    with pytest.raises(RosterError, match=message):
        federation().introduce(facts)


# ---------------------------------------------------------------- exchange


@pytest.mark.parametrize(
    ("senders", "to", "expected"),
    [
        (["a"], None, {("a", "b"), ("a", "c"), ("a", "t")}),
        (["a", "b"], (name for name in ["t", "b"]), {("a", "b"), ("a", "t"), ("b", "t")}),
        (NAMES, {"a": ["b"], "t": federation().sources}, {("a", "b"), ("t", "a"), ("t", "b"), ("t", "c")}),
    ],
)
def test_messages_reach_everybody_else_or_the_receivers_chosen(senders: list[str], to: Any, expected: Any) -> None:
    received = federation().exchange("x", same(1.0, senders), **({} if to is None else {"to": to}))
    assert routes(received) == expected
    received = federation().exchange("x", {"a": {"x": torch.zeros(3)}, "b": {"y": torch.zeros(1, 2)}}, to=["t"])
    assert (received["t"]["a"]["x"].shape, received["t"]["b"]["y"].shape) == ((3,), (1, 2))


@pytest.mark.parametrize("to", [[], {}, {"a": []}])
def test_no_receivers_means_nobody_and_not_everybody(to: Any) -> None:
    fed = federation()
    assert fed.exchange("x", same(1.0, ["a"]), to=to) == {}
    assert len(fed.ledger) == 0
    assert fed.mean("x", same(1.0), to=[]) == {}


@pytest.mark.parametrize(
    "call",
    [
        lambda fed: fed.exchange("x", same(1.0, ["a"]), to=["zoe"]),
        lambda fed: fed.exchange("x", same(1.0, ["a"]), to={"zoe": ["a"]}),
        lambda fed: fed.exchange("x", same(1.0, ["a"]), to={"a": ["zoe"]}),
        lambda fed: fed.exchange("x", same(1.0, ["a"]), to="t"),  # which would be taken letter by letter
        lambda fed: fed.mean("x", same(1.0), among=["a", "zoe"]),
        lambda fed: fed.mean("x", same(1.0), to=["a", "zoe"]),
        *(lambda fed, verb=verb: getattr(fed, verb)("x", {"zoe": {"x": X}}) for verb in ("exchange", "mean", "sum")),
        lambda fed: fed.report({"zoe": {"acc": 1.0}}, ["acc"]),
    ],
)
def test_unknown_clients_are_refused(call: Callable[[Federation], Any]) -> None:
    with pytest.raises(RosterError, match="clients"):
        call(federation())


def test_absent_clients_neither_send_nor_receive() -> None:
    fed = federation(participation=Schedule([["a", "t"]]))
    assert routes(fed.exchange("x", same(1.0))) == {("a", "t"), ("t", "a")}
    assert {(entry.sender, entry.receiver) for entry in fed.ledger} == {("a", "t"), ("t", "a")}
    assert list(fed.mean("w", same(1.0))) == ["a", "t"]
    fed = federation(heard={"x": Schedule([["a", "t"]])})
    assert routes(fed.exchange("x", same(1.0), to=["t"])) == {("a", "t")}
    assert routes(fed.exchange("y", same(1.0), to=["t"])) == {("a", "t"), ("b", "t"), ("c", "t")}


@pytest.mark.parametrize("verb", ["exchange", "mean", "sum"])
def test_what_leaves_a_client_is_detached_and_copied(verb: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    received = getattr(federation(), verb)("x", {"a": {"x": parameter}}, to=["t"])["t"]
    tensor = (received["a"] if verb == "exchange" else received)["x"]
    with torch.no_grad():
        parameter.fill_(7.0)
    assert tensor.tolist() == [1.0, 1.0]
    assert not tensor.requires_grad
    tensor.zero_()
    assert parameter.tolist() == [7.0, 7.0]


def test_an_exchange_with_nobody_present_is_skipped() -> None:
    fed = federation(participation=Schedule([[]]))
    assert fed.exchange("x", same(1.0)) == {}
    assert fed.mean("x", same(1.0)) == {}
    assert fed.sum("x", same(1.0)) == {}
    assert fed.catch_up("x") == {}
    assert len(fed.ledger) == 0


# ---------------------------------------------------------------- mean and sum


vectors = st.integers(1, 4).flatmap(
    lambda clients: st.tuples(
        st.lists(
            st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=3, max_size=3), min_size=clients, max_size=clients
        ),
        st.lists(st.floats(1e-3, 1e6), min_size=clients, max_size=clients),
    )
)


@settings(deadline=None)
@given(vectors)
def test_the_mean_agrees_with_fedavg_and_numpy(drawn: tuple[list[list[float]], list[float]]) -> None:
    values, weights = drawn
    updates = [{"x": torch.tensor(row[:2]).double(), "y": torch.tensor(row[2]).double()} for row in values]
    names = NAMES[: len(values)]
    by_name = dict(zip(names, weights, strict=True))
    mean = federation().mean("w", dict(zip(names, updates, strict=True)), weights=by_name)["t"]
    expected = fedavg(updates, weights)
    for name in ("x", "y"):
        stacked = np.stack([update[name].numpy() for update in updates])
        bound = 1e-12 * max(1.0, float(np.abs(stacked).max()))
        np.testing.assert_allclose(mean[name].numpy(), np.average(stacked, axis=0, weights=weights), rtol=0, atol=bound)
        np.testing.assert_allclose(mean[name].numpy(), expected[name].numpy(), rtol=0, atol=bound)


@settings(deadline=None)
@given(vectors)
def test_the_sum_is_numpys_in_roster_order(drawn: tuple[list[list[float]], list[float]]) -> None:
    values, _ = drawn
    names = NAMES[: len(values)]
    payloads = {name: {"x": torch.tensor(row)} for name, row in zip(names, values, strict=True)}
    total = federation().sum("w", dict(reversed(payloads.items())))["a"]["x"]
    expected = np.zeros(3, dtype=np.float32) + np.asarray(values[0], dtype=np.float32)
    for row in values[1:]:
        expected += np.asarray(row, dtype=np.float32)
    assert np.array_equal(total.numpy(), expected)


def test_among_chooses_whose_payloads_count_and_to_who_receives() -> None:
    fed = federation()
    payloads = {name: {"x": torch.tensor(float(index))} for index, name in enumerate(NAMES)}
    mean = fed.mean("w", payloads, among=fed.sources[1:], to=[fed.target])
    assert list(mean) == ["t"]
    assert mean["t"]["x"].item() == 1.5
    senders = {entry.sender for entry in fed.ledger}
    assert senders == {"b", "c", SERVER}


def test_the_scale_of_weights_does_not_matter_even_at_the_ends_of_float32() -> None:
    payloads = {"a": {"x": torch.tensor([1e30])}, "b": {"x": torch.tensor([3e30])}}
    for unit in (1e-30, 1.0, 1e30):
        mean = federation().mean("w", payloads, weights={"a": unit, "b": unit})
        assert math.isclose(mean["t"]["x"].item(), 2e30, rel_tol=1e-6)


@pytest.mark.parametrize("weights", [{"a": 1.0}, *({"a": 1.0, "b": b} for b in (0.0, -1.0, math.inf, math.nan))])
def test_missing_or_useless_weights_of_senders_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(PayloadError, match="weights must"):
        federation().mean("w", same(1.0, ["a", "b"]), weights=weights)
    assert federation().mean("w", same(2.0), among=["a"], weights=weights)["t"]["x"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "other", [{"x": torch.zeros(3)}, {"x": torch.zeros(2).double()}, {"y": torch.zeros(2)}, {"y": X, "x": X}]
)
def test_payloads_that_cannot_be_added_are_refused_by_client(other: dict[str, Tensor]) -> None:
    with pytest.raises(PayloadError, match="client 'b' differs from 'a'"):
        federation().mean("w", {"a": {"x": X, "y": X} if len(other) == 2 else {"x": X}, "b": other})


@pytest.mark.parametrize("verb", ["exchange", "mean", "sum"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_diverged_client_is_named(verb: str, value: float) -> None:
    fed = federation()
    fed.round_idx = 12
    with pytest.raises(DivergedError, match=r"client 'b' .* channel 'w' in round 12"):
        getattr(fed, verb)("w", {"a": {"x": X}, "b": {"x": torch.tensor([0.0, value])}})
    assert len(fed.ledger) == 0
    fed.exchange("w", same(1.0))  # the failure was raised, and is over
    for words in ("the first", "the second"):
        fed.fail(DivergedError(words))
    with pytest.raises(DivergedError, match="the first"):
        fed.report({}, ["loss"])
    assert fed.report({}, ["loss"]) == {}


# ---------------------------------------------------------------- away and back


def test_a_client_that_was_away_catches_up_once() -> None:
    fed = federation(participation=Schedule([["a", "t"], ["a", "b", "t"], ["a", "b", "c", "t"]]))
    fed.mean("w", same(3.0))
    before = fed.ledger.total_bytes
    fed.round_idx = 1
    assert values(fed.catch_up("w")) == {"b": [3.0, 3.0]}
    assert fed.ledger.total_bytes - before == downlink(same(0.0)["a"], torch.zeros(3))
    assert fed.catch_up("w") == {}
    fed.round_idx = 2
    assert list(fed.catch_up("w")) == ["c"]
    assert fed.catch_up("other") == {}


def values(received: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[float]]:
    return {name: payload["x"].tolist() for name, payload in received.items()}


def test_what_is_caught_up_with_is_the_last_total_and_not_what_a_receiver_made_of_it() -> None:
    fed = federation(participation=Schedule([["a", "t"], [], ["b", "c", "t"], NAMES]))
    fed.sum("w", same(3.0))["a"]["x"].zero_()
    fed.round_idx = 1
    assert fed.sum("w", same(4.0)) == {}, "over nobody: the last one stays"
    fed.round_idx = 2
    assert values(fed.catch_up("w")) == {"b": [6.0, 6.0], "c": [6.0, 6.0]}
    fed.sum("w", same(5.0))
    fed.round_idx = 3
    assert values(fed.catch_up("w")) == {"a": [15.0, 15.0]}


def test_a_mean_that_was_for_others_is_not_caught_up_with() -> None:
    fed = federation(participation=Schedule([["a", "t"], NAMES]))
    fed.mean("w", same(3.0), to=["a", "b"])
    fed.round_idx = 1
    assert list(fed.catch_up("w")) == ["b"]  # "c" was absent and "t" present, and neither was a receiver
    fed = federation(heard={"w": Schedule([["a", "t"], NAMES])})
    fed.mean("w", same(3.0))
    fed.round_idx = 1
    assert list(fed.catch_up("w")) == ["b", "c"]


# ---------------------------------------------------------------- report


def test_a_mean_over_too_few_is_skipped_with_one_warning_per_channel_if_declared() -> None:
    rounds = Schedule([["a", "t"], ["a", "t"], ["a", "b", "t"]])
    declared = [Summed("x", too_few="skip"), Summed("y", too_few="skip"), Summed("z")]
    talk = federation(privacy=PairwiseMasking(colluders=0), participation=rounds, channels=declared)
    sources = ["a", "b", "c"]
    with pytest.warns(UserWarning, match=r"channel 'x': \['a'\] alone"):
        assert talk.mean("x", same(1.0), among=sources) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        talk.round_idx = 1
        assert talk.mean("x", same(1.0), among=sources) == {}
    with pytest.warns(UserWarning, match="channel 'y'"):
        talk.mean("y", same(1.0), among=sources)
    assert len(talk.ledger) == 0
    with pytest.raises(FederationError, match=r"run over \['a'\] alone"):
        talk.mean("z", same(1.0), among=sources)
    talk.round_idx = 2
    assert talk.mean("x", same(1.0), among=sources).keys() == {"a", "b", "t"}


@pytest.mark.filterwarnings("error")
def test_too_few_is_never_the_case_without_privacy_nor_where_nobody_is_present() -> None:
    declared = [Summed("x", too_few="skip")]
    one = federation(participation=Schedule([["a", "t"]]), channels=declared)
    assert one.mean("x", same(1.0), among=["a", "b"]).keys() == {"a", "t"}
    nobody = federation(participation=Schedule([["t"]]), privacy=PairwiseMasking(colluders=0), channels=declared)
    assert nobody.mean("x", same(1.0), among=["a", "b"]) == {}


@pytest.mark.parametrize("privacy", [None, PairwiseMasking(colluders=0)], ids=["plain", "masking"])
def test_absent_clients_send_and_receive_where_they_are_asked_to(privacy: PairwiseMasking | None) -> None:
    talk = federation(participation=Schedule([["a", "t"]]), heard={"x": Schedule([["t"]])}, privacy=privacy)
    payloads = {name: {"x": torch.full((2,), float(value))} for value, name in enumerate(NAMES)}
    mean = talk.mean("x", payloads, among=["a", "b", "c"], to=["b", "t"], absent_too=True)
    assert mean.keys() == {"b", "t"}
    torch.testing.assert_close(mean["t"]["x"], torch.tensor([1.0, 1.0]), atol=1e-5, rtol=0)
    received = talk.exchange("x", payloads, to=["c", "t"], absent_too=True)
    assert {name: set(senders) for name, senders in received.items()} == {"c": {*"abt"}, "t": {*"abc"}}
    assert talk.exchange("x", payloads) == {}  # without it, the target participates alone


def test_a_report_reaches_everyone() -> None:
    fed = federation()
    reported = fed.report({"c": {"acc": 0.5}, "a": {"loss": 1.5, "acc": math.nan}}, ["acc", "loss"])
    assert list(reported) == ["a", "c"]
    assert math.isnan(reported["a"]["acc"])
    assert (reported["a"]["loss"], reported["c"]) == (1.5, {"acc": 0.5})
    number = torch.zeros((), dtype=torch.float64)
    up = {"a": size({"acc": number, "loss": number}), "c": size({"acc": number})}
    assert {(e.sender, e.receiver): e.num_bytes for e in fed.ledger} == {
        **{(name, SERVER): num_bytes for name, num_bytes in up.items()},
        **{(SERVER, name): sum(up.values()) for name in NAMES},
    }


# ---------------------------------------------------------------- ledger


def test_an_exchange_is_booked_at_its_wire_size_for_each_receiver() -> None:
    fed = federation()
    payload = {"x": torch.zeros(3, 2), "n": torch.tensor(1)}
    fed.round_idx = 4
    fed.exchange("features", {"a": payload}, to=["b", "t"])
    fed.exchange("features", {"a": payload}, to=["t"])
    assert {(e.round_idx, e.channel, e.sender, e.receiver): (e.messages, e.num_bytes) for e in fed.ledger} == {
        (4, "features", "a", "b"): (1, size(payload)),
        (4, "features", "a", "t"): (2, 2 * size(payload)),
    }


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_mean_and_a_sum_are_booked_at_their_wire_size(weighted: bool, dtype: torch.dtype) -> None:
    fed = federation()
    payload = {"x": torch.zeros(3, 2, dtype=dtype), "h": torch.zeros(5, dtype=torch.float16)}
    vector = torch.zeros(11 + weighted, dtype=torch.float32 if dtype == torch.float32 else torch.float64)
    payloads = {name: payload for name in ["a", "c"]}
    (fed.mean if weighted else fed.sum)("w", payloads, to=["t", "a"])
    assert {(e.sender, e.receiver): e.num_bytes for e in fed.ledger} == {
        ("a", SERVER): uplink(payload, vector),
        ("c", SERVER): uplink(payload, vector),
        (SERVER, "a"): downlink(payload, vector),
        (SERVER, "t"): downlink(payload, vector),
    }


# ---------------------------------------------------------------- checkpoints


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_a_federation_goes_on_where_its_state_left_off() -> None:
    rule = Fraction(0.4)
    one = federation(participation=rule, seed=3)
    for one.round_idx in range(4):
        one.mean("w", same(float(one.round_idx)))
    one.batch_idx = 2
    other = federation(participation=rule, seed=99)
    other.load_state_dict(saved_and_loaded(one.state_dict()))
    assert (other.round_idx, other.batch_idx, other.seed) == (3, 2, 3)
    assert other.ledger == one.ledger
    assert other.ledger is not one.ledger
    for round_idx in range(4, 12):
        one.round_idx = other.round_idx = round_idx
        assert one.present() == other.present()
        left, right = one.catch_up("w"), other.catch_up("w")
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name]["x"], right[name]["x"]) for name in left)
        one.mean("w", same(float(round_idx)))
        other.mean("w", same(float(round_idx)))
    assert other.ledger == one.ledger


@pytest.mark.parametrize(
    ("clients", "target"),
    [(["a", "b", "t"], "t"), (["a", "b", "t", "c"], "t"), (NAMES, "a"), (["a", "b", "d", "t"], "t")],
)
def test_the_state_of_another_roster_is_refused(clients: list[str], target: str) -> None:
    state = federation().state_dict()
    with pytest.raises(RosterError, match="belongs to another federation"):
        Federation(clients, target).load_state_dict(state)


# ---------------------------------------------------------------- long vectors


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Vectors of any length are made one after the other; how many there were when each was."""
    alive: WeakSet[Tensor] = WeakSet()
    counts: list[int] = []

    def noted(payload: Mapping[str, Tensor], *others: Any) -> Tensor:
        vector = pack(payload, *others)
        if not vector.is_meta:
            counts.append(len(alive))
            alive.add(vector)
        return vector

    monkeypatch.setattr(driver, "_LONG", 1)
    monkeypatch.setattr(driver, "pack", noted)
    return counts


def unlike(**more: Tensor) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {name: {"x": torch.randn(50, 3, generator=generator), **more} for name in NAMES}


def test_long_plain_vectors_are_made_one_at_a_time(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    payloads, weights = unlike(half=torch.ones(2, dtype=torch.float16)), {"a": 3, "b": 1, "c": 2, "t": 7}
    one, other = federation(), federation()
    mean, total = one.mean("w", payloads, weights=weights), one.sum("s", payloads)
    assert made == [0, 0, 0, 0] * 2
    monkeypatch.setattr(driver, "_LONG", 1 << 20)
    again, summed = other.mean("w", payloads, weights=weights), other.sum("s", payloads)
    assert made[8:] == [0, 1, 2, 3] * 2
    for name in NAMES:
        for key in ("x", "half"):
            assert torch.equal(mean[name][key], again[name][key])
            assert torch.equal(total[name][key], summed[name][key])
    assert one.ledger == other.ledger


@pytest.mark.parametrize("checked", [3, math.inf])
def test_a_vector_goes_once_it_is_protected(checked: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tags and without."""
    alive: WeakSet[Tensor] = WeakSet()
    left: list[int] = []

    def noted(*arguments: Any) -> Tensor:
        vector = pack(*arguments)
        alive.add(vector)
        return vector

    def protected(client: MaskingClient, vector: Tensor) -> Tensor:
        left.append(len(alive))
        return protect(client, vector)

    protect = MaskingClient.protect
    monkeypatch.setattr(driver, "_CHECKED", checked)
    monkeypatch.setattr(driver, "pack", noted)
    monkeypatch.setattr(MaskingClient, "protect", protected)
    federation(privacy=PairwiseMasking()).sum("s", unlike())
    assert left == [4, 3, 2, 1]


def test_a_message_goes_once_the_server_has_added_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: WeakSet[Tensor] = WeakSet()
    left: list[int] = []

    def protected(client: MaskingClient, vector: Tensor) -> Tensor:
        message = protect(client, vector)
        alive.add(message)
        return message

    def adding(server: MaskingServer, name: str, message: Tensor) -> None:
        left.append(len(alive))
        add(server, name, message)

    protect, add = MaskingClient.protect, MaskingServer.add
    monkeypatch.setattr(MaskingClient, "protect", protected)
    monkeypatch.setattr(MaskingServer, "add", adding)
    federation(privacy=PairwiseMasking()).sum("s", unlike())
    assert left == [4, 3, 2, 1]


@pytest.mark.parametrize("extra", [torch.tensor([1, 2]), torch.tensor([True])])
def test_entries_that_are_no_floats_are_checked_before_any_is_sent(made: list[int], extra: Tensor) -> None:
    total = federation().sum("s", unlike(extra=extra))
    assert made == [0, 1, 2, 3]
    assert torch.equal(total["a"]["extra"], (4 * extra.int()).to(extra.dtype))


def test_a_long_vector_that_is_not_finite_is_refused_before_any_is_made(made: list[int]) -> None:
    payloads = unlike()
    payloads["c"]["x"][7, 1] = math.nan
    with pytest.raises(DivergedError, match="client 'c' would send NaN"):
        federation().sum("s", payloads)
    assert made == []


def test_backends_that_hide_make_their_vectors_at_once(made: list[int]) -> None:
    fed = federation(privacy=PairwiseMasking())
    total = fed.sum("s", unlike())
    assert made == [0, 1, 2, 3]
    assert total["a"]["x"].shape == (50, 3)


@pytest.mark.slow
def test_a_default_masked_sum_of_more_clients_than_32_bits_hold_is_that_of_a_plain_one() -> None:
    names = [f"c{index}" for index in range(66)]
    generator = torch.Generator().manual_seed(0)
    payloads = {name: {"x": 64 * torch.rand(3, generator=generator) - 32} for name in names}
    masked, plain = (
        Federation(names, "c0", privacy=backend).sum("s", payloads)["c5"]["x"]
        for backend in (PairwiseMasking(), Plain(FixedPoint()))
    )
    assert torch.equal(masked, plain)


def test_numbers_are_sent_to_who_is_present_or_reports() -> None:
    fed = federation(participation=Schedule([["a", "t"]]))
    assert fed.report({"c": {"acc": 0.5}, "a": {"acc": 1.0}}, ["acc"]) == {"a": {"acc": 1.0}, "c": {"acc": 0.5}}
    entries = {(each.sender, each.receiver) for each in fed.ledger}
    assert entries == {("a", SERVER), ("c", SERVER), (SERVER, "a"), (SERVER, "c"), (SERVER, "t")}
