"""Progress of a run, warm-ups, what goes on from a checkpoint, and runs in which nothing is left to train."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import small_federation
from fedlit import Component, FederatedModule, Run, methods
from fedlit.functional import annealing
from fedlit.methods import FADA, KD3A, AdaBN, CoMDA, FedAvg, FedCORAL, FedDANN
from helpers import build, digits, trainer
from refused import refused
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs


@pytest.mark.parametrize("warmup", [0, 1])
def test_weights_that_join_after_a_warm_up_have_momentum_as_from_a_first_step(warmup: int) -> None:
    """Fused SGD, the default, fails on a group in which some weights have momentum and others none yet."""

    def plain(params: Any) -> SGD:
        return SGD(params, lr=0.01, momentum=0.9)

    weights = []
    for given in ({}, {"optimizer": plain}):
        pl.seed_everything(0)
        module = small_federation.build(FADA, warmup_rounds=warmup, disentangle=True, attention_samples=20, **given)
        trainer(2).fit(module, Blobs())
        weights.append(module.replicas[TARGET].state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], msg=name)


def test_a_trust_region_without_a_step_to_limit_is_named() -> None:
    network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())
    module = AdaBN(CLIENTS, TARGET, NUM_CLASSES, Backboned(network, 8), trust_region=0.5)
    with pytest.warns(UserWarning, match=r"trust_region=0.5 has done nothing.*'webcam' took none"):
        trainer(1).fit(module, Blobs())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(1).fit(small_federation.build(FedCORAL, trust_region=0.5), Blobs())
    assert not [each for each in caught if "has done nothing" in str(each.message)]


class Backboned(nn.Sequential):
    """A network that tells the width of its features."""

    def __init__(self, network: nn.Module, out_features: int) -> None:
        super().__init__(network)
        self.out_features = out_features


@pytest.mark.parametrize(
    ("given", "word"), [({"max_epochs": 0}, "max_epochs=0"), ({"limit_train_batches": 0}, "limit_train_batches=0")]
)
def test_a_run_in_which_nothing_is_trained_says_so(given: dict[str, Any], word: str) -> None:
    with pytest.warns(UserWarning, match=f"no round is trained.*{word}"):
        trainer(1, **given).fit(small_federation.build(), Blobs())


def test_a_method_that_has_ended_does_not_ask_for_more_rounds(tmp_path: Path) -> None:
    run = trainer(3)
    run.fit(small_federation.build(methods.FedAnalytic, warmup_rounds=1), Blobs())
    run.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.warns(
        UserWarning, match="has 2 rounds, after which the method ends, whatever is asked for .max_epochs=9"
    ):
        trainer(9).fit(
            small_federation.build(methods.FedAnalytic, warmup_rounds=1), Blobs(), ckpt_path=tmp_path / "end.ckpt"
        )


def extractor_after(rounds: int, trust_region: float | None) -> torch.Tensor:
    """First weights of the target's extractor after a FedMMD run with one round of warm-up and long Adam steps."""
    module = small_federation.build(
        methods.FedMMD,
        warmup_rounds=1,
        trust_region=trust_region,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.05),
    )
    trainer(rounds, limit_val_batches=0).fit(module, Blobs())
    return next(module.replicas[TARGET].extractor.parameters()).detach()


def test_a_target_stays_in_its_trust_region_and_a_wide_one_changes_no_bit() -> None:
    free = extractor_after(3, None)
    assert torch.equal(extractor_after(3, 1e9), free)
    warmed = extractor_after(1, None)
    torch.testing.assert_close(extractor_after(3, 1e-6), warmed, atol=1e-5, rtol=0)
    assert (free - warmed).abs().max() > 0.1


class Seen(pl.Callback, Component):
    """Whether a round was one of the warm-up, progress, and the target's learning rate, in each round."""

    def __init__(self) -> None:
        self.warm: list[bool] = []
        self.progress: list[float] = []
        self.rates: list[float] = []
        self.end = -1.0

    def on_round_start(self, run: Run) -> None:
        self.warm.append(run.clock.warming_up)
        self.progress.append(run.clock.progress)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if pl_module.federation.batch_idx == 0:  # the first batch of a round
            assert pl_module.run.clock.progress == self.progress[-1]  # the same within it
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.end = pl_module.run.clock.progress


def fitted(rounds: int, warmup: int | float, method: Any = methods.FedMMD, **kwargs: Any) -> Any:
    seen = Seen()
    module = small_federation.build(method, warmup_rounds=warmup)
    callbacks = kwargs.pop("callbacks", [])
    saves = {"enable_checkpointing": bool(callbacks), "limit_val_batches": 0}
    run = trainer(rounds, [seen, *callbacks], **saves)
    run.fit(module, Blobs(), **kwargs)
    return module, seen.warm


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
def test_a_share_is_so_many_of_the_planned_rounds(share: float, steps: int, expected: dict[int, int]) -> None:
    for rounds, warm in expected.items():
        module = small_federation.build(methods.FedMMD, warmup_rounds=share)
        given = {"limit_val_batches": 0, "strategy": {"local_steps": steps}}
        trainer(rounds, [Stop()], **given).fit(module, Blobs())
        assert module.warmup_rounds == warm


@pytest.mark.parametrize("method", [methods.FedMMD, methods.KD3A])
def test_a_share_trains_as_that_number_of_rounds_does(method: type[FederatedModule]) -> None:
    (share, warm), (number, _) = fitted(5, 0.5, method), fitted(5, 3, method)
    assert warm == [True, True, True, False, False]  # three quarters: so few rounds have fewer than 100 local steps
    for name, value in number.state_dict().items():
        assert torch.equal(share.state_dict()[name], value), name


def test_a_run_that_goes_on_for_longer_keeps_its_warm_up(tmp_path: Path) -> None:
    """4 rounds were planned, 3 of them warm; after round 1 the run is told of 8."""
    saved = ModelCheckpoint(dirpath=tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    fitted(4, 0.5, callbacks=[saved])
    _, warm = fitted(8, 0.5, ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    assert warm == [True, True, False, False, False, False, False]


def test_a_dictionary_of_a_checkpoint_is_there_after_its_warm_up(tmp_path: Path) -> None:
    """Loading knows the warm-up of the run: 4 of 6 rounds."""
    saved = ModelCheckpoint(dirpath=tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    method = partial(methods.FedDaDiL, num_atoms=2, atom_size=20, atom_batch_size=10)
    trained, _ = fitted(6, 0.5, method, callbacks=[saved])
    again, warm = fitted(6, 0.5, method, ckpt_path=str(tmp_path / "epoch=4.ckpt"))
    assert warm == [False]
    assert again.warmup_rounds == 4
    for got, expected in zip(again.reconstruct(again.target), trained.reconstruct(trained.target), strict=True):
        assert torch.equal(got, expected)


def test_a_share_of_a_run_whose_end_is_not_planned_in_rounds_is_refused() -> None:
    with refused("warmup_rounds"):
        fitted(-1, 0.5)
    module = small_federation.build(methods.FedMMD, warmup_rounds=0.5)
    with refused("warmup_rounds"):
        trainer(4, limit_val_batches=0, max_steps=8).fit(module, Blobs())


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
