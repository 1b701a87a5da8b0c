"""FedRF-TCA: its rounds against Algorithms 2 to 4 written out by hand, and what it sends to whom."""

from __future__ import annotations

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
from torch.optim import SGD
from torch.utils.data import TensorDataset

import helpers
from fedlit import FederatedModule
from fedlit.callbacks import OracleAccuracy
from fedlit.federation import Everyone, Schedule
from fedlit.federation.wire import wire_size
from fedlit.functional import hard_vote, sample_frequencies
from fedlit.methods import FedRFTCA
from fedlit.models import VotingReplica
from fedlit.privacy import GaussianMechanism
from helpers import Snapshots, descend_, digits, loader, same, samples_of, shards, trainer, unequal, weights

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


def fit(*args: Any, **kwargs: Any) -> Snapshots:
    return helpers.fit(*args, **({"strategy": ALL} | kwargs))


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
                descend_(loss, params[name].values(), 0.5)
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
    for rounds in (2, 4, 5):  # those in which the target gets a classifier, as it does at the end by hand
        expected = by_hand(snapshots.start["c0"], data, present[:rounds], 2, remedies)
        for name, state in expected.items():
            found = {key: snapshots.rounds[rounds - 1][name][key] for key in state}
            torch.testing.assert_close(found, state, atol=2e-6, rtol=1e-5)


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


