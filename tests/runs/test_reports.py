"""Losses and scores beside differential privacy: not reported, or noised and accounted for, or exact by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import TensorDataset

from fedlit.data import FederatedLoader
from fedlit.federation import ChannelError, Federation
from fedlit.methods import FedAvg
from fedlit.privacy import GaussianMechanism, PairwiseMasking, PrivacyWarning
from helpers import build, digits, trainer

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
    pytest.importorskip("dp_accounting")

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


@pytest.mark.parametrize(
    "monitor", ["target/score", "source/acc", "train/loss", "source/clean/loss", "validator/density"]
)
def test_a_monitor_of_what_is_not_told_is_refused_before_training(monitor: str) -> None:
    data = digits(target_labels=30)
    stop = EarlyStopping(monitor, mode="max")
    with pytest.raises(ChannelError, match=rf"EarlyStopping\(monitor='{monitor}'\) needs numbers"):
        trainer(1, [stop], strategy={"differential_privacy": NOISE}).fit(build(FedAvg, data), data)
