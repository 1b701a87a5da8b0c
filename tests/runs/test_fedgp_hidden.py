"""FedDA and FedGP: the hidden rule against the open one, and who is sent what."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from backends import BACKENDS, NEEDS, QUICK, backend
from fedgp_by_hand import (
    CASES,
    GRID,
    NAMES,
    B,
    Local,
    Settings,
    Snapshots,
    W,
    Wire,
    build,
    estimates_by_hand,
    fit,
    noted,
    rule_by_hand,
    scale_of,
    shares_of,
    talk,
    vector,
)
from fedlit.methods import FedDA
from fedlit.privacy import CKKSAffine, PaillierAffine, PairwiseMasking, PlainAffine
from helpers import same

PROTOCOLS: dict[str, Any] = {
    "plain": lambda: PlainAffine(**GRID),
    "paillier": lambda: PaillierAffine(**GRID, **QUICK),
    "ckks": lambda: CKKSAffine(**GRID),
}
ROUNDS = 3


@dataclass
class Run:
    module: Any
    snapshots: Snapshots


_RUNS: dict[tuple[str, str, str], Run] = {}


def run(case: str, name: str = "", protocol: str = "") -> Run:
    """Three rounds of a case, open or hidden; kept, as several tests look at them."""
    key = (case, name, protocol)
    if key not in _RUNS:
        if protocol in NEEDS:
            pytest.importorskip(NEEDS[protocol])
        settings = CASES[case]
        module = build(noted(settings.method), **settings.kwargs)
        strategy = {"privacy": backend(name)} if name else {}
        if protocol:
            strategy["two_party"] = {"inner_product": PROTOCOLS[protocol]()}
        _RUNS[key] = Run(module, fit(module, rounds=ROUNDS, strategy=strategy))
    return _RUNS[key]


def error_of_mean(name: str, settings: Settings) -> float:
    """Greatest error of one entry of a mean: that of a sum, over the sum of weights relative to the largest."""
    shares = shares_of(NAMES[:-1], settings)
    return float(BACKENDS[name]().error_bound(2)) * max(shares.values())


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
MORE = [case for case in CASES if case not in FOUR and not case.startswith(("beta", "FedGP auto, exact"))]
COVERING = [
    *((case, "masking") for case in (*FOUR, "FedDA auto, aligned", "FedGP by model", "cosine by layer, aligned")),
    *(("FedGP auto", name) for name in BACKENDS if name != "masking"),
]
PRODUCT = [
    *((case, name) for name in BACKENDS for case in FOUR if (case, name) not in COVERING),
    *((case, "masking") for case in MORE if (case, "masking") not in COVERING),
]


@pytest.mark.parametrize(
    ("case", "name"), [*COVERING, *[pytest.param(*each, marks=pytest.mark.slow) for each in PRODUCT]]
)
def test_hidden_rounds_equal_open_ones_within_the_error_of_a_mean(case: str, name: str) -> None:
    hidden = run(case, name)
    mean = error_of_mean(name, CASES[case])
    check_steps(case, hidden, mean)
    check_weights(case, hidden, mean)
    logged, open_ = hidden.snapshots.metrics[-1], run(case).snapshots.metrics[-1]
    assert logged["beta"] == pytest.approx(open_["beta"], abs=1e-4)
    assert logged["target_variance"] == pytest.approx(open_["target_variance"], rel=1e-4)
    # what only somebody who has a single source's update could tell
    assert not [name for name in logged if name.startswith(("beta/", "distance/", "tau/"))]


@pytest.mark.parametrize("case", ["FedGP auto", *(pytest.param(c, marks=pytest.mark.slow) for c in FOUR[:3])])
def test_exact_backends_agree_to_the_last_bit(case: str) -> None:
    states = [run(case, backend).snapshots.rounds[-1]["c2"] for backend in ("masking", "bfv", "paillier")]
    assert same(states[0], states[1])
    assert same(states[0], states[2])


PRODUCTS = ["FedDA auto", "FedGP by layer", "FedGP auto", "FedGP by model"]


@pytest.mark.parametrize(
    ("case", "protocol"),
    [
        *((case, "plain") for case in PRODUCTS),
        *(("FedGP auto", protocol) for protocol in ("paillier", "ckks")),
        *(
            pytest.param(case, protocol, marks=pytest.mark.slow)
            for protocol in ("paillier", "ckks")
            for case in PRODUCTS
            if case != "FedGP auto"
        ),
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
    network = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 2))
    module = build(beta=beta, classifier=network)
    strategy = {"privacy": PairwiseMasking(colluders=0), "two_party": PlainAffine(**GRID)}
    snapshots = fit(module, rounds=2, strategy=strategy)
    assert not torch.equal(snapshots.rounds[-1]["c2"]["classifier.0.bias"], snapshots.start["c2"]["classifier.0.bias"])


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


def size(*fields: tuple[str, str, list[int]]) -> int:
    """Bytes of a message: the length of its header in 4 bytes, the header, and the numbers."""
    header = json.dumps([list(item) for item in fields], separators=(",", ":"))
    width = {"float32": 4, "float64": 8}
    return 4 + len(header) + sum(width[kind] * math.prod(shape) for _, kind, shape in fields)


WEIGHTS = [(W, "float32", [2, 5]), (B, "float32", [2])]

SEALED = 16 + 60  # a tag, and a key of 32 bytes with a nonce of 12 and a tag of its own


@pytest.mark.parametrize("case", FOUR)
def test_bytes_per_round_are_those_counted_by_hand(case: str) -> None:
    """Two sources: an update up and a model down each; hidden, also what the target says."""
    settings = CASES[case]
    module = run(case).module
    used = module.federation.ledger.bytes_by_channel()
    assert used["update"] == ROUNDS * 2 * size(*WEIGHTS, ("path", "float64", []))
    assert used["model"] == ROUNDS * 2 * size(*WEIGHTS)
    used = run(case, "masking").module.federation.ledger.bytes_by_channel()
    assert used["model"] == ROUNDS * 2 * (size(*WEIGHTS) + SEALED)
    if case != "FedDA":
        assert used["target_update"] == ROUNDS * 2 * (size(("summary", "float64", [3]), *WEIGHTS) + SEALED)
    if case not in ("FedDA", "FedGP by layer"):
        hidden = run(case, "masking", "plain").module.federation.ledger.bytes_by_channel()
        assert hidden["target_update"] == ROUNDS * 2 * (size(("summary", "float64", [3])) + SEALED)
        assert hidden["update"] == used["update"]
    if settings.beta == "auto":  # a number more, and its name in the schema, in each of three messages of a round
        fixed = {"FedDA auto": "FedDA", "FedGP auto": "FedGP by layer"}[case]
        name = len(',["beta","float32",[]]')
        less = run(fixed, "masking").module.federation.ledger.bytes_by_channel()["update"]
        assert used["update"] - less == ROUNDS * 3 * (4 + name)
