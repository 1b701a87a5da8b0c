"""Exported models of signals take windows in the units of the recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlit.data import SignalDomains
from fedlit.export import export_target
from fedlit.methods import SourceOnly
from fedlit.models import Features, Recurrent, ResNet1D, SmallCNN1D
from helpers import samples_of, trainer
from refused import slow

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "by client": (lambda: SmallCNN1D(width=4), {}),
    "by window, magnitude": (lambda: ResNet1D(width=4), {"normalise": "window", "magnitudes": {"length": ["0", "1"]}}),
    "gru": (lambda: Recurrent(width=4), {"normalise": "none"}),
    "lstm": (lambda: Recurrent(width=4, cell="lstm"), {}),
    "features": (Features, {"features": True}),
    "features, magnitude": (
        Features, {"features": True, "normalise": "zscore_unit", "magnitudes": {"length": ["0", "1"]}}
    ),
}  # fmt: skip


def signals() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(1800, 2)) * [1, 50] + [0, 900]).astype(np.float32)
    return {"x": x, "label": np.arange(1800) // 50 % 2, "person": np.repeat(["a", "b", "c"], 600), "rate": 50.0}


@pytest.mark.parametrize("name", ["by client", *map(slow, [*CASES][1:])])
def test_a_file_predicts_of_raw_windows_what_the_module_does_of_prepared_ones(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    network, arguments = CASES[name]
    data = SignalDomains(signals(), domain="person", window=16, unit="samples", seed=0, **arguments)
    module = SourceOnly(data.clients, data.target, data.num_classes, network())
    trainer(1).fit(module, data)
    x, _ = samples_of(data, "c", "test")
    expected = module.replicas["c"].eval()(x).softmax(dim=1)
    raw = data.load("c").x[data.split("c").test]
    export_target(module, tmp_path / "target.onnx", data)
    session = onnxruntime.InferenceSession(tmp_path / "target.onnx")
    (found,) = session.run(["predictions"], {"inputs": raw.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-4)
    card = (tmp_path / "target.onnx.md").read_text()
    assert "`inputs`, shape (n, 2, 16), float32. Windows of 16 samples at 50 samples a second, channels 0, 1" in card
