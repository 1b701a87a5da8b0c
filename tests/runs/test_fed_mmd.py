"""FedMMD: its steps against the discrepancy over all pairs of samples, its two exchanges, and what they send."""

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

from fedlit.federation import ChannelError, Schedule
from fedlit.federation.messenger import Messenger
from fedlit.methods import FedMMD
from fedlit.models import Committee, MomentReplica
from fedlit.privacy import GaussianMechanism, PaillierAffine, PairwiseMasking, PlainAffine, PrivacyError
from helpers import fit, unequal

LR = 0.5
NAMES = ["c0", "c1", "c2"]
WIDTH = 4


class Linear(nn.Linear):
    """An extractor of 5 numbers to 4 features."""

    def __init__(self) -> None:
        super().__init__(5, WIDTH)


def build(names: list[str] | None = None, **kwargs: Any) -> FedMMD:
    torch.manual_seed(0)
    names = names or NAMES
    given: dict[str, Any] = {"mmd_weight": 1.0, "warmup_rounds": 0, "optimizer": lambda p: SGD(p, lr=LR)} | kwargs
    return FedMMD(names, names[-1], 2, given.pop("extractor", None) or Linear(), **given)


def trained(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith(("extractor.", "classifier."))}


def kernel(u: Tensor, alpha: float, degree: int, center: float) -> Tensor:
    z = -alpha * (u - center)
    return math.exp(-alpha * center) * sum(z**q / math.factorial(q) for q in range(degree + 1))  # type: ignore[return-value]


def distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y[None]).square().sum(dim=2)


def step_by_hand(
    start: dict[str, nn.Module], data: dict[str, TensorDataset], degree: int, center: float | None, within: str,
    unit_norm: bool, alpha: float | None = None, asked: tuple[int | None, int | None] = (None, None),
) -> dict[str, dict[str, Tensor]]:  # fmt: skip
    """Weights after one step from sums over all pairs (equations 3 to 6 and 18 to 20); degree 0: of the Gaussian.

    ``asked``: at how many of their first samples the target and the sources have a gradient of L_p3; ``None`` is all.
    """
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
        total = total + mean_within(v[name]) + across(v[name][: asked[1]], v["c2"].detach())
        total = total + across(v[name].detach(), v["c2"][: asked[0]]) / 2
    total.backward()
    result = {}
    for name, replica in replicas.items():
        params = dict(replica.named_parameters())
        result[name] = {key: (p if p.grad is None else p - LR * p.grad).detach() for key, p in params.items()}
    return result


@pytest.mark.parametrize(
    ("exchange", "degree", "center", "within", "unit_norm"),
    [
        ("summed", 2, None, "truncated", True),
        ("summed", 3, None, "truncated", False),
        ("summed", 2, 0.0, "exact", True),
        ("summed", 1, 1.5, "truncated", False),
        ("pairwise", 3, None, "truncated", True),
        ("pairwise", 1, 0.0, "exact", False),
        ("open", 0, None, "exact", True),
        ("open", 0, None, "exact", False),
    ],
)
def test_a_step_is_that_of_all_pairs_of_samples(
    exchange: Any, degree: int, center: float | None, within: Any, unit_norm: bool
) -> None:
    series = {"degree": degree, "center": center, "within": within} if degree else {}  # 0: the Gaussian kernel itself
    snapshots = fit(build(unit_norm=unit_norm, exchange=exchange, **series))
    expected = step_by_hand(snapshots.start, unequal(), degree, center, within, unit_norm)
    for name in NAMES:
        ours = trained(snapshots.rounds[0][name])
        torch.testing.assert_close(ours, {key: expected[name][key] for key in ours}, atol=2e-6, rtol=1e-5)
    moved = snapshots.rounds[0]["c2"]["extractor.weight"] - snapshots.start["c2"].state_dict()["extractor.weight"]
    assert float(moved.abs().max()) > 1e-4


def test_gradients_are_of_as_many_samples_as_leave_the_moments_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 numbers about the 34 moments: the target's distance, value and 2 samples of 4; 1 of each of two sources."""
    monkeypatch.setattr(PlainAffine, "most_outputs", lambda self, num_moments: {34: 12}[num_moments])
    seen: dict[str, Tensor] = {}
    features = MomentReplica.features
    module = build(exchange="pairwise", degree=3)

    def noted(replica: MomentReplica, x: Tensor) -> Tensor:
        seen[next(name for name in NAMES if module.replicas[name] is replica)] = x
        return features(replica, x)

    monkeypatch.setattr(MomentReplica, "features", noted)
    snapshots = fit(module)
    data = {}
    for name, whole in unequal().items():  # in the batch's order
        found = torch.cdist(seen[name], whole.tensors[0]).argmin(dim=1)
        data[name] = TensorDataset(*(tensor[found] for tensor in whole.tensors))
    expected = step_by_hand(snapshots.start, data, 3, None, "truncated", True, asked=(2, 1))
    for name in NAMES:
        ours = trained(snapshots.rounds[0][name])
        torch.testing.assert_close(ours, {key: expected[name][key] for key in ours}, atol=2e-6, rtol=1e-5)


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
    "pairwise": {"two_party": {"moments": PaillierAffine(None, 1024, True, reveal_moments=True)}},  # arithmetic only
}


