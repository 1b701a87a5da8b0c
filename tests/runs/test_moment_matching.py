"""FedDAN and FedCORAL: steps against autograd of the joint loss, what is sent and known, and who sits out."""

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
from torch.utils.data import DataLoader, TensorDataset

from fedlit.federation import Client, DivergedError, Federation, RosterError, Schedule
from fedlit.functional import (
    coral_loss,
    fedavg,
    kernel_ladder,
    mixture_frequencies,
    multi_kernel_mmd,
    random_fourier_features,
    sample_frequencies,
)
from fedlit.methods import FedCORAL, FedDAN
from fedlit.methods.mean_matching import MomentMatching
from fedlit.methods.mean_messages import sum_difference
from fedlit.models import MLP
from fedlit.privacy import PairwiseMasking
from fedlit.run.component import Component
from fedlit.run.run import Run
from helpers import loader, same, shards, trainer, weights

LR = 0.5
WIDTH = 3
METHODS: dict[str, tuple[type[MomentMatching], dict[str, Any]]] = {
    "FedDAN": (FedDAN, {"num_frequencies": 20}),
    "FedCORAL": (FedCORAL, {}),
    "FedCORAL, scaled": (FedCORAL, {"feature_variance": "mean"}),
}
ASKS = ("FedDAN", "FedCORAL, scaled")
"""Those that learn the scale of the features."""


class Linear(nn.Linear):
    """An extractor of 5 numbers to 3 features, in double precision."""

    def __init__(self) -> None:
        super().__init__(5, WIDTH, dtype=torch.float64)


def build(name: str, clients: list[str], **kwargs: Any) -> MomentMatching:
    torch.manual_seed(0)
    method, arguments = METHODS[name]
    given: dict[str, Any] = {"average": "classifier", "optimizer": lambda params: SGD(params, lr=LR)}
    classifier = nn.Linear(WIDTH, 2, dtype=torch.float64)
    return method(clients, clients[-1], 2, Linear(), classifier, **(arguments | given | kwargs))


def shifted(*sizes: int) -> dict[str, TensorDataset]:
    """A client of each size around a centre of its own, in double precision; the last is the target."""
    data = shards(len(sizes), max(sizes))
    return {
        name: TensorDataset(
            data[name].tensors[0][:size].double() * (1 + 0.3 * i) + 0.4 * i, data[name].tensors[1][:size]
        )
        for i, (name, size) in enumerate(zip(data, sizes, strict=True))
    }


class Snapshots(pl.Callback, Component):
    """The replicas at the start, and copies of all clients' weights after each round."""

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        self.rounds: list[dict[str, dict[str, Tensor]]] = []

    def on_train_start(self, trainer: pl.Trainer, module: MomentMatching) -> None:  # type: ignore[override]
        self.start = {name: copy.deepcopy(replica) for name, replica in module.replicas.named_children()}

    def on_round_end(self, run: Run) -> None:
        module: Any = run.module
        self.rounds.append({name: weights(module, name) for name, _ in module.replicas.named_children()})


def fit(module: MomentMatching, data: Any, rounds: int = 1, batch_size: int = 64, **kwargs: Any) -> Snapshots:
    """Train; by default a batch has all samples of a client, and a round is one step."""
    snapshots = Snapshots()
    run = trainer(rounds, [snapshots, *kwargs.pop("callbacks", [])], **kwargs)
    run.fit(module, loader(data, batch_size))
    return snapshots


# -------------------------------------------------------------------- one step by hand


def distance(name: str, match: str, features: list[Tensor], seed: int) -> Tensor:
    """The joint loss of the sources' features and, last, the target's, by the functions for all samples together."""
    *sources, target = features
    if name == "FedDAN":
        unit = sample_frequencies(20, WIDTH, 1.0, seed=seed)
        frequencies = mixture_frequencies(unit, kernel_ladder(torch.cat(sources), target))
        means = [random_fourier_features(z, frequencies).mean(0) for z in features]
        gaps = [own - means[-1] for own in means[:-1]]
        if match == "pooled":
            return torch.stack(gaps).mean(0).square().sum()
        return torch.stack([gap.square().sum() for gap in gaps]).mean()
    if name == "FedCORAL, scaled":
        variance = torch.cov(torch.cat(features).detach().T).trace() / WIDTH
        return distance("FedCORAL", match, [z / variance.sqrt() for z in features], seed)
    if match == "pairwise":
        return torch.stack([coral_loss(z, target) for z in sources]).mean()
    # torch's covariance of samples with weights: sources count alike, whatever the size of their batches
    shares = torch.cat([torch.full((len(z),), 1 / len(z) / len(sources), dtype=torch.float64) for z in sources])
    covariance = torch.cov(torch.cat(sources).T, aweights=shares.detach())
    return (covariance - torch.cov(target.T)).square().sum() / (4 * WIDTH**2)


