"""Tags of totals: the polynomial by hand, what they pass, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedlit.privacy import CKKS, AuthenticationError, DecodeError, FixedPoint, Tags
from fedlit.privacy.links import derive

KEY, ABOUT = bytes(range(32)), b"a sum"


def by_hand(integers: list[int], largest: int, client: str, size: int = 4) -> int:
    """Poly1305 of RFC 8439 in Python's integers."""
    key = derive(KEY, "tags of a total", ABOUT)
    r = int.from_bytes(derive(key, "r", length=16), "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    message = b"".join((number + largest).to_bytes(size, "little") for number in integers)
    sum_ = 0
    for start in range(0, len(message), 16):
        sum_ = (
            (sum_ + int.from_bytes(message[start : start + 16].ljust(16, b"\0") + b"\1", "little")) * r % (2**130 - 5)
        )
    return (sum_ + int.from_bytes(derive(key, "offset", client, length=16), "little")) % 2**128


@pytest.mark.parametrize("length", [0, 1, 4, 1025, 66_000])
def test_tags_are_those_of_the_equation(length: int, generator: torch.Generator) -> None:
    codec = FixedPoint()
    vector = (torch.rand(length, generator=generator) - 0.5) * 60
    tagged = Tags(KEY, ABOUT, codec, 3).append(vector, "c0")
    assert torch.equal(tagged[:length], vector)
    parts = codec.encode(tagged[length:]).tolist()
    assert len(parts) == 8
    assert sum(p << 16 * i for i, p in enumerate(parts)) == by_hand(codec.encode(vector).tolist(), codec.limit, "c0")


def total_of(tags: Tags, codec: FixedPoint, clients: int, length: int, generator: torch.Generator) -> Tensor:
    sent = []
    for number in range(clients):
        vector = (torch.rand(length, generator=generator) - 0.5) * 2 * codec.bound * 0.99
        sent.append(codec.encode(tags.append(vector, f"c{number}")))
    return codec.decode(torch.stack(sent).sum(dim=0))


NAMES = [f"c{number}" for number in range(7)]


@pytest.mark.parametrize(
    "codec", [FixedPoint(), FixedPoint(20, 0.004), FixedPoint(0, 1.0), FixedPoint(30, 4e6), FixedPoint(10, 3.0)]
)
def test_the_total_of_any_grid_passes(codec: FixedPoint, generator: torch.Generator) -> None:
    tags = Tags(KEY, ABOUT, codec, 7)
    total = total_of(tags, codec, 7, 500, generator)
    assert torch.equal(tags.check(total, NAMES), total[:500])


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
            tags.check(each, NAMES[:number])
    for other in (
        Tags(KEY, b"another sum", codec, 7),
        Tags(bytes(32), ABOUT, codec, 7),
        tags.of(b"", False),
        tags.of(b"w", True),
    ):
        with pytest.raises(AuthenticationError):
            other.check(total, NAMES[:number])
    with pytest.raises(AuthenticationError):
        tags.check(total, NAMES[1:4])
    with pytest.raises(DecodeError):
        tags.check(total[:7], NAMES[:number])
    tags.check(total, NAMES[:number])


@pytest.mark.parametrize("shares", [(3, 0, 0), (2, 1, 0), (1, 3, -1), (0, 1, 1), (0, 0, 0)])
def test_other_combinations_of_the_vectors_are_refused(shares: tuple[int, ...], generator: torch.Generator) -> None:
    """As a server adds ciphertexts up whose key it has not."""
    codec = FixedPoint(20, 4.0)
    tags = Tags(KEY, ABOUT, codec, 7)
    sent = [codec.encode(tags.append(torch.rand(300, generator=generator), name)) for name in NAMES[:3]]
    tags.check(codec.decode(torch.stack(sent).sum(dim=0)), NAMES[:3])
    combined = codec.decode(sum(share * vector for share, vector in zip(shares, sent, strict=True)))
    for names in (NAMES[:3], NAMES[:2], NAMES[:1]):
        with pytest.raises(AuthenticationError):
            tags.check(combined, names)


@pytest.mark.parametrize("entry", [-(2.0**43), float("nan"), float("inf"), 100.0])
def test_numbers_beyond_what_clients_add_up_to_are_refused(entry: float, generator: torch.Generator) -> None:
    """Which would run into the number beside them in a coefficient."""
    codec = FixedPoint()
    for attempt in range(20):
        tags = Tags(KEY, bytes([attempt]), codec, 7)
        total = total_of(tags, codec, 3, 10, generator)
        total[4] = entry
        with pytest.raises(AuthenticationError, match="is not the sum"):
            tags.check(total, NAMES[:3])


@pytest.mark.parametrize("shape", [(), (9, 1), (9, 2)])
def test_what_is_no_row_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DecodeError, match="no row"):
        Tags(KEY, ABOUT, FixedPoint(), 3).check(torch.zeros(shape, dtype=torch.float64), NAMES[:3])


def test_numbers_between_steps_are_refused(generator: torch.Generator) -> None:
    """Rounded away, they would let clients hold totals that differ."""
    codec = FixedPoint()
    tags = Tags(KEY, ABOUT, codec, 7)
    total = total_of(tags, codec, 3, 10, generator)
    total[4] += 0.49 / codec.scale
    with pytest.raises(AuthenticationError, match="is not the sum"):
        tags.check(total, NAMES[:3])


@pytest.mark.parametrize("bound", [0.3, 1.0, 2.0])
def test_numbers_that_the_codec_takes_at_its_bound_pass_on_a_finer_grid(bound: float) -> None:
    """Which the codec rounds before it compares them with its bound."""
    pytest.importorskip("tenseal")
    backend = CKKS(FixedPoint(20, bound), max_clients=8)
    vector = torch.full((3,), -bound - 0.49 * 2.0**-20, dtype=torch.float64)
    backend.codec.check(vector)
    tags = Tags(KEY, ABOUT, backend.grid, 3)
    total = torch.stack([backend.grid.round(tags.append(vector, name)) for name in NAMES[:3]]).sum(dim=0)
    tags.check(backend.grid.decode(total), NAMES[:3])
