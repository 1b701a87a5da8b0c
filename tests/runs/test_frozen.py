"""Frozen weights are equal everywhere from the start, and are not sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedlit import FederatedModule, Run
from fedlit.federation import Everyone
from fedlit.methods import FedAvg, FedGP, FedMMD, FedRep, SourceOnly
from fedlit.models import MLP, Features
from helpers import assert_resumes, build, digits, loader, same, shards, trainer, weights
from site_runs import merged, start

NAMES = ["c0", "c1", "c2"]


def backbone(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(5, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.ReLU())
    network.out_features = 6  # type: ignore[assignment]
    return network.requires_grad_(False)


def fit(
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
    frozen, beforehand = fit(network, data), fit(Features(6), features)
    assert bytes_of(frozen) == bytes_of(beforehand)
    for name in NAMES:
        ours, theirs = frozen.replicas[name], beforehand.replicas[name]
        assert same(ours.extractor.state_dict(), network.state_dict())
        torch.testing.assert_close(ours.classifier.state_dict(), theirs.classifier.state_dict())
    trained = fit(backbone().requires_grad_(True), data)
    assert bytes_of(trained) > bytes_of(frozen) + 3 * 5 * 36 * 4  # rounds, two up and three down, numbers, bytes


@pytest.mark.multiprocess
def test_frozen_weights_are_not_sent_by_three_processes_either() -> None:
    arguments = ["--frozen", "--rounds", "3", "--steps", "3"]
    (alone,) = start(*arguments)
    results = start(*arguments, "--devices", "3")
    assert merged(results) == alone["weights"]
    assert all(result["ledger"] == alone["ledger"] for result in results)
    (whole,) = start(*arguments[1:])
    # Rows are round, channel, sender, receiver, messages, bytes; 64 times 16 weights and 16 biases stay at home.
    for frozen, trained in zip(alone["ledger"], whole["ledger"], strict=True):
        assert frozen[:5] == trained[:5]
        if frozen[1] == "weights":
            assert trained[5] - frozen[5] >= 4160 * frozen[4]


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_statistics_of_a_frozen_batchnorm_are_sent_as_long_as_they_move(mode: str) -> None:
    network = backbone(norm=True)
    network.train(mode == "training")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    module = fit(network, shards(3))
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
    module = fit(network, shards(3), Thaws)
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


@pytest.mark.parametrize(
    ("method", "kwargs"),
    [(FedAvg, {}), (FedGP, {}), (FedRep, {}), (FedMMD, {"degree": 1, "warmup_rounds": 1})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_methods_train_on_a_frozen_extractor_and_resume(
    method: type[FederatedModule], kwargs: dict[str, Any], tmp_path: Path
) -> None:
    data = digits(target_labels=30)

    def make() -> FederatedModule:
        torch.manual_seed(1)
        return build(method, data, extractor=MLP(64, [16]).requires_grad_(False), **kwargs)

    whole = assert_resumes(make, lambda: data, tmp_path, [3], rounds=3, strategy={"local_steps": 2})
    for client in data.clients:
        assert same(whole.replicas[client.name].extractor.state_dict(), whole.originals[0].state_dict())
