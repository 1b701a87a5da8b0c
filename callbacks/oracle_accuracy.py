"""OracleAccuracy: accuracy and other scores on the target's hidden labels."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
)

from fedlit.callbacks.shared import check_form, federated, is_dry
from fedlit.federation import Channel, reveal_for_oracle
from fedlit.federation.labels import known_labels
from fedlit.federation.metrics import ORACLE
from fedlit.federation.nested import take
from fedlit.functional import brier_score
from fedlit.module import FederatedModule
from fedlit.run.component import Component
from fedlit.run.evaluation import named_outputs
from fedlit.run.tasks import Classification, NumberMeter

_PREFIX = "oracle/"
_BINS = 10
_FEW = 10
"""Labelled validation samples of the target up to which a run warns how few they are."""


class OracleAccuracy(Callback, Component):
    """Measure accuracy and loss on the target's hidden labels, in validation and test, as papers report them.

    Log as ``oracle/target/NAME``: ``acc``, ``balanced_acc`` (mean recall over the classes that the target has) and
    ``f1`` (weighted by samples), in [0, 1]; ``loss`` (cross-entropy); and of the predicted probabilities, with the
    temperature of `Calibration` if there is one, ``ece`` (expected calibration error, 15 bins, in [0, 1]), ``brier``
    (`brier_score`, in [0, 2]) and ``auc`` (mean area under the ROC curve of each class against the rest). In regression
    ``r2`` (share of variance explained, at most 1), ``rmse`` and ``mae`` (root mean squared and mean absolute error, in
    the labels' unit; of several numbers, means over these beside ``rmse/NUMBER`` of each), ``loss`` (mean squared
    error) and, with `ConformalIntervals`, ``coverage`` (share of labels within their interval). Of a method's other
    predictions (`FederatedModule.alternatives`), ``PREDICTION/acc``. Numbers are equal on all processes, and travel
    over the channel "oracle". No federation could know them, so nothing may be selected by them.

    Args:
        per_class: Also log the accuracy on each class c that the target has, as ``oracle/target/acc/c``.

    Attributes:
        history: Label-free score and accuracy of each validation that has both; see `RunSummary`.
        confusion: Samples of the last test, or validation by itself, by true class (row) and predicted class (column);
            ``None`` before, in regression, and where reports carry noise, which would be larger than the counts.
        reliability: In 10 equal bins of the predicted class's probability: number of the same samples, mean probability
            and share that is right; ``None`` as with ``confusion``.

    Raises:
        LabelGuardError: When a run starts, if a callback or a schedule monitors an ``oracle/`` metric.
    """

    def __init__(self, per_class: bool = False) -> None:
        self.per_class = per_class
        self._start_afresh()
        self.history: list[tuple[float, float]] = []
        self._warned = False
        self.confusion: list[list[int]] | None = None
        self.reliability: list[list[float]] | None = None

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Scores on labels that no federation has."""
        return (ORACLE,)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse outputs that have no set form."""
        check_form(federated(pl_module, self), self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn anew in each run."""
        self._warned = False

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the samples of the last evaluation."""
        self._start_afresh()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Keep predictions of a batch of the target, if this process hosts it."""
        if not trainer.sanity_checking:
            self._update(federated(pl_module, self), outputs, batch)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report and log the scores."""
        if not trainer.sanity_checking:
            self._log(federated(pl_module, self))

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record score and accuracy; the module has logged its score only now."""
        score, accuracy = (trainer.callback_metrics.get(key) for key in ("target/score", f"{_PREFIX}target/acc"))
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        module = federated(pl_module, self)
        if fitting and module.federation.shows(module.target) and score is not None and accuracy is not None:
            self.history.append((float(score), float(accuracy)))

    def state_dict(self) -> dict[str, Any]:
        """The history."""
        return {"history": [list(pair) for pair in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the history of a checkpoint."""
        self.history = [(score, accuracy) for score, accuracy in state_dict["history"]]

    def _start_afresh(self) -> None:
        self._loss = MeanMetric(sync_on_compute=False)  # other processes have no target, and would wait for ever
        self._outputs: list[tuple[Tensor, Tensor]] = []  # logits and labels
        self._numbers = NumberMeter()
        self._alternatives: dict[str, tuple[int, int]] = {}  # number of right predictions, and of all

    def _update(self, module: FederatedModule, outputs: Any, batch: Mapping[str, Any]) -> None:
        name = module.target.name
        if not isinstance(outputs, Mapping) or name not in outputs or len(batch[name]) < 2:
            return
        labels = reveal_for_oracle(batch[name][1])
        known = known_labels(labels)
        logits, labels = outputs[name].detach()[known], labels[known]
        if len(labels) == 0:
            return
        self._outputs.append((logits.cpu(), labels.cpu()))
        if not isinstance(module.task, Classification):
            self._numbers.update(logits, labels)
            return
        for label, other in module.alternatives(take(batch[name][0], known)).items():
            right, seen = self._alternatives.get(label, (0, 0))
            self._alternatives[label] = (right + int((other.argmax(dim=1) == labels).sum()), seen + len(labels))
        self._loss.to(logits.device).update(F.cross_entropy(logits.float(), labels), weight=len(labels))

    def _warn_of_few(self, module: FederatedModule) -> None:
        """Once in a run, in the process of the target."""
        number, trainer = sum(len(labels) for _, labels in self._outputs), module.trainer
        if self._warned or not 0 < number < _FEW or is_dry(trainer) or trainer.limit_val_batches != 1.0:
            return
        self._warned = True
        warnings.warn(
            f"accuracy on validation samples of {module.target.name!r} (oracle) is of {number} with a label, of which "
            f"one makes {100 / number:.0f} points: it shows little",
            stacklevel=2,
        )

    def _log(self, module: FederatedModule) -> None:
        fitting, target = module.trainer.state.fn == TrainerFn.FITTING, module.target.name
        names, scores, size = [*module.task.metrics, "coverage"], dict[str, float](), module.num_classes
        names += [f"coverage/{index}" for index in range(size) if f"r2/{index}" in names]
        classifies = isinstance(module.task, Classification)
        if classifies:
            names = ["acc", "balanced_acc", "f1", "loss", "ece", "brier", "auc"]
            names += [f"acc/{index}" for index in range(size)] if self.per_class else []
            if fitting:
                self._warn_of_few(module)
        if self._outputs and classifies:
            scores = self._scores_of_classes(module)
        elif self._outputs:
            scores = self._numbers.compute() | self._coverage(module)
        scores |= {f"{label}/acc": right / seen for label, (right, seen) in self._alternatives.items()}
        names += [f"{label}/acc" for label in type(module).alternative_names]
        cells: list[str] = []
        # counts would use up the clipping norm of all numbers where reports carry noise
        counts = classifies and not fitting and module.federation.channels.reports == "exact"
        if counts:
            cells = [f"confusion/{row}/{column}" for row in range(size) for column in range(size)]
            cells += [f"reliability/{row}/{column}" for row in range(_BINS) for column in range(3)]
            if self._outputs and self._are_finite():
                confusion: list[list[float]] = self._confusion(module).double().tolist()
                scores |= dict(zip(cells, chain(*confusion, *self._reliability(module)), strict=True))
        mine = {target: scores} if scores else {}
        reported = module.federation.report(mine, names + cells, channel="oracle").get(target, {})
        if counts:
            numbers = iter([reported[name] for name in cells if name in reported])
            self.confusion = [[int(number) for number in islice(numbers, size)] for _ in range(size)]
            self.reliability = [[*islice(numbers, 3)] for _ in range(_BINS)]
            if not self.confusion[0]:
                self.confusion = self.reliability = None
        logged = {key: reported[key] for key in names if key in reported}
        if not classifies:
            logged = named_outputs(module.trainer, logged)
        # the mean squared error is ``eval_loss`` of a source
        metrics = {f"{_PREFIX}target/{'loss' if key == 'eval_loss' else key}": each for key, each in logged.items()}
        module.run.log(metrics, module.target)

    def _are_finite(self) -> bool:
        """Whether there are probabilities at all: outputs of a diverged model may have none."""
        return all(bool(logits.isfinite().all()) for logits, _ in self._outputs)

    def _all_outputs(self) -> tuple[Tensor, Tensor]:
        logits, labels = map(torch.cat, zip(*self._outputs, strict=True))
        return logits, labels

    def _coverage(self, module: FederatedModule) -> dict[str, float]:
        """Share of labels within their interval, if there are any: of each of several outputs, and their mean."""
        intervals, (outputs, labels) = module.run.outputs.intervals, self._all_outputs()
        if intervals is None:
            return {}
        low, high = intervals.around(outputs)
        labels = labels.reshape(outputs.shape).double()
        shares = ((low <= labels) & (labels <= high)).double().mean(dim=0).tolist()
        each = {f"coverage/{index}": share for index, share in enumerate(shares) if len(shares) > 1}
        return {"coverage": sum(shares) / len(shares), **each}

    def _confusion(self, module: FederatedModule) -> Tensor:
        return multiclass_confusion_matrix(*self._all_outputs(), module.num_classes)

    def _reliability(self, module: FederatedModule) -> list[list[float]]:
        logits, labels = self._all_outputs()
        sure, predicted = module.task.predictions(logits.double(), module.run.outputs.temperature).max(dim=1)
        bins = (sure * _BINS).long().clamp(max=_BINS - 1)
        sums = torch.zeros(_BINS, 3, dtype=torch.float64)
        sums.index_add_(0, bins, torch.stack([torch.ones_like(sure), sure, (predicted == labels).double()], dim=1))
        sums[:, 1:] /= sums[:, :1].clamp(min=1)
        rows: list[list[float]] = sums.tolist()
        return rows

    def _scores_of_classes(self, module: FederatedModule) -> dict[str, float]:
        confusion = self._confusion(module)
        hits, predicted, samples = confusion.diagonal(), confusion.sum(dim=0), confusion.sum(dim=1)
        recall = (hits / samples)[samples > 0].tolist()
        f1 = 2 * hits / (predicted + samples).clamp(min=1)
        scores = {
            "acc": int(hits.sum()) / int(samples.sum()),
            "balanced_acc": sum(recall) / len(recall),
            "f1": float((f1 * samples).sum() / samples.sum()),
            "loss": float(self._loss.compute()),
        }
        if self._are_finite():
            scores |= self._scores_of_probabilities(module)
        there = samples.nonzero().flatten().tolist()
        return scores | {f"acc/{index}": each for index, each in zip(there, recall, strict=True) if self.per_class}

    def _scores_of_probabilities(self, module: FederatedModule) -> dict[str, float]:
        logits, labels = self._all_outputs()
        p = module.task.predictions(logits.double(), module.run.outputs.temperature)
        areas = [
            float(binary_auroc(p[:, label], of_class.long()))
            for label in range(module.num_classes)
            if 0 < int((of_class := labels == label).sum()) < len(labels)
        ]
        error = multiclass_calibration_error(p, labels, module.num_classes, n_bins=15)
        scores = {"ece": float(error), "brier": float(brier_score(p, labels))}
        return scores | ({"auc": sum(areas) / len(areas)} if areas else {})
