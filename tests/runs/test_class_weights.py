"""Class weights in the loss, next to torch, scikit-learn and samples that are there twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import SGD
from torch.utils.data import TensorDataset

from fedlit import FederatedModule
from fedlit.data import Digits, FederatedLoader
from fedlit.federation import Client
from fedlit.methods import FedAvg
from fedlit.models import MLP
from method_table import METHODS
from small_federation import trainer

WEIGHED = [
    "APFL", "FedAvg", "FedGP auto", "FedRFTCA", "TargetOnly",
    *[pytest.param(name, marks=pytest.mark.slow) for name in ("FedDAN", "FedMMD", "KNNPer")],
]  # fmt: skip
"""Of each way in which methods use the loss, one."""


class Skewed(pl.LightningDataModule):
    """Two clients with 12 samples of class 0 and 4 of class 1, which are there ``often`` times."""

    def __init__(self, often: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = {}
        for name in ("dslr", "webcam"):
            y = torch.tensor([0] * 12 + [1] * 4)
            x = torch.randn(16, 5, generator=generator) + y[:, None]
            again = torch.tensor([*range(12), *[*range(12, 16)] * often])
            self.parts[name] = TensorDataset(x[again], y[again])

    def train_dataloader(self) -> FederatedLoader:
        return FederatedLoader(self.parts, batch_size=64, guarded="webcam", seed=0)


def trained(data: Any, tmp_path: Path, class_weights: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = FedAvg(
        [Client("dslr"), Client("webcam", "target", True)], "webcam", 2, MLP(5, [4]),
        optimizer=lambda groups: SGD(groups, lr=0.5), weighting="uniform", class_weights=class_weights,
    )  # fmt: skip
    trainer(3, [], tmp_path).fit(module, data)
    return module.replicas["webcam"].state_dict()


def test_weights_are_samples_that_are_there_several_times(tmp_path: Path):
    thrice, plain = trained(Skewed(3), tmp_path, None), trained(Skewed(), tmp_path, None)
    for weights in ([2 / 3, 2.0], "balanced"):
        weighed = trained(Skewed(), tmp_path, weights)
        for name, tensor in thrice.items():
            torch.testing.assert_close(weighed[name], tensor)
    assert not torch.allclose(thrice["classifier.weight"], plain["classifier.weight"])


def test_going_on_with_other_weights_is_told(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    def resumed(rounds: int, class_weights: Any, path: Path | None = None) -> list[str]:
        module = FedAvg(["dslr", "webcam"], "webcam", 2, MLP(5, [4]), class_weights=class_weights)
        run = trainer(rounds, [], tmp_path)
        recwarn.clear()
        run.fit(module, Skewed(), ckpt_path=path)
        run.save_checkpoint(tmp_path / "run.ckpt")
        return [str(each.message) for each in recwarn if "goes on with other" in str(each.message)]

    assert resumed(1, "balanced") == []
    assert resumed(2, "balanced", tmp_path / "run.ckpt") == []
    (warning,) = resumed(3, None, tmp_path / "run.ckpt")
    assert "class_weights was 'balanced' and is None" in warning


@pytest.mark.parametrize("name", WEIGHED)
def test_equal_weights_are_none_with_any_method(name: str, tmp_path: Path):
    method, arguments, of_data = METHODS[name]
    states = []
    for weights in (None, [1.0] * 10, [1.0] * 9 + [5.0]):
        torch.manual_seed(0)
        every_class = {"target_label_draw": "balanced"}  # the last one too, which is weighed
        data = Digits(target="fonts", flatten=True, seed=0, **every_class, **of_data)
        module: FederatedModule = method(
            data.clients, data.target, 10, MLP(64, [16]), class_weights=weights,
            optimizer=lambda groups: SGD(groups, lr=0.1), **arguments,
        )  # fmt: skip
        trainer(2, [], tmp_path, limit_val_batches=0).fit(module, data)
        states.append(module.replicas["fonts"].state_dict())
    plain, equal, skewed = states
    for key, tensor in plain.items():
        torch.testing.assert_close(equal[key], tensor, atol=1e-5, rtol=1e-4)
    assert any(not torch.allclose(skewed[key].double(), tensor.double(), atol=1e-4) for key, tensor in plain.items())
