"""Ditto, FedRep, APFL and KNNPer: update rules against hand-made loops, their limits, and what stays at home."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from fedlit import Client, FederatedModule
from fedlit.federation import UNLABELLED, Fraction, Schedule
from fedlit.functional import fedavg
from fedlit.methods import APFL, Ditto, FedAvg, FedRep, KNNPer
from helpers import Snapshots, batches_of, build, descend_, digits, loader, shards, trainer, unequal, weights

METHODS: dict[str, tuple[type[FederatedModule], dict[str, Any]]] = {
    "APFL": (APFL, {"alpha": 0.3}),
    "Ditto": (Ditto, {"lam": 0.5}),
    "FedRep": (FedRep, {}),
    "KNNPer": (KNNPer, {"num_neighbors": 5}),
}
CLIENTS = ("clean", "blended", "fonts")
LR = 0.3


def on_shards(method: type[FederatedModule], width: int = 0, **kwargs: Any) -> FederatedModule:
    """Logistic regression, or two linear layers with ``width`` features between; the target is c2."""
    torch.manual_seed(0)
    extractor: nn.Module = nn.Linear(5, width) if width else nn.Identity()
    kwargs.setdefault("optimizer", lambda params: SGD(params, lr=LR))
    clients = ["c0", "c1", Client("c2", role="target", labelled=True)]
    return method(clients, "c2", 2, extractor, nn.Linear(width or 5, 2), **kwargs)  # type: ignore[arg-type]


def gradient(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the mean cross-entropy of softmax regression, by its closed form."""
    error = ((x @ weight.T + bias).softmax(dim=1) - F.one_hot(y, 2)) / len(y)
    return error.T @ x, error.sum(dim=0)


def run_digits(method: type[FederatedModule], rounds: int = 3, callbacks: Any = (), **kwargs: Any) -> FederatedModule:
    strategy, limits = kwargs.pop("strategy", {}), kwargs.pop("trainer", {})
    data = digits(target_labels=30)
    module = build(method, data, **kwargs)
    trainer(rounds, callbacks, strategy=strategy, **limits).fit(module, data)
    return module


Pair = list[Tensor]
"""Weight and bias of softmax regression."""


def rounds_by_hand(data: dict[str, TensorDataset], start: Pair, personal_step: Any) -> tuple[Pair, dict[str, Pair]]:
    """Three rounds: a step of w is plain, and w is averaged by samples; v has a step of its own."""
    shared, personal, total = start, {name: start for name in data}, sum(map(len, data.values()))
    for round_idx in range(3):
        ends = {}
        for name in data:
            w, v = shared, personal[name]
            for x, y in batches_of(data, name, round_idx):
                v, w = personal_step(v, w, shared, x, y), descend(w, gradient(*w, x, y))
            ends[name], personal[name] = w, v
        shared = [sum(len(data[name]) / total * ends[name][i] for name in data) for i in range(2)]  # type: ignore[misc]
    return shared, personal


def descend(weights: Pair, gradients: Sequence[Tensor], rate: float = LR) -> Pair:
    return [p - rate * g for p, g in zip(weights, gradients, strict=True)]


def ditto_step(v: Pair, w: Pair, anchor: Pair, x: Tensor, y: Tensor) -> Pair:
    """v <- v - lr (grad F(v) + lam (v - w)), w of the round's start."""
    return [p - LR * (g + 0.5 * (p - a)) for p, g, a in zip(v, gradient(*v, x, y), anchor, strict=True)]


def mixed(v: Pair, w: Pair) -> Pair:
    return [0.3 * p + 0.7 * q for p, q in zip(v, w, strict=True)]


def apfl_step(v: Pair, w: Pair, anchor: Pair, x: Tensor, y: Tensor) -> Pair:
    """v <- v - lr alpha grad F(alpha v + (1 - alpha) w), while w <- w - lr grad F(w), both from the same w and v."""
    return descend(v, gradient(*mixed(v, w), x, y), 0.3 * LR)


@pytest.mark.parametrize(("name", "step", "predicting"), [("Ditto", ditto_step, lambda v, w: v),
                                                          ("APFL", apfl_step, mixed)])  # fmt: skip
