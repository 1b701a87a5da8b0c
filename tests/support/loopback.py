"""A carrier within one process, whose connections can be cut, and sites that are threads."""

from __future__ import annotations

import threading
import time
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
        breaks: How calls to come break off, one after the other: see `BREAKS`; "" is not at all.
        calls: How many there were.
    """

    def __init__(self, listener: Loopback, name: str) -> None:
        self._listener, self._name = listener, name
        self._connected = False
        self.dead = False
        self.breaks: list[str] = []
        self.calls = 0

    def call(self, request: Pieces) -> Pieces:
        self.calls += 1
        answer = self._listener.answer
        if self.dead or answer is None:
            raise BrokenError("there is nobody")
        if not self._connected:
            self._connected = True
            self._listener.came(self._name)
        how = self.breaks.pop(0) if self.breaks else ""
        if how == "on the way there":
            raise BrokenError("cut off before the server has heard")
        pieces = list(answer(self._name, self._checked(request, how)))
        if self.dead or how == "on the way back":
            raise BrokenError("cut off after the server has answered")
        return self._torn(pieces) if how == "within the answer" else iter(pieces)

    def _checked(self, request: Pieces, how: str) -> Pieces:
        for number, piece in enumerate(request):
            if self.dead or (how == "within the request" and number):
                raise BrokenError("the site is gone")
            yield piece

    @staticmethod
    def _torn(pieces: list[bytes]) -> Pieces:
        yield pieces[0]
        if len(pieces) > 1:
            yield pieces[1][: len(pieces[1]) // 2]
        raise BrokenError("cut off within the answer")

    def die(self) -> None:
        self.dead = True
        self.close()

    def close(self) -> None:
        if self._connected:
            self._connected = False
            self._listener.gone(self._name)


BREAKS = ("on the way there", "within the request", "on the way back", "within the answer")
"""Where a call may break off."""


def around_a_star(
    sites: Mapping[str, Collection[str]],
    action: Callable[[Transport, Any], _T],
    facts: Mapping[str, Any] | None = None,
    patience: float = 0.3,
    ends: tuple[Listener, Callable[[str], Caller]] | None = None,
    timeout: float = 20.0,
) -> list[_T | BaseException]:
    """What ``action`` returns or raises at the server and at each site; each is a thread.

    Args:
        sites: Clients of each.
        action: Given the transport and, at sites, the caller.
        facts: See `ServerStar`.
        patience: Of all.
        ends: Of another carrier: the server's, and what makes that of a site.
        timeout: Seconds in which all have to end.
    """
    if ends is None:
        listener = Loopback()
        ends = (listener, listener.caller)
    results: dict[int, _T | BaseException] = {}
    names = ["", *sites]

    def work(place: int) -> None:
        star: Any = None
        caller: Any = None
        try:
            if place == 0:
                star = ServerStar(ends[0], {name: [*of] for name, of in sites.items()}, facts or {}, 5.0, patience)
            else:
                caller = ends[1](names[place])
                star = SiteStar(caller, facts or {}, None, 5.0, patience)
            star.open()
            results[place] = action(star, caller)
            star.close()
        except BaseException as error:
            results[place] = error
            if star is not None and not getattr(caller, "dead", False):
                star.close(str(error))

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(names))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    return [results[place] for place in range(len(names))]
