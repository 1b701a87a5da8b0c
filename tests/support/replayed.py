"""A plugin for pytest: calls of public functions are repeated with their tensors on another device, see `elsewhere`.

Results must be on that device and equal. What was covered and what failed is written to the file that the environment
variable FEDLIT_REPLAYED names.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import elsewhere
from elsewhere import tensors_in
from fedlit import functional

_MOST = 6
"""Calls of a function that are repeated."""

# functions of torch.func on tensors of a class of one's own end Python
_SKIPPED = {"gradient_map"}

_calls: dict[str, int] = {}
_failures: dict[str, str] = {}
_running: list[str] = []


def _repeats(arguments: Any) -> bool:
    """Whether arguments can be used twice, and have tensors."""
    leaves = [each for each in tree_leaves(arguments) if not isinstance(each, Tensor)]
    has_some = next(tensors_in(arguments), None) is not None
    return has_some and not any(callable(each) or hasattr(each, "__next__") for each in leaves)


def _repeat(name: str, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
    try:
        with elsewhere.elsewhere():
            again = function(*elsewhere.moved(args), **elsewhere.moved(kwargs))
            for before, after in zip(tensors_in(result), tensors_in(again), strict=True):
                assert isinstance(after, elsewhere.Elsewhere), f"a result of shape {tuple(after.shape)} is on the CPU"
                torch.testing.assert_close(before.detach(), after.detach().cpu(), equal_nan=True)
    except Exception as error:
        _failures.setdefault(name, f"{type(error).__name__}: {error}"[:300])


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _running:
            return function(*args, **kwargs)
        _running.append(name)
        try:
            before = torch.get_rng_state()
            result = function(*args, **kwargs)
            after = torch.get_rng_state()
            if _calls.get(name, 0) < _MOST and _repeats((args, kwargs)):
                _calls[name] = _calls.get(name, 0) + 1
                torch.set_rng_state(before)
                _repeat(name, function, args, kwargs, result)
                torch.set_rng_state(after)
            return result
        finally:
            _running.pop()

    return call


for _name in functional.__all__:
    _function = getattr(functional, _name)
    if inspect.isfunction(_function) and _name not in _SKIPPED:
        setattr(functional, _name, _watched(_name, _function))


def pytest_sessionfinish() -> None:
    """Write what was found."""
    Path(os.environ["FEDLIT_REPLAYED"]).write_text(json.dumps({"calls": _calls, "failures": _failures}))
