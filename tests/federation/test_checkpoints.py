"""Parts of several processes make the file that one process would have written, and the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from fedlit.checkpoints import keep_clients, merge
from fedlit.optim import ClientSchedules

NAMES = ["b", "VA Long Beach", "keys", "a", "replicas"]
PLACEMENTS = [
    [NAMES],
    [NAMES[:2], NAMES[2:]],
    [["a", "b"], ["replicas", "keys", "VA Long Beach"]],
    [["keys"], ["replicas", "a"], ["b", "VA Long Beach"]],
    [[name] for name in reversed(NAMES)],
]
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: Adam(params, lr=0.01),
}


class Process:
    """The clients of one process, in roster order, as a module would train them."""

    def __init__(self, clients: Iterable[str], make: Callable[[Iterable[Any]], Optimizer], steps: int) -> None:
        self.clients = [name for name in NAMES if name in clients]
        self.replicas = nn.Module()
        for name in self.clients:
            torch.manual_seed(NAMES.index(name))
            # sizes differ between clients, and some entry has no parameters
            self.replicas._modules[name] = nn.Sequential(nn.Linear(2, 2 + NAMES.index(name)), nn.ReLU())
        self.optimizer = make([
            {"params": list(self.replicas._modules[name].parameters()), "client": name} for name in self.clients  # type: ignore[union-attr]
        ])  # fmt: skip
        self.schedules = ClientSchedules(self.optimizer, lambda view: ExponentialLR(view, 0.9), "round")
        self.train(range(steps))

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad(set_to_none=True)
            # "a" never trains, and so has no optimiser state; "keys" sits out every other step
            taking_part = [name for name in self.clients if name != "a" and (name != "keys" or step % 2)]
            for name in taking_part:
                module = self.replicas._modules[name]
                assert module is not None
                module(torch.full((3, 2), 1.0 + step)).square().mean().backward()
            self.optimizer.step()
            self.schedules.step(taking_part, {})

    def checkpoint(self) -> dict[str, Any]:
        weights = {f"replicas.{name}": tensor.clone() for name, tensor in self.replicas.state_dict().items()}
        return {
            "epoch": 3,
            "state_dict": {"shared": torch.tensor(1.0), **weights},
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [self.schedules.state_dict()],
            "round_losses": {name: [0.5 + NAMES.index(name)] for name in self.clients},
        }

    def load(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.replicas.load_state_dict({k.removeprefix("replicas."): v for k, v in state.items() if k != "shared"})
        self.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        self.schedules.load_state_dict(checkpoint["lr_schedulers"][0])


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        if not all(isinstance(key, int) for key in one):  # optimiser states are in the order of their first step
            assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_merged_parts_are_what_one_process_writes(
    placement: list[list[str]], make: Callable[[Iterable[Any]], Optimizer]
) -> None:
    whole = merge([Process(share, make, 3).checkpoint() for share in placement], NAMES)
    assert_equal(whole, Process(NAMES, make, 3).checkpoint())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("before", PLACEMENTS[1::2])
@pytest.mark.parametrize("after", PLACEMENTS)
def test_training_goes_on_under_any_other_placement(
    before: list[list[str]], after: list[list[str]], make: Callable[[Iterable[Any]], Optimizer]
) -> None:
    whole = merge([Process(share, make, 3).checkpoint() for share in before], NAMES)
    processes = [Process(share, make, 0) for share in after]
    for process in processes:
        process.load(keep_clients(whole, process.clients))
        process.train(range(3, 6))
    uninterrupted = Process(NAMES, make, 6).checkpoint()
    assert_equal(merge([process.checkpoint() for process in processes], NAMES), uninterrupted)


def test_a_part_has_its_own_clients_and_what_is_shared() -> None:
    part = keep_clients(Process(NAMES, OPTIMIZERS["sgd"], 2).checkpoint(), ["keys", "b"])
    clients = {name.split(".")[1] for name in part["state_dict"] if name.startswith("replicas.")}
    assert clients == {"keys", "b"}
    assert "shared" in part["state_dict"]
    assert [group["client"] for group in part["optimizer_states"][0]["param_groups"]] == ["b", "keys"]
    assert [group["params"] for group in part["optimizer_states"][0]["param_groups"]] == [[0, 1], [2, 3]]
    assert part["epoch"] == 3


def test_weights_alone_can_be_merged_and_cut() -> None:
    parts = [{"state_dict": Process(share, SGD, 0).checkpoint()["state_dict"]} for share in PLACEMENTS[2]]
    whole = merge(parts, NAMES)
    assert_equal(whole["state_dict"], Process(NAMES, SGD, 0).checkpoint()["state_dict"])
    assert list(whole) == ["state_dict"]
    assert list(keep_clients(whole, ["a"])["state_dict"]) == ["shared", "replicas.a.0.weight", "replicas.a.0.bias"]


def test_a_schedule_of_the_modules_own_is_taken_from_rank_0() -> None:
    parts = [{**Process(share, SGD, 0).checkpoint(), "lr_schedulers": [{"last_epoch": 2}]} for share in PLACEMENTS[1]]
    assert merge(parts, NAMES)["lr_schedulers"] == [{"last_epoch": 2}]


def test_the_parts_are_left_as_they_were() -> None:
    parts = [Process(share, OPTIMIZERS["adam"], 2).checkpoint() for share in PLACEMENTS[3]]
    again = [Process(share, OPTIMIZERS["adam"], 2).checkpoint() for share in PLACEMENTS[3]]
    keep_clients(merge(parts, NAMES), ["a"])
    assert_equal(parts, again)
