"""refine: what the target's own samples make of its classifier, and what the sources' samples say to it."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from fedlit import FederatedModule
from fedlit.export import target_model
from fedlit.federation import ChannelError, Client
from fedlit.functional import neighbour_agreement, neighbour_graph, refine_labels, refinement, softmax_regression
from fedlit.methods import T3A, FedAnalytic, FedAvg, FedRFTCA, KNNPer, SourceOnly
from fedlit.models import MLP
from fedlit.privacy import FixedPoint, PairwiseMasking, Plain
from fedlit.run.refinement import Heads, Proposal, copied, decide_
from helpers import build, descend_, digits, loader, same, trainer, weights
from method_table import METHODS

CLIENTS = ("c0", "c1", "c2")
STRENGTH, PASSES = 100, 15
"""Of the refined classifier (the inverse of its penalty per sample), and over the samples by which a network learns."""


def clusters(size: int = 60, shift: float = 1.5) -> dict[str, TensorDataset]:
    """Three classes, each around a direction of its own; all of the target is moved towards one of them."""
    generator = torch.Generator().manual_seed(0)
    data = {}
    for client in CLIENTS:
        y = torch.arange(size if client == "c2" else 60) % 3
        x = 2 * F.one_hot(y, 6).float() + 0.7 * torch.randn(len(y), 6, generator=generator)
        target = client == "c2"
        data[client] = TensorDataset(
            x + shift * torch.eye(6)[0] if target else x, torch.full_like(y, -1) if target else y
        )
    return data


def fit(
    refine: Any = True, size: int = 60, rounds: int = 2, batch_size: int = 20, checkpoint: Any = None, **kwargs: Any
) -> tuple[Any, Any]:
    """A linear classifier of the clusters; its Trainer too."""
    torch.manual_seed(0)
    strategy, callbacks = kwargs.pop("strategy", {}), kwargs.pop("callbacks", ())
    arguments: dict[str, Any] = {"optimizer": lambda params: SGD(params, lr=0.5), "classifier": nn.Linear(6, 3)}
    arguments |= {"extractor": nn.Identity()} | kwargs
    extractor = copy.deepcopy(arguments.pop("extractor"))
    if arguments["classifier"] is None:  # the method makes its own
        del arguments["classifier"]
    module = arguments.pop("method", FedAvg)(CLIENTS, "c2", 3, extractor, refine=refine, **arguments)
    run = trainer(rounds, callbacks, strategy=strategy, enable_checkpointing=bool(callbacks))
    run.fit(module, loader(clusters(size), batch_size), ckpt_path=checkpoint)
    return module, run


fitted = cache(fit)


def errors(module: FederatedModule) -> int:
    """Of the target's samples."""
    x = clusters()["c2"].tensors[0]
    return int((module.eval()(x).argmax(dim=1) != torch.arange(60) % 3).sum())


def sent(module: FederatedModule, name: str) -> list[tuple[str, str]]:
    return [(entry.sender, entry.receiver) for entry in module.federation.ledger if entry.channel == name]


def standardised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.detach().double()
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0) * x.shape[1] ** 0.5
    return (x - mean) / deviation, mean, deviation


def reverse_accuracy(features: Any, own: Tensor, labels: Tensor) -> float:
    """Share of the sources' samples that a classifier of the target's labels gets right."""
    x, y = (torch.cat(parts) for parts in zip(*(clusters()[name].tensors for name in CLIENTS[:2]), strict=True))
    z, mean, deviation = standardised(features(own))
    weight, bias = softmax_regression(z, F.one_hot(labels.argmax(dim=1), 3).double(), 1 / 60)
    right = (((features(x).detach() - mean) / deviation) @ weight.T + bias).argmax(dim=1) == y
    return float(right.double().mean())


