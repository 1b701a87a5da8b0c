"""Tags of totals: the linear family by hand, what they pass, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fedlit.privacy import AuthenticationError, DecodeError, FixedPoint, Tags
from fedlit.privacy.links import derive

KEY, ABOUT = bytes(range(32)), b"a sum"


def by_hand(integers: list[int], width: int = 1024) -> list[int]:
    """u^T X v mod 2^64 in Python's integers, with factors in the order in which they are drawn."""
    stream = Cipher(algorithms.AES256(derive(KEY, "tags of a total", ABOUT)), modes.CTR(bytes(16))).encryptor()

    def draw(count: int) -> list[int]:
        data = stream.update(bytes(8 * count))
        return [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]

    right = draw(2 * width)
    tags = draw(2)
    for start in range(0, len(integers), width):
        left = draw(2)
        for column, number in enumerate(integers[start : start + width]):
            for tag in range(2):
                tags[tag] += left[tag] * number * right[tag * width + column]
    return [tag % 2**64 for tag in tags]


@pytest.mark.parametrize("length", [0, 1, 1025, 66_000])
def test_tags_are_those_of_the_equation(length: int, generator: torch.Generator) -> None:
    codec = FixedPoint()
    vector = (torch.rand(length, generator=generator) - 0.5) * 60
    tagged = Tags(KEY, ABOUT, codec, 7).append(vector)
    assert torch.equal(tagged[:length], vector)
    parts = codec.encode(tagged[length:]).tolist()
    assert len(parts) == 8
    assert [sum(p << 16 * i for i, p in enumerate(parts[4 * t : 4 * t + 4])) for t in range(2)] == by_hand(
        codec.encode(vector).tolist()
    )


def total_of(tags: Tags, codec: FixedPoint, clients: int, length: int, generator: torch.Generator) -> Tensor:
    vectors = ((torch.rand(length, generator=generator) - 0.5) * 2 * codec.bound * 0.99 for _ in range(clients))
    return codec.decode(torch.stack([codec.encode(tags.append(vector)) for vector in vectors]).sum(dim=0))


@pytest.mark.parametrize(
    "codec", [FixedPoint(), FixedPoint(20, 0.004), FixedPoint(0, 1.0), FixedPoint(30, 4e6), FixedPoint(10, 3.0)]
)
def test_the_total_of_any_grid_passes(codec: FixedPoint, generator: torch.Generator) -> None:
    number = 7
    tags = Tags(KEY, ABOUT, codec, 7)
    total = total_of(tags, codec, 7, 500, generator)
    assert torch.equal(tags.check(total, number), total[:500])


def test_forgeries_are_refused(generator: torch.Generator) -> None:
    """One entry changed by a step or by a power of two, entries exchanged, other tags, another sum, another key."""
    codec = FixedPoint()
    tags = Tags(KEY, ABOUT, codec, 7)
    number = 3
    total = total_of(tags, codec, number, 2000, generator)
    forged = []
    for power in range(32):
        changed = total.clone()
        changed[int(torch.randint(2000, (1,), generator=generator))] += 2.0**power / codec.scale
        forged.append(changed)
    for power in (0, 16, 31):  # all of them by the same, which the sum of factors would have to take to zero
        changed = total.clone()
        changed[:2000] += 2.0**power / codec.scale
        forged.append(changed)
    for first, second in torch.randint(2000, (32, 2), generator=generator).tolist():
        changed = total.clone()
        changed[[first, second]] = changed[[second, first]]
        forged += [changed] if first != second else []
    for index in range(8):
        changed = total.clone()
        changed[2000 + index] += 1 / codec.scale
        forged.append(changed)
    forged += [
        torch.cat([total[:1999], total[2000:]]),
        torch.cat([total[:1], total]),
        torch.zeros_like(total),
        2 * total,
        -total,
    ]
    for each in forged:
        with pytest.raises(AuthenticationError):
            tags.check(each, number)
    for other in (Tags(KEY, b"another sum", codec, 7), Tags(bytes(32), ABOUT, codec, 7)):
        with pytest.raises(AuthenticationError):
            other.check(total, number)
    with pytest.raises(AuthenticationError):
        tags.check(2 * total, 2 * number - 1)
    for part, added in ((total[:7], number), (torch.zeros_like(total), 0), (3 * total, 3 * number)):
        with pytest.raises(DecodeError):
            tags.check(part, added)
    tags.check(total, number)
