"""Step board: the step under way, what sites have sent for it, and the replies that await them.

The server's thread opens steps and waits for messages; a thread for each call of a site brings messages and takes
replies. All of them hold `StepBoard.changed` while they look at the board, and notify it of each change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from fedlit.federation.errors import FederationError
from fedlit.federation.membership import Membership
from fedlit.federation.transport import Outgoing
from fedlit.privacy import DecodeError
from fedlit.remote.carrier import BrokenError, Pieces
from fedlit.remote.star.framing import check_enclosed, entry, make_head, one_line, read_body

_log = logging.getLogger("fedlit.remote")

_REMIND = 30.0
"""Seconds after which it is logged again which sites are waited for."""

JOINED = 0
"""Number of the reply to a site that comes back; steps count from 1."""


@dataclass
class Step:
    """The step under way."""

    number: int  # from 1
    due: dict[int, list[int]]  # by rank, sizes of the messages that are due from it: one for each way
    doing: str  # names it in logs and errors
    messages: dict[int, list[Tensor]] = field(default_factory=dict)  # by rank, those that have come
    encloses: bool = False  # whether a short message may follow those that are due
    turns: list[int] | None = None  # ranks in the order in which their messages are to come; ``None`` is at once


@dataclass
class Reply:
    """The answer to a call."""

    head: bytes
    body: Sequence[Outgoing] = ()


@dataclass
class SiteCalls:
    """The server's record of a site."""

    session: str = ""  # of its process, if one takes part or waits
    asked: int = 0  # the last step that it has asked for
    replies: dict[int, Reply] = field(default_factory=dict)  # to its calls from that step on, by step; or `JOINED`
    connections: int = 0  # of its processes that stand

    def restart(self, session: str = "") -> None:
        """Forget the process before."""
        self.session, self.asked, self.replies = session, 0, {}


