"""Checkpoints: a client's state is under its name, whatever process hosted it; all else is equal on all of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from fedlit.federation import FederationError
from fedlit.federation.documents import fingerprint
from fedlit.run.checkpoint import arrange, join, split
from fedlit.run.gathering import Part, check_public, gather
from fedlit.run.optimisation import ClientSchedules

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
    """The clients of one process, in roster order, trained as by a module."""

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

    def lightnings(self) -> dict[str, Any]:
        weights = {f"replicas.{name}": tensor.clone() for name, tensor in self.replicas.state_dict().items()}
        return {
            "epoch": 3,
            "state_dict": {"shared": torch.tensor(1.0), **weights},
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [self.schedules.state_dict()],
            "loops": {"seen": [1, 2.5, torch.arange(3)]},
        }

    def checkpoint(self) -> dict[str, Any]:
        made = self.lightnings()
        split(made, self.clients)
        for name in self.clients:
            made["clients"][name]["losses"] = [0.5 + NAMES.index(name)]
        return made

    def load(self, checkpoint: dict[str, Any]) -> None:
        join(checkpoint, self.clients)
        state = checkpoint["state_dict"]
        self.replicas.load_state_dict({k.removeprefix("replicas."): v for k, v in state.items() if k != "shared"})
        self.optimizer.load_state_dict(arrange(self.optimizer, checkpoint["optimizer_states"][0]))
        self.schedules.load_state_dict(checkpoint["lr_schedulers"][0])


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        if not all(isinstance(key, int) for key in one):  # optimiser states are in the order of their first step
            assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    else:
        assert type(one) is type(other)
        assert fingerprint(one) == fingerprint(other)


def gathered(checkpoints: Sequence[dict[str, Any]], own: Collection[str] = ()) -> dict[str, Any]:
    """The checkpoints of all ranks, gathered on rank 0 as over the wire."""
    parts = [Part.read(each["clients"], Part.of(each, own).message()) for each in checkpoints]
    check_public(parts)
    return gather(checkpoints[0], parts, NAMES)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parts_of_several_processes_make_what_one_process_writes(
    placement: list[list[str]], make: Callable[[Iterable[Any]], Optimizer]
) -> None:
    whole = gathered([Process(share, make, 3).checkpoint() for share in placement])
    assert_equal(whole, Process(NAMES, make, 3).checkpoint())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize(("before", "after"), [(PLACEMENTS[1], PLACEMENTS[0]), *itertools.pairwise(PLACEMENTS[1:])])
def test_training_goes_on_under_any_other_placement(
    before: list[list[str]], after: list[list[str]], make: Callable[[Iterable[Any]], Optimizer]
) -> None:
    whole = gathered([Process(share, make, 3).checkpoint() for share in before])
    processes = [Process(share, make, 0) for share in after]
    for process in processes:
        process.load(copy.deepcopy(whole))
        process.train(range(3, 6))
    uninterrupted = Process(NAMES, make, 6).checkpoint()
    assert_equal(gathered([process.checkpoint() for process in processes]), uninterrupted)


def test_each_client_has_its_own_weights_states_and_schedule_and_nobody_elses() -> None:
    process = Process(NAMES, OPTIMIZERS["adam"], 3)
    made = process.checkpoint()
    assert list(made) == ["epoch", "state_dict", "lr_schedulers", "loops", "clients"]
    assert list(made["state_dict"]) == ["shared"]
    assert made["lr_schedulers"] == [None]
    assert list(made["clients"]) == NAMES
    for place, name in enumerate(NAMES):
        own = made["clients"][name]
        assert set(own) == {"weights", "optimizers", "lr_schedulers", "losses"}
        assert own["weights"]["0.weight"].shape == (2 + place, 2)
        ((group,),) = own["optimizers"]
        assert group["client"] == name
        steps = 0 if name == "a" else 1 if name == "keys" else 3
        assert [0 if state is None else int(state["step"]) for state in group["params"]] == [steps, steps]
        assert own["lr_schedulers"][0]["last_epoch"] == steps


def test_weights_alone_can_be_split_and_joined() -> None:
    made = {"state_dict": Process(NAMES, SGD, 0).lightnings()["state_dict"]}
    split(made, NAMES)
    assert list(made) == ["state_dict", "clients"]
    join(made, ["a"])
    assert list(made["state_dict"]) == ["shared", "replicas.a.0.weight", "replicas.a.0.bias"]
    assert "optimizer_states" not in made


def test_a_schedule_of_the_modules_own_stays_public() -> None:
    made = Process(NAMES, SGD, 0).lightnings() | {"lr_schedulers": [{"last_epoch": 2}]}
    split(made, NAMES)
    join(made, NAMES)
    assert made["lr_schedulers"] == [{"last_epoch": 2}]


def test_groups_find_their_own_states_in_whatever_order_an_optimiser_has_them() -> None:
    parts = {name: [nn.Linear(2, 1), nn.Linear(3, 1)] for name in "ab"}

    def grouped(order: list[tuple[str, int]]) -> Adam:
        return Adam([{"params": parts[name][part].parameters(), "client": name} for name, part in order], lr=0.01)

    by_part = grouped([("a", 0), ("b", 0), ("a", 1), ("b", 1)])
    for group in by_part.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, float(param.numel()))
    by_part.step()
    by_client = grouped([("b", 0), ("b", 1), ("a", 0), ("a", 1)])
    by_client.load_state_dict(arrange(by_client, by_part.state_dict()))
    for param, state in by_part.state.items():
        assert torch.equal(by_client.state[param]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("mine", ({"b": torch.ones(1)}, {"a": torch.ones(1)})),
        ("mine", (torch.zeros(2), torch.tensor([0.0, 1.0]))),
        ("epoch", (3, 4)),
        ("mine", (1,)),  # on one process alone
        ("mine", (float("nan"), 7.0)),
        ("mine", ({"a"}, {"b"})),
        ("mine", (np.zeros(2), np.ones(2))),
        ("state_dict", ({"shared": torch.tensor(1.0)}, {"shared": torch.tensor(2.0)})),
    ],
)
def test_what_is_under_no_clients_name_and_differs_is_refused(key: str, values: tuple[Any, ...]) -> None:
    parts = [Process(share, SGD, 0).checkpoint() for share in PLACEMENTS[1]]
    for part, value in zip(parts[::-1], values, strict=False):
        part[key] = value
    with pytest.raises(FederationError, match=rf"checkpoint\['{key}'\] differs"):
        gathered(parts)


def test_equal_values_of_any_kind_pass_and_the_servers_are_those_of_rank_0() -> None:
    values = {
        "x": [1, 2.0, None, float("nan"), "t", {1, 2}, np.array([1.0, np.nan])],
        "y": (torch.tensor([float("nan")]).isnan(), {"z": object()}, torch.tensor(float("nan"))),
    }
    parts = [Process(share, SGD, 0).checkpoint() | copy.deepcopy(values) for share in PLACEMENTS[1]]
    for rank, part in enumerate(parts):
        part |= {"server": rank, "path": f"/site/{rank}"}
    whole = gathered(parts, own=["path"])
    assert (whole["server"], whole["path"]) == (0, "/site/0")


def test_callbacks_that_differ_are_named_and_clocks_are_not() -> None:
    parts = [Process(share, SGD, 0).checkpoint() for share in PLACEMENTS[1]]
    for rank, part in enumerate(parts):
        part["callbacks"] = {"Timer": {"elapsed": float(rank)}, "Mine": {"seen": rank}}
    with pytest.warns(UserWarning, match="callback Mine differs") as caught:
        assert gathered(parts)["callbacks"]["Mine"] == {"seen": 0}
    assert len(caught) == 1
