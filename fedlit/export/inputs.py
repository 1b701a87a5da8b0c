"""What an exported model takes: samples as their owner has them, if the data module prepares them by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlit.data import DomainDataModule
from fedlit.data.raw_inputs import RawInputs

_HOOKS = ("finish", "transform", "make_dataset")
"""Of a data module, which change samples after they are loaded."""

_MOST_SAMPLES = 32
"""Samples of the target that are compared."""


def raw_inputs_of(data: DomainDataModule) -> RawInputs | None:
    """Return ``data.raw_inputs()``, after a comparison with what the data module makes of the target's samples.

    Args:
        data: With the target's data.

    Returns:
        Raw samples and the network that prepares them; ``None`` if models take samples as they were loaded.

    Raises:
        TypeError: If samples are prepared in another way, or in any without ``raw_inputs``.
    """
    _ = data.input_shape  # an error where samples have several tensors, which are not compared
    raw, loaded = data.raw_inputs(), data.load(data.target).x
    kind, finished = type(data).__name__, data._domain(data.target).x
    if isinstance(loaded, Tensor) and (raw is None or _comparable(loaded, raw)):
        places = torch.linspace(0, len(loaded) - 1, min(len(loaded), _MOST_SAMPLES)).round().long()
        prepared, x = _prepared(data, places), loaded[places]
        found = x if raw is None else raw.network(x)
        # other numbers of numbers are an error of whoever gives them, and nothing is dropped in silence
        same = found.numel() != prepared.numel() or _alike(found, prepared)
        hooks = ["finish"] if not _alike(x, finished[places]) else ["transform"]
    elif raw is None:
        same, hooks = bool(loaded is finished or loaded == finished), ["finish"]
    else:
        hooks = _after(type(data), "raw_inputs")
        same = not hooks or (hooks == ["transform"] and _transforms_alike(data, raw))
    if same:
        return raw
    missing = "which raw_inputs() does not state" if raw is None else "and raw_inputs() in another way"
    raise TypeError(
        f"{kind} prepares samples in {' and '.join(hooks)}(), {missing}, so that an exported model would predict "
        "wrongly on raw ones: override raw_inputs() to return a RawInputs whose network prepares samples so, or export "
        "a model of prepared samples by their shape: export_target(module, path, data.input_shape)"
    )


def _comparable(loaded: Tensor, raw: RawInputs) -> bool:
    return loaded.shape[1:] == raw.sample.shape[1:] and loaded.dtype == raw.sample.dtype


def _prepared(data: DomainDataModule, places: Tensor) -> Tensor:
    """Samples of the target as a model sees them in evaluation."""
    dataset: Any = data.all_samples(data.target)
    if hasattr(dataset, "batch"):
        x: Tensor = dataset.batch(places)[0]
        return x
    return torch.stack([torch.as_tensor(dataset[place][0]) for place in places.tolist()])


def _alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same numbers but for rounding, whatever their shapes and types are."""
    x, y = x.flatten().double(), y.flatten().double()
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)


def _after(kind: type[DomainDataModule], method: str) -> list[str]:
    """Hooks that a subclass overrides of the class that has a method."""
    order = list(kind.__mro__)
    owner = next(place for place, each in enumerate(order) if method in vars(each))
    return [hook for hook in _HOOKS if any(hook in vars(each) for each in order[:owner])]


def _transforms_alike(data: DomainDataModule, raw: RawInputs) -> bool:
    """Whether the transform of evaluation does to raw samples what the network does."""
    transform = data.transform(training=False)
    generator = torch.Generator().manual_seed(0)
    sample = torch.rand(4, *raw.sample.shape[1:], generator=generator)
    x = sample if raw.sample.is_floating_point() else (256 * sample).to(raw.sample.dtype)
    return transform is not None and _alike(transform(x), raw.network(x))
