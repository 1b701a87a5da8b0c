"""FedDaDiL: a local step by hand, what is sent and what never is, and where its atoms start."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

import helpers
from fedgp_by_hand import Wire
from fedlit.callbacks import OracleAccuracy, summarise
from fedlit.functional import joint_ot_loss, project_simplex, softmax_regression, wasserstein_barycenter
from fedlit.methods import FedAvg, FedDaDiL
from fedlit.models import DictionaryReplica, Features
from fedlit.privacy import GaussianMechanism, PairwiseMasking, PrivacyWarning
from helpers import loader, same, trainer, weights
from refused import slow

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


def fit(
    module: FedDaDiL | FedAvg, rounds: int = 2, batch_size: int = 24, **kwargs: Any
) -> list[dict[str, dict[str, Tensor]]]:
    return helpers.fit(module, kwargs.pop("data", None) or blobs(), rounds, batch_size, **kwargs).rounds


def test_atoms_start_at_the_class_means_and_variances_of_all_sources() -> None:
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


def test_the_start_is_of_all_samples_however_many_a_round_sees() -> None:
    whole = fit(build(), rounds=1)[0]
    part = fit(build(), rounds=1, batch_size=4, strategy={"local_steps": 1})[0]
    torch.testing.assert_close(part["c2"]["dictionary.points"], whole["c2"]["dictionary.points"])


@pytest.mark.parametrize(("unit_norm", "spread"), [(False, 1.0), (True, WIDTH**-0.5)])
def test_atoms_at_random_start_equal_at_all_clients_and_nothing_is_sent_for_it(unit_norm: bool, spread: float) -> None:
    """A rate of almost 0 leaves them where they started."""
    module = build(atom_start="random", atom_size=300, unit_norm=unit_norm, atom_lr=1e-12, simplex_lr=1e-12)
    state = fit(module, rounds=1)[0]
    points = state["c2"]["dictionary.points"]
    torch.testing.assert_close(points, state["c0"]["dictionary.points"])
    torch.testing.assert_close(points.mean(dim=1), torch.zeros(ATOMS, WIDTH), atol=0.25 * spread, rtol=0)
    torch.testing.assert_close(points.std(dim=1), torch.full((ATOMS, WIDTH), spread), atol=0.2 * spread, rtol=0)
    assert {entry.channel for entry in module.federation.ledger} - {"metrics"} == {"atoms"}


def test_atoms_at_random_learn_the_classes() -> None:
    module = build(atom_start="random", atom_lr=0.3, optimizer=Adam, sample_weights="uniform")
    fit(module, rounds=60)
    x, y = blobs()["c2"].tensors
    module.run.prepare_predictions()
    assert float((module.replicas["c2"](x).argmax(dim=1) == y).float().mean()) > 0.8


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ({"privacy": PairwiseMasking(colluders=0)}, "alone has samples"),
        ({}, None),  # nothing was to be hidden
        (
            {"privacy": PairwiseMasking(colluders=0), "differential_privacy": GaussianMechanism(1e3, 1e-9)},
            "has, and perhaps no other client, samples",
        ),
    ],
)
def test_a_source_that_alone_has_a_class_is_told_that_its_moments_are_its_own(strategy: Any, told: str | None) -> None:
    data = blobs()
    x, y = data["c1"].tensors
    data["c1"] = TensorDataset(x, y.clamp(max=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(1, strategy=strategy).fit(build(), loader(data, 24))
    words = [str(item.message) for item in caught if issubclass(item.category, PrivacyWarning)]
    alone = [text for text in words if text.startswith("of the classes")]
    assert len(alone) == (told is not None)
    assert all(text.startswith(f"of the classes [2] client 'c0' {told}") for text in alone)


@pytest.mark.parametrize(
    ("label_cost", "sample_weights"), [slow(2.0, "uniform"), ("adaptive", "uniform"), (2.0, "balanced")]
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


def module_rows(module: FedDaDiL, name: str, round_idx: int = 1, batch_idx: int = 0) -> list[Tensor]:
    """Points in the order of a step."""
    federation = module.federation
    now = federation.round_idx, federation.batch_idx
    federation.round_idx, federation.batch_idx = round_idx, batch_idx
    try:
        return module.rows(next(client for client in module.clients if client.name == name))
    finally:
        federation.round_idx, federation.batch_idx = now


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
    assert same({key: ours[key] for key in theirs}, theirs)
    with pytest.raises(RuntimeError, match="no dictionary"):
        fed_dadil.distill(2)


def test_coordinates_are_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, module = Wire(monkeypatch), build(warmup_rounds=1, extractor=Encoder())
    fit(module, rounds=4, batch_size=8)
    sent = {
        (channel, key, tuple(tensor.shape))
        for channel, payloads, _ in (*wire.averaged, *wire.exchanged)
        for payload in payloads.values()
        for key, tensor in payload.items()
    }
    assert {(channel, key) for channel, key, _ in sent} == {
        ("weights", "extractor.weight"), ("weights", "extractor.bias"), ("weights", "classifier.weight"),
        ("weights", "classifier.bias"), ("class_moments", "moments"), ("atoms", "dictionary.points"),
        ("atoms", "dictionary.labels"),
    }  # fmt: skip
    assert {shape for channel, _, shape in sent if channel == "atoms"} == {(2, 12, 5), (2, 12, 3)}
    assert (ATOMS,) not in {shape for _, _, shape in sent}


class Encoder(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


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


def test_atoms_that_moved_do_not_predict_by_old_classifiers() -> None:
    module = build()
    fit(module, rounds=2)
    replica, x = module.replicas[module.target], blobs()["c2"].tensors[0]
    before = replica(x)
    batch = list(blobs()["c2"].tensors)
    module.loss(module.target, batch)
    with pytest.raises(RuntimeError, match="moved since"):
        replica(x)
    module.run.prepare_predictions()
    torch.testing.assert_close(replica(x), before)


def test_a_validation_within_a_round_changes_nothing() -> None:
    module = build()
    run = trainer(1, [OracleAccuracy()], val_check_interval=1)
    run.fit(module, loader(blobs(), 12), loader(blobs(), 24, training=False, guarded="c2"))
    without = fit(build(), rounds=1, batch_size=12)[-1]
    for name in NAMES:
        own = weights(module, name)
        assert all(torch.equal(own[key], without[name][key]) for key in own if key.startswith(("dictionary.", "coord")))


def test_both_predictions_are_scored() -> None:
    module = build(predict_with="ensemble")
    run = trainer(2, [OracleAccuracy()])
    run.fit(module, loader(blobs(), 24), loader(blobs(), 5, training=False, guarded="c2"))
    x, y = blobs()["c2"].tensors
    for name, logits in module.alternatives(x).items():
        by_hand = float((logits.argmax(dim=1) == y).float().mean())
        assert float(run.callback_metrics[f"oracle/target/{name}/acc"]) == pytest.approx(by_hand)
    assert float(run.callback_metrics["oracle/target/acc"]) == float(run.callback_metrics["oracle/target/ensemble/acc"])
    assert set(summarise(run, module, 1.0).oracle_alternatives) == {"reconstruction", "ensemble"}
