"""A trust region: steps by hand, shares that add up, and runs that it holds back or leaves as they are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from fedlit import methods
from fedlit.functional import annealing
from fedlit.models import MLP
from fedlit.run.trust_region import copy_weights, hold_back_, step_limit
from small_federation import TARGET, Blobs, build, trainer


def stepped(step: torch.Tensor, limit: float, samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a linear layer before and after a step that is held back, on the unit vectors as inputs."""
    layer = nn.Linear(4, 2, bias=False)
    before = copy_weights(layer)
    with torch.no_grad():
        layer.weight += step
    hold_back_(layer, before, torch.eye(4)[:samples], limit)
    return before["weight"], layer.weight.detach()


def test_a_step_is_shortened_to_its_share_of_the_spread() -> None:
    step = torch.arange(8.0).view(2, 4)  # of unit vectors, features are the columns of the weights
    before, after = stepped(step, 0.1)
    spread = (before - before.mean(dim=1, keepdim=True)).norm()
    assert float((after - before).norm() / spread) == pytest.approx(0.1, rel=1e-5)
    torch.testing.assert_close((after - before) / (after - before).norm(), step / step.norm())  # its direction stays


def test_short_steps_and_those_of_one_sample_are_left_as_they_are() -> None:
    step = torch.full((2, 4), 1e-3)
    before, after = stepped(step, 0.5)
    assert torch.equal(after, before + step)
    before, after = stepped(100 * step, 1e-6, samples=1)
    assert torch.equal(after, before + 100 * step)


def test_looking_at_features_leaves_modes_and_statistics_alone() -> None:
    network = MLP(4, [3], dropout=0.5, batch_norm=True)
    norm = next(module for module in network.modules() if isinstance(module, nn.BatchNorm1d)).eval()
    statistics, state = norm.running_mean.clone(), torch.get_rng_state()
    before = copy_weights(network)
    with torch.no_grad():
        network.layers[0].weight += 1
    hold_back_(network, before, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), 1e-3)
    assert network.training
    assert not norm.training
    assert torch.equal(norm.running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), state)


def test_shares_of_all_steps_are_the_whole_and_fall() -> None:
    shares = [step_limit(0.7, round_idx / 5, rounds=5, steps=3) for round_idx in range(5)]
    assert 3 * math.fsum(shares) == pytest.approx(0.7)
    assert [share / shares[0] for share in shares] == pytest.approx([(1 + 2 * each) ** -0.75 for each in range(5)])
    assert step_limit(0.7, 1.0, rounds=5, steps=3) == pytest.approx(shares[0] * 11**-0.75)  # beyond what was planned


@pytest.mark.parametrize("progress", [-0.1, 1.1])
def test_annealing_goes_by_a_share_of_the_training(progress: float) -> None:
    assert [annealing(0), annealing(1)] == pytest.approx([1, 0.16557], abs=1e-5)
    with pytest.raises(ValueError, match="progress must be from 0 to 1"):
        annealing(progress)


def extractor_after(folder: Path, rounds: int, trust_region: float | None) -> torch.Tensor:
    """First weights of the target's extractor after a FedMMD run with one round of warm-up and long Adam steps."""
    module = build(
        methods.FedMMD,
        warmup_rounds=1,
        trust_region=trust_region,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.05),
    )
    trainer(rounds, [], folder, limit_val_batches=0).fit(module, Blobs())
    return next(module.replicas[TARGET].extractor.parameters()).detach()


def test_a_target_stays_in_its_trust_region_and_a_wide_one_changes_no_bit(tmp_path: Path) -> None:
    free = extractor_after(tmp_path, 3, None)
    assert torch.equal(extractor_after(tmp_path, 3, 1e9), free)
    warmed = extractor_after(tmp_path, 1, None)
    torch.testing.assert_close(extractor_after(tmp_path, 3, 1e-6), warmed, atol=1e-5, rtol=0)
    assert (free - warmed).abs().max() > 0.1


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_trust_region_is_positive(value: float) -> None:
    with pytest.raises(ValueError, match="trust_region must be positive"):
        build(methods.FedMMD, trust_region=value)


def test_a_target_that_does_not_train_without_labels_has_no_trust_region() -> None:
    with pytest.raises(ValueError, match=r"trust_region=1\.0 would do nothing in SourceOnly"):
        build(methods.SourceOnly, trust_region=1.0)
