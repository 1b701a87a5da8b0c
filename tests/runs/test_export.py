"""The target's model by itself, read where there is no fedlit, of prepared and of raw samples, next to a Trainer's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlit
from fedlit import FederatedModule
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
from fedlit.export import export_target, target_model
from fedlit.federation import RosterError
from fedlit.methods import APFL, Ditto, FedAvg, FedDaDiL, FedRFTCA, KNNPer, SourceOnly
from fedlit.models import MLP, SmallCNN
from fedlit.papers.stand_ins import write_idx
from helpers import build, digits, same, trainer, weights
from method_table import METHODS

READER = """
import sys
sys.modules["fedlit"] = None  # importing it is an error
import numpy as np
import torch
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    model, inputs, outputs = line.strip().split("|")
    network = torch.export.load(model).module()
    with torch.no_grad():
        np.save(outputs, network(torch.from_numpy(np.load(inputs))).numpy())
    assert not [name for name in sys.modules if name.startswith("fedlit.")]
    print("done", flush=True)
"""
"""Answers a line of three paths, model, inputs and outputs, by writing the outputs."""

pytestmark = pytest.mark.usefixtures("translations_kept")

Reader = Callable[[Path, Tensor], Tensor]


def without_fedlit(model: Path, inputs: Tensor) -> Tensor:
    """What a .pt2 file predicts where fedlit cannot be imported; in this process, as torch takes long to import."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fedlit"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "fedlit", None)
        network = torch.export.load(model).module()
        with torch.no_grad():
            found = network(inputs)
        assert not [name for name in sys.modules if name.startswith("fedlit.")]
    return found


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Reads a .pt2 file in a process in which fedlit cannot be imported."""
    folder = tmp_path_factory.mktemp("elsewhere")
    environment = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [sys.executable, "-I", "-W", "ignore", "-c", READER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        def read(model: Path, inputs: Tensor) -> Tensor:
            np.save(folder / "inputs.npy", inputs.numpy())
            process.stdin.write(f"{model}|{folder / 'inputs.npy'}|{folder / 'outputs.npy'}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            return torch.from_numpy(np.load(folder / "outputs.npy"))

        yield read
        process.stdin.close()


def read_onnx(path: Path, inputs: Tensor) -> Tensor:
    onnxruntime = pytest.importorskip("onnxruntime")
    (found,) = onnxruntime.InferenceSession(path).run(["predictions"], {"inputs": inputs.numpy()})
    return torch.from_numpy(found)


READERS: dict[str, Reader] = {
    ".pt2": without_fedlit,
    ".onnx": read_onnx,
    "": lambda folder, inputs: fedlit.load(folder)(inputs),
}

CASES: dict[str, tuple[type[FederatedModule], dict[str, Any], dict[str, Any]]] = METHODS | {
    "FedRFTCA, vote": (FedRFTCA, {"num_frequencies": 16, "num_components": 8, "classifier_period": None}, {}),
    "FedDaDiL, ensemble": (FedDaDiL, METHODS["FedDaDiL"][1] | {"predict_with": "ensemble"}, {}),
    "SmallCNN": (FedAvg, {"extractor": SmallCNN(1, width=4)}, {"flatten": False}),
    "SmallCNN, APFL": (APFL, {"extractor": SmallCNN(1, width=4)}, {"flatten": False, "target_labels": 30}),
}
"""Every method, and what else predicts in another way."""

PARTS = (slice(0, 120), slice(7, 8))
"""Samples that files predict: all and one; torch traces two."""


@cache
def trained(name: str) -> tuple[FederatedModule, Tensor, Tensor]:
    """A case, inputs of its target, and what a Trainer predicts for them."""
    method, arguments, options = CASES[name]
    data = digits(**options)
    module = build(method, data, **arguments)
    run = trainer(2, limit_val_batches=0)
    run.fit(module, data)
    expected = run.predict(module, data)[0]["fonts"]  # type: ignore[index, call-overload]
    inputs = data.dataset("fonts", "test").batch(torch.arange(120))[0]  # type: ignore[attr-defined]
    assert len(expected) == 120
    return module, inputs, expected


READ = {
    "FedProx": {"extractor", "classifier"},  # no anchor
    "Ditto": {"personal"},
    "FedRFTCA": {"extractor", "aligner", "classifier", "frequencies"},  # not what sources have sent
    "FedDaDiL": {"extractor", "reconstruction"},  # neither atoms nor coordinates
    "FedMMD": {"extractor", "members"},
}
"""Parts of a replica that predictions read, all of which and nothing else a file has."""


def by_default(rows: Collection[Any], default: Collection[Any]) -> list[Any]:
    return [pytest.param(*row, marks=() if row in default else pytest.mark.slow) for row in rows]


@pytest.mark.parametrize(
    ("name", "suffix"),
    by_default(
        [(name, suffix) for name in CASES for suffix in READERS],
        [(name, ".pt2") for name in ("FedRFTCA", "FedDaDiL", "APFL", "KNNPer")]
        + [("SmallCNN", ".onnx"), ("FedRFTCA", ""), ("KNNPer", "")],
    ),
)
def test_files_predict_as_the_trainer_does(name: str, suffix: str, tmp_path: Path) -> None:
    module, inputs, expected = trained(name)
    path = tmp_path / f"target{suffix}"
    export_target(module, path, inputs.shape[1:])
    for part in PARTS:
        found = READERS[suffix](path, inputs[part])
        torch.testing.assert_close(found, expected[part], atol=1e-6 if suffix == ".pt2" else 1e-5, rtol=0)
    assert sorted(tmp_path.iterdir()) == [path, *([path.with_suffix(f"{suffix}.md")] if suffix else [])]
    if name in READ and suffix == ".pt2":
        program = torch.export.load(path)
        names = {*program.state_dict, *program.constants}
        assert {name.split(".")[1] for name in names} == READ[name]
        assert str(Path(__file__).parents[2]).encode() not in path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_another_process_reads_a_file_without_fedlit(name: str, elsewhere: Reader, tmp_path: Path) -> None:
    module, inputs, expected = trained(name)
    export_target(module, tmp_path / "target.pt2", inputs.shape[1:])
    for part in PARTS:
        torch.testing.assert_close(elsewhere(tmp_path / "target.pt2", inputs[part]), expected[part], atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", [KNNPer, Ditto])
def test_the_model_is_a_copy_that_training_does_not_reach(method: type[FederatedModule]) -> None:
    _, arguments, options = METHODS[method.__name__]
    module = build(method, digits(**options), dropout=0.5, **arguments)
    trainer(2).fit(module, digits(**options))
    before = weights(module, "fonts")
    model = target_model(module)
    assert same(weights(module, "fonts"), before)
    assert not any(part.training for part in model.modules())
    assert not any(param.requires_grad for param in model.parameters())
    inputs = torch.rand(5, 64)
    first = model(inputs)
    torch.testing.assert_close(first.sum(dim=1), torch.ones(5))
    trainer(3).fit(module, digits(**options))
    assert torch.equal(model(inputs), first)
    assert not torch.allclose(target_model(module)(inputs), first)


class Eigenvalues(nn.Module):
    """Has an operation that ONNX lacks."""

    out_features = 64

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linalg.eigvalsh(x.unsqueeze(2) * x.unsqueeze(1))


def untrained(extractor: nn.Module, method: type[FederatedModule] = FedAvg) -> FederatedModule:
    module = build(method, digits(), extractor=extractor)
    module.configure_model()
    return module


def test_an_operation_that_onnx_lacks_is_told_with_the_way_out(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    module = untrained(Eigenvalues())
    with pytest.raises(TypeError, match="FedAvg"):
        export_target(module, tmp_path / "target.onnx", (64,))
    assert not list(tmp_path.iterdir())
    export_target(module, tmp_path / "target.pt2", (64,))


class OfOne(nn.Module):
    """Takes a batch of one sample in a way of its own."""

    out_features = 64

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(64, 64), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "squeezed":
            x = x.squeeze()
        elif x.shape[0] == 1:
            return x
        elif self.how == "centred":
            x = x - x.mean(dim=0)
        features: Tensor = self.layer(x)
        return features


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("branch", "FedAvg predicts otherwise for a batch of one sample, and a file has the operations of several"),
        pytest.param("centred", "FedAvg predicts otherwise for a batch of one sample", marks=pytest.mark.slow),
        ("squeezed", r"FedAvg fails on a batch of one sample: .*Its forward must take any n in the same way: use squ"),
    ],
)
def test_a_network_that_takes_one_sample_otherwise_is_refused(
    how: str, message: str, suffix: str, tmp_path: Path
) -> None:
    """torch traces a batch of two, and lets the graph take one."""
    with pytest.raises(TypeError, match=message):
        export_target(untrained(OfOne(how)), tmp_path / f"target{suffix}", (64,))
    assert not list(tmp_path.iterdir())


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


def test_a_network_that_draws_random_numbers_is_not_taken_for_one_that_branches(tmp_path: Path) -> None:
    module = untrained(Noisy(64, 64))
    before = torch.random.get_rng_state()
    export_target(module, tmp_path / "target.pt2", (64,))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_method_that_predicts_otherwise_is_refused() -> None:
    class Guessing(FedAvg):
        def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            return {}

    with pytest.raises(TypeError, match="predict_step"):
        target_model(untrained(MLP(64, [16]), Guessing))


def test_paths_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = untrained(MLP(64, [16]))
    with pytest.raises(ValueError, match="output"):
        export_target(module, tmp_path / "model.pth", (64,))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        export_target(module, tmp_path / "nowhere" / "model.pt2", (64,))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"fedlit\[onnx\]"):
        export_target(module, tmp_path / "model.onnx", (64,))


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


def idx(folder: Path) -> str:
    write_idx(folder, 300)
    return str(folder)


def features(folder: Path) -> str:
    generator, arrays = np.random.default_rng(0), {}
    for place, name in enumerate(("a", "b", "c")):
        arrays[f"{name}_y"] = np.arange(40) % 3
        x = generator.normal(size=(40, 3)) * [1, 0.1, 30] + place + arrays[f"{name}_y"][:, None]
        arrays[f"{name}_x"] = x.astype(np.float32)
    np.savez(folder / "features.npz", **arrays)
    return str(folder / "features.npz")


MODULES: dict[str, Callable[[Path], DomainDataModule]] = {
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


@pytest.mark.parametrize(
    ("name", "suffix"),
    by_default(
        [(name, suffix) for name in MODULES for suffix in READERS],
        [("own data module", ".onnx"), ("FashionMNIST, noise", ".pt2"), ("FeatureDomains, ranks", "")],
    ),
)
def test_files_predict_of_raw_samples_what_the_module_does_of_prepared_ones(
    name: str, suffix: str, tmp_path: Path
) -> None:
    data = MODULES[name](tmp_path)
    module, expected = fitted(data)
    raw = data.load(data.target).x[data.split(data.target).test]
    path = tmp_path / f"target{suffix}"
    export_target(module, path, data)
    found = READERS[suffix](path, raw.flatten(1) if name == "Digits" else raw)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("predict", "normalise"), [("disease", "local"), ("heart_rate", "none")])
def test_a_model_of_heart_disease_takes_rows_of_the_table(predict: Any, normalise: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
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


def test_a_recorded_run_with_such_an_export_is_refused_before_it_trains(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "runs", export="target.pt2")
    with pytest.raises(RosterError, match=r"export.*finish"):
        fitted(Scaled(), [record])
