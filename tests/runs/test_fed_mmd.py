"""FedMMD: its steps against the discrepancy over all pairs of samples, its two exchanges, and what they send."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from fedlit.federation import ChannelError, Client, Schedule
from fedlit.functional import taylor_moments
from fedlit.methods import FedMMD
from fedlit.models import MLP, Bottleneck, Committee, MomentReplica
from fedlit.privacy import (
    BFV,
    CKKS,
    CKKSAffine,
    FixedPoint,
    GaussianMechanism,
    Paillier,
    PaillierAffine,
    PairwiseMasking,
    PlainAffine,
    PrivacyError,
)
from helpers import digits, loader, same, shards, trainer, weights

LR = 0.5
NAMES = ["c0", "c1", "c2"]
SIZES = (20, 17, 14)
WIDTH = 4


class Linear(nn.Linear):
    """An extractor of 5 numbers to 4 features."""

    def __init__(self) -> None:
        super().__init__(5, WIDTH)


def build(names: list[str] | None = None, **kwargs: Any) -> FedMMD:
    torch.manual_seed(0)
    given = NAMES if names is None else names
    kwargs.setdefault("optimizer", lambda params: SGD(params, lr=LR))
    return FedMMD(
        given,
        given[-1],
        2,
        kwargs.pop("extractor", None) or Linear(),
        **({"mmd_weight": 1.0, "warmup_rounds": 0} | kwargs),
    )


def unequal() -> dict[str, TensorDataset]:
    """Clients of 20, 17 and 14 samples around different centres."""
    data = shards(3, 20)
    return {
        name: TensorDataset(data[name].tensors[0][:size] + 0.5 * i, data[name].tensors[1][:size])
        for i, (name, size) in enumerate(zip(NAMES, SIZES, strict=True))
    }


class Snapshots(pl.Callback):
    """The replicas at the start, and copies of all clients' weights after each round."""

    def __init__(self) -> None:
        self.start: dict[str, nn.Module] = {}
        self.rounds: list[dict[str, dict[str, Tensor]]] = []

    def on_train_start(self, trainer: pl.Trainer, module: FedMMD) -> None:  # type: ignore[override]
        self.start = {name: copy.deepcopy(replica) for name, replica in module.replicas.named_children()}

    def on_round_end(self, trainer: pl.Trainer, module: FedMMD, round_idx: int) -> None:
        self.rounds.append({name: weights(module, name) for name, _ in module.replicas.named_children()})


def fit(module: FedMMD, data: Any = None, rounds: int = 1, batch_size: int = 64, **kwargs: Any) -> Snapshots:
    """Train; by default a batch has all samples of a client, and a round is one step."""
    snapshots = Snapshots()
    run = trainer(rounds, [snapshots, *kwargs.pop("callbacks", [])], **kwargs)
    run.fit(module, loader(unequal() if data is None else data, batch_size))
    return snapshots


def trained(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith(("extractor.", "classifier."))}


# -------------------------------------------------------------------- one step by hand


def kernel(u: Tensor, alpha: float, degree: int, center: float) -> Tensor:
    z = -alpha * (u - center)
    return math.exp(-alpha * center) * sum(z**q / math.factorial(q) for q in range(degree + 1))  # type: ignore[return-value]


def distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y[None]).square().sum(dim=2)


