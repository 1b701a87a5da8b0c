"""TargetPredictions: what the target's model says of its samples, as a file."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedlit.callbacks.shared import federated
from fedlit.module import FederatedModule
from fedlit.training.tasks import Classification


class TargetPredictions(Callback):
    """Writes what ``trainer.predict`` finds for the target to a file: a row per sample, in the data's order.

    The first column, ``predicted``, has the most probable class, and there is one more for the probability of each
    class; in regression there is a column for each number alone. Columns bear the names that the data module has in
    ``classes``, such as a `DomainDataModule`, or else count from 0. The process that hosts the target writes. Nothing
    is written under ``fast_dev_run``.

    Args:
        csv: Path of the file; ``None`` is ``predictions.csv`` in the Trainer's ``log_dir``, or its
            ``default_root_dir``.

    Raises:
        TypeError: If the module is no `FederatedModule`.
        ValueError: If the data module names another number of classes than the module has, or no sample was one of the
            target's.
    """

    def __init__(self, csv: str | None = None) -> None:
        self.csv = csv
        self._path = Path()
        self._batches: list[Tensor] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other modules; decide where the file will be."""
        federated(pl_module, self)
        if stage == "predict":
            # log_dir is a broadcast: all processes ask for it, and one without samples to predict only comes this far
            self._path = Path(self.csv or Path(trainer.log_dir or trainer.default_root_dir, "predictions.csv"))

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start afresh; refuse names that do not fit before anything is predicted."""
        self._batches = []
        _names(trainer, federated(pl_module, self))

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep a batch of the target, if this process hosts it."""
        name = federated(pl_module, self).target.name
        if isinstance(outputs, Mapping) and name in outputs:
            self._batches.append(outputs[name].detach().cpu())

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        module = federated(pl_module, self)
        target = module.target
        if not module.federation.is_local(target) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not self._batches:
            raise ValueError(
                f"no sample of target {target.name!r} was predicted, so there is nothing to write: give "
                "trainer.predict a loader that has the target's samples, or remove TargetPredictions"
            )
        rows = torch.cat(self._batches).tolist()
        names = _names(trainer, module)
        choosing = isinstance(module.task, Classification)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["predicted", *names] if choosing else names)
            writer.writerows([names[row.index(max(row))], *row] if choosing else row for row in rows)
        print(f"predictions of {len(rows)} samples of {target.name!r} are in {self._path}", flush=True)


def _names(trainer: Trainer, module: FederatedModule) -> list[str]:
    """What the columns are called, one for each class or number."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    names = getattr(data, "classes", None)
    if names is None:
        return [str(index) for index in range(module.num_classes)]
    if len(names) != module.num_classes:
        raise ValueError(
            f"classes of {type(data).__name__} must name the {module.num_classes} outputs of {type(module).__name__} "
            f"(num_classes), got {len(names)} names: give the module num_classes=data.num_classes"
        )
    return [str(name) for name in names]
