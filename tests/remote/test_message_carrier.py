"""The carrier over single messages: calls in parts, connections, refusals, and messages of another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import processes
from fedlit.remote import BrokenError, RefusedError
from fedlit.remote import message_carrier as carrier
from fedlit.remote.carrier import PIECE_BYTES
from fedlit.remote.message_carrier import Message, MessageCaller, MessageListener
from fedlit.remote.relay import Relay
from loopback import Echo, soon
from remote_ends import through_a_relay

SESSION, CALL = 32 * "s", 32 * "c"
TEN = b"ten bytes!"


class Engine:
    """Brings messages in the caller's thread; those of the kinds in ``cut`` get no answer."""

    def __init__(self) -> None:
        self.listening: Callable[[str, Message], dict[str, Any]] | None = None
        self.cut: set[str] = set()
        self.kinds: list[str] = []

    def register(self, handle: Callable[[str, Message], dict[str, Any]]) -> None:
        self.listening = handle

    def handle(self, name: str, message: Message) -> dict[str, Any]:
        assert self.listening is not None
        return self.listening(name, message)

    def caller(self, name: str) -> MessageCaller:
        def send(message: Message, seconds: float) -> Message | None:
            self.kinds.append(message["kind"])
            return None if message["kind"] in self.cut else self.handle(name, message)

        return MessageCaller(send)

    def replying(self, reply: list[bytes]) -> MessageListener:
        """A listener that reads nothing, and has one reply for all."""
        listener = MessageListener(self.register, "an engine")
        listener.listen(lambda name, pieces: iter(reply), lambda name: None, lambda name: None)
        return listener


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def echo(engine: Engine) -> Iterator[Echo]:
    echo = Echo(MessageListener(engine.register, "an engine"))
    yield echo
    echo.close()