def step_by_hand(
    start: dict[str, nn.Module], data: dict[str, TensorDataset], degree: int, center: float | None, within: str,
    unit_norm: bool, alpha: float | None = None,
) -> dict[str, dict[str, Tensor]]:  # fmt: skip
    """Weights after one step from sums over all pairs (equations 3 to 6 and 18 to 20); degree 0: of the Gaussian."""
    if alpha is None:
        alpha = 1 / 4 if unit_norm else 1 / (4 * WIDTH)
    replicas = {name: copy.deepcopy(replica) for name, replica in start.items()}
    raw = {name: replicas[name].extractor(data[name].tensors[0]).double() for name in NAMES}  # type: ignore[union-attr, operator]
    v = {name: F.normalize(each, dim=1) if unit_norm else each for name, each in raw.items()}
    if center is None:
        center = float(torch.stack([distances(v[s], v["c2"]).detach().mean() for s in NAMES[:-1]]).mean())

    def values(u: Tensor, exact: bool) -> Tensor:
        return torch.exp(-alpha * u) if exact else kernel(u, alpha, degree, center)

    def mean_within(x: Tensor) -> Tensor:
        u = distances(x, x)[~torch.eye(len(x), dtype=torch.bool)]
        return values(u, within == "exact").mean()

    def across(x: Tensor, y: Tensor) -> Tensor:
        return -2 * values(distances(x, y), degree == 0).mean()

    total = mean_within(v["c2"])
    for name in NAMES[:-1]:
        readable = v[name].float() * (math.sqrt(WIDTH) if unit_norm else 1)
        total = total + F.cross_entropy(replicas[name].classifier(readable), data[name].tensors[1])  # type: ignore[operator]
        total = total + mean_within(v[name]) + across(v[name], v["c2"].detach())
        total = total + across(v[name].detach(), v["c2"]) / 2
    total.backward()
    result = {}
    for name, replica in replicas.items():
        params = dict(replica.named_parameters())
        result[name] = {key: (p if p.grad is None else p - LR * p.grad).detach() for key, p in params.items()}
    return result


@pytest.mark.parametrize("exchange", ["summed", "pairwise"])
@pytest.mark.parametrize(
    ("degree", "center", "within", "unit_norm"),
    [
        (1, None, "truncated", True),
        (2, None, "truncated", True),
        (3, None, "truncated", False),
        (2, 0.0, "exact", True),
        (2, 1.5, "truncated", False),
        (1, 0.0, "exact", False),
    ],
)
def test_a_step_is_that_of_all_pairs_of_samples(
    exchange: Any, degree: int, center: float | None, within: Any, unit_norm: bool
) -> None:
    module = build(degree=degree, center=center, within=within, unit_norm=unit_norm, exchange=exchange)
    snapshots = fit(module)
    expected = step_by_hand(snapshots.start, unequal(), degree, center, within, unit_norm)
    for name in NAMES:
        ours = trained(snapshots.rounds[0][name])
        for key, tensor in ours.items():
            torch.testing.assert_close(tensor, expected[name][key], atol=2e-6, rtol=1e-5, msg=f"{name} {key}")
    moved = snapshots.rounds[0]["c2"]["extractor.weight"] - snapshots.start["c2"].state_dict()["extractor.weight"]
    assert float(moved.abs().max()) > 1e-4


@pytest.mark.parametrize("unit_norm", [True, False])
def test_open_features_train_on_the_gaussian_kernel_itself(unit_norm: bool) -> None:
    snapshots = fit(build(exchange="open", unit_norm=unit_norm))
    expected = step_by_hand(snapshots.start, unequal(), 0, None, "exact", unit_norm)
    for name in NAMES:
        for key, tensor in trained(snapshots.rounds[0][name]).items():
            torch.testing.assert_close(tensor, expected[name][key], atol=2e-6, rtol=1e-5, msg=f"{name} {key}")


