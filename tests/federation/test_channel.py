"""Channels: what a declaration lets through, what a choice for it must fit, and messages that differ by receiver."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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
from fedlit.federation.channel import declared_by
from fedlit.federation.choices import Channels
from fedlit.federation.leaks import seen_by_the_server
from fedlit.federation.transport import OneProcess, Transport
from fedlit.privacy import CKKSAffine, GaussianMechanism, Paillier, PairwiseMasking, Plain, PlainAffine
from fedlit.training.optimisation import default_optimizer
from thread_transport import on_ranks

NAMES = ["a", "b", "c", "t"]
WEIGHTS = Summed("weights", "weights of the network", up="sources")
FEATURES = Open("features", "embedded samples", up="target", to="sources", otherwise="take exchange='moments'")
DOT = Pairwise("dot", "the target's direction", up="target", to="sources", beside="weights")
NOISE = GaussianMechanism(1.0, 1.0)


def federation(*channels: Channel, **choices: Any) -> Federation:
    return Federation(NAMES, "t", channels=channels, **choices)


def each(*names: str, value: float = 1.0) -> dict[str, dict[str, Tensor]]:
    return {name: {"x": torch.full((2,), value)} for name in names}


# ---------------------------------------------------------------- declarations


def test_a_declaration_says_itself_in_a_line() -> None:
    assert str(WEIGHTS) == "weights of the network, from the sources to everyone, every round"
    assert str(Open("votes", up="learners", to="target", how_often="once")) == (
        "votes, from those who train to the target, once"
    )


@pytest.mark.parametrize("name", ["", "x" * 33, "é" * 17, "weights/keys"])
def test_a_name_that_cannot_travel_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must have 1 to 32 bytes of UTF-8 and not end in '/keys', got"):
        Open(name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Open("news", up="source"), r"up of channel 'news' must be one of \('everyone', 'sources', .*'source'"),
        (lambda: Pairwise("dot", to="c3"), "to of channel 'dot' must be one of"),
        (lambda: Summed("w", too_few="wait"), "too_few of channel 'w' must be 'raise' or 'skip', got 'wait'"),
    ],
)
def test_words_that_mean_nothing_are_refused(make: Callable[[], Channel], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_channel_is_told() -> None:
    with pytest.raises(TypeError, match="channels must be of Summed, Open or Pairwise, got 'weights'"):
        federation("weights")  # type: ignore[arg-type]


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


# ---------------------------------------------------------------- choices, before anything is sent


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"privacy": {"wieghts": Plain()}},
            r"privacy names the channels \['wieghts'\], which this run does not have: it has \['weights', ",
        ),
        ({"two_party": {"dots": PlainAffine()}}, r"two_party names the channels \['dots'\]"),
        ({"differential_privacy": {"wieghts": NOISE}}, r"differential_privacy names the channels \['wieghts'\]"),
        ({"heard": {"wieghts": Fraction(0.5)}}, r"heard names the channels \['wieghts'\]"),
        (
            {"privacy": {"weights": Plain(), "features": Plain()}},
            r"privacy does not protect channel 'features' \(in the clear: embedded.* or take exchange='moments'",
        ),
        (
            {"privacy": PairwiseMasking(colluders=0)},
            "privacy does not protect channel 'features'.* take exchange='moments'",
        ),
        ({"two_party": {"weights": PlainAffine()}}, "two_party does not protect channel 'weights'"),
        (
            {"two_party": PlainAffine()},
            "two_party for 'dot' keeps from others what they could see anyway, as channel 'weights' is open: give the",
        ),
        ({"differential_privacy": {"counts": NOISE}}, "cannot blur channel 'counts' .*: a count is exact. Give it by"),
        ({"differential_privacy": NOISE}, r"cannot blur channel 'counts'.* for some of \['weights', 'features', 'dot'"),
        ({"privacy": {"counts": Plain()}}, r"privacy names the channels \['counts'\], but not 'weights', whose mes"),
        ({"heard": {"weights": Schedule([["nobody"]])}}, r"nobody"),
    ],
)
def test_a_choice_that_no_channel_can_take_is_told_at_once(choices: dict[str, Any], message: str) -> None:
    counts = Summed("counts", "numbers of samples", unblurred="a count is exact")
    with pytest.raises(RosterError, match=message):
        federation(WEIGHTS, FEATURES, DOT, counts, **choices)


def test_fewer_senders_than_a_backend_can_hide_are_told_at_once() -> None:
    alone = Summed("alone", up="target")
    with pytest.raises(
        ChannelError, match=r"\['t'\] alone can send over channel 'alone'.* hides nothing of fewer than 2:"
    ):
        federation(alone, privacy=PairwiseMasking(colluders=0))
    federation(alone, privacy={"alone": Plain()})
    learners = Summed("learn", up="learners")
    with pytest.raises(ChannelError, match=r"\['a'\] alone can send over channel 'learn'"):
        federation(learners, learners=["a"], privacy=PairwiseMasking(colluders=0))


def test_protocols_where_nothing_is_pairwise_are_told_if_the_method_could_be_asked_for_it() -> None:
    either = Summed("moments", otherwise="take exchange='pairwise'")
    with pytest.raises(ChannelError, match="no channel of this run is pairwise: leave it out; or take exchange='pair"):
        federation(either, two_party=PlainAffine())
    with pytest.raises(ChannelError, match=r"two_party names the channels \['dot'\], but not 'third'"):
        federation(Pairwise("dot"), Pairwise("third"), two_party={"dot": CKKSAffine()})


def test_a_later_declaration_is_checked_as_the_first_ones_are() -> None:
    fed = federation(WEIGHTS, privacy={"weights": PairwiseMasking(colluders=0)})
    with pytest.raises(ChannelError, match=r"privacy names the channels \['weights'\], but not 'scores'"):
        fed.channels.declare([Summed("scores", "statistics")])


def test_watched_numbers_are_never_blurred() -> None:
    watched = Open("metrics", unblurred="numbers are watched", watched=True)
    fed = federation(WEIGHTS, watched, differential_privacy=NOISE)
    assert fed.channels["metrics"].mechanism is None
    assert fed.channels["weights"].mechanism is NOISE


# ---------------------------------------------------------------- what is not declared cannot be sent


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (
            lambda fed: fed.mean("wieghts", {}),
            r"'wieghts' is not declared, .* which has \['weights', 'features', 'dot'",
        ),
        (lambda fed: fed.exchange("weights", {}), "in the clear cannot go over channel 'weights' .summed: weights of"),
        (lambda fed: fed.sum("features", {}), "a message that is summed cannot go over channel 'features'"),
        (lambda fed: fed.affine("weights", {}, {}, [], 1), "a message that is pairwise cannot go over channel 'weig"),
        (lambda fed: fed.mean("weights", each("a", "t"), ["a", "t"]), r"\['t'\] cannot send over channel 'weights'"),
        (lambda fed: fed.exchange("features", each("a")), r"\['a'\] cannot send over channel 'features'"),
        (lambda fed: fed.exchange("features", {}, to=["t"]), r"\['t'\] cannot receive over channel 'features'"),
        (lambda fed: fed.exchange("features", {}, to={"t": ["t"]}), r"\['t'\] cannot receive over channel 'features'"),
    ],
)
def test_what_is_not_declared_cannot_be_sent(send: Callable[[Federation], Any], message: str) -> None:
    fed = federation(WEIGHTS, FEATURES, DOT)
    with pytest.raises(ChannelError, match=message):
        send(fed)
    assert not fed.ledger.bytes_by_channel()


def test_defaults_are_those_of_the_declaration() -> None:
    fed = federation(WEIGHTS, FEATURES)
    got = fed.mean("weights", each("a", "b", "c") | each("b", value=4.0))
    assert got.keys() == set(NAMES)
    assert got["t"]["x"].tolist() == [2.0, 2.0]
    got_features = fed.exchange("features", each("t"))
    assert {name: [*senders] for name, senders in got_features.items()} == {"a": ["t"], "b": ["t"], "c": ["t"]}


def test_without_declarations_any_name_may_be_sent_over() -> None:
    fed = Federation(NAMES, "t")
    assert fed.mean("anything", each(*NAMES))["a"]["x"].tolist() == [1.0, 1.0]
    assert fed.exchange("else", each("a"), to=["b"])["b"]["a"]["x"].tolist() == [1.0, 1.0]


# ---------------------------------------------------------------- old names


def test_the_old_place_of_the_default_optimizer_says_where_it_is_now() -> None:
    with pytest.warns(FutureWarning, match=r"fedlit.optim is now called fedlit.training.optimisation; fedlit 0\.4"):
        old = runpy.run_module("fedlit.optim")
    assert old["default_optimizer"] is default_optimizer


# ---------------------------------------------------------------- a payload for each receiver


def told(sender: str, *receivers: str) -> dict[str, dict[str, Tensor]]:
    """Something else for each."""
    return {name: {"x": torch.tensor([10.0 * NAMES.index(sender) + NAMES.index(name)])} for name in receivers}


def test_a_sender_may_tell_each_receiver_something_else() -> None:
    fed = federation(Open("gradient", up="target", to="sources"))
    got = fed.exchange("gradient", {"t": told("t", "a", "b", "c")})
    assert {name: message["t"]["x"].tolist() for name, message in got.items()} == {
        "a": [30.0],
        "b": [31.0],
        "c": [32.0],
    }
    one = federation(Open("gradient", up="target", to="sources"))
    one.exchange("gradient", {"t": {"x": torch.zeros(1)}})
    assert [*fed.ledger] == [*one.ledger], "as many bytes as where all are told the same"
    assert fed.state_dict()["calls"] == 1


def test_messages_to_all_and_to_each_go_by_one_call() -> None:
    fed = federation(Open("news"))
    got = fed.exchange("news", {"a": {"x": torch.zeros(3)}, "t": told("t", "a", "c")})
    assert {name: sorted(messages) for name, messages in got.items()} == {
        "a": ["t"],
        "b": ["a"],
        "c": ["a", "t"],
        "t": ["a"],
    }
    assert got["c"]["t"]["x"].tolist() == [32.0]


def talk(transport: Transport) -> tuple[dict[str, dict[str, dict[str, Tensor]]], Any]:
    """What local clients get where some tell all the same and some each something else, and what was booked."""
    fed = Federation(NAMES, "t", channels=[Open("news")], transport=transport)
    said = {"a": {"x": torch.arange(3.0)}, "b": told("b", "a", "t"), "t": told("t", "a", "b", "c")}
    own = {client.name for client in fed.local_clients}
    got = fed.exchange("news", {name: payload for name, payload in said.items() if name in own})
    return got, [*fed.ledger]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_receiver_gets_its_own_whichever_rank_hosts_it(ranks: int) -> None:
    expected, booked = talk(OneProcess())
    parts = on_ranks(talk, ranks)
    got = {name: messages for part, _ in parts for name, messages in part.items()}
    assert {name: sorted(messages) for name, messages in got.items()} == {
        "a": ["b", "t"],
        "b": ["a", "t"],
        "c": ["a", "t"],
        "t": ["a", "b"],
    }
    for receiver, messages in expected.items():
        for sender, message in messages.items():
            assert torch.equal(got[receiver][sender]["x"], message["x"])
    assert all(ledger == booked for _, ledger in parts)


def test_who_is_away_or_not_meant_gets_none() -> None:
    fed = federation(Open("news", to="sources"), participation=Schedule([["a", "b", "t"]]))
    got = fed.exchange("news", {"t": told("t", "a", "b", "c")}, to={"t": ["b", "c"]})
    assert got.keys() == {"b"}


@pytest.mark.parametrize(
    ("payload", "error", "message"),
    [
        ({"a": {"x": torch.ones(1)}, "B": {"x": torch.ones(1)}}, RosterError, r"payloads\['t'\] must list clients"),
        ({"a": {"x": torch.ones(1)}, "mu": torch.ones(1)}, PayloadError, "or a payload for each receiver, got both"),
        ({"a": {"x": torch.ones(1)}, "t": {"x": torch.ones(1)}}, ChannelError, r"\['t'\] cannot receive"),
    ],
)
def test_no_message_to_one_receiver_is_lost_without_a_word(
    payload: dict[str, Any], error: type[Exception], message: str
) -> None:
    fed = federation(Open("news", to="sources"))
    with pytest.raises(error, match=message):
        fed.exchange("news", {"t": payload})


def test_receivers_may_be_clients_as_everywhere() -> None:
    fed = federation(Open("news"))
    got = fed.exchange("news", {"t": {fed.clients[0]: {"x": torch.ones(1)}}})  # type: ignore[dict-item]
    assert {name: [*messages] for name, messages in got.items()} == {"a": ["t"]}


def test_learners_differ_between_rounds_and_have_to_be_named() -> None:
    fed = federation(Summed("weights", up="learners"), Open("news", to="learners"), learners=["a"])
    with pytest.raises(ChannelError, match=r"among must be given over channel .*learners may differ between rounds"):
        fed.mean("weights", each("a", "b"))
    with pytest.raises(ChannelError, match="to must be given over channel"):
        fed.exchange("news", each("t"))
    assert fed.mean("weights", each("a", "b", value=2.0), among=["a", "b"])["c"]["x"].tolist() == [2.0, 2.0]


def test_who_is_present_on_a_channel_that_there_is_not_is_no_question() -> None:
    with pytest.raises(ChannelError, match="'wieghts' is not declared"):
        federation(WEIGHTS).present("wieghts")


def test_others_may_call_something_else_channels() -> None:
    class Image:
        channels = 3

    assert declared_by([Image(), object()]) == []


def test_a_message_to_one_receiver_is_checked_like_any_other() -> None:
    fed = federation(Open("news"))
    with pytest.raises(DivergedError, match="client 't' would send NaN"):
        fed.exchange("news", {"t": {"a": {"x": torch.tensor([float("nan")])}, "b": {"x": torch.zeros(1)}}})


def test_each_message_costs_privacy() -> None:
    pytest.importorskip("dp_accounting")
    whole, by_receiver = (federation(Open("news"), differential_privacy=NOISE) for _ in range(2))
    whole.exchange("news", {"t": {"x": torch.zeros(1)}})
    by_receiver.exchange("news", {"t": told("t", "a", "b", "c")})
    assert by_receiver.epsilon("message")["t"] > whole.epsilon("message")["t"], "three releases, not one"
    three = federation(Open("news"), differential_privacy=NOISE)
    for _ in range(3):
        three.exchange("news", {"t": {"x": torch.zeros(1)}})
    assert by_receiver.epsilon("message") == three.epsilon("message")


@pytest.mark.parametrize(
    ("backend", "placement", "seen"),
    [
        (PairwiseMasking(), [["a", "b"], ["c"], ["t"]], "hosts ['a', 'b'], who know enough to read what ['c'] send"),
        (PairwiseMasking(), [["a"], ["b", "c"], ["t"]], None),
        (PairwiseMasking(), [["t"], ["a", "b", "c"]], None),
        (PairwiseMasking(), [[], ["a", "b"], ["c", "t"]], None),
        (PairwiseMasking(threshold=0.51, colluders=0), [["a", "b"], ["c"], ["t"]], "hosts ['a', 'b']"),
        (Plain(), [["a", "b"], ["c"], ["t"]], None),
        (Paillier(key_bits=1024, insecure_test_keys=True), [["a"], ["b", "c", "t"]], "hosts ['a'], who know enough"),
        (Paillier(key_bits=1024, insecure_test_keys=True), [["t"], ["a", "b", "c"]], None),
    ],
)
def test_a_server_that_hosts_enough_clients_to_read_the_others_is_told(
    backend: Any, placement: list[list[str]], seen: str | None
) -> None:
    """Three sources send; one that is left is their sum without the others, and a shared key opens all."""
    clients = [Client("a"), Client("b"), Client("c"), Client("t", "target", labelled=False)]
    channels = Channels([WEIGHTS], clients, privacy=backend)
    told = seen_by_the_server(channels, {name: rank for rank, share in enumerate(placement) for name in share})
    assert len(told) == (seen is not None)
    assert all(str(seen) in sentence for sentence in told)
