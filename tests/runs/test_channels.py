"""Channels in a run: what is booked is what was declared, and what was not declared is told before it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._pytree import tree_leaves

from fedlit import FederatedModule, methods
from fedlit.callbacks import Validators
from fedlit.federation import KEYS, SERVER, ChannelError, Federation, Fraction, Open, RosterError
from fedlit.methods import FedAvg, FedGP, FedMMD, FedRFTCA
from fedlit.privacy import GaussianMechanism, PairwiseMasking, PlainAffine
from fedlit.run.run import Run
from helpers import build, digits, normalised_head, same, trainer, weights
from method_table import METHODS, ONE_PASS

CASES: dict[str, tuple[tuple[type[FederatedModule], dict[str, Any], dict[str, Any]], dict[str, Any], set[str]]] = {
    **{f"{name}, plain": (row, {}, {"target_update", "inner_product"}) for name, row in METHODS.items()},
    **{
        f"{name}, masked": (row, {"privacy": PairwiseMasking(colluders=0)}, {"inner_product"})
        for name, row in METHODS.items()
        if name != "FedGP auto, exact"  # is refused
    },
    "FedGP, pairwise": (
        (FedGP, {"beta": "auto"}, {"target_labels": 30, "target_batch_size": 8}),
        {"privacy": PairwiseMasking(colluders=0), "two_party": PlainAffine()},
        set(),
    ),
    "FedMMD, moments to sources": ((FedMMD, {"degree": 1, "exchange": "pairwise", "warmup_rounds": 0}, {}), {}, set()),
    "FedRFTCA, voting": (
        (FedRFTCA, {"num_frequencies": 16, "num_components": 8, "classifier_period": None}, {}),
        {},
        set(),
    ),
}
"""A run, choices of the strategy, and the channels that are declared for others: updates hidden, a protocol given."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_booked_is_what_was_declared_and_the_other_way_round(case: str) -> None:
    (method, arguments, options), choices, silent = CASES[case]
    data = digits(**options)
    module = build(method, data, **arguments)
    short = {} if case.startswith(ONE_PASS) else {"local_steps": 2}  # needs all samples in its round
    trainer(3, strategy=choices | short).fit(module, data)
    channels, ledger = module.federation.channels, module.federation.ledger
    assert {entry.channel.removesuffix(KEYS) for entry in ledger} | silent >= set(channels)
    for entry in ledger:
        channel = channels[entry.channel.removesuffix(KEYS)]
        if entry.channel.endswith(KEYS):
            assert channel.hides or channel.sent.startswith("pairwise") or "encrypted on its way" in channel.sent
            continue
        way, *_ = channel.sent.split(":")
        senders, receivers = set(channel.senders), set(channel.receivers)
        if way.startswith("pairwise"):  # a protocol has steps in both directions
            senders = receivers = senders | receivers
        summed = way.startswith("summed") or channel.name == "metrics"  # numbers are told through the server
        assert (SERVER in (entry.sender, entry.receiver)) == summed, entry
        assert entry.sender in {SERVER, *senders}, entry
        assert entry.receiver in {SERVER, *receivers}, entry
    for channel in channels.values():
        assert channel.declared.contents
        protected = channel.sent.startswith("summed") or channel.protocol is not None
        assert (channel.description is not None) == protected


