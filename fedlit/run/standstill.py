"""Check that local steps change weights: a copy that runs another network's weights trains nothing."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fedlit.federation import Client, NotTrainedError
from fedlit.run.run import Run

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by the size of an element in bytes."""


class Standstill:
    """Watch local clients from a run's start until a weight of each has changed.

    Unchanged weights are an error in the first round in which the client took local steps, if the optimiser holds none
    of them, a module that steps by itself took no step, or steps had no gradient of any though the loss has one, or
    changed nothing at a rate that no schedule has lowered. What may be intended is none: a rate of 0, a warm-up of the
    rate, a loss of 0, as of a weight of 0, frozen features of a target without labels, or steps that a scaler of half
    precision skips. The next round is watched then, and the run's end warns.
    """

    def __init__(self, run: Run, optimizers: Sequence[Optimizer]) -> None:
        self._trainable = {c.name: _trainable(run.replicas[c]) for c in run.federation.local_clients}
        self._waiting = {name: None for name, params in self._trainable.items() if params}  # in roster order
        self._trained: set[str] = set()
        target, self._put_away = run.target, run.release
        own = run.replicas[target].parameters() if target.name in self._trainable and not run.uses_target_labels else ()
        # a loss without labels moves features alone: at a target whose extractor is frozen, nothing may be left to move
        self._excused = {target.name} if any(not param.requires_grad for param in own) else set[str]()
        self._by_itself = not run.module.automatic_optimization
        self._stepped: set[str] = set()
        self._rates: dict[str, float] = {}  # of clients that have stepped at full rates
        self._reached: set[str] = set()
        self._before: dict[str, tuple[list[int], list[int]]] = {}
        self._hooks: list[RemovableHandle] = []
        self.watch_(optimizers)

    def watch_(self, optimizers: Sequence[Optimizer]) -> None:
        """Watch the steps of these optimisers alone."""
        for hook in self._hooks:
            hook.remove()
        self._optimised = {id(param) for each in optimizers for group in each.param_groups for param in group["params"]}
        self._hooks = [each.register_step_post_hook(self._note_step) for each in optimizers if self._waiting]

    def start_round_(self, learners: Iterable[Client]) -> None:
        """Note the weights that the local steps of these clients start from."""
        waiting = [client.name for client in learners if client.name in self._waiting]
        self._before.clear()
        for name in waiting:
            self._before[name] = (_sums(self._trainable[name]), _writes(self._trainable[name]))
            self._put_away(name)
        self._stepped.clear()
        self._rates.clear()
        self._reached.clear()

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        for name in {group.get("client", "") for group in optimizer.param_groups} & self._before.keys():
            if name not in self._reached and any(param.grad is not None for param in self._trainable[name]):
                self._reached.add(name)
        overflow = getattr(optimizer, "found_inf", None)  # a scaler lets fused optimisers skip a step by themselves
        if overflow is not None and bool(overflow):
            return
        for group in optimizer.param_groups:
            name, rate = group.get("client", ""), group.get("lr")
            self._stepped.add(name)
            if rate is not None and rate > 0 and rate >= group.get("initial_lr", rate):
                self._rates[name] = max(float(rate), self._rates.get(name, 0.0))

    def check_(
        self, losses: Mapping[str, float], with_graph: Collection[str], round_idx: int
    ) -> NotTrainedError | None:
        """Return an error if local steps of clients with a loss train nothing.

        Args:
            losses: By client, of the round.
            with_graph: Clients whose loss has a gradient.
            round_idx: For the message.
        """
        for name in [name for name in self._before if name in losses]:
            self._trained.add(name)
            params, (sums, writes) = self._trainable[name], self._before[name]
            now = _sums(params)
            self._put_away(name)
            if now != sums:
                del self._waiting[name]
                continue
            if _writes(params) != writes:  # of a module that clears its gradients after each step, at a rate of 0
                self._reached.add(name)
            if not any(id(param) in self._optimised for param in params):
                why = "the optimizer has none of them: build its groups with client_param_groups()"
            elif self._by_itself and name not in self._stepped:
                why = (
                    "training_step has stepped no optimizer (automatic_optimization = False): call step() of "
                    "self.optimizers() in every round, of which local_steps of the strategy sets the length"
                )
            elif name in self._stepped and name in with_graph and name not in self._reached:
                why = (
                    "no gradient reaches its copy of the networks. Causes: a forward that is bound to another network "
                    "(a function compiled or traced before, a lambda or closure that holds a module), or a loss "
                    "without them. Give networks uncompiled or as torch.compile(network), keep modules as attributes "
                    "of modules, and freeze what is not to be trained (requires_grad_(False))"
                )
            elif name in self._rates and (losses[name] or self._by_itself) and name not in self._excused:
                why = (
                    f"its gradients are 0, or too small to change a weight at the learning rate {self._rates[name]:g}. "
                    "Causes: units that are dead or saturated, a loss that is constant in the weights, inputs that are "
                    "all 0, gradients clipped to almost 0, or a rate far too low. Raise the rate, scale inputs, "
                    "or mend the loss"
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
        """Warn of clients that took local steps in the run without a change of their weights."""
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
    """Return torch's count of writes to each tensor; fused optimizers are not counted."""
    return [param._version for param in params]


@torch.no_grad()
def _sums(params: Sequence[Tensor]) -> list[int]:
    """Sum the bits of each tensor, which differs where a value has changed."""
    values = [torch.view_as_real(param) if param.is_complex() else param for param in params]
    integers = [each.detach().view(_INTEGERS[each.element_size()]) for each in values]
    return [int(each.sum(dtype=torch.int64)) for each in integers]


def _trainable(replica: nn.Module) -> list[Tensor]:
    """Return trained parameters; tensors of other classes may have no bits to compare."""
    params = [param for param in replica.parameters() if param.requires_grad]
    return [param for param in params if type(param) is nn.Parameter and param.layout is torch.strided]
