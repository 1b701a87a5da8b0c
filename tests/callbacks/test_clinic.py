"""ClinicMetrics in real runs: against scikit-learn and counts of all samples in one place, and over processes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.metrics import roc_auc_score, roc_curve
from torch.optim import Adam

import processes
from backends import backend
from fedlit.callbacks import Calibration, ClinicMetrics, closing_table, summarise
from fedlit.callbacks.report.run import blocks_of
from fedlit.callbacks.report.run_folder import RunFolder
from fedlit.data import HeartDisease
from fedlit.federation import ChannelError, LabelGuardError, RosterError
from fedlit.methods import FedAvg
from fedlit.models import MLP
from fedlit.privacy import FixedPoint, GaussianMechanism, PairwiseMasking, Plain, PrivacyWarning
from fedlit.tables import Table
from helpers import samples_of, trainer
from refused import refused
from small_federation import CLIENTS, TARGET, Blobs, build

SOURCES = ("cleveland", "hungary", "switzerland")
HOSPITAL = "va_long_beach"
ALL = {"specificity": 0.8, "sensitivity": 0.9, "prevalence": 0.1}


def fit(folder: Path, rounds: int = 2, callbacks: Any = (), data: Any = None, **kwargs: Any) -> Any:
    given = kwargs.pop("given", ALL)
    data = data or HeartDisease(seed=0, val_fraction=0.3)
    torch.manual_seed(0)
    module = FedAvg(
        data.clients, data.target, 2, MLP(data.in_features, [8]), optimizer=lambda params: Adam(params, lr=0.05)
    )
    run = trainer(rounds, [ClinicMetrics("disease", **given), *callbacks], default_root_dir=str(folder), **kwargs)
    run.fit(module, data)
    return run, module, data


def of(module: Any, data: Any, client: str, stage: str = "val") -> tuple[Any, Any]:
    """Log odds of the disease, and whether patients are ill."""
    x, y = samples_of(data, client, stage)
    with torch.no_grad():
        z = module.replicas[client](x).double().numpy()
    return z[:, 1] - z[:, 0], y.numpy() == 1


def logged_of(run: Any) -> dict[str, float]:
    return {name: float(value) for name, value in run.callback_metrics.items()}


def pooled(module: Any, data: Any) -> tuple[Any, Any]:
    odds, ill = zip(*(of(module, data, name) for name in SOURCES), strict=True)
    return np.concatenate(odds), np.concatenate(ill)


def thresholds(module: Any, data: Any) -> dict[str, float]:
    """Exact thresholds of the sources' samples in one place."""
    odds, ill = pooled(module, data)
    healthy, sick = np.sort(odds[~ill]), np.sort(odds[ill])[::-1]
    return {
        "specificity": healthy[math.ceil(0.8 * len(healthy)) - 1], "sensitivity": sick[math.ceil(0.9 * len(sick)) - 1]
    }  # fmt: skip


def logit(p: float) -> float:
    return math.log(p / (1 - p))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    saver = ModelCheckpoint(tmp_path_factory.mktemp("run"), filename="last")
    return *fit(Path(saver.dirpath or ""), callbacks=[saver], enable_checkpointing=True), saver.best_model_path


def test_areas_and_operating_points_are_those_of_scikit_learn(ran: Any) -> None:
    run, module, data, _ = ran
    logged = logged_of(run)
    for client in (*SOURCES, HOSPITAL):
        prefix = "oracle/target" if client == HOSPITAL else f"source/{client}"
        odds, ill = of(module, data, client)
        assert logged[f"{prefix}/auroc"] == pytest.approx(roc_auc_score(ill, odds), abs=1e-6)
        assert logged[f"{prefix}/auroc_low"] < logged[f"{prefix}/auroc"] < logged[f"{prefix}/auroc_high"]
        false, true, _ = roc_curve(ill, odds, drop_intermediate=False)
        assert logged[f"{prefix}/sensitivity_at_specificity"] == pytest.approx(true[1 - false >= 0.8 - 1e-9].max())
        assert logged[f"{prefix}/specificity_at_sensitivity"] == pytest.approx((1 - false)[true >= 0.9 - 1e-9].max())


