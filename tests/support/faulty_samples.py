"""Small federations of which one client has samples that no run can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedlit import Client, FederatedModule, methods
from fedlit.data import FederatedLoader
from fedlit.methods import FedAvg
from fedlit.models import MLP
from helpers import trainer

CLIENTS, TARGET = ["a", "b", "t"], "t"
SIZE, WIDTH, NUM_CLASSES = 40, 5, 3

Parts = dict[str, list[Tensor]]


class Items(Dataset[Any]):
    """Samples that are made when they are read, one by one; it counts how often."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.reads = torch.zeros(len(y), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return self.x[index], self.y[index]


def parts(seed: int = 0) -> Parts:
    """Inputs and classes of each client; the target has all of its labels."""
    generator = torch.Generator().manual_seed(seed)
    found: Parts = {}
    for name in CLIENTS:
        y = torch.arange(SIZE) % NUM_CLASSES
        found[name] = [torch.randn(SIZE, WIDTH, generator=generator) + y[:, None], y]
    return found


def put(client: str, entry: int, row: int, value: float) -> Callable[[Parts], None]:
    """Write a value into one sample."""

    def fault(data: Parts) -> None:
        data[client][entry][row] = value

    return fault


def turned(client: str, entry: int, change: Callable[[Tensor], Tensor]) -> Callable[[Parts], None]:
    """Change all inputs (0), or labels (1), of a client."""

    def fault(data: Parts) -> None:
        data[client][entry] = change(data[client][entry])

    return fault


FAULTS: dict[str, tuple[Callable[[Parts], None], str]] = {
    "NaN at a source": (
        put("b", 0, 17, float("nan")),
        r"'b' must be finite, got nan in row 17 \(1 of \d+ samples\)",
    ),
    "infinity": (put("a", 0, 17, float("-inf")), "'a' must be finite, got -inf in row 17 "),
    "NaN at the target": (put("t", 0, 17, float("nan")), "'t' must be finite, got nan in row 17 "),
    "classes from 1": (turned("a", 1, lambda y: y + 1), r"'a' must lie in 0\.\.2 .* \(y - 1 if"),
    "one class too high": (put("b", 1, 17, 3), r"'b' must lie in 0\.\.2 .*\(3 in row 17\): renumber"),
    "a class below 0": (put("t", 1, 17, -7), r"'t' must lie in 0\.\.2 .*\(-7 in row 17\): renumber"),
    "no label at a source": (put("a", 1, 17, -1), r"'a' have no label \(-1 in row 17\)"),
    "int32": (turned("a", 1, Tensor.int), r"'a' must be classes, .*got torch.int32 .*: give y.long\(\)"),
    "uint8": (turned("t", 1, Tensor.byte), r"'t' .*got torch.uint8 .*: give y.long\(\)"),
    "floats": (turned("a", 1, Tensor.float), r"got torch.float32 .*: give y.long\(\)"),
    "bools": (turned("a", 1, Tensor.bool), r"got torch.bool .*: give y.long\(\)"),
    "a column": (turned("a", 1, lambda y: y[:, None]), r"shape \(\d+, 1\): give y.squeeze\(1\)"),
    "a column of floats": (turned("b", 1, lambda y: y[:, None].float()), r"give y.squeeze\(1\).long\(\)"),
    "one-hot": (turned("a", 1, F.one_hot), r"shape \(\d+, 3\): give y.argmax\(dim=1\)"),
    "float64": (
        turned("a", 0, Tensor.double),
        r"network, whose parameters are torch.float32, does not take .* 'a', torch.float64 .*: give x.float\(\)",
    ),
    "int64": (turned("b", 0, Tensor.long), r"'b', torch.int64 .*: give x.float\(\)"),
    "one column less": (turned("b", 0, lambda x: x[:, 1:]), r"'b' have shape \(4,\), those of 'a' have \(5,\)"),
}
"""Faults, and patterns of the errors about them."""


def build(method: type[FederatedModule] = FedAvg, **kwargs: Any) -> FederatedModule:
    """A method whose target has labels."""
    torch.manual_seed(0)
    clients = [*CLIENTS[:2], Client(TARGET, "target", labelled=kwargs.pop("labelled", True))]
    network = kwargs.pop("extractor", None) or MLP(WIDTH, [8])
    return method(clients, TARGET, kwargs.pop("num_classes", NUM_CLASSES), network, **kwargs)


def load(data: Parts, in_memory: bool = True, training: bool = True, **kwargs: Any) -> FederatedLoader:
    """A loader of samples that lie in memory, or are made when they are read."""
    kind: Any = TensorDataset if in_memory else Items
    return FederatedLoader({name: kind(*own) for name, own in data.items()}, 8, training=training, seed=0, **kwargs)


def fit(
    fault: str, in_memory: bool = True, federated: bool = True, devices: int = 1, method: str = "FedAvg"
) -> FederatedModule:
    """Train on data with a fault; other methods than FedAvg of a target without labels."""
    data, labelled, network = parts(), method == "FedAvg", MLP(WIDTH, [8], batch_norm=method == "AdaBN")
    module = build(getattr(methods, method), labelled=labelled, extractor=network)
    FAULTS[fault][0](data)
    trainer(2, federated=federated, devices=devices).fit(module, load(data, in_memory))
    return module
