"""Small federations for the tests: three clients with different digits, and Trainers without decoration."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, TensorDataset

from fedlit import Component, FederatedModule, FederatedStrategy, Run
from fedlit.data import Digits, DomainDataModule, FederatedLoader
from fedlit.federation import RoundPlan
from fedlit.models import MLP

QUIET: dict[str, Any] = {
    "accelerator": os.environ.get("FEDLIT_TEST_ACCELERATOR", "cpu"),  # "gpu" where there is one
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def digits(**kwargs: Any) -> Digits:
    """Embedded digits; clients clean, blended, fonts."""
    given: dict[str, Any] = {"clients": ["clean", "blended", "fonts"], "target": "fonts", "flatten": True, "seed": 0}
    given["batch_size"] = 64  # a round is 7 steps
    return Digits(**(given | kwargs))


def build(method: type[FederatedModule], data: Digits, **kwargs: Any) -> FederatedModule:
    """A method on a tiny MLP, always from the same weights."""
    torch.manual_seed(0)
    network = kwargs.pop("extractor", None) or MLP(64, [16], dropout=kwargs.pop("dropout", 0.0))
    return method(data.clients, data.target, data.num_classes, network, **kwargs)


def layers(width: int, *parts: nn.Module) -> Any:
    """An extractor of so many features."""
    network = nn.Sequential(*parts)
    network.out_features = width  # type: ignore[assignment]
    return network


def normalised_head(width: int = 16, outputs: int = 10) -> nn.Module:
    """A classifier with BatchNorm, for `build`; always the same."""
    linear = nn.Linear(width, outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.BatchNorm1d(width), linear)


STATEFUL: dict[str, Any] = {
    "dropout": 0.2,
    "optimizer": lambda params: Adam(params, lr=0.01),
    "lr_scheduler": lambda optimizer: StepLR(optimizer, 2, 0.5),
}
"""For `build`: random numbers, and states of optimiser and schedule, all of which runs have to keep apart by client."""


def trainer(rounds: int = 2, callbacks: Any = (), federated: bool = True, **kwargs: Any) -> pl.Trainer:
    """A quiet Trainer; keyword arguments of the strategy are given as ``strategy={...}``."""
    given = kwargs.pop("strategy", {})
    if federated:
        kwargs["strategy"] = FederatedStrategy(**({"num_threads": 1} | given))
    return pl.Trainer(**(QUIET | {"max_epochs": rounds, "callbacks": list(callbacks), "devices": 1} | kwargs))


def weights(module: FederatedModule, client: str) -> dict[str, Tensor]:
    """A copy of one client's weights."""
    return {name: tensor.detach().clone() for name, tensor in module.replicas[client].state_dict().items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether two state dicts agree to the last bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """sha256 of named tensors."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def batches_of(data: Mapping[str, Dataset[Any]], client: str, round_idx: int = 0, batch_size: int = 8) -> list[Any]:
    """A client's batches of a round, in the order of `loader`."""
    made = loader(dict(data), batch_size)
    made.plan(RoundPlan(made.sizes(), lambda _: set(data), lambda: (round_idx, 0)))
    return [step[client] for step in made if client in step]


def samples_of(data: DomainDataModule, client: str, part: str = "") -> tuple[Tensor, Tensor]:
    """Inputs as networks are given them in evaluation, and true labels: of a part, or all of a domain's."""
    y = data.labels(client)
    positions = getattr(data.split(client), part) if part else torch.arange(len(y))
    everything: Any = data.all_samples(client)
    return everything.batch(positions)[0], y[positions]


class Snapshots(pl.Callback, Component):
    """Copies of all clients' networks at the start, and of weights before and after rounds, and what these log."""

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        self.starts: list[dict[str, dict[str, Tensor]]] = []
        self.rounds: list[dict[str, dict[str, Tensor]]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedModule)
        self.start = {name: copy.deepcopy(replica) for name, replica in pl_module.replicas.named_children()}

    def on_round_start(self, run: Run) -> None:
        self.starts.append({name: weights(run.module, name) for name, _ in run.replicas.named_children()})

    def on_round_end(self, run: Run) -> None:
        self.rounds.append({name: weights(run.module, name) for name, _ in run.replicas.named_children()})
        self.metrics.append({name: float(value) for name, value in run.trainer.callback_metrics.items()})


def assert_resumes(
    make: Callable[[], FederatedModule],
    data: Callable[[], Any],
    folder: Path,
    steps: Sequence[int],
    rounds: int = 4,
    ledger: bool = True,
    **kwargs: Any,
) -> FederatedModule:
    """A run that goes on from its checkpoint after so many steps ends as the run in a row, which is returned."""
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    straight = make()
    trainer(rounds, [saver], enable_checkpointing=True, **kwargs).fit(straight, data())
    for step in steps:
        resumed = make()
        trainer(rounds, **kwargs).fit(resumed, data(), ckpt_path=folder / f"step={step}.ckpt")
        for client in straight.clients:
            assert same(weights(straight, client.name), weights(resumed, client.name)), (step, client.name)
        assert not ledger or straight.federation.ledger == resumed.federation.ledger, step
    return straight


def shards(num_clients: int, size: int = 40, seed: int = 0) -> dict[str, TensorDataset]:
    """Random two-class data, easy to reason about: ``size`` samples of 5 numbers per client."""
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for index in range(num_clients):
        x = torch.randn(size, 5, generator=generator)
        data[f"c{index}"] = TensorDataset(x, (x.sum(dim=1) > 0).long())
    return data


def unequal(*sizes: int, shift: float = 0.5, scale: float = 0.0, dtype: Any = None) -> dict[str, TensorDataset]:
    """`shards` of 20, 17 and 14 samples, or other numbers, around different centres and perhaps in other units."""
    sizes = sizes or (20, 17, 14)
    data = {}
    for i, ((name, shard), size) in enumerate(zip(shards(len(sizes), max(sizes)).items(), sizes, strict=True)):
        x, y = (tensor[:size] for tensor in shard.tensors)
        data[name] = TensorDataset(x.to(dtype) * (1 + scale * i) + shift * i, y)
    return data


def loader(data: dict[str, TensorDataset], batch_size: int = 8, **kwargs: Any) -> FederatedLoader:
    """A training loader over ``data``."""
    return FederatedLoader(data, batch_size, seed=0, **kwargs)


def fit(
    module: FederatedModule,
    data: dict[str, TensorDataset] | None = None,
    rounds: int = 1,
    batch_size: int = 64,
    callbacks: Sequence[pl.Callback] = (),
    **kwargs: Any,
) -> Snapshots:
    """Train on `unequal` or other data; by default a batch has all samples of a client, and a round is one step."""
    snapshots = Snapshots()
    run = trainer(rounds, [snapshots, *callbacks], **kwargs)
    run.fit(module, loader(unequal() if data is None else data, batch_size))
    return snapshots


def descend_(loss: Tensor, params: Iterable[Tensor], lr: float) -> None:
    """A step of plain gradient descent; of losses of one graph, the last is to be taken down first."""
    params = list(params)
    gradients = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        for param, gradient in zip(params, gradients, strict=True):
            param -= lr * gradient