@pytest.mark.parametrize("dense", [False, True])
def test_the_target_gets_a_classifier_of_its_refined_predictions(monkeypatch: pytest.MonkeyPatch, dense: bool) -> None:
    if dense:
        monkeypatch.setattr(refinement, "_DENSE", 60)
    (plain, _), (module, run) = fitted(refine=False), fit()
    x = clusters()["c2"].tensors[0]
    z, _, _ = standardised(x)
    p = plain.eval()(x).double().softmax(dim=1)
    labels = refine_labels(p, z, alpha=0.8 if dense else 0.7, with_model=True)
    weight, bias = softmax_regression(z, labels, 1 / (STRENGTH * 60))
    torch.testing.assert_close(module.eval()(x).double(), z @ weight.T + bias, atol=1e-4, rtol=1e-4)
    assert errors(module) < errors(plain)
    assert run.callback_metrics["refine/taken"] == 1
    for source in CLIENTS[:2]:
        assert same(weights(module, source), weights(plain, source))
    temperature, before = module.run.outputs.temperature, plain.eval()(x).argmax(dim=1)
    sure = target_model(module)(x)
    torch.testing.assert_close(sure, (module(x) / temperature).softmax(dim=1))
    # as sure as neighbours agree on the classes before
    expected = neighbour_agreement(before, neighbour_graph(z))
    assert float(sure.amax(dim=1).mean()) == pytest.approx(expected, abs=1e-4)


def test_the_sources_answer_with_their_accuracy_of_both_classifiers() -> None:
    module, run = fitted()
    own = clusters()["c2"].tensors[0]
    p = fitted(refine=False)[0].eval()(own).double().softmax(dim=1)
    for name, labels in (("_before", p), ("", refine_labels(p, standardised(own)[0]))):
        expected = reverse_accuracy(lambda x: x, own, labels)
        assert float(run.callback_metrics[f"refine/reverse_accuracy{name}"]) == pytest.approx(expected, abs=1e-6)
    assert sorted(sent(module, "refined_head")) == [("c2", "c0"), ("c2", "c1")]
    assert len(sent(module, "reverse_accuracy")) == 3  # two to the server, one sum from there
    assert {entry.round_idx for entry in module.federation.ledger if entry.channel == "refined_head"} == {1}


class Negative(nn.Module):
    """Turns every prediction around: no classifier put before it predicts as it says, on any machine."""

    def forward(self, x: Tensor) -> Tensor:
        return -x


def constant() -> nn.Linear:
    classifier = nn.Linear(6, 3)
    with torch.no_grad():
        classifier.bias.copy_(torch.tensor([0.0, 99.0, 0.0]))
    return classifier


def diverging(groups: Any) -> SGD:
    return SGD(groups, lr=float("inf") if len(groups) == 1 else 0.5)  # of the target's network alone


NETWORK: dict[str, Any] = {"extractor": nn.Sequential(nn.Linear(6, 5), nn.Tanh()), "classifier": nn.Linear(5, 3)}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"size": 49}, "49 training samples"),
        ({"classifier": nn.Linear(6, 3, bias=False)}, "has a bias"),
        ({"classifier": nn.Sequential(nn.Linear(6, 3), Negative())}, "one linear classifier"),
        ({"optimizer": lambda params: SGD(params, lr=0.0), "classifier": constant()}, "nothing separates"),
        ({"refine": "network"}, "nothing to train"),
        ({"refine": "network", "batch_size": 1, "rounds": 1} | NETWORK, "2 samples"),
        ({"refine": "network", "classifier": nn.Sequential(nn.Linear(6, 3), Negative())}, "classifier"),
        ({"refine": "network", "optimizer": diverging, "extractor": nn.Sequential(nn.Linear(6, 6))}, "not finite"),
    ],
)
def test_where_it_cannot_be_done_a_warning_says_why_and_nothing_changes(arguments: Any, reason: str) -> None:
    plain, _ = fit(**({"refine": True} | arguments | {"refine": False}))
    with pytest.warns(UserWarning, match=f"target 'c2' is left .*{reason}"):
        module, run = fit(**arguments)
    assert run.callback_metrics["refine/taken"] == 0
    assert same(weights(module, "c2"), weights(plain, "c2"))
    assert not sent(module, "refined_head")


