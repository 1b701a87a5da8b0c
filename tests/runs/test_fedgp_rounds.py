"""FedDA and FedGP: rounds that clients miss, the hidden rule against the open one, and who is sent what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedgp_by_hand as hand
from backends import BACKENDS, NEEDS, PROTOCOLS, backend
from fedgp_by_hand import CASES, GRID, NAMES, B, Settings, W, Wire, build, check_steps, fit, talk, unequal, zero_layer
from fedlit import Client
from fedlit.federation import Schedule
from fedlit.methods import FedDA, FedGP, TargetOnly
from fedlit.privacy import PairwiseMasking, PlainAffine
from helpers import Snapshots, same, shards
from refused import slow


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
        strategy["privacy"] = PairwiseMasking(colluders=0)
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
    assert same(first["c1"], snapshots.start["c1"].state_dict())
    assert same(first["c0"], first["c2"])
    assert same(second["c1"], second["c2"])
    booked = [entry for entry in module.federation.ledger if entry.channel == "model"]
    assert [(e.round_idx, e.receiver, e.messages) for e in booked] == [(0, "c0", 1), (1, "c1", 2), (1, "c0", 1)]


@pytest.mark.parametrize("privacy", [None, PairwiseMasking(colluders=0)])
def test_with_nobody_there_the_targets_own_update_is_taken(privacy: Any) -> None:
    strategy: dict[str, Any] = {"participation": Schedule([["c2"]]), "privacy": privacy}
    module, alone = build(beta="auto"), build(TargetOnly)
    ours = fit(module, rounds=2, strategy=strategy)
    theirs = fit(alone, rounds=2, strategy={"participation": Schedule([["c2"]])})
    for key in (W, B):
        torch.testing.assert_close(ours.rounds[-1]["c2"][key], theirs.rounds[-1]["c2"][key], atol=1e-6, rtol=1e-6)
        assert torch.equal(ours.rounds[-1]["c0"][key], ours.start["c0"].state_dict()[key])
    assert set(module.federation.ledger.bytes_by_channel()) == {"metrics"}


@pytest.mark.parametrize(
    ("way", "hidden"), [("participation", True), ("update", False), ("update", True), ("target_update", True)]
)
def test_a_round_without_the_target_changes_nothing(way: str, hidden: bool) -> None:
    away = Schedule([["c0", "c1"], ["c0", "c1", "c2"]])
    strategy: dict[str, Any] = {"participation": away} if way == "participation" else {"heard": {way: away}}
    if hidden:
        strategy["privacy"] = PairwiseMasking(colluders=0)
    module = build(beta="auto", **hand.normalised())
    snapshots = fit(module, rounds=2, strategy={"nested_heard": False} | strategy)
    first, second = snapshots.rounds
    if way == "target_update":  # it is there, and takes its own step, as without sources
        assert not torch.equal(first["c2"][W], snapshots.start["c2"].state_dict()[W])
        assert not talk(module, "update", 0)
    else:
        for name in NAMES:
            learnt = [key for key in first[name] if not key.endswith("num_batches_tracked")]
            assert all(torch.equal(first[name][key], snapshots.start[name].state_dict()[key]) for key in learnt)
        assert {e.channel for e in module.federation.ledger if e.round_idx == 0} == {"metrics"}
        assert "beta" not in snapshots.metrics[0]
    assert not torch.equal(second["c2"][W], first["c2"][W])
    assert all(torch.equal(second[name][W], second["c2"][W]) for name in NAMES)


def test_a_dropped_update_counts_nowhere_and_its_sender_gets_the_model_all_the_same() -> None:
    heard = {"update": Schedule([["c0", "c2"]])}
    module = build(beta=hand.PER_SOURCE)
    snapshots = fit(module, strategy={"heard": heard, "nested_heard": False})
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
    for strategy in ({"heard": {channel: lost}, "nested_heard": False}, {"participation": lost}):
        module = build(clients=clients, beta=betas)
        hidden = {"privacy": PairwiseMasking(colluders=0), "two_party": PlainAffine()}
        runs.append(fit(module, data, strategy=hidden | strategy).rounds[0]["c2"])
    assert same(runs[0], runs[1])


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "masked"])
def test_a_source_that_trains_on_an_old_model_is_left_out(hidden: bool) -> None:
    """c1 does not get the models of rounds 0 and 1, but its updates get through: they are of another start."""
    clients: list[Client | str] = ["c0", "c1", "c3", Client("c2", role="target", labelled=True)]
    data = unequal() | {"c3": shards(1)["c0"]}
    some, everyone = ["c0", "c2", "c3"], ["c0", "c1", "c2", "c3"]
    more: dict[str, Any] = {"nested_heard": False} | ({"privacy": PairwiseMasking(colluders=0)} if hidden else {})
    stale, lost = build(beta="auto", clients=clients), build(beta="auto", clients=clients)
    ours = fit(stale, data, 3, strategy=more | {"heard": {"model": Schedule([some, some, everyone])}})
    # the same run, but that its update of round 1 is lost
    heard = {"model": Schedule([some, some, everyone]), "update": Schedule([everyone, some, everyone])}
    theirs = fit(lost, data, 3, strategy=more | {"heard": heard})
    for round_idx in range(3):
        assert same(ours.rounds[round_idx]["c2"], theirs.rounds[round_idx]["c2"]), round_idx
    assert same(ours.rounds[1]["c1"], ours.start["c1"].state_dict())
    assert same(ours.rounds[2]["c1"], ours.rounds[2]["c2"])
    spoke = ["c1" in {sender for sender, _ in talk(stale, "update", round_idx)} for round_idx in range(3)]
    assert spoke == [True, False, True]


def test_a_source_that_opposes_the_target_leaves_the_mean_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the documentation of `FedDA` warns of: of two hidden sources, the target then reads the other's part."""
    data = unequal()
    x, y = data["c2"].tensors
    data["c0"], data["c1"] = TensorDataset(x, y), TensorDataset(x, 1 - y)
    wire, module = Wire(monkeypatch), build(beta={"c0": 0.5, "c1": 0.25}, classifier=zero_layer())
    snapshots = fit(module, data, batch_size=64, strategy={"privacy": PairwiseMasking(colluders=0)})
    own = fit(build(TargetOnly, classifier=zero_layer()), data, batch_size=64).rounds[0]["c2"]
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
    fit(build(settings.method, **settings.kwargs), strategy={"privacy": PairwiseMasking(colluders=0)})
    summaries = [payloads["c2"]["summary"] for channel, payloads, _ in wire.exchanged if channel == "target_update"]
    assert ["".join("1" if number > 0 else "0" for number in summary.tolist()) for summary in summaries] == (
        [told] if told else []
    )


