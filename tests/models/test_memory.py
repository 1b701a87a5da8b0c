"""A client's memory of a round: its start, learning rates, and gradients there."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlit.models import RoundMemory

RATES = [0.5, 0.25, 0.125]  # powers of two, so that their sum is exact
State = dict[str, Tensor]


def walk(generator: torch.Generator, steps: int = 3) -> list[State]:
    """States of a model: the start and after each step."""
    shapes = {"layer.weight": (3, 2), "layer.bias": (3,), "norm.running_mean": (3,)}
    states = [{n: torch.randn(shape, generator=generator) for n, shape in shapes.items()} for _ in range(steps + 1)]
    return [state | {"norm.num_batches_tracked": torch.tensor(index)} for index, state in enumerate(states)]


def gradient(state: State) -> State:
    """A gradient that belongs to a state."""
    return {name: 3 * tensor for name, tensor in state.items() if name.startswith("layer.")}


def go_on(memory: RoundMemory, states: list[State], rates: list[float]) -> RoundMemory:
    for state, rate in zip(states, rates, strict=True):
        memory.observe_(gradient(state))
        memory.record_(rate)
    return memory


def record(memory: RoundMemory, states: list[State], rates: list[float] = RATES) -> RoundMemory:
    """Start from the first state, and go through the others."""
    memory.begin_(states[0])
    return go_on(memory, states[1:], rates)


def test_the_update_is_the_difference_from_the_start_which_training_does_not_move(generator: torch.Generator) -> None:
    states = walk(generator)
    memory, start = RoundMemory(), copy.deepcopy(states[0])
    memory.begin_(states[0])
    states[0]["layer.weight"].add_(1.0)
    states[-1]["layer.weight"].requires_grad_()
    update = memory.update(states[-1])
    assert list(update) == list(states[-1])
    assert all(torch.equal(tensor, states[-1][name] - start[name]) for name, tensor in update.items())
    assert not any(tensor.requires_grad for tensor in update.values())
    assert list(memory.update({"layer.bias": start["layer.bias"]})) == ["layer.bias"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_is_at_the_start_for_a_while_and_then_restored(fails: bool) -> None:
    """Buffers too that are no part of the start, and move in between; and after an error."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    shared = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name.startswith("0.")}
    memory = RoundMemory()
    memory.begin_(shared)
    start = {name: tensor.detach().clone() for name, tensor in shared.items()}
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.add_(1.0)
    module(torch.randn(8, 2))
    before = copy.deepcopy(module.state_dict())
    with contextlib.suppress(ZeroDivisionError), memory.at_start(module, shared):
        assert all(torch.equal(shared[name], start[name]) for name in start)
        assert torch.equal(module[1].weight, before["1.weight"])
        module(torch.randn(8, 2))
        if fails:
            raise ZeroDivisionError
    same(module.state_dict(), before)
    assert module[0].weight.requires_grad


@pytest.mark.parametrize("keep_gradients", [True, False])
def test_gradients_are_kept_if_asked_for_and_a_new_round_forgets_them(
    keep_gradients: bool, generator: torch.Generator
) -> None:
    states, memory = walk(generator), RoundMemory(keep_gradients)
    record(memory, states)
    assert memory.path == sum(RATES)
    assert memory.statistics.count == 3
    same(memory.gradients, [*map(gradient, states[1:])] if keep_gradients else [])
    record(memory, walk(generator, steps=1), [0.5])
    assert (memory.path, memory.statistics.count, len(memory.gradients)) == (0.5, 1, int(keep_gradients))
    memory.forget_()
    assert not any(memory.state_dict().values())


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_round_goes_on_from_a_checkpoint_to_the_last_bit(stop: int, generator: torch.Generator) -> None:
    """And what goes on does not write into the state that it was loaded from."""
    states = walk(generator)
    straight = record(RoundMemory(keep_gradients=True), states)
    first = record(RoundMemory(keep_gradients=True), states[: stop + 1], RATES[:stop])
    saved, file = first.state_dict(), io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    for state in (torch.load(file, weights_only=True), saved):
        before = copy.deepcopy(state)
        resumed = RoundMemory(keep_gradients=True)
        resumed.load_state_dict(state)
        go_on(resumed, states[stop + 1 :], RATES[stop:])
        same(straight.state_dict(), resumed.state_dict())
        same(before, state)
        same(resumed.update(states[-1]), straight.update(states[-1]))


def same(one: Any, other: Any) -> None:
    """Compare nested states to the last bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = [*one.values()], [other[key] for key in one]
    if isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            same(left, right)
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
