"""Tasks, classification and regression: loss, predictions and metrics."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from fedlit.checks import check, check_at_least, check_one_of
from fedlit.federation import UNLABELLED, Client
from fedlit.federation.labels import TaskName, known_labels
from fedlit.functional import information_score

if TYPE_CHECKING:
    from fedlit.run.outputs import LabelScale

_ROUNDING = 1e-3
"""Tolerance for the sum 1 of a row of probabilities."""

ClassWeights: TypeAlias = Literal["balanced"] | Sequence[float] | None


def _checked(class_weights: object, num_classes: int) -> Tensor:
    numbers = class_weights if isinstance(class_weights, Sequence) and not isinstance(class_weights, str) else ()
    fits = len(numbers) == num_classes and all(isinstance(each, int | float) and 0 <= each < inf for each in numbers)
    rule = f"'balanced', or {num_classes} finite numbers (num_classes) of at least 0, not all 0"
    check(fits and any(numbers), "class_weights", rule, class_weights)
    return torch.tensor(numbers, dtype=torch.float64)


class Meter(Protocol):
    """Evaluation of one client, batch by batch."""

    def update(self, outputs: Tensor, labels: Any) -> None:
        """Count a batch; a target's labels are not read."""

    def compute(self) -> dict[str, float]:
        """Return the metrics, by name."""