def test_personal_models_follow_their_update_rule(name: str, step: Any, predicting: Any) -> None:
    method, arguments = METHODS[name]
    data, module = unequal(40, 13, 6), on_shards(method, **arguments)
    start = [tensor.detach().clone() for tensor in module.originals[1].parameters()]
    trainer(3).fit(module, loader(data))
    shared, personal = rounds_by_hand(data, start, step)
    for client, v in personal.items():
        got, expected = weights(module, client), predicting(v, shared)
        for prefix, pair in (("", shared), ("personal.", v)):
            found = [got[f"{prefix}classifier.{key}"] for key in ("weight", "bias")]
            torch.testing.assert_close(found, pair, atol=1e-6, rtol=1e-5)
        x = data[client].tensors[0]
        torch.testing.assert_close(module.replicas[client](x), x @ expected[0].T + expected[1], atol=1e-5, rtol=1e-5)


def fedrep_by_hand(
    data: dict[str, TensorDataset], head_steps: dict[str, int], together: int
) -> dict[str, dict[str, Tensor]]:
    """Algorithm 1 with torch's own tools: head steps with the body fixed, body steps with the head fixed, mean body."""
    torch.manual_seed(0)
    first = nn.ModuleDict({"extractor": nn.Linear(5, 3), "classifier": nn.Linear(3, 2)})
    nets = {name: copy.deepcopy(first) for name in data}
    for round_idx in range(3):
        for name, net in nets.items():
            batches = batches_of(data, name, round_idx)
            for step, start in enumerate(range(0, len(batches), together)):
                part = net["classifier" if step < head_steps[name] else "extractor"]
                losses = [F.cross_entropy(net["classifier"](net["extractor"](x)), y)
                          for x, y in batches[start : start + together]]  # fmt: skip
                descend_(torch.stack(losses).sum() / together, part.parameters(), LR)
        bodies = [net["extractor"].state_dict() for net in nets.values()]
        mean = fedavg(bodies, [len(shard) for shard in data.values()])
        for net in nets.values():
            net["extractor"].load_state_dict(mean)
    return {name: net.state_dict() for name, net in nets.items()}


@pytest.mark.parametrize(
    ("head_share", "together", "head_steps"), [(0.5, 1, (3, 1, 1)), (0.8, 1, (4, 2, 1)), (0.5, 2, (2, 1, 1))]
)
def test_fedrep_trains_heads_first_then_bodies_and_averages_bodies(
    head_share: float, together: int, head_steps: tuple[int, ...]
) -> None:
    data = unequal(40, 13, 6)  # 5, 2 and 1 batches
    module = on_shards(FedRep, width=3, head_share=head_share)
    trainer(3, accumulate_grad_batches=together).fit(module, loader(data))
    expected = fedrep_by_hand(data, dict(zip(data, head_steps, strict=True)), together)
    for name in data:
        torch.testing.assert_close(weights(module, name), dict(expected[name]), atol=1e-6, rtol=1e-5)
    heads = [expected[name]["classifier.weight"] for name in data]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])


def test_vectorised_fedrep_equals_one_client_at_a_time() -> None:
    one, many = (on_shards(FedRep, width=3, vectorize=vectorize) for vectorize in (False, True))
    for module in (one, many):
        trainer(2, gradient_clip_val=0.1).fit(module, loader(unequal(40, 13, 6)))
    for client in ("c0", "c1", "c2"):
        torch.testing.assert_close(weights(many, client), weights(one, client), atol=2e-5, rtol=1e-4)


def test_knnper_mixes_scikit_learns_neighbours_with_fedavg() -> None:
    lam, data = 0.3, digits(target_labels=30)
    module = build(KNNPer, data, lam=lam)
    trainer(1).fit(module, data)
    plain = run_digits(FedAvg, 1)
    for client in CLIENTS:
        train, test = data.dataset(client, "train"), data.dataset(client, "test")
        x, y = train.batch(torch.arange(len(train)))
        known = y != UNLABELLED
        assert int(known.sum()) == (30 if client == "fonts" else len(train))
        queries, _ = test.batch(torch.arange(len(test)))
        replica = plain.replicas[client].eval()
        with torch.no_grad():
            stored, asked = (replica.extractor(z).double().numpy() for z in (x[known], queries))  # type: ignore[operator]
            softmax = replica(queries).softmax(dim=1).double()
        oracle = KNeighborsClassifier(10, weights=lambda distances: np.exp(-distances))
        oracle.fit(stored, y[known].numpy())
        near = torch.zeros(len(test), 10, dtype=torch.float64)
        near[:, oracle.classes_] = torch.from_numpy(oracle.predict_proba(asked))
        expected = lam * near + (1 - lam) * softmax
        module.eval()
        got = module.replicas[client](queries).softmax(dim=1).double()
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        if client == "fonts":
            torch.testing.assert_close(module(queries).softmax(dim=1).double(), expected, atol=1e-5, rtol=0)


