"""FedDA and FedGP: rounds against Algorithm 1 written out by hand, what is sent to whom, and the hidden rule."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from helpers import loader, same, shards, trainer, weights

from fedlit import Client, FederatedModule
from fedlit.federation import DivergedError, Federation, RosterError, Schedule
from fedlit.functional import auto_beta
from fedlit.methods import FedDA, FedGP, SourceOnly, TargetOnly
from fedlit.privacy import (
    BFV,
    CKKS,
    AffineGrid,
    CKKSAffine,
    FixedPoint,
    GaussianMechanism,
    Paillier,
    PaillierAffine,
    PairwiseMasking,
    PlainAffine,
)

Update = dict[str, Tensor]

LR = 0.1
NAMES = ["c0", "c1", "c2"]  # the last is the target
SIZES = [40, 21, 27]  # 5, 3 and 4 batches of 8
W, B = "classifier.weight", "classifier.bias"
STATISTICS = ("running_mean", "running_var")


def roster(num_clients: int = 3, labelled: bool = True) -> list[Client | str]:
    """Sources, and a target that knows its labels."""
    names: list[Client | str] = [f"c{i}" for i in range(num_clients - 1)]
    return [*names, Client(f"c{num_clients - 1}", role="target", labelled=labelled)]


def build(method: type[FedDA] = FedGP, clients: Sequence[Client | str] | None = None, **kwargs: Any) -> Any:
    """Logistic regression of 5 numbers; the last client is the target."""
    torch.manual_seed(0)
    given = roster() if clients is None else list(clients)
    target = next(client.name for client in given if isinstance(client, Client))
    network = {"extractor": nn.Identity(), "classifier": nn.Linear(5, 2)}
    kwargs.setdefault("optimizer", lambda params: SGD(params, lr=LR))
    return method(given, target, 2, **(network | kwargs))


def unequal(seed: int = 0) -> dict[str, TensorDataset]:
    """Clients of different sizes; c0 is labelled much as the target is, c1 by another rule."""
    generator = torch.Generator().manual_seed(seed)
    rules = torch.tensor([[1.0, 1, 1, 0.5, 1], [1, -1, 0, 1, -0.5], [1, 1, 1, 1, 1]])
    data = {}
    for name, size, rule in zip(NAMES, SIZES, rules, strict=True):
        x = torch.randn(size, 5, generator=generator)
        noise = 0.5 * torch.randn(size, generator=generator)
        data[name] = TensorDataset(x, (x @ rule + noise > 0).long())
    return data


class Snapshots(pl.Callback):
    """Copies of all clients' weights, and of what is logged: at the start, and after each round."""

    def __init__(self) -> None:
        self.start: dict[str, Update] = {}
        self.rounds: list[dict[str, Update]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, module: FederatedModule) -> None:  # type: ignore[override]
        self.start = {name: weights(module, name) for name, _ in module.replicas.named_children()}

    def on_round_end(self, trainer: pl.Trainer, module: FederatedModule, round_idx: int) -> None:
        self.rounds.append({name: weights(module, name) for name, _ in module.replicas.named_children()})
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(
    module: FederatedModule,
    data: dict[str, TensorDataset] | None = None,
    rounds: int = 1,
    batch_size: int = 8,
    **kwargs: Any,
) -> Snapshots:
    snapshots = Snapshots()
    run = trainer(rounds, [snapshots, *kwargs.pop("callbacks", [])], **kwargs)
    run.fit(module, loader(unequal() if data is None else data, batch_size))
    return snapshots


def talk(module: FederatedModule, channel: str, round_idx: int | None = None) -> list[tuple[str, str]]:
    """Who sent to whom over a channel."""
    return [
        (entry.sender, entry.receiver)
        for entry in module.federation.ledger
        if entry.channel == channel and round_idx in (None, entry.round_idx)
    ]


# -------------------------------------------------------------------- Algorithm 1 by hand, in float64


@dataclass
class Local:
    """What one client has done in a round: its update, its learning rates, and its batches' gradients at the start."""

    update: Update
    rates: list[float] = field(default_factory=list)
    gradients: list[Update] = field(default_factory=list)

    @property
    def path(self) -> float:
        return math.fsum(self.rates)


@dataclass(frozen=True)
class Settings:
    """What the rule is given, with the defaults of the methods."""

    method: type[FedDA]
    beta: Any = 0.5
    weighting: str = "uniform"
    granularity: str = "layer"
    projection: str = "orthogonal"
    residual: str = "isotropic"
    align_magnitudes: bool = False
    target_lr_ratio: float = 1.0
    warmup_rounds: int = 0

    @property
    def kwargs(self) -> dict[str, Any]:
        own = {"beta", "weighting", "align_magnitudes", "target_lr_ratio", "warmup_rounds"}
        more = {"granularity", "projection", "residual"} if issubclass(self.method, FedGP) else set()
        return {name: value for name, value in vars(self).items() if name in own | more}


def train_by_hand(start: Update, batches: Iterator[Any], rates: Iterator[float], clip: float | None = None) -> Local:
    """Plain gradient steps of logistic regression."""
    state, local = {name: tensor.clone() for name, tensor in start.items()}, Local({})

    def gradient(at: Update, x: Tensor, y: Tensor) -> Update:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in at.items()}
        loss = F.cross_entropy(x @ leaves[W].T + leaves[B], y)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    for (x, y), rate in zip(batches, rates, strict=False):
        gradients = gradient(state, x, y)
        norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in gradients.values()))
        shrink = 1.0 if clip is None else min(1.0, clip / norm)
        state = {name: tensor - rate * shrink * gradients[name] for name, tensor in state.items()}
        local.rates.append(rate)
        local.gradients.append({name: -tensor.double() for name, tensor in gradient(start, x, y).items()})
    local.update = {name: (state[name] - start[name]).double() for name in state}
    return local


