"""Progress of a run: the share of its planned rounds that are over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from fedlit import Component, FederatedModule, Run
from fedlit.functional import annealing
from fedlit.methods import KD3A, CoMDA, FedAvg, FedDANN
from helpers import build, digits, trainer
from refused import refused


class Seen(pl.Callback, Component):
    """What progress, and the target's learning rate, were in each round."""

    def __init__(self) -> None:
        self.progress: list[float] = []
        self.rates: list[float] = []
        self.end = -1.0

    def on_round_start(self, run: Run) -> None:
        self.progress.append(run.clock.progress)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, FederatedModule)
        if pl_module.federation.batch_idx == 0:  # the first batch of a round
            assert pl_module.run.clock.progress == self.progress[-1]  # the same within it
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedModule)
        self.end = pl_module.run.clock.progress


@pytest.mark.parametrize(
    ("given", "run", "strategy", "progress"),
    [
        ({}, {"rounds": 4}, {}, [0, 1 / 4, 2 / 4, 3 / 4]),
        ({"warmup_rounds": 2}, {"rounds": 5}, {}, [0, 0, 0, 1 / 3, 2 / 3]),
        ({"warmup_rounds": 0.5}, {"rounds": 8}, {"local_steps": 1}, [*[0] * 7, 1 / 2]),
        ({"warmup_rounds": 3}, {"rounds": 3}, {}, [0, 0, 0]),
        ({}, {"rounds": 2}, {"local_steps": 1, "rounds_per_epoch": 3}, [each / 6 for each in range(6)]),
        # two of the three rounds of an epoch
        ({}, {"rounds": 2, "limit_train_batches": 4}, {"local_steps": 2, "rounds_per_epoch": 3},
         [0, 1 / 4, 2 / 4, 3 / 4]),
        ({}, {"rounds": 4, "max_steps": 14}, {}, [0, 1 / 4]),  # a round is of 7 steps
    ],
)  # fmt: skip
def test_progress_goes_from_0_in_the_first_round_after_the_warm_up_to_1(
    given: dict, run: dict, strategy: dict, progress: list[float]
) -> None:
    data, seen = digits(), Seen()
    module = build(FedAvg, data, **given)
    trainer(callbacks=[seen], limit_val_batches=0, strategy=strategy, **run).fit(module, data)
    assert seen.progress == progress
    expected = 1.0 if "max_steps" not in run else 2 / 4
    assert seen.end == (0.0 if given.get("warmup_rounds") == 3 else expected)


def test_a_run_without_a_planned_end_has_no_progress() -> None:
    data = digits()
    run = trainer(-1, [Seen()], max_steps=7)
    with refused("max_epochs"):
        run.fit(build(FedAvg, data), data)
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        _ = build(FedAvg, data).run.clock.progress


def test_methods_go_on_as_they_began_in_a_run_without_a_planned_end() -> None:
    for method, share in ((KD3A, "share_over"), (CoMDA, "own_share"), (FedDANN, "reversal")):
        data = digits()
        module = build(method, data)
        trainer(-1, max_steps=7 * (module.warmup_rounds + 2), limit_val_batches=0).fit(module, data)
        assert getattr(module, share)() == (1.0 if method is FedDANN else 0.0)  # lambda is constant


def test_a_schedule_by_progress_has_the_rate_of_each_round(tmp_path: Path) -> None:
    def run(epochs: int, checkpoint: Path | None = None) -> tuple[Seen, pl.Trainer]:
        data, seen = digits(), Seen()
        module = build(
            FedAvg,
            data,
            optimizer=lambda params: SGD(params, lr=0.1),
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda _: annealing(module.run.clock.progress)),
            warmup_rounds=1,
        )
        run = trainer(epochs, [seen])
        run.fit(module, data, ckpt_path=checkpoint)
        return seen, run

    straight, _ = run(5)
    assert straight.rates == [0.1 * annealing(share) for share in (0, 0, 1 / 4, 2 / 4, 3 / 4)]
    _, half = run(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = run(5, tmp_path / "half.ckpt")
    assert resumed.rates == straight.rates[1:]
