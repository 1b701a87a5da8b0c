"""The word at the start of a run whose sources have their classes in unequal shares."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedlit.methods import KD3A, AdaBN, FedDAN, FedJDA, FedMMD
from fedlit.models import MLP
from helpers import loader, trainer

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
