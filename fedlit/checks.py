"""Checks of arguments: each raises an error that names the argument, the rule, the value and the way out."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral
from typing import Any, NoReturn


class ArgumentError(ValueError):
    """An argument breaks a rule; errors of other types that `refuse` raises have the same attributes.

    Attributes:
        argument: Its name, as users write it.
        value: What was passed.
    """

    argument: str = ""
    value: Any = None


def refuse(
    argument: str, rule: str, value: Any, way_out: str = "", error: type[Exception] = ArgumentError, shown: str = ""
) -> NoReturn:
    """Raise ``"ARGUMENT must be RULE, got VALUE: WAY OUT"``.

    Args:
        argument: Name of the argument, with its symbol in the paper: ``"classifier_period (T_C)"``. The error's
            attribute ``argument`` is the part before the first blank.
        rule: What it must be, such as ``"at least 1 round"``.
        value: What was passed.
        way_out: What to do about it.
        error: Type of the error.
        shown: What the message says was passed, where that is not the value itself, such as its shape.
    """
    problem: Any = error(f"{argument} must be {rule}, got {shown or repr(value)}" + (f": {way_out}" if way_out else ""))
    problem.argument, problem.value = argument.split(" ")[0], value
    raise problem


def check(
    holds: bool,
    argument: str,
    rule: str,
    value: Any,
    way_out: str = "",
    error: type[Exception] = ArgumentError,
    shown: str = "",
) -> None:
    """`refuse` the argument unless the rule holds."""
    if not holds:
        refuse(argument, rule, value, way_out, error, shown)


def check_at_least(
    argument: str,
    value: float,
    minimum: float,
    unit: str = "",
    way_out: str = "",
    error: type[Exception] = ArgumentError,
) -> None:
    """Refuse what is no number, or below ``minimum``, infinity and NaN; ``unit`` follows the minimum: ``"1 round"``."""
    fits = _is_in(minimum, value, math.inf) and value < math.inf
    check(fits, argument, f"at least {minimum:g} {unit}".rstrip(), value, way_out, error)


def check_positive(argument: str, value: float, way_out: str = "", error: type[Exception] = ArgumentError) -> None:
    """Refuse what is no number, or not positive and finite."""
    check(_is_in(0, value, math.inf) and 0 < value < math.inf, argument, "positive and finite", value, way_out, error)


def check_between(
    argument: str, value: float, low: float, high: float, way_out: str = "", error: type[Exception] = ArgumentError
) -> None:
    """Refuse what is no number in ``[low, high]``."""
    check(_is_in(low, value, high), argument, f"from {low:g} to {high:g}", value, way_out, error)


def check_count(argument: str, value: object, minimum: int, unit: str = "", way_out: str = "") -> None:
    """Refuse what is no integer of at least ``minimum``; ``unit`` follows the minimum, as in `check_at_least`."""
    fits = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum
    check(fits, argument, f"an integer of at least {minimum} {unit}".rstrip(), value, way_out)


def _is_in(low: float, value: object, high: float) -> bool:
    """Whether a value is a number in ``[low, high]``; what does not compare with numbers is none."""
    try:
        return bool(low <= value <= high)  # type: ignore[operator]
    except TypeError:
        return False


def check_one_of(
    argument: str, value: Any, choices: Collection[Any], way_out: str = "", error: type[Exception] = ArgumentError
) -> None:
    """Refuse what is not among ``choices``."""
    if value not in choices:  # or naming all choices would take its time at each call
        refuse(argument, f"one of {list(choices)}", value, way_out, error)


def is_missing(value: object) -> bool:
    """Whether a value of a table is missing: ``None``, NaN, or pandas' NA, which is neither equal to itself nor not."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True
