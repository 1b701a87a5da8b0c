"""Inputs of one tensor or of several: dictionaries, lists, tuples, named tuples and dataclasses of tensors, nested."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Inputs: TypeAlias = Any
"""A tensor, or a structure of tensors, with samples along the first dimension of each."""

Shape: TypeAlias = tuple[int, ...] | tuple[tuple[str, tuple[int, ...]], ...]
"""Of one sample; of several tensors, (path, shape) sorted by path."""

Rows: TypeAlias = Tensor | slice
"""Positions, int64; a mask, bool; or a range."""


def leaves(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors of inputs, sorted by path, such as ``"['image']"`` or ``"[0]"``; of a tensor by itself ``""``.

    A `TypeError` if something else is among them, such as texts.
    """
    tensors: dict[str, Tensor] = {}  # sorted, as clients' dictionaries may differ in order
    for path, leaf in sorted(_walk(inputs), key=_path):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"inputs{path} must be a tensor, got {type(leaf).__name__}: give tensors, or dictionaries, lists, "
                "tuples or dataclasses of tensors"
            )
        tensors[path] = leaf
    return tensors


def tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    """As `leaves`, without what is no tensor."""
    return {path: leaf for path, leaf in sorted(_walk(inputs), key=_path) if isinstance(leaf, Tensor)}


def entries(inputs: Inputs) -> list[tuple[str, Any]]:
    """Paths and leaves of inputs, tensors and others, in order."""
    return list(_walk(inputs))


def num_samples(inputs: Inputs) -> int:
    """Number of samples in a batch of inputs."""
    sized = [leaf for _, leaf in _walk(inputs) if not _is_common(leaf)]
    return len(next((leaf for leaf in sized if isinstance(leaf, Tensor)), sized[0] if sized else ()))


def sample_shape(inputs: Inputs) -> Shape:
    """Shape of one sample of a batch; of what is no tensor ``()``."""
    if _parts(inputs) is None:
        return _shape(inputs)
    return tuple(sorted((path, _shape(leaf)) for path, leaf in _walk(inputs)))


def any_size(shape: Shape) -> Shape:
    """A shape whose sizes differ between batches, and are 0 here; see `alike`."""
    if any(isinstance(part, tuple) for part in shape):
        return tuple((path, (0,) * len(sizes)) for path, sizes in shape)  # type: ignore[misc]
    return (0,) * len(shape)


def alike(shape: object, other: object) -> bool:
    """Return whether two shapes are equal but for sizes that are 0."""
    if isinstance(shape, tuple) and isinstance(other, tuple):
        return len(shape) == len(other) and all(map(alike, shape, other))
    return shape == other or (isinstance(shape, int) and isinstance(other, int) and 0 in (shape, other))


def in_words(shape: Shape) -> str:
    """A shape as errors have it: ``(3, 8, 8)``, or ``['age'] (1,), ['image'] (3, 8, 8)``; see `any_size` for "any"."""
    if any(isinstance(part, tuple) for part in shape):
        return ", ".join(f"{path} {in_words(sizes)}" for path, sizes in shape)  # type: ignore[misc]
    return str(shape) if 0 not in shape else f"({', '.join('any' if size == 0 else str(size) for size in shape)})"


def layout(sample: Any) -> list[tuple[str, Any]]:
    """Paths of a single sample's leaves, each with its shape, or its type if it has none."""
    return [(path, tuple(getattr(leaf, "shape", None) or ()) or type(leaf).__name__) for path, leaf in _walk(sample)]


