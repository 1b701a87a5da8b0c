"""Differential privacy at the source: clipping, noise, accounting, and that it composes with backends and training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats

from fedlit.federation import Federation
from fedlit.privacy import Accountant, FixedPoint, GaussianMechanism, InputError, Plain, differential
from refused import refused

NAMES = ["a", "b", "c", "t"]


def exact_epsilon(multiplier: float, count: int, delta: float) -> float:
    """Analytic Gaussian mechanism (Balle and Wang 2018, theorem 8): count releases act as one of z / sqrt(count)."""
    z = multiplier / math.sqrt(count)

    def failure(epsilon: float) -> float:
        upper = stats.norm.cdf(1 / (2 * z) - epsilon * z)
        return float(upper - math.exp(epsilon) * stats.norm.cdf(-1 / (2 * z) - epsilon * z))

    low, high = 0.0, 500.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if failure(middle) > delta else (low, middle)
    return high


def test_noise_is_standard_normal_and_never_repeats_under_a_seed() -> None:
    mechanism, nothing = GaussianMechanism(1.0, 1.0), {"w": torch.zeros(20_000, dtype=torch.float64)}
    torch.manual_seed(0)
    first = mechanism.release(nothing)["w"]
    torch.manual_seed(0)
    second = mechanism.release(nothing)["w"]
    assert not torch.equal(first, second)
    assert not nothing["w"].any()  # which was in float64, and stays what it was
    for sample in (first, second):
        assert stats.kstest(sample.numpy(), "norm").pvalue > 1e-10
    # 7 standard deviations of 1 / sqrt(20,000) (2e-12)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.05
    assert mechanism.release({"w": torch.zeros(0)})["w"].shape == (0,)


def test_noise_of_a_long_entry_is_drawn_in_pieces_that_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = differential._normals(1000, bytes(32))
    monkeypatch.setattr(differential, "_PIECE", 1000)
    long = differential._normals(20_500, bytes(32))
    assert torch.equal(long[:1000], whole)
    assert stats.kstest(long.numpy(), "norm").pvalue > 1e-10
    assert len(long.unique()) == 20_500


def test_a_long_payload_is_shortened_as_a_whole_and_a_short_one_is_not() -> None:
    # a norm of 5 over both entries together; noise of 1e-9 * C does not show
    payload = {"w": torch.tensor([[3.0, 0.0]]), "b": torch.tensor(4.0, dtype=torch.float64)}
    released = GaussianMechanism(clip_norm=1.0, noise_multiplier=1e-9).release(payload)
    torch.testing.assert_close(released["w"], torch.tensor([[0.6, 0.0]]))
    torch.testing.assert_close(released["b"], torch.tensor(0.8, dtype=torch.float64))
    same = GaussianMechanism(clip_norm=5.1, noise_multiplier=1e-9).release(payload)
    torch.testing.assert_close(same["w"], payload["w"])


def test_clipping_is_around_public_values() -> None:
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1e-9)
    released = mechanism.release({"w": torch.tensor([103.0, 104.0])}, around={"w": torch.tensor([100.0, 100.0])})
    torch.testing.assert_close(released["w"], torch.tensor([100.6, 100.8]))
    with pytest.raises(InputError, match="around"):
        mechanism.release({"w": torch.zeros(2)}, around={"w": torch.zeros(3)})


def test_noise_has_the_deviation_promised_and_integers_stay_integers() -> None:
    mechanism = GaussianMechanism(clip_norm=2.0, noise_multiplier=3.0)
    released = mechanism.release({"w": torch.zeros(20_000), "n": torch.zeros(3, dtype=torch.int64)})
    assert abs(float(released["w"].std()) - 6.0) < 0.22  # 7 standard deviations of 6 / sqrt(40,000) (2e-12)
    assert released["n"].dtype == torch.int64


def test_noise_does_not_wrap_integers_and_flags_are_refused() -> None:
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1000.0)  # each end has 45 % of the values
    values = mechanism.release({"n": torch.full((2000,), 128, dtype=torch.uint8)})["n"]
    assert {0, 255} <= set(values.tolist())  # held at the ends
    for bad in (torch.tensor([True]), torch.zeros(1, dtype=torch.complex64)):
        with pytest.raises(InputError, match="to which no noise can be added"):
            mechanism.release({"z": bad})
    with pytest.raises(InputError, match="cannot clip NaN"):
        mechanism.release({"w": torch.tensor([math.nan])})


@pytest.mark.parametrize(
    ("argument", "values"), [("clip_norm", (0.0, 1.0)), ("noise_multiplier", (1.0, 0.0)), ("delta", (1.0, 1.0, 1.0))]
)
def test_impossible_mechanisms_are_refused(argument: str, values: tuple[float, ...]) -> None:
    with refused(argument):
        GaussianMechanism(*values)


@pytest.mark.parametrize(("multiplier", "count"), [(1.0, 1), (5.0, 100), (2.0, 10), (20.0, 1000), (0.5, 10)])
def test_the_accountant_has_the_exact_loss_of_gaussians(multiplier: float, count: int) -> None:
    account = Accountant()
    for _ in range(count):
        account.record(["a"], multiplier)
    account.record(["b"], multiplier)
    exact = exact_epsilon(multiplier, count, 1e-5)
    assert account.epsilon("a", 1e-5) == pytest.approx(exact, rel=1e-9)
    assert account.epsilon("nobody", 1e-5) == 0.0
    other = Accountant()
    other.load_state_dict(account.state_dict())
    assert other.epsilon("a", 1e-5) == account.epsilon("a", 1e-5)


@pytest.mark.parametrize("multipliers", [[3.0] * 20, [1.0, 2.0, 2.0, 8.0]])
def test_the_exact_loss_is_that_of_privacy_loss_distributions_and_below_that_of_renyi(multipliers: list[float]) -> None:
    """Against Google's dp-accounting: its privacy loss distributions are upper bounds on a grid of 1e-3."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    bounds = [PLDAccountant(value_discretization_interval=1e-3), RdpAccountant()]
    account = Accountant()
    for multiplier in multipliers:
        account.record(["a"], multiplier)
    for bound in bounds:
        bound.compose(accounting.ComposedDpEvent([accounting.GaussianDpEvent(each) for each in multipliers]))
    by_distribution, by_renyi = (float(bound.get_epsilon(1e-6)) for bound in bounds)
    assert account.epsilon("a", 1e-6) == pytest.approx(by_distribution, rel=1e-5)
    assert 1.06 < by_renyi / account.epsilon("a", 1e-6) < 1.10