class Scaled(Linear):
    """Features in another unit."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


SAFE = {
    "open": {},
    "summed": {"privacy": {"moments": PairwiseMasking(colluders=0)}},
    "pairwise": {"two_party": {"moments": PaillierAffine(key_bits=1024, insecure_test_keys=True)}},  # arithmetic only
}


@pytest.mark.parametrize("exchange", SAFE)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_features_of_any_unit_train_the_same(exchange: Any, scale: float) -> None:
    """With alpha in that unit, the fixed-point grid holds the moments, and the discrepancy is what it was."""
    alpha = 1 / (16 * scale**2)
    module = build(extractor=Scaled(scale), unit_norm=False, alpha=alpha, exchange=exchange)
    torch.nn.init.zeros_(module.originals[1].requires_grad_(False).weight)  # which reads features in their unit
    snapshots = fit(module, strategy=SAFE[exchange])
    degree, within = (0, "exact") if exchange == "open" else (2, "truncated")
    expected = step_by_hand(snapshots.start, unequal(), degree, None, within, False, alpha)
    for name in NAMES:
        start = snapshots.start[name].state_dict()
        for key, tensor in trained(snapshots.rounds[0][name]).items():
            torch.testing.assert_close(tensor, expected[name][key], atol=1e-4, rtol=1e-4, msg=f"{name} {key}")
        moved = snapshots.rounds[0][name]["extractor.weight"] - start["extractor.weight"]
        assert float(moved.abs().max()) > 1e-2


@pytest.mark.parametrize("exchange", ["summed", "pairwise"])
def test_features_too_long_for_alpha_leave_the_grid_with_an_error(exchange: Any) -> None:
    module = build(extractor=Scaled(1e3), unit_norm=False, exchange=exchange)
    with pytest.raises(PrivacyError, match="moments"):
        fit(module, strategy=SAFE[exchange])


@pytest.mark.parametrize("exchange", ["summed", "pairwise"])
def test_features_too_short_for_alpha_have_a_flat_kernel_and_the_right_step(exchange: Any) -> None:
    module = build(extractor=Scaled(1e-3), unit_norm=False, exchange=exchange)
    snapshots = fit(module, strategy=SAFE[exchange])
    expected = step_by_hand(snapshots.start, unequal(), 2, None, "truncated", False)
    for name in NAMES:
        for key, tensor in trained(snapshots.rounds[0][name]).items():
            torch.testing.assert_close(tensor, expected[name][key], atol=2e-6, rtol=1e-5, msg=f"{name} {key}")


def test_lambda_0_is_training_of_each_source_by_itself() -> None:
    module = build(mmd_weight=0.0)
    snapshots = fit(module, rounds=2)
    start = snapshots.start["c2"].state_dict()
    last = snapshots.rounds[-1]
    assert torch.equal(last["c2"]["extractor.weight"], start["extractor.weight"])
    assert not torch.equal(last["c0"]["extractor.weight"], last["c1"]["extractor.weight"])


def test_two_sources_of_the_same_data_are_one() -> None:
    """With S = 1 multi-source is single; so is the mean over two equal sources."""
    data = unequal()
    twice = {"c0": data["c0"], "c1": data["c0"], "c2": data["c2"]}
    two, one = fit(build(), twice, rounds=3), fit(build(["c0", "c2"]), {"c0": data["c0"], "c2": data["c2"]}, rounds=3)
    for name in ("c0", "c2"):
        for key, tensor in trained(one.rounds[-1][name]).items():
            torch.testing.assert_close(two.rounds[-1][name][key], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("exchange", ["summed", "pairwise", "open"])
def test_a_batch_of_one_sample_has_no_pairs_within(exchange: Any) -> None:
    """14 samples of the target in batches of 13: the last one is alone."""
    snapshots = fit(build(exchange=exchange), batch_size=13, rounds=2)
    for state in snapshots.rounds[-1].values():
        assert all(bool(tensor.isfinite().all()) for tensor in trained(state).values())


# -------------------------------------------------------------------- exchanges and backends


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_pairwise_and_summed_train_the_same(degree: int) -> None:
    """Several steps in a round, whose centre is that of the first one in both."""
    runs = [fit(build(degree=degree, exchange=exchange), rounds=2, batch_size=6) for exchange in ("summed", "pairwise")]
    for name in NAMES:
        for key, tensor in trained(runs[0].rounds[-1][name]).items():
            torch.testing.assert_close(runs[1].rounds[-1][name][key], tensor, atol=2e-6, rtol=1e-5)


BACKENDS = {
    "masking": lambda: PairwiseMasking(colluders=0),
    "paillier": lambda: Paillier(key_bits=512, insecure_test_keys=True),  # tests arithmetic, not secrecy
    "bfv": lambda: BFV(),
    "ckks": lambda: CKKS(),
}
PROTOCOLS = {
    "plain": lambda: PlainAffine(),
    "paillier": lambda: PaillierAffine(key_bits=1024, insecure_test_keys=True),  # tests arithmetic, not secrecy
    "ckks": lambda: CKKSAffine(),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_moments_train_as_open_ones_within_the_grid(backend: str) -> None:
    """An error of a mean of moments moves a gradient by that times the kernel's coefficients, all below 1 here."""
    open_ = fit(build(), rounds=2)
    hidden = fit(build(), rounds=2, strategy={"privacy": {"moments": BACKENDS[backend]()}})
    bound = 21 * float(BACKENDS[backend]().error_bound(2)) + 1e-6
    for name in NAMES:
        for key, tensor in trained(open_.rounds[-1][name]).items():
            assert float((hidden.rounds[-1][name][key] - tensor).abs().max()) < bound


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_encrypted_gradients_train_as_plain_ones(protocol: str) -> None:
    short = {"local_steps": 1}
    open_ = fit(build(exchange="pairwise"), rounds=2, strategy=short)
    chosen = {"two_party": {"moments": PROTOCOLS[protocol]()}}
    hidden = fit(build(exchange="pairwise"), rounds=2, strategy=short | chosen)
    tolerance = 1e-3 if protocol == "ckks" else 2e-6
    for name in NAMES:
        for key, tensor in trained(open_.rounds[-1][name]).items():
            assert float((hidden.rounds[-1][name][key] - tensor).abs().max()) < tolerance, (name, key)


