"""The carrier over single messages: calls in parts, who is there, what is refused, and another process's messages."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fedlit.remote import BrokenError, RefusedError
from fedlit.remote import message_carrier as carrier
from fedlit.remote.carrier import PIECE_BYTES, Pieces
from fedlit.remote.message_carrier import Message, MessageCaller, MessageListener
from fedlit.remote.relay import Relay


class Engine:
    """What brings messages: hands them over in the caller's thread; ``cut`` loses those of a kind, or their answers."""

    def __init__(self) -> None:
        self.handle: Callable[[str, Message], dict[str, Any]] | None = None
        self.cut: set[str] = set()
        self.kinds: list[str] = []

    def register(self, handle: Callable[[str, Message], dict[str, Any]]) -> None:
        self.handle = handle

    def sender(self, name: str) -> Callable[[Message, float], Message | None]:
        def send(message: Message, seconds: float) -> Message | None:
            self.kinds.append(message["kind"])
            if message["kind"] in self.cut or self.handle is None:
                return None
            return self.handle(name, message)

        return send


class Echo:
    """Answers by the name of who calls, and then by what it was told; notes who comes and goes."""

    def __init__(self, engine: Engine) -> None:
        self.noted: list[str] = []
        self.wait = threading.Event()
        self.wait.set()
        self.listener = MessageListener(engine.register, "an engine")
        self.address = self.listener.listen(
            self.answer, lambda name: self.noted.append(f"came {name}"), lambda name: self.noted.append(f"gone {name}")
        )

    def answer(self, name: str, pieces: Pieces) -> Pieces:
        self.noted.append(f"call {name}")
        yield name.encode()
        for piece in pieces:
            if piece == b"refuse":
                raise RefusedError("not this one")
            if piece == b"fail":
                raise ValueError("a secret")
            self.wait.wait(20)
            yield piece


def replying(engine: Engine, reply: list[bytes]) -> MessageListener:
    """A listener that reads nothing, and has one reply for all."""
    listener = MessageListener(engine.register, "an engine")
    listener.listen(lambda name, pieces: iter(reply), lambda name: None, lambda name: None)
    return listener


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def echo(engine: Engine) -> Iterator[Echo]:
    echo = Echo(engine)
    yield echo
    echo.wait.set()
    echo.listener.close()


@pytest.fixture
def north(engine: Engine, echo: Echo) -> Iterator[MessageCaller]:
    caller = MessageCaller(engine.sender("north"))
    yield caller
    caller.close()


