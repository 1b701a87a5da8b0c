"""FedDaDiL: a local step by hand, what is sent and what never is, and where its atoms start."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from fedlit.callbacks import OracleAccuracy, closing_table, summarise
from fedlit.federation import Federation, RosterError, Schedule
from fedlit.federation.messenger import Messenger
from fedlit.federation.transport import OneProcess
from fedlit.functional import joint_ot_loss, project_simplex, softmax_regression, wasserstein_barycenter
from fedlit.methods import FedAvg, FedDaDiL
from fedlit.models import DictionaryReplica, Features
from fedlit.privacy import CKKS, GaussianMechanism, PairwiseMasking, PrivacyWarning
from helpers import loader, same, trainer, weights

NAMES = ["c0", "c1", "c2"]
WIDTH, CLASSES, ATOMS, SIZE = 5, 3, 2, 12
LR = 0.05


def blobs(size: int = 24, uneven: bool = False) -> dict[str, TensorDataset]:
    """Three classes around centres that move from client to client; uneven, half of the samples are of the last."""
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(CLASSES, WIDTH, generator=generator)
    shift = torch.randn(WIDTH, generator=generator)
    data = {}
    for index, name in enumerate(NAMES):
        y = (torch.arange(size) % (CLASSES + uneven)).clamp(max=CLASSES - 1)
        data[name] = TensorDataset(centres[y] + index * shift + torch.randn(size, WIDTH, generator=generator), y)
    return data


def build(**kwargs: Any) -> FedDaDiL:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "num_atoms": ATOMS, "atom_size": SIZE, "unit_norm": False, "label_cost": 2.0, "atom_lr": LR, "simplex_lr": LR,
        "penalty": 0.1, "optimizer": lambda params: SGD(params, lr=LR),
    }  # fmt: skip
    return FedDaDiL(NAMES, "c2", CLASSES, kwargs.pop("extractor", None) or Features(WIDTH), **(given | kwargs))


class Snapshots(pl.Callback):
    """Copies of all clients' states after each round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, dict[str, Tensor]]] = []

    def on_round_end(self, trainer: pl.Trainer, module: FedDaDiL | FedAvg, round_idx: int) -> None:
        self.rounds.append({name: weights(module, name) for name, _ in module.replicas.named_children()})


def fit(
    module: FedDaDiL | FedAvg, rounds: int = 2, batch_size: int = 24, **kwargs: Any
) -> list[dict[str, dict[str, Tensor]]]:
    snapshots, data = Snapshots(), kwargs.pop("data", None) or blobs()
    run = trainer(rounds, [snapshots, *kwargs.pop("callbacks", [])], **kwargs)
    run.fit(module, loader(data, batch_size))
    return snapshots.rounds


# -------------------------------------------------------------------- the start and a step


def test_atoms_start_at_the_class_means_and_variances_of_all_sources() -> None:
    """Of the pooled sources' samples, less the noise, which is N(0, 1) and other for each atom."""
    module = build(atom_size=300, num_iterations=1)
    state = fit(module, rounds=1)[0]
    points = state["c2"]["dictionary.points"]
    assert torch.equal(points, state["c0"]["dictionary.points"])
    pooled = torch.cat([blobs()[name].tensors[0] for name in NAMES[:2]])
    classes = torch.cat([blobs()[name].tensors[1] for name in NAMES[:2]])
    own = torch.arange(300) % CLASSES
    noise = torch.empty_like(points)
    for label in range(CLASSES):
        here = pooled[classes == label]
        noise[:, own == label] = (points[:, own == label] - here.mean(dim=0)) / here.std(dim=0, correction=0)
    torch.testing.assert_close(noise.mean(dim=1), torch.zeros(ATOMS, WIDTH), atol=0.2, rtol=0)
    torch.testing.assert_close(noise.std(dim=1), torch.ones(ATOMS, WIDTH), atol=0.15, rtol=0)
    assert float((noise[0] * noise[1]).mean().abs()) < 0.1
    labels = state["c2"]["dictionary.labels"]
    torch.testing.assert_close(labels, F.one_hot(own, CLASSES).float().expand_as(labels))


@pytest.mark.parametrize("local_steps", [1, 7])
def test_the_start_is_of_all_samples_however_many_a_round_sees(local_steps: int) -> None:
    whole = fit(build(), rounds=1)[0]
    part = fit(build(), rounds=1, batch_size=4, strategy={"local_steps": local_steps})[0]
    torch.testing.assert_close(part["c2"]["dictionary.points"], whole["c2"]["dictionary.points"])


