"""The right word for a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is nearest, whatever its capitals; ``None`` if none is near."""
    by_lower = {each.lower(): each for each in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question to go between an error and the rest of its message, or nothing but a colon."""
    found = nearest(word, known)
    return ":" if found is None else f": did you mean {found!r}?"
