"""Runs under privacy backends and differential privacy, what they report beside it, and what channels declare."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from backends import BACKENDS, backend
from fedlit.callbacks import Validators
from fedlit.data import FederatedLoader
from fedlit.federation import ChannelError, Federation, Fraction
from fedlit.methods import FedAvg
from fedlit.privacy import FixedPoint, GaussianMechanism, PairwiseMasking, Plain, PrivacyWarning
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


@pytest.mark.parametrize("backend", [None, pytest.param(PairwiseMasking(colluders=0), marks=pytest.mark.slow)])
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
    mechanism = GaussianMechanism(clip_norm=1e-3, noise_multiplier=1.0)
    data = digits(target_labels=30)

    def start(rounds: int, checkpoint: str | None = None) -> tuple[Any, Any]:
        module = build(FedAvg, data, optimizer=lambda parameters: SGD(parameters, lr=0.05))
        run = trainer(rounds, strategy={"differential_privacy": mechanism, "participation": Fraction(0.5)})
        run.fit(module, data, ckpt_path=checkpoint)
        return module, run

    _, run = start(2)
    path = str(tmp_path / "half.ckpt")
    run.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["clients"]
    assert all(saved[client]["received"] for client in ("clean", "blended", "fonts"))
    resumed, _ = start(4, path)
    straight, _ = start(4)
    assert resumed.federation.epsilon() == straight.federation.epsilon()
    assert all(math.isfinite(epsilon) and epsilon > 0 for epsilon in resumed.federation.epsilon().values())
    assert not same(weights(resumed, "fonts"), weights(straight, "fonts"))  # noise is never repeated


NOISE = GaussianMechanism(0.5, 4.0)


def logged(wrong_label: bool, **strategy: Any) -> dict[str, float]:
    """Everything that a run of a round logs and so tells; one label of client "clean" may be another."""
    data = digits(target_labels=30)
    data.setup("fit")
    loaders = data.train_dataloader()
    if wrong_label:
        loaders = _with_another_label(loaders)
    module = build(FedAvg, data)
    run = trainer(1, strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        run.fit(module, loaders, data.val_dataloader())
    return {name: float(value) for name, value in run.callback_metrics.items()}


def _with_another_label(loader: FederatedLoader) -> FederatedLoader:
    datasets = {
        name: [loader.datasets[name][row] for row in range(len(loader.datasets[name]))] for name in loader.datasets
    }
    made = {}
    for name, rows in datasets.items():
        labels = torch.tensor([int(label) for _, label in rows])
        if name == "clean":
            labels[0] = (labels[0] + 1) % 10
        made[name] = TensorDataset(torch.stack([inputs for inputs, _ in rows]), labels)
    return FederatedLoader(made, batch_size=64)


OF_CLIENTS = ("train/", "source/", "target/", "validator/", "oracle/")


def test_one_changed_label_is_not_told_beside_noise() -> None:
    """The attack: losses in the log tell with certainty which of two data sets a client has, whatever epsilon says."""
    one, other = (logged(changed, differential_privacy=NOISE) for changed in (False, True))
    for seen in (one, other):
        assert not [name for name in seen if name.startswith(OF_CLIENTS)]


def test_exact_reports_do_tell_it_and_so_the_test_above_can_fail() -> None:
    once, again, other = (
        logged(changed, differential_privacy=NOISE, reports="exact") for changed in (False, False, True)
    )
    assert once["source/clean/loss"] == again["source/clean/loss"] != other["source/clean/loss"]


def test_noised_reports_have_the_noise_and_are_accounted_for() -> None:

    def run(**strategy: Any) -> Any:
        data = digits(target_labels=30)
        module = build(FedAvg, data)
        trainer(2, strategy={"differential_privacy": NOISE, "privacy": PairwiseMasking(colluders=0)} | strategy).fit(
            module, data
        )
        return module

    silent, noisy = run(), run(reports=GaussianMechanism(1e7, 3.0))
    seen = {name: float(value) for name, value in noisy.trainer.callback_metrics.items()}
    assert {"source/clean/loss", "source/acc", "target/score"} <= seen.keys()
    assert not 0 <= seen["source/clean/acc"] <= 1 or not 0 <= seen["source/blended/acc"] <= 1, (
        "noise of 3e7 leaves both in [0, 1] in 2e-16 of all runs"
    )
    silent_spent, noisy_spent = (module.federation.epsilon("message") for module in (silent, noisy))
    # two rounds and two validations, each one release of multiplier 3, beside two of multiplier 4
    expected = GaussianMechanism(1.0, (2 / 16 + 4 / 9) ** -0.5)
    assert noisy_spent["clean"] > silent_spent["clean"]
    single = Federation(["a", "t"], "t", differential_privacy=expected, seed=0)
    single.exchange("news", {"a": {"x": torch.zeros(1)}})
    assert noisy_spent["clean"] == pytest.approx(single.epsilon("message")["a"])
    # those who see sums only see reports singly all the same
    assert noisy.federation.epsilon("sum")["clean"] > silent.federation.epsilon("sum")["clean"]


@contextmanager
def heard() -> Iterator[list[str]]:
    words: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield words
    words += [str(item.message) for item in caught if issubclass(item.category, PrivacyWarning)]


@pytest.mark.parametrize(
    ("strategy", "word"),
    [
        ({}, None),
        ({"reports": "exact"}, None),
        ({"differential_privacy": NOISE}, "clients do not report their losses"),
        ({"differential_privacy": NOISE, "reports": "exact"}, "privacy/epsilon does not count them"),
        ({"differential_privacy": NOISE, "reports": NOISE}, "with noise of standard deviation 2"),
    ],
)
def test_what_is_reported_and_not_is_warned_of_once(strategy: dict[str, Any], word: str | None) -> None:
    data = digits(target_labels=30)
    with heard() as words:
        trainer(2, strategy=strategy).fit(build(FedAvg, data), data)
    assert len(words) == (word is not None)
    assert all(str(word) in each for each in words)


@pytest.mark.parametrize("monitor", ["target/score", "source/clean/loss", "validator/density"])
def test_a_monitor_of_what_is_not_told_is_refused_before_training(monitor: str) -> None:
    data = digits(target_labels=30)
    stop = EarlyStopping(monitor, mode="max")
    with pytest.raises(ChannelError, match=rf"EarlyStopping\(monitor='{monitor}'\) needs numbers"):
        trainer(1, [stop], strategy={"differential_privacy": NOISE}).fit(build(FedAvg, data), data)


@pytest.mark.parametrize("federated", [True, False])
def test_a_callbacks_channels_are_declared_with_any_strategy(federated: bool) -> None:
    data = digits()
    module = build(FedAvg, data)
    trainer(1, [Validators(["iwv"])], federated=federated).fit(module, data)
    assert "source_moments" in module.federation.channels
    assert module.federation.ledger.messages_by_channel()["source_moments"] > 0
