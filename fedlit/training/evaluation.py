"""Evaluation: what every process logs of all clients in validation and test, and the one way to log it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fedlit.training.method import Method, metric_names
from fedlit.training.tasks import Meter


class Evaluation(Callback):
    """Scores what clients' replicas predict of their own samples; attached by every `FederatedModule`.

    Outputs are those of ``validation_step`` and ``test_step``: ``{client: logits or numbers}``. Labels of the target
    are not read.
    """

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meters.clear()
        cast(Method, pl_module).prepare_predictions()

    def _count(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        module = cast(Method, pl_module)
        for name, predicted in outputs.items():
            if name not in self._meters:
                self._meters[name] = module.task.meter(name == module.target.name, module.device)
            self._meters[name].update(predicted, batch[name][1])

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        module = cast(Method, pl_module)
        values = {name: meter.compute() for name, meter in self._meters.items()}
        told = module.federation.report(values, list(module.task.metrics))
        metrics = metric_names(module, told)
        quality = module.task.metrics[0]
        of_sources = [row[quality] for row in told.values() if quality in row]
        if of_sources:
            metrics[f"source/{quality}"] = sum(of_sources) / len(of_sources)
        module.log_everywhere(metrics)

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _start
    on_validation_batch_end = on_test_batch_end = _count
    on_validation_epoch_end = on_test_epoch_end = _log

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave a module that predicts."""
        cast(Method, pl_module).prepare_predictions()


def log_everywhere(trainer: Trainer, module: LightningModule, metrics: Mapping[str, float]) -> None:
    """Log numbers that are equal on all processes, in whatever hook."""
    if trainer.evaluating:  # a Trainer returns what is logged so; no reduction, no warning, the key exists everywhere
        module.log_dict(dict(metrics), batch_size=1, sync_dist=True, rank_zero_only=True)
        return
    # at once, and without the quarter of a millisecond that `self.log` takes for each
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)
