"""Phases with an optimiser, batch size and local steps of their own, in one run and checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD, Adam

from fedlit import FederatedModule
from fedlit.federation import RosterError
from fedlit.methods import FedDaDiL, SourceOnly
from fedlit.models import MLP
from fedlit.run.component import PhaseSettings
from fedlit.run.planning import paces_of
from helpers import Snapshots, assert_resumes, loader, same, trainer, unequal
from refused import refused

ENCODER = PhaseSettings(partial(Adam, lr=0.01), batch_size=5, local_steps=3)
CLIENTS, TARGET = ["c0", "c1", "c2"], "c2"


def build(method: type[FederatedModule] = FedDaDiL, **kwargs: Any) -> FederatedModule:
    torch.manual_seed(0)
    if method is FedDaDiL:
        atoms = {
            "num_atoms": 2,
            "atom_size": 6,
            "penalty": 0.1,
            "weighting": "samples",
            "optimizer": partial(SGD, lr=0.05),
        }
        kwargs = {**atoms, "warmup_rounds": 2, "encoder": ENCODER, **kwargs}
    return method(CLIENTS, TARGET, 2, MLP(5, [4]), **kwargs)


class Steps(pl.Callback):
    """By epoch: the length that Lightning has for it, its steps with the batches' sizes, and its validations."""

    def __init__(self) -> None:
        self.lengths: list[float] = []
        self.sizes: list[list[dict[str, int]]] = []
        self.validations: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.lengths.append(trainer.num_training_batches)
            self.sizes.append([])
        self.sizes[-1].append({name: len(samples[0]) for name, samples in batch.items()})

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.validations.append(len(self.sizes[-1]))


def network(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if name.startswith(("extractor", "classifier"))}


@pytest.mark.parametrize("rounds", [2, 4])
def test_the_encoder_of_a_run_is_that_of_fedavg_with_its_settings(rounds: int) -> None:
    """Adam on batches of 5, three steps a round: FedAvg over the sources with these settings for the whole run."""
    both, alone = Snapshots(), Snapshots()
    trainer(rounds, [both]).fit(build(), loader(unequal()))
    sources = build(SourceOnly, optimizer=ENCODER.optimizer)
    trainer(2, [alone], strategy={"local_steps": 3}).fit(sources, loader(unequal(), 5))
    for ours, theirs in zip(both.rounds[:2], alone.rounds, strict=True):
        assert all(same(network(ours[name]), network(theirs[name])) for name in CLIENTS)
    assert all(same(network(each[TARGET]), network(alone.rounds[1][TARGET])) for each in both.rounds[2:])


def test_rounds_have_the_length_and_batches_of_their_phase() -> None:
    steps, data = Steps(), unequal()
    validation = loader(data, 32, training=False, guarded=TARGET)
    trainer(4, [steps]).fit(build(), loader(data), validation)
    assert steps.lengths == [3, 3, 3, 3]  # the last two: one pass over 20 samples in batches of 8
    encoder = [{"c0": 5, "c1": 5}] * 3
    assert steps.sizes[0] == encoder
    assert [each["c0"] for each in steps.sizes[1]] == [5, 5, 5]
    assert steps.sizes[2] == [{"c0": 8, "c1": 8}, {"c0": 8, "c1": 8}, {"c0": 4, "c1": 1}]
    assert steps.sizes[3] == [{"c0": 8, "c1": 8, "c2": 8}, {"c0": 8, "c1": 8, "c2": 6}, {"c0": 4, "c1": 1}]
    assert steps.validations == [3, 3, 3, 3]


@pytest.mark.parametrize("limit", [0.5, 3])
def test_epochs_follow_the_phases_lengths_and_the_trainers_limit(limit: float) -> None:
    steps = Steps()
    module = build(encoder=PhaseSettings(local_steps=6))
    run = trainer(4, [steps], limit_train_batches=limit, strategy={"local_steps": 2})
    run.fit(module, loader(unequal()), loader(unequal(), 32, training=False, guarded=TARGET))
    expected = {0.5: [3, 3, 1, 1], 3: [3, 3, 2, 2]}[limit]
    assert [len(each) for each in steps.sizes] == steps.validations == expected
    assert run.global_step == sum(expected)


@pytest.mark.parametrize("start", ["class_moments", "random"])
def test_checkpoints_of_each_step_resume_across_phases(tmp_path: Path, start: str) -> None:
    """Steps 1 to 6 are the encoder's with Adam, 7 to 9 the round of moments, if any, then the atoms' with SGD."""
    make = partial(build, atom_start=start, encoder=PhaseSettings(partial(Adam, lr=0.01), 5, 3))
    assert_resumes(make, lambda: loader(unequal()), tmp_path, [2, 6, 8], rounds=5)


def test_the_checkpoint_of_a_phases_last_round_has_the_next_phases_optimizer(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer(4, [saver], enable_checkpointing=True).fit(build(), loader(unequal()))
    saved = [torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=False) for epoch in range(4)]
    settings = [each["clients"]["c0"]["optimizers"][0][0] for each in saved]
    assert ["betas" in each for each in settings] == [True, False, False, False]
    assert saved[0]["plan"]["paces"] == [(0, 5, 3), (2, None, None)]


def test_a_resumed_run_has_the_phases_of_its_checkpoint(tmp_path: Path) -> None:
    run = trainer(1)
    run.fit(build(), loader(unequal()))
    run.save_checkpoint(tmp_path / "one.ckpt")
    other = build(encoder=PhaseSettings(ENCODER.optimizer, 5, 2))
    with pytest.raises(RosterError, match="paces was"):
        trainer(4).fit(other, loader(unequal()), ckpt_path=tmp_path / "one.ckpt")


def test_steps_of_a_run_end_with_a_round_of_any_phase() -> None:
    """Two rounds of 3 steps, then rounds of one pass: 3 steps."""
    module = build(encoder=PhaseSettings(local_steps=2))
    run = trainer(-1, max_steps=7)
    run.fit(module, loader(unequal()))
    assert (run.global_step, module.federation.round_idx) == (7, 3)
    with refused("max_steps"):
        trainer(-1, max_steps=6).fit(build(encoder=PhaseSettings(local_steps=2)), loader(unequal()))


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({"encoder": PhaseSettings()}, [(0, None, 4)]),  # one pace, as of a method without phases
        ({"encoder": PhaseSettings(local_steps=4)}, [(0, None, 4)]),
        ({"encoder": PhaseSettings(batch_size=2)}, [(0, 2, 4), (2, None, 4)]),
        ({"encoder": PhaseSettings(local_steps=1), "warmup_rounds": 0}, [(0, None, 4)]),
    ],
)
def test_phases_of_equal_settings_are_planned_as_one(phases: dict[str, Any], expected: list[Any]) -> None:
    paces = paces_of(build(**phases).run, local_steps=4)
    assert [(each.first_round, each.batch_size, each.local_steps) for each in paces] == expected


def test_an_epoch_of_several_rounds_has_rounds_of_one_length() -> None:
    with refused("rounds_per_epoch"):
        trainer(2, strategy={"rounds_per_epoch": 2}).fit(build(), loader(unequal()))


@pytest.mark.parametrize("name", ["batch_size", "local_steps"])
def test_settings_of_a_phase_are_at_least_one(name: str) -> None:
    with refused(name):
        PhaseSettings(**{name: 0})