def test_sources_that_cannot_try_a_classifier_speak_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_target(self: FederatedModule, replica: Any) -> nn.Module:
        replica.extractor, replica.classifier = nn.ConstantPad1d((0, 1), 1.0), nn.Linear(7, 3)
        return replica

    monkeypatch.setattr(SourceOnly, "build_target", build_target)
    monkeypatch.setattr(SourceOnly, "on_round_end", lambda self, round_idx: None)
    with pytest.warns(UserWarning, match="from 1.000 to 0.000"):
        _, run = fit(method=SourceOnly)
    assert run.callback_metrics["refine/taken"] == 0


@pytest.mark.parametrize(("after", "taken"), [(0.64, True), (0.62, False)])
@pytest.mark.filterwarnings("ignore:refine. target 'c2' is left")
def test_seven_tenths_of_the_accuracy_on_the_sources_samples_are_enough(after: float, taken: bool) -> None:
    network, refined = nn.Linear(2, 3), nn.Linear(2, 3)
    target = Client("c2", role="target")
    run: Any = SimpleNamespace(target=target, replicas={target: network}, outputs=SimpleNamespace(temperature=1.0))
    proposal = Proposal(Heads(torch.zeros(2, 3, 2), torch.zeros(2, 3)), copied(refined), 2.0)
    numbers = decide_(run, proposal, {"right": torch.tensor([0.9, after], dtype=torch.float64)})
    assert numbers["taken"] == taken
    assert torch.equal(network.weight, refined.weight) == taken
    assert run.outputs.temperature == (2.0 if taken else 1.0)


def test_one_source_that_would_hide_behind_nobody_is_named_at_the_start() -> None:
    data = clusters()
    module = FedAvg(["c0", "c2"], "c2", 3, nn.Identity(), nn.Linear(6, 3), refine=True)
    masked = {"weights": Plain(), "reverse_accuracy": PairwiseMasking(colluders=0)}
    with pytest.raises(ChannelError, match="reverse_accuracy"):
        trainer(1, strategy={"privacy": masked}).fit(module, loader({name: data[name] for name in ("c0", "c2")}))


def test_masked_sums_decide_as_plain_ones_on_the_grid() -> None:
    plain, one = fit(strategy={"privacy": Plain(FixedPoint())})
    masked, other = fit(strategy={"privacy": PairwiseMasking(colluders=0)})
    assert same(weights(plain, "c2"), weights(masked, "c2"))
    names = [name for name in one.callback_metrics if name.startswith("refine/")]
    assert len(names) == 3
    assert all(one.callback_metrics[name] == other.callback_metrics[name] for name in names)


def test_a_resumed_run_ends_refined_as_one_that_went_through(tmp_path: Path) -> None:
    whole, _ = fit(rounds=3)
    _, run = fit(rounds=2, refine=False)
    run.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.warns(UserWarning, match="refine was False and is True"):
        resumed, end = fit(rounds=3, checkpoint=tmp_path / "two.ckpt")
    assert same(weights(whole, "c2"), weights(resumed, "c2"))
    end.save_checkpoint(tmp_path / "three.ckpt")
    again, _ = fit(rounds=3, checkpoint=tmp_path / "three.ckpt")
    assert same(weights(whole, "c2"), weights(again, "c2"))