def vector(update: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([update[name].detach().double().flatten() for name in names])


def groups_of(update: Mapping[str, Tensor], settings: Settings) -> list[list[str]]:
    """Names that are projected together; running statistics are not projected."""
    layers = [name for name in update if not name.endswith(STATISTICS)]
    by_layer = issubclass(settings.method, FedGP) and settings.granularity == "layer"
    return [[name] for name in layers] if by_layer else [layers]


def scale_of(source: Local, target: Local, settings: Settings) -> float:
    return target.path / source.path if settings.align_magnitudes else 1.0


def rule_by_hand(locals_: Mapping[str, Local], betas: Mapping[str, float], shares: Mapping[str, float],
                 settings: Settings) -> Update:  # fmt: skip
    """Definition 4.1 or 4.3, or appendix C.9 with beta at the source; the target is the last client."""
    target = locals_[NAMES[-1]]
    statistics = [[name] for name in target.update if name.endswith(STATISTICS)]
    step: Update = {}
    for names in [*groups_of(target.update, settings), *statistics]:
        t = vector(target.update, names)
        total = torch.zeros_like(t)
        for source, beta in betas.items():
            s = vector(locals_[source].update, names)
            if names not in statistics:
                s = s * scale_of(locals_[source], target, settings)
                cosine = float(t @ s) / (float(t.norm() * s.norm()) or 1.0)
                if settings.projection == "cosine":
                    s = max(cosine, 0.0) * s
                elif issubclass(settings.method, FedGP):
                    s = max(cosine, 0.0) * float(t.norm()) / (float(s.norm()) or 1.0) * s
            total += shares[source] * ((1 - beta) * t + beta * s)
        parts = torch.split(total, [target.update[name].numel() for name in names])
        step |= {name: part.view_as(target.update[name]) for name, part in zip(names, parts, strict=True)}
    return step


@dataclass
class Estimates:
    variance: float
    distance: dict[str, float] = field(default_factory=dict)
    residual: dict[str, float] = field(default_factory=dict)
    beta: dict[str, float] = field(default_factory=dict)


def estimates_by_hand(
    locals_: Mapping[str, Local],
    sources: Sequence[str],
    settings: Settings,
    variance: float | None = None,
) -> Estimates:
    """Appendix A.5, from all the target's batch gradients at once, and updates over its learning rates.

    The update has the noise of the mean gradient at the round's start, in proportion to its length; of the exact
    residual, what is left of each gradient off the source's directions.
    """
    target = locals_[NAMES[-1]]
    names = [name for name in target.update if not name.endswith(STATISTICS)]
    g = vector(target.update, names) / target.path
    width = len(g)
    if variance is None:
        rows = torch.stack([vector(gradient, names) for gradient in target.gradients])
        noise = float(rows.var(dim=0).sum()) / len(rows)
        unit = float(g.square().sum()) / float(rows.mean(dim=0).square().sum())
        variance = noise * unit
    found = Estimates(variance)
    for source in sources:
        scale = scale_of(locals_[source], target, settings) / target.path
        s = scale * vector(locals_[source].update, names)
        found.distance[source] = float((s - g).square().sum()) - variance
        basis = []  # unit vectors of the source's directions
        start = 0
        for group in groups_of({name: target.update[name] for name in names}, settings):
            length = sum(target.update[name].numel() for name in group)
            direction = torch.zeros(width, dtype=torch.float64)
            direction[start : start + length] = s[start : start + length]
            basis.append(direction / direction.norm())
            start += length
        q = torch.stack(basis)
        across = 1 - len(q) / width
        if settings.residual == "exact":
            left = rows - rows @ q.T @ q
            across = float(left.var(dim=0).sum()) / float(rows.var(dim=0).sum())
        found.residual[source] = float((g - q.T @ (q @ g)).square().sum()) - across * variance
        apart = found.residual[source] if issubclass(settings.method, FedGP) else found.distance[source]
        given = settings.beta
        if given == "auto":
            found.beta[source] = variance / (variance + max(apart, 0.0))
        else:
            found.beta[source] = given[source] if isinstance(given, dict) else given
    return found


def shares_of(sources: Sequence[str], settings: Settings) -> dict[str, float]:
    sizes = dict(zip(NAMES, SIZES, strict=True))
    raw = {name: float(sizes[name]) if settings.weighting == "samples" else 1.0 for name in sources}
    return {name: weight / sum(raw.values()) for name, weight in raw.items()}


def rounds_by_hand(
    start: Update, settings: Settings, rounds: int, clip: float | None = None, rates: Any = None
) -> tuple[Update, Estimates]:
    """All weights after some rounds of everybody, and the estimates of the last one."""
    data = unequal()
    reference = loader(data)
    state, found = {name: tensor.clone() for name, tensor in start.items()}, Estimates(math.nan)
    given: dict[str, Iterator[float]] = {}
    for name in NAMES:
        ratio = settings.target_lr_ratio if name == "c2" else 1.0
        given[name] = itertools.repeat(LR * ratio) if rates is None else rates(name, ratio)
    for round_idx in range(rounds):
        warming_up = round_idx < settings.warmup_rounds
        locals_ = {}
        for name in NAMES[:-1] if warming_up else NAMES:
            batches = reference._reader(name).read(round_idx, 0, 99)
            locals_[name] = train_by_hand(state, batches, given[name], clip)
        shares = shares_of(NAMES[:-1], settings)
        if warming_up:
            step = {name: sum(shares[s] * locals_[s].update[name] for s in NAMES[:-1]) for name in state}
        else:
            found = estimates_by_hand(locals_, NAMES[:-1], settings)
            step = rule_by_hand(locals_, found.beta, shares, settings)
        state = {name: (tensor.double() + step[name]).float() for name, tensor in state.items()}
    return state, found


PER_SOURCE = {"c0": 0.3, "c1": 0.9}
FAST = {"target_lr_ratio": 0.4, "align_magnitudes": True}

FIXED = {
    "FedDA": Settings(FedDA),
    "FedDA, samples": Settings(FedDA, weighting="samples", target_lr_ratio=0.4),
    "FedDA, a beta per source": Settings(FedDA, beta=PER_SOURCE, weighting="samples"),
    "FedDA, aligned": Settings(FedDA, beta=0.7, **FAST),
    "FedGP by layer": Settings(FedGP),
    "FedGP by model": Settings(FedGP, granularity="model", target_lr_ratio=0.4),
    "FedGP, a beta per source": Settings(FedGP, beta=PER_SOURCE, weighting="samples"),
    "FedGP, aligned": Settings(FedGP, **FAST),
    "cosine by layer, aligned": Settings(FedGP, beta=PER_SOURCE, projection="cosine", **FAST),
    "cosine by model": Settings(FedGP, beta=0.3, projection="cosine", granularity="model", weighting="samples"),
    "FedGP after a warm-up": Settings(FedGP, warmup_rounds=1, weighting="samples"),
    "beta 0": Settings(FedGP, beta=0),
    "beta 1": Settings(FedDA, beta=1),
}
AUTO = {
    "FedDA auto": Settings(FedDA, beta="auto"),
    "FedDA auto, aligned": Settings(FedDA, beta="auto", weighting="samples", **FAST),
    "FedGP auto": Settings(FedGP, beta="auto"),
    "FedGP auto by model": Settings(FedGP, beta="auto", granularity="model", weighting="samples", **FAST),
    "FedGP auto, exact": Settings(FedGP, beta="auto", residual="exact"),
    "FedGP auto, exact by model": Settings(FedGP, beta="auto", residual="exact", granularity="model", **FAST),
    "FedGP auto, cosine": Settings(FedGP, beta="auto", projection="cosine", warmup_rounds=1, **FAST),
}


@pytest.mark.parametrize("case", [*FIXED, *AUTO])
def test_rounds_equal_the_algorithm_by_hand(case: str) -> None:
    """Also what is logged: beta, sigma^2, d^2 and tau of the last round."""
    settings = (FIXED | AUTO)[case]
    module = build(settings.method, **settings.kwargs)
    snapshots = fit(module, rounds=3)
    expected, found = rounds_by_hand(snapshots.start["c2"], settings, 3)
    for name in NAMES:
        for key in (W, B):
            torch.testing.assert_close(snapshots.rounds[-1][name][key], expected[key], atol=2e-6, rtol=1e-5)
            assert torch.equal(snapshots.rounds[-1][name][key], snapshots.rounds[-1]["c2"][key])
    assert float((expected[W] - snapshots.start["c2"][W]).abs().max()) > 1e-2
    logged, shares = snapshots.metrics[-1], shares_of(NAMES[:-1], settings)
    assert logged["beta"] == pytest.approx(sum(shares[name] * found.beta[name] for name in shares), rel=1e-3)
    assert logged["target_variance"] == pytest.approx(found.variance, rel=1e-4)
    for name in NAMES[:-1]:
        # differences of larger numbers, from weights in float32
        assert logged[f"beta/{name}"] == pytest.approx(found.beta[name], rel=1e-3)
        assert logged[f"distance/{name}"] == pytest.approx(found.distance[name], rel=1e-3, abs=1e-5)
        if found.distance[name] > 0:
            tau = min(1.0, math.sqrt(max(found.residual[name], 0.0) / found.distance[name]))
            assert logged[f"tau/{name}"] == pytest.approx(tau, rel=2e-3, abs=1e-3)
    if settings.beta == "auto":
        assert any(0.01 < beta < 0.99 for beta in found.beta.values()), found.beta


def test_auto_weights_are_those_of_the_function_where_steps_are_small() -> None:
    """Then the target's update is the mean of its gradients at the start, and the exact residual is `auto_beta`."""
    slow = 1e-3
    for granularity in ("layer", "model"):
        settings = Settings(FedGP, beta="auto", residual="exact", granularity=granularity)
        module = build(FedGP, optimizer=lambda params: SGD(params, lr=slow), **settings.kwargs)
        snapshots = fit(module)
        reference, state = loader(unequal()), {key: snapshots.start["c2"][key] for key in (W, B)}
        rate = itertools.repeat(slow)
        locals_ = {name: train_by_hand(state, reference._reader(name).read(0, 0, 99), rate) for name in NAMES}
        sources = [
            {key: tensor / locals_["c2"].path for key, tensor in locals_[name].update.items()} for name in NAMES[:-1]
        ]
        found = auto_beta(locals_["c2"].gradients, sources, "fedgp", granularity)  # type: ignore[arg-type]
        for index, name in enumerate(NAMES[:-1]):
            logged = snapshots.metrics[0]
            assert logged[f"beta/{name}"] == pytest.approx(float(found.beta[index]), rel=2e-2)
            assert logged[f"distance/{name}"] == pytest.approx(float(found.distance[index]), rel=2e-2)


def test_the_residuals_differ_and_agree_where_noise_is_isotropic() -> None:
    """Isotropic and exact are two estimates: they differ on one round's data, but not in the step's other parts."""
    one, other = (fit(build(beta="auto", residual=residual)).metrics[0] for residual in ("isotropic", "exact"))
    assert one["beta/c1"] != other["beta/c1"]
    for key in ("target_variance", "distance/c0", "distance/c1"):
        assert one[key] == pytest.approx(other[key], rel=1e-4)


def test_a_source_that_opposes_the_target_adds_nothing() -> None:
    """Card 6: with <g_T, g_S> <= 0, the result is (1 - beta) g_T."""
    data = unequal()
    for name in ("c0", "c1"):
        x, y = data["c2"].tensors
        data[name] = TensorDataset(x, 1 - y)
    module = build(beta=0.75, classifier=_zero_layer())
    alone = build(TargetOnly, classifier=_zero_layer())
    ours, theirs = fit(module, data, batch_size=64), fit(alone, data, batch_size=64)
    for key in (W, B):
        torch.testing.assert_close(ours.rounds[0]["c2"][key], 0.25 * theirs.rounds[0]["c2"][key], atol=1e-7, rtol=1e-5)


def _zero_layer() -> nn.Linear:
    layer = nn.Linear(5, 2)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


# -------------------------------------------------------------------- optimisers, schedules, networks


class Noted:
    """Keeps, for each round, what its rule was given and what it gave."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes: list[tuple[dict[str, Local], Update]] = []
        self.counts: list[dict[str, float]] = []

    def move_to_(self, step: Update) -> None:
        given = {}
        for client in self.federation.local_clients:  # type: ignore[attr-defined]
            memory = self.memory(client)  # type: ignore[attr-defined]
            update = {name: tensor.double() for name, tensor in self.update(client).items()}  # type: ignore[attr-defined]
            given[client.name] = Local(update, [memory.path], [dict(gradient) for gradient in memory.gradients])
        statistics, target = self.memory(self.target).statistics, given[self.target.name]  # type: ignore[attr-defined]
        variance = math.nan
        if statistics.count > 1 and target.path:
            names = list(statistics.mean)
            lengths = [float(vector(u, names).square().sum()) for u in (target.update, statistics.mean)]
            variance = statistics.variance / statistics.count / lengths[1] * lengths[0] / target.path**2
        self.counts.append({"batches": statistics.count, "variance": variance})
        self.notes.append((given, {name: tensor.clone() for name, tensor in step.items()}))
        super().move_to_(step)  # type: ignore[misc]


class NotedDA(Noted, FedDA):
    """FedDA with notes."""


class NotedGP(Noted, FedGP):
    """FedGP with notes."""


def noted(method: type[FedDA]) -> type[Any]:
    return NotedGP if issubclass(method, FedGP) else NotedDA


def normalised() -> dict[str, Any]:
    """A network with BatchNorm, whose statistics start far from the data's."""
    norm = nn.BatchNorm1d(6)
    norm.running_var.fill_(3.0)  # type: ignore[union-attr]
    return {"extractor": nn.Sequential(nn.Linear(5, 6), norm, nn.ReLU()), "classifier": nn.Linear(6, 2)}


@pytest.mark.parametrize("case", ["FedDA", "FedDA, aligned", "FedGP by layer", "FedGP by model",
                                  "cosine by layer, aligned", "FedGP, aligned"])  # fmt: skip
@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
def test_batchnorm_statistics_are_averaged_and_neither_projected_nor_aligned(case: str, hidden: bool) -> None:
    settings = FIXED[case]
    module = build(noted(settings.method), **settings.kwargs, **normalised())
    # a bound that the running variances stay below
    strategy = {"privacy": PairwiseMasking(FixedPoint(20, 64.0))} if hidden else {}
    snapshots = fit(module, rounds=2, strategy=strategy)
    for given, step in module.notes:
        expected = rule_by_hand(given, settings_betas(settings), shares_of(NAMES[:-1], settings), settings)
        assert step.keys() == expected.keys()
        assert any(name.endswith("running_var") for name in step)
        for name, tensor in expected.items():
            torch.testing.assert_close(step[name].double(), tensor, atol=2e-6, rtol=1e-5, msg=name)
    last = snapshots.rounds[-1]
    for name, tensor in last["c2"].items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(last["c0"][name], tensor), name
    # counters stay at home and go on counting
    counts = [int(last[name]["extractor.1.num_batches_tracked"]) for name in NAMES]
    assert counts == [10, 6, 8]


def settings_betas(settings: Settings) -> dict[str, float]:
    given = settings.beta
    return {name: given[name] if isinstance(given, dict) else given for name in NAMES[:-1]}


@pytest.mark.parametrize("beta", [0.5, "auto"])
def test_local_normalisation_layers_are_trained_and_kept_and_no_part_of_the_rule(beta: Any) -> None:
    module = build(NotedGP, beta=beta, residual="exact", local_norm=True, **normalised())
    snapshots = fit(module, rounds=2)
    given, step = module.notes[-1]
    names = ["extractor.0.weight", "extractor.0.bias", W, B]
    assert list(step) == names
    assert all(list(local.update) == names for local in given.values())
    assert all(list(gradient) == names for gradient in given["c2"].gradients)
    last = snapshots.rounds[-1]
    assert all(torch.equal(last["c0"][name], last["c2"][name]) for name in names)
    for kind in ("weight", "running_mean"):
        assert not torch.equal(last["c0"][f"extractor.1.{kind}"], last["c2"][f"extractor.1.{kind}"])
    assert module._num_parameters == 6 * 5 + 6 + 12 + 2


@pytest.mark.parametrize("case", ["FedGP auto", "FedDA auto, aligned"])
def test_clipping_shortens_updates_and_leaves_their_relative_noise(case: str) -> None:
    """That is estimated from gradients at the round's start, which no step is made of."""
    settings = AUTO[case]
    module = build(settings.method, **settings.kwargs)
    snapshots = fit(module, rounds=2, gradient_clip_val=0.3)
    expected, found = rounds_by_hand(snapshots.start["c2"], settings, 2, clip=0.3)
    torch.testing.assert_close(snapshots.rounds[-1]["c0"][W], expected[W], atol=2e-6, rtol=1e-5)
    assert snapshots.metrics[-1]["target_variance"] == pytest.approx(found.variance, rel=1e-4)
    _, unclipped = rounds_by_hand(snapshots.start["c2"], settings, 2)
    assert found.variance < 0.8 * unclipped.variance  # the clip bites


def test_looking_at_gradients_of_the_start_leaves_training_alone() -> None:
    """Neither BatchNorm's statistics nor the random numbers of dropout see the second forward pass."""

    class Blind(NotedDA):
        def observe_(self, samples: Sequence[Any]) -> None:
            """See nothing."""

    def network() -> dict[str, Any]:
        torch.manual_seed(4)
        return {
            "extractor": nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)),
            "classifier": nn.Linear(6, 2),
        }

    runs = [fit(build(method, target_lr_ratio=2.0, **network()), rounds=2) for method in (Blind, NotedDA)]
    assert "target_variance" in runs[1].metrics[-1]
    for name in NAMES:
        assert same(runs[0].rounds[-1][name], runs[1].rounds[-1][name])


