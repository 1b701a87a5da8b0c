"""A site's end of a star: each step is a call to the server."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fedlit.federation.documents import read_document
from fedlit.federation.errors import FederationError, PeerFailedError, RosterError
from fedlit.federation.transport import NO_BYTES, NOTHING, Outgoing, Transport, Way
from fedlit.privacy import DecodeError
from fedlit.remote.carrier import BrokenError, Caller, Pieces
from fedlit.remote.star.framing import bytes_of, check_enclosed, cut, entry, frames, make_head, read_body, read_head

_log = logging.getLogger("fedlit.remote")


class DismissedError(FederationError):
    """The server goes on without this site, which timed out: it may come back as a new process."""


class ServerLostError(FederationError):
    """The server did not answer for longer than a site's patience."""


@final
class SiteStar(Transport):
    """A site's end; waits ``wait_for`` seconds for a server, and ``patience`` seconds for calls that fail."""

    losable = True
    encloses = True

    def __init__(
        self,
        caller: Caller,
        facts: Mapping[str, Any],
        clients: Sequence[str] | None,
        wait_for: float,
        patience: float,
    ) -> None:
        self._caller = caller
        self._facts = dict(facts)
        self._clients = None if clients is None else list(clients)
        self._wait_for, self._patience = wait_for, patience
        self._session = secrets.token_hex(16)
        self._number = 0
        self._history: dict[str, dict[int, Any]] | None = None
        self._closed = False
        self.rank = -1
        self.sites: dict[str, list[str]] = {}

    @property
    def step(self) -> int:
        """See `Transport`."""
        return self._number

    @property
    def returning(self) -> bool:
        """See `Transport`."""
        return self._history is not None

    def open(self) -> None:
        """Find the server, and be let in; a `RefusedError` if not, a `FederationError` if there is none in time."""

        def hello() -> bytes:  # anew for each call, as it has the time
            return make_head(
                kind="hello", session=self._session, clock=time.time(), facts=self._facts, clients=self._clients
            )

        try:
            head, pieces = self._ask(hello, (), self._wait_for)
        except ServerLostError as error:
            raise FederationError(
                f"there was no server within {self._wait_for:g} s (wait_for): {error}. See whether it runs, and "
                "whether this machine may dial out to it"
            ) from error
        rank, sites, late = entry(head, "rank", int), entry(head, "sites", dict), head.get("late")
        if not 0 < rank <= len(sites):
            raise DecodeError(f"the server answers a hello by {str(head)[:200]}")
        self.rank, self.sites, self.world_size = rank, sites, len(sites) + 1
        if late:
            history = read_document(*read_body(pieces, [entry(head, "bytes", int)], "the history of the run"))
            self._history = {key: dict((number, value) for number, value in part) for key, part in history.items()}
        name, clients = list(sites.items())[rank - 1]
        under_way = ", and a run is under way" if late else ""
        _log.info("the server has let this site in as %r, with %s%s", name, ", ".join(map(str, clients)), under_way)

    # ------------------------------------------------ calls

    def _ask(
        self, head: Callable[[], bytes], body: Sequence[Outgoing], patience: float
    ) -> tuple[dict[str, Any], Pieces]:
        """Call, again and again if it breaks off; the reply's head, and the pieces after it."""
        broken: float | None = None
        while True:
            try:
                reply = self._caller.call(_request(head(), body))
                answer = read_head(reply)
                break
            except BrokenError as error:
                now = time.monotonic()
                if broken is None:
                    _log.warning("the server does not answer (%s): trying again for %g s", error, patience)
                    broken = now
                if now - broken >= patience:
                    raise ServerLostError(
                        f"the server did not answer for {patience:g} s: {error}. Look at its output first"
                    ) from error
                time.sleep(min(0.25, patience / 10))
        if answer.get("dismissed"):
            self._closed = True
            raise DismissedError(
                "the server goes on without this site: it was disconnected for longer than the server's patience, or "
                "silent for longer than its step_timeout, or the server has started again; start it again, and it "
                "takes part from the next round"
            )
        if "ended" in answer:
            self._closed = True
            if answer.get("again"):
                raise ServerLostError(f"the server was stopped: {str(answer['ended'])[:2000]}")
            raise PeerFailedError(f"the server has ended: {str(answer['ended'])[:2000]}")
        return answer, reply

    def _take_step(
        self, head: bytes, body: Sequence[Outgoing], sizes: Callable[[Mapping[str, Any]], list[int]], doing: str
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """One step: the reply's head and messages, whose ``sizes`` follow from the head."""
        ends: float | None = None
        while True:
            answer, pieces = self._ask(lambda: head, body, self._patience)
            try:
                return answer, read_body(pieces, sizes(answer), doing)
            except BrokenError as error:
                ends = time.monotonic() + self._patience if ends is None else ends
                if time.monotonic() >= ends:
                    raise ServerLostError(
                        f"the server's answer broke off again and again, in {doing}: {error}"
                    ) from error

    def _step_head(self, which: list[int], enclosed: int = 0) -> bytes:
        return make_head(kind="step", session=self._session, step=self._number, which=which, enclosed=enclosed)

    # ------------------------------------------------ steps

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        """See `Transport`."""
        return self._meeting(frame, doing)[0]

    def meet_with(
        self, frame: Tensor, enclosed: Mapping[int, Tensor], doing: str
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """See `Transport`."""
        tables, _, arrived = self._meeting(frame, doing, enclosed.get(0, NO_BYTES))
        return tables, {0: arrived} if len(arrived) else {}

    def roll_call(self, lacks: Callable[[Collection[int]], str] = lambda lost: "") -> frozenset[int]:
        """See `Transport`; a site that comes back waits for the next."""
        if self._history is None:
            return self._meeting(NOTHING, "a roll call")[1]
        answer, _ = self._take_step(make_head(kind="join", session=self._session), (), lambda _: [], "a return")
        self._history = None
        self._number = entry(answer, "step", int)
        self.over = entry(answer, "over", bool)
        return self._take_verdict(answer)

    def last_call(self) -> frozenset[int]:
        """See `Transport`."""
        return self._meeting(NOTHING, "the last roll call")[1]

    def _take_verdict(self, answer: Mapping[str, Any]) -> frozenset[int]:
        """Note the ranks that have dropped out, and return those that come back."""
        lost, joined = self._ranks(answer, "lost"), self._ranks(answer, "joined")
        if self.rank in lost:
            raise DismissedError("the server goes on without this site")
        self.lost = lost
        return joined

    def _ranks(self, answer: Mapping[str, Any], key: str) -> frozenset[int]:
        ranks = frozenset(entry(answer, key, list))
        if not ranks <= {*range(1, self.world_size)}:
            raise DecodeError(f"the server reports {key} ranks by {str(answer[key])[:200]}")
        return ranks

    def _meeting(
        self, frame: Tensor, doing: str, enclosed: Tensor = NO_BYTES
    ) -> tuple[list[Tensor], frozenset[int], Tensor]:
        self._number += 1
        ours = bytes_of(frame)
        if self._history is not None:
            table = self._recorded("meetings", doing)
            if table.shape != (self.world_size, len(ours)) or not torch.equal(table[self.rank], ours):
                raise RosterError(
                    f"this site does otherwise than when the run began, in {doing}: it must come back with the data, "
                    "configuration and versions that it had"
                )
            return frames(table, frame), frozenset(), NO_BYTES

        def coming(answer: Mapping[str, Any]) -> list[int]:
            size = entry(answer, "enclosed", int)
            check_enclosed(size, doing)
            return [self.world_size * len(ours), size]

        head = self._step_head([0], len(enclosed))
        answer, (table, arrived) = self._take_step(head, [ours, enclosed], coming, doing)
        joined = self._take_verdict(answer)
        return frames(table.reshape(self.world_size, -1), frame), joined, arrived

    def _recorded(self, what: str, doing: str) -> Any:
        """The history's entry of this step."""
        assert self._history is not None
        if self._number not in self._history[what]:
            raise RosterError(f"this site is in {doing}, where the others were not when the run began")
        return self._history[what][self._number]

    def swap(self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str) -> list[Tensor | None]:
        """See `Transport`."""
        self._number += 1
        due = [size for _, there, size in ways if there == self.rank]
        if self._history is not None:
            recorded = self._recorded("messages", doing) if due else []
            return [message for (message,) in recorded]
        if not due and not any(here == self.rank for here, _, _ in ways):
            return []
        parts = {id(message): message for message in outgoing}  # one for several ways is sent once
        indices = {identity: index for index, identity in enumerate(parts)}

        def coming(answer: Mapping[str, Any]) -> list[int]:
            missing = entry(answer, "missing", list)
            return [size for index, size in enumerate(due) if index not in missing]

        head = self._step_head([indices[id(message)] for message in outgoing])
        answer, received = self._take_step(head, [*parts.values()], coming, doing)
        arrived = iter(received)
        return [None if index in answer["missing"] else next(arrived) for index in range(len(due))]

    def recall(self) -> Any:
        """See `Transport`."""
        if self._history is None or self._number not in self._history["results"]:
            return None
        self._number, value = self._history["results"][self._number]
        return value

    def close(self, why: str = "done") -> None:
        """Leave; the others go on if this is before the end."""
        if not self._closed:
            self._closed = True
            try:
                for _ in self._caller.call(iter([make_head(kind="leave", session=self._session, why=why)])):
                    pass
            except FederationError as error:
                _log.info("could not say goodbye to the server: %s", error)
        self._caller.close()


def _request(head: bytes, body: Sequence[Outgoing]) -> Iterator[bytes]:
    yield head
    yield from cut(body)
