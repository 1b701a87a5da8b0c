"""Settings of parameter groups by part and client, and resumes with another optimiser or schedule."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
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

from faulty_samples import CLIENTS, NUM_CLASSES, TARGET, WIDTH, load, parts
from fedlit import Client, FederatedModule
from fedlit.federation import RosterError
from fedlit.methods import FADA, CoMDA, FedAvg, FedDANN, FedGP, FedWDGRL, FinetuneOffline, TargetOnly
from fedlit.models import MLP
from helpers import STATEFUL, build, digits, loader, same, shards, trainer, weights
from refused import refused, slow

BY_PART = [
    {"part": "extractor", "lr": 0.003},
    {"part": "discriminator", "lr": 0.03, "weight_decay": 0.01},
    {"client": "fonts", "part": "classifier", "lr": 0.02},
]


def rates(module: FederatedModule) -> list[tuple[str, float]]:
    return [(group["client"], group["lr"]) for group in module.trainer.optimizers[0].param_groups]


def fitted(method: type[FederatedModule], data: Any = None, rounds: int = 1, **kwargs: Any) -> FederatedModule:
    data = digits() if data is None else data
    module = build(method, data, **({"optimizer": lambda params: SGD(params, lr=0.1)} | kwargs))
    trainer(rounds, gradient_clip_val=0.05).fit(module, data)
    return module


def test_each_part_of_each_client_moves_by_its_own_settings() -> None:
    data = shards(2, 16)
    torch.manual_seed(0)
    names: list[Client | str] = ["c0", Client("c1", role="target", labelled=True)]
    entries: list[dict[str, Any]] = [
        {"part": "classifier", "lr": 0.5},
        {"client": "c0", "part": "extractor", "lr": 0.02},
        {"client": "c1", "part": "classifier", "lr": 0.25},  # above the first
        {"client": "c1", "part": "extractor.layers.0", "weight_decay": 0.3},
    ]
    module = TargetOnly(names, "c1", 2, MLP(5, [4]), optimizer=lambda params: SGD(params, lr=0.1), param_groups=entries)
    module.learners = lambda round_idx: module.clients  # type: ignore[method-assign]
    extractor, classifier = copy.deepcopy(module.originals)
    trainer(1).fit(module, loader(data, batch_size=16))
    lr_and_decay = {
        ("c0", "extractor"): (0.02, 0.0),
        ("c0", "classifier"): (0.5, 0.0),
        ("c1", "extractor"): (0.1, 0.3),
        ("c1", "classifier"): (0.25, 0.0),
    }
    for client, samples in data.items():
        x, y = samples.tensors
        F.cross_entropy(classifier(extractor(x)), y).backward()
        moved = weights(module, client)
        for part, network in (("extractor", extractor), ("classifier", classifier)):
            lr, decay = lr_and_decay[client, part]
            for name, param in network.named_parameters():
                assert param.grad is not None
                expected = param - lr * (param.grad + decay * param)
                torch.testing.assert_close(moved[f"{part}.{name}"], expected.detach(), rtol=1e-5, atol=1e-7)
            network.zero_grad()


@pytest.mark.parametrize("method", [FedAvg, FedDANN, CoMDA])
def test_a_division_into_equal_settings_changes_nothing(method: type[FederatedModule]) -> None:
    entries = [{"part": "classifier", "lr": 0.1}, {"client": "clean", "weight_decay": 0.0}]
    one, divided = fitted(method), fitted(method, param_groups=entries)
    assert len(rates(divided)) > len(rates(one))
    for client in ("clean", "blended", "fonts"):
        assert same(weights(one, client), weights(divided, client))


def test_ratios_of_methods_scale_what_entries_do_not_give() -> None:
    parts = [{"part": "classifier", "lr": 1.0}]
    module = fitted(FedDANN, discriminator_lr_ratio=10, param_groups=parts)
    assert [rate for client, rate in rates(module) if client == "fonts"] == [0.1, 1.0, 1.0]
    module = fitted(FedGP, digits(target_labels=30), target_lr_ratio=0.5, param_groups=parts)
    assert rates(module)[-4:] == [("blended", 0.1), ("blended", 1.0), ("fonts", 0.05), ("fonts", 0.5)]
    module = fitted(FinetuneOffline, digits(target_labels=30), target_lr_ratio=0.5, federated_rounds=1)
    assert rates(module) == [("clean", 0.1), ("blended", 0.1), ("fonts", 0.05)]


def resumable(entries: Any, rounds: int, checkpoint: Path | None = None) -> tuple[FederatedModule, pl.Trainer]:
    data = digits()
    module = build(FedDANN, data, **STATEFUL, schedule_rounds=2, param_groups=entries)
    run = trainer(rounds, gradient_clip_val=1.0)
    run.fit(module, data, ckpt_path=checkpoint)
    return module, run


def test_a_resumed_run_equals_one_in_a_row_and_needs_the_same_groups(tmp_path: Path) -> None:
    straight, _ = resumable(BY_PART, 2)
    _, half = resumable(BY_PART, 1)
    path = tmp_path / "half.ckpt"
    half.save_checkpoint(path)
    torch.load(path, weights_only=True)
    resumed, _ = resumable(BY_PART, 2, path)
    for client in ("clean", "blended", "fonts"):
        assert same(weights(straight, client), weights(resumed, client))
    assert not same(weights(straight, "fonts"), weights(resumable(None, 2)[0], "fonts"))
    with pytest.raises(RosterError, match=r"groups of \[2, 2, 4\] parameters"):
        resumable(None, 2, path)
    other = [{**BY_PART[0], "lr": 0.5}, *BY_PART[1:]]
    with pytest.warns(UserWarning, match=r"param_groups was .*: an optimizer goes"):
        changed, _ = resumable(other, 2, path)
    assert same(weights(straight, "fonts"), weights(changed, "fonts"))


@pytest.mark.parametrize(
    ("method", "entry", "argument"),
    [
        (FedAvg, {"lr": 0.1}, "param_groups[0]"),
        (FedAvg, {"part": "classifier"}, "param_groups[0]"),
        (FedAvg, "classifier", "param_groups[0]"),
        (FedAvg, {"part": 0, "lr": 0.1}, "param_groups[0]['part']"),
        (FedAvg, {"client": "x", "lr": 0.1}, "param_groups[0]['client']"),
        (FedAvg, {"part": "clasifier", "lr": 0.1}, "param_groups[0]['part']"),
        (CoMDA, {"part": "peer", "client": "clean", "lr": 0.1}, "param_groups[0]['part']"),
        (FedAvg, {"part": "classifier", "learning_rate": 0.1}, "param_groups[0]"),
        (FedAvg, {"part": "classifier", "params": []}, "param_groups[0]"),
        (FedAvg, {"part": "classifier", "lr": -0.1}, "param_groups[0]['lr']"),
        (FedAvg, {"client": "clean", "lr": float("nan")}, "param_groups[0]['lr']"),
        (FADA, {"part": "discriminator", "lr": 0.1}, "param_groups[0]['part']"),
        (FedWDGRL, {"part": "discriminator.0", "lr": 0.1}, "param_groups[0]['part']"),
    ],
)
def test_entries_that_would_do_nothing_or_harm_are_refused(
    method: type[FederatedModule], entry: Any, argument: str
) -> None:
    with refused(argument):
        fitted(method, param_groups=[entry])


def test_a_rate_that_a_ratio_would_scale_is_refused() -> None:
    with refused("discriminator_lr_ratio"):
        fitted(FedDANN, discriminator_lr_ratio=10, param_groups=[{"part": "discriminator.0", "lr": 0.1}])
    with refused("target_lr_ratio"):
        given = digits(target_labels=30)
        fitted(FedGP, given, target_lr_ratio=0.5, param_groups=[{"client": "fonts", "lr": 0.1}])


class OwnOptimizer(FedAvg):
    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return SGD(self.client_param_groups(), lr=0.1)


def test_frozen_parts_and_own_optimisers_take_no_settings() -> None:
    data = digits()
    module = build(FedAvg, data, param_groups=[{"part": "extractor", "lr": 0.1}])
    module.originals[0].requires_grad_(False)
    with refused("param_groups[0]['part']"):
        trainer(1).fit(module, data)
    with refused("param_groups"):
        fitted(OwnOptimizer, param_groups=[{"part": "extractor", "lr": 0.1}])


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
    ("before", "now"), [(partial(SGD, lr=0.1), ADAM), slow(ADAM, partial(SGD, lr=0.1)), slow(ADAM, RMSprop)]
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
        None, step(0.5), slow(lambda optimizer: ConstantLR(optimizer)),
        slow(lambda optimizer: CosineAnnealingLR(optimizer, 4)),
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0),
    ],
)  # fmt: skip
def test_the_same_optimizer_and_schedule_are_resumed_without_a_word(schedule: Schedule, tmp_path: Path) -> None:
    fit(3, tmp_path / "a.ckpt", schedule=schedule)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*goes on with")
        fit(4, tmp_path / "a.ckpt", schedule=schedule, resume=True)


@pytest.mark.parametrize("arguments", [{"optimizer": "adam"}, {"lr_scheduler": {"step_size": 3}}, {"optimizer": None}])
def test_what_makes_no_optimizer_is_refused_by_name(arguments: dict[str, Any]) -> None:
    (name, given), *_ = arguments.items()
    with pytest.raises(TypeError, match=f"{name} must be a function that makes one, .*, got {re.escape(repr(given))}"):
        FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(WIDTH, [8]), **arguments)
    module = FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(WIDTH, [8]), optimizer=lambda params: len([*params]))
    with refused("optimizer", TypeError):
        trainer(1).fit(module, load(parts()))
