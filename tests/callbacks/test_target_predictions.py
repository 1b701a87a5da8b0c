"""TargetPredictions in anybody's Trainer, against what the target's network says of the samples directly."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlit.callbacks import TargetPredictions
from fedlit.data import Digits, FederatedLoader, HeartDisease
from fedlit.methods import FedAvg
from fedlit.models import MLP
from refused import refused
from small_federation import CLIENTS, TARGET, Blobs, build, trainer


def read(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def predict(folder: Path, module: Any, data: Any, loader: Any = None, rounds: int = 1, **given: Any) -> list[list[str]]:
    """What the callback writes of a module after a fit."""
    run = trainer(rounds, [TargetPredictions(**given)], folder)
    run.fit(module, data)
    run.predict(module, loader or data)
    return read(folder / "predictions.csv")


def heart_rates() -> tuple[HeartDisease, FedAvg]:
    data = HeartDisease(predict="heart_rate", seed=0)
    torch.manual_seed(0)
    return data, FedAvg(data.clients, data.target, 1, MLP(data.in_features, [8]), task="regression")


def network(module: Any) -> torch.nn.Module:
    replica = module.replicas[module.target.name]
    return torch.nn.Sequential(replica.extractor, replica.classifier).eval()


@pytest.mark.parametrize(("federated", "keep"), [(True, False), (False, True)])
def test_the_file_has_the_probabilities_of_the_targets_network(tmp_path, federated, keep):
    data, module = Blobs(), build(weighting="uniform")
    run = trainer(2, [TargetPredictions()], tmp_path, federated)
    run.fit(module, data)
    run.predict(module, data, return_predictions=keep)  # 30 samples in batches of 8
    header, *rows = read(tmp_path / "predictions.csv")
    assert header == ["id", "predicted", "0", "1", "2", "3"]
    assert [row[0] for row in rows] == [str(place) for place in range(30)]
    with torch.no_grad():
        expected = network(module)(data.parts["test"][TARGET].tensors[0]).softmax(dim=1)
    torch.testing.assert_close(torch.tensor([[float(cell) for cell in row[2:]] for row in rows]), expected)
    assert [row[1] for row in rows] == [str(label) for label in expected.argmax(dim=1).tolist()]


def test_a_second_prediction_replaces_the_first_where_the_user_says(tmp_path):
    data, module = Blobs(), build()
    run = trainer(1, [TargetPredictions(str(tmp_path / "some" / "where.csv"))], tmp_path)
    run.fit(module, data)
    run.predict(module, data)
    first = read(tmp_path / "some" / "where.csv")
    with torch.no_grad():
        next(module.replicas[TARGET].parameters()).add_(1)
    run.predict(module, data)
    second = read(tmp_path / "some" / "where.csv")
    assert len(first) == len(second) == 31
    assert first[0] == second[0]
    assert first[1:] != second[1:]
    assert not (tmp_path / "predictions.csv").exists()


class Named(Blobs):
    """Blobs whose classes have names."""

    classes = ("red", "green", "blue", "grey")


def test_classes_have_the_names_that_the_data_module_gives_them(tmp_path):
    header, *lines = predict(tmp_path, build(), Named(), rounds=2)
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert {row["predicted"] for row in rows} <= set(Named.classes)
    assert all(float(row[row["predicted"]]) == max(float(row[name]) for name in Named.classes) for row in rows)


def test_in_regression_there_are_numbers_alone(tmp_path):
    data, module = heart_rates()
    header, *rows = predict(tmp_path, module, data, rounds=2)
    assert header == ["id", *data.classes]
    assert [int(row[0]) for row in rows] == data.split(data.target).test.tolist()
    dataset = data.dataset(data.target, "test")
    inputs = torch.stack([dataset[index][0] for index in range(len(dataset))])
    with torch.no_grad():
        expected = module(inputs)
    written = torch.tensor([[float(cell) for cell in row[1:]] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(written, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("argument", "classes", "costs"),
    [
        ("classes", ["red", "green"], None),
        ("classes", ["id", "b", "c", "d"], None),  # a column of the file
        ("costs", None, [[0.0] * 4] * 3 + [[0.0]]),
    ],
)
def test_mismatches_are_refused_before_anything_is_predicted(argument, classes, costs, tmp_path):
    data = Blobs()
    data.classes = classes
    with refused(argument):
        predict(tmp_path, build(), data, costs=costs)


def test_predictions_without_the_target_are_refused(tmp_path):
    data = Blobs()
    sources = {name: data.parts["test"][name] for name in CLIENTS if name != TARGET}
    with pytest.raises(ValueError, match=f"no sample of target '{TARGET}'"):
        predict(tmp_path, build(), data, FederatedLoader(sources, training=False))


def test_a_target_without_test_samples_is_an_error(tmp_path):
    """Lightning skips the loop, and would end without an error."""
    data = Digits(target="fonts", flatten=True, test_fraction=0.0, batch_size=512)
    module = FedAvg(data.clients, data.target, data.num_classes, MLP(64, [8]))
    run = trainer(1, [TargetPredictions()], tmp_path, limit_train_batches=1)
    run.fit(module, data)
    with pytest.raises(ValueError, match="no sample of target 'fonts'"):
        run.predict(module, data)


def hospitals(tmp_path: Path, data: HeartDisease, **given: Any) -> list[dict[str, str]]:
    """What a model after two rounds predicts for the patients of a hospital, by what a row's columns are called."""
    torch.manual_seed(0)
    module = FedAvg(data.clients, data.target, 2, MLP(data.in_features, [8]))
    header, *rows = predict(tmp_path, module, data, rounds=2, **given)
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_ids_are_positions_in_the_targets_data(tmp_path):
    data = HeartDisease(seed=0)
    rows = hospitals(tmp_path, data)
    everyone = data.load(data.target)
    tested = data.dataset(data.target, "test")
    assert len(rows) == len(tested) == 40
    for row, (_, y) in zip(rows, (tested[place] for place in range(40)), strict=True):
        assert int(everyone.y[int(row["id"])]) == int(y)
    ages = torch.tensor([float(everyone.x[int(row["id"]), 0]) for row in rows])
    shown = torch.stack([tested[place][0][0] for place in range(40)])  # standardised: equal up to scale and shift
    assert float(torch.corrcoef(torch.stack([ages, shown]))[0, 1]) == pytest.approx(1, abs=1e-5)


class Wards(HeartDisease):
    """Patients who have names."""

    def ids(self, client: str, stage: str) -> list[str]:
        positions = getattr(self.split(client), "test" if stage == "predict" else stage)
        return [f"{client}, bed {place}" for place in positions.tolist()]


def test_ids_are_those_that_the_data_module_gives(tmp_path):
    data = Wards(seed=0)
    assert [row["id"] for row in hospitals(tmp_path, data)] == data.ids(data.target, "test")


def test_decisions_are_the_cheapest_by_the_rows_own_probabilities(tmp_path):
    """Of two classes that is a threshold: to overlook an ill patient costs 4 false alarms, so 1 in 5 is too many."""
    rows = hospitals(tmp_path, HeartDisease(seed=0), costs=[[0, 1], [4, 0]])
    assert [*rows[0]] == ["id", "predicted", "decision", "healthy", "disease"]
    for row in rows:
        assert row["decision"] == ("disease" if float(row["disease"]) > 0.2 else "healthy")
    assert any(row["decision"] != row["predicted"] for row in rows)


def test_costs_are_refused_where_numbers_are_predicted(tmp_path):
    data, module = heart_rates()
    with refused("costs"):
        predict(tmp_path, module, data, costs=[[0.0]])
