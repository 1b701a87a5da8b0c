"""Errors about arguments: what they say, and what they carry."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from fedlit.checks import (
    ArgumentError,
    check,
    check_at_least,
    check_between,
    check_count,
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


@pytest.mark.parametrize(
    "call",
    [
        *(lambda value=value: check_positive("x", value) for value in (0, -1.0, math.nan, math.inf, "1", None)),
        *(lambda value=value: check_between("x", value, 0, 1) for value in (-0.1, 1.1, math.nan, "1", None)),
        *(lambda value=value: check_at_least("x", value, 2) for value in (1, math.nan, math.inf, "3", None, [3])),
        *(lambda value=value: check_count("x", value, 1) for value in (0, 1.0, True, "1", None, math.nan)),
        lambda: check_one_of("x", "y", ("ordered", "random")),
    ],
)
def test_what_does_not_hold_is_refused(call: Callable[[], None]) -> None:
    with refused("x"):
        call()


def test_what_holds_passes() -> None:
    check(True, "x", "whatever", 0)
    check_positive("x", 1e-300)
    check_between("x", 1, 0, 1)
    check_at_least("x", 2, 2)
    check_count("x", 1, 1)
    check_count("x", np.int64(3), 1)
    check_one_of("x", None, (None, 1))
