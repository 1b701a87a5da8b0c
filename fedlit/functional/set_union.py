"""The union of sets from a sum of tables, which does not reveal who has what.

An invertible Bloom lookup table (Goodrich and Mitzenmacher, Allerton 2011): each element is added to a few cells that
its hash chooses; a cell with one element alone reveals it, and removing it empties others. A secure sum of tables is
the table of all sets together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.functional.checks import check_shape

MAX_BYTES = 62
"""Of an element."""

_HASHES = 5
_CHECK = 8
_DIGITS = 2 * (1 + MAX_BYTES + _CHECK)
"""Half bytes of an element's length, its bytes and its check."""

_UNIT = 1 / 64
"""Value of one in a table: small, so that several elements in a cell stay within the range of fixed-point numbers."""


def union_cells(num_elements: int) -> int:
    """Cells for each hash, with which a union of so many elements fails to be read less than once in 10^5 times.

    Five hashes read 70% of as many elements as there are cells; few elements need more, not to meet in all five.
    """
    return max(32, -(-6 * num_elements // 10))


def union_table(elements: Iterable[bytes], cells: int) -> Tensor:
    """The table of a set, to be summed with those of others, shape (5 * cells, 143), float64.

    A row has the number of elements and the sums of their half bytes, in units of 1/64. Elements have at most 62 bytes,
    and occur once; ``cells`` for each hash are the same for all tables of a sum, see `union_cells`.
    """
    table = torch.zeros(_HASHES * cells, 1 + _DIGITS, dtype=torch.float64)
    for element in elements:
        table[_cells_of(element, cells)] += _UNIT * _row(element)
    return table


def read_union(total: Tensor, cells: int) -> dict[bytes, int]:
    """Elements of summed tables of `union_table`, sorted, and the number of tables with each.

    Entries of the total may be off by less than 1/128.

    Raises:
        ValueError: If there are more elements than can be decoded from the table, or it is no sum of tables.
    """
    check_shape("total", total, _HASHES * cells, 1 + _DIGITS)
    left = (total.double() / _UNIT).round().long()
    elements: dict[bytes, int] = {}
    waiting = list(range(len(left)))
    while waiting:
        cell = waiting.pop()
        element, count = _alone(left[cell]), int(left[cell, 0])
        # each element is taken once: in what is no sum of tables one may come again, and the loop would not end
        if element is None or element in elements or cell not in (others := _cells_of(element, cells)):
            continue
        elements[element] = count
        left[others] -= count * _row(element).long()
        waiting += others
    rule = f"a sum of tables of at most {cells * _HASHES // 2} different elements"
    check(not bool(left.any()), "total", rule, total, shown=f"a remainder after {len(elements)} of them")
    return dict(sorted(elements.items()))


def _row(element: bytes) -> Tensor:
    """One, and the half bytes of an element with its length and check, shape (143,)."""
    check(len(element) <= MAX_BYTES, "elements", f"of at most {MAX_BYTES} bytes", element, shown=repr(element[:80]))
    digest = hashlib.blake2b(element, digest_size=_CHECK, person=b"union check").digest()
    whole = bytes([len(element)]) + element.ljust(MAX_BYTES, b"\0") + digest
    return torch.tensor([1, *(half for byte in whole for half in divmod(byte, 16))], dtype=torch.float64)


def _alone(cell: Tensor) -> bytes | None:
    """Element of a cell that has a single one, however often; ``None`` for others."""
    count = int(cell[0])
    halves = cell[1:]
    if count < 1 or bool((halves % count != 0).any()) or int(halves.min()) < 0 or int(halves.max()) > 15 * count:
        return None
    digits = (halves // count).tolist()
    whole = bytes(16 * high + low for high, low in zip(digits[::2], digits[1::2], strict=True))
    if whole[0] > MAX_BYTES:
        return None
    element = whole[1 : 1 + whole[0]]
    return element if torch.equal(_row(element)[1:].long() * count, halves) else None


def _cells_of(element: bytes, cells: int) -> list[int]:
    digest = hashlib.blake2b(element, digest_size=8 * _HASHES, person=b"union places").digest()
    return [
        number * cells + int.from_bytes(digest[8 * number : 8 * number + 8], "big") % cells for number in range(_HASHES)
    ]
