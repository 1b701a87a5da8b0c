"""Evaluation by a user's module: its validation_step and test_step, and their hooks, of each client's copy."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from fedlit.federation import Client, GuardedLabels, reveal_for_oracle
from fedlit.federation.batch_parts import whole
from fedlit.federation.labels import with_known_labels
from fedlit.federation.nested import num_samples
from fedlit.module import Batch, FederatedModule
from fedlit.run.tasks import Unscored
from fedlit.wrapped.outputs import LoggedNumbers

Stage = Literal["validation", "test"]

Log = Callable[..., None]
"""What stands in for ``self.log`` of a client's copy."""


class SelfEvaluated(FederatedModule):
    """Evaluates clients by ``validation_step`` and ``test_step`` of their copies of a module.

    Whether evaluation reads labels of the target is tried on its first batch, with a copy of the copy and labels that
    refuse to be read. A step that fails so is given the samples with known labels, and its numbers are an oracle;
    another one never receives the labels.
    """

    _logged: LoggedNumbers
    _stepped: set[str]
    """Local clients that have evaluated a batch in the evaluation under way."""

    _reads_labels: dict[str, bool]
    """By stage, whether its step reads labels of the target; of the target's process."""

    @abstractmethod
    def at_work(
        self, client: Client | str, log: Log | None = None, module: pl.LightningModule | None = None
    ) -> AbstractContextManager[pl.LightningModule]:
        """Give a local client's copy of the module as if the Trainer had it alone."""

    def evaluates(self, stage: Stage) -> bool:
        """Return whether the module has a step of a stage."""
        return is_overridden(f"{stage}_step", self.originals[0], pl.LightningModule)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return local clients' outputs, if they have a set form, and call ``validation_step`` of their copies."""
        return self._evaluate("validation", batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return local clients' outputs, if they have a set form, and call ``test_step`` of their copies."""
        return self._evaluate("test", batch, batch_idx)

    def _evaluate(self, stage: Stage, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        outputs = {} if isinstance(self.task, Unscored) else super().validation_step(batch, batch_idx)
        if self.evaluates(stage):
            able = [client.name for client in self.clients if client.name in batch and self.can_predict(client)]
            ready = {name: batch[name] for name in able}
            reads = self._reads_labels.get(stage)
            if self.target.name in ready and reads is None:
                reads = self._try_step(stage, ready[self.target.name], batch_idx)
                self._reads_labels[stage] = reads
            if self.target.name in ready and reads:
                inputs, labels, *others = ready[self.target.name]
                known = with_known_labels([inputs, reveal_for_oracle(labels), *others])
                ready = {**ready, self.target.name: known}
            for client, samples in self.run.in_streams(ready, f"{stage} {batch_idx}"):
                if num_samples(samples):
                    self._stepped.add(client.name)
                    self._call_step(stage, client, samples, batch_idx)
        return outputs

    def _call_step(self, stage: Stage, client: Client, samples: Sequence[Any], batch_idx: int) -> None:
        log = partial(self._logged.note, client.name, num_samples(samples), evaluates=True)
        with self.at_work(client, log) as module:
            _step_with_hooks(module, stage, samples, batch_idx)

    def _try_step(self, stage: Stage, samples: Sequence[Any], batch_idx: int) -> bool:
        """Return whether evaluating the target reads labels: try with none, on a copy that logs nothing."""
        if len(samples) < 2 or not isinstance(samples[1], GuardedLabels):
            return len(samples) > 1
        try:
            tried: Any = copy.deepcopy(self.replicas[self.target].get_submodule("extractor"))
            streams: Any = self.run.in_streams({self.target.name: samples}, f"{stage} {batch_idx}")
            with closing(streams), self.at_work(self.target, _log_nothing, tried) as module:
                for _ in streams:
                    _step_with_hooks(module, stage, samples, batch_idx)
                    getattr(module, f"on_{stage}_epoch_end")()  # which may read labels that steps have collected
        except Exception:  # of any type, as a compiled step wraps it; if it is another error, the step itself raises it
            return True
        return False

    # ---------------------------------------------------------------- hooks

    def call_copies(self, hook: str, clients: Collection[str] | None = None, evaluates: bool = False) -> None:
        """Call a hook of local clients' copies, of all or of some."""
        local = [client.name for client in self.federation.local_clients]
        chosen = [name for name in local if clients is None or name in clients]
        for client, _ in self.run.in_streams({name: () for name in chosen}, hook):
            log = partial(self._logged.note, client.name, 1, evaluates=True) if evaluates else None
            with self.at_work(client, log) as module:
                getattr(module, hook)()

    def _start(self, stage: Stage, hook: str) -> None:
        if self.evaluates(stage):
            self.call_copies(hook, evaluates=True)

    def _end(self, stage: Stage, hook: str) -> None:
        if self.evaluates(stage):
            self.call_copies(hook, self._stepped, evaluates=True)

    def on_validation_start(self) -> None:
        """Of each client's copy of the module."""
        self._start("validation", "on_validation_start")

    def on_validation_epoch_start(self) -> None:
        """Of each client's copy of the module."""
        self._start_epoch()
        self._start("validation", "on_validation_epoch_start")

    def on_validation_epoch_end(self) -> None:
        """Of each copy that has evaluated samples; then numbers that copies have logged are logged."""
        self._end("validation", "on_validation_epoch_end")
        self._end_epoch("validation")

    def on_validation_end(self) -> None:
        """Of each copy that has evaluated samples."""
        self._end("validation", "on_validation_end")

    def on_test_start(self) -> None:
        """Of each client's copy of the module."""
        super().on_test_start()
        self._start("test", "on_test_start")

    def on_test_epoch_start(self) -> None:
        """Of each client's copy of the module."""
        self._start_epoch()
        self._start("test", "on_test_epoch_start")

    def on_test_epoch_end(self) -> None:
        """Of each copy that has evaluated samples; then numbers that copies have logged are logged."""
        self._end("test", "on_test_epoch_end")
        self._end_epoch("test")

    def on_test_end(self) -> None:
        """Of each copy that has evaluated samples."""
        self._end("test", "on_test_end")

    def _start_epoch(self) -> None:
        self._stepped.clear()
        self._logged.start_evaluation()

    def _end_epoch(self, stage: Stage) -> None:
        if self.evaluates(stage):
            self._logged.end_evaluation(self.run, self._reads_labels.get(stage, True))


def call_step(module: pl.LightningModule, name: str, samples: Any, batch_idx: int) -> Any:
    """Call a step of a module with as many of batch, its index and that of the only loader as it takes."""
    step = getattr(module, name)
    params = inspect.signature(step).parameters.values()
    taken = [each for each in params if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    return step(*(samples, batch_idx, 0)[: len(taken)])


def _step_with_hooks(module: pl.LightningModule, stage: Stage, samples: Sequence[Any], batch_idx: int) -> None:
    batch = whole(samples)
    getattr(module, f"on_{stage}_batch_start")(batch, batch_idx)
    given = call_step(module, f"{stage}_step", batch, batch_idx)
    getattr(module, f"on_{stage}_batch_end")(given, batch, batch_idx)


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for ``self.log``."""
