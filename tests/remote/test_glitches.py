"""Calls that break off: sums are right and no site drops out, unless it takes longer than the patience."""

from __future__ import annotations

import io
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedlit.federation import Federation, Summed
from fedlit.privacy import PairwiseMasking
from fedlit.privacy.masking import MaskingClient
from fedlit.remote import DismissedError, LostClientsError, ServerLostError
from fedlit.remote.star import SiteStar
from loopback import BREAKS, Loopback, around_a_star, masked_sums
from refused import slow

SITES = {name: [name] for name in "abcd"}
ALL = 1.0 + 2.0 + 3.0 + 4.0
ROUNDS = 3


def sums_when(strike: Callable[[Any, Any, int], None], patience: float) -> list[Any]:
    return around_a_star(SITES, masked_sums(SITES, ROUNDS, strike), patience)


def at_b_in_round_1(strike: Callable[[Any], None]) -> Callable[[Any, Any, int], None]:
    return lambda star, caller, round_idx: strike(caller) if (star.rank, round_idx) == (2, 1) else None


@pytest.mark.parametrize("how", [*map(slow, BREAKS[:3]), BREAKS[3]])
def test_a_call_that_breaks_off_is_made_again_and_nothing_is_counted_twice(how: str) -> None:
    def breaks(caller: Any) -> None:
        caller.breaks = [how, "", how, "", "", how]

    assert sums_when(at_b_in_round_1(breaks), 1.0) == [[], *[[ALL] * ROUNDS] * 4]


def test_many_calls_of_all_sites_break_off_in_all_ways() -> None:
    def breaks(star: Any, caller: Any, round_idx: int) -> None:
        if caller is not None:
            draw = random.Random(10 * star.rank + round_idx)
            caller.breaks = [draw.choice(["", *BREAKS]) for _ in range(4)]  # each takes a tenth of the patience

    assert sums_when(breaks, 0.7) == [[], *[[ALL] * ROUNDS] * 4]


def test_a_site_that_is_disconnected_for_less_than_the_patience_goes_on() -> None:
    def unplug(caller: Any) -> None:
        caller.die()
        time.sleep(0.4)
        caller.dead = False

    assert sums_when(at_b_in_round_1(unplug), 2.0) == [[], *[[ALL] * ROUNDS] * 4]


@pytest.mark.parametrize(("rank", "returns"), [(2, True), (4, False)], ids=["a source returns", "the target is gone"])
def test_a_site_that_times_out_gives_up_and_the_others_go_on(rank: int, returns: bool) -> None:
    server: list[Any] = []

    def strike(star: Any, caller: Any, round_idx: int) -> None:
        if star.rank == 0:
            server[:] = [star]
        elif (star.rank, round_idx) == (rank, 1):
            caller.die()
            while returns and rank not in server[0].lost:
                time.sleep(0.01)
            caller.dead = not returns

    results = sums_when(strike, 0.4)
    assert isinstance(results.pop(rank), DismissedError if returns else ServerLostError)
    assert results == [[], *[[ALL, ALL - rank, ALL - rank]] * 3]


