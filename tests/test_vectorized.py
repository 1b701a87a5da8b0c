"""Replicas trained in one vectorised call against the loop over clients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.run.vectorisation import StackedReplicas

NAMES = ["a", "b", "c"]
Batch = dict[str, tuple[Tensor, Tensor]]


def networks() -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {}
    for index, name in enumerate(NAMES):
        torch.manual_seed(index)
        made[name] = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return made


def batch(generator: torch.Generator, **sizes: int) -> Batch:
    return {
        name: (
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
            torch.randint(0, 2, (size,), generator=generator),
        )
        for name, size in sizes.items()
    }


def pairs(replicas: dict[str, nn.Module], others: dict[str, nn.Module]) -> list[tuple[Tensor, Tensor]]:
    names = [(name, key) for name in NAMES for key, _ in replicas[name].named_parameters()]
    return [(replicas[name].get_parameter(key), others[name].get_parameter(key)) for name, key in names]


def looped(replicas: dict[str, nn.Module], batches: list[Batch]) -> list[dict[str, Tensor]]:
    """Losses of one client after the other, and their gradients added up over the batches."""
    losses = [{name: F.cross_entropy(replicas[name](x), y) for name, (x, y) in one.items()} for one in batches]
    for one in losses:
        for loss in one.values():
            loss.backward()
    return losses


def vectorised(stacked: StackedReplicas, batches: list[Batch]) -> list[dict[str, Tensor]]:
    losses = []
    for one in batches:
        losses.append(stacked.losses(one))
        if losses[-1]:
            torch.stack(list(losses[-1].values())).sum().backward()
        stacked.scatter_gradients()
    return losses


@pytest.mark.parametrize(
    "sizes",
    [
        [{"a": 5, "b": 1, "c": 3}],
        [{"a": 2, "c": 6}],
        [{"a": 4, "b": 2, "c": 3}, {"a": 1, "b": 5, "c": 3}],
        [{"a": 4, "b": 2, "c": 3}, {"b": 5}],  # "a" and "c" have run out of samples
        [{}, {"a": 4, "c": 3}],
        [{}],
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_the_loop(sizes: list[dict[str, int]], generator: torch.Generator) -> None:
    batches = [batch(generator, **one) for one in sizes]
    replicas = networks()
    reference = copy.deepcopy(replicas)
    found, expected = vectorised(StackedReplicas(replicas), batches), looped(reference, batches)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)
    for param, twin in pairs(replicas, reference):
        assert (param.grad is None) == (twin.grad is None)  # a client that was absent in all batches has no gradient
        if twin.grad is not None:
            torch.testing.assert_close(param.grad, twin.grad, rtol=1e-12, atol=1e-12)


def test_lightnings_order_of_clearing_between_loss_and_backward_works(generator: torch.Generator) -> None:
    replicas = networks()
    stacked = StackedReplicas(replicas)
    vectorised(stacked, [batch(generator, a=2, b=2, c=2)])
    losses = stacked.losses(batch(generator, a=2))
    for module in replicas.values():
        module.zero_grad(set_to_none=True)
    stacked.zero_grad()
    losses["a"].backward()
    stacked.scatter_gradients()
    assert [replicas[name].get_parameter("0.bias").grad is not None for name in NAMES] == [True, False, False]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda nets: dict.fromkeys(nets, nn.BatchNorm1d(3)), "running_mean"),
        (lambda nets: nets["a"].requires_grad_(False), "0.weight"),
        (lambda nets: nets["b"][2].requires_grad_(False), "2.weight"),
        (lambda nets: nets | {"b": nn.Sequential(nn.Linear(3, 9))}, "'b'"),
        (lambda nets: nets | {"c": nn.Linear(3, 2)}, "'c'"),
    ],
)
def test_networks_that_cannot_be_stacked_are_refused(change: Any, word: str) -> None:
    replicas = networks()
    changed = change(replicas)
    with pytest.raises(ValueError, match=word):
        StackedReplicas(changed if isinstance(changed, dict) else replicas)


class Centred(nn.Linear):
    """Subtracts the mean of the batch, which no buffer shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3, track_running_stats=False), Centred(3, 3)], ids=["norm", "own"])
def test_networks_in_which_samples_of_a_batch_meet_are_refused_where_batches_differ(
    layer: nn.Module, generator: torch.Generator
) -> None:
    def stacked() -> StackedReplicas:
        return StackedReplicas({name: nn.Sequential(copy.deepcopy(layer), nn.Linear(3, 4).double()) for name in NAMES})

    layer.double()
    replicas = stacked()
    replicas.losses(batch(generator, a=3, b=3, c=3))  # nothing is padded
    with pytest.raises(ValueError, match="compute a sample's output from its whole batch, as shorter batches are pad"):
        replicas.losses(batch(generator, a=3, b=2, c=3))
