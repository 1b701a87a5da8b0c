"""Dicts of tensors as one flat vector, and back with shapes and types kept.

On a fixed-point grid, floats of up to 32 bits are one number each. Wider entries (float64 and integers) are two: the
two digits of their steps on the grid, in a base that fits the bound. At the default grid, integers up to 2^27 travel
exactly beside weights that need 20 binary places, through any backend whose sums are nearer to the truth than half a
step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedlit.checks import check
from fedlit.privacy.errors import DecodeError, InputError, RangeError
from fedlit.privacy.fixed_point import FixedPoint

Payload: TypeAlias = Mapping[str, Tensor]
Schema: TypeAlias = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Name, type and shape of each entry."""


_LONG = 1 << 22
"""Numbers that are divided at once."""


def schema_of(payload: Payload) -> Schema:
    """Names, types and shapes of a payload, in its order."""
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in payload.items())


def check_equal(schemas: Mapping[str, Schema], what: str = "payloads", error: type[Exception] = InputError) -> Schema:
    """The schema that all clients share; raises an ``error`` if there is none."""
    first = next(iter(schemas))
    for name, schema in schemas.items():
        if schema != schemas[first]:
            difference = _difference(first, schemas[first], name, schema)
            raise error(f"{what} must agree to be added: {difference}")
    return schemas[first]


def _difference(first: str, schema: Schema, name: str, other: Schema) -> str:
    """How the payload of client ``name`` differs from that of ``first``."""
    ours = {entry[0]: entry[1:] for entry in schema}
    theirs = {entry[0]: entry[1:] for entry in other}
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    detail = f"{keys[0]!r} is {ours.get(keys[0])} there and {theirs.get(keys[0])} here" if keys else "the order differs"
    return f"client {name!r} differs from {first!r}, {detail}"


def relative_weights(weights: Mapping[str, float], names: Sequence[str], codec: FixedPoint | None) -> dict[str, float]:
    """Weights of ``names`` divided by the largest, so that premultiplied vectors stay within the bounds of plain ones.

    On a grid they are rounded to steps of their own, 2^-24 of the largest where the bound allows, and at least one of
    them, so that the sum of weights in the total is the one used. Raises an `InputError` if a weight is missing, not
    positive or not finite.
    """
    missing = [name for name in names if name not in weights]
    check(not missing, "weights", "given for each client that sends", missing, "", InputError, f"none for {missing}")
    bad = {name: weights[name] for name in names if not 0 < weights[name] < math.inf}
    check(not bad, "weights", "positive and finite", bad, "leave a client out instead", InputError)
    largest = max((float(weights[name]) for name in names), default=1.0)
    shares = {name: float(weights[name]) / largest for name in names}
    if codec is None:
        return shares
    steps = _weight_steps(codec)
    return {name: max(1, round(share * steps)) / steps for name, share in shares.items()}


def _weight_steps(codec: FixedPoint) -> int:
    """Steps of the grid that stand for the largest weight: within the bound, and exact in float32."""
    return min(codec.limit, 1 << 24)


def check_row(what: str, vector: Tensor) -> None:
    """Raise an `InputError` unless ``vector`` has shape (n,); ``what`` names it."""
    check(vector.dim() == 1, what, "of shape (n,)", tuple(vector.shape), "flatten it", InputError)


def check_equally_long(lengths: Mapping[str, int]) -> None:
    """Raise a `DecodeError` unless the vectors of all clients, of these lengths, can be added."""
    check(len(set(lengths.values())) < 2, "vectors", "equally long, to be added", lengths, error=DecodeError)


def is_wide(dtype: torch.dtype) -> bool:
    """Whether an entry of this type needs more digits than float32 has."""
    return dtype == torch.float64 or not dtype.is_floating_point


