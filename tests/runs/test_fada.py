"""FADA: identifiers and extractors against steps by hand, its attention against clusters, and identities."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from adversaries import LR, NAMES, Extractor, fit, shifted
from fedlit.federation import ChannelError, Schedule
from fedlit.functional import intra_cluster_distance, k_means, relative_scatter
from fedlit.methods import FADA, FedAvg
from fedlit.models.disentangling import DISENTANGLING
from fedlit.privacy import GaussianMechanism
from helpers import batches_of, descend_, loader, same, trainer, weights

LAMBDA, RATE = 0.6, 0.2


def fada(names: list[str] | None = None, method: type[FADA] = FADA, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    names = NAMES if names is None else names
    given: dict[str, Any] = {"identifier_weight": LAMBDA, "identifier_lr": RATE, "hidden": 6}
    given |= {"extractor": Extractor(), "classifier": nn.Linear(4, 2).double(), "weighting": "uniform"}
    given |= {"optimizer": lambda params: SGD(params, lr=LR)} | kwargs
    return method(names, names[-1], 2, given.pop("extractor"), given.pop("classifier"), **given)


def network(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith(("extractor.", "classifier."))}


@pytest.mark.parametrize("reverse", ["target", "both"])
def test_local_steps_are_those_of_equations_4_and_5(reverse: str) -> None:
    """Three steps in one round, in which c1 has a batch in the first two; attention is uniform."""
    data = shifted((24, 16, 24))
    module = fada(reverse=reverse, attention="uniform")
    start: Any = fit(module, data, batch_size=8)
    nets, identifiers = copy.deepcopy(start), {n: copy.deepcopy(start[n].discriminator[0]) for n in NAMES[:-1]}
    batches = {n: batches_of(data, n) for n in NAMES}
    for step in range(3):
        there = [n for n in NAMES[:-1] if step < len(batches[n])]
        features = {n: nets[n].extractor(batches[n][step][0]) for n in (*there, "c2")}
        still = {n: own.detach() for n, own in features.items()}
        for n in there:
            d = identifiers[n]
            real, fake = d(still[n]), d(still["c2"])
            bce = F.binary_cross_entropy_with_logits
            loss = (bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))) / 2
            descend_(loss, d.parameters(), RATE)
        misled = torch.stack([-identifiers[n](features["c2"]).sigmoid().log().mean() for n in there]).mean()
        total = LAMBDA * misled
        for n in there:
            total = total + F.cross_entropy(nets[n].classifier(features[n]), batches[n][step][1])
            if reverse == "both":
                total = total - LAMBDA * (1 - identifiers[n](features[n]).sigmoid()).log().mean()
        parts = [part for n in (*there, "c2") for part in (nets[n].extractor, nets[n].classifier)]
        descend_(total, [param for part in parts for param in part.parameters()], LR)
    ends = {n: network(net.state_dict()) for n, net in nets.items()}
    for name, before in network(start["c2"].state_dict()).items():
        expected = ends["c2"][name] + (ends["c0"][name] + ends["c1"][name]) / 2 - before
        for client in NAMES:
            torch.testing.assert_close(weights(module, client)[name], expected, atol=1e-10, rtol=0)
    for place, n in enumerate(NAMES[:-1]):
        for copied in (module.replicas[n].discriminator[0], module.replicas["c2"].discriminator[place]):
            torch.testing.assert_close(copied.state_dict(), identifiers[n].state_dict(), atol=1e-10, rtol=0)


class Normed(nn.Sequential):
    """With statistics, of which a sum of changes would have variances below 0."""

    out_features = 4

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=0.9))
        self.double()


@pytest.mark.parametrize("extractor", [Extractor, Normed])
def test_without_an_adversary_and_with_uniform_attention_it_is_fedavg(extractor: type[nn.Module]) -> None:
    data = shifted((24, 16, 24))
    torch.manual_seed(0)
    networks = extractor(), nn.Linear(4, 2).double()
    module = fada(attention="uniform", identifier_weight=0.0, extractor=networks[0], classifier=networks[1])
    fit(module, data, batch_size=8, rounds=3)
    plain = FedAvg(NAMES, "c2", 2, *networks, weighting="uniform", optimizer=lambda params: SGD(params, lr=LR))
    fit(plain, data, batch_size=8, rounds=3)
    for name in NAMES:
        for key, value in weights(plain, name).items():
            if not key.endswith("num_batches_tracked"):  # the target counts its own
                torch.testing.assert_close(weights(module, name)[key], value, atol=1e-10, rtol=0)


def test_both_sides_keep_one_identifier_whoever_is_away() -> None:
    presence = [["c0", "c2"], ["c0", "c1"], ["c0", "c1", "c2"]]
    module = fada()
    start = fit(module, shifted((24, 16, 20)), batch_size=8, rounds=3, strategy={"participation": Schedule(presence)})
    for place, name in enumerate(NAMES[:-1]):
        own, targets = module.replicas[name].discriminator[0], module.replicas["c2"].discriminator[place]
        assert same(own.state_dict(), targets.state_dict())
        assert not torch.equal(own[0].weight, start[name].discriminator[0][0].weight)


def test_noise_and_aligned_magnitudes_are_refused_together() -> None:
    """Learning rates are sent beside an update, which noise would drown."""
    mechanism = {"update": GaussianMechanism(clip_norm=10.0, noise_multiplier=1e-9)}
    given = {"batch_size": 8, "strategy": {"differential_privacy": mechanism}}
    with pytest.raises(ChannelError, match=r"cannot blur channel 'update'.*take align_magnitudes=False"):
        fit(fada(align_magnitudes=True), shifted((24, 16, 20)), **given)
    fit(fada(), shifted((24, 16, 20)), **given)


# -------------------------------------------------------------------- equations 6 to 8

MI = 0.4


def disentangling_step(net: Any, x: Tensor, y: Tensor) -> None:
    """A step by hand, in which each network has a loss of its own."""
    extractor, classifier, split, judge = net.extractor, net.classifier, net.disentangler, net.class_identifier
    features = extractor(x)
    invariant, specific = split(features).chunk(2, dim=1)
    labels = F.cross_entropy(classifier(features), y) + F.cross_entropy(classifier(invariant), y)
    uniform = F.cross_entropy(judge(specific), torch.full((len(x), 2), 0.5, dtype=torch.float64))
    still = features.detach()
    parts = split(still).chunk(2, dim=1)
    rebuilt = (net.reconstructor(torch.cat(parts, dim=1)) - still).square().mean()
    before = [len(x) - 1, *range(len(x) - 1)]
    own, others = net.estimator(torch.cat(parts, dim=1)), net.estimator(torch.cat([parts[0], parts[1][before]], dim=1))
    information = own.mean() - others.exp().mean().log() if len(x) > 1 else 0 * own.mean()
    losses = {
        extractor: labels + uniform,
        classifier: labels,
        split: F.cross_entropy(classifier(invariant), y) + uniform + rebuilt + MI * information,
        judge: F.cross_entropy(judge(specific), y),
        net.reconstructor: rebuilt,
        net.estimator: -information,
    }
    steps = [torch.autograd.grad(loss, list(own.parameters()), retain_graph=True) for own, loss in losses.items()]
    with torch.no_grad():
        for own, gradients in zip(losses, steps, strict=True):
            torch._foreach_sub_(list(own.parameters()), [LR * gradient for gradient in gradients])


@pytest.mark.parametrize("batch_size", [8, 1])
def test_sources_that_disentangle_take_steps_by_equations_6_to_8(batch_size: int) -> None:
    """The target's network moves by the mean of what they change; a batch of one has no equation 8."""
    data = shifted((3 * batch_size, 2 * batch_size, batch_size))
    module = fada(disentangle=True, mi_weight=MI, attention="uniform", identifier_weight=0.0)
    start: Any = fit(module, data, batch_size=batch_size)
    nets = {name: copy.deepcopy(start[name]) for name in NAMES[:-1]}
    for name, net in nets.items():
        for x, y in batches_of(data, name, batch_size=batch_size):
            disentangling_step(net, x, y)
    for key, before in network(start["c2"].state_dict()).items():
        expected = (nets["c0"].state_dict()[key] + nets["c1"].state_dict()[key]) / 2
        torch.testing.assert_close(weights(module, "c2")[key], expected, atol=1e-10, rtol=0)
        assert not torch.equal(before, expected)
    for name, net in nets.items():
        parts = {key: value for key, value in net.state_dict().items() if key.startswith(DISENTANGLING)}
        assert {key.split(".")[0] + "." for key in parts} == {*DISENTANGLING}
        for key, value in parts.items():
            torch.testing.assert_close(weights(module, name)[key], value, atol=1e-10, rtol=0)
            alone = key.startswith("estimator.") and batch_size == 1
            if key.endswith("weight"):  # the last bias moves both means of equation 8 alike
                assert torch.equal(value, start[name].state_dict()[key]) == alone


