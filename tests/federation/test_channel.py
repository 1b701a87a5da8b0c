"""Channels: declarations, the choices that fit them, and messages that differ by receiver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import QUICK
from fedlit.federation import (
    Channel,
    ChannelError,
    Client,
    DivergedError,
    Federation,
    Fraction,
    Open,
    Pairwise,
    PayloadError,
    RosterError,
    Schedule,
    Summed,
)
from fedlit.federation.choices import Channels
from fedlit.federation.leaks import seen_by_the_server
from fedlit.privacy import (
    CKKSAffine,
    GaussianMechanism,
    Paillier,
    PairwiseMasking,
    Plain,
    PlainAffine,
    ThresholdPaillier,
)
from refused import refused

NAMES = ["a", "b", "c", "t"]
WEIGHTS = Summed("weights", "weights of the network", up="sources")
FEATURES = Open("features", "embedded samples", up="target", to="sources", otherwise="take exchange='moments'")
DOT = Pairwise("dot", "the target's direction", up="target", to="sources", beside="weights")
NOISE = GaussianMechanism(1.0, 1.0)


def federation(*channels: Channel, **choices: Any) -> Federation:
    return Federation(NAMES, "t", channels=channels, **choices)


def each(*names: str, value: float = 1.0) -> dict[str, dict[str, Tensor]]:
    return {name: {"x": torch.full((2,), value)} for name in names}


@pytest.mark.parametrize(
    ("argument", "make", "error"),
    [
        *(("name", lambda name=name: Open(name), ValueError) for name in ("", "x" * 33, "é" * 17, "weights/keys")),
        ("up", lambda: Open("news", up="source"), ValueError),  # type: ignore[arg-type]
        ("to", lambda: Pairwise("dot", to="c3"), ValueError),  # type: ignore[arg-type]
        ("too_few", lambda: Summed("w", too_few="wait"), ValueError),  # type: ignore[arg-type]
        ("channels", lambda: federation("weights"), TypeError),  # type: ignore[arg-type]
        ("privacy", lambda: federation(WEIGHTS, privacy=Plain), TypeError),
        ("two_party", lambda: federation(WEIGHTS, two_party={"dot": Plain()}), TypeError),
        ("differential_privacy", lambda: federation(WEIGHTS, differential_privacy=1.0), TypeError),
        ("reports", lambda: federation(WEIGHTS, reports="none"), TypeError),
    ],
)
def test_arguments_out_of_range_are_refused(argument: str, make: Callable[[], Any], error: type[Exception]) -> None:
    with refused(argument, error):
        make()


def test_the_first_declaration_of_a_name_counts() -> None:
    fed = federation(WEIGHTS, Summed("weights", "others"), FEATURES)
    assert [*fed.channels] == ["weights", "features"]
    fed.channels.declare([Open("features", "others"), Open("later", "more")])
    assert [*fed.channels] == ["weights", "features", "later"]
    assert fed.channels["features"].declared is FEATURES


def test_each_channel_knows_who_sends_and_what_protects_it() -> None:
    backend = PairwiseMasking(colluders=0)
    clients = [Client("a"), Client("b"), Client("c", "target", labelled=False), Client("d")]
    learn = Summed("learn", up="learners", to="learners")
    samples = Open("features", "embedded samples", up="target", to="sources")
    fed = Federation(clients, "c", channels=[WEIGHTS, samples, DOT, learn], learners=["a", "d"], privacy=backend)
    found = {name: (channel.senders, channel.receivers) for name, channel in fed.channels.items()}
    everyone, sources = ("a", "b", "c", "d"), ("a", "b", "d")
    assert found == {
        "weights": (sources, everyone),
        "features": (("c",), sources),
        "dot": (("c",), sources),
        "learn": (("a", "d"), ("a", "d")),
    }
    assert fed.channels["weights"].description == backend.describe_round(3)
    assert fed.channels["weights"].hides
    assert fed.channels["features"].description is None
    assert fed.channels["dot"].protocol is None, "asked for by two_party alone, as a summed channel does its work"
    assert fed.channels["features"].sent == (
        "in the clear to who receives it, encrypted on its way: embedded samples, from the target to the sources, "
        "every round"
    )
    singly = federation(Summed("update", "what has changed", singly=True)).channels["update"]
    assert singly.sent.startswith("in the clear: ")
    assert singly.description is None


COUNTS = Summed("counts", "numbers of samples", unblurred="a count is exact")
MASKED = PairwiseMasking(colluders=0)


@pytest.mark.parametrize(
    ("argument", "choices"),
    [
        ("privacy", {"privacy": {"wieghts": Plain()}}),
        ("two_party", {"two_party": {"dots": PlainAffine()}}),
        ("differential_privacy", {"differential_privacy": {"wieghts": NOISE}}),
        ("heard", {"heard": {"wieghts": Fraction(0.5)}}),
        ("privacy", {"privacy": {"weights": Plain(), "features": Plain()}}),  # an open channel
        ("privacy", {"privacy": MASKED}),
        ("two_party", {"two_party": {"weights": PlainAffine()}}),
        ("two_party", {"two_party": PlainAffine()}),  # beside a summed channel in plaintext
        ("differential_privacy", {"differential_privacy": {"counts": NOISE}}),
        ("differential_privacy", {"differential_privacy": NOISE}),
        ("privacy", {"privacy": {"counts": Plain()}}),  # leaves weights in plaintext
        ("rounds[0]", {"heard": {"weights": Schedule([["nobody"]])}}),
    ],
)
def test_a_choice_that_no_channel_can_take_is_refused_at_once(argument: str, choices: dict[str, Any]) -> None:
    with refused(argument, RosterError):
        federation(WEIGHTS, FEATURES, DOT, COUNTS, **choices)


def test_fewer_senders_than_a_backend_can_hide_are_refused_at_once() -> None:
    alone = Summed("alone", up="target")
    with pytest.raises(ChannelError, match=r"\['t'\] alone can send"):
        federation(alone, privacy=MASKED)
    federation(alone, privacy={"alone": Plain()})
    with pytest.raises(ChannelError, match=r"\['a'\] alone can send"):
        federation(Summed("learn", up="learners"), learners=["a"], privacy=MASKED)


def test_protocols_are_refused_where_nothing_is_pairwise_or_another_pair_is_left_out() -> None:
    with refused("two_party", ChannelError) as caught:
        federation(Summed("moments", otherwise="take exchange='pairwise'"), two_party=PlainAffine())
    assert "or take exchange='pairwise'" in str(caught.value)
    with refused("two_party", ChannelError):
        federation(Pairwise("dot"), Pairwise("third"), two_party={"dot": CKKSAffine()})


def test_a_later_declaration_is_checked_as_the_first_ones_are() -> None:
    fed = federation(WEIGHTS, privacy={"weights": MASKED})
    with refused("privacy", ChannelError):
        fed.channels.declare([Summed("scores", "statistics")])


def test_watched_numbers_are_never_blurred() -> None:
    watched = Open("metrics", unblurred="numbers are watched", watched=True)
    fed = federation(WEIGHTS, watched, differential_privacy=NOISE)
    assert fed.channels["metrics"].mechanism is None
    assert fed.channels["weights"].mechanism is NOISE


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (lambda fed: fed.mean("wieghts", {}), "is not declared"),
        (lambda fed: fed.present("wieghts"), "is not declared"),
        (lambda fed: fed.exchange("weights", {}), "in the clear cannot go over"),
        (lambda fed: fed.sum("features", {}), "summed cannot go over"),
        (lambda fed: fed.affine("weights", {}, {}, [], 1), "pairwise cannot go over"),
        (lambda fed: fed.mean("weights", each("a", "t"), ["a", "t"]), r"\['t'\] cannot send"),
        (lambda fed: fed.exchange("features", each("a")), r"\['a'\] cannot send"),
        (lambda fed: fed.exchange("features", {}, to=["t"]), r"\['t'\] cannot receive"),
        (lambda fed: fed.exchange("features", {}, to={"t": ["t"]}), r"\['t'\] cannot receive"),
    ],
)
def test_what_is_not_declared_cannot_be_sent(send: Callable[[Federation], Any], message: str) -> None:
    fed = federation(WEIGHTS, FEATURES, DOT)
    with pytest.raises(ChannelError, match=message):
        send(fed)
    assert not fed.ledger.bytes_by_channel()


def test_defaults_are_those_of_the_declaration_and_without_any_all_names_may_be_sent_over() -> None:
    fed = federation(WEIGHTS, FEATURES)
    got = fed.mean("weights", each("a", "b", "c") | each("b", value=4.0))
    assert got.keys() == set(NAMES)
    assert got["t"]["x"].tolist() == [2.0, 2.0]
    got_features = fed.exchange("features", each("t"))
    assert {name: [*senders] for name, senders in got_features.items()} == {"a": ["t"], "b": ["t"], "c": ["t"]}
    fed = Federation(NAMES, "t")
    assert fed.mean("anything", each(*NAMES))["a"]["x"].tolist() == [1.0, 1.0]
    received = fed.exchange("else", {"t": {fed.clients[0]: each("t")["t"]}})  # type: ignore[dict-item]
    assert {name: [*messages] for name, messages in received.items()} == {"a": ["t"]}


def separate(sender: str, *receivers: str) -> dict[str, dict[str, Tensor]]:
    return {name: {"x": torch.tensor([10.0 * NAMES.index(sender) + NAMES.index(name)])} for name in receivers}


def test_messages_to_all_and_to_each_go_by_one_call() -> None:
    fed = federation(Open("news"))
    got = fed.exchange("news", {"a": {"x": torch.zeros(3)}, "t": separate("t", "a", "c")})
    senders = {name: sorted(messages) for name, messages in got.items()}
    assert senders == {"a": ["t"], "b": ["a"], "c": ["a", "t"], "t": ["a"]}
    assert got["c"]["t"]["x"].tolist() == [32.0]
    fed, one = (federation(Open("gradient", up="target", to="sources")) for _ in range(2))
    fed.exchange("gradient", {"t": separate("t", "a", "b", "c")})
    one.exchange("gradient", {"t": {"x": torch.zeros(1)}})
    assert [*fed.ledger] == [*one.ledger], "as many bytes as where all receive the same"
    assert fed.state_dict()["calls"] == 1


def test_who_is_away_or_not_meant_gets_none() -> None:
    fed = federation(Open("news", to="sources"), participation=Schedule([["a", "b", "t"]]))
    got = fed.exchange("news", {"t": separate("t", "a", "b", "c")}, to={"t": ["b", "c"]})
    assert got.keys() == {"b"}


@pytest.mark.parametrize(
    ("payload", "error", "message"),
    [
        ({"a": {"x": torch.ones(1)}, "B": {"x": torch.ones(1)}}, RosterError, "must be a list of clients"),
        ({"a": {"x": torch.ones(1)}, "mu": torch.ones(1)}, PayloadError, "got both"),
        ({"a": {"x": torch.ones(1)}, "t": {"x": torch.ones(1)}}, ChannelError, r"\['t'\] cannot receive"),
        ({"a": {"x": torch.tensor([float("nan")])}, "b": {"x": torch.zeros(1)}}, DivergedError, "client 't'"),
    ],
)
def test_no_message_to_one_receiver_is_lost_without_a_word(
    payload: dict[str, Any], error: type[Exception], message: str
) -> None:
    fed = federation(Open("news", to="sources"))
    with pytest.raises(error, match=message):
        fed.exchange("news", {"t": payload})


def test_learners_differ_between_rounds_and_have_to_be_named() -> None:
    fed = federation(Summed("weights", up="learners"), Open("news", to="learners"), learners=["a"])
    with pytest.raises(ChannelError, match="among must be given"):
        fed.mean("weights", each("a", "b"))
    with pytest.raises(ChannelError, match="to must be given"):
        fed.exchange("news", each("t"))
    assert fed.mean("weights", each("a", "b", value=2.0), among=["a", "b"])["c"]["x"].tolist() == [2.0, 2.0]


def test_each_message_costs_privacy() -> None:
    whole, by_receiver = (federation(Open("news"), differential_privacy=NOISE) for _ in range(2))
    whole.exchange("news", {"t": {"x": torch.zeros(1)}})
    by_receiver.exchange("news", {"t": separate("t", "a", "b", "c")})
    assert by_receiver.epsilon("message")["t"] > whole.epsilon("message")["t"], "three releases, not one"
    three = federation(Open("news"), differential_privacy=NOISE)
    for _ in range(3):
        three.exchange("news", {"t": {"x": torch.zeros(1)}})
    assert by_receiver.epsilon("message") == three.epsilon("message")


@pytest.mark.parametrize(
    ("backend", "placement", "seen"),
    [
        (PairwiseMasking(), [["a", "b"], ["c"], ["t"]], "hosts ['a', 'b']"),
        (PairwiseMasking(), [["a"], ["b", "c"], ["t"]], None),
        (PairwiseMasking(), [["t"], ["a", "b", "c"]], None),
        (PairwiseMasking(), [[], ["a", "b"], ["c", "t"]], None),
        (PairwiseMasking(threshold=0.51, colluders=0), [["a", "b"], ["c"], ["t"]], "hosts ['a', 'b']"),
        (Plain(), [["a", "b"], ["c"], ["t"]], None),
        (Paillier(key_bits=1024, insecure_test_keys=True), [["a"], ["b", "c", "t"]], "hosts ['a']"),
        (Paillier(key_bits=1024, insecure_test_keys=True), [["t"], ["a", "b", "c"]], None),
        (ThresholdPaillier(**QUICK), [["a"], ["b", "c", "t"]], "hosts ['a']"),
        (ThresholdPaillier(**QUICK), [["b"], ["a", "c", "t"]], None),
        (ThresholdPaillier(dealer="t", **QUICK), [["t"], ["a", "b", "c"]], "hosts ['t']"),
    ],
)
def test_a_server_that_hosts_enough_clients_to_read_the_others_is_told(
    backend: Any, placement: list[list[str]], seen: str | None
) -> None:
    clients = [Client("a"), Client("b"), Client("c"), Client("t", "target", labelled=False)]
    channels = Channels([WEIGHTS], clients, privacy=backend)
    ranks = {name: rank for rank, share in enumerate(placement) for name in share}
    sentences = seen_by_the_server(channels, {client.name: ranks[client.name] for client in clients})
    assert len(sentences) == (seen is not None)
    assert all(str(seen) in sentence for sentence in sentences)
