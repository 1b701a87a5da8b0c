"""Runs on a GPU next to the CPU; without a GPU, what keeps them equal is tested as far as the CPU shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD

import fedgp_by_hand
from fedgp_by_hand import unequal
from fedlit import FederatedModule, FederatedStrategy
from fedlit.federation import RosterError
from fedlit.methods import FedAvg, FedRFTCA, FedWDGRL
from fedlit.models import MLP
from fedlit.privacy import PairwiseMasking
from helpers import QUIET, build, digits, loader, same, trainer, weights
from method_table import METHODS

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def fitted(name: str, device: str, precision: str, privacy: Any = None) -> FederatedModule:
    """A row of the table after three rounds."""
    method, arguments, options = METHODS[name]
    module = build(method, data := digits(**options), **{"optimizer": partial(SGD, lr=0.05, momentum=0.9)} | arguments)
    run = trainer(3, accelerator=device, precision=precision, strategy={"privacy": privacy}, gradient_clip_val=1.0)
    run.fit(module, data)
    return module


@on_a_gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_trains_what_the_cpu_trains(name: str, masked: bool) -> None:
    privacy = PairwiseMasking(colluders=0) if masked else None
    try:
        expected, found = (fitted(name, device, "64-true", privacy) for device in ("cpu", "gpu"))
    except RosterError as error:
        pytest.skip(f"has nothing to say over a hidden channel: {error}")
    for client in expected.clients:
        one, other = weights(expected, client.name), weights(found, client.name)
        for key, tensor in one.items():
            torch.testing.assert_close(other[key].cpu(), tensor, rtol=0, atol=1e-5 if masked else 1e-9)
    assert sorted(expected.federation.ledger) == sorted(found.federation.ledger)


@on_a_gpu
@pytest.mark.parametrize("residual", ["isotropic", "exact"])
def test_a_checkpoint_within_a_round_resumes_on_a_gpu(residual: str, tmp_path: Path) -> None:
    def go(path: str | None = None, **given: Any) -> dict[str, Tensor]:
        module = fedgp_by_hand.build(beta="auto", residual=residual)
        trainer(2, accelerator="gpu", **given).fit(module, loader(unequal()), ckpt_path=path)
        return weights(module, "c2")

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight = go(callbacks=[saver], enable_checkpointing=True)
    assert same(go(str(tmp_path / "step=7.ckpt")), straight)  # rounds have 5 steps


class Elsewhere(FederatedStrategy):
    """Builds modules where a GPU's strategy does: in Lightning's context of a device other than the CPU."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta"):
            yield


class Lazy(nn.Sequential):
    """A network that takes the width of the samples."""

    out_features = 16

    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(16), nn.ReLU())


@pytest.mark.parametrize("method", [FedAvg, FedWDGRL, FedRFTCA])
@pytest.mark.parametrize("extractor", [partial(MLP, 64, [16]), Lazy, partial(MLP, None, [16])])
def test_first_weights_do_not_depend_on_the_device(method: type[FederatedModule], extractor: Any) -> None:
    found = []
    for strategy in (FederatedStrategy, Elsewhere):
        torch.manual_seed(0)
        data = digits()
        sizes = {"num_frequencies": 16, "num_components": 8} if method is FedRFTCA else {}
        module = method(data.clients, data.target, data.num_classes, extractor(), **sizes)
        pl.Trainer(**QUIET | {"max_epochs": 1, "strategy": strategy(num_threads=1)}).fit(module, data)
        found.append(weights(module, data.target))
    assert same(*found)