@pytest.mark.parametrize(("absent", "away"), [("c1", 1), ("c1", 2), ("c2", 1)])
def test_who_was_away_at_the_end_of_the_warm_up_starts_from_its_result(absent: str, away: int) -> None:
    others = [name for name in NAMES if name != absent]
    schedule = Schedule([*[others] * away, NAMES])
    module = build(hand.NotedGP, warmup_rounds=1)
    snapshots = fit(module, rounds=away + 1, strategy={"participation": schedule})
    assert same(snapshots.rounds[0][absent], snapshots.start[absent].state_dict())
    assert all(same(snapshots.rounds[-1][name], snapshots.rounds[-1]["c2"]) for name in NAMES)
    given, _ = module.notes[-1]
    expected = hand.rule_by_hand(given, hand.settings_betas(Settings(FedGP)), {"c0": 0.5, "c1": 0.5}, Settings(FedGP))
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


def test_a_checkpoint_between_rounds_holds_no_copies_of_the_network(tmp_path: Path) -> None:
    module = build(beta="auto", residual="exact")
    fit(module)
    module.trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert all("memory" not in state for state in saved["clients"].values())
    assert {name for state in saved["clients"].values() for name in state["weights"]} == {W, B}


@cache
def run(case: str, name: str = "", protocol: str = "") -> tuple[Any, Snapshots]:
    """Two rounds of a case, open or hidden."""
    if protocol in NEEDS:
        pytest.importorskip(NEEDS[protocol])
    settings = CASES[case]
    module = build(hand.noted(settings.method), **settings.kwargs)
    strategy = {"privacy": backend(name)} if name else {}
    if protocol:
        strategy["two_party"] = {"inner_product": PROTOCOLS[protocol](**GRID)}
    return module, fit(module, rounds=2, strategy=strategy)


def error_of_step(settings: Settings, name: str, cosine: float = 0.0) -> Callable[[Mapping[str, Any], float], float]:
    """Greatest error of one entry of a step, to first order, under a backend and with cosines off by ``cosine``.

    An entry of the mean of contributions is off by that of a sum over the sum of weights, relative to the largest, and
    so is that of betas, which the target's update is multiplied with. With an inner product, the projection on a layer
    is off by |g_T| times the error of its cosine, and of the estimates, distance by 2 |g_T| |g_S| and residual by
    2 |g_T|^2 times that for each layer; an error e of either, in units of squared gradients, moves
    beta = s2 / (s2 + d2) by at most e / s2.
    """
    mean = float(BACKENDS[name]().error_bound(2)) * max(hand.shares_of(NAMES[:-1], settings).values())

    def error(given: Mapping[str, Any], variance: float) -> float:
        scales = {client: hand.scale_of(local, given["c2"], settings) for client, local in given.items()}
        updates = [hand.vector(local.update, [W, B]) * scales[client] for client, local in given.items()]
        target, longest = float(updates[-1].norm()), max(float(update.norm()) for update in updates)
        layers, auto = 2, settings.beta == "auto"
        beta = 2 * layers * target * longest * cosine / given["c2"].path ** 2 / variance if auto else 0.0
        biggest = max(float(update.abs().max()) for update in updates)
        of_means = mean * (1 + biggest if auto else 1)
        rounding = 8 * 2.0**-24 * biggest  # float32, in a handful of operations
        return of_means + target * cosine + beta * (target + longest) + rounding

    return error