def mapped(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Inputs with a function of each tensor in its place."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    made = (function(leaf) if isinstance(leaf, Tensor) else leaf for _, leaf in _walk(inputs))
    return _remade(inputs, made)


def rebuilt(like: Inputs, tensors: Mapping[str, Any]) -> Inputs:
    """Inputs of the structure ``like``, from tensors by path; a `ValueError` if paths differ."""
    paths = [path for path, _ in _walk(like)]
    if set(paths) != set(tensors):
        raise ValueError(f"inputs must have the tensors {sorted(paths)}, got {sorted(tensors)}")
    return _remade(like, iter([tensors[path] for path in paths]))


def take(samples: Inputs, rows: Rows) -> Inputs:
    """Some samples of a batch of tensors, lists or arrays; a `TypeError` of anything else."""
    if isinstance(samples, Tensor):
        return samples[rows]
    return _remade(samples, iter([_taken(leaf, rows, path) for path, leaf in _walk(samples)]))


def concatenate(batches: Sequence[Inputs]) -> Inputs:
    """Several batches as one, at least one batch; a `ValueError` if they differ in structure."""
    first, *others = batches
    if isinstance(first, Tensor):
        return torch.cat([*batches])
    table = {path: [leaf] for path, leaf in _walk(first)}
    for batch in others:
        for path, leaf in _walk(rebuilt(first, dict(_walk(batch)))):
            table[path].append(leaf)
    joined = {
        path: torch.cat(each) if isinstance(each[0], Tensor) else sum(each[1:], each[0]) for path, each in table.items()
    }
    return rebuilt(first, joined)


def pieces(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """Batches of at most so many samples, in order."""
    for start in range(0, num_samples(inputs), size):
        yield take(inputs, slice(start, start + size))


def vectors(inputs: Inputs) -> Tensor | None:
    """A batch whose tensors are floating and of shape (n, d) each, side by side, shape (n, sum of d); else ``None``."""
    parts = [leaf for _, leaf in sorted(_walk(inputs), key=_path)]
    if not all(isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.is_floating_point() for leaf in parts):
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


# ---------------------------------------------------------------- structures


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Members of a structure, with the last part of their paths; ``None`` of a leaf, such as a list of texts."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, list | tuple) and any(isinstance(each, Tensor) or _parts(each) for each in value[:1]):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    return None


_path = itemgetter(0)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape[1:]) if isinstance(leaf, Tensor) else ()


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    parts = _parts(value)
    if parts is None:
        yield path, value
        return
    for name, item in parts:
        yield from _walk(item, path + name)


def _remade(like: Any, made: Iterator[Any]) -> Any:
    """The structure of a value, with other leaves in their order."""
    parts = _parts(like)
    if parts is None:
        return next(made)
    return with_members(like, [_remade(item, made) for _, item in parts])


def with_members(like: Any, members: Sequence[Any]) -> Any:
    """Return a structure with other members, in their order."""
    if isinstance(like, Mapping):
        named = dict(zip(like, members, strict=True))
        if type(like) is dict:
            return named
        if not isinstance(like, MutableMapping):
            return type(like)(named)  # type: ignore[call-arg]
        changed: Any = copy.copy(like)  # a class may take other arguments, such as defaultdict
        changed.update(named)
        return changed
    if is_dataclass(like):
        changed = copy.copy(like)
        for field, member in zip(fields(like), members, strict=True):
            object.__setattr__(changed, field.name, member)  # frozen ones too
        return changed
    return type(like)(*members) if hasattr(like, "_fields") else type(like)(members)


def _is_common(leaf: Any) -> bool:
    """Whether something is one thing for all samples, such as a number or a text."""
    return isinstance(leaf, str) or not hasattr(leaf, "__len__") or (isinstance(leaf, Tensor) and leaf.dim() == 0)


def _taken(leaf: Any, rows: Rows, path: str) -> Any:
    if _is_common(leaf):
        return leaf
    if isinstance(leaf, Tensor):
        return leaf[rows]
    if isinstance(leaf, np.ndarray):
        return leaf[rows if isinstance(rows, slice) else rows.cpu().numpy()]
    if isinstance(leaf, list | tuple):
        if isinstance(rows, slice):
            return leaf[rows]
        positions = rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows
        return type(leaf)([leaf[index] for index in positions.tolist()])
    raise TypeError(
        f"samples{path} are of type {type(leaf).__name__}, of which no samples can be taken: give tensors, or "
        "dictionaries, lists, tuples or dataclasses of tensors"
    )
