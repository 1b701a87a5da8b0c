"""What a client remembers of a round: where it started, its learning rates, and statistics of gradients there."""

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


def walk(generator: torch.Generator, steps: int = 3) -> list[dict[str, Tensor]]:
    """States of a model with parameters and BatchNorm's statistics, the start and after each step, with gradients.

    The gradients are of batches at the start; which batch comes with which step is of no interest here.
    """
    shapes = {"layer.weight": (3, 2), "layer.bias": (3,), "norm.running_mean": (3,)}
    states = []
    for _ in range(steps + 1):
        state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for tensor in parameters(state).values():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        states.append(state | {"norm.num_batches_tracked": torch.tensor(len(states))})
    return states


def parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("layer.")}


def gradients(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in parameters(state).items():
        assert tensor.grad is not None
        found[name] = tensor.grad
    return found


def record(memory: RoundMemory, states: list[dict[str, Tensor]], rates: list[float] = RATES) -> RoundMemory:
    """Start from the first state, and go through the others."""
    memory.begin_(states[0])
    for state, rate in zip(states[1:], rates, strict=True):
        memory.observe_(gradients(state))
        memory.record_(rate)
    return memory


def stored(memory: RoundMemory) -> dict[str, Any]:
    """Its state after a trip through a file that holds plain values only."""
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_the_update_is_what_has_changed_since_the_round_began(generator: torch.Generator) -> None:
    states = walk(generator)
    memory = record(RoundMemory(), states)
    update = memory.update(states[-1])
    assert list(update) == list(states[-1])
    for name, tensor in update.items():
        assert torch.equal(tensor, states[-1][name] - states[0][name])
    assert list(memory.update(parameters(states[-1]))) == ["layer.weight", "layer.bias"]


def test_the_start_is_a_copy_that_training_does_not_move() -> None:
    layer = nn.Linear(2, 3)
    memory = RoundMemory()
    memory.begin_(layer.state_dict(keep_vars=True))
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert torch.equal(memory.start["weight"], before)
    assert not memory.start["weight"].requires_grad
    update = memory.update(dict(layer.named_parameters()))
    torch.testing.assert_close(update["weight"], torch.ones(3, 2))
    assert not update["weight"].requires_grad


def test_gradients_are_copied_as_they_are_when_observed() -> None:
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
def test_a_module_is_at_the_start_for_a_while_and_then_what_it_was(fails: bool) -> None:
    """Also buffers that are no part of the start, and move in between; and if what is done there fails."""
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
    assert int(module[1].num_batches_tracked) == 1
    assert module[0].weight.requires_grad


@pytest.mark.parametrize("rates", [RATES, [0.0, 0.25, 0.125]])
def test_statistics_are_those_of_the_gradients_whatever_the_learning_rates(
    rates: list[float], generator: torch.Generator
) -> None:
    states = walk(generator)
    memory = record(RoundMemory(keep_gradients=True), states, rates)
    assert memory.path == sum(rates)
    expected = [gradients(state) for state in states[1:]]
    assert len(memory.gradients) == 3
    for ours, gradient in zip(memory.gradients, expected, strict=True):
        assert list(ours) == ["layer.weight", "layer.bias"]
        assert all(torch.equal(ours[name], gradient[name]) for name in ours)
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
    assert memory.path == sum(RATES)
    assert (memory.statistics.count, memory.statistics.mean, memory.gradients) == (0, {}, [])
    held = {name: value for name, value in memory.state_dict().items() if value}
    assert set(held) == {"start", "path"}  # no second copy of the network
    observing = record(RoundMemory(), walk(generator))
    assert (observing.statistics.count, observing.gradients) == (3, [])


def test_a_new_round_and_the_end_of_a_round_forget_the_last_one(generator: torch.Generator) -> None:
    memory = record(RoundMemory(keep_gradients=True), walk(generator))
    second = walk(generator, steps=1)
    record(memory, second, [0.5])
    assert (memory.path, memory.statistics.count, len(memory.gradients)) == (0.5, 1, 1)
    assert torch.equal(memory.gradients[0]["layer.bias"], gradients(second[1])["layer.bias"])
    assert torch.equal(memory.statistics.mean["layer.bias"], gradients(second[1])["layer.bias"])
    memory.forget_()
    state = memory.state_dict()
    assert all(not value for value in state.values()), state


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_round_goes_on_from_a_checkpoint_to_the_last_bit(stop: int, generator: torch.Generator) -> None:
    states = walk(generator)
    straight = record(RoundMemory(keep_gradients=True), states)
    first = record(RoundMemory(keep_gradients=True), states[: stop + 1], RATES[:stop])
    resumed = RoundMemory(keep_gradients=True)
    resumed.load_state_dict(stored(first))
    for state, rate in zip(states[stop + 1 :], RATES[stop:], strict=True):
        resumed.observe_(gradients(state))
        resumed.record_(rate)
    ours, theirs = straight.state_dict(), resumed.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ("path", "squares", "count"):
        assert ours[name] == theirs[name]
    for name in ("start", "mean"):
        assert ours[name].keys() == theirs[name].keys()
        assert all(torch.equal(tensor, theirs[name][key]) for key, tensor in ours[name].items())
    for one, other in zip(ours["gradients"], theirs["gradients"], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert torch.equal(resumed.update(states[-1])["layer.weight"], straight.update(states[-1])["layer.weight"])


def test_one_who_loads_does_not_write_into_what_was_saved(generator: torch.Generator) -> None:
    states = walk(generator)
    first = record(RoundMemory(keep_gradients=True), states[:2], RATES[:1])
    saved = first.state_dict()
    before = copy.deepcopy(saved)
    resumed = RoundMemory(keep_gradients=True)
    resumed.load_state_dict(saved)
    resumed.observe_(gradients(states[2]))
    resumed.record_(0.25)
    after = first.state_dict()
    assert (after["path"], after["count"], len(after["gradients"])) == (0.5, 1, 1)
    assert torch.equal(after["start"]["layer.bias"], before["start"]["layer.bias"])
    assert torch.equal(after["mean"]["layer.bias"], before["mean"]["layer.bias"])


def test_half_precision_weights_keep_their_mean_in_float32(generator: torch.Generator) -> None:
    states = []
    for state in walk(generator):
        half = {name: tensor.detach().bfloat16() for name, tensor in parameters(state).items()}
        for name, tensor in half.items():
            tensor.grad = gradients(state)[name].bfloat16()
        states.append(half)
    memory = record(RoundMemory(), states)
    assert memory.statistics.mean["layer.weight"].dtype == torch.float32
    expected = torch.stack([gradients(state)["layer.weight"].float() for state in states[1:]]).mean(dim=0)
    torch.testing.assert_close(memory.statistics.mean["layer.weight"], expected)
    assert memory.update(states[-1])["layer.weight"].dtype == torch.bfloat16
