"""FedDA and FedGP: rounds against Algorithm 1 written out by hand, the target's variance, and errors."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import fedgp_by_hand as hand
import processes
from fedgp_by_hand import AUTO, FIXED, LR, NAMES, B, NotedDA, NotedGP, W, build, check_steps, fit, idle, rounds_by_hand
from fedlit import Client
from fedlit.federation import RosterError
from fedlit.functional import auto_beta
from fedlit.methods import FedDA, FedGP
from fedlit.privacy import GaussianMechanism, PairwiseMasking, PlainAffine
from helpers import same, weights


@pytest.mark.parametrize("case", [*FIXED, *AUTO])
def test_rounds_equal_the_algorithm_by_hand(case: str) -> None:
    settings = (FIXED | AUTO)[case]
    module = build(settings.method, **settings.kwargs)
    snapshots = fit(module, rounds=2)
    expected, found = rounds_by_hand(snapshots.start["c2"].state_dict(), settings, 2)
    for name in NAMES:
        torch.testing.assert_close(snapshots.rounds[-1][name], expected, atol=2e-6, rtol=1e-5)
        assert same(snapshots.rounds[-1][name], snapshots.rounds[-1]["c2"])
    assert float((expected[W] - snapshots.start["c2"].state_dict()[W]).abs().max()) > 1e-2
    logged, shares = snapshots.metrics[-1], hand.shares_of(NAMES[:-1], settings)
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


MASKED = {"privacy": PairwiseMasking(colluders=0)}


class Watching(nn.Linear):
    """A layer with a counter and a moving average of its own, which are no parameters and no BatchNorm's."""

    def __init__(self) -> None:
        super().__init__(5, 4)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("moving", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.moving += 0.1 * (x.detach().mean(dim=0) - self.moving)
        return super().forward(x)


@pytest.mark.parametrize(
    ("case", "strategy"), [("FedDA", {}), ("FedGP by model", MASKED), ("cosine by layer, aligned", {})]
)
def test_any_running_statistics_are_averaged_and_neither_projected_nor_aligned(case: str, strategy: Any) -> None:
    """Statistics are no directions, whatever they are called: a projection of one that is opposed would be 0."""
    settings, data = FIXED[case], hand.unequal()
    x, y = data["c2"].tensors
    data["c0"] = TensorDataset(-x, y)
    network = {"extractor": nn.Sequential(Watching(), nn.BatchNorm1d(4)), "classifier": nn.Linear(4, 2)}
    module = build(hand.noted(settings.method), **settings.kwargs, **network)
    last = fit(module, data, rounds=2, strategy=strategy).rounds[-1]
    check_steps(module, settings)
    assert {"extractor.0.moving", "extractor.1.running_var"} <= module.notes[0][1].keys()
    counter = "extractor.1.num_batches_tracked"  # stays at home and goes on counting
    assert all(same(last[name] | {counter: last["c2"][counter]}, last["c2"]) for name in NAMES)
    assert [int(last[name][counter]) for name in NAMES] == [8, 6, 8]
    assert int(last["c2"]["extractor.0.seen"]) == 8  # another's counter is the target's


def test_local_normalisation_layers_are_trained_and_kept_and_no_part_of_the_rule() -> None:
    module = build(NotedGP, beta="auto", residual="exact", local_norm=True, **hand.normalised())
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


def test_looking_at_gradients_of_the_start_leaves_training_alone() -> None:
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


def falling(interval: str) -> Any:
    """Learning rates of a schedule of steps or rounds, by hand."""
    steps = dict(zip(NAMES, (5, 3, 4), strict=True))

    def rates(name: str, ratio: float) -> Iterator[float]:
        return (LR * ratio * 0.8 ** (i if interval == "step" else i // steps[name]) for i in itertools.count())

    return rates


@pytest.mark.parametrize(
    ("case", "interval", "clip"),
    [("FedDA auto, aligned", "step", None), ("FedGP auto", "round", None), ("FedDA auto, aligned", "step", 0.3)],
)
def test_schedules_and_clipping_keep_the_ratio_of_learning_rates_and_the_relative_noise(
    case: str, interval: str, clip: float | None
) -> None:
    settings, schedule = AUTO[case], lambda optimizer: StepLR(optimizer, 1, 0.8)
    module = build(settings.method, **settings.kwargs, lr_scheduler=schedule, schedule_interval=interval)
    snapshots = fit(module, rounds=2, gradient_clip_val=clip)
    start = snapshots.start["c2"].state_dict()
    expected, found = rounds_by_hand(start, settings, 2, clip=clip, rates=falling(interval))
    torch.testing.assert_close(snapshots.rounds[-1]["c2"], expected, atol=2e-6, rtol=1e-5)
    assert snapshots.metrics[-1]["target_variance"] == pytest.approx(found.variance, rel=1e-4)
    _, unclipped = rounds_by_hand(start, settings, 2, rates=falling(interval))
    assert (found.variance < 0.8 * unclipped.variance) == (clip is not None)  # the clip bites


def test_a_step_over_several_batches_counts_once_but_each_batch_has_its_gradient() -> None:
    """Batches of c0, c1 and the target: 5, 3 and 4, so with 2 batches to a step 3, 2 and 2 steps."""
    module = build(NotedGP, beta="auto", target_lr_ratio=0.5)
    fit(module, rounds=2, accumulate_grad_batches=2)
    for (given, _), count in zip(module.notes, module.counts, strict=True):
        assert {name: local.path for name, local in given.items()} == pytest.approx({"c0": 0.3, "c1": 0.2, "c2": 0.1})
        assert count["batches"] == 4


def test_vectorised_training_equals_one_client_at_a_time() -> None:
    runs = [fit(build(beta="auto", vectorize=each), rounds=2, accumulate_grad_batches=2) for each in (False, True)]
    torch.testing.assert_close(runs[1].rounds[-1]["c2"], runs[0].rounds[-1]["c2"], atol=1e-5, rtol=1e-4)
    assert runs[1].metrics[-1]["target_variance"] == pytest.approx(runs[0].metrics[-1]["target_variance"], rel=1e-3)


def test_frozen_parameters_stay_and_cost_the_rule_nothing() -> None:
    torch.manual_seed(1)
    frozen, head = nn.Linear(5, 6).requires_grad_(False), nn.Linear(6, 2)
    mapped = {name: TensorDataset(frozen(data.tensors[0]), data.tensors[1]) for name, data in hand.unequal().items()}
    ours = fit(build(beta="auto", residual="exact", extractor=frozen, classifier=head), rounds=2)
    theirs = fit(build(beta="auto", residual="exact", classifier=head), mapped, rounds=2)
    assert torch.equal(ours.rounds[-1]["c2"]["extractor.weight"], ours.start["c2"].state_dict()["extractor.weight"])
    for key in (W, B):
        torch.testing.assert_close(ours.rounds[-1]["c2"][key], theirs.rounds[-1]["c2"][key], atol=1e-6, rtol=1e-5)
    assert "tau/c1" in theirs.metrics[-1]
    assert ours.metrics[-1].keys() == theirs.metrics[-1].keys()
    for name, value in theirs.metrics[-1].items():
        assert ours.metrics[-1][name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name


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


class Watched:
    """Keeps the target's steps of the last round, over its learning rate."""

    steps: ClassVar[list[hand.Update]] = []

    def on_round_start(self, run: Any) -> None:
        self.steps.clear()
        super().on_round_start(run)  # type: ignore[misc]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        before = {name: tensor.double() for name, tensor in weights(self, "c2").items()}
        super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        after = weights(self, "c2")
        step = {name: (after[name].double() - before[name]) / (0.4 * LR) for name in before}
        if any(bool(tensor.any()) for tensor in step.values()):  # sources have more batches
            self.steps.append(step)


class WatchedDA(Watched, NotedDA):
    """FedDA."""


class WatchedGP(Watched, NotedGP):
    """FedGP."""


@pytest.mark.parametrize("rule", ["fedda", "fedgp"])
@pytest.mark.parametrize("optimizer", [partial(SGD, momentum=0.9), Adam])
def test_weights_from_steps_are_those_of_auto_beta(rule: Literal["fedda", "fedgp"], optimizer: Any) -> None:
    """Appendix A.5 in the paper's practice: batches are steps, and a source's gradient its mean step."""
    method: Any = WatchedDA if rule == "fedda" else WatchedGP
    more = {} if rule == "fedda" else {"residual": "exact"}
    build_optimizer = partial(optimizer, lr=LR)
    module = build(method, beta="auto", estimate_from="steps", target_lr_ratio=0.4, optimizer=build_optimizer, **more)
    logged = fit(module, rounds=2).metrics[-1]
    locals_ = module.notes[-1][0]
    sources = [{k: t / locals_[name].path for k, t in locals_[name].update.items()} for name in NAMES[:-1]]
    expected = auto_beta(module.steps, sources, rule, "layer")
    assert len(module.steps) == 4
    assert logged["target_variance"] == pytest.approx(expected.target_variance.item(), rel=1e-3)
    for index, name in enumerate(NAMES[:-1]):
        assert logged[f"beta/{name}"] == pytest.approx(expected.beta[index].item(), rel=1e-3)
        assert logged[f"distance/{name}"] == pytest.approx(expected.distance[index].item(), rel=1e-3)


@pytest.mark.parametrize("estimate_from", ["gradients", "steps"])
def test_rates_of_0_are_told_as_such(estimate_from: str) -> None:
    module = build(beta="auto", estimate_from=estimate_from, lr_scheduler=idle)
    with pytest.raises(RosterError, match="were 0 in a whole round"):
        fit(module)


def test_repeated_passes_over_the_same_samples_tell_no_more() -> None:
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


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"lr_scheduler": idle}, "RosterError: .*were 0 in a whole round", marks=pytest.mark.slow),
        ({"method": hand.Overshoot}, "DivergedError: .*NaN or infinite entries"),
    ],
)
def test_what_the_target_finds_wrong_with_its_steps_is_an_error_on_all_processes(
    arguments: dict[str, Any], message: str
) -> None:
    errors = [one.error for one in processes.run(hand.fit_on_processes, arguments, ranks=2)]
    assert all(message.partition(":")[0] in error for error in errors), errors
    assert any(re.search(message, error) for error in errors), errors  # the text may be in that of its process alone


