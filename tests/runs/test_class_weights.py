"""Class weights in the loss, and what a run says at its start whose sources have their classes in unequal shares."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

from fedlit import FederatedModule
from fedlit.data import Digits, FederatedLoader
from fedlit.federation import Client
from fedlit.methods import KD3A, AdaBN, FedAvg, FedDAN, FedJDA, FedMMD
from fedlit.models import MLP
from helpers import loader, trainer
from method_table import METHODS

WEIGHED = [
    "APFL", "FedAvg", "FedGP auto",
    *[pytest.param(name, marks=pytest.mark.slow) for name in ("FedDAN", "FedMMD", "FedRFTCA", "KNNPer", "TargetOnly")],
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


def trained(data: Any, class_weights: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = FedAvg(
        [Client("dslr"), Client("webcam", "target", True)], "webcam", 2, MLP(5, [4]),
        optimizer=lambda groups: SGD(groups, lr=0.5), weighting="uniform", class_weights=class_weights,
    )  # fmt: skip
    trainer(3).fit(module, data)
    return module.replicas["webcam"].state_dict()


def test_weights_are_samples_that_are_there_several_times():
    thrice, plain = trained(Skewed(3), None), trained(Skewed(), None)
    for weights in ([2 / 3, 2.0], "balanced"):
        weighed = trained(Skewed(), weights)
        for name, tensor in thrice.items():
            torch.testing.assert_close(weighed[name], tensor)
    assert not torch.allclose(thrice["classifier.weight"], plain["classifier.weight"])


@pytest.mark.parametrize("name", WEIGHED)
def test_equal_weights_are_none_with_any_method(name: str):
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
        trainer(2, limit_val_batches=0, strategy={"local_steps": 4}).fit(module, data)
        states.append(module.replicas["fonts"].state_dict())
    plain, equal, skewed = states
    for key, tensor in plain.items():
        torch.testing.assert_close(equal[key], tensor, atol=1e-5, rtol=1e-4)
    assert any(not torch.allclose(skewed[key].double(), tensor.double(), atol=1e-4) for key, tensor in plain.items())


CLIENTS = ("a", "b", "t")


def drawn(ones: int, number: int = 100) -> TensorDataset:
    """Samples of which so many are of class 1."""
    labels = (torch.arange(number) < ones).long()
    return TensorDataset(torch.randn(number, 4, generator=torch.Generator().manual_seed(ones)), labels)


def words_of(ones: dict[str, int], method: Any = FedDAN, data: Any = None, **arguments: Any) -> list[str]:
    """What is warned of class shares in a run of one round."""
    torch.manual_seed(0)
    given = {"classifier": nn.Linear(3, 2)} | arguments
    given = {name: value for name, value in given.items() if value is not None}
    module = method(list(CLIENTS), "t", 2, MLP(4, [3]), **given)
    data = data or {name: drawn(number) for name, number in ones.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=1).fit(module, loader(data, 50))
    return [str(each.message) for each in caught if "shared out unequally" in str(each.message)]


def test_a_method_that_matches_domains_says_so_where_sources_have_other_class_shares() -> None:
    (words,) = words_of({"a": 50, "b": 93, "t": 50})
    assert "50% of 'a' and 7% of 'b' are of class 0" in words
    assert "FedDAN" in words
    assert "take KD3A, FedAvg or recipes/tables" in words


@pytest.mark.parametrize(
    ("ones", "method", "arguments"),
    [
        ({"a": 50, "b": 60, "t": 50}, FedDAN, {}),
        ({"a": 90, "b": 90, "t": 50}, FedDAN, {}),  # unequal, and alike: what the target has nobody may know
        ({"a": 10, "b": 90, "t": 50}, FedDAN, {"mmd_weight": 0.0}),
        ({"a": 10, "b": 90, "t": 50}, KD3A, {}),
    ],
)
def test_nothing_is_said_of_alike_shares_or_to_a_method_that_matches_nothing(
    ones: dict[str, int], method: Any, arguments: dict[str, Any]
) -> None:
    assert not words_of(ones, method, **arguments)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (FedMMD, {"warmup_rounds": 1}),
        (FedJDA, {"num_frequencies": 8, "num_components": 4, "classifier": None}),
        (AdaBN, {"classifier": nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))}),
    ],
)
def test_it_comes_before_a_warm_up_and_of_methods_without_a_weight(method: Any, arguments: dict[str, Any]) -> None:
    assert words_of({"a": 10, "b": 90, "t": 50}, method, **arguments)


def test_labels_that_would_have_to_be_read_sample_by_sample_are_left_alone() -> None:
    class OnDisk(Dataset[Any]):
        def __init__(self, kept: TensorDataset) -> None:
            self.kept = kept

        def __len__(self) -> int:
            return len(self.kept)

        def __getitem__(self, index: int) -> Any:
            return self.kept[index]

    data = {name: OnDisk(drawn(number)) for name, number in (("a", 10), ("b", 90), ("t", 50))}
    assert not words_of({}, data=data)