@final
class StepBoard:
    """See the module; sites are ranks 1, 2, ...

    They time out after ``patience`` seconds without a connection, and after ``step_timeout`` seconds for which nothing
    but their messages of a step are waited for.
    """

    def __init__(self, names: Sequence[str], patience: float, step_timeout: float) -> None:
        self.names = ["", *names]
        self.sites = {rank: SiteCalls() for rank in range(1, len(self.names))}
        self.members = Membership(self.sites, patience)
        self._step_timeout = step_timeout
        self.changed = threading.Condition()  # the lock of everything else
        self.number = 0
        self.begun = self.again = False
        self.ended: str | None = None  # why; ``again`` is whether the server may come back
        self._step: Step | None = None

    def named(self, ranks: Collection[int]) -> str:
        """Names of ranks, for logs."""
        return ", ".join(self.names[rank] for rank in sorted(ranks))

    def disconnected(self) -> set[int]:
        """Ranks that neither take part nor wait to come back; with the lock."""
        return {*self.sites} - self.members.here - self.members.waiting

    def presence(self) -> tuple[dict[str, str], str]:
        """What each site does, and the step under way with the sites that it waits for, in words."""
        with self.changed:
            due = set() if self._step is None else self._step.due.keys() - self._step.messages.keys()
            states = {}
            for rank, name in enumerate(self.names[1:], 1):
                if rank in self.members.waiting:
                    states[name] = "waits for the next round"
                elif rank in self.members.here:
                    connected = "takes part" if self.sites[rank].connections else "takes part, but is not connected"
                    states[name] = f"{connected}, and is waited for" if rank in due & self.members.here else connected
                else:
                    states[name] = "has left" if self.begun else "has not come"
            return states, "" if self._step is None else self._step.doing

    def check_running(self) -> None:
        """Raise a `FederationError` if the run has ended."""
        if self.ended is not None:
            raise FederationError(self.ended)

    # ------------------------------------------------ sites come and drop out

    def connect(self, name: str, change: int) -> None:
        """Count one connection of a site more (1) or less (-1)."""
        with self.changed:
            if name not in self.names[1:]:
                return
            rank = self.names.index(name, 1)
            self.sites[rank].connections += change
            if self.sites[rank].connections > 0:
                self.members.connected(rank)
            else:
                self.members.disconnected(rank)
            self.changed.notify_all()

    def drop(self, rank: int, why: str) -> None:
        """Go on without a site."""
        self.members.drop(rank)
        self.sites[rank].restart()
        _log.warning("site %s %s: the run goes on without it", self.names[rank], why)
        self.changed.notify_all()

    def drop_timed_out(self) -> None:
        """Go on without sites that have been disconnected for too long."""
        for rank in self.members.overdue():
            self.drop(rank, "timed out")

    def await_sites(
        self, missing: Callable[[], Collection[int]], what: str, seconds: float, needed: bool = True
    ) -> None:
        """Wait until ``missing()`` is empty, and log now and then which sites are missing; with the lock.

        A `FederationError` after so many seconds, if they are ``needed``.
        """
        ends, reminds = time.monotonic() + seconds, time.monotonic() + min(_REMIND, seconds / 2)
        while ranks := missing():
            self.check_running()
            now = time.monotonic()
            if now >= ends and not needed:
                return
            if now >= ends:
                raise FederationError(
                    f"sites {[self.names[rank] for rank in sorted(ranks)]} did not come within {seconds:g} s "
                    f"(wait_for) {what}: see their output, start them, or wait longer"
                )
            if now >= reminds:
                reminds = now + _REMIND
                _log.info("still waiting for %s", self.named(ranks))
            self.changed.wait(min(ends, reminds) - now)
            self.drop_timed_out()

    # ------------------------------------------------ the server's thread

    def here(self) -> set[int]:
        """Ranks that take part."""
        with self.changed:
            return {*self.members.here}

    def collect(
        self,
        due: Mapping[int, list[int]],
        doing: str,
        replies: Mapping[int, Reply] | None = None,
        encloses: bool = False,
    ) -> dict[int, list[Tensor]]:
        """Open a step, and take the messages that are due, without those of sites that drop out meanwhile.

        ``replies`` are for sites that need not wait for others. If the step ``encloses``, a short message follows those
        that are due, of no bytes if a site has sent none.
        """
        with self.changed:
            step = self._open(Step(self.number + 1, dict(due), doing, encloses=encloses), replies or {})
            self._await_messages(step, due)
            return {rank: messages for rank, messages in step.messages.items() if rank in self.members.here}

    def collect_in_turn(
        self, due: Mapping[int, list[int]], doing: str, replies: Mapping[int, Reply]
    ) -> Iterator[tuple[int, list[Tensor] | None]]:
        """As `collect`, but one rank after the other, and no messages are kept; ``None`` of one that drops out."""
        turns = sorted(due)
        with self.changed:
            step = self._open(Step(self.number + 1, dict(due), doing, turns=turns), replies)
        while turns:
            yield turns[0], self._hand_over(step, turns[0])
            with self.changed:
                turns.pop(0)
                self.changed.notify_all()

    def _hand_over(self, step: Step, rank: int) -> list[Tensor] | None:
        with self.changed:
            self._await_messages(step, {rank})
            messages = step.messages.get(rank) if rank in self.members.here else None
            step.messages[rank] = []
            return messages

    def _open(self, step: Step, replies: Mapping[int, Reply]) -> Step:
        self.number, self._step = step.number, step
        for rank, reply in replies.items():
            self.sites[rank].replies[step.number] = reply
        self.changed.notify_all()
        return step

    def _await_messages(self, step: Step, ranks: Collection[int]) -> None:
        """Wait until all of these that take part have sent what is due, but for those that time out; with the lock."""
        ends, reminds = time.monotonic() + self._step_timeout, time.monotonic() + _REMIND
        while missing := ({*ranks} & self.members.here) - step.messages.keys():
            self.check_running()
            now = time.monotonic()
            if now >= ends:
                for rank in missing:
                    self.drop(rank, f"is connected, and did not answer {self._step_timeout:g} s (step_timeout) long")
                continue
            if now >= reminds:
                reminds = now + _REMIND
                _log.info("%s: waiting for %s", step.doing, self.named(missing))
            left = min(ends, reminds) - now
            time_left = self.members.time_left()
            self.changed.wait(left if time_left is None else min(time_left, left) + 0.001)
            self.drop_timed_out()

    def finish(self, replies: Mapping[int, Reply] | None = None) -> None:
        """End the step under way, with replies to the sites among these that take part."""
        with self.changed:
            for rank, reply in (replies or {}).items():
                if rank in self.members.here:
                    self.sites[rank].replies[self.number] = reply
            self._step = None
            self.changed.notify_all()

    def end(self, why: str, again: bool) -> None:
        """Let calls that wait return that the run has ended."""
        with self.changed:
            self.ended, self.again = self.ended or why, again
            self.changed.notify_all()

    # ------------------------------------------------ threads of sites' calls

    def answer_step(self, rank: int, head: Mapping[str, Any], pieces: Pieces) -> Reply:
        """Take a site's messages when its step is under way, and wait for the reply."""
        session, number, which = head.get("session"), entry(head, "step", int), entry(head, "which", list)
        site = self.sites[rank]
        with self.changed:
            if self._last_reply(rank, session) is None:
                site.asked = max(site.asked, number)  # a site that asks for this step has the replies to those before
                site.replies = {step: reply for step, reply in site.replies.items() if step >= number}
            while (last := self._last_reply(rank, session, number)) is None:
                self._check_latest(site, number)
                step = self._step
                # before the reply, which is there already where a site need not wait for others
                if step is not None and step.number == number and rank in step.due and rank not in step.messages:
                    break
                if number in site.replies:
                    return site.replies[number]
                if number < self.number:
                    raise DecodeError(f"step {number} is over, and step {self.number} under way")
                self.changed.wait()
            if last is not None:
                return last
            assert step is not None
            # wait for ranks before, where messages are too long to be kept at once
            while step.turns and step.turns[0] != rank and rank in self.members.here and self.ended is None:
                self.changed.wait()
        messages = self._received(rank, step, which, entry(head, "enclosed", int) if step.encloses else 0, pieces)
        with self.changed:
            step.messages.setdefault(rank, messages)
            self.changed.notify_all()
            while (last := self._last_reply(rank, session, number)) is None and number not in site.replies:
                self._check_latest(site, number)
                self.changed.wait()
            return last or site.replies[number]

    def answer_join(self, rank: int, head: Mapping[str, Any], pieces: Pieces) -> Reply:
        """Let a site that comes back wait for the next roll call."""
        session, site = head.get("session"), self.sites[rank]
        with self.changed:
            if self._last_reply(rank, session) is None and rank not in self.members.here:
                self.members.wait(rank)
                self.changed.notify_all()
            while (last := self._last_reply(rank, session)) is None and JOINED not in site.replies:
                self.changed.wait()
            return last or site.replies[JOINED]

    def answer_leave(self, rank: int, head: Mapping[str, Any], pieces: Pieces) -> Reply:
        """Let a site go."""
        with self.changed:
            if self.sites[rank].session == head.get("session"):
                why = one_line(head.get("why"))
                if why == "done":
                    self.members.drop(rank)
                    _log.info("site %s has ended", self.names[rank])
                    self.changed.notify_all()
                else:
                    self.drop(rank, f"has left ({why})")
        return Reply(make_head(ok=True))

    def _last_reply(self, rank: int, session: Any, number: int = -1) -> Reply | None:
        """Reply to a site that takes no part any more; of a step that is over, that to the step."""
        site = self.sites[rank]
        if self.ended is None:
            return None if site.session == session else Reply(make_head(dismissed=True))
        over = site.replies.get(number) if site.session == session else None
        return over or Reply(make_head(ended=self.ended, again=self.again))

    @staticmethod
    def _check_latest(site: SiteCalls, number: int) -> None:
        """Give up a call that broke off and was made again."""
        if number < site.asked:
            raise BrokenError(f"step {number} was asked for again")

    def _received(self, rank: int, step: Step, which: list[int], enclosed: int, pieces: Pieces) -> list[Tensor]:
        """Messages of a site, one for each way; the same for several ways is sent once."""
        check_enclosed(enclosed, step.doing)
        sizes = step.due[rank]
        if len(which) != len(sizes) or sorted({*which}) != list(range(len({*which}))):
            raise DecodeError(f"{len(sizes)} messages are due in {step.doing}, and {len(which)} are announced")
        lengths: dict[int, int] = {}
        for index, size in zip(which, sizes, strict=True):
            if lengths.setdefault(index, size) != size:
                raise DecodeError(f"messages of {lengths[index]} and {size} bytes are given as one, in {step.doing}")
        expected = [lengths[index] for index in sorted(lengths)] + [enclosed] * step.encloses
        parts = read_body(pieces, expected, f"{step.doing}, {self.names[rank]}")
        return [parts[index] for index in which] + parts[len(lengths) :]