def test_the_loss_of_next_to_no_noise_and_of_next_to_no_signal() -> None:
    account = Accountant()
    for name, multiplier in (("bare", 1e-200), ("loud", 1e-3), ("faint", 1e9)):
        account.record([name], multiplier)
    assert math.isinf(account.epsilon("bare", 1e-5))
    assert account.epsilon("loud", 1e-5) == pytest.approx(1e6 / 2 + 1e3 * stats.norm.isf(1e-5), rel=1e-5)
    assert account.epsilon("faint", 1e-5) == 0.0  # delta alone covers it


def federation(**arguments: Any) -> Federation:
    return Federation(NAMES, "t", **arguments)


def test_every_message_of_a_channel_is_clipped_whatever_carries_it() -> None:
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1e-7)
    sent = {name: {"w": torch.tensor([3.0, 4.0])} for name in NAMES}
    clipped = torch.tensor([0.6, 0.8])
    for backend in (Plain(), Plain(FixedPoint())):
        fed = federation(privacy=backend, differential_privacy={"w": mechanism})
        torch.testing.assert_close(fed.mean("w", sent)["a"]["w"], clipped, atol=1e-5, rtol=0)
        torch.testing.assert_close(fed.sum("w", sent)["a"]["w"], 4 * clipped, atol=1e-5, rtol=0)
        torch.testing.assert_close(fed.exchange("w", sent)["a"]["b"]["w"], clipped, atol=1e-5, rtol=0)
        assert torch.equal(fed.mean("open", sent)["a"]["w"], sent["a"]["w"])
        assert fed.channels["open"].mechanism is None


def test_every_message_of_a_channel_has_noise_whatever_carries_it() -> None:
    """Of deviation z C in each message: a mean of four has half of it, a sum twice."""
    mechanism = GaussianMechanism(clip_norm=0.5, noise_multiplier=4.0)
    sent = {name: {"w": torch.zeros(4000)} for name in NAMES}
    for backend in (Plain(), Plain(FixedPoint())):
        fed = federation(privacy=backend, differential_privacy={"w": mechanism})
        for got, deviation in (
            (fed.mean("w", sent)["a"], 1.0),
            (fed.sum("w", sent)["a"], 4.0),
            (fed.exchange("w", sent)["a"]["b"], 2.0),
        ):
            assert float(got["w"].std()) == pytest.approx(deviation, rel=0.06)
            assert abs(float(got["w"].mean())) < 0.06 * deviation


def test_releases_are_counted_and_the_noise_of_a_hidden_sum_covers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=2.0, delta=1e-6)
    sent = {name: {"w": torch.zeros(2)} for name in NAMES}
    plain, hidden = federation(differential_privacy=mechanism), federation(differential_privacy=mechanism)
    monkeypatch.setattr(type(hidden.channels["w"].backend), "min_clients", 2)  # as if it hid messages
    hidden.mean("w", sent)
    monkeypatch.undo()
    plain.mean("w", sent)
    for fed in (plain, hidden):
        assert fed.epsilon("message")["t"] == pytest.approx(exact_epsilon(2.0, 1, 1e-6))
    assert plain.epsilon("sum") == plain.epsilon("message")
    # four clients of equal weight: noise of deviation 2 * sqrt(4)
    assert hidden.epsilon("sum")["t"] == pytest.approx(exact_epsilon(4.0, 1, 1e-6))
    other = federation(differential_privacy=mechanism)
    other.load_state_dict(hidden.state_dict())
    assert other.epsilon("sum") == hidden.epsilon("sum")
