"""Networks that run a second time in the backward pass, so that no activations are kept until then."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedlit.checks import refuse


def recompute_(replica: nn.Module) -> None:
    """Let the extractors in a replica keep their inputs alone for the backward pass, which runs them again.

    The second call has the random numbers, weights and modes of the first. Gradients are the same to the last bit, and
    buffers change once. Layers draw from torch's own generators; what they keep beside parameters and buffers is as the
    first call leaves it.

    Args:
        replica: Changed in place; state dicts and copies are as before.

    Raises:
        ValueError: If an extractor is compiled.
    """
    inside: set[nn.Module] = set()
    for module in replica.modules():
        extractor = getattr(module, "extractor", None)
        if not isinstance(extractor, nn.Module) or extractor in inside:
            continue
        if "forward" in vars(extractor) or isinstance(extractor, torch.jit.ScriptModule):
            way_out = "give the network that it was made of"
            refuse("recompute", "False with an extractor that is compiled", type(extractor).__name__, way_out)
        inside.update(extractor.modules())
        extractor.forward = _Recomputed(extractor)


class _Recomputed:
    """The ``forward`` of a network; a class, so that copies and pickles have their own network."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(type(self.network).forward, self.network)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        states = [_State.of(module) for module in self.network.modules()]
        copied = [replace(each, buffers=each.copies()) for each in states]

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _AsBefore(copied)

        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


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

    def copies(self) -> dict[str, Tensor | None]:
        return {name: None if each is None else each.clone() for name, each in self.buffers.items()}

    def put_back_(self, buffers: dict[str, Tensor | None]) -> None:
        self.module.training = self.training
        self.module._parameters.update(self.params)
        self.module._buffers.update(buffers)


class _AsBefore:
    """Within it, modules have what they had, and copies of their buffers; entered once for each backward pass."""

    def __init__(self, states: Sequence[_State]) -> None:
        self._states = states
        self._now: list[_State] = []

    def __enter__(self) -> None:
        self._now = [_State.of(each.module) for each in self._states]
        for each in self._states:
            each.put_back_(each.copies())

    def __exit__(self, *_: object) -> None:
        for each in self._now:
            each.put_back_(each.buffers)
        self._now = []
