"""A resume with another optimiser or schedule than the checkpoint's: what counts is told, or the resume refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

import fedlit
from faulty_samples import CLIENTS, NUM_CLASSES, TARGET, WIDTH, load, parts
from fedlit.methods import FedAvg
from fedlit.models import MLP
from helpers import trainer
from own_modules import Simple

Schedule = Callable[[Optimizer], LRScheduler] | None
ADAM = partial(Adam, lr=0.01)


def fit(rounds: int, path: Path, optimizer: Any = ADAM, schedule: Schedule = None, resume: bool = False) -> set[float]:
    """Learning rates at the end."""
    torch.manual_seed(0)
    module = FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(WIDTH, [8]), optimizer=optimizer, lr_scheduler=schedule)
    rates: set[float] = set()

    class End(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            rates.update(group["lr"] for group in trainer.optimizers[0].param_groups if group["client"] != TARGET)

    run = trainer(rounds, [End()])
    run.fit(module, load(parts()), ckpt_path=path if resume else None, weights_only=False)
    run.save_checkpoint(path)
    return rates


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (partial(SGD, lr=0.01), partial(SGD, lr=0.1), "optimizer SGD goes on .* lr"),
        (partial(SGD, lr=0.01), partial(SGD, lr=0.01, momentum=0.9), "momentum was 0 and is 0.9"),
        (ADAM, partial(AdamW, lr=0.01, weight_decay=0), "decoupled_weight_decay was False and is True"),
    ],
)
def test_settings_that_a_resume_does_not_take_are_named(before: Any, now: Any, message: str, tmp_path: Path) -> None:
    rates = fit(1, tmp_path / "a.ckpt", before)
    with pytest.warns(UserWarning, match=message):
        assert fit(2, tmp_path / "a.ckpt", now, resume=True) == rates


@pytest.mark.parametrize(
    ("before", "now"), [(partial(SGD, lr=0.1), ADAM), (ADAM, partial(SGD, lr=0.1)), (ADAM, RMSprop)]
)
def test_another_optimizer_cannot_take_over_a_state(before: Any, now: Any, tmp_path: Path) -> None:
    fit(1, tmp_path / "a.ckpt", before)
    with pytest.raises(
        ValueError, match=r"checkpoint's optimizer has the settings .* lacks: resume with the optimizer of"
    ):
        fit(2, tmp_path / "a.ckpt", now, resume=True)


def step(gamma: float) -> Schedule:
    return lambda optimizer: StepLR(optimizer, 1, gamma)


def test_another_schedule_is_named_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fit(1, path, schedule=step(0.5))
    with pytest.warns(UserWarning, match="StepLR goes on with .* gamma was 0.5") as told:
        assert fit(2, tmp_path / "a.ckpt", schedule=step(0.9), resume=True) == {0.0025}
    assert sum("goes on" in str(each.message) for each in told) == 1
    for other in (lambda optimizer: ExponentialLR(optimizer, 0.9), lambda optimizer: CosineAnnealingLR(optimizer, 3)):
        with pytest.raises(ValueError, match=r"the settings \['gamma', 'step_size'\], and .* has"):
            fit(3, path, schedule=other, resume=True)
    with pytest.warns(UserWarning, match="lr_scheduler was given and is None"):
        fit(3, path, resume=True)


@pytest.mark.parametrize(
    "schedule",
    [
        None, step(0.5), lambda optimizer: ConstantLR(optimizer), lambda optimizer: CosineAnnealingLR(optimizer, 4),
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0),
    ],
)  # fmt: skip
def test_the_same_optimizer_and_schedule_are_resumed_without_a_word(schedule: Schedule, tmp_path: Path) -> None:
    fit(3, tmp_path / "a.ckpt", schedule=schedule)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*goes on with")
        fit(4, tmp_path / "a.ckpt", schedule=schedule, resume=True)


def test_a_module_of_ones_own_is_warned_of_as_well(tmp_path: Path) -> None:
    def run(lr: float, rounds: int, path: Path | None = None) -> None:
        module = fedlit.Federated(Simple(nn.Linear(WIDTH, NUM_CLASSES), lr), CLIENTS, TARGET, NUM_CLASSES)
        run = trainer(rounds)
        run.fit(module, load(parts()), ckpt_path=path, weights_only=False)
        run.save_checkpoint(tmp_path / "a.ckpt")

    run(0.01, 1)
    with pytest.warns(UserWarning, match="lr was 0.01 and is 0.1"):
        run(0.1, 2, tmp_path / "a.ckpt")


@pytest.mark.parametrize("arguments", [{"optimizer": "adam"}, {"lr_scheduler": {"step_size": 3}}, {"optimizer": None}])
def test_what_makes_no_optimizer_is_refused_by_name(arguments: dict[str, Any]) -> None:
    (name, given), *_ = arguments.items()
    with pytest.raises(TypeError, match=f"{name} must be a function that makes one, .*, got {re.escape(repr(given))}"):
        FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(WIDTH, [8]), **arguments)
    module = FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(WIDTH, [8]), optimizer=lambda params: len([*params]))
    with pytest.raises(TypeError, match=r"optimizer must make a torch.optim.Optimizer"):
        trainer(1).fit(module, load(parts()))
