"""Weights that layers share stay shared in every copy, and are sent, averaged and stepped once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import fedlit
from fedlit import Client, FederatedModule
from fedlit.export import export_target
from fedlit.methods import FedAvg, FedCORAL, FedGP, FedProx, FedRep
from helpers import assert_resumes, digits, loader, same, trainer, weights
from method_table import METHODS
from own_modules import Simple
from shown import one_of_each

NAMES = ["c0", "c1", "c2"]


class Body(nn.Module):
    """Features whose last layer has the shape of a classifier."""

    def __init__(self, inputs: int = 5, classes: int = 3, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, classes)
        self.norm = nn.BatchNorm1d(classes) if norm else nn.Identity()
        self.second = nn.Linear(classes, classes)
        self.out_features = classes

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.norm(self.first(x)))))


def tied(inputs: int = 5, classes: int = 3, norm: bool = False) -> tuple[Body, nn.Module]:
    """An extractor and a classifier with one weight, always the same."""
    torch.manual_seed(0)
    body, head = Body(inputs, classes, norm), nn.Linear(classes, classes)
    head.weight = body.second.weight
    return body, head


def samples(number: int = 20) -> dict[str, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(number, 5, generator=generator) for _ in NAMES]
    return {name: TensorDataset(each, each[:, :3].argmax(dim=1)) for name, each in zip(NAMES, x, strict=True)}


def fit(method: type[FederatedModule], rounds: int = 1, run: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    module = method(NAMES, "c2", 3, *tied(), **kwargs)
    trainer(rounds, **(run or {})).fit(module, loader(samples(), batch_size=20))
    return module


def is_tied(replica: nn.Module) -> bool:
    head = replica.classifier[-1] if isinstance(replica.classifier, nn.Sequential) else replica.classifier
    return head.weight is replica.extractor.second.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("name", one_of_each(sorted(METHODS)))
def test_a_method_keeps_weights_tied_or_refuses_them_by_name(name: str) -> None:
    method, kwargs, of_data = METHODS[name]
    data, (body, head) = digits(**of_data), tied(64, 10)
    given = {key: value for key, value in kwargs.items() if key != "classifier"}
    if name.startswith("AdaBN"):
        head = nn.Sequential(nn.BatchNorm1d(10), head)
    if name in ("FedJDA", "FedRFTCAClosedForm"):
        pytest.skip("makes its classifier")
    if name.split(",")[0] in ("CoMDA", "FedMMD", "FedMME", "FedRFTCA", "FedRep", "KD3A"):
        with pytest.raises(ValueError, match=r"^'extractor\.second\.weight' and 'classifier\.weight' are one weight"):
            method(data.clients, data.target, data.num_classes, body, head, **given)
        return
    module = method(data.clients, data.target, data.num_classes, body, head, **given)
    trainer(2, strategy={"local_steps": 2}).fit(module, data)
    for client in module.clients:
        replica = module.replicas[client.name]
        assert is_tied(replica)
        assert not hasattr(replica, "personal") or is_tied(replica.personal)
        sent = [tensor.data_ptr() for tensor in module.run.weights.of(client.name).values() if tensor.numel()]
        assert len(set(sent)) == len(sent)


def stepped(client: str) -> nn.Sequential:
    """Extractor and classifier after one step of SGD on all samples of a client."""
    net, (x, y) = nn.Sequential(*tied()), samples()[client].tensors
    optimizer = SGD(net.parameters(), lr=0.1)
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    return net


def test_a_round_of_fedavg_is_that_of_copies_of_the_whole_network() -> None:
    module = fit(FedAvg, optimizer=lambda params: SGD(params, lr=0.1))
    nets = [stepped(name) for name in ("c0", "c1")]
    states = [net.state_dict() for net in nets]
    mean = {key: (states[0][key] + states[1][key]) / 2 for key in states[0]}
    own = module.replicas["c2"].state_dict()
    for key, value in mean.items():
        part = {"0": "extractor", "1": "classifier"}[key[0]]
        torch.testing.assert_close(own[f"{part}{key[1:]}"], value)


def test_a_tied_weight_is_sent_once() -> None:
    module = fit(FedAvg)
    assert [name for name in module.run.weights.of("c0") if name.startswith("classifier")] == ["classifier.bias"]
    apart = FedAvg(NAMES, "c2", 3, Body(), nn.Linear(3, 3))
    trainer(1).fit(apart, loader(samples(), batch_size=20))
    ours, theirs = (each.federation.ledger.bytes_by_channel()["weights"] for each in (module, apart))
    assert theirs - ours >= 5 * 9 * 4  # two messages up, three down, numbers, bytes


@pytest.mark.parametrize("method", [FedProx, FedGP])
def test_a_run_with_tied_weights_resumes_to_the_same_bits(method: type[FederatedModule], tmp_path: Path) -> None:
    clients = [Client("c0"), Client("c1"), Client("c2", role="target", labelled=True)]
    whole = assert_resumes(
        lambda: method(clients, "c2", 3, *tied()), lambda: loader(samples()), tmp_path, [6], rounds=3
    )
    assert all(is_tied(whole.replicas[name]) for name in NAMES)


def test_training_all_clients_in_one_call_keeps_weights_tied() -> None:
    together, one_by_one = fit(FedAvg, 2, vectorize=True), fit(FedAvg, 2)
    for name in NAMES:
        assert is_tied(together.replicas[name])
        torch.testing.assert_close(weights(together, name), weights(one_by_one, name))


@pytest.mark.parametrize("name", ["target.pt2", "target.onnx"])
def test_an_exported_file_of_tied_weights_predicts_what_the_module_does(name: str, tmp_path: Path) -> None:
    module, inputs = fit(FedAvg), torch.randn(7, 5)
    export_target(module, tmp_path / name, [5])
    expected = module(inputs).softmax(dim=1).detach()
    if name.endswith("pt2"):
        found = torch.export.load(tmp_path / name).module()(inputs)
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(tmp_path / name)
        found = torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0])
    torch.testing.assert_close(found, expected)


def test_a_classifier_that_is_a_part_of_the_extractor_is_one_in_every_copy() -> None:
    torch.manual_seed(0)
    body = Body()
    module = FedAvg(NAMES, "c2", 3, body, body.second)
    trainer(1).fit(module, loader(samples()))
    for name in NAMES:
        assert module.replicas[name].classifier is module.replicas[name].extractor.second
    assert same(weights(module, "c0"), weights(module, "c1"))


def test_tied_buffers_stay_tied_and_are_sent_once() -> None:
    body, head = tied()
    body.register_buffer("scale", torch.ones(3))
    head.register_buffer("scale", body.scale)
    module = FedAvg(NAMES, "c2", 3, body, head)
    trainer(1).fit(module, loader(samples()))
    replica = module.replicas["c1"]
    assert replica.classifier.scale is replica.extractor.scale
    assert "classifier.scale" not in module.run.weights.of("c1")


@pytest.mark.parametrize(
    ("method", "kwargs"), [(FedRep, {}), (FedCORAL, {"average": "classifier"}), (FedAvg, {"refine": True})]
)
def test_parts_that_go_different_ways_share_no_weight(method: type[FederatedModule], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"are one weight, but .*give the"):
        method(NAMES, "c2", 3, *tied(), **kwargs)


def test_parameters_that_share_memory_without_being_one_are_refused() -> None:
    body, head = Body(), nn.Linear(3, 3)
    head.weight = nn.Parameter(body.second.weight.t())
    with pytest.raises(ValueError, match=r"'extractor\.second\.weight' and 'classifier\.weight' share memory"):
        FedAvg(NAMES, "c2", 3, body, head)
    FedAvg(NAMES, "c2", 3, Body(), nn.LSTM(3, 3))  # whose weights may lie side by side


class Decayed(nn.Module):
    """A loss that reads the network it is for, of which it is not a part, and another one of which it is."""

    def __init__(self, network: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.networks, self.head = [network], head

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        decay = sum(param.square().sum() for param in self.networks[0].parameters())
        return F.cross_entropy(logits, y) + 0.1 * decay + 0.1 * self.head.weight.square().sum()


class Regularised(Simple):
    def __init__(self) -> None:
        body, head = tied()
        super().__init__(nn.Sequential(body, head))
        self.loss = Decayed(self.net, head)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch[1])


def test_a_loss_of_a_wrapped_module_reads_its_own_clients_network() -> None:
    torch.manual_seed(0)
    module, alone = fedlit.Federated(Regularised(), NAMES, "c2", 3), []
    trainer(1).fit(module, loader(samples(), batch_size=20))
    for name in ("c0", "c1"):
        own, (x, y) = Regularised(), samples()[name].tensors
        own.training_step((x, y), 0).backward()
        own.configure_optimizers().step()
        alone.append(own.net.state_dict())
    replica = module.replicas["c2"].extractor
    assert replica.loss.networks[0] is replica.net
    assert replica.loss.head is replica.net[1]
    for key, value in replica.net.state_dict().items():
        torch.testing.assert_close(value, (alone[0][key] + alone[1][key]) / 2)
