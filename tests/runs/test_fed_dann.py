"""FedDANN and FADE against domain-adversarial training of pooled data, written out with torch's autograd."""

from __future__ import annotations

import copy
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from adversaries import LR, NAMES, Extractor, Untouched, fit, shifted
from fedlit import FederatedModule
from fedlit.federation import Schedule
from fedlit.functional import domain_adversarial_loss, entropy_weights, reversal_weight
from fedlit.methods import FADA, FADE, FedAvg, FedDANN, FedWDGRL
from fedlit.models import AdversarialReplica, make_discriminator
from fedlit.privacy import FixedPoint, PairwiseMasking, Plain
from fedlit.run.component import Component
from fedlit.run.run import Run
from helpers import STATEFUL, build, digits, loader, same, trainer, weights

LAMBDA = 0.7


def federated(method: type[FedDANN] = FedDANN, names: list[str] | None = None, **kwargs: Any) -> FedDANN:
    torch.manual_seed(0)
    names = NAMES if names is None else names
    given = {"optimizer": lambda params: SGD(params, lr=LR, momentum=0.5), "reversal_weight": LAMBDA, "hidden": 6}
    given |= {"schedule_rounds": None, "weighting": "uniform", "classifier": nn.Linear(4, 2).double()}
    given |= {"extractor": Extractor()} | kwargs
    return method(names, names[-1], 2, given.pop("extractor"), given.pop("classifier"), **given)


def states(module: Any) -> dict[str, dict[str, Tensor]]:
    return {name: weights(module, name) for name in NAMES}


# -------------------------------------------------------------------- against training of pooled data