def test_thresholds_are_those_of_all_sources_samples_on_the_safe_side(ran: Any) -> None:
    run, module, data, _ = ran
    logged, exact, (odds, ill) = logged_of(run), thresholds(module, data), pooled(module, data)
    for held, sign in (("specificity", 1), ("sensitivity", -1)):
        found = logit(logged[f"threshold/{held}"])
        assert abs(found - exact[held]) < 1e-3 + abs(exact[held]) / 128
        assert sign * (found - exact[held]) > -1e-5  # float32 of the log
    assert (odds[~ill] <= logit(logged["threshold/specificity"]) + 1e-5).mean() >= 0.8
    assert (odds[ill] > logit(logged["threshold/sensitivity"]) - 1e-5).mean() >= 0.9


@pytest.mark.parametrize("stage", ["val", "test"])
def test_a_target_is_measured_at_the_threshold_that_sources_chose(stage: str, ran: Any, tmp_path: Path) -> None:
    """On test samples after a checkpoint was loaded; predictive values are those of 1000 people of whom 100 are ill."""
    run, module, data, path = ran
    logged = logged_of(run)
    chosen = {held: logit(logged[f"threshold/{held}"]) for held in ("specificity", "sensitivity")}
    if stage == "test":
        again = FedAvg(data.clients, data.target, 2, MLP(data.in_features, [8]))
        tested = trainer(1, [ClinicMetrics("disease", **ALL)])
        tested.test(again, data, ckpt_path=path, verbose=False)
        logged = logged_of(tested)
    for client in (HOSPITAL, "cleveland"):
        prefix = "oracle/target" if client == HOSPITAL else f"source/{client}"
        odds, ill = of(module, data, client, stage)
        for held, threshold in chosen.items():
            found = odds > threshold
            sensitivity, specificity = found[ill].mean(), (~found)[~ill].mean()
            assert logged[f"{prefix}/at_{held}/sensitivity"] == pytest.approx(sensitivity)
            assert logged[f"{prefix}/at_{held}/specificity"] == pytest.approx(specificity)
            right, wrong = 100 * sensitivity, 900 * (1 - specificity)
            assert logged[f"{prefix}/at_{held}/ppv"] == pytest.approx(right / (right + wrong))
            right, wrong = 900 * specificity, 100 * (1 - sensitivity)
            assert logged[f"{prefix}/at_{held}/npv"] == pytest.approx(right / (right + wrong))


def test_a_threshold_that_holds_something_else_is_not_taken_from_a_checkpoint(ran: Any) -> None:
    *_, data, path = ran
    again = FedAvg(data.clients, data.target, 2, MLP(data.in_features, [8]))
    tested = trainer(1, [ClinicMetrics("disease", specificity=0.7)])
    tested.test(again, data, ckpt_path=path, verbose=False)
    assert math.isnan(logged_of(tested)["oracle/target/at_specificity/sensitivity"])


def test_one_class_is_distinguished_from_all_others(tmp_path: Path) -> None:
    module, data = build(), Blobs()
    run = trainer(2, [ClinicMetrics("2"), Calibration()])
    run.fit(module, data)
    for client in CLIENTS:
        x, y = data.parts["val"][client].tensors
        with torch.no_grad():
            p = module.replicas[client](x).double().softmax(dim=1)[:, 2].numpy()
        prefix = "oracle/target" if client == TARGET else f"source/{client}"
        assert logged_of(run)[f"{prefix}/auroc"] == pytest.approx(roc_auc_score(y.numpy() == 2, p), abs=1e-6)
    names = {name.rpartition("/")[2] for name in logged_of(run) if name.startswith("oracle/target/at_")}
    assert names == {"sensitivity", "specificity"}  # without a prevalence there are no predictive values
    assert "threshold/sensitivity" not in logged_of(run)


class OneClass(Blobs):
    """A source and the target have no sample of class 0."""

    def __init__(self) -> None:
        super().__init__()
        for part in self.parts.values():
            for name in (CLIENTS[0], TARGET):
                y = part[name].tensors[1]
                y[y == 0] = 1


