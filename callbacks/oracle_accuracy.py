"""OracleAccuracy: how well the target really does, measured with the labels that it does not have."""

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
from torchmetrics.classification import MulticlassStatScores
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
)

from fedlit.callbacks.shared import federated
from fedlit.federation import Channel, LabelGuardError, Open, reveal_for_oracle
from fedlit.federation.labels import known_labels
from fedlit.federation.nested import take
from fedlit.functional import brier_score
from fedlit.module import FederatedModule
from fedlit.run.component import Component
from fedlit.run.tasks import Classification, NumberMeter

_PREFIX = "oracle/"
_BINS = 10
_FEW = 10
"""Labelled validation samples of the target up to which a run warns how few they are."""


class OracleAccuracy(Callback, Component):
    """Accuracy and loss on the target's hidden labels, in validation and test: what papers report.

    Logs ``oracle/target/acc``, ``oracle/target/balanced_acc`` (mean recall over the classes that the target has) and
    ``oracle/target/f1`` (F1 scores of classes, weighted by their samples), all in [0, 1], and ``oracle/target/loss``
    (cross-entropy). Of the probabilities that are predicted, with the temperature of `Calibration` if there is one:
    ``oracle/target/ece`` (expected calibration error of the most probable class, 15 bins, in [0, 1]) and
    ``oracle/target/brier`` (`brier_score`, in [0, 2]), the lower the better, and ``oracle/target/auc`` (area under the
    ROC curve: the mean of each class against the rest, over those that some samples have and others have not). In
    regression ``oracle/target/r2`` (share of variance explained, at most 1) and ``oracle/target/loss`` (mean squared
    error, in the square of the labels' unit). They are equal on all processes. No federation could know these numbers,
    so nothing may be selected by them.
    Where a method has other predictions of the target (`FederatedModule.alternatives`), their accuracy is
    ``oracle/target/NAME/acc``. All of them travel over the channel "oracle", which tables of communication keep apart
    from what the method sends.

    Args:
        per_class: Also log the accuracy on each class c that the target has, as ``oracle/target/acc/c``.

    Attributes:
        history: Label-free score and accuracy of each validation that has both; see `RunSummary`.
        confusion: How many samples of each class (row) the last test, or validation by itself, took for which (column);
            ``None`` before, in regression, and where reports carry noise, which would be larger than the counts.
        reliability: Of the same samples, by the probability of the predicted class in 10 equal bins from 0 to 1: how
            many there are, their mean probability, and the share that is right; ``None`` as with ``confusion``.

    Raises:
        LabelGuardError: When a run starts, if EarlyStopping, ModelCheckpoint or a schedule monitors an ``oracle/``
            metric.
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
        contents, way = "scores on the target's hidden labels", "no federation could know it"
        return (Open("oracle", contents, how_often="every evaluation", unblurred=way, watched=True),)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse callbacks that would select by the target's labels."""
        federated(pl_module, self)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            _refuse(getattr(callback, "monitor", None), type(callback).__name__)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse schedules that would learn from the target's labels; they exist only from here on."""
        self._warned = False
        for config in trainer.lr_scheduler_configs:
            _refuse(config.monitor, type(config.scheduler).__name__)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting afresh."""
        self._start_afresh()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count a batch of the target, if this process hosts it."""
        if not trainer.sanity_checking:
            self._update(federated(pl_module, self), outputs, batch)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share and log the numbers."""
        if not trainer.sanity_checking:
            self._log(federated(pl_module, self))

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember score and accuracy; the module has logged its score only now."""
        score, accuracy = (trainer.callback_metrics.get(key) for key in ("target/score", f"{_PREFIX}target/acc"))
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and score is not None and accuracy is not None:
            self.history.append((float(score), float(accuracy)))

    def state_dict(self) -> dict[str, Any]:
        """The history."""
        return {"history": [list(pair) for pair in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a restored history."""
        self.history = [(score, accuracy) for score, accuracy in state_dict["history"]]

    def _start_afresh(self) -> None:
        self._hits: MulticlassStatScores | None = None
        self._loss: MeanMetric | None = None
        self._outputs: list[tuple[Tensor, Tensor]] = []  # logits and labels
        self._numbers: NumberMeter | None = None
        self._alternatives: dict[str, tuple[int, int]] = {}  # right predictions, and all

    def _update(self, module: FederatedModule, outputs: Any, batch: Mapping[str, Any]) -> None:
        name = module.target.name
        if not isinstance(outputs, Mapping) or name not in outputs or len(batch[name]) < 2:
            return
        labels = reveal_for_oracle(batch[name][1])
        known = known_labels(labels)
        logits, labels = outputs[name].detach()[known], labels[known]
        if len(labels) == 0:
            return
        if not isinstance(module.task, Classification):
            self._numbers = self._numbers or NumberMeter()
            self._numbers.update(logits, labels)
            return
        if self._hits is None or self._loss is None:
            # The other processes have no target: torchmetrics' own synchronisation would wait for them for ever.
            self._hits = MulticlassStatScores(module.num_classes, average=None, sync_on_compute=False).to(logits.device)
            self._loss = MeanMetric(sync_on_compute=False).to(logits.device)
        for label, other in module.alternatives(take(batch[name][0], known)).items():
            right, seen = self._alternatives.get(label, (0, 0))
            self._alternatives[label] = (right + int((other.argmax(dim=1) == labels).sum()), seen + len(labels))
        self._outputs.append((logits.cpu(), labels.cpu()))
        self._hits.update(logits, labels)
        self._loss.update(F.cross_entropy(logits.float(), labels), weight=len(labels))

    def _warn_of_few(self, module: FederatedModule) -> None:
        """Once in a run, in the process of the target."""
        number, trainer = sum(len(labels) for _, labels in self._outputs), module.trainer
        if self._warned or not 0 < number < _FEW or trainer.fast_dev_run or trainer.limit_val_batches != 1.0:  # type: ignore[attr-defined]
            return
        self._warned = True
        warnings.warn(
            f"accuracy on validation samples of {module.target.name!r} (oracle) is of {number} with a label, of which "
            f"one makes {100 / number:.0f} points: it shows little",
            stacklevel=2,
        )

    def _log(self, module: FederatedModule) -> None:
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._warn_of_few(module)
        if isinstance(module.task, Classification):
            mine, names = self._scores_of_classes(module)
        else:
            found = {} if self._numbers is None else self._numbers.compute()
            renamed = {"loss" if name == "eval_loss" else name: value for name, value in found.items()}
            mine, names = ({module.target.name: renamed} if renamed else {}), ["r2", "loss"]
        for each in mine.values():
            each |= {f"{label}/acc": right / seen for label, (right, seen) in self._alternatives.items()}
        names += [f"{label}/acc" for label in type(module).alternative_names]
        shown = len(names)
        exact = module.federation.channels.reports == "exact"  # counts would use up the clipping norm of all numbers
        if exact and isinstance(module.task, Classification) and module.trainer.state.fn != TrainerFn.FITTING:
            cells = [(row, column) for row in range(module.num_classes) for column in range(module.num_classes)]
            names += [f"confusion/{row}/{column}" for row, column in cells]
            names += [f"reliability/{row}/{column}" for row in range(_BINS) for column in range(3)]
            if self._outputs and self._are_finite():
                counted = chain(*self._confusion(module), *self._reliability(module))
                mine[module.target.name] |= dict(zip(names[shown:], counted, strict=True))
        reported = module.federation.report(mine, names, channel="oracle").get(module.target.name, {})
        if len(names) > shown:
            numbers = iter([reported[name] for name in names[shown:] if name in reported])
            size = module.num_classes
            self.confusion = [[int(number) for number in islice(numbers, size)] for _ in range(size)]
            self.reliability = [[*islice(numbers, 3)] for _ in range(_BINS)]
            if not self.confusion[0]:
                self.confusion = self.reliability = None
        module.run.log({f"{_PREFIX}target/{key}": reported[key] for key in names[:shown] if key in reported})

    def _are_finite(self) -> bool:
        """Whether the outputs have probabilities at all: those of a model that has diverged may not."""
        return all(bool(logits.isfinite().all()) for logits, _ in self._outputs)

    def _confusion(self, module: FederatedModule) -> list[list[float]]:
        logits, labels = map(torch.cat, zip(*self._outputs, strict=True))
        counted: list[list[float]] = multiclass_confusion_matrix(logits, labels, module.num_classes).double().tolist()
        return counted

    def _reliability(self, module: FederatedModule) -> list[list[float]]:
        logits, labels = map(torch.cat, zip(*self._outputs, strict=True))
        sure, predicted = module.task.predictions(logits.double(), module.run.outputs.temperature).max(dim=1)
        bins = (sure * _BINS).long().clamp(max=_BINS - 1)
        sums = torch.zeros(_BINS, 3, dtype=torch.float64)
        sums.index_add_(0, bins, torch.stack([torch.ones_like(sure), sure, (predicted == labels).double()], dim=1))
        sums[:, 1:] /= sums[:, :1].clamp(min=1)
        rows: list[list[float]] = sums.tolist()
        return rows

    def _scores_of_classes(self, module: FederatedModule) -> tuple[dict[str, dict[str, float]], list[str]]:
        classes = [f"acc/{index}" for index in range(module.num_classes)] if self.per_class else []
        mine: dict[str, dict[str, float]] = {}
        if self._hits is not None and self._loss is not None:
            scores = self._hits.compute()  # per class: true and false positives, true and false negatives, samples
            hits, predicted, samples = scores[:, 0], scores[:, 0] + scores[:, 1], scores[:, 4]
            recall = (hits / samples)[samples > 0].tolist()
            f1 = 2 * hits / (predicted + samples).clamp(min=1)
            numbers = {
                "acc": int(hits.sum()) / int(samples.sum()),
                "balanced_acc": sum(recall) / len(recall),
                "f1": float((f1 * samples).sum() / samples.sum()),
                "loss": float(self._loss.compute()),
                **self._scores_of_probabilities(module),
            }
            there = samples.nonzero().flatten().tolist()
            numbers |= {f"acc/{index}": each for index, each in zip(there, recall, strict=True) if self.per_class}
            mine[module.target.name] = numbers
        return mine, ["acc", "balanced_acc", "f1", "loss", "ece", "brier", "auc", *classes]

    def _scores_of_probabilities(self, module: FederatedModule) -> dict[str, float]:
        if not self._are_finite():
            return {}
        logits, labels = map(torch.cat, zip(*self._outputs, strict=True))
        p = module.task.predictions(logits.double(), module.run.outputs.temperature)
        areas = [
            float(binary_auroc(p[:, label], of_class.long()))
            for label in range(module.num_classes)
            if 0 < int((of_class := labels == label).sum()) < len(labels)
        ]
        error = multiclass_calibration_error(p, labels, module.num_classes, n_bins=15)
        found = {"ece": float(error), "brier": float(brier_score(p, labels))}
        return found | ({"auc": sum(areas) / len(areas)} if areas else {})


def _refuse(monitor: object, who: str) -> None:
    if isinstance(monitor, str) and monitor.startswith(_PREFIX):
        raise LabelGuardError(
            f"{who}(monitor={monitor!r}) would select by the target's hidden labels, which no federation has: monitor "
            "'target/score' (label-free, mode='max') or 'source/acc' (mode='max') instead"
        )
