"""Who is present: every rule is a pure function of the seed and the round."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlit.federation import (
    Client,
    Everyone,
    Federation,
    Fraction,
    OneByOne,
    Participation,
    RosterError,
    Schedule,
    UniformSubset,
)
from fedlit.federation.client import make_roster, names_of
from refused import refused

ROSTER = make_roster(["t", *"abcde"], target="t")
STRANGERS = Schedule([["a"], ["zoe"]])
RULES = [Everyone(), Fraction(0.4), UniformSubset(), OneByOne(), OneByOne("random")]


def present(rule: Participation, round_idx: int, seed: int = 0, stream: str = "") -> list[str]:
    return names_of(rule.present(ROSTER, round_idx, seed, stream))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@given(seed=st.integers(0, 2**32), rounds=st.permutations(range(6)))
def test_a_draw_depends_on_seed_and_round_alone(rule: Participation, seed: int, rounds: list[int]) -> None:
    forwards = {round_idx: present(rule, round_idx, seed) for round_idx in range(6)}
    state = random.getstate()
    assert {round_idx: present(rule, round_idx, seed) for round_idx in rounds} == forwards
    assert random.getstate() == state


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_the_target_is_always_present_and_the_order_is_the_rosters(rule: Participation) -> None:
    for round_idx in range(50):
        names = present(rule, round_idx)
        assert names[0] == "t"
        assert names == [client.name for client in ROSTER if client.name in names]


@pytest.mark.parametrize("rule", RULES[1:3] + RULES[4:], ids=lambda rule: type(rule).__name__)
def test_another_seed_or_stream_draws_otherwise(rule: Participation) -> None:
    drawn = [present(rule, round_idx) for round_idx in range(30)]
    assert [present(rule, round_idx, seed=1) for round_idx in range(30)] != drawn
    assert [present(rule, round_idx, stream="x") for round_idx in range(30)] != drawn


@pytest.mark.parametrize(("p", "number"), [(0.01, 1), (0.2, 1), (0.4, 2), (0.5, 2), (0.7, 4), (1.0, 5)])
def test_a_fraction_is_rounded_to_at_least_one_source(p: float, number: int) -> None:
    # round(p * 5), half to even: 0.5 * 5 = 2.5 -> 2 and 0.7 * 5 = 3.5 -> 4
    for round_idx in range(20):
        assert len(present(Fraction(p), round_idx)) == number + 1


@pytest.mark.parametrize(
    ("argument", "make", "error"),
    [
        *(("p", lambda p=p: Fraction(p), ValueError) for p in (0.0, -0.1, 1.01, float("nan"))),
        ("at_least", lambda: UniformSubset(-1), ValueError),
        ("order", lambda: OneByOne("sorted"), ValueError),  # type: ignore[arg-type]
        ("rounds", lambda: Schedule([]), ValueError),
        ("rounds[1]", lambda: Federation(ROSTER, "t", participation=STRANGERS), RosterError),
        ("rounds[1]", lambda: Federation(ROSTER, "t", heard={"x": STRANGERS}), RosterError),
    ],
)
def test_arguments_out_of_range_are_refused(argument: str, make: Callable[[], Any], error: type[Exception]) -> None:
    with refused(argument, error):
        make()


@pytest.mark.parametrize(("at_least", "smallest"), [(0, 0), (2, 2), (5, 5), (9, 5)])
def test_sizes_of_a_uniform_subset_are_uniform_above_the_smallest(at_least: int, smallest: int) -> None:
    rounds = 2000  # draws of a fixed seed: they pass always or never
    counts = Counter(len(present(UniformSubset(at_least), round_idx)) - 1 for round_idx in range(rounds))
    assert set(counts) == set(range(smallest, 6))
    expected = rounds / (6 - smallest)
    assert all(abs(count - expected) < 4 * expected**0.5 for count in counts.values())


def test_one_by_one_meets_every_source_and_a_schedule_starts_again() -> None:
    assert [present(OneByOne(), round_idx)[1] for round_idx in range(7)] == list("abcdeab")
    drawn = [present(OneByOne("random"), round_idx) for round_idx in range(100)]
    assert {len(names) for names in drawn} == {2}
    assert {names[1] for names in drawn} == set("abcde")
    rule = Schedule([["b", "a"], [], ["t"]])
    assert [present(rule, round_idx) for round_idx in range(5)] == [["a", "b"], [], ["t"], ["a", "b"], []]


@given(st.integers(0, 1000), st.integers(0, 30))
def test_drops_are_nested_in_the_order_of_the_channels(seed: int, round_idx: int) -> None:
    federation = Federation(
        ROSTER,
        "t",
        participation=Fraction(0.8),
        heard={"A": UniformSubset(), "B": Fraction(0.5), "C": OneByOne("random")},
        seed=seed,
    )
    federation.round_idx = round_idx
    whole, a, b, c = (set(names_of(federation.present(channel))) for channel in (None, "A", "B", "C"))
    assert {"t"} <= c <= b <= a <= whole
    assert set(names_of(federation.present("other"))) == whole


def test_without_nesting_each_channel_draws_among_all_who_are_present() -> None:
    heard = {"A": OneByOne(), "B": Fraction(0.6), "C": OneByOne("random")}
    loose = Federation(ROSTER, "t", participation=Fraction(0.8), heard=heard, nested_heard=False)
    escaped = 0
    for round_idx in range(30):
        loose.round_idx = round_idx
        whole, a, b, c = (names_of(loose.present(channel)) for channel in (None, "A", "B", "C"))
        assert set(a) | set(b) | set(c) <= set(whole)
        assert len(whole) == 5
        assert (len(a), len(b), len(c)) == (2, 3, 2)  # of four sources, whatever the other channels have drawn
        escaped += not set(c) <= set(b)
        alone = Federation(ROSTER, "t", participation=Fraction(0.8), heard={"C": heard["C"]})
        alone.round_idx = round_idx
        assert names_of(alone.present("C")) == c
    assert escaped > 3


def test_a_users_rule_needs_one_method() -> None:
    class Alphabetical(Participation):
        def draw(self, clients: list[Client], round_idx: int, rng: random.Random) -> list[Client]:  # type: ignore[override]
            return sorted(clients, key=lambda client: client.name)[: round_idx + 1]

    federation = Federation(ROSTER, "t", participation=Alphabetical())
    assert names_of(federation.present()) == ["a"]
    assert names_of(federation.roster.present(5)) == ["t", *"abcde"]
