"""Calls that break off: sums are right and nobody is lost, unless it takes longer than the patience."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedlit.federation import Client, Federation, FederationError
from fedlit.privacy import PairwiseMasking
from fedlit.remote import DismissedError, ServerLostError
from fedlit.remote.star import ServerStar, SiteStar
from loopback import BREAKS, Loopback, LoopbackCaller, around_a_star


def outcome_of(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except FederationError as error:
        return error


NAMES = ["a", "b", "c", "d"]
SITES = {name: [name] for name in NAMES}
ROUNDS = 3


def sums(before: Callable[[Any, Any, int], None], rounds: int = ROUNDS) -> Callable[[Any, Any], list[dict[str, float]]]:
    """Masked sums, one a round, of 1 for the first client, 2 for the second, and so on; what this process receives.

    ``before`` is given the transport, the caller and the round, between the roll call and the sum.
    """

    def action(star: Any, caller: Any) -> list[dict[str, float]]:
        clients = [Client(name, role="target" if name == "d" else "source") for name in NAMES]
        backend = PairwiseMasking(colluders=0, threshold=0.6)
        placement = [[], *SITES.values()]
        federation = Federation(clients, "d", transport=star, placement=placement, privacy=backend, seed=0)
        federation.settled = True
        if star.rank == 0:
            star.begin(())
        found = []
        for round_idx in range(rounds):
            federation.round_idx = round_idx
            federation.roll_call()
            before(star, caller, round_idx)
            mine = {client.name: {"x": torch.full((3,), 1.0 + star.rank)} for client in federation.local_clients}
            got = federation.sum("weights", mine)
            found.append({name: float(payload["x"][0]) for name, payload in got.items()})
        return found

    return action


ALL = 2.0 + 3.0 + 4.0 + 5.0


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_call_that_breaks_off_is_made_again_and_nothing_is_counted_twice(how: str, place: int) -> None:
    def before(star: Any, caller: LoopbackCaller | None, round_idx: int) -> None:
        if star.rank == 2 and caller is not None and round_idx == 1:
            caller.breaks = [""] * place + [how]

    results = around_a_star(SITES, sums(before), patience=1.0)
    assert results == [[{}] * ROUNDS, *([{name: ALL}] * ROUNDS for name in NAMES)]


def test_many_calls_of_all_sites_break_off_in_all_ways() -> None:
    def before(star: Any, caller: LoopbackCaller | None, round_idx: int) -> None:
        if caller is not None:
            draw = random.Random(10 * star.rank + round_idx)
            caller.breaks = [draw.choice(["", *BREAKS]) for _ in range(6)]

    # tries again after a tenth of its patience; 6 breaks in a row are within it
    results = around_a_star(SITES, sums(before), patience=1.0)
    assert results == [[{}] * ROUNDS, *([{name: ALL}] * ROUNDS for name in NAMES)]


def test_a_cable_that_is_out_for_less_than_the_patience_loses_nobody() -> None:
    def before(star: Any, caller: LoopbackCaller | None, round_idx: int) -> None:
        if star.rank == 2 and caller is not None and round_idx == 1:
            caller.die()
            time.sleep(0.4)
            caller.dead = False

    results = around_a_star(SITES, sums(before), patience=2.0)
    assert results == [[{}] * ROUNDS, *([{name: ALL}] * ROUNDS for name in NAMES)]


def test_one_that_is_out_for_longer_loses_the_site_which_gives_up() -> None:
    def before(star: Any, caller: LoopbackCaller | None, round_idx: int) -> None:
        if star.rank == 2 and caller is not None and round_idx == 1:
            caller.die()

    results = around_a_star(SITES, sums(before), patience=0.5)
    lost = results.pop(2)
    assert isinstance(lost, ServerLostError)
    assert "did not answer for 0.5 s" in str(lost)
    assert results == [[{}] * ROUNDS, *([{name: ALL}, *[{name: ALL - 3.0}] * 2] for name in "acd")]


def test_a_site_that_comes_back_too_late_is_told_that_the_others_go_on() -> None:
    def before(star: Any, caller: LoopbackCaller | None, round_idx: int) -> None:
        if star.rank == 2 and caller is not None and round_idx == 1:
            caller.die()
            while 2 not in server[0].lost:
                time.sleep(0.01)
            caller.dead = False
        elif star.rank == 0:
            server[:] = [star]

    server: list[Any] = []
    results = around_a_star(SITES, sums(before), patience=0.3)
    late = results.pop(2)
    assert isinstance(late, DismissedError)
    assert "start it again, and it takes part from the next round" in str(late)
    assert results == [[{}] * ROUNDS, *([{name: ALL}, *[{name: ALL - 3.0}] * 2] for name in "acd")]


def test_a_server_that_is_gone_is_given_up_by_all_after_their_patience() -> None:
    def before(star: Any, caller: LoopbackCaller | None, round_idx: int) -> None:
        if round_idx == 1 and star.rank == 0:
            star._listener.close()
            closed.set()
            raise KeyboardInterrupt
        if round_idx == 1:
            assert closed.wait(60)

    closed = threading.Event()
    start = time.monotonic()
    server, *sites = around_a_star(SITES, sums(before), patience=0.5)
    assert isinstance(server, KeyboardInterrupt)
    assert all(isinstance(each, ServerLostError) for each in sites), sites
    assert time.monotonic() - start < 5.0


def test_a_site_that_starts_again_before_the_first_round_ends_all_and_the_server_listens_no_more() -> None:
    listener = Loopback()
    server = ServerStar(listener, {"a": ["a"]}, {}, wait_for=5.0, patience=5.0)
    opening = threading.Thread(target=server.open)
    opening.start()
    callers = [listener.caller("a") for _ in range(2)]
    first, second = (SiteStar(caller, {}, None, 5.0, 5.0) for caller in callers)
    first.open()
    opening.join(5)
    meeting = threading.Thread(target=first.meet, args=(torch.zeros(1), "a test"))
    meeting.start()
    server.meet(torch.zeros(1), "a test")
    meeting.join(5)
    callers[0].close()
    second.open()
    with pytest.raises(FederationError, match="started again before the first round"):
        server.meet(torch.zeros(1), "a test")
    server.close("so it ends")
    assert listener.answer is None, "who is gone is called no more"


def test_a_site_that_is_gone_while_its_call_waits_is_overdue() -> None:
    listener = Loopback()
    server = ServerStar(listener, {"a": ["a"], "b": ["b"]}, {}, wait_for=10.0, patience=0.3)
    opening = threading.Thread(target=server.open, daemon=True)
    opening.start()
    caller = listener.caller("a")
    site = SiteStar(caller, {}, None, 5.0, 5.0)
    site.open()
    threading.Thread(target=lambda: outcome_of(lambda: site.meet(torch.zeros(1), "a test")), daemon=True).start()
    assert server.board.members.here == {1}
    time.sleep(0.1)
    caller.die()
    time.sleep(0.5)
    with server.board.changed:
        server.board.drop_timed_out()
    assert not server.board.members.here
    server.close("the test has ended")


def test_sites_that_are_ahead_of_the_server_are_waited_for_however_late_they_leave() -> None:
    listener = Loopback()
    joined: list[Any] = []

    def action(star: Any, caller: Any) -> Any:
        star.meet(torch.tensor([star.rank]), "rounds")
        star.begin((1,))
        if star.rank == 1:
            time.sleep(0.5)
            star.close("is ahead")
            again = SiteStar(listener.caller("a"), {}, None, 5.0, 5.0)
            again.open()
            again._history = {} if again._history is None else again._history
            star = again
        joined.append((star.rank, star.roll_call()))
        star.meet(torch.tensor([star.rank]), "a round")
        if star.rank == 1:
            star.close()
        return star.lost

    ends = (listener, listener.caller)
    results = around_a_star({"a": ["a"], "b": ["b"]}, action, patience=5.0, ends=ends)
    assert results == [frozenset()] * 3, results
    assert dict(joined)[0] == {1}
