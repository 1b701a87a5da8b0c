"""Regression of one and of several numbers: scores against scikit-learn, tables, predictions and exported files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch.optim import Adam

from fedlit.callbacks import OracleAccuracy, TargetPredictions, summarise
from fedlit.data import CSVDomains, DomainDataModule
from fedlit.export import export_target
from fedlit.methods import FedAvg, SourceOnly
from fedlit.models import MLP
from helpers import samples_of, trainer
from refused import refused
from two_numbers import NAMES, PLANTS, Measured

METRICS = {"r2": r2_score, "rmse": root_mean_squared_error, "mae": mean_absolute_error}


def tables(folder: Path, unknown: int = 0) -> Path:
    """A table for each of three plants; the numbers to predict differ in unit by a factor of 1e5."""
    random = np.random.default_rng(0)
    for place, plant in enumerate(PLANTS):
        x = random.normal(size=(60, 3))
        wear = 1e6 + 1e3 * (x[:, 0] + 0.2 * random.normal(size=60) + 0.3 * place)
        heat = 0.01 * (x[:, 1] - x[:, 2] + 0.5 * random.normal(size=60))
        lines = [",".join(map(repr, map(float, row))) for row in np.column_stack([x, wear, heat])]
        for row in range(unknown if plant == "turin" else 0):
            lines[row] = lines[row].rpartition(",")[0] + ","
        folder.mkdir(exist_ok=True)
        (folder / f"{plant}.csv").write_text("\n".join(["a,b,c,wear,heat", *lines]) + "\n")
    return folder


def csv_domains(folder: Path, **given: Any) -> CSVDomains:
    pytest.importorskip("pandas")
    arguments: dict[str, Any] = {"label": NAMES, "task": "regression", "target": "turin", "seed": 0}
    return CSVDomains(str(folder), **(arguments | given))


def fitted(data: DomainDataModule, folder: Path, method: Any = FedAvg, rounds: int = 8) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = method(
        data.clients, data.target, data.num_classes, MLP(data.in_features, [8]), task="regression",
        optimizer=lambda params: Adam(params, lr=0.03),
    )  # fmt: skip
    run = trainer(rounds, [OracleAccuracy(), TargetPredictions(str(folder / "predictions.csv"))])
    run.fit(module, data)
    return module, run


def predicted(module: Any, data: DomainDataModule, client: str, stage: str) -> tuple[Any, Any]:
    """Labels and predictions of one client's samples in the labels' unit, each (n, k)."""
    x, y = samples_of(data, client, stage)
    with torch.no_grad():
        outputs = module.task.in_unit(client, module.replicas[client](x))
    return y.reshape(outputs.shape).numpy(), outputs.numpy()


@pytest.mark.parametrize("kind", ["python", "csv"])
def test_scores_of_each_number_and_their_means_are_those_of_scikit_learn(kind: str, tmp_path: Path) -> None:
    data = Measured(target="turin", seed=0) if kind == "python" else csv_domains(tables(tmp_path / "plants"))
    module, run = fitted(data, tmp_path)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    prefixes = {"essen": "source/essen", "lyon": "source/lyon", "turin": "oracle/target"}
    for client, prefix in prefixes.items():
        y, outputs = predicted(module, data, client, "val")
        for name, metric in METRICS.items():
            each = metric(y, outputs, multioutput="raw_values")
            found = [logged[f"{prefix}/{name}/{output}"] for output in NAMES]
            assert found == pytest.approx(each.tolist(), rel=1e-5)
            assert logged[f"{prefix}/{name}"] == pytest.approx(each.mean(), rel=1e-5)
    for name in METRICS:
        of_sources = [logged[f"source/{client}/{name}"] for client in ("essen", "lyon")]
        assert logged[f"source/{name}"] == pytest.approx(np.mean(of_sources), rel=1e-6)
    # both are learnt, as each is standardised by itself: their units differ by a factor of 1e5
    assert min(logged[f"oracle/target/r2/{output}"] for output in NAMES) > 0.3
    summary = summarise(run, module, 1.0)
    assert summary.oracle_rmse == pytest.approx(logged["oracle/target/rmse"])
    assert {name: {*row} for name, row in summary.oracle_outputs.items()} == {key: {*METRICS} for key in NAMES}
    assert summary.oracle_outputs["heat"]["mae"] == pytest.approx(logged["oracle/target/mae/heat"])
    assert type(summary).from_json(summary.to_json()) == summary


def test_each_number_has_its_own_mean_and_deviation(tmp_path: Path) -> None:
    data = csv_domains(tables(tmp_path / "plants"))
    module, _ = fitted(data, tmp_path, SourceOnly, rounds=1)
    y = torch.cat([data.labels(name)[data.split(name).train] for name in ("essen", "lyon")]).numpy()
    scale = module.task.scales["turin"]
    np.testing.assert_allclose(scale.mean.numpy(), y.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(scale.deviation.numpy(), y.std(axis=0), rtol=1e-9)


def test_one_number_has_scores_without_a_name(tmp_path: Path) -> None:
    data = csv_domains(tables(tmp_path / "plants"), label="wear", leave_out=["heat"])
    module, run = fitted(data, tmp_path, rounds=2)
    y, outputs = predicted(module, data, "turin", "val")
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    assert logged["oracle/target/mae"] == pytest.approx(mean_absolute_error(y, outputs), rel=1e-5)
    assert logged["oracle/target/rmse"] == pytest.approx(logged["oracle/target/loss"] ** 0.5, rel=1e-5)
    assert not [name for name in logged if name.endswith("/wear")]
    assert summarise(run, module, 1.0).oracle_outputs == {}


@pytest.mark.parametrize("suffix", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_predictions_and_files_have_a_column_for_each_number(suffix: str, tmp_path: Path) -> None:
    folder = tables(tmp_path / "plants", unknown=3)
    data = csv_domains(folder, transductive=True)
    assert int(data.labels("turin").isnan().any(dim=1).sum()) == 3
    module, run = fitted(data, tmp_path, rounds=2)
    run.predict(module, data)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", *NAMES]
    _, outputs = predicted(module, data, "turin", "test")
    np.testing.assert_allclose(np.array(rows, dtype=float)[:, 1:], outputs, rtol=1e-6)
    path = tmp_path / f"target.{suffix}"
    export_target(module, path, data)
    table = np.loadtxt(folder / "turin.csv", delimiter=",", skiprows=1, usecols=(0, 1, 2))
    if suffix == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
        (found,) = session.run(None, {name: table[:, [place]] for place, name in enumerate("abc")})
    else:
        found = torch.export.load(path).module()(torch.from_numpy(table)).detach().numpy()
    np.testing.assert_allclose(found, outputs, rtol=1e-4)
    assert "0. wear\n1. heat" in Path(f"{path}.md").read_text()


def test_new_rows_are_predicted_by_column(tmp_path: Path) -> None:
    folder = tables(tmp_path / "plants")
    (tmp_path / "new.csv").write_text("a,b,c\n1,0,0\n0,1,0\n")
    data = csv_domains(folder, predict_file=str(tmp_path / "new.csv"))
    module, run = fitted(data, tmp_path, rounds=8)
    run.predict(module, data)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert float(first["wear"]) > float(second["wear"]) > 9e5
    assert float(first["heat"]) < float(second["heat"]) < 1


@pytest.mark.parametrize(
    "given", [{"task": "classification"}, {"label": []}, {"label": ["wear", "wear"]}, {"label": ["wear", 3]}]
)
def test_labels_that_are_no_columns_to_predict_together_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    if 3 in given.get("label", []):
        with pytest.raises(TypeError, match="label must"):
            csv_domains(tables(tmp_path / "plants"), **given)
        return
    with refused("label"):
        csv_domains(tables(tmp_path / "plants"), **given)