class StopAfter(pl.Callback):
    """Stops training after some round, as a callback of the user's might."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.should_stop = module.federation.round_idx >= self.rounds


VOTING: dict[str, Any] = {"num_frequencies": 32, "num_components": 16, "classifier_period": None}


def test_sources_vote_once_at_the_end_and_the_target_predicts_their_majority() -> None:
    data = digits()
    module = helpers.build(FedRFTCA, data, **VOTING)
    everyone = ["clean", "blended", "fonts"]
    snapshots, schedule = Snapshots(), Schedule([everyone, ["clean", "fonts"]])  # blended is away at the end
    run = trainer(2, [snapshots, OracleAccuracy()], strategy={"participation": schedule})
    run.fit(module, data)
    assert not any(name.startswith("target/score") for name in snapshots.metrics[1])  # the round before it
    assert "target/score" in run.callback_metrics

    replica = module.replicas["fonts"].eval()
    assert isinstance(replica, VotingReplica)
    x, y = samples_of(data, "fonts", "test")
    aligned = replica.aligner(replica.random_features(x))
    logits = torch.stack([module.replicas[name].classifier(aligned) for name in ("clean", "blended")])
    torch.testing.assert_close(module(x), hard_vote(logits))

    votes = [(e.round_idx, e.sender, e.receiver) for e in module.federation.ledger if e.channel == "vote"]
    assert sorted(votes) == [(1, "blended", "fonts"), (1, "clean", "fonts")]
    assert "classifier" not in module.federation.ledger.bytes_by_channel()

    now = run.test(module, data, verbose=False)[0]
    right = (hard_vote(logits).argmax(dim=1) == y).float().mean()
    assert now["oracle/target/acc"] == pytest.approx(float(right), abs=1e-6)


def test_messages_have_the_size_that_the_paper_says() -> None:
    """Of 2N, 2N m or (m + 1) C float32 numbers, and a header; means also have a weight and what is averaged."""
    fit(module := build(classifier_period=2), rounds=2)
    used = module.federation.ledger.bytes_by_channel()
    # those that are dropped are nested in this order: Table II, setting (III)
    assert [channel.name for channel in module.channels] == ["features", "target_features", "aligner", "classifier"]
    message = {"mean": torch.empty(2 * N)}
    assert wire_size(message) == 4 + len('[["mean","float32",[16]]]') + 2 * N * 4
    assert used["target_features"] == 2 * 2 * wire_size(message)
    # two rounds: two sources up, their mean to the target; three aligners up and down; at the end two classifiers up
    for channel, messages, size in (("features", 6, 2 * N), ("aligner", 12, 2 * N * M), ("classifier", 5, 2 * M + 2)):
        assert 0 < used[channel] - messages * 4 * size < messages * 200


def test_messages_have_the_size_that_the_paper_says_whatever_the_data_and_the_batch() -> None:
    """Of 2N, 2N m or (m + 1) C float32 numbers, and a header; means also have a weight and what is averaged."""

    def used(copies: int) -> dict[str, int]:
        data = {
            name: TensorDataset(*(torch.cat([tensor] * copies) for tensor in shard.tensors))
            for name, shard in shards(3, 24).items()
        }
        fit(module := build(classifier_period=2), data, 2, batch_size=8 * copies)
        return module.federation.ledger.bytes_by_channel()

    once = used(1)
    assert once == used(2)
    message = {"mean": torch.empty(2 * N)}
    assert wire_size(message) == 4 + len('[["mean","float32",[16]]]') + 2 * N * 4
    assert once["target_features"] == 2 * 2 * wire_size(message)
    # two rounds: two sources up, their mean to the target; three aligners up and down; at the end two classifiers up
    for channel, messages, size in (("features", 6, 2 * N), ("aligner", 12, 2 * N * M), ("classifier", 5, 2 * M + 2)):
        assert 0 < once[channel] - messages * 4 * size < messages * 200


class DeadReLU(nn.Sequential):
    """An extractor that gives 0 for every input, and has no gradient."""

    out_features = 6

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.ReLU())
        with torch.no_grad():
            self[0].bias.fill_(-100.0)


@pytest.mark.parametrize(
    "trouble", ["one sample", "dead", *(pytest.param(x, marks=pytest.mark.slow) for x in ("pairs", "batch of 1"))]
)
def test_batches_without_spread_neither_blow_up_the_aligner_nor_the_loss(trouble: str) -> None:
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
    # decay moves dead weights: the run would end at once for a client none of whose weights changes
    module = FedRFTCA(
        list(data), "c2", 2, extractor, optimizer=lambda params: SGD(params, 0.01, 0.9, weight_decay=0.01)
    )
    snapshots = Snapshots()
    seen: list[float] = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: FederatedModule, *rest: Any) -> None:  # type: ignore[override]
            seen.extend(float(loss) for _, losses in module.run.record.steps[-1:] for loss in losses)

    run = trainer(2 if trouble == "batch of 1" else 8, [snapshots, Losses()], strategy=ALL)
    run.fit(module, loader(data, 1 if trouble == "batch of 1" else 8))
    first = max(float(start.aligner.weight.detach().abs().max()) for start in snapshots.start.values())
    largest = max(float(s["aligner.weight"].abs().max()) for state in snapshots.rounds for s in state.values())
    assert len(seen) > 20
    assert all(math.isfinite(loss) for loss in seen)
    assert min(seen) >= -1.0
    assert max(seen) <= 200 + 10
    assert largest < 2 * first


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


@pytest.mark.parametrize(
    ("period", "rounds", "limits", "strategy"),
    [
        (None, 2, {"max_steps": 6, "max_epochs": -1}, {}),
        (50, 2, {"max_steps": 6, "max_epochs": 9}, {}),
        (50, 4, {"max_epochs": 2, "limit_train_batches": 4}, {"local_steps": 2, "rounds_per_epoch": 3}),
        (50, 2, {"max_steps": 2, "max_epochs": -1, "accumulate_grad_batches": 3}, {}),
    ],
    ids=["steps", "steps before epochs", "two of three rounds", "accumulated steps"],
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


def test_a_checkpoint_from_before_the_target_has_a_classifier_warns_and_has_no_score(tmp_path: Path) -> None:
    data = digits()
    module = helpers.build(FedRFTCA, data, **VOTING)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run = trainer(9, [saver, StopAfter(2)], strategy=ALL, enable_checkpointing=True)
    run.fit(module, data)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no classifier yet")
        whole = run.test(module, data, verbose=False)[0]  # it was closed when it was stopped
    assert "target/score" in whole
    fresh = helpers.build(FedRFTCA, data, **VOTING)
    other = trainer(9, strategy=ALL)
    with pytest.warns(UserWarning, match="no classifier yet"):
        early = other.test(fresh, data, ckpt_path=str(tmp_path / "epoch=0.ckpt"), verbose=False)[0]
    assert "target/score" not in early
    assert "source/clean/acc" in early
