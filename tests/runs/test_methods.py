"""What each method trains and sends, against hand-made loops and identities between methods."""

from __future__ import annotations

import copy
from functools import partial
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

from fedlit import Client, FederatedModule, Requires
from fedlit.data import FederatedLoader
from fedlit.federation import (
    DivergedError,
    Fraction,
    GuardedLabels,
    LabelGuardError,
    Open,
    RosterError,
    Schedule,
    Summed,
    reveal_for_oracle,
)
from fedlit.functional import fedavg
from fedlit.methods import FedAvg, FedProx, FinetuneOffline, SourceOnly, TargetOnly
from fedlit.models import MLP, Replica, SmallCNN
from helpers import assert_resumes, batches_of, build, digits, loader, same, shards, trainer, weights
from refused import refused


def linear(
    num_clients: int, method: type[FederatedModule] = FedAvg, lr: float = 0.5, **kwargs: object
) -> FederatedModule:
    """Logistic regression from zero weights on `shards`; the target trains along."""
    layer = nn.Linear(5, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    names: list[Client | str] = [f"c{i}" for i in range(num_clients - 1)]
    names.append(Client(f"c{num_clients - 1}", role="target", labelled=True))
    kwargs.setdefault("optimizer", lambda params: SGD(params, lr=lr))
    return method(names, f"c{num_clients - 1}", 2, nn.Identity(), layer, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build_optimizer", "options"),
    [
        (lambda params: SGD(params, lr=0.5), {}),
        (lambda params: Adam(params, lr=0.05), {"reset_optimizer": True}),
        (lambda params: Adam(params, lr=0.05, fused=True), {"reset_optimizer": True, "vectorize": True}),
    ],
)
def test_fedavg_equals_local_training_by_hand_and_the_weighted_mean(build_optimizer: Any, options: dict) -> None:
    data = shards(3, 20)
    data["c2"] = TensorDataset(*(tensor[:9] for tensor in data["c2"].tensors))
    module = linear(3, optimizer=build_optimizer, **options)
    trainer(2).fit(module, loader(data))
    model = nn.Linear(5, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
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
        model.load_state_dict(fedavg(states, [20, 20, 9]))
    for client in data:
        torch.testing.assert_close(
            weights(module, client)["classifier.weight"], model.weight.detach(), atol=1e-6, rtol=1e-5
        )


def test_uniform_weighting_ignores_sample_counts() -> None:
    data = shards(2, 24)
    data["c1"] = TensorDataset(*(tensor[:8] for tensor in data["c1"].tensors))
    alone = {}
    for name, shard in data.items():
        layer = torch.zeros(2, 5, requires_grad=True)
        F.cross_entropy(shard.tensors[0] @ layer.T, shard.tensors[1]).backward()
        alone[name] = -0.5 * layer.grad
    module = linear(2, weighting="uniform")
    trainer(1).fit(module, loader(data, batch_size=64))
    expected = (alone["c0"] + alone["c1"]) / 2
    torch.testing.assert_close(weights(module, "c0")["classifier.weight"], expected, atol=1e-6, rtol=1e-5)


def run_digits(method: type[FederatedModule], rounds: int = 3, **kwargs: object) -> FederatedModule:
    options = {key: kwargs.pop(key) for key in ("target_labels", "transductive") if key in kwargs}
    strategy = kwargs.pop("strategy", {})
    data = digits(**options)
    module = build(method, data, **kwargs)
    trainer(rounds, strategy=strategy).fit(module, data)
    return module


def test_without_target_labels_fedavg_is_source_only() -> None:
    assert same(weights(run_digits(FedAvg), "fonts"), weights(run_digits(SourceOnly), "fonts"))


def test_fedprox_with_mu_zero_is_fedavg() -> None:
    prox, plain = run_digits(FedProx, mu=0.0), run_digits(FedAvg)
    ours = {name: tensor for name, tensor in weights(prox, "fonts").items() if not name.startswith("anchor")}
    assert same(ours, weights(plain, "fonts"))


def test_fedprox_pulls_towards_the_model_of_the_rounds_start() -> None:
    """The proximal gradient is zero at the anchor, so one local step is FedAvg's; more steps stay nearer to it."""
    one_step = {"local_steps": 1}
    prox, plain = (run_digits(method, 1, strategy=one_step) for method in (FedProx, FedAvg))
    ours = {name: tensor for name, tensor in weights(prox, "fonts").items() if not name.startswith("anchor")}
    assert same(ours, weights(plain, "fonts"))

    def distance(mu: float) -> float:
        torch.manual_seed(0)
        origin = MLP(64, [16]).state_dict()
        module = run_digits(FedProx, 1, mu=mu)
        state = weights(module, "fonts")
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


def test_an_absent_client_neither_sends_nor_receives_and_catches_up() -> None:
    schedule = Schedule([["clean", "blended", "fonts"], ["clean", "fonts"], ["clean", "blended", "fonts"]])
    before = run_digits(SourceOnly, 1, strategy={"participation": schedule})
    away = run_digits(SourceOnly, 2, strategy={"participation": schedule})
    assert same(weights(before, "blended"), weights(away, "blended"))
    assert not same(weights(away, "fonts"), weights(away, "blended"))
    back = run_digits(SourceOnly, 3, strategy={"participation": schedule})
    talk = [entry for entry in back.federation.ledger if entry.channel == "weights" and entry.round_idx == 2]
    to_blended = next(entry for entry in talk if entry.receiver == "blended")
    assert to_blended.messages == 2  # what it missed, and this round's mean
    assert next(entry for entry in talk if entry.receiver == "clean").messages == 1
    assert same(weights(back, "blended"), weights(back, "clean"))


def test_drops_leave_out_sources_of_one_channel_only() -> None:
    module = run_digits(SourceOnly, 4, strategy={"heard": {"weights": Fraction(0.5)}})
    senders = [e.sender for e in module.federation.ledger if e.channel == "weights" and e.receiver == "server"]
    assert len(senders) == 4  # one of two sources in each round
    told = [e.sender for e in module.federation.ledger if e.channel == "metrics" and e.receiver == "server"]
    assert {"clean", "blended"} <= set(told)


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


def test_local_norm_is_refused_where_a_client_would_keep_fresh_statistics() -> None:
    data = digits(flatten=False)
    module = build(SourceOnly, data, extractor=SmallCNN(1, width=4), local_norm=True)
    with pytest.raises(ValueError, match=r"leaves \['fonts'\], who do not train"):
        trainer(1).fit(module, data)


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


def test_vectorising_is_refused_where_it_would_be_wrong() -> None:
    with pytest.raises(ValueError, match="FedProx has its own"):
        run_digits(FedProx, vectorize=True)
    data = digits(flatten=False)
    module = build(FedAvg, data, extractor=SmallCNN(1, width=4), vectorize=True)
    with pytest.raises(ValueError, match="without buffers"):
        trainer(1).fit(module, data)


def test_clipping_is_per_client() -> None:
    """One step of plain SGD: each client's update has norm lr * clip, however large the others' gradients are."""
    data = shards(2, 16)
    data["c0"] = TensorDataset(100 * data["c0"].tensors[0], data["c0"].tensors[1])
    module = linear(2, TargetOnly, lr=1.0)
    module.learners = lambda round_idx: module.clients  # type: ignore[method-assign]
    run = trainer(1, gradient_clip_val=0.1)
    run.fit(module, loader(data, batch_size=64))
    assert run.callback_metrics["source/c0/grad_norm"] > 10 * run.callback_metrics["target/grad_norm"]
    for client in ("c0", "c1"):
        moved = torch.cat([tensor.flatten() for tensor in weights(module, client).values()])
        assert float(moved.norm()) == pytest.approx(0.1, rel=1e-4)


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

    manual = assert_resumes(make, lambda: digits(target_labels=30), tmp_path, [20], rounds=3)  # two steps a batch
    trainer(3).fit(automatic := make(FedAvg), digits(target_labels=30))
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
    with pytest.raises(RosterError, match=r"one of fedlit\.methods\.fedavg\.FedAvg, this run trains .*SourceOnly"):
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


def test_warm_up_leaves_out_what_a_method_does_in_each_step() -> None:
    class Talker(FedAvg):
        channels = (Open("talk"), Summed("weights"))

        def losses(self, batch: dict) -> dict[str, torch.Tensor]:  # type: ignore[override]
            self.federation.exchange("talk", {name: {"x": torch.ones(1)} for name in batch})
            return super().losses(batch)

    module = run_digits(Talker, 2, warmup_rounds=1, strategy={"local_steps": 2})
    assert {entry.round_idx for entry in module.federation.ledger if entry.channel == "talk"} == {1}


@pytest.mark.parametrize(
    "arguments",
    [{"mu": 0.5}, {"mu": 0.5, "reset_optimizer": True}, {"method": SourceOnly, "vectorize": True}],
    ids=["stateful", "reset", "vectorised"],
)
def test_a_checkpoint_within_a_round_resumes_bit_for_bit(arguments: dict[str, Any], tmp_path: Path) -> None:
    given = {"method": FedProx, "dropout": 0.2, "optimizer": partial(Adam, lr=0.01)} | arguments

    def make() -> FederatedModule:
        return build(data=digits(), **given)

    assert_resumes(make, digits, tmp_path, [5], rounds=2, strategy={"rounds_per_epoch": 2})  # a round is 7 steps


class OwnData(pl.LightningDataModule):
    """Somebody else's data module, which knows how to make a loader and nothing more; its target is the largest."""

    def train_dataloader(self) -> FederatedLoader:
        data = shards(3, 24)
        data["c1"] = TensorDataset(*(tensor[:8] for tensor in data["c1"].tensors))
        data["c2"] = TensorDataset(*(tensor.repeat_interleave(3, dim=0) for tensor in data["c2"].tensors))
        return loader(data)


def test_in_a_plain_trainer_any_data_module_is_cut_into_the_same_rounds() -> None:
    plain, federated = linear(3, SourceOnly), linear(3, SourceOnly)
    trainer(2, federated=False).fit(plain, OwnData())
    trainer(2).fit(federated, OwnData())
    assert plain.federation.weights == {"c0": 24, "c1": 8, "c2": 72}
    assert plain.federation.ledger == federated.federation.ledger
    assert same(weights(plain, "c2"), weights(federated, "c2"))


def test_loaders_in_the_wrong_place_are_refused() -> None:
    data = shards(2)
    with refused("training"):
        trainer(1).fit(linear(2), loader(data), loader(data))
    with pytest.raises(RosterError, match=r"data of \['c9'\]"):
        trainer(1).fit(linear(2), loader({**data, "c9": data["c0"]}))
    with pytest.raises(TypeError, match=r"samples of client 'c0' must be"):
        trainer(1).fit(linear(2), loader({name: [{"x": 1}] for name in data}))


def test_the_target_given_as_a_source_is_refused() -> None:
    with pytest.raises(RosterError, match="client 't' has role 'source', but"):
        FedAvg(["a", Client("t", labelled=True)], "t", 2, MLP(4))
    with pytest.raises(RosterError, match="model's target 'clean' and the data module's"):
        trainer(1).fit(FedAvg(["clean", "blended", "fonts"], "clean", 10, MLP(64)), digits())


def test_optimisers_without_clients_and_vectorised_manual_steps_are_refused() -> None:
    module = linear(2)
    module.configure_optimizers = lambda: Adam(module.parameters())  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="needs the key 'client'"):
        trainer(1).fit(module, loader(shards(2)))
    data = digits()
    with pytest.raises(ValueError, match="needs automatic optimisation"):
        trainer(1).fit(build(TwoOptimizers, data, vectorize=True), data)


class Peeking(SourceOnly):
    """A method that tries to read the target's labels while it trains."""

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        return self.clients


@pytest.mark.parametrize("federated", [True, False])
def test_reading_target_labels_in_training_raises(federated: bool) -> None:
    data = digits()
    with pytest.raises(LabelGuardError, match="'fonts' are not available"):
        trainer(1, federated=federated).fit(build(Peeking, data), data)


class Spy(pl.Callback):
    """Collects what a callback sees where the target's labels would be."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: dict, batch_idx: int
    ) -> None:
        self.seen += [batch["fonts"][1]] if "fonts" in batch else []

    def on_validation_batch_start(self, trainer: object, module: object, batch: dict, batch_idx: int) -> None:
        if "fonts" in batch:
            assert len(reveal_for_oracle(batch["fonts"][1])) > 0
            self.seen.append(batch["fonts"][1])


def test_callbacks_see_guarded_labels_too() -> None:
    class Everybody(SourceOnly):
        requires = Requires(unlabelled_target=True)

        def learners(self, round_idx: int) -> tuple[Client, ...]:
            return self.clients

        def loss(self, client: Client, batch: tuple) -> torch.Tensor:  # type: ignore[override]
            logits = self.replicas[client.name](batch[0])
            return logits.square().mean() if client.is_target else F.cross_entropy(logits, batch[1])

    spy, data = Spy(), digits()
    trainer(1, [spy]).fit(build(Everybody, data), data)
    assert spy.seen
    assert all(isinstance(labels, GuardedLabels) for labels in spy.seen)
    training = spy.seen[0]
    with pytest.raises(LabelGuardError):
        reveal_for_oracle(training)  # type: ignore[arg-type]


def test_a_loss_that_is_not_a_number_names_client_and_round() -> None:
    data = shards(2)
    data["c0"].tensors[0][3, 0] = 3e38
    with pytest.raises(DivergedError, match=r"client 'c0' is nan in round 1"):
        trainer(2).fit(linear(2), loader(data))


def test_settings_that_would_stop_inside_a_round_are_refused() -> None:
    data = digits()
    with pytest.raises(ValueError, match="stops inside a round"):
        trainer(5, max_steps=5).fit(build(FedAvg, data), data)
    with pytest.raises(ValueError, match="max_time stops inside a round"):
        trainer(5, [Timer("00:01:00:00")]).fit(build(FedAvg, data), data)


def test_ordinary_loaders_are_refused_by_the_strategy() -> None:
    with refused("dataloaders", TypeError):
        trainer(1).fit(linear(2), torch.utils.data.DataLoader(shards(2)["c0"], 8))


def test_without_validation_samples_a_run_trains_and_tests() -> None:
    data = digits(val_fraction=0.0)
    run = trainer(1)
    run.fit(module := build(FedAvg, data), data)
    assert module.federation.round_idx == 1
    assert "source/acc" not in run.callback_metrics
    assert 0 <= run.test(module, data, verbose=False)[0]["source/acc"] <= 1


def test_clients_of_different_shapes_are_refused_before_training() -> None:
    data = shards(2)
    data["c1"] = TensorDataset(torch.randn(10, 7), torch.zeros(10, dtype=torch.long))
    with pytest.raises(RosterError, match=r"client 'c1' have shape \(7,\)"):
        trainer(1).fit(linear(2), loader(data))


def test_a_client_without_data_is_refused() -> None:
    with pytest.raises(RosterError, match=r"clients \['c1'\] have no training data"):
        trainer(1).fit(linear(2), loader({"c0": shards(1)["c0"]}))
    with pytest.raises(RosterError, match="client 'c1' has no samples"):
        loader({**shards(1), "c1": TensorDataset(torch.empty(0, 5), torch.empty(0))})


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


def test_local_steps_count_optimiser_steps_and_wrap_around_small_clients() -> None:
    data = shards(2, 24)
    data["c1"] = TensorDataset(*(tensor[:8] for tensor in data["c1"].tensors))
    module = linear(2)
    run = trainer(3, strategy={"local_steps": 5})
    run.fit(module, loader(data))
    assert run.global_step == 15
    assert module.federation.round_idx == 3
