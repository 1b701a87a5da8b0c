"""Who takes part, by a clock that the test sets."""

from __future__ import annotations

import pytest

from fedlit.federation.membership import Membership


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def members(clock: Clock) -> Membership:
    """Three that are here, and a patience of 10 s."""
    members = Membership([1, 2, 3], 10.0, clock)
    for rank in (1, 2, 3):
        members.come(rank)
    return members


def test_nobody_is_here_before_they_come(clock: Clock) -> None:
    members = Membership([1, 2], 10.0, clock)
    assert members.meeting() == ({1, 2}, set())
    members.come(2)
    assert members.meeting() == ({1}, set())


def test_who_is_dropped_is_waited_for_no_more_and_told_of_at_the_next_meeting(members: Membership) -> None:
    assert not members.meeting().lost
    members.drop(2)
    assert members.here == {1, 3}
    assert members.meeting() == ({2}, set())
    assert members.meeting() == ({2}, set()), "and at each one after it"


def test_who_is_silent_for_as_long_as_the_patience_is_dropped(members: Membership, clock: Clock) -> None:
    members.silent(2)
    clock.now += 9.9
    assert not members.overdue()
    assert members.here == {1, 2, 3}
    clock.now += 0.1
    assert members.overdue() == {2}
    assert members.here == {1, 3}
    assert not members.overdue(), "once"


def test_who_is_heard_again_in_time_has_lost_nothing(members: Membership, clock: Clock) -> None:
    members.silent(2)
    clock.now += 9.0
    members.heard(2)
    clock.now += 9.0
    assert not members.overdue()
    members.silent(2)
    clock.now += 9.0
    assert not members.overdue(), "silence counts from its own beginning"
    clock.now += 1.0
    assert members.overdue() == {2}


def test_silence_that_is_told_of_twice_counts_from_the_first_time(members: Membership, clock: Clock) -> None:
    members.silent(2)
    clock.now += 6.0
    members.silent(2)
    clock.now += 4.0
    assert members.overdue() == {2}


def test_time_left_is_until_the_first_is_overdue(members: Membership, clock: Clock) -> None:
    assert members.time_left() is None
    members.silent(3)
    clock.now += 4.0
    members.silent(1)
    assert members.time_left() == 6.0
    clock.now += 20.0
    assert members.time_left() == 0.0
    assert members.overdue() == {1, 3}
    assert members.time_left() is None, "nobody waits for those who are lost"


def test_silence_of_one_who_is_not_here_is_of_no_effect(members: Membership, clock: Clock) -> None:
    members.drop(2)
    members.silent(2)
    clock.now += 60.0
    assert not members.overdue()
    assert members.time_left() is None


def test_who_comes_back_waits_for_a_roll_call(members: Membership) -> None:
    members.drop(2)
    members.meeting()
    members.wait(2)
    assert members.waiting == {2}
    assert members.meeting() == ({2}, set()), "a meeting within a round lets nobody in"
    assert members.meeting(roll_call=True) == (set(), {2})
    assert members.here == {1, 2, 3}
    assert not members.waiting
    assert members.meeting(roll_call=True) == (set(), set()), "once"


def test_who_waits_and_is_silent_for_too_long_does_not_come_in(members: Membership, clock: Clock) -> None:
    members.drop(2)
    members.wait(2)
    members.silent(2)
    assert members.time_left() == 10.0
    clock.now += 10.0
    assert members.overdue() == {2}
    assert members.meeting(roll_call=True) == ({2}, set())


def test_who_comes_back_was_not_silent_before(members: Membership, clock: Clock) -> None:
    members.silent(2)
    clock.now += 10.0
    assert members.overdue() == {2}
    members.wait(2)
    assert not members.overdue()
    assert members.meeting(roll_call=True).joined == {2}


def test_all_may_be_lost_and_come_back(members: Membership, clock: Clock) -> None:
    for rank in (1, 2, 3):
        members.silent(rank)
    clock.now += 10.0
    assert members.overdue() == {1, 2, 3}
    assert members.meeting() == ({1, 2, 3}, set())
    for rank in (1, 2, 3):
        members.wait(rank)
    assert members.meeting(roll_call=True) == (set(), {1, 2, 3})