class Classification:
    """Logits of classes.

    Args:
        num_classes: Number of classes C, at least 2.
        class_weights: Factors of the losses by class, C numbers of at least 0, not all 0; ``"balanced"`` takes each
            client's labels, with a mean of 1 over its samples; ``None`` weighs none.

    Attributes:
        metrics: Names of what meters compute.
        means: Those of which the mean over sources is logged too.

    Raises:
        ValueError: If there are fewer classes, or the weights do not fit them.
    """

    metrics: tuple[str, ...] = ("acc", "eval_loss", "score")
    means = ("acc",)

    def __init__(self, num_classes: int, class_weights: ClassWeights = None) -> None:
        check_at_least("num_classes", num_classes, 2)
        self.num_classes = self.num_outputs = num_classes
        self.balanced = class_weights == "balanced"
        self._weights = None if self.balanced or class_weights is None else _checked(class_weights, num_classes)
        self._balanced: dict[str, Tensor] = {}

    def balance_(self, client: str, counts: Tensor) -> None:
        """Weigh a client's classes by its counts of labelled training samples, shape (C,).

        A class of n_c of n samples weighs n / (k n_c) for the k classes of the client, and an empty one 0.
        """
        there = counts > 0
        weights = counts.sum() / (there.sum() * counts.clamp(min=1)).double()
        self._balanced[client] = torch.where(there, weights, 0.0)

    def loss(self, client: Client, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over one client's labelled samples, a scalar.

        With class weights the mean is still over samples: weights would cancel out in batches of one class.
        """
        weights = self._balanced.get(client.name) if self.balanced else self._weights
        if weights is not None:
            total = F.cross_entropy(outputs, labels, weights.to(outputs), ignore_index=UNLABELLED, reduction="sum")
            return torch.div(total, (labels != UNLABELLED).sum().clamp(min=1))
        if not client.is_target:
            return F.cross_entropy(outputs, labels)
        total = F.cross_entropy(outputs, labels, ignore_index=UNLABELLED, reduction="sum")
        return torch.div(total, (labels != UNLABELLED).sum().clamp(min=1))

    def standardised(self, client: str, samples: Sequence[Any]) -> Sequence[Any]:
        """Return a client's inputs and labels as its loss reads them: unchanged."""
        return samples

    def in_unit(self, client: str, outputs: Tensor) -> Tensor:
        """Return a client's outputs unchanged: logits have no unit."""
        return outputs

    def predictions(self, outputs: Tensor, temperature: float = 1.0) -> Tensor:
        """Return class probabilities, shape (batch, C), of logits that are divided by a positive temperature."""
        return (outputs if temperature == 1 else outputs / temperature).softmax(dim=1)

    def meter(self, is_target: bool, device: torch.device) -> Meter:
        """Return a meter: accuracy and loss of a source, a label-free score of the target."""
        return _ScoreMeter(self.num_classes, device) if is_target else _ClassMeter(self.num_classes, device)


class Regression:
    """Numbers, which networks learn standardised where a client has a `LabelScale`.

    Args:
        num_outputs: Numbers to predict for a sample, at least 1.

    Attributes:
        metrics: As of `Classification`; of several outputs also those of each, as ``rmse/INDEX``.
        means: As of `Classification`.
        scales: By local client, its scale of labels; none before a run, or with ``scale_labels=False``.

    Raises:
        ValueError: If it is less.
    """

    means = ("r2", "rmse", "mae")

    def __init__(self, num_outputs: int) -> None:
        check_at_least("num_classes", num_outputs, 1, "output with task='regression'")
        self.num_outputs = num_outputs
        each = [f"{name}/{index}" for index in range(num_outputs if num_outputs > 1 else 0) for name in self.means]
        self.metrics: tuple[str, ...] = (*self.means, "eval_loss", *each)
        self.scales: dict[str, LabelScale] = {}

    def loss(self, client: Client, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error over one client's labelled samples and outputs, a scalar without unit.

        Labels are `standardised`, of shape (batch,) or (batch, k).
        """
        labels = labels.reshape(outputs.shape).to(outputs.dtype)
        if not client.is_target:
            return F.mse_loss(outputs, labels)
        known = known_labels(labels)
        errors = torch.where(known[:, None], outputs - labels, 0.0)  # 0 before squaring: no NaN reaches a gradient
        return errors.square().mean(dim=1).sum() / known.sum().clamp(min=1)

    def standardised(self, client: str, samples: Sequence[Any]) -> Sequence[Any]:
        """Return a client's inputs and its labels, less their mean and over their deviation.

        Without a scale, or where labels are not available, they are unchanged.
        """
        inputs, labels, *others = samples
        if client not in self.scales or not isinstance(labels, Tensor):
            return samples
        return (inputs, self.scales[client].standardised(labels), *others)

    def in_unit(self, client: str, outputs: Tensor) -> Tensor:
        """Return a client's outputs in the labels' unit, shape (batch, k), float64."""
        return self.scales[client].in_unit(outputs) if client in self.scales else outputs.double()

    def predictions(self, outputs: Tensor, temperature: float = 1.0) -> Tensor:
        """Return outputs in the labels' unit, shape (batch, k), which have no temperature."""
        return outputs

    def meter(self, is_target: bool, device: torch.device) -> Meter:
        """Return a meter: R2 and errors of a source, nothing of the target."""
        return _Nothing() if is_target else NumberMeter()


class Unscored:
    """Outputs of any form, which the module that makes them evaluates by itself.

    Attributes:
        metrics: None, see `Classification`.
        means: Likewise.
    """

    metrics: tuple[str, ...] = ()
    means: tuple[str, ...] = ()
    num_outputs = 0

    def loss(self, client: Client, outputs: Tensor, labels: Tensor) -> Tensor:
        """Refuse, as the module has a loss of its own."""
        raise NotImplementedError

    def standardised(self, client: str, samples: Sequence[Any]) -> Sequence[Any]:
        """Return a client's samples unchanged."""
        return samples

    def in_unit(self, client: str, outputs: Any) -> Any:
        """Return outputs unchanged."""
        return outputs

    def predictions(self, outputs: Any, temperature: float = 1.0) -> Any:
        """Return outputs unchanged."""
        return outputs

    def meter(self, is_target: bool, device: torch.device) -> Meter:
        """Return a meter of nothing."""
        return _Nothing()


Task: TypeAlias = Classification | Regression | Unscored


def make_task(name: TaskName, num_outputs: int, class_weights: ClassWeights = None) -> Classification | Regression:
    """Return a task by its name, for a number of classes or of outputs.

    Raises:
        ValueError: If the name is neither of both, the number is too small, or class weights do not fit.
    """
    check_one_of("task", name, ("classification", "regression"))
    if name == "classification":
        return Classification(num_outputs, class_weights)
    check(class_weights is None, "class_weights", "left out with task='regression'", class_weights)
    return Regression(num_outputs)


class NumberMeter:
    """R2 and errors of outputs in the labels' unit: each output's, if there are several, and their means.

    The errors are RMSE (root of the mean squared error), MAE (mean absolute error) and the mean squared error. R2 is at
    most 1, and below 0 if the labels' mean predicts better; for constant labels 1 or 0; missing for fewer than two
    samples. Sums are of differences from the first label, so that the labels' mean and unit cost no digits
    (torchmetrics' R2Score sums squares of labels, and takes a squared error below 1e-4 for 0).
    """

    def __init__(self) -> None:
        self.samples = 0
        self._first: Tensor | None = None
        self._sums: Tensor | float = 0.0  # of differences, their squares, squared and absolute errors; shape (4, k)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch, all of whose labels are known."""
        labels = labels.reshape(outputs.shape).double()
        if self._first is None:
            self._first = labels[0]
        differences, errors = labels - self._first, outputs.detach().double() - labels
        self._sums = self._sums + torch.stack([differences, differences.square(), errors.square(), errors.abs()]).sum(
            dim=1
        )
        self.samples += len(labels)

    def compute(self) -> dict[str, float]:
        """Return R2, where it is defined, RMSE, MAE and loss, and of output i of several ``r2/i`` and so on."""
        first, second, squared_errors, absolute_errors = torch.as_tensor(self._sums)
        variance = second - first.square() / self.samples
        r2 = torch.where(variance > 0, 1 - squared_errors / variance, (squared_errors == 0).double())
        scores = {"r2": r2} if self.samples > 1 else {}
        scores |= {"rmse": (squared_errors / self.samples).sqrt(), "mae": absolute_errors / self.samples}
        found = {name: float(each.mean()) for name, each in scores.items()}
        found["eval_loss"] = float(squared_errors.mean()) / self.samples
        if len(r2) > 1:
            found |= {f"{name}/{index}": each for name, of in scores.items() for index, each in enumerate(of.tolist())}
        return found


def _warn_of_probabilities(outputs: Tensor) -> None:
    """Warn if outputs are probabilities, of which a softmax would be taken once more."""
    if bool(((outputs >= 0).all(dim=1) & ((outputs.double().sum(dim=1) - 1).abs() < _ROUNDING)).all()):
        warnings.warn(
            "outputs of the network are probabilities (all are at least 0, and each row has the sum 1), and losses, "
            "scores and predictions take a softmax of them once more: give logits, without a softmax at the end",
            stacklevel=2,
        )


class _ClassMeter:
    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.accuracy = MulticlassAccuracy(num_classes, average="micro", sync_on_compute=False).to(device)
        self.loss = MeanMetric(sync_on_compute=False).to(device)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        if not self.loss.update_called:
            _warn_of_probabilities(outputs)
        self.accuracy.update(outputs, labels)
        self.loss.update(F.cross_entropy(outputs, labels), weight=len(labels))

    def compute(self) -> dict[str, float]:
        return {"acc": float(self.accuracy.compute()), "eval_loss": float(self.loss.compute())}


class _ScoreMeter:
    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.probabilities = torch.zeros(num_classes, device=device, dtype=torch.float64)
        self.entropy, self.samples = 0.0, 0

    def update(self, outputs: Tensor, labels: Any) -> None:
        if not self.samples:
            _warn_of_probabilities(outputs)
        log_p = outputs.detach().double().log_softmax(dim=1)
        self.probabilities += log_p.exp().sum(dim=0)
        self.entropy -= float((log_p.exp() * log_p).sum())
        self.samples += len(outputs)

    def compute(self) -> dict[str, float]:
        return {"score": float(information_score(self.probabilities / self.samples, self.entropy / self.samples))}


class _Nothing:
    def update(self, outputs: Tensor, labels: Any) -> None:
        pass

    def compute(self) -> dict[str, float]:
        return {}
