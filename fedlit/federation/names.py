"""Names of clients, classes, levels and columns: which are too much alike, and which YAML has read as no text."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from datetime import date

_READ_AS = {True: "yes, on and true", False: "no, off and false"}
"""What YAML reads as a truth value unless it is in quotes, in capitals, too."""


def alike(names: Iterable[str], key: Callable[[str], object] | None = None) -> list[list[str]]:
    """Groups of different names that differ in capitals, blanks or Unicode normal form alone.

    Args:
        names: Repetitions do not count.
        key: Equal for names that are alike; `folded` by default.

    Returns:
        At least two names in each group, in the order in which they come.
    """
    groups: dict[object, dict[str, None]] = {}
    for name in names:
        groups.setdefault((key or folded)(name), {})[name] = None
    return [[*group] for group in groups.values() if len(group) > 1]


def folded(name: str) -> str:
    """A name without capitals, repeated or outer blanks, characters without width, and in one Unicode form."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join("".join(sign for sign in text if unicodedata.category(sign) != "Cf").split())


def difference(names: Sequence[str]) -> str:
    """Name what alone differs between names of one group of `alike`, for messages."""
    if len({folded(name) for name in names}) > 1:
        return "how one number is written"
    for what, form in (
        ("capitals", str.casefold),
        ("blanks", lambda name: "".join(name.split())),
        ("Unicode normal form", lambda name: unicodedata.normalize("NFKC", name)),
    ):
        if len({form(name) for name in names}) == 1:
            return f"{what} alone"
    return "capitals, blanks or Unicode normal form alone"


def shown(names: Iterable[str]) -> str:
    """A list of names for messages; what would look the same is escaped."""
    clear = {name: unicodedata.is_normalized("NFC", name) and name.isprintable() for name in names}
    return f"[{', '.join(repr(name) if fine else ascii(name) for name, fine in clear.items())}]"


def not_text(value: object) -> str | None:
    """What a value is that should have been a text, and how to write it; ``None`` if it is a text.

    Args:
        value: As YAML, or a caller, gave it.
    """
    if isinstance(value, str):
        return None
    return f"got {value!r}: {how_to_quote(value) or f'it is of type {type(value).__name__}'}"


def how_to_quote(value: object) -> str:
    """How to write what YAML has read as a truth value, number, date or nothing; empty for other values."""
    if isinstance(value, bool):
        example = "yes" if value else "no"
        return f"YAML reads {_READ_AS[value]} without quotes as {value}: if it is a name, quote it, as in '{example}'"
    if value is None:
        return "YAML reads null, ~ and nothing as None: if it is a name, quote it, as in 'null'"
    if isinstance(value, int | float | date):
        what = "a date" if isinstance(value, date) else "a number"
        return f"YAML reads digits without quotes as {what}: if it is a name, quote it, as in '{value}'"
    return ""


def check_texts(argument: str, values: object, error: type[Exception] = TypeError) -> None:
    """Refuse names that are no texts.

    Args:
        argument: Its name, for the message.
        values: A name, or a list or the keys of a mapping of them; ``None`` is fine.
        error: Class of what is raised.

    Raises:
        TypeError: Or ``error``, if one is a truth value, a number, a date or the like.
    """
    if values is None or isinstance(values, str):
        return
    many = isinstance(values, list | tuple | dict | set | frozenset)
    for value in values if many else (values,):  # type: ignore[attr-defined]
        problem = not_text(value)
        if problem is not None:
            raise error(f"{argument} must {'have' if many else 'be'} names in text, {problem}")


def check_list(argument: str, values: object, error: type[Exception] = TypeError) -> None:
    """Refuse a text in place of a list of texts, which would be taken letter by letter, and what `check_texts` does."""
    if isinstance(values, str):
        raise error(f"{argument} must be a list of texts, got the text {values!r}: write [{values!r}]")
    check_texts(argument, values, error)