@pytest.mark.parametrize("conditional", [False, True])
def test_rounds_of_one_step_are_centralised_training_of_one_extractor(conditional: bool) -> None:
    """One network for all data, and a gradient reversed between it and D."""
    rounds, data = 4, shifted()
    module = federated(conditional=conditional, optimizer=lambda params: SGD(params, lr=LR))
    network = fit(module, data, rounds=rounds)["c2"]

    def shown(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = network.extractor(x)
        p = network.classifier(features).softmax(dim=1).detach()
        maps = torch.stack([torch.kron(q, f) for q, f in zip(p, features, strict=True)]) if conditional else features
        return features, maps, entropy_weights(p) if conditional else torch.ones(len(x)).double()

    for _ in range(rounds):
        task, domains = torch.zeros(()).double(), torch.zeros(()).double()
        for name in NAMES:
            features, maps, each = shown(data[name].tensors[0])
            source = name != "c2"
            task = task + (F.cross_entropy(network.classifier(features), data[name].tensors[1]) / 2 if source else 0)
            logits = network.discriminator(maps)
            labels = torch.full_like(logits, float(source))
            domains = domains + (0.25 if source else 0.5) * F.binary_cross_entropy_with_logits(logits, labels, each)
        learnt = [*network.extractor.parameters(), *network.classifier.parameters()]
        down = torch.autograd.grad(task - LAMBDA * domains, learnt, retain_graph=True)
        judged = list(network.discriminator.parameters())
        judging = torch.autograd.grad(domains, judged)
        with torch.no_grad():
            torch._foreach_sub_(learnt, [LR * 2 / 3 * gradient for gradient in down])
            torch._foreach_sub_(judged, [LR * gradient for gradient in judging])
    for name in NAMES:
        for key, value in weights(module, name).items():
            torch.testing.assert_close(value, network.state_dict()[key], atol=1e-10, rtol=0)


def centrally(
    start: dict[str, Any], data: dict[str, TensorDataset], rounds: int, batch_size: int, squared: bool
) -> dict[str, dict[str, Tensor]]:
    """Rounds of several steps: an extractor for each client, and one D of all, from the gradient of the joint loss."""
    networks = {name: copy.deepcopy(replica) for name, replica in start.items()}
    discriminator = copy.deepcopy(networks["c2"].discriminator)
    own = {n: [*r.extractor.parameters(), *r.classifier.parameters()] for n, r in networks.items()}
    optimizers = {n: SGD(params, lr=LR, momentum=0.5) for n, params in own.items()}
    judge = SGD(discriminator.parameters(), lr=LR, momentum=0.5)
    readers = loader(data, batch_size)
    for round_idx in range(rounds):
        batches = {n: list(readers._reader(n).read(round_idx, 0, -(-len(data[n]) // batch_size))) for n in NAMES}
        for step in range(max(map(len, batches.values()))):
            there = [n for n in NAMES if step < len(batches[n])]
            features = {n: networks[n].extractor(batches[n][step][0]) for n in there}
            for n in there:
                task = 0 * networks[n].classifier(features[n]).sum()
                if n != "c2":
                    task = F.cross_entropy(networks[n].classifier(features[n]), batches[n][step][1])
                optimizers[n].zero_grad()
                task.backward(retain_graph=True)
            sources = [n for n in there if n != "c2"]
            if sources and "c2" in there:
                logits = {n: discriminator(features[n]) for n in there}
                loss = domain_adversarial_loss([logits[n] for n in sources], logits["c2"])
                if squared:
                    parts = [F.softplus(-logits[n]).mean() for n in sources]
                    loss = torch.stack(parts).square().mean() / 4 + F.softplus(logits["c2"]).mean().square() / 4
                params = [param for n in there for param in own[n][:2]]
                reversed_ = torch.autograd.grad(loss, params, retain_graph=True)
                for param, gradient in zip(params, reversed_, strict=True):
                    param.grad -= LAMBDA * len(sources) * gradient
                judge.zero_grad()
                loss.backward(inputs=list(discriminator.parameters()))
                judge.step()
            for n in there:
                optimizers[n].step()
        with torch.no_grad():
            for params in zip(*own.values(), strict=True):
                mean = torch.stack([*params]).mean(dim=0)
                for param in params:
                    param.copy_(mean)
    for network in networks.values():
        network.discriminator = discriminator
    return {name: network.state_dict() for name, network in networks.items()}


@pytest.mark.parametrize(
    ("sizes", "squared"),
    [((24, 24, 24), False), ((24, 24, 24), True), ((24, 9, 20), False), ((24, 17, 8), False), ((8, 7, 20), False)],
    ids=["equal", "squared", "a source stops", "the target stops", "both sources stop"],
)
def test_summed_gradients_train_the_discriminator_of_pooled_data(sizes: tuple[int, ...], squared: bool) -> None:
    """With momentum, over rounds of several batches; a step without both sides changes no D."""
    data = shifted(sizes)
    one_round = sizes != (24, 24, 24)  # who stopped has a momentum of its own from then on
    module = federated(squared=squared)
    start = fit(module, data, batch_size=8, rounds=1 if one_round else 3)
    expected = centrally(start, data, 1 if one_round else 3, 8, squared)
    for name in NAMES:
        for key, value in weights(module, name).items():
            torch.testing.assert_close(value, expected[name][key], atol=1e-10, rtol=0)


def test_one_plain_step_of_averaged_discriminators_is_that_of_summed_gradients() -> None:
    data, plain = shifted(), {"optimizer": lambda params: SGD(params, lr=LR)}
    averaged, summed = federated(sync="round", **plain), federated(**plain)
    for module in (averaged, summed):
        fit(module, data, rounds=3)
    for name in NAMES:
        for key, value in weights(averaged, name).items():
            torch.testing.assert_close(value, weights(summed, name)[key], atol=1e-10, rtol=0)


def test_averaged_discriminators_of_one_domain_each_tell_nothing_apart_where_the_summed_one_does() -> None:
    """Two overlapping domains in features that stand still and are positive, as after ReLU; 100 steps in a round."""
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(400, 2, generator=generator)
    there = torch.arange(400) < 200
    x[~there, 0] += 3
    labels = torch.zeros(200, dtype=torch.long)
    data = {"s": TensorDataset(x[there], labels), "t": TensorDataset(x[~there], labels)}
    found = {}
    for sync in ("step", "round"):
        given: dict[str, Any] = {"extractor": Untouched(2), "classifier": nn.Linear(2, 2), "hidden": 16}
        module = federated(names=["s", "t"], sync=sync, optimizer=lambda params: SGD(params, lr=0.1), **given)
        fit(module, data, batch_size=200, strategy={"local_steps": 100})
        with torch.no_grad():
            logits = module.replicas["t"].discriminator(x)
            loss = domain_adversarial_loss([logits[there]], logits[~there])
        found[sync] = float(((logits > 0) == there).double().mean()), float(loss)
    assert found["step"] == pytest.approx((0.86, 0.33), abs=0.03)
    assert found["round"][0] == pytest.approx(0.5, abs=0.05)
    assert found["round"][1] > math.log(2)


# -------------------------------------------------------------------- identities


@pytest.mark.parametrize("sync", ["step", "round"])
def test_without_reversal_sources_average_as_in_fedavg_to_the_last_bit(sync: str) -> None:
    data = digits()
    plain, adversarial = (
        build(method, data, **STATEFUL, **arguments)
        for method, arguments in ((FedAvg, {}), (FedDANN, {"reversal_weight": 0.0, "average": "sources", "sync": sync}))
    )
    for module in (plain, adversarial):
        trainer(3, gradient_clip_val=1.0).fit(module, data)
    for name in ("clean", "blended", "fonts"):
        parts = {k: t for k, t in weights(adversarial, name).items() if not k.startswith("discriminator.")}
        assert same(parts, weights(plain, name))


def test_the_schedule_begins_without_reversal_and_follows_the_planned_rounds() -> None:
    seen: list[float] = []

    class Watched(FedDANN):
        def reversal(self) -> float:
            seen.append(super().reversal() / LAMBDA)
            return seen[-1]

    for given, progress in (
        ({}, [0, 1 / 4, 1 / 2, 3 / 4]),
        ({"schedule_rounds": 2}, [0, 1 / 2, 1, 1]),
        ({"schedule_rounds": "planned", "warmup_rounds": 2}, [0, 1 / 2]),
    ):
        seen.clear()
        fit(federated(Watched, **{"schedule_rounds": "planned", **given}), shifted(), rounds=4)
        assert seen == pytest.approx([reversal_weight(p) for p in progress])
    for given, rounds in (({"schedule_rounds": None}, {}), ({"schedule_rounds": "planned"}, {"rounds": -1})):
        seen.clear()
        fit(federated(Watched, **given), shifted(), **{"rounds": 3, "max_steps": 3, **rounds})
        assert seen == [1, 1, 1]


def test_fade_is_feddann_with_averaged_discriminators_and_squared_losses() -> None:
    data = shifted()
    fade, spelled = federated(FADE), federated(sync="round", squared=True)
    for module in (fade, spelled):
        with pytest.warns(UserWarning, match=f"{type(module).__name__} with sync='round' averages discriminators"):
            fit(module, data, batch_size=8, rounds=2)
    assert all(same(state, states(spelled)[name]) for name, state in states(fade).items())
    assert [channel.name for channel in fade.channels] == ["weights", "discriminator"]


@pytest.mark.parametrize("method", [FedDANN, FedWDGRL, FADA])
def test_a_frozen_extractor_stands_still_while_it_is_judged(method: type[FederatedModule]) -> None:
    torch.manual_seed(0)
    extractor, classifier = Extractor().requires_grad_(False), nn.Linear(4, 2).double()
    module = method(NAMES, "c2", 2, extractor, classifier)
    start = fit(module, shifted())
    before = start["c2"].state_dict()
    changed = {key for key, value in weights(module, "c2").items() if not torch.equal(value, before[key])}
    assert {key.split(".")[0] for key in changed} == {"classifier", "discriminator"}


# -------------------------------------------------------------------- what is sent, and who is away


def test_a_local_step_has_one_exchange_more_than_fedavg() -> None:
    data, calls = shifted((24, 24, 24)), {}
    for method in (FedDANN, FedAvg):
        module = federated() if method is FedDANN else FedAvg(NAMES, "c2", 2, Extractor(), nn.Linear(4, 2).double())
        fit(module, data, batch_size=8, rounds=2)
        calls[method] = module.federation.state_dict()["calls"]
    # in each of 2 rounds: vectors and total in each of 3 steps, what failed in the last; a mean of D, with its check
    assert calls[FedDANN] - calls[FedAvg] == 2 * (3 * 2 + 1 + 3)
    module = federated()
    fit(module, data, batch_size=8)
    sent = {entry.channel for entry in module.federation.ledger} - {"metrics"}
    assert sent == {"weights", "discriminator_gradient", "discriminator"}
    assert sum(weight.numel() for weight in module.replicas["c0"].discriminator.parameters()) == (4 + 2) * 6 + 1


def test_absent_clients_keep_their_discriminator_until_they_come_back() -> None:
    data = shifted((24, 24, 24))
    presence = [["c0", "c2"], ["c0", "c1", "c2"]]
    module, seen = federated(), []

    class Watching(pl.Callback, Component):
        def on_round_start(self, run: Run) -> None:
            module: Any = run.module
            seen.append({name: weights(module, name)["discriminator.0.weight"] for name in NAMES})

        on_round_end = on_round_start

    trainer(2, [Watching()], strategy={"participation": Schedule(presence)}).fit(module, loader(data, 8))
    start, end, back, last = seen
    assert torch.equal(end["c1"], start["c1"])
    assert torch.equal(end["c0"], end["c2"])
    assert not torch.equal(end["c0"], start["c0"])
    assert torch.equal(back["c1"], back["c0"])
    assert torch.equal(last["c0"], last["c1"])


def test_a_round_without_the_target_moves_no_discriminator() -> None:
    module = federated()
    start = fit(module, shifted(), strategy={"participation": Schedule([["c0", "c1"]])})
    for name in NAMES:
        before = start[name].state_dict()
        state = weights(module, name)
        assert all(torch.equal(value, before[key]) for key, value in state.items() if key.startswith("discriminator."))


def test_masked_gradients_train_as_those_on_the_grid_and_single_clients_are_too_few_to_hide() -> None:
    data = shifted((24, 24, 24))
    masked, grid, plain = federated(), federated(), federated()
    for module, backend in ((masked, PairwiseMasking()), (grid, Plain(FixedPoint())), (plain, None)):
        fit(module, data, batch_size=8, rounds=2, strategy={"privacy": backend})
    for name in NAMES:
        assert same(weights(masked, name), weights(grid, name))
        for key, value in weights(plain, name).items():
            torch.testing.assert_close(value, weights(masked, name)[key], atol=1e-4, rtol=0)


def test_where_too_few_are_heard_to_be_hidden_the_step_passes_without_a_domain_loss() -> None:
    module = federated(average="sources")
    backend = {"weights": Plain(), "discriminator": Plain(), "discriminator_gradient": PairwiseMasking()}
    presence = Schedule([["c0", "c2"]])
    start = fit(module, shifted(), strategy={"privacy": backend, "participation": presence})
    key = "discriminator.0.weight"
    assert torch.equal(weights(module, "c0")[key], start["c0"].state_dict()[key])


def test_a_sum_of_one_source_and_the_target_is_warned_about_where_a_backend_hides() -> None:
    data = {name: shifted()[name] for name in ("c0", "c1")}
    with pytest.warns(UserWarning, match=r"summed over 'c0' and the target alone: each learns the other's"):
        fit(
            federated(names=["c0", "c1"]),
            data,
            strategy={"privacy": PairwiseMasking(colluders=0)},
        )


def test_the_target_predicts_better_on_shifted_data_oracle() -> None:
    """Measured on labels that training never sees: two classes, of which a shift of the target's hides one side."""
    generator = torch.Generator().manual_seed(0)

    def domain(offset: float) -> TensorDataset:
        y = torch.arange(200) % 2
        x = 2.0 * y[:, None] - 1 + torch.tensor([0.5, 0.6]) * torch.randn(200, 2, generator=generator)
        return TensorDataset((x + torch.tensor([offset, 0.0])).double(), y)

    class Net(nn.Sequential):
        out_features = 8

        def __init__(self) -> None:
            super().__init__(nn.Linear(2, 8), nn.ReLU())
            self.double()

    data = {"c0": domain(0.0), "c1": domain(0.2), "c2": domain(2.5)}
    x, y = data["c2"].tensors
    hidden = {**data, "c2": TensorDataset(x, torch.full_like(y, -1))}
    accuracy = {}
    for reversal in (0.0, 1.0):
        given: dict[str, Any] = {"extractor": Net(), "classifier": nn.Linear(8, 2).double(), "hidden": 16}
        module = federated(reversal_weight=reversal, optimizer=lambda params: SGD(params, lr=0.1), **given)
        fit(module, hidden, batch_size=100, rounds=30)
        with torch.no_grad():
            accuracy[reversal] = float((module(x).argmax(dim=1) == y).double().mean())
    assert accuracy[1.0] > accuracy[0.0] + 0.1


# -------------------------------------------------------------------- set-up and bad input


def test_the_discriminator_has_no_batch_statistics_and_the_networks_number_type() -> None:
    discriminator = make_discriminator(3, 5)
    x = torch.randn(4, 3)
    torch.testing.assert_close(discriminator(x)[:1], discriminator(x[:1]))
    assert discriminator(x).shape == (4,)
    replica = AdversarialReplica(Extractor(), nn.Linear(4, 2).double(), discriminator)
    assert replica.discriminator(x.double()).dtype == torch.float64


def test_the_discriminators_rate_is_the_others_times_its_ratio() -> None:
    module = federated(discriminator_lr_ratio=10.0)
    fit(module, shifted())
    rates = [(group["client"], group["lr"]) for group in module.trainer.optimizers[0].param_groups]
    assert rates == [(name, rate) for name in NAMES for rate in (LR, 10 * LR)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": 0}, "hidden must be at least 1 unit, got 0"),
        ({"sync": "epoch"}, "sync must be 'step' or 'round', got 'epoch'"),
        ({"reversal_weight": -0.1}, r"reversal_weight \(lambda\) must be at least 0 and finite, got -0.1"),
        ({"reversal_weight": math.inf}, r"reversal_weight \(lambda\) must be at least 0 and finite, got inf"),
        ({"schedule_rounds": 0}, "schedule_rounds must be at least 1 round, .* got 0"),
        ({"schedule_rounds": "all"}, "schedule_rounds must be at least 1 round, .* got 'all'"),
        ({"conditional": True, "task": "regression"}, "conditional=True shows D class probabilities"),
        ({"average": "target"}, "average must be 'all' or 'sources', got 'target'"),
        ({"discriminator_lr_ratio": 0.0}, "discriminator_lr_ratio must be positive and finite, got 0.0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        federated(**arguments)


def test_a_discriminator_without_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 input and 1 hidden unit, got 0 and 4"):
        make_discriminator(0, 4)
