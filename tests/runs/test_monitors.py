"""Callbacks that monitor what nothing logs: the error says what there is, and what to monitor."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fedlit
from fedlit import FederatedModule
from fedlit.data import HeartDisease
from fedlit.methods import FedAvg
from fedlit.models import MLP
from own_modules import Net
from refused import refused
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, build, trainer


class Validated(Net):
    """Logs a number of no label, and one of labels, in a validation_step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(1.0))
        self.log("right", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())


def wrapped() -> FederatedModule:
    torch.manual_seed(0)
    return fedlit.Federated(Validated(), CLIENTS, TARGET, NUM_CLASSES)


def fit(callback: Callback, module: FederatedModule, folder: Path, **kwargs: Any) -> None:
    trainer(3, [callback], folder, enable_checkpointing=True, **kwargs).fit(module, Blobs())


OF_THE_MODULE = "training_step, validation_step of Validated logs are those of one client each, source/NAME/... and "
KINDS = [(EarlyStopping, RuntimeError), (ModelCheckpoint, MisconfigurationException)]


@pytest.mark.parametrize(
    ("kind", "error", "every"), [(*KINDS[0], 1), *(pytest.param(*kind, 2, marks=pytest.mark.slow) for kind in KINDS)]
)
@pytest.mark.parametrize(
    ("monitor", "advice"),
    [
        ("right", "monitor one of 'source/right', 'source/amazon/right', 'source/dslr/right', 'source/caltech/right'."),
        ("batch_loss", "monitor one of 'source/amazon/batch_loss', 'source/dslr/batch_loss', 'source/caltech/batch_lo"),
        ("source/accc", "did you mean 'source/acc'?"),
        ("loss", "monitor one of 'source/amazon/loss', 'source/dslr/loss', 'source/caltech/loss', 'train/loss'."),
    ],
)
def test_a_number_of_a_wrapped_module_is_monitored_under_its_clients_names(
    tmp_path: Path, monitor: str, advice: str, kind: Any, error: type[Exception], every: int
) -> None:
    expected = f"{kind.__name__}(monitor='{monitor}') needs a number that this run does not log: {advice}"
    with pytest.raises(error, match=re.escape(expected)) as told:
        fit(kind(monitor=monitor), wrapped(), tmp_path, check_val_every_n_epoch=every)
    assert OF_THE_MODULE in str(told.value)
    there = str(told.value).partition("There are ")[2].split(", ")
    assert {"source/NAME/batch_loss", "source/NAME/acc", "target/score"} <= {*there}
    assert len(there) == len({*there})


@pytest.mark.parametrize(("kind", "error"), KINDS)
def test_a_misspelt_monitor_of_any_method_is_told_what_was_meant(
    tmp_path: Path, kind: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"needs a number .* does not") as told:
        fit(kind(monitor="target/scor", mode="max"), build(), tmp_path)
    assert "validation_step" not in str(told.value)


def test_what_is_logged_may_be_monitored_and_a_lenient_callback_stays_lenient(tmp_path: Path) -> None:
    fit(EarlyStopping("source/amazon/batch_loss"), wrapped(), tmp_path)
    fit(EarlyStopping("nothing", strict=False), build(), tmp_path)


def test_errors_in_regression_may_be_monitored_and_are_better_the_lower(tmp_path: Path) -> None:
    for monitor in ("source/rmse", "source/cleveland/mae"):
        data = HeartDisease(predict="heart_rate", seed=0)
        module = FedAvg(data.clients, data.target, 1, MLP(data.in_features, [8]), task="regression")
        saver = ModelCheckpoint(tmp_path, monitor=monitor)
        trainer(2, [saver, EarlyStopping(monitor)], tmp_path, enable_checkpointing=True).fit(module, data)
        assert saver.best_model_score is not None
        with refused("mode"):
            trainer(1, [EarlyStopping(monitor, mode="max")], tmp_path).fit(module, data)


SCORES = ["target/score", "source/acc", "source/amazon/acc", "validator/trust", "source/r2", "source/dslr/auroc"]
LOSSES = ["train/loss", "source/amazon/loss", "source/amazon/eval_loss"]


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
@pytest.mark.parametrize(("mode", "monitors"), [("min", SCORES), ("max", LOSSES)])
def test_the_worst_round_is_not_taken_for_the_best(tmp_path: Path, kind: Any, mode: str, monitors: list[str]) -> None:
    for monitor in monitors:
        with refused("mode"):
            fit(kind(monitor=monitor, mode=mode), build(), tmp_path)


def test_a_schedule_that_waits_for_a_higher_loss_is_refused(tmp_path: Path) -> None:
    def plateau(optimizer: torch.optim.Optimizer, mode: Any) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, mode)

    fit(EarlyStopping("target/score", mode="max"), build(lr_scheduler=partial(plateau, mode="min")), tmp_path)
    with refused("mode"):
        fit(EarlyStopping("target/score", mode="max"), build(lr_scheduler=partial(plateau, mode="max")), tmp_path)


class Broken(Callback):
    """Fails as anybody's callback may, beside one that monitors what is not there yet."""

    monitor = "never"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        raise RuntimeError("no metric here")


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^no metric here$"):
        fit(Broken(), build(), tmp_path)