def test_clients_of_one_class_have_no_area_and_are_no_error(tmp_path: Path) -> None:
    run, data = trainer(1, [ClinicMetrics("0", sensitivity=0.5)]), OneClass()
    run.fit(build(), data)
    logged = logged_of(run)
    for prefix in (f"source/{CLIENTS[0]}", "oracle/target"):
        undefined = ("auroc", "auroc_low", "sensitivity_at_specificity", "at_specificity/sensitivity")
        assert all(math.isnan(logged[f"{prefix}/{name}"]) for name in undefined)
        assert 0 <= logged[f"{prefix}/at_sensitivity/specificity"] <= 1
    assert 0 <= logged[f"source/{CLIENTS[1]}/auroc"] <= 1


def test_without_an_operating_point_nothing_is_sent_but_scores(tmp_path: Path) -> None:
    run, module, _ = fit(tmp_path, given={"specificity": None})
    assert "clinic" not in module.federation.channels
    names = {name.removeprefix("oracle/target/") for name in logged_of(run) if name.startswith("oracle/")}
    assert names == {"auroc", "auroc_low", "auroc_high"}


@pytest.mark.parametrize(
    "name", ["masking", "grid", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bfv", "ckks"))]
)
def test_every_backend_finds_the_same_thresholds(name: str, ran: Any, tmp_path: Path) -> None:
    chosen = {"weights": Plain(), "clinic": Plain(FixedPoint(16)) if name == "grid" else backend(name)}
    run, module, _ = fit(tmp_path, strategy={"privacy": chosen})
    for key, value in logged_of(ran[0]).items():
        if "threshold" in key or "at_s" in key:
            assert logged_of(run)[key] == value
    sent = {entry.channel for entry in module.federation.ledger}
    assert ("clinic_classes" in sent) == (name != "grid")


class LonePositives(HeartDisease):
    """Only one source has patients who are ill among its validation samples."""

    def val_dataloader(self) -> Any:
        loader = super().val_dataloader()
        for name in ("hungary", "switzerland"):
            dataset = loader.datasets[name]
            dataset.y = torch.zeros_like(dataset.y)
        return loader


def test_counts_that_one_source_alone_has_are_not_sent_under_masks(tmp_path: Path) -> None:
    data = LonePositives(seed=0, val_fraction=0.3)
    strategy = {"privacy": PairwiseMasking(colluders=0)}
    with pytest.warns(PrivacyWarning, match="'cleveland' alone has samples"):
        run, *_ = fit(tmp_path, data=data, strategy=strategy)
    logged = logged_of(run)
    assert math.isnan(logged["threshold/sensitivity"])
    assert 0 < logged["threshold/specificity"] < 1
    with pytest.raises(RosterError, match="lone_classes='send'"):
        fit(tmp_path, data=data, strategy=strategy, given={"specificity": None, "sensitivity": 0.9})
    given = {"sensitivity": 0.9, "lone_classes": "send"}
    run, *_ = fit(tmp_path, data=LonePositives(seed=0, val_fraction=0.3), strategy=strategy, given=given)
    assert 0 < logged_of(run)["threshold/sensitivity"] < 1


class Thresholds(pl.Callback):
    """Remembers whether there is a threshold while a round trains."""

    def __init__(self, metrics: ClinicMetrics) -> None:
        self.metrics = metrics
        self.seen: list[bool] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.metrics._thresholds is not None)


def test_a_threshold_is_one_of_the_weights_that_were_validated(tmp_path: Path) -> None:
    metrics = ClinicMetrics("2")
    watch = Thresholds(metrics)
    trainer(2, [metrics, watch]).fit(build(), Blobs())
    assert not any(watch.seen)
    assert metrics._thresholds is not None


@pytest.mark.parametrize(
    ("name", "value"), [("specificity", 1.0), ("sensitivity", 0.0), ("prevalence", 1.5), ("lone_classes", "keep")]
)
def test_numbers_that_are_no_shares_are_refused(name: str, value: Any) -> None:
    with refused(name):
        ClinicMetrics("disease", **{name: value})


