"""fedavg against numpy's average and against numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlit.functional import fedavg


def random_updates(
    number: int, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> list[dict[str, Tensor]]:
    return [
        {
            "weight": torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype),
            "scale": torch.randn((), generator=generator, dtype=torch.float64).to(dtype),
        }
        for _ in range(number)
    ]


def test_weighted_mean_by_hand() -> None:
    # (1 * 10 + 3 * 20) / 4 = 17.5 and (1 * -1 + 3 * 1) / 4 = 0.5
    mean = fedavg([{"a": torch.tensor([10.0, -1.0])}, {"a": torch.tensor([20.0, 1.0])}], weights=[1, 3])
    assert mean["a"].tolist() == [17.5, 0.5]


@pytest.mark.parametrize("weights", [None, [1.0, 1.0, 1.0], [2, 0, 5], torch.tensor([0.5, 1.5, 3.0])])
def test_agrees_with_numpy_average(weights: Sequence[float] | Tensor | None, generator: torch.Generator) -> None:
    updates = random_updates(3, generator)
    mean = fedavg(updates, weights)
    for name in ("weight", "scale"):
        stacked = np.stack([update[name].numpy() for update in updates])
        given_weights = None if weights is None else np.asarray(weights, dtype=np.float64)
        np.testing.assert_allclose(mean[name].numpy(), np.average(stacked, axis=0, weights=given_weights), rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_keeps_shapes_and_dtypes(dtype: torch.dtype, generator: torch.Generator) -> None:
    updates = random_updates(2, generator, dtype)
    mean = fedavg(updates, [1, 2])
    assert {name: (t.shape, t.dtype) for name, t in mean.items()} == {
        name: (t.shape, t.dtype) for name, t in updates[0].items()
    }
    assert list(mean) == list(updates[0])


def test_half_precision_does_not_lose_the_many_small_shares() -> None:
    # 4096 ones: a running float16 sum of shares 1/4096 would stop growing at 0.5
    mean = fedavg([{"a": torch.ones(1, dtype=torch.float16)}] * 4096)
    assert mean["a"].item() == 1.0


def test_integers_are_averaged_exactly_and_rounded_half_to_even() -> None:
    updates = [{"n": torch.tensor([1, 2, 10])}, {"n": torch.tensor([2, 3, 11])}]
    mean = fedavg(updates)
    assert mean["n"].dtype == torch.int64
    assert mean["n"].tolist() == [2, 2, 10]  # 1.5 -> 2, 2.5 -> 2, 10.5 -> 10


def test_batch_norm_state_dicts_can_be_averaged_and_loaded() -> None:
    networks = [nn.BatchNorm1d(2) for _ in range(2)]
    for steps, network in zip([3, 5], networks, strict=True):
        for _ in range(steps):
            network(torch.randn(8, 2))
    mean = fedavg([network.state_dict() for network in networks], weights=[3, 1])
    assert mean["num_batches_tracked"].item() == 4  # 3.5, to even
    nn.BatchNorm1d(2).load_state_dict(mean)


def test_adds_from_left_to_right() -> None:
    """In float32, (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1: the order of the sum is part of the contract."""
    big, one, minus = ({"a": torch.tensor([value])} for value in (1e8, 1.0, -1e8))
    quarter = torch.tensor([0.25])
    assert fedavg([big, one, minus, {"a": torch.zeros(1)}])["a"].item() == 0.0
    assert torch.equal(fedavg([big, minus, one, {"a": torch.zeros(1)}])["a"], quarter)


def test_same_input_gives_the_same_bits_and_new_tensors(generator: torch.Generator) -> None:
    updates = random_updates(5, generator, torch.float32)
    first, second = fedavg(updates, [1, 2, 3, 4, 5]), fedavg(updates, [1, 2, 3, 4, 5])
    assert all(torch.equal(first[name], second[name]) for name in first)
    alone = fedavg(updates[:1])
    assert torch.equal(alone["weight"], updates[0]["weight"])
    alone["weight"].zero_()
    assert updates[0]["weight"].abs().sum() > 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50)), min_size=1, max_size=8).filter(
        lambda pairs: any(weight for _, weight in pairs)
    )
)
def test_equals_the_exact_rational_mean_whatever_the_unit_of_the_weights(pairs: list[tuple[int, int]]) -> None:
    updates = [{"a": torch.tensor([float(value)], dtype=torch.float64)} for value, _ in pairs]
    exact = Fraction(sum(value * weight for value, weight in pairs), sum(weight for _, weight in pairs))
    for unit in (1.0, 1e-6, 1e6):
        mean = fedavg(updates, [unit * weight for _, weight in pairs])["a"].item()
        assert math.isclose(mean, float(exact), rel_tol=1e-12, abs_tol=1e-10)


def test_gradients_pass_through() -> None:
    parameter = torch.ones(2, requires_grad=True)
    mean = fedavg([{"a": parameter}, {"a": torch.zeros(2)}], [1, 3])["a"]
    (gradient,) = torch.autograd.grad(mean.sum(), parameter)
    assert gradient.tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("updates", "weights", "message"),
    [
        ([], None, "at least 1 update"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], None, r"update 1 lacks \['a'\] and adds \['b'\]"),
        ([{"a": torch.ones(1)}, {"a": torch.ones(2)}], None, r"'a' is \(1,\) in update 0 and \(2,\) in update 1"),
        ([{"a": torch.ones(1)}] * 2, [1.0, -0.5], "got -0.5 for update 1"),
        ([{"a": torch.ones(1)}] * 2, [float("nan"), 1.0], "got nan for update 0"),
        ([{"a": torch.ones(1)}] * 2, [float("inf"), 1.0], "got inf for update 0"),
        ([{"a": torch.ones(1)}] * 2, [0.0, 0.0], "positive sum"),
        ([{"a": torch.ones(1)}] * 2, [1.0], "got 1 for 2 updates"),
        ([{"a": torch.ones(1)}] * 2, torch.ones(2, 1), r"got shape \(2, 1\)"),
    ],
)
def test_refuses_what_cannot_be_averaged(
    updates: list[dict[str, Tensor]], weights: Sequence[float] | Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fedavg(updates, weights)
