"""An exported model takes raw samples of every data module and predicts what the module does of prepared ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlit.callbacks import RunRecord
from fedlit.data import (
    ColoredMNIST,
    Digits,
    Domain,
    DomainDataModule,
    FashionMNIST,
    FeatureDomains,
    HeartDisease,
    RawInputs,
)
from fedlit.data.heart import HOSPITALS, patients
from fedlit.data.raw_inputs import VectorNetwork
from fedlit.export import export_target
from fedlit.federation import RosterError
from fedlit.methods import SourceOnly
from fedlit.models import MLP
from helpers import trainer
from stand_ins import write_idx

onnxruntime = pytest.importorskip("onnxruntime")


class Scaled(DomainDataModule):
    """Numbers of very different sizes, which `finish` standardises."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**({"target": "there", "seed": 0} | kwargs))
        self.check_roster()

    def domain_names(self) -> list[str]:
        return ["here", "there"]

    def class_names(self) -> list[str]:
        return ["below", "above"]

    def load(self, domain: str) -> Domain:
        generator = torch.Generator().manual_seed(len(domain))
        y = torch.arange(60) % 2
        x = torch.randn(60, 3, generator=generator) + 2 * y[:, None]
        return Domain(x * torch.tensor([1.0, 100.0, 0.01]) + 7, y)

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        return (x - x[train].mean(dim=0)) / x[train].std(dim=0)


class Explained(Scaled):
    """Says what `finish` does."""

    def raw_inputs(self) -> RawInputs:
        x, train = self.load(self.target).x, self.split(self.target).train
        return RawInputs(VectorNetwork(x[train].mean(dim=0), x[train].std(dim=0), unit=False), x[:1], "Lengths in m.")


class Halved(Explained):
    """Does something else than what it says, as its parent does not know."""

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        return super().finish(x, train) / 2


