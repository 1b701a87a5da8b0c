"""What each method trains and sends, against hand-made loops and identities between methods."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Timer
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from fedlit import Client, FederatedModule
from fedlit.federation import (
    DivergedError,
    LabelGuardError,
    RosterError,
    Schedule,
)
from fedlit.functional import fedavg
from fedlit.methods import FedAvg, FedProx, FinetuneOffline, SourceOnly, TargetOnly
from fedlit.models import MLP, Replica, SmallCNN
from helpers import assert_resumes, batches_of, build, digits, loader, same, shards, trainer, weights


def zeros() -> nn.Linear:
    layer = nn.Linear(5, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def linear(
    num_clients: int, method: type[FederatedModule] = FedAvg, lr: float = 0.5, **kwargs: object
) -> FederatedModule:
    """Logistic regression from zero weights on `shards`; the target trains along."""
    names: list[Client | str] = [f"c{i}" for i in range(num_clients - 1)]
    names.append(Client(f"c{num_clients - 1}", role="target", labelled=True))
    kwargs.setdefault("optimizer", lambda params: SGD(params, lr=lr))
    return method(names, f"c{num_clients - 1}", 2, nn.Identity(), zeros(), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build_optimizer", "options"),
    [
        (lambda params: SGD(params, lr=0.5), {}),
        (lambda params: SGD(params, lr=0.5), {"weighting": "uniform"}),
        (lambda params: Adam(params, lr=0.05), {"reset_optimizer": True}),
        (lambda params: Adam(params, lr=0.05, fused=True), {"reset_optimizer": True, "vectorize": True}),
    ],
)
def test_fedavg_equals_local_training_by_hand_and_the_weighted_mean(build_optimizer: Any, options: dict) -> None:
    data = shards(3, 20)
    data["c2"] = TensorDataset(*(tensor[:9] for tensor in data["c2"].tensors))
    module = linear(3, optimizer=build_optimizer, **options)
    trainer(2).fit(module, loader(data))
    model = zeros()
    for round_idx in range(2):
        states = []
        for name in data:
            local = copy.deepcopy(model)
            optimizer = build_optimizer(local.parameters())
            for x, y in batches_of(data, name, round_idx):
                optimizer.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimizer.step()
            states.append({key: tensor.detach() for key, tensor in local.state_dict().items()})
        model.load_state_dict(fedavg(states, [1, 1, 1] if "weighting" in options else [20, 20, 9]))
    for client in data:
        found = weights(module, client)["classifier.weight"]
        torch.testing.assert_close(found, model.weight.detach(), atol=1e-6, rtol=1e-5)


def run_digits(method: type[FederatedModule], rounds: int = 3, **kwargs: object) -> FederatedModule:
    options = {key: kwargs.pop(key) for key in ("target_labels", "transductive") if key in kwargs}
    strategy = kwargs.pop("strategy", {})
    data = digits(**options)
    module = build(method, data, **kwargs)
    trainer(rounds, strategy=strategy).fit(module, data)
    return module


def test_without_target_labels_fedavg_is_source_only() -> None:
    assert same(weights(run_digits(FedAvg), "fonts"), weights(run_digits(SourceOnly), "fonts"))


def test_fedprox_pulls_towards_the_model_of_the_rounds_start() -> None:
    """The proximal gradient is zero at the anchor, so one local step is FedAvg's; more steps stay nearer to it."""

    def assert_fedavg(rounds: int, mu: float, **kwargs: Any) -> None:
        prox, plain = run_digits(FedProx, rounds, mu=mu, **kwargs), run_digits(FedAvg, rounds, **kwargs)
        ours = {name: tensor for name, tensor in weights(prox, "fonts").items() if not name.startswith("anchor")}
        assert same(ours, weights(plain, "fonts"))

    assert_fedavg(1, 0.5, strategy={"local_steps": 1})
    assert_fedavg(2, 0.0)

    def distance(mu: float) -> float:
        torch.manual_seed(0)
        origin = MLP(64, [16]).state_dict()
        state = weights(run_digits(FedProx, 1, mu=mu), "fonts")
        return sum(float((state[f"extractor.{name}"] - tensor).square().sum()) for name, tensor in origin.items())

    assert distance(10.0) < distance(1.0) < distance(0.0)


