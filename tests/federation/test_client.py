"""Clients, rosters and where they are placed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlit.federation import Client, RosterError
from fedlit.federation.client import make_roster, names_of, place
from refused import refused


def test_a_source_is_labelled_and_a_target_is_not_unless_said_otherwise() -> None:
    client = Client("amazon")
    assert (client.role, client.labelled, client.is_target, client.num_samples) == ("source", True, False, None)
    assert Client("VA Long-Beach_état (0)", "target").labelled is False
    assert names_of(make_roster(["b", Client("t", "target", num_samples=7), "a"], target="t")) == ["b", "t", "a"]
    assert make_roster(["a", Client("t", "target", labelled=True)], target="t")[1].labelled is True


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a:b", " a", "a\nb", "a\u200b", "server", "SERVER", 3, None])
def test_names_that_would_break_metric_and_checkpoint_keys_are_refused(name: object) -> None:
    with pytest.raises(RosterError, match="rename the client"):
        Client(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(("argument", "value"), [("role", "teacher"), ("labelled", False), ("num_samples", 0)])
def test_unusable_clients_are_refused(argument: str, value: object) -> None:
    with refused(argument, RosterError):
        Client("a", **{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("clients", [[Client("a", "target"), "b"], ["a", Client("b")]])
def test_a_role_that_contradicts_the_target_is_refused(clients: list[Client | str]) -> None:
    with pytest.raises(RosterError, match="but the target is 'b'"):
        make_roster(clients, target="b")


@pytest.mark.parametrize(
    ("argument", "clients", "target"),
    [("clients", [], "a"), ("clients", ["a"], "a"), ("clients", ["a", "b", "a"], "b"), ("target", ["a", "d"], "w")],
)
def test_clients_that_make_no_federation_are_refused(argument: str, clients: list[str], target: str) -> None:
    with refused(argument, RosterError):
        make_roster(clients, target)


@given(st.integers(2, 40).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k))))
def test_shares_are_contiguous_and_differ_by_at_most_one(numbers: tuple[int, int]) -> None:
    num_clients, world_size = numbers
    ranks = place(make_roster(map(str, range(num_clients)), "0"), world_size)
    assert ranks == sorted(ranks)
    sizes = Counter(ranks)
    assert sorted(sizes) == list(range(world_size))
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_placements_by_hand() -> None:
    assert place(make_roster("abcde", "a"), 2) == [0, 0, 0, 1, 1]  # floor(i * 2 / 5) for i = 0..4
    assert place(make_roster("abc", "a"), 2, [["b"], ["c", "a"]]) == [1, 0, 1]
    assert place(make_roster("abc", "a"), 3, [[], ["a", "b"], ["c"]]) == [1, 1, 2]  # the server by itself
    with pytest.raises(RosterError, match="3 processes for 2 clients"):
        place(make_roster("ab", "a"), 3)


@pytest.mark.parametrize(
    "placement",
    [
        [["a", "b", "c"]],  # too few lists
        [["a", "b"], ["b", "c"]],
        [["a", "b", "c"], []],
        [["a", "b"], ["x"]],
        [["a", "bc"], []],
    ],
)
def test_a_placement_must_name_each_client_once_and_leave_no_rank_empty(placement: list[list[str]]) -> None:
    with refused("placement", RosterError):
        place(make_roster("abc", "a"), 2, placement)
