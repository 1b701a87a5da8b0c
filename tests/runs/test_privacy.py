"""Training under privacy backends and differential privacy, compared with plain training."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from backends import BACKENDS, backend
from fedlit.federation import Fraction
from fedlit.methods import FedAvg
from fedlit.privacy import FixedPoint, GaussianMechanism, PairwiseMasking, Plain
from helpers import build, digits, same, trainer, weights

ROUNDS = 3


def train(rounds: int = ROUNDS, **strategy: Any) -> Any:
    """FedAvg of a linear classifier, whose training does not make small differences grow."""
    torch.manual_seed(3)
    network = {"extractor": nn.Identity(), "classifier": nn.Linear(64, 10)}
    module = build(FedAvg, digits(target_labels=30), optimizer=lambda parameters: SGD(parameters, lr=0.05), **network)
    run = trainer(rounds, strategy=strategy)
    run.fit(module, digits(target_labels=30))
    return module


def difference(one: Any, other: Any) -> float:
    return max(
        float((mine - theirs).abs().max())
        for client in ("clean", "blended", "fonts")
        for mine, theirs in zip(weights(one, client).values(), weights(other, client).values(), strict=True)
    )


@pytest.fixture(scope="module")
def plain() -> Any:
    return train()


@pytest.fixture(scope="module")
def on_grid() -> Any:
    return train(privacy=Plain(FixedPoint()))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("masking", "ckks") else pytest.mark.slow) for n in BACKENDS]
)
def test_training_equals_plain_training_within_the_error_of_each_rounds_mean(
    name: str, plain: Any, on_grid: Any
) -> None:
    chosen = backend(name)
    module = train(privacy=chosen)
    # a mean over clients whose relative weights add up to at least 1; gradient steps on a convex loss do not expand
    bound = ROUNDS * chosen.error_bound(3) + 1e-6
    assert difference(module, plain) <= bound
    if name != "ckks":
        assert difference(module, on_grid) == 0.0


def test_a_wide_clip_and_hardly_any_noise_train_like_plain(plain: Any) -> None:
    module = train(differential_privacy=GaussianMechanism(clip_norm=1e3, noise_multiplier=1e-10))
    assert difference(module, plain) < 1e-5


@pytest.mark.parametrize("backend", [None, PairwiseMasking(colluders=0)], ids=["plain", "masking"])
def test_a_round_moves_weights_by_no_more_than_the_clip(backend: Any) -> None:
    clip = 1e-3
    mechanism = GaussianMechanism(clip_norm=clip, noise_multiplier=1e-6)
    modules = [train(rounds, differential_privacy=mechanism, privacy=backend) for rounds in (1, 2, 3)]
    states = [torch.cat([tensor.flatten() for tensor in weights(module, "fonts").values()]) for module in modules]
    for before, after in pairwise(states):
        moved = float((after - before).norm())
        assert 0.2 * clip < moved <= clip + 1e-4
    assert difference(modules[0], modules[1]) > 0


def test_a_trained_module_is_clipped_around_the_weights_it_has_when_a_mechanism_is_added() -> None:
    module = train(4)
    before = torch.cat([tensor.flatten() for tensor in weights(module, "fonts").values()])
    clip = 1e-3
    run = trainer(1, strategy={"differential_privacy": GaussianMechanism(clip, 1e-6)})
    run.fit(module, digits(target_labels=30))
    after = torch.cat([tensor.flatten() for tensor in weights(module, "fonts").values()])
    assert 0 < float((after - before).norm()) <= clip + 1e-4
    assert float(before.norm()) > 1


def test_spent_privacy_and_public_weights_survive_a_resume_in_the_middle_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    mechanism = GaussianMechanism(clip_norm=1e-3, noise_multiplier=1.0)
    data = digits(target_labels=30)

    def start(rounds: int, checkpoint: str | None = None) -> tuple[Any, Any]:
        module = build(FedAvg, data, optimizer=lambda parameters: SGD(parameters, lr=0.05))
        run = trainer(rounds, strategy={"differential_privacy": mechanism, "participation": Fraction(0.5)})
        run.fit(module, data, ckpt_path=checkpoint)
        return module, run

    _, run = start(3)
    path = str(tmp_path / "half.ckpt")
    run.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["clients"]
    assert all(saved[client]["received"] for client in ("clean", "blended", "fonts"))
    resumed, _ = start(6, path)
    straight, _ = start(6)
    assert resumed.federation.epsilon() == straight.federation.epsilon()
    assert all(math.isfinite(epsilon) and epsilon > 0 for epsilon in resumed.federation.epsilon().values())
    assert not same(weights(resumed, "fonts"), weights(straight, "fonts"))  # noise is never repeated
