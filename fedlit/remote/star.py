"""Star: the transport of a server with sites around it, which may vanish and come back.

All processes go through the same steps, numbered from 1: a step is a meeting, or a swap of messages. In each a site
makes one call over its carrier (none in a swap in which it has no part), and the reply ends the step for it. A call
that breaks off is made again; the server knows what it has received, and sends its reply again. Messages between sites
pass through the server.

A request is a head in JSON, in one piece, and then a body of numbers; nothing is unpickled. The server reads a body
when it is in the step that it belongs to, and knows how long each message in it has to be.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from fedlit.federation.documents import document, read_document
from fedlit.federation.errors import FederationError, PeerFailedError, RosterError
from fedlit.federation.membership import Membership, Verdict
from fedlit.federation.transport import MOST_BYTES, Outgoing, Transport, Way, whole
from fedlit.privacy import DecodeError
from fedlit.remote.carrier import PIECE_BYTES, BrokenError, Caller, Listener, Pieces, RefusedError

_log = logging.getLogger("fedlit.remote")

PROTOCOL = 1
"""Version of the messages between star ends; raised where older ones would not understand."""

_HEAD_BYTES = 1 << 20
"""Of JSON at most."""

_CLOCKS = 300.0
"""Seconds that a site's clock may differ from the server's."""

_REMIND = 30.0
"""Seconds after which it is logged again which sites are waited for."""

_STILL_CONNECTED = 15.0
"""Seconds after which it is noticed at the latest that a process has gone."""

_LONG = 64 << 20
"""Bytes from which on the progress of messages is logged, and they come one after the other."""


class DismissedError(FederationError):
    """The server goes on without this site, which was silent for too long: it may come back as a new process."""


class ServerLostError(FederationError):
    """The server did not answer for longer than a site's patience."""


# ---------------------------------------------------------------- requests and replies


def _head(**words: Any) -> bytes:
    return json.dumps(words).encode()


def _read_head(pieces: Pieces) -> dict[str, Any]:
    """The head of a request or reply."""
    piece = next(pieces, b"")
    if len(piece) > _HEAD_BYTES:
        raise DecodeError(f"a head of {len(piece)} bytes was sent, which must have at most {_HEAD_BYTES}")
    try:
        head = json.loads(piece)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"what should be a head in JSON is none: {str(error)[:100]}") from None
    if not isinstance(head, dict):
        raise DecodeError(f"a head must be a JSON object, got {str(head)[:100]}")
    return head


def _cut(messages: Sequence[Outgoing]) -> Iterator[bytes]:
    """Messages of bytes, one after the other, in pieces."""
    for message in [part for each in messages for part in (each if isinstance(each, list) else [each])]:
        view: memoryview = message.numpy().data
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


def _read_body(pieces: Pieces, sizes: Sequence[int], doing: str) -> list[Tensor]:
    """Messages of so many bytes each; a `DecodeError` if the body has another length."""
    messages = []
    rest = b""
    progress = _Progress(sum(sizes), doing)
    for size in sizes:
        message = torch.empty(size, dtype=torch.uint8)
        view, filled = message.numpy().data, 0
        while filled < size:
            piece = rest or next(pieces, b"")
            if not piece:
                raise DecodeError(f"{filled} bytes of a message of {size} came, and then no more, in {doing}")
            taken = min(len(piece), size - filled)
            view[filled : filled + taken] = piece[:taken]
            filled, rest = filled + taken, piece[taken:]
            progress.add(taken)
        messages.append(message)
    if rest or next(pieces, b""):
        raise DecodeError(f"more than the {sum(sizes)} bytes that are due came in {doing}")
    return messages


class _Progress:
    """Logs every few seconds how far a long message is."""

    def __init__(self, size: int, doing: str) -> None:
        self._size, self._doing, self._done = size, doing, 0
        self._next = time.monotonic() + 10

    def add(self, size: int) -> None:
        self._done += size
        if self._size >= _LONG and time.monotonic() >= self._next:
            self._next = time.monotonic() + 10
            share = 100 * self._done // self._size
            _log.info("%s: %d of %d MB have come (%d %%)", self._doing, self._done >> 20, self._size >> 20, share)


def _bytes_of(frame: Tensor) -> Tensor:
    return frame.contiguous().reshape(-1).view(torch.uint8)


