"""A carrier over single messages and their answers, for an engine that organisations run already.

Such an engine (NVIDIA FLARE, for example) encrypts, and names to the server the site that a message is from. It answers
each message within seconds; a call may take hours, and be of any size. So a call is cut into messages: some put the
request, in order, and some take the reply, each of which waits a while for it. Sites send signs of life in between.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from fedlit.remote.carrier import PIECE_BYTES, BrokenError, Caller, Listener, Pieces, RefusedError

_log = logging.getLogger("fedlit.remote")

Message = Mapping[str, Any]
"""Of text, whole numbers, truth values, bytes, and lists of bytes."""

MESSAGE_BYTES = 1 << 20
"""Of pieces in one message at most."""

POLL = 5.0
"""Seconds that a message waits for its answer; then the reply is to ask again."""

ALIVE = 2.0
"""Seconds between a site's signs of life."""

DISCONNECTED = 10.0
"""Seconds without any message after which a site counts as disconnected."""

BREAKS = 60.0
"""Seconds after which a message without an answer, or a call without messages, has broken off."""

_MAX_CALLS = 6
"""Of one site at once: a call, and some that broke off unnoticed."""

_MAX_WAITING = 2
"""Messages of a call that wait to be read: two, so that one comes while another is read."""


@dataclass
class _Call:
    """A call under way, at the server."""

    requests: queue.Queue[tuple[list[bytes], bool]] = field(default_factory=lambda: queue.Queue(_MAX_WAITING))
    replies: queue.Queue[dict[str, Any]] = field(default_factory=lambda: queue.Queue(_MAX_WAITING))
    last_message: float = field(default_factory=time.monotonic)
    over: bool = False


