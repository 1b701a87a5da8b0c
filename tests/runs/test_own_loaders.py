"""Runs on ordinary DataLoaders with dict batches: equal to those on pairs, to a mean by hand, resumed and apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import fedlit
import processes
from fedlit import Client, FederatedModule
from fedlit.callbacks import OracleAccuracy
from fedlit.data import FederatedLoader
from fedlit.federation import RosterError, SampleError
from fedlit.methods import FedAvg, FedDAN, FedGP, FedMMD
from fedlit.models import MLP
from helpers import fingerprint, same, shards, trainer, weights
from refused import refused, slow

CLIENTS, TARGET = ["c0", "c1", "c2"], "c2"
SIZES = {"c0": 40, "c1": 25, "c2": 17}


def pairs(labels: Callable[[Tensor], Tensor] | None = None) -> dict[str, TensorDataset]:
    """Samples and labels of the clients; with ``labels``, others of the target."""
    data = {}
    for name, shard in shards(3).items():
        x, y = (each[: SIZES[name]] for each in shard.tensors)
        data[name] = TensorDataset(x, y if labels is None or name != TARGET else labels(y))
    return data


class Records(Dataset[Any]):
    """The same as dictionaries with a text."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.data[index]
        return {"name": f"patient {index}", "values": x, "outcome": int(y)}


def loaders(data: dict[str, TensorDataset], training: bool = True) -> dict[str, DataLoader[Any]]:
    return {name: DataLoader(Records(each), 8, shuffle=training) for name, each in data.items()}


def named(data: dict[str, TensorDataset], **given: Any) -> FederatedLoader:
    return FederatedLoader.from_loaders(loaders(data), **({"label": "outcome", "inputs": "values", "seed": 0} | given))


