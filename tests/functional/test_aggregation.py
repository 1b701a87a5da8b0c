"""Aggregation against numpy, against numbers by hand, and against what FedDA's and FedGP's definitions imply."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlit import functional as fn


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


def test_half_precision_does_not_lose_the_many_small_shares() -> None:
    # 4096 ones: a running float16 sum of shares 1/4096 would stop growing at 0.5
    mean = fn.fedavg([{"a": torch.ones(1, dtype=torch.float16)}] * 4096)
    assert mean["a"].item() == 1.0


def test_integers_are_averaged_exactly_and_rounded_half_to_even() -> None:
    updates = [{"n": torch.tensor([1, 2, 10])}, {"n": torch.tensor([2, 3, 11])}]
    mean = fn.fedavg(updates)
    assert mean["n"].dtype == torch.int64
    assert mean["n"].tolist() == [2, 2, 10]  # 1.5 -> 2, 2.5 -> 2, 10.5 -> 10


def test_adds_from_left_to_right() -> None:
    """In float32, (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1: the order of the sum is part of the contract."""
    big, one, minus = ({"a": torch.tensor([value])} for value in (1e8, 1.0, -1e8))
    quarter = torch.tensor([0.25])
    assert fn.fedavg([big, one, minus, {"a": torch.zeros(1)}])["a"].item() == 0.0
    assert torch.equal(fn.fedavg([big, minus, one, {"a": torch.zeros(1)}])["a"], quarter)


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50)), min_size=1, max_size=8).filter(
        lambda pairs: any(weight for _, weight in pairs)
    )
)
def test_equals_the_exact_rational_mean_whatever_the_unit_of_the_weights(pairs: list[tuple[int, int]]) -> None:
    updates = [{"a": torch.tensor([float(value)], dtype=torch.float64)} for value, _ in pairs]
    exact = Fraction(sum(value * weight for value, weight in pairs), sum(weight for _, weight in pairs))
    for unit in (1.0, 1e-6, 1e6):
        mean = fn.fedavg(updates, [unit * weight for _, weight in pairs])["a"].item()
        assert math.isclose(mean, float(exact), rel_tol=1e-12, abs_tol=1e-10)


GRANULARITIES = pytest.mark.parametrize("granularity", ["layer", "model"])


def flatten(update: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in update.values()])


def scaled(update: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: factor * tensor for name, tensor in update.items()}


def close(first: dict[str, Tensor], second: dict[str, Tensor], rtol: float = 1e-12) -> None:
    torch.testing.assert_close(first, second, rtol=rtol, atol=rtol)


def test_fedda_by_hand_with_a_beta_and_a_weight_per_source() -> None:
    # 1/4 [0.5 * 2 + 0.5 * 10] + 3/4 [0.8 * 2 + 0.2 * -4] = 1.5 + 0.6
    t, first, second = ({"a": torch.tensor([value], dtype=torch.float64)} for value in (2.0, 10.0, -4.0))
    result = fn.fedda(t, [first, second], beta=[0.5, 0.2], weights=[1, 3])
    assert result["a"].item() == pytest.approx(2.1, rel=1e-14)


def test_fedgp_by_hand_layer_by_layer_and_as_a_whole() -> None:
    r"""Two layers, t = (3, 4 | 1), s = (2, 0 | -1).

    Layers: <3 4, 2 0> / 4 = 1.5 gives (3, 0); the second is opposed and gives 0. So at beta 1/2: (3, 2 | 1/2).
    Whole: <t, s> = 6 - 1 = 5, |s|^2 = 5, so the projection is s itself: at beta 1/2 (2.5, 2 | 0).
    Without the filter the second layer is projected as well: -1 / 1 of s, which is 1.
    """
    t = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    s = {"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([-1.0])}
    by_layer, whole = (fn.fedgp(t, [s], 0.5, granularity=granularity) for granularity in ("layer", "model"))
    assert [by_layer["a"].tolist(), by_layer["b"].tolist()] == [[3.0, 2.0], [0.5]]
    assert [whole["a"].tolist(), whole["b"].tolist()] == [[2.5, 2.0], [0.0]]
    unfiltered = fn.fedgp(t, [s], 0.5, filtered=False)
    assert [unfiltered["a"].tolist(), unfiltered["b"].tolist()] == [[3.0, 2.0], [1.0]]
    # the cosines are 3/5 and -1: (3 + 6/5, 4 | 1 + 1) / 2
    cosine = fn.fedgp_cosine(t, [s], 0.5, 1.0, filtered=False)
    torch.testing.assert_close(cosine, {"a": torch.tensor([2.1, 2.0]), "b": torch.tensor([1.0])})
    # the layers' projections together are nearer to t than the whole's
    distances = [(flatten(t) - flatten(fn.fedgp(t, [s], 1.0, granularity=g))).norm() for g in ("layer", "model")]
    assert distances[0] < distances[1]


@GRANULARITIES
def test_fedgp_agrees_with_projections_made_by_numpy(granularity: str, generator: torch.Generator) -> None:
    t, *sources = random_updates(4, generator)
    beta, weights = [0.2, 0.5, 0.9], np.array([1.0, 2.0, 4.0])
    result = fn.fedgp(t, sources, beta, weights.tolist(), granularity)
    groups = [["weight"], ["scale"]] if granularity == "layer" else [["weight", "scale"]]
    for names in groups:
        a, *others = (np.concatenate([update[name].numpy().ravel() for name in names]) for update in (t, *sources))
        expected = np.zeros_like(a)
        for w, b, g in zip(weights / weights.sum(), beta, others, strict=True):
            expected += w * ((1 - b) * a + b * max(a @ g, 0) / (g @ g) * g)
        got = np.concatenate([result[name].numpy().ravel() for name in names])
        np.testing.assert_allclose(got, expected, rtol=1e-12)


@GRANULARITIES
def test_products_of_many_small_layers_are_numpys(granularity: str, generator: torch.Generator) -> None:
    """More than fit into one pack, an empty one and large ones among them."""
    sizes = [3, 0, 4096, 4097, 1, *[4000] * 17, 70_000, 2]
    t, *sources = ({f"l{i}": torch.randn(n, generator=generator) for i, n in enumerate(sizes)} for _ in range(3))
    inner, squares, own = fn.products_with_sources(t, sources, granularity)
    torch.testing.assert_close(own, fn.inner_products(t, t, granularity))
    for k, source in enumerate(sources):
        pairs = [(t[name].double().numpy(), source[name].double().numpy()) for name in t]
        for found, expected in ((inner, [a @ b for a, b in pairs]), (squares, [b @ b for _, b in pairs])):
            expected = expected if granularity == "layer" else [sum(expected)]
            np.testing.assert_allclose(found[k].numpy(), expected, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize(("dtype", "beta"), [(torch.float32, 0.1), (torch.float64, 0.3), (torch.float32, 1.0)])
@GRANULARITIES
def test_opposed_orthogonal_and_zero_sources_leave_exactly_the_targets_share(
    granularity: str, beta: float, dtype: torch.dtype, generator: torch.Generator
) -> None:
    t = torch.randn(50, generator=generator, dtype=torch.float64).to(dtype)
    orthogonal = torch.stack([-t[1::2], t[::2]], dim=1).flatten()  # each product has its opposite in the sum
    sources = [{"a": -2 * t}, {"a": orthogonal}, {"a": torch.zeros(50, dtype=dtype)}]
    for few in ([sources[0]], [sources[1]], [sources[2]], sources):
        result = fn.fedgp({"a": t}, few, beta, weights=[0.1, 0.7, 0.3][: len(few)], granularity=granularity)
        assert torch.equal(result["a"], t * (1 - beta))
        cosine = fn.fedgp_cosine({"a": t}, few, beta, [1.0] * len(few), granularity=granularity)
        assert torch.equal(cosine["a"], t * (1 - beta))


@GRANULARITIES
def test_fedgp_does_not_depend_on_the_length_of_a_source(granularity: str, generator: torch.Generator) -> None:
    t, *sources = random_updates(3, generator)
    plain = fn.fedgp(t, sources, [0.3, 0.8], granularity=granularity)
    for factor in (1e-20, 0.5, 3.0, 1e20):
        other = [scaled(sources[0], factor), sources[1]]
        close(fn.fedgp(t, other, [0.3, 0.8], granularity=granularity), plain)
    # a power of two changes no digit, not even in float32, whose squares would vanish below 1e-22
    t, *sources = random_updates(3, generator, torch.float32)
    tiny = [scaled(source, 2.0**-90) for source in sources]
    close(
        fn.fedgp(t, tiny, 0.5, granularity=granularity), fn.fedgp(t, sources, 0.5, granularity=granularity), rtol=1e-6
    )


def test_fedda_at_its_ends_and_for_equal_updates(generator: torch.Generator) -> None:
    t, *sources = random_updates(4, generator)
    weights = [0.1, 0.2, 0.7]
    nothing, everything = fn.fedda(t, sources, 0.0, weights), fn.fedda(t, sources, 1.0, weights)
    assert all(torch.equal(nothing[name], t[name]) for name in t)
    close(everything, fn.fedavg(sources, weights))
    close(fn.fedda(t, [t, t], [0.3, 0.9]), t)
    close(fn.fedda(t, sources[::-1], torch.tensor(0.5), weights[::-1]), fn.fedda(t, sources, 0.5, weights))


@pytest.mark.parametrize("rule", ["fedda", "fedgp", "fedgp_cosine"])
def test_statistics_are_averaged_and_counters_kept(rule: str) -> None:
    def update(direction: float, mean: float, count: int) -> dict[str, Tensor]:
        return {
            "bn.weight": torch.tensor([direction]),
            "bn.running_mean": torch.tensor([mean]),
            "bn.running_var": torch.tensor([10 * mean]),
            "bn.num_batches_tracked": torch.tensor(count),
        }

    t, s = update(1.0, 2.0, 7), update(-1.0, -6.0, 100)
    extra = {"scales": [5.0]} if rule == "fedgp_cosine" else {}
    result = {"fedda": fn.fedda, "fedgp": fn.fedgp, "fedgp_cosine": fn.fedgp_cosine}[rule](t, [s], 0.25, **extra)
    # 3/4 * 2 + 1/4 * -6 = 0, although the statistics are opposed; the weight is projected away
    assert result["bn.running_mean"].item() == 0.0
    assert result["bn.running_var"].item() == 0.0
    assert result["bn.weight"].item() == (0.5 if rule == "fedda" else 0.75)
    assert result["bn.num_batches_tracked"].item() == 7
    result["bn.num_batches_tracked"] += 1
    assert t["bn.num_batches_tracked"].item() == 7  # the result shares no memory


def test_float32_rounding_does_not_turn_an_opposed_source_into_an_aligned_one() -> None:
    r"""<t, s> = -1, but in float32 the products 1e8, -1 and -1e8 sum to 0 or more, whichever comes first."""
    t = {"a": torch.tensor([1e4, 1.0, 1e4])}
    s = {"a": torch.tensor([1e4, -1.0, -1e4])}
    assert fn.inner_products(t, s).item() == -1.0
    assert torch.equal(fn.fedgp(t, [s], 0.5)["a"], t["a"] / 2)
    almost = {"a": torch.tensor([1e4, 2.0, -1e4])}
    got = fn.fedgp(t, [almost], 1.0)["a"].double()
    expected = 2 / (2e8 + 4) * almost["a"].double()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_projected_in_wider_numbers(dtype: torch.dtype) -> None:
    # |s|^2 = 1e4 * 300^2 = 9e8 has no float16
    t, s = {"a": torch.full((10_000,), 3.0, dtype=dtype)}, {"a": torch.full((10_000,), 300.0, dtype=dtype)}
    result = fn.fedgp(t, [s], 0.5)["a"]
    assert result.dtype == dtype
    torch.testing.assert_close(result, t["a"], rtol=4e-3, atol=0)


def test_inner_products_name_their_layers_in_order_and_leave_statistics_out() -> None:
    a = {"w": torch.tensor([[1.0, 2.0]]), "n": torch.tensor(5), "bn.running_var": torch.ones(1), "b": torch.tensor(3.0)}
    b = {"b": torch.tensor(-1.0), "w": torch.tensor([[3.0, 4.0]])}
    assert fn.inner_products(a, b).tolist() == [11.0, -3.0]
    assert fn.inner_products(a, b, "model").tolist() == [8.0]
    assert fn.inner_products(a, b).dtype == torch.float64


def test_a_model_without_layers_has_nothing_to_project() -> None:
    t, s = {"bn.running_mean": torch.tensor([2.0])}, {"bn.running_mean": torch.tensor([4.0])}
    assert fn.inner_products(t, s).shape == (0,)
    for granularity in ("layer", "model"):
        assert fn.fedgp(t, [s], 0.5, granularity=granularity)["bn.running_mean"].item() == 3.0


def test_what_is_not_a_number_is_not_hidden_by_a_projection() -> None:
    t, s = {"a": torch.tensor([1.0, float("nan")])}, {"a": torch.ones(2)}
    assert fn.fedgp(t, [s], 0.5)["a"].isnan().any()
    assert fn.fedgp(s, [t], 0.5)["a"].isnan().any()


@GRANULARITIES
def test_sources_that_scale_their_own_updates_add_up_to_fedgp(granularity: str, generator: torch.Generator) -> None:
    """As it runs under secure aggregation: only the sum of the scaled updates is seen."""
    t, *sources = random_updates(4, generator)
    beta = 0.4
    total = scaled(t, 1 - beta)
    for s in sources:
        coefficients = fn.projection_coefficients(
            fn.inner_products(t, s, granularity), fn.inner_products(s, s, granularity)
        )
        sent = fn.scale_layers(s, coefficients * beta / len(sources))
        total = {name: total[name] + sent[name] for name in total}
    close(total, fn.fedgp(t, sources, beta, granularity=granularity))