def pack(payload: Payload, codec: FixedPoint | None, weight: float | None = None) -> Tensor:
    """Entries of ``payload`` one after the other, shape (n,).

    Without a codec floats are kept: float64 if an entry is wide, else float32. All entries are multiplied by a weight
    from `relative_weights`, and it becomes the last number; ``None`` does neither. Raises an `InputError` if an entry
    is complex, a `RangeError` if an integer is beyond 2^53, or a wide entry beyond what its two digits hold; others are
    checked when they are protected.
    """
    for name, tensor in payload.items():
        if tensor.is_complex():
            raise InputError(f"entry {name!r} has type {tensor.dtype}: send its real and imaginary parts")
        if not tensor.is_floating_point() and tensor.dtype.itemsize == 8 and tensor.numel():
            largest = float(tensor.detach().to(torch.float64).abs().max())
            if largest > 2**53:
                raise RangeError(f"entry {name!r} has an integer of {largest:g}, only up to 2^53 are exact: scale it")
    sizes = _sizes([(tensor.dtype, tensor.numel()) for tensor in payload.values()], codec)
    wide = codec is None and any(is_wide(tensor.dtype) for tensor in payload.values())
    # on the device of the first: numbers beside weights on a GPU may have been made on the CPU
    device = next((tensor.device for tensor in payload.values()), None)
    dtype = torch.float64 if wide else torch.float32
    if payload and all(_is_plain(tensor, dtype, device) for tensor in payload.values()):
        flat = [tensor.detach().reshape(-1) for tensor in payload.values()]  # views; two calls, for many small vectors
        vector = torch.cat(flat if weight is None else [*flat, flat[0].new_empty(1)])
        if weight is not None:
            vector[:-1].mul_(weight)
    else:
        length = sum(sizes) + (weight is not None)
        vector = torch.empty(length, dtype=dtype, device=device)  # filled in place, as long ones fill memory
        for (name, tensor), part in zip(payload.items(), torch.split(vector[: sum(sizes)], sizes), strict=True):
            entry = tensor.detach().reshape(-1)
            if codec is not None and is_wide(tensor.dtype):
                _write_digits(name, entry, 1.0 if weight is None else weight, codec, part)
            else:
                part.copy_(entry)
                if weight is not None:
                    part.mul_(weight)
    if weight is not None:
        vector[-1] = weight if codec is None else round(weight * _weight_steps(codec)) / codec.scale
    return vector


def _is_plain(tensor: Tensor, dtype: torch.dtype, device: torch.device | None) -> bool:
    """Whether an entry goes into a vector of this type as it is, without a copy of its own before."""
    same = tensor.dtype == dtype and tensor.device == device and tensor.is_contiguous()
    return same and type(tensor) in (Tensor, nn.Parameter)


def _sizes(entries: Sequence[tuple[torch.dtype, int]], codec: FixedPoint | None) -> list[int]:
    """Numbers of entries in a vector: on a grid wide ones have two digits."""
    return [2 * size if codec is not None and is_wide(dtype) else size for dtype, size in entries]