@final
class MessageListener(Listener):
    """The server's end: the engine passes to `handle` each message, with the name of the site that it is from."""

    def __init__(self, register: Callable[[Callable[[str, Message], dict[str, Any]]], None], address: str) -> None:
        self._register, self._address = register, address
        self._calls: dict[tuple[str, str], _Call] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._answer: Callable[[str, Pieces], Pieces] | None = None
        self._came: Callable[[str], None] = lambda name: None
        self._gone: Callable[[str], None] = lambda name: None

    def listen(
        self, answer: Callable[[str, Pieces], Pieces], came: Callable[[str], None], gone: Callable[[str], None]
    ) -> str:
        """See `Listener`."""
        self._answer, self._came, self._gone = answer, came, gone
        threading.Thread(target=self._watch, name="fedlit-presence", daemon=True).start()
        self._register(self.handle)
        return self._address

    def handle(self, name: str, message: Message) -> dict[str, Any]:
        """Answer one message of a site."""
        if self._closed.is_set():
            return _state("broken", "the server does not listen any more")
        kind, session, call = (message.get(key) for key in ("kind", "session", "call"))
        if not isinstance(session, str) or not 16 <= len(session) <= 64:
            return _state("refused", "a message of a site has a session")
        if kind == "bye":
            self._forget([(name, session)])
            return {"state": "ok"}
        self._see((name, session))
        if kind == "alive":
            return {"state": "ok"}
        if not isinstance(call, str) or not 16 <= len(call) <= 64 or kind not in ("put", "take"):
            return _state("refused", f"there is no message of kind {str(kind)[:50]!r}")
        if kind == "take":
            return self._take((name, call))
        pieces = message.get("pieces")
        if not isinstance(pieces, list) or not all(
            isinstance(piece, bytes) and len(piece) <= PIECE_BYTES for piece in pieces
        ):
            return _state("refused", f"a part of a request is a list of at most {PIECE_BYTES} bytes each")
        last = bool(message.get("last"))
        if not self._put((name, call), pieces, bool(message.get("first")), last):
            return {"state": "full"}
        return self._take((name, call)) if last else {"state": "ok"}

    def _put(self, key: tuple[str, str], pieces: list[bytes], first: bool, last: bool) -> bool:
        """Take a part of a request; ``False`` if there is no room yet."""
        with self._lock:
            if first and key not in self._calls:
                if sum(name == key[0] and not call.over for (name, _), call in self._calls.items()) >= _MAX_CALLS:
                    return False
                self._calls[key] = _Call()
                threading.Thread(target=self._serve, args=(key[0], self._calls[key]), daemon=True).start()
            call = self._calls.get(key)
        if call is None:
            return True  # it is over, as its reply shows
        call.last_message = time.monotonic()
        try:
            call.requests.put((pieces, last), timeout=POLL)
        except queue.Full:
            return False
        return True

    def _take(self, key: tuple[str, str]) -> dict[str, Any]:
        """The next part of a reply, if it comes soon."""
        call = self._calls.get(key)
        if call is None:
            return _state("broken", "the server knows no such call, or has given it up")
        call.last_message = time.monotonic()
        try:
            part = call.replies.get(timeout=POLL)
        except queue.Empty:
            return {"state": "wait"}
        if part["state"] != "ok" or part["last"]:
            with self._lock:
                self._calls.pop(key, None)
        return part

    def _serve(self, name: str, call: _Call) -> None:
        """Answer a call, in a thread of its own."""
        assert self._answer is not None
        try:
            for pieces, last in _batches(self._answer(name, _requested(call))):
                if not self._reply(call, {"state": "ok", "pieces": pieces, "last": last}):
                    break
        except RefusedError as error:
            self._reply(call, _state("refused", str(error)))
        except BrokenError as error:
            self._reply(call, _state("broken", str(error)))
        except Exception as error:
            _log.exception("a call of site %s failed", name)
            # its text may contain what is not for a site
            self._reply(call, _state("broken", f"the server failed ({type(error).__name__}): see its log"))
        finally:
            call.over = True

    def _reply(self, call: _Call, part: dict[str, Any]) -> bool:
        """Leave a part of a reply to be taken; ``False`` if no message asks for it, and the call is given up."""
        while not self._closed.is_set():
            try:
                call.replies.put(part, timeout=1.0)
                return True
            except queue.Full:
                if time.monotonic() - call.last_message > BREAKS:
                    break
        with self._lock:
            self._calls = {key: each for key, each in self._calls.items() if each is not call}
        return False

    # ------------------------------------------------ connections

    def _see(self, key: tuple[str, str]) -> None:
        with self._lock:
            new = key not in self._seen
            self._seen[key] = time.monotonic()
        if new:
            self._came(key[0])

    def _forget(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            with self._lock:
                connected = self._seen.pop(key, None) is not None
            if connected:
                self._gone(key[0])

    def _watch(self) -> None:
        """Notice sites that have disconnected, and calls for whose replies no message asks any more."""
        while not self._closed.wait(0.5):
            now = time.monotonic()
            self._forget([key for key, at in [*self._seen.items()] if now - at > DISCONNECTED])
            with self._lock:
                over = [key for key, call in self._calls.items() if call.over and now - call.last_message > BREAKS]
                for key in over:
                    del self._calls[key]

    def close(self) -> None:
        """See `Listener`."""
        time.sleep(0.1)  # until replies that wait have been asked for
        self._closed.set()


def _state(state: str, reason: str) -> dict[str, Any]:
    return {"state": state, "words": reason}


def _requested(call: _Call) -> Pieces:
    """Pieces of a request as they come."""
    while True:
        try:
            pieces, last = call.requests.get(timeout=BREAKS)
        except queue.Empty:
            raise BrokenError("the request was cut off") from None
        yield from pieces
        if last:
            return


def _batches(pieces: Pieces) -> Iterator[tuple[list[bytes], bool]]:
    """Pieces in lists of at most `MESSAGE_BYTES`, and whether each is the last."""
    batch: list[bytes] = []
    size = 0
    for piece in pieces:
        if batch and size + len(piece) > MESSAGE_BYTES:
            yield batch, False
            batch, size = [], 0
        batch.append(piece)
        size += len(piece)
    yield batch, True


@final
class MessageCaller(Caller):
    """A site's end; ``send`` returns the server's answer, or ``None`` if none came within the seconds."""

    def __init__(self, send: Callable[[Message, float], Message | None]) -> None:
        self._send = send
        self._session = secrets.token_hex(16)
        self._closed = threading.Event()
        self._signs: threading.Thread | None = None

    def call(self, request: Pieces) -> Pieces:
        """See `Caller`."""
        if self._signs is None:
            self._signs = threading.Thread(target=self._show_life, name="fedlit-alive", daemon=True)
            self._signs.start()
        call, first = secrets.token_hex(16), True
        answer: Message = {}
        early: list[Message] = []
        for pieces, last in _batches(request):
            part = {"kind": "put", "call": call, "first": first, "last": last, "pieces": pieces}
            while (answer := self._ask(part))["state"] == "full":  # a server that answers meanwhile reads no further
                early.append(self._ask({"kind": "take", "call": call}))
                if early[-1].get("last"):
                    break
            if answer["state"] == "full":
                answer = early.pop()
                break
            first = False
        for each in (*early, answer):
            if each["state"] == "ok":
                yield from each["pieces"]
        while answer["state"] != "ok" or not answer["last"]:
            answer = self._ask({"kind": "take", "call": call})
            if answer["state"] == "ok":
                yield from answer["pieces"]

    def _ask(self, message: Message) -> Message:
        """Send one message, and return an answer that goes on."""
        answer = self._send({**message, "session": self._session}, BREAKS)
        if answer is None:
            raise BrokenError("the server did not answer a message")
        state = answer.get("state")
        if state == "refused":
            raise RefusedError(str(answer.get("words")))
        if state not in ("ok", "wait", "full"):
            raise BrokenError(str(answer.get("words", answer)))
        return answer

    def _show_life(self) -> None:
        """Send a sign of life now and then."""
        while not self._closed.wait(ALIVE):
            self._send({"kind": "alive", "session": self._session}, DISCONNECTED)

    def close(self) -> None:
        """See `Caller`."""
        if not self._closed.is_set():
            self._closed.set()
            if self._signs is not None:
                self._send({"kind": "bye", "session": self._session}, DISCONNECTED)
