"""Calibration in real runs: against scipy on all samples in one place, on several processes, and in what it leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from torch.utils.data import TensorDataset

import processes
from commands import rows as rows_of
from fedlit.callbacks import Calibration, OracleAccuracy, TargetPredictions, calibration, summarise
from fedlit.callbacks.shared import RandomBasis
from fedlit.data import Digits, FederatedLoader, HeartDisease
from fedlit.export import export_target, target_model
from fedlit.federation import RosterError
from fedlit.functional import fit_temperature, importance_weights
from fedlit.methods import FedAvg, FedGP, FedRFTCA, TargetOnly
from fedlit.models import MLP
from fedlit.privacy import PairwiseMasking
from refused import refused
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, EveryMetric, build, trainer

SOURCES = CLIENTS[:-1]


def sharp(method: Any = FedAvg, **kwargs: Any) -> Any:
    return build(method, optimizer=lambda params: torch.optim.Adam(params, lr=0.5), **kwargs)


def by_scipy(module: Any, weighted: bool = False, sources: Sequence[str] = SOURCES) -> float:
    """The temperature of all validation samples of the sources in one place, as each source's model sees them."""
    data, logits, labels, phi = Blobs().parts["val"], [], [], {}
    basis = RandomBasis()
    with torch.no_grad():
        for name in CLIENTS:
            x, y = data[name].tensors
            phi[name] = basis.of(module, name, x)
            if name in sources:
                logits.append(module.replicas[name](x).double())
                labels.append(y)
    pooled = torch.cat([phi[name] for name in sources])
    weights = None
    if weighted:
        theta = importance_weights(pooled.T @ pooled / len(pooled), phi[TARGET].mean(dim=0), ridge=10.0)
        weights = (pooled @ theta).numpy()
    return best(torch.cat(logits).numpy(), torch.cat(labels).numpy(), weights)


def best(z: Any, y: Any, weights: Any = None) -> float:
    """The temperature at which the mean loss of logits is lowest; losses count up to 30."""

    def loss(log_temperature: float) -> float:
        each = -log_softmax(z / math.exp(log_temperature), axis=1)[np.arange(len(y)), y]
        return float(np.average(np.minimum(each, 30), weights=weights) * (1 if weights is None else weights.sum()))

    found = minimize_scalar(loss, bounds=(math.log(0.1), math.log(10)), method="bounded", options={"xatol": 1e-9})
    return float(np.exp(found.x))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {using: calibrated(tmp_path_factory.mktemp(using), using) for using in ("sources", "weighted")}


def calibrated(folder: Path, using: Any = "sources", rounds: int = 6, module: Any = None, **kwargs: Any) -> Any:
    module = module or sharp()
    run = trainer(rounds, [Calibration(using), *kwargs.pop("callbacks", [])], folder, **kwargs)
    run.fit(module, kwargs.pop("data", None) or Blobs())
    return run, module


@pytest.mark.parametrize("using", ["sources", "weighted"])
def test_the_temperature_is_that_of_the_sources_pooled_samples(using, runs):
    run, module = runs[using]
    assert module.run.outputs.temperature == pytest.approx(by_scipy(module, using == "weighted"), rel=5e-3)
    assert module.run.outputs.temperature > 1.2
    assert float(run.callback_metrics["target/temperature"]) == pytest.approx(module.run.outputs.temperature)


def test_a_model_that_is_not_sure_enough_gets_a_temperature_below_1(tmp_path):
    _, module = calibrated(tmp_path, "weighted", rounds=1, module=build())
    assert by_scipy(module, weighted=True) < 0.9
    assert module.run.outputs.temperature == pytest.approx(by_scipy(module, weighted=True), rel=1e-2)


def test_weights_change_the_temperature(runs):
    plain, weighted = (module.run.outputs.temperature for _, module in runs.values())
    assert abs(math.log(plain / weighted)) > 0.01


def test_the_target_is_sent_the_mean_alone_through_the_backend(runs, tmp_path):
    _, module = calibrated(tmp_path, "weighted", strategy={"privacy": PairwiseMasking(colluders=0)})
    assert module.run.outputs.temperature == pytest.approx(runs["weighted"][1].run.outputs.temperature, rel=1e-3)
    assert module.federation.channels["calibration"].description.backend == "PairwiseMasking"
    sent = [entry for entry in module.federation.ledger if entry.channel == "calibration"]
    assert [(entry.sender, entry.receiver) for entry in sent] == 6 * [
        *((name, "server") for name in SOURCES),
        ("server", TARGET),
    ]


