"""TargetPredictions in anybody's Trainer, against what the target's network says of the samples directly."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlit.callbacks import TargetPredictions
from fedlit.data import FederatedLoader, HeartDisease
from fedlit.methods import FedAvg
from fedlit.models import MLP
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, build, trainer


def read(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def network(module: Any) -> torch.nn.Module:
    """The target's extractor and classifier, one after the other."""
    replica = module.replicas[module.target.name]
    return torch.nn.Sequential(replica.extractor, replica.classifier).eval()


@pytest.mark.parametrize("federated", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_the_file_has_the_probabilities_of_the_targets_network(tmp_path: Path, federated: bool, keep: bool):
    data, module = Blobs(), build(weighting="uniform")
    run = trainer(2, [TargetPredictions()], tmp_path, federated)
    run.fit(module, data)
    run.predict(module, data, return_predictions=keep)  # 30 samples in batches of 8
    header, *rows = read(tmp_path / "predictions.csv")
    assert header == ["predicted", "0", "1", "2", "3"]
    with torch.no_grad():
        expected = network(module)(data.parts["test"][TARGET].tensors[0]).softmax(dim=1)
    torch.testing.assert_close(torch.tensor([[float(cell) for cell in row[1:]] for row in rows]), expected)
    assert [row[0] for row in rows] == [str(label) for label in expected.argmax(dim=1).tolist()]


def test_a_second_prediction_replaces_the_first_where_the_user_says(tmp_path: Path):
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


def test_classes_have_the_names_that_the_data_module_gives_them(tmp_path: Path):
    module = build()
    run = trainer(2, [TargetPredictions()], tmp_path)
    run.fit(module, Named())
    run.predict(module, Named())
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["predicted"] for row in rows} <= set(Named.classes)
    assert all(float(row[row["predicted"]]) == max(float(row[name]) for name in Named.classes) for row in rows)


def test_in_regression_there_are_numbers_alone(tmp_path: Path):
    data = HeartDisease(predict="heart_rate", seed=0)
    torch.manual_seed(0)
    module = FedAvg(data.clients, data.target, 1, MLP(data.in_features, [8]), task="regression")
    run = trainer(2, [TargetPredictions()], tmp_path)
    run.fit(module, data)
    run.predict(module, data)
    header, *rows = read(tmp_path / "predictions.csv")
    assert header == data.classes
    dataset = data.dataset(data.target, "test")
    inputs = torch.stack([dataset[index][0] for index in range(len(dataset))])  # type: ignore[arg-type]
    with torch.no_grad():
        expected = network(module)(inputs)
    torch.testing.assert_close(torch.tensor([[float(cell) for cell in row] for row in rows]), expected)


def test_names_that_do_not_fit_are_refused_before_anything_is_predicted(tmp_path: Path):
    data, module = Blobs(), build()
    data.classes = ["red", "green"]  # type: ignore[attr-defined]
    run = trainer(1, [TargetPredictions()], tmp_path)
    run.fit(module, data)
    with pytest.raises(ValueError, match=rf"classes of Blobs must name the {NUM_CLASSES} outputs of FedAvg .* got 2"):
        run.predict(module, data)


def test_predictions_without_the_target_are_refused(tmp_path: Path):
    data, module = Blobs(), build()
    run = trainer(1, [TargetPredictions()], tmp_path)
    run.fit(module, data)
    sources = {name: data.parts["test"][name] for name in CLIENTS if name != TARGET}
    with pytest.raises(ValueError, match=f"no sample of target '{TARGET}' was predicted"):
        run.predict(module, FederatedLoader(sources, training=False))


def test_fast_dev_run_writes_no_file(tmp_path: Path):
    module = build()
    trainer(1, [TargetPredictions()], tmp_path, fast_dev_run=True).fit(module, Blobs())
    trainer(1, [TargetPredictions()], tmp_path, fast_dev_run=True).predict(module, Blobs())
    assert not list(tmp_path.rglob("predictions.csv"))
