"""Evaluation: metrics of all clients in validation and test, and warnings about the target's predictions."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fedlit.federation import FederatedLoader
from fedlit.federation.nested import vectors
from fedlit.functional import nearest_neighbours, neighbourhood_information, standardised_directions
from fedlit.run.run import Run, run_of
from fedlit.run.sample_check import check_evaluation
from fedlit.run.tasks import Classification, Meter

LEAST = 30
"""Minimum of target validation samples for neighbourhoods."""

MOST = 2000
"""Number of samples considered at most: distances take n^2 d multiplications, once in a run."""


class Evaluation(Callback):
    """Score the predictions of clients' replicas on their samples; attached by every `FederatedModule`.

    Outputs are those of ``validation_step`` and ``test_step``: ``{client: logits or numbers}``. No label of the target
    is read. The target's process warns if all its predictions are of one class at the end of ``fit``, ``test`` or
    ``predict``, and once in ``fit`` when they collapse (`CollapseWatch`).
    """

    def __init__(self) -> None:
        self._watch = CollapseWatch()
        self._meters: dict[str, Meter] = {}
        self._classes: list[Tensor] = []  # predicted at the target, batch by batch
        self._predictions = self._undefined = 0  # for the target, and those of them that are NaN
        self._inputs: list[Tensor] = []  # of the target, in the first validation of a run
        self._neighbours: Tensor | None = None  # of these

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meters.clear()
        self._classes.clear()
        self._predictions = self._undefined = 0
        self._inputs.clear()
        self._check_samples(trainer, run_of(pl_module))
        run_of(pl_module).prepare_predictions()

    def _check_samples(self, trainer: Trainer, run: Run) -> None:
        """Check samples before they are evaluated, as a `FederatedStrategy` does itself."""
        if getattr(trainer.strategy, "federation", None) is not None:
            return
        stage = "predict" if trainer.predicting else "test" if trainer.testing else "val"
        loaders = getattr(trainer, f"{stage}_dataloaders")
        for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
            if isinstance(loader, FederatedLoader) and getattr(loader.check, "run", None) is not run:
                check_evaluation(run, loader)

    def _count(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        run = run_of(pl_module)
        for name, predicted in outputs.items():
            if name not in self._meters:
                self._meters[name] = run.task.meter(name == run.target.name, run.device)
            self._meters[name].update(predicted, batch[name][1])
        if trainer.state.fn == TrainerFn.FITTING and self._neighbours is None and run.target.name in outputs:
            inputs = vectors(batch[run.target.name][0])
            if inputs is not None and sum(map(len, self._inputs)) < MOST:
                self._inputs.append(inputs.detach().cpu())
        self._count_classes(trainer, pl_module, outputs, batch)

    def _count_classes(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        run = run_of(pl_module)
        predicted = outputs.get(run.target.name) if isinstance(outputs, Mapping) else None
        if not isinstance(predicted, torch.Tensor):
            return
        # of classes, a logit of -inf rules one out
        numbers = predicted.detach().softmax(dim=1) if isinstance(run.task, Classification) else predicted.detach()
        self._undefined += int(numbers.isnan().any(dim=1).sum())
        self._predictions += len(numbers)
        if isinstance(run.task, Classification):
            self._classes.append(predicted.detach().argmax(dim=1).cpu())

    def _predicted(self) -> Counter[int]:
        """Count the target's predictions of each class."""
        return Counter(torch.cat(self._classes).tolist() if self._classes else [])

    def _information(self, num_classes: int) -> float | None:
        """Return the information of neighbours on each other's predicted class, if the target's inputs are vectors."""
        if self._neighbours is None and self._inputs:
            inputs = torch.cat(self._inputs)[:MOST]
            enough = len(inputs) >= LEAST and bool(inputs.isfinite().all())
            self._neighbours = nearest_neighbours(standardised_directions(inputs)) if enough else torch.empty(0)
            self._inputs.clear()
        if self._neighbours is None or not len(self._neighbours) or not self._classes:
            return None
        classes = torch.cat(self._classes)[:MOST]
        if len(classes) != len(self._neighbours):
            return None
        return float(neighbourhood_information(classes, self._neighbours, num_classes))

    def _warn(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of predictions that are NaN, or all of one class, which an accuracy may not show."""
        predicted = self._predicted()
        if self._undefined:
            warnings.warn(
                f"{self._undefined} of {self._predictions} predictions for target "
                f"{run_of(pl_module).target.name!r} are NaN: its network has diverged. Lower the "
                "learning rate, clip gradients (Trainer(gradient_clip_val=...)), or scale inputs that are large",
                stacklevel=2,
            )
            return
        if len(predicted) != 1 or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        ((label, number),) = predicted.items()
        if number < FEW:
            return
        run = run_of(pl_module)
        warnings.warn(
            f"all {number} predictions for target {run.target.name!r} are of class {_class_name(trainer, label)}, "
            "as of a model that has not learnt yet or has collapsed: train for more rounds (max_epochs), with Adam or "
            "a higher learning rate (optimizer), or with warmup_rounds on the sources first; if one class is much the "
            "larger, decide by what errors cost (costs of TargetPredictions)",
            stacklevel=2,
        )

    def _warn_of_collapse(self, trainer: Trainer, run: Run, score: float) -> None:
        """Warn at the target's process, after the round in which its predictions collapse."""
        round_idx = run.federation.round_idx - 1
        predicted = {_class_name(trainer, label): number for label, number in self._predicted().items()}
        assert isinstance(run.task, Classification)
        information = self._information(run.task.num_classes)
        text = self._watch.see(predicted, score, round_idx, information)
        if text:
            weight = f"lower {run.requires.adaptation_weight}, or " if run.requires.adaptation_weight else "lower "
            limit = " set trust_region=1.0," if run.requires.unlabelled_target and run.trust_region is None else ""
            warnings.warn(
                f"the predictions of {run.name} for target {run.target.name!r} have got worse by round "
                f"{round_idx}: {text}. Take an earlier round, by validator/trust (the callbacks Validators and "
                f"TrustedRound); or{limit} {weight}the learning rate, raise warmup_rounds, or scale inputs to length 1",
                stacklevel=2,
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier run, as a run is compared with itself alone."""
        self._watch = CollapseWatch()
        self._neighbours = None

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        run = run_of(pl_module)
        values = {name: meter.compute() for name, meter in self._meters.items()}
        if trainer.state.fn == TrainerFn.FITTING and "score" in values.get(run.target.name, {}):
            self._warn_of_collapse(trainer, run, values[run.target.name]["score"])
        reported = run.federation.report(values, list(run.task.metrics))
        metrics = run.metric_names(reported)
        quality = next(iter(run.task.metrics), "")
        of_sources = [row[quality] for row in reported.values() if quality in row]
        if of_sources:
            metrics[f"source/{quality}"] = sum(of_sources) / len(of_sources)
        run.log(metrics)

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _start
    on_validation_batch_end = on_test_batch_end = _count
    on_validation_epoch_end = on_test_epoch_end = _log
    on_predict_batch_end = _count_classes
    on_fit_end = on_test_end = on_predict_end = _warn

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse validation samples before the first round, rather than after it."""
        self._check_samples(trainer, run_of(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module ready to predict."""
        run_of(pl_module).prepare_predictions()


def _class_name(trainer: Trainer, label: int) -> str:
    names = getattr(trainer.datamodule, "classes", None)  # type: ignore[attr-defined]
    return f"{names[label]!r}" if names is not None and len(names) > label else str(label)


_VARIETY = 0.25
"""Predictions have collapsed with less than this share of the greatest variety so far."""

_FALL = 0.05
"""A score has fallen by more than this share of the best so far (at least 0.01)."""

_PATIENCE = 3
"""Successive validations with a fallen score that rule out chance."""

FEW = 10
"""Number of predictions below which one class alone is plausible."""


_SCATTER = 0.25
"""Neighbourhoods have scattered with less information by more than this share of the maximum so far."""

_LEAST_INFORMATION = 0.2
"""Information of neighbourhoods below which a fall means nothing."""


class _Fall:
    """Count successive validations in which a number is below its maximum so far."""

    def __init__(self) -> None:
        self.best, self.best_round = 0.0, 0
        self._low = 0

    def see(self, value: float, round_idx: int, allowed: float) -> bool:
        """Return whether ``value`` has been more than ``allowed`` below the maximum for `_PATIENCE` validations."""
        self._low = self._low + 1 if self.best - value > allowed else 0
        if value > self.best:
            self.best, self.best_round = value, round_idx
        return self._low == _PATIENCE

    def text(self, now: float) -> str:
        return (
            f"was {self.best:.3f} after round {self.best_round}, and has been lower in {_PATIENCE} validations since, "
            f"now {now:.3f}"
        )


class CollapseWatch:
    """Compare each validation of a run with the best one before.

    Variety is exp(entropy of the predicted classes) - 1: 0 where all are of one class. Mixed classes show where
    neighbouring inputs are no longer predicted alike. Permuted classes are not detected.
    """

    def __init__(self) -> None:
        self._variety, self._most = 0.0, 1.0  # greatest, and the largest class's share then
        self._score, self._information = _Fall(), _Fall()
        self._reported = False

    def see(self, predicted: Mapping[str, int], score: float, round_idx: int, information: float | None = None) -> str:
        """Return the text of a warning, at most once in a run; empty while predictions are about as good as before.

        Args:
            predicted: Number of predictions by class name.
            score: `fedlit.functional.information_score`.
            round_idx: Of the last round before.
            information: `fedlit.functional.neighbourhood_information` of predicted classes, if there are neighbours.
        """
        total = sum(predicted.values())
        if self._reported or total < FEW:
            return ""
        shares = {name: number / total for name, number in predicted.items() if number}
        largest = max(shares, key=shares.__getitem__)
        variety = math.exp(-math.fsum(share * math.log(share) for share in shares.values())) - 1
        fallen = self._score.see(score, round_idx, max(_FALL * self._score.best, 0.01))
        scattered = information is not None and self._information.see(
            information, round_idx, _SCATTER * max(self._information.best, _LEAST_INFORMATION)
        )
        text = ""
        if self._variety and variety <= _VARIETY * self._variety:  # of no variety yet, nothing is left to lose
            text = (
                f"{100 * shares[largest]:.0f}% of them are of class {largest}, and the largest class had "
                f"{100 * self._most:.0f}% before"
            )
        elif fallen:
            text = f"their label-free score (target/score) {self._score.text(score)}"
        elif scattered and information is not None:
            text = (
                "near samples are put into different classes more often: the information that a sample's neighbours "
                f"have of its class {self._information.text(information)}"
            )
        if variety > self._variety:
            self._variety, self._most = variety, shares[largest]
        self._reported = bool(text)
        return text
