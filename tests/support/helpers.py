"""Small federations for the tests: three clients with different digits, and Trainers without decoration."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from fedlit import FederatedModule, FederatedStrategy
from fedlit.data import Digits, FederatedLoader
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


def shards(num_clients: int, size: int = 40, seed: int = 0) -> dict[str, TensorDataset]:
    """Random two-class data, easy to reason about: ``size`` samples of 5 numbers per client."""
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for index in range(num_clients):
        x = torch.randn(size, 5, generator=generator)
        data[f"c{index}"] = TensorDataset(x, (x.sum(dim=1) > 0).long())
    return data


def loader(data: dict[str, TensorDataset], batch_size: int = 8, **kwargs: Any) -> FederatedLoader:
    """A training loader over ``data``."""
    return FederatedLoader(data, batch_size, seed=0, **kwargs)
