"""A device that this machine has not: tensors that say they are elsewhere, and refuse to meet those that are not.

torch's "lazy" device has no driver to load; values are on the CPU. Refused is what real devices refuse: operations on
tensors of two devices, but for indices and single numbers, and `Tensor.numpy`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy")

_ACROSS = ("aten::copy_", "aten::_to_copy", "aten::index")
"""First letters of operations that take tensors of two devices."""

_TENSOR, _AS_TENSOR = torch.tensor, torch.as_tensor


class Elsewhere(Tensor):
    """A tensor of `DEVICE` with the values of ``inner``."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """As of any tensor, which torch refuses of a class of one's own."""
        return self.inner.tolist()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
        """As of any tensor."""
        return _tensor(data, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _Mode(TorchDispatchMode):
    """Lets tensors be made on `DEVICE`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives, on the device on which it would be."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    is_there = any(isinstance(each, Elsewhere) for each in given)
    here = [each for each in given if not isinstance(each, Elsewhere) and each.dim()]
    name = func._schema.name
    if is_there and here and not name.startswith(_ACROSS):
        raise RuntimeError(f"{name}: tensors on two devices, one of shape {tuple(here[0].shape)} on the CPU")
    if name == "aten::copy_":
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    if kwargs.get("device") is not None:
        is_there = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    written = _written(func, args, kwargs)
    if isinstance(written, Elsewhere) and isinstance(found, Tensor):
        if written.shape != found.shape:  # as by squeeze_, which returns the tensor itself
            written.data = Elsewhere(found)
            written.inner = found
        return written
    return tree_map(lambda each: Elsewhere(each) if is_there and isinstance(each, Tensor) else each, found)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The first argument that an operation writes into; ``None`` if it writes into none."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    changed = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return given.get(changed[0]) if changed else None


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """`torch.tensor`, which makes its result without an operation that could be seen."""
    made = _TENSOR(data, dtype=dtype)
    is_there = device is not None and torch.device(device).type == DEVICE.type
    return (Elsewhere(made) if is_there else made).requires_grad_(requires_grad)


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    if isinstance(data, Tensor):
        return data.to(device or data.device, dtype or data.dtype)
    return _tensor(data, dtype=dtype, device=device)


def _inner(each: Any) -> Any:
    return each.inner if isinstance(each, Elsewhere) else each


def moved(value: Any) -> Any:
    """Arguments with their tensors on `DEVICE`, which take gradients if they did, also those in objects of fedlit."""

    def move(each: Any) -> Any:
        if isinstance(each, Elsewhere):
            return each
        if isinstance(each, Tensor):
            return Elsewhere(each.detach().clone()).requires_grad_(each.requires_grad)
        if type(each).__module__.startswith("fedlit.") and hasattr(each, "__dict__"):
            made = copy.copy(each)
            for name, part in vars(each).items():
                object.__setattr__(made, name, moved(part))
            return made
        return each

    return tree_map(move, value)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors of a result, also in objects of fedlit."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part, seen)
    elif type(value).__module__.startswith("fedlit.") and hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Within it, tensors can be made on `DEVICE`."""
    torch.tensor, torch.as_tensor = _tensor, _as_tensor  # type: ignore[assignment]
    try:
        with _Mode():
            yield
    finally:
        torch.tensor, torch.as_tensor = _TENSOR, _AS_TENSOR