def _frames(body: Tensor, frame: Tensor, ranks: int) -> list[Tensor]:
    """Frames of all ranks, shaped like one's own."""
    return [row.clone().view(frame.dtype).reshape(frame.shape) for row in body.reshape(ranks, -1)]


# ---------------------------------------------------------------- the server


@dataclass
class _Step:
    """What is done now.

    Attributes:
        number: Of the step.
        due: By rank, sizes of the messages that are due from it: one for each way.
        doing: In words.
        came: By rank, what has come.
        turns: Ranks in the order in which their messages are to come; ``None`` is at once.
    """

    number: int
    due: dict[int, list[int]]
    doing: str
    came: dict[int, list[Tensor]] = field(default_factory=dict)
    turns: list[int] | None = None


@dataclass
class _Reply:
    """What a call is answered by."""

    head: bytes
    body: Sequence[Outgoing] = ()


@dataclass
class _Seat:
    """A site, as the server sees it.

    Attributes:
        session: Of its process, if one takes part or waits.
        asked: The last step that it has asked for.
        replies: To its calls from that step on; 0 is the one to a return.
        presences: Connections of its processes that stand.
    """

    session: str = ""
    asked: int = 0
    replies: dict[int, _Reply] = field(default_factory=dict)
    presences: int = 0


