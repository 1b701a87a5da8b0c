"""Ordinary DataLoaders of clients: the same batches as they make themselves, in an order that a run can repeat."""

from __future__ import annotations

import gc
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fedlit.federation import FederatedLoader, LabelGuardError, RoundPlan
from fedlit.federation.batch_parts import whole
from fedlit.federation.data_loaders import Cut
from fedlit.privacy import DecodeError
from own_loaders import Frozen, Named, Record, Rows, counted, dictionary, gathered, one, pairs, planned, rows
from refused import refused


def as_user_dict(samples: list[Any]) -> UserDict[str, Any]:
    return UserDict(torch.utils.data.default_collate(samples))


class Halves(Sampler[int]):
    """Even rows in a random order of numpy's global generator, rotated by the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from np.roll(np.random.permutation(np.arange(0, self.size, 2)), self.epoch)  # noqa: NPY002

    def __len__(self) -> int:
        return self.size // 2


class Growing(Sampler[list[int]]):
    """Batches of 1, 2, 3 rows, and so on."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order, start = torch.randperm(self.size).tolist(), 0
        for number in range(1, len(self) + 1):
            yield order[start : start + number]
            start += number

    def __len__(self) -> int:
        return int((2 * self.size) ** 0.5)


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("local_steps", [None, 4])
def test_shuffled_loaders_are_a_federated_loader_of_their_datasets(drop_last: bool, local_steps: int | None) -> None:
    sizes = {"a": 7, "b": 12}
    ours = FederatedLoader.from_loaders(
        {name: DataLoader(pairs(size), 3, shuffle=True, drop_last=drop_last) for name, size in sizes.items()}, seed=5
    )
    theirs = FederatedLoader({name: pairs(size) for name, size in sizes.items()}, 3, drop_last=drop_last, seed=5)
    for round_idx in (0, 3):
        for one_step, other in zip(
            *(planned(each, (round_idx, 1), local_steps=local_steps) for each in (ours, theirs)), strict=True
        ):
            assert {name: rows([batch]) for name, batch in one_step.items()} == {
                name: rows([batch]) for name, batch in other.items()
            }


SAMPLERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "subset": lambda: DataLoader(pairs(20), 4, sampler=SubsetRandomSampler([1, 3, 5, 7, 9, 11])),
    "numpy's": lambda: DataLoader(pairs(20), 4, sampler=Halves(20)),
    "with replacement": lambda: DataLoader(pairs(9), 4, sampler=WeightedRandomSampler([0.1] * 9, 30)),
    "part of them": lambda: DataLoader(pairs(20), 4, sampler=RandomSampler(pairs(20), num_samples=7)),
    "of batches": lambda: DataLoader(pairs(10), batch_sampler=Growing(10)),
    "with a generator": lambda: DataLoader(pairs(20), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_orders_of_samplers_repeat_by_seed_and_pass_and_differ_otherwise(name: str) -> None:
    loader = SAMPLERS[name]()
    state, numpys = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = rows(one(loader))
    torch.manual_seed(7)
    assert rows(one(loader)) == rows(one(SAMPLERS[name]())) == first
    assert rows(one(loader, round_idx=5)) == rows(one(SAMPLERS[name](), round_idx=5))  # as a resumed run starts there
    assert len({str(rows(one(loader, round_idx=each))) for each in range(4)}) > 1
    assert any(rows(one(loader, seed=each)) != first for each in (1, 2))
    torch.set_rng_state(state)
    one(loader)
    assert torch.equal(state, torch.get_rng_state())
    assert np.random.get_state()[1].tolist() == numpys  # noqa: NPY002


class Stateful(Sampler[int]):
    """Goes on from the state that its generator has."""

    def __init__(self, size: int) -> None:
        self.size, self.random = size, np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        yield from self.random.permutation(self.size).tolist()

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize("local_steps", [None, 5])
def test_positions_are_those_of_a_batchs_samples_whatever_the_sampler(local_steps: int | None) -> None:
    made = FederatedLoader.from_loaders({"a": DataLoader(pairs(10), 3, sampler=Stateful(10))}, seed=0)
    orders = []
    for round_idx in range(3):
        batches = [step["a"] for step in planned(made, (round_idx, 0), local_steps=local_steps)]
        for batch_idx, batch in enumerate(batches):
            assert made.positions("a", round_idx, batch_idx).tolist() == rows([batch])[0]
        orders.append(str(rows(batches)))
    assert len(set(orders)) == 3


def test_a_generator_counts_by_its_seed_and_not_by_its_state() -> None:
    def order(seed: int, drawn: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        torch.rand(drawn, generator=generator)
        return rows(one(DataLoader(pairs(20), 4, shuffle=True, generator=generator)))

    assert order(3) == order(3, drawn=5)
    assert order(3) != order(4)


def test_rows_are_those_that_samplers_draw() -> None:
    drawn = {name: counted(one(make())) for name, make in SAMPLERS.items()}
    assert drawn["subset"] == Counter([1, 3, 5, 7, 9, 11])
    assert drawn["numpy's"] == Counter(range(0, 20, 2))
    assert drawn["with replacement"].total() == 30
    assert drawn["part of them"].total() == 7
    assert sorted(map(len, rows(one(SAMPLERS["of batches"]())))) == [1, 2, 3, 4]


def test_samples_are_counted_by_rows_and_not_by_what_collate_makes_of_them() -> None:
    loaders = {name: make() for name, make in SAMPLERS.items()}
    twice = DataLoader(pairs(9), 4, collate_fn=lambda samples: torch.utils.data.default_collate(samples * 2))
    made = FederatedLoader.from_loaders({"twice": twice, **loaders})
    assert made.sizes() == {
        "twice": 9, "subset": 6, "numpy's": 10, "with replacement": 9, "part of them": 20, "of batches": 10,
        "with a generator": 20,
    }  # fmt: skip
    assert {name: fact.num_samples for name, fact in made.facts().items()} == made.sizes()
    assert len(next(iter(made))["twice"][1]) == 8
    # statistics are over the same samples: rows of another part do not get in
    (every,) = [batch["subset"] for batch in made.in_order(["subset"])]
    assert rows([every]) == [[1, 3, 5, 7, 9, 11]]


def test_other_processes_know_how_many_batches_a_client_has() -> None:
    everything = planned(FederatedLoader.from_loaders({name: make() for name, make in SAMPLERS.items()}, seed=0))
    elsewhere = FederatedLoader.from_loaders({}, seed=0)
    elsewhere.receive_cuts({name: everything.announced_cut(name) for name in SAMPLERS})
    elsewhere.plan(RoundPlan(everything.sizes(), lambda _: SAMPLERS, lambda: (0, 0)))
    assert elsewhere.batches_in() == 8  # 30 rows in batches of 4
    for step, batches in enumerate(everything):
        assert {name for name in SAMPLERS if step < elsewhere.batches_of(name)} == set(batches)
        for name, batch in batches.items():
            if name != "of batches":
                assert elsewhere.samples_in(name, 0, step) == len(batch[0])
    with refused("batch_sampler"):
        elsewhere.samples_in("of batches", 0, 0)
    assert elsewhere.cut(10, "of batches").least == 1
    with refused("batch_size"):
        elsewhere.cut(10, "of batches", batch_size=3)


@pytest.mark.parametrize(
    "sent",
    [None, (1, 2), (2**41, 1, False, 0, 0), (1, 0, False, 0, 0), (1, 2, 0, 0, 0), (-1, 2, False, 0, 0), "batches"],
)
def test_what_is_no_cut_is_refused(sent: Any) -> None:
    with pytest.raises(DecodeError, match="'a'"):
        Cut.received("a", sent)


# ---------------------------------------------------------------- batches


LOADERS: dict[str, tuple[DataLoader[Any], dict[str, Any]]] = {
    "dict": (DataLoader(Rows(10, dictionary), 4), {"label": "label"}),
    "dict, one input": (DataLoader(Rows(10, dictionary), 4), {"label": "label", "inputs": "x"}),
    "of another class": (DataLoader(Rows(10, dictionary), 4, collate_fn=as_user_dict), {"label": "label"}),
    "named tuple": (DataLoader(Rows(10, dictionary), 4, collate_fn=gathered(Named)), {"label": "label"}),
    "dataclass": (DataLoader(Rows(10, dictionary), 4, collate_fn=gathered(Record)), {"label": "label"}),
    "frozen dataclass": (DataLoader(Rows(10, dictionary), 4, collate_fn=gathered(Frozen)), {"label": "label"}),
    "label first": (DataLoader(Rows(10, lambda row: (row % 3, torch.ones(2) * row, row)), 4), {"label": 0}),
    "label last": (DataLoader(Rows(10, lambda row: (torch.ones(2) * row, row, row % 3)), 4), {"label": -1}),
    "pairs": (DataLoader(pairs(10), 4), {}),
}


def plain(batch: Any) -> str:
    return f"{type(batch).__name__} {batch!r}"


@pytest.mark.parametrize("name", LOADERS)
def test_a_batch_is_given_back_as_the_loader_makes_it_itself(name: str) -> None:
    loader, parts = LOADERS[name]
    made = FederatedLoader.from_loaders({"a": loader}, stage="test", **parts)
    ours = [whole(step["a"]) for step in made]
    if name == "pairs":
        ours = [list(batch) for batch in ours]
    assert [plain(batch) for batch in ours] == [plain(batch) for batch in loader]


def test_inputs_and_labels_are_the_parts_that_are_named() -> None:
    def parts(name: str, **changed: Any) -> tuple[Any, Any]:
        loader, given = LOADERS[name]
        batch = one(loader, stage="test", **(given | changed))[0]
        return batch[0], batch[1].tolist()

    x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    inputs, labels = parts("dict")
    assert labels == [0, 1, 2, 0]
    assert inputs["id"] == ["row 0", "row 1", "row 2", "row 3"]
    assert set(inputs) == {"id", "x"}
    for name in ("dict, one input", "named tuple", "frozen dataclass"):
        inputs, labels = parts(name)
        assert torch.equal(inputs, x), name
        assert labels == [0, 1, 2, 0]
    inputs, _ = parts("dataclass")
    assert torch.equal(inputs["age"], x + 30)
    assert torch.equal(parts("dataclass", inputs=["age"])[0]["age"], x + 30)
    assert [each.shape for each in parts("label first")[0]] == [(4, 2), (4,)]
    assert [each.shape for each in parts("label last", inputs=[1, 0])[0]] == [(4,), (4, 2)]
    assert parts("label last")[1] == parts("label first")[1] == [0, 1, 2, 0]


def test_the_targets_labels_are_nowhere_in_its_training_batches() -> None:
    """Tried as a method would that looks through all that it is given."""

    def secrets(thing: Any) -> list[Tensor]:
        seen: dict[int, Any] = {}
        open_ = [thing]
        while open_:
            each = open_.pop()
            if id(each) not in seen and not isinstance(each, type) and not hasattr(each, "__globals__"):
                seen[id(each)] = each
                open_ += gc.get_referents(each)
        return [each for each in seen.values() if isinstance(each, Tensor) and each.tolist() == [7, 8, 7, 8]]

    loader = DataLoader(Rows(4, lambda row: {"x": torch.rand(2), "label": 7 + row % 2, "id": str(row)}), 4)
    for inputs in (None, "x"):
        made = FederatedLoader.from_loaders({"t": loader}, label="label", inputs=inputs, seed=0)
        assert secrets(next(iter(made)))
        made.guarded = "t"
        (step,) = made
        assert not secrets(step)
        with pytest.raises(LabelGuardError):
            _ = whole(step["t"])["label"] == 7
        made.training = False  # where the oracle alone may read them
        assert secrets(next(iter(made)))


class Noisy:
    """A collate_fn that draws random numbers, of torch and of numpy."""

    def __call__(self, samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return {"x": x + torch.rand(1) + np.random.rand(), "y": y}  # noqa: NPY002


def test_workers_change_nothing_not_even_what_collate_draws() -> None:
    def batches(num_workers: int) -> list[Any]:
        loader = DataLoader(pairs(12), 4, shuffle=True, num_workers=num_workers, collate_fn=Noisy())
        return one(loader, label="y")

    alone, with_workers = batches(0), batches(2)
    assert all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) for x, y in zip(alone, with_workers, strict=True))
    noise = [float(batch[0][0, 0]) % 1 for batch in alone]
    assert len(set(noise)) == 3


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of torch, without a GPU
def test_pinned_memory_is_that_of_each_clients_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = DataLoader(Rows(6, lambda row: (torch.ones(2), row % 2)), 2, pin_memory=True, num_workers=1)
    made = FederatedLoader.from_loaders({"c": apart})
    assert len(list(made)) == 3
    workers = made._readers["c"].samples  # torch pins what comes of them
    assert workers is not None
    assert (workers.pin_memory, workers.num_workers, workers.persistent_workers) == (True, 1, True)

    pinned: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, *device: pinned.append(len(tensor)) or tensor)
    loaders = {"a": DataLoader(pairs(12), 4, pin_memory=True), "b": DataLoader(pairs(9), 3)}
    assert [set(step) for step in FederatedLoader.from_loaders(loaders)] == [{"a", "b"}] * 3
    assert pinned == [4] * 6  # inputs and labels of a's batches

    made = FederatedLoader({"a": pairs(12), "d": Rows(8, lambda row: (torch.ones(2), row % 2))}, 4, pin_memory=True)
    pinned.clear()
    assert len(list(made)) == 3
    assert pinned[:2] == [4, 4]
    assert made._readers["d"].samples is not None
    assert made._readers["d"].samples.pin_memory


def test_samples_of_any_length_may_be_padded() -> None:
    def pad(samples: list[Any]) -> dict[str, Tensor]:
        series = torch.nn.utils.rnn.pad_sequence([each for each, _ in samples], batch_first=True)
        return {"series": series, "y": torch.tensor([label for _, label in samples])}

    def of(start: int) -> DataLoader[Any]:
        return DataLoader(Rows(6, lambda row: (torch.ones(start + row, 2), row % 2)), 3, collate_fn=pad)

    made = FederatedLoader.from_loaders({"a": of(1), "b": of(5)}, label="y")
    assert [fact.input_shape for fact in made.facts().values()] == [(0, 0)] * 2
    assert [batch["b"][0].shape for batch in made] == [(3, 7, 2), (3, 10, 2)]