def unpack(
    vector: Tensor, schema: Schema, codec: FixedPoint | None, weighted: bool, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Inverse of `pack` for a total; divides by the sum of weights if ``weighted``.

    Integer entries are rounded half to even; a sum of flags shows whether any is set. Raises a `DecodeError` if the
    vector does not have the length of such a payload, a `RangeError` if a sum does not fit the type of its entry.
    """
    form = f"{vector.dtype} of shape {tuple(vector.shape)}"
    is_row = vector.dim() == 1 and vector.is_floating_point()
    check(is_row, "total", "a row of floats", form, error=DecodeError, shown=form)
    vector = vector if device is None else vector.to(device)
    if weighted:
        vector, weight = _weight_apart(vector, codec)
        check(float(weight) > 0, "sum of the weights in a total", "above 0", float(weight), error=DecodeError)
    sizes = _sizes([(dtype, math.prod(shape)) for _, dtype, shape in schema], codec)
    check(
        len(vector) == sum(sizes), "numbers of a total", f"{sum(sizes)}, as of payloads", len(vector), error=DecodeError
    )
    payload: dict[str, Tensor] = {}
    for (name, dtype, shape), part in zip(schema, torch.split(vector, sizes), strict=True):
        if codec is not None and is_wide(dtype):
            part = _number(part, codec)
        if weighted:
            part = _divided(part, weight, dtype)
        if not dtype.is_floating_point:
            part = part.round()
            _check_fits(name, part, dtype)
        try:
            payload[name] = part.to(dtype).reshape(shape)
        except (RuntimeError, TypeError, OverflowError) as error:  # no elements, and sizes past any tensor's
            raise DecodeError(f"a total has an entry {name!r} of impossible shape {shape}") from error
        if dtype == torch.float16 and not bool(payload[name].isfinite().all()) and bool(part.isfinite().all()):
            raise RangeError(f"the sum of entry {name!r} leaves the range of {dtype}: send it as float32")
    return payload


def _divided(part: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers over a weight; long ones piece by piece, in the type that they are to have, as they fill memory."""
    if dtype not in (torch.float32, torch.float64) or len(part) < _LONG:
        return part / weight
    quotients = torch.empty(len(part), dtype=dtype, device=part.device)
    for start in range(0, len(part), _LONG):
        quotients[start : start + _LONG] = part[start : start + _LONG] / weight
    return quotients


def check_weight(vector: Tensor, codec: FixedPoint | None, shares: Mapping[str, float]) -> None:
    """Raise a `DecodeError` unless the weight in a total is that of its clients, relative as in `relative_weights`.

    Whoever leaves a vector out of a total, or adds one, changes its weight, unless by as much elsewhere.
    """
    weight, expected = float(_weight_apart(vector, codec)[1]), math.fsum(shares.values())
    # on a grid the sum of weights is exact; floats are added in some order
    if abs(weight - expected) > (1e-4 * expected if codec is None else 0.5 / _weight_steps(codec)):
        raise DecodeError(
            f"a mean holds a weight of {weight:.6g}, but the clients that announced a vector, {[*shares]}, have "
            f"{expected:.6g} together: the server has left a vector out that arrived, or added one"
        )


def _weight_apart(vector: Tensor, codec: FixedPoint | None) -> tuple[Tensor, Tensor]:
    """Numbers of a weighted total, and the sum of weights, its last number."""
    if not len(vector):
        raise DecodeError("a weighted total has no numbers, where the last one is the sum of weights")
    vector, weight = vector[:-1], vector[-1]
    if codec is not None:  # weights are whole steps; an approximate sum of them is not quite
        weight = (weight * codec.scale).round() / _weight_steps(codec)
    return vector, weight


def _check_fits(name: str, part: Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.bool or not part.numel():
        return
    # sums come as float64, which has 53 digits, or as float32 of entries that are no wider than that
    finite = bool(part.isfinite().all())
    check(finite, f"sum of entry {name!r}", f"finite, as {dtype}", "NaN or infinity", error=DecodeError)
    low, high = (int(end) for end in torch.aminmax(part))
    minimum, maximum = max(torch.iinfo(dtype).min, -(2**53)), min(torch.iinfo(dtype).max, 2**53)
    if low < minimum or high > maximum:
        raise RangeError(
            f"the sum of entry {name!r} goes from {low} to {high}, but {dtype} holds {minimum} to {maximum} only: "
            "send it in a wider type, or scaled down"
        )


def _base(codec: FixedPoint) -> int:
    """Base of the digits of a wide entry: digits up to half of it are exact in float32 and within the bound."""
    return 1 << min(24, codec.limit.bit_length() - 1)


def _write_digits(name: str, flat: Tensor, weight: float, codec: FixedPoint, digits: Tensor) -> None:
    """Write weighted numbers into ``digits``, twice as many: all high ones, then all low ones."""
    base, parts = _base(codec), (flat, digits[: len(flat)], digits[len(flat) :])
    for numbers, high, low in zip(*(torch.split(part, _LONG) for part in parts), strict=True):
        numbers = numbers.to(torch.float64) * weight
        steps = (numbers * codec.scale).round()
        quotients = (steps / base).round()
        if len(numbers):
            largest = float(quotients.abs().max())
            if base // 2 < largest < math.inf:  # what is not finite stays so, and is refused like any other number
                raise RangeError(
                    f"entry {name!r} has a number of {float(numbers.abs().max()):g}, but two digits on the grid "
                    f"{codec} hold only |x| <= {base * base / 2 / codec.scale:g}: lower fraction_bits, or send it "
                    "scaled down"
                )
        high.copy_(quotients / codec.scale)
        low.copy_((steps - quotients * base) / codec.scale)  # balanced: at most half a base, either side of 0


def _number(digits: Tensor, codec: FixedPoint) -> Tensor:
    # rounded to the grid first: a sum that is off by less than half a step (CKKS) is exact again
    high, low = (digits.to(torch.float64) * codec.scale).round().chunk(2)
    return (high * _base(codec) + low) / codec.scale
