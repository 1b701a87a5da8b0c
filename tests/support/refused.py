"""How tests expect errors: by their type and the argument they name, not by their sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(argument: str, error: type[Exception] = ValueError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of `fedlit.checks` about an argument."""
    with pytest.raises(error) as caught:
        yield caught
    assert getattr(caught.value, "argument", None) == argument, f"{caught.value!r} is not about {argument!r}"


def slow(*case: Any) -> Any:
    """A row of a test that the default run leaves out."""
    return pytest.param(*case, marks=pytest.mark.slow)
