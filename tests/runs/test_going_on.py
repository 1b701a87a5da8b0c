"""What a run that goes on from a checkpoint takes from it, and a run in which nothing is left to train: both say so."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from fedlit import FederatedModule, methods
from fedlit.methods import FADA, AdaBN, FedCORAL
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, build, trainer

SETTINGS: Any = {"optimizer": partial(SGD, lr=0.1, momentum=0.5), "lr_scheduler": partial(StepLR, step_size=2)}


def train(folder: Path, rounds: int, ckpt_path: Path | None = None, **kwargs: Any) -> FederatedModule:
    pl.seed_everything(0)
    module = build(**{**SETTINGS, **kwargs})
    trainer(rounds, [], folder).fit(module, Blobs(), ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two rounds."""
    folder = tmp_path_factory.mktemp("before")
    pl.seed_everything(0)
    run = trainer(2, [], folder)
    run.fit(build(**SETTINGS), Blobs())
    run.save_checkpoint(folder / "two.ckpt")
    return folder / "two.ckpt"


@pytest.mark.parametrize("warmup", [0, 1])
def test_weights_that_join_after_a_warm_up_have_momentum_as_from_a_first_step(tmp_path: Path, warmup: int) -> None:
    """Fused SGD, the default, fails on a group in which some weights have momentum and others none yet."""

    def plain(params: Any) -> SGD:
        return SGD(params, lr=0.01, momentum=0.9)

    weights = []
    for given in ({}, {"optimizer": plain}):
        pl.seed_everything(0)
        module = build(FADA, warmup_rounds=warmup, disentangle=True, attention_samples=20, **given)
        trainer(3, [], tmp_path).fit(module, Blobs())
        weights.append(module.replicas[TARGET].state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], msg=name)


def test_a_trust_region_without_a_step_to_limit_is_named(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())
    module = AdaBN(CLIENTS, TARGET, NUM_CLASSES, Backboned(network, 8), trust_region=0.5)
    with pytest.warns(UserWarning, match=r"trust_region=0.5 has done nothing.*'webcam' took none"):
        trainer(1, [], tmp_path).fit(module, Blobs())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(1, [], tmp_path).fit(build(FedCORAL, trust_region=0.5), Blobs())
    assert not [each for each in caught if "has done nothing" in str(each.message)]


class Backboned(nn.Sequential):
    """A network that tells the width of its features."""

    def __init__(self, network: nn.Module, out_features: int) -> None:
        super().__init__(network)
        self.out_features = out_features


@pytest.mark.parametrize(
    ("given", "word"), [({"max_epochs": 0}, "max_epochs=0"), ({"limit_train_batches": 0}, "limit_train_batches=0")]
)
def test_a_run_in_which_nothing_is_trained_says_so(given: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"no round is trained.*{word}"):
        trainer(1, [], tmp_path, **given).fit(build(), Blobs())


def extractor_after(folder: Path, rounds: int, trust_region: float | None) -> torch.Tensor:
    """First weights of the target's extractor after a FedMMD run with one round of warm-up and long Adam steps."""
    module = build(
        methods.FedMMD,
        warmup_rounds=1,
        trust_region=trust_region,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.05),
    )
    trainer(rounds, [], folder, limit_val_batches=0).fit(module, Blobs())
    return next(module.replicas[TARGET].extractor.parameters()).detach()


def test_a_target_stays_in_its_trust_region_and_a_wide_one_changes_no_bit(tmp_path: Path) -> None:
    free = extractor_after(tmp_path, 3, None)
    assert torch.equal(extractor_after(tmp_path, 3, 1e9), free)
    warmed = extractor_after(tmp_path, 1, None)
    torch.testing.assert_close(extractor_after(tmp_path, 3, 1e-6), warmed, atol=1e-5, rtol=0)
    assert (free - warmed).abs().max() > 0.1
