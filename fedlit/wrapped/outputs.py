"""Outputs of a user's module: of its forward, and what it logs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fedlit.federation.labels import TaskName
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
            f"(batch, {self.num_classes}), which num_classes sets: let forward give those"
        )


class LoggedNumbers(Component):
    """Numbers that clients' copies of a module log, reported by client when a round ends."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, list[Any]]] = {}

    def note(self, client: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``self.log`` of a client's copy."""
        numbers = self._numbers.setdefault(client, {}).setdefault(name, [])
        if isinstance(value, Metric):
            numbers[:] = [value]
        else:
            numbers.append(value.detach() if isinstance(value, Tensor) else float(value))

    def on_run_start(self, run: Run) -> None:
        """Forget what was logged in another run."""
        self._numbers = {}

    def on_round_end(self, run: Run) -> None:
        """Log the mean over the round's steps of each number, of each client under its name."""
        federation, logged, self._numbers = run.federation, self._numbers, {}
        if federation.channels.reports == "off":
            return
        own = {client: {name: _number(each) for name, each in numbers.items()} for client, numbers in logged.items()}
        names = {name for numbers in own.values() for name in numbers}
        received = federation.transport.all_gather(sorted(names), "names of logged numbers")
        everywhere = sorted({str(name) for each in received if isinstance(each, list) for name in each})
        if everywhere:
            reported = federation.report(own, everywhere)
            renamed = {
                client: {f"own_{name}" if name in _TAKEN else name: each for name, each in numbers.items()}
                for client, numbers in reported.items()
            }
            run.log(run.metric_names(renamed))


def _number(values: list[Any]) -> float:
    """Mean of a round's numbers, or what a metric comes to, which starts anew then."""
    if isinstance(values[0], Metric):
        number = float(values[0].compute())
        values[0].reset()
        return number
    return float(sum(float(each) for each in values)) / len(values)