@pytest.fixture
def north(engine: Engine, echo: Echo) -> Iterator[MessageCaller]:
    caller = engine.caller("north")
    yield caller
    caller.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of ten bytes, which wait a moment for their answers."""
    monkeypatch.setattr(carrier, "POLL", 0.01)
    monkeypatch.setattr(carrier, "MESSAGE_BYTES", 10)


def test_pieces_come_as_they_were_sent_with_the_name_that_the_engine_states(echo: Echo, north: MessageCaller) -> None:
    pieces = [b"head", b"", bytes(PIECE_BYTES), b"\0\xff" * 1000]
    assert list(north.call(iter(pieces))) == [b"north", *pieces]
    assert list(north.call(iter([]))) == [b"north"]


def test_a_long_call_is_cut_into_messages_of_bounded_size(echo: Echo, engine: Engine, north: MessageCaller) -> None:
    number = 5 * carrier.MESSAGE_BYTES // PIECE_BYTES
    sent = [bytes([index % 256]) * PIECE_BYTES for index in range(number)]
    assert list(north.call(iter(sent))) == [b"north", *sent]
    assert engine.kinds.count("put") == 5
    assert engine.kinds.count("take") >= 4


@pytest.mark.usefixtures("small")
def test_a_request_that_is_not_read_waits_and_does_not_pile_up(
    echo: Echo, engine: Engine, north: MessageCaller
) -> None:
    echo.open.clear()
    received: list[bytes] = []
    taken: list[bytes] = []

    def request() -> Iterator[bytes]:
        for _ in range(60):
            taken.append(TEN)
            yield TEN

    thread = threading.Thread(target=lambda: received.extend(north.call(request())), daemon=True)
    thread.start()
    assert soon(lambda: engine.kinds.count("put") > 20)
    assert len(taken) < 10
    echo.open.set()
    thread.join(20)
    assert received == [b"north", *[TEN] * 60]


@pytest.mark.usefixtures("small")
def test_a_reply_that_is_whole_before_the_request_is_ends_the_call(engine: Engine) -> None:
    reply = [bytes([index]) * 10 for index in range(4)]
    listener, north = engine.replying(reply), engine.caller("north")
    assert list(north.call(iter([TEN] * 60))) == reply
    assert engine.kinds.count("put") < 60
    north.close()
    listener.close()


@pytest.mark.usefixtures("small")
def test_a_reply_that_is_not_taken_is_given_up_as_a_whole(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "BREAKS", 0.5)
    reply = [bytes([index]) * 10 for index in range(40)]
    listener = engine.replying(reply)
    take = {"kind": "take", "session": SESSION, "call": CALL}
    put = {**take, "kind": "put", "pieces": [b"x"], "first": True, "last": True}
    assert engine.handle("north", put)["pieces"] == reply[:1]
    time.sleep(1.5)
    assert engine.handle("north", take)["state"] == "broken"
    listener.close()


def test_an_answer_that_takes_long_is_asked_for_again_and_again(
    echo: Echo, engine: Engine, north: MessageCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "POLL", 0.02)
    echo.open.clear()
    threading.Timer(0.3, echo.open.set).start()
    assert list(north.call(iter([b"x"]))) == [b"north", b"x"]
    assert engine.kinds.count("take") > 5


def test_a_refusal_comes_with_its_reason_and_a_failure_without(
    echo: Echo, engine: Engine, north: MessageCaller
) -> None:
    with pytest.raises(RefusedError, match="not this\none"):
        list(north.call(iter([b"refuse"])))
    with pytest.raises(BrokenError, match="ValueError") as raised:
        list(north.call(iter([b"fail"])))
    assert "secret" not in str(raised.value)
    engine.cut = {"put"}
    with pytest.raises(BrokenError, match="did not answer"):
        list(north.call(iter([b"x"])))
    engine.cut = set()
    assert list(north.call(iter([b"x"]))) == [b"north", b"x"], "other calls come through"
    echo.listener.close()
    with pytest.raises(BrokenError):
        list(north.call(iter([b"x"])))


def test_sites_connect_before_their_first_call_and_disconnect_when_they_close(
    echo: Echo, engine: Engine, north: MessageCaller
) -> None:
    for _ in range(3):
        list(north.call(iter([b"x"])))
    assert echo.noted == ["came north", *["call north"] * 3]
    south = engine.caller("south")
    assert next(iter(south.call(iter([])))) == b"south"
    for name, caller in (("north", north), ("south", south)):
        caller.close()
        assert echo.noted[-1] == f"gone {name}"


def test_a_site_without_signs_of_life_disconnects(echo: Echo, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "ALIVE", 0.1)
    monkeypatch.setattr(carrier, "DISCONNECTED", 0.4)
    north = engine.caller("north")
    list(north.call(iter([])))
    engine.handle("south", {"kind": "alive", "session": SESSION})
    assert "came south" in echo.noted
    assert soon(lambda: "gone south" in echo.noted)
    time.sleep(0.5)
    assert "gone north" not in echo.noted
    north.close()
    assert echo.noted[-1] == "gone north"


@pytest.mark.parametrize(
    "message",
    [
        *({"session": None, "call": None}, {"session": "s", "call": None}, {"kind": "eval"}, {"call": 7}),
        *({"pieces": "x"}, {"pieces": [bytes(1 << 20)]}),
    ],
)
def test_a_message_of_another_form_is_refused(echo: Echo, engine: Engine, message: Message) -> None:
    whole = {"kind": "put", "session": SESSION, "call": CALL} | message
    given = {key: value for key, value in whole.items() if value is not None}
    assert engine.handle("north", given)["state"] == "refused"


def test_replies_are_for_the_site_that_called(echo: Echo, engine: Engine) -> None:
    take = {"kind": "take", "session": SESSION, "call": CALL}
    assert engine.handle("north", take)["state"] == "broken", "there is no such call"
    put = {**take, "kind": "put", "pieces": [b"x"], "first": True, "last": True}
    assert engine.handle("north", put)["pieces"]
    assert engine.handle("south", take)["state"] == "broken"


def test_a_site_has_a_few_calls_at_once_and_calls_without_messages_are_forgotten(
    echo: Echo, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "BREAKS", 0.5)
    monkeypatch.setattr(carrier, "POLL", 0.02)
    put = {"kind": "put", "session": SESSION, "pieces": [b"x"], "first": True, "last": False}
    states = [engine.handle("north", {**put, "call": f"{index:032}"})["state"] for index in range(8)]
    assert states == ["ok"] * 6 + ["full"] * 2
    assert soon(lambda: engine.handle("north", {**put, "call": 32 * "9"})["state"] == "ok")


def test_a_process_that_was_started_sends_through_the_one_that_started_it_and_no_other_does() -> None:
    received: list[tuple[Message, float]] = []
    answer = {"state": "ok", "pieces": [b"\n", b"two"], "none": [], "words": "a\nb"}

    def send(message: Message, seconds: float) -> Message | None:
        received.append((message, seconds))
        return answer if message["kind"] == "put" else None

    relay = Relay(send)
    put = {"kind": "put", "pieces": [b"one\n", b"", bytes(300_000)], "last": True, "call": "\n\u00e9"}
    sent = [(put, 3.5), ({"kind": "alive"}, 1.0)]
    (refused,) = processes.run(through_a_relay, {**relay.environment, "FEDLIT_RELAY_KEY": 32 * "0"}, sent)
    assert refused.error
    assert not received
    assert processes.results(through_a_relay, relay.environment, sent) == [[answer, None]]
    assert received == sent
    relay.close()