@pytest.mark.parametrize("sizes", [(12, 12, 12), (12, 7, 9), (11, 8), (9, 8, 12, 7)])
@pytest.mark.parametrize("match", ["pooled", "pairwise"])
@pytest.mark.parametrize("name", METHODS)
def test_all_clients_gradients_together_are_that_of_the_joint_loss(name: str, match: Any, sizes: Any) -> None:
    data = shifted(*sizes)
    module = build(name, list(data), match=match, mmd_weight=3.0)
    snapshots = fit(module, data)
    features, total = [], torch.zeros((), dtype=torch.float64)
    for client, samples in data.items():
        replica = snapshots.start[client]
        features.append(replica.extractor(samples.tensors[0]))
        if client != module.target.name:
            total = total + F.cross_entropy(replica.classifier(features[-1]), samples.tensors[1])
    joint = distance(name, match, features, module.federation.seed)
    (total + 3.0 * joint).backward()
    for client in data:
        for key, param in snapshots.start[client].extractor.named_parameters():
            expected = (param - LR * param.grad).detach()
            got = snapshots.rounds[0][client][f"extractor.{key}"]
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=f"{client} {key}")
            assert float(param.grad.abs().max()) > 1e-4 or key == "bias"  # CORAL's target: it moves the mean alone
    told = float(module.trainer.callback_metrics["target/loss"])
    if match == "pooled" or len(sizes) == 2:
        assert told == pytest.approx(3.0 * float(joint), rel=1e-6)
    if name in ASKS:
        z = torch.cat(features).detach()
        middle = kernel_ladder(z, z[:0], num_kernels=1)
        torch.testing.assert_close(module.replicas["c0"].reference, middle, rtol=1e-12, atol=0)


def test_the_pairwise_loss_is_the_pooled_one_and_the_sources_spread() -> None:
    """(1/K) sum_k |m_k - mbar|^2 more: 0 with equal sources."""
    apart = shifted(12, 12, 12)
    equal = {"c0": apart["c0"], "c1": apart["c0"], "c2": apart["c2"]}
    for data in (apart, equal):
        told = {}
        for match in ("pooled", "pairwise"):
            module = build("FedDAN", list(data), match=match, bandwidth=4.0)
            snapshots = fit(module, data)
            for client in ("c0", "c1"):
                task = F.cross_entropy(snapshots.start[client](data[client].tensors[0]), data[client].tensors[1])
                told[match, client] = float(module.trainer.callback_metrics[f"source/{client}/loss"] - task)
        unit = sample_frequencies(20, WIDTH, 1.0, seed=module.federation.seed)
        frequencies = mixture_frequencies(unit, [1.0, 2.0, 4.0, 8.0, 16.0])
        means = [
            random_fourier_features(snapshots.start[client].extractor(data[client].tensors[0]), frequencies).mean(0)
            for client in ("c0", "c1")
        ]
        spread = float((means[0] - means[1]).square().sum() / 4)
        assert told["pooled", "c0"] == pytest.approx(told["pooled", "c1"], abs=1e-6)
        pair = told["pairwise", "c0"] + told["pairwise", "c1"]
        assert pair == pytest.approx(told["pooled", "c0"] + spread, abs=2e-6)
        assert (spread > 1e-3) == (data is apart)


def test_with_many_frequencies_the_loss_is_that_of_the_kernels() -> None:
    data = shifted(20, 20)
    module = build("FedDAN", list(data), num_frequencies=20000)
    snapshots = fit(module, data)
    x, y = (snapshots.start[client].extractor(data[client].tensors[0]).detach() for client in data)
    expected = float(multi_kernel_mmd(x, y, kernel_ladder(x, y)))
    assert float(module.trainer.callback_metrics["target/loss"]) == pytest.approx(expected, rel=0.05)