def embedded(state: dict[str, Tensor], client: str) -> Tensor:
    """Embeddings of a client's labelled samples by the weights in a checkpoint."""
    data = digits(target_labels=30)
    train = data.dataset(client, "train")
    x, y = train.batch(torch.arange(len(train)))
    prefix = f"replicas.{client}.extractor.layers.0."
    return F.relu(F.linear(x[y != UNLABELLED], state[f"{prefix}weight"], state[f"{prefix}bias"]))


def test_every_checkpoint_has_the_datastore_of_its_own_weights(tmp_path: Path) -> None:
    """Also one from within a round, and one that is written after the last round was closed early."""

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            trainer.should_stop = trainer.global_step == 28

    savers = [
        ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1, filename="{step}"),
        ModelCheckpoint(tmp_path, save_last=True, save_top_k=0),
    ]
    module = run_digits(KNNPer, 4, [*savers, Stop()], trainer={"enable_checkpointing": True})
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert {path.stem for path in paths} >= {"step=7", "step=14", "last"}
    for path in paths:
        saved = torch.load(path, weights_only=True)["clients"]
        for client in CLIENTS:
            state = {f"replicas.{client}.{name}": tensor for name, tensor in saved[client]["weights"].items()}
            torch.testing.assert_close(state[f"replicas.{client}.embeddings"], embedded(state, client))
    state = {f"replicas.fonts.{name}": tensor for name, tensor in weights(module, "fonts").items()}
    torch.testing.assert_close(state["replicas.fonts.embeddings"], embedded(state, "fonts"))


def test_unlabelled_samples_are_no_neighbours_even_in_data_that_do_not_list_them() -> None:
    data = shards(3, 24)
    x, y = data["c2"].tensors
    data["c2"] = TensorDataset(x, torch.where(torch.arange(24) < 20, UNLABELLED, y))
    module = on_shards(KNNPer)
    trainer(1).fit(module, loader(data))
    got = weights(module, "c2")
    assert torch.equal(got["embeddings"], x[20:])
    assert torch.equal(got["labels"], y[20:])


@pytest.mark.parametrize("name", ["APFL", "Ditto", "KNNPer"])
def test_the_averaged_model_is_fedavgs_to_the_last_bit(name: str) -> None:
    method, arguments = METHODS[name]
    options: dict[str, Any] = {
        "dropout": 0.2,
        "optimizer": lambda params: Adam(params, lr=0.01),
        "strategy": {"participation": Fraction(0.5)},
        "trainer": {"gradient_clip_val": 0.1},
    }
    ours, plain = run_digits(method, 2, **arguments, **options), run_digits(FedAvg, 2, **options)
    for client in CLIENTS:
        got, expected = weights(ours, client), weights(plain, client)
        assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert ours.federation.ledger.bytes_by_channel() == plain.federation.ledger.bytes_by_channel()


@pytest.mark.parametrize("name", ["APFL", "Ditto"])
def test_after_a_warm_up_personal_models_start_from_its_result(name: str) -> None:
    method, arguments = METHODS[name]
    starts = Snapshots()
    run_digits(method, 3, [starts], warmup_rounds=2, **arguments)
    first, result = starts.starts[0]["fonts"], starts.starts[2]
    for client in CLIENTS:
        for key in ("extractor.layers.0.weight", "classifier.bias"):
            assert torch.equal(result[client][f"personal.{key}"], result["fonts"][key])
            assert not torch.equal(result[client][f"personal.{key}"], first[key])


@pytest.mark.parametrize("name", ["APFL", "Ditto"])
def test_who_is_away_neither_trains_nor_starts_a_personal_model(name: str) -> None:
    method, arguments = METHODS[name]
    schedule = Schedule([["clean", "fonts"], ["clean", "blended", "fonts"], ["clean", "fonts"]])
    starts = Snapshots()
    module = run_digits(method, 3, [starts], strategy={"participation": schedule}, **arguments)
    away, late, there = (state["blended"] for state in starts.starts)
    fonts = starts.starts[1]["fonts"]
    head = "personal.classifier.weight"
    assert not away["personalised"]
    assert late["personalised"]
    assert torch.equal(late[head], fonts["classifier.weight"])  # it starts from what its client fetches
    assert not torch.equal(late[head], away["classifier.weight"])
    assert not torch.equal(fonts[head], fonts["classifier.weight"])
    assert not torch.equal(there[head], late[head])
    end = weights(module, "blended")
    assert all(torch.equal(end[key], there[key]) for key in end if key.startswith("personal"))
