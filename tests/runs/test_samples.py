"""Samples that no run can take are refused by client, row and way out, before a network meets them; others are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import faulty_samples
import fedlit
import processes
from faulty_samples import FAULTS, SIZE, TARGET, WIDTH, Items, build, fit, load, parts, put
from fedlit import Client
from fedlit.callbacks import OracleAccuracy
from fedlit.data import DomainDataModule, FederatedLoader
from fedlit.data.base import DatasetLayoutError, Domain
from fedlit.federation import SampleError
from fedlit.methods import FedDAN, SourceOnly
from fedlit.models import MLP
from helpers import trainer
from own_modules import Simple

NAN = float("nan")


either_way = pytest.mark.parametrize(
    ("in_memory", "federated"), [(True, True), (False, False)], ids=["memory", "items, plain Trainer"]
)


@either_way
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_client_row_and_way_out(fault: str, in_memory: bool, federated: bool) -> None:
    with pytest.raises(ValueError, match=FAULTS[fault][1]):
        fit(fault, in_memory, federated)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("method", "fault", "in_memory", "rank_of_client"),
    [
        pytest.param("FedAvg", "NaN at a source", True, 1, marks=pytest.mark.slow),
        # exchanges in every step
        pytest.param("FedDANN", "one class too high", False, 1, marks=pytest.mark.slow),
        ("AdaBN", "NaN at the target", False, 2),  # reads the target's samples after the last exchange of a round
    ],
)
def test_every_process_ends_and_the_others_learn_nothing_of_the_data(
    method: str, fault: str, in_memory: bool, rank_of_client: int
) -> None:
    ended = processes.run(faulty_samples.fit, fault, in_memory, True, 3, method, ranks=3)
    for rank, one in enumerate(ended):
        last = one.error.strip().splitlines()[-1]
        own = rank == rank_of_client
        assert re.search(FAULTS[fault][1] if own else ": .* (says|states) w", last), last
        assert ("row" in last) == own


def test_samples_that_are_made_when_read_are_not_read_twice() -> None:
    module, loader = build(), load(parts(), in_memory=False)
    trainer(2).fit(module, loader)
    for dataset in loader.datasets.values():
        assert int(dataset.reads[0]) >= 2
        assert dataset.reads[1:].tolist() == [2] * (SIZE - 1)


@either_way
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_row_of_the_target_that_is_nan_is_no_silent_metric(stage: str, in_memory: bool, federated: bool) -> None:
    data, module, run = parts(1), build(), trainer(1, federated=federated)
    data["t"][0][21, 0] = NAN
    bad = load(data, in_memory, training=False)
    if stage == "fit":
        with pytest.raises(SampleError, match=r"client 't' .* nan in row 21 "):
            run.fit(module, load(parts()), bad)
        assert run.global_step == (0 if in_memory else 5)
        return
    run.fit(module, load(parts()))
    with pytest.raises(SampleError, match=r"client 't' .* nan in row 21 "):
        getattr(run, stage)(module, bad)


def test_labels_of_the_target_that_nobody_reads_may_be_anything() -> None:
    data = parts()
    data["t"][1] = torch.full((SIZE, 2), NAN)
    module, run = build(labelled=False), trainer(1)
    run.fit(module, load(data), load(data, training=False))
    assert 0 <= run.callback_metrics["target/score"] <= 1
    scored = trainer(1, [OracleAccuracy()])
    scored.fit(module := build(labelled=False), load(data))
    assert len(scored.predict(module, load({"t": data["t"]}, training=False))) == 5


def test_predictions_that_are_not_finite_are_said_to_be_so() -> None:
    class Root(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sqrt())

    data = {name: [x.abs(), y] for name, (x, y) in parts().items()}
    negative = data | {"t": [-data["t"][0], data["t"][1]]}
    with pytest.warns(UserWarning, match=r"40 of 40 predictions for target"):
        trainer(1).fit(build(extractor=Root(WIDTH, [8])), load(data), load(negative, training=False))


class Imputing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.nan_to_num(nan=0.0))


@pytest.mark.parametrize("in_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_network_may_fill_in_what_is_missing(in_memory: bool) -> None:
    data, filled = parts(), parts()
    for name in data:
        data[name][0][::7, 1] = NAN
        filled[name][0][::7, 1] = 0.0
    modules = []
    for each in (data, filled):
        torch.manual_seed(0)
        modules.append(module := build(FedDAN, extractor=Imputing(WIDTH, [8]), num_frequencies=10))
        trainer(2).fit(module, load(each, in_memory), load(each, in_memory, training=False))
    for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(one, other)


class Halving(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() / 2)


class Tokens(nn.Module):
    out_features = 8

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).mean(dim=1)


@pytest.mark.parametrize(
    ("network", "change", "precision"),
    [
        (lambda: Halving(WIDTH, [8]), Tensor.byte, "32-true"),
        (lambda: MLP(WIDTH, [8]), Tensor.double, "64-true"),
        (Tokens, lambda x: x.long().clamp(0, 8), "bf16-mixed"),
        (lambda: MLP(WIDTH, [8]), Tensor.half, "bf16-true"),
    ],
)
def test_inputs_of_every_type_that_the_network_takes_train(
    network: Callable[[], nn.Module], change: Callable[[Tensor], Tensor], precision: Any
) -> None:
    data = {name: [change(x), y] for name, (x, y) in parts().items()}
    run = trainer(1, precision=precision)
    run.fit(build(extractor=network()), load(data), load(data, training=False))
    assert run.global_step == 5


class Boxes(Simple):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0].float()) - batch[1]["boxes"]).square().mean()


def test_labels_of_a_module_of_ones_own_may_be_of_any_form() -> None:
    class Boxed(Dataset[Any]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            missing = -1 if index % 2 else index
            return torch.ones(WIDTH).double(), {"boxes": torch.ones(4), "classes": torch.tensor([missing, missing])}

    clients = ["a", "b", Client("t", "target", labelled=True)]
    data = {name: Boxed() for name in ("a", "b", "t")}
    run = trainer(1)
    run.fit(
        fedlit.Federated(Boxes(nn.Linear(WIDTH, 4)), clients, TARGET, 4, task="regression"), FederatedLoader(data, 9)
    )
    assert run.callback_metrics["target/loss"] > 0


def test_a_subset_in_memory_is_looked_at_as_a_whole() -> None:
    data = parts()
    data["b"][0][10] = NAN
    datasets: dict[str, Any] = {name: TensorDataset(*own) for name, own in data.items()}
    datasets["b"] = Subset(datasets["b"], range(0, SIZE, 2))
    with pytest.raises(SampleError, match=r"client 'b' .* nan in row 5 \(1 of 20"):
        trainer(1).fit(build(), FederatedLoader(datasets, 8))
    datasets["b"] = Subset(datasets["b"].dataset, range(1, SIZE, 2))
    trainer(1).fit(build(), FederatedLoader(datasets, 8))


class Ragged(Items):
    """Samples of several shapes."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x[: WIDTH - (index == 12)], y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*parts()["a"], strict=True))


