"""refine: what the target's own samples make of its classifier, and what the sources' samples say to it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

import fedlit.run.refinement as refinement
from fedlit import FederatedModule
from fedlit.export import target_model
from fedlit.federation import ChannelError
from fedlit.functional import refine_labels, softmax_regression
from fedlit.methods import AdaBN, FedAvg, FedDaDiL, FedMMD, FedRFTCA, FedRFTCAClosedForm, KNNPer, SourceOnly
from fedlit.privacy import FixedPoint, PairwiseMasking, Plain
from helpers import build, digits, loader, normalised_head, same, trainer, weights

CLIENTS = ("c0", "c1", "c2")


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


def fit(refine: Any = True, size: int = 60, rounds: int = 2, **kwargs: Any) -> tuple[Any, Any]:
    """A linear classifier of the clusters; its Trainer too."""
    torch.manual_seed(0)
    strategy, given = kwargs.pop("strategy", {}), kwargs.pop("fit", {})
    arguments: dict[str, Any] = {"optimizer": lambda params: SGD(params, lr=0.5), "classifier": nn.Linear(6, 3)}
    module = kwargs.pop("method", FedAvg)(CLIENTS, "c2", 3, nn.Identity(), refine=refine, **(arguments | kwargs))
    run = trainer(rounds, strategy=strategy)
    run.fit(module, loader(clusters(size)), **given)
    return module, run


def errors(module: FederatedModule) -> int:
    """Of the target's samples."""
    x = clusters()["c2"].tensors[0]
    return int((module.eval()(x).argmax(dim=1) != torch.arange(60) % 3).sum())


def sent(module: FederatedModule, name: str) -> list[tuple[str, str]]:
    return [(entry.sender, entry.receiver) for entry in module.federation.ledger if entry.channel == name]


def test_the_target_gets_a_classifier_of_its_refined_predictions() -> None:
    plain, _ = fit(refine=False)
    module, run = fit()
    x = clusters()["c2"].tensors[0].double()
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0) * 6**0.5
    p = plain.eval()(x.float()).double().softmax(dim=1)
    labels = refine_labels(p, (x - mean) / deviation)
    weight, bias = softmax_regression((x - mean) / deviation, labels, 1 / (refinement.STRENGTH * 60))
    expected = ((x - mean) / deviation) @ weight.T + bias
    torch.testing.assert_close(module.eval()(x.float()).double(), expected, atol=1e-4, rtol=1e-4)
    assert errors(module) < errors(plain)
    assert run.callback_metrics["refine/taken"] == 1
    for source in CLIENTS[:2]:
        assert same(weights(module, source), weights(plain, source))
    torch.testing.assert_close(target_model(module)(x.float()), module(x.float()).softmax(dim=1))


def test_the_sources_answer_with_their_accuracy_of_both_classifiers() -> None:
    module, run = fit()
    x, y = (torch.cat(parts) for parts in zip(*(clusters()[name].tensors for name in CLIENTS[:2]), strict=True))
    own = clusters()["c2"].tensors[0].double()
    mean, deviation = own.mean(dim=0), own.std(dim=0, correction=0) * 6**0.5
    p = fit(refine=False)[0].eval()(own.float()).double().softmax(dim=1)
    standardised = (own - mean) / deviation
    for name, labels in (("_before", p), ("", refine_labels(p, standardised))):
        weight, bias = softmax_regression(standardised, F.one_hot(labels.argmax(dim=1), 3).double(), 1 / 60)
        right = (((x - mean) / deviation) @ weight.T + bias).argmax(dim=1) == y
        told = float(run.callback_metrics[f"refine/reverse_accuracy{name}"])
        assert told == pytest.approx(float(right.double().mean()), abs=1e-6)
    assert sorted(sent(module, "refined_head")) == [("c2", "c0"), ("c2", "c1")]
    assert len(sent(module, "reverse_accuracy")) == 3  # two to the server, one sum from there
    assert {entry.round_idx for entry in module.federation.ledger if entry.channel == "refined_head"} == {1}


def test_what_speaks_against_the_sources_samples_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "refine_labels", lambda p, x: refine_labels(p, x)[:, [1, 2, 0]])
    plain, _ = fit(refine=False)
    with pytest.warns(UserWarning, match=r"target 'c2' is left .* sources' samples from 0\.\d+ to 0\.\d+"):
        module, run = fit()
    assert run.callback_metrics["refine/taken"] == 0
    assert same(weights(module, "c2"), weights(plain, "c2"))


