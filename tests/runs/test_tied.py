"""Weights that layers share stay shared, and are sent once; frozen ones are equal everywhere, and are not sent."""

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
from fedlit import Client, FederatedModule, Run
from fedlit.export import export_target
from fedlit.federation import Everyone
from fedlit.methods import FedAvg, FedCORAL, FedGP, FedProx, FedRep, SourceOnly
from fedlit.models import MLP, Features
from helpers import assert_resumes, build, digits, layers, loader, same, shards, trainer, weights
from method_table import METHODS, ONE_PASS, one_of_each
from own_modules import Simple

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
    if name in ONE_PASS:
        pytest.skip("makes its classifier")
    if name.split(",")[0] in ("CoMDA", "FedMMD", "FedMME", "FedRFTCA", "FedRep", "GALA", "KD3A"):
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


def test_an_exported_file_of_tied_weights_predicts_what_the_module_does(tmp_path: Path) -> None:
    module, inputs = fit(FedAvg), torch.randn(7, 5)
    export_target(module, tmp_path / "target.pt2", [5])
    found = torch.export.load(tmp_path / "target.pt2").module()(inputs)
    torch.testing.assert_close(found, module(inputs).softmax(dim=1).detach())


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


def backbone(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    parts = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()] if norm else [nn.Linear(5, 6), nn.ReLU()]
    return layers(6, *parts).requires_grad_(False)


def train(
    extractor: nn.Module, data: dict[str, TensorDataset], method: type[FederatedModule] = SourceOnly, **kwargs: Any
) -> FederatedModule:
    torch.manual_seed(0)
    module = method(NAMES, "c2", 2, extractor, nn.Linear(6, 2), **kwargs)
    trainer(3, strategy={"participation": Everyone()}).fit(module, loader(data))
    return module


def bytes_of(module: FederatedModule, channel: str = "weights") -> int:
    return module.federation.ledger.bytes_by_channel()[channel]


def test_a_frozen_extractor_costs_what_features_computed_beforehand_cost() -> None:
    data, network = shards(3), backbone()
    features = {name: TensorDataset(network(each.tensors[0]), each.tensors[1]) for name, each in data.items()}
    frozen, beforehand = train(network, data), train(Features(6), features)
    assert bytes_of(frozen) == bytes_of(beforehand)
    for name in NAMES:
        ours, theirs = frozen.replicas[name], beforehand.replicas[name]
        assert same(ours.extractor.state_dict(), network.state_dict())
        torch.testing.assert_close(ours.classifier.state_dict(), theirs.classifier.state_dict())
    trained = train(backbone().requires_grad_(True), data)
    assert bytes_of(trained) > bytes_of(frozen) + 3 * 5 * 36 * 4  # rounds, two up and three down, numbers, bytes


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_statistics_of_a_frozen_batchnorm_are_sent_as_long_as_they_move(mode: str) -> None:
    network = backbone(norm=True)
    network.train(mode == "training")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    module = train(network, shards(3))
    (norm,) = (part for part in module.replicas["c0"].modules() if isinstance(part, nn.BatchNorm1d))
    sent = set(module.run.weights.of("c0"))
    statistics = {"extractor.1.running_mean", "extractor.1.running_var"}
    assert sent == {"classifier.weight", "classifier.bias"} | (statistics if mode == "training" else set())
    assert torch.equal(norm.running_mean, before["1.running_mean"]) == (mode == "evaluation")
    assert torch.equal(norm.running_mean, module.replicas["c2"].extractor[1].running_mean)


class Thaws(SourceOnly):
    """Trains all from round 1 on."""

    def on_round_start(self, run: Run) -> None:
        super().on_round_start(run)
        if run.clock.round_idx == 1:
            self.replicas.requires_grad_(True)
            optimizer = self.optimizers(use_pl_optimizer=False)
            for client in self.federation.local_clients:
                thawed = list(self.replicas[client].extractor.parameters())
                optimizer.add_param_group({"params": thawed, "client": client.name})


def test_weights_are_sent_from_the_round_on_in_which_they_are_trained() -> None:
    network = backbone()
    module = train(network, shards(3), Thaws)
    entries = [entry for entry in module.federation.ledger if entry.channel == "weights"]
    by_round = [sum(entry.num_bytes for entry in entries if entry.round_idx == number) for number in range(3)]
    assert by_round[0] < by_round[1] == by_round[2]
    assert same(weights(module, "c0"), weights(module, "c1"))
    assert not same(module.replicas["c0"].extractor.state_dict(), network.state_dict())


def test_loaded_weights_that_are_not_those_given_are_sent() -> None:
    data = shards(3)
    torch.manual_seed(0)
    module = SourceOnly(NAMES, "c2", 2, backbone(), nn.Linear(6, 2))
    module.configure_model()
    with torch.no_grad():
        module.replicas["c0"].extractor[0].weight.add_(1)
        module.replicas["c1"].extractor[0].weight.add_(3)
    trainer(1).fit(module, loader(data))
    assert same(weights(module, "c0"), weights(module, "c1"))
    torch.testing.assert_close(module.replicas["c0"].extractor[0].weight, backbone()[0].weight + 2)


@pytest.mark.parametrize("name", ["FedGP", "FedMMD", "FADA"])
def test_methods_train_around_a_frozen_extractor(name: str) -> None:
    method, kwargs, of_data = METHODS[name]
    module = build(method, data := digits(**of_data), extractor=MLP(64, [16]).requires_grad_(False), **kwargs)
    trainer(2, strategy={"local_steps": 2}).fit(module, data)
    for client in data.clients:
        assert same(module.replicas[client.name].extractor.state_dict(), module.originals[0].state_dict())
