"""FedDANN, FADE and FedWDGRL against adversarial training of pooled data, by autograd; a distance against transport."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import ot
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
from fedlit.methods import FADE, FedAvg, FedDANN, FedWDGRL
from fedlit.privacy import PairwiseMasking
from helpers import STATEFUL, batches_of, build, descend_, digits, loader, same, trainer, weights

LAMBDA = 0.7


def federated(method: Any = FedDANN, names: Sequence[str] = NAMES, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {"classifier": nn.Linear(4, 2).double(), "extractor": Extractor(), "hidden": 6}
    given |= {"optimizer": lambda params: SGD(params, lr=LR, momentum=0.5), "weighting": "uniform"} | kwargs
    if method is not FedWDGRL:
        given = {"reversal_weight": LAMBDA, "schedule_rounds": None} | given
    return method(names, names[-1], 2, given.pop("extractor"), given.pop("classifier"), **given)


def states(module: Any) -> dict[str, dict[str, Tensor]]:
    return {name: weights(module, name) for name in NAMES}


def test_conditional_rounds_of_one_step_are_centralised_training_of_one_extractor() -> None:
    rounds, data = 3, shifted()
    module = federated(conditional=True, optimizer=lambda params: SGD(params, lr=LR))
    network = fit(module, data, rounds=rounds)["c2"]

    def shown(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = network.extractor(x)
        p = network.classifier(features).softmax(dim=1).detach()
        maps = torch.stack([torch.kron(q, f) for q, f in zip(p, features, strict=True)])
        return features, maps, entropy_weights(p)

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
        torch.testing.assert_close(weights(module, name), dict(network.state_dict()), atol=1e-10, rtol=0)


def centrally(
    start: dict[str, Any], data: dict[str, TensorDataset], rounds: int, batch_size: int, squared: bool
) -> dict[str, dict[str, Tensor]]:
    """Rounds of several steps: an extractor for each client, and one D of all, from the gradient of the joint loss."""
    networks = {name: copy.deepcopy(replica) for name, replica in start.items()}
    discriminator = copy.deepcopy(networks["c2"].discriminator)
    own = {n: [*r.extractor.parameters(), *r.classifier.parameters()] for n, r in networks.items()}
    optimizers = {n: SGD(params, lr=LR, momentum=0.5) for n, params in own.items()}
    judge = SGD(discriminator.parameters(), lr=LR, momentum=0.5)
    for round_idx in range(rounds):
        batches = {n: batches_of(data, n, round_idx, batch_size) for n in NAMES}
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
    data = shifted(sizes)
    one_round = sizes != (24, 24, 24)  # who stopped has a momentum of its own from then on
    module = federated(squared=squared)
    start = fit(module, data, batch_size=8, rounds=1 if one_round else 3)
    expected = centrally(start, data, 1 if one_round else 3, 8, squared)
    for name in NAMES:
        torch.testing.assert_close(weights(module, name), dict(expected[name]), atol=1e-10, rtol=0)


@cache
def averaged() -> FederatedModule:
    trainer(2, gradient_clip_val=1.0).fit(module := build(FedAvg, digits(), **STATEFUL), digits())
    return module


@pytest.mark.parametrize(
    ("method", "weight", "sync"), [(FedDANN, "reversal_weight", "step"), (FedWDGRL, "wasserstein_weight", "round")]
)
def test_without_an_adversary_sources_average_as_in_fedavg_to_the_last_bit(method: Any, weight: str, sync: str) -> None:
    module = build(method, digits(), **STATEFUL, average="sources", sync=sync, **{weight: 0.0})
    trainer(2, gradient_clip_val=1.0).fit(module, digits())
    for name in ("clean", "blended", "fonts"):
        parts = {k: t for k, t in weights(module, name).items() if not k.startswith("discriminator.")}
        assert same(parts, weights(averaged(), name))


def test_the_schedule_begins_without_reversal_and_follows_the_planned_rounds() -> None:
    seen: list[float] = []

    class Watched(FedDANN):
        def reversal(self) -> float:
            seen.append(super().reversal() / LAMBDA)
            return seen[-1]

    for given, progress in (
        ({"schedule_rounds": 2}, [0, 1 / 2, 1, 1]),
        ({"schedule_rounds": "planned", "warmup_rounds": 2}, [0, 1 / 2]),
    ):
        seen.clear()
        fit(federated(Watched, **given), shifted(), rounds=4)
        assert seen == pytest.approx([reversal_weight(p) for p in progress])
    seen.clear()
    fit(federated(Watched, schedule_rounds="planned"), shifted(), rounds=-1, max_steps=3)
    assert seen == [1, 1, 1]


def test_fade_is_feddann_with_averaged_discriminators_and_squared_losses() -> None:
    data = shifted()
    fade, spelled = federated(FADE), federated(sync="round", squared=True)
    for module in (fade, spelled):
        with pytest.warns(UserWarning, match="averages discriminators"):
            fit(module, data, batch_size=8, rounds=2)
    assert all(same(state, states(spelled)[name]) for name, state in states(fade).items())
    assert [channel.name for channel in fade.channels] == ["weights", "discriminator"]


def test_a_round_without_the_target_moves_no_discriminator() -> None:
    module = federated()
    start = fit(module, shifted(), strategy={"participation": Schedule([["c0", "c1"]])})
    for name in NAMES:
        before = start[name].state_dict()
        state = weights(module, name)
        assert all(torch.equal(value, before[key]) for key, value in state.items() if key.startswith("discriminator."))


def test_a_sum_of_one_source_and_the_target_is_warned_about_where_a_backend_hides() -> None:
    data = {name: shifted()[name] for name in ("c0", "c1")}
    with pytest.warns(UserWarning, match="'c0' and the target"):
        fit(federated(names=["c0", "c1"]), data, strategy={"privacy": PairwiseMasking(colluders=0)})


LAMBDA, GAMMA, RATE = 0.4, 3.0, 0.05


def wdgrl(**kwargs: Any) -> FedWDGRL:
    given: dict[str, Any] = {"wasserstein_weight": LAMBDA, "penalty_weight": GAMMA, "critic_lr": RATE}
    return federated(FedWDGRL, **given | {"optimizer": lambda params: SGD(params, lr=LR)} | kwargs)


def slopes(critic: Any, x: Tensor) -> Tensor:
    """Gradients of a critic with one hidden layer by its inputs, from its weights."""
    active = (critic[0](x) > 0).to(x.dtype)
    return (active * critic[2].weight) @ critic[0].weight


def test_it_is_centralised_training_with_several_critic_steps_on_the_same_features() -> None:
    data, steps, rounds = shifted(), 3, 3
    module = wdgrl(critic_steps=steps)
    network: Any = fit(module, data, rounds=rounds)["c2"]
    critic = network.discriminator

    def distance(features: dict[str, Tensor]) -> Tensor:
        means = {name: critic(own).mean() for name, own in features.items()}
        return (means["c0"] + means["c1"]) / 2 - means["c2"]

    for _ in range(rounds):
        features = {name: network.extractor(data[name].tensors[0]) for name in NAMES}
        still = {name: own.detach() for name, own in features.items()}
        for _ in range(steps):
            penalties = {n: (slopes(critic, own).norm(dim=1) - 1).square().mean() for n, own in still.items()}
            penalty = (penalties["c0"] + penalties["c1"]) / 4 + penalties["c2"] / 2
            descend_(GAMMA * penalty - distance(still), critic.parameters(), RATE)
        task = sum(F.cross_entropy(network.classifier(features[n]), data[n].tensors[1]) for n in NAMES[:-1]) / 2
        learnt = [*network.extractor.parameters(), *network.classifier.parameters()]
        descend_(task + LAMBDA * distance(features), learnt, LR * 2 / 3)
    for name in NAMES:
        torch.testing.assert_close(weights(module, name), dict(network.state_dict()), atol=1e-10, rtol=0)


def test_critics_stay_equal_where_optimisers_have_a_memory_and_a_source_stops() -> None:
    data = shifted((24, 9, 24))
    module = wdgrl(optimizer=lambda params: SGD(params, lr=LR, momentum=0.9))
    fit(module, data, batch_size=8, rounds=2)
    critics = [{k: t for k, t in weights(module, n).items() if k.startswith("discriminator.")} for n in NAMES]
    assert same(critics[0], critics[1])
    assert same(critics[0], critics[2])
    trained = {id(param) for group in module.trainer.optimizers[0].param_groups for param in group["params"]}
    assert not trained & {id(param) for name in NAMES for param in module.replicas[name].discriminator.parameters()}


def test_the_distance_of_a_critic_with_slope_one_is_below_that_of_optimal_transport_and_comes_near() -> None:
    generator = torch.Generator().manual_seed(0)
    data = {name: shifted()[name] for name in ("c0", "c1")}
    for index, shard in enumerate(data.values()):
        shard.tensors[0].copy_(torch.randn(shard.tensors[0].shape, generator=generator) + 1.5 * index)
    module = wdgrl(names=["c0", "c1"], extractor=Untouched(5), classifier=nn.Linear(5, 2).double(), critic_steps=5,
                   hidden=20, penalty_weight=10.0)  # fmt: skip
    fit(module, data, rounds=40)
    critic: Any = module.replicas["c1"].discriminator
    source, target = (shard.tensors[0] for shard in data.values())
    with torch.no_grad():
        estimate = float(critic(source).mean() - critic(target).mean())
        bound = float(torch.linalg.matrix_norm(critic[0].weight, 2) * torch.linalg.matrix_norm(critic[2].weight, 2))
        steepest = float(slopes(critic, torch.cat([source, target])).norm(dim=1).max())
    exact = ot.emd2(np.full(20, 1 / 20), np.full(17, 1 / 17), torch.cdist(source, target).numpy())
    assert 0 < estimate / bound <= exact
    assert steepest == pytest.approx(1, abs=0.3)
    assert 0.75 * exact < estimate < 1.05 * exact


def test_each_step_of_the_critic_is_a_sum() -> None:
    data = shifted((24, 24, 24))
    sums = []
    for steps in (1, 2):
        module = wdgrl(critic_steps=steps)
        trainer(1).fit(module, loader(data, 8))
        sums.append(module.federation.ledger.messages_by_channel()["critic_gradient"])
    assert sums[1] == 2 * sums[0]