def test_finetuning_changes_the_target_alone_and_sends_nothing() -> None:
    half = run_digits(FinetuneOffline, 2, federated_rounds=2, target_labels=30)
    full = run_digits(FinetuneOffline, 4, federated_rounds=2, target_labels=30)
    assert same(weights(half, "clean"), weights(full, "clean"))
    assert not same(weights(half, "fonts"), weights(full, "fonts"))
    assert same(weights(half, "fonts"), weights(run_digits(SourceOnly, 2, target_labels=30), "fonts"))
    assert {entry.round_idx for entry in full.federation.ledger if entry.channel == "weights"} == {0, 1}


def test_target_only_sends_nothing_and_leaves_sources_alone() -> None:
    module = run_digits(TargetOnly, target_labels=30)
    assert "weights" not in module.federation.ledger.bytes_by_channel()
    torch.manual_seed(0)
    start = MLP(64, [16]).state_dict()
    got = weights(module, "clean")
    assert all(torch.equal(got[f"extractor.{name}"], tensor) for name, tensor in start.items())
    assert module.federation.weights["fonts"] == 30


def test_a_client_that_was_absent_catches_up() -> None:
    everyone = ["clean", "blended", "fonts"]
    schedule = Schedule([everyone, ["clean", "fonts"], everyone])
    back = run_digits(SourceOnly, 3, strategy={"participation": schedule})
    talk = [entry for entry in back.federation.ledger if entry.channel == "weights" and entry.round_idx == 2]
    messages = {entry.receiver: entry.messages for entry in talk}
    assert (messages["blended"], messages["clean"]) == (2, 1)  # what it missed, and this round's mean
    assert same(weights(back, "blended"), weights(back, "clean"))


def test_local_norm_keeps_normalisation_at_home() -> None:
    torch.manual_seed(0)
    data = digits(flatten=False, target_labels=30)
    module = build(FedAvg, data, extractor=SmallCNN(1, width=4), local_norm=True)
    trainer(2).fit(module, data)
    ours, theirs = weights(module, "clean"), weights(module, "blended")
    norms = [
        f"{prefix}.{name}"
        for prefix, part in module.replicas["clean"].named_modules()
        if isinstance(part, nn.BatchNorm2d)
        for name in part.state_dict()
        if name != "num_batches_tracked"
    ]
    assert norms
    assert all(not torch.equal(ours[name], theirs[name]) for name in norms)
    others = [name for name in ours if name not in norms and "num_batches" not in name]
    assert all(torch.equal(ours[name], theirs[name]) for name in others)


def test_warm_up_rounds_are_fedavg_over_the_sources() -> None:
    with pytest.warns(UserWarning, match=r"TargetOnly never starts: all of 2"):
        warm = run_digits(TargetOnly, 2, warmup_rounds=2, target_labels=30)
    assert same(weights(warm, "fonts"), weights(run_digits(SourceOnly, 2, target_labels=30), "fonts"))
    after = run_digits(TargetOnly, 3, warmup_rounds=2, target_labels=30)
    assert same(weights(warm, "clean"), weights(after, "clean"))
    assert not same(weights(warm, "fonts"), weights(after, "fonts"))


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_vectorised_training_equals_one_client_at_a_time(accumulate: int) -> None:
    def run(vectorize: bool) -> FederatedModule:
        data = digits(target_labels=30)
        module = build(FedAvg, data, vectorize=vectorize, optimizer=lambda params: Adam(params, lr=0.01))
        trainer(3, accumulate_grad_batches=accumulate, gradient_clip_val=0.5).fit(module, data)
        return module

    one, many = run(False), run(True)
    for client in ("clean", "fonts"):
        for name, tensor in weights(one, client).items():
            torch.testing.assert_close(weights(many, client)[name], tensor, atol=2e-5, rtol=1e-4)