def test_where_too_few_are_left_to_unmask_all_stop_and_state_without_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four, two drop out before their vectors; the threshold is three."""
    struck: dict[str, Any] = {}
    protect = MaskingClient.protect

    def protect_or_die(client: MaskingClient, vector: torch.Tensor) -> torch.Tensor:
        if client.name in struck:
            struck[client.name].die()
        return protect(client, vector)

    def strike(star: Any, caller: Any, round_idx: int) -> None:
        if round_idx == 1 and star.rank in (2, 3):
            struck["abcd"[star.rank - 1]] = caller

    monkeypatch.setattr(MaskingClient, "protect", protect_or_die)
    server, a, _, _, d = sums_when(strike, 0.3)
    assert all(isinstance(each, LostClientsError) for each in (server, a, d)), (server, a, d)
    assert all("cannot be had without ['b', 'c']" in str(each) for each in (server, a, d))


@pytest.mark.parametrize(
    ("gone", "adapts", "too_few", "why"),
    [
        ("d", True, "raise", "adapted to the target 'd'"),
        ("abc", False, "raise", "no source is left"),
        ("abd", False, "skip", "needs 2 clients under PairwiseMasking"),
    ],
)
def test_those_without_whom_a_round_would_change_nothing_are_waited_for_and_named(
    gone: str, adapts: bool, too_few: Any, why: str
) -> None:
    def action(star: Any, caller: Any) -> None:
        choices = {"channels": [Summed("weights", too_few=too_few)], "privacy": PairwiseMasking(colluders=0), "seed": 0}
        federation = Federation([*"abcd"], "d", transport=star, placement=[[], *SITES.values()], **choices)
        if star.rank == 0:
            star.begin(())
            star._wait_for = 0.4
        federation.roll_call(adapts)
        if caller is not None and federation.local_clients[0].name in gone:
            caller.die()
            raise KeyboardInterrupt
        federation.roll_call(adapts)

    server, *sites = around_a_star(SITES, action, patience=0.3)
    assert why in str(server)
    for error in (server, *(site for name, site in zip("abcd", sites, strict=True) if name not in gone)):
        assert f"{[*gone]} did not come within 0.4 s" in str(error)


def test_a_server_that_is_gone_is_given_up_by_all_after_their_patience() -> None:
    listener, closed = Loopback(), threading.Event()

    def strike(star: Any, caller: Any, round_idx: int) -> None:
        if round_idx == 1 and star.rank == 0:
            listener.close()
            closed.set()
            raise KeyboardInterrupt
        if round_idx == 1:
            assert closed.wait(60)

    start = time.monotonic()
    action = masked_sums(SITES, ROUNDS, strike)
    server, *sites = around_a_star(SITES, action, patience=0.5, ends=(listener, listener.caller))
    assert isinstance(server, KeyboardInterrupt)
    assert all(isinstance(each, ServerLostError) for each in sites), sites
    assert time.monotonic() - start < 5.0


def test_a_site_that_starts_again_before_the_first_round_ends_all_and_the_server_listens_no_more() -> None:
    listener = Loopback()
    again = SiteStar(listener.caller("a"), {}, None, 5.0, 5.0)

    def action(star: Any, caller: Any) -> None:
        star.meet(torch.zeros(1), "a test")
        if star.rank == 1:
            caller.close()
            again.open()
            raise KeyboardInterrupt
        star.meet(torch.zeros(1), "another")

    server, _ = around_a_star({"a": ["a"]}, action, patience=5.0, ends=(listener, listener.caller))
    assert "started again" in str(server)
    assert listener.answer is None


def test_sites_that_are_ahead_of_the_server_are_waited_for_however_late_they_leave() -> None:
    listener = Loopback()
    joined: dict[int, Any] = {}

    def action(star: Any, caller: Any) -> Any:
        star.meet(torch.tensor([star.rank]), "rounds")
        star.begin((1,))
        if star.rank == 1:
            time.sleep(0.5)
            star.close("is ahead")
            star = SiteStar(listener.caller("a"), {}, None, 5.0, 5.0)
            star.open()
            assert star.returning
        joined[star.rank] = star.roll_call()
        star.meet(torch.tensor([star.rank]), "a round")
        if star.rank == 1:
            star.close()
        return star.lost

    results = around_a_star({"a": ["a"], "b": ["b"]}, action, patience=5.0, ends=(listener, listener.caller))
    assert results == [frozenset()] * 3, results
    assert joined[0] == {1}


@pytest.mark.parametrize("longer_than", [1 << 20, 0], ids=["at once", "one after the other"])
def test_a_site_that_is_connected_and_sends_nothing_times_out_and_the_others_go_on(
    longer_than: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    after, logged = threading.Event(), io.StringIO()
    monkeypatch.setattr("fedlit.remote.star.server.LONG", longer_than)
    monkeypatch.setattr(logging.getLogger("fedlit.remote"), "handlers", [logging.StreamHandler(logged)])

    def strike(star: Any, caller: Any, round_idx: int) -> None:
        if (star.rank, round_idx) == (2, 1):
            assert after.wait(20)  # its connection stands
        elif round_idx == ROUNDS - 1:
            after.set()

    start = time.monotonic()
    # the others wait for longer than their patience
    results = around_a_star(SITES, masked_sums(SITES, ROUNDS, strike), patience=0.2, step_timeout=1.0)
    assert isinstance(results.pop(2), DismissedError)
    assert results == [[], *[[ALL, ALL - 2, ALL - 2]] * 3]
    assert 1.0 < time.monotonic() - start < 4.0
    assert "site b is connected, and did not answer 1 s (step_timeout) long" in logged.getvalue()


def test_a_site_that_is_slow_and_answers_in_time_is_kept() -> None:
    def strike(star: Any, caller: Any, round_idx: int) -> None:
        if star.rank == 2:
            time.sleep(0.4)  # longer than the patience, and in all than the step_timeout

    action = masked_sums(SITES, ROUNDS, strike)
    assert around_a_star(SITES, action, patience=0.2, step_timeout=1.0) == [[], *[[ALL] * ROUNDS] * 4]
