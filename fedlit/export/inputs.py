"""Inputs of an exported model: raw samples, if the data module states how it prepares them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlit.data import DomainDataModule
from fedlit.data.raw_inputs import RawInputs

_HOOKS = ("finish", "transform", "make_dataset")
"""Methods of a data module that change samples after they are loaded."""

_MAX_SAMPLES = 32
"""Samples of the target that are compared."""


def raw_inputs_of(data: DomainDataModule) -> RawInputs | None:
    """Return ``data.raw_inputs()``, after a comparison with the target's samples as the data module prepares them.

    Args:
        data: With the target's data.

    Returns:
        Raw samples and the network that prepares them; ``None`` if models take samples as they were loaded.

    Raises:
        TypeError: If samples are prepared in another way, or in any without ``raw_inputs``.
    """
    _ = data.input_shape  # an error where samples have several tensors, which are not compared
    raw, loaded = data.raw_inputs(), data.load(data.target).x
    finished = data._domain(data.target).x
    if isinstance(loaded, Tensor) and (raw is None or _comparable(loaded, raw)):
        indices = torch.linspace(0, len(loaded) - 1, min(len(loaded), _MAX_SAMPLES)).round().long()
        prepared, x = _prepared(data, indices), loaded[indices]
        expected = x if raw is None else raw.network(x)
        # another number of values is an error of the caller's, which the model raises
        same = expected.numel() != prepared.numel() or _close(expected, prepared)
        hooks = ["transform"] if _close(x, finished[indices]) else ["finish"]
    elif raw is None:
        same, hooks = bool(loaded is finished or loaded == finished), ["finish"]
    else:
        hooks = _hooks_below(type(data), "raw_inputs")
        same = not hooks or (hooks == ["transform"] and _transform_equals(data, raw))
    if same:
        return raw
    missing = "which raw_inputs() does not state" if raw is None else "and raw_inputs() in another way"
    raise TypeError(
        f"{type(data).__name__} prepares samples in {' and '.join(hooks)}(), {missing}, so that an exported model "
        "would predict wrongly on raw ones: override raw_inputs() to return a RawInputs whose network prepares samples "
        "so, or export a model of prepared samples by their shape: export_target(module, path, data.input_shape)"
    )


def _comparable(loaded: Tensor, raw: RawInputs) -> bool:
    return loaded.shape[1:] == raw.sample.shape[1:] and loaded.dtype == raw.sample.dtype


def _prepared(data: DomainDataModule, indices: Tensor) -> Tensor:
    """Samples of the target as a model receives them in evaluation."""
    dataset: Any = data.all_samples(data.target)
    if hasattr(dataset, "batch"):
        x: Tensor = dataset.batch(indices)[0]
        return x
    return torch.stack([torch.as_tensor(dataset[index][0]) for index in indices.tolist()])


def _close(x: Tensor, y: Tensor) -> bool:
    """Compare two tensors of any shape and type up to rounding."""
    x, y = x.flatten().double(), y.flatten().double()
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)


def _hooks_below(data_type: type[DomainDataModule], method: str) -> list[str]:
    """Hooks that subclasses override of the class that has a method."""
    order = list(data_type.__mro__)
    owner = next(index for index, each in enumerate(order) if method in vars(each))
    return [hook for hook in _HOOKS if any(hook in vars(each) for each in order[:owner])]


def _transform_equals(data: DomainDataModule, raw: RawInputs) -> bool:
    """Compare the transform of evaluation with the network, on random raw samples."""
    transform = data.transform(training=False)
    generator = torch.Generator().manual_seed(0)
    sample = torch.rand(4, *raw.sample.shape[1:], generator=generator)
    x = sample if raw.sample.is_floating_point() else (256 * sample).to(raw.sample.dtype)
    return transform is not None and _close(transform(x), raw.network(x))