def test_accumulated_batches_equal_one_large_batch() -> None:
    data = shards(2, 32)
    large, small = linear(2), linear(2)
    trainer(2).fit(large, loader(data, batch_size=32))
    trainer(2, accumulate_grad_batches=4).fit(small, loader(data, batch_size=8))
    torch.testing.assert_close(
        weights(small, "c0")["classifier.weight"], weights(large, "c0")["classifier.weight"], atol=1e-6, rtol=1e-5
    )


class TwoOptimizers(FedAvg):
    """FedAvg by manual optimisation, one optimiser for extractors and one for classifiers."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        parts = []
        for part in ("extractor", "classifier"):
            groups = [
                {"params": list(self.replicas[c.name].get_submodule(part).parameters()), "client": c.name}
                for c in self.federation.local_clients
            ]
            parts.append(Adam(groups, lr=0.01))
        return parts

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        total = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(total)
        for optimizer in optimizers:
            optimizer.step()
        return total


def test_manual_optimisation_with_several_optimisers_trains_and_resumes(tmp_path: Path) -> None:
    """Adam works entry by entry, so two optimisers over disjoint parameters equal one over all."""

    def make(method: type[FederatedModule] = TwoOptimizers) -> FederatedModule:
        return build(method, digits(target_labels=30), optimizer=lambda params: Adam(params, lr=0.01))

    manual = assert_resumes(make, lambda: digits(target_labels=30), tmp_path, [20], rounds=2)  # two steps a batch
    trainer(2).fit(automatic := make(FedAvg), digits(target_labels=30))
    assert same(weights(manual, "fonts"), weights(automatic, "fonts"))


def test_resuming_with_other_data_rounds_or_method_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    run_digits(FedAvg, 1, target_labels=30).trainer.save_checkpoint(path)

    def resume(method: type[FederatedModule], seed: int = 0, **strategy: object) -> None:
        data = digits(target_labels=30, seed=seed)
        trainer(2, strategy=strategy).fit(build(method, data), data, ckpt_path=path)

    with pytest.raises(RosterError, match="seed was 0 and is 5"):
        resume(FedAvg, seed=5)
    with pytest.raises(RosterError, match="local_steps was None and is 3"):
        resume(FedAvg, local_steps=3)
    with pytest.raises(RosterError, match=r"one of fedlit\.methods\.FedAvg, this run trains .*SourceOnly"):
        resume(SourceOnly)
    resume(FedAvg)
    data = digits(target="clean")
    with pytest.raises(RosterError, match="belongs to another federation"):
        trainer(2).fit(build(FedAvg, data), data, ckpt_path=path)


def test_stopping_inside_a_round_still_aggregates() -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            trainer.should_stop = trainer.global_step == 3

    data = digits()
    module = build(SourceOnly, data)
    trainer(5, [Stop()]).fit(module, data)
    assert (module.federation.round_idx, module.federation.batch_idx) == (1, 0)
    assert same(weights(module, "clean"), weights(module, "fonts"))


class Peeking(SourceOnly):
    """A method that tries to read the target's labels while it trains."""

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        return self.clients


def without_clients() -> FederatedModule:
    """A method whose optimiser does not know whose weights are whose."""
    module = linear(2)
    module.configure_optimizers = lambda: Adam(module.parameters())  # type: ignore[method-assign]
    return module


def on_shards(data: Any, *more: Any) -> Callable[[], None]:
    return lambda: trainer(1).fit(linear(2), data, *more)


