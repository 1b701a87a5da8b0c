"""A warm-up that is a share of the planned rounds: how many rounds that are, resumption, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fedlit import FederatedModule, methods
from fedlit.run.clock import warmup_of
from fedlit.run.component import Component
from fedlit.run.run import Run
from refused import refused
from small_federation import TARGET, Blobs, build, trainer


class Kinds(pl.Callback, Component):
    """By round, whether it was one of the warm-up."""

    def __init__(self) -> None:
        self.warm: list[bool] = []

    def on_round_start(self, run: Run) -> None:
        module: Any = run.module
        self.warm.append(module.run.clock.warming_up)


def fitted(folder: Path, rounds: int, warmup: int | float, method: Any = methods.FedMMD, **kwargs: Any) -> Any:
    kinds = Kinds()
    module = build(method, warmup_rounds=warmup)
    callbacks = kwargs.pop("callbacks", [])
    saves = {"enable_checkpointing": bool(callbacks), "limit_val_batches": 0}
    run = trainer(rounds, [kinds, *callbacks], folder, **saves)
    run.fit(module, Blobs(), **kwargs)
    return module, kinds.warm


def test_a_share_is_the_whole_rounds_in_it() -> None:
    assert [warmup_of(0.5, rounds, steps=100) for rounds in (1, 2, 3, 30)] == [0, 1, 1, 15]
    assert warmup_of(0.29, 100, steps=100) == 29
    assert warmup_of(0.999, 30, steps=100) == 29  # a round is left for the method
    assert [warmup_of(rounds, None, steps=1) for rounds in (0, 3, 5.0)] == [0, 3, 5]


def test_a_share_has_a_hundred_local_steps_or_three_quarters_of_the_rounds() -> None:
    assert [warmup_of(0.5, rounds, steps=10) for rounds in (15, 16, 18, 20, 30)] == [10, 10, 10, 10, 15]
    assert [warmup_of(0.5, rounds, steps=1) for rounds in (1, 2, 3, 4, 15, 133, 200, 300)] == [
        0, 1, 2, 3, 11, 99, 100, 150
    ]  # fmt: skip
    assert warmup_of(0.1, 20, steps=30) == 4  # 120 steps; 3 rounds have 90
    assert warmup_of(0.9, 10, steps=1) == 9  # more than three quarters, as the user said


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


@pytest.mark.parametrize("value", [-1, -0.5, 1.5, math.inf, math.nan])
def test_what_is_no_number_of_rounds_and_no_share_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"a share of the planned ones, above 0 and below 1, got {value}"):
        build(methods.FedMMD, warmup_rounds=value)


def test_a_share_of_a_run_without_an_end_is_refused(tmp_path: Path) -> None:
    with refused("warmup_rounds"):
        fitted(tmp_path, -1, 0.5)


def test_a_share_of_a_run_that_steps_may_end_is_refused(tmp_path: Path) -> None:
    module = build(methods.FedMMD, warmup_rounds=0.5)
    with pytest.raises(
        ValueError, match=r"warmup_rounds=0\.5 is a share of max_epochs' rounds, and max_steps=8 may end"
    ):
        trainer(4, [], tmp_path, limit_val_batches=0, max_steps=8).fit(module, Blobs())


def test_a_whole_float_is_a_number_of_rounds() -> None:
    assert build(methods.FedMMD, warmup_rounds=5.0).warmup_rounds == 5
    assert TARGET in [client.name for client in build(methods.FedMMD, warmup_rounds=0.5).clients]
