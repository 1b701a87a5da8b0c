"""Channels in a run: what is booked is what was declared, and what was not declared is told before it is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlit import Run
from fedlit.callbacks import Validators
from fedlit.federation import ChannelError, Fraction, Open
from fedlit.methods import FedAvg
from fedlit.privacy import GaussianMechanism, PairwiseMasking, PlainAffine
from helpers import build, digits, trainer


class Chatty(FedAvg):
    """Says more than it declares, after the first round."""

    def on_round_end(self, run: Run) -> None:
        self.federation.exchange("chat", {client.name: {"x": torch.ones(1)} for client in self.sources})


class Watched(FedAvg):
    """Counts its steps, and declares a channel that no backend protects."""

    steps = 0

    @property
    def channels(self) -> Any:
        return (*super().channels, Open("features", "features of a batch", "sources", "target"))

    def loss(self, *args: Any) -> Any:
        self.steps += 1
        return super().loss(*args)


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"privacy": {"wieghts": PairwiseMasking(colluders=0)}}, "wieghts.*weights"),
        ({"differential_privacy": {"wieghts": GaussianMechanism(1.0, 1.0)}}, "wieghts.*weights"),
        ({"heard": {"wieghts": Fraction(0.5)}}, "wieghts.*weights"),
        ({"two_party": {"wieghts": PlainAffine()}}, "wieghts.*weights"),
        ({"privacy": {"features": PairwiseMasking(colluders=0)}}, "features"),
    ],
)
def test_a_misspelt_or_an_open_channel_is_refused_before_the_first_step(choices: dict[str, Any], named: str) -> None:
    data = digits(target_labels=30)
    module = build(Watched, data)
    with pytest.raises(ChannelError, match=named):
        trainer(2, strategy=choices).fit(module, data)
    assert module.steps == 0


def test_what_is_not_declared_cannot_be_sent() -> None:
    data = digits(target_labels=30)
    with pytest.raises(ChannelError, match="chat"):
        trainer(1).fit(build(Chatty, data), data)


@pytest.mark.parametrize("federated", [True, False])
def test_a_callbacks_channels_are_declared_with_any_strategy(federated: bool) -> None:
    data = digits()
    module = build(FedAvg, data)
    trainer(1, [Validators(["iwv"])], federated=federated).fit(module, data)
    assert "source_moments" in module.federation.channels
    assert module.federation.ledger.messages_by_channel()["source_moments"] > 0


class Diary(FedAvg):
    """Every client keeps a number of its own; one that is kept elsewhere would be the same for all."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        for client in self.federation.local_clients:
            checkpoint["clients"][client.name]["diary"] = len(client.name)


def test_what_a_method_keeps_of_a_client_is_under_its_name(tmp_path: Path) -> None:
    data = digits(target_labels=30)
    run = trainer(1)
    run.fit(build(Diary, data), data)
    run.save_checkpoint(tmp_path / "diary.ckpt")
    kept = torch.load(tmp_path / "diary.ckpt", weights_only=False)["clients"]
    assert {name: state["diary"] for name, state in kept.items()} == {"clean": 5, "blended": 7, "fonts": 5}