def test_without_sources_there_is_no_start() -> None:
    with pytest.raises(RosterError, match="round 0 gathers the class moments of the sources, but none participates"):
        fit(build(), strategy={"participation": Schedule([["c2"], NAMES])})


def test_a_class_that_no_source_has_starts_around_the_mean_of_all() -> None:
    module = build(atom_size=300, num_iterations=1)
    data = {name: TensorDataset(each.tensors[0], each.tensors[1].clamp(max=1)) for name, each in blobs().items()}
    snapshots = Snapshots()
    trainer(1, [snapshots]).fit(module, loader(data, 24))
    points = snapshots.rounds[0]["c2"]["dictionary.points"][:, 2::3].flatten(0, 1)
    pooled = torch.cat([data[name].tensors[0] for name in NAMES[:2]])
    torch.testing.assert_close(points.mean(dim=0), pooled.mean(dim=0), atol=0.8, rtol=0)
    torch.testing.assert_close(points.std(dim=0), pooled.std(dim=0), atol=0.5, rtol=0.1)


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ({"privacy": PairwiseMasking(colluders=0)}, True),
        ({}, False),  # nothing was to be hidden
        ({"privacy": PairwiseMasking(colluders=0), "differential_privacy": GaussianMechanism(10.0, 0.1)}, False),
    ],
)
def test_a_source_that_alone_has_a_class_is_told_that_its_moments_are_its_own(strategy: Any, told: bool) -> None:
    """The mean of all sources tells this class's moments of one: c0 alone has the last one."""
    data = blobs()
    x, y = data["c1"].tensors
    data["c1"] = TensorDataset(x, y.clamp(max=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(1, strategy=strategy).fit(build(), loader(data, 24))
    words = [str(item.message) for item in caught if issubclass(item.category, PrivacyWarning)]
    alone = [text for text in words if "alone has samples" in text]
    assert len(alone) == told
    assert all(text.startswith("of the classes [2] client 'c0' alone has samples") for text in alone)


@pytest.mark.parametrize(
    ("label_cost", "sample_weights"), [(2.0, "uniform"), ("adaptive", "uniform"), (2.0, "balanced")]
)
def test_a_round_is_a_step_of_each_client_and_their_mean(label_cost: Any, sample_weights: Any) -> None:
    """Algorithms 1 and 2 with all points of the atoms and all samples in one batch."""
    module, data = build(label_cost=label_cost, sampling="uniform", sample_weights=sample_weights), blobs(uneven=True)
    before, after = fit(module, rounds=2, data=data)
    stepped = []
    for name in NAMES:
        points = before[name]["dictionary.points"].clone().requires_grad_()
        labels = before[name]["dictionary.labels"].clone().requires_grad_()
        alpha = before[name]["coordinates"].clone().requires_grad_()
        # the same points in the same order, which the barycenter starts from
        rows = module_rows(module, name)
        found = wasserstein_barycenter(
            [atom[row] for atom, row in zip(points, rows, strict=True)],
            [atom[row] for atom, row in zip(labels, rows, strict=True)],
            alpha,
            label_cost=label_cost,
        )
        x, y = data[name].tensors
        support, shares = found.support, found.labels
        assert shares is not None
        if name == "c2":
            means = torch.stack(
                [(shares[:, c, None] * support).sum(dim=0) / shares[:, c].sum() for c in range(CLASSES)]
            )
            weighing = None if sample_weights == "uniform" else by_class(torch.cdist(x, means).argmin(dim=1))
            loss = joint_ot_loss(x, support, weights=weighing)
        else:
            weighing = None if sample_weights == "uniform" else by_class(y)
            classes = F.one_hot(y, CLASSES).float()
            loss = joint_ot_loss(x, support, classes, shares, label_cost, weights=weighing)
        loss.backward()
        assert points.grad is not None
        gradient = torch.zeros_like(labels) if labels.grad is None else labels.grad
        stepped.append((points.detach() - LR * points.grad, labels.detach() - LR * gradient))
        assert alpha.grad is not None
        moved = alpha.detach() - LR * alpha.grad
        # of two numbers the projection is known: move both by the same amount, then cut at 0 and 1
        first = ((moved[0] - moved[1] + 1) / 2).clamp(0, 1)
        torch.testing.assert_close(after[name]["coordinates"], torch.stack([first, 1 - first]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        after["c0"]["dictionary.points"], torch.stack([p for p, _ in stepped]).mean(dim=0), atol=1e-5, rtol=1e-4
    )
    for name in NAMES:
        assert torch.equal(after[name]["dictionary.points"], after["c0"]["dictionary.points"])
    projected = torch.stack([project_simplex(y) for _, y in stepped]).mean(dim=0)
    torch.testing.assert_close(after["c0"]["dictionary.labels"], projected, atol=1e-5, rtol=1e-4)


def by_class(y: Tensor) -> Tensor:
    """A third of the mass for each of three classes."""
    counts = torch.tensor([int((y == label).sum()) for label in range(CLASSES)])
    assert int(counts.min()) < int(counts.max())
    return torch.tensor([1 / (CLASSES * int(counts[label])) for label in y], dtype=torch.float64)


def test_balanced_weights_are_the_default_and_uniform_ones_the_paper_s() -> None:
    data = blobs(uneven=True)
    runs = [fit(build(**given), data=data)[-1]["c2"] for given in ({}, {"sample_weights": "balanced"})]
    uniform = fit(build(sample_weights="uniform"), data=data)[-1]["c2"]
    assert torch.equal(runs[0]["dictionary.points"], runs[1]["dictionary.points"])
    assert not torch.allclose(runs[0]["dictionary.points"], uniform["dictionary.points"])


def module_rows(module: FedDaDiL, name: str, round_idx: int = 1, batch_idx: int = 0) -> list[Tensor]:
    """Points in the order of a step."""
    federation = module.federation
    now = federation.round_idx, federation.batch_idx
    federation.round_idx, federation.batch_idx = round_idx, batch_idx
    try:
        return module.rows(next(client for client in module.clients if client.name == name))
    finally:
        federation.round_idx, federation.batch_idx = now


@pytest.mark.parametrize("alone", ["c0", "c2"])
def test_one_client_alone_is_dadil_without_a_federation(alone: str) -> None:
    """Four rounds of two steps with Adam, which remembers across rounds: one dictionary, stepped eight times."""
    schedule = Schedule([["c0", "c1"], *[[alone]] * 4])
    module = build(optimizer=lambda params: Adam(params, lr=LR), sampling="uniform", sample_weights="uniform")
    rounds = fit(module, 5, strategy={"participation": schedule, "local_steps": 2})
    start = rounds[0][alone]
    points, labels, alpha = (
        start[name].clone().requires_grad_() for name in ("dictionary.points", "dictionary.labels", "coordinates")
    )
    adam = Adam([points, labels, alpha], lr=LR)
    x, y = blobs()[alone].tensors
    for round_idx in range(1, 5):
        for step in range(2):
            rows = module_rows(module, alone, round_idx, step)
            found = wasserstein_barycenter(
                [atom[row] for atom, row in zip(points, rows, strict=True)],
                [atom[row] for atom, row in zip(labels, rows, strict=True)],
                alpha,
                label_cost=2.0,
            )
            if alone == "c2":
                loss = joint_ot_loss(x, found.support)
            else:
                loss = joint_ot_loss(x, found.support, F.one_hot(y, CLASSES).float(), found.labels, 2.0)
            adam.zero_grad()
            loss.backward()
            adam.step()
            with torch.no_grad():
                labels.copy_(project_simplex(labels))
                alpha.copy_(project_simplex(alpha))
    torch.testing.assert_close(rounds[-1][alone]["dictionary.points"], points.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rounds[-1][alone]["dictionary.labels"], labels.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rounds[-1][alone]["coordinates"], alpha.detach(), atol=1e-4, rtol=1e-4)
    assert float((points.detach() - start["dictionary.points"]).abs().mean()) > 0.05


def test_with_little_entropy_a_run_is_near_that_of_exact_plans() -> None:
    exact, near, far = (fit(build(entropy=entropy, num_iterations=1))[-1]["c2"] for entropy in (None, 1e-3, 1.0))
    gaps = [float((state["dictionary.points"] - exact["dictionary.points"]).abs().mean()) for state in (near, far)]
    assert 0 < gaps[0] < 0.2 * gaps[1]


def test_labels_and_coordinates_stay_on_their_simplices() -> None:
    module = build(simplex_lr=0.5, optimizer=lambda params: Adam(params, lr=LR))
    for state in fit(module, rounds=5, batch_size=8):
        for client in state.values():
            for name in ("coordinates", "dictionary.labels"):
                torch.testing.assert_close(client[name].sum(dim=-1), torch.ones(client[name].shape[:-1]))
                assert bool((client[name] >= -1e-7).all())
    assert not torch.equal(client["coordinates"], torch.full((ATOMS,), 1 / ATOMS))


def test_a_pass_deals_out_every_point_and_each_class_in_turn() -> None:
    module = build(atom_size=20, atom_batch_size=6)
    module.configure_model()
    federation = module.federation
    client = module.clients[0]
    passes = []
    for batch_idx in range(8):
        federation.batch_idx = batch_idx
        passes.append(module.rows(client))
    sizes = [[len(row) for row in rows] for rows in passes]
    assert sizes == [[5, 5]] * 8, "no small rest, which many samples would be carried onto"
    for start in (0, 4):
        for atom in range(ATOMS):
            dealt = torch.cat([rows[atom] for rows in passes[start : start + 4]])
            assert sorted(dealt.tolist()) == list(range(20))
            assert [sorted((batch % CLASSES).tolist()) for batch in dealt[:18].split(3)] == [[0, 1, 2]] * 6
    assert not torch.equal(passes[0][0], passes[4][0])
    assert not torch.equal(passes[0][0], passes[0][1])


def test_phase_1_is_fedavg_though_the_dictionarys_features_have_length_1() -> None:
    torch.manual_seed(0)
    networks = Encoder(), nn.Linear(WIDTH, CLASSES)
    fedavg = FedAvg(
        NAMES, "c2", CLASSES, *copy.deepcopy(networks), weighting="uniform", optimizer=lambda p: SGD(p, lr=LR)
    )
    theirs = fit(fedavg, rounds=3, batch_size=8)[-1]["c0"]
    fed_dadil = build(warmup_rounds=3, unit_norm=True, extractor=networks[0], classifier=networks[1])
    ours = fit(fed_dadil, rounds=3, batch_size=8)[-1]["c0"]
    assert len(theirs) == 4
    for key, value in theirs.items():
        assert torch.equal(ours[key], value)


# -------------------------------------------------------------------- messages


def test_coordinates_are_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is given to the federation to be sent, by name."""
    sent: list[tuple[str, str, tuple[int, ...]]] = []

    def watch(name: str) -> None:
        original = getattr(Federation, name)

        def watched(self: Federation, channel: str, payloads: Any, *args: Any, **kwargs: Any) -> Any:
            sent.extend((channel, key, tuple(t.shape)) for p in payloads.values() for key, t in p.items())
            return original(self, channel, payloads, *args, **kwargs)

        monkeypatch.setattr(Federation, name, watched)

    watch("mean")
    watch("exchange")
    module = build(warmup_rounds=1, extractor=Encoder())
    fit(module, rounds=4, batch_size=8)
    assert {(channel, key) for channel, key, _ in sent} == {
        ("weights", "extractor.weight"), ("weights", "extractor.bias"), ("weights", "classifier.weight"),
        ("weights", "classifier.bias"), ("class_moments", "moments"), ("atoms", "dictionary.points"),
        ("atoms", "dictionary.labels"),
    }  # fmt: skip
    assert {shape for channel, _, shape in sent if channel == "atoms"} == {(2, 12, 5), (2, 12, 3)}
    assert (ATOMS,) not in {shape for _, _, shape in sent}


@pytest.mark.parametrize("predict_with", ["reconstruction", "ensemble"])
def test_no_message_of_any_kind_has_a_coordinate_in_it(predict_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of all that is carried between clients and server or told to all processes, validation included."""
    carried: list[Tensor] = []

    def numbers(value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            carried.append(value.detach().clone().float().flatten())
        elif isinstance(value, float):
            carried.append(torch.tensor([value]))
        elif isinstance(value, dict):
            numbers(list(value.values()))
        elif isinstance(value, list | tuple | set):
            for each in value:
                numbers(each)

    for owner, names in (
        (Messenger, ("announce", "deliver", "to_server", "broadcast", "from_server")),
        (OneProcess, ("meet", "tell_all")),
    ):
        for name in names:
            original = getattr(owner, name)

            def watched(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                numbers([args, kwargs])
                return original(self, *args, **kwargs)

            monkeypatch.setattr(owner, name, watched)

    module, snapshots = build(predict_with=predict_with), Snapshots()
    run = trainer(4, [snapshots, OracleAccuracy()])
    run.fit(module, loader(blobs(), 8), loader(blobs(), 24, training=False, guarded="c2"))
    everything = torch.cat(carried).sort().values

    def found(searched: Tensor) -> Tensor:
        """Whether there is such a number, but for the rounding of a mean."""
        above = torch.searchsorted(everything, searched.contiguous()).clamp(1, len(everything) - 1)
        near = torch.stack([everything[above - 1], everything[above]])
        return ((near - searched).abs() <= 2e-7 * searched.abs()).any(dim=0)

    total = 3 * snapshots.rounds[-1]["c0"]["dictionary.points"]
    assert bool(found(total.flatten()).all()), "what was sent is found"
    for state in (client for clients in snapshots.rounds[1:] for client in clients.values()):
        assert len(state["coordinates"].unique()) == ATOMS
        assert not bool(found(state["coordinates"]).any())
        assert not bool(found(3 * state["coordinates"]).any())


class Encoder(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def test_atoms_cost_their_numbers_each_way() -> None:
    """Equation 13: K n (d + C) numbers of 4 bytes, and a header that does not grow with them."""

    def sizes(atom_size: int) -> list[int]:
        module = build(atom_size=atom_size)
        fit(module, rounds=2)
        return [entry.num_bytes for entry in module.federation.ledger if entry.channel == "atoms"]

    small, large = sizes(12), sizes(24)
    assert len(small) == 6, "three up, three down"
    assert all(b - a in range(4 * 2 * 12 * 8, 4 * 2 * 12 * 8 + 8) for a, b in zip(small, large, strict=True))


@pytest.mark.parametrize("backend", [partial(PairwiseMasking, colluders=0), CKKS])
def test_hidden_atoms_are_the_open_ones_up_to_the_backends_error(backend: Any) -> None:
    open_, hidden = fit(build(), rounds=3), fit(build(), rounds=3, strategy={"privacy": backend()})
    for key in ("dictionary.points", "dictionary.labels", "coordinates"):
        torch.testing.assert_close(hidden[-1]["c2"][key], open_[-1]["c2"][key], atol=1e-4, rtol=0)


# -------------------------------------------------------------------- predictions


def test_softmax_regression_is_that_of_scikit_learn() -> None:
    x, y = blobs()["c0"].tensors
    weight, bias = softmax_regression(x, F.one_hot(y, CLASSES).float(), penalty=0.01)
    theirs = LogisticRegression(C=1 / (0.01 * len(x)), tol=1e-8, max_iter=1000).fit(x.double(), y)
    ours = (x.double() @ weight.T + bias).softmax(dim=1)
    torch.testing.assert_close(ours, torch.from_numpy(theirs.predict_proba(x.double())), atol=1e-4, rtol=0)
    soft = torch.rand(24, CLASSES, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    weight, bias = softmax_regression(x, soft, penalty=0.01)
    # a sample with probabilities is C samples with weights
    theirs.fit(x.double().repeat(CLASSES, 1), torch.arange(CLASSES).repeat_interleave(24), soft.T.flatten())
    ours = (x.double() @ weight.T + bias).softmax(dim=1)
    torch.testing.assert_close(ours, torch.from_numpy(theirs.predict_proba(x.double())), atol=1e-4, rtol=0)


def test_the_target_predicts_by_reconstruction_or_by_ensemble() -> None:
    reconstruction, ensemble = build(), build(predict_with="ensemble")
    for module in (reconstruction, ensemble):
        fit(module, rounds=3)
    replica = ensemble.replicas["c2"]
    assert isinstance(replica, DictionaryReplica)
    x, y = blobs()["c2"].tensors
    each = [head(x).softmax(dim=1) for head in replica.ensemble]
    by_hand = sum(a * p for a, p in zip(replica.coordinates.detach(), each, strict=True))
    torch.testing.assert_close(ensemble(x).exp(), by_hand, atol=1e-5, rtol=1e-4)
    assert torch.equal(reconstruction(x), replica.by_reconstruction(x)), "both train the same"
    for module in (reconstruction, ensemble):
        assert float((module(x).argmax(dim=1) == y).float().mean()) > 0.9
    found = wasserstein_barycenter(
        list(replica.dictionary.points.detach()), list(replica.dictionary.labels.detach()),
        replica.coordinates.detach(), label_cost=2.0,
    )  # fmt: skip
    weight, bias = softmax_regression(found.support, found.labels, penalty=0.1)  # type: ignore[arg-type]
    torch.testing.assert_close(reconstruction(x), (x.double() @ weight.T + bias).float(), atol=1e-3, rtol=1e-3)


def test_a_distilled_set_has_all_classes_and_trains_a_classifier() -> None:
    module = build(atom_size=30)
    fit(module, rounds=6)
    for samples_per_class in (1, 4):
        z, y = module.distill(samples_per_class)
        assert z.shape == (samples_per_class * CLASSES, WIDTH)
        assert y.shape == (samples_per_class * CLASSES, CLASSES)
        assert set(y.argmax(dim=1).tolist()) == {0, 1, 2}
        weight, bias = softmax_regression(z, y)
        x, labels = blobs()["c2"].tensors
        assert float(((x.double() @ weight.T + bias).argmax(dim=1) == labels).float().mean()) > 0.8
    with pytest.raises(ValueError, match="samples_per_class must be at least 1, got 0"):
        module.distill(0)


def test_the_loss_falls() -> None:
    losses: list[float] = []

    class Watch(pl.Callback):
        def on_round_end(self, trainer: pl.Trainer, module: FedDaDiL | FedAvg, round_idx: int) -> None:
            if "train/loss" in trainer.callback_metrics:
                losses.append(float(trainer.callback_metrics["train/loss"]))

    fit(build(optimizer=lambda params: Adam(params, lr=LR)), rounds=30, callbacks=[Watch()])
    assert losses[-1] < 0.75 * losses[0]


# -------------------------------------------------------------------- resume, arguments


@pytest.mark.parametrize("step", [2, 6, 8])
def test_a_checkpoint_in_the_round_of_moments_or_among_the_atoms_resumes_bit_for_bit(step: int, tmp_path: Path) -> None:
    def run(checkpoint: str | None = None, stop: int = -1) -> FedDaDiL:
        module = build(atom_batch_size=5, optimizer=lambda params: Adam(params, lr=LR))
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        engine = trainer(4, [saver], enable_checkpointing=True, max_steps=stop)
        engine.fit(module, loader(blobs(), 7), ckpt_path=checkpoint)
        return module

    straight = run()
    (path,) = tmp_path.glob(f"step={step}.ckpt")
    resumed = run(str(path))
    for name in NAMES:
        assert same(weights(resumed, name), weights(straight, name))


def test_every_checkpoint_predicts_by_its_own_dictionary(tmp_path: Path) -> None:
    """Saved after a round, before anything was fitted to it, and also where validations are further apart."""
    data, module = blobs(), build()
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_epochs=1, save_top_k=-1)
    run = trainer(3, [saver, OracleAccuracy()], enable_checkpointing=True)
    run.fit(module, loader(data, 24))
    checks = loader(data, 24, training=False, guarded="c2")
    fitted = {name: head.weight.clone() for name, head in heads(module).items()}
    for verb in ("test", "validate"):
        again = build()
        found = getattr(trainer(3, [OracleAccuracy()]), verb)(again, checks, ckpt_path=saver.best_model_path)
        assert float(found[0]["oracle/target/acc"]) > 0.9
        for name, head in heads(again).items():
            torch.testing.assert_close(head.weight, fitted[name])
    again = build()
    predicted = trainer(3, []).predict(again, checks, ckpt_path=saver.best_model_path)
    assert predicted is not None
    torch.testing.assert_close(heads(again)["R"].weight, fitted["R"])


def heads(module: FedDaDiL) -> dict[str, nn.Linear]:
    replica = module.replicas[module.target]
    return {"R": replica.reconstruction, **{f"E{k}": head for k, head in enumerate(replica.ensemble)}}  # type: ignore[dict-item]


def test_atoms_that_moved_do_not_predict_by_old_classifiers() -> None:
    module = build()
    fit(module, rounds=2)
    replica, x = module.replicas[module.target], blobs()["c2"].tensors[0]
    before = replica(x)
    batch = list(blobs()["c2"].tensors)
    module.loss(module.target, batch)
    with pytest.raises(RuntimeError, match="moved since classifiers were fitted to it: call the method's"):
        replica(x)
    module.prepare_predictions()
    torch.testing.assert_close(replica(x), before)


def test_a_second_run_starts_with_phase_1_again() -> None:
    """Its encoder is not trained through classifiers that the first run has left, nor in evaluation mode."""
    module, watcher = build(warmup_rounds=1, extractor=Encoder()), Phases()
    fit(module, rounds=3)
    fit(module, rounds=3, callbacks=[watcher])
    assert watcher.seen[:2] == [(False, True), (False, True)]
    assert watcher.seen[2][0]


class Phases(pl.Callback):
    """Whether there is a dictionary in each round, and whether encoders are in training mode."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: FedDaDiL, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        replica = module.replicas[module.target]
        self.seen.append((bool(replica.started), replica.extractor.training))


def test_without_a_dictionary_there_is_no_summary() -> None:
    module = build(warmup_rounds=2, extractor=Encoder())
    fit(module, rounds=2)
    with pytest.raises(RuntimeError, match=r"no dictionary before round 2 ends .* stands at round 2: train"):
        module.distill(2)


def test_a_validation_within_a_round_changes_nothing() -> None:
    """There coordinates and labels are off their simplices, until the next step."""
    module = build()
    run = trainer(2, [OracleAccuracy()], val_check_interval=1)
    run.fit(module, loader(blobs(), 6), loader(blobs(), 24, training=False, guarded="c2"))
    without = fit(build(), batch_size=6)[-1]
    for name in NAMES:
        own = weights(module, name)
        for key in ("dictionary.points", "dictionary.labels", "coordinates"):
            assert torch.equal(own[key], without[name][key])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"atom_batch_size": 2},
            r"atom_batch_size \(n_b\) must be at least 3, a point of each class, with sampling='balanced', got 2",
        ),
        ({"num_atoms": 0}, r"num_atoms \(K\) must be at least 1, got 0"),
        ({"atom_size": 2}, r"atom_size \(n\) must be at least 3, got 2"),
        ({"atom_batch_size": 0}, r"atom_batch_size \(n_b\) must be at least 1, got 0"),
        ({"num_iterations": 0}, "num_iterations must be at least 1, got 0"),
        ({"atom_lr": 0.0}, "atom_lr must be positive and finite, got 0.0"),
        ({"simplex_lr": -1.0}, "simplex_lr must be positive and finite, got -1.0"),
        ({"penalty": 0.0}, "penalty must be positive and finite, got 0.0"),
        ({"sampling": "sorted"}, "sampling must be 'balanced' or 'uniform', got 'sorted'"),
        ({"sample_weights": "sorted"}, "sample_weights must be 'balanced' or 'uniform', got 'sorted'"),
        ({"predict_with": "both"}, "predict_with must be 'reconstruction' or 'ensemble', got 'both'"),
        ({"entropy": 0.0}, "entropy must be positive and finite, got 0.0"),
        ({"label_cost": -2.0}, r"label_cost \(beta\) must be at least 0 and finite, or 'adaptive', got -2.0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_the_oracle_sees_the_fitted_classifier(tmp_path: Path) -> None:
    module = build()
    data = {name: TensorDataset(*each.tensors) for name, each in blobs().items()}
    run = trainer(3, [OracleAccuracy()])
    run.fit(module, loader(data, 24), loader(data, 24, training=False, guarded="c2"))
    assert float(run.callback_metrics["oracle/target/acc"]) > 0.9
    assert float(run.callback_metrics["source/acc"]) > 0.9


def test_both_predictions_are_scored_and_told_in_the_table() -> None:
    module = build(predict_with="ensemble")
    run = trainer(3, [OracleAccuracy()])
    run.fit(module, loader(blobs(), 24), loader(blobs(), 5, training=False, guarded="c2"))
    x, y = blobs()["c2"].tensors
    for name, logits in module.alternatives(x).items():
        by_hand = float((logits.argmax(dim=1) == y).float().mean())
        assert float(run.callback_metrics[f"oracle/target/{name}/acc"]) == pytest.approx(by_hand)
    assert float(run.callback_metrics["oracle/target/acc"]) == float(run.callback_metrics["oracle/target/ensemble/acc"])
    summary = summarise(run, module, 1.0)
    assert set(summary.oracle_alternatives) == {"reconstruction", "ensemble"}
    console = Console(width=160)
    with console.capture() as capture:
        console.print(closing_table([summary]))
    assert "FedDaDiL, by prediction (oracle): reconstruction" in capture.get()
