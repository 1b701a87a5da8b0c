"""Data modules of clients, and DataLoaders that a `FederatedLoader` cannot take over: named, with a way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from fedlit.federation import FederatedLoader, SampleError
from own_loaders import Frozen, Named, Rows, Ward, counted, dictionary, gathered, one, pairs
from refused import refused


def test_data_modules_are_asked_as_by_a_trainer_and_set_up_once() -> None:
    wards = {"a": Ward(), "b": Ward()}
    made = {stage: FederatedLoader.from_loaders(wards, stage=stage, seed=0) for stage in ("train", "val", "test")}
    order = ["prepare_data", "setup fit", "train", "val", "setup test", "test"]
    assert [ward.asked for ward in wards.values()] == [order, order]
    assert made["train"].training
    assert not made["val"].training
    assert made["train"].sizes() == {"a": 14, "b": 14}
    trained, validated = (
        {name: counted([step[name] for step in made[stage] if name in step]) for name in wards}
        for stage in ("train", "val")
    )
    assert all(trained[name] + validated[name] == Counter(range(20)) for name in wards)
    assert trained["a"] != trained["b"]
    alone = FederatedLoader.from_loaders({"b": Ward()}, seed=0)  # in a process without the other
    assert counted([step["b"] for step in alone]) == trained["b"]


def test_only_one_process_of_a_machine_prepares_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    ward = Ward()
    FederatedLoader.from_loaders({"a": ward}, seed=0)
    assert ward.asked == ["setup fit", "train"]


# ---------------------------------------------------------------- errors


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.ones(1), 0


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


class Wrong(Endless):
    """A sampler that draws something in each pass, by its number."""

    def __init__(self, *drawn: Any) -> None:
        self.drawn, self.epoch = drawn, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = min(epoch, len(self.drawn) - 1)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.drawn[self.epoch])

    def __len__(self) -> int:
        return len(self.drawn[0])


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


DATA = pairs(6)
UNUSABLE: dict[str, tuple[str, Callable[[], DataLoader[Any]]]] = {
    "no length": ("dataset", lambda: DataLoader(Streamed())),
    "a loader of its own": ("loader", lambda: OwnLoader(DATA)),
    "no batches": ("batch_size", lambda: DataLoader(DATA, batch_size=None)),
    "shared out": ("sampler", lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))),
    "a sampler without length": ("sampler", lambda: DataLoader(DATA, sampler=Endless())),
    "batches without length": (
        "batch_sampler",
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(Endless(), 2, False)),
    ),
    "rows that there are not": ("sampler", lambda: DataLoader(DATA, sampler=Wrong([0, 6]))),
    "no rows": ("sampler", lambda: DataLoader(DATA, sampler=Wrong(["a"]))),
    "too few": ("loader", lambda: DataLoader(DATA, 7, drop_last=True)),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_kept_is_refused_by_name(name: str) -> None:
    argument, make = UNUSABLE[name]
    loader = make()
    with refused(argument, SampleError) as caught:
        FederatedLoader.from_loaders({"oslo": loader})
    assert "'oslo'" in str(caught.value)


def test_samplers_that_change_their_mind_are_refused() -> None:
    changing = DataLoader(DATA, 2, sampler=Wrong([0, 1], [1, 0], [2, 3]))
    with refused("sampler", SampleError):
        one(changing, round_idx=2)
    shrinking = DataLoader(DATA, batch_sampler=Wrong([[0], [1]], [[0]]))
    with refused("batch_sampler", SampleError):
        one(shrinking, round_idx=1)


@pytest.mark.parametrize(
    "given",
    [Rows(3, dictionary), [DataLoader(DATA)], FederatedLoader({"a": DATA}), pl.LightningModule(), None],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_loader_is_refused(given: Any) -> None:
    with pytest.raises((TypeError, pl.utilities.exceptions.MisconfigurationException)):
        FederatedLoader.from_loaders({"oslo": given})


def test_arguments_are_checked() -> None:
    with refused("loaders", TypeError):
        FederatedLoader.from_loaders([DataLoader(DATA)])  # type: ignore[arg-type]
    with refused("stage"):
        FederatedLoader.from_loaders({"a": DataLoader(DATA)}, stage="fit")  # type: ignore[arg-type]
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException) as unwritten:
        FederatedLoader.from_loaders({"oslo": pl.LightningDataModule()})
    assert "'oslo'" in unwritten.value.__notes__[0]
    with refused("predict_dataloader", TypeError) as caught:
        FederatedLoader.from_loaders({"oslo": Ward()}, stage="predict")
    assert "'oslo'" in str(caught.value)
    assert "list of 2" in str(caught.value)


@pytest.mark.parametrize(
    ("form", "parts", "argument", "shown"),
    [
        (dictionary, {"label": "y"}, "label", "'id', 'x', 'label'"),
        (dictionary, {"label": "label", "inputs": "image"}, "inputs", "'id', 'x', 'label'"),
        (dictionary, {"label": "label", "inputs": "label"}, "inputs", "a dict"),
        (lambda row: {"label": row}, {"label": "label"}, "inputs", "a dict of 'label'"),
        (lambda row: (torch.ones(2), row), {"label": 2}, "label", "a list of 2"),
        (lambda row: torch.ones(2), {"label": "label"}, "label", "a Tensor"),
        (lambda row: "text", {"label": 0}, "inputs", "a list of 1"),
    ],
)
def test_batches_without_what_is_named_are_refused(
    form: Callable[[int], Any], parts: dict[str, Any], argument: str, shown: str
) -> None:
    made = FederatedLoader.from_loaders({"oslo": DataLoader(Rows(1, form))}, **parts)
    with refused(argument, SampleError) as caught:
        made.samples("oslo")
    assert "'oslo'" in str(caught.value)
    assert shown in str(caught.value)


def test_a_label_is_named_unless_batches_are_pairs() -> None:
    with pytest.raises(TypeError, match=r"'oslo'.* got dict"):
        FederatedLoader.from_loaders({"oslo": DataLoader(Rows(4, dictionary))}).samples("oslo")
    loader = DataLoader(Rows(4, dictionary), collate_fn=gathered(Named))
    assert isinstance(FederatedLoader.from_loaders({"oslo": loader}).samples("oslo"), Named)
    loader = DataLoader(Rows(4, dictionary), collate_fn=gathered(Frozen))
    with refused("label", SampleError):
        FederatedLoader.from_loaders({"oslo": loader}).samples("oslo")
    loader = DataLoader(Rows(4, dictionary), collate_fn=lambda samples: 3)
    with refused("label", SampleError):
        FederatedLoader.from_loaders({"oslo": loader}, label="label").samples("oslo")


def test_an_error_of_collate_names_client_and_rows() -> None:
    made = FederatedLoader.from_loaders({"oslo": DataLoader(DATA, 2, collate_fn=lambda samples: samples[2])})
    with pytest.raises(IndexError) as caught:
        next(iter(made))
    assert "'oslo'" in caught.value.__notes__[0]
    assert "[0, 1]" in caught.value.__notes__[0]
