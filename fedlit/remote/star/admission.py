"""Admission: which processes the server lets in as sites, and what those that come late are sent."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from fedlit.federation.documents import document
from fedlit.privacy import DecodeError
from fedlit.remote.carrier import Pieces, RefusedError
from fedlit.remote.star.board import Reply, StepBoard
from fedlit.remote.star.framing import entry, make_head, one_line

_log = logging.getLogger("fedlit.remote")

CLOCKS = 300.0
"""Seconds that a site's clock may differ from the server's."""

STILL_CONNECTED = 15.0
"""Seconds within which it is noticed that a process has ended."""


@dataclass
class History:
    """The steps before the first round, by their numbers, for sites that come back later."""

    meetings: dict[int, Tensor] = field(default_factory=dict)  # tables of frames
    messages: dict[int, dict[int, Any]] = field(default_factory=dict)  # by rank, in a list of one each
    results: dict[int, Any] = field(default_factory=dict)  # with the number of the step after which there was one

    def message_for(self, rank: int) -> Tensor:
        """All that a site needs of it, as one message."""
        received = {number: to[rank] for number, to in self.messages.items() if rank in to}
        parts = {"meetings": self.meetings, "messages": received, "results": self.results}
        return document({key: [[*item] for item in part.items()] for key, part in parts.items()}, "history")


@final
class Admission:
    """Compares a site's hello with what the server needs (``facts``), and puts its process on the step board."""

    def __init__(
        self, board: StepBoard, history: History, sites: Mapping[str, list[str]], facts: Mapping[str, Any]
    ) -> None:
        self._board, self._history, self._sites = board, history, sites
        self._facts = json.loads(json.dumps(dict(facts)))

    def answer_hello(self, rank: int, head: Mapping[str, Any], pieces: Pieces) -> Reply:
        """Let a site in, before the first round or for the next one.

        A `RefusedError` if it has another clock, other facts or clients, or is connected already.
        """
        board, name = self._board, self._board.names[rank]
        session, clock = entry(head, "session", str), entry(head, "clock", float)
        if not 16 <= len(session) <= 64:
            raise DecodeError(f"a session has 16 to 64 letters, got {len(session)}")
        self._check(name, clock, head.get("facts"), head.get("clients"))
        with board.changed:
            self._await_end_of_others(rank, session)
            site, late = board.sites[rank], board.begun
            if site.session != session:
                if rank in board.members.here and board.number:
                    board.drop(rank, "has started again")
                    if not late and board.ended is None:
                        board.end(f"site {name!r} started again before the first round", again=False)
                board.members.drop(rank)
                site.restart(session)
                if not late:
                    board.members.come(rank)
                _log.info("site %s has come%s", name, ", and takes part from the next round" if late else "")
                board.changed.notify_all()
            history = [self._history.message_for(rank)] if late else []
            size = sum(len(part) for part in history)
            return Reply(make_head(rank=rank, sites=self._sites, late=late, bytes=size), history)

    def _check(self, name: str, clock: float, facts: Any, clients: Any) -> None:
        if not abs(time.time() - clock) <= CLOCKS:
            raise RefusedError(
                f"the clock of site {name!r} is {clock - time.time():+.0f} s off the server's, which may be "
                f"{CLOCKS:g} s at most: set the clocks of both"
            )
        theirs = facts if isinstance(facts, dict) else {}
        for key in {**self._facts, **theirs}:
            if theirs.get(key) != self._facts.get(key):
                ours, other = _differing(self._facts.get(key), theirs.get(key))
                raise RefusedError(
                    f"{one_line(key)} differs: the server has {one_line(ours)}, site {name!r} has {one_line(other)}"
                )
        if clients is not None and clients != self._sites[name]:
            raise RefusedError(
                f"site {name!r} claims the clients {str(clients)[:200]}, but the server has {self._sites[name]} for "
                "the certificate of this name (sites)"
            )

    def _await_end_of_others(self, rank: int, session: str) -> None:
        """Refuse a second process of one name; one that was killed just now is still connected for some seconds."""
        site, ends = self._board.sites[rank], time.monotonic() + STILL_CONNECTED
        while site.session not in ("", session) and site.connections > 1:
            if time.monotonic() >= ends:
                raise RefusedError(
                    f"another process is connected as site {self._board.names[rank]!r}, and a name is for one: end the "
                    "other first"
                )
            self._board.changed.wait(ends - time.monotonic())


def _differing(ours: Any, theirs: Any) -> Sequence[Any]:
    """Of two mappings, the entries that differ; anything else as it is."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return ours, theirs
    keys = [key for key in {**ours, **theirs} if key not in ours or key not in theirs or ours[key] != theirs[key]]
    return [{key: side[key] for key in keys if key in side} for side in (ours, theirs)]