def on_digits(method: type[FederatedModule] = FedAvg, callbacks: Any = (), **kwargs: Any) -> Callable[[], None]:
    run = {key: kwargs.pop(key) for key in ("max_steps", "federated") if key in kwargs}
    images = "extractor" in kwargs
    return lambda: trainer(1, callbacks, **run).fit(build(method, digits(), **kwargs), digits(flatten=not images))


def cnn() -> nn.Module:
    return SmallCNN(1, width=4)


TWO = shards(2)


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (on_shards(loader(TWO), loader(TWO)), ValueError, "training"),
        (on_shards(loader({**TWO, "c9": TWO["c0"]})), RosterError, r"data of \['c9'\]"),
        (on_shards(loader({"c0": TWO["c0"]})), RosterError, r"\['c1'\] have no training data"),
        (lambda: loader({**TWO, "c1": TensorDataset(torch.empty(0, 5), torch.empty(0))}), RosterError, "no samples"),
        (on_shards(torch.utils.data.DataLoader(TWO["c0"], 8)), TypeError, "dataloaders"),
        (lambda: FedAvg(["a", Client("t", labelled=True)], "t", 2, MLP(4)), RosterError, "'t' has role 'source', but"),
        (lambda: trainer(1).fit(FedAvg(["clean", "blended", "fonts"], "clean", 10, MLP(64)), digits()), RosterError,
         "target .* must be"),
        (lambda: trainer(1).fit(without_clients(), loader(TWO)), ValueError, "^configure_optimizers must"),
        (on_digits(TwoOptimizers, vectorize=True), ValueError, "^vectorize must"),
        (on_digits(FedProx, vectorize=True), ValueError, "^vectorize must"),
        (on_digits(extractor=cnn(), vectorize=True), ValueError, "^vectorize must"),
        (on_digits(SourceOnly, extractor=cnn(), local_norm=True), ValueError, "^local_norm must"),
        (on_digits(max_steps=5), ValueError, "^max_steps must"),
        (on_digits(callbacks=[Timer("00:01:00:00")]), ValueError, "^max_time must"),
        (on_digits(Peeking), LabelGuardError, "'fonts' are not available"),
        (on_digits(Peeking, federated=False), LabelGuardError, "'fonts' are not available"),
    ],
)  # fmt: skip
def test_what_no_run_could_do_is_refused(run: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run()


def test_a_loss_that_is_not_a_number_names_client_and_round() -> None:
    data = shards(2)
    data["c0"].tensors[0][3, 0] = 3e38
    with pytest.raises(DivergedError, match=r"client 'c0' is nan in round 1"):
        trainer(2).fit(linear(2), loader(data))


def test_without_validation_samples_a_run_trains_and_tests() -> None:
    data = digits(val_fraction=0.0)
    run = trainer(1)
    run.fit(module := build(FedAvg, data), data)
    assert module.federation.round_idx == 1
    assert "source/acc" not in run.callback_metrics
    assert 0 <= run.test(module, data, verbose=False)[0]["source/acc"] <= 1


def test_validation_metrics_are_those_of_each_clients_own_replica() -> None:
    data = digits()
    module = build(SourceOnly, data, local_norm=True)
    run = trainer(1)
    run.fit(module, data)
    metrics = run.validate(module, data, verbose=False)[0]
    accuracies = []
    for client in ("clean", "blended"):
        dataset = data.dataset(client, "val")
        x, y = dataset.batch(torch.arange(len(dataset)))
        replica = module.replicas[client].eval()
        assert isinstance(replica, Replica)
        accuracies.append(float((replica(x).argmax(dim=1) == y).float().mean()))
        assert metrics[f"source/{client}/acc"] == pytest.approx(accuracies[-1], abs=1e-6)
    assert metrics["source/acc"] == pytest.approx(sum(accuracies) / 2, abs=1e-6)
    assert 0 <= metrics["target/score"] <= 1
    assert not any(name.startswith(("target/acc", "oracle")) for name in metrics)
