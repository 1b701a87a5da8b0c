"""The target's model by itself, read where there is no fedlit, against what a Trainer predicts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlit import FederatedModule
from fedlit.export import export_target, target_model
from fedlit.methods import APFL, Ditto, FedAvg, FedDaDiL, FedRFTCA, KNNPer
from fedlit.models import MLP, SmallCNN
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

Reader = Callable[[Path, Tensor], Tensor]


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


CASES: dict[str, tuple[type[FederatedModule], dict[str, Any], dict[str, Any]]] = METHODS | {
    "FedRFTCA, vote": (FedRFTCA, {"num_frequencies": 16, "num_components": 8, "classifier_period": None}, {}),
    "FedDaDiL, ensemble": (FedDaDiL, METHODS["FedDaDiL"][1] | {"predict_with": "ensemble"}, {}),
    "SmallCNN": (FedAvg, {"extractor": SmallCNN(1, width=4)}, {"flatten": False}),
    "SmallCNN, APFL": (APFL, {"extractor": SmallCNN(1, width=4)}, {"flatten": False, "target_labels": 30}),
}
"""Every method, and what else predicts in another way."""

PARTS = (slice(0, 120), slice(7, 8))
"""Samples that files predict: all and one; torch traces two."""


@dataclass
class Trained:
    """A case, inputs of its target, and what a Trainer predicts for them."""

    name: str
    module: FederatedModule
    inputs: Tensor
    expected: Tensor


@pytest.fixture(scope="module", params=CASES)
def trained_case(request: pytest.FixtureRequest) -> Trained:
    method, arguments, options = CASES[request.param]
    data = digits(**options)
    module = build(method, data, **arguments)
    run = trainer(2, limit_val_batches=0)
    run.fit(module, data)
    expected = run.predict(module, data)[0]["fonts"]
    inputs = data.dataset("fonts", "test").batch(torch.arange(120))[0]  # type: ignore[attr-defined]
    assert len(expected) == 120
    return Trained(request.param, module, inputs, expected)


UNLIKE = (
    "AdaBN, mixing", "APFL", "CoMDA", "FedDaDiL, ensemble", "FedJDA", "FedMMD", "FedProx", "FedRFTCA, vote", "KNNPer",
    "SmallCNN",
)  # fmt: skip
"""Cases whose graphs differ, of which the default run exports each."""

READ = {
    "FedProx": {"extractor", "classifier"},  # no anchor
    "Ditto": {"personal"},
    "FedRFTCA": {"extractor", "aligner", "classifier", "frequencies"},  # not what sources have sent
    "FedDaDiL": {"extractor", "reconstruction"},  # neither atoms nor coordinates
    "FedMMD": {"extractor", "members"},
}
"""Parts of a replica that predictions read, all of which and nothing else a file has."""


def cases(default: Collection[str]) -> Any:
    """Go through all cases, by default through some."""
    marked = [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in CASES]
    return pytest.mark.parametrize("trained_case", marked, indirect=True)


@cases({*UNLIKE, *READ})
def test_files_predict_as_the_trainer_does(trained_case: Trained, elsewhere: Reader, tmp_path: Path) -> None:
    inputs, expected = trained_case.inputs, trained_case.expected
    export_target(trained_case.module, tmp_path / "target.pt2", inputs.shape[1:])
    for part in PARTS:
        found = elsewhere(tmp_path / "target.pt2", inputs[part])
        torch.testing.assert_close(found, expected[part], atol=1e-6, rtol=0)
    if trained_case.name in READ:
        program = torch.export.load(tmp_path / "target.pt2")
        names = {*program.state_dict, *program.constants}
        assert {name.split(".")[1] for name in names} == READ[trained_case.name]
        assert str(Path(__file__).parents[2]).encode() not in (tmp_path / "target.pt2").read_bytes()


@cases(UNLIKE)
def test_onnx_files_predict_as_the_trainer_does(trained_case: Trained, translations_kept: None, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    inputs, expected = trained_case.inputs, trained_case.expected
    export_target(trained_case.module, tmp_path / "target.onnx", inputs.shape[1:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target.onnx", "target.onnx.md"]
    session = onnxruntime.InferenceSession(tmp_path / "target.onnx")
    for part in PARTS:
        (found,) = session.run(["predictions"], {"inputs": inputs[part].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected[part], atol=1e-5, rtol=0)


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
