"""FedRF-TCA: its rounds against Algorithms 2 to 4 written out by hand, and what it sends to whom."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from fedlit import FederatedModule
from fedlit.callbacks import OracleAccuracy
from fedlit.callbacks.privacy_report import report
from fedlit.federation import (
    KEYS,
    SERVER,
    ChannelError,
    Everyone,
    Fraction,
    OneByOne,
    Schedule,
    UniformSubset,
    reveal_for_oracle,
)
from fedlit.federation.wire import schema_text, wire_size
from fedlit.functional import hard_vote, sample_frequencies
from fedlit.methods import FedRFTCA
from fedlit.models import MLP, SmallCNN, VotingReplica
from fedlit.privacy import BFV, CKKS, FixedPoint, GaussianMechanism, Paillier, PairwiseMasking, Plain
from fedlit.privacy.packing import schema_of
from fedlit.run.component import Component
from fedlit.run.run import Run
from helpers import digits, loader, same, shards, trainer, weights

N, M = 8, 4  # frequencies and components
ALL = {"participation": Everyone()}
BUFFERS = {"seed", "received", "heard", "informed"}  # of a replica's state: what is no weight
GAIN = (2 * N / M) ** 0.5  # length of W's columns


def build(num_clients: int = 3, **kwargs: Any) -> FedRFTCA:
    """A linear extractor of 5 numbers to 6 features; the last client is the target."""
    names = [f"c{i}" for i in range(num_clients)]
    torch.manual_seed(0)
    given = {"num_frequencies": N, "num_components": M, "optimizer": lambda params: SGD(params, lr=0.5)}
    return FedRFTCA(names, names[-1], 2, kwargs.pop("extractor", None) or nn.Linear(5, 6), **(given | kwargs))


class Snapshots(pl.Callback, Component):
    """Copies of all clients' weights: at the start, and after each round."""

    def __init__(self) -> None:
        self.start: dict[str, nn.Module] = {}
        self.rounds: list[dict[str, dict[str, Tensor]]] = []

    def on_train_start(self, trainer: pl.Trainer, module: FederatedModule) -> None:  # type: ignore[override]
        self.start = {name: copy.deepcopy(replica) for name, replica in module.replicas.named_children()}

    def on_round_end(self, run: Run) -> None:
        module: Any = run.module
        self.rounds.append({name: weights(module, name) for name, _ in module.replicas.named_children()})


def fit(
    module: FedRFTCA, data: dict[str, TensorDataset], rounds: int = 1, batch_size: int = 64, **kwargs: Any
) -> Snapshots:
    """Train; with few samples per client, a batch has all of them, and a round is one step."""
    snapshots = Snapshots()
    kwargs.setdefault("strategy", ALL)
    trainer(rounds, [snapshots, *kwargs.pop("callbacks", [])], **kwargs).fit(module, loader(data, batch_size))
    return snapshots


def unequal(num_clients: int = 3, seed: int = 0) -> dict[str, TensorDataset]:
    """Clients with 20, 17, 14, ... samples around different centres."""
    data = shards(num_clients, 20, seed)
    return {
        name: TensorDataset(shard.tensors[0][: 20 - 3 * i] + 0.5 * i, shard.tensors[1][: 20 - 3 * i])
        for i, (name, shard) in enumerate(data.items())
    }


def part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith(f"{prefix}.")}


def senders(module: FederatedModule, channel: str, round_idx: int) -> set[str]:
    names = {e.sender for e in module.federation.ledger if e.channel == channel and e.round_idx == round_idx}
    return names - {"server"}


# -------------------------------------------------------------------- against the algorithms written out


