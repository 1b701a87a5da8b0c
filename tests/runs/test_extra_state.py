"""State that a module describes in a form of its own stays at its client; only parameters and buffers are averaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlit
import processes
from fedlit import FederatedModule
from fedlit.methods import FedAvg
from helpers import build, digits, loader, shards, trainer
from method_table import METHODS, ONE_PASS, one_of_each
from own_modules import Simple

NAMES = ["c0", "c1", "c2"]


class Counts(nn.Module):
    """Counts the samples it has seen in training, in a dictionary that is its extra state."""

    def __init__(self, inputs: int = 64, width: int = 16, state: Any = None) -> None:
        super().__init__()
        self.layer, self.out_features = nn.Linear(inputs, width), width
        self.state: Any = {"seen": 0} if state is None else state

    def forward(self, x: Tensor) -> Tensor:
        if self.training and isinstance(self.state, dict):
            self.state["seen"] += len(x)
        return self.layer(x).relu()

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("name", one_of_each(sorted(METHODS)))
def test_every_method_trains_with_extra_state(name: str) -> None:
    method, kwargs, options = METHODS[name]
    data = digits(**options)
    module = build(method, data, extractor=Counts(), **kwargs)
    whole = name in ONE_PASS  # which go through all samples
    trainer(2, strategy={"local_steps": None if whole else 2}).fit(module, data)
    counters = [id(part.state) for part in module.modules() if isinstance(part, Counts)]
    assert len(set(counters)) == len(counters)  # no two copies count together
    sent = module.run.weights.of("clean")
    assert all(isinstance(tensor, Tensor) for tensor in sent.values())
    assert not [key for key in sent if key.endswith("_extra_state")]


@pytest.mark.parametrize("state", [{"seen": 0}, 7, b"abc", "", torch.ones(3)], ids=str)
def test_extra_state_is_kept_in_checkpoints_by_client(state: Any, tmp_path: Path) -> None:
    def make() -> FederatedModule:
        torch.manual_seed(0)
        return FedAvg(NAMES, "c2", 2, Counts(5, 4, state=dict(state) if isinstance(state, dict) else state))

    whole, first, rest = make(), make(), make()
    trainer(3).fit(whole, loader(shards(3)))
    run = trainer(2)
    run.fit(first, loader(shards(3)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    trainer(3).fit(rest, loader(shards(3)), ckpt_path=tmp_path / "a.ckpt")
    for name in NAMES:
        own, theirs = whole.replicas[name].extractor, rest.replicas[name].extractor
        assert own.state is theirs.state or bool(torch.as_tensor(own.state == theirs.state).all())
        assert torch.equal(own.layer.weight, theirs.layer.weight)
    if isinstance(state, dict):
        assert whole.replicas["c0"].extractor.state["seen"] == 3 * 40
        assert whole.replicas["c2"].extractor.state["seen"] == 0


def test_a_tensor_in_extra_state_is_not_averaged() -> None:
    torch.manual_seed(0)
    module = FedAvg(NAMES, "c2", 2, Counts(5, 4, state=torch.zeros(3)))
    module.configure_model()
    for number, name in enumerate(NAMES):
        module.replicas[name].extractor.state = torch.full((3,), float(number))
    trainer(1).fit(module, loader(shards(3)))
    assert [module.replicas[name].extractor.state.tolist() for name in NAMES] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


class Moving(nn.Module):
    """Puts a new tensor in its buffer's place with each batch, as a moving average is often written."""

    out_features = 5

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
        return x - self.mean


def test_a_buffer_that_a_module_replaces_is_averaged_as_it_is() -> None:
    torch.manual_seed(0)
    data = shards(3)
    module = FedAvg(NAMES, "c2", 2, Moving(), nn.Linear(5, 2))
    trainer(2).fit(module, loader(data, batch_size=40))
    mean = torch.zeros(5)
    for _ in range(2):
        mean = torch.stack([0.5 * mean + 0.5 * data[name].tensors[0].mean(dim=0) for name in ("c0", "c1")]).mean(dim=0)
    for name in NAMES:
        torch.testing.assert_close(module.replicas[name].extractor.mean, mean)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_quantised_network_is_a_frozen_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    network = torch.ao.quantization.quantize_dynamic(network, {nn.Linear}, torch.qint8)
    modules = [FedAvg(NAMES, "c2", 2, network, nn.Linear(4, 2)) for _ in range(2)]
    run = trainer(1)
    run.fit(modules[0], loader(shards(3)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    trainer(2).fit(modules[1], loader(shards(3)), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    inputs = torch.randn(4, 5)
    assert torch.equal(modules[1].replicas["c0"].extractor(inputs), network(inputs))


class Hidden(nn.Module):
    """Whose state has copies of its weights, as of modules that gather or rename them."""

    out_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self._register_state_dict_hook(clone_weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_that_a_state_dict_hides_are_refused_by_name() -> None:
    module = FedAvg(NAMES, "c2", 2, Hidden(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"extractor\.layer\.weight"):
        trainer(1).fit(module, loader(shards(3)))


def clone_weights(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}layer.weight"] = state[f"{prefix}layer.weight"].clone()


class Net(Simple):
    """With hyper-parameters whose texts differ between processes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nn.Linear(5, 2))
        self.save_hyperparameters()


def saved(path: str, devices: int) -> str:
    """How a module with such hyper-parameters is described in a checkpoint of processes that differ."""
    numbers = (0, 8) if devices == 1 or processes.os.environ["LOCAL_RANK"] == "0" else (8, 0)
    unequal = set()
    for number in numbers:
        unequal.add(number)  # of which repr has the order of insertion
    torch.manual_seed(0)
    hparams = {"choices": unequal, "loss": [lambda x: x for _ in range(numbers[0] + 1)][-1], "thing": object()}
    module = fedlit.Federated(Net(**hparams), NAMES, "c2", 2)
    run = trainer(1, devices=devices)
    run.fit(module, loader(shards(3)))
    run.save_checkpoint(path)
    return str(module.hparams["module"])


@pytest.mark.multiprocess
def test_functions_and_sets_in_hyper_parameters_go_into_a_checkpoint_of_two_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    texts = processes.results(saved, path, 2, ranks=2)
    assert texts[0] == texts[1]
    assert "{0, 8}" in texts[0]
    assert "0x" not in texts[0]
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["hyper_parameters"]["module"] == texts[0]
    assert [*checkpoint["clients"]] == NAMES
