"""Algorithm 1 of FedDA and FedGP written out by hand in float64, and what it is compared on."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import helpers
from fedlit import Client, FederatedModule
from fedlit.federation import Federation
from fedlit.methods import FedDA, FedGP
from fedlit.privacy import AffineGrid, FixedPoint
from helpers import batches_of, loader, trainer

Update = dict[str, Tensor]

LR = 0.1
NAMES = ["c0", "c1", "c2"]  # the last is the target
SIZES = [40, 21, 27]  # 5, 3 and 4 batches of 8
W, B = "classifier.weight", "classifier.bias"
STATISTICS = ("running_mean", "running_var", "moving")
# both vectors of an inner product have length 1, so that a bound of 2 is enough
GRID = {"grid": AffineGrid(*[FixedPoint(20, 2.0)] * 3)}


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


def fit(
    module: FederatedModule, data: Any = None, rounds: int = 1, batch_size: int = 8, **kwargs: Any
) -> helpers.Snapshots:
    return helpers.fit(module, unequal() if data is None else data, rounds, batch_size, **kwargs)


def talk(module: FederatedModule, channel: str, round_idx: int | None = None) -> list[tuple[str, str]]:
    """Who sent to whom over a channel."""
    return [
        (entry.sender, entry.receiver)
        for entry in module.federation.ledger
        if entry.channel == channel and round_idx in (None, entry.round_idx)
    ]


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
    filtered: bool = True
    align_magnitudes: bool = False
    target_lr_ratio: float = 1.0
    warmup_rounds: int = 0

    @property
    def kwargs(self) -> dict[str, Any]:
        own = {"beta", "weighting", "align_magnitudes", "target_lr_ratio", "warmup_rounds"}
        more = {"granularity", "projection", "residual", "filtered"} if issubclass(self.method, FedGP) else set()
        return {name: value for name, value in vars(self).items() if name in own | more}


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
                passed = max(cosine, 0.0 if settings.filtered else -1.0)
                if settings.projection == "cosine":
                    s = passed * s
                elif issubclass(settings.method, FedGP):
                    s = passed * float(t.norm()) / (float(s.norm()) or 1.0) * s
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
    raw = {name: sizes[name] if settings.weighting == "samples" else 1.0 for name in sources}
    return {name: weight / sum(raw.values()) for name, weight in raw.items()}


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


def rounds_by_hand(
    start: Update, settings: Settings, rounds: int, clip: float | None = None, rates: Any = None
) -> tuple[Update, Estimates]:
    """All weights after some rounds of everybody, and the estimates of the last one."""
    data = unequal()
    state, found = {name: tensor.clone() for name, tensor in start.items()}, Estimates(math.nan)
    given: dict[str, Iterator[float]] = {}
    for name in NAMES:
        ratio = settings.target_lr_ratio if name == "c2" else 1.0
        given[name] = itertools.repeat(LR * ratio) if rates is None else rates(name, ratio)
    for round_idx in range(rounds):
        warming_up = round_idx < settings.warmup_rounds
        locals_ = {}
        for name in NAMES[:-1] if warming_up else NAMES:
            batches = iter(batches_of(data, name, round_idx))
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
    "FedGP, aligned": Settings(FedGP, **FAST),
    "FedGP without the filter": Settings(FedGP, filtered=False),
    "cosine without the filter": Settings(FedGP, projection="cosine", filtered=False, **FAST),
    "cosine by layer, aligned": Settings(FedGP, beta=PER_SOURCE, projection="cosine", **FAST),
    "FedGP after a warm-up": Settings(FedGP, warmup_rounds=1, weighting="samples"),
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


def zero_layer() -> nn.Linear:
    layer = nn.Linear(5, 2)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


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


def settings_betas(settings: Settings) -> dict[str, float]:
    given = settings.beta
    return {name: given[name] if isinstance(given, dict) else given for name in NAMES[:-1]}


CASES = FIXED | AUTO


def check_steps(
    module: Any,
    settings: Settings,
    first: int = 0,
    error_of: Callable[[Mapping[str, Local], float], float] | None = None,
    share: float = 1e-3,
) -> None:
    """Each step is the rule on the updates of that very round.

    Entries may be off by what ``error_of`` the updates and the target's variance returns, which has to be small enough
    to tell a wrong rule from a right one: below a ``share`` of the largest entry.
    """
    rounds = list(zip(module.notes, module.counts, strict=True))[first:]
    assert rounds
    for (given, step), count in rounds:
        found = estimates_by_hand(given, NAMES[:-1], settings, count["variance"])
        expected = rule_by_hand(given, found.beta, shares_of(NAMES[:-1], settings), settings)
        double = {name: tensor.double() for name, tensor in step.items()}
        if error_of is None:
            torch.testing.assert_close(double, expected, atol=2e-6, rtol=1e-5)
            continue
        bound = error_of(given, count["variance"])
        assert bound < share * max(float(tensor.abs().max()) for tensor in expected.values())
        torch.testing.assert_close(double, expected, atol=bound, rtol=0)


class Wire:
    """Everything that clients hand to the federation, by verb: channel, payloads by sender, and names of receivers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exchanged: list[tuple[str, dict[str, Any], list[str]]] = []
        self.averaged: list[tuple[str, dict[str, Any], list[str]]] = []
        self.multiplied: list[tuple[str, list[str], list[str]]] = []
        self.means: list[dict[str, Any]] = []
        for verb in ("exchange", "mean", "affine"):
            monkeypatch.setattr(Federation, verb, self.watched(verb))

    def watched(self, verb: str) -> Any:
        original = getattr(Federation, verb)
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if verb == "affine":
                self.multiplied.append((given["channel"], list(given["moments"]), list(given["maps"])))
                return original(*args, **kwargs)
            to = ["everyone"] if given.get("to") is None else [getattr(each, "name", each) for each in given["to"]]
            calls = self.averaged if verb == "mean" else self.exchanged
            calls.append((given["channel"], dict(given["payloads"]), to))
            result = original(*args, **kwargs)
            self.means += [result] if verb == "mean" else []
            return result

        return call


def idle(optimizer: Any) -> LambdaLR:
    """No learning rate in the first round."""
    return LambdaLR(optimizer, lambda round_idx: min(round_idx, 1))


class Overshoot(FedGP):
    """The target's weights overflow in its last step, which no loss of the round sees."""

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(epoch, batch_idx, *args, **kwargs)
        if batch_idx == 3 and any(client.is_target for client in self.federation.local_clients):
            with torch.no_grad():
                next(self.replicas["c2"].parameters()).fill_(math.inf)


def fit_on_processes(arguments: dict[str, Any]) -> None:
    """Two rounds of FedGP with `unequal` data, as one of two processes."""
    trainer(2, devices=2, strategy={"timeout": 30.0}).fit(build(beta="auto", **arguments), loader(unequal()))