class ByTransform(Scaled):
    """Scales batch by batch."""

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        return x

    def transform(self, training: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: (x - 7) / 100


class Untouched(Scaled):
    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        return x.clone()


def fitted(data: DomainDataModule, callbacks: Any = (), **kwargs: Any) -> tuple[Any, Tensor]:
    """A module that was trained a little, and its predictions of the target's test samples."""
    torch.manual_seed(0)
    module = SourceOnly(data.clients, data.target, data.num_classes, MLP(data.in_features, [8]), **kwargs)
    run = trainer(2, callbacks, strategy={"local_steps": 3}, limit_val_batches=0)
    run.fit(module, data)
    return module, torch.cat([batch[data.target] for batch in run.predict(module, data)])  # type: ignore[union-attr, index, call-overload]


def predicted(module: Any, data: DomainDataModule, folder: Path, raw: Tensor) -> dict[str, Tensor]:
    """What both files of a module predict of raw samples."""
    for suffix in ("pt2", "onnx"):
        export_target(module, folder / f"target.{suffix}", data)
    session = onnxruntime.InferenceSession(folder / "target.onnx")
    (found,) = session.run(None, {"inputs": raw.numpy()})
    return {
        "onnx": torch.from_numpy(found),
        "pt2": torch.export.load(folder / "target.pt2").module()(raw).detach(),
    }


def idx(folder: Path) -> str:
    write_idx(folder, 300)
    return str(folder)


def features(folder: Path) -> str:
    generator, arrays = np.random.default_rng(0), {}
    for place, name in enumerate(("a", "b", "c")):
        arrays[f"{name}_y"] = np.arange(40) % 3
        x = generator.normal(size=(40, 6)) * [1, 5, 0.1, 30, 1, 1] + place + arrays[f"{name}_y"][:, None]
        arrays[f"{name}_x"] = x.astype(np.float32)
    np.savez(folder / "features.npz", **arrays)
    return str(folder / "features.npz")


CASES: dict[str, Callable[[Path], DomainDataModule]] = {
    "own data module": lambda folder: Explained(),
    "own, nothing prepared": lambda folder: Untouched(),
    "Digits": lambda folder: Digits(flatten=True, seed=0),
    "FashionMNIST": lambda folder: FashionMNIST(idx(folder), num_sources=2, noise_level=0.0, seed=0),
    "FashionMNIST, noise": lambda folder: FashionMNIST(idx(folder), num_sources=2, redraw_noise=True, seed=0),
    "ColoredMNIST": lambda folder: ColoredMNIST(idx(folder), seed=0),
} | {
    f"FeatureDomains, {how}": lambda folder, how=how: FeatureDomains(features(folder), normalise=how, seed=0)  # type: ignore[misc]
    for how in ("none", "unit", "zscore", "zscore_unit", "ranks")
}


@pytest.mark.usefixtures("translations_kept")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.endswith((", unit", "zscore", "none")) else ())
        for name in CASES
    ],
)
def test_files_predict_of_raw_samples_what_the_module_does_of_prepared_ones(name: str, tmp_path: Path) -> None:
    data = CASES[name](tmp_path)
    module, expected = fitted(data)
    raw = data.load(data.target).x[data.split(data.target).test]
    if name == "Digits":
        raw = raw.flatten(1)
    for found in predicted(module, data, tmp_path, raw).values():
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("translations_kept")
@pytest.mark.parametrize(("predict", "normalise"), [("disease", "local"), ("heart_rate", "none")])
def test_a_model_of_heart_disease_takes_rows_of_the_table(predict: Any, normalise: Any, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    data = HeartDisease(predict=predict, normalise=normalise, target="hungary", seed=0)
    module, expected = fitted(data, task=data.task)
    export_target(module, tmp_path / "target.onnx", data)
    rows = [row for row in patients() if row["dataset"] == HOSPITALS["hungary"]]
    rows = [row for row in rows if predict == "disease" or row["thalch"]]
    pandas.DataFrame([rows[place] for place in data.split("hungary").test.tolist()]).to_csv("rows.csv", index=False)
    card = (tmp_path / "target.onnx.md").read_text()
    (code,) = re.findall("```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace('"target.onnx"', repr(str(tmp_path / "target.onnx"))), names)
    np.testing.assert_allclose(names["predictions"], expected.numpy(), atol=1e-5, rtol=1e-4)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("kind", "place"), [(Scaled, "finish"), (ByTransform, "transform"), (Halved, "finish")])
def test_preparation_that_a_file_would_leave_out_is_refused(kind: type[Scaled], place: str, tmp_path: Path) -> None:
    data = kind()
    module, expected = fitted(data)
    for suffix in ("pt2", "onnx"):
        with pytest.raises(TypeError, match=place):
            export_target(module, tmp_path / f"target.{suffix}", data)
    assert not [*tmp_path.glob("target*")]
    export_target(module, tmp_path / "target.pt2", data.input_shape)  # of prepared samples
    found = torch.export.load(tmp_path / "target.pt2").module()
    prepared = data.dataset("there", "test").batch(torch.arange(len(expected)))[0]  # type: ignore[attr-defined]
    torch.testing.assert_close(found(prepared), expected)


class Logarithms(FeatureDomains):
    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        return super().finish(x.abs().log1p(), train)


class Clipped(HeartDisease):
    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        return super().finish(x, train).clamp(-1, 1)


@pytest.mark.parametrize("kind", [Logarithms, Clipped])
def test_a_subclass_that_prepares_samples_otherwise_is_refused(kind: Any, tmp_path: Path) -> None:
    data = kind(seed=0) if kind is Clipped else kind(features(tmp_path), normalise="zscore", seed=0)
    with pytest.raises(TypeError, match="finish"):
        export_target(fitted(data)[0], tmp_path / "target.pt2", data)


def test_a_recorded_run_with_such_an_export_is_refused_before_it_trains(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "runs", export="target.pt2")
    with pytest.raises(RosterError, match=r"export.*finish"):
        fitted(Scaled(), [record])
