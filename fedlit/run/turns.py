"""Local steps of one client after the other, so that activations and gradients of one are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch.optim import Optimizer

if TYPE_CHECKING:
    from fedlit.run.run import Run

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SEEING_ALL = (
    *("backward", "on_before_backward", "on_after_backward", "on_before_zero_grad", "optimizer_zero_grad"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step"),
)
"""Hooks of a module or callback in which all clients' gradients are seen where clients take the step together."""

_MANY = 100
"""Groups of an optimiser beyond which a step is of those that are present alone."""

LARGE = 1_000_000
"""Trained numbers of a client from which on memory is worth the time that turns take, some 0.2 ms of each."""


def independent(function: _Function) -> _Function:
    """Mark ``losses`` or ``training_step`` whose losses of a client depend on no other client's batch or weights.

    A method that overrides it, as to exchange within a step, has the mark only if it is given anew.
    """
    function.independent = True  # type: ignore[attr-defined]
    return function


class Turns:
    """Whose turn it is in a local step; steps taken in turns are bit for bit those taken together.

    Attributes:
        client: Name of the client whose turn it is; ``None`` where all local clients take the step together.
        is_first: Whether it is the first turn of the step.
        is_last: Whether it is the last one.
        unfinished: Clients that have taken a step which has failed before it was another one's turn.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._large: dict[int, bool] = {}  # by identity of an optimiser
        self._names: set[str] = set()  # of clients in the last step
        self._sees_all: bool | None = None
        self.unfinished: list[str | None] = []
        self.client: str | None = None
        self.is_first = self.is_last = True

    def start_(self) -> None:
        """Begin a run."""
        self._large.clear()
        self._names.clear()
        self._sees_all = None
        self.unfinished = []

    def own(self, batch: Mapping[str, Sequence[Any]]) -> Mapping[str, Sequence[Any]]:
        """Return the samples of ``batch`` that the step is taken on now."""
        return batch if self.client is None else {name: batch[name] for name in (self.client,) if name in batch}

    def of(self, optimizer: Optimizer) -> list[str | None]:
        """Return the clients that take turns in a step of an optimiser, in roster order; one ``None`` is all together.

        They do where their losses are `independent`, their networks large, the optimiser one of torch's, and neither a
        scaler of half precision decides on the step of all nor a hook from elsewhere sees the gradients of all.
        """
        run = self._run
        separate = getattr(run.phase().losses, "independent", False)
        separate = separate and getattr(run.module.training_step, "independent", False)
        scales = getattr(run.trainer.precision_plugin, "scaler", None) is not None
        if not separate or scales or run.stacked is not None or not run.module.automatic_optimization:
            return [None]
        if self._sees_all is None:
            self._sees_all = _sees_all(run)
        if self._sees_all or not _is_torch_s(optimizer):
            return [None]
        local = [client.name for client in run.present_learners() if run.federation.is_local(client)]
        has_all = {group["client"] for group in optimizer.param_groups} >= {*local}
        return [*local] if has_all and len(local) > 1 and self._is_large(optimizer) else [None]

    def _is_large(self, optimizer: Optimizer) -> bool:
        if id(optimizer) not in self._large:
            numbers: dict[str, int] = {}
            for group in optimizer.param_groups:
                numbers[group["client"]] = numbers.get(group["client"], 0) + sum(p.numel() for p in group["params"])
            self._large[id(optimizer)] = max(numbers.values(), default=0) >= LARGE
        return self._large[id(optimizer)]

    @contextmanager
    def take(self, optimizer: Optimizer, names: Sequence[str | None]) -> Iterator[Iterator[str | None]]:
        """Give each client in turn an optimiser of its groups alone; its gradients go when its turn ends."""
        everybody = optimizer.param_groups
        try:
            yield self._each(optimizer, self._there(optimizer), names)
        except BaseException:
            self.unfinished = list(names[: names.index(self.client)]) if self.client in names else []
            raise
        finally:
            optimizer.param_groups, self.client = everybody, None
            self.is_first = self.is_last = True

    def _there(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return, of many groups, those of the clients that train in this round; gradients of others go.

        So that a step costs by those who are present. Without any, all of them.
        """
        everybody = optimizer.param_groups
        if len(everybody) <= _MANY or not _is_torch_s(optimizer):
            return everybody
        names = {client.name for client in self._run.present_learners()}
        there = [group for group in everybody if group["client"] in names] or everybody
        gone, self._names = self._names - names, names
        for group in everybody if gone else ():
            for param in group["params"] if group["client"] in gone else ():
                param.grad = None
        return there

    def _each(
        self, optimizer: Optimizer, there: list[dict[str, Any]], names: Sequence[str | None]
    ) -> Iterator[str | None]:
        # of Lightning's, in checkpoints: processes that host other numbers of clients count alike
        counted = self._run.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
        for place, name in enumerate(names):
            before = counted.state_dict()
            self.client, self.is_first, self.is_last = name, place == 0, place == len(names) - 1
            optimizer.param_groups = [group for group in there if name in (None, group["client"])]
            yield name
            if name is not None:
                optimizer.zero_grad(set_to_none=True)
            if not self.is_last:
                counted.load_state_dict(before)


def _is_torch_s(optimizer: Optimizer) -> bool:
    """Whether an optimiser goes by parameters alone: others may count steps, or keep lists in the order of groups."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _sees_all(run: Run) -> bool:
    """Whether a module or callback that is not fedlit's or Lightning's has a hook in which gradients are seen."""
    callbacks: list[object] = list(run.trainer.callbacks)  # type: ignore[attr-defined]
    hooks = (getattr(type(each), name, None) for each in (run.module, *callbacks) for name in _SEEING_ALL)
    return any(not str(hook.__module__).startswith(("fedlit.", "lightning.")) for hook in hooks if hook is not None)
