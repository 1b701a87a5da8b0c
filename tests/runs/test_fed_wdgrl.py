"""FedWDGRL: its critic against gradients of pooled data by hand, and its distance against optimal transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import ot
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from adversaries import LR, NAMES, Extractor, Untouched, fit, shifted
from fedlit.methods import FedWDGRL
from helpers import loader, same, trainer, weights

LAMBDA, GAMMA, RATE = 0.4, 3.0, 0.05


def wdgrl(names: list[str] | None = None, **kwargs: Any) -> FedWDGRL:
    torch.manual_seed(0)
    names = NAMES if names is None else names
    given: dict[str, Any] = {"wasserstein_weight": LAMBDA, "penalty_weight": GAMMA, "critic_lr": RATE, "hidden": 6}
    given |= {"classifier": nn.Linear(4, 2).double(), "extractor": Extractor(), "weighting": "uniform"}
    given |= {"optimizer": lambda params: SGD(params, lr=LR)} | kwargs
    return FedWDGRL(names, names[-1], 2, given.pop("extractor"), given.pop("classifier"), **given)


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
            loss, params = GAMMA * penalty - distance(still), list(critic.parameters())
            gradients = torch.autograd.grad(loss, params, materialize_grads=True)
            with torch.no_grad():
                torch._foreach_sub_(params, [RATE * gradient for gradient in gradients])
        task = sum(F.cross_entropy(network.classifier(features[n]), data[n].tensors[1]) for n in NAMES[:-1]) / 2
        learnt = [*network.extractor.parameters(), *network.classifier.parameters()]
        gradients = torch.autograd.grad(task + LAMBDA * distance(features), learnt)
        with torch.no_grad():
            torch._foreach_sub_(learnt, [LR * 2 / 3 * gradient for gradient in gradients])
    for name in NAMES:
        for key, value in weights(module, name).items():
            torch.testing.assert_close(value, network.state_dict()[key], atol=1e-10, rtol=0)


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
    fit(module, data, rounds=60)
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