def test_weighted_sources_send_as_many_numbers_as_documented(runs):
    _, module = runs["weighted"]
    sizes = {entry.num_bytes for entry in module.federation.ledger if entry.channel == "calibration"}
    numbers = 2 * 32**2 + 107 * 32 + 1
    assert all(8 * numbers <= size < 8 * numbers + 200 for size in sizes)


def test_sharp_probabilities_are_mended_and_classes_stay(tmp_path):
    data, module = Blobs(), sharp()
    run = trainer(4, [Calibration(), OracleAccuracy(), TargetPredictions()], tmp_path)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    x, y = data.parts["test"][TARGET].tensors
    with torch.no_grad():
        logits = module.replicas[TARGET](x).double()
    expected = (logits / module.run.outputs.temperature).softmax(dim=1)
    squares = [float((p - torch.eye(NUM_CLASSES)[y]).square().sum(dim=1).mean()) for p in (expected, logits.softmax(1))]
    assert float(run.callback_metrics["oracle/target/brier"]) == pytest.approx(squares[0], abs=1e-6)
    assert squares[0] < squares[1]
    assert summarise(run, module, 1.0).temperature == pytest.approx(module.run.outputs.temperature)
    run.predict(module, data)
    rows = rows_of(tmp_path / "predictions.csv")
    written = torch.tensor([[float(row[str(label)]) for label in range(NUM_CLASSES)] for row in rows])
    torch.testing.assert_close(written.double(), expected, atol=1e-6, rtol=1e-5)
    assert [int(row["predicted"]) for row in rows] == logits.argmax(dim=1).tolist()


def test_predictions_of_sources_are_left_alone(runs):
    run, module = runs["sources"]
    data = Blobs()
    loader = FederatedLoader({name: data.parts["test"][name] for name in CLIENTS}, training=False)
    predicted = run.predict(module, loader)
    for name in CLIENTS:
        with torch.no_grad():
            logits = module.replicas[name](data.parts["test"][name].tensors[0])
        divided = logits / module.run.outputs.temperature if name == TARGET else logits
        torch.testing.assert_close(torch.cat([batch[name] for batch in predicted]), divided.softmax(dim=1))