def by_hand(
    start: nn.Module, data: dict[str, TensorDataset], present: list[list[str]], period: int, remedies: dict[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Algorithms 2 to 4 on full batches with steps of 0.5 and lambda 0.7; loss (11) takes the messages' mean."""
    target = list(data)[-1]
    omega = sample_frequencies(N, 6, 0.8, seed=0)
    init = {name: tensor for name, tensor in start.state_dict().items() if name not in BUFFERS}
    params = {name: {key: tensor.clone() for key, tensor in init.items()} for name in data}
    for t, there in enumerate(present):
        for state in params.values():
            for tensor in state.values():
                tensor.requires_grad_(True)
        s = {}
        for name, shard in data.items():
            z = shard.tensors[0] @ params[name]["extractor.weight"].T + params[name]["extractor.bias"]
            phase = (z / z.norm(dim=1, keepdim=True)) @ omega.T
            s[name] = torch.cat([phase.cos(), phase.sin()], dim=1) / N**0.5
        mu = {name: features.mean(dim=0) for name, features in s.items()}
        heard = [name for name in there if name != target]
        for name, shard in data.items():
            w, aligned = params[name]["aligner.weight"], s[name] @ params[name]["aligner.weight"].T
            loss = torch.zeros(())
            if name != target:
                logits = aligned @ params[name]["classifier.weight"].T + params[name]["classifier.bias"]
                loss = loss + F.cross_entropy(logits, shard.tensors[1])
            if name in there and heard and target in there:
                other = (sum(mu[source] for source in heard) / len(heard) if name == target else mu[target]).detach()
                mmd = (w @ (mu[name] - other)).square().sum()
                spread = aligned.var(dim=0, unbiased=True).sum()
                mmd = mmd - spread / len(aligned) if remedies["unbiased"] else mmd
                floor = 0.01 * (aligned.square().sum() / len(aligned) + (w @ other).square().sum())
                mmd = mmd / (spread + floor) if remedies["constraint"] == "relative" else mmd
                loss = loss + (1.0 if name == target else 0.7) * mmd
            if loss.requires_grad:
                own = list(params[name].values())
                for tensor, gradient in zip(own, torch.autograd.grad(loss, own, allow_unused=True), strict=True):
                    if gradient is not None:
                        tensor.data -= 0.5 * gradient
        for state in params.values():
            for tensor in state.values():
                tensor.requires_grad_(False)
        if heard:
            mean = torch.stack([params[name]["aligner.weight"] for name in there]).mean(dim=0)
            for name in there:
                params[name]["aligner.weight"] = mean.clone()
        if remedies["constraint"] == "orthogonal":
            for state in params.values():
                u, _, vh = torch.linalg.svd(state["aligner.weight"], full_matrices=False)
                state["aligner.weight"] = GAIN * u @ vh
        last = t + 1 == len(present)
        due = (t + 1) % period == 0 and heard
        if due or last:
            among = heard if due else list(data)[:-1]
            for key in ("classifier.weight", "classifier.bias"):
                mean = torch.stack([params[name][key] for name in among]).mean(dim=0)
                for name in there if due else [target]:
                    params[name][key] = mean.clone()
    return params


@pytest.mark.parametrize(
    "remedies",
    [
        {"constraint": "none", "unbiased": False},
        {"constraint": "none", "unbiased": True},
        {"constraint": "relative", "unbiased": True},
        {"constraint": "orthogonal", "unbiased": False},
    ],
    ids=lambda remedies: f"{remedies['constraint']}-{remedies['unbiased']}",
)
def test_rounds_equal_the_algorithms_by_hand(remedies: dict[str, Any]) -> None:
    """Everyone, one source, nobody, both again and an end between two averages of the classifiers."""
    present = [["c0", "c1", "c2"], ["c1", "c2"], ["c2"], ["c0", "c2"], ["c0", "c1", "c2"]]
    data = unequal()
    module = build(bandwidth=0.8, mmd_weight=0.7, classifier_period=2, **remedies)
    snapshots = fit(module, data, 5, strategy={"participation": Schedule(present)})
    for rounds in (1, 2, 3, 4, 5):
        expected = by_hand(snapshots.start["c0"], data, present[:rounds], 2, remedies)
        if rounds in (1, 3):  # by hand the run ended here, and the target got a classifier; this one went on
            expected["c2"].update(
                part(by_hand(snapshots.start["c0"], data, present[: rounds - 1], 2, remedies)["c2"], "classifier")
                if rounds > 1
                else part(snapshots.start["c2"].state_dict(), "classifier")
            )
        for name, state in expected.items():
            for key, tensor in state.items():
                torch.testing.assert_close(snapshots.rounds[rounds - 1][name][key], tensor, atol=2e-6, rtol=1e-5)


# -------------------------------------------------------------------- who moves whose extractor


def test_the_alignment_moves_every_clients_own_extractor_and_labels_never_the_targets() -> None:
    data = unequal()
    flipped = {name: TensorDataset(shard.tensors[0], 1 - shard.tensors[1]) for name, shard in data.items()}
    with_mmd, without, other_labels = build(mmd_weight=1.0), build(mmd_weight=0.0), build(mmd_weight=1.0)
    start = fit(with_mmd, data).start
    fit(without, data)
    fit(other_labels, flipped)
    for name in data:
        moved = part(weights(with_mmd, name), "extractor")
        assert not torch.equal(moved["extractor.weight"], start[name].state_dict()["extractor.weight"])
        if name != "c2":
            assert not torch.equal(moved["extractor.weight"], weights(without, name)["extractor.weight"])
            assert not torch.equal(moved["extractor.weight"], weights(other_labels, name)["extractor.weight"])
    assert same(part(weights(with_mmd, "c2"), "extractor"), part(weights(other_labels, "c2"), "extractor"))


def test_extractors_are_neither_shared_nor_averaged_nor_sent() -> None:
    module = build(classifier_period=1)
    fit(module, unequal(), 3)
    parameters = [id(p) for replica in module.replicas.children() for p in replica.parameters()]
    assert len(parameters) == len(set(parameters))
    storages = [p.data_ptr() for replica in module.replicas.children() for p in replica.parameters()]
    assert len(storages) == len(set(storages))
    extractors = [weights(module, name)["extractor.weight"] for name in ("c0", "c1", "c2")]
    assert not any(torch.equal(extractors[i], extractors[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    channels = {"features", "target_features", "aligner", "classifier", "metrics"}
    assert set(module.federation.ledger.bytes_by_channel()) == channels
    aligners = [weights(module, name)["aligner.weight"] for name in ("c0", "c1", "c2")]
    assert torch.equal(aligners[0], aligners[1])
    assert torch.equal(aligners[0], aligners[2])


def test_the_target_sees_the_mean_of_the_messages_alone() -> None:
    """Which source sent what does not matter, and two sources that say the same are as one: no sum."""
    data = unequal()
    swapped = {"c0": data["c1"], "c1": data["c0"], "c2": data["c2"]}
    twins = {"c0": data["c0"], "c1": data["c0"], "c2": data["c2"]}
    alone = {"c0": data["c0"], "c1": data["c2"]}
    targets = []
    for given in (data, swapped, twins, alone):
        module = build(len(given))
        fit(module, given)
        targets.append(weights(module, list(given)[-1])["extractor.weight"])
    torch.testing.assert_close(targets[0], targets[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(targets[2], targets[3], atol=1e-6, rtol=1e-5)
    assert float((targets[0] - targets[2]).abs().max()) > 1e-4


def test_weighting_by_samples_reaches_messages_and_aligners() -> None:
    """A source of three times the data counts as three sources with a copy of it each."""
    data = shards(3, 12)
    copies = {"c0": data["c0"], "c1": data["c1"], "c2": data["c1"], "c3": data["c1"], "c4": data["c2"]}
    tripled = dict(data)
    tripled["c1"] = TensorDataset(*(torch.cat([tensor] * 3) for tensor in data["c1"].tensors))
    # without the correction of the bias, which knows of the batch size
    one = build(3, weighting="samples", unbiased=False, constraint="none", mmd_weight=0.5)
    many = build(5, weighting="uniform", unbiased=False, constraint="none", mmd_weight=0.5)
    fit(one, tripled)
    fit(many, copies)
    torch.testing.assert_close(
        weights(one, "c2")["extractor.weight"], weights(many, "c4")["extractor.weight"], atol=1e-6, rtol=1e-5
    )


# -------------------------------------------------------------------- absence and drops


def test_the_default_is_a_uniform_subset_of_the_sources() -> None:
    for federated in (True, False):
        module = build()
        trainer(1, federated=federated).fit(module, loader(unequal(), 64))
        assert isinstance(module.federation.roster.participation, UniformSubset)


def test_a_round_without_sources_leaves_the_target_as_it_is_and_sends_nothing() -> None:
    module = build(optimizer=lambda params: Adam(params, lr=0.1, weight_decay=0.1), constraint="none")
    schedule = Schedule([["c0", "c1", "c2"], ["c2"], ["c0", "c1", "c2"]])
    snapshots = fit(module, unequal(), 3, strategy={"participation": schedule})
    before, after = snapshots.rounds[:2]
    learnt = {name: tensor for name, tensor in after["c2"].items() if name not in BUFFERS}
    assert all(torch.equal(before["c2"][name], tensor) for name, tensor in learnt.items())
    talk = {e.channel for e in module.federation.ledger if e.round_idx == 1}
    assert talk == {"metrics"}
    for name in ("c0", "c1"):
        assert not torch.equal(before[name]["extractor.weight"], after[name]["extractor.weight"])
        assert not torch.equal(before[name]["classifier.weight"], after[name]["classifier.weight"])


def test_absent_sources_train_on_their_labels_alone_and_keep_their_own_aligner() -> None:
    data = unequal()
    absent, plain = build(), build(mmd_weight=0.0)
    away = fit(absent, data, 2, strategy={"participation": Schedule([["c0", "c2"]])})
    alone = fit(plain, data, 2, strategy={"participation": Schedule([["c0", "c2"]])})
    ours, theirs = away.rounds[-1], alone.rounds[-1]
    assert same(ours["c1"], theirs["c1"])
    assert not torch.equal(ours["c1"]["aligner.weight"], ours["c0"]["aligner.weight"])
    assert torch.equal(ours["c0"]["aligner.weight"], ours["c2"]["aligner.weight"])
    assert not torch.equal(ours["c0"]["extractor.weight"], theirs["c0"]["extractor.weight"])


def test_a_dropped_message_leaves_a_client_with_its_label_loss_for_that_round() -> None:
    data = unequal()
    heard = {"features": Schedule([["c0", "c2"], ["c0", "c1", "c2"]])}
    strategy = ALL | {"heard": heard, "nested_heard": False}
    dropped, plain = build(), build(mmd_weight=0.0)
    ours = fit(dropped, data, 2, strategy=strategy).rounds
    theirs = fit(plain, data, 2, strategy=strategy).rounds
    for key in ("extractor.weight", "extractor.bias", "classifier.weight"):
        assert torch.equal(ours[0]["c1"][key], theirs[0]["c1"][key])
    assert not torch.equal(ours[0]["c0"]["extractor.weight"], theirs[0]["c0"]["extractor.weight"])
    assert not torch.equal(ours[1]["c1"]["extractor.weight"], theirs[1]["c1"]["extractor.weight"])
    assert torch.equal(ours[0]["c1"]["aligner.weight"], ours[0]["c0"]["aligner.weight"])  # of which it has its part
    assert [bool(ours[i]["c1"]["heard"]) for i in (0, 1)] == [False, True]


def test_a_dropped_aligner_is_neither_averaged_nor_replaced() -> None:
    module = build()
    schedule = {"aligner": Schedule([["c0", "c2"]])}
    rounds = fit(module, unequal(), 2, strategy=ALL | {"heard": schedule}).rounds
    assert torch.equal(rounds[1]["c0"]["aligner.weight"], rounds[1]["c2"]["aligner.weight"])
    assert not torch.equal(rounds[1]["c0"]["aligner.weight"], rounds[1]["c1"]["aligner.weight"])
    assert senders(module, "aligner", 1) == {"c0", "c2"}
    assert senders(module, "features", 1) == {"c0", "c1"}
    assert senders(module, "target_features", 1) == {"c2"}


def test_subsets_of_messages_aligners_and_classifiers_are_nested() -> None:
    """Table II, setting (III): A present, B among A, C among B."""
    module = build(6, classifier_period=1)
    heard = {"aligner": UniformSubset(), "classifier": UniformSubset()}
    fit(module, shards(6, 8), 12, strategy={"heard": heard})
    sizes = []
    for round_idx in range(11):  # the last one closes the run if C was empty
        a, b, c = (senders(module, channel, round_idx) - {"c5"} for channel in ("features", "aligner", "classifier"))
        assert c <= b <= a
        sizes.append((len(a), len(b), len(c)))
    assert any(a > b for a, b, _ in sizes)
    assert any(b > c for _, b, c in sizes)


def test_table_xv_row_c_draws_messages_in_order_and_aligners_at_random() -> None:
    module = build(6)
    heard = {"features": OneByOne(), "aligner": OneByOne("random")}
    fit(module, shards(6, 8), 10, strategy=ALL | {"heard": heard, "nested_heard": False})
    features = [senders(module, "features", i) for i in range(10)]
    aligners = [senders(module, "aligner", i) - {"c5"} for i in range(10)]
    assert features == [{f"c{i % 5}"} for i in range(10)]
    assert all(len(names) == 1 for names in aligners)
    assert aligners != features
    assert len({next(iter(names)) for names in aligners}) > 2


def test_nested_pairs_are_the_same_pair() -> None:
    module = build(6)
    heard = {"features": OneByOne(), "aligner": OneByOne()}
    fit(module, shards(6, 8), 5, strategy=ALL | {"heard": heard})
    for i in range(5):
        assert senders(module, "features", i) == {f"c{i}"}
        assert senders(module, "aligner", i) == {f"c{i}", "c5"}
        told = [e for e in module.federation.ledger if e.channel == "target_features" and e.round_idx == i]
        assert {e.receiver for e in told} == {f"c{i}"}


# -------------------------------------------------------------------- the classifier


def test_classifiers_are_averaged_every_period_and_given_to_the_target() -> None:
    module = build(classifier_period=3)
    snapshots = fit(module, unequal(), 7)
    keys = ["classifier.weight", "classifier.bias"]
    booked = {e.round_idx for e in module.federation.ledger if e.channel == "classifier"}
    assert booked == {2, 5, 6}  # t = 3 and 6, and the end
    start = snapshots.start["c2"].state_dict()
    for round_idx, state in enumerate(snapshots.rounds):
        for key in keys:
            equal = torch.equal(state["c0"][key], state["c1"][key])
            assert equal == (round_idx in (2, 5))
            if round_idx < 2:
                assert torch.equal(state["c2"][key], start[key])  # nothing trains it there
            elif round_idx < 6:
                assert torch.equal(state["c2"][key], snapshots.rounds[2 if round_idx < 5 else 5]["c0"][key])
            else:
                mean = (state["c0"][key] + state["c1"][key]) / 2
                torch.testing.assert_close(state["c2"][key], mean)


def test_at_the_end_the_target_alone_gets_the_mean_over_all_sources() -> None:
    """Also those that are absent in the last round, and if the period is longer than the run."""
    module = build(classifier_period=50)
    schedule = Schedule([["c0", "c2"]])
    state = fit(module, unequal(), 4, strategy={"participation": schedule}).rounds[-1]
    mean = (state["c0"]["classifier.weight"] + state["c1"]["classifier.weight"]) / 2
    torch.testing.assert_close(state["c2"]["classifier.weight"], mean)
    assert not torch.equal(state["c0"]["classifier.weight"], state["c1"]["classifier.weight"])
    talk = [(e.sender, e.receiver) for e in module.federation.ledger if e.channel == "classifier"]
    assert sorted(talk) == [("c0", "server"), ("c1", "server"), ("server", "c2")]


def test_a_run_that_ends_with_a_period_is_closed_already() -> None:
    module = build(classifier_period=2)
    fit(module, unequal(), 4)
    booked = [e for e in module.federation.ledger if e.channel == "classifier"]
    assert {e.round_idx for e in booked} == {1, 3}
    assert all(e.messages == 1 for e in booked)


class StopAfter(pl.Callback):
    """Stops training after some round, as a callback of the user's might."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.should_stop = module.federation.round_idx >= self.rounds


@pytest.mark.parametrize("period", [50, None])
def test_a_run_that_is_stopped_early_is_closed_too(period: int | None) -> None:
    module = build(classifier_period=period)
    fit(module, unequal(), 9, callbacks=[StopAfter(3)])
    assert module.federation.round_idx == 3
    state = {name: weights(module, name) for name in ("c0", "c1", "c2")}
    if period is None:
        assert state["c2"]["informed"]
        assert torch.equal(state["c2"]["ballot.1.weight"], state["c1"]["classifier.weight"])
    else:
        mean = (state["c0"]["classifier.weight"] + state["c1"]["classifier.weight"]) / 2
        torch.testing.assert_close(state["c2"]["classifier.weight"], mean)
    channel = "vote" if period is None else "classifier"
    assert len({e.sender for e in module.federation.ledger if e.channel == channel} - {"server"}) == 2


def test_early_stopping_on_a_metric_closes_the_run() -> None:
    data = digits()
    module = on_digits(data, classifier_period=50)
    stopping = EarlyStopping("source/acc", patience=1, mode="max", min_delta=1.0)  # no round improves by that much
    trainer(9, [stopping], strategy=ALL).fit(module, data)
    assert module.federation.round_idx == 2
    state = {name: weights(module, name) for name in ("clean", "blended", "fonts")}
    mean = (state["clean"]["classifier.weight"] + state["blended"]["classifier.weight"]) / 2
    torch.testing.assert_close(state["fonts"]["classifier.weight"], mean)


def on_digits(data: Any, **kwargs: Any) -> FedRFTCA:
    torch.manual_seed(0)
    given = {"num_frequencies": 32, "num_components": 16, "optimizer": lambda params: Adam(params, lr=0.01)}
    extractor = kwargs.pop("extractor", None) or MLP(64, [16])
    return FedRFTCA(data.clients, data.target, data.num_classes, extractor, **(given | kwargs))


# -------------------------------------------------------------------- one-shot voting


def test_sources_vote_once_at_the_end_and_the_target_predicts_their_majority(tmp_path: Path) -> None:
    data = digits()
    module = on_digits(data, classifier_period=None)
    seen: list[set[str]] = []

    class Metrics(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            seen.append(set(trainer.callback_metrics))

    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    schedule = Schedule([["clean", "blended", "fonts"], ["clean", "fonts"]])  # blended is away at the end
    run = trainer(
        2, [Metrics(), saver, OracleAccuracy()], strategy={"participation": schedule}, enable_checkpointing=True
    )
    run.fit(module, data)
    assert not any(name.startswith("target/score") for name in seen[0])
    assert "target/score" in seen[1]

    replica = module.replicas["fonts"].eval()
    assert isinstance(replica, VotingReplica)
    test = data.dataset("fonts", "test")
    x, y = test.batch(torch.arange(len(test)))
    aligned = replica.aligner(replica.random_features(x))
    logits = torch.stack([module.replicas[name].classifier(aligned) for name in ("clean", "blended")])
    torch.testing.assert_close(module(x), hard_vote(logits))

    votes = [e for e in module.federation.ledger if e.channel == "vote"]
    size = wire_size({"weight": torch.empty(10, 16), "bias": torch.empty(10)})
    assert {(e.round_idx, e.sender, e.receiver, e.messages, e.num_bytes) for e in votes} == {
        (1, "clean", "fonts", 1, size),
        (1, "blended", "fonts", 1, size),
    }
    assert "classifier" not in module.federation.ledger.bytes_by_channel()

    now = run.test(module, data, verbose=False)[0]
    again = run.test(module, data, ckpt_path=str(tmp_path / "epoch=1.ckpt"), verbose=False)[0]
    assert again == now
    right = (hard_vote(logits).argmax(dim=1) == reveal_for_oracle(y)).float().mean()
    assert now["oracle/target/acc"] == pytest.approx(float(right), abs=1e-6)
    fresh = on_digits(data, classifier_period=None)
    other = trainer(2, [OracleAccuracy()], strategy={"participation": schedule})
    assert other.test(fresh, data, ckpt_path=str(tmp_path / "epoch=1.ckpt"), verbose=False)[0] == now


def test_a_voting_run_resumes_bit_for_bit_and_votes_once(tmp_path: Path) -> None:
    def run(callbacks: list[pl.Callback], checkpoint: str | None = None) -> FedRFTCA:
        data = digits()
        module = on_digits(data, classifier_period=None)
        trainer(4, callbacks, enable_checkpointing=bool(callbacks)).fit(module, data, ckpt_path=checkpoint)
        return module

    straight = run([ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)])
    resumed = run([], str(tmp_path / "epoch=1.ckpt"))
    for name in ("clean", "blended", "fonts"):
        assert same(weights(straight, name), weights(resumed, name))
    assert straight.federation.ledger == resumed.federation.ledger
    assert len([e for e in resumed.federation.ledger if e.channel == "vote"]) == 2


def test_a_finished_voting_run_that_is_resumed_keeps_its_votes(tmp_path: Path) -> None:
    data = digits()
    module = on_digits(data, classifier_period=None)
    run = trainer(2)
    run.fit(module, data)
    run.save_checkpoint(tmp_path / "done.ckpt")
    again = on_digits(data, classifier_period=None)
    trainer(2).fit(again, data, ckpt_path=str(tmp_path / "done.ckpt"))
    assert same(weights(module, "fonts"), weights(again, "fonts"))


# -------------------------------------------------------------------- resuming


def test_a_checkpoint_within_a_round_keeps_what_was_received(tmp_path: Path) -> None:
    """Three local steps in a round: messages come in the first, the checkpoint after the second."""

    def run(callbacks: list[pl.Callback], checkpoint: str | None = None) -> FedRFTCA:
        data = digits()
        module = on_digits(data, classifier_period=2, extractor=MLP(64, [16], dropout=0.2))
        run = trainer(4, callbacks, enable_checkpointing=bool(callbacks), strategy=ALL | {"local_steps": 3})
        run.fit(module, data, ckpt_path=checkpoint)
        return module

    straight = run([ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")])
    path = tmp_path / "step=5.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["federation"]["batch_idx"] == 2
    assert saved["clients"]["fonts"]["weights"]["heard"]
    assert float(saved["clients"]["fonts"]["weights"]["received"].norm()) > 0.1
    resumed = run([], str(path))
    for name in ("clean", "blended", "fonts"):
        assert same(weights(straight, name), weights(resumed, name))
    assert straight.federation.ledger == resumed.federation.ledger


@pytest.mark.parametrize("period", [4, 50])
def test_a_run_resumed_between_two_averages_of_the_classifiers_is_the_same(period: int, tmp_path: Path) -> None:
    def run(callbacks: list[pl.Callback], checkpoint: str | None = None) -> FedRFTCA:
        module = build(classifier_period=period)
        run = trainer(6, callbacks, enable_checkpointing=bool(callbacks))
        run.fit(module, loader(unequal()), ckpt_path=checkpoint)
        return module

    straight = run([ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)])
    resumed = run([], str(tmp_path / "epoch=2.ckpt"))
    for name in ("c0", "c1", "c2"):
        assert same(weights(straight, name), weights(resumed, name))
    assert straight.federation.ledger == resumed.federation.ledger


# -------------------------------------------------------------------- bytes


def test_messages_have_the_size_that_the_paper_says_whatever_the_data_and_the_batch() -> None:
    def run(copies: int) -> dict[str, int]:
        data = {
            name: TensorDataset(*(torch.cat([tensor] * copies) for tensor in shard.tensors))
            for name, shard in shards(3, 24).items()
        }
        module = build(classifier_period=2)
        fit(module, data, 2, batch_size=8 * copies)
        used = module.federation.ledger.bytes_by_channel()
        assert used.pop("metrics") > 0
        return used

    once, twice = run(1), run(2)
    assert once == twice
    message = {"mean": torch.empty(2 * N)}
    aligner = {"aligner.weight": torch.empty(M, 2 * N)}
    classifier = {"classifier.weight": torch.empty(2, M), "classifier.bias": torch.empty(2)}
    assert wire_size(message) == 4 + len('[["mean","float32",[16]]]') + 2 * N * 4
    # two rounds: two sources up, their mean to the target, and the target's own to two sources
    assert once["features"] == 2 * (2 * up(message) + down(message))
    assert once["target_features"] == 2 * 2 * wire_size(message)
    assert once["aligner"] == 2 * (3 * up(aligner) + 3 * down(aligner))
    assert once["classifier"] == 2 * up(classifier) + 3 * down(classifier)
    # what is not 2N, 2N m or (m + 1) C float32 numbers: a weight each, and the description
    assert up(message) - 2 * N * 4 == up(message | {"mean": torch.empty(98)}) - 98 * 4 < 100


def up(payload: dict[str, Tensor]) -> int:
    """Bytes of a summand of a plain mean: what it is, its numbers, and its weight."""
    text = torch.empty(len(schema_text(schema_of(payload))), dtype=torch.uint8)
    return wire_size({"schema": text, "sum": torch.empty(sum(tensor.numel() for tensor in payload.values()) + 1)})


def down(payload: dict[str, Tensor]) -> int:
    """Bytes of the mean: the same, the number of clients and whether they have weights."""
    text = torch.empty(len(schema_text(schema_of(payload))), dtype=torch.uint8)
    total = torch.empty(sum(tensor.numel() for tensor in payload.values()) + 1)
    return wire_size({"schema": text, "about": torch.empty(2, dtype=torch.int32), "sum": total})


def test_several_local_steps_exchange_messages_once() -> None:
    one, three = build(), build()
    fit(one, shards(3, 24), 2, batch_size=8, strategy=ALL | {"local_steps": 1})
    fit(three, shards(3, 24), 2, batch_size=8, strategy=ALL | {"local_steps": 3})
    ours, theirs = (module.federation.ledger.bytes_by_channel() for module in (one, three))
    for channel in ("features", "target_features"):
        assert ours[channel] == theirs[channel] > 0


# -------------------------------------------------------------------- privacy

BACKENDS: dict[str, Any] = {
    "masking": partial(PairwiseMasking, colluders=0),
    # quick keys: this is about arithmetic and not about secrecy
    "paillier": lambda: Paillier(key_bits=512, insecure_test_keys=True),
    "bfv": BFV,
    "ckks": CKKS,
}
NEEDS = {"paillier": "phe", "bfv": "tenseal", "ckks": "tenseal"}


def trained(rounds: int = 4, clients: int = 4, period: int | None = 2, **strategy: Any) -> FedRFTCA:
    module = build(clients, optimizer=lambda params: SGD(params, lr=0.05), classifier_period=period)
    fit(module, shards(clients, 16), rounds, strategy={"participation": UniformSubset(at_least=2)} | strategy)
    return module


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_trains_as_plain_sums_do(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*sends no mean")
        module = trained(privacy=BACKENDS[name]())
    reference = trained() if name == "ckks" else trained(privacy=Plain(FixedPoint()))
    summed = {e.channel for e in module.federation.ledger if e.receiver == SERVER} - {"metrics"}
    assert {channel.removesuffix(KEYS) for channel in summed} == {"features", "aligner", "classifier"}
    for client in ("c0", "c1", "c2", "c3"):
        for key, tensor in weights(reference, client).items():
            if name == "ckks":
                torch.testing.assert_close(weights(module, client)[key], tensor, atol=1e-3, rtol=0)
            else:
                assert torch.equal(weights(module, client)[key], tensor), (client, key)


def test_a_grid_makes_no_more_difference_than_its_step() -> None:
    plain, grid = trained(), trained(privacy=Plain(FixedPoint()))
    for client in ("c0", "c3"):
        torch.testing.assert_close(weights(plain, client), weights(grid, client), atol=1e-4, rtol=0)


def test_a_single_source_under_masking_says_nothing_and_one_warning_names_the_remedy() -> None:
    module = build(classifier_period=1)
    schedule = Schedule([["c0", "c2"], ["c0", "c2"], ["c0", "c1", "c2"]])
    strategy = {"participation": schedule, "privacy": PairwiseMasking(colluders=0)}
    with pytest.warns(UserWarning, match=r"UniformSubset\(at_least=2\)") as caught:
        snapshots = fit(module, unequal(), 3, strategy=strategy)
    about = [str(warning.message) for warning in caught if "sends no mean" in str(warning.message)]
    assert sorted("'features'" in message for message in about) == [False, True]  # and one about the classifiers
    assert "['c0'] alone would send, and PairwiseMasking hides nothing of fewer than 2" in about[0]
    for round_idx in (0, 1):
        assert "c0" not in senders(module, "features", round_idx)
        assert not snapshots.rounds[round_idx]["c2"]["heard"]
        assert senders(module, "aligner", round_idx) >= {"c0", "c2"}
        assert not senders(module, "classifier", round_idx)
    assert senders(module, "features", 2) == {"c0", "c1"}
    assert snapshots.rounds[2]["c2"]["heard"]


def test_masked_runs_close_with_absent_sources_too() -> None:
    module = build(classifier_period=50)
    strategy = {"participation": Schedule([["c0", "c2"]]), "privacy": PairwiseMasking(colluders=0)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*sends no mean")
        state = fit(module, unequal(), 2, strategy=strategy).rounds[-1]
    mean = (state["c0"]["classifier.weight"] + state["c1"]["classifier.weight"]) / 2
    torch.testing.assert_close(state["c2"]["classifier.weight"], mean, atol=1e-5, rtol=0)


def test_noise_on_messages_and_aligners_is_applied_and_accounted() -> None:
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=0.1)
    noisy = trained(differential_privacy={"features": mechanism, "aligner": mechanism})
    plain = trained()
    assert all(tensor.isfinite().all() for tensor in weights(noisy, "c3").values())
    assert not torch.equal(weights(noisy, "c3")["aligner.weight"], weights(plain, "c3")["aligner.weight"])
    assert set(noisy.federation.accounts["message"].clients) == {"c0", "c1", "c2", "c3"}


def test_hardly_any_noise_and_a_wide_clip_change_hardly_anything() -> None:
    mechanism = GaussianMechanism(clip_norm=1e3, noise_multiplier=1e-10)
    torch.testing.assert_close(
        weights(trained(differential_privacy=mechanism), "c3"), weights(trained(), "c3"), atol=1e-4, rtol=0
    )


def test_aligners_are_clipped_around_the_last_one() -> None:
    """A clip far below the norm of W would else shrink it: it only bounds the step of a round."""
    clip = 1e-3
    mechanism = GaussianMechanism(clip_norm=clip, noise_multiplier=1e-9)
    module = build(optimizer=lambda params: SGD(params, lr=0.5))
    strategy = ALL | {"differential_privacy": {"aligner": mechanism}}
    snapshots = fit(module, unequal(), 3, strategy=strategy)
    before = snapshots.start["c2"].state_dict()["aligner.weight"]
    for state in snapshots.rounds:
        assert float((state["c2"]["aligner.weight"] - before).norm()) <= clip * 1.01
        before = state["c2"]["aligner.weight"]


# -------------------------------------------------------------------- options and surroundings


def test_orthogonal_columns_of_the_first_length_after_every_round() -> None:
    module = build(constraint="orthogonal")
    snapshots = fit(module, unequal(), 3, strategy={"participation": Schedule([["c0", "c2"], ["c2"]])})
    for state in snapshots.rounds:
        for client in ("c0", "c1", "c2"):
            gram = state[client]["aligner.weight"] @ state[client]["aligner.weight"].T
            torch.testing.assert_close(gram, GAIN**2 * torch.eye(M), atol=1e-5, rtol=0)
    first = snapshots.start["c0"].state_dict()["aligner.weight"]
    torch.testing.assert_close(first @ first.T, GAIN**2 * torch.eye(M), atol=1e-5, rtol=0)


def test_without_a_constraint_the_target_shrinks_its_aligner_and_relative_alignment_does_not() -> None:
    """A trap: W that tends to 0 makes the paper's loss (11) perfect. Only the target's loss is at work."""

    def norm(constraint: Any) -> float:
        module = build(
            constraint=constraint, unbiased=False, mmd_weight=0.0, optimizer=lambda params: SGD(params, lr=0.1)
        )
        schedule = {"aligner": Schedule([["c2"]])}  # keeps the sources' aligners out of it
        snapshots = fit(module, unequal(), 80, strategy=ALL | {"heard": schedule})
        after = snapshots.rounds[-1]["c2"]["aligner.weight"]
        return float(after.norm() / snapshots.start["c2"].state_dict()["aligner.weight"].norm())

    # a loss that no scaling of W changes has its gradient perpendicular to W, and steps can but lengthen it
    assert norm("relative") >= 1.0
    assert norm("none") < 1.0


def test_batch_norm_dropout_and_accumulation_train_every_client() -> None:
    data = digits(flatten=False)
    torch.manual_seed(0)
    module = on_digits(data, extractor=SmallCNN(1, width=4), classifier_period=1)
    snapshots = Snapshots()
    trainer(2, [snapshots], strategy=ALL, accumulate_grad_batches=2).fit(module, data)
    for name in ("clean", "blended", "fonts"):
        start, after = snapshots.start[name].state_dict(), weights(module, name)
        for key in after:
            if key.startswith("extractor.") and key.endswith(("weight", "running_mean")):
                assert not torch.equal(start[key], after[key]), (name, key)
    ours, theirs = weights(module, "clean"), weights(module, "fonts")
    means = [key for key in ours if key.endswith("running_mean")]
    assert means
    assert all(not torch.equal(ours[key], theirs[key]) for key in means)  # they are the extractor's, and stay


def test_accumulated_batches_exchange_their_messages_once_a_round() -> None:
    module = build()
    fit(module, shards(3, 32), 2, batch_size=8, accumulate_grad_batches=2)
    message = {"mean": torch.empty(2 * N)}
    used = module.federation.ledger.bytes_by_channel()
    assert used["features"] == 2 * (2 * up(message) + down(message))
    assert used["target_features"] == 2 * 2 * wire_size(message)


def test_in_a_plain_trainer_it_trains_the_same() -> None:
    plain, federated = build(classifier_period=2), build(classifier_period=2)
    trainer(3, federated=False).fit(plain, loader(unequal()))
    trainer(3).fit(federated, loader(unequal()))
    for name in ("c0", "c1", "c2"):
        assert same(weights(plain, name), weights(federated, name))
    assert plain.federation.ledger == federated.federation.ledger


def test_after_a_warm_up_of_fedavg_all_start_from_the_same_network() -> None:
    module = build(warmup_rounds=2, classifier_period=50)
    snapshots = fit(module, unequal(), 3)
    warm = snapshots.rounds[1]
    learnt = [key for key in warm["c0"] if key not in BUFFERS]
    for key in learnt:
        assert torch.equal(warm["c0"][key], warm["c1"][key])
        assert torch.equal(warm["c0"][key], warm["c2"][key])
    channels = {(e.round_idx, e.channel) for e in module.federation.ledger if e.channel != "metrics"}
    after_it = {(2, channel) for channel in ("features", "target_features", "aligner", "classifier")}
    assert channels == {(0, "weights"), (1, "weights"), *after_it}
    after = snapshots.rounds[2]
    assert not torch.equal(after["c0"]["extractor.weight"], after["c2"]["extractor.weight"])


def test_a_client_away_at_the_end_of_the_warm_up_fetches_its_result() -> None:
    module = build(warmup_rounds=1, mmd_weight=0.0, optimizer=lambda params: SGD(params, lr=0.0))
    torch.manual_seed(0)
    schedule = Schedule([["c0", "c2"], ["c0", "c1", "c2"]])
    fit(module, unequal(), 2, strategy={"participation": schedule})
    fetched = [e for e in module.federation.ledger if e.channel == "weights" and e.round_idx == 1]
    assert [(e.sender, e.receiver) for e in fetched] == [("server", "c1")]


@pytest.mark.parametrize("period", [1, None])
def test_a_classifier_of_ones_own_is_used(period: int | None) -> None:
    classifier = nn.Sequential(nn.Linear(M, 7), nn.ReLU(), nn.Linear(7, 2))
    module = build(classifier=classifier, classifier_period=period)
    snapshots = fit(module, unequal(), 2)
    state = snapshots.rounds[-1]
    assert state["c0"]["classifier.0.weight"].shape == (7, M)
    assert module(torch.randn(3, 5)).shape == (3, 2)
    for key in ("classifier.0.weight", "classifier.2.bias"):
        if period == 1:
            assert torch.equal(state["c0"][key], state["c2"][key])
        else:
            assert torch.equal(state["c1"][key], state["c2"][key.replace("classifier", "ballot.1")])


def test_the_targets_labels_are_never_used() -> None:
    data = digits(target_labels=1.0)
    with_labels, without = on_digits(data), on_digits(digits())
    trainer(2, strategy=ALL).fit(with_labels, data)
    trainer(2, strategy=ALL).fit(without, digits())
    assert same(weights(with_labels, "fonts"), weights(without, "fonts"))


def test_frequencies_are_everyones_and_neither_sent_nor_stored() -> None:
    module = build()
    fit(module, unequal())
    replicas = list(module.replicas.children())
    assert all(torch.equal(replica.frequencies, replicas[0].frequencies) for replica in replicas)
    assert torch.equal(replicas[0].frequencies, sample_frequencies(N, 6, 1.0, seed=0))
    assert not any("frequencies" in name for name in module.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_components": 0}, r"num_components \(m\) must be between 1 and 2 \* num_frequencies \(2N = 16\), got 0"),
        ({"num_components": 17}, r"num_components \(m\) must be between 1 .*, got 17"),
        ({"num_frequencies": 0}, r"2N = 0"),
        ({"mmd_weight": -0.1}, r"mmd_weight \(lambda\) must be at least 0 and finite, got -0.1"),
        ({"mmd_weight": float("nan")}, r"mmd_weight \(lambda\) must be at least 0 and finite, got nan"),
        ({"mmd_weight": float("inf")}, r"mmd_weight \(lambda\) must be at least 0 and finite, got inf"),
        ({"train_extractor": "norm"}, "train_extractor='norm' trains normalisation layers, and the extractor has none"),
        ({"train_extractor": "some"}, "train_extractor must be 'all', 'norm' or 'none', got 'some'"),
        ({"constraint": "trace"}, "constraint must be 'none', 'relative' or 'orthogonal', got 'trace'"),
        ({"classifier_period": 0}, r"classifier_period \(T_C\) must be at least 1 round, or null .*, got 0"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"kernel": "linear"}, "kernel"),
        ({"weighting": "size"}, "weighting must be"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_an_extractor_that_does_not_tell_its_width_is_refused() -> None:
    with pytest.raises(TypeError, match="extractor must have an integer attribute out_features"):
        fit(build(extractor=nn.Sequential(nn.Linear(5, 6))), unequal())


def test_vectorising_is_refused() -> None:
    with pytest.raises(ValueError, match="FedRFTCA has its own"):
        fit(build(vectorize=True), unequal())


def test_half_of_the_sources_by_fraction_train_too() -> None:
    module = build(5, classifier_period=1)
    fit(module, shards(5, 12), 4, strategy={"participation": Fraction(0.5)})
    assert all(len(senders(module, "features", i)) == 2 for i in range(4))
    assert all(senders(module, "target_features", i) == {"c4"} for i in range(4))


# -------------------------------------------------------------------- other seeds


def test_a_checkpoint_predicts_with_its_own_frequencies_under_any_global_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the seed in the state, a model that is loaded elsewhere would silently take other random features."""
    data = digits()
    module = on_digits(data, classifier_period=1)
    run = trainer(1, strategy=ALL)
    run.fit(module, data)
    run.save_checkpoint(tmp_path / "run.ckpt")
    test = data.dataset("fonts", "test")
    x, _ = test.batch(torch.arange(len(test)))
    module.eval()
    expected, numbers = module(x), run.test(module, data, verbose=False)[0]

    monkeypatch.setenv("PL_GLOBAL_SEED", "77")
    fresh = on_digits(digits(), classifier_period=1)
    other = trainer(1, strategy=ALL)
    assert other.test(fresh, digits(), ckpt_path=str(tmp_path / "run.ckpt"), verbose=False)[0] == numbers
    assert fresh.federation.seed == 77  # of this run; the replica's is another
    assert torch.equal(fresh.eval()(x), expected)
    loaded = FedRFTCA.load_from_checkpoint(
        tmp_path / "run.ckpt", clients=data.clients, extractor=MLP(64, [16]), weights_only=True
    )
    assert torch.equal(loaded.eval()(x), expected)
    for replica in loaded.replicas.children():
        assert torch.equal(replica.frequencies, sample_frequencies(32, 16, 1.0, seed=0))


@pytest.mark.parametrize("period", [2, None])
def test_a_run_resumed_under_another_global_seed_is_the_same(
    period: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(callbacks: list[pl.Callback], checkpoint: str | None = None) -> FedRFTCA:
        module = build(classifier_period=period)
        run = trainer(4, callbacks, enable_checkpointing=bool(callbacks))
        run.fit(module, loader(unequal()), ckpt_path=checkpoint)
        return module

    straight = run([ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)])
    monkeypatch.setenv("PL_GLOBAL_SEED", "77")
    resumed = run([], str(tmp_path / "epoch=1.ckpt"))
    for name in ("c0", "c1", "c2"):
        assert torch.equal(resumed.replicas[name].frequencies, sample_frequencies(N, 6, 1.0, seed=0))
        assert same(weights(straight, name), weights(resumed, name))


# -------------------------------------------------------------------- data that is all alike


class DeadReLU(nn.Sequential):
    """An extractor that gives 0 for every input, and has no gradient."""

    out_features = 6

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.ReLU())
        with torch.no_grad():
            self[0].bias.fill_(-100.0)


@pytest.mark.parametrize("trouble", ["one sample", "pairs", "dead", "batch of 1"])
def test_batches_without_spread_neither_blow_up_the_aligner_nor_the_loss(trouble: str) -> None:
    """Divided by a spread of almost 0, the alignment's gradient would be without bound. All options at defaults."""
    data = shards(3, 24)
    if trouble in ("one sample", "pairs"):
        kinds = 1 if trouble == "one sample" else 2
        data = {
            name: TensorDataset(shard.tensors[0][:kinds].repeat(24 // kinds, 1), shard.tensors[1])
            for name, shard in data.items()
        }
    torch.manual_seed(0)
    extractor = DeadReLU() if trouble == "dead" else nn.Sequential(nn.Linear(5, 6))
    extractor.out_features = 6
    module = FedRFTCA(list(data), "c2", 2, extractor)
    snapshots = Snapshots()
    seen: list[float] = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: FederatedModule, *rest: Any) -> None:  # type: ignore[override]
            seen.extend(float(loss) for _, losses in module.run.record.steps[-1:] for loss in losses)

    run = trainer(10, [snapshots, Losses()], strategy=ALL)
    run.fit(module, loader(data, 1 if trouble == "batch of 1" else 8))
    first = max(float(start.aligner.weight.detach().abs().max()) for start in snapshots.start.values())
    largest = max(float(s["aligner.weight"].abs().max()) for state in snapshots.rounds for s in state.values())
    print(f"{trouble}: |W| {first:.3f} -> {largest:.3f}, losses {min(seen):.3f} to {max(seen):.3f}")
    assert len(seen) > 20
    assert all(math.isfinite(loss) for loss in seen)
    assert min(seen) >= -1.0
    assert max(seen) <= 200 + 10
    assert largest < 2 * first


# -------------------------------------------------------------------- who is told what


def test_the_targets_message_is_reported_as_sent_between_clients_and_the_sources_as_hidden() -> None:
    module = trained(privacy=PairwiseMasking(colluders=0))
    channels = {channel.channel: channel for channel in report(module.federation).channels}
    assert set(channels) == {"features", "target_features", "aligner", "classifier"}
    assert channels["target_features"].description is None
    assert channels["target_features"].bytes_keys == 12 * len('....[["key","uint8",[32]]]' + 32 * ".")  # by pair
    sent = {(e.sender, e.receiver) for e in module.federation.ledger if e.channel == "target_features"}
    assert sent <= {("c3", "c0"), ("c3", "c1"), ("c3", "c2")}
    for channel, senders in (("features", 3), ("aligner", 4), ("classifier", 3)):
        assert channels[channel].description == PairwiseMasking(colluders=0).describe_round(senders)


def test_one_source_under_masking_is_refused_with_ways_out_that_work() -> None:
    data = {name: shard for name, shard in shards(2, 12).items()}
    masking, way_out = PairwiseMasking(colluders=0), r"give this channel fedlit\.privacy\.Plain\(\)"
    with pytest.raises(ChannelError, match=rf"\['c0'\] alone can send over channel 'features' .* {way_out}"):
        fit(build(2), data, strategy=ALL | {"privacy": masking})
    privacy: dict[str, Any] = {"features": Plain(), "aligner": masking}
    with pytest.raises(ChannelError, match=rf"\['c0'\] alone can send over channel 'classifier' .* {way_out}"):
        fit(build(2), data, strategy=ALL | {"privacy": {**privacy, "classifier": masking}})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*sends no mean")
        state = fit(build(2), data, 2, strategy=ALL | {"privacy": {**privacy, "classifier": Plain()}}).rounds[-1]
        voted = fit(build(2, classifier_period=None), data, 2, strategy=ALL | {"privacy": privacy}).rounds[-1]
    assert torch.equal(state["c1"]["classifier.weight"], state["c0"]["classifier.weight"])
    assert torch.equal(voted["c1"]["ballot.0.weight"], voted["c0"]["classifier.weight"])


def test_a_source_away_at_the_end_of_the_warm_up_and_after_trains_on_from_its_result() -> None:
    """c1 is away in the warm-up and in the round after it; there and later, its extractor is its own."""
    data = unequal()
    module = build(warmup_rounds=1, mmd_weight=0.0)
    schedule = Schedule([["c0", "c2"], ["c0", "c2"], ["c0", "c1", "c2"]])
    rounds = fit(module, data, 4, strategy={"participation": schedule}).rounds
    assert not torch.equal(rounds[0]["c1"]["extractor.weight"], rounds[0]["c2"]["extractor.weight"])
    expected = copy.deepcopy(module.replicas["c1"])
    before = rounds[0]["c2"]  # the result of the warm-up, which the target has
    for state in rounds[1:]:
        expected.load_state_dict(before)
        for parameter in expected.parameters():
            parameter.grad = None
        F.cross_entropy(expected(data["c1"].tensors[0]), data["c1"].tensors[1]).backward()
        for key, parameter in expected.named_parameters():
            if key != "aligner.weight" or state is rounds[1]:  # the aligner is averaged where c1 is present
                assert parameter.grad is not None
                torch.testing.assert_close(state["c1"][key], parameter.detach() - 0.5 * parameter.grad)
        before = state["c1"]
    fetched = [e for e in module.federation.ledger if e.channel == "weights" and e.round_idx > 0]
    assert [(e.round_idx, e.sender, e.receiver) for e in fetched] == [(1, "server", "c1")]


def test_votes_under_differential_privacy_are_clipped_around_the_last_public_classifier() -> None:
    """Clipped around 0, a classifier would lose nearly all its length; around what all know, only its last steps."""
    clip = 1e-3
    mechanism = GaussianMechanism(clip_norm=clip, noise_multiplier=1e-9)
    for warmup_rounds in (0, 1):
        module = build(classifier_period=None, warmup_rounds=warmup_rounds)
        strategy = ALL | {"differential_privacy": {"vote": mechanism}}
        snapshots = fit(module, unequal(), 3, strategy=strategy)
        state = snapshots.rounds[-1]
        public = snapshots.rounds[0]["c0"] if warmup_rounds else snapshots.start["c0"].state_dict()
        for i, source in enumerate(("c0", "c1")):
            gaps = {
                holder: torch.cat(
                    [(state[name][f"{prefix}.{key}"] - public[f"classifier.{key}"]).flatten() for key in keys]
                ).norm()
                for holder, name, prefix in (("own", source, "classifier"), ("vote", "c2", f"ballot.{i}"))
                for keys in (("weight", "bias"),)
            }
            assert float(gaps["own"]) > 20 * clip
            assert float(gaps["vote"]) == pytest.approx(clip, rel=1e-3)
        assert set(module.federation.accounts["message"].clients) == {"c0", "c1"}


def test_a_target_that_is_alone_sends_nothing_and_spends_no_privacy() -> None:
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1.0)
    strategy = {"differential_privacy": dict.fromkeys(("features", "target_features", "aligner"), mechanism)}
    module = build()
    fit(module, unequal(), 3, strategy=strategy | {"participation": Schedule([["c2"]])})
    for account in module.federation.accounts.values():
        assert not set(account.clients)
    heard = build()
    fit(heard, unequal(), 3, strategy=strategy | {"participation": Schedule([["c2"], ["c1", "c2"], ["c2"]])})
    assert set(heard.federation.accounts["message"].clients) == {"c1", "c2"}


# -------------------------------------------------------------------- the end of a run


@pytest.mark.parametrize("period", [None, 50])
@pytest.mark.parametrize(
    ("rounds", "limits", "strategy"),
    [
        (2, {"max_steps": 6, "max_epochs": -1}, {}),
        (2, {"max_steps": 6, "max_epochs": 9}, {}),
        (3, {"max_epochs": 3, "limit_train_batches": 2}, {}),
        (4, {"max_epochs": 2, "limit_train_batches": 4}, {"local_steps": 2, "rounds_per_epoch": 3}),
        (2, {"max_steps": 2, "max_epochs": -1, "accumulate_grad_batches": 3}, {}),
    ],
    ids=["steps", "steps before epochs", "part of a round", "two of three rounds", "accumulated steps"],
)
def test_a_limited_run_closes_in_its_last_round_so_that_the_last_checkpoint_is_whole(
    period: int | None, rounds: int, limits: dict[str, Any], strategy: dict[str, Any], tmp_path: Path
) -> None:
    module = build(classifier_period=period)
    saver = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    run = trainer(1, [saver], strategy=ALL | strategy, enable_checkpointing=True, **limits)
    run.fit(module, loader(shards(3, 24), 8))
    assert module.federation.round_idx == rounds
    channel = "vote" if period is None else "classifier"
    booked = [e for e in module.federation.ledger if e.channel == channel and e.sender != "server"]
    assert [(e.round_idx, e.sender, e.messages) for e in booked] == [(rounds - 1, "c0", 1), (rounds - 1, "c1", 1)]
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["clients"]
    assert saved["c2"]["weights"]["informed"]
    assert same(saved["c2"]["weights"], weights(module, "c2"))


@pytest.mark.parametrize("period", [None, 50])
def test_a_checkpoint_from_before_the_target_has_a_classifier_warns_and_has_no_score(
    period: int | None, tmp_path: Path
) -> None:
    data = digits()
    module = on_digits(data, classifier_period=period)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run = trainer(9, [saver, StopAfter(2)], strategy=ALL, enable_checkpointing=True)
    run.fit(module, data)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no classifier yet")
        whole = run.test(module, data, verbose=False)[0]  # it was closed when it was stopped
    assert "target/score" in whole
    fresh = on_digits(data, classifier_period=period)
    other = trainer(9, strategy=ALL)
    with pytest.warns(UserWarning, match="target 'fonts' has no classifier yet: .* its predictions mean nothing"):
        early = other.test(fresh, data, ckpt_path=str(tmp_path / "epoch=0.ckpt"), verbose=False)[0]
    assert "target/score" not in early
    assert "source/clean/acc" in early


def test_a_warm_up_gives_a_target_no_votes() -> None:
    """Its classifier is among what the warm-up averages, but the ballots are still copies of the first one."""
    data = digits()
    module = on_digits(data, classifier_period=None, warmup_rounds=2)
    run = trainer(4, [StopAfter(3)], strategy=ALL, limit_val_batches=1)
    informed: list[bool] = []

    class Look(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            informed.append(bool(module.replicas[module.target].informed))  # type: ignore[operator, union-attr]

    run.callbacks.append(Look())
    run.fit(module, data)
    assert informed[:2] == [False, False]
    assert module.replicas[module.target].informed  # closed, and so voted, when it was stopped


def test_a_classifier_mean_that_was_skipped_is_made_up_for_at_the_end() -> None:
    """In the last round a single source is heard: too few to hide, so that close_run asks all of them."""
    schedule = Schedule([["c0", "c1", "c2"], ["c0", "c2"]])
    module = build(classifier_period=2)
    fit(module, shards(3), 2, strategy={"participation": schedule, "privacy": PairwiseMasking(colluders=0)})
    assert module.replicas[module.target].informed
    assert senders(module, "classifier", 1) >= {"c0", "c1"}
