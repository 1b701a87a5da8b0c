"""Ways to spoil bytes, texts and archives, for `fuzz.py`: each takes a random generator and gives a new version."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

EDGES = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1)
_WORDS = ("<H", "<I", "<Q", ">H", ">I", ">Q")
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "server", "\ud800", "\x00", "9" * 20, [], {}, [[]], [None], {"": None},
    ["tuple"], ["tensor", 0], ["tensor", -1], ["array", 10**30], ["float", "inf"], ["dict", [1]], ["set", ["list"]],
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_NUMBERS = (
    b"-1", b"0", b"1e999", b"-1e999", b"NaN", b"nan", b"Infinity", b"inf", b"1.5", b"null", b"true", b'"x"', b"",
    b"9" * 19, b"1" + b"0" * 400, b"1" + b"0" * 5000, b"18446744073709551616", b"0x10", b"1_000", b"[[[[]]]]",
    b"[" * 2000, b'{"a":' * 2000, b"- - -", b"&a [*a]", b"!!python/object:os.system", b"\xff\xfe", b"\n", b",,",
)  # fmt: skip

Mutation = Callable[[Random, bytes, Sequence[bytes]], bytes]


def place(rng: Random, data: bytes) -> int:
    """Somewhere in ``data``, near an end half of the time, where lengths and kinds are told."""
    near = rng.choice((16, 64, 256, 1 << 62))
    at = rng.randrange(max(1, min(near, len(data))))
    return at if rng.random() < 0.9 else max(0, len(data) - 1 - at)


def flip(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8)) if data else 0):
        spoilt[place(rng, data)] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def set_bytes(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    at, count = place(rng, data), rng.choice((1, 1, 2, 4, 16))
    return data[:at] + bytes([rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))]) * count + data[at + count :]


def set_word(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """A number of 2, 4 or 8 bytes, as lengths are, at a boundary or near the true length."""
    at, layout = place(rng, data), struct.Struct(rng.choice(_WORDS))
    value = rng.choice((*EDGES, len(data), len(data) + 1, len(data) - 1, len(data) * 2, rng.randrange(1 << 16)))
    return data[:at] + layout.pack(value % (1 << 8 * layout.size)) + data[at + layout.size :]


def cut(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    at = place(rng, data)
    return rng.choice((data[:at], data[at:], data[: len(data) - 1], data[:at] + data[at + rng.randrange(1, 64) :], b""))


def extend(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    at = rng.choice((len(data), place(rng, data)))
    more = rng.choice(
        (bytes(rng.choice((1, 7, 4096))), rng.randbytes(rng.randrange(1, 40)), data[: 1 + place(rng, data)])
    )
    return data[:at] + more + data[at:]


def splice(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    other = rng.choice(pool or [data])
    at = place(rng, data)
    return rng.choice((other, data[:at] + other[at:], data[:at] + other[place(rng, other) :]))


def noise(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 3, 4, 12, 28, 33, 60, 200)))


def numbers(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """One number of a text, or another place in it, replaced by one that is hard to read."""
    found = list(_NUMBER.finditer(data, 0, 20_000))
    start, stop = rng.choice(found).span() if found else (place(rng, data),) * 2
    return data[:start] + rng.choice(_NUMBERS) + data[stop:]


def lines(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Lines of a text left out, repeated, swapped or taken from another."""
    rows = data.split(b"\n")
    more = rng.choice(pool or [data]).split(b"\n")
    a, b = rng.randrange(len(rows)), rng.randrange(len(rows))
    change = rng.randrange(4)
    if change == 0:
        del rows[a]
    elif change == 1:
        rows.insert(b, rows[a])
    elif change == 2:
        rows[a], rows[b] = rows[b], rows[a]
    else:
        rows[a] = rng.choice(more)
    return b"\n".join(rows)


def tree(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """One node of a JSON text replaced, removed, repeated, nested or renamed; keys may come twice."""
    try:
        content = json.loads(data)
        text = json.dumps(odd_node(rng, content), separators=(",", ":"))
    except (ValueError, RecursionError):  # spoilt before
        return numbers(rng, data, pool)
    if rng.random() < 0.1:
        text = text.replace("{", '{"":1,"":2,', 1)
    return text.encode()


def odd_node(rng: Random, content: Any, odd: Sequence[Any] = ODD) -> Any:
    """``content`` with one node of its lists and mappings changed, on the way down at each level with even chances."""
    inside = isinstance(content, dict | list) and len(content) > 0
    if not inside or rng.random() < 0.15:
        change = rng.randrange(6)
        if change == 0 and isinstance(content, int | float) and not isinstance(content, bool):
            return content + rng.choice((-1, 1, 0.5, 2**32))
        if change == 1:
            for _ in range(rng.choice((1, 2, 120, 300))):
                content = [content]
            return content
        return rng.choice(odd)
    if isinstance(content, list):
        at, spoilt = rng.randrange(len(content)), list(content)
        change = rng.randrange(8)
        if change == 0:
            del spoilt[at]
        elif change == 1:
            spoilt.insert(rng.randrange(len(spoilt) + 1), spoilt[at])
        elif change == 2:
            spoilt.reverse()
        else:
            spoilt[at] = odd_node(rng, spoilt[at], odd)
        return spoilt
    key, changed = rng.choice(list(content)), dict(content)
    change = rng.randrange(8)
    if change == 0:
        del changed[key]
    elif change == 1:
        changed[rng.choice(("", "server", f"{key}x", rng.choice(list(content))))] = changed.pop(key)
    else:
        changed[key] = odd_node(rng, changed[key], odd)
    return changed


BYTES: tuple[Mutation, ...] = (flip, flip, set_bytes, set_word, set_word, cut, extend, splice, noise)
TEXT: tuple[Mutation, ...] = (numbers, numbers, lines, tree, flip, set_bytes, cut, extend, splice)


def spoil(rng: Random, data: bytes, pool: Sequence[bytes] = (), ways: Sequence[Mutation] = BYTES) -> bytes:
    """One or a few mutations on top of one another."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(ways)(rng, data, pool)
    return data


def archive(
    rng: Random, data: bytes, pool: Sequence[bytes], names: str = "", ways: Sequence[Mutation] = BYTES
) -> bytes:
    """A zip file with one member spoilt under a right checksum, of those whose names end in ``names``, or raw bytes."""
    if rng.random() < 0.3:
        return spoil(rng, data, pool)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        members = {info.filename: file.read(info) for info in file.infolist()}
    chosen = rng.choice([name for name in members if name.endswith(names)] or list(members))
    members[chosen] = spoil(rng, members[chosen], list(members.values()), ways)
    if rng.random() < 0.1:
        members[rng.choice((chosen + "x", "../x", "x"))] = members.pop(chosen)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, content in members.items():
            file.writestr(zipfile.ZipInfo(name), content)
    return made.getvalue()