def soon(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return condition()


def test_pieces_come_as_they_were_sent_with_the_name_that_the_engine_tells(echo: Echo, north: MessageCaller) -> None:
    pieces = [b"head", b"", bytes(PIECE_BYTES), b"\0\xff" * 1000]
    assert list(north.call(iter(pieces))) == [b"north", *pieces]
    assert list(north.call(iter([]))) == [b"north"]


def test_a_long_call_is_cut_into_messages_of_bounded_size(echo: Echo, engine: Engine, north: MessageCaller) -> None:
    number = 5 * carrier.MESSAGE_BYTES // PIECE_BYTES
    sent = [bytes([place % 256]) * PIECE_BYTES for place in range(number)]
    told = iter(north.call(iter(sent)))
    assert next(told) == b"north"
    assert all(got == expected for got, expected in zip(told, sent, strict=True))
    assert engine.kinds.count("put") == 5
    assert engine.kinds.count("take") >= 4


def test_a_request_that_is_not_read_waits_and_does_not_pile_up(
    echo: Echo, engine: Engine, north: MessageCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps a few messages of a call; the site offers the next one again until it is taken."""
    monkeypatch.setattr(carrier, "POLL", 0.05)
    monkeypatch.setattr(carrier, "MESSAGE_BYTES", 10)
    echo.wait.clear()
    told: list[bytes] = []
    sent = [b"ten bytes!" for _ in range(60)]
    thread = threading.Thread(target=lambda: told.extend(north.call(iter(sent))), daemon=True)
    thread.start()
    assert soon(lambda: engine.kinds.count("put") > 20)
    (call,) = echo.listener._calls.values()
    assert call.requests.qsize() <= carrier._MAX_WAITING
    echo.wait.set()
    thread.join(20)
    assert told == [b"north", *sent]


def test_a_reply_that_is_whole_before_the_request_is_ends_the_call(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a step which is asked for again: the server has it, and reads nothing."""
    monkeypatch.setattr(carrier, "POLL", 0.05)
    monkeypatch.setattr(carrier, "MESSAGE_BYTES", 10)
    reply = [bytes([place]) * 10 for place in range(4)]
    listener = replying(engine, reply)
    north = MessageCaller(engine.sender("north"))
    assert list(north.call(iter([b"ten bytes!"] * 60))) == reply
    assert engine.kinds.count("put") < 60
    north.close()
    listener.close()


def test_a_reply_that_nobody_takes_is_given_up_as_a_whole(
    echo: Echo, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that was frozen for longer has its call broken off, and never parts of a reply without others."""
    monkeypatch.setattr(carrier, "BREAKS", 0.5)
    monkeypatch.setattr(carrier, "MESSAGE_BYTES", 10)
    reply = [bytes([place]) * 10 for place in range(40)]
    listener = replying(engine, reply)
    assert engine.handle is not None
    take = {"kind": "take", "session": 32 * "s", "call": 32 * "c"}
    told = engine.handle("north", {**take, "kind": "put", "pieces": [b"x"], "first": True, "last": True})
    assert told["pieces"] == reply[:1]
    assert soon(lambda: engine.handle is not None and not listener._calls, 10)
    assert engine.handle("north", take)["state"] == "broken"
    listener.close()


def test_an_answer_that_takes_long_is_asked_for_again_and_again(
    echo: Echo, engine: Engine, north: MessageCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "POLL", 0.02)
    echo.wait.clear()
    threading.Timer(0.5, echo.wait.set).start()
    assert list(north.call(iter([b"x"]))) == [b"north", b"x"]
    assert engine.kinds.count("take") > 5


def test_a_refusal_comes_with_its_words_and_a_failure_without(echo: Echo, north: MessageCaller) -> None:
    with pytest.raises(RefusedError, match="not this one"):
        list(north.call(iter([b"refuse"])))
    with pytest.raises(BrokenError, match=r"the server failed \(ValueError\): see its log$"):
        list(north.call(iter([b"fail"])))
    assert list(north.call(iter([b"x"]))) == [b"north", b"x"], "other calls come through"


def test_a_message_without_an_answer_breaks_a_call_off(echo: Echo, engine: Engine, north: MessageCaller) -> None:
    engine.cut = {"put"}
    with pytest.raises(BrokenError, match="the server did not answer a message"):
        list(north.call(iter([b"x"])))
    engine.cut = set()
    assert list(north.call(iter([b"x"]))) == [b"north", b"x"]


def test_a_site_has_come_before_its_first_call_and_is_gone_when_it_closes(
    echo: Echo, engine: Engine, north: MessageCaller
) -> None:
    for _ in range(3):
        list(north.call(iter([b"x"])))
    assert echo.noted == ["came north", *["call north"] * 3]
    south = MessageCaller(engine.sender("south"))
    assert next(iter(south.call(iter([])))) == b"south"
    north.close()
    assert echo.noted[-1] == "gone north"
    south.close()
    assert echo.noted[-1] == "gone south"


def test_a_site_that_says_nothing_for_long_is_gone_and_one_that_shows_signs_of_life_is_not(
    echo: Echo, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "ALIVE", 0.1)
    monkeypatch.setattr(carrier, "DISCONNECTED", 0.6)
    north, south = MessageCaller(engine.sender("north")), MessageCaller(engine.sender("south"))
    for caller in (north, south):
        list(caller.call(iter([])))
    south._closed.set()  # its machine is gone, and says no goodbye
    assert soon(lambda: "gone south" in echo.noted)
    time.sleep(0.8)
    assert "gone north" not in echo.noted
    north.close()
    assert echo.noted[-1] == "gone north"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"kind": "put"}, "a message of a site has a session"),
        ({"kind": "put", "session": "s"}, "a message of a site has a session"),
        ({"kind": "eval", "session": 32 * "s", "call": 32 * "c"}, "there is no message of kind 'eval'"),
        ({"kind": "put", "session": 32 * "s", "call": 7}, "there is no message of kind 'put'"),
        ({"kind": "put", "session": 32 * "s", "call": 32 * "c", "pieces": "x"}, "is a list of at most"),
        ({"kind": "put", "session": 32 * "s", "call": 32 * "c", "pieces": [bytes(1 << 20)]}, "is a list of at most"),
    ],
)
def test_a_message_that_is_none_is_refused(echo: Echo, engine: Engine, message: Message, words: str) -> None:
    assert engine.handle is not None
    answer = engine.handle("north", message)
    assert answer["state"] == "refused"
    assert words in answer["words"]


def test_a_reply_of_a_call_that_is_unknown_is_none(echo: Echo, engine: Engine) -> None:
    assert engine.handle is not None
    answer = engine.handle("north", {"kind": "take", "session": 32 * "s", "call": 32 * "c"})
    assert answer == {"state": "broken", "words": "the server knows no such call, or has given it up"}


def test_one_site_cannot_take_the_reply_of_another(echo: Echo, engine: Engine, north: MessageCaller) -> None:
    echo.wait.clear()
    thread = threading.Thread(target=lambda: list(north.call(iter([b"x"]))), daemon=True)
    thread.start()
    assert soon(lambda: bool(echo.listener._calls))
    ((_, call),) = echo.listener._calls
    assert engine.handle is not None
    assert engine.handle("south", {"kind": "take", "session": 32 * "s", "call": call})["state"] == "broken"
    echo.wait.set()
    thread.join(10)


def test_calls_that_nobody_asks_for_are_forgotten_and_a_site_has_a_few_at_once(
    echo: Echo, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "BREAKS", 0.5)
    monkeypatch.setattr(carrier, "POLL", 0.02)
    assert engine.handle is not None
    put = {"kind": "put", "session": 32 * "s", "pieces": [b"x"], "first": True, "last": False}
    states = [engine.handle("north", {**put, "call": f"{place:032}"})["state"] for place in range(8)]
    assert states == ["ok"] * 6 + ["full"] * 2
    assert soon(lambda: not echo.listener._calls)
    assert engine.handle("north", {**put, "call": 32 * "9"})["state"] == "ok"


def test_what_a_closed_server_is_told_breaks_off(echo: Echo, north: MessageCaller) -> None:
    list(north.call(iter([b"x"])))
    echo.listener.close()
    with pytest.raises(BrokenError, match="does not listen any more"):
        list(north.call(iter([b"x"])))


# -------------------------------------------------------------------- from a process that was started


CHILD = """
from fedlit.remote.relay import RelayedSender
send = RelayedSender()
answer = send({"kind": "put", "pieces": [b"one\\n", b"", bytes(300000)], "last": True, "call": "\\n\u00e9"}, 3.5)
assert answer == {"state": "ok", "pieces": [b"\\n", b"two"], "none": [], "words": "a\\nb"}, answer
assert send({"kind": "alive"}, 1.0) is None
print("done")
"""


def test_a_process_that_was_started_sends_through_the_one_that_started_it() -> None:
    told: list[tuple[Message, float]] = []

    def send(message: Message, seconds: float) -> Message | None:
        told.append((message, seconds))
        answer = {"state": "ok", "pieces": [b"\n", b"two"], "none": [], "words": "a\nb"}
        return answer if message["kind"] == "put" else None

    relay = Relay(send)
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env={**__import__("os").environ, **relay.environment}, capture_output=True
    )
    assert done.stdout.decode().strip() == "done", done.stderr.decode()
    assert [seconds for _, seconds in told] == [3.5, 1.0]
    pieces = [b"one\n", b"", bytes(300000)]
    assert told[0][0] == {"kind": "put", "pieces": pieces, "last": True, "call": "\n\u00e9"}


def test_a_process_of_another_key_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay(lambda message, seconds: {"state": "ok"})
    wrong = {**__import__("os").environ, **relay.environment, "FEDLIT_RELAY_KEY": 32 * "0"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=wrong, capture_output=True)
    assert done.returncode
    right = {**__import__("os").environ, **relay.environment}
    code = "from fedlit.remote.relay import RelayedSender\nprint(RelayedSender()({'kind': 'x'}, 1.0))"
    done = subprocess.run([sys.executable, "-c", code], env=right, capture_output=True)
    assert done.stdout.decode().strip() == "{'state': 'ok'}", "others are"
