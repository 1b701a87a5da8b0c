"""A warm-up that is a share of the planned rounds: how many rounds that are, resumption, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fedlit import Component, FederatedModule, Run, methods
from refused import refused
from small_federation import Blobs, build, trainer


class Kinds(pl.Callback, Component):
    """By round, whether it was one of the warm-up."""

    def __init__(self) -> None:
        self.warm: list[bool] = []

    def on_round_start(self, run: Run) -> None:
        self.warm.append(run.clock.warming_up)


def fitted(folder: Path, rounds: int, warmup: int | float, method: Any = methods.FedMMD, **kwargs: Any) -> Any:
    kinds = Kinds()
    module = build(method, warmup_rounds=warmup)
    callbacks = kwargs.pop("callbacks", [])
    saves = {"enable_checkpointing": bool(callbacks), "limit_val_batches": 0}
    run = trainer(rounds, [kinds, *callbacks], folder, **saves)
    run.fit(module, Blobs(), **kwargs)
    return module, kinds.warm


class Stop(pl.Callback):
    """Ends a run with its first step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        trainer.should_stop = True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("share", "steps", "expected"),
    [
        (0.5, 100, {1: 0, 2: 1, 3: 1, 30: 15}),  # the whole rounds in it
        (0.29, 100, {100: 29}),
        (0.999, 100, {30: 29}),  # a round is left for the method
        (3, 1, {10: 3}),
        (0.5, 10, {15: 10, 20: 10, 30: 15}),  # a hundred local steps
        (0.5, 1, {1: 0, 2: 1, 3: 2, 4: 3, 133: 99, 200: 100, 300: 150}),  # or three quarters of the rounds
        (0.1, 30, {20: 4}),  # 120 steps; 3 rounds have 90
        (0.9, 1, {10: 9}),  # more than three quarters, as the user said
    ],
)
def test_a_share_is_so_many_of_the_planned_rounds(
    share: float, steps: int, expected: dict[int, int], tmp_path: Path
) -> None:
    for rounds, warm in expected.items():
        module = build(methods.FedMMD, warmup_rounds=share)
        given = {"limit_val_batches": 0, "strategy": {"local_steps": steps}}
        trainer(rounds, [Stop()], tmp_path, **given).fit(module, Blobs())
        assert module.warmup_rounds == warm


@pytest.mark.parametrize("method", [methods.FedMMD, methods.FedDaDiL, methods.KD3A])
def test_a_share_trains_as_that_number_of_rounds_does(tmp_path: Path, method: type[FederatedModule]) -> None:
    (share, warm), (number, _) = fitted(tmp_path, 5, 0.5, method), fitted(tmp_path, 5, 3, method)
    assert warm == [True, True, True, False, False]  # three quarters: so few rounds have fewer than 100 local steps
    for name, value in number.state_dict().items():
        assert torch.equal(share.state_dict()[name], value), name


def test_a_run_of_one_round_has_no_warm_up(tmp_path: Path) -> None:
    assert fitted(tmp_path, 1, 0.5)[1] == [False]


def test_a_run_that_goes_on_for_longer_keeps_its_warm_up(tmp_path: Path) -> None:
    """4 rounds were planned, 3 of them warm; after round 1 the run is told of 8."""
    saved = ModelCheckpoint(dirpath=tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    fitted(tmp_path, 4, 0.5, callbacks=[saved])
    _, warm = fitted(tmp_path, 8, 0.5, ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    assert warm == [True, True, False, False, False, False, False]


def test_a_dictionary_of_a_checkpoint_is_there_after_its_warm_up(tmp_path: Path) -> None:
    """Loading knows the warm-up of the run: 4 of 6 rounds."""
    saved = ModelCheckpoint(dirpath=tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    trained, _ = fitted(tmp_path, 6, 0.5, methods.FedDaDiL, callbacks=[saved])
    again, warm = fitted(tmp_path, 6, 0.5, methods.FedDaDiL, ckpt_path=str(tmp_path / "epoch=4.ckpt"))
    assert warm == [False]
    assert again.warmup_rounds == 4
    for got, expected in zip(again.reconstruct(again.target), trained.reconstruct(trained.target), strict=True):
        assert torch.equal(got, expected)


def test_a_share_of_a_run_without_an_end_is_refused(tmp_path: Path) -> None:
    with refused("warmup_rounds"):
        fitted(tmp_path, -1, 0.5)


def test_a_share_of_a_run_that_steps_may_end_is_refused(tmp_path: Path) -> None:
    module = build(methods.FedMMD, warmup_rounds=0.5)
    with pytest.raises(ValueError, match=r"warmup_rounds=0\.5 is a share of"):
        trainer(4, [], tmp_path, limit_val_batches=0, max_steps=8).fit(module, Blobs())
