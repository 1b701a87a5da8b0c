"""Outputs of a user's module: of its forward, and what it logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fedlit.checks import check
from fedlit.federation import Channel
from fedlit.federation.labels import TaskName
from fedlit.federation.metrics import ORACLE
from fedlit.run.component import Component
from fedlit.run.run import Run

_TAKEN = ("loss", "grad_norm", "acc", "score", "r2", "rmse", "mae", "eval_loss")
"""Names under which fedlit logs numbers of clients."""


class Outputs(nn.Module):
    """What a module's ``forward`` gives, as logits of classes or as numbers, shape (batch, num_classes).

    For two classes, one logit of the second class for each sample, shape (batch,) or (batch, 1), will do: it stands
    beside a 0 for the first. ``name`` is the module's, for errors.
    """

    def __init__(self, num_classes: int, task: TaskName, name: str) -> None:
        super().__init__()
        self.num_classes, self.task, self.name = num_classes, task, name

    def forward(self, outputs: Any) -> Tensor:
        """Outputs of shape (batch, num_classes)."""
        if isinstance(outputs, Tensor):
            if outputs.ndim == 1:
                outputs = outputs.unsqueeze(1)
            if self.task == "classification" and self.num_classes == 2 and outputs.shape[1:] == (1,):
                outputs = torch.cat([torch.zeros_like(outputs), outputs], dim=1)
            if outputs.shape[1:] == (self.num_classes,):
                known: Tensor = outputs
                return known
        given = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        what = "logits" if self.task == "classification" else "numbers"
        raise TypeError(
            f"{self.name}.forward gives {given}; clients are evaluated, and the target predicted, with {what} of shape "
            f"(batch, {self.num_classes}), which num_classes sets: let forward give those, or leave num_classes out, "
            "and clients are evaluated by validation_step and test_step of the module alone"
        )


class LoggedNumbers(Component):
    """Numbers that clients' copies of a module log, reported by client when a round or an evaluation ends.

    Args:
        evaluates: Whether the module evaluates clients; then its numbers may be of hidden labels of the target.
        waits: Whether a hook at the end of an epoch may log, or read metrics that were logged.
    """

    def __init__(self, evaluates: bool, waits: bool = False) -> None:
        self._evaluates, self.waits = evaluates, waits
        self._unread: list[Metric] = []
        self._of_round: _Logged = {}
        self._of_evaluation: _Logged = {}

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Numbers of labels that no federation has."""
        return (ORACLE,) if self._evaluates else ()

    def note(
        self,
        client: str,
        size: int,
        name: str,
        value: Any,
        *args: Any,
        evaluates: bool = False,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Stand in for ``self.log`` of a client's copy that trains on ``size`` samples or evaluates them.

        Numbers of a round are weighed by samples with ``on_epoch`` alone, as by Lightning.
        """
        logged = self._of_evaluation if evaluates else self._of_round
        series = logged.setdefault(client, {}).setdefault(name, _Series(reduce_fx))
        series.add(value, (size if batch_size is None else batch_size) if evaluates or on_epoch else 1)

    def on_run_start(self, run: Run) -> None:
        """Forget what was logged in another run."""
        self._of_round = {}

    def on_round_start(self, run: Run) -> None:
        """Let metrics of the round before start anew, if no epoch has ended since."""
        self._reset_read()

    def on_round_end(self, run: Run) -> None:
        """Log the mean over the round's steps of each number, of each client under its name."""
        logged, of_round, self._of_round = _computed(self._of_round, reset=not self.waits), self._of_round, {}
        metrics = [series.metric for numbers in of_round.values() for series in numbers.values()]
        self._unread += [each for each in metrics if self.waits and each is not None]
        names = _names_everywhere(run, logged)
        if names:
            run.log(run.metric_names(_renamed(run.federation.report(logged, names))))

    def end_epoch(self, run: Run) -> None:
        """Log what a hook at the epoch's end has logged; metrics start anew."""
        self.on_round_end(run)
        self._reset_read()

    def _reset_read(self) -> None:
        for metric in self._unread:
            metric.reset()
        self._unread = []

    def start_evaluation(self) -> None:
        """Forget an evaluation that was interrupted."""
        self._of_evaluation = {}

    def end_evaluation(self, run: Run, reads_labels: bool) -> None:
        """Log the numbers of an evaluation by client, and the means over sources.

        Those of the target are an oracle if its labels were read; ``reads_labels`` is known to its process alone.
        """
        logged, self._of_evaluation = _computed(self._of_evaluation), {}
        if run.trainer.sanity_checking:
            return
        names = _names_everywhere(run, logged)
        if not names:
            return
        federation, target = run.federation, run.target
        oracle = {target.name: logged.pop(target.name)} if reads_labels and target.name in logged else {}
        reported = _renamed(federation.report(logged, names))
        means: dict[str, float] = {}  # first, as errors name some of what is logged
        for name in dict.fromkeys(name for row in reported.values() for name in row):
            of_sources = [row[name] for client, row in reported.items() if client != target.name and name in row]
            if of_sources:
                means[f"source/{name}"] = sum(of_sources) / len(of_sources)
        run.log({**means, **run.metric_names(reported)})
        hidden = _renamed(federation.report(oracle, names, channel=ORACLE.name)).get(target.name, {})
        run.log({f"oracle/target/{name}": value for name, value in hidden.items()}, target)


class _Series:
    """Numbers of one name at one client, or a metric that has counted by itself.

    Args:
        reduce: How Lightning's ``self.log`` reduces them: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, or torch's
            function of that name.
    """

    def __init__(self, reduce: Any) -> None:
        name = str(getattr(reduce, "__name__", reduce)).lower().replace("avg", "mean")
        check(name in _REDUCTIONS, "reduce_fx", f"one of {[*_REDUCTIONS]} in self.log", reduce)
        self._reduce = _REDUCTIONS[name]
        self.metric: Metric | None = None
        self._values: list[Any] = []
        self._weights: list[int] = []

    def add(self, value: Any, weight: int) -> None:
        if isinstance(value, Metric):
            self.metric = value
            return
        self._values.append(value.detach() if isinstance(value, Tensor) else float(value))
        self._weights.append(weight)

    def result(self, reset: bool) -> float:
        """Reduce them, weighted by samples; or compute the metric, which with ``reset`` starts anew then."""
        if self.metric is not None:
            number = float(self.metric.compute())
            if reset:
                self.metric.reset()
            return number
        return self._reduce([float(each) for each in self._values], self._weights)


_Logged: TypeAlias = dict[str, dict[str, _Series]]


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weight * each for weight, each in zip(weights, values, strict=True))
    return total / max(1, sum(weights))


_REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "mean": _mean,
    "sum": lambda values, weights: sum(values),
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
}


def _computed(logged: _Logged, reset: bool = True) -> dict[str, dict[str, float]]:
    return {client: {name: each.result(reset) for name, each in numbers.items()} for client, numbers in logged.items()}


def _names_everywhere(run: Run, logged: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the names that some process has numbers of; none where clients report nothing."""
    federation = run.federation
    if federation.channels.reports == "off":
        return []
    names = {name for numbers in logged.values() for name in numbers}
    received = federation.transport.all_gather(sorted(names), "names of logged numbers")
    return sorted({str(name) for each in received if isinstance(each, list) for name in each})


def _renamed(reported: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return reported numbers under names that are none of fedlit's."""
    return {
        client: {f"own_{name}" if name in _TAKEN else name: each for name, each in numbers.items()}
        for client, numbers in reported.items()
    }
