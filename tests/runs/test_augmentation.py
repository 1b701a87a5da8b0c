"""Draws of augmentations, whatever they draw from, depend on seed, client, batch and position alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedlit
import processes
from fedlit.data import Domain, DomainDataModule, FederatedLoader
from fedlit.federation import RoundPlan
from fedlit.methods import FedAvg
from fedlit.models import Features
from helpers import fingerprint, loader, shards, trainer, weights
from own_modules import Simple

SOURCES: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002, as the augmentations of others do
    "numpy, normal": lambda: float(np.random.normal()),  # noqa: NPY002, of which two are drawn at a time
    "random": random.random,
    "random, gauss": lambda: random.gauss(0, 1),
}
NAMES = ["c0", "c1", "c2"]


def drawn() -> Tensor:
    return torch.tensor([draw() for draw in SOURCES.values()], dtype=torch.float64)


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return drawn(), torch.tensor(index)


class Batches(Items):
    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return torch.stack([drawn() for _ in indices]), indices


def draws(
    dataset: Dataset[Any], num_workers: int = 0, seed: int = 0, round_idx: int = 0, training: bool = True
) -> dict[str, Tensor]:
    """By client, draws of a pass, shape (samples, sources); other things are drawn before, which must not matter."""
    torch.manual_seed(round_idx)
    np.random.seed(num_workers)  # noqa: NPY002
    random.seed(seed)
    made = FederatedLoader(dict.fromkeys(("a", "b"), dataset), 2, num_workers=num_workers, seed=seed, training=training)
    if training:
        made.plan(RoundPlan({"a": 5, "b": 5}, lambda _: {"a", "b"}, lambda: (round_idx, 0)))
    steps = list(made)
    return {name: torch.cat([step[name][0] for step in steps]) for name in ("a", "b")}


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_draws_do_not_depend_on_workers_nor_on_what_was_drawn_before(training: bool) -> None:
    alone = draws(Items(), 0, training=training)
    shared = draws(Items(), 2, training=training)
    assert all(torch.equal(alone[name], shared[name]) for name in alone)


def test_seeds_clients_passes_and_samples_draw_differently() -> None:
    runs = [draws(Items()), draws(Items(), seed=1), draws(Items(), round_idx=1)]
    rows = torch.cat([run[name] for run in runs for name in run])
    for column in rows.T:
        assert len(column.unique()) == len(rows) == 30


@pytest.mark.parametrize("dataset", [Items(), Batches()])
def test_what_is_drawn_elsewhere_goes_on_as_if_nothing_had_been_read(dataset: Dataset[Any]) -> None:
    def outside(reads: bool) -> Tensor:
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        random.seed(3)
        first = drawn()
        made = FederatedLoader({"a": dataset}, 2, seed=0)
        if reads:
            made.facts()
            list(made)
        return torch.cat([first, drawn()])

    assert torch.equal(outside(reads=True), outside(reads=False))


class Noisy(DomainDataModule):
    """Points to which a transform adds what numpy and Python draw."""

    def __init__(self) -> None:
        super().__init__(target="c2", seed=0, batch_size=8)
        self.check_roster()

    def domain_names(self) -> list[str]:
        return NAMES

    def class_names(self) -> list[str]:
        return ["below", "above"]

    def load(self, domain: str) -> Domain:
        x = torch.randn(40, 5, generator=torch.Generator().manual_seed(int(domain[1])))
        return Domain(x, (x.sum(dim=1) > 0).long())

    def transform(self, training: bool) -> Callable[[Tensor], Tensor] | None:
        return jitter if training else None


def jitter(x: Tensor) -> Tensor:
    return x + torch.as_tensor(np.random.normal(size=x.shape), dtype=x.dtype) * random.random()  # noqa: NPY002


class Mixing(Simple):
    """Augments in its training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((jitter(batch[0]), batch[1]), batch_idx)


class Dropping(nn.Module):
    """A network that draws from numpy in its forward."""

    out_features = 5

    def forward(self, x: Tensor) -> Tensor:
        return jitter(x) if self.training else x


def module_of(kind: str) -> fedlit.FederatedModule:
    torch.manual_seed(0)
    if kind == "in training_step":
        return fedlit.Federated(Mixing(nn.Linear(5, 2)), NAMES, "c2", 2)
    return FedAvg(NAMES, "c2", 2, Dropping() if kind == "in forward" else Features(5), nn.Linear(5, 2))


def run(kind: str, devices: int, before: int) -> dict[str, str]:
    """Fingerprints of local clients' weights after two rounds, before which something else was drawn."""
    np.random.seed(before)  # noqa: NPY002
    random.seed(before)
    module = module_of(kind)
    if kind == "in transform":
        trainer(2, devices=devices, limit_val_batches=0).fit(module, Noisy())
    else:
        trainer(2, devices=devices).fit(module, loader(shards(3)))
    return {client.name: fingerprint(weights(module, client.name)) for client in module.federation.local_clients}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "kind", ["in transform", *(pytest.param(f"in {x}", marks=pytest.mark.slow) for x in ("training_step", "forward"))]
)
def test_runs_depend_neither_on_processes_nor_on_other_draws_which_they_leave_alone(kind: str) -> None:
    alone = run(kind, 1, 11)
    after = drawn()[1:]
    np.random.seed(11)  # noqa: NPY002
    random.seed(11)
    assert torch.equal(after, drawn()[1:])
    shared = processes.results(run, kind, 3, 5, ranks=3)
    assert {name: digest for each in shared for name, digest in each.items()} == alone