def test_what_a_clinic_does_not_measure_is_refused(tmp_path: Path) -> None:
    with refused("positive"):
        trainer(1, [ClinicMetrics("ill")]).fit(build(), Blobs())
    with refused("callbacks"):
        trainer(1, [ClinicMetrics("1"), ClinicMetrics("2")]).fit(build(), Blobs())
    data = HeartDisease(predict="heart_rate", seed=0)
    module = FedAvg(data.clients, data.target, 1, MLP(data.in_features, [8]), task="regression")
    with pytest.raises(ValueError, match="task='regression'"):
        trainer(1, [ClinicMetrics("disease")]).fit(module, data)
    with pytest.raises(LabelGuardError, match="oracle/target/auroc"):
        trainer(1, [ClinicMetrics("1"), EarlyStopping("oracle/target/auroc")]).fit(build(), Blobs())
    with refused("fraction_bits"):
        fit(tmp_path, strategy={"privacy": Plain(FixedPoint(12))})
    noise = GaussianMechanism(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ChannelError, match=r"cannot blur channel 'clinic'.*specificity=None"):
        fit(tmp_path, strategy={"differential_privacy": noise})


def seen(folder: Path, devices: int, placement: Any = None) -> dict[str, Any]:
    """What this process has of a run on so many, through masks."""
    module = build()
    strategy = {"privacy": PairwiseMasking(colluders=0), "placement": placement}
    metrics = ClinicMetrics("2", sensitivity=0.6, prevalence=0.2)
    run = trainer(2, [metrics], devices=devices, strategy=strategy, default_root_dir=str(folder))
    run.fit(module, Blobs())
    return {key: value for key, value in logged_of(run).items() if "grad_norm" not in key}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("placement", [None, [[], CLIENTS]], ids=str)
def test_two_processes_find_what_one_finds(placement: Any, tmp_path: Path) -> None:
    (alone,) = processes.results(seen, tmp_path, 1, ranks=1)
    first, second = processes.results(seen, tmp_path, 2, placement, ranks=2)
    assert first == second == alone
    assert {"threshold/sensitivity", "oracle/target/at_sensitivity/ppv", "source/dslr/auroc"} <= alone.keys()


def test_results_and_report_have_what_was_measured(tmp_path: Path) -> None:
    run, module, data = fit(tmp_path)
    run.test(module, data, verbose=False)
    logged, found = logged_of(run), summarise(run, module, 1.0)
    names = ClinicMetrics("disease", **ALL).names
    assert found.oracle_clinic == pytest.approx({name: logged[f"oracle/target/{name}"] for name in names})
    assert type(found).from_json(found.to_json()) == found
    (note,) = [line for line in closing_table([found]).footnotes if "auroc" in line]
    assert f"at_specificity/ppv {found.oracle_clinic['at_specificity/ppv']:.3f}" in note
    assert f"auroc_low {found.oracle_clinic['auroc_low']:.3f}" in note
    several = [found, replace(found, seed=1, oracle_clinic={"auroc": 0.5, "auroc_low": 0.4})]
    (note,) = [line for line in closing_table(several).footnotes if "auroc" in line]
    assert f"auroc {(found.oracle_clinic['auroc'] + 0.5) / 2:.3f}" in note
    assert "auroc_low" not in note
    blocks = blocks_of(RunFolder("run", found, {}, {}, logged, None, None, {}, ()), "run")
    (table,) = [each for each in blocks if isinstance(each, Table) and each.columns[0].title == "metric"]
    assert {column.title for column in table.columns[1:]} == {*SOURCES, f"{HOSPITAL} (ORACLE)"}
    place = [column.title for column in table.columns].index(f"{HOSPITAL} (ORACLE)")
    shown = {cells[0]: cells[place] for cells in table.texts()}
    assert shown == {name: f"{logged[f'oracle/target/{name}']:.3f}" for name in names}
    (text,) = [each.text for each in blocks if "Metrics of a clinic" in str(getattr(each, "text", ""))]
    assert f"specificity {logged['threshold/specificity']:.4g}" in text


def test_a_target_without_labels_is_not_measured(tmp_path: Path) -> None:
    run = trainer(1, [ClinicMetrics("2")])
    run.fit(build(), Blobs(unknown=30))
    assert not [name for name in logged_of(run) if name.startswith("oracle/")]
    assert 0 < logged_of(run)["threshold/specificity"] < 1
