"""What tests of the command share: runs of it take seconds, many of which go into the same data again and again."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

import fedlit.data.digits


@pytest.fixture(scope="session", autouse=True)
def _digits_are_drawn_once() -> Iterator[None]:
    """Drawing them takes longer than a short run, and always gives the same."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("printed_digits", "photo_patches"):
            patch.setattr(fedlit.data.digits, name, functools.cache(getattr(fedlit.data.digits, name)))
        yield
