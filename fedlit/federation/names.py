"""Names of clients, classes, levels and columns: near duplicates, and what YAML reads as something other than text."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from datetime import date

_READ_AS = {True: "yes, on and true", False: "no, off and false"}


def alike(names: Iterable[str], key: Callable[[str], object] | None = None) -> list[list[str]]:
    """Groups of two or more different names with equal ``key``; `folded` by default. Repetitions do not count."""
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
    """A list of names for messages, with invisible differences escaped."""
    clear = {name: unicodedata.is_normalized("NFC", name) and name.isprintable() for name in names}
    return f"[{', '.join(repr(name) if fine else ascii(name) for name, fine in clear.items())}]"


def not_text(value: object) -> str | None:
    """Describe a value that should have been a text, and how to write it; ``None`` of a text."""
    if isinstance(value, str):
        return None
    return f"got {value!r}: {how_to_quote(value) or f'it is of type {type(value).__name__}'}"


def how_to_quote(value: object) -> str:
    """How to write a name that YAML reads as a truth value, number, date or nothing; empty for other values."""
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
    """Raise an ``error`` unless a name, or all of a list or of the keys of a mapping, are texts; ``None`` is fine."""
    if values is None or isinstance(values, str):
        return
    many = isinstance(values, list | tuple | dict | set | frozenset)
    for value in values if many else (values,):  # type: ignore[attr-defined]
        problem = not_text(value)
        if problem is not None:
            raise error(f"{argument} must {'have' if many else 'be'} names in text, {problem}")


def check_list(argument: str, values: object, error: type[Exception] = TypeError) -> None:
    """As `check_texts`, and refuse a single text, which would be taken letter by letter."""
    if isinstance(values, str):
        raise error(f"{argument} must be a list of texts, got the text {values!r}: write [{values!r}]")
    check_texts(argument, values, error)
