"""TargetPredictions: predictions of the target's model for its samples, as a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedlit.callbacks.shared import check_form, class_names, federated, is_dry, log_folder, write_rows
from fedlit.checks import check
from fedlit.data import DomainDataModule
from fedlit.functional import decide
from fedlit.module import FederatedModule
from fedlit.run.tasks import Classification


class TargetPredictions(Callback):
    """Write predictions of ``trainer.predict`` for the target to a file: a row per sample, in the data's order.

    The column ``id`` has the data module's ``ids``, or the sample's position in the target's data before the split;
    of a loader without a `DomainDataModule`, in the loader. ``predicted`` has the most probable class, and there is a
    column for the probability of each class, called as in ``classes``; in regression there is a column for each number,
    and with the intervals of `ConformalIntervals`, in the labels' unit too, ``NUMBER_lower`` and ``NUMBER_upper`` after
    them. The process that hosts the target writes; nothing is written under ``fast_dev_run``.

    Args:
        csv: Path of the file; ``None`` is ``predictions.csv`` in the ``log_dir``, or the ``default_root_dir``.
        costs: Costs of decisions in any unit, ``costs[true class][decided class]``. They add the column ``decision``:
            the class with the lowest expected cost, see `fedlit.functional.decide`. Of two classes ``[[0, 1], [4, 0]]``
            decides for the second where its probability is above 1 / (1 + 4).

    Raises:
        TypeError: If the module is no `FederatedModule`.
        ValueError: If ``classes`` do not fit the module or the file's columns, if ``costs`` do not fit the classes, or
            if no sample was one of the target's.
    """

    def __init__(self, csv: str | None = None, costs: list[list[float]] | None = None) -> None:
        self.csv = csv
        self.costs = costs
        self._path = Path()
        self._batches: list[Tensor] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other modules, and choose the path of the file."""
        federated(pl_module, self)
        self._batches = []
        if stage == "predict":
            # asked of all processes: one without samples to predict runs none of the later hooks
            self._path = Path(self.csv or log_folder(trainer) / "predictions.csv")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse mismatched names and costs before anything is predicted."""
        module = federated(pl_module, self)
        check_form(module, self)
        names, others = class_names(trainer, module), self._first_columns(module) + _ends(trainer, module)
        twice = [name for name in names if name in others]
        check(not twice, "classes", f"different from the other columns of the file, {others}", twice, "rename them")
        if self.costs is not None:
            rule = "of decisions for a class, and the method has task='regression'"
            check(isinstance(module.task, Classification), "costs", rule, self.costs, "leave costs out")
            number = len(names)
            rule = f"{number} rows of {number} numbers, costs[true class][decided class]"
            fits = [len(row) for row in self.costs] == [number] * number
            check(fits, "costs", rule, self.costs, f"the classes are {names}")

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Keep a batch of the target, if this process hosts it."""
        name = federated(pl_module, self).target.name
        if isinstance(outputs, Mapping) and name in outputs:
            self._batches.append(outputs[name].detach().cpu())

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        module = federated(pl_module, self)
        target = module.target
        if not self._batches or is_dry(trainer):
            return  # another process hosts the target; or it has no samples, which `teardown` refuses
        predicted = torch.cat(self._batches)
        rows, names, ids = predicted.tolist(), class_names(trainer, module), _ids(trainer, target.name, len(predicted))
        first: list[list[str]] = [ids]
        if isinstance(module.task, Classification):
            first.append([names[row.index(max(row))] for row in rows])
        if self.costs is not None:
            first.append([names[label] for label in decide(predicted, torch.tensor(self.costs)).tolist()])
        intervals, about = module.run.outputs.intervals, ""
        if intervals is not None:
            lower, upper = intervals.around(predicted)
            ends = torch.stack([lower, upper], dim=2).flatten(1)  # in the order of `_ends`
            rows, about = torch.cat([predicted.double(), ends], dim=1).tolist(), f"; {intervals.promise}"
        header = [*self._first_columns(module), *names, *_ends(trainer, module)]
        write_rows(self._path, [header, *([*texts, *row] for *texts, row in zip(*first, rows, strict=True))])
        print(f"predictions of {len(rows)} samples of {target.name!r} are in {self._path}{about}", flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to end without a file: Lightning skips the loop without samples, and logs nothing."""
        module = federated(pl_module, self)
        if stage != "predict" or self._batches or is_dry(trainer):
            return
        if module.federation.is_local(module.target):
            raise ValueError(
                f"no sample of target {module.target.name!r} was predicted, so there is nothing to write: give "
                "trainer.predict a loader that has the target's samples (a data module has its test samples: "
                "test_fraction, or transductive for all) and a limit_predict_batches above 0, or remove "
                "TargetPredictions"
            )

    def _first_columns(self, module: FederatedModule) -> list[str]:
        """Names of the columns before those of classes, or of numbers."""
        choosing = isinstance(module.task, Classification)
        return ["id", *(["predicted"] if choosing else []), *(["decision"] if self.costs is not None else [])]


def _ends(trainer: Trainer, module: FederatedModule) -> list[str]:
    """Names of the columns with the ends of intervals."""
    if module.run.outputs.intervals is None:
        return []
    return [f"{name}_{end}" for name in class_names(trainer, module) for end in ("lower", "upper")]


def _ids(trainer: Trainer, target: str, number: int) -> list[str]:
    """Ids of the samples, in the order of the data module's loader for predictions."""
    data = trainer.predict_loop._data_source.instance  # trainer.datamodule may be one of an earlier fit
    if not isinstance(data, DomainDataModule):
        return [str(place) for place in range(number)]
    ids = data.ids(target, "predict")
    if ids is None:
        ids = [str(place) for place in data.split(target).test.tolist()]
    if len(ids) < number:
        raise ValueError(
            f"{number} samples of target {target!r} were predicted, but {type(data).__name__} has ids of {len(ids)} "
            "samples to predict: give trainer.predict a loader in place of the data module (dataloaders=...)"
        )
    return ids[:number]  # of fewer, as under limit_predict_batches, the first
