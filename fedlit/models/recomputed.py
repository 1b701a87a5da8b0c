"""Networks that run a second time in the backward pass, so that no activations are kept until then."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fedlit.checks import refuse


def recompute_(replica: nn.Module) -> None:
    """Let the extractors in a replica keep their inputs alone for the backward pass, which runs them again.

    The second call has the random numbers, weights and modes of the first. Gradients are the same to the last bit, and
    buffers change once. Layers draw from the default generators of torch, numpy and Python, or from those that are
    attributes of a layer, or in a list or dictionary of it; what else they keep beside parameters and buffers is as the
    first call leaves it.

    Args:
        replica: Changed in place; state dicts and copies are as before.

    Raises:
        ValueError: If an extractor is compiled, or there is none.
        RuntimeError: In the backward pass, if the second call has another output.
    """
    inside: set[nn.Module] = set()
    for module in replica.modules():
        extractor = module._modules.get("extractor")
        if extractor is None or extractor in inside:
            continue
        if "forward" in vars(extractor) or isinstance(extractor, torch.jit.ScriptModule):
            way_out = "give the network that it was made of"
            rule = "False with an extractor that is compiled, or has another forward than its class"
            refuse("recompute", rule, type(extractor).__name__, way_out)
        inside.update(extractor.modules())
        extractor.forward = _Recomputed(extractor)
    if not inside:
        rule = "False with replicas that have no module named extractor, as nothing would be run again"
        refuse("recompute", rule, True, "name the network so")


class _Recomputed:
    """The ``forward`` of a network; a class, so that copies and pickles have their own network."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first: list[list[tuple[Tensor, Tensor]]] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))  # it may change dictionaries and lists
            found = type(self.network).forward(self.network, *args, **kwargs)
            if first:
                self._check_equal(first[0], _marks(found))
            elif torch.is_grad_enabled():
                first.append(_marks(found))
            return found

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _AsBefore(copied, drawn)

        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        copies: dict[int, Tensor] = {}
        copied = [_State.of(module).with_copies(copies) for module in self.network.modules()]
        drawn = _Generators(_held(self.network.modules()))
        before = _versions(args, kwargs)
        with set_checkpoint_early_stop(False):  # by an exception, which a forward may catch
            found = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if _versions(args, kwargs) != before:
            raise RuntimeError(
                f"{type(self.network).__name__} changes its inputs in place, so that it cannot be run again: let it "
                "make new tensors (inplace=False), or give recompute=False"
            )
        return found

    def _check_equal(self, first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> None:
        """Refuse another output than that of the first call, but for rounding, which not every device repeats."""
        for (mark, size), (again, _) in zip(first, second, strict=True):
            if bool((mark - again).abs() > _ROUNDING * size):
                raise RuntimeError(
                    f"{type(self.network).__name__} has another output when it is run again, so that gradients would "
                    "be wrong: let it draw from torch's default generator, and keep no state beside parameters and "
                    "buffers, or give recompute=False"
                )


_ROUNDING = 1e-5
"""Difference that rounding makes, in units of the sum of absolute values."""


@torch.no_grad()
def _marks(outputs: Any) -> list[tuple[Tensor, Tensor]]:
    """Return a number for each output tensor that differs where its entries or their order do, and its size."""
    found = []
    for each in tree_leaves(outputs):
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()) and each.numel():
            numbers = (torch.view_as_real(each) if each.is_complex() else each).double().flatten()
            ramp = torch.linspace(0.5, 1.5, len(numbers), dtype=numbers.dtype, device=numbers.device)
            found.append((numbers @ ramp, numbers.abs().sum()))
    return found


@dataclass(frozen=True)
class _State:
    """What a module has when it is called: `torch.func.functional_call` and ``eval()`` may be over by the second."""

    module: nn.Module
    training: bool
    params: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]

    @classmethod
    def of(cls, module: nn.Module) -> _State:
        return cls(module, module.training, dict(module._parameters), dict(module._buffers))

    def with_copies(self, copies: dict[int, Tensor]) -> _State:
        """Return it with copies of its buffers; ``copies`` has those of modules before, as two may share one."""
        for each in self.buffers.values():
            if each is not None and id(each) not in copies:
                copies[id(each)] = each.clone()
        own = {name: None if each is None else copies[id(each)] for name, each in self.buffers.items()}
        return replace(self, buffers=own)

    def put_back_(self) -> None:
        self.module.training = self.training
        self.module._parameters.update(self.params)
        self.module._buffers.update(self.buffers)


class _Generators:
    """States of numpy's and Python's generators and of some others; torch keeps those of its default ones."""

    def __init__(self, own: Iterable[Any]) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002, layers draw from it
        self.own = {id(each): (each, _state(each)) for each in own}

    def put_back_(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for generator, state in self.own.values():
            if isinstance(generator, torch.Generator | np.random.RandomState):
                generator.set_state(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, np.random.BitGenerator):
                generator.state = state
            else:
                generator.setstate(state)


_OWN = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _held(modules: Iterable[nn.Module]) -> list[Any]:
    """Return generators that are attributes of modules or of their classes, or in a list or dictionary of these."""
    found: list[Any] = []
    for module in modules:
        own = [value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
        of_classes = [value for kind in _classes(type(module)) for value in vars(kind).values()]
        for value in (*own, *of_classes):
            several = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
            found += [each for each in several if isinstance(each, _OWN)]
    return found


def _classes(kind: type) -> list[type]:
    """The class and its bases that are not torch's."""
    return [each for each in kind.__mro__ if each is not object and not each.__module__.startswith("torch.")]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.SystemRandom):
        way_out = "let the layer draw from random.Random, or leave recompute out"
        refuse(
            "recompute", "False with layers that hold a random.SystemRandom, which draws nothing twice", True, way_out
        )
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.state if isinstance(generator, np.random.BitGenerator) else generator.getstate()


def _versions(*inputs: Any) -> list[int]:
    """Return how often tensors have been written to."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


class _AsBefore:
    """Within it, modules have what they had, and copies of their buffers; entered once for each backward pass."""

    def __init__(self, states: Sequence[_State], drawn: _Generators) -> None:
        self._states, self._drawn = states, drawn
        self._now: list[_State | _Generators] = []

    def __enter__(self) -> None:
        modules, known = [each.module for each in self._states], self._drawn.own
        held = _held(modules)
        if any(id(each) not in known for each in held):
            raise RuntimeError(
                f"{type(modules[0]).__name__} makes a random generator while it is called, so that it cannot be run "
                "again: make it before, or give recompute=False"
            )
        self._now = [*map(_State.of, modules), _Generators(each for each, _ in known.values())]
        self._drawn.put_back_()
        copies: dict[int, Tensor] = {}
        for each in self._states:
            each.with_copies(copies).put_back_()

    def __exit__(self, *_: object) -> None:
        for each in self._now:
            each.put_back_()
        self._now = []