class Stopping(pl.Callback):
    """Asks for the end of a run after its second round, where `EarlyStopping` and `Timer` do."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop |= trainer.current_epoch == 1


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"method": T3A, "refine": False}, id="T3A"),
        pytest.param({"method": SourceOnly}, id="refined"),
        pytest.param({"method": FedAnalytic, "warmup_rounds": 1}, id="closed form, refined"),
    ],
)
def test_checkpoints_of_a_run_that_stops_early_are_of_its_end(given: Any, tmp_path: Path) -> None:
    """They are those of a run that was planned for as many rounds, and runs go on from both alike."""
    network: Any = {"extractor": MLP(6, [8]), "classifier": None}

    def files(folder: str) -> Any:
        return [torch.load(each, weights_only=False) for each in sorted((tmp_path / folder).glob("*.ckpt"))]

    def ended(rounds: int, folder: str, *callbacks: pl.Callback, start: Path | None = None) -> dict[str, Tensor]:
        kept = ModelCheckpoint(tmp_path / folder, filename="end", save_last=True)
        module, _ = fit(rounds=rounds, checkpoint=start, callbacks=[kept, *callbacks], **network, **given)
        return weights(module, "c2")

    planned = ended(2, "planned")
    assert same(planned, ended(5, "stopped", Stopping()))
    for folder in ("planned", "stopped"):
        assert [each["epoch"] for each in files(folder)] == [1, 1]
        assert all(same(planned, each["clients"]["c2"]["weights"]) for each in files(folder))
    rare = [ModelCheckpoint(tmp_path / "rare", every_n_epochs=4), Stopping()]
    fit(rounds=5, callbacks=rare, **network, **given)  # which saves nothing
    assert not files("rare")
    starts = {each: tmp_path / each / "last.ckpt" for each in ("planned", "stopped")}
    assert same(*(ended(3, f"{each}, on", start=start) for each, start in starts.items()))


@pytest.mark.parametrize(
    ("method", "arguments", "reason"),
    [
        (KNNPer, {"refine": True, "lam": 1.0}, "one linear classifier"),  # neighbours of a memory
        (FedRFTCA, {"refine": "network", **METHODS["FedRFTCA"][1], "classifier_period": None}, "no gradient passes"),
    ],
)
def test_predictions_that_are_no_network_of_layers_are_left(method: Any, arguments: Any, reason: str) -> None:
    data = digits(target_labels=100 if method is KNNPer else 0, batch_size=128)
    with pytest.warns(UserWarning, match=reason):
        trainer(2).fit(build(method, data, **arguments), data)


def by_hand(network: nn.Module) -> tuple[nn.Module, Tensor]:
    """SHOT on the target's samples, all in one batch, by autograd of its equations; and the refined predictions."""
    x = clusters()["c2"].tensors[0]
    z, _, _ = standardised(x)
    network = copy.deepcopy(network).eval()
    for done in range(PASSES + 1):
        with torch.no_grad():
            refined = refine_labels(network(x).double().softmax(dim=1), z)
        if done == PASSES:
            break
        p = network(x).softmax(dim=1)
        entropy = -(p * p.log()).sum(dim=1).mean()
        diversity = -(p.mean(dim=0) * p.mean(dim=0).log()).sum()
        loss = entropy - diversity - 0.3 * (refined.float() * p.log()).sum(dim=1).mean()
        descend_(loss, network.extractor.parameters(), 0.5 * (1 - done / PASSES))
    return network, refined


@pytest.mark.parametrize("dense", [60, 61])
def test_a_network_learns_its_own_sure_and_refined_predictions(monkeypatch: pytest.MonkeyPatch, dense: int) -> None:
    monkeypatch.setattr(refinement, "_DENSE", dense)  # the samples from which on a model takes part
    given = {"rounds": 4, "batch_size": 60} | NETWORK
    before = fit(refine=False, **given)[0].replicas["c2"]
    module, run = fit(refine="network", **given)
    expected, refined = by_hand(before)
    assert run.callback_metrics["refine/taken"] == 1
    got = module.replicas["c2"]
    for name, param in expected.extractor.named_parameters():
        torch.testing.assert_close(got.extractor.get_parameter(name), param, atol=1e-4, rtol=1e-3)
        assert not torch.equal(before.extractor.get_parameter(name), param)
    x = clusters()["c2"].tensors[0]
    z, _, _ = standardised(expected.extractor(x))
    weight, bias = softmax_regression(z, refined, 1 / (STRENGTH * 60))
    expected_p = (z @ weight.T + bias).softmax(dim=1)
    torch.testing.assert_close(module.eval()(x).double().softmax(dim=1), expected_p, atol=1e-2, rtol=0)
    # the sources are asked of features as they were
    found = float(run.callback_metrics["refine/reverse_accuracy"])
    assert found == pytest.approx(reverse_accuracy(before.eval().extractor, x, refined), abs=1e-6)