class Flipped(nn.Linear):
    """Not what its weight and bias say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([1.0, -1.0, 1.0])


class Negative(nn.Module):
    """Turns every prediction around: no classifier put before it predicts as it says, on any machine."""

    def forward(self, x: Tensor) -> Tensor:
        return -x


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"size": 49}, "it has 49 training samples, and neighbourhoods take 50"),
        ({"classifier": nn.Linear(6, 3, bias=False)}, "no linear layer of its network has a bias"),
        ({"classifier": nn.Sequential(nn.Linear(6, 3), Negative())}, "not those of one"),
        ({"classifier": Flipped(6, 3)}, "not those of one linear classifier of its features"),
        ({"optimizer": lambda params: SGD(params, lr=0.0), "classifier": "constant"}, "class 1: nothing separates"),
    ],
)
def test_where_it_cannot_be_done_a_warning_says_why_and_nothing_changes(arguments: Any, reason: str) -> None:
    if arguments.get("classifier") == "constant":
        arguments["classifier"] = nn.Linear(6, 3)
        with torch.no_grad():
            arguments["classifier"].bias.copy_(torch.tensor([0.0, 99.0, 0.0]))
    plain, _ = fit(refine=False, **arguments)
    with pytest.warns(UserWarning, match=f"refine: target 'c2' is left as the last round made it: .*{reason}"):
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


def test_sources_that_are_lost_leave_it() -> None:
    """Where too few are left to hide who says what, nobody is asked."""
    module, _ = fit()
    before = weights(module, "c2")
    other = {name: tensor + 1 for name, tensor in before.items()}
    proposal = refinement.Proposal(refinement.Heads(torch.zeros(2, 3, 6), torch.zeros(2, 3)), other)
    with pytest.warns(UserWarning, match="too few sources answered for the privacy backend to hide"):
        assert refinement.decide_(module, proposal, None) == {"taken": 0.0}
    assert same(weights(module, "c2"), before)


def test_one_source_that_would_hide_behind_nobody_is_told_so_at_the_start() -> None:
    data = clusters()
    module = FedAvg(["c0", "c2"], "c2", 3, nn.Identity(), nn.Linear(6, 3), refine=True)
    masked = {"weights": Plain(), "reverse_accuracy": PairwiseMasking(colluders=0)}
    with pytest.raises(ChannelError, match=r"'c0'\] alone can send over channel 'reverse_accuracy'"):
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
        resumed, end = fit(rounds=3, fit={"ckpt_path": tmp_path / "two.ckpt"})
    assert same(weights(whole, "c2"), weights(resumed, "c2"))
    end.save_checkpoint(tmp_path / "three.ckpt")
    again, _ = fit(rounds=3, fit={"ckpt_path": tmp_path / "three.ckpt"})
    assert same(weights(whole, "c2"), weights(again, "c2"))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (AdaBN, {"classifier": normalised_head()}),
        (FedDaDiL, {"warmup_rounds": 1, "num_atoms": 2, "atom_size": 20, "atom_batch_size": 10, "penalty": 0.1}),
        (FedMMD, {"warmup_rounds": 1, "degree": 1}),
        (FedRFTCA, {"num_frequencies": 16, "num_components": 8, "classifier_period": 1}),
        (FedRFTCA, {"num_frequencies": 16, "num_components": 8, "classifier_period": None}),
        (FedRFTCAClosedForm, {"num_frequencies": 16, "num_components": 8}),
    ],
)
def test_all_classifiers_that_a_target_predicts_with_are_replaced(
    method: type[FederatedModule], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is taken away: networks of this size and these rounds know too little."""
    monkeypatch.setattr(refinement, "LEFT", 0.0)
    data = digits(batch_size=128)
    found: list[tuple[Tensor, Tensor]] = []  # the first is the new classifier
    original = refinement._fitted
    monkeypatch.setattr(refinement, "_fitted", lambda *each: found.append(original(*each)) or found[-1])
    module = build(method, data, refine=True, optimizer=lambda params: Adam(params, lr=0.01), **arguments)
    run = trainer(2)
    run.fit(module, data)
    assert run.callback_metrics["refine/taken"] == 1
    x = data.dataset("fonts", "train").x
    calls: list[Tensor] = []
    for layer in module.replicas["fonts"].modules():
        if isinstance(layer, nn.Linear) and torch.equal(layer.weight, found[0][0]):
            layer.register_forward_hook(lambda layer, inputs, output: calls.append(output))
    predicted = module.eval()(x).argmax(dim=1)
    assert calls
    assert all(torch.equal(output.argmax(dim=1), predicted) for output in calls)


def test_neighbours_of_a_memory_are_no_linear_classifier() -> None:
    data = digits(target_labels=100, batch_size=128)
    module = build(KNNPer, data, refine=True, lam=1.0)
    with pytest.warns(UserWarning, match="not those of one linear classifier of its features"):
        trainer(1).fit(module, data)


# -------------------------------------------------------------------- a network that is trained on