MECHANISM = GaussianMechanism(clip_norm=10.0, noise_multiplier=1e-9)


@pytest.mark.parametrize(
    ("arguments", "strategy", "message"),
    [
        ({"beta": "auto", "residual": "exact"}, MASKED, "single updates"),
        ({}, {"differential_privacy": MECHANISM}, "for the channel 'update' alone. .* for some of \\['update'\\]"),
        ({}, {"differential_privacy": {"model": MECHANISM}}, "cannot blur channel 'model'"),
        ({"beta": "auto"}, {"differential_privacy": {"update": MECHANISM}}, "take a fixed beta"),
        ({"align_magnitudes": True}, {"differential_privacy": {"update": MECHANISM}}, "align_magnitudes=False"),
        ({}, {"two_party": PlainAffine()}, "channel 'update' is open"),
        ({"projection": "cosine"}, MASKED | {"two_party": PlainAffine()}, "projection='orthogonal'"),
        ({"warmup_rounds": 1}, {"privacy": {"weights": PairwiseMasking(colluders=0)}}, "but not 'update'"),
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


@pytest.mark.parametrize("strategy", [{}, MASKED], ids=["open", "masked"])
def test_one_step_of_the_target_has_no_variance_for_auto_weights(strategy: Any) -> None:
    with pytest.raises(RosterError, match="at least 2"):
        fit(build(beta="auto"), batch_size=64, strategy=strategy)
    fit(build(beta="auto"), batch_size=14, strategy=strategy)  # two


@pytest.mark.parametrize(("case", "strategy"), [("FedDA, aligned", MASKED), ("cosine by layer, aligned", {})])
def test_a_fixed_beta_needs_neither_a_learning_rate_nor_a_second_step(case: str, strategy: Any) -> None:
    settings = hand.CASES[case]
    module = build(hand.noted(settings.method), **settings.kwargs, lr_scheduler=idle)
    snapshots = fit(module, rounds=2, batch_size=64, strategy=strategy)
    for name in NAMES:
        assert torch.equal(snapshots.rounds[0][name][W], snapshots.start[name].state_dict()[W])
    check_steps(module, settings, first=1)
    assert float(module.notes[1][1][W].abs().max()) > 1e-3
    logged = snapshots.metrics[1]
    assert logged["beta"] == pytest.approx(sum(hand.settings_betas(settings).values()) / 2)
    assert not [name for name in logged if name.startswith(("target_variance", "distance/", "tau/"))]
    assert ("beta/c0" in logged) == (not strategy)


@pytest.mark.parametrize(("method", "more"), [(FedDA, MASKED), (FedGP, {})])
def test_differential_privacy_of_updates_trains_with_a_fixed_beta(method: type[FedDA], more: Any) -> None:
    wide, narrow, plain = build(method), build(method), build(method)
    expected = fit(plain, rounds=2, strategy=more).rounds[-1]["c2"]
    ours = fit(wide, rounds=2, strategy={"differential_privacy": {"update": MECHANISM}, **more}).rounds[-1]["c2"]
    torch.testing.assert_close(ours, expected, atol=3e-6, rtol=0)
    clip = GaussianMechanism(clip_norm=1e-3, noise_multiplier=1e-9)
    clipped = fit(narrow, rounds=2, strategy={"differential_privacy": {"update": clip}, **more}).rounds[-1]["c2"]
    if method is FedGP:  # which does not depend on the length of a source's update
        torch.testing.assert_close(clipped[W], expected[W], atol=1e-5, rtol=0)
    else:
        assert float((clipped[W] - expected[W]).abs().max()) > 1e-3
    assert sorted(wide.federation.accounts["message"].clients) == ["c0", "c1"]
    assert hand.talk(wide, "update", 0)
