"""The server's end of a star: it goes through the steps, and carries messages between sites."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fedlit.federation.errors import FederationError
from fedlit.federation.membership import Verdict
from fedlit.federation.transport import NOTHING, Outgoing, Transport, Way, whole
from fedlit.privacy import DecodeError
from fedlit.remote.carrier import Listener, Pieces, RefusedError
from fedlit.remote.star.admission import Admission, History
from fedlit.remote.star.board import JOINED, Reply, StepBoard
from fedlit.remote.star.framing import LONG, bytes_of, cut, frames, make_head, read_head

_log = logging.getLogger("fedlit.remote")


@final
class ServerStar(Transport):
    """The server's end: rank 0, which hosts no client; sites are ranks 1, 2, ... in their order. See `Server`."""

    rank = 0
    losable = True
    encloses = True

    def __init__(
        self,
        listener: Listener,
        sites: Mapping[str, Sequence[str]],
        facts: Mapping[str, Any],
        wait_for: float,
        patience: float,
        step_timeout: float,
    ) -> None:
        self.world_size = len(sites) + 1
        self.sites = {name: list(clients) for name, clients in sites.items()}
        self.address = ""
        self.board = StepBoard(list(sites), patience, step_timeout)
        self._history = History()
        admission = Admission(self.board, self._history, self.sites, facts)
        self._requests: dict[str, Callable[[int, Mapping[str, Any], Pieces], Reply]] = {
            "hello": admission.answer_hello,
            "step": self.board.answer_step,
            "join": self.board.answer_join,
            "leave": self.board.answer_leave,
        }
        self._listener = listener
        self._wait_for = wait_for
        self._closed = False
        self._expected: frozenset[int] = frozenset()

    @property
    def step(self) -> int:
        """See `Transport`."""
        return self.board.number

    @property
    def begun(self) -> bool:
        """Whether the first round has begun, or is about to."""
        return self.board.begun

    def open(self) -> None:
        """Listen, and wait for all sites; a `FederationError` if one does not come in time."""
        board = self.board
        self.address = self._listener.listen(
            self._answer, lambda name: board.connect(name, 1), lambda name: board.connect(name, -1)
        )
        _log.info("the server listens at %s, and waits for %s", self.address, ", ".join(self.sites))
        with board.changed:
            board.await_sites(lambda: board.sites.keys() - board.members.here, "to begin", self._wait_for)

    def _answer(self, name: str, pieces: Pieces) -> Pieces:
        """Answer a call of a site, in a thread of its own."""
        if name not in self.sites:
            raise RefusedError(f"the server knows no site {name!r}, but {[*self.sites]} (sites)")
        board, rank = self.board, [*self.sites].index(name) + 1
        try:
            head = read_head(pieces)
            if not isinstance(head.get("kind"), str) or head["kind"] not in self._requests:
                raise DecodeError(f"there is no request of kind {str(head.get('kind'))[:50]!r}")
            reply = self._requests[head["kind"]](rank, head, pieces)
            yield reply.head
            yield from cut(reply.body)
        except DecodeError as error:
            with board.changed:
                if rank in board.members.here:
                    board.drop(rank, f"sends what is no request ({error})")
            raise RefusedError(f"the server cannot read what {name!r} sends: {error}") from error
        except RefusedError as error:
            _log.warning("refused site %s: %s", name, error)
            raise

    # ------------------------------------------------ steps

    def meet(self, frame: Tensor, doing: str) -> list[Tensor]:
        """See `Transport`."""
        return self._meeting(frame, doing)[0]

    def meet_with(
        self, frame: Tensor, enclosed: Mapping[int, Tensor], doing: str
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """See `Transport`."""
        tables, _, arrived = self._meeting(frame, doing, enclosed)
        return tables, arrived

    def roll_call(self, lacks: Callable[[Collection[int]], str] = lambda lost: "") -> frozenset[int]:
        """See `Transport`; where no site is left, waits for one."""
        board = self.board
        members, expected, disconnected = board.members, self._expected, board.disconnected

        def wait(missing: Callable[[], Collection[int]], what: str) -> None:
            board.await_sites(missing, what, self._wait_for)

        with board.changed:
            wait(lambda: expected & disconnected(), "to come back")
            wait(lambda: set() if members.here or members.waiting else disconnected(), "when none was left")
            if why := lacks(disconnected()):
                _log.warning("no round begins without %s: %s", board.named(disconnected()), why)
                wait(lambda: disconnected() if lacks(disconnected()) else set(), f"to go on: {why}")
        self._expected = frozenset()
        return self._meeting(NOTHING, "a roll call", roll_call=True)[1].joined

    def last_call(self) -> frozenset[int]:
        """See `Transport`; waits for all sites."""
        board = self.board
        with board.changed:
            _log.info("the last round is over: waiting for %s, to give them the result", board.named(self.lost))
            board.await_sites(board.disconnected, "to receive the result", self._wait_for, needed=False)
        return self._meeting(NOTHING, "the last roll call", roll_call=True, over=True)[1].joined

    def begin(self, back: Collection[int]) -> None:
        """See `Transport`."""
        board = self.board
        with board.changed:
            board.begun, self._expected = True, frozenset(back)
            for rank in back:  # they leave once they have their answer, to come back as new processes
                board.members.drop(rank)
            board.changed.notify_all()

    def _meeting(
        self,
        frame: Tensor,
        doing: str,
        enclosed: Mapping[int, Tensor] | None = None,
        roll_call: bool = False,
        over: bool = False,
    ) -> tuple[list[Tensor], Verdict, dict[int, Tensor]]:
        board, ours = self.board, bytes_of(frame)
        received = board.collect({rank: [len(ours)] for rank in board.here()}, doing, encloses=True)
        table = torch.zeros(self.world_size, len(ours), dtype=torch.uint8)
        table[0] = ours
        with board.changed:  # the verdict, the table and the replies hold for the same sites
            verdict = board.members.meeting(roll_call)
            for rank in received.keys() - verdict.lost:
                table[rank] = received[rank][0]
            lost, joined = sorted(verdict.lost), sorted(verdict.joined)

            def reply(rank: int, *body: Tensor) -> Reply:
                inside = [] if enclosed is None or rank not in enclosed else [enclosed[rank]]
                size = sum(map(len, inside))
                head = make_head(step=board.number, lost=lost, joined=joined, over=over, enclosed=size)
                return Reply(head, [*body, *inside])

            for rank in verdict.joined:
                board.sites[rank].replies[JOINED] = reply(rank)
            present = board.members.here - verdict.joined
            board.finish({rank: reply(rank, table.reshape(-1)) for rank in present})
        if verdict.lost and not board.begun:
            names = [board.names[rank] for rank in sorted(verdict.lost)]
            why = f"sites {names} dropped out before the first round: start them, and the server, again"
            self.close(why)
            raise FederationError(why)
        self.lost = verdict.lost
        if not board.begun:
            self._history.meetings[board.number] = table
        for rank in verdict.joined:
            _log.info("site %s takes part again", board.names[rank])
        arrived = {rank: each[1] for rank, each in received.items() if rank not in verdict.lost and len(each[1])}
        return frames(table, frame), verdict, arrived

    def swap(self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str) -> list[Tensor | None]:
        """See `Transport`."""
        board, present = self.board, self.board.here()
        senders = _senders(ways)
        carried: dict[int, Outgoing] = dict(zip(senders.pop(0, []), outgoing, strict=True))
        receivers = {there for _, there, _ in ways if there}
        waiting = {there for here, there, _ in ways if here and there}
        at_once = ({*senders} | receivers) - waiting  # their reply needs nothing of another site
        due = {rank: [ways[index][2] for index in indices] for rank, indices in senders.items() if rank in present}
        received = board.collect(due, doing, {rank: self._reply(rank, ways, carried) for rank in at_once & present})
        for rank, messages in received.items():
            carried |= dict(zip(senders[rank], messages, strict=True))
        board.finish({rank: self._reply(rank, ways, carried) for rank in waiting})

        def arrived(rank: int) -> list[Tensor | None]:
            ours = [index for index, (_, there, _) in enumerate(ways) if there == rank]
            return [whole(carried[index]) if index in carried else None for index in ours]

        if not board.begun:
            self._history.messages[board.number] = {
                rank: [[message] for message in arrived(rank)] for rank in receivers
            }
        return arrived(0)

    def gather_each(
        self, ways: Sequence[Way], outgoing: Sequence[Outgoing], doing: str, take: Callable[[int, Tensor], None]
    ) -> None:
        """See `Transport`; long messages come one site after the other."""
        if sum(size for _, _, size in ways) < LONG:
            super().gather_each(ways, outgoing, doing, take)
            return
        board, present = self.board, self.board.here()
        senders = {rank: indices for rank, indices in _senders(ways).items() if rank in present}
        due = {rank: [ways[index][2] for index in indices] for rank, indices in senders.items()}
        left = sorted(index for indices in senders.values() for index in indices)
        early: dict[int, Tensor] = {}
        replies = {rank: self._reply(rank, ways, {}) for rank in due}
        for rank, messages in board.collect_in_turn(due, doing, replies):
            if messages is None:
                left = [index for index in left if index not in senders[rank]]
            early.update(zip(senders[rank], messages or [], strict=False))
            del messages  # or two sites' would be in memory while the next is awaited
            while left and left[0] in early:  # in the order of the ways, whatever the order of the ranks
                index = left.pop(0)
                take(index, early.pop(index))
        board.finish()

    def _reply(self, rank: int, ways: Sequence[Way], carried: Mapping[int, Outgoing]) -> Reply:
        """The messages to a site, of those that were carried."""
        theirs = [index for index, (_, there, _) in enumerate(ways) if there == rank]
        missing = [number for number, index in enumerate(theirs) if index not in carried]
        body = [carried[index] for index in theirs if index in carried]
        return Reply(make_head(step=self.board.number, missing=missing), body)

    def note(self, step: int, value: Any) -> None:
        """See `Transport`."""
        self._history.results[step] = [self.board.number, value]

    # ------------------------------------------------ the end

    def close(self, why: str | None = None, again: bool = False) -> None:
        """End: with ``why`` as an error of all sites, and else when they have ended, too.

        With ``again`` they learn that the server was stopped, and may come back.
        """
        board = self.board
        with board.changed:
            if self._closed:
                return
            self._closed = True
            if why is None and board.ended is None:
                ends = time.monotonic() + max(10.0, board.members.patience)
                while board.members.here and (left := ends - time.monotonic()) > 0:
                    board.changed.wait(left)
                    board.drop_timed_out()
            board.end(why or "the run has ended", again)
        if why is not None:
            time.sleep(0.2)  # until calls that wait have their answer
        self._listener.close()


def _senders(ways: Sequence[Way]) -> dict[int, list[int]]:
    """By rank, the indices of the ways that it sends."""
    senders: dict[int, list[int]] = {}
    for index, (here, _, _) in enumerate(ways):
        senders.setdefault(here, []).append(index)
    return senders
