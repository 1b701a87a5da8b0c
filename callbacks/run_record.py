"""RunRecord: the files of a run's folder, from the command or a script."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from pydoc import locate
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fedlit.callbacks.communication_ledger import CommunicationLedger
from fedlit.callbacks.oracle_accuracy import OracleAccuracy
from fedlit.callbacks.round_timer import RoundTimer
from fedlit.callbacks.run_summary import RunSummary, summarise
from fedlit.callbacks.shared import class_names, federated, is_dry, write_rows, write_whole
from fedlit.callbacks.target_predictions import TargetPredictions
from fedlit.callbacks.tracking import (
    Artifacts,
    hides_from_others,
    log_settings,
    public,
    tags_at_start,
    tell_of_lost,
)
from fedlit.data import DomainDataModule
from fedlit.federation import RosterError, reveal_for_oracle
from fedlit.federation.labels import known_labels
from fedlit.federation.streams import was_seeded
from fedlit.module import FederatedModule
from fedlit.run.tasks import Classification, Unscored

HEADER = ["client", "x", "y", "predicted", "label"]
MAX_SAMPLES = 150
"""Of a client in the table."""
_KEPT = 2000
"""Samples of a client that these are drawn from."""

SUMMARY, METRICS, SETTINGS, EMBEDDINGS = "summary.json", "metrics.csv", "settings.yaml", "embeddings.csv"
MODEL = "model"
"""Folder of the model that `Artifacts` sends."""

_VERSION = re.compile(r"version_(\d+)")


class Embeddings:
    """Extracted features of clients' test samples, in the plane of their first two principal components.

    Features of different clients' samples never meet on a process that does not host them: the process of the target
    has those of its local clients alone, the other processes none.
    """

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._captured: dict[str, list[Tensor]] = {}
        self._kept: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def start_(self, module: FederatedModule) -> None:
        """Hook into the extractors, if this process hosts the target."""
        self.stop_()
        self._kept = {}
        if not module.federation.is_local(module.target):
            return
        for name, replica in module.replicas.named_children():
            extractor = getattr(replica, "extractor", None)
            if isinstance(extractor, torch.nn.Module):
                captured = self._captured[name] = []
                self._hooks.append(extractor.register_forward_hook(lambda _, __, out, to=captured: to.append(out)))

    def keep_(self, module: FederatedModule, outputs: Any, batch: Any) -> None:
        """Keep a batch of each client that has been predicted from its extractor's features."""
        for name, captured in self._captured.items():
            features = next((each for each in captured if isinstance(each, Tensor)), None)
            captured.clear()
            predicted = outputs.get(name) if isinstance(outputs, Mapping) else None
            if features is None or not isinstance(predicted, Tensor) or len(features) != len(predicted):
                continue
            kept = self._kept.setdefault(name, [])
            if sum(len(each) for each, *_ in kept) < _KEPT:
                labels = (
                    reveal_for_oracle(batch[name][1]) if len(batch[name]) > 1 else torch.full((len(predicted),), -1)
                )
                kept.append((features.detach().flatten(1).cpu(), predicted.detach().cpu(), labels.detach().cpu()))

    def end_(self, trainer: Trainer, module: FederatedModule) -> list[list[str]]:
        """A header and a row for each sample; nothing if nothing was predicted here."""
        self.stop_()
        kept = {name: [*map(torch.cat, zip(*batches, strict=True))] for name, batches in self._kept.items()}
        widths = {features.shape[1] for features, *_ in kept.values()}
        if module.target.name not in kept or len(widths) != 1:
            return []
        generator = torch.Generator().manual_seed(0)  # the same samples in every run
        for name, each in kept.items():
            some = torch.randperm(len(each[0]), generator=generator)[:MAX_SAMPLES].sort().values
            kept[name] = [tensor[some] for tensor in each]
        features = torch.cat([features for features, *_ in kept.values()]).double()
        if not features.isfinite().all():
            return []
        points = iter(_plane(features))
        choosing = isinstance(module.task, Classification)
        names = class_names(trainer, module) if choosing else []
        rows = [HEADER]
        for name, (_, outputs, labels) in kept.items():
            known = known_labels(labels).tolist() if choosing else []
            for place, (output, label) in enumerate(zip(outputs, labels.tolist(), strict=True)):
                x, y = next(points)
                texts = [names[int(output.argmax())], names[label] if known[place] else ""] if choosing else ["", ""]
                rows.append([name, f"{x:.4g}", f"{y:.4g}", *texts])
        return rows

    def stop_(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._captured = [], {}


def _plane(features: Tensor) -> list[list[float]]:
    """Coordinates along the first two principal components, shape (n, 2), of features, shape (n, d)."""
    from sklearn.decomposition import PCA

    found = PCA(min(2, *features.shape), svd_solver="full").fit_transform(features.numpy())
    rows: list[list[float]] = [[*row, 0.0][:2] for row in found.tolist()]
    return rows


class RunLogger(CSVLogger):
    """Write metrics to the file after every epoch, so that an interrupted run can go on."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep a row, and write all rows if it ends an epoch."""
        super().log_metrics(metrics, step)
        if "epoch" in metrics:
            self.save()


class RunRecord(Callback):
    """Write the files that ``fedlit report`` reads into a folder, as the command does.

    In a script it is the only callback that is needed: it adds those that are missing of `OracleAccuracy`,
    `CommunicationLedger`, `RoundTimer`, `TargetPredictions`, the callbacks that the method names, and a CSVLogger. Each
    ``fit`` has its own folder with ``metrics.csv`` (logged metrics, by round), ``summary.json`` (`RunSummary`, after
    ``test`` on test samples, before on the last validation), ``ledger.csv`` (bytes and messages by sender and
    receiver), ``embeddings.csv`` (from ``test``, see `Embeddings`) and ``settings.yaml`` (as far as a script shows
    settings; the command has ``config.yaml``).

    Args:
        folder: In which each run gets ``version_0``, ``version_1`` and so on; ``None`` is the folder of the first
            logger that has one, or ``runs/METHOD`` in the Trainer's ``default_root_dir``. Without any logger and
            folder, and under ``fast_dev_run``, nothing is written, and ``summary`` alone is left.
        method: Name in tables; ``None`` is the class of the module.
        export: Also write the target's model, under this name in the folder: ``NAME.pt2``, ``NAME.onnx``, or ``NAME``
            for a folder with safetensors, see `export_target`.
        awaits_test: Whether ``trainer.test`` follows, without which the run counts as unfinished.

    Attributes:
        path: The run's folder; ``None`` before, and without one.
        summary: Of the last run; ``None`` before.

    Raises:
        TypeError: If the module is no `FederatedModule`.
        ValueError: If ``folder`` is given and the Trainer has a CSVLogger, which has another; or if ``export`` ends
            otherwise, or there is no folder for it.
        ImportError: If libraries for ONNX are missing.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        method: str | None = None,
        export: str | None = None,
        awaits_test: bool = False,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.method = method
        self.export = export
        self.awaits_test = awaits_test
        self.path: Path | None = None
        self.summary: RunSummary | None = None
        self._logger: CSVLogger | None = None
        self._started = 0.0
        self._seconds: float | None = None
        self._trained: FederatedModule | None = None
        self._shape: tuple[int, ...] = ()
        self._embeddings = Embeddings()

    # ---------------------------------------------------------------- folder, logger and callbacks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Claim a folder, and add missing loggers and callbacks."""
        module = federated(pl_module, self)
        if stage != "fit":
            return
        if not was_seeded():
            rank_zero_warn(
                "no seed was given, and no run can repeat this one: call lightning.seed_everything(SEED) before "
                f"networks are built. It is recorded under the seed {module.federation.seed}"
            )
        self._started, self._seconds, self.summary = time.perf_counter(), None, None
        if not is_dry(trainer):
            self._log_to_file(trainer, module)
        log_dir = trainer.log_dir  # a broadcast: all processes ask for it
        self.path = None if log_dir is None or not trainer.loggers else Path(log_dir)
        self._check_export(trainer)
        self._add_callbacks(trainer, module)
        if trainer.is_global_zero and not any(isinstance(each, SaveConfigCallback) for each in trainer.callbacks):  # type: ignore[attr-defined]
            given = public(settings(trainer, module), hides_from_others(module))
            log_settings(trainer.loggers, given, tags_at_start(trainer, module, self.method))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse data that cannot be exported, before rounds are trained."""
        federation, target = federated(pl_module, self).federation, federated(pl_module, self).target
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.export is None or not isinstance(data, DomainDataModule) or not federation.is_local(target):
            return
        from fedlit.export.target import raw_inputs_of  # takes a second to import

        try:
            raw_inputs_of(data)
        except TypeError as error:
            federation.fail(RosterError(f"export={self.export!r}: {error}"))

    def _log_to_file(self, trainer: Trainer, module: FederatedModule) -> None:
        others = [logger for logger in trainer.loggers if logger is not self._logger]
        files = [logger for logger in others if isinstance(logger, CSVLogger)]
        if files and self.folder is not None:
            raise ValueError(
                f"folder={str(self.folder)!r} is given, but the Trainer's CSVLogger writes to {files[0].log_dir!r}: "
                "leave folder out, or the logger (logger=False)"
            )
        if files:  # the folder of the first is that of the run
            trainer.loggers = [files[0], *(logger for logger in others if logger is not files[0])]
        elif self.folder is not None or others:
            there = next((logger.log_dir for logger in others if logger.log_dir), None)
            if self.folder is None and there is not None:
                self._logger = RunLogger(there, name="", version="")
            else:
                parent = self.folder or Path(trainer.default_root_dir, "runs", type(module).__name__)
                name = claim(parent).name if trainer.is_global_zero else ""
                name = trainer.strategy.broadcast(name)
                self._logger = RunLogger(str(parent.parent), name=parent.name, version=name)
            trainer.loggers = [self._logger, *others]

    def _check_export(self, trainer: Trainer) -> None:
        """Raise before training what would fail after it."""
        if self.export is None or is_dry(trainer):
            return
        from fedlit.export.target import check_path  # takes a second to import

        if self.path is None:
            raise ValueError(f"export={self.export!r} needs a folder, but the Trainer has no logger: give folder")
        self.path.mkdir(parents=True, exist_ok=True)
        check_path(self.path / self.export)

    def _add_callbacks(self, trainer: Trainer, module: FederatedModule) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        ledger = None if self.path is None else CommunicationLedger(print_table=False)
        behind = callbacks.index(self) + 1  # Lightning is iterating: their setup is still to come there
        callbacks[behind:behind] = lacking(callbacks, module, ledger)
        module.run.declare_channels()

    # ---------------------------------------------------------------- results

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Record the shape of a sample."""
        if not self._shape and isinstance(batch, Mapping) and batch:
            self._shape = tuple(next(iter(batch.values()))[0].shape[1:])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the metrics so far: a run that goes on from the checkpoint does not log them again."""
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.save()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, and sum up the run unless a test follows."""
        module = federated(pl_module, self)
        timer = next(callback for callback in trainer.callbacks if isinstance(callback, RoundTimer))  # type: ignore[attr-defined]
        self._trained = module
        self._seconds = timer.resumed_s + time.perf_counter() - self._started
        if self.path is not None and trainer.is_global_zero and not (self.path / "config.yaml").is_file():
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / SETTINGS, yaml.safe_dump(settings(trainer, module), sort_keys=False))
        if not self.awaits_test:
            self._sum_up(trainer, module, self._seconds)
            if self.path is not None:
                self._send(trainer, module, self.path)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to collect features."""
        self._embeddings.start_(federated(pl_module, self))

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Collect features of a batch."""
        self._embeddings.keep_(federated(pl_module, self), outputs, batch)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sum up a run that has been trained; here, as Lightning leaves out a test without samples."""
        module = federated(pl_module, self)
        if stage != "test" or self._seconds is None or self._trained is not module:  # or it is of another run
            return
        points = self._embeddings.end_(trainer, module)
        self._sum_up(trainer, module, self._seconds)
        if self.path is not None:
            if points:
                write_rows(self.path / EMBEDDINGS, points)
            self._send(trainer, module, self.path)

    def _send(self, trainer: Trainer, module: FederatedModule, folder: Path) -> None:
        for each in _artifacts(trainer):
            each.send_(trainer, module, folder)
        tell_of_lost(trainer.loggers, folder)

    def _sum_up(self, trainer: Trainer, module: FederatedModule, seconds: float) -> None:
        self.summary = summarise(trainer, module, seconds, self.method)
        if self.path is None:
            return
        if trainer.is_global_zero:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / SUMMARY, self.summary.to_json())
        if module.federation.is_local(module.target):
            self._export(trainer, module, self.summary)

    def _export(self, trainer: Trainer, module: FederatedModule, summary: RunSummary) -> None:
        asked = self.export is not None
        if not asked and not any(each.model for each in _artifacts(trainer)):
            return
        from fedlit.export import export_target  # takes a second to import

        assert self.path is not None
        self.path.mkdir(parents=True, exist_ok=True)
        data = trainer.datamodule  # type: ignore[attr-defined]
        form = data if isinstance(data, DomainDataModule) else self._shape
        scores = summary.published_scores() if trainer.state.fn == TrainerFn.TESTING else None
        try:
            export_target(module, self.path / (self.export or MODEL), form, scores)
        except (TypeError, ImportError) as error:
            if asked:
                raise
            rank_zero_warn(f"the model is not among the artifacts: {error}")


def _artifacts(trainer: Trainer) -> list[Artifacts]:
    return [each for each in trainer.callbacks if isinstance(each, Artifacts)]  # type: ignore[attr-defined]


def lacking(
    callbacks: Sequence[Callback], module: object, ledger: CommunicationLedger | None, *more: Callback | None
) -> list[Callback]:
    """Callbacks of fedlit, and of the method, of whose types there are none yet."""
    needed: list[Any] = [OracleAccuracy(), ledger, RoundTimer(), TargetPredictions(), *more]
    if isinstance(getattr(module, "task", None), Unscored):
        needed = [each for each in needed if not isinstance(each, OracleAccuracy | TargetPredictions)]
    needed += [locate(path)() for path in getattr(module, "watched_by", ())]  # type: ignore[operator]
    return [each for each in needed if each is not None and not any(isinstance(one, type(each)) for one in callbacks)]


def settings(trainer: Trainer, module: FederatedModule) -> dict[str, Any]:
    """Settings of a run in the form of the command's configuration, with objects as the names of their classes."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    extractor, classifier = module.originals
    model = {**dict(module.hparams), "extractor": extractor, "classifier": classifier}
    return {
        "seed_everything": module.federation.seed if was_seeded() else None,
        "model": {"class_path": _class(module), "init_args": {key: _plain(value) for key, value in model.items()}},
        "data": {"class_path": data and _class(data), "init_args": {"target": module.target.name}},
        "trainer": {"max_epochs": trainer.max_epochs, "strategy": {"class_path": _class(trainer.strategy)}},
    }


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _class(value)


def _class(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


# ---------------------------------------------------------------- folders


def claim(parent: Path, name: str | None = None) -> Path:
    """Make a folder that no other process has: ``version_N``, or of this name, with a number at its end if taken."""
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(match[1]) for each in parent.iterdir() if (match := _VERSION.fullmatch(each.name))]
    numbers = count(max(taken, default=-1) + 1)
    numbered = (f"version_{number}" for number in numbers)
    for each in numbered if name is None else chain([name], (f"{name}-{number}" for number in count(1))):
        try:
            (parent / each).mkdir()  # succeeds in one process only
        except FileExistsError:
            continue
        return parent / each
    raise AssertionError("numbers do not end")
