"""Members of a run, by a clock that the test sets."""

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
    assert members.meeting() == ({1, 2, 3}, set())
    for rank in (1, 2, 3):
        members.come(rank)
    return members


def test_a_dropped_member_is_announced_at_each_meeting(members: Membership) -> None:
    assert members.meeting() == (set(), set())
    members.drop(2)
    assert members.here == {1, 3}
    assert members.meeting() == members.meeting() == ({2}, set())


def test_a_member_times_out_after_the_patience_since_it_disconnected(members: Membership, clock: Clock) -> None:
    members.disconnected(2)
    clock.now += 6.0
    members.disconnected(2)  # counts from the first time
    clock.now += 3.9
    assert not members.overdue()
    clock.now += 0.1
    assert members.overdue() == {2}
    assert members.here == {1, 3}
    assert not members.overdue(), "once"


def test_a_member_that_connects_again_in_time_goes_on(members: Membership, clock: Clock) -> None:
    for _ in range(2):
        members.disconnected(2)
        clock.now += 9.0
        members.connected(2)
        clock.now += 9.0
        assert not members.overdue()
    members.disconnected(2)
    clock.now += 10.0
    assert members.overdue() == {2}


def test_time_left_is_that_of_the_first_to_time_out(members: Membership, clock: Clock) -> None:
    assert members.time_left() is None
    members.disconnected(3)
    clock.now += 4.0
    members.disconnected(1)
    assert members.time_left() == 6.0
    clock.now += 20.0
    assert members.time_left() == 0.0
    assert members.overdue() == {1, 3}
    assert members.time_left() is None, "those that timed out are not waited for"
    members.disconnected(3)
    clock.now += 60.0
    assert not members.overdue()


def test_a_member_comes_back_with_a_roll_call(members: Membership) -> None:
    members.drop(2)
    members.wait(2)
    assert members.waiting == {2}
    assert members.meeting() == ({2}, set()), "a meeting within a round lets nobody in"
    assert members.meeting(roll_call=True) == (set(), {2})
    assert members.here == {1, 2, 3}
    assert members.meeting(roll_call=True) == (set(), set()), "once"


def test_a_member_that_waits_can_time_out(members: Membership, clock: Clock) -> None:
    members.drop(2)
    members.wait(2)
    members.disconnected(2)
    assert members.time_left() == 10.0
    clock.now += 10.0
    assert members.overdue() == {2}
    assert members.meeting(roll_call=True) == ({2}, set())


def test_all_may_time_out_and_come_back(members: Membership, clock: Clock) -> None:
    for rank in (1, 2, 3):
        members.disconnected(rank)
    clock.now += 10.0
    assert members.overdue() == {1, 2, 3}
    for rank in (1, 2, 3):
        members.wait(rank)
    assert not members.overdue(), "one that comes back was not disconnected before"
    assert members.meeting(roll_call=True) == (set(), {1, 2, 3})