@pytest.mark.parametrize(("exchange", "scale"), [("open", 1e3), ("summed", 1e-3), ("pairwise", 1e3)])
def test_features_of_any_unit_train_the_same(exchange: Any, scale: float) -> None:
    alpha = 1 / (16 * scale**2)
    module = build(extractor=Scaled(scale), unit_norm=False, alpha=alpha, exchange=exchange)
    torch.nn.init.zeros_(module.originals[1].requires_grad_(False).weight)  # which reads features in their unit
    snapshots = fit(module, strategy=SAFE[exchange])
    degree, within = (0, "exact") if exchange == "open" else (2, "truncated")
    expected = step_by_hand(snapshots.start, unequal(), degree, None, within, False, alpha)
    for name in NAMES:
        start, ours = snapshots.start[name].state_dict(), trained(snapshots.rounds[0][name])
        torch.testing.assert_close(ours, {key: expected[name][key] for key in ours}, atol=1e-4, rtol=1e-4)
        moved = ours["extractor.weight"] - start["extractor.weight"]
        assert float(moved.abs().max()) > 1e-2


@pytest.mark.parametrize("exchange", ["summed", "pairwise"])
def test_features_too_long_for_alpha_leave_the_grid_with_an_error(exchange: Any) -> None:
    module = build(extractor=Scaled(1e3), unit_norm=False, exchange=exchange)
    with pytest.raises(PrivacyError, match="moments"):
        fit(module, strategy=SAFE[exchange])


@pytest.mark.parametrize("exchange", ["summed", "pairwise", "open"])
def test_a_batch_of_one_sample_has_no_pairs_within(exchange: Any) -> None:
    snapshots = fit(build(exchange=exchange), batch_size=13, rounds=2)
    for state in snapshots.rounds[-1].values():
        assert all(bool(tensor.isfinite().all()) for tensor in trained(state).values())


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


def test_in_the_papers_mode_extractors_are_averaged_and_classifiers_stay_until_the_end() -> None:
    """What the target learns: the mean extractor of the warm-up, and each source's classifier after the last round."""
    module = build(classifier_period=None, warmup_rounds=2, weighting="uniform")
    snapshots = fit(module, rounds=4)
    start = snapshots.start["c2"].state_dict()
    for state in snapshots.rounds[:2]:  # of the warm-up
        for part in ("weight", "bias"):
            assert torch.equal(state["c2"][f"extractor.{part}"], state["c0"][f"extractor.{part}"])
            assert torch.equal(state["c2"][f"classifier.{part}"], start[f"classifier.{part}"])
        assert not torch.equal(state["c0"]["classifier.weight"], state["c1"]["classifier.weight"])
    assert not torch.equal(snapshots.rounds[1]["c2"]["extractor.weight"], start["extractor.weight"])
    assert snapshots.rounds[2]["c2"]["informed"].tolist() == [False, False]
    for index, source in enumerate(("c0", "c1")):
        assert torch.equal(
            snapshots.rounds[3]["c2"][f"members.{index}.weight"], snapshots.rounds[3][source]["classifier.weight"]
        )


