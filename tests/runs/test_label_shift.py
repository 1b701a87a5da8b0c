"""The word at the start of a run whose sources have their classes in unequal shares."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedlit.methods import KD3A, FedDAN, FedMMD
from fedlit.models import MLP
from fedlit.training.label_shift import beyond_chance, most_unequal
from helpers import loader, trainer

CLIENTS = ("a", "b", "t")


def drawn(ones: int, number: int = 100) -> TensorDataset:
    """Samples of which so many are of class 1."""
    labels = (torch.arange(number) < ones).long()
    return TensorDataset(torch.randn(number, 4, generator=torch.Generator().manual_seed(ones)), labels)


def words_of(ones: dict[str, int], method: Any = FedDAN, data: Any = None, **arguments: Any) -> list[str]:
    """What is warned of class shares in a run of one round."""
    torch.manual_seed(0)
    module = method(list(CLIENTS), "t", 2, MLP(4, [3]), nn.Linear(3, 2), **arguments)
    data = data or {name: drawn(number) for name, number in ones.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=1).fit(module, loader(data, 50))
    return [str(each.message) for each in caught if "shared out unequally" in str(each.message)]


def test_a_method_that_matches_domains_says_so_where_sources_have_other_class_shares() -> None:
    (words,) = words_of({"a": 50, "b": 93, "t": 50})
    assert "50% of 'a' and 7% of 'b' are of class 0" in words
    assert "FedDAN" in words
    assert "lower mmd_weight" in words


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


def test_a_warm_up_comes_after_the_word() -> None:
    assert words_of({"a": 10, "b": 90, "t": 50}, FedMMD, warmup_rounds=1)


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


def test_what_chance_does_to_samples_of_equal_shares_is_taken_away() -> None:
    draws = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.2])
    found = []
    for _ in range(2000):
        a, b = (torch.from_numpy(draws.multinomial(n, shares)).double() for n in (40, 60))
        plain = float((a / 40 - b / 60).abs().sum()) / 2
        found.append((plain, beyond_chance(a, b)))
    variation, left = np.mean(found, axis=0)
    p = torch.tensor(shares)
    expected = float((2 / np.pi * p * (1 - p) * (1 / 40 + 1 / 60)).sqrt().sum()) / 2
    assert variation == pytest.approx(expected, rel=0.05)
    assert left < 0.3 * variation  # never below 0, so not 0 on average
    assert beyond_chance(torch.tensor([1e6, 1e6]), torch.tensor([1e6, 9e6])) == pytest.approx(0.4, abs=0.001)


def test_a_single_source_is_compared_with_equal_shares() -> None:
    distance, words = most_unequal({"a": torch.tensor([900.0, 100.0])})
    assert distance == pytest.approx(0.4 - (2 / np.pi * 0.25 / 1000) ** 0.5, abs=1e-6)
    assert words == "90% of 'a' and 50% of equal shares are of class 0"
    assert most_unequal({}) == (0.0, "")
    assert most_unequal({"a": torch.zeros(2), "b": torch.tensor([5.0, 5.0])})[0] == 0.0
