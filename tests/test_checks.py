"""Errors about arguments: what they say, and what they carry."""

from __future__ import annotations

import math

import pytest

from fedlit.checks import (
    ArgumentError,
    check,
    check_at_least,
    check_between,
    check_one_of,
    check_positive,
    refuse,
)
from fedlit.federation import RosterError
from refused import refused


def test_the_message_names_argument_rule_value_and_way_out() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_at_least("classifier_period (T_C)", 0, 1, "round", "give 1 to send it each round")
    assert str(caught.value) == (
        "classifier_period (T_C) must be at least 1 round, got 0: give 1 to send it each round"
    )
    assert (caught.value.argument, caught.value.value) == ("classifier_period", 0)


def test_errors_of_other_types_carry_the_same() -> None:
    with refused("target", RosterError) as caught:
        refuse("target", "one of the clients", "webcam", error=RosterError)
    assert caught.value.value == "webcam"  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_positive_refuses(value: float) -> None:
    with refused("mu"):
        check_positive("mu", value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_between_refuses(value: float) -> None:
    with refused("share"):
        check_between("share", value, 0, 1)


@pytest.mark.parametrize("value", [1, math.nan, math.inf])
def test_at_least_refuses(value: float) -> None:
    with refused("rounds"):
        check_at_least("rounds", value, 2)


def test_one_of_refuses_and_shows_the_choices() -> None:
    with pytest.raises(ArgumentError, match=r"order must be one of \['ordered', 'random'\], got 'x'"):
        check_one_of("order", "x", ("ordered", "random"))


def test_what_holds_passes() -> None:
    check(True, "x", "whatever", 0)
    check_positive("x", 1e-300)
    check_between("x", 1, 0, 1)
    check_at_least("x", 2, 2)
    check_one_of("x", None, (None, 1))
