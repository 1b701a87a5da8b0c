"""A carrier within one process, whose connections can be cut, and sites that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from fedlit.federation.transport import Transport
from fedlit.remote.carrier import BrokenError, Caller, Listener, Pieces
from fedlit.remote.star import ServerStar, SiteStar

_T = TypeVar("_T")


class Loopback(Listener):
    """The server's end; sites' ends are made by `caller`."""

    def __init__(self) -> None:
        self.answer: Callable[[str, Pieces], Pieces] | None = None
        self.came: Callable[[str], None] = lambda name: None
        self.gone: Callable[[str], None] = lambda name: None

    def listen(
        self, answer: Callable[[str, Pieces], Pieces], came: Callable[[str], None], gone: Callable[[str], None]
    ) -> str:
        self.came, self.gone = came, gone
        self.answer = answer
        return "nowhere:0"

    def close(self) -> None:
        self.answer = None

    def caller(self, name: str) -> LoopbackCaller:
        return LoopbackCaller(self, name)


class LoopbackCaller(Caller):
    """A site's end.

    Attributes:
        dead: Whether the site is, as after kill -9: nothing that it does arrives any more.
        breaks: How many calls to come break off: even ones before the server has answered, odd ones after.
    """

    def __init__(self, listener: Loopback, name: str) -> None:
        self._listener, self._name = listener, name
        self._connected = False
        self.dead = False
        self.breaks = 0

    def call(self, request: Pieces) -> Pieces:
        answer = self._listener.answer
        if self.dead or answer is None:
            raise BrokenError("there is nobody")
        if not self._connected:
            self._connected = True
            self._listener.came(self._name)
        before = self.breaks and self.breaks % 2 == 0
        self.breaks = max(0, self.breaks - 1)
        if before:
            raise BrokenError("cut off on the way there")
        pieces = list(answer(self._name, self._checked(request)))
        if self.dead:
            raise BrokenError("there is nobody")
        if before == 0 and self.breaks_now:
            raise BrokenError("cut off on the way back")
        return iter(pieces)

    breaks_now = False

    def _checked(self, request: Pieces) -> Pieces:
        for piece in request:
            if self.dead:
                raise BrokenError("the site is gone")
            yield piece

    def die(self) -> None:
        self.dead = True
        if self._connected:
            self._connected = False
            self._listener.gone(self._name)

    def close(self) -> None:
        if self._connected:
            self._connected = False
            self._listener.gone(self._name)


def around_a_star(
    sites: Mapping[str, Collection[str]],
    action: Callable[[Transport, LoopbackCaller | None], _T],
    facts: Mapping[str, Any] | None = None,
    patience: float = 0.3,
) -> list[_T | BaseException]:
    """What ``action`` returns or raises at the server and at each site; each is a thread."""
    listener = Loopback()
    results: dict[int, _T | BaseException] = {}
    names = ["", *sites]

    def work(place: int) -> None:
        star: Any = None
        caller = None
        try:
            if place == 0:
                star = ServerStar(listener, {name: [*of] for name, of in sites.items()}, facts or {}, 5.0, patience)
            else:
                caller = listener.caller(names[place])
                star = SiteStar(caller, facts or {}, None, 5.0, patience)
            star.open()
            results[place] = action(star, caller)
            star.close()
        except BaseException as error:
            results[place] = error
            if star is not None and not (caller is not None and caller.dead):
                star.close(str(error))

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    return [results[place] for place in range(len(names))]