def test_checkpoints_and_files_have_the_temperature_of_their_weights(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    _, module = calibrated(tmp_path, callbacks=[saver], enable_checkpointing=True)
    final = module.run.outputs.temperature
    saved = {
        epoch: torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)["clients"][TARGET]["temperature"]
        for epoch in (1, 5)
    }
    assert saved[5] == final
    assert abs(saved[1] - final) > 1e-3
    x = Blobs().parts["test"][TARGET].tensors[0]
    other = sharp()
    (first, *_) = trainer(1, [], tmp_path).predict(other, Blobs(), ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert other.run.outputs.temperature == saved[1]
    with torch.no_grad():
        expected = (other.replicas[TARGET](x) / saved[1]).softmax(dim=1)
    torch.testing.assert_close(first[TARGET], expected[:8])
    torch.testing.assert_close(target_model(other)(x), expected)
    export_target(other, tmp_path / "target.pt2", (5,))
    assert f"Logits are divided by {saved[1]:.3g}, as" in (tmp_path / "target.pt2.md").read_text()
    torch.testing.assert_close(torch.export.load(tmp_path / "target.pt2").module()(x), expected)


def test_a_fit_without_calibration_ends_without_a_temperature(tmp_path):
    module = sharp()
    module.run.outputs.temperature = 2.0
    trainer(1, [], tmp_path).fit(module, Blobs())
    assert module.run.outputs.temperature == 1


@pytest.mark.parametrize("odd", [0.0, "2"])
def test_a_checkpoint_with_something_else_as_temperature_is_refused(odd, tmp_path):
    run, _ = calibrated(tmp_path, rounds=1)
    run.save_checkpoint(tmp_path / "x.ckpt")
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
    stored["clients"][TARGET]["temperature"] = odd
    torch.save(stored, tmp_path / "x.ckpt")
    with refused("temperature", RosterError):
        trainer(1, [], tmp_path).predict(sharp(), Blobs(), ckpt_path=str(tmp_path / "x.ckpt"))


def hospitals(method: Any, labels: int, folder: Path, using: Any = "target", rate: float = 0.05) -> Any:
    data = HeartDisease(target_labels=labels, seed=0)
    torch.manual_seed(0)
    module = method(
        data.clients, data.target, 2, MLP(data.in_features, [8]), optimizer=lambda p: torch.optim.Adam(p, lr=rate)
    )
    run = trainer(3, [Calibration(using)], folder)
    run.fit(module, data)
    return data, module


class Bystander(FedAvg):
    def learners(self, round_idx: int) -> Any:
        return self.sources


@pytest.mark.parametrize(("method", "above"), [(Bystander, True), (FedGP, False)])
def test_few_labels_of_the_target_are_enough(method, above, tmp_path):
    data, module = hospitals(method, 40, tmp_path, rate=0.05 if above else 0.2)
    train = data.dataset(data.target, "train")
    x, y = train.batch(data.split(data.target).train.argsort().argsort())
    with torch.no_grad():
        z = module.replicas[data.target](x[y >= 0]).double().numpy()
    expected = best(z, y[y >= 0].numpy())
    assert (expected > 1) == above
    assert module.run.outputs.temperature == pytest.approx(expected if above else 1, rel=1e-4)
    assert not [entry for entry in module.federation.ledger if entry.channel == "calibration"]


class Means(Blobs):
    """The sources validate on the means of their classes, where nobody errs."""

    def __init__(self) -> None:
        super().__init__()
        for name in SOURCES:
            x, y = self.parts["train"][name].tensors
            classes = torch.unique(y)
            self.parts["val"][name] = TensorDataset(torch.stack([x[y == c].mean(dim=0) for c in classes]), classes)


@pytest.mark.parametrize("using", ["sources", "weighted"])
def test_samples_without_an_error_show_no_temperature(using, tmp_path):
    module = build(optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
    with pytest.warns(UserWarning, match="the sources' validation samples have no error"):
        trainer(8, [Calibration(using)], tmp_path).fit(module, Means())
    assert module.run.outputs.temperature == 1


def test_labels_without_an_error_show_no_temperature(tmp_path, monkeypatch):
    def of_right_ones(logits, labels):
        return fit_temperature(logits, logits.argmax(dim=1))

    monkeypatch.setattr(calibration, "fit_temperature", of_right_ones)
    with pytest.warns(UserWarning, match="the labelled samples of .* have no error.* raise target_labels"):
        _, module = hospitals(Bystander, 40, tmp_path)
    assert module.run.outputs.temperature == 1


def refined(folder: Path, *callbacks: Any, target_labels: int = 0) -> Any:
    """A refined network of digits, and what it is scored with."""
    data = Digits(
        target="fonts", flatten=True, transductive=True, test_fraction=0.0, target_labels=target_labels, seed=0
    )
    torch.manual_seed(0)
    module = FedAvg(
        data.clients, data.target, data.num_classes, MLP(64), refine=True,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )  # fmt: skip
    run = trainer(4, [*callbacks, OracleAccuracy()], folder)
    run.fit(module, data)
    assert run.callback_metrics["refine/taken"] == 1
    return run, module, data


@pytest.mark.parametrize("using", ["sources", "weighted"])
def test_a_refined_classifier_keeps_the_temperature_that_comes_with_it(using, tmp_path):
    plain, module, _ = refined(tmp_path / "plain")
    expected = module.run.outputs.temperature
    assert expected < 1
    run, module, data = refined(tmp_path / "calibrated", Calibration(using))
    assert module.run.outputs.temperature == expected
    assert run.callback_metrics["target/temperature"] == pytest.approx(expected)
    assert run.callback_metrics["oracle/target/brier"] == plain.callback_metrics["oracle/target/brier"]
    run.save_checkpoint(tmp_path / "end.ckpt")
    again = trainer(4, [Calibration(using)], tmp_path / "again")
    again.validate(module, data, ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert module.run.outputs.temperature == expected
    nothing = trainer(4, [], tmp_path / "nothing", limit_val_batches=0)
    nothing.fit(module, data, ckpt_path=tmp_path / "end.ckpt")  # no round is left
    assert (module.run.outputs.temperature, module.run.outputs.is_refined) == (expected, True)
    more = trainer(5, [], tmp_path / "more", limit_val_batches=0)
    module.run.parts = [part for part in module.run.parts if type(part).__name__ != "Refinement"]
    more.fit(module, data, ckpt_path=tmp_path / "end.ckpt")  # a further round's classifier is another
    assert (module.run.outputs.temperature, module.run.outputs.is_refined) == (1, False)


def test_labels_that_a_refined_classifier_was_fitted_with_do_not_make_it_surer(tmp_path):
    _, module, _ = refined(tmp_path / "plain", target_labels=80)
    of_refinement = module.run.outputs.temperature
    _, module, data = refined(tmp_path / "calibrated", Calibration("target"), target_labels=80)
    with torch.no_grad():
        ((x, y),) = [(x, y) for _, x, y in module.run.samples.labelled([module.target])]
        found = best(module.replicas[data.target](x).double().numpy(), y.numpy())
    assert module.run.outputs.temperature == pytest.approx(max(found, of_refinement), rel=1e-3)


def test_less_than_ten_labels_are_too_few(tmp_path):
    with pytest.raises(RosterError, match=r"at least 10 labelled .* has 9"):
        hospitals(Bystander, 9, tmp_path)


class Without(Blobs):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def val_dataloader(self) -> FederatedLoader:
        own = {name: TensorDataset(*self.parts["val"][name].tensors) for name in self.names}
        return FederatedLoader(own, batch_size=8, training=False, guarded=TARGET, seed=0)


@pytest.mark.parametrize(
    ("using", "names", "lacking"), [("sources", [TARGET], "the sources"), ("weighted", SOURCES, f"'{TARGET}'")]
)
def test_missing_samples_are_an_error(using, names, lacking, tmp_path):
    with pytest.raises(RosterError, match=f"needs validation samples of {lacking}"):
        trainer(1, [Calibration(using)], tmp_path).fit(sharp(), Without(names))


def test_a_source_without_validation_samples_does_not_count(tmp_path):
    module = sharp()
    trainer(6, [Calibration()], tmp_path).fit(module, Without([*SOURCES[1:], TARGET]))
    assert module.run.outputs.temperature == pytest.approx(by_scipy(module, sources=SOURCES[1:]), rel=5e-3)
    assert module.run.outputs.temperature != pytest.approx(by_scipy(module), rel=0.05)


def test_sources_that_nobody_trains_show_no_temperature(tmp_path):
    data = Digits(target="fonts", target_labels=100, flatten=True, seed=0)
    module = TargetOnly(data.clients, data.target, data.num_classes, MLP(64))
    with pytest.warns(UserWarning, match=r"TargetOnly trains no source.*using='target'"):
        trainer(2, [Calibration()], tmp_path).fit(module, data)
    assert module.run.outputs.temperature == 1
    assert not [entry for entry in module.federation.ledger if entry.channel == "calibration"]


def test_while_there_is_nothing_to_predict_with_there_is_no_temperature(tmp_path):
    seen, module = EveryMetric(), build(FedRFTCA, num_frequencies=8, num_components=4, classifier_period=3)
    trainer(4, [Calibration(), seen], tmp_path).fit(module, Blobs())
    found = [row["target/temperature"] for row in seen.rows]
    assert found[:3] == [1, 1, 1] != found[3:]


def test_what_cannot_be_calibrated_is_refused(tmp_path):
    with refused("using"):
        Calibration("labels")
    with pytest.raises(ValueError, match="before OracleAccuracy"):
        trainer(1, [OracleAccuracy(), Calibration()], tmp_path).fit(build(), Blobs())
    data = HeartDisease(predict="heart_rate", seed=0)
    module = FedAvg(data.clients, data.target, 1, MLP(data.in_features, [8]), task="regression")
    with pytest.raises(ValueError, match="task='regression'"):
        trainer(1, [Calibration()], tmp_path).fit(module, data)


def seen(folder: Path, devices: int, using: Any, placement: Any = None) -> dict[str, Any]:
    """What this process has of a run on so many, through masks."""
    module = sharp()
    strategy = {"privacy": PairwiseMasking(colluders=0), "placement": placement}
    run = trainer(2, [Calibration(using), OracleAccuracy()], folder, devices=devices, strategy=strategy)
    run.fit(module, Blobs())
    logged = {key: float(value) for key, value in run.callback_metrics.items() if "grad_norm" not in key}
    run.save_checkpoint(folder / "last.ckpt")
    own = module.run.outputs.temperature if module.federation.is_local(module.target) else None
    return {"own": own, "logged": logged, "ledger": [tuple(vars(entry).items()) for entry in module.federation.ledger]}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("using", "placement"), [("weighted", None), ("sources", [[], CLIENTS])], ids=str)
def test_two_processes_find_what_one_finds(using, placement, tmp_path):
    seen_by: dict[int, Any] = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        seen_by[count] = processes.results(seen, folder, count, using, placement if count == 2 else None, ranks=count)
    (alone,) = seen_by[1]
    first, second = seen_by[2]
    assert first["own"] is None
    assert second["own"] == alone["own"] != 1
    for each in (first, second):
        assert each["logged"] == alone["logged"]
        assert each["logged"]["target/temperature"] == pytest.approx(alone["own"])
        assert each["ledger"] == alone["ledger"]
    trainer(1, [], tmp_path).predict(other := sharp(), Blobs(), ckpt_path=str(tmp_path / "2" / "last.ckpt"))
    assert other.run.outputs.temperature == alone["own"]
