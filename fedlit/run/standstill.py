"""Whether local steps train: in the first round in which a client takes any, some weight of its copy has to change.

A copy whose forward runs the weights of another network trains nothing, and its losses look like those of training.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlit.federation import Client, NotTrainedError
from fedlit.run.run import Run

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element in bytes."""


class Standstill:
    """Watches local clients from a run's start until a weight of each has changed.

    Unchanged weights are an error if the optimiser took steps without a gradient of any of them, though the loss has
    one, or if the optimiser has none of them. Other causes may be intended: gradients or a learning rate of 0, steps
    that are yet to come where a module accumulates gradients, a loss of frozen features alone. If weights never change,
    the run's end warns.

    Args:
        run: Whose clients are watched.
        optimizers: Of the run.
    """

    def __init__(self, run: Run, optimizers: Sequence[Optimizer]) -> None:
        self._trainable = {c.name: _trainable(run.replicas[c]) for c in run.federation.local_clients}
        self._optimised = {id(param) for each in optimizers for group in each.param_groups for param in group["params"]}
        self._waiting = [name for name, params in self._trainable.items() if params]
        self._trained: set[str] = set()
        self._stepped: set[str] = set()
        self._reached: set[str] = set()
        self._before: dict[str, tuple[list[int], list[int]]] = {}
        self._hooks = [each.register_step_post_hook(self._note_step) for each in optimizers if self._waiting]

    def start_round_(self, learners: Iterable[Client]) -> None:
        """Note the weights that the local steps of these clients start from."""
        waiting = [client.name for client in learners if client.name in self._waiting]
        self._before = {name: (_sums(self._trainable[name]), _writes(self._trainable[name])) for name in waiting}
        self._stepped.clear()
        self._reached.clear()

    def note_gradients_(self) -> None:
        """Note who has a gradient, after a local step; call it after each."""
        for name in self._before:
            if name not in self._reached and any(param.grad is not None for param in self._trainable[name]):
                self._reached.add(name)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.update(group.get("client", "") for group in optimizer.param_groups)

    def check_(self, clients: Collection[str], with_graph: Collection[str], round_idx: int) -> NotTrainedError | None:
        """Return an error if a client's local steps, which a round ended with, train nothing.

        Args:
            clients: Names of local clients that took local steps in it.
            with_graph: Those of which a loss had a gradient by something.
            round_idx: The round.
        """
        for name in [name for name in self._before if name in clients]:
            self._trained.add(name)
            params, (sums, writes) = self._trainable[name], self._before[name]
            if _sums(params) != sums:
                self._waiting.remove(name)
                continue
            if _writes(params) != writes:  # of a module that clears its gradients after each step, at a rate of 0
                self._reached.add(name)
            if not any(id(param) in self._optimised for param in params):
                why = "the optimizer has none of them: build its groups with client_param_groups()"
            elif name in self._stepped and name in with_graph and name not in self._reached:
                why = (
                    "no gradient reaches its copy of the networks. Causes: a forward that is bound to another network "
                    "(a function compiled or traced before, a lambda or closure that holds a module), or a loss "
                    "without them. Give networks uncompiled or as torch.compile(network), keep modules as attributes "
                    "of modules, and freeze what is not to be trained (requires_grad_(False))"
                )
            else:
                continue
            return NotTrainedError(
                f"no weight of client {name!r} changed in its local steps of round {round_idx}: {why}"
            )
        if not self._waiting:
            self._release()
        return None

    def end_(self) -> None:
        """Warn of clients that took local steps in the run and have none of their weights changed."""
        still = [name for name in self._waiting if name in self._trained]
        if still:
            warnings.warn(
                f"no local step of this run changed a weight of {still}: the learning rate or all gradients were 0, no "
                "step was taken, or losses depend on frozen weights alone",
                stacklevel=2,
            )
        self._release()

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._before = [], {}


def _writes(params: Sequence[Tensor]) -> list[int]:
    """How often each was written to, as far as torch counts it: fused optimizers are not counted."""
    return [param._version for param in params]


@torch.no_grad()
def _sums(params: Sequence[Tensor]) -> list[int]:
    """A sum over the bits of each, which differs where a value has changed."""
    values = [torch.view_as_real(param) if param.is_complex() else param for param in params]
    integers = [each.detach().view(_INTEGERS[each.element_size()]) for each in values]
    return [int(each.sum(dtype=torch.int64)) for each in integers]


def _trainable(replica: nn.Module) -> list[Tensor]:
    """Parameters that are trained; tensors of other classes may have no bits to look at."""
    params = [param for param in replica.parameters() if param.requires_grad]
    return [param for param in params if type(param) is nn.Parameter and param.layout is torch.strided]
