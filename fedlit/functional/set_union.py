"""The union of sets from a sum of tables, which does not reveal who has what.

An invertible Bloom lookup table: each element is added to a few cells that its hash chooses, and a cell with one
element alone gives it away, which empties others (Goodrich and Mitzenmacher, Invertible Bloom lookup tables, Allerton
2011). Tables are added entry by entry, so that a secure sum of them is the table of all sets together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

MOST_BYTES = 62
"""Of an element."""

_HASHES = 5
_CHECK = 8
_DIGITS = 2 * (1 + MOST_BYTES + _CHECK)
"""Half bytes of an element's length, its bytes and its check."""

_UNIT = 1 / 64
"""What one is in a table: small, so that several elements in a cell stay within the range of fixed-point numbers."""


def union_cells(num_elements: int) -> int:
    """Cells for each hash, so that a union of at most so many elements is read back but for less than 1 in 10^5 times.

    Five hashes read 70% of as many elements as there are cells; few elements need more, not to meet in all five.
    """
    return max(32, -(-6 * num_elements // 10))


def union_table(elements: Iterable[bytes], cells: int) -> Tensor:
    """The table of a set, to be summed with those of others.

    Args:
        elements: Each of at most 62 bytes, and once.
        cells: For each hash, see `union_cells`; the same for all tables of a sum.

    Returns:
        Shape (5 * cells, 143), float64: the number of elements and the sums of their half bytes, in units of 1/64.

    Raises:
        ValueError: If an element is longer.
    """
    table = torch.zeros(_HASHES * cells, 1 + _DIGITS, dtype=torch.float64)
    for element in elements:
        table[_places(element, cells)] += _UNIT * _row(element)
    return table


def read_union(total: Tensor, cells: int) -> dict[bytes, int]:
    """The elements of summed tables, sorted, and in how many of the tables each is.

    Args:
        total: Sum of what `union_table` gave, shape (5 * cells, 143); entries may be off by less than 1/128.
        cells: As of the tables.

    Raises:
        ValueError: If there are more elements than can be decoded from the table, or it is no sum of tables.
    """
    left = (total.double() / _UNIT).round().long()
    if left.shape != (_HASHES * cells, 1 + _DIGITS):
        raise ValueError(f"total must have shape {(_HASHES * cells, 1 + _DIGITS)}, got {tuple(left.shape)}")
    found: dict[bytes, int] = {}
    waiting = list(range(len(left)))
    while waiting:
        place = waiting.pop()
        element, count = _alone(left[place]), int(left[place, 0])
        # each element is taken once: in what is no sum of tables one may come again, and the loop would not end
        if element is None or element in found or place not in (places := _places(element, cells)):
            continue
        found[element] = count
        left[places] -= count * _row(element).long()
        waiting += places
    if bool(left.any()):
        raise ValueError(
            f"total must be a sum of tables of at most {cells * _HASHES // 2} different elements, and after "
            f"{len(found)} of them something is left that cannot be decoded"
        )
    return dict(sorted(found.items()))


def _row(element: bytes) -> Tensor:
    """One, and the half bytes of an element with its length and check, shape (143,)."""
    if len(element) > MOST_BYTES:
        raise ValueError(f"elements must have at most {MOST_BYTES} bytes, got {len(element)}: {element[:80]!r}")
    digest = hashlib.blake2b(element, digest_size=_CHECK, person=b"union check").digest()
    whole = bytes([len(element)]) + element.ljust(MOST_BYTES, b"\0") + digest
    return torch.tensor([1, *(half for byte in whole for half in divmod(byte, 16))], dtype=torch.float64)


def _alone(cell: Tensor) -> bytes | None:
    """The element of a cell that has a single one, however often; ``None`` for others."""
    count = int(cell[0])
    halves = cell[1:]
    if count < 1 or bool((halves % count != 0).any()) or int(halves.min()) < 0 or int(halves.max()) > 15 * count:
        return None
    digits = (halves // count).tolist()
    whole = bytes(16 * high + low for high, low in zip(digits[::2], digits[1::2], strict=True))
    if whole[0] > MOST_BYTES:
        return None
    element = whole[1 : 1 + whole[0]]
    return element if torch.equal(_row(element)[1:].long() * count, halves) else None


def _places(element: bytes, cells: int) -> list[int]:
    digest = hashlib.blake2b(element, digest_size=8 * _HASHES, person=b"union places").digest()
    return [
        number * cells + int.from_bytes(digest[8 * number : 8 * number + 8], "big") % cells for number in range(_HASHES)
    ]