@pytest.mark.parametrize("name", METHODS)
def test_no_message_holds_a_sample_unless_the_channel_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for the bytes of training samples in all that is given to be sent, whatever is declared."""
    method, arguments, options = METHODS[name]
    data, carrying = digits(**options), set()
    samples = [data.dataset(client.name, "train").x[:5] for client in data.clients]
    rows = [row.numpy().tobytes() for row in torch.cat(samples)]

    def watched(send: Any) -> Any:
        def sending(self: Federation, channel: str, payloads: Any, *args: Any, **kwargs: Any) -> Any:
            whole = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tree_leaves(payloads))
            carrying.update([channel] if any(row in whole for row in rows) else [])
            return send(self, channel, payloads, *args, **kwargs)

        return sending

    for verb in ("exchange", "mean", "sum"):
        monkeypatch.setattr(Federation, verb, watched(getattr(Federation, verb)))
    module = build(method, data, **arguments)
    trainer(3, strategy={} if name in ONE_PASS else {"local_steps": 2}).fit(module, data)
    declared = {channel.name for channel in module.federation.channels.values() if channel.declared.samples}
    assert carrying == declared == ({"samples"} if "votes" in name else set())


def test_no_configuration_that_is_shipped_sends_samples() -> None:
    """With default arguments, and as configured; `test_no_message_holds_a_sample` sees to it that it is declared."""
    found = 0
    for path in [*Path("configs").rglob("*.yaml"), *Path("examples").rglob("*.yaml")]:
        for text in _texts(yaml.safe_load(path.read_text())):
            assert text != "votes", path
            found += text.startswith("fedlit.methods.")
    assert found > 100
    for name in methods.__all__:
        method = getattr(methods, name)
        made = build(method, digits(target_labels=30), **({"classifier": normalised_head()} if name == "AdaBN" else {}))
        assert not [channel.name for channel in made.channels if channel.samples], name


def _texts(config: Any) -> Iterator[str]:
    if isinstance(config, dict | list):
        for each in config.values() if isinstance(config, dict) else config:
            yield from _texts(each)
    elif isinstance(config, str):
        yield config


def test_where_updates_are_hidden_exact_residuals_are_refused() -> None:
    method, arguments, options = METHODS["FedGP auto, exact"]
    data = digits(**options)
    with pytest.raises(ChannelError, match="'exact' needs single updates at the target"):
        trainer(3, strategy={"privacy": PairwiseMasking(colluders=0)}).fit(build(method, data, **arguments), data)


class Chatty(FedAvg):
    """Says more than it declares, after the first round."""

    def on_round_end(self, run: Run) -> None:
        self.federation.exchange("chat", {client.name: {"x": torch.ones(1)} for client in self.sources})


class Watched(FedAvg):
    """Counts its steps."""

    steps = 0

    def loss(self, *args: Any) -> Any:
        self.steps += 1
        return super().loss(*args)


@pytest.mark.parametrize(
    "choices",
    [
        {"privacy": {"wieghts": PairwiseMasking(colluders=0)}},
        {"differential_privacy": {"wieghts": GaussianMechanism(1.0, 1.0)}},
        {"heard": {"wieghts": Fraction(0.5)}},
        {"two_party": {"wieghts": PlainAffine()}},
    ],
)
def test_a_misspelt_channel_is_told_before_the_first_step(choices: dict[str, Any]) -> None:
    data = digits(target_labels=30)
    module = build(Watched, data)
    with pytest.raises(ChannelError, match=r"wieghts.*weights"):
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


def test_a_checkpoint_without_names_gives_its_weights_and_is_not_resumed(tmp_path: Path) -> None:
    """Versions before channels wrote Lightning's own form, and what clients remember under keys of the federation."""
    data = digits(target_labels=30)
    first = build(FedAvg, data)
    run = trainer(1)
    run.fit(first, data)
    run.save_checkpoint(tmp_path / "new.ckpt")
    new = torch.load(tmp_path / "new.ckpt", weights_only=False)
    kept = ("epoch", "global_step", "pytorch-lightning_version", "loops", "hyper_parameters", "callbacks")
    old = {key: new[key] for key in kept if key in new} | {
        "state_dict": first.state_dict(),
        "optimizer_states": [],
        "lr_schedulers": [],
        "federation": {"roster": new["federation"]["roster"], "totals": {}},
    }
    torch.save(old, tmp_path / "old.ckpt")
    second = build(FedAvg, data)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    trainer(1).test(second, data, ckpt_path=str(tmp_path / "old.ckpt"), weights_only=False, verbose=False)
    assert same(weights(first, "fonts"), weights(second, "fonts"))
    with pytest.raises(RosterError, match="did not keep each client's state under its name"):
        trainer(2).fit(build(FedAvg, data), data, ckpt_path=str(tmp_path / "old.ckpt"), weights_only=False)


def test_an_open_channel_takes_no_backend() -> None:
    class Features(FedAvg):
        channels = (Open("features", "features of a batch", "sources", "target"),)

    data = digits()
    with pytest.raises(ChannelError, match="features"):
        trainer(1, strategy={"privacy": {"features": PairwiseMasking(colluders=0)}}).fit(build(Features, data), data)