class Three(DomainDataModule):
    def __init__(self, data: Any) -> None:
        super().__init__(target=TARGET, seed=0, val_fraction=0.0, test_fraction=0.0)
        self.data = data
        self.check_roster()

    def domain_names(self) -> list[str]:
        return ["a", "b", "t"]

    def class_names(self) -> list[str]:
        return ["red", "green", "blue"]

    def load(self, domain: str) -> Domain:
        return Domain(*self.data[domain])


def with_fault(fault: Callable[[Any], None], seed: int = 0) -> Any:
    data = parts(seed)
    fault(data)
    return data


def scored(fault: Callable[[Any], None]) -> None:
    """A run whose evaluation looks at labels with a fault."""
    data = load(with_fault(fault, 1), in_memory=False, training=False)
    trainer(1, [OracleAccuracy()]).fit(build(), load(parts()), data)


def regressed(change: Callable[[Tensor], Tensor]) -> None:
    """A run that predicts numbers, of which those of a client are changed."""
    data = {name: [x, y.float()] for name, (x, y) in parts().items()}
    data["a"][1] = change(data["a"][1])
    trainer(1).fit(build(task="regression", num_classes=1), load(data))


def of_a_module(fault: Callable[[Any], None]) -> None:
    trainer(1).fit(build(SourceOnly, labelled=False), Three(with_fault(fault)))