@final
class ServerStar(Transport):
    """The server's end: rank 0, which hosts no client.

    Args:
        listener: Of the carrier.
        sites: Clients of each site, whose certificate has its name; ranks 1, 2, ... in this order.
        facts: What all must have alike, by what it is.
        wait_for: Seconds to wait for sites before the first round, and where none is left.
        patience: Seconds of silence after which a site is lost.
    """

    rank = 0
    losable = True

    def __init__(
        self,
        listener: Listener,
        sites: Mapping[str, Sequence[str]],
        facts: Mapping[str, Any],
        wait_for: float,
        patience: float,
    ) -> None:
        self.world_size = len(sites) + 1
        self.sites = {name: list(clients) for name, clients in sites.items()}
        self.address = ""
        self._listener = listener
        self._facts = json.loads(json.dumps(dict(facts)))
        self._wait_for = wait_for
        self._names = ["", *sites]
        self._rank_of = {name: rank for rank, name in enumerate(self._names) if rank}
        self._seats = {rank: _Seat() for rank in self._rank_of.values()}
        self._members = Membership(self._seats, patience)
        self._changed = threading.Condition()
        self._number = 0
        self._step: _Step | None = None
        self._ended: str | None = None
        self._closed = self._again = False
        self._begun = False
        self._expected: frozenset[int] = frozenset()
        self._history: dict[str, dict[int, Any]] = {"meetings": {}, "messages": {}, "results": {}}

    @property
    def step(self) -> int:
        """See `Transport`."""
        return self._number

    @property
    def begun(self) -> bool:
        """Whether the first round has begun, or is about to."""
        return self._begun

    # ------------------------------------------------ who comes, and goes

    def open(self) -> None:
        """Listen, and wait for all sites.

        Raises:
            FederationError: If one does not come in time.
        """
        self.address = self._listener.listen(self._answer, self._came, self._gone)
        _log.info("the server listens at %s, and waits for %s", self.address, ", ".join(self._names[1:]))
        with self._changed:
            self._await(lambda: set(self._seats) - self._members.here, "to begin")

    def _await(self, missing: Any, what: str) -> None:
        """Wait until ``missing()`` is empty, and log now and then who is missing; called with the lock."""
        ends, reminds = time.monotonic() + self._wait_for, time.monotonic() + min(_REMIND, self._wait_for / 2)
        while lacking := missing():
            if self._ended is not None:
                raise FederationError(self._ended)
            names = [self._names[rank] for rank in sorted(lacking)]
            now = time.monotonic()
            if now >= ends:
                raise FederationError(
                    f"sites {names} did not come within {self._wait_for:g} s (wait_for) {what}: see their output, "
                    "start them, or wait longer"
                )
            if now >= reminds:
                reminds = now + _REMIND
                _log.info("still waiting for %s", ", ".join(names))
            self._changed.wait(min(ends, reminds) - now)
            self._drop_overdue()

    def _came(self, name: str) -> None:
        self._connected(name, 1)

    def _gone(self, name: str) -> None:
        self._connected(name, -1)

    def _connected(self, name: str, more: int) -> None:
        """So many connections of a site more or less."""
        with self._changed:
            rank = self._rank_of.get(name)
            if rank is None:
                return
            seat = self._seats[rank]
            seat.presences += more
            if seat.presences > 0:
                self._members.heard(rank)
            else:
                self._members.silent(rank)
            self._changed.notify_all()

    def _drop_overdue(self) -> None:
        for rank in self._members.overdue():
            self._dismiss(rank, "was silent for too long")

    def _dismiss(self, rank: int, why: str) -> None:
        """Go on without a site."""
        self._members.drop(rank)
        self._seats[rank].session, self._seats[rank].asked, self._seats[rank].replies = "", 0, {}
        _log.warning("site %s %s: the run goes on without it", self._names[rank], why)
        self._changed.notify_all()

    # ------------------------------------------------ calls of sites

    def _answer(self, name: str, pieces: Pieces) -> Pieces:
        rank = self._rank_of.get(name)
        if rank is None:
            raise RefusedError(f"the server knows no site {name!r}, but {self._names[1:]} (sites)")
        kinds = {"hello": self._hello, "step": self._step_of, "join": self._join_of, "leave": self._leave_of}
        try:
            head = _read_head(pieces)
            if not isinstance(head.get("kind"), str) or head["kind"] not in kinds:
                raise DecodeError(f"there is no request of kind {str(head.get('kind'))[:50]!r}")
            reply = kinds[head["kind"]](rank, head, pieces)
            yield reply.head
            yield from _cut(reply.body)
        except DecodeError as error:
            with self._changed:
                if rank in self._members.here:
                    self._dismiss(rank, f"sends what is no request ({error})")
            raise RefusedError(f"the server cannot read what {name!r} sends: {error}") from error
        except RefusedError as error:
            _log.warning("refused site %s: %s", name, error)
            raise

    def _hello(self, rank: int, head: Mapping[str, Any], pieces: Pieces) -> _Reply:
        name, session, clock = self._names[rank], head.get("session"), head.get("clock")
        if not isinstance(session, str) or not 16 <= len(session) <= 64 or type(clock) is not float:
            raise DecodeError("a hello has a session and a clock")
        if not abs(time.time() - clock) <= _CLOCKS:
            raise RefusedError(
                f"the clock of site {name!r} is {clock - time.time():+.0f} s off the server's, which may be "
                f"{_CLOCKS:g} s at most: set the clocks of both"
            )
        self._compare(name, head.get("facts"))
        claimed = head.get("clients")
        if claimed is not None and claimed != self.sites[name]:
            raise RefusedError(
                f"site {name!r} claims the clients {str(claimed)[:200]}, but the server has {self.sites[name]} for the "
                "certificate of this name (sites)"
            )
        with self._changed:
            self._check_alone(rank, session)
            seat, late = self._seats[rank], self._begun
            if seat.session != session:
                if rank in self._members.here and self._number:
                    self._dismiss(rank, "has started again")
                    if not late:
                        self._ended = self._ended or f"site {name!r} started again before the first round"
                self._members.drop(rank)
                seat.session, seat.asked, seat.replies = session, 0, {}
                if not late:
                    self._members.come(rank)
                _log.info("site %s has come%s", name, ", and takes part from the next round" if late else "")
                self._changed.notify_all()
            history = [self._history_for(rank)] if late else []
            size = sum(len(part) for part in history)
            return _Reply(_head(rank=rank, sites=self.sites, late=late, bytes=size), history)

    def _check_alone(self, rank: int, session: str) -> None:
        """Refuse a second process of one name; one that was killed just now is still connected for some seconds."""
        seat, ends = self._seats[rank], time.monotonic() + _STILL_CONNECTED
        while seat.session not in ("", session) and seat.presences > 1:
            if time.monotonic() >= ends:
                raise RefusedError(
                    f"another process is connected as site {self._names[rank]!r}, and a name is for one: end the other "
                    "first"
                )
            self._changed.wait(ends - time.monotonic())

    def _compare(self, name: str, facts: Any) -> None:
        theirs = facts if isinstance(facts, dict) else {}
        for key in [*self._facts, *(key for key in theirs if key not in self._facts)]:
            if theirs.get(key) != self._facts.get(key):
                ours, other = _differing(self._facts.get(key), theirs.get(key))
                raise RefusedError(
                    f"{_line(key)} differs: the server has {_line(ours)}, site {name!r} has {_line(other)}"
                )

    def _history_for(self, rank: int) -> Tensor:
        """Message to a site that comes later, with what has happened before the first round."""
        own = {"messages": {number: to[rank] for number, to in self._history["messages"].items() if rank in to}}
        parts = {**self._history, **own}
        return document({key: [[*item] for item in part.items()] for key, part in parts.items()}, "history")

    def _refusal(self, rank: int, session: Any) -> _Reply | None:
        """Reply to a site that takes no part any more, else ``None``; with the lock."""
        if self._ended is not None:
            return _Reply(_head(ended=self._ended, again=self._again))
        return None if self._seats[rank].session == session else _Reply(_head(dismissed=True))

    def _step_of(self, rank: int, head: Mapping[str, Any], pieces: Pieces) -> _Reply:
        session, number, which = head.get("session"), head.get("step"), head.get("which")
        if type(number) is not int or not isinstance(which, list) or not all(type(each) is int for each in which):
            raise DecodeError("a step has a number, and states which message goes which way")
        seat = self._seats[rank]
        with self._changed:
            if self._refusal(rank, session) is None:
                seat.asked = max(seat.asked, number)  # who asks for this step has the replies to those before
                seat.replies = {step: reply for step, reply in seat.replies.items() if step >= number}
            while (refusal := self._refusal(rank, session)) is None:
                self._check_wanted(seat, number)
                step = self._step
                if step is not None and step.number == number and rank in step.due and rank not in step.came:
                    break
                if number in seat.replies:
                    return seat.replies[number]
                if number < self._number:
                    raise DecodeError(f"step {number} is over, and step {self._number} under way")
                self._changed.wait()
            if refusal is not None:
                return self._answer_to(seat, session, number) or refusal
        assert step is not None
        self._take_turn(rank, step)
        messages = self._received(rank, step, which, pieces)
        with self._changed:
            step.came.setdefault(rank, messages)
            self._changed.notify_all()
            while (refusal := self._refusal(rank, session)) is None and number not in seat.replies:
                self._check_wanted(seat, number)
                self._changed.wait()
            return self._answer_to(seat, session, number) or refusal or seat.replies[number]

    @staticmethod
    def _answer_to(seat: _Seat, session: Any, number: int) -> _Reply | None:
        """Reply to a step that is over, which a site receives even if the run has ended since."""
        return seat.replies.get(number) if seat.session == session else None

    def _check_wanted(self, seat: _Seat, number: int) -> None:
        """Give up a call that broke off and was made again."""
        if number < seat.asked:
            raise BrokenError(f"step {number} was asked for again")

    def _take_turn(self, rank: int, step: _Step) -> None:
        """Wait for those before, where messages are too long to be kept at once."""
        with self._changed:
            while step.turns and step.turns[0] != rank and rank in self._members.here and self._ended is None:
                self._changed.wait()

    def _received(self, rank: int, step: _Step, which: list[int], pieces: Pieces) -> list[Tensor]:
        """Messages of a site, one for each way; the same for several ways is sent once."""
        sizes = step.due[rank]
        if len(which) != len(sizes) or sorted({*which}) != list(range(len({*which}))):
            raise DecodeError(f"{len(sizes)} messages are due in {step.doing}, and {len(which)} are announced")
        lengths: dict[int, int] = {}
        for place, size in zip(which, sizes, strict=True):
            if lengths.setdefault(place, size) != size:
                raise DecodeError(f"messages of {lengths[place]} and {size} bytes are given as one, in {step.doing}")
        parts = _read_body(pieces, [lengths[place] for place in sorted(lengths)], f"{step.doing}, {self._names[rank]}")
        return [parts[place] for place in which]

    def _join_of(self, rank: int, head: Mapping[str, Any], pieces: Pieces) -> _Reply:
        session, seat = head.get("session"), self._seats[rank]
        with self._changed:
            if self._refusal(rank, session) is None and rank not in self._members.here:
                self._members.wait(rank)
                self._changed.notify_all()
            while (refusal := self._refusal(rank, session)) is None and 0 not in seat.replies:
                self._changed.wait()
            return refusal or seat.replies[0]

    def _leave_of(self, rank: int, head: Mapping[str, Any], pieces: Pieces) -> _Reply:
        with self._changed:
            if self._seats[rank].session == head.get("session"):
                why = _line(head.get("why"))
                if why == "done":
                    self._members.drop(rank)
                    _log.info("site %s has ended", self._names[rank])
                    self._changed.notify_all()
                else:
                    self._dismiss(rank, f"has left ({why})")
        return _Reply(_head(ok=True))

    # ------------------------------------------------ steps

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        """See `Transport`."""
        return self._meeting(frame, doing)[0]

    def roll_call(self, lacks: Callable[[Collection[int]], str] = lambda lost: "") -> frozenset[int]:
        """See `Transport`; where no site is left, waits for one."""
        with self._changed:
            members, expected = self._members, self._expected

            def away() -> set[int]:
                return {*self._seats} - members.here - members.waiting

            self._await(lambda: expected & away(), "to come back")
            self._await(lambda: set() if members.here or members.waiting else away(), "when none was left")
            if why := lacks(away()):
                _log.warning("no round begins without %s: %s", ", ".join(self._names[r] for r in sorted(away())), why)
                self._await(lambda: away() if lacks(away()) else set(), f"to go on: {why}")
        self._expected = frozenset()
        return self._meeting(torch.zeros(1, dtype=torch.uint8), "a roll call", roll_call=True)[1].joined

    def begin(self, back: Collection[int]) -> None:
        """See `Transport`."""
        with self._changed:
            self._begun, self._expected = True, frozenset(back)
            for rank in back:  # they leave once they have their answer, to come back as new processes
                self._members.drop(rank)
            self._changed.notify_all()

    def _meeting(self, frame: Tensor, doing: str, roll_call: bool = False) -> tuple[list[Tensor], Verdict]:
        own = _bytes_of(frame)
        came = self._collect({rank: [len(own)] for rank in self._here()}, doing)
        table = torch.zeros(self.world_size, len(own), dtype=torch.uint8)
        table[0] = own
        with self._changed:
            verdict = self._members.meeting(roll_call)
            for rank in {*came} - verdict.lost:
                table[rank] = came[rank][0]
            words = _head(step=self._number, lost=sorted(verdict.lost), joined=sorted(verdict.joined))
            for rank in self._members.here:
                if rank in verdict.joined:
                    self._seats[rank].replies[0] = _Reply(words)
                else:
                    self._seats[rank].replies[self._number] = _Reply(words, [table.reshape(-1)])
            self._step = None
            self._changed.notify_all()
        self._check_lost(verdict.lost)
        self.lost = verdict.lost
        if not self._begun:
            self._history["meetings"][self._number] = table
        for rank in verdict.joined:
            _log.info("site %s takes part again", self._names[rank])
        return _frames(table.reshape(-1), frame, self.world_size), verdict

    def _check_lost(self, lost: Collection[int]) -> None:
        if lost and not self._begun:
            names = [self._names[rank] for rank in sorted(lost)]
            self.close(words := f"sites {names} were lost before the first round: start them, and the server, again")
            raise FederationError(words)

    def _collect(
        self,
        due: Mapping[int, list[int]],
        doing: str,
        replies: Mapping[int, _Reply] | None = None,
        consume: Callable[[int, list[Tensor] | None], None] | None = None,
    ) -> dict[int, list[Tensor]]:
        """Take a step's messages of those from whom some are due; without those who are lost meanwhile.

        ``replies`` are for those who need not wait for others. With ``consume`` messages come one rank after the other,
        and are handed over and not kept; ``None`` of one that is lost.
        """
        with self._changed:
            self._number += 1
            step = self._step = _Step(self._number, dict(due), doing, turns=None if consume is None else sorted(due))
            for rank, reply in (replies or {}).items():
                self._seats[rank].replies[self._number] = reply
            self._changed.notify_all()
            if consume is None:
                self._wait_until_come(step, step.due.keys())
                return {rank: messages for rank, messages in step.came.items() if rank in self._members.here}
        assert step.turns is not None
        while step.turns:
            rank = step.turns[0]
            with self._changed:
                self._wait_until_come(step, {rank})
                messages = step.came.get(rank) if rank in self._members.here else None
                step.came[rank] = []
            consume(rank, messages)
            del messages
            with self._changed:
                step.turns.pop(0)
                self._changed.notify_all()
        return {}

    def _wait_until_come(self, step: _Step, ranks: Collection[int]) -> None:
        """Wait until all of these that are here have sent what is due; with the lock."""
        reminds = time.monotonic() + _REMIND
        while missing := ({*ranks} & self._members.here) - step.came.keys():
            if self._ended is not None:
                raise FederationError(self._ended)
            now = time.monotonic()
            left = self._members.time_left()
            if now >= reminds:
                reminds = now + _REMIND
                _log.info("%s: waiting for %s", step.doing, ", ".join(self._names[rank] for rank in sorted(missing)))
            self._changed.wait(reminds - now if left is None else max(0.0, min(left, reminds - now)) + 0.001)
            self._drop_overdue()

    def swap(self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str) -> list[Tensor | None]:
        """See `Transport`."""
        senders: dict[int, list[int]] = {}
        for place, (here, _, _) in enumerate(ways):
            senders.setdefault(here, []).append(place)
        carried: dict[int, Outgoing] = dict(zip(senders.pop(0, []), outgoing, strict=True))
        receivers = {there for _, there, _ in ways if there}
        relayed = {there for here, there, _ in ways if here and there}
        there = self._here()
        at_once = {rank: self._reply_to(rank, ways, carried) for rank in (({*senders} | receivers) - relayed) & there}
        due = {rank: [ways[place][2] for place in places] for rank, places in senders.items() if rank in there}
        came = self._collect(due, doing, at_once)
        for rank, messages in came.items():
            carried |= dict(zip(senders[rank], messages, strict=True))
        with self._changed:
            for rank in relayed & self._members.here:
                self._seats[rank].replies[self._number] = self._reply_to(rank, ways, carried)
            self._step = None
            self._changed.notify_all()
        if not self._begun:
            kept = {
                rank: [
                    [whole(carried[place]) if place in carried else None]
                    for place, (_, there, _) in enumerate(ways)
                    if there == rank
                ]
                for rank in receivers
            }
            self._history["messages"][self._number] = kept
        return [
            whole(carried[place]) if place in carried else None
            for place, (_, there, _) in enumerate(ways)
            if there == 0
        ]

    def gather_each(
        self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str, take: Callable[[int, Tensor], None]
    ) -> None:
        """See `Transport`; long messages come one site after the other."""
        if sum(size for _, _, size in ways) < _LONG:
            super().gather_each(ways, outgoing, doing, take)
            return
        senders: dict[int, list[int]] = {}
        for place, (here, _, _) in enumerate(ways):
            senders.setdefault(here, []).append(place)
        there = self._here()
        due = {rank: [ways[place][2] for place in places] for rank, places in senders.items() if rank in there}
        waiting: dict[int, Tensor] = {}
        left = sorted(place for rank in due for place in senders[rank])

        def consume(rank: int, messages: list[Tensor] | None) -> None:
            """Hand over in the order of the ways, whatever the order of the ranks."""
            if messages is None:
                left[:] = [place for place in left if place not in senders[rank]]
            waiting.update(zip(senders[rank], messages or [], strict=False))
            while left and left[0] in waiting:
                place = left.pop(0)
                take(place, waiting.pop(place))

        self._collect(due, doing, {rank: self._reply_to(rank, ways, {}) for rank in due}, consume)
        with self._changed:
            self._step = None
            self._changed.notify_all()

    def _here(self) -> set[int]:
        with self._changed:
            return {*self._members.here}

    def _reply_to(self, rank: int, ways: Sequence[Way], carried: Mapping[int, Outgoing]) -> _Reply:
        """The messages to a site, of those that were carried."""
        places = [place for place, (_, there, _) in enumerate(ways) if there == rank]
        missing = [place for place, which in enumerate(places) if which not in carried]
        body = [carried[place] for place in places if place in carried]
        return _Reply(_head(step=self._number, missing=missing), body)

    def note(self, step: int, value: Any) -> None:
        """See `Transport`."""
        self._history["results"][step] = [self._number, value]

    # ------------------------------------------------ the end

    def close(self, why: str | None = None, again: bool = False) -> None:
        """End: with ``why`` as an error of all sites, and else when they have ended, too.

        With ``again`` they learn that the server was stopped, and may come back.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if why is None and self._ended is None:
                ends = time.monotonic() + max(10.0, self._members.patience)
                while self._members.here and (left := ends - time.monotonic()) > 0:
                    self._changed.wait(left)
                    self._drop_overdue()
            self._ended, self._again = self._ended or why or "the run has ended", again
            self._changed.notify_all()
        if why is not None:
            time.sleep(0.2)  # until calls that wait have their answer
        self._listener.close()


def _differing(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Of two mappings, what differs in them; anything else as it is."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return ours, theirs
    keys = [key for key in {**ours, **theirs} if key not in ours or key not in theirs or ours[key] != theirs[key]]
    return tuple({key: side[key] for key in keys if key in side} for side in (ours, theirs))  # type: ignore[return-value]


def _line(words: object) -> str:
    """Return a text, such as a site's, on one line of a log and in bounds."""
    return " ".join(str(words)[:500].split())


