"""A carrier within one process, whose connections can be cut, sites that are threads, and a listener that echoes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch

from fedlit.federation import Client, Federation
from fedlit.federation.transport import Transport
from fedlit.privacy import PairwiseMasking
from fedlit.remote.carrier import BrokenError, Caller, Listener, Pieces, RefusedError
from fedlit.remote.star import ServerStar, SiteStar

_T = TypeVar("_T")

BREAKS = ("on the way there", "within the request", "on the way back", "within the answer")
"""Where a call may break off."""


def soon(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Wait until a condition holds; ``False`` if it does not in time."""
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return bool(condition())


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
        dead: As after kill -9: nothing that the site sends arrives.
        breaks: Where the next calls break off, one after the other: see `BREAKS`; "" is nowhere.
    """

    def __init__(self, listener: Loopback, name: str) -> None:
        self._listener, self._name = listener, name
        self._connected = False
        self.dead = False
        self.breaks: list[str] = []

    def call(self, request: Pieces) -> Pieces:
        answer = self._listener.answer
        if self.dead or answer is None:
            raise BrokenError("nobody listens")
        if not self._connected:
            self._connected = True
            self._listener.came(self._name)
        how = self.breaks.pop(0) if self.breaks else ""
        if how == "on the way there":
            raise BrokenError(how)
        pieces = list(answer(self._name, self._checked(request, how)))
        if self.dead or how == "on the way back":
            raise BrokenError(how)
        return self._torn(pieces) if how == "within the answer" else iter(pieces)

    def _checked(self, request: Pieces, how: str) -> Pieces:
        for number, piece in enumerate(request):
            if self.dead or (how == "within the request" and number):
                raise BrokenError(how)
            yield piece

    @staticmethod
    def _torn(pieces: list[bytes]) -> Pieces:
        yield pieces[0]
        if len(pieces) > 1:
            yield pieces[1][: len(pieces[1]) // 2]
        raise BrokenError("within the answer")

    def die(self) -> None:
        self.dead = True
        self.close()

    def close(self) -> None:
        if self._connected:
            self._connected = False
            self._listener.gone(self._name)


class Echo:
    """Answers by the caller's name, and then by its request; notes connections and calls.

    Pieces ``b"refuse"`` and ``b"fail"`` raise errors; others wait for ``open``.
    """

    def __init__(self, listener: Listener) -> None:
        self.noted: list[str] = []
        self.open = threading.Event()
        self.open.set()
        self.listener = listener
        self.address = listener.listen(
            self.answer, lambda name: self.noted.append(f"came {name}"), lambda name: self.noted.append(f"gone {name}")
        )

    def answer(self, name: str, pieces: Pieces) -> Pieces:
        self.noted.append(f"call {name}")
        yield name.encode()
        for piece in pieces:
            if piece == b"refuse":
                raise RefusedError("not this\none" + "!" * 10_000)
            if piece == b"fail":
                raise ValueError("a secret")
            self.open.wait(20)
            yield piece

    def close(self) -> None:
        self.open.set()
        self.listener.close()


def around_a_star(
    sites: Mapping[str, Collection[str]],
    action: Callable[[Transport, Any], _T],
    patience: float = 0.3,
    ends: tuple[Listener, Callable[[str], Caller]] | None = None,
    timeout: float = 20.0,
    step_timeout: float = 60.0,
) -> list[_T | BaseException]:
    """Results or errors of ``action`` at the server and at each site; each is a thread.

    Args:
        sites: Clients of each.
        action: Takes the transport and, at sites, the caller.
        patience: Of all.
        ends: Of another carrier: the server's, and a function that makes that of a site.
        timeout: Seconds in which all have to end.
        step_timeout: Of the server.
    """
    if ends is None:
        listener = Loopback()
        ends = (listener, listener.caller)
    results: dict[int, _T | BaseException] = {}
    names = ["", *sites]

    def work(rank: int) -> None:
        star: Any = None
        caller: Any = None
        try:
            if rank == 0:
                of_sites = {name: [*clients] for name, clients in sites.items()}
                star = ServerStar(ends[0], of_sites, {}, 5.0, patience, step_timeout)
            else:
                caller = ends[1](names[rank])
                star = SiteStar(caller, {}, None, 5.0, patience)
            star.open()
            results[rank] = action(star, caller)
            star.close()
        except BaseException as error:
            results[rank] = error
            if star is not None and not getattr(caller, "dead", False):
                star.close(str(error))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(names))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return [results[rank] for rank in range(len(names))]


def masked_sums(
    sites: Mapping[str, list[str]], rounds: int, before: Callable[[Any, Any, int], None], width: int = 3
) -> Callable[[Any, Any], list[float]]:
    """An action of `around_a_star`: one masked sum per round of vectors of each site's rank.

    Args:
        sites: With one client each, the last of which is the target.
        rounds: Their number.
        before: Called with transport, caller and round, between the roll call and the sum.
        width: Of a vector.
    """
    names = [name for clients in sites.values() for name in clients]

    def action(star: Any, caller: Any) -> list[float]:
        clients = [Client(name, role="target" if name == names[-1] else "source") for name in names]
        privacy = PairwiseMasking(colluders=0, threshold=0.6)
        placement = [[], *sites.values()]
        federation = Federation(clients, names[-1], transport=star, placement=placement, privacy=privacy, seed=0)
        federation.settled = True
        if star.rank == 0:
            star.begin(())
        received = []
        for round_idx in range(rounds):
            federation.round_idx = round_idx
            federation.roll_call()
            before(star, caller, round_idx)
            mine = {client.name: {"x": torch.full((width,), float(star.rank))} for client in federation.local_clients}
            received += [float(payload["x"][0]) for payload in federation.sum("weights", mine).values()]
        return received

    return action
