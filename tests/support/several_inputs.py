"""A federation whose samples are one tensor, or the same numbers in several tensors: both train alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedlit import Client, FederatedModule
from fedlit.callbacks import Calibration, OracleAccuracy, Validators
from fedlit.data import FederatedLoader
from fedlit.models import MLP
from helpers import trainer, weights
from method_table import METHODS, ONE_PASS

CLIENTS, TARGET, NUM_CLASSES = ["a", "b", "t"], "t", 10


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Halves:
    left: Tensor
    right: Tensor


FORMS = {
    "tensor": lambda x: x,
    "dict": lambda x: {"right": x[..., 4:], "left": x[..., :4]},
    "list": lambda x: [x[..., :4], x[..., 4:]],
    "tuple": lambda x: (x[..., :4], x[..., 4:]),
    "named tuple": lambda x: Pair(x[..., :4], x[..., 4:]),
    "dataclass": lambda x: Halves(x[..., :4], x[..., 4:]),
    "nested": lambda x: {"both": [x[..., :4], {"right": x[..., 4:]}]},
}
"""Structures of the same six numbers."""


def joined(inputs: Any) -> Tensor:
    """The six numbers of a batch, whatever their structure."""
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, Mapping):
        parts = [inputs[key] for key in sorted(inputs)]
    else:
        parts = [getattr(inputs, f.name) for f in fields(inputs)] if is_dataclass(inputs) else list(inputs)
    return torch.cat([joined(part) for part in parts], dim=1)


class Joining(nn.Module):
    """An extractor that puts the parts of its inputs side by side."""

    out_features = 16

    def __init__(self) -> None:
        super().__init__()
        self.network = MLP(6, [16])

    def forward(self, x: Any) -> Tensor:
        return self.network(joined(x))


class Formed(Dataset[Any]):
    """Samples in a form; read a batch at a time, or one by one."""

    def __init__(self, x: Tensor, y: Tensor, form: str) -> None:
        self.x, self.y, self.form = x, y, form
        self.labelled_indices = None if bool((y >= 0).all()) else (y >= 0).nonzero().squeeze(1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Any) -> Any:
        return FORMS[self.form](self.x[index]), self.y[index]


class FormedBatches(Formed):
    augments = False

    def batch(self, indices: Tensor) -> Any:
        return self[indices]


def loaders(form: str, labels: int = 0, batched: bool = True) -> list[FederatedLoader]:
    """To train, validate and predict on."""
    generator = torch.Generator().manual_seed(0)
    kind = FormedBatches if batched else Formed
    parts: list[dict[str, Any]] = [{}, {}]
    for place, part in enumerate(parts):
        for shift, name in enumerate(CLIENTS):
            y = torch.randint(NUM_CLASSES, (60,), generator=generator)
            x = torch.randn(60, 6, generator=generator) + y[:, None] / 3 + 0.3 * shift
            if name == TARGET and not place:
                y = torch.where(torch.arange(60) < labels, y, -1)
            part[name] = kind(x, y, form)
    train, val = parts
    return [
        FederatedLoader(train, 16, seed=0),
        FederatedLoader(val, 60, training=False, seed=0),
        FederatedLoader({TARGET: val[TARGET]}, 60, training=False, seed=0),
    ]


def build(name: str, **extra: Any) -> tuple[FederatedModule, int]:
    """A method of the table, and how many labels the target has."""
    method, given, data = METHODS[name]
    labels = {0: 0, 1.0: 60}.get(data.get("target_labels", 0), 30)
    torch.manual_seed(0)
    clients = [*CLIENTS[:2], Client(TARGET, "target", labelled=labels > 0)]
    return method(clients, TARGET, NUM_CLASSES, Joining(), **(given | extra)), labels


def run(name: str, form: str, batched: bool = True, devices: int = 1, **extra: Any) -> dict[str, Any]:
    """What a run of a method logs and predicts, with all that looks at inputs beside it."""
    module, labels = build(name, **extra)
    train, val, predict = loaders(form, labels, batched)
    watching: list[pl.Callback] = [Calibration(), OracleAccuracy(), Validators()]
    strategy = {} if name in ONE_PASS else {"local_steps": 2}
    rounds = 1 if name in ONE_PASS else 3
    fitted = trainer(rounds, watching, strategy=strategy, devices=devices, check_val_every_n_epoch=rounds)
    fitted.fit(module, train, val)
    metrics = {key: float(value) for key, value in fitted.callback_metrics.items()}
    local = [client.name for client in module.federation.local_clients]
    states = {client: weights(module, client) for client in local}
    found = {"metrics": metrics, "weights": states, "predictions": None}
    if devices == 1:
        found["predictions"] = torch.cat([batch[TARGET] for batch in fitted.predict(module, predict)])
    return found