def trained(fault: Callable[[Any], None], in_memory: bool = False, **kwargs: Any) -> None:
    trainer(1).fit(build(), load(with_fault(fault), in_memory, **kwargs))


def of_another_kind(dataset: Any, client: str = "a", federated: bool = True) -> None:
    data = {name: TensorDataset(*own) for name, own in parts().items()} | {client: dataset}
    trainer(1, federated=federated).fit(build(), FederatedLoader(data, SIZE))


def number_7(value: float) -> Callable[[Tensor], Tensor]:
    return lambda y: torch.where(torch.arange(SIZE) == 7, value, y)


@pytest.mark.parametrize(
    ("run", "fault", "error", "message"),
    [
        (scored, put("a", 1, 9, -1), SampleError, r"source 'a' have no label \(-1 in row 9"),
        (scored, put("a", 1, 9, 3), SampleError, r"labels of client 'a' must lie"),
        (scored, faulty_samples.turned("b", 1, Tensor.float), SampleError, r"labels of client 'b' must be classes"),
        (scored, put("t", 1, 9, 3), SampleError, r"labels of client 't' must lie"),
        (regressed, number_7(NAN), SampleError, r"source 'a' have no label \(NaN"),
        (regressed, number_7(float("inf")), SampleError, "must be finite, got infinity in"),
        (regressed, lambda y: y[:, None].expand(-1, 2), SampleError, r"shape \(\d+, 2\)"),
        (of_a_module, put("b", 1, 9, 4), DatasetLayoutError, r"labels of domain 'b' must lie"),
        (of_a_module, put("a", 1, 9, -1), DatasetLayoutError, r"source 'a' have no label \(-1"),
        (of_a_module, faulty_samples.turned("b", 1, Tensor.float), DatasetLayoutError, "'b' must be classes"),
        (of_a_module, put("b", 0, 9, NAN), SampleError, "inputs of client 'b' must be"),
        (trained, put("a", 0, 31, NAN), SampleError, r"client 'a' .* nan in row 31 "),
        (partial(trained, num_workers=1), put("a", 0, 31, NAN), SampleError, r"client 'a' .* nan in row 31 "),
        (
            partial(trained, in_memory=True),
            lambda data: data["t"][1].fill_(-1),
            SampleError,
            "target 't' is declared as labelled",
        ),
        (of_another_kind, Ragged(*parts()["a"]), SampleError, r"client 'a' must have one shape.* in row 12"),
        (of_another_kind, Stream(), TypeError, r"of client 'a' must give samples"),
        (of_another_kind, DataLoader(TensorDataset(*parts()["a"])), TypeError, "got DataLoader: give the dataset of"),
        (of_another_kind, iter([]), TypeError, "got list_iterator"),
        (of_another_kind, tuple(parts()["a"]), TypeError, r"must be \(inputs"),
        (of_another_kind, TensorDataset(parts()["a"][0]), TypeError, r"got tuple of 1: give .*-1"),
        (of_another_kind, [{"x": torch.zeros(5), "y": 0}] * 9, TypeError, "got dict: give a TensorDataset"),
        (partial(of_another_kind, federated=False), tuple(parts()["a"]), TypeError, r"must be \(inputs"),
    ],
)
def test_what_no_run_takes_is_refused_however_it_comes(
    run: Callable[[Any], None], fault: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(fault)
