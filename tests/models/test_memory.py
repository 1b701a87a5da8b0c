"""A client's memory of a round: its start, learning rates, and statistics of gradients there."""

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
    """States of a model, the start and after each step, whose layer's tensors have gradients."""
    shapes = {"layer.weight": (3, 2), "layer.bias": (3,), "norm.running_mean": (3,)}
    states = []
    for _ in range(steps + 1):
        state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for tensor in layer_of(state).values():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        states.append(state | {"norm.num_batches_tracked": torch.tensor(len(states))})
    return states


def layer_of(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith("layer.")}


def gradients(state: State) -> dict[str, Any]:
    return {name: tensor.grad for name, tensor in layer_of(state).items()}


def record(memory: RoundMemory, states: list[State], rates: list[float] = RATES) -> RoundMemory:
    """Start from the first state, and go through the others."""
    memory.begin_(states[0])
    return go_on(memory, states[1:], rates)


def go_on(memory: RoundMemory, states: list[State], rates: list[float]) -> RoundMemory:
    for state, rate in zip(states, rates, strict=True):
        memory.observe_(gradients(state))
        memory.record_(rate)
    return memory


def test_the_update_is_the_difference_from_the_start(generator: torch.Generator) -> None:
    states = walk(generator)
    memory = record(RoundMemory(), states)
    update = memory.update(states[-1])
    assert list(update) == list(states[-1])
    assert all(torch.equal(tensor, states[-1][name] - states[0][name]) for name, tensor in update.items())
    assert list(memory.update(layer_of(states[-1]))) == ["layer.weight", "layer.bias"]


def test_the_start_is_a_copy_that_training_does_not_move() -> None:
    layer = nn.Linear(2, 3)
    memory = RoundMemory()
    memory.begin_(layer.state_dict(keep_vars=True))
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert torch.equal(memory.start["weight"], before)
    update = memory.update(dict(layer.named_parameters()))["weight"]
    torch.testing.assert_close(update, torch.ones(3, 2))
    assert not memory.start["weight"].requires_grad
    assert not update.requires_grad


def test_gradients_are_copied_when_observed() -> None:
    """The next backward pass may write into the same tensors."""
    memory = RoundMemory(keep_gradients=True)
    memory.begin_(nn.Linear(2, 3).state_dict())
    gradient = {"weight": torch.full((3, 2), 1.0), "bias": torch.zeros(3)}
    memory.observe_(gradient)
    gradient["weight"].fill_(5.0)
    memory.observe_(gradient)
    gradient["weight"].zero_()
    torch.testing.assert_close(memory.statistics.mean["weight"], torch.full((3, 2), 3.0))  # of 1 and 5
    assert [float(kept["weight"].mean()) for kept in memory.gradients] == [1.0, 5.0]
    assert memory.statistics.variance == pytest.approx(6 * 8.0)  # of 1 and 5, in each of 6 entries


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
        assert int(module[1].num_batches_tracked) == 2
        if fails:
            raise ZeroDivisionError
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert module[0].weight.requires_grad


@pytest.mark.parametrize("rates", [RATES, [0.0, 0.25, 0.125]])
def test_statistics_are_those_of_the_gradients_at_any_learning_rates(
    rates: list[float], generator: torch.Generator
) -> None:
    states = walk(generator)
    memory = record(RoundMemory(keep_gradients=True), states, rates)
    expected = [gradients(state) for state in states[1:]]
    assert memory.path == sum(rates)
    for ours, theirs in zip(memory.gradients, expected, strict=True):
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    rows = torch.stack([torch.cat([tensor.flatten() for tensor in gradient.values()]) for gradient in expected])
    mean = torch.cat([tensor.flatten() for tensor in memory.statistics.mean.values()])
    torch.testing.assert_close(mean, rows.mean(dim=0))
    assert memory.statistics.count == 3
    assert memory.statistics.variance == pytest.approx(float(rows.double().var(dim=0).sum()), rel=1e-6)


def test_a_client_that_observes_nothing_keeps_its_start_and_its_learning_rates_alone(
    generator: torch.Generator,
) -> None:
    memory = RoundMemory(keep_gradients=True)
    memory.begin_(walk(generator)[0])
    for rate in RATES:
        memory.record_(rate)
    assert {name for name, value in memory.state_dict().items() if value} == {"start", "path"}
    assert memory.path == sum(RATES)
    assert record(RoundMemory(), walk(generator)).gradients == []


def test_a_new_round_and_the_end_of_a_round_forget_the_last_one(generator: torch.Generator) -> None:
    memory = record(RoundMemory(keep_gradients=True), walk(generator))
    second = walk(generator, steps=1)
    record(memory, second, [0.5])
    assert (memory.path, memory.statistics.count, len(memory.gradients)) == (0.5, 1, 1)
    assert torch.equal(memory.statistics.mean["layer.bias"], gradients(second[1])["layer.bias"])
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
        assert torch.equal(resumed.update(states[-1])["layer.weight"], straight.update(states[-1])["layer.weight"])


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


def test_half_precision_weights_keep_their_mean_in_float32(generator: torch.Generator) -> None:
    states = []
    for state in walk(generator):
        half = {name: tensor.detach().bfloat16() for name, tensor in layer_of(state).items()}
        for name, tensor in half.items():
            tensor.grad = gradients(state)[name].bfloat16()
        states.append(half)
    memory = record(RoundMemory(), states)
    assert memory.statistics.mean["layer.weight"].dtype == torch.float32
    expected = torch.stack([gradients(state)["layer.weight"].float() for state in states[1:]]).mean(dim=0)
    torch.testing.assert_close(memory.statistics.mean["layer.weight"], expected)
    assert memory.update(states[-1])["layer.weight"].dtype == torch.bfloat16