def test_what_disentangles_is_at_the_sources_alone_and_nothing_more_is_sent() -> None:
    sent = []
    for disentangle in (False, True):
        module = fada(disentangle=disentangle)
        fit(module, shifted((24, 16, 24)), batch_size=8, rounds=2)
        sent.append([vars(entry) for entry in module.federation.ledger])
    assert sent[0] == sent[1]
    parts = {name: {key.split(".")[0] for key in weights(module, name)} for name in NAMES}
    assert parts["c0"] - parts["c2"] == {part.rstrip(".") for part in DISENTANGLING}
    assert not parts["c2"] - parts["c0"]


class Looking(FADA):
    """Keeps the target's samples that attention looks at."""

    def features(self, inputs: Any, update: Any) -> Tensor:
        self.seen = inputs
        return super().features(inputs, update)


def settled(module: FADA, data: dict[str, TensorDataset]) -> FADA:
    """A module between rounds whose data are loaded."""
    trainer(1).fit(module, loader(data, 64))
    return module


def test_attention_is_the_softmax_of_what_each_update_gains_by_itself() -> None:
    data = shifted((20, 17, 40))
    module = settled(fada(method=Looking), data)
    replica = module.replicas["c2"]
    generator = torch.Generator().manual_seed(0)
    state = module.weights_of(module.target)
    updates = {
        name: {k: 0.5 * torch.randn(v.shape, generator=generator).to(v) for k, v in state.items()}
        for name in NAMES[:-1]
    }

    def features(update: dict[str, Tensor] | None = None) -> Tensor:
        moved = copy.deepcopy(replica)
        if update is not None:
            moved.load_state_dict({k: v + update[k] for k, v in network(replica.state_dict()).items()}, strict=False)
        return moved.extractor(module.seen).detach()

    for attention, measure in (("relative", relative_scatter), ("paper", intra_cluster_distance)):
        module.attention, module.temperature = attention, 0.05 if attention == "relative" else 1.0  # type: ignore[assignment]
        weighed = module.weigh(updates)
        before = k_means(features(), 2, seed=module.federation.seed)
        gains = []
        for update in updates.values():
            moved = features(update)
            gains.append(float(measure(features(), before) - measure(moved, k_means(moved, 2, start=before))))
        powers = [math.exp(gain / module.temperature) for gain in gains]
        expected = {name: power / sum(powers) for name, power in zip(updates, powers, strict=True)}
        assert weighed == pytest.approx(expected, rel=1e-9)
        assert abs(gains[0] - gains[1]) > 1e-3
        assert module.weigh(dict.fromkeys(updates, updates["c0"])) == {"c0": 0.5, "c1": 0.5}
        assert module.weigh({"c0": updates["c0"]}) == {"c0": 1.0}
        assert module.weigh({}) == {}


def test_too_few_samples_for_clusters_mean_equal_attention_and_a_warning() -> None:
    data = shifted((20, 17, 4))
    module = FADA(NAMES, "c2", 5, Extractor(), nn.Linear(4, 5).double(), attention_samples=5)
    with pytest.warns(UserWarning, match="4 samples"):
        fit(module, data)


def test_the_attention_is_logged_and_a_step_has_one_exchange() -> None:
    data, calls = shifted((24, 24, 24)), []
    for batch_size in (24, 8):
        module = fada()
        run = trainer(1)
        run.fit(module, loader(data, batch_size))
        calls.append(module.federation.state_dict()["calls"])
        told = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("attention/")}
        assert sorted(told) == ["attention/c0", "attention/c1"]
        assert sum(told.values()) == pytest.approx(1)
    assert calls[1] - calls[0] == 2  # 3 steps in place of 1