@pytest.mark.parametrize("interval", ["step", "round"])
@pytest.mark.parametrize("case", ["FedDA auto, aligned", "FedGP auto", "cosine by layer, aligned"])
def test_schedules_keep_the_ratio_of_learning_rates_and_steps_are_divided_by_their_own(
    case: str, interval: str
) -> None:
    settings = (FIXED | AUTO)[case]
    module = build(
        settings.method,
        **settings.kwargs,
        lr_scheduler=lambda optimizer: StepLR(optimizer, 1, 0.8),
        schedule_interval=interval,
    )
    snapshots = fit(module, rounds=2)
    steps = dict(zip(NAMES, (5, 3, 4), strict=True))

    def rates(name: str, ratio: float) -> Iterator[float]:
        return (LR * ratio * 0.8 ** (i if interval == "step" else i // steps[name]) for i in itertools.count())

    expected, found = rounds_by_hand(snapshots.start["c2"], settings, 2, rates=rates)
    for key in (W, B):
        torch.testing.assert_close(snapshots.rounds[-1]["c2"][key], expected[key], atol=2e-6, rtol=1e-5)
    assert snapshots.metrics[-1]["target_variance"] == pytest.approx(found.variance, rel=1e-4)


def test_a_step_over_several_batches_counts_once_but_each_batch_has_its_gradient() -> None:
    """Batches of c0, c1 and the target: 5, 3 and 4, so with 2 batches to a step 3, 2 and 2 steps."""
    module = build(NotedGP, beta="auto", target_lr_ratio=0.5)
    fit(module, rounds=2, accumulate_grad_batches=2)
    for (given, _), count in zip(module.notes, module.counts, strict=True):
        assert {name: local.path for name, local in given.items()} == pytest.approx({"c0": 0.3, "c1": 0.2, "c2": 0.1})
        assert count["batches"] == 4


def test_several_parameter_groups_of_a_client_are_one_step() -> None:
    """As with different weight decays for weights and biases."""

    class Parts(NotedGP):
        def client_param_groups(self) -> list[dict[str, Any]]:
            groups = []
            for client in self.federation.local_clients:
                weight, bias = self.replicas[client.name].parameters()
                groups += [{"params": [weight], "client": client.name}, {"params": [bias], "client": client.name}]
            return groups

    parts, whole = build(Parts, beta="auto"), build(NotedGP, beta="auto")
    ours, theirs = fit(parts, rounds=2), fit(whole, rounds=2)
    assert parts.counts == whole.counts
    assert [count["batches"] for count in parts.counts] == [4, 4]
    assert [given["c2"].path for given, _ in parts.notes] == pytest.approx([0.4, 0.4])
    assert same(ours.rounds[-1]["c2"], theirs.rounds[-1]["c2"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_vectorised_training_equals_one_client_at_a_time(accumulate: int) -> None:
    runs = [
        fit(build(beta="auto", vectorize=vectorize), rounds=3, accumulate_grad_batches=accumulate)
        for vectorize in (False, True)
    ]
    for key in (W, B):
        torch.testing.assert_close(runs[1].rounds[-1]["c2"][key], runs[0].rounds[-1]["c2"][key], atol=1e-5, rtol=1e-4)
    assert runs[1].metrics[-1]["target_variance"] == pytest.approx(runs[0].metrics[-1]["target_variance"], rel=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"beta": 0.5},
        {"beta": "auto"},
        {"beta": "auto", "residual": "exact"},
        {"beta": "auto", "granularity": "model"},
        {"beta": "auto", "align_magnitudes": True, "projection": "cosine"},
    ],
    ids=lambda arguments: ", ".join(str(value) for value in arguments.values()),
)
def test_frozen_parameters_stay_and_cost_the_rule_nothing(arguments: dict[str, Any]) -> None:
    """As if the frozen layer had been applied to the data: it is no direction, and no part of isotropic noise."""
    torch.manual_seed(1)
    frozen, head = nn.Linear(5, 6).requires_grad_(False), nn.Linear(6, 2)
    mapped = {name: TensorDataset(frozen(data.tensors[0]), data.tensors[1]) for name, data in unequal().items()}
    ours = fit(build(**arguments, extractor=frozen, classifier=head), rounds=2)
    theirs = fit(build(**arguments, classifier=head), mapped, rounds=2)
    assert torch.equal(ours.rounds[-1]["c2"]["extractor.weight"], ours.start["c2"]["extractor.weight"])
    for key in (W, B):
        torch.testing.assert_close(ours.rounds[-1]["c2"][key], theirs.rounds[-1]["c2"][key], atol=1e-6, rtol=1e-5)
    assert "tau/c1" in theirs.metrics[-1]
    assert ours.metrics[-1].keys() == theirs.metrics[-1].keys()
    for name, value in theirs.metrics[-1].items():
        assert ours.metrics[-1][name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
@pytest.mark.parametrize("method", [FedDA, FedGP])
def test_tied_weights_move_once(method: type[FedDA], hidden: bool) -> None:
    """One tensor under two names, as in an autoencoder: with beta 0 the step is the target's own."""

    def network() -> dict[str, Any]:
        torch.manual_seed(2)
        encoder, decoder = nn.Linear(5, 5), nn.Linear(5, 5)
        decoder.weight = encoder.weight
        return {"extractor": nn.Sequential(encoder, nn.Tanh(), decoder), "classifier": nn.Linear(5, 2)}

    strategy = {"privacy": PairwiseMasking()} if hidden else {}
    ours = fit(build(method, beta=0, **network()), strategy=strategy)
    theirs = fit(build(TargetOnly, **network()))
    assert float((theirs.rounds[0]["c2"]["extractor.0.weight"] - ours.start["c2"]["extractor.0.weight"]).norm()) > 1e-2
    for name, tensor in theirs.rounds[0]["c2"].items():
        torch.testing.assert_close(ours.rounds[0]["c2"][name], tensor, atol=2e-6, rtol=1e-5, msg=name)
    assert torch.equal(ours.rounds[0]["c2"]["extractor.0.weight"], ours.rounds[0]["c2"]["extractor.2.weight"])


# -------------------------------------------------------------------- the variance of the target's update


class Slope(NotedDA):
    """A loss that is linear in the weights, <x, theta>: the gradient of a batch is the mean of its x, wherever it is.

    Coordinates are independent, so that one run with m of them is m draws of the data.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[Tensor] = []  # of the target

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        return self.replicas[client.name](batch[0]).mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        before = weights(self, "c2")[W]
        super().optimizer_step(*args, **kwargs)
        self.steps.append((weights(self, "c2")[W] - before).flatten() / LR)


def slope(
    x: Tensor, optimizer: Any, rounds: int = 1, batch_size: int = 1, **kwargs: Any
) -> tuple[Slope, list[dict[str, float]]]:
    """A run of the target on samples ``x``, beside a source that is of no interest; with the logged metrics."""
    clients: list[Client | str] = ["c0", Client("c2", role="target", labelled=True)]
    classifier = nn.Linear(x.shape[1], 1, bias=False)
    module = build(Slope, clients, beta="auto", classifier=classifier, optimizer=optimizer)
    labels = torch.zeros(len(x), dtype=torch.long)
    data = {"c0": TensorDataset(x + 1, labels), "c2": TensorDataset(x, labels)}
    return module, fit(module, data, rounds, batch_size, **kwargs).metrics


def true_variance(module: Slope, round_idx: int) -> float:
    """Of the target's update over its learning rates, summed over coordinates; off by sqrt(2 / m) of itself."""
    local = module.notes[round_idx][0]["c2"]
    update = local.update[W].flatten() / local.path
    return float(update.var()) * len(update)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_logged_variance_is_that_of_the_update_under_momentum(momentum: float) -> None:
    r"""An update over its learning rates is sum_j w_j g_j / B, of true variance sigma^2 sum_j w_j^2 / B^2.

    In the first round w_j = (1 - m^(B-j+1)) / (1 - m); the second has the same samples again, and the velocity of the
    first, m^(B-j+1) (1 - m^B) / (1 - m) for its j-th sample. The estimate is
    sigma^2/B (A mu^2 + C sigma^2/B) / (mu^2 + sigma^2/B), with A = (mean w)^2 and C = mean w^2, for a true C sigma^2/B:
    their ratio lies between A/C and 1, up to 4 standard errors. The worst order of the samples has the largest C.
    """
    batches, width = 25, 2000
    x = 1 + torch.randn(batches, width, generator=torch.Generator().manual_seed(0))
    module, metrics = slope(x, lambda params: SGD(params, lr=LR, momentum=momentum), rounds=2)
    left = momentum ** torch.arange(batches, 0, -1, dtype=torch.float64)  # m^(B-j+1)
    own, carried = (1 - left) / (1 - momentum), left * (1 - momentum**batches) / (1 - momentum)
    error = 4 * math.sqrt(2 / width)
    for round_idx, factor in enumerate((own, own.sort().values + carried.sort().values)):
        least = float(factor.mean() ** 2 / factor.square().mean())
        ratio = metrics[round_idx]["target_variance"] / true_variance(module, round_idx)
        assert least > 0.75
        assert least * (1 - error) < ratio < 1 + error
    steps = torch.stack(module.steps[batches:])
    between_steps = float(steps.var(dim=0).sum()) / batches
    assert (between_steps < true_variance(module, 1) / 10) == (momentum > 0)  # what the published code takes


def test_the_logged_variance_is_that_of_the_update_under_adam() -> None:
    """Adam divides by a slowly changing root mean square, the same for signal and noise, after weights of momentum.

    With these alone the ratio is that of SGD with momentum, from 0.79 to 1. In the first round the root itself is
    noisy: the first steps are of length 1 whatever the gradient, which takes from the signal and the noise alike.
    """
    x = 0.5 + torch.randn(25, 2000, generator=torch.Generator().manual_seed(0))
    module, metrics = slope(x, lambda params: Adam(params, lr=LR, betas=(0.9, 0.999)), rounds=3)
    for round_idx in range(3):
        ratio = metrics[round_idx]["target_variance"] / true_variance(module, round_idx)
        assert 0.5 < ratio < 2, round_idx
    steps = torch.stack(module.steps[-25:])
    assert float(steps.var(dim=0).sum()) / 25 < true_variance(module, 2) / 5  # what the published code takes


@pytest.mark.parametrize("optimizer", [lambda params: SGD(params, lr=LR, momentum=0.9), lambda params: Adam(params)])
def test_samples_that_are_all_alike_have_no_variance_under_momentum(optimizer: Any) -> None:
    """Although steps grow from one to the next while momentum gathers."""
    x = torch.randn(1, 20, generator=torch.Generator().manual_seed(0)).expand(10, 20)
    module, (metrics,) = slope(x, optimizer)
    local = module.notes[0][0]["c2"]
    length = float(local.update[W].norm()) / local.path
    assert metrics["target_variance"] < 1e-10 * length**2
    assert metrics["beta"] < 1e-8


def test_repeated_passes_over_the_same_samples_tell_no_more() -> None:
    """n samples, each 4 times, are seen once."""
    n = 8
    x = torch.randn(n, 500, generator=torch.Generator().manual_seed(0))
    between = float(x.double().var(dim=0).sum())

    def variance(steps: int | None, **kwargs: Any) -> float:
        strategy = {} if steps is None else {"local_steps": steps}
        module, (metrics,) = slope(x, lambda params: SGD(params, lr=LR), strategy=strategy, **kwargs)
        assert module.counts[0]["batches"] == (n if steps is None else min(n, steps))
        return metrics["target_variance"]

    assert variance(None) == pytest.approx(between / n, rel=1e-4)
    assert variance(4 * n) == pytest.approx(between / n, rel=1e-4)
    assert variance(n // 2) == pytest.approx(between / (n // 2), rel=0.2)  # half a pass
    assert variance(2 * n, accumulate_grad_batches=2) == pytest.approx(between / n, rel=1e-4)  # pairs of samples


def test_weights_over_repeated_passes_equal_the_algorithm_by_hand() -> None:
    settings = AUTO["FedGP auto, exact"]
    module = build(NotedGP, **settings.kwargs)
    snapshots = fit(module, strategy={"local_steps": 16})
    ((given, step),) = module.notes
    assert len(given["c2"].gradients) == 4  # of 27 samples, in batches of 8
    found = estimates_by_hand(given, NAMES[:-1], settings)
    for name, tensor in rule_by_hand(given, found.beta, shares_of(NAMES[:-1], settings), settings).items():
        torch.testing.assert_close(step[name].double(), tensor, atol=2e-6, rtol=1e-4)
    assert snapshots.metrics[0]["target_variance"] == pytest.approx(found.variance, rel=1e-4)


# -------------------------------------------------------------------- learning rates of 0, and updates that diverge


def idle(optimizer: Any) -> LambdaLR:
    """No learning rate in the first round."""
    return LambdaLR(optimizer, lambda round_idx: min(round_idx, 1))


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
def test_a_round_without_a_learning_rate_has_no_gradient_to_compare(hidden: bool) -> None:
    strategy = {"privacy": PairwiseMasking()} if hidden else {}
    for method in (FedDA, FedGP):
        with pytest.raises(RosterError, match="those of 'c2' were 0 in a whole round: give its schedule a higher"):
            fit(build(method, beta="auto", lr_scheduler=idle), rounds=2, strategy=strategy)


@pytest.mark.parametrize("case", ["FedDA", "FedDA, aligned", "FedGP by layer", "cosine by layer, aligned"])
@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
def test_with_a_fixed_beta_a_round_without_a_learning_rate_changes_nothing(case: str, hidden: bool) -> None:
    settings = CASES[case]
    module = build(noted(settings.method), **settings.kwargs, lr_scheduler=idle)
    snapshots = fit(module, rounds=2, strategy={"privacy": PairwiseMasking()} if hidden else {})
    for name in NAMES:
        assert torch.equal(snapshots.rounds[0][name][W], snapshots.start[name][W])
    assert "target_variance" not in snapshots.metrics[0]
    given, step = module.notes[1]
    expected = rule_by_hand(given, settings_betas(settings), shares_of(NAMES[:-1], settings), settings)
    assert float(expected[W].abs().max()) > 1e-2
    for name, tensor in expected.items():
        torch.testing.assert_close(step[name].double(), tensor, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("case", ["FedDA auto, aligned", "FedGP auto", "FedGP auto, exact"])
def test_single_steps_without_a_learning_rate_do_no_harm(case: str) -> None:
    """As in a linear warm-up that starts at 0."""
    settings = AUTO[case]
    module = build(
        settings.method,
        **settings.kwargs,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / 3)),
        schedule_interval="step",
    )
    snapshots = fit(module)

    def rates(name: str, ratio: float) -> Iterator[float]:
        return (LR * ratio * min(1.0, i / 3) for i in itertools.count())

    expected, found = rounds_by_hand(snapshots.start["c2"], settings, 1, rates=rates)
    for key in (W, B):
        torch.testing.assert_close(snapshots.rounds[0]["c2"][key], expected[key], atol=2e-6, rtol=1e-5)
    assert snapshots.metrics[0]["target_variance"] == pytest.approx(found.variance, rel=1e-4)
    for name in NAMES[:-1]:
        assert snapshots.metrics[0][f"beta/{name}"] == pytest.approx(found.beta[name], rel=1e-3)


class Overshoot(FedGP):
    """The target's weights overflow in its last step, which no loss of the round sees."""

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(epoch, batch_idx, *args, **kwargs)
        if batch_idx == 3 and any(client.is_target for client in self.federation.local_clients):
            with torch.no_grad():
                next(self.replicas["c2"].parameters()).fill_(math.inf)


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
def test_a_target_that_diverges_in_its_last_step_is_named(hidden: bool) -> None:
    with pytest.raises(DivergedError, match="the update of 'c2' has NaN or infinite entries"):
        fit(build(Overshoot, beta="auto"), strategy={"privacy": PairwiseMasking()} if hidden else {})


SITE = """
import sys
sys.path.insert(0, {folder!r})
import test_fedgp as here
if __name__ == "__main__":
    arguments = {{"lr": {{"lr_scheduler": here.idle}}, "inf": {{"method": here.Overshoot}}}}[{trouble!r}]
    module = here.build(beta="auto", **arguments)
    run = here.trainer(2, devices=2, strategy={{"timeout": 30.0}})
    try:
        run.fit(module, here.loader(here.unequal()))
    except Exception as error:
        line = " ".join(["ENDS", str(module.trainer.global_rank), type(error).__name__, str(error), chr(10)])
        here.os.write(1, line.encode())  # at once: two processes share the output
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("lr", "RosterError .*were 0 in a whole round"),
        pytest.param("inf", "DivergedError .*NaN or infinite entries", marks=pytest.mark.slow),
    ],
)
def test_what_the_target_finds_wrong_with_its_steps_is_an_error_on_all_processes(
    trouble: str, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "site.py"
    script.write_text(SITE.format(folder=str(Path(__file__).parent), trouble=trouble))
    clean = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=clean, check=False
    )
    for rank in (0, 1):
        assert re.search(f"ENDS {rank} {message}", done.stdout), done.stdout + done.stderr[-3000:]


def test_in_a_plain_trainer_the_method_trains_the_same() -> None:
    for kwargs in ({}, {"beta": "auto", "residual": "exact"}):
        plain, federated = (fit(build(**kwargs), rounds=3, federated=flag) for flag in (False, True))
        for name in NAMES:
            assert same(plain.rounds[-1][name], federated.rounds[-1][name])
        assert plain.metrics[-1] == pytest.approx(federated.metrics[-1], rel=0, abs=0, nan_ok=True)


# -------------------------------------------------------------------- hidden updates


KEYS = {"insecure_test_keys": True, "key_bits": 512}  # quick keys: this is about arithmetic and not about secrecy
BACKENDS: dict[str, Any] = {
    "masking": PairwiseMasking,
    "bfv": BFV,
    "paillier": lambda: Paillier(**KEYS),
    "ckks": CKKS,
}
NEEDS = {"paillier": "phe", "bfv": "tenseal", "ckks": "tenseal"}
# both vectors of an inner product have length 1, so that a bound of 2 is enough
GRID = {"grid": AffineGrid(*[FixedPoint(20, 2.0)] * 3)}
PROTOCOLS: dict[str, Any] = {
    "plain": lambda: PlainAffine(**GRID),
    "paillier": lambda: PaillierAffine(**GRID, **KEYS),
    "ckks": lambda: CKKSAffine(**GRID),
}
CASES = FIXED | AUTO
ROUNDS = 3


@dataclass
class Run:
    module: Any
    snapshots: Snapshots


_RUNS: dict[tuple[str, str, str], Run] = {}


def run(case: str, backend: str = "", protocol: str = "") -> Run:
    """Three rounds of a case, open or hidden; kept, as several tests look at them."""
    key = (case, backend, protocol)
    if key not in _RUNS:
        for needed in (NEEDS.get(backend), {"paillier": "phe", "ckks": "tenseal"}.get(protocol)):
            if needed:
                pytest.importorskip(needed)
        settings = CASES[case]
        module = build(noted(settings.method), **settings.kwargs)
        strategy = {"privacy": BACKENDS[backend]()} if backend else {}
        if protocol:
            strategy["two_party"] = {"inner_product": PROTOCOLS[protocol]()}
        _RUNS[key] = Run(module, fit(module, rounds=ROUNDS, strategy=strategy))
    return _RUNS[key]


def error_of_mean(backend: str, settings: Settings) -> float:
    """Greatest error of one entry of a mean: that of a sum, over the sum of weights relative to the largest."""
    shares = shares_of(NAMES[:-1], settings)
    return float(BACKENDS[backend]().error_bound(2)) * max(shares.values())


def error_of_step(
    settings: Settings, given: Mapping[str, Local], variance: float, mean: float, cosine: float = 0.0
) -> float:
    """Greatest error of one entry of a step, to first order, if means are off by ``mean`` and cosines by ``cosine``.

    An entry of the mean of contributions is off by ``mean``, and so is that of betas, which the target's update is
    multiplied with. With an inner product, the projection on a layer is off by |g_T| times the error of its cosine,
    and of the estimates, distance by 2 |g_T| |g_S| and residual by 2 |g_T|^2 times that for each layer; an error e of
    either, in units of squared gradients, moves beta = s2 / (s2 + d2) by at most e / s2.
    """
    updates = [vector(local.update, [W, B]) * scale_of(local, given["c2"], settings) for local in given.values()]
    target = float(updates[-1].norm())
    longest = max(float(update.norm()) for update in updates)
    layers = 2
    beta = 2 * layers * target * longest * cosine / given["c2"].path ** 2 / variance if settings.beta == "auto" else 0.0
    biggest = max(float(update.abs().max()) for update in updates)
    of_means = mean * (1 + biggest if settings.beta == "auto" else 1)
    rounding = 8 * 2.0**-24 * biggest  # float32, in a handful of operations
    return of_means + target * cosine + beta * (target + longest) + rounding


def check_steps(case: str, hidden: Run, mean: float, cosine: float = 0.0) -> None:
    """Each step is the open rule on the updates of that very round."""
    settings = CASES[case]
    module = hidden.module
    assert len(module.notes) == ROUNDS - settings.warmup_rounds
    for (given, step), count in zip(module.notes, module.counts, strict=True):
        found = estimates_by_hand(given, NAMES[:-1], settings, count["variance"])
        expected = rule_by_hand(given, found.beta, shares_of(NAMES[:-1], settings), settings)
        bound = error_of_step(settings, given, count["variance"], mean, cosine)
        # small enough to tell a wrong rule from a right one
        assert bound < (1e-2 if cosine else 1e-3) * max(float(tensor.abs().max()) for tensor in expected.values())
        for name, tensor in expected.items():
            assert float((step[name] - tensor).abs().max()) <= bound


def check_weights(case: str, hidden: Run, mean: float, cosine: float = 0.0) -> None:
    """All weights after three rounds are those of the open run.

    Each round adds its own error of a step, sqrt(m) times an entry's in length, and passes on what was there before:
    not enlarged by steps on a convex loss and by means of updates (FedDA), enlarged at most twice by projections and
    estimates on this data.
    """
    open_, settings = run(case), CASES[case]
    worst = max(
        error_of_step(settings, given, count["variance"], mean, cosine)
        for (given, _), count in zip(hidden.module.notes, hidden.module.counts, strict=True)
    )
    bound = sum(2.0**i for i in range(ROUNDS)) * math.sqrt(12) * worst
    for name in NAMES:
        for key in (W, B):
            apart = hidden.snapshots.rounds[-1][name][key] - open_.snapshots.rounds[-1][name][key]
            assert float(apart.abs().max()) <= bound


FOUR = ["FedDA", "FedDA auto", "FedGP by layer", "FedGP auto"]
MORE = [
    "FedDA, a beta per source", "FedDA, aligned", "FedDA auto, aligned", "FedGP by model", "FedGP, a beta per source",
    "cosine by layer, aligned", "cosine by model", "FedGP auto by model", "FedGP auto, cosine",
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "backend"), [*[(case, backend) for backend in BACKENDS for case in FOUR], *[(c, "masking") for c in MORE]]
)
def test_hidden_rounds_equal_open_ones_within_the_error_of_a_mean(case: str, backend: str) -> None:
    hidden = run(case, backend)
    mean = error_of_mean(backend, CASES[case])
    check_steps(case, hidden, mean)
    check_weights(case, hidden, mean)
    logged, open_ = hidden.snapshots.metrics[-1], run(case).snapshots.metrics[-1]
    assert logged["beta"] == pytest.approx(open_["beta"], abs=1e-4)
    assert logged["target_variance"] == pytest.approx(open_["target_variance"], rel=1e-4)
    # what only somebody who has a single source's update could tell
    assert not [name for name in logged if name.startswith(("beta/", "distance/", "tau/"))]


@pytest.mark.parametrize("case", FOUR)
def test_exact_backends_agree_to_the_last_bit(case: str) -> None:
    states = [run(case, backend).snapshots.rounds[-1]["c2"] for backend in ("masking", "bfv", "paillier")]
    assert same(states[0], states[1])
    assert same(states[0], states[2])


PRODUCTS = ["FedDA auto", "FedGP by layer", "FedGP auto", "FedGP by model"]


@pytest.mark.parametrize(
    ("case", "protocol"),
    [
        *[(case, protocol) for protocol in ("plain", "paillier") for case in PRODUCTS],
        ("FedGP auto", "ckks"),
        *[pytest.param(case, "ckks", marks=pytest.mark.slow) for case in PRODUCTS if case != "FedGP auto"],
    ],
)
def test_inner_products_give_what_the_targets_update_would(case: str, protocol: str) -> None:
    """A cosine is the sum of 12 products; on a grid each number is off by half a step, see `AffineGrid.error_bound`."""
    hidden = run(case, "masking", protocol)
    mean = error_of_mean("masking", CASES[case])
    cosine = PROTOCOLS[protocol]().error_bound(12)
    check_steps(case, hidden, mean, cosine)
    check_weights(case, hidden, mean, cosine)


def test_paillier_and_plain_inner_products_agree_to_the_last_bit() -> None:
    one, other = (run("FedGP auto", "masking", protocol) for protocol in ("plain", "paillier"))
    assert same(one.snapshots.rounds[-1]["c2"], other.snapshots.rounds[-1]["c2"])


@pytest.mark.parametrize("beta", [0.5, "auto"])
def test_a_single_layer_that_is_a_single_number_fits_the_grid(beta: Any) -> None:
    """Its direction is 1 or -1, at the very end of what a bound of 1 allows."""
    network = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 2))
    module = build(beta=beta, classifier=network)
    strategy = {"privacy": PairwiseMasking(), "two_party": PlainAffine(**GRID)}
    snapshots = fit(module, rounds=2, strategy=strategy)
    assert not torch.equal(snapshots.rounds[-1]["c2"]["classifier.0.bias"], snapshots.start["c2"]["classifier.0.bias"])


# -------------------------------------------------------------------- who is sent what


class Wire:
    """Everything that clients hand to the federation, by verb: (channel, payloads, receivers)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exchanged: list[tuple[str, dict[str, Any], list[str]]] = []
        self.averaged: list[tuple[str, dict[str, Any], list[str]]] = []
        self.multiplied: list[tuple[str, list[str], list[str]]] = []
        self.means: list[dict[str, Any]] = []
        exchange, mean, affine = Federation.exchange, Federation.mean, Federation.affine

        def names(to: Any) -> list[str]:
            return ["everyone"] if to is None else [client.name for client in to]

        def spy_exchange(federation: Any, channel: str, payloads: Any, to: Any = None, **kwargs: Any) -> Any:
            self.exchanged.append((channel, dict(payloads), names(to)))
            return exchange(federation, channel, payloads, to, **kwargs)

        def spy_mean(federation: Any, channel: str, payloads: Any, among: Any = None, to: Any = None,
                     **kwargs: Any) -> Any:  # fmt: skip
            self.averaged.append((channel, dict(payloads), names(to)))
            self.means.append(mean(federation, channel, payloads, among, to, **kwargs))
            return self.means[-1]

        def spy_affine(federation: Any, channel: str, moments: Any, maps: Any, *rest: Any) -> Any:
            self.multiplied.append((channel, list(moments), list(maps)))
            return affine(federation, channel, moments, maps, *rest)

        monkeypatch.setattr(Federation, "exchange", spy_exchange)
        monkeypatch.setattr(Federation, "mean", spy_mean)
        monkeypatch.setattr(Federation, "affine", spy_affine)


@pytest.mark.parametrize("case", FOUR)
def test_in_the_open_the_target_gets_updates_and_gives_the_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, wire = CASES[case], Wire(monkeypatch)
    module = build(settings.method, **settings.kwargs)
    fit(module, rounds=2)
    assert not wire.averaged
    assert not wire.multiplied
    seen = [(channel, list(payloads), to) for channel, payloads, to in wire.exchanged]
    assert seen == [("update", ["c0", "c1"], ["c2"]), ("model", ["c2"], ["c0", "c1"])] * 2
    assert set(module.federation.ledger.bytes_by_channel()) == {"update", "model", "metrics"}
    assert set(talk(module, "update")) == {("c0", "c2"), ("c1", "c2")}
    assert set(talk(module, "model")) == {("c2", "c0"), ("c2", "c1")}


@pytest.mark.parametrize("case", [*FOUR, "FedDA, aligned"])
@pytest.mark.parametrize("inner_product", [False, True], ids=["update", "inner product"])
def test_nobody_sees_a_sources_update_and_with_inner_products_nobody_the_targets(
    case: str, inner_product: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, wire = CASES[case], Wire(monkeypatch)
    more = {"two_party": {"inner_product": PlainAffine()}} if inner_product else {}
    module = build(settings.method, **settings.kwargs)
    fit(module, rounds=2, strategy={"privacy": PairwiseMasking()} | more)
    ratio = settings.method is FedDA and settings.beta != "auto"  # needs no products
    # the sources speak in means alone, and these reach the target alone
    assert all(sender == "c2" for _, payloads, _ in wire.exchanged for sender in payloads)
    assert [(channel, list(payloads), to) for channel, payloads, to in wire.averaged] == [
        ("update", ["c0", "c1"], ["c2"])
    ] * 2
    assert all(set(mean) == {"c2"} for mean in wire.means)
    heads = {W, B, "beta"} if settings.beta == "auto" else {W, B}
    for (_, payloads, _), mean in zip(wire.averaged, wire.means, strict=True):
        assert all(set(payload) == heads for payload in payloads.values())
        received = mean["c2"][W]
        assert not any(torch.allclose(received, payload[W], atol=1e-4) for payload in payloads.values())
        for name in (W, B):
            received = mean["c2"][name]
            both = sum(payload[name] for payload in payloads.values()) / 2
            torch.testing.assert_close(received, both, atol=1e-6, rtol=0)
    told = [set(payloads["c2"]) for channel, payloads, _ in wire.exchanged if channel == "target_update"]
    asks = not ratio or settings.align_magnitudes
    own = {W, B} if not ratio and not inner_product else set()
    assert told == ([{"summary", *own}] * 2 if asks else [])
    asked = [("inner_product", ["c2"], ["c0", "c1"])] * 2 if inner_product and not ratio else []
    assert wire.multiplied == asked
    channels = {"update", "update/keys", "model", "metrics"}
    channels |= {"target_update"} if asks else set()
    channels |= {"inner_product"} if asked else set()
    assert set(module.federation.ledger.bytes_by_channel()) == channels
    assert set(talk(module, "update")) == {("c0", "server"), ("c1", "server"), ("server", "c2")}
    assert set(talk(module, "target_update")) == ({("c2", "c0"), ("c2", "c1")} if asks else set())


def size(*fields: tuple[str, str, list[int]]) -> int:
    """Bytes of a message: the length of its header in 4 bytes, the header, and the numbers."""
    header = json.dumps([list(item) for item in fields], separators=(",", ":"))
    width = {"float32": 4, "float64": 8}
    return 4 + len(header) + sum(width[kind] * math.prod(shape) for _, kind, shape in fields)


WEIGHTS = [(W, "float32", [2, 5]), (B, "float32", [2])]


@pytest.mark.parametrize("case", FOUR)
def test_bytes_per_round_are_those_counted_by_hand(case: str) -> None:
    """Two sources: an update up and a model down each; hidden, also what the target says."""
    settings = CASES[case]
    module = run(case).module
    used = module.federation.ledger.bytes_by_channel()
    assert used["update"] == ROUNDS * 2 * size(*WEIGHTS, ("path", "float64", []))
    assert used["model"] == ROUNDS * 2 * size(*WEIGHTS)
    used = run(case, "masking").module.federation.ledger.bytes_by_channel()
    assert used["model"] == ROUNDS * 2 * size(*WEIGHTS)
    if case != "FedDA":
        assert used["target_update"] == ROUNDS * 2 * size(("summary", "float64", [3]), *WEIGHTS)
    if case not in ("FedDA", "FedGP by layer"):
        hidden = run(case, "masking", "plain").module.federation.ledger.bytes_by_channel()
        assert hidden["target_update"] == ROUNDS * 2 * size(("summary", "float64", [3]))
        assert hidden["update"] == used["update"]
    if settings.beta == "auto":  # a number more, and its name in the schema, in each of three messages of a round
        fixed = {"FedDA auto": "FedDA", "FedGP auto": "FedGP by layer"}[case]
        name = len(',["beta","float32",[]]')
        less = run(fixed, "masking").module.federation.ledger.bytes_by_channel()["update"]
        assert used["update"] - less == ROUNDS * 3 * (4 + name)


# -------------------------------------------------------------------- participation


def two(clients: Sequence[str], **kwargs: Any) -> Snapshots:
    """The same method in a federation of these clients alone."""
    names: list[Client | str] = [name for name in clients if name != "c2"]
    data = unequal()
    module = build(clients=[*names, Client("c2", role="target", labelled=True)], **kwargs)
    return fit(module, {name: data[name] for name in clients})


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
def test_absent_sources_are_left_out_and_fetch_the_model_when_they_come_back(hidden: bool) -> None:
    present = [["c0", "c1", "c2"], ["c0", "c2"], ["c0", "c1", "c2"]]
    strategy: dict[str, Any] = {"participation": Schedule(present[1:])}
    if hidden:
        strategy["privacy"] = PairwiseMasking()
    module = build(beta="auto", weighting="samples")
    warns = pytest.warns(UserWarning, match="hides nothing of fewer than 2") if hidden else nullcontext()
    with warns:
        snapshots = fit(module, rounds=2, strategy=strategy)
    first, second = snapshots.rounds
    if hidden:  # one source alone: the target's own update is taken
        assert torch.equal(first["c2"][W], two(["c0", "c2"], beta=0).rounds[0]["c2"][W])
    else:
        assert same(first["c2"], two(["c0", "c2"], beta="auto", weighting="samples").rounds[0]["c2"])
        assert "beta/c1" not in snapshots.metrics[0]
        assert "beta/c1" in snapshots.metrics[1]
    assert same(first["c1"], snapshots.start["c1"])
    assert same(first["c0"], first["c2"])
    assert same(second["c1"], second["c2"])
    booked = [entry for entry in module.federation.ledger if entry.channel == "model"]
    assert [(e.round_idx, e.receiver, e.messages) for e in booked] == [(0, "c0", 1), (1, "c1", 2), (1, "c0", 1)]


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
def test_with_nobody_there_the_targets_own_update_is_taken(hidden: bool) -> None:
    strategy: dict[str, Any] = {"participation": Schedule([["c2"]])}
    if hidden:
        strategy["privacy"] = PairwiseMasking()
    module, alone = build(beta="auto"), build(TargetOnly)
    ours = fit(module, rounds=2, strategy=strategy)
    theirs = fit(alone, rounds=2, strategy={"participation": Schedule([["c2"]])})
    for key in (W, B):
        torch.testing.assert_close(ours.rounds[-1]["c2"][key], theirs.rounds[-1]["c2"][key], atol=1e-6, rtol=1e-6)
        assert torch.equal(ours.rounds[-1]["c0"][key], ours.start["c0"][key])
    assert set(module.federation.ledger.bytes_by_channel()) == {"metrics"}


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
@pytest.mark.parametrize("way", ["participation", "update", "target_update"])
def test_a_round_without_the_target_changes_nothing(way: str, hidden: bool) -> None:
    """Whether it is away, or only its message is lost; and the round after goes on as if nothing had been."""
    if way == "target_update" and not hidden:
        pytest.skip("nothing is sent on it")
    away = Schedule([["c0", "c1"], ["c0", "c1", "c2"]])
    strategy: dict[str, Any] = {"participation": away} if way == "participation" else {"drops": {way: away}}
    if hidden:
        strategy["privacy"] = PairwiseMasking()
    module = build(beta="auto", **normalised())
    snapshots = fit(module, rounds=2, strategy={"nested_drops": False} | strategy)
    first, second = snapshots.rounds
    if way == "target_update":  # it is there, and takes its own step, as without sources
        assert not torch.equal(first["c2"][W], snapshots.start["c2"][W])
        assert not talk(module, "update", 0)
    else:
        for name in NAMES:
            learnt = [key for key in first[name] if not key.endswith("num_batches_tracked")]
            assert all(torch.equal(first[name][key], snapshots.start[name][key]) for key in learnt)
        assert {e.channel for e in module.federation.ledger if e.round_idx == 0} == {"metrics"}
        assert "beta" not in snapshots.metrics[0]
    assert not torch.equal(second["c2"][W], first["c2"][W])
    assert all(torch.equal(second[name][W], second["c2"][W]) for name in NAMES)


def test_a_dropped_update_counts_nowhere_and_its_sender_gets_the_model_all_the_same() -> None:
    drops = {"update": Schedule([["c0", "c2"]])}
    module = build(beta=PER_SOURCE)
    snapshots = fit(module, strategy={"drops": drops, "nested_drops": False})
    expected = two(["c0", "c2"], beta=0.3).rounds[0]["c2"]
    assert same(snapshots.rounds[0]["c2"], expected)
    assert same(snapshots.rounds[0]["c1"], expected)
    assert talk(module, "update") == [("c0", "c2")]


@pytest.mark.parametrize("channel", ["update", "target_update", "inner_product"])
def test_hidden_means_are_over_those_who_contribute(channel: str) -> None:
    """With a beta per source, the target's share is that of the betas in the mean: of c0 and c1, of three sources."""
    clients: list[Client | str] = ["c0", "c1", "c3", Client("c2", role="target", labelled=True)]
    data = unequal() | {"c3": shards(1)["c0"]}
    betas = {"c0": 0.2, "c1": 0.6, "c3": 1.0}
    lost = Schedule([["c0", "c1", "c2"]])
    runs = []
    for strategy in ({"drops": {channel: lost}, "nested_drops": False}, {"participation": lost}):
        module = build(clients=clients, beta=betas)
        hidden = {"privacy": PairwiseMasking(), "two_party": PlainAffine()}
        runs.append(fit(module, data, strategy=hidden | strategy).rounds[0]["c2"])
    assert same(runs[0], runs[1])


def test_a_dropped_model_is_fetched_in_the_next_round_before_training() -> None:
    drops = {"model": Schedule([["c0", "c2"], ["c0", "c1", "c2"]])}
    module, undisturbed = build(beta="auto"), build(beta="auto")
    snapshots = fit(module, rounds=2, strategy={"drops": drops})
    expected = fit(undisturbed, rounds=2)
    assert same(snapshots.rounds[0]["c1"], snapshots.start["c1"])
    for name in NAMES:
        assert same(snapshots.rounds[1][name], expected.rounds[1][name])
    messages = {(e.round_idx, e.receiver): e.messages for e in module.federation.ledger if e.channel == "model"}
    assert messages == {(0, "c0"): 1, (1, "c1"): 2, (1, "c0"): 1}


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
def test_a_source_that_trains_on_an_old_model_is_left_out(hidden: bool) -> None:
    """c1 does not get the models of rounds 0 and 1, but its updates get through: they are of another start."""
    clients: list[Client | str] = ["c0", "c1", "c3", Client("c2", role="target", labelled=True)]
    data = unequal() | {"c3": shards(1)["c0"]}
    some, everyone = ["c0", "c2", "c3"], ["c0", "c1", "c2", "c3"]
    more: dict[str, Any] = {"nested_drops": False} | ({"privacy": PairwiseMasking()} if hidden else {})
    stale, lost = build(beta="auto", clients=clients), build(beta="auto", clients=clients)
    ours = fit(stale, data, 3, strategy=more | {"drops": {"model": Schedule([some, some, everyone])}})
    # the same run, but that its update of round 1 is lost
    drops = {"model": Schedule([some, some, everyone]), "update": Schedule([everyone, some, everyone])}
    theirs = fit(lost, data, 3, strategy=more | {"drops": drops})
    for round_idx in range(3):
        assert same(ours.rounds[round_idx]["c2"], theirs.rounds[round_idx]["c2"]), round_idx
    assert same(ours.rounds[1]["c1"], ours.start["c1"])
    assert same(ours.rounds[2]["c1"], ours.rounds[2]["c2"])
    spoke = ["c1" in {sender for sender, _ in talk(stale, "update", round_idx)} for round_idx in range(3)]
    assert spoke == [True, False, True]


def test_a_source_that_opposes_the_target_leaves_the_mean_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the documentation of `FedDA` warns of: of two hidden sources, the target then reads the other's part."""
    data = unequal()
    x, y = data["c2"].tensors
    data["c0"], data["c1"] = TensorDataset(x, y), TensorDataset(x, 1 - y)
    wire, module = Wire(monkeypatch), build(beta={"c0": 0.5, "c1": 0.25}, classifier=_zero_layer())
    snapshots = fit(module, data, batch_size=64, strategy={"privacy": PairwiseMasking()})
    own = fit(build(TargetOnly, classifier=_zero_layer()), data, batch_size=64).rounds[0]["c2"]
    ((_, payloads, _),), (mean,) = wire.averaged, wire.means
    for key in (W, B):
        assert not payloads["c1"][key].any()
        torch.testing.assert_close(mean["c2"][key], payloads["c0"][key] / 2, atol=1e-6, rtol=0)
        # c0 is the target's twin, on which the target's update is its own projection
        expected = (1 - 0.375) * own[key] + 0.25 * own[key]
        torch.testing.assert_close(snapshots.rounds[0]["c2"][key], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "told"),
    [("FedDA auto", "111"), ("FedGP auto", "111"), ("FedGP by layer", "101"), ("FedDA, aligned", "001"), ("FedDA", "")],
)
def test_the_target_tells_no_numbers_that_are_not_needed(case: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of squared norm, variance and sum of learning rates; the last is known to all who know the configuration."""
    settings, wire = CASES[case], Wire(monkeypatch)
    fit(build(settings.method, **settings.kwargs), strategy={"privacy": PairwiseMasking()})
    summaries = [payloads["c2"]["summary"] for channel, payloads, _ in wire.exchanged if channel == "target_update"]
    assert ["".join("1" if number > 0 else "0" for number in summary.tolist()) for summary in summaries] == (
        [told] if told else []
    )


def test_a_target_dropped_on_the_model_keeps_it_for_later() -> None:
    drops = {"model": Schedule([["c0", "c1"], ["c0", "c1", "c2"]])}
    module, undisturbed = build(), build()
    snapshots = fit(module, rounds=2, strategy={"drops": drops, "nested_drops": False})
    expected = fit(undisturbed, rounds=2)
    assert same(snapshots.rounds[0]["c2"], expected.rounds[0]["c2"])
    assert same(snapshots.rounds[0]["c0"], snapshots.start["c0"])
    assert same(snapshots.rounds[1]["c0"], expected.rounds[1]["c0"])


def test_a_single_source_under_masking_is_skipped_with_a_warning_and_told_nothing() -> None:
    module = build(clients=["c0", Client("c2", role="target", labelled=True)])
    data = unequal()
    with pytest.warns(UserWarning, match=r"round 0 sends no mean over channel 'update': \['c0'\] alone"):
        snapshots = fit(
            module, {name: data[name] for name in ("c0", "c2")}, rounds=2, strategy={"privacy": PairwiseMasking()}
        )
    expected = two(["c0", "c2"], beta=0).rounds[0]["c2"]
    assert same(snapshots.rounds[0]["c2"], expected)
    assert same(snapshots.rounds[1]["c0"], snapshots.rounds[1]["c2"])
    assert not talk(module, "target_update")  # nobody needs it


# -------------------------------------------------------------------- warm-up


def test_warm_up_rounds_are_fedavg_over_the_sources_and_send_no_updates() -> None:
    module, average = build(warmup_rounds=2, beta="auto"), build(SourceOnly, weighting="uniform")
    snapshots, expected = fit(module, rounds=3), fit(average, rounds=2)
    assert same(snapshots.rounds[1]["c2"], expected.rounds[1]["c2"])
    assert "beta" not in snapshots.metrics[1]
    assert "beta" in snapshots.metrics[2]
    spoken = {(e.round_idx, e.channel) for e in module.federation.ledger if e.channel != "metrics"}
    assert spoken == {(0, "weights"), (1, "weights"), (2, "update"), (2, "model")}


@pytest.mark.parametrize(("absent", "away"), [("c1", 1), ("c1", 2), ("c2", 1), ("c2", 2)])
def test_who_was_away_at_the_end_of_the_warm_up_starts_from_its_result(absent: str, away: int) -> None:
    """Also a target, and those who are still away in the round after it: all updates are from the same model."""
    others = [name for name in NAMES if name != absent]
    schedule = Schedule([*[others] * away, NAMES])
    module = build(NotedGP, warmup_rounds=1)
    snapshots = fit(module, rounds=away + 1, strategy={"participation": schedule})
    assert same(snapshots.rounds[0][absent], snapshots.start[absent])
    assert all(same(snapshots.rounds[-1][name], snapshots.rounds[-1]["c2"]) for name in NAMES)
    given, _ = module.notes[-1]
    expected = rule_by_hand(given, settings_betas(Settings(FedGP)), {"c0": 0.5, "c1": 0.5}, Settings(FedGP))
    before = snapshots.rounds[away - 1]["c0"]  # of the warm-up, or of a round that the absent one has missed
    for key in (W, B):
        torch.testing.assert_close(
            snapshots.rounds[-1]["c2"][key] - before[key], expected[key].float(), atol=1e-6, rtol=0
        )
    # an absent client receives nothing; a source that comes back later needs the model of then
    later = [("c2", "c1")] if (absent, away) == ("c1", 2) else []
    assert talk(module, "weights", away) == ([] if later else [("server", absent)])
    assert talk(module, "model", away)[: len(later)] == later
    assert not [pair for round_idx in range(away) for name in ("weights", "model")
                for pair in talk(module, name, round_idx) if pair[1] == absent]  # fmt: skip


def test_a_source_that_missed_the_warm_up_and_a_round_without_a_new_model_fetches_its_result() -> None:
    """Round 1 has no target to send a model, so that in round 2 all start from the result of the warm-up."""
    participation = Schedule([["c0", "c2"], ["c0", "c2"], NAMES])
    drops = {"update": Schedule([NAMES, ["c0", "c1"], NAMES])}
    module = build(warmup_rounds=1)
    snapshots = fit(module, rounds=3, strategy={"participation": participation, "drops": drops, "nested_drops": False})
    assert same(snapshots.rounds[1]["c1"], snapshots.start["c1"])
    assert same(snapshots.rounds[1]["c2"], snapshots.rounds[0]["c0"])
    assert talk(module, "weights", 2)[-1] == ("server", "c1")
    assert {pair[0] for pair in talk(module, "update", 2)} == {"c0", "c1"}
    assert same(snapshots.rounds[2]["c1"], snapshots.rounds[2]["c2"])


# -------------------------------------------------------------------- checkpoints


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fixed": ({"beta": 0.5, "align_magnitudes": True}, {}),
    "auto": ({"beta": "auto"}, {}),
    "auto, exact": ({"beta": "auto", "residual": "exact"}, {}),
    "masked": ({"beta": "auto"}, {"privacy": PairwiseMasking}),
    "masked, inner products": ({"beta": "auto"}, {"privacy": PairwiseMasking, "two_party": PROTOCOLS["plain"]}),
    "batchnorm": ({"beta": "auto"}, {}),
    "vectorised": ({"beta": "auto", "vectorize": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_within_a_round_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """c1 is away in round 1, so that it is still behind when the run is resumed within round 2."""
    arguments, given = RESUMED[name]
    away = Schedule([NAMES, ["c0", "c2"], NAMES]) if name != "masked" else Schedule([NAMES])
    torch.manual_seed(3)

    def go(callbacks: list[pl.Callback], checkpoint: str | None = None) -> tuple[Any, Snapshots]:
        torch.manual_seed(7)
        more = normalised() if name == "batchnorm" else {}
        module = build(
            optimizer=lambda params: Adam(params, lr=0.02),
            lr_scheduler=lambda optimizer: StepLR(optimizer, 2, 0.5),
            schedule_interval="step",
            warmup_rounds=1,
            **(arguments | more),
        )
        snapshots = Snapshots()
        strategy = {key: value() for key, value in given.items()} | {"rounds_per_epoch": 2, "participation": away}
        run = trainer(2, [snapshots, *callbacks], enable_checkpointing=bool(callbacks), strategy=strategy)
        run.fit(module, loader(unequal()), ckpt_path=checkpoint)
        return module, snapshots

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight, everything = go([saver])
    assert straight.federation.round_idx == 4
    for step, round_idx in ((2, 0), (8, 1), (12, 2), (17, 3)):  # rounds of 5 steps
        path = tmp_path / f"step={step}.ckpt"
        saved = torch.load(path, weights_only=True)
        assert (saved["federation"]["round_idx"], saved["federation"]["batch_idx"]) == (round_idx, step - 5 * round_idx)
        resumed, rest = go([], str(path))
        for client in NAMES:
            assert same(everything.rounds[-1][client], rest.rounds[-1][client]), (step, client)
        assert rest.metrics[-1] == pytest.approx(everything.metrics[-1], rel=0, abs=0, nan_ok=True)
        if "masked" not in name:  # which exchanges its keys again
            assert straight.federation.ledger == resumed.federation.ledger


def test_a_client_that_was_behind_before_a_checkpoint_fetches_the_model_after_it(tmp_path: Path) -> None:
    def go(rounds: int, checkpoint: str | None = None) -> tuple[Any, pl.Trainer]:
        module = build()
        run = trainer(rounds, strategy={"participation": Schedule([["c0", "c2"], NAMES])})
        run.fit(module, loader(unequal()), ckpt_path=checkpoint)
        return module, run

    _, half = go(1)
    path = str(tmp_path / "half.ckpt")
    half.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["behind"] == ["c1"]
    straight, _ = go(2)
    resumed, _ = go(2, path)
    for name in NAMES:
        assert same(weights(straight, name), weights(resumed, name))
    assert straight.federation.ledger == resumed.federation.ledger


def test_a_checkpoint_between_rounds_holds_no_copies_of_the_network(tmp_path: Path) -> None:
    module = build(beta="auto", residual="exact")
    fit(module)
    module.trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert not saved.get("memory")
    assert {name.split(".", 2)[2] for name in saved["state_dict"]} == {W, B}
    loaded = FedGP.load_from_checkpoint(
        tmp_path / "run.ckpt", extractor=nn.Identity(), classifier=nn.Linear(5, 2), weights_only=True
    )
    assert same(weights(loaded, "c2"), weights(module, "c2"))


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        (FedDA, {"beta": 1.5}, r"beta must be 'auto' or lie in \[0, 1\], got 1.5 for source 'c0'"),
        (FedDA, {"beta": -0.1}, r"beta must be 'auto' or lie in \[0, 1\], got -0.1"),
        (FedDA, {"beta": math.nan}, r"beta must be 'auto' or lie in \[0, 1\], got nan"),
        (FedDA, {"beta": "Auto"}, r"beta must be 'auto' or lie in \[0, 1\], got 'Auto'"),
        (FedGP, {"beta": {"c0": 0.5, "c1": 2}}, r"got 2 for source 'c1'"),
        (FedGP, {"beta": {"c0": 0.5}}, r"one number for each source of \['c0', 'c1'\], got \{'c0': 0.5\}"),
        (FedGP, {"beta": {"c0": 0.5, "c1": 0.5, "c2": 0.5}}, "beta must have one number for each source"),
        (FedDA, {"target_lr_ratio": 0.0}, "target_lr_ratio must be positive and finite, got 0.0"),
        (FedDA, {"target_lr_ratio": math.inf}, "target_lr_ratio must be positive and finite, got inf"),
        (FedDA, {"target_lr_ratio": math.nan}, "target_lr_ratio must be positive and finite, got nan"),
        (FedGP, {"granularity": "network"}, "granularity must be 'layer' or 'model', got 'network'"),
        (FedGP, {"projection": "euclid"}, "projection must be 'orthogonal' or 'cosine', got 'euclid'"),
        (FedGP, {"residual": "full"}, "residual must be 'isotropic' or 'exact', got 'full'"),
        (FedGP, {"weighting": "size"}, "weighting must be"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_at_construction(
    method: type[FedDA], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(method, **arguments)


MECHANISM = GaussianMechanism(clip_norm=10.0, noise_multiplier=1e-9)


@pytest.mark.parametrize(
    ("arguments", "strategy", "message"),
    [
        ({"beta": "auto", "residual": "exact"}, {"privacy": PairwiseMasking()}, "needs single updates at the target"),
        ({}, {"differential_privacy": MECHANISM}, "FedGP covers the channel 'update', not 'model'"),
        ({}, {"differential_privacy": {"model": MECHANISM}}, "not 'model'"),
        ({}, {"differential_privacy": {"target_update": MECHANISM}}, "not 'target_update'"),
        ({}, {"differential_privacy": {"inner_product": MECHANISM}}, "not 'inner_product'"),
        ({"beta": "auto"}, {"differential_privacy": {"update": MECHANISM}}, "needs a fixed beta"),
        ({"align_magnitudes": True}, {"differential_privacy": {"update": MECHANISM}}, "align_magnitudes=False"),
        ({}, {"two_party": PlainAffine()}, "channel 'update' is open"),
        ({}, {"two_party": {"inner_product": PlainAffine()}}, "or leave two_party out"),
        (
            {"projection": "cosine"},
            {"privacy": PairwiseMasking(), "two_party": PlainAffine()},
            "projection='cosine' needs the length of each layer",
        ),
        ({}, {"privacy": {"weights": PairwiseMasking()}}, "but not for 'update'"),
    ],
)  # fmt: skip
def test_what_cannot_be_protected_is_refused_when_training_starts(
    arguments: dict[str, Any], strategy: dict[str, Any], message: str
) -> None:
    module = build(**arguments)
    with pytest.raises(RosterError, match=message):
        fit(module, strategy=strategy)
    assert module.federation.round_idx == 0
    assert not module.federation.ledger.total_bytes


def test_a_target_without_labels_is_refused() -> None:
    for method in (FedDA, FedGP):
        module = method(NAMES, "c2", 2, nn.Identity(), nn.Linear(5, 2))
        with pytest.raises(RosterError, match=f"{method.__name__} trains on target labels, but target 'c2' has none"):
            fit(module)


def test_one_step_of_the_target_has_no_variance_for_auto_weights() -> None:
    for kwargs in ({}, {"strategy": {"privacy": PairwiseMasking()}}):
        with pytest.raises(RosterError, match="at least 2 of different samples; 'c2' had 1: lower its batch"):
            fit(build(beta="auto"), batch_size=64, **kwargs)
    fit(build(beta="auto"), batch_size=14)  # two


@pytest.mark.parametrize("case", ["FedDA", "FedDA, aligned", "FedGP by layer", "cosine by layer, aligned"])
@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
def test_one_step_of_the_target_is_enough_for_a_fixed_beta(case: str, hidden: bool) -> None:
    settings = CASES[case]
    module = build(noted(settings.method), **settings.kwargs)
    snapshots = fit(module, batch_size=64, strategy={"privacy": PairwiseMasking()} if hidden else {})
    ((given, step),) = module.notes
    expected = rule_by_hand(given, settings_betas(settings), shares_of(NAMES[:-1], settings), settings)
    for name, tensor in expected.items():
        torch.testing.assert_close(step[name].double(), tensor, atol=2e-6, rtol=1e-5)
    logged = snapshots.metrics[0]
    assert logged["beta"] == pytest.approx(sum(settings_betas(settings).values()) / 2)
    assert "target_variance" not in logged
    assert not [name for name in logged if name.startswith(("distance/", "tau/"))]
    assert ("beta/c0" in logged) == (not hidden)


@pytest.mark.parametrize("backend", [None, PairwiseMasking()], ids=["open", "masked"])
@pytest.mark.parametrize("method", [FedDA, FedGP])
def test_differential_privacy_of_updates_trains_with_a_fixed_beta(method: type[FedDA], backend: Any) -> None:
    """A wide clip and hardly any noise change nothing; a narrow clip is felt; each source's release is booked."""
    wide, narrow, plain = build(method), build(method), build(method)
    more = {} if backend is None else {"privacy": backend}
    expected = fit(plain, rounds=2, strategy=more).rounds[-1]["c2"]
    ours = fit(wide, rounds=2, strategy={"differential_privacy": {"update": MECHANISM}, **more}).rounds[-1]["c2"]
    for key in (W, B):
        torch.testing.assert_close(ours[key], expected[key], atol=3e-6, rtol=0)
    clip = GaussianMechanism(clip_norm=1e-3, noise_multiplier=1e-9)
    clipped = fit(narrow, rounds=2, strategy={"differential_privacy": {"update": clip}, **more}).rounds[-1]["c2"]
    if method is FedGP and backend is None:  # which does not depend on the length of a source's update
        torch.testing.assert_close(clipped[W], expected[W], atol=1e-5, rtol=0)
    else:
        assert float((clipped[W] - expected[W]).abs().max()) > 1e-3
    assert sorted(wide.federation.accounts["message"].clients) == ["c0", "c1"]
    assert talk(wide, "update", 0)


# -------------------------------------------------------------------- what is logged


class Book(Logger):
    """Keeps what a logger is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "book"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))


def test_weights_and_estimates_reach_the_loggers_in_every_round() -> None:
    book = Book()
    module = build(beta="auto")
    snapshots = fit(module, rounds=3, logger=book)
    rows = [row for row in book.rows if "beta" in row]
    assert len(rows) == 3
    for row, metrics in zip(rows, snapshots.metrics, strict=True):
        assert {"beta", "beta/c0", "beta/c1", "distance/c0", "distance/c1", "target_variance"} <= set(row)
        for name, value in row.items():
            assert metrics[name] == pytest.approx(value, nan_ok=True)
        assert row["beta"] == pytest.approx((row["beta/c0"] + row["beta/c1"]) / 2)
        for name in ("c0", "c1"):
            assert math.isnan(row[f"tau/{name}"]) == (row[f"distance/{name}"] <= 0)
            assert math.isnan(row[f"tau/{name}"]) or 0 <= row[f"tau/{name}"] <= 1