def sizes(module: FedMMD, channel: str) -> list[int]:
    return [entry.num_bytes for entry in module.federation.ledger if entry.channel == channel]


def test_messages_have_the_size_of_the_moments_whatever_the_batch() -> None:
    """14 numbers up at degree 2 and 4 features, and the centre with them down; twice the samples, the same bytes."""
    data = {name: TensorDataset(*(torch.cat([t, t]) for t in each.tensors)) for name, each in unequal().items()}
    modules = [build(), build()]
    fit(modules[0])
    fit(modules[1], data)
    for channel in ("moments", "target_moments"):
        assert sizes(modules[0], channel) == sizes(modules[1], channel)
    deep = build(degree=1)
    fit(deep)
    # 14 and 4 numbers of 4 bytes, and a header that says how many
    for more, less in zip(sizes(modules[0], "moments"), sizes(deep, "moments"), strict=True):
        assert 4 * 10 <= more - less < 4 * 11


def test_summed_moments_reach_the_target_as_a_mean_alone() -> None:
    module = build()
    fit(module)
    talk = {(entry.channel, entry.sender, entry.receiver) for entry in module.federation.ledger}
    assert {pair for pair in talk if pair[0] == "target_moments"} == {
        ("target_moments", "c2", "c0"),
        ("target_moments", "c2", "c1"),
    }
    assert not [pair for pair in talk if pair[0] == "moments" and {pair[1], pair[2]} <= set(NAMES)]


def test_large_features_leave_the_grid_with_an_error_and_not_silently() -> None:
    data = unequal()
    x, y = data["c0"].tensors
    data["c0"] = TensorDataset(1e4 * x, y)
    module = build(unit_norm=False, degree=3)
    with pytest.raises(PrivacyError, match="moments"):
        fit(module, data, strategy={"privacy": {"moments": PairwiseMasking(codec=FixedPoint(20, 32.0), colluders=0)}})


# -------------------------------------------------------------------- classifiers of the sources


def test_the_target_predicts_with_the_mean_of_the_sources_classifiers() -> None:
    module = build()
    fit(module, rounds=2)
    committee = module.replicas["c2"]
    assert isinstance(committee, Committee)
    x = torch.randn(7, 5)
    features = 2.0 * F.normalize(committee.extractor(x), dim=1)  # sqrt(L)
    each = [module.replicas[name].classifier(features).softmax(dim=1) for name in ("c0", "c1")]
    torch.testing.assert_close(committee(x).exp(), (each[0] + each[1]) / 2)
    torch.testing.assert_close(module(x), committee(x))


def test_classifiers_come_every_few_rounds_and_at_the_end() -> None:
    def rounds(period: int | None) -> list[int]:
        module = build(classifier_period=period, warmup_rounds=1)
        fit(module, rounds=6)
        return sorted({entry.round_idx for entry in module.federation.ledger if entry.channel == "classifier"})

    assert rounds(None) == [5]
    assert rounds(1) == [1, 2, 3, 4, 5]
    assert rounds(4) == [3, 5]


def test_before_classifiers_came_the_target_predicts_with_that_of_the_pre_training() -> None:
    module = build(classifier_period=None, warmup_rounds=2)
    snapshots = fit(module, rounds=2)
    last = snapshots.rounds[-1]
    for name in ("extractor.weight", "classifier.weight"):
        assert torch.equal(last["c2"][name], last["c0"][name])
    x = torch.randn(7, 5)
    torch.testing.assert_close(module(x), module.replicas["c0"](x))
    assert not bool(module.replicas["c2"].informed.any())