class OfPairs(pl.LightningModule):
    """Somebody's module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class OfRecords(OfPairs):
    """The same, of dictionaries, which it writes down."""

    seen: list[Any]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        return F.cross_entropy(self(batch["values"]), batch["outcome"])


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def wrapped(kind: type[OfPairs]) -> FederatedModule:
    return fedlit.Federated(seeded(kind), CLIENTS, TARGET, 2)


def method(kind: type[FederatedModule], labelled: bool = False, **given: Any) -> FederatedModule:
    clients = [*CLIENTS[:2], Client(TARGET, "target", labelled=labelled)]
    return kind(clients, TARGET, 2, seeded(partial(MLP, 5, [8])), **given)


def fitted(made: FederatedModule, loader: Any, rounds: int = 3, **given: Any) -> FederatedModule:
    trainer(rounds, **given).fit(made, loader)
    return made


def equal(one: FederatedModule, other: FederatedModule) -> bool:
    return all(same(weights(one, name), weights(other, name)) for name in CLIENTS)


def test_a_module_is_given_batches_as_they_are_and_learns_as_from_pairs() -> None:
    OfRecords.seen = []
    ours = fitted(wrapped(OfRecords), named(pairs()))
    assert equal(ours, fitted(wrapped(OfPairs), FederatedLoader(pairs(), 8, seed=0)))
    assert len(OfRecords.seen) == 3 * (5 + 4)
    for batch in OfRecords.seen:
        assert type(batch) is dict
        assert list(batch) == ["name", "values", "outcome"]
        assert all(name.startswith("patient ") for name in batch["name"])
        assert len(batch["name"]) == len(batch["values"]) == len(batch["outcome"])


def some_known(y: Tensor) -> Tensor:
    return torch.where(torch.arange(len(y)) % 4 == 0, y, -1)


def with_more(samples: list[Any]) -> Any:
    """A batch with a text, a number and a tensor that are of all samples."""
    return {"ward": "north", "number": 7, "unit": torch.tensor(2.0)} | torch.utils.data.default_collate(samples)


def test_of_a_target_with_some_labels_a_module_is_given_those_samples() -> None:
    def federated(kind: type[OfPairs]) -> FederatedModule:
        clients = [*CLIENTS[:2], Client(TARGET, "target", labelled=True)]
        return fedlit.Federated(seeded(kind), clients, TARGET, 2)

    OfRecords.seen = []
    ours = fitted(federated(OfRecords), named(pairs(some_known)))
    assert equal(ours, fitted(federated(OfPairs), FederatedLoader(pairs(some_known), 8, seed=0)))
    assert all((batch["outcome"] >= 0).all() for batch in OfRecords.seen)
    assert any(len(batch["name"]) not in (8, 1) for batch in OfRecords.seen)


@pytest.mark.parametrize("inputs", ["values", None])
def test_texts_and_numbers_of_all_samples_are_given_as_they_are(inputs: str | None) -> None:
    class Few(OfRecords):
        def forward(self, x: Any) -> Tensor:
            return self.net(x if isinstance(x, Tensor) else x["values"])

    clients = [*CLIENTS[:2], Client(TARGET, "target", labelled=True)]
    made = fedlit.FederatedDAN(seeded(Few), clients, TARGET, 2, features="net.2", width=8, warmup_rounds=1)
    data = pairs(some_known)
    given = {name: DataLoader(Records(each), 8, collate_fn=with_more) for name, each in data.items()}
    OfRecords.seen = []
    fitted(made, FederatedLoader.from_loaders(given, label="outcome", inputs=inputs), 2)
    assert {(batch["ward"], batch["number"], float(batch["unit"])) for batch in OfRecords.seen} == {("north", 7, 2.0)}


METHODS: dict[str, tuple[Any, ...]] = {
    "FedAvg": (FedAvg, False, {}),
    "FedMMD": (FedMMD, False, {"warmup_rounds": 1}),
    "FedDAN": (FedDAN, False, {"warmup_rounds": 1}),
    "FedGP": (FedGP, True, {"warmup_rounds": 1}),
}


@pytest.mark.parametrize("name", ["FedMMD", slow("FedAvg"), slow("FedDAN"), slow("FedGP")])
def test_methods_learn_from_records_as_from_pairs(name: str) -> None:
    kind, labelled, given = METHODS[name]
    data = pairs(some_known if labelled else None)
    ours = fitted(method(kind, labelled, **given), named(data))
    assert equal(ours, fitted(method(kind, labelled, **given), FederatedLoader(data, 8, seed=0)))


@pytest.mark.parametrize("make", [partial(method, FedMMD, warmup_rounds=1), partial(wrapped, OfRecords)])
def test_labels_of_an_unlabelled_target_have_no_effect(make: Callable[[], FederatedModule]) -> None:
    OfRecords.seen = []
    assert equal(fitted(make(), named(pairs())), fitted(make(), named(pairs(lambda y: 1 - y))))


def test_clients_weigh_by_the_samples_that_they_train_on() -> None:
    data = pairs()
    given: dict[str, DataLoader[Any]] = {
        "c0": DataLoader(Records(data["c0"]), 40, sampler=SubsetRandomSampler(range(30, 40))),
        "c1": DataLoader(Records(data["c1"]), 60, sampler=WeightedRandomSampler([0.1] * 25, 60)),
        "c2": DataLoader(Records(data["c2"]), 8),
    }
    OfRecords.seen = []
    made = wrapped(OfRecords)
    ends: list[dict[str, Tensor]] = []

    class Watch(pl.Callback, fedlit.Component):
        def on_train_batch_end(self, *_: Any) -> None:
            ends.append({name: weights(made, name)["extractor.net.0.weight"] for name in CLIENTS[:2]})

    fitted(made, FederatedLoader.from_loaders(given, label="outcome", inputs="values", seed=0), 1, callbacks=[Watch()])
    assert {name: made.federation.weights[name] for name in CLIENTS[:2]} == {"c0": 10, "c1": 25}
    assert [len(batch["name"]) for batch in OfRecords.seen] == [10, 60]
    mean = (10 * ends[0]["c0"] + 25 * ends[0]["c1"]) / 35
    torch.testing.assert_close(weights(made, TARGET)["extractor.net.0.weight"], mean)


class Wards(pl.LightningDataModule):
    """Loaders of the clients of this process, of batch sizes of their own."""

    def loader(self, stage: str) -> FederatedLoader:
        assert self.trainer is not None
        data = pairs(some_known)
        local = [client.name for client in self.trainer.lightning_module.federation.local_clients]
        size = dict(zip(CLIENTS, (7, 4, 5), strict=True))
        every: dict[str, DataLoader[Any]] = {
            name: DataLoader(Records(data[name]), size[name], shuffle=stage == "train", drop_last=name == "c1")
            for name in local
        }
        if "c0" in local and stage == "train":
            sampler = WeightedRandomSampler([0.1] * 40, 50)
            every["c0"] = DataLoader(Records(data["c0"]), 7, sampler=sampler)
        return FederatedLoader.from_loaders(every, stage=stage, label="outcome", inputs="values", seed=0)

    def train_dataloader(self) -> FederatedLoader:
        return self.loader("train")

    def val_dataloader(self) -> FederatedLoader:
        return self.loader("val")


MADE = {"wrapped": partial(wrapped, OfRecords), "FedDAN": partial(method, FedDAN, True, warmup_rounds=1)}


def run(kind: str, devices: int = 1) -> dict[str, Any]:
    OfRecords.seen = []
    made = MADE[kind]()
    fit = trainer(3, devices=devices)
    fit.fit(made, Wards())
    numbers = {name: float(value) for name, value in fit.callback_metrics.items()}
    return {
        "weights": {client.name: fingerprint(weights(made, client.name)) for client in made.federation.local_clients},
        "logged": numbers,
        "steps": fit.global_step,
    }


straight = cache(run)


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["wrapped", slow("FedDAN")])
def test_one_process_and_several_that_have_their_own_loaders_are_the_same(kind: str) -> None:
    alone = straight(kind)
    several = processes.results(run, kind, 3, ranks=3)
    assert alone["steps"] == 3 * 8  # of c0, which draws 50 rows in batches of 7
    assert {name: each for one in several for name, each in one["weights"].items()} == alone["weights"]
    assert all(one["logged"] == alone["logged"] and one["steps"] == alone["steps"] for one in several)
    assert "source/acc" in alone["logged"]


@pytest.mark.parametrize("kind", ["wrapped", slow("FedDAN")])
def test_resumed_is_straight(kind: str, tmp_path: Path) -> None:
    OfRecords.seen = []
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer(3, [saver], enable_checkpointing=True).fit(MADE[kind](), Wards())
    for step in (11, 16):  # within a round and between two
        made = MADE[kind]()
        trainer(3).fit(made, Wards(), ckpt_path=tmp_path / f"step={step}.ckpt", weights_only=False)
        found = {client.name: fingerprint(weights(made, client.name)) for client in made.federation.local_clients}
        assert found == straight(kind)["weights"], step


def test_evaluation_and_prediction_read_the_named_parts() -> None:
    OfRecords.seen = []
    data = pairs()
    made, fit = wrapped(OfRecords), trainer(2, [OracleAccuracy()])
    evaluated = {
        stage: FederatedLoader.from_loaders(loaders(data, False), stage=stage, label="outcome", inputs="values")
        for stage in ("val", "test")
    }
    fit.fit(made, named(data), evaluated["val"])
    (tested,) = fit.test(made, evaluated["test"], verbose=False)
    with torch.no_grad():
        for name, metric in (("c0", "source/c0/acc"), (TARGET, "oracle/target/acc")):
            x, y = data[name].tensors
            right = made.replicas[name].eval()(x).argmax(dim=1) == y
            assert tested[metric] == pytest.approx(float(right.float().mean())), name
    predicted = torch.cat([step[TARGET] for step in fit.predict(made, evaluated["test"]) if TARGET in step])
    assert predicted.shape == (17, 2)


# ---------------------------------------------------------------- errors


def test_clients_whose_batches_have_another_structure_are_named_with_both() -> None:
    given = loaders(pairs())

    def with_age(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return batch | {"age": batch["values"][:, :1]}

    given["c1"] = DataLoader(given["c1"].dataset, 8, collate_fn=with_age)
    OfRecords.seen = []
    with pytest.raises(RosterError, match="'c1'") as caught:
        fitted(wrapped(OfRecords), FederatedLoader.from_loaders(given, label="outcome"))
    assert "['age']" in str(caught.value)
    assert "'c0'" in str(caught.value)


def test_texts_among_inputs_of_a_method_are_named_with_a_way_out() -> None:
    with pytest.raises(SampleError, match=r"\['name'\] of type list") as caught:
        fitted(method(FedAvg), named(pairs(), inputs=None))
    assert "from_loaders" in str(caught.value)


def test_a_method_that_weighs_batches_takes_no_batch_sampler() -> None:
    data = pairs()
    given = {name: DataLoader(each, batch_sampler=[[0], [1, 2]]) for name, each in data.items()}
    with refused("batch_sampler"):
        fitted(method(FedDAN, warmup_rounds=1), FederatedLoader.from_loaders(given))
    fitted(method(FedMMD, warmup_rounds=1), FederatedLoader.from_loaders(given), 2)


def test_a_label_that_is_no_tensor_is_refused() -> None:
    def texts(samples: list[Any]) -> Any:
        return {"values": torch.stack([each["values"] for each in samples]), "outcome": ["ill"] * len(samples)}

    given = {name: DataLoader(each.dataset, 8, collate_fn=texts) for name, each in loaders(pairs()).items()}
    with pytest.raises(SampleError, match="labels of client 'c0'"):
        fitted(method(FedAvg), FederatedLoader.from_loaders(given, label="outcome"))


def test_a_single_sample_left_over_is_refused_with_batchnorm() -> None:
    given = {name: DataLoader(each, 8, shuffle=True) for name, each in pairs().items()}
    given["c1"] = DataLoader(pairs()["c1"], batch_sampler=[[0, 1], [2]])
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    net.out_features = 8  # type: ignore[assignment]
    with pytest.raises(RosterError, match=r"'c1'.*BatchNorm"):
        fitted(FedAvg(CLIENTS, TARGET, 2, net), FederatedLoader.from_loaders(given))
