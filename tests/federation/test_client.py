"""Clients, rosters and where they are placed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlit.federation import Client, RosterError
from fedlit.federation.client import make_roster, names_of, place


def test_a_client_is_a_labelled_source_unless_told_otherwise() -> None:
    client = Client("amazon")
    assert (client.role, client.labelled, client.is_target, client.num_samples) == ("source", True, False, None)


def test_a_target_is_unlabelled_unless_told_otherwise() -> None:
    assert Client("webcam", "target").labelled is False
    assert Client("webcam", "target", labelled=True).labelled is True


@pytest.mark.parametrize("name", ["keys", "type", "VA Long Beach", "état", "0", "a-b_c", "(x)", "self", "servers"])
def test_any_ordinary_word_can_be_a_name(name: str) -> None:
    assert Client(name).name == name


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a:b", " a", "a\nb", "server", 3, None])
def test_names_that_would_break_metric_and_checkpoint_keys_are_refused(name: object) -> None:
    with pytest.raises(RosterError, match=r"client name must be a non-empty string .* rename the client"):
        Client(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": "teacher"}, "role of client 'a' must be 'source' or 'target', got 'teacher'"),
        ({"labelled": False}, "source client 'a' must be labelled"),
        ({"num_samples": 0}, "client 'a' has 0 training samples, at least 1 is needed"),
    ],
)
def test_unusable_clients_are_refused_by_argument(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(RosterError, match=message):
        Client("a", **arguments)  # type: ignore[arg-type]


def test_a_roster_keeps_the_order_and_gives_roles() -> None:
    roster = make_roster(["b", Client("t", "target", num_samples=7), "a"], target="t")
    assert names_of(roster) == ["b", "t", "a"]
    assert [client.role for client in roster] == ["source", "target", "source"]
    assert roster[1].labelled is False
    assert roster[1].num_samples == 7


@pytest.mark.parametrize("clients", [[Client("a", "target"), "b"], ["a", Client("b")]])
def test_a_role_that_contradicts_the_target_is_refused(clients: list[Client | str]) -> None:
    with pytest.raises(RosterError, match="but the target is 'b'"):
        make_roster(clients, target="b")


def test_a_labelled_target_stays_labelled() -> None:
    assert make_roster(["a", Client("t", "target", labelled=True)], target="t")[1].labelled is True


@pytest.mark.parametrize(
    ("clients", "target", "message"),
    [
        ([], "a", r"a federation needs at least 2 clients, got 0"),
        (["a"], "a", r"a federation needs at least 2 clients, got 1: \['a'\]"),
        (["a", "b", "a"], "b", r"client names must be unique, got \['a'\] more than once"),
        (["amazon", "dslr"], "webcam", r"target 'webcam' is not one of the clients \['amazon', 'dslr'\]"),
    ],
)
def test_clients_that_make_no_federation_are_refused(clients: list[str], target: str, message: str) -> None:
    with pytest.raises(RosterError, match=message):
        make_roster(clients, target)


def test_places_five_clients_on_two_processes_by_hand() -> None:
    # floor(i * 2 / 5) for i = 0..4
    assert place(make_roster("abcde", "a"), 2) == [0, 0, 0, 1, 1]


@given(st.integers(2, 40).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k))))
def test_shares_are_contiguous_and_differ_by_at_most_one(numbers: tuple[int, int]) -> None:
    num_clients, world_size = numbers
    ranks = place(make_roster(map(str, range(num_clients)), "0"), world_size)
    assert ranks == sorted(ranks)
    sizes = Counter(ranks)
    assert sorted(sizes) == list(range(world_size))
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_a_placement_by_name_is_followed() -> None:
    assert place(make_roster("abc", "a"), 2, [["b"], ["c", "a"]]) == [1, 0, 1]


def test_more_processes_than_clients_are_refused() -> None:
    with pytest.raises(RosterError, match=r"3 processes for 2 clients .* use devices=2 or fewer"):
        place(make_roster("ab", "a"), 3)


@pytest.mark.parametrize(
    "placement",
    [[["a"], ["b"]], [["a", "b"], ["b", "c"]], [["a", "b", "c"], []], [["a", "b"], ["x"]], [["a", "bc"], []]],
)
def test_a_placement_must_name_each_client_once_and_leave_no_rank_empty(placement: list[list[str]]) -> None:
    with pytest.raises(RosterError, match=r"placement must name each of \['a', 'b', 'c'\] once"):
        place(make_roster("abc", "a"), 2, placement)


def test_a_placement_needs_one_list_per_process() -> None:
    with pytest.raises(RosterError, match="placement has 1 entries for 2 processes"):
        place(make_roster("abc", "a"), 2, [["a", "b", "c"]])