def on(passes: int, monkeypatch: pytest.MonkeyPatch, rounds: int = 1, **kwargs: Any) -> tuple[Any, Any, nn.Module]:
    """A network of two layers, refined in so many passes; its Trainer, and the target's network as it was before."""
    monkeypatch.setattr(refinement, "PASSES", passes)
    before: list[nn.Module] = []
    original = refinement.propose

    def propose(method: Any, passes: Any) -> refinement.Proposal:
        before.append(copy.deepcopy(method.replicas["c2"]))
        return original(method, passes)

    monkeypatch.setattr(refinement, "propose", propose)
    torch.manual_seed(0)
    given = {"extractor": nn.Sequential(nn.Linear(6, 5), nn.Tanh()), "classifier": nn.Linear(5, 3)}
    given |= {"optimizer": lambda params: SGD(params, lr=0.5)}
    arguments = given | {"refine": "network"} | kwargs
    module = FedAvg(CLIENTS, "c2", 3, arguments.pop("extractor"), arguments.pop("classifier"), **arguments)
    run = trainer(rounds)
    run.fit(module, loader(clusters(), 60))
    return module, run, before[0]


def by_hand(network: nn.Module, passes: int) -> tuple[nn.Module, Tensor]:
    """SHOT on the target's samples, all in one batch, by autograd of its equations; and the refined predictions."""
    x = clusters()["c2"].tensors[0]
    standardised = ((x - x.mean(dim=0)) / x.std(dim=0, correction=0) / 6**0.5).double()
    network = copy.deepcopy(network).eval()
    for done in range(passes + 1):
        with torch.no_grad():
            refined = refine_labels(network(x).double().softmax(dim=1), standardised)
        if done == passes:
            break
        p = network(x).softmax(dim=1)
        entropy = -(p * p.log()).sum(dim=1).mean()
        diversity = -(p.mean(dim=0) * p.mean(dim=0).log()).sum()
        loss = entropy - diversity - 0.3 * (refined.float() * p.log()).sum(dim=1).mean()
        gradients = torch.autograd.grad(loss, [*network.extractor.parameters()])
        with torch.no_grad():
            for param, gradient in zip(network.extractor.parameters(), gradients, strict=True):
                param -= 0.5 * (1 - done / passes) * gradient
    return network, refined


def test_a_network_learns_its_own_sure_and_refined_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    module, run, before = on(3, monkeypatch, rounds=4)
    expected, refined = by_hand(before, 3)
    assert run.callback_metrics["refine/taken"] == 1
    got = module.replicas["c2"]
    for name, param in expected.extractor.named_parameters():
        torch.testing.assert_close(got.extractor.get_parameter(name), param, atol=1e-5, rtol=1e-4)
        assert not torch.equal(before.extractor.get_parameter(name), param)
    x = clusters()["c2"].tensors[0]
    features = expected.extractor(x).detach().double()
    mean, deviation = features.mean(dim=0), features.std(dim=0, correction=0) * 5**0.5
    weight, bias = softmax_regression((features - mean) / deviation, refined, 1 / (refinement.STRENGTH * 60))
    logits = ((features - mean) / deviation) @ weight.T + bias
    torch.testing.assert_close(module.eval()(x).double().softmax(dim=1), logits.softmax(dim=1), atol=1e-3, rtol=0.0)
    assert not any(module.training for module in [got.classifier])  # as `module.eval()` left it


def test_the_sources_are_asked_of_features_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run, before = on(3, monkeypatch, rounds=4)
    _, refined = by_hand(before, 3)
    x, y = (torch.cat(parts) for parts in zip(*(clusters()[name].tensors for name in CLIENTS[:2]), strict=True))
    own = before.eval().extractor(clusters()["c2"].tensors[0]).detach().double()
    mean, deviation = own.mean(dim=0), own.std(dim=0, correction=0) * 5**0.5
    weight, bias = softmax_regression((own - mean) / deviation, F.one_hot(refined.argmax(dim=1), 3).double(), 1 / 60)
    right = (((before.extractor(x).detach() - mean) / deviation) @ weight.T + bias).argmax(dim=1) == y
    assert float(run.callback_metrics["refine/reverse_accuracy"]) == pytest.approx(
        float(right.double().mean()), abs=1e-6
    )


def test_a_network_that_is_refused_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "LEFT", 2.0)
    extractor = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5).eval(), nn.Dropout(0.2))
    with pytest.warns(UserWarning, match="is left as the last round made it"):
        module, run, before = on(2, monkeypatch, extractor=extractor)
    assert run.callback_metrics["refine/taken"] == 0
    assert same(weights(module, "c2"), before.state_dict())
    assert all(param.grad is None for param in module.replicas["c2"].classifier.parameters())


