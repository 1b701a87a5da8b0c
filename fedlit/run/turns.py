"""Local steps of one client after the other, so that activations and gradients of one are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch.optim import Optimizer

from fedlit.federation import Client
from fedlit.run.param_groups import MANY

if TYPE_CHECKING:
    from fedlit.run.run import Run

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SEEING_ALL = (
    *("backward", "on_before_backward", "on_after_backward", "on_before_zero_grad", "optimizer_zero_grad"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step"),
)
"""Hooks of a module or callback in which all clients' gradients are seen where clients take the step together."""

_There = tuple[Sequence[Client], list[dict[str, Any]], list[dict[str, Any]]]
"""Clients that train, all groups of an optimiser, and those of the clients."""

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
        has_zeroed: Whether gradients were set to None before the turns, so that Lightning is not to do it after them.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pays = False
        self._there_now: _There = ((), [], [])  # in the last step
        self.unfinished: list[str | None] = []
        self.client: str | None = None
        self.is_first = self.is_last = True
        self.has_zeroed = False

    def start_(self) -> None:
        """Begin a run."""
        self._pays = _is_large(self._run) and not _sees_all(self._run)
        self._there_now = ((), [], [])
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
        if not self._pays or not _is_torch_s(optimizer):
            return [None]
        separate = getattr(run.phase().losses, "independent", False)
        separate = separate and getattr(run.module.training_step, "independent", False)
        scales = getattr(run.trainer.precision_plugin, "scaler", None) is not None
        if not separate or scales or run.stacked is not None or not run.module.automatic_optimization:
            return [None]
        local = [client.name for client in run.present_learners() if run.federation.is_local(client)]
        has_all = {group["client"] for group in optimizer.param_groups} >= {*local}
        return [*local] if has_all and len(local) > 1 else [None]

    @contextmanager
    def take(self, optimizer: Optimizer, names: Sequence[str | None], place: int) -> Iterator[None]:
        """Let one of the clients `of` a step take it, with an optimiser of its groups alone; its gradients go then."""
        # of Lightning's, in checkpoints: processes that host other numbers of clients count alike
        counted = self._run.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
        with self._turn(names, place):
            before = None if self.is_last else counted.state_dict()
            own = self._there if self.client is None else self._of_client
            try:
                with stepping(optimizer, own(optimizer)):
                    yield
                    if self.client is not None:
                        optimizer.zero_grad(set_to_none=True)
                        if self._run.offload is not None:
                            self._run.offload.keep_states_(optimizer)
                            self._run.release(self.client)
                if before is not None:
                    counted.load_state_dict(before)
            except BaseException:
                self.unfinished = list(names[:place])
                raise

    def accumulate(
        self,
        optimizer: Optimizer,
        is_first: bool,
        training_step: Callable[[], Any],
        backward: Callable[[Any], object],
    ) -> Any:
        """Return the loss of a batch whose gradients wait for those of the next one, with the last client's graph.

        The graphs of the other clients `of` the step are gone by then. Gradients of all stay, as they are added up.

        Args:
            optimizer: Of all local clients.
            is_first: Whether it is the first of the batches, before which there are no gradients.
            training_step: Gives the loss of those whose turn it is.
            backward: Adds the gradients of that loss up.
        """
        names = self.of(optimizer)
        self.has_zeroed = is_first and len(names) > 1
        if self.has_zeroed:
            optimizer.zero_grad(set_to_none=True)
        for place in range(len(names)):
            with self._turn(names, place):
                loss = training_step()
                if not self.is_last:
                    backward(loss)
        return loss

    @contextmanager
    def _turn(self, names: Sequence[str | None], place: int) -> Iterator[None]:
        self.client, self.is_first, self.is_last = names[place], place == 0, place == len(names) - 1
        try:
            yield
        finally:
            self.client, self.is_first, self.is_last = None, True, True

    def _of_client(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        return [group for group in optimizer.param_groups if group["client"] == self.client]

    def _there(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return, of many groups, those of the clients that train in this round; gradients of others go.

        So that a step costs by those who are present. Without any, all of them.
        """
        everybody = optimizer.param_groups
        if len(everybody) <= MANY or not _is_torch_s(optimizer):
            return everybody
        learners = self._run.present_learners()
        if self._there_now[0] is not learners or self._there_now[1] is not everybody:  # looked up once for a round
            names = {client.name for client in learners}
            there = [group for group in everybody if group["client"] in names] or everybody
            gone = {client.name for client in self._there_now[0]} - names
            for group in everybody if gone else ():
                for param in group["params"] if group["client"] in gone else ():
                    param.grad = None
            self._there_now = learners, everybody, there
        return self._there_now[2]


@contextmanager
def stepping(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Within it, an optimiser has some of its groups alone."""
    everybody = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        yield
    finally:
        optimizer.param_groups = everybody


def _is_large(run: Run) -> bool:
    sizes = (
        sum(param.numel() for param in run.replicas[client].parameters() if param.requires_grad)
        for client in run.federation.local_clients
    )
    return any(size >= LARGE for size in sizes)


def _is_torch_s(optimizer: Optimizer) -> bool:
    """Whether an optimiser goes by parameters alone: others may count steps, or keep lists in the order of groups."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _sees_all(run: Run) -> bool:
    """Whether a module or callback that is not fedlit's or Lightning's has a hook in which gradients are seen."""
    callbacks: list[object] = list(run.trainer.callbacks)  # type: ignore[attr-defined]
    hooks = (getattr(type(each), name, None) for each in (run.module, *callbacks) for name in _SEEING_ALL)
    return any(not str(hook.__module__).startswith(("fedlit.", "lightning.")) for hook in hooks if hook is not None)
