"""`fedlit.train`: the run is the one of an ordinary Trainer, and its results show themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

import fedlit
from fedlit import FederatedStrategy
from fedlit.callbacks import Calibration
from fedlit.data import Digits, HeartDisease
from fedlit.export import target_model
from fedlit.methods import FedAvg, FedMMD
from fedlit.models import MLP, SmallCNN
from fedlit.privacy import PairwiseMasking
from helpers import same, weights


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")
    return fedlit.train("FedAvg", "heart_disease", target="hungary", rounds=3, folder=folder)


def test_it_is_the_run_of_an_ordinary_trainer(run: Any) -> None:
    pl.seed_everything(0, verbose=False)
    data = HeartDisease(target="hungary", seed=0)
    module = FedAvg(data.clients, "hungary", data.num_classes, MLP(data.input_shape[0]))
    strategy = FederatedStrategy(num_threads=1)
    pl.Trainer(max_epochs=3, strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False).fit(
        module, data
    )
    assert same(weights(module, "hungary"), weights(run.module, "hungary"))
    assert run.module.federation.round_idx == 3


def test_methods_have_the_arguments_of_their_shipped_configuration_unless_others_are_given() -> None:
    made = fedlit.train(FedMMD, "digits", rounds=1, unit_norm=True, warmup_rounds=0, extractor=nn_of(16))
    assert made.module.run.trust_region is not None  # 1.0 in configs/methods/fed_mmd.yaml, and without it none
    assert made.module.unit_norm
    (optimizer,) = made.trainer.optimizers
    assert all(group["lr"] == 0.002 for group in optimizer.param_groups)
    assert isinstance(optimizer, Optimizer)
    given = fedlit.train("FedMMD", "digits", rounds=1, optimizer=lambda params: Adam(params, lr=0.01))
    assert all(group["lr"] == 0.01 for group in given.trainer.optimizers[0].param_groups)


def test_a_callback_that_mends_probabilities_comes_before_those_that_score_them() -> None:
    made = fedlit.train("FedAvg", "digits", rounds=2, trainer={"callbacks": [Calibration()]})
    assert made.module.run.outputs.temperature != 1


def nn_of(width: int) -> Any:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
    network.out_features = width  # type: ignore[assignment]
    return network


def test_images_get_a_convolutional_network_and_privacy_is_chosen_by_name() -> None:
    made = fedlit.train("FedAvg", Digits(target="fonts", seed=0), rounds=1, privacy="masking", folder="here")
    assert isinstance(made.module.replicas["fonts"].extractor, SmallCNN)
    assert isinstance(made.module.federation.channels["weights"].backend, PairwiseMasking)
    assert made.folder == Path("here/version_0").resolve()
    others: dict[str, Any] = {"trainer": {"callbacks": [pl.Callback()]}, "strategy": {"local_steps": 1}}
    again = fedlit.train(made.module, made.data, rounds=2, **others)
    assert again.module is made.module
    assert again.trainer.strategy.local_steps == 1


def test_results_are_those_of_the_run(run: Any) -> None:
    metrics = run.metrics
    summary = json.loads((run.folder / "summary.json").read_text())
    assert metrics["oracle_accuracy"] == summary["oracle_accuracy"]
    assert metrics["target_score"] == summary["target_score"]
    assert all(name == "target_score" or name.startswith("oracle_") for name in metrics)
    assert "hungary" in run._repr_html_()
    assert repr(run).startswith("FedAvg on 'hungary', 3 rounds: target_score ")
    total = sum(run.module.federation.ledger.bytes_by_channel().values())
    assert f"{total / 1e6:.3g}"[:3] in run.ledger.markdown()
    assert "<table>" in run.ledger._repr_html_()


def test_predictions_are_a_table_of_the_targets_test_samples(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    table = run.predict()
    assert isinstance(table, pandas.DataFrame)
    positions = run.data.split("hungary").test
    probabilities = target_model(run.module)(run.data.all_samples("hungary").batch(positions)[0])
    torch.testing.assert_close(
        torch.tensor(table[["healthy", "disease"]].to_numpy(), dtype=torch.float32), probabilities, atol=1e-5, rtol=0
    )
    assert table["predicted"].tolist() == [["healthy", "disease"][row] for row in probabilities.argmax(dim=1).tolist()]
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = run.predict()
    assert [row["predicted"] for row in rows] == table["predicted"].tolist()


def test_curves_page_and_model_are_written(run: Any, tmp_path: Path) -> None:
    paths = run.plot().save(tmp_path / "curves")
    assert len(paths) >= 3
    assert all(path.read_text().startswith("<svg") for path in paths)
    assert run.plot()._repr_html_().count("<svg") == len(paths)
    page = run.report()
    assert page.path == run.folder / "report.html"
    assert page._repr_html_().startswith("<iframe srcdoc=")
    assert page._repr_html_().count('"') == 8  # the page's own are escaped
    run.export(tmp_path / "model")
    assert fedlit.load(tmp_path / "model").classes == ["healthy", "disease"]


NEEDING_MORE = {"TargetDistillation"}  # a teacher's predictions


@pytest.mark.parametrize(
    "name",
    [name if name in ("AdaBN", "Ditto", "Oracle") else pytest.param(name, marks=pytest.mark.slow)
     for name in sorted(set(fedlit.methods.__all__) - NEEDING_MORE)],
)  # fmt: skip
def test_every_method_is_trained_by_its_name(name: str, tmp_path: Path) -> None:
    """On data given by name, with what its shipped configuration says of data: labels of the target, whole batches."""
    made = fedlit.train(name, "heart_disease", rounds=2, target="hungary")
    assert type(made.module).__name__ == name
    assert len(made.predict()) == len(made.data.split("hungary").test)
    made.export(tmp_path / "model")
    assert fedlit.load(tmp_path / "model").classes == ["healthy", "disease"]


def test_what_would_be_given_twice_or_by_another_name_is_refused(tmp_path: Path) -> None:
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "strategy": (
            {"trainer": {"strategy": "auto"}, "privacy": "masking"},
            r"trainer\['strategy'\] must be left out",
        ),
        "rounds": ({"trainer": {"max_epochs": 3}}, r"trainer\['max_epochs'\] must be left out, got 3: give rounds"),
        "privacy": ({"privacy": "masking", "strategy": {"privacy": None}}, r"strategy\['privacy'\] must be left out"),
        "argument": ({"roundz": 3}, "roundz must be no argument of train, or one of FedAvg, got 3"),
        "of the data": ({"target_labels": 5}, r"it is an argument of the data: give HeartDisease\(target_labels=...\)"),
        "dry": ({"trainer": {"fast_dev_run": True}}, "fast_dev_run"),
    }
    for given, message in wrong.values():
        with pytest.raises(ValueError, match=message):
            fedlit.train("FedAvg", "heart_disease", **given)


def test_a_folder_in_the_home_is_one_whatever_the_working_directory_is_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    quiet = {"enable_progress_bar": False, "callbacks": pl.Callback()}
    made = fedlit.train("FedAvg", "heart_disease", rounds=1, folder="~/mine", trainer=quiet)
    assert made.folder == tmp_path / "mine" / "version_0"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert made.plot().pictures
    assert len(made.predict()) > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("FedAgv", "digits"),
            "method must be the name of a class in fedlit.methods, got 'FedAgv': did you mean",
        ),
        (("FedAvg", "digts"), "data must be the name of a shipped configuration, got 'digts': did you mean 'digits'"),
        (("FedAvg", "zzz"), "there are adaptiope, "),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(given: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedlit.train(*given)


def test_what_is_made_already_takes_no_arguments() -> None:
    data = Digits(target="fonts", flatten=True, seed=0)
    module = FedAvg(data.clients, "fonts", 10, MLP(64, [8]))
    with pytest.raises(ValueError, match="privacy must be the name of a shipped configuration, got 'mask'"):
        fedlit.train(module, data, privacy="mask")
    with pytest.raises(ValueError, match=r"arguments must be left out, as the method is made already, got \['lr'\]"):
        fedlit.train(module, data, lr=1)
    with pytest.raises(ValueError, match="target must be left out"):
        fedlit.train(module, data, target="fonts")