@pytest.mark.parametrize("exchange", ["summed", "pairwise", "open"])
def test_one_source_of_pooled_samples_has_the_loss_of_equations_16_and_17(exchange: Any) -> None:
    """Two participants' samples 0, 1 and 3 as one source, a target at 0 and 2; features (x, 0, 0, 0).

    With alpha = 1, around 0, u = d^2: L_p1 is the mean of k over the pairs 0-1 (u = 1), 0-3 (9) and 1-3 (4), whoever
    has them, and L_p3 -2 times that over 0-0 (0), 0-2 (4), 1-0 (1), 1-2 (1), 3-0 (9), 3-2 (1).
    """

    def k(u: int) -> float:
        return math.exp(-u) if exchange == "open" else 1 - u + u * u / 2

    x = torch.zeros(3, 5).index_put((torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0])), torch.tensor([0.0, 1.0, 3.0]))
    data = {
        "c0": TensorDataset(x, torch.zeros(3, dtype=torch.long)),
        "c1": TensorDataset(x[[0, 0]], torch.zeros(2, dtype=torch.long)),
    }
    data["c1"].tensors[0][1, 0] = 2.0
    extractor = Linear()
    with torch.no_grad():
        extractor.weight.zero_()[0, 0] = 1.0
        extractor.bias.zero_()
    losses: dict[str, Tensor] = {}

    class Noting(FedMMD):
        def losses(self, batch: Any) -> dict[str, Tensor]:
            found = super().losses(batch)
            losses.update({name: each.detach() for name, each in found.items()})
            return found

    series = {} if exchange == "open" else {"center": 0.0}
    module = Noting(
        ["c0", "c1"],
        "c1",
        2,
        extractor,
        warmup_rounds=0,
        mmd_weight=1.0,
        alpha=1.0,
        unit_norm=False,
        exchange=exchange,
        optimizer=lambda p: SGD(p, lr=0.0),
        **series,
    )
    fit(module, data)
    p1, p2 = (k(1) + k(9) + k(4)) / 3, k(4)
    p3 = -2 * (k(0) + k(4) + k(1) + k(1) + k(9) + k(1)) / 6
    task = F.cross_entropy(module.replicas["c0"].classifier(extractor(x)), data["c0"].tensors[1])
    assert losses["c0"].item() == pytest.approx(float(task.detach()) + p1 + p3, rel=1e-5)
    assert losses["c1"].item() == pytest.approx(p2 + p3, rel=1e-5)


def test_classifiers_under_differential_privacy_are_clipped_around_that_of_the_pre_training() -> None:
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


@pytest.mark.parametrize("exchange", ["summed", "pairwise"])
def test_without_the_target_or_without_sources_nothing_is_aligned(exchange: Any) -> None:
    alone = fit(build(mmd_weight=0.0))
    for present in (["c0", "c1"], ["c2"]):
        snapshots = fit(build(exchange=exchange), strategy={"participation": Schedule([present])})
        start = snapshots.start["c2"].state_dict()["extractor.weight"]
        assert torch.equal(snapshots.rounds[0]["c2"]["extractor.weight"], start)
        if "c0" in present:
            ours, theirs = (each.rounds[0]["c0"]["extractor.weight"] for each in (snapshots, alone))
            torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("exchange", "strategy"),
    [
        ("summed", {"two_party": {"moments": PlainAffine()}}),
        ("summed", {"two_party": PlainAffine()}),
        ("pairwise", {"privacy": PairwiseMasking(colluders=0)}),
        ("open", {"privacy": {"moments": PairwiseMasking(colluders=0)}}),
    ],
)
def test_protection_that_the_exchange_does_not_use_is_refused(exchange: Any, strategy: Any) -> None:
    with pytest.raises(ChannelError, match=r"privacy|two_party"):
        fit(build(exchange=exchange), strategy=strategy)


def test_features_that_may_be_repelled_are_warned_about_once() -> None:
    with pytest.warns(UserWarning, match=r"degree 2 repels") as told:
        fit(build(unit_norm=False, alpha=2.0), rounds=3)
    assert len([warning for warning in told if "repels" in str(warning.message)]) == 1


def test_a_single_source_cannot_be_hidden_in_a_sum() -> None:
    data = unequal()
    few = {"c0": data["c0"], "c2": data["c2"]}
    with pytest.raises(ChannelError, match=r"alone can send .*'moments'"):
        fit(build(["c0", "c2"]), few, strategy={"privacy": {"moments": PairwiseMasking(colluders=0)}})


@pytest.mark.parametrize(
    ("backend", "announced"),
    [
        (PairwiseMasking(), 5),  # of three sources none may vanish anyway
        (PairwiseMasking(threshold=0.6, colluders=0), 11),
    ],
)
def test_a_masked_step_has_five_announcements_where_no_source_may_vanish(
    backend: PairwiseMasking, announced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys up and down, vectors, the total, and the target's moments; with shares, three times two more."""
    calls: list[str] = []
    announce = Messenger.announce_with

    def counted(self: Messenger, channel: str, *args: Any, **given: Any) -> Any:
        calls.append(channel)
        return announce(self, channel, *args, **given)

    monkeypatch.setattr(Messenger, "announce_with", counted)
    counts = []
    for steps in (2, 3):
        calls.clear()
        module = build(["c0", "c1", "c2", "c3"])
        fit(module, unequal(24, 24, 24, 24), batch_size=8, strategy={"privacy": backend, "local_steps": steps})
        counts.append(len(calls))
    assert counts[1] - counts[0] == announced