COVERING = [
    *((case, "masking") for case in ("FedDA auto, aligned", "FedGP by model")),
    *(slow(case, "masking") for case in ("FedDA", "cosine by layer, aligned")),
    *(("FedGP auto", name) if name != "bfv" else slow("FedGP auto", name) for name in BACKENDS),
]


@pytest.mark.parametrize(("case", "name"), COVERING)
def test_hidden_rounds_equal_open_ones_within_the_error_of_a_mean(case: str, name: str) -> None:
    module, hidden = run(case, name)
    check_steps(module, CASES[case], error_of=error_of_step(CASES[case], name))
    logged, open_ = hidden.metrics[-1], run(case)[1].metrics[-1]
    assert logged["beta"] == pytest.approx(open_["beta"], abs=1e-4)
    assert logged["target_variance"] == pytest.approx(open_["target_variance"], rel=1e-4)
    # what only somebody who has a single source's update could tell
    assert not [name for name in logged if name.startswith(("beta/", "distance/", "tau/"))]


def test_exact_backends_agree_to_the_last_bit() -> None:
    states = [run("FedGP auto", backend)[1].rounds[-1]["c2"] for backend in ("masking", "bfv", "paillier")]
    assert same(states[0], states[1])
    assert same(states[0], states[2])


@pytest.mark.parametrize(
    ("case", "protocol"),
    [
        *((case, "plain") for case in ("FedDA auto", "FedGP by layer", "FedGP by model")),
        *(("FedGP auto", protocol) for protocol in ("plain", "paillier")),
        pytest.param("FedGP auto", "ckks", marks=pytest.mark.slow),  # whose keys take seconds
    ],
)
def test_inner_products_give_what_the_targets_update_would(case: str, protocol: str) -> None:
    """A cosine is the sum of 12 products; on a grid each number is off by half a step, see `AffineGrid.error_bound`."""
    error_of = error_of_step(CASES[case], "masking", PROTOCOLS[protocol](**GRID).error_bound(12))
    check_steps(run(case, "masking", protocol)[0], CASES[case], error_of=error_of, share=1e-2)


def test_paillier_and_plain_inner_products_agree_to_the_last_bit() -> None:
    one, other = (run("FedGP auto", "masking", protocol) for protocol in ("plain", "paillier"))
    assert same(one[1].rounds[-1]["c2"], other[1].rounds[-1]["c2"])


def test_a_single_layer_that_is_a_single_number_fits_the_grid() -> None:
    network = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 2))
    module = build(beta="auto", classifier=network)
    strategy = {"privacy": PairwiseMasking(colluders=0), "two_party": PlainAffine(**GRID)}
    snapshots = fit(module, rounds=2, strategy=strategy)
    assert not torch.equal(
        snapshots.rounds[-1]["c2"]["classifier.0.bias"], snapshots.start["c2"].state_dict()["classifier.0.bias"]
    )


@pytest.mark.parametrize("case", ["FedDA", "FedGP auto"])
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


@pytest.mark.parametrize(
    ("case", "inner_product"),
    [
        *((case, True) for case in ("FedDA", "FedDA auto", "FedGP by layer", "FedGP auto")),
        *((case, False) for case in ("FedDA, aligned", "FedGP auto")),
    ],
)
def test_nobody_sees_a_sources_update_and_with_inner_products_nobody_the_targets(
    case: str, inner_product: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, wire = CASES[case], Wire(monkeypatch)
    more = {"two_party": PlainAffine()} if inner_product else {}
    module = build(settings.method, **settings.kwargs)
    fit(module, rounds=2, strategy={"privacy": PairwiseMasking(colluders=0)} | more)
    ratio = settings.method is FedDA and settings.beta != "auto"  # needs no products
    assert module.federation.channels["update"].receivers == ("c2",)
    # the sources speak in means alone, and these reach the target alone
    assert all(sender == "c2" for _, payloads, _ in wire.exchanged for sender in payloads)
    assert [(channel, list(payloads)) for channel, payloads, _ in wire.averaged] == [("update", ["c0", "c1"])] * 2
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
    channels.add("target_update/keys" if asks else "model/keys")  # of the first message between clients
    assert set(module.federation.ledger.bytes_by_channel()) == channels
    assert set(talk(module, "update")) == {("c0", "server"), ("c1", "server"), ("server", "c2")}
    assert set(talk(module, "target_update")) == ({("c2", "c0"), ("c2", "c1")} if asks else set())
