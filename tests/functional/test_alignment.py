"""The alignment loss against numbers by hand, its population value and the invariances that its remedies promise."""

from __future__ import annotations

import pytest
import torch

from fedlit.functional import alignment_loss, rff_mmd_squared


def test_numbers_by_hand() -> None:
    aligned = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]])
    other = torch.tensor([0.0, 1.0])
    # mean (1, 1), distance^2 1; squared deviations 1+1, 1+1, 0+4: 8, over 2 is S = 4; Q = (0 + 4 + 10) / 3 + 1
    scale = 4 + 0.01 * (14 / 3 + 1)
    assert alignment_loss(aligned, other).item() == pytest.approx(1.0)
    assert alignment_loss(aligned, other, unbiased=True).item() == pytest.approx(1 - 4 / 3)
    assert alignment_loss(aligned, other, relative=True).item() == pytest.approx(1 / scale)
    assert alignment_loss(aligned, other, relative=True, unbiased=True).item() == pytest.approx((1 - 4 / 3) / scale)


def test_it_is_equation_11_without_remedies(generator: torch.Generator) -> None:
    features, received, aligner = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((9, 12), (12,), (12, 4))
    )
    loss = alignment_loss(features @ aligner, received @ aligner)
    assert float(loss) == pytest.approx(float(rff_mmd_squared(features.mean(dim=0), received, aligner)), rel=1e-12)


def test_unbiased_has_the_population_value_as_its_mean_and_biased_exceeds_it(generator: torch.Generator) -> None:
    """20000 batches of 5 from a Gaussian with mean (1, -1), standard deviations (1, 2): tr Cov / b = 5 / 5 = 1."""
    batches = torch.randn(20000, 5, 2, generator=generator) * torch.tensor([1.0, 2.0]) + torch.tensor([1.0, -1.0])
    other = torch.tensor([0.0, 1.0])
    population = 1.0 + 4.0
    unbiased, biased = (
        torch.func.vmap(lambda batch, each=each: alignment_loss(batch, other, unbiased=each))(batches)
        for each in (True, False)
    )
    tolerance = 4 * float(unbiased.std()) / 20000**0.5
    assert tolerance < 0.15
    assert float(unbiased.mean()) == pytest.approx(population, abs=tolerance)
    assert float(biased.mean()) == pytest.approx(population + 1.0, abs=tolerance)


def test_relative_does_not_change_with_the_scale_and_the_gradient_is_perpendicular_to_w(
    generator: torch.Generator,
) -> None:
    features, received = torch.randn(7, 6, generator=generator), torch.randn(6, generator=generator)
    for unbiased in (False, True):
        aligner = torch.randn(6, 3, generator=generator, requires_grad=True)
        loss = alignment_loss(features @ aligner, received @ aligner, relative=True, unbiased=unbiased)
        small = alignment_loss(
            features @ (1e-2 * aligner), received @ (1e-2 * aligner), relative=True, unbiased=unbiased
        )
        torch.testing.assert_close(small, loss)
        (gradient,) = torch.autograd.grad(loss, aligner)
        assert float((gradient * aligner.detach()).sum().abs()) < 1e-5 * float(
            gradient.norm() * aligner.detach().norm()
        )
        assert float(gradient.norm()) > 1e-3


def test_relative_unbiased_is_relative_less_nearly_one_over_the_batch(generator: torch.Generator) -> None:
    aligned, other = torch.randn(8, 3, generator=generator), torch.randn(3, generator=generator)
    difference = alignment_loss(aligned, other, relative=True) - alignment_loss(
        aligned, other, relative=True, unbiased=True
    )
    spread, length = float(aligned.var(dim=0).sum()), float(aligned.square().sum() / 8 + other.square().sum())
    assert float(difference) == pytest.approx(1 / 8 / (1 + 0.01 * length / spread), rel=1e-5)
    assert float(difference) == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize("options", [{}, {"unbiased": True}, {"relative": True}, {"unbiased": True, "relative": True}])
def test_gradients_are_those_of_differences(options: dict[str, bool], generator: torch.Generator) -> None:
    aligned = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    other = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, o: alignment_loss(a, o, **options), (aligned, other))


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_single_sample_has_no_spread_and_is_taken_by_its_length(unbiased: bool) -> None:
    """Distance (1 - 3)^2 + 2^2 = 8; lengths 5 and 9."""
    aligned, other = torch.tensor([[1.0, 2.0]]), torch.tensor([3.0, 0.0])
    assert float(alignment_loss(aligned, other, unbiased=unbiased)) == 8.0
    assert float(alignment_loss(aligned, other, unbiased=unbiased, relative=True)) == pytest.approx(8 / 14)
    opposite = alignment_loss(aligned, -aligned[0], unbiased=unbiased, relative=True)
    assert float(opposite) == pytest.approx(2.0)  # |2 f|^2 / 2 |f|^2, the largest there is


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("unbiased", [False, True])
def test_the_relative_loss_is_bounded_and_no_scaling_of_w_changes_it(
    unbiased: bool, size: int, generator: torch.Generator
) -> None:
    """|mean - other|^2 <= 2 (|mean|^2 + |other|^2) <= 2 Q over at least 0.01 Q; less at most S / b over S."""
    point, noise = torch.randn(1, 3, generator=generator), torch.randn(size, 3, generator=generator)
    alike, skewed = point.expand(size, 3).clone(), torch.cat([1e3 * noise[:1], 1e-3 * noise[1:]])
    lower = -1 / size if unbiased and size > 1 else 0.0
    for aligned in (noise, alike, point + 1e-4 * noise, torch.zeros(size, 3), skewed):
        mean, zero = aligned.mean(dim=0), torch.zeros(3)
        for received in (torch.randn(3, generator=generator), torch.full((3,), 1e4), -mean, mean, zero):
            losses = []
            for scale in (1.0, 1e-4, 1e4):
                batch = (scale * aligned).requires_grad_(True)
                loss = alignment_loss(batch, scale * received, unbiased=unbiased, relative=True)
                assert torch.autograd.grad(loss, batch)[0].isfinite().all()
                losses.append(float(loss.detach()))
            assert lower - 1e-5 <= losses[0] <= 200 * (1 + 1e-5)
            assert losses == pytest.approx([losses[0]] * 3, rel=1e-3, abs=1e-5)