def test_modules_stay_in_the_modes_that_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> nn.BatchNorm1d:
            return super().train(False)

    monkeypatch.setattr(refinement, "LEFT", 0.0)
    module, run, _ = on(2, monkeypatch, extractor=nn.Sequential(nn.Linear(6, 5), Still(5).eval()))
    assert run.callback_metrics["refine/taken"] == 1
    assert torch.equal(module.replicas["c2"].extractor[1].running_mean, torch.zeros(5))


def test_features_that_nothing_makes_are_refined_by_the_classifier_alone() -> None:
    with pytest.warns(UserWarning, match="has nothing to train below the classifier: give refine=True"):
        _, run = fit(refine="network")
    assert run.callback_metrics["refine/taken"] == 0


def test_votes_let_no_gradient_through() -> None:
    data = digits(batch_size=128)
    arguments = {"num_frequencies": 16, "num_components": 8, "classifier_period": None}
    module = build(FedRFTCA, data, refine="network", optimizer=lambda groups: Adam(groups, lr=0.01), **arguments)
    with pytest.warns(UserWarning, match="no gradient passes through its predictions: give refine=True"):
        trainer(2).fit(module, data)


@pytest.mark.parametrize(
    ("arguments", "batch_size", "reason"),
    [
        ({}, 1, "no batch of it has 2 samples to train on: raise batch_size"),
        ({"classifier": nn.Sequential(nn.Linear(5, 3), Negative())}, 60, "not those of one linear classifier"),
    ],
)
def test_what_cannot_be_trained_on_is_told(arguments: Any, batch_size: int, reason: str) -> None:
    torch.manual_seed(0)
    given = {"classifier": nn.Linear(5, 3), "optimizer": lambda groups: SGD(groups, lr=0.5)} | arguments
    module = FedAvg(CLIENTS, "c2", 3, nn.Sequential(nn.Linear(6, 5), nn.Tanh()), refine="network", **given)
    with pytest.warns(UserWarning, match=reason):
        trainer(2).fit(module, loader(clusters(), batch_size))


def test_gradients_are_clipped_as_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "LEFT", 0.0)
    monkeypatch.setattr(refinement, "PASSES", 1)
    before: list[Tensor] = []
    original = refinement.train_on_

    def train_on_(method: Any, *given: Any) -> Any:
        weight = method.replicas["c2"].extractor[0].weight
        before.append(weight.detach().clone())
        found = original(method, *given)
        before.append(weight.detach().clone())
        return found

    monkeypatch.setattr(refinement, "train_on_", train_on_)
    torch.manual_seed(0)
    extractor = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    module = FedAvg(CLIENTS, "c2", 3, extractor, nn.Linear(5, 3), refine="network", optimizer=lambda g: SGD(g, lr=1.0))
    trainer(1, gradient_clip_val=1e-3, gradient_clip_algorithm="value").fit(module, loader(clusters(), 60))
    moved = (before[1] - before[0]).abs()
    assert 0 < float(moved.max()) <= 1.001e-3


def test_a_network_that_diverges_says_so_and_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer(groups: Any) -> SGD:
        return SGD(groups, lr=float("inf") if len(groups) == 1 else 0.5)  # of the target's network alone

    with pytest.warns(UserWarning, match="once it has trained on, .* not finite: lower the learning rate"):
        module, run, before = on(3, monkeypatch, optimizer=optimizer, extractor=nn.Sequential(nn.Linear(6, 5)))
    assert run.callback_metrics["refine/taken"] == 0
    assert same(weights(module, "c2"), before.state_dict())


def test_a_trained_network_does_not_depend_on_the_random_state_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "LEFT", 0.0)
    extractor, original = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)), refinement.train_on_
    one, run, before = on(2, monkeypatch, extractor=copy.deepcopy(extractor))
    assert run.callback_metrics["refine/taken"] == 1
    assert not same(weights(one, "c2"), before.state_dict())
    monkeypatch.setattr(refinement, "train_on_", lambda *given: (torch.rand(7), original(*given))[1])
    other, *_ = on(2, monkeypatch, extractor=copy.deepcopy(extractor))
    assert same(weights(one, "c2"), weights(other, "c2"))


@pytest.mark.parametrize("refine", ["both", 2])
def test_a_form_that_there_is_not_is_refused(refine: Any) -> None:
    with pytest.raises(ValueError, match=r"refine must be true \(the classifier\), 'network' or false, got"):
        FedAvg(CLIENTS, "c2", 3, nn.Identity(), nn.Linear(6, 3), refine=refine)


def test_numbers_have_no_classes_to_refine() -> None:
    error = re.escape("refine=True refines class probabilities, which task='regression' lacks: give refine=False")
    with pytest.raises(ValueError, match=error):
        FedAvg(CLIENTS, "c2", 1, nn.Identity(), nn.Linear(6, 1), task="regression", refine=True)