def test_one_kernel_of_a_given_bandwidth_is_fedrf_tca_without_an_aligner() -> None:
    """sigma^2 = b / 2: the frequencies are those that FedRF-TCA draws."""
    data = shifted(12, 9)
    module = build("FedDAN", list(data), num_kernels=1, bandwidth=2 * 1.7**2)
    snapshots = fit(module, data)
    frequencies = sample_frequencies(20, WIDTH, 1.7, seed=module.federation.seed)
    means = [
        random_fourier_features(snapshots.start[client].extractor(data[client].tensors[0]), frequencies).mean(0)
        for client in data
    ]
    expected = float((means[0] - means[1]).square().sum())
    assert float(module.trainer.callback_metrics["target/loss"]) == pytest.approx(expected, rel=1e-5)
    assert {entry.channel for entry in module.federation.ledger} == {"moments", "weights", "metrics"}


@pytest.mark.parametrize("name", METHODS)
def test_everyones_network_is_averaged_by_default(name: str) -> None:
    """What one step leaves at each client, then FedAvg of it all."""
    data = shifted(12, 7, 9)
    alone = fit(build(name, list(data)), data)
    both = fit(build(name, list(data), average="all"), data)
    states = [{key: alone.rounds[0][client][key] for key in ("extractor.weight", "extractor.bias")} for client in data]
    expected = fedavg(states, [12, 7, 9])
    for client in data:
        for key, value in expected.items():
            torch.testing.assert_close(both.rounds[0][client][key], value, rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------- once a round


@pytest.mark.parametrize("match", ["pooled", "pairwise"])
@pytest.mark.parametrize("name", METHODS)
def test_rounds_of_one_step_are_the_same_said_every_step_or_every_round(name: str, match: Any) -> None:
    data = shifted(12, 7, 9)
    runs = [fit(build(name, list(data), match=match, every=every), data, rounds=3) for every in ("step", "round")]
    for client in data:
        assert same(runs[0].rounds[-1][client], runs[1].rounds[-1][client])


def test_between_exchanges_the_others_stay_and_ones_own_mean_moves() -> None:
    """Two steps a round of the target: others + share * own, with its own mean of now."""
    data = shifted(12, 7, 9)
    module = build("FedDAN", list(data), every="round", num_kernels=1, bandwidth=3.0)
    snapshots = fit(module, data, strategy={"local_steps": 2})
    frequencies = mixture_frequencies(sample_frequencies(20, WIDTH, 1.0, seed=module.federation.seed), [3.0])

    def mean(client: str, extractor: nn.Module) -> Tensor:
        return random_fourier_features(extractor(data[client].tensors[0]), frequencies).mean(0)

    first = torch.stack([mean(client, snapshots.start[client].extractor) for client in ("c0", "c1")]).mean(0).detach()
    extractor = copy.deepcopy(snapshots.start["c2"].extractor)
    for _ in range(2):
        extractor.zero_grad()
        (first - mean("c2", extractor)).square().sum().backward()
        with torch.no_grad():
            for param in extractor.parameters():
                param -= LR * param.grad
    for key, param in extractor.named_parameters():
        torch.testing.assert_close(
            snapshots.rounds[0]["c2"][f"extractor.{key}"], param.detach(), rtol=1e-12, atol=1e-12
        )
    assert len([entry for entry in module.federation.ledger if entry.channel == "moments"]) == 6  # up and down, once


@pytest.mark.parametrize("every", ["step", "round"])
@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_within_a_round_resumes_bit_for_bit(name: str, every: Any, tmp_path: Path) -> None:
    def go(callbacks: list[pl.Callback], checkpoint: str | None = None) -> tuple[MomentMatching, Snapshots]:
        torch.manual_seed(7)
        optimizer = {"optimizer": lambda params: Adam(params, lr=0.02)}
        module = build(name, ["c0", "c1", "c2"], every=every, warmup_rounds=1, average="all", **optimizer)
        snapshots = Snapshots()
        run = trainer(3, [snapshots, *callbacks], enable_checkpointing=bool(callbacks))
        run.fit(module, loader(shifted(20, 17, 14), 5), ckpt_path=checkpoint)
        return module, snapshots

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight, everything = go([saver])
    for step in (2, 6, 9):  # rounds of 4 steps
        resumed, rest = go([], str(tmp_path / f"step={step}.ckpt"))
        for client in ("c0", "c1", "c2"):
            assert same(everything.rounds[-1][client], rest.rounds[-1][client]), (step, client)
        assert straight.federation.ledger == resumed.federation.ledger


# -------------------------------------------------------------------- what is sent, and what is known


@pytest.mark.parametrize("name", METHODS)
def test_pooled_nobody_hears_another_client(name: str) -> None:
    data = shifted(12, 7, 9)
    module = build(name, list(data), average="all")
    fit(module, data)
    talk = {(entry.channel, entry.sender, entry.receiver) for entry in module.federation.ledger}
    assert not [entry for entry in talk if {entry[1], entry[2]} <= set(data)]
    asked = {"scale"} if name in ASKS else set()
    assert {entry[0] for entry in talk} == {"moments", "weights", "metrics"} | asked


@pytest.mark.parametrize(("name", "numbers"), [("FedDAN", 40), ("FedCORAL", 10)])
def test_messages_have_the_size_of_a_mean_whatever_the_batch(name: str, numbers: int) -> None:
    sizes = []
    for data in (shifted(12, 7, 9), shifted(30, 20, 25)):
        module = build(name, list(data))
        fit(module, data)
        sizes.append(
            [e.num_bytes for e in module.federation.ledger if e.channel == "moments" and e.receiver == "server"]
        )
    assert sizes[0] == sizes[1]
    assert all(8 * numbers < size < 8 * numbers + 200 for size in sizes[0])


def test_a_sum_that_a_client_was_lost_from_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(["a", "b", "t"], "t")
    means = {name: torch.full((2,), value) for name, value in (("a", 1.0), ("b", 5.0), ("t", 2.0))}
    told = sum_difference(federation, "moments", means, federation.sources)
    assert {name: gap.tolist() for name, gap in told.items()} == {name: [1.0, 1.0] for name in means}
    whole = federation.sum
    for lost in means:
        gone: set[str] = set()

        def without(channel: str, payloads: Any, among: Any, to: Any, lost: str = lost, gone: set[str] = gone) -> Any:
            gone.add(lost)  # before it has sent
            return whole(channel, {name: own for name, own in payloads.items() if name != lost}, among, to)

        monkeypatch.setattr(federation, "sum", without)
        monkeypatch.setattr(federation._messenger, "is_lost", gone.__contains__)
        assert sum_difference(federation, "moments", means, federation.sources) == {}


@pytest.mark.parametrize("match", ["pooled", "pairwise"])
@pytest.mark.parametrize("name", METHODS)
def test_masked_means_train_as_plain_ones_within_the_grid(name: str, match: Any) -> None:
    data = shifted(12, 7, 9)
    runs = [
        fit(build(name, list(data), match=match, average="all"), data, rounds=2, strategy={"privacy": privacy})
        for privacy in (None, PairwiseMasking(colluders=0))
    ]
    for client in data:
        for key, value in runs[0].rounds[-1][client].items():
            torch.testing.assert_close(runs[1].rounds[-1][client][key], value, rtol=0, atol=1e-4)


# -------------------------------------------------------------------- who sits out


@pytest.mark.parametrize("name", METHODS)
def test_without_the_target_or_without_sources_nothing_is_matched(name: str) -> None:
    data = shifted(12, 7, 9)
    alone = fit(build(name, list(data), mmd_weight=0.0), data)
    for present in (["c0", "c1"], ["c2"]):
        snapshots = fit(build(name, list(data)), data, strategy={"participation": Schedule([present])})
        start = snapshots.start["c2"].state_dict()["extractor.weight"]
        assert torch.equal(snapshots.rounds[0]["c2"]["extractor.weight"], start)
        if "c0" in present:
            ours, theirs = (each.rounds[0]["c0"]["extractor.weight"] for each in (snapshots, alone))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_clients_whose_epoch_is_over_sit_out(name: str) -> None:
    """Sources of 3 and 2 batches, a target of 2: after the second nobody is matched, and the longer source goes on."""
    data = shifted(18, 12, 12)
    module = build(name, list(data))
    snapshots = fit(module, data, batch_size=6)
    up = [e for e in module.federation.ledger if e.channel == "moments" and e.receiver == "server"]
    assert [(entry.sender, entry.messages) for entry in up] == [("c0", 2), ("c1", 2), ("c2", 2)]
    assert [float(snapshots.rounds[0][client]["share"]) for client in data] == [0, 0, 0]


@pytest.mark.parametrize(("sizes", "matched"), [((12, 13, 12), ["c0", "c2"]), ((12, 12, 13), []), ((13, 12), [])])
def test_a_batch_of_one_sample_has_no_covariance(sizes: Any, matched: list[str]) -> None:
    """The third batch of 13 samples in batches of 6 has one."""
    data = shifted(*(size + 6 if size == 12 else size for size in sizes))
    module = build("FedCORAL", list(data))
    with pytest.warns(UserWarning, match=r"\['c\d'\] have a batch of 1 sample, which has no covariance") as told:
        snapshots = fit(module, data, batch_size=6, rounds=2)
    assert len([each for each in told if "covariance" in str(each.message)]) == 1
    assert [client for client in data if snapshots.rounds[0][client]["share"]] == matched
    assert all(bool(value.isfinite().all()) for state in snapshots.rounds[-1].values() for value in state.values())


def test_a_batch_of_one_sample_has_a_mean() -> None:
    data = shifted(7, 7, 7)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*covariance")
        snapshots = fit(build("FedDAN", list(data)), data, batch_size=3)
    assert all(float(snapshots.rounds[0][client]["share"]) for client in data)


@pytest.mark.parametrize(("name", "argument"), [("FedDAN", "bandwidth"), ("FedCORAL, scaled", "feature_variance")])
def test_features_that_are_all_alike_have_no_scale(name: str, argument: str) -> None:
    data = {name: TensorDataset(torch.ones_like(d.tensors[0]), d.tensors[1]) for name, d in shifted(6, 6, 6).items()}
    message = (
        rf"the features of all samples of \['c0', 'c1', 'c2'\] are alike in round 0, .* give {argument}, a smaller"
    )
    with pytest.raises(DivergedError, match=message):
        fit(build(name, list(data)), data)


@pytest.mark.parametrize("match", ["pooled", "pairwise"])
def test_scaled_covariances_do_not_know_the_unit_of_the_features(match: Any) -> None:
    """The loss of features a hundred times as long, and the gradient by the extractor a hundredth of what it was."""
    data, told = shifted(12, 7, 9), []
    arguments: dict[str, Any] = {"feature_variance": "mean", "match": match, "average": "classifier"}
    arguments["optimizer"] = lambda params: SGD(params, lr=LR)
    for factor in (1.0, 100.0):
        extractor, classifier = build("FedCORAL", list(data)).originals
        with torch.no_grad():
            for param in extractor.parameters():
                param.mul_(factor)
        start = extractor.weight.detach().clone()
        module = FedCORAL(list(data), "c2", 2, extractor, classifier, **arguments)
        fit(module, data)
        moved = module.replicas["c2"].extractor.weight.detach() - start
        told.append((float(module.trainer.callback_metrics["target/loss"]), moved))
    assert told[0][0] > 1e-3
    assert told[1][0] == pytest.approx(told[0][0], rel=1e-6)
    torch.testing.assert_close(100 * told[1][1], told[0][1], rtol=1e-6, atol=1e-9)


def test_a_client_with_one_sample_is_in_the_scale_though_it_has_no_covariance() -> None:
    """It sits out the step, in which the others are matched."""
    data = shifted(6, 1, 6)
    module = build("FedCORAL, scaled", list(data))
    with pytest.warns(UserWarning, match=r"\['c1'\] have a batch of 1 sample"):
        snapshots = fit(module, data)
    z = torch.cat([snapshots.start[name].extractor(data[name].tensors[0]).detach() for name in data])
    assert module.pair_distance("c0") == pytest.approx(2 * float(torch.cov(z.T).trace()), rel=1e-12)


@pytest.mark.parametrize("small", [0, 1, 2])
def test_a_round_that_begins_with_a_batch_of_one_sample_has_a_scale_in_its_other_steps(small: int) -> None:
    """Batches of 3 of 7 samples: the third has one, and is the first of the round after the warm-up."""
    data = shifted(*(7 if place == small else 12 for place in range(3)))
    module = build("FedCORAL, scaled", list(data), warmup_rounds=1)
    with pytest.warns(UserWarning, match=rf"\['c{small}'\] have a batch of 1 sample"):
        fit(module, data, rounds=2, batch_size=3, strategy={"local_steps": 2})
    assert all(bool(value.isfinite().all()) for name in data for value in weights(module, name).values())
    assert all(module.pair_distance(name) > 0 for name in data)


def test_what_a_backend_cannot_hide_is_not_sent() -> None:
    """Pairwise, a single source's mean; the source trains on its labels."""
    data = shifted(12, 7, 9)
    alone = fit(build("FedDAN", list(data), mmd_weight=0.0, average="all"), data)
    strategy = {"privacy": {name: PairwiseMasking(colluders=0) for name in ("scale", "moments", "weights")}}
    strategy["participation"] = Schedule([["c0", "c2"]])
    module = build("FedDAN", list(data), match="pairwise", average="all")
    with pytest.warns(UserWarning, match="sends no mean over channel 'moments'"):
        snapshots = fit(module, data, strategy=strategy)
    assert float(snapshots.rounds[0]["c2"]["share"]) == 0
    assert alone.start.keys() == snapshots.start.keys()


def test_a_labelled_target_learns_from_its_labels_too() -> None:
    data = shifted(12, 7, 9)
    y = data["c2"].tensors[1].clone()
    y[3:] = -1
    data["c2"] = TensorDataset(data["c2"].tensors[0], y)
    clients: Any = ["c0", "c1", Client("c2", role="target", labelled=True)]
    torch.manual_seed(0)
    module = FedDAN(clients, "c2", 2, Linear(), nn.Linear(WIDTH, 2, dtype=torch.float64), mmd_weight=0.0,
                    average="classifier", optimizer=lambda params: SGD(params, lr=LR))  # fmt: skip
    snapshots = fit(module, data)
    replica = snapshots.start["c2"]
    F.cross_entropy(replica(data["c2"].tensors[0][:3]), y[:3]).backward()
    expected = replica.extractor.weight - LR * replica.extractor.weight.grad
    got = snapshots.rounds[0]["c2"]["extractor.weight"]
    torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("FedDAN", {"mmd_weight": -1.0}, r"mmd_weight \(lambda\) must be at least 0 and finite, got -1.0"),
        ("FedCORAL", {"mmd_weight": math.nan}, r"mmd_weight \(lambda\) must be at least 0 and finite, got nan"),
        ("FedDAN", {"match": "both"}, "match must be 'pooled' or 'pairwise', got 'both'"),
        ("FedDAN", {"every": "epoch"}, "every must be 'step' or 'round', got 'epoch'"),
        ("FedDAN", {"average": "extractor"}, "average must be 'all' or 'classifier', got 'extractor'"),
        ("FedDAN", {"num_kernels": 0}, r"num_kernels \(U\) must be at least 1, got 0"),
        ("FedDAN", {"num_frequencies": 12}, r"\(N\) must be a positive multiple of num_kernels \(5\), .* got 12"),
        ("FedDAN", {"bandwidth_factor": 1.0}, "bandwidth_factor must be above 1 and finite, got 1.0"),
        ("FedDAN", {"bandwidth": 0.0}, r"bandwidth \(b\) must be 'mean', or a positive and finite .* got 0.0"),
        ("FedDAN", {"bandwidth": "median"}, r"bandwidth \(b\) must be 'mean', .* got 'median'"),
        ("FedCORAL", {"feature_variance": -1.0}, r"feature_variance \(v\) must be 'mean', .* variance, got -1.0"),
        ("FedCORAL", {"feature_variance": "max"}, r"feature_variance \(v\) must be 'mean', .* got 'max'"),
    ],
)
def test_bad_arguments_are_named(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, ["c0", "c1"], **arguments)


def test_an_extractor_with_nothing_to_train_is_refused() -> None:
    extractor = nn.Identity()
    extractor.out_features = 5  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"FedDAN moves features, and the extractor has nothing to train: .*Bottleneck"
    ):
        FedDAN(["c0", "c1"], "c1", 2, extractor)
    with pytest.raises(ValueError, match="FedCORAL moves features"):
        FedCORAL(["c0", "c1"], "c1", 2, MLP(5, [4]).requires_grad_(False))


def test_a_loader_that_does_not_tell_sizes_is_refused() -> None:
    data = shifted(6, 6)
    module = build("FedDAN", list(data))
    batch = {name: samples.tensors for name, samples in data.items()}
    with pytest.raises(RosterError, match="FedDAN has to know every client's batch size: train on a"):
        trainer(1, federated=False).fit(module, DataLoader([0], collate_fn=lambda _: batch))