def test_classifiers_under_differential_privacy_are_clipped_around_that_of_the_pre_training() -> None:
    """Clipped around 0, they would lose nearly all their length; around what all know, only their own steps."""
    clip = 1e-3
    mechanism = GaussianMechanism(clip_norm=clip, noise_multiplier=1e-9)
    module = build(warmup_rounds=1)
    snapshots = fit(module, rounds=3, strategy={"differential_privacy": {"classifier": mechanism}})
    public, state = snapshots.rounds[0]["c0"], snapshots.rounds[-1]
    for i, source in enumerate(("c0", "c1")):
        gaps = {
            holder: torch.cat(
                [(state[name][f"{prefix}.{key}"] - public[f"classifier.{key}"]).flatten() for key in ("weight", "bias")]
            ).norm()
            for holder, name, prefix in (("own", source, "classifier"), ("told", "c2", f"members.{i}"))
        }
        assert float(gaps["own"]) > 20 * clip
        assert float(gaps["told"]) == pytest.approx(clip, rel=1e-3)


def test_a_source_that_is_away_is_no_member_until_it_comes() -> None:
    away = {"participation": Schedule([["c0", "c2"], NAMES])}
    snapshots = fit(build(), rounds=2, strategy=away)
    assert [each["c2"]["informed"].tolist() for each in snapshots.rounds] == [[True, False], [True, True]]
    at_the_end = fit(build(classifier_period=None), rounds=1, strategy=away)
    assert at_the_end.rounds[0]["c2"]["informed"].tolist() == [True, True], "the last round asks everybody"
    assert torch.equal(snapshots.rounds[0]["c1"]["extractor.weight"], snapshots.start["c1"].extractor.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("exchange", ["summed", "pairwise", "open"])
def test_without_the_target_or_without_sources_nothing_is_aligned(exchange: Any) -> None:
    """Sources that are there train on their labels."""
    alone = fit(build(mmd_weight=0.0))
    for present in (["c0", "c1"], ["c2"]):
        snapshots = fit(build(exchange=exchange), strategy={"participation": Schedule([present])})
        start = snapshots.start["c2"].state_dict()["extractor.weight"]
        assert torch.equal(snapshots.rounds[0]["c2"]["extractor.weight"], start)
        if "c0" in present:
            ours, theirs = (each.rounds[0]["c0"]["extractor.weight"] for each in (snapshots, alone))
            torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-6)


def test_a_run_that_is_stopped_early_still_gives_the_target_its_classifiers() -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            trainer.should_stop = True

    module = build(classifier_period=None)
    fit(module, rounds=5, callbacks=[Stop()])
    assert module.federation.round_idx == 1
    assert bool(module.replicas["c2"].informed.all())


# -------------------------------------------------------------------- resume


@pytest.mark.parametrize("exchange", ["summed", "pairwise", "open"])
def test_a_checkpoint_within_a_round_resumes_bit_for_bit(exchange: Any, tmp_path: Path) -> None:
    def go(callbacks: list[pl.Callback], checkpoint: str | None = None) -> tuple[FedMMD, Snapshots]:
        torch.manual_seed(7)
        module = build(exchange=exchange, warmup_rounds=1, optimizer=lambda params: Adam(params, lr=0.02))
        snapshots = Snapshots()
        run = trainer(3, [snapshots, *callbacks], enable_checkpointing=bool(callbacks))
        run.fit(module, loader(unequal(), 5), ckpt_path=checkpoint)
        return module, snapshots

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight, everything = go([saver])
    for step in (2, 6, 9):  # rounds of 4 steps
        resumed, rest = go([], str(tmp_path / f"step={step}.ckpt"))
        for name in NAMES:
            assert same(everything.rounds[-1][name], rest.rounds[-1][name]), (step, name)
        if exchange == "summed":  # pairs exchange their keys again
            assert straight.federation.ledger == resumed.federation.ledger


