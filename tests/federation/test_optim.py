"""Clipping and learning-rate schedules per client."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, ReduceLROnPlateau, StepLR

from fedlit.run.optimisation import ClientSchedules, client_norms, clip_client_gradients

CLIENTS = ["a", "b", "keys"]


def parameters() -> dict[str, list[Tensor]]:
    return {client: [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))] for client in CLIENTS}


def groups(params: dict[str, list[Tensor]]) -> list[dict[str, Any]]:
    return [{"params": own, "client": client} for client, own in params.items()]


def rates(optimizer: Optimizer) -> dict[str, float]:
    return {group["client"]: group["lr"] for group in optimizer.param_groups}


def test_each_clients_gradient_is_clipped_by_its_own_norm() -> None:
    params = parameters()
    optimizer = SGD(groups(params), lr=0.1)
    params["a"][0].grad, params["a"][1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])  # norm 5
    params["b"][0].grad = torch.tensor([0.3, 0.4])  # norm 0.5, below the limit; its other gradient is missing
    norms = client_norms(optimizer)
    assert {name: round(float(norm), 6) for name, norm in norms.items()} == {"a": 5.0, "b": 0.5}
    clip_client_gradients(optimizer, 1.0)
    torch.testing.assert_close(params["a"][0].grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(params["a"][1].grad, torch.tensor([0.8]))
    torch.testing.assert_close(params["b"][0].grad, torch.tensor([0.3, 0.4]))
    assert params["b"][1].grad is None
    assert params["keys"][0].grad is None


def test_a_client_with_several_groups_has_one_norm_and_values_are_clipped_alone() -> None:
    params = parameters()
    optimizer = SGD([{"params": [param], "client": client} for client, own in params.items() for param in own], lr=0.1)
    params["a"][0].grad, params["a"][1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert float(client_norms(optimizer)["a"]) == pytest.approx(5.0)
    clip_client_gradients(optimizer, 2.5)
    assert params["a"][1].grad.tolist() == pytest.approx([2.0], abs=1e-5)
    params["a"][0].grad, params["b"][0].grad = torch.tensor([3.0, -4.0]), torch.tensor([0.5, -0.1])
    clip_client_gradients(optimizer, 1.0, "value")
    assert params["a"][0].grad.tolist() == [1.0, -1.0]
    assert params["b"][0].grad.tolist() == pytest.approx([0.5, -0.1])


def test_clipping_equals_that_of_each_client_alone(generator: torch.Generator) -> None:
    params = parameters()
    for own in params.values():
        for param in own:
            param.grad = 5 * torch.randn(param.shape, generator=generator)
    alone = {client: [param.grad.clone() for param in own] for client, own in params.items()}
    clip_client_gradients(Adam(groups(params)), 0.7)
    for client, gradients in alone.items():
        norm = torch.cat(gradients).norm()
        for param, gradient in zip(params[client], gradients, strict=True):
            torch.testing.assert_close(param.grad, gradient * min(1.0, float(0.7 / (norm + 1e-6))))


def test_a_schedule_advances_for_participants_only() -> None:
    optimizer = SGD(groups(parameters()), lr=1.0)
    schedules = ClientSchedules(optimizer, lambda view: ExponentialLR(view, 0.5), "round")
    optimizer.step()
    schedules.step(["a", "keys"], {})
    schedules.step(["a", "zoe"], {})
    assert rates(optimizer) == {"a": 0.25, "b": 1.0, "keys": 0.5}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "build",
    [
        lambda view: StepLR(view, 2, 0.1),
        lambda view: CosineAnnealingLR(view, 5),
        lambda view: LinearLR(view, 0.1, total_iters=4),
    ],
)
def test_a_clients_schedule_is_what_it_would_be_alone(build: Any) -> None:
    optimizer = SGD(groups(parameters()), lr=0.3)
    schedules = ClientSchedules(optimizer, build, "round")
    reference = SGD(parameters()["a"], lr=0.3)
    schedule = build(reference)
    for _ in range(7):
        optimizer.step()
        schedules.step(["a"], {})
        reference.step()
        schedule.step()
        assert rates(optimizer)["a"] == reference.param_groups[0]["lr"]
    fresh = SGD(parameters()["a"], lr=0.3)
    build(fresh)
    assert rates(optimizer)["b"] == fresh.param_groups[0]["lr"]


def test_a_plateau_is_each_clients_own() -> None:
    optimizer = SGD(groups(parameters()), lr=1.0)
    schedules = ClientSchedules(optimizer, lambda view: ReduceLROnPlateau(view, factor=0.1, patience=1), "round")  # type: ignore[arg-type,return-value]
    for round_idx in range(4):
        schedules.step(["a", "b"], {"a": 1.0, "b": 1.0 / (round_idx + 1), "keys": 1.0})
    schedules.step(["keys"], {})  # took part, but has no loss to show
    # "a" stood still: the best of round 0 was not beaten for more than 1 round
    assert rates(optimizer) == pytest.approx({"a": 0.1, "b": 1.0, "keys": 1.0})


@pytest.mark.parametrize("kind", ["exponential", "plateau"])
def test_schedules_survive_a_checkpoint_and_steer_the_groups_it_brings(kind: str) -> None:
    def build(view: Optimizer) -> Any:
        return ExponentialLR(view, 0.5) if kind == "exponential" else ReduceLROnPlateau(view, factor=0.5, patience=0)

    def made() -> tuple[Optimizer, ClientSchedules]:
        optimizer = SGD(groups(parameters()), lr=1.0, momentum=0.9)
        return optimizer, ClientSchedules(optimizer, build, "round")

    def advance(optimizer: Optimizer, schedules: ClientSchedules, rounds: range) -> dict[str, float]:
        for round_idx in rounds:
            optimizer.step()
            clients = CLIENTS[: 1 + round_idx % 3]
            schedules.step(clients, dict.fromkeys(clients, 1.0))
        return rates(optimizer)

    one = made()
    advance(*one, range(4))
    file = io.BytesIO()
    torch.save({"optimizer": one[0].state_dict(), "schedules": one[1].state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = made()
    other[0].load_state_dict(state["optimizer"])
    other[1].load_state_dict(state["schedules"])
    assert rates(other[0]) == rates(one[0])
    assert advance(*other, range(4, 9)) == advance(*one, range(4, 9)) != rates(made()[0])
    assert other[1].state_dict() == one[1].state_dict()


def test_a_process_restores_its_own_clients_from_everybodys_schedules() -> None:
    optimizer = SGD(groups(parameters()), lr=1.0)
    schedules = ClientSchedules(optimizer, lambda view: ExponentialLR(view, 0.5), "round")
    optimizer.step()
    schedules.step(["b"], {})
    state = copy.deepcopy(schedules.state_dict())
    own = {"b": parameters()["b"]}
    mine = SGD(groups(own), lr=1.0)
    restored = ClientSchedules(mine, lambda view: ExponentialLR(view, 0.5), "round")
    restored.load_state_dict(state)
    assert restored.schedules["b"].last_epoch == 1