# ---------------------------------------------------------------- a site


@final
class SiteStar(Transport):
    """A site's end.

    Args:
        caller: Of the carrier.
        facts: See `ServerStar`.
        clients: That this site claims to have; ``None`` leaves that to the server.
        wait_for: Seconds to wait for a server that is not there yet.
        patience: Seconds that the server may be silent.
    """

    losable = True

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
        """Find the server, and be let in.

        Raises:
            RefusedError: If the server does not let this site in.
            FederationError: If there is no server in time.
        """

        def hello() -> bytes:
            return _head(
                kind="hello", session=self._session, clock=time.time(), facts=self._facts, clients=self._clients
            )

        try:
            head, pieces = self._ask(hello, (), self._wait_for)
        except ServerLostError as error:
            raise FederationError(
                f"there was no server within {self._wait_for:g} s (wait_for): {error}. See whether it runs, and "
                "whether this machine may dial out to it"
            ) from error
        rank, sites, late, size = (head.get(key) for key in ("rank", "sites", "late", "bytes"))
        if type(rank) is not int or not isinstance(sites, dict) or not 0 < rank <= len(sites) or type(size) is not int:
            raise DecodeError(f"the server answers a hello by {str(head)[:200]}")
        self.rank, self.sites, self.world_size = rank, sites, len(sites) + 1
        if late:
            _bound([size], "the history of the run")
            (message,) = _read_body(pieces, [size], "the history of the run")
            history = read_document(message)
            self._history = {key: dict((number, value) for number, value in part) for key, part in history.items()}
        name, clients = list(sites.items())[rank - 1]
        under_way = ", and a run is under way" if late else ""
        _log.info("the server has let this site in as %r, with %s%s", name, ", ".join(map(str, clients)), under_way)

    def _ask(self, head: Any, body: Sequence[Outgoing], patience: float) -> tuple[dict[str, Any], Pieces]:
        """Call, again and again if it breaks off; the reply's head, and the pieces after it."""
        broken: float | None = None
        while True:
            try:
                reply = self._caller.call(_request(head(), body))
                answer = _read_head(reply)
            except BrokenError as error:
                now = time.monotonic()
                if broken is None:
                    _log.warning("the server does not answer (%s): trying again for %g s", error, patience)
                broken = now if broken is None else broken
                if now - broken >= patience:
                    raise ServerLostError(
                        f"the server did not answer for {patience:g} s: {error}. Look at its output first"
                    ) from error
                time.sleep(min(0.25, patience / 10))
                continue
            if answer.get("dismissed"):
                self._closed = True
                raise DismissedError(
                    "the server goes on without this site: it was silent for longer than the server's patience, or the "
                    "server has started again; start it again, and it takes part from the next round"
                )
            if "ended" in answer:
                self._closed = True
                if answer.get("again"):
                    raise ServerLostError(f"the server was stopped: {str(answer['ended'])[:2000]}")
                raise PeerFailedError(f"the server has ended: {str(answer['ended'])[:2000]}")
            return answer, reply

    def _take(
        self, head: bytes, body: Sequence[Outgoing], sizes: Any, doing: str
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """One step: what the server answers, whose messages have the ``sizes`` that its head lets be due."""
        ends: float | None = None
        while True:
            answer, pieces = self._ask(lambda: head, body, self._patience)
            try:
                due = sizes(answer)
                _bound(due, doing)
                return answer, _read_body(pieces, due, doing)
            except BrokenError as error:
                ends = time.monotonic() + self._patience if ends is None else ends
                if time.monotonic() >= ends:
                    raise ServerLostError(
                        f"the server's answer broke off again and again, in {doing}: {error}"
                    ) from error

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        """See `Transport`."""
        return self._meeting(frame, doing)[0]

    def roll_call(self, lacks: Callable[[Collection[int]], str] = lambda lost: "") -> frozenset[int]:
        """See `Transport`; one who returns waits for the next."""
        if self._history is None:
            return self._meeting(torch.zeros(1, dtype=torch.uint8), "a roll call")[1]
        answer, _ = self._take(_head(kind="join", session=self._session), (), lambda _: [], "a return")
        self._history = None
        if type(answer.get("step")) is not int:
            raise DecodeError(f"the server answers a return by {str(answer)[:200]}")
        self._number = answer["step"]
        return self._verdict(answer)

    def _verdict(self, answer: Mapping[str, Any]) -> frozenset[int]:
        reported = []
        for key in ("lost", "joined"):
            ranks = answer.get(key)
            if not isinstance(ranks, list) or not all(
                type(rank) is int and 0 < rank < self.world_size for rank in ranks
            ):
                raise DecodeError(f"the server reports {key} ranks by {str(ranks)[:200]}")
            reported.append(frozenset(ranks))
        if self.rank in reported[0]:
            raise DismissedError("the server goes on without this site")
        self.lost = reported[0]
        return reported[1]

    def _meeting(self, frame: Tensor, doing: str) -> tuple[list[Tensor], frozenset[int]]:
        self._number += 1
        own = _bytes_of(frame)
        if self._history is not None:
            table = self._recorded("meetings", doing)
            if table.shape != (self.world_size, len(own)) or not torch.equal(table[self.rank], own):
                raise RosterError(
                    f"this site does otherwise than when the run began, in {doing}: it must come back with the data, "
                    "configuration and versions that it had"
                )
            return _frames(table.reshape(-1), frame, self.world_size), frozenset()
        head = _head(kind="step", session=self._session, step=self._number, which=[0])
        answer, (body,) = self._take(head, [own], lambda _: [self.world_size * len(own)], doing)
        joined = self._verdict(answer)
        return _frames(body, frame, self.world_size), joined

    def _recorded(self, what: str, doing: str) -> Any:
        """What the history has of this step."""
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
        leaving = [size for here, _, size in ways if here == self.rank]
        if not due and not leaving:
            return []
        parts: dict[int, Outgoing] = {}
        for message in outgoing:
            parts.setdefault(id(message), message)
        places = {identity: place for place, identity in enumerate(parts)}
        which = [places[id(message)] for message in outgoing]
        head = _head(kind="step", session=self._session, step=self._number, which=which)

        def coming(answer: Mapping[str, Any]) -> list[int]:
            missing = answer.get("missing")
            if not isinstance(missing, list) or not all(type(place) is int for place in missing):
                raise DecodeError(f"the server answers a step by {str(answer)[:200]}")
            return [size for place, size in enumerate(due) if place not in missing]

        answer, came = self._take(head, [*parts.values()], coming, doing)
        arrived = iter(came)
        return [None if place in answer["missing"] else next(arrived) for place in range(len(due))]

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
                for _ in self._caller.call(iter([_head(kind="leave", session=self._session, why=why)])):
                    pass
            except FederationError as error:
                _log.info("could not say goodbye to the server: %s", error)
        self._caller.close()


def _request(head: bytes, body: Sequence[Outgoing]) -> Pieces:
    yield head
    yield from _cut(body)


def _bound(sizes: Sequence[int], doing: str) -> None:
    if min(sizes, default=0) < 0 or sum(sizes) > MOST_BYTES:
        raise DecodeError(
            f"messages of {list(sizes)[:20]} bytes are announced in {doing}, beyond this machine's memory"
        )