# -------------------------------------------------------------------- errors and warnings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"degree": 4}, r"degree \(D\) must be one of \[1, 2, 3\], got 4"),
        ({"alpha": -1.0}, "alpha must be positive and finite, got -1.0"),
        ({"center": -1.0}, r"center \(c\) must be at least 0, got -1"),
        ({"within": "all"}, "within must be 'truncated' or 'exact', got 'all'"),
        ({"mmd_weight": math.nan}, r"mmd_weight \(lambda\) must be at least 0 and finite, got nan"),
        ({"exchange": "closed"}, "exchange must be 'summed', 'pairwise' or 'open', got 'closed'"),
        ({"classifier_period": 0}, r"classifier_period \(T_C\) must be at least 1 round, .* got 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_protection_that_the_exchange_does_not_use_is_refused() -> None:
    with pytest.raises(ChannelError, match=r"two_party does not protect channel 'moments' .* take exchange='pairwise'"):
        fit(build(), strategy={"two_party": {"moments": PlainAffine()}})
    with pytest.raises(ChannelError, match=r"no channel of this run is pairwise: .* take exchange='pairwise'"):
        fit(build(), strategy={"two_party": PlainAffine()})
    for exchange in ("pairwise", "open"):
        for privacy in (PairwiseMasking(colluders=0), {"moments": PairwiseMasking(colluders=0)}):
            message = "privacy does not protect channel 'moments' .* take exchange='summed'"
            with pytest.raises(ChannelError, match=message):
                fit(build(exchange=exchange), strategy={"privacy": privacy})


def test_features_that_may_be_repelled_are_warned_about_once() -> None:
    with pytest.warns(
        UserWarning, match=r"features are up to [\d.]+ long, .* degree 2 repels: lower alpha \(2\)"
    ) as told:
        fit(build(unit_norm=False, alpha=2.0), rounds=3)
    assert len([warning for warning in told if "repels" in str(warning.message)]) == 1
    for kwargs in ({"unit_norm": False, "alpha": 2.0, "degree": 3}, {}):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*repels")
            fit(build(**kwargs))


def test_a_single_source_cannot_be_hidden_in_a_sum() -> None:
    data = unequal()
    few = {"c0": data["c0"], "c2": data["c2"]}
    with pytest.raises(ChannelError, match=r"\['c0'\] alone can send over channel 'moments'"):
        fit(build(["c0", "c2"]), few, strategy={"privacy": {"moments": PairwiseMasking(colluders=0)}})
    alone = {"privacy": {"moments": PairwiseMasking(colluders=0)}, "participation": Schedule([["c0", "c2"]])}
    with pytest.warns(UserWarning, match="moments"):
        snapshots = fit(build(), strategy=alone)
    assert torch.equal(
        snapshots.rounds[0]["c2"]["extractor.weight"], snapshots.start["c2"].state_dict()["extractor.weight"]
    )


def test_replicas_by_hand() -> None:
    extractor = Bottleneck(MLP(6, [5]), 3)
    x = torch.randn(4, 6)
    torch.testing.assert_close(extractor(x), extractor.layer(extractor.extractor(x)))
    assert extractor.out_features == 3
    with pytest.raises(ValueError, match="out_features must be at least 1, got 0"):
        Bottleneck(MLP(6, [5]), 0)
    with pytest.raises(TypeError, match="out_features"):
        Bottleneck(nn.ReLU(), 3)
    classifier = nn.Linear(3, 2)
    unit, free = MomentReplica(extractor, classifier, True), MomentReplica(extractor, classifier, False)
    z = extractor(x)
    torch.testing.assert_close(unit.features(x).norm(dim=1), torch.ones(4))
    torch.testing.assert_close(unit(x), classifier(math.sqrt(3) * z / z.norm(dim=1, keepdim=True)))
    torch.testing.assert_close(free(x), classifier(z))
    torch.testing.assert_close(taylor_moments(unit.features(x), 2)[1:3], torch.ones(2, dtype=torch.float64))


def test_digits_train_with_labels_of_the_target_hidden() -> None:
    data = digits()
    torch.manual_seed(0)
    module = FedMMD(data.clients, data.target, data.num_classes, Bottleneck(MLP(64, [32]), 8), warmup_rounds=2)
    run = trainer(4)
    run.fit(module, data)
    assert isinstance(module.clients[-1], Client)
    assert float(run.callback_metrics["target/score"]) > 0
    assert float(run.callback_metrics["source/acc"]) > 0.3
